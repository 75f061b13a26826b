//! Which node has which CIDRs, found by overlap.

use super::{Family, net_bounds};
use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// CIDRs with their owners. A search costs a look-up for each prefix length and one for each CIDR found, however many there
/// are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NetIndex {
    /// By family, first address and prefix length.
    owners: BTreeMap<(Family, u128, u8), BTreeSet<String>>,
}

fn key(net: &IpNet) -> (Family, u128, u8) {
    (Family::of_net(net), net_bounds(net).0, net.prefix_len())
}

impl NetIndex {
    /// Adds an owner of a CIDR, whose host bits do not matter.
    pub fn insert(&mut self, net: &IpNet, owner: &str) {
        self.owners.entry(key(net)).or_default().insert(owner.to_owned());
    }

    /// Removes an owner of a CIDR. No-op if it is not one.
    pub fn remove(&mut self, net: &IpNet, owner: &str) {
        let key = key(net);
        if let Some(owners) = self.owners.get_mut(&key) {
            owners.remove(owner);
            if owners.is_empty() {
                self.owners.remove(&key);
            }
        }
    }

    /// The owners of CIDRs that overlap with this one, with theirs.
    pub fn overlapping(&self, net: &IpNet) -> impl Iterator<Item = (&str, IpNet)> {
        let (family, length) = (Family::of_net(net), net.prefix_len());
        let (first, last) = net_bounds(net);
        let around = (0..length).filter_map(move |length| {
            let wider = IpNet::new(family.address(first), length).ok()?;
            self.owners.get_key_value(&key(&wider))
        });
        let within = (Bound::Included((family, first, length)), Bound::Included((family, last, u8::MAX)));
        let within = self.owners.range(within);
        around.chain(within).flat_map(|((family, first, length), owners)| {
            let net = IpNet::new(family.address(*first), *length).ok();
            net.into_iter().flat_map(move |net| owners.iter().map(move |owner| (owner.as_str(), net)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ip::overlaps;
    use proptest::prelude::*;

    #[test]
    fn owners_of_overlapping_cidrs_are_found_until_removed() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let mut index = NetIndex::default();
        for (cidr, owner) in [("10.0.0.0/8", "a"), ("10.1.2.7/24", "b"), ("10.1.2.0/24", "c"), ("fd00::/64", "d")] {
            index.insert(&net(cidr), owner);
        }
        let found = |index: &NetIndex, cidr: &str| {
            index.overlapping(&net(cidr)).map(|(owner, net)| format!("{owner} {net}")).collect::<Vec<_>>()
        };
        assert_eq!(found(&index, "10.1.2.0/24"), ["a 10.0.0.0/8", "b 10.1.2.0/24", "c 10.1.2.0/24"]);
        assert_eq!(found(&index, "10.1.0.0/16"), ["a 10.0.0.0/8", "b 10.1.2.0/24", "c 10.1.2.0/24"]);
        assert_eq!(found(&index, "10.1.2.128/25"), ["a 10.0.0.0/8", "b 10.1.2.0/24", "c 10.1.2.0/24"]);
        assert_eq!(found(&index, "::/0"), ["d fd00::/64"]);
        assert!(found(&index, "11.0.0.0/8").is_empty());
        index.remove(&net("10.1.2.0/24"), "b");
        index.remove(&net("10.1.2.0/24"), "b");
        index.remove(&net("10.0.0.0/8"), "nobody");
        assert_eq!(found(&index, "10.1.2.0/24"), ["a 10.0.0.0/8", "c 10.1.2.0/24"]);
    }

    fn nets() -> impl Strategy<Value = IpNet> {
        // Few bits, so that many overlap.
        (any::<bool>(), 0_u32..64, 24_u8..=32).prop_map(|(v6, bits, length)| {
            let (family, length) = if v6 { (Family::Ipv6, 96 + length) } else { (Family::Ipv4, length) };
            IpNet::new(family.address(u128::from(bits) * 5), length).unwrap().trunc()
        })
    }

    proptest! {
        #[test]
        fn it_finds_what_a_comparison_with_each_finds(all in prop::collection::vec(nets(), 0..20), net in nets()) {
            let mut index = NetIndex::default();
            for (number, one) in all.iter().enumerate() {
                index.insert(one, &number.to_string());
            }
            let mut found: Vec<(usize, IpNet)> =
                index.overlapping(&net).map(|(owner, one)| (owner.parse().unwrap(), one)).collect();
            found.sort_unstable();
            let expected: Vec<(usize, IpNet)> =
                all.iter().copied().enumerate().filter(|(_, one)| overlaps(one, &net)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
