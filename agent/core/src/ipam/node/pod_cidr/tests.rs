use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn pool(text: &str) -> PodCidr {
    PodCidr::new(text.parse().unwrap())
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

/// All addresses that the pool allocates, with different draws.
fn drain(pool: &mut PodCidr) -> BTreeSet<IpAddr> {
    let draws = (0_u64..).map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut given = BTreeSet::new();
    for draw in draws {
        match pool.allocate_next("pod", at(0), draw) {
            Ok(address) => assert!(given.insert(address), "{address} given twice"),
            Err(error) => {
                assert!(matches!(error, AddressError::RangeFull { .. }), "{error}");
                break;
            }
        }
    }
    given
}

// case: ipam D1
#[test]
fn a_28_gives_the_router_and_thirteen_pods_an_address_and_never_its_first_and_last() {
    let mut pool = pool("10.66.1.16/28");
    pool.allocate_next("router", at(0), 7).unwrap();
    let given = drain(&mut pool);
    assert_eq!(given.len(), 13);
    assert!(!given.contains(&ip("10.66.1.16")) && !given.contains(&ip("10.66.1.31")));
    let error = pool.allocate_next("one more", at(0), 0).unwrap_err().to_string();
    assert!(error.contains("range full: 10.66.1.16/28 has 14 usable addresses, 14 in use"), "{error}");
}

// case: ipam D2
#[test]
fn tiny_cidrs_use_what_they_have() {
    for (cidr, addresses) in
        [("10.0.0.0/31", 2), ("10.0.0.9/32", 1), ("fd00::/127", 2), ("fd00::7/128", 1), ("10.0.0.0/30", 2)]
    {
        let mut pool = pool(cidr);
        assert_eq!(pool.usage().size, addresses, "{cidr}");
        assert_eq!(drain(&mut pool).len() as u64, addresses, "{cidr}");
    }
    assert_eq!(drain(&mut pool("10.0.0.0/30")), BTreeSet::from([ip("10.0.0.1"), ip("10.0.0.2")]));
}

#[test]
fn ipv6_is_capped_and_the_ends_of_the_address_space_do_not_overflow() {
    let capped = pool("fd00::/64");
    assert_eq!(capped.usage().size, 65_535);
    assert!(capped.usable(ip("fd00::1")) && capped.usable(ip("fd00::ffff")));
    assert!(!capped.usable(ip("fd00::")) && !capped.usable(ip("fd00::1:0")));
    assert_eq!(pool("fd00::/112").usage().size, 65_534);
    let mut last = pool("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127");
    assert_eq!(drain(&mut last).len(), 2);
    assert_eq!(drain(&mut pool("255.255.255.248/29")).len(), 6);
    assert_eq!(pool("0.0.0.0/0").usage().size, (1 << 32) - 2);
}

// case: ipam D3
#[test]
fn a_named_address_is_given_once_and_only_from_inside() {
    let mut pool = pool("10.66.1.16/28");
    pool.allocate(ip("10.66.1.20"), "a", at(0)).unwrap();
    assert_eq!(
        pool.allocate(ip("10.66.1.20"), "b", at(0)),
        Err(AddressError::AlreadyAllocated { address: ip("10.66.1.20"), owner: "a".to_owned() })
    );
    for outside in ["10.66.2.5", "10.66.1.16", "10.66.1.31", "fd00::1", "::10.66.1.20"] {
        let error = pool.allocate(ip(outside), "b", at(0)).unwrap_err();
        assert!(matches!(error, AddressError::OutOfRange { .. }), "{error}");
    }
    let error = pool.allocate(ip("10.66.2.5"), "b", at(0)).unwrap_err().to_string();
    assert!(error.contains("10.66.1.17 to 10.66.1.30"), "{error}");
}

// case: ipam D4
#[test]
fn an_address_of_the_node_is_never_drawn_and_a_request_for_it_names_what_it_is_kept_for() {
    let mut pool = pool("10.66.1.16/28");
    pool.exclude(ip("10.66.1.20"), "node-ip").unwrap();
    // Elsewhere it has no effect, and repeating it changes nothing.
    pool.exclude(ip("10.66.9.9"), "node-ip").unwrap();
    pool.exclude(ip("10.66.1.20"), "node-ip").unwrap();
    assert_eq!(
        pool.exclude(ip("10.66.1.20"), "router"),
        Err(AddressError::Excluded { address: ip("10.66.1.20"), owner: "node-ip".to_owned() })
    );
    pool.allocate_next("router", at(0), 3).unwrap();
    let error = pool.allocate(ip("10.66.1.20"), "pod", at(0)).unwrap_err();
    assert_eq!(error, AddressError::Excluded { address: ip("10.66.1.20"), owner: "node-ip".to_owned() });
    assert!(error.to_string().contains("node-ip"));
    let given = drain(&mut pool);
    assert_eq!(given.len(), 12);
    assert!(!given.contains(&ip("10.66.1.20")));
    assert_eq!(pool.usage(), Usage { size: 14, used: 13, reserved: 1, quarantined: 0 });
}

#[test]
fn the_parts_of_other_networks_are_not_drawn_and_what_is_held_in_them_stays() {
    let net = |text: &str| text.parse().unwrap();
    let mut pool = pool("10.66.1.0/26");
    pool.allocate(ip("10.66.1.20"), "pod", at(0)).unwrap();
    // Touching, overlapping, at the end, and outside.
    for part in ["10.66.1.16/29", "10.66.1.20/30", "10.66.1.24/29", "10.66.1.60/30", "10.66.2.0/24", "fd00::/64"] {
        pool.exclude_net(&net(part), "docker0");
    }
    assert_eq!(pool.usage(), Usage { size: 62, used: 1, reserved: 15 + 3, quarantined: 0 });
    assert!(matches!(
        pool.allocate(ip("10.66.1.31"), "pod", at(0)),
        Err(AddressError::Excluded { owner, .. }) if owner == "docker0"
    ));
    pool.release(ip("10.66.1.20"), "pod", at(0), at(100)).unwrap();
    let given = drain(&mut pool);
    assert_eq!(given.len(), 62 - 16 - 3);
    assert!(given.iter().all(|address| !matches!(address, IpAddr::V4(ip) if (16..32).contains(&ip.octets()[3]))));
    assert!(!given.contains(&ip("10.66.1.61")));
}

#[test]
fn released_addresses_are_quarantined_and_reallocated_in_order_if_no_other_is_free() {
    let mut pool = pool("10.0.0.0/29");
    for last in 1..=6 {
        pool.allocate(ip(&format!("10.0.0.{last}")), "a", at(0)).unwrap();
    }
    assert!(pool.release(ip("10.0.0.1"), "another", at(1), at(60)).is_err());
    for (second, last) in [(1, 4), (2, 2), (3, 5)] {
        pool.release(ip(&format!("10.0.0.{last}")), "a", at(second), at(second + 60)).unwrap();
    }
    assert!(pool.release(ip("10.0.0.4"), "a", at(4), at(64)).is_err(), "released already");
    assert_eq!(pool.usage(), Usage { size: 6, used: 3, reserved: 0, quarantined: 3 });
    assert_eq!(
        pool.allocate(ip("10.0.0.4"), "b", at(5)),
        Err(AddressError::InQuarantine { address: ip("10.0.0.4"), until: at(61) })
    );
    let given: Vec<_> = (0..3).map(|draw| pool.allocate_next("b", at(5), draw).unwrap()).collect();
    assert_eq!(given, [ip("10.0.0.4"), ip("10.0.0.2"), ip("10.0.0.5")]);
    assert!(pool.allocate_next("b", at(5), 0).is_err());
    pool.release(ip("10.0.0.4"), "b", at(6), at(66)).unwrap();
    assert!(pool.allocate(ip("10.0.0.4"), "c", at(65)).is_err());
    assert!(pool.allocate(ip("10.0.0.4"), "c", at(66)).is_ok());
}

#[test]
fn a_free_address_is_preferred_to_a_quarantined_one_for_any_draw() {
    for draw in 0..50 {
        let mut pool = pool("10.0.0.0/29");
        for last in [2, 3, 5] {
            assert!(pool.restore_quarantine(ip(&format!("10.0.0.{last}")), at(0), at(60)));
        }
        assert!(!pool.restore_quarantine(ip("10.0.9.9"), at(0), at(60)));
        for _ in 0..3 {
            let address = pool.allocate_next("a", at(1), draw).unwrap();
            assert!([1, 4, 6].map(|last| ip(&format!("10.0.0.{last}"))).contains(&address), "{address}");
        }
    }
}

#[test]
fn draws_spread_over_the_whole_range() {
    let firsts: BTreeSet<IpAddr> =
        (0..6).map(|draw| pool("10.0.0.0/29").allocate_next("a", at(0), draw).unwrap()).collect();
    assert_eq!(firsts.len(), 6);
}

// Two nodes list one block.
#[test]
fn a_block_that_another_node_lists_is_detected() {
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let own = net("10.0.1.0/24");
    let (wider, other) = (net("10.0.0.0/16"), net("10.0.2.0/24"));
    assert_eq!(contested(&own, "me", [("me", own), ("b", other)]), None);
    let found = contested(&own, "me", [("me", own), ("b", other), ("c", wider)]).unwrap();
    assert_eq!((found.node.as_str(), found.other), ("c", wider));
    assert!(found.to_string().contains("10.0.1.0/24") && found.to_string().contains("CiliumNode c"));
}

proptest! {
    #[test]
    fn an_address_has_one_owner_and_numbers_add_up(
        steps in proptest::collection::vec((0_u8..4, any::<u64>(), 0_u8..40), 1..200),
        prefix in 26_u8..=32,
    ) {
        let mut pool = PodCidr::new(format!("10.1.2.64/{prefix}").parse().unwrap());
        let mut held: BTreeSet<IpAddr> = BTreeSet::new();
        let mut now = 0;
        for (kind, draw, last) in steps {
            now += 1;
            let named = ip(&format!("10.1.2.{}", 64 + last));
            match kind {
                0 | 1 => match pool.allocate_next("a", at(now), draw) {
                    Ok(address) => {
                        prop_assert!(pool.usable(address));
                        prop_assert!(held.insert(address));
                    }
                    Err(_) => prop_assert_eq!(held.len() as u64, pool.usage().size),
                },
                2 => if pool.allocate(named, "a", at(now)).is_ok() {
                    prop_assert!(held.insert(named));
                },
                _ => prop_assert_eq!(pool.release(named, "a", at(now), at(now + 9)).is_ok(), held.remove(&named)),
            }
            let usage = pool.usage();
            prop_assert_eq!(usage.used, held.len() as u64);
            prop_assert_eq!(usage.free() + usage.used + usage.quarantined, usage.size);
        }
    }
}
