//! Restores the state machine from its records and the node's configuration.

use super::error::Finding;
use super::journal::{Change, Outcome};
use super::record::{Quarantine, Record, RecordKey, RecordTimes};
use super::{DEFAULT_POOL, Leases, ROUTER, Timings};
use crate::ip::Family;
use crate::ipam::later;
use crate::ipam::node::pod_cidr::{AddressError, Addresses};
use crate::ipam::supply::{Grant, GrantState, Pools, Supply};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// An address of the pod CIDR that must not be allocated to pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The address; no effect outside the pod CIDR.
    pub address: IpAddr,
    /// Its use, such as `node-ip`.
    pub label: String,
    /// A pod without a record has it: the address is quarantined when that ends.
    pub of_pod: bool,
}

/// The surroundings of the pods on this node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Surroundings {
    /// Addresses that must not be allocated to pods.
    pub exclusions: Vec<Exclusion>,
    /// Networks of the node inside a pod CIDR, each with a label: their addresses are not allocated.
    pub networks: Vec<(IpNet, String)>,
    /// `local-router-ipv4` and `-ipv6`: used unchanged, inside or outside the pod CIDR.
    pub configured_router: Addresses,
    /// Router addresses found outside our records, the most trusted first: the host's device before `CiliumInternalIP`
    /// of the CiliumNode.
    pub seen_routers: Vec<Addresses>,
}

/// The result of setting a [`Supply`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Accepted {
    /// Findings to report.
    pub findings: Vec<Finding>,
    /// Pod CIDRs that the new supply leaves out and that something still holds addresses of: they stay granted, and drain.
    pub still_held: Vec<IpNet>,
}

/// Restored [`Leases`].
#[derive(Debug)]
pub struct Restored {
    /// The state machine.
    pub leases: Leases,
    /// Findings to report.
    pub findings: Vec<Finding>,
    /// To be written before the first answer is sent.
    pub changes: Vec<Change>,
}

impl Leases {
    /// Restores the state machine from the stored records. Works without any pod CIDR: leases are known, released and
    /// confirmed; new ones wait. `boot` is that of the machine now (see [`Moment`](crate::moment::Moment)).
    #[must_use]
    pub fn restore(
        records: impl IntoIterator<Item = Record>,
        timings: Timings,
        times: RecordTimes,
        boot: String,
        now: Timestamp,
    ) -> Restored {
        let mut leases = Self {
            timings,
            boot,
            supply: Supply::default(),
            surroundings: None,
            router: BTreeMap::new(),
            pods: BTreeMap::new(),
            owners: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            resting: BTreeMap::new(),
            generation: 0,
            held_back: None,
            pools: Pools::default(),
        };
        let mut grants = Vec::new();
        let mut findings = Vec::new();
        let mut changes = Vec::new();
        let mut holders: Vec<Record> = Vec::new();
        for mut record in records {
            if record.wait_again(&timings, times, now) {
                changes.push(Change::Put(record.clone()));
            }
            match record {
                Record::Pod(lease) => {
                    leases.generation = leases.generation.max(lease.generation);
                    holders.push(Record::Pod(lease));
                }
                Record::Owner(lease) => {
                    leases.generation = leases.generation.max(lease.generation);
                    holders.push(Record::Owner(lease));
                }
                Record::Tombstone(tombstone) => {
                    leases.tombstones.insert(tombstone.attachment.clone(), tombstone);
                }
                Record::Quarantine(quarantine) => {
                    leases.generation = leases.generation.max(quarantine.generation);
                    leases.resting.insert(quarantine.address, quarantine);
                }
                Record::Router(router) => {
                    leases.router.insert(Family::of(router.address), router);
                }
                Record::Grant(grant) => grants.push(grant),
            }
        }
        leases.restore_holders(holders, &mut findings, &mut changes);
        // Records are unordered.
        grants.sort_by_key(|grant: &Grant| grant.net);
        leases.supply = Supply::of_grants(grants);
        // What is found here is found again, and reported, when the surroundings are known.
        leases.rebuild(now, &mut Vec::new());
        for router in leases.router.values() {
            if let Some(allocator) = leases.pools.with(router.address) {
                // Held by a pod, it is chosen again when the surroundings are known.
                let _ = allocator.exclude(router.address, ROUTER);
            }
        }
        Restored { leases, findings, changes }
    }

    /// The youngest lease of an address wins; an allocated address is not quarantined.
    fn restore_holders(&mut self, mut holders: Vec<Record>, findings: &mut Vec<Finding>, changes: &mut Vec<Change>) {
        let generation = |record: &Record| match record {
            Record::Pod(lease) => lease.generation,
            Record::Owner(lease) => lease.generation,
            _ => 0,
        };
        holders.sort_by_key(|record| (std::cmp::Reverse(generation(record)), record.key()));
        let mut taken: BTreeMap<IpAddr, String> = BTreeMap::new();
        for record in holders {
            let (addresses, holder): (Vec<IpAddr>, String) = match &record {
                Record::Pod(lease) => (lease.addresses.iter().collect(), lease.holder()),
                Record::Owner(lease) => (vec![lease.address], lease.holder()),
                _ => continue,
            };
            let conflict = addresses.iter().find_map(|address| taken.get(address).map(|kept| (*address, kept.clone())));
            if let Some((address, kept)) = conflict {
                findings.push(Finding::TwoHolders { address, kept, dropped: holder });
                changes.push(Change::Remove(record.key()));
                continue;
            }
            for address in addresses {
                taken.insert(address, holder.clone());
                if self.resting.remove(&address).is_some() {
                    changes.push(Change::Remove(RecordKey::Quarantine(address)));
                }
            }
            match record {
                Record::Pod(lease) => {
                    self.pods.insert(lease.attachment.clone(), lease);
                }
                Record::Owner(lease) => {
                    self.owners.insert((lease.pool.clone(), lease.address), lease);
                }
                _ => {}
            }
        }
    }

    /// Takes over what the node may allocate from, and what lies around the pods. Live leases keep their addresses; new ones
    /// come from the active pod CIDRs. The same again changes nothing.
    ///
    /// A pod CIDR is recorded before anything of it: in whatever state the process ends, the records tell of every pod CIDR
    /// that an address was allocated from, and of at most one active one in place of another.
    pub fn set_supply(
        &mut self,
        supply: Supply,
        mut surroundings: Surroundings,
        now: Timestamp,
        draw: u64,
    ) -> Outcome<Accepted> {
        let mut changes = self.expire(now);
        let mut findings = Vec::new();
        let (supply, still_held) = self.keep_held(supply);
        // Other plugins that use us for IPAM configure the gateway address on their own devices. It remains the
        // router's.
        surroundings
            .exclusions
            .retain(|exclusion| self.router.values().all(|router| router.address != exclusion.address));
        self.record_grants(&supply, &mut changes);
        let is_same = self.surroundings.as_ref() == Some(&surroundings) && self.supply.has_same_addresses(&supply);
        self.supply = supply;
        if is_same {
            return Outcome { answer: Accepted { findings, still_held }, changes };
        }
        let before = self.surroundings.replace(surroundings);
        self.quarantine_unrecorded(before, now, &mut changes);
        self.rebuild(now, &mut findings);
        for family in [Family::Ipv4, Family::Ipv6] {
            self.choose_router(family, now, draw, &mut findings, &mut changes);
        }
        self.exclude_networks();
        Outcome { answer: Accepted { findings, still_held }, changes }
    }

    /// Quarantines the addresses of pods without a record that ended.
    fn quarantine_unrecorded(&mut self, before: Option<Surroundings>, now: Timestamp, changes: &mut Vec<Change>) {
        let excluded = |address| {
            self.surroundings.iter().flat_map(|around| &around.exclusions).any(|exclusion| exclusion.address == address)
        };
        let ended: Vec<Exclusion> = before
            .into_iter()
            .flat_map(|around| around.exclusions)
            .filter(|exclusion| exclusion.of_pod && !excluded(exclusion.address))
            .filter(|exclusion| self.held().all(|held| held != exclusion.address))
            .collect();
        for Exclusion { address, label, .. } in ended {
            let quarantine = Quarantine {
                pool: DEFAULT_POOL.to_owned(),
                address,
                generation: self.generation,
                last_holder: label,
                since: now,
                until: later(now, self.timings.quarantine),
            };
            changes.push(Change::Put(Record::Quarantine(quarantine.clone())));
            self.resting.insert(address, quarantine);
        }
    }

    /// The granted pod CIDRs.
    #[must_use]
    pub fn supply(&self) -> &Supply {
        &self.supply
    }

    /// Adds the pod CIDRs of which addresses are held and which a new supply leaves out.
    fn keep_held(&self, mut supply: Supply) -> (Supply, Vec<IpNet>) {
        let left_out = |grant: &&Grant| !supply.grants().any(|new| new.pool == grant.pool && new.net == grant.net);
        let is_held = |grant: &&Grant| self.held().any(|address| grant.net.contains(&address));
        let mut kept: Vec<Grant> = self
            .supply
            .grants()
            .filter(left_out)
            .filter(is_held)
            .map(|grant| Grant { state: GrantState::Draining, ..grant.clone() })
            .collect();
        kept.sort_by_key(|grant| grant.net);
        let nets = kept.iter().map(|grant| grant.net).collect();
        kept.into_iter().for_each(|grant| supply.add(grant));
        (supply, nets)
    }

    fn record_grants(&self, supply: &Supply, changes: &mut Vec<Change>) {
        let is = |one: &Grant, other: &Grant| one.pool == other.pool && one.net == other.net;
        // What goes drains first, so that no two records compete whatever the process ends between.
        let gone: Vec<&Grant> = self.supply.grants().filter(|old| !supply.grants().any(|new| is(old, new))).collect();
        let drained = gone.iter().filter(|grant| grant.state == GrantState::Active);
        let drained = drained.map(|grant| Grant { state: GrantState::Draining, ..(*grant).clone() });
        let is_new = |new: &&Grant| !self.supply.grants().any(|old| is(old, new) && old.is_recorded_as(new));
        let put = drained.chain(supply.grants().filter(is_new).cloned());
        changes.extend(put.map(|grant| Change::Put(Record::Grant(grant))));
        changes.extend(gone.iter().map(|grant| Change::Remove(RecordKey::Grant(grant.pool.clone(), grant.net))));
    }

    /// Makes the allocators of the supply, and books what is held, excluded and quarantined.
    fn rebuild(&mut self, now: Timestamp, findings: &mut Vec<Finding>) {
        self.pools = Pools::new(&self.supply);
        self.book_holders(now, findings);
        self.book_exclusions(findings);
        for quarantine in self.resting.values() {
            if let Some(allocator) = self.pools.with(quarantine.address) {
                allocator.restore_quarantine(quarantine.address, quarantine.since, quarantine.until);
            }
        }
    }

    fn book_holders(&mut self, now: Timestamp, findings: &mut Vec<Finding>) {
        let held: Vec<(IpAddr, String)> = self.holders().collect();
        for (address, holder) in held {
            // The allocators are new and holders are distinct, so the only refusal is an address of an earlier pod CIDR.
            let booked = self.pools.with(address).map(|allocator| allocator.allocate(address, &holder, now));
            if !matches!(booked, Some(Ok(())))
                && let Some(net) = self.pools.net_of(Family::of(address))
            {
                findings.push(Finding::OutsidePodCidr { holder, address, net });
            }
        }
    }

    /// Keeps the addresses of the node's networks from being allocated.
    pub(super) fn exclude_networks(&mut self) {
        for (net, label) in self.surroundings.iter().flat_map(|around| &around.networks) {
            self.pools.exclude_net(net, label);
        }
    }

    fn book_exclusions(&mut self, findings: &mut Vec<Finding>) {
        for Exclusion { address, label, .. } in self.surroundings.iter().flat_map(|around| &around.exclusions) {
            let Some(pool) = self.pools.with(*address) else { continue };
            if let Err(AddressError::AlreadyAllocated { owner: holder, .. }) = pool.exclude(*address, label) {
                findings.push(Finding::ExclusionHeld { address: *address, label: label.clone(), holder });
            }
        }
    }
}
