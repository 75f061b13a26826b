use super::*;
use proptest::prelude::*;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn carved(cidrs: &[&str], block_prefix: u8) -> BlockSet<String> {
    let carve = |text: &&str| Carving::new(net(text), block_prefix).unwrap();
    BlockSet::new(cidrs.iter().map(carve).collect()).unwrap()
}

fn take(set: &mut BlockSet<String>) -> Option<String> {
    set.take("owner".to_owned(), &[]).ok().map(|block| block.net.to_string())
}

fn release_at_once(set: &mut BlockSet<String>, block: &Block<String>) {
    set.release(block, at(0), at(0)).unwrap();
    set.expire(at(0));
}

// case: ipam A1
#[test]
fn a_set_is_exhausted_in_ascending_order_and_then_reports_its_counts() {
    let mut set = carved(&["172.22.0.0/20"], 26);
    let blocks: Vec<IpNet> = (0..64).map(|_| set.take("n".to_owned(), &[]).unwrap().net).collect();
    assert!(blocks.is_sorted());
    assert_eq!((blocks[0], blocks[63]), (net("172.22.0.0/26"), net("172.22.15.192/26")));
    let error = set.take("n".to_owned(), &[]).unwrap_err();
    assert_eq!(error, Exhausted(Counts { total: 64, held: 64, quarantined: 0, kept_back: 0 }));
    assert!(error.to_string().contains("64 of 64 held"));
}

// case: ipam A2
#[test]
fn a_released_block_is_reused_last() {
    let mut set = carved(&["10.77.0.0/22"], 24);
    let first = set.take("a".to_owned(), &[]).unwrap();
    take(&mut set);
    release_at_once(&mut set, &first);
    let next: Vec<_> = (0..3).filter_map(|_| take(&mut set)).collect();
    assert_eq!(next, ["10.77.2.0/24", "10.77.3.0/24", "10.77.0.0/24"]);
    assert_eq!(take(&mut set), None);
}

// case: ipam A3
#[test]
fn a_claimed_block_is_not_allocated_and_claims_do_not_move_the_cursor() {
    let mut set = carved(&["10.77.0.0/22"], 24);
    set.claim(&[net("10.77.2.0/24")], &"claimant".to_owned()).unwrap();
    let next: Vec<_> = (0..4).map(|_| take(&mut set)).collect();
    let expected = ["10.77.0.0/24", "10.77.1.0/24", "10.77.3.0/24"].map(|text| Some(text.to_owned()));
    assert_eq!(next[..3], expected);
    assert_eq!(next[3], None);
}

// case: ipam A4
#[test]
fn claiming_twice_counts_once_and_releasing_once_frees() {
    let mut set = carved(&["10.77.0.0/22"], 24);
    let claim = [net("10.77.2.0/24")];
    let first = set.claim(&claim, &"a".to_owned()).unwrap();
    assert_eq!(set.claim(&claim, &"a".to_owned()).unwrap(), first);
    assert_eq!((set.counts(&[]).held, set.counts(&[]).free()), (1, 3));
    release_at_once(&mut set, &first[0]);
    assert_eq!((set.counts(&[]).held, set.counts(&[]).free()), (0, 4));
    assert!(set.claim(&claim, &"b".to_owned()).is_ok());
    // The proof of the first allocation is stale, for the same owner too.
    assert_eq!(set.release(&first[0], at(0), at(0)), Err(NotHeld { net: claim[0], generation: first[0].generation }));
    assert_eq!(set.owner(&claim[0]), Some(&"b".to_owned()));
}

// case: ipam A6
#[test]
fn ipv6_blocks_are_counted_and_the_last_is_right() {
    let mut set = carved(&["fd4a:7::/56"], 64);
    let blocks: Vec<_> = std::iter::from_fn(|| take(&mut set)).collect();
    assert_eq!(blocks.len(), 256);
    assert_eq!((blocks[0].as_str(), blocks[255].as_str()), ("fd4a:7::/64", "fd4a:7:0:ff::/64"));
}

// case: ipam A7, A9
#[test]
fn what_cannot_be_carved_is_refused() {
    assert_eq!(
        Carving::new(net("fd4a::/40"), 60),
        Err(CarvingError::TooManyBlocks { cidr: net("fd4a::/40"), block_prefix: 60 })
    );
    assert!(Carving::new(net("fd4a::/40"), 56).is_ok());
    assert_eq!(
        Carving::new(net("10.9.0.0/24"), 22),
        Err(CarvingError::BlockLargerThanCidr { cidr: net("10.9.0.0/24"), block_prefix: 22 })
    );
    assert!(matches!(Carving::new(net("10.9.0.0/24"), 33), Err(CarvingError::PrefixTooLong { .. })));
    assert!(matches!(Carving::new(net("fd4a::/120"), 129), Err(CarvingError::PrefixTooLong { .. })));
    for extreme in ["0.0.0.0/0", "::/0"] {
        let carving = Carving::new(net(extreme), 0).unwrap();
        assert_eq!((carving.blocks(), carving.block(0), carving.block(1)), (1, Some(net(extreme)), None));
    }
    let single = Carving::new(net("255.255.255.255/32"), 32).unwrap();
    assert_eq!(single.block(0), Some(net("255.255.255.255/32")));
}

// case: ipam A11, A12
#[test]
fn a_claim_must_be_exactly_one_aligned_block() {
    let mut set = carved(&["10.77.0.0/22"], 24);
    set.take("a".to_owned(), &[]).unwrap();
    let before = set.clone();
    let mut claim = |text: &str| set.claim(&[net(text)], &"b".to_owned()).unwrap_err();
    let pool = || "10.77.0.0/22 in blocks of /24".to_owned();
    for text in ["10.0.0.0/8", "10.77.0.0/22", "10.77.2.0/23", "10.77.2.0/25", "10.77.2.9/24"] {
        assert_eq!(claim(text), ClaimError::NotABlock { net: net(text), pool: pool() });
    }
    for text in ["10.78.0.0/24", "fd00::/64"] {
        assert_eq!(claim(text), ClaimError::OutOfRange { net: net(text), pool: pool() });
    }
    assert_eq!(
        claim("10.77.0.0/24"),
        ClaimError::Held { net: net("10.77.0.0/24"), held: net("10.77.0.0/24"), owner: "a".to_owned() }
    );
    // All or nothing.
    let both = set.claim(&[net("10.77.2.0/24"), net("10.77.0.0/24")], &"b".to_owned());
    assert!(matches!(both, Err(ClaimError::Held { .. })));
    assert_eq!(set, before);
}

// case: ipam A13
#[test]
fn overlapping_elements_are_refused_and_both_named() {
    let carve = |text: &str| Carving::new(net(text), 24).unwrap();
    let error = BlockSet::<String>::new(vec![carve("10.50.0.0/16"), carve("10.9.0.0/16"), carve("10.50.128.0/17")])
        .unwrap_err();
    assert_eq!((error.first, error.second), (net("10.50.0.0/16"), net("10.50.128.0/17")));
    assert!(error.to_string().contains("10.50.0.0/16 and 10.50.128.0/17"));
}

#[test]
fn a_huge_set_costs_what_is_held_and_not_what_is_free() {
    for (cidr, prefix, blocks) in [("10.0.0.0/8", 24, 65_536), ("fd00::/104", 120, 65_536), ("10.0.0.0/8", 30, 1 << 22)]
    {
        let mut set = carved(&[cidr], prefix);
        assert_eq!(set.counts(&[]).total, blocks);
        take(&mut set);
        assert_eq!(set.intervals.len(), 1);
        assert_eq!(set.counts(&[]).free(), blocks - 1);
    }
}

#[test]
fn a_released_block_is_quarantined_and_only_its_last_owner_may_claim_it() {
    let mut set = carved(&["10.77.0.0/23"], 24);
    let block = set.take("a".to_owned(), &[]).unwrap();
    set.release(&block, at(10), at(70)).unwrap();
    assert_eq!(set.counts(&[]), Counts { total: 2, held: 0, quarantined: 1, kept_back: 0 });
    assert_eq!(take(&mut set).as_deref(), Some("10.77.1.0/24"));
    assert_eq!(take(&mut set), None);
    assert!(matches!(set.claim(&[block.net], &"b".to_owned()), Err(ClaimError::InQuarantine { .. })));
    set.expire(at(69));
    assert_eq!(take(&mut set), None);
    let mut other = set.clone();
    let again = other.claim(&[block.net], &"a".to_owned()).unwrap();
    assert!(again[0].generation > block.generation);
    set.expire(at(70));
    assert_eq!(take(&mut set).as_deref(), Some("10.77.0.0/24"));
}

#[test]
fn a_recorded_quarantine_does_not_replace_an_owner() {
    let mut set = carved(&["10.77.0.0/23"], 24);
    let entry = |text: &str| Quarantined { net: net(text), owner: "a".to_owned(), since: at(0), until: at(60) };
    set.claim(&[net("10.77.0.0/24")], &"b".to_owned()).unwrap();
    assert!(!set.restore_quarantine(entry("10.77.0.0/24")));
    assert!(set.restore_quarantine(entry("10.77.1.0/24")));
    assert!(!set.restore_quarantine(entry("10.77.1.0/25")));
    assert_eq!(set.quarantined().collect::<Vec<_>>(), [entry("10.77.1.0/24")]);
}

#[test]
fn blocks_of_the_former_size_are_accepted_and_skipped() {
    let mut set = carved(&["10.77.0.0/22"], 24);
    set.honour(vec![Carving::new(net("10.77.0.0/22"), 26).unwrap()]);
    let owner = "old".to_owned();
    set.claim(&[net("10.77.0.64/26"), net("10.77.0.128/26"), net("10.77.2.0/26")], &owner).unwrap();
    assert_eq!(set.counts(&[]), Counts { total: 4, held: 2, quarantined: 0, kept_back: 0 });
    assert_eq!(take(&mut set).as_deref(), Some("10.77.1.0/24"));
    // One block overlaps a legacy claim in part, the other is listed by another node.
    assert_eq!(set.take(owner.clone(), &[net("10.77.3.128/25")]), Err(Exhausted(set.counts(&[net("10.77.3.128/25")]))));
    assert_eq!(set.counts(&[net("10.77.3.128/25")]).kept_back, 1);
    assert_eq!(take(&mut set).as_deref(), Some("10.77.3.0/24"));
    let overlap = set.claim(&[net("10.77.2.0/24")], &owner);
    assert!(matches!(overlap, Err(ClaimError::Held { .. })), "a larger block over one's own smaller one is no claim");
    let mut fresh = carved(&["10.77.0.0/22"], 24);
    fresh.honour(vec![Carving::new(net("10.77.0.0/22"), 26).unwrap()]);
    let both = fresh.claim(&[net("10.77.0.0/24"), net("10.77.0.64/26")], &owner);
    assert_eq!(both, Err(ClaimError::Overlapping { net: net("10.77.0.64/26"), other: net("10.77.0.0/24") }));
    assert_eq!(fresh.held().count(), 0);
}

proptest! {
    /// Against a model that keeps one entry for each block.
    #[test]
    fn blocks_are_disjoint_and_inside_and_counted_right(
        steps in proptest::collection::vec((0_u8..6, 0_u64..24, 0_u64..4), 1..120),
    ) {
        let cidrs = ["10.0.0.0/28", "10.9.0.0/29"];
        let mut set = carved(&cidrs, 31);
        let all: Vec<IpNet> = set.carvings().iter().flat_map(|c| (0..c.blocks()).filter_map(|i| c.block(i))).collect();
        prop_assert_eq!(all.len(), 12);
        let mut model: BTreeMap<IpNet, (String, Block<String>)> = BTreeMap::new();
        let mut resting: BTreeMap<IpNet, (String, i64)> = BTreeMap::new();
        let mut now = 0;
        for (kind, pick, who) in steps {
            let owner = format!("o{who}");
            let picked = all[pick as usize % all.len()];
            match kind {
                0 | 1 => match set.take(owner.clone(), &[]) {
                    Ok(block) => {
                        prop_assert!(all.contains(&block.net));
                        prop_assert!(!model.contains_key(&block.net) && !resting.contains_key(&block.net));
                        model.insert(block.net, (owner, block));
                    }
                    Err(Exhausted(counts)) => prop_assert_eq!(counts.free(), 0),
                },
                2 => {
                    let allowed = model.get(&picked).is_none_or(|(holder, _)| *holder == owner)
                        && resting.get(&picked).is_none_or(|(former, _)| *former == owner);
                    let claimed = set.claim(&[picked], &owner);
                    prop_assert_eq!(claimed.is_ok(), allowed);
                    if let Ok(mut blocks) = claimed {
                        resting.remove(&picked);
                        model.insert(picked, (owner, blocks.remove(0)));
                    }
                }
                3 | 4 => if let Some((owner, block)) = model.remove(&picked) {
                    let until = now + 20;
                    prop_assert_eq!(set.release(&block, at(now), at(until)), Ok(()));
                    prop_assert!(set.release(&block, at(now), at(until)).is_err());
                    resting.insert(picked, (owner, until));
                },
                _ => {
                    now += 7;
                    set.expire(at(now));
                    resting.retain(|_, (_, until)| *until > now);
                }
            }
            let counts = set.counts(&[]);
            prop_assert_eq!(counts.held, model.len() as u64);
            prop_assert_eq!(counts.quarantined, resting.len() as u64);
            prop_assert_eq!(counts.free(), 12 - counts.held - counts.quarantined);
            prop_assert!(set.held().map(|block| block.net).eq(model.keys().copied()));
        }
    }
}
