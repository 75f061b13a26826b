//! The positions of an allocator that are not free, with the reason. The cost follows the pods and not the size of the range.

use super::pod_cidr::{AddressError, Usage};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Why an address is not free.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Booking {
    /// Allocated to this owner.
    Held(String),
    /// Never allocated, under this label (`node-ip`, `router`).
    Excluded(String),
    /// Released, and not free yet.
    Quarantined { since: Timestamp, until: Timestamp },
}

/// Positions that are not free. The address of a position is passed along for the errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bookings<P: Ord> {
    booked: BTreeMap<P, Booking>,
}

impl<P: Ord> Default for Bookings<P> {
    fn default() -> Self {
        Self { booked: BTreeMap::new() }
    }
}

impl<P: Ord + Copy> Bookings<P> {
    pub(super) fn is_free(&self, position: &P) -> bool {
        !self.booked.contains_key(position)
    }

    /// The positions from one to another that are not free, in their order.
    pub(super) fn between(&self, first: P, last: P) -> impl Iterator<Item = P> + '_ {
        self.booked.range(first..=last).map(|(position, _)| *position)
    }

    pub(super) fn hold(&mut self, position: P, owner: &str) {
        self.booked.insert(position, Booking::Held(owner.to_owned()));
    }

    pub(super) fn exclude(&mut self, position: P, address: IpAddr, label: &str) -> Result<(), AddressError> {
        match self.booked.get(&position) {
            Some(Booking::Held(owner)) => Err(AddressError::AlreadyAllocated { address, owner: owner.clone() }),
            Some(Booking::Excluded(owner)) if owner != label => {
                Err(AddressError::Excluded { address, owner: owner.clone() })
            }
            _ => {
                self.booked.insert(position, Booking::Excluded(label.to_owned()));
                Ok(())
            }
        }
    }

    pub(super) fn allocate(&mut self, position: P, address: IpAddr, owner: &str) -> Result<(), AddressError> {
        match self.booked.get(&position) {
            None => {
                self.hold(position, owner);
                Ok(())
            }
            Some(Booking::Held(owner)) => Err(AddressError::AlreadyAllocated { address, owner: owner.clone() }),
            Some(Booking::Excluded(owner)) => Err(AddressError::Excluded { address, owner: owner.clone() }),
            Some(Booking::Quarantined { until, .. }) => Err(AddressError::InQuarantine { address, until: *until }),
        }
    }

    pub(super) fn undo(&mut self, position: P, address: IpAddr, owner: &str) -> Result<(), AddressError> {
        self.check_held(position, address, owner)?;
        self.booked.remove(&position);
        Ok(())
    }

    pub(super) fn release(
        &mut self,
        position: P,
        address: IpAddr,
        owner: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<(), AddressError> {
        self.check_held(position, address, owner)?;
        self.booked.insert(position, Booking::Quarantined { since: now, until });
        Ok(())
    }

    pub(super) fn restore_quarantine(&mut self, position: P, since: Timestamp, until: Timestamp) -> bool {
        let free = self.is_free(&position);
        if free {
            self.booked.insert(position, Booking::Quarantined { since, until });
        }
        free
    }

    pub(super) fn expire(&mut self, now: Timestamp) {
        self.booked.retain(|_, booking| !matches!(booking, Booking::Quarantined { until, .. } if *until <= now));
    }

    pub(super) fn usage(&self, size: u64) -> Usage {
        let mut usage = Usage { size, ..Usage::default() };
        for booking in self.booked.values() {
            match booking {
                Booking::Held(_) => usage.used += 1,
                Booking::Excluded(_) => usage.reserved += 1,
                Booking::Quarantined { .. } => usage.quarantined += 1,
            }
        }
        usage
    }

    pub(super) fn longest_quarantined(&self, may_be_used: impl Fn(&P) -> bool) -> Option<P> {
        let quarantined = self.booked.iter().filter_map(|(position, booking)| match booking {
            Booking::Quarantined { since, .. } if may_be_used(position) => Some((*since, *position)),
            Booking::Held(_) | Booking::Excluded(_) | Booking::Quarantined { .. } => None,
        });
        quarantined.min().map(|(_, position)| position)
    }

    fn check_held(&self, position: P, address: IpAddr, owner: &str) -> Result<(), AddressError> {
        match self.booked.get(&position) {
            Some(Booking::Held(holder)) if holder == owner => Ok(()),
            _ => Err(AddressError::NotHeld { address, owner: owner.to_owned() }),
        }
    }
}
