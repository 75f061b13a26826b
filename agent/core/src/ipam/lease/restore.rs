//! The state machine from its records, and from what the node was granted.

use super::error::Finding;
use super::journal::{Change, Outcome};
use super::record::{Record, RecordKey, RecordTimes};
use super::{Leases, Timings};
use crate::ip::Family;
use crate::ipam::node::pod_cidr::{AddressError, Addresses, PodCidr, PodCidrs};
use ipnet::{Ipv4Net, Ipv6Net};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::IpAddr;

/// An address of the pod CIDR that no pod may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The address; outside the pod CIDR it has no effect.
    pub address: IpAddr,
    /// What it is kept for, such as `node-ip`.
    pub label: String,
}

/// What the node was given to hand out, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Network {
    /// IPv4 pod CIDR.
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 pod CIDR.
    pub ipv6: Option<Ipv6Net>,
    /// Addresses that no pod may have.
    pub exclusions: Vec<Exclusion>,
    /// `local-router-ipv4` and `-ipv6`: used as they are, inside or outside the pod CIDR.
    pub configured_router: Addresses,
    /// Router addresses seen elsewhere than in our own records, the most trusted first: the host's device before
    /// `CiliumInternalIP` of the CiliumNode.
    pub seen_routers: Vec<Addresses>,
}

/// A [`Leases`] made from records.
#[derive(Debug)]
pub struct Restored {
    /// The state machine.
    pub leases: Leases,
    /// What should be known.
    pub findings: Vec<Finding>,
    /// To be written before the first answer leaves.
    pub changes: Vec<Change>,
}

impl Leases {
    /// Takes up from the stored records: first the pods' addresses, then the router's, which may be chosen anew
    /// while a live pod's may not (`ipam` 2.1.5). Works without any pod CIDR: leases are known, released and
    /// confirmed; new ones wait. `boot` is that of the machine now (see [`Moment`](crate::moment::Moment)).
    #[must_use]
    pub fn restore(
        records: impl IntoIterator<Item = Record>,
        timings: Timings,
        network: Network,
        times: RecordTimes,
        boot: String,
        now: Timestamp,
        draw: u64,
    ) -> Restored {
        let mut leases = Self {
            timings,
            boot,
            network: Network::default(),
            router: BTreeMap::new(),
            pods: BTreeMap::new(),
            owners: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            resting: BTreeMap::new(),
            generation: 0,
            held_back: None,
            pools: PodCidrs::default(),
        };
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
            }
        }
        leases.restore_holders(holders, &mut findings, &mut changes);
        let mut outcome = leases.set_network(network, now, draw);
        findings.append(&mut outcome.answer);
        changes.append(&mut outcome.changes);
        Restored { leases, findings, changes }
    }

    /// The youngest lease of an address wins; an address with a holder does not rest.
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

    /// Takes over what the node was given. Live leases keep their addresses; new ones come from the new CIDR. The same
    /// network again changes nothing.
    pub fn set_network(&mut self, mut network: Network, now: Timestamp, draw: u64) -> Outcome<Vec<Finding>> {
        let mut changes = self.expire(now);
        let mut findings = Vec::new();
        // Plugins that get their addresses from us put the gateway on devices of their own. It is the router's still.
        network.exclusions.retain(|exclusion| self.router.values().all(|router| router.address != exclusion.address));
        if self.network == network {
            return Outcome { answer: findings, changes };
        }
        self.pools = PodCidrs {
            ipv4: network.ipv4.map(|net| PodCidr::new(net.into())),
            ipv6: network.ipv6.map(|net| PodCidr::new(net.into())),
        };
        self.network = network;
        self.book_holders(now, &mut findings);
        self.book_exclusions(&mut findings);
        for quarantine in self.resting.values() {
            if let Ok(pool) = self.pools.family(Family::of(quarantine.address)) {
                pool.restore_quarantine(quarantine.address, quarantine.since, quarantine.until);
            }
        }
        for family in [Family::Ipv4, Family::Ipv6] {
            self.choose_router(family, now, draw, &mut findings, &mut changes);
        }
        Outcome { answer: findings, changes }
    }

    fn book_holders(&mut self, now: Timestamp, findings: &mut Vec<Finding>) {
        let held: Vec<(IpAddr, String)> = self.holders().collect();
        for (address, holder) in held {
            let Ok(pool) = self.pools.family(Family::of(address)) else { continue };
            // The allocator is new and holders are distinct, so the only refusal is an address from an earlier CIDR.
            if pool.allocate(address, &holder, now).is_err() {
                findings.push(Finding::OutsidePodCidr { holder, address, net: pool.net() });
            }
        }
    }

    fn book_exclusions(&mut self, findings: &mut Vec<Finding>) {
        for Exclusion { address, label } in &self.network.exclusions {
            let Ok(pool) = self.pools.family(Family::of(*address)) else { continue };
            if let Err(AddressError::AlreadyAllocated { owner: holder, .. }) = pool.exclude(*address, label) {
                findings.push(Finding::ExclusionHeld { address: *address, label: label.clone(), holder });
            }
        }
    }
}
