//! Pod leases: allocation of this node's addresses (`architecture` decision 9, `ipam` decisions 7-9).
//!
//! [`Leases`] is a synchronous state machine owned by one task. Each call takes the time (and a random draw if an
//! address is chosen) and returns an [`Outcome`]: the answer, and the changes of the durable records that must be
//! written, in order, before the answer is sent. If the process terminates between two of these writes, it restarts in
//! a state in which no address has two owners and everything that was answered still holds.
//!
//! ```text
//!            ADD                     confirm
//!   free ─────────► Provisional ─────────────► Confirmed
//!    ▲                  │ DEL, expiry,             │ DEL, superseded,
//!    │                  │ superseded               │ collected
//!    │  quarantine ends ▼                          ▼
//!    └────────────── Quarantined ◄─────────────────┘
//! ```
//!
//! A confirmed lease becomes provisional again if a DEL is processed that started before a repeated ADD, and that ADD
//! has not confirmed the lease yet.
//!
//! # How long an unused address stays allocated
//! All timers are persistent and independent of the wall clock, so these limits hold across restarts and reboots:
//!
//! | after | released within |
//! |---|---|
//! | DEL, GC, supersession | 30 s ([`Timings::quarantine`]); at once if no other address is free |
//! | an ADD that was not completed | 10 min 30 s ([`Timings::provisional`], then the quarantine) |
//! | loss of a pod without DEL | 7 min 30 s (see [`super::audit`], then the quarantine) |
//! | a reboot | 30 s from the agent's start |
//!
//! A lease is released by its attachment (container ID and interface name) only, so a late or repeated DEL cannot
//! release an address that was reallocated. Leases allocated through the calls of Cilium's API are separate
//! ([`OwnerLease`]): those calls see no others.

mod error;
mod journal;
mod owner;
mod record;
mod restore;
mod router;
mod row;

pub use error::{AddError, ConfirmError, Finding, OwnerError};
pub use journal::{Change, Outcome, Owed};
pub use owner::{ExpirationIds, OwnerRequest};
pub use record::{
    Attachment, Expiration, FORMAT, Interface, LeaseState, OwnerLease, Pod, PodAttachment, PodLease, Quarantine,
    Record, RecordError, RecordKey, RecordTimes, Router, Stored, Tombstone,
};
pub use restore::{Accepted, Exclusion, Restored, Surroundings};
pub use row::{Row, RowState};

use super::later;
use super::node::pod_cidr::Addresses;
pub use super::supply::DEFAULT_POOL;
use super::supply::{PoolUsage, Pools, Supply};
use crate::ip::Family;
use crate::moment::Moment;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

const ROUTER: &str = "router";

/// Durations of timers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    /// Lifetime of an unconfirmed lease.
    pub provisional: Duration,
    /// Quarantine of an address between two allocations.
    pub quarantine: Duration,
    /// Lifetime of a DEL without a lease. Short, because a runtime may attach the same container again.
    pub tombstone: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            provisional: Duration::from_secs(600),
            quarantine: Duration::from_secs(30),
            tombstone: Duration::from_secs(60),
        }
    }
}

/// A CNI ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddRequest {
    /// The attachment.
    pub attachment: Attachment,
    /// Name of the network, if the plugin reported it.
    pub network: Option<String>,
    /// The pod, if the runtime named it.
    pub pod: Option<Pod>,
    /// Path of the pod's network namespace.
    pub netns: String,
    /// Start time of the plugin, if it reported it: a DEL that arrived before an ADD's start does not affect that ADD.
    pub began: Option<Moment>,
}

/// A CNI GC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectRequest {
    /// The network that it is about.
    pub network: String,
    /// The attachments of that network that are in use.
    pub valid: BTreeSet<Attachment>,
    /// When the plugin began, if it said so.
    pub began: Option<Moment>,
}

/// Answer to [`Leases::add`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// The lease.
    pub lease: PodLease,
    /// The pod's gateways.
    pub router: Addresses,
}

/// Allocation of this node's addresses.
///
/// Invariant: an address is in at most one of `pods`, `owners`, `resting`, and is not the router's.
#[derive(Debug)]
pub struct Leases {
    timings: Timings,
    boot: String,
    supply: Supply,
    surroundings: Option<Surroundings>,
    router: BTreeMap<Family, Router>,
    pods: BTreeMap<Attachment, PodLease>,
    owners: BTreeMap<(String, IpAddr), OwnerLease>,
    tombstones: BTreeMap<Attachment, Tombstone>,
    resting: BTreeMap<IpAddr, Quarantine>,
    generation: u64,
    held_back: Option<String>,
    /// Derived from the fields above; rebuilt when the network changes.
    pools: Pools,
}

impl Leases {
    /// Suspends allocation while there is a reason, such as another CiliumNode that lists the same pod CIDR (`ipam`
    /// decision 14). Existing leases are not affected. `None` resumes it.
    pub fn hold_back(&mut self, reason: Option<String>) {
        self.held_back = reason;
    }

    /// Allocates an address to an attachment. Idempotent: a repeated request returns the existing lease. Before a new
    /// allocation, older leases of the same pod UID and interface name whose network namespace no longer exists are
    /// ended, because a runtime that re-creates a sandbox may not send their DEL.
    pub fn add(
        &mut self,
        request: AddRequest,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
        draw: u64,
    ) -> Outcome<Result<Granted, AddError>> {
        let mut changes = self.expire(now);
        let answer = self.add_expired(request, netns_exists, now, draw, &mut changes);
        Outcome { answer, changes }
    }

    fn add_expired(
        &mut self,
        request: AddRequest,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
        draw: u64,
        changes: &mut Vec<Change>,
    ) -> Result<Granted, AddError> {
        let AddRequest { attachment, network, pod, netns, began } = request;
        if let Some(tombstone) = self.tombstones.get(&attachment)
            && !self.is_after(began.as_ref(), tombstone.began.as_ref())
        {
            return Err(AddError::Overtaken { attachment, at: tombstone.since });
        }
        let router = self.router();
        if let Some(lease) = self.pods.get(&attachment).filter(|lease| self.asked_since(lease, began.as_ref())) {
            return Ok(Granted { lease: lease.clone(), router });
        }
        if let Some(lease) = self.pods.get_mut(&attachment) {
            let mut renewed = lease.clone();
            renewed.network = network.or(renewed.network);
            renewed.pod = pod.or(renewed.pod);
            renewed.netns = netns;
            renewed.began = began.or(renewed.began);
            if let LeaseState::Provisional { expires, .. } = &mut renewed.state {
                *expires = later(now, self.timings.provisional);
            }
            if renewed != *lease {
                *lease = renewed;
                changes.push(Change::Put(Record::Pod(lease.clone())));
            }
            return Ok(Granted { lease: lease.clone(), router });
        }
        self.supersede(&attachment, pod.as_ref(), netns_exists, now, changes);
        self.ready(DEFAULT_POOL, now, draw, changes)?;
        let holder = attachment.to_string();
        let addresses = self
            .pools
            .allocate_next(DEFAULT_POOL, None, &holder, now, draw)
            .map_err(|reason| AddError::Exhausted { pool: DEFAULT_POOL.to_owned(), reason })?;
        self.generation += 1;
        let lease = PodLease {
            attachment: attachment.clone(),
            network,
            pod,
            netns,
            began,
            confirmed: None,
            pool: DEFAULT_POOL.to_owned(),
            addresses,
            generation: self.generation,
            state: LeaseState::Provisional { since: now, expires: later(now, self.timings.provisional) },
        };
        // The new lease is written before the end of the quarantine: if only one of the two is on disk, the lease
        // counts.
        changes.push(Change::Put(Record::Pod(lease.clone())));
        self.end_quarantine(addresses.iter(), changes);
        if self.tombstones.remove(&attachment).is_some() {
            changes.push(Change::Remove(RecordKey::Tombstone(attachment.clone())));
        }
        self.pods.insert(attachment, lease.clone());
        Ok(Granted { lease, router: self.router() })
    }

    fn supersede(
        &mut self,
        attachment: &Attachment,
        pod: Option<&Pod>,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) {
        let Some(uid) = pod.and_then(|pod| pod.uid.as_deref()) else { return };
        let gone: Vec<Attachment> = self
            .pods
            .values()
            .filter(|lease| lease.attachment.ifname == attachment.ifname)
            .filter(|lease| lease.pod.as_ref().and_then(|pod| pod.uid.as_deref()) == Some(uid))
            .filter(|lease| !netns_exists(&lease.netns))
            .map(|lease| lease.attachment.clone())
            .collect();
        for attachment in gone {
            self.end_pod(&attachment, now, changes);
        }
    }

    fn may_allocate(&self, pool: &str) -> Result<(), AddError> {
        let reason = self.supply.refusal(pool).or_else(|| self.held_back.clone());
        reason.map_or(Ok(()), |reason| Err(AddError::HeldBack { reason }))
    }

    /// Whether new addresses can be allocated.
    fn ready(&mut self, pool: &str, now: Timestamp, draw: u64, changes: &mut Vec<Change>) -> Result<(), AddError> {
        if self.pools.is_empty() {
            return Err(AddError::WaitingForPodCidr);
        }
        self.may_allocate(pool)?;
        for family in self.pools.families(DEFAULT_POOL) {
            if !self.router.contains_key(&family) {
                let mut findings = Vec::new();
                self.choose_router(family, now, draw, &mut findings, changes);
                for finding in findings {
                    if let Finding::NoRouter { reason } = finding {
                        return Err(AddError::NoRouter { reason });
                    }
                }
            }
        }
        Ok(())
    }

    /// The interface was created (or, for chained IPAM, will be): the lease no longer expires. A repeated call replaces
    /// the interface. `began` is the start time of the calling ADD: if a later ADD has requested the lease since, that
    /// one's interface counts, and nothing changes.
    pub fn confirm(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: PodAttachment,
        began: Option<&Moment>,
        now: Timestamp,
    ) -> Outcome<Result<PodLease, ConfirmError>> {
        let mut changes = self.expire(now);
        let asked_since = self.pods.get(attachment).is_some_and(|lease| self.asked_since(lease, began));
        let answer = match self.pods.get_mut(attachment) {
            None => Err(ConfirmError::NoLease { attachment: attachment.clone() }),
            Some(lease) if lease.generation != generation => Err(ConfirmError::OtherGeneration {
                attachment: attachment.clone(),
                presented: generation,
                current: lease.generation,
            }),
            Some(lease) if asked_since => Ok(lease.clone()),
            Some(lease) => {
                let same =
                    matches!(&lease.state, LeaseState::Confirmed { interface: known, .. } if *known == interface);
                if !same || lease.confirmed != lease.began {
                    lease.confirmed.clone_from(&lease.began);
                    lease.state = LeaseState::Confirmed { since: now, interface };
                    changes.push(Change::Put(Record::Pod(lease.clone())));
                }
                Ok(lease.clone())
            }
        };
        Outcome { answer, changes }
    }

    /// Releases the lease of this attachment in any state, and returns what it was. Without a lease it succeeds, too,
    /// and leaves a tombstone in case the ADD is still running.
    ///
    /// A DEL may have been queued since it `began`, on disk or in a socket. A lease that a later ADD has requested, for
    /// the first time or again, is not the one to release: it is kept, and nothing is returned. It is provisional until
    /// that ADD confirms it.
    pub fn del(&mut self, attachment: &Attachment, began: Option<Moment>, now: Timestamp) -> Outcome<Option<PodLease>> {
        let mut changes = self.expire(now);
        if let Some(lease) = self.pods.get(attachment).filter(|lease| self.asked_since(lease, began.as_ref())) {
            let confirmed_since = self.is_after(lease.confirmed.as_ref(), began.as_ref());
            if matches!(lease.state, LeaseState::Confirmed { .. }) && !confirmed_since {
                let state = LeaseState::Provisional { since: now, expires: later(now, self.timings.provisional) };
                let lease = PodLease { state, ..lease.clone() };
                changes.push(Change::Put(Record::Pod(lease.clone())));
                self.pods.insert(attachment.clone(), lease);
            }
            return Outcome { answer: None, changes };
        }
        let answer = self.end_pod(attachment, now, &mut changes);
        if answer.is_none() {
            let until = later(now, self.timings.tombstone);
            let known = self.tombstones.get(attachment).and_then(|tombstone| tombstone.began.as_ref());
            let began = if self.is_after(known, began.as_ref()) { known.cloned() } else { began };
            let tombstone = Tombstone { attachment: attachment.clone(), since: now, began, until };
            changes.push(Change::Put(Record::Tombstone(tombstone.clone())));
            self.tombstones.insert(attachment.clone(), tombstone);
        }
        Outcome { answer, changes }
    }

    /// Whether an ADD that started after `began` has requested a lease.
    #[must_use]
    pub fn asked_since(&self, lease: &PodLease, began: Option<&Moment>) -> bool {
        self.is_after(lease.began.as_ref(), began)
    }

    /// Whether one moment is known to be later than the other.
    fn is_after(&self, one: Option<&Moment>, other: Option<&Moment>) -> bool {
        one.zip(other).is_some_and(|(one, other)| one.is_after(other, &self.boot))
    }

    /// The current lease of an attachment.
    #[must_use]
    pub fn check(&self, attachment: &Attachment, now: Timestamp) -> Option<&PodLease> {
        self.pods
            .get(attachment)
            .filter(|lease| !matches!(lease.state, LeaseState::Provisional { expires, .. } if expires <= now))
    }

    /// Ends every lease of a network whose attachment is not in the list of valid ones (CNI GC). The list has the
    /// attachments of that network alone. With an empty one only leases without a live namespace end: the runtime may have lost its
    /// state, while its pods run. A lease that was asked for since the GC began stays.
    pub fn collect(
        &mut self,
        request: &CollectRequest,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
    ) -> Outcome<Vec<PodLease>> {
        let CollectRequest { network, valid, began } = request;
        let garbage: BTreeSet<Attachment> = self
            .pods
            .values()
            .filter(|lease| lease.network.as_ref() == Some(network) && !valid.contains(&lease.attachment))
            .filter(|lease| !self.asked_since(lease, began.as_ref()))
            .filter(|lease| !valid.is_empty() || !netns_exists(&lease.netns))
            .map(|lease| lease.attachment.clone())
            .collect();
        self.end_all(|lease| garbage.contains(&lease.attachment), now)
    }

    /// Ends all leases whose network namespace does not exist. Only correct right after a reboot, which no namespace
    /// survives: while a runtime is running, a namespace may be missing for other reasons.
    pub fn drop_gone(&mut self, netns_exists: impl Fn(&str) -> bool, now: Timestamp) -> Outcome<Vec<PodLease>> {
        self.end_all(|lease| !netns_exists(&lease.netns), now)
    }

    /// Names leases to come after this generation: those up to it were named before records were lost.
    pub fn continue_after(&mut self, generation: u64) {
        self.generation = self.generation.max(generation);
    }

    /// Records the pod that the datapath knows at an address and that no record names, because its record was lost: an
    /// interface that another plugin attached, so that no device shows it. It keeps its generation, to which its flows belong, and its address until the reboot, which
    /// no pod outlives.
    pub fn adopt(&mut self, address: IpAddr, generation: u64, now: Timestamp) -> Outcome<Option<PodLease>> {
        let mut changes = self.expire(now);
        if self.held().any(|held| held == address) {
            return Outcome { answer: None, changes };
        }
        let mut addresses = Addresses::default();
        addresses.set(address);
        let lease = PodLease {
            attachment: Attachment { container_id: format!("unrecorded-{address}"), ifname: "unknown".to_owned() },
            network: None,
            pod: None,
            netns: String::new(),
            began: None,
            confirmed: None,
            pool: DEFAULT_POOL.to_owned(),
            addresses,
            generation,
            state: LeaseState::Confirmed {
                since: now,
                interface: PodAttachment::Plugin { plugin: "unknown".to_owned(), routed: true },
            },
        };
        changes.push(Change::Put(Record::Pod(lease.clone())));
        self.end_quarantine([address].into_iter(), &mut changes);
        if let Some(allocator) = self.pools.with(address) {
            // Kept for something else on this node, it is the pod's all the same until that ends.
            let _ = allocator.allocate(address, &lease.holder(), now);
        }
        self.pods.insert(lease.attachment.clone(), lease.clone());
        Outcome { answer: Some(lease), changes }
    }

    /// Ends confirmed leases that an audit found to have no pod, each with the generation that was audited.
    pub fn end_lost(&mut self, lost: &[(Attachment, u64)], now: Timestamp) -> Outcome<Vec<PodLease>> {
        let is_lost = |lease: &PodLease| lost.iter().any(|(a, g)| *a == lease.attachment && *g == lease.generation);
        self.end_all(|lease| matches!(lease.state, LeaseState::Confirmed { .. }) && is_lost(lease), now)
    }

    fn end_all(&mut self, ended: impl Fn(&PodLease) -> bool, now: Timestamp) -> Outcome<Vec<PodLease>> {
        let mut changes = self.expire(now);
        let attachments: Vec<Attachment> =
            self.pods.values().filter(|lease| ended(lease)).map(|lease| lease.attachment.clone()).collect();
        let answer = attachments.iter().filter_map(|attachment| self.end_pod(attachment, now, &mut changes)).collect();
        Outcome { answer, changes }
    }

    /// Processes expired timers: unconfirmed leases, quarantines, tombstones. Every call does this first; a timer at
    /// [`Self::next_deadline`] keeps the records short in between.
    pub fn expire(&mut self, now: Timestamp) -> Vec<Change> {
        let mut changes = Vec::new();
        let expired: Vec<Attachment> = self
            .pods
            .values()
            .filter(|lease| matches!(lease.state, LeaseState::Provisional { expires, .. } if expires <= now))
            .map(|lease| lease.attachment.clone())
            .collect();
        for attachment in expired {
            self.end_pod(&attachment, now, &mut changes);
        }
        let expired: Vec<(String, IpAddr)> = self
            .owners
            .iter()
            .filter(|(_, lease)| lease.expiration.as_ref().is_some_and(|expiration| expiration.at <= now))
            .map(|(key, _)| key.clone())
            .collect();
        for key in expired {
            self.end_owner(&key, now, &mut changes);
        }
        self.tombstones.retain(|attachment, tombstone| {
            let kept = tombstone.until > now;
            if !kept {
                changes.push(Change::Remove(RecordKey::Tombstone(attachment.clone())));
            }
            kept
        });
        self.resting.retain(|address, quarantine| {
            let kept = quarantine.until > now;
            if !kept {
                changes.push(Change::Remove(RecordKey::Quarantine(*address)));
            }
            kept
        });
        self.pools.expire(now);
        changes
    }

    /// When [`Self::expire`] is due next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let provisional = self.pods.values().filter_map(|lease| match lease.state {
            LeaseState::Provisional { expires, .. } => Some(expires),
            LeaseState::Confirmed { .. } => None,
        });
        let timers = self.owners.values().filter_map(|lease| lease.expiration.as_ref().map(|timer| timer.at));
        let tombstones = self.tombstones.values().map(|tombstone| tombstone.until);
        let resting = self.resting.values().map(|quarantine| quarantine.until);
        provisional.chain(timers).chain(tombstones).chain(resting).min()
    }

    /// All pod leases, by attachment.
    pub fn pods(&self) -> impl Iterator<Item = &PodLease> {
        self.pods.values()
    }

    /// All allocated addresses, confirmed or provisional.
    pub fn held(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let of_pods = self.pods.values().flat_map(|lease| {
            let ipv4 = lease.addresses.ipv4.map(IpAddr::V4);
            ipv4.into_iter().chain(lease.addresses.ipv6.map(IpAddr::V6))
        });
        of_pods.chain(self.owners.keys().map(|(_, address)| *address))
    }

    /// Addresses of each pod CIDR, or set of addresses, by state.
    #[must_use]
    pub fn usage(&self) -> Vec<PoolUsage> {
        self.pools.usage()
    }

    fn holders(&self) -> impl Iterator<Item = (IpAddr, String)> {
        let pods = self.pods.values().flat_map(|lease| {
            let holder = lease.holder();
            lease.addresses.iter().map(move |address| (address, holder.clone())).collect::<Vec<_>>()
        });
        pods.chain(self.owners.values().map(|lease| (lease.address, lease.holder())))
    }

    fn end_pod(&mut self, attachment: &Attachment, now: Timestamp, changes: &mut Vec<Change>) -> Option<PodLease> {
        let lease = self.pods.remove(attachment)?;
        for address in lease.addresses.iter() {
            self.quarantine(address, &lease.pool, lease.generation, lease.holder(), now, changes);
        }
        changes.push(Change::Remove(RecordKey::Pod(attachment.clone())));
        Some(lease)
    }

    /// Quarantines an address. Its record is written before the lease's is removed: if both are on disk, the lease
    /// counts, and the caller retries the release.
    fn quarantine(
        &mut self,
        address: IpAddr,
        pool: &str,
        generation: u64,
        holder: String,
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) {
        let until = later(now, self.timings.quarantine);
        if let Some(allocator) = self.pools.with(address) {
            // Refused only for an address of an earlier pod CIDR, from which nothing is allocated.
            let released = allocator.release(address, &holder, now, until).is_ok();
            let exclusion = self
                .surroundings
                .iter()
                .flat_map(|around| &around.exclusions)
                .find(|exclusion| exclusion.address == address);
            if let Some(exclusion) = exclusion.filter(|_| released)
                && allocator.exclude(address, &exclusion.label).is_ok()
            {
                return;
            }
        }
        let quarantine =
            Quarantine { pool: pool.to_owned(), address, generation, last_holder: holder, since: now, until };
        changes.push(Change::Put(Record::Quarantine(quarantine.clone())));
        self.resting.insert(address, quarantine);
    }

    /// Ends the quarantine of addresses that were reallocated early, because no other address was free.
    fn end_quarantine(&mut self, addresses: impl Iterator<Item = IpAddr>, changes: &mut Vec<Change>) {
        for address in addresses {
            if self.resting.remove(&address).is_some() {
                changes.push(Change::Remove(RecordKey::Quarantine(address)));
            }
        }
    }
}

#[cfg(test)]
mod tests;
