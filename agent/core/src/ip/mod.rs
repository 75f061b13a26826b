//! Addresses, blocks and ranges.
//!
//! Arithmetic uses `u128`, so that one implementation serves both families; an IPv4 address is its 32 bits.
pub mod block;
pub mod index;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address family. Families are independent of each other everywhere (`ipam` 2.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// 32 bits.
    Ipv4,
    /// 128 bits.
    Ipv6,
}

impl Family {
    /// The family of an address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Ipv4,
            IpAddr::V6(_) => Self::Ipv6,
        }
    }

    /// The family of a CIDR.
    #[must_use]
    pub fn of_net(net: &IpNet) -> Self {
        match net {
            IpNet::V4(_) => Self::Ipv4,
            IpNet::V6(_) => Self::Ipv6,
        }
    }

    /// The length of an address in bits, which is also the longest prefix.
    #[must_use]
    pub fn bits(self) -> u8 {
        match self {
            Self::Ipv4 => 32,
            Self::Ipv6 => 128,
        }
    }

    /// The address with these bits. For IPv4 only the lower 32 bits are used; the others are zero.
    pub(crate) fn address(self, bits: u128) -> IpAddr {
        match self {
            #[expect(clippy::cast_possible_truncation, reason = "an IPv4 address is held in the lowest 32 bits")]
            Self::Ipv4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
            Self::Ipv6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

/// The bits of an address as a number.
pub(crate) fn address_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// First and last address of a CIDR as numbers.
pub(crate) fn net_bounds(net: &IpNet) -> (u128, u128) {
    (address_bits(net.network()), address_bits(net.broadcast()))
}

/// Whether two CIDRs overlap. Aligned CIDRs overlap only if one contains the other.
#[must_use]
pub fn overlaps(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_symmetric_and_ends_at_the_border() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        for (a, b, expected) in [
            ("10.0.0.0/8", "10.1.0.0/16", true),
            ("10.0.0.0/9", "10.128.0.0/9", false),
            ("10.0.0.0/24", "10.0.0.0/24", true),
            ("::/0", "10.0.0.0/8", false),
            ("fd00::/8", "fd00:1::/32", true),
        ] {
            assert_eq!(overlaps(&net(a), &net(b)), expected, "{a} {b}");
            assert_eq!(overlaps(&net(b), &net(a)), expected, "{b} {a}");
        }
    }

    #[test]
    fn bits_and_back() {
        for text in ["0.0.0.0", "10.66.1.20", "255.255.255.255", "::", "fd4a:7::1", "::ffff:10.0.0.1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(Family::of(address).address(address_bits(address)), address);
        }
    }
}
