//! Host-scope allocation from the node's pod CIDR (`ipam` 2.2, 2.1.3, 2.1.6).
//!
//! A [`PodCidr`] records which addresses of a CIDR are allocated, reserved or quarantined, and allocates the others
//! from a random position. Only addresses that are not free are stored, so its cost depends on the pods and not on the
//! size of the CIDR. [`crate::ipam::lease`] knows the owner of an address and its history.

use super::bookings::Bookings;
use crate::ip::{Family, address_bits, net_bounds, overlaps};
use crate::ipam::supply::Allocator;
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Of an IPv6 pod CIDR only the first 2^16 addresses are used.
pub const MAX_IPV6_ADDRESSES: u128 = 1 << 16;

/// Addresses of a pod CIDR by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Usable addresses: all but the first and last of a CIDR with more than two.
    pub size: u64,
    /// Allocated to pods and other owners.
    pub used: u64,
    /// Reserved for the router and addresses of the node.
    pub reserved: u64,
    /// Quarantined: neither free nor allocated, but allocated if no other address is free.
    pub quarantined: u64,
}

impl Usage {
    /// Addresses that can be allocated at once.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.size.saturating_sub(self.used).saturating_sub(self.reserved).saturating_sub(self.quarantined)
    }
}

/// Why no address, or not this one, can be allocated. Nothing is allocated then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// No address is left, not even a quarantined one.
    #[error(
        "range full: {net} has {} usable addresses, {} in use, {} reserved, {} in quarantine",
        usage.size, usage.used, usage.reserved, usage.quarantined
    )]
    RangeFull {
        /// The pod CIDR.
        net: IpNet,
        /// The counts by state.
        usage: Usage,
    },
    /// As [`Self::RangeFull`] for a pool of single addresses.
    #[error(
        "pool full: of {} addresses, {} are in use, {} reserved, {} in quarantine",
        usage.size, usage.used, usage.reserved, usage.quarantined
    )]
    PoolFull {
        /// The counts by state.
        usage: Usage,
    },
    /// Not an address of this pool.
    #[error("{address} is not an address of this pool")]
    NotInPool {
        /// The requested address.
        address: IpAddr,
    },
    /// Not a usable address of this CIDR.
    #[error("{address} is not in the valid range: {net} gives {first} to {last}")]
    OutOfRange {
        /// The requested address.
        address: IpAddr,
        /// The pod CIDR.
        net: IpNet,
        /// First usable address.
        first: IpAddr,
        /// Last usable address.
        last: IpAddr,
    },
    /// Another owner has it.
    #[error("{address} is already allocated to {owner}")]
    AlreadyAllocated {
        /// The requested address.
        address: IpAddr,
        /// The owner.
        owner: String,
    },
    /// It is reserved.
    #[error("{address} is excluded: it is kept for {owner}")]
    Excluded {
        /// The requested address.
        address: IpAddr,
        /// Its use.
        owner: String,
    },
    /// It was released recently.
    #[error("{address} is in quarantine until {until}")]
    InQuarantine {
        /// The requested address.
        address: IpAddr,
        /// When it becomes available.
        until: Timestamp,
    },
    /// This node has no pod CIDR of the family.
    #[error("{family} allocation is not available: the node has no {family} pod CIDR")]
    FamilyDisabled {
        /// The requested family.
        family: Family,
    },
    /// The owner of a release does not have the address.
    #[error("{address} is not held by {owner}")]
    NotHeld {
        /// The address to release.
        address: IpAddr,
        /// The presented owner.
        owner: String,
    },
}

/// The allocator of one pod CIDR.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCidr {
    net: IpNet,
    first: u128,
    last: u128,
    bookings: Bookings<u128>,
    /// Parts that are not allocated, in order and apart from each other.
    excluded: Vec<Part>,
}

/// A part of a pod CIDR, inclusive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    first: u128,
    last: u128,
    label: String,
}

impl PodCidr {
    /// An allocator whose usable addresses are all free. Host bits of `net` are dropped.
    #[must_use]
    pub fn new(net: IpNet) -> Self {
        let net = net.trunc();
        let (mut first, mut last) = net_bounds(&net);
        if Family::of_net(&net) == Family::Ipv6 {
            last = last.min(first.saturating_add(MAX_IPV6_ADDRESSES - 1));
        }
        if net_bounds(&net).1 - first > 1 {
            first += 1;
            // The cap may exclude the last address of the CIDR already.
            last = last.min(net_bounds(&net).1 - 1);
        }
        Self { net, first, last, bookings: Bookings::default(), excluded: Vec::new() }
    }

    /// The CIDR, without host bits.
    #[must_use]
    pub fn net(&self) -> IpNet {
        self.net
    }

    fn family(&self) -> Family {
        Family::of_net(&self.net)
    }

    fn position(&self, address: IpAddr) -> Result<u128, AddressError> {
        let position = address_bits(address);
        if Family::of(address) == self.family() && (self.first..=self.last).contains(&position) {
            return Ok(position);
        }
        let [first, last] = [self.first, self.last].map(|bits| self.family().address(bits));
        Err(AddressError::OutOfRange { address, net: self.net, first, last })
    }

    /// The excluded part that has a position.
    fn part(&self, position: u128) -> Option<&Part> {
        self.excluded.iter().find(|part| (part.first..=part.last).contains(&position))
    }

    /// The first free position in the range, outside of the excluded parts.
    fn free_from(&self, first: u128, last: u128) -> Option<u128> {
        let mut from = first;
        for part in self.excluded.iter().filter(|part| part.last >= first && part.first <= last) {
            if part.first > from
                && let Some(free) = self.free_between(from, part.first - 1)
            {
                return Some(free);
            }
            from = part.last.checked_add(1)?;
        }
        if from <= last { self.free_between(from, last) } else { None }
    }

    /// The first free position in the range: walks what is not free, which is sorted, until that leaves a gap.
    fn free_between(&self, first: u128, last: u128) -> Option<u128> {
        let mut candidate = first;
        for booked in self.bookings.between(first, last) {
            if booked > candidate {
                break;
            }
            candidate = booked.checked_add(1)?;
        }
        (candidate <= last).then_some(candidate)
    }
}

impl Allocator for PodCidr {
    fn usable(&self, address: IpAddr) -> bool {
        self.position(address).is_ok()
    }

    fn exclude(&mut self, address: IpAddr, label: &str) -> Result<(), AddressError> {
        let Ok(position) = self.position(address) else { return Ok(()) };
        self.bookings.exclude(position, address, label)
    }

    fn exclude_net(&mut self, net: &IpNet, label: &str) {
        if Family::of_net(net) != self.family() {
            return;
        }
        let (first, last) = net_bounds(net);
        let (first, last) = (first.max(self.first), last.min(self.last));
        if first > last {
            return;
        }
        let part = Part { first, last, label: label.to_owned() };
        let (mut touching, apart): (Vec<Part>, Vec<Part>) = std::mem::take(&mut self.excluded)
            .into_iter()
            .partition(|other| other.first <= part.last && part.first <= other.last);
        touching.push(part);
        let merged = touching.into_iter().reduce(|one, other| Part {
            first: one.first.min(other.first),
            last: one.last.max(other.last),
            label: one.label,
        });
        self.excluded = apart.into_iter().chain(merged).collect();
        self.excluded.sort_by_key(|part| part.first);
    }

    /// The first free address from the random position `draw` onwards, around the end.
    fn allocate_next(&mut self, owner: &str, now: Timestamp, draw: u64) -> Result<IpAddr, AddressError> {
        self.expire(now);
        let start = self.first + u128::from(draw) % (self.last - self.first + 1);
        let position = self
            .free_from(start, self.last)
            .or_else(|| if start > self.first { self.free_from(self.first, start - 1) } else { None })
            .or_else(|| self.bookings.longest_quarantined(|position| self.part(*position).is_none()));
        let Some(position) = position else {
            return Err(AddressError::RangeFull { net: self.net, usage: self.usage() });
        };
        self.bookings.hold(position, owner);
        Ok(self.family().address(position))
    }

    fn allocate(&mut self, address: IpAddr, owner: &str, now: Timestamp) -> Result<(), AddressError> {
        self.expire(now);
        let position = self.position(address)?;
        match self.part(position).filter(|_| self.bookings.is_free(&position)) {
            Some(part) => Err(AddressError::Excluded { address, owner: part.label.clone() }),
            None => self.bookings.allocate(position, address, owner),
        }
    }

    fn undo(&mut self, address: IpAddr, owner: &str) -> Result<(), AddressError> {
        self.bookings.undo(self.position(address)?, address, owner)
    }

    fn release(&mut self, address: IpAddr, owner: &str, now: Timestamp, until: Timestamp) -> Result<(), AddressError> {
        self.bookings.release(self.position(address)?, address, owner, now, until)
    }

    fn restore_quarantine(&mut self, address: IpAddr, since: Timestamp, until: Timestamp) -> bool {
        self.position(address).is_ok_and(|position| self.bookings.restore_quarantine(position, since, until))
    }

    fn expire(&mut self, now: Timestamp) {
        self.bookings.expire(now);
    }

    fn usage(&self) -> Usage {
        let mut usage = self.bookings.usage(u64::try_from(self.last - self.first + 1).unwrap_or(u64::MAX));
        for part in &self.excluded {
            let booked = self.bookings.between(part.first, part.last).count() as u128;
            let free = u64::try_from((part.last - part.first + 1).saturating_sub(booked)).unwrap_or(u64::MAX);
            usage.reserved = usage.reserved.saturating_add(free);
        }
        usage
    }
}

/// At most one address of each family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Addresses {
    /// The IPv4 address, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Addr>,
    /// The IPv6 address, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<Ipv6Addr>,
}

impl Addresses {
    /// The addresses, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_none() && self.ipv6.is_none()
    }

    /// Sets the address of its family.
    pub fn set(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(address) => self.ipv4 = Some(address),
            IpAddr::V6(address) => self.ipv6 = Some(address),
        }
    }
}

/// Another node that lists a pod CIDR overlapping one of this node's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pod CIDR {own} of this node overlaps with {other}, which CiliumNode {node} lists; remove one of the two")]
pub struct Contested {
    /// This node's pod CIDR.
    pub own: IpNet,
    /// The other node.
    pub node: String,
    /// The other node's pod CIDR.
    pub other: IpNet,
}

/// The first other node, by name, that lists a pod CIDR of this node too. While there is one, no new address may be
/// allocated from it (`ipam` decision 14).
#[must_use]
pub fn contested<'a>(
    own: &IpNet,
    own_name: &str,
    nodes: impl IntoIterator<Item = (&'a str, IpNet)>,
) -> Option<Contested> {
    nodes
        .into_iter()
        .filter(|(node, other)| *node != own_name && overlaps(own, other))
        .min()
        .map(|(node, other)| Contested { own: *own, node: node.to_owned(), other })
}

#[cfg(test)]
mod tests;
