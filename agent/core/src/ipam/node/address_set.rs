//! Allocation from single addresses, as clouds attach them to a node one by one.

use super::bookings::Bookings;
use super::pod_cidr::{AddressError, Usage};
use crate::ipam::supply::Allocator;
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// The allocator of a set of addresses. All of them can be used: none is a network or broadcast address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressSet {
    addresses: BTreeSet<IpAddr>,
    bookings: Bookings<IpAddr>,
}

impl AddressSet {
    /// An allocator in which every address is free.
    #[must_use]
    pub fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self { addresses: addresses.into_iter().collect(), bookings: Bookings::default() }
    }

    fn check(&self, address: IpAddr) -> Result<(), AddressError> {
        if self.addresses.contains(&address) { Ok(()) } else { Err(AddressError::NotInPool { address }) }
    }
}

impl Allocator for AddressSet {
    fn usable(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
    }

    fn exclude(&mut self, address: IpAddr, label: &str) -> Result<(), AddressError> {
        if self.usable(address) { self.bookings.exclude(address, address, label) } else { Ok(()) }
    }

    fn exclude_net(&mut self, net: &IpNet, label: &str) {
        let inside: Vec<IpAddr> = self.addresses.iter().copied().filter(|address| net.contains(address)).collect();
        for address in inside {
            // One that is allocated stays so.
            let _ = self.exclude(address, label);
        }
    }

    fn allocate_next(&mut self, owner: &str, now: Timestamp, draw: u64) -> Result<IpAddr, AddressError> {
        self.expire(now);
        let start = usize::try_from(draw % (self.addresses.len().max(1) as u64)).unwrap_or_default();
        let mut from_there = self.addresses.iter().cycle().skip(start).take(self.addresses.len());
        let free = from_there.find(|address| self.bookings.is_free(address)).copied();
        let address = free.or_else(|| self.bookings.longest_quarantined(|_| true));
        let address = address.ok_or_else(|| AddressError::PoolFull { usage: self.usage() })?;
        self.bookings.hold(address, owner);
        Ok(address)
    }

    fn allocate(&mut self, address: IpAddr, owner: &str, now: Timestamp) -> Result<(), AddressError> {
        self.expire(now);
        self.check(address)?;
        self.bookings.allocate(address, address, owner)
    }

    fn undo(&mut self, address: IpAddr, owner: &str) -> Result<(), AddressError> {
        self.check(address)?;
        self.bookings.undo(address, address, owner)
    }

    fn release(&mut self, address: IpAddr, owner: &str, now: Timestamp, until: Timestamp) -> Result<(), AddressError> {
        self.check(address)?;
        self.bookings.release(address, address, owner, now, until)
    }

    fn restore_quarantine(&mut self, address: IpAddr, since: Timestamp, until: Timestamp) -> bool {
        self.usable(address) && self.bookings.restore_quarantine(address, since, until)
    }

    fn expire(&mut self, now: Timestamp) {
        self.bookings.expire(now);
    }

    fn usage(&self) -> Usage {
        self.bookings.usage(self.addresses.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn each_address_is_allocated_once_and_a_quarantined_one_last() {
        let [a, b, c] = ["192.0.2.4", "192.0.2.9", "198.51.100.1"].map(ip);
        for draw in [0, 1, 2, u64::MAX] {
            let mut set = AddressSet::new([a, b, c]);
            set.exclude(b, "router").unwrap();
            let given = [0, 1].map(|_| set.allocate_next("pod", at(0), draw).unwrap());
            assert_eq!(BTreeSet::from(given), BTreeSet::from([a, c]));
            let full = set.allocate_next("pod", at(0), draw).unwrap_err();
            assert!(full.to_string().contains("3 addresses"), "{full}");
            assert!(set.release(a, "another", at(1), at(31)).is_err());
            set.release(a, "pod", at(1), at(31)).unwrap();
            assert_eq!(set.usage(), Usage { size: 3, used: 1, reserved: 1, quarantined: 1 });
            assert_eq!(set.allocate(a, "next", at(2)), Err(AddressError::InQuarantine { address: a, until: at(31) }));
            // Nothing else is left.
            assert_eq!(set.allocate_next("next", at(2), draw), Ok(a));
            set.undo(a, "next").unwrap();
            assert!(set.restore_quarantine(a, at(2), at(32)) && set.allocate(a, "next", at(32)).is_ok());
        }
    }

    #[test]
    fn an_address_of_another_pool_is_refused_and_an_empty_set_is_full() {
        let mut set = AddressSet::new([ip("192.0.2.4")]);
        let other = ip("192.0.2.5");
        assert_eq!(set.allocate(other, "pod", at(0)), Err(AddressError::NotInPool { address: other }));
        assert!(set.exclude(other, "node-ip").is_ok() && !set.restore_quarantine(other, at(0), at(1)));
        assert!(matches!(AddressSet::new([]).allocate_next("pod", at(0), 3), Err(AddressError::PoolFull { .. })));
    }
}
