//! Host-scope allocation from the pod CIDR of the node (`ipam` 2.2, 2.1.3, 2.1.6).
//!
//! A [`PodCidr`] knows which addresses of one CIDR are in use, reserved or resting, and draws from the rest at a random
//! position. It keeps only what is not free, so its cost follows the pods and not the size of the CIDR. Who holds an
//! address, and why, is known one level up, in [`crate::ipam::lease`].

use crate::ip::{Family, address_bits, net_bounds, overlaps};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Of an IPv6 pod CIDR only the first 2^16 addresses are used.
pub const MAX_IPV6_ADDRESSES: u128 = 1 << 16;

/// Why an address is not free.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Booking {
    /// Held by this owner.
    Held(String),
    /// Never given to anybody, under this label (`node-ip`, `router`).
    Excluded(String),
    /// Given back, and resting.
    Quarantined { since: Timestamp, until: Timestamp },
}

/// Addresses of a pod CIDR by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Addresses that can be used at all: all but the first and last of a CIDR with more than two.
    pub size: u64,
    /// Held by pods and other lease holders.
    pub used: u64,
    /// Kept for the router and for addresses of the node.
    pub reserved: u64,
    /// Given back a short while ago: neither free nor used, but given out when nothing else is left.
    pub quarantined: u64,
}

impl Usage {
    /// Addresses that can be given at once.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.size.saturating_sub(self.used).saturating_sub(self.reserved).saturating_sub(self.quarantined)
    }
}

/// Why no address, or not this one, can be given. Nothing is booked then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Nothing is left, not even in quarantine.
    #[error(
        "range full: {net} has {} usable addresses, {} in use, {} reserved, {} in quarantine",
        usage.size, usage.used, usage.reserved, usage.quarantined
    )]
    RangeFull {
        /// The pod CIDR.
        net: IpNet,
        /// What became of its addresses.
        usage: Usage,
    },
    /// Not an address that this CIDR can give.
    #[error("{address} is not in the valid range: {net} gives {first} to {last}")]
    OutOfRange {
        /// The address asked for.
        address: IpAddr,
        /// The pod CIDR.
        net: IpNet,
        /// First usable address.
        first: IpAddr,
        /// Last usable address.
        last: IpAddr,
    },
    /// Somebody holds it.
    #[error("{address} is already allocated to {owner}")]
    AlreadyAllocated {
        /// The address asked for.
        address: IpAddr,
        /// Who holds it.
        owner: String,
    },
    /// It is kept for something else than pods.
    #[error("{address} is excluded: it is kept for {owner}")]
    Excluded {
        /// The address asked for.
        address: IpAddr,
        /// What it is kept for.
        owner: String,
    },
    /// It was given back a short while ago.
    #[error("{address} is in quarantine until {until}")]
    InQuarantine {
        /// The address asked for.
        address: IpAddr,
        /// When it becomes free.
        until: Timestamp,
    },
    /// This node has no pod CIDR of the family.
    #[error("{family} allocation is not available: the node has no {family} pod CIDR")]
    FamilyDisabled {
        /// The family asked for.
        family: Family,
    },
    /// The owner of a release is not the holder.
    #[error("{address} is not held by {owner}")]
    NotHeld {
        /// The address to give back.
        address: IpAddr,
        /// Who wanted to.
        owner: String,
    },
}

/// The allocator of one pod CIDR.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodCidr {
    net: IpNet,
    first: u128,
    last: u128,
    bookings: BTreeMap<u128, Booking>,
}

impl PodCidr {
    /// An allocator in which everything usable is free. Host bits of `net` are dropped.
    #[must_use]
    pub fn new(net: IpNet) -> Self {
        let net = net.trunc();
        let (mut first, mut last) = net_bounds(&net);
        if Family::of_net(&net) == Family::Ipv6 {
            last = last.min(first.saturating_add(MAX_IPV6_ADDRESSES - 1));
        }
        if net_bounds(&net).1 - first > 1 {
            first += 1;
            // The cap may have cut the last address of the CIDR off already.
            last = last.min(net_bounds(&net).1 - 1);
        }
        Self { net, first, last, bookings: BTreeMap::new() }
    }

    /// The CIDR, without host bits.
    #[must_use]
    pub fn net(&self) -> IpNet {
        self.net
    }

    /// Whether the address is one that this CIDR can give.
    #[must_use]
    pub fn usable(&self, address: IpAddr) -> bool {
        self.position(address).is_ok()
    }

    /// Keeps an address from being given, under a label such as `router`. An address outside the usable range needs
    /// no keeping and is accepted.
    ///
    /// # Errors
    /// When it is held or excluded already; the quarantine of an address ends by this.
    pub fn exclude(&mut self, address: IpAddr, label: &str) -> Result<(), AddressError> {
        let Ok(position) = self.position(address) else { return Ok(()) };
        match self.bookings.get(&position) {
            Some(Booking::Held(owner)) => Err(AddressError::AlreadyAllocated { address, owner: owner.clone() }),
            Some(Booking::Excluded(owner)) if owner != label => {
                Err(AddressError::Excluded { address, owner: owner.clone() })
            }
            _ => {
                self.bookings.insert(position, Booking::Excluded(label.to_owned()));
                Ok(())
            }
        }
    }

    /// Gives a free address to `owner`: the first free one from the random position `draw` onwards, around the end.
    /// When none is free, the address that has rested longest.
    ///
    /// # Errors
    /// [`AddressError::RangeFull`] when everything is held or excluded.
    pub fn allocate_next(&mut self, owner: &str, now: Timestamp, draw: u64) -> Result<IpAddr, AddressError> {
        self.expire(now);
        let start = self.first + u128::from(draw) % (self.last - self.first + 1);
        let position = self
            .free_from(start, self.last)
            .or_else(|| if start > self.first { self.free_from(self.first, start - 1) } else { None })
            .or_else(|| self.longest_rested());
        let Some(position) = position else {
            return Err(AddressError::RangeFull { net: self.net, usage: self.usage() });
        };
        self.bookings.insert(position, Booking::Held(owner.to_owned()));
        Ok(self.family().address(position))
    }

    /// Gives this address to `owner`.
    ///
    /// # Errors
    /// Outside the usable range, held, excluded (the error names for what), or in quarantine.
    pub fn allocate(&mut self, address: IpAddr, owner: &str, now: Timestamp) -> Result<(), AddressError> {
        self.expire(now);
        let position = self.position(address)?;
        match self.bookings.get(&position) {
            None => {
                self.bookings.insert(position, Booking::Held(owner.to_owned()));
                Ok(())
            }
            Some(Booking::Held(owner)) => Err(AddressError::AlreadyAllocated { address, owner: owner.clone() }),
            Some(Booking::Excluded(owner)) => Err(AddressError::Excluded { address, owner: owner.clone() }),
            Some(Booking::Quarantined { until, .. }) => Err(AddressError::InQuarantine { address, until: *until }),
        }
    }

    /// Frees an address at once: nobody was told of it yet.
    ///
    /// # Errors
    /// When `owner` does not hold it. Nothing changes then.
    pub fn undo(&mut self, address: IpAddr, owner: &str) -> Result<(), AddressError> {
        let position = self.held_position(address, owner)?;
        self.bookings.remove(&position);
        Ok(())
    }

    /// Gives an address back; it rests until `until`.
    ///
    /// # Errors
    /// When `owner` does not hold it. Nothing changes then.
    pub fn release(
        &mut self,
        address: IpAddr,
        owner: &str,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<(), AddressError> {
        let position = self.held_position(address, owner)?;
        self.bookings.insert(position, Booking::Quarantined { since: now, until });
        Ok(())
    }

    /// Puts a recorded quarantine back. Returns false, and changes nothing, when the address is not usable here or is
    /// booked otherwise.
    pub fn restore_quarantine(&mut self, address: IpAddr, since: Timestamp, until: Timestamp) -> bool {
        match self.position(address) {
            Ok(position) if !self.bookings.contains_key(&position) => {
                self.bookings.insert(position, Booking::Quarantined { since, until });
                true
            }
            _ => false,
        }
    }

    /// Frees every address whose quarantine has ended.
    pub fn expire(&mut self, now: Timestamp) {
        self.bookings.retain(|_, booking| !matches!(booking, Booking::Quarantined { until, .. } if *until <= now));
    }

    /// Addresses by state.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let size = u64::try_from(self.last - self.first + 1).unwrap_or(u64::MAX);
        let mut usage = Usage { size, ..Usage::default() };
        for booking in self.bookings.values() {
            match booking {
                Booking::Held(_) => usage.used += 1,
                Booking::Excluded(_) => usage.reserved += 1,
                Booking::Quarantined { .. } => usage.quarantined += 1,
            }
        }
        usage
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

    fn held_position(&self, address: IpAddr, owner: &str) -> Result<u128, AddressError> {
        let position = self.position(address)?;
        match self.bookings.get(&position) {
            Some(Booking::Held(holder)) if holder == owner => Ok(position),
            _ => Err(AddressError::NotHeld { address, owner: owner.to_owned() }),
        }
    }

    /// The first position in the range without a booking: walks the bookings, which are sorted, until they leave a gap.
    fn free_from(&self, first: u128, last: u128) -> Option<u128> {
        let mut candidate = first;
        for (booked, _) in self.bookings.range(first..=last) {
            if *booked > candidate {
                break;
            }
            candidate = booked.checked_add(1)?;
        }
        (candidate <= last).then_some(candidate)
    }

    fn longest_rested(&self) -> Option<u128> {
        self.bookings
            .iter()
            .filter_map(|(position, booking)| match booking {
                Booking::Quarantined { since, .. } => Some((*since, *position)),
                _ => None,
            })
            .min()
            .map(|(_, position)| position)
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

/// The pod CIDRs of the node, one for each family it serves.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodCidrs {
    /// IPv4, if served.
    pub ipv4: Option<PodCidr>,
    /// IPv6, if served.
    pub ipv6: Option<PodCidr>,
}

impl PodCidrs {
    /// Whether the node serves no family (yet).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ipv4.is_none() && self.ipv6.is_none()
    }

    /// The allocator of a family.
    ///
    /// # Errors
    /// [`AddressError::FamilyDisabled`]
    pub fn family(&mut self, family: Family) -> Result<&mut PodCidr, AddressError> {
        match family {
            Family::Ipv4 => self.ipv4.as_mut(),
            Family::Ipv6 => self.ipv6.as_mut(),
        }
        .ok_or(AddressError::FamilyDisabled { family })
    }

    /// The allocators there are, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = &PodCidr> {
        self.ipv4.iter().chain(&self.ipv6)
    }

    /// One address of the family asked for, or of each family that the node serves: IPv6 first, then IPv4. When IPv4
    /// fails the IPv6 address is free again (`ipam` 2.1.1).
    ///
    /// # Errors
    /// When one of the families cannot give an address; nothing is booked then.
    pub fn allocate_next(
        &mut self,
        family: Option<Family>,
        owner: &str,
        now: Timestamp,
        draw: u64,
    ) -> Result<Addresses, AddressError> {
        let wanted: Vec<Family> = match family {
            Some(family) => vec![family],
            None => [Family::Ipv6, Family::Ipv4].into_iter().filter(|family| self.family(*family).is_ok()).collect(),
        };
        let mut addresses = Addresses::default();
        for family in wanted {
            match self.family(family).and_then(|pool| pool.allocate_next(owner, now, draw)) {
                Ok(address) => addresses.set(address),
                Err(error) => {
                    for address in addresses.iter() {
                        // Booked a moment ago under this owner, so this cannot be refused.
                        self.family(Family::of(address))?.undo(address, owner)?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(addresses)
    }
}

/// Another node that lists a block which overlaps with one of this node's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pod CIDR {own} of this node overlaps with {other}, which CiliumNode {node} lists; remove one of the two")]
pub struct Contested {
    /// This node's block.
    pub own: IpNet,
    /// The other node.
    pub node: String,
    /// The other node's block.
    pub other: IpNet,
}

/// The first other node, by name, that lists a block of this node too. While there is one, no new address may be given
/// from the block (`ipam` decision 14); [`crate::ipam::lease::Leases::hold_back`] takes the text.
#[must_use]
pub fn contested<'a>(
    own: &[IpNet],
    own_name: &str,
    nodes: impl IntoIterator<Item = (&'a str, &'a [IpNet])>,
) -> Option<Contested> {
    nodes
        .into_iter()
        .filter(|(node, _)| *node != own_name)
        .flat_map(|(node, listed)| own.iter().flat_map(move |own| listed.iter().map(move |other| (node, own, other))))
        .filter(|(_, own, other)| overlaps(own, other))
        .min()
        .map(|(node, own, other)| Contested { own: *own, node: node.to_owned(), other: *other })
}

#[cfg(test)]
mod tests;
