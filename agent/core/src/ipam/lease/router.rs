//! The router address of each family.

use super::error::Finding;
use super::journal::Change;
use super::record::{Record, RecordKey, Router};
use super::{DEFAULT_POOL, Leases, ROUTER};
use crate::ip::Family;
use crate::ipam::node::pod_cidr::{AddressError, Addresses};
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::net::IpAddr;

impl Leases {
    /// Chooses the configured address, else the recorded one, else one found elsewhere, else a random one.
    pub(super) fn choose_router(
        &mut self,
        family: Family,
        now: Timestamp,
        draw: u64,
        findings: &mut Vec<Finding>,
        changes: &mut Vec<Change>,
    ) {
        let of_family = |addresses: &Addresses| addresses.iter().find(|address| Family::of(*address) == family);
        let around = self.surroundings.clone().unwrap_or_default();
        if let Some(address) = of_family(&around.configured_router) {
            if let Some(net) = self.pools.net_with(address) {
                findings.push(Finding::RouterInsidePodCidr { address, net });
                if let Some(allocator) = self.pools.with(address)
                    && let Err(AddressError::AlreadyAllocated { owner: holder, .. }) =
                        allocator.exclude(address, ROUTER)
                {
                    findings.push(Finding::ExclusionHeld { address, label: ROUTER.to_owned(), holder });
                }
            }
            self.set_router(address, now, changes);
            return;
        }
        if !self.pools.families(DEFAULT_POOL).contains(&family) {
            return;
        }
        let seen: Vec<IpAddr> = self
            .router
            .get(&family)
            .map(|router| router.address)
            .into_iter()
            .chain(around.seen_routers.iter().filter_map(of_family))
            .collect();
        let mut refused: Option<(IpAddr, AddressError)> = None;
        let mut chosen = None;
        for address in &seen {
            // `allocate` and not `exclude` alone: a router outside the pod CIDRs would belong to another node by now.
            let allocated = self.pools.allocate(DEFAULT_POOL, *address, ROUTER, now);
            match allocated.and_then(|()| self.free_router(*address)) {
                Ok(()) => {
                    chosen = Some(*address);
                    break;
                }
                Err(reason) => refused = refused.or(Some((*address, reason))),
            }
        }
        // The router that pods use stays, even if a network of the node has its address by now.
        self.exclude_networks();
        let address = match chosen {
            Some(address) => Ok(address),
            None => self.pools.allocate_one(DEFAULT_POOL, family, ROUTER, now, draw).and_then(|address| {
                self.free_router(address)?;
                Ok(address)
            }),
        };
        let address = match address {
            Ok(address) => address,
            Err(reason) => {
                findings.push(Finding::NoRouter { reason });
                if self.router.remove(&family).is_some() {
                    changes.push(Change::Remove(RecordKey::Router(family)));
                }
                return;
            }
        };
        // It was free just now, so this cannot be refused.
        let excluded = self.pools.with(address).map_or(Ok(()), |allocator| allocator.exclude(address, ROUTER));
        if let Err(reason) = excluded {
            findings.push(Finding::NoRouter { reason });
            return;
        }
        match refused {
            Some((old, reason)) => findings.push(Finding::RouterReplaced { old, new: address, reason }),
            None => {
                let others: BTreeSet<IpAddr> = seen.into_iter().filter(|other| *other != address).collect();
                findings.extend(others.into_iter().map(|other| Finding::RouterMismatch { used: address, other }));
            }
        }
        self.set_router(address, now, changes);
    }

    /// Frees an address that was allocated to see whether it can be.
    fn free_router(&mut self, address: IpAddr) -> Result<(), AddressError> {
        self.pools.with(address).map_or(Ok(()), |allocator| allocator.undo(address, ROUTER))
    }

    fn set_router(&mut self, address: IpAddr, now: Timestamp, changes: &mut Vec<Change>) {
        let family = Family::of(address);
        if self.router.get(&family).is_none_or(|router| router.address != address) {
            let router = Router { address, since: now };
            changes.push(Change::Put(Record::Router(router.clone())));
            self.router.insert(family, router);
        }
        if self.resting.remove(&address).is_some() {
            changes.push(Change::Remove(RecordKey::Quarantine(address)));
        }
    }

    /// The router addresses in force.
    #[must_use]
    pub fn router(&self) -> Addresses {
        let mut addresses = Addresses::default();
        for router in self.router.values() {
            addresses.set(router.address);
        }
        addresses
    }
}
