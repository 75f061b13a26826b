//! Leases with an owner string: the calls of Cilium's API (`/ipam`).

use super::error::OwnerError;
use super::journal::{Change, Outcome};
use super::record::{Expiration, OwnerLease, Record, RecordKey};
use super::{DEFAULT_POOL, Leases, later};
use crate::ip::Family;
use jiff::Timestamp;
use std::net::IpAddr;

/// `POST /ipam`: allocates an address to an owner string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerRequest {
    /// One family, or all families that the node serves.
    pub family: Option<Family>,
    /// The owner.
    pub owner: String,
    /// A pool, or the node's default.
    pub pool: Option<String>,
    /// UUIDs of the timers to start, one per family.
    pub expiration: Option<ExpirationIds>,
}

/// New UUIDs, drawn by the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpirationIds {
    /// For the IPv4 address.
    pub ipv4: String,
    /// For the IPv6 address.
    pub ipv6: String,
}

impl Leases {
    /// `POST /ipam`: allocates an address to an owner string, of one family or of each that the node serves.
    pub fn allocate_for_owner(
        &mut self,
        request: OwnerRequest,
        now: Timestamp,
        draw: u64,
    ) -> Outcome<Result<Vec<OwnerLease>, OwnerError>> {
        let mut changes = self.expire(now);
        let answer = self.allocate_for_owner_expired(request, now, draw, &mut changes);
        Outcome { answer, changes }
    }

    fn allocate_for_owner_expired(
        &mut self,
        request: OwnerRequest,
        now: Timestamp,
        draw: u64,
        changes: &mut Vec<Change>,
    ) -> Result<Vec<OwnerLease>, OwnerError> {
        let OwnerRequest { family, owner, pool, expiration } = request;
        let pool = pool.unwrap_or_else(|| DEFAULT_POOL.to_owned());
        self.check_pool(&pool)?;
        self.ready(&pool, now, draw, changes)?;
        let addresses = self.pools.allocate_next(&pool, family, &format!("owner {owner}"), now, draw)?;
        let leases = addresses
            .iter()
            .map(|address| {
                let uuid = expiration.as_ref().map(|ids| match Family::of(address) {
                    Family::Ipv4 => ids.ipv4.clone(),
                    Family::Ipv6 => ids.ipv6.clone(),
                });
                self.hold_for_owner(owner.clone(), &pool, address, uuid, now, changes)
            })
            .collect();
        Ok(leases)
    }

    /// `POST /ipam/{ip}`: allocates this address to an owner string. The pool is required.
    pub fn allocate_address_for_owner(
        &mut self,
        address: IpAddr,
        owner: String,
        pool: &str,
        now: Timestamp,
    ) -> Outcome<Result<OwnerLease, OwnerError>> {
        let mut changes = self.expire(now);
        let answer = match self
            .check_pool(pool)
            .and_then(|()| Ok(self.may_allocate(pool)?))
            .and_then(|()| Ok(self.pools.allocate(pool, address, &format!("owner {owner}"), now)?))
        {
            Ok(()) => Ok(self.hold_for_owner(owner, pool, address, None, now, &mut changes)),
            Err(error) => Err(error),
        };
        Outcome { answer, changes }
    }

    fn hold_for_owner(
        &mut self,
        owner: String,
        pool: &str,
        address: IpAddr,
        uuid: Option<String>,
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) -> OwnerLease {
        self.generation += 1;
        let lease = OwnerLease {
            owner,
            pool: pool.to_owned(),
            address,
            generation: self.generation,
            since: now,
            expiration: uuid.map(|uuid| Expiration { uuid, at: later(now, self.timings.provisional) }),
        };
        changes.push(Change::Put(Record::Owner(lease.clone())));
        self.end_quarantine([address].into_iter(), changes);
        self.owners.insert((lease.pool.clone(), address), lease.clone());
        lease
    }

    /// Stops the timer of a lease with an owner string: its endpoint has been created by the caller, who presents the
    /// UUID.
    pub fn stop_expiration(
        &mut self,
        address: IpAddr,
        pool: &str,
        uuid: &str,
        now: Timestamp,
    ) -> Outcome<Result<(), OwnerError>> {
        let mut changes = self.expire(now);
        let no_timer = || OwnerError::NoTimer { address, pool: pool.to_owned() };
        let answer = match self.owners.get_mut(&(pool.to_owned(), address)) {
            None => Err(no_timer()),
            Some(lease) => match &lease.expiration {
                None => Err(no_timer()),
                Some(timer) if timer.uuid != uuid => {
                    Err(OwnerError::OtherTimer { address, pool: pool.to_owned(), presented: uuid.to_owned() })
                }
                Some(_) => {
                    lease.expiration = None;
                    changes.push(Change::Put(Record::Owner(lease.clone())));
                    Ok(())
                }
            },
        };
        Outcome { answer, changes }
    }

    /// `DELETE /ipam/{ip}`: releases an address that was allocated to an owner string. A pod's address is refused.
    pub fn release_for_owner(
        &mut self,
        address: IpAddr,
        pool: &str,
        now: Timestamp,
    ) -> Outcome<Result<OwnerLease, OwnerError>> {
        let mut changes = self.expire(now);
        let endpoint = self.pods.values().find(|lease| lease.addresses.iter().any(|held| held == address));
        let answer = match endpoint {
            Some(lease) => Err(OwnerError::InUse { address, attachment: lease.attachment.clone() }),
            None => self
                .end_owner(&(pool.to_owned(), address), now, &mut changes)
                .ok_or_else(|| OwnerError::NotAllocated { address, pool: pool.to_owned() }),
        };
        Outcome { answer, changes }
    }

    pub(super) fn end_owner(
        &mut self,
        key: &(String, IpAddr),
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) -> Option<OwnerLease> {
        let lease = self.owners.remove(key)?;
        self.quarantine(lease.address, &lease.pool, lease.generation, lease.holder(), now, changes);
        changes.push(Change::Remove(RecordKey::Owner(lease.pool.clone(), lease.address)));
        Some(lease)
    }

    fn check_pool(&self, pool: &str) -> Result<(), OwnerError> {
        let is_known = pool == DEFAULT_POOL || self.pools.has(pool);
        if is_known { Ok(()) } else { Err(OwnerError::UnknownPool { pool: pool.to_owned() }) }
    }
}
