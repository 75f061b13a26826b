use super::plan::{parse, plan_within};
use super::*;
use crate::ip::block::BlockSet;
use crate::ip::{Family, overlaps};
use crate::ipam::cluster::Node;
use crate::ipam::cluster::records::{LIMIT, PoolRecord, Records};
use crate::ipam::later;
use crate::ipam::verdict::{Code, Standing};
use ipnet::IpNet;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

fn family(cidrs: &[&str], mask_size: u8) -> FamilySettings {
    FamilySettings { enabled: true, cidrs: cidrs.iter().map(|text| net(text)).collect(), mask_size }
}

fn off() -> FamilySettings {
    FamilySettings { enabled: false, cidrs: Vec::new(), mask_size: 24 }
}

fn pool(cidrs: &[&str], mask_size: u8) -> Settings {
    Settings::new(family(cidrs, mask_size), off(), BLOCK_QUARANTINE).unwrap().0
}

fn dual(ipv4: FamilySettings, ipv6: FamilySettings) -> Settings {
    Settings::new(ipv4, ipv6, BLOCK_QUARANTINE).unwrap().0
}

fn node(name: &str, created: i64, pod_cidrs: &[&str]) -> Node {
    Node {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        created: at(created),
        deleting: false,
        pod_cidrs: pod_cidrs.iter().map(|text| (*text).to_owned()).collect(),
        claim: None,
        error: String::new(),
        annotation: None,
    }
}

/// A cluster and a leader, which applies plans to the nodes as the operator does.
#[derive(Debug, Clone)]
struct Cluster {
    settings: Settings,
    nodes: Vec<Node>,
    records: Records,
    ledger: Ledger,
    now: Timestamp,
}

impl Cluster {
    fn new(settings: Settings, nodes: Vec<Node>) -> Self {
        let ledger = settings.take_over(&RecordSet::new(), at(0));
        Self { settings, nodes, records: Records::default(), ledger, now: at(0) }
    }

    fn plan(&self) -> Plan<Ledger> {
        plan(&Input { nodes: self.nodes.clone(), synced: true, settled: true }, self.ledger.clone(), self.now)
    }

    /// Plans and applies; returns the names of the written nodes.
    fn round(&mut self) -> Vec<String> {
        let plan = self.plan();
        let written = plan.nodes.keys().cloned().collect();
        self.apply(plan);
        written
    }

    fn apply(&mut self, plan: Plan<Ledger>) {
        for (name, change) in &plan.nodes {
            let node = self.nodes.iter_mut().find(|node| node.name == *name).unwrap();
            assert_eq!(node.uid, change.uid);
            if let Some(nets) = &change.pod_cidrs {
                node.pod_cidrs = nets.iter().map(ToString::to_string).collect();
            }
            node.error = change.verdict.as_ref().map(|verdict| verdict.text.clone()).unwrap_or_default();
            node.annotation.clone_from(&change.annotation);
            // The verdict as seen by an agent of this release, and of the previous one.
            let read = Standing::read(node.annotation.as_deref(), &node.pod_cidrs, Some(&node.error));
            assert_eq!(read.verdict, change.verdict);
            if read.verdict.as_ref().is_none_or(|verdict| verdict.code != Code::RecordsFull) {
                assert_eq!(read, Standing::read(None, &node.pod_cidrs, Some(&node.error)));
            }
            assert_eq!(read.refusal().is_some(), is_refusal_to_the_release_before(&node.error));
            if change.accepted {
                node.claim = None;
            }
        }
        self.records = plan.records.unwrap().remove(DEFAULT_POOL).unwrap();
        self.ledger = plan.ledger;
    }

    /// Another process becomes leader, with the written state only.
    fn new_leader(&mut self) {
        let data = self.records.to_data(&BTreeMap::new()).unwrap();
        let records = Records::from_data(&data).unwrap();
        assert_eq!(records, self.records);
        self.ledger = self.settings.take_over(&BTreeMap::from([(DEFAULT_POOL.to_owned(), records)]), self.now);
    }

    fn set(&self, family: Family) -> &BlockSet<String> {
        self.ledger.set(DEFAULT_POOL, family).unwrap()
    }

    fn get(&self, name: &str) -> &Node {
        self.nodes.iter().find(|node| node.name == name).unwrap()
    }

    fn get_mut(&mut self, name: &str) -> &mut Node {
        self.nodes.iter_mut().find(|node| node.name == name).unwrap()
    }

    fn code(&self, name: &str) -> Option<Code> {
        let node = self.get(name);
        let standing = Standing::read(node.annotation.as_deref(), &node.pod_cidrs, Some(&node.error));
        standing.verdict.map(|verdict| verdict.code)
    }

    fn cidrs(&self, name: &str) -> Vec<&str> {
        self.get(name).pod_cidrs.iter().map(String::as_str).collect()
    }
}

/// How agents of the previous release recognise a refusal.
fn is_refusal_to_the_release_before(error: &str) -> bool {
    let others = [
        "is kept, but is not a block of the pool as configured now",
        "pod CIDR yet: nobody led for a while",
        "the pool is full",
    ];
    !error.is_empty() && !others.iter().any(|other| error.contains(other))
}

/// The five nodes of B4, four of them served.
fn five_nodes() -> Cluster {
    let nodes = (1..=5).map(|index| node(&format!("n{index}"), index, &[])).collect();
    let mut cluster = Cluster::new(pool(&["10.33.0.0/25", "10.34.0.0/25"], 26), nodes);
    cluster.round();
    cluster
}

// case: ipam B1
#[test]
fn a_fresh_node_gets_the_first_block_and_no_error() {
    let mut cluster = Cluster::new(pool(&["10.140.0.0/17"], 25), vec![node("a", 0, &[])]);
    assert_eq!(cluster.round(), ["a"]);
    assert_eq!(cluster.cidrs("a"), ["10.140.0.0/25"]);
    assert_eq!(cluster.get("a").error, "");
    assert!(cluster.round().is_empty());
}

// case: ipam B2
#[test]
fn a_claim_is_honoured_before_anything_is_given_in_whatever_order_nodes_are_listed() {
    let mut others: Vec<Node> = (0..20).map(|index| node(&format!("o{index}"), 100 + index, &[])).collect();
    others.extend([node("q", 0, &[]), node("r", 50, &["10.131.4.0/24"])]);
    let mut results = BTreeSet::new();
    for shuffle in 0..50_usize {
        let mut nodes = others.clone();
        nodes.rotate_left(shuffle % others.len());
        if shuffle % 2 == 1 {
            nodes.reverse();
        }
        nodes.swap(shuffle % 7, 7 + shuffle % 13);
        let mut cluster = Cluster::new(pool(&["10.131.0.0/16"], 24), nodes);
        cluster.round();
        assert_eq!(cluster.cidrs("q"), ["10.131.0.0/24"]);
        assert_eq!(cluster.cidrs("r"), ["10.131.4.0/24"]);
        cluster.nodes.sort_by(|a, b| a.name.cmp(&b.name));
        results.insert(format!("{:?}", cluster.nodes));
    }
    assert_eq!(results.len(), 1);
}

#[test]
fn nothing_is_planned_before_the_list_is_complete() {
    let cluster = Cluster::new(pool(&["10.131.0.0/16"], 24), vec![node("q", 0, &[])]);
    let input = Input { nodes: cluster.nodes.clone(), synced: false, settled: true };
    let plan = plan(&input, cluster.ledger.clone(), at(0));
    assert!(plan.nodes.is_empty());
    assert_eq!(plan.records, None);
    assert_eq!(plan.ledger, cluster.ledger);
}

// case: ipam B3
#[test]
fn with_one_family_full_nothing_of_the_other_is_booked() {
    let settings = dual(family(&["10.40.0.0/24"], 26), family(&["fd40::/127"], 128));
    let nodes =
        vec![node("a", 0, &["10.40.0.192/26", "fd40::/128"]), node("b", 1, &["fd40::1/128"]), node("c", 2, &[])];
    let mut cluster = Cluster::new(settings, nodes);
    cluster.round();
    // One family is listed: the other one is added in the same step.
    assert_eq!(cluster.cidrs("b"), ["10.40.0.0/26", "fd40::1/128"]);
    assert!(cluster.cidrs("c").is_empty());
    assert!(cluster.get("c").error.contains("IPv6") && cluster.get("c").error.contains("full"));
    assert_eq!(cluster.ledger.blocks("c"), None);
    // The IPv4 block that c did not get is still the next one.
    for _ in 0..3 {
        assert!(cluster.round().is_empty());
    }
    assert_eq!(cluster.set(Family::Ipv4).peek(&[]), Ok(net("10.40.0.64/26")));
}

// case: ipam B4
#[test]
fn the_first_list_element_with_a_free_block_gives_it() {
    let cluster = five_nodes();
    assert_eq!(cluster.cidrs("n1"), ["10.33.0.0/26"]);
    assert_eq!(cluster.cidrs("n2"), ["10.33.0.64/26"]);
    assert_eq!(cluster.cidrs("n3"), ["10.34.0.0/26"]);
    assert_eq!(cluster.cidrs("n4"), ["10.34.0.64/26"]);
    assert!(cluster.cidrs("n5").is_empty());
    assert!(cluster.get("n5").error.contains("full"), "{}", cluster.get("n5").error);
    assert_eq!(cluster.code("n5"), Some(Code::PoolExhausted));
}

#[test]
fn a_verdict_is_written_again_for_another_list_though_its_text_is_the_same() {
    let mut cluster = five_nodes();
    cluster.get_mut("n1").pod_cidrs = vec!["10.34.0.64/26".to_owned()];
    cluster.round();
    let (error, annotation) = (cluster.get("n1").error.clone(), cluster.get("n1").annotation.clone());
    cluster.get_mut("n1").pod_cidrs.push("10.34.0.0/26".to_owned());
    assert_eq!(cluster.code("n1"), None, "the judged list is another one");
    assert_eq!(cluster.round(), ["n1"]);
    assert_eq!((cluster.code("n1"), &cluster.get("n1").error), (Some(Code::Conflict), &error));
    assert_ne!(cluster.get("n1").annotation, annotation);
    // A text of an operator of the previous release gets its annotation.
    cluster.get_mut("n1").annotation = None;
    assert_eq!(cluster.round(), ["n1"]);
    // Once the conflict is resolved, both are removed.
    cluster.get_mut("n1").pod_cidrs = vec!["10.33.0.0/26".to_owned()];
    cluster.round();
    assert_eq!((cluster.get("n1").annotation.as_deref(), cluster.get("n1").error.as_str()), (None, ""));
}

// case: ipam B5
#[test]
fn an_appended_element_serves_the_node_that_waited_and_touches_no_other() {
    let mut cluster = five_nodes();
    cluster.settings = pool(&["10.33.0.0/25", "10.34.0.0/25", "10.35.0.0/25"], 26);
    cluster.new_leader();
    assert_eq!(cluster.round(), ["n5"]);
    assert_eq!(cluster.cidrs("n5"), ["10.35.0.0/26"]);
    assert_eq!(cluster.get("n5").error, "");
}

// case: ipam B8
#[test]
fn the_later_of_two_claims_gets_an_error_and_keeps_its_spec() {
    let mut cluster = five_nodes();
    // Created before n4, which does not matter to a leader that knows n4.
    cluster.nodes.push(node("n0", -5, &["10.34.0.64/26"]));
    let n4 = cluster.get("n4").clone();
    assert_eq!(cluster.round(), ["n0"]);
    assert_eq!(*cluster.get("n4"), n4);
    assert_eq!(cluster.cidrs("n0"), ["10.34.0.64/26"]);
    let error = cluster.get("n0").error.clone();
    assert!(error.contains("10.34.0.64/26 is already allocated") && error.contains("n4"), "{error}");
    // A new leader decides the same, although it does not know which was first.
    cluster.new_leader();
    assert!(cluster.round().is_empty());
    assert_eq!(cluster.ledger.blocks("n4"), Some(vec![net("10.34.0.64/26")]));
}

#[test]
fn a_leader_without_history_gives_a_double_claim_to_the_node_created_first_then_to_the_smaller_uid() {
    for (a_created, b_created, winner) in [(1, 2, "a"), (2, 1, "b"), (1, 1, "a")] {
        for reversed in [false, true] {
            let mut nodes = vec![node("a", a_created, &["10.33.0.0/26"]), node("b", b_created, &["10.33.0.0/26"])];
            if reversed {
                nodes.reverse();
            }
            let mut cluster = Cluster::new(pool(&["10.33.0.0/25"], 26), nodes);
            assert_eq!(cluster.round().len(), 1);
            assert_eq!(cluster.get(winner).error, "", "{a_created} {b_created}");
            assert_eq!(cluster.ledger.blocks(winner), Some(vec![net("10.33.0.0/26")]));
        }
    }
}

// case: ipam B9
#[test]
fn a_node_that_lists_another_block_than_its_own_gets_a_verdict_and_the_ledger_does_not_change() {
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("n1", 1, &[]), node("n2", 2, &[])]);
    cluster.round();
    cluster.get_mut("n1").pod_cidrs = vec!["10.33.0.128/26".to_owned()];
    assert_eq!(cluster.round(), ["n1"]);
    assert!(cluster.get("n1").error.contains("conflict"), "{}", cluster.get("n1").error);
    assert_eq!(cluster.cidrs("n1"), ["10.33.0.128/26"]);
    assert_eq!(cluster.ledger.blocks("n1"), Some(vec![net("10.33.0.0/26")]));
    // Neither of the two blocks is assigned to another node.
    cluster.nodes.extend([node("n3", 3, &[]), node("n4", 4, &[])]);
    cluster.round();
    assert_eq!(cluster.cidrs("n3"), ["10.33.0.192/26"]);
    assert!(cluster.get("n4").error.contains("full"));
    // Corrected: the verdict is withdrawn, and the wrongly listed block is quarantined, since pods may have addresses
    // of it.
    cluster.get_mut("n1").pod_cidrs = vec!["10.33.0.0/26".to_owned()];
    cluster.round();
    assert_eq!(cluster.get("n1").error, "");
    assert!(cluster.get("n4").error.contains("full"));
    cluster.now = at(BLOCK_QUARANTINE.as_secs() as i64);
    cluster.round();
    assert_eq!(cluster.cidrs("n4"), ["10.33.0.128/26"]);
}

// case: ipam B11
#[test]
fn a_restarted_operator_books_what_nodes_list_and_writes_nothing() {
    let mut cluster = five_nodes();
    for _ in 0..3 {
        cluster.new_leader();
        assert!(cluster.round().is_empty());
    }
    assert_eq!(cluster.ledger.blocks("n3"), Some(vec![net("10.34.0.0/26")]));
}

// case: ipam B12
#[test]
fn text_that_is_no_cidr_is_an_error_of_that_node_alone() {
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("a", 1, &["10.33.0/26"]), node("b", 2, &[])]);
    cluster.round();
    assert!(cluster.get("a").error.contains("\"10.33.0/26\""), "{}", cluster.get("a").error);
    assert_eq!(cluster.cidrs("a"), ["10.33.0/26"]);
    assert_eq!(cluster.cidrs("b"), ["10.33.0.0/26"]);
    assert!(cluster.round().is_empty());
}

// case: ipam B13
#[test]
fn a_list_for_a_family_that_is_off_and_none_for_one_that_is_on_are_refused() {
    let disabled = |mut settings: FamilySettings| {
        settings.enabled = false;
        settings
    };
    let ipv6 = || family(&["fd00::/104"], 120);
    let ipv4 = || family(&["10.0.0.0/8"], 24);
    let refused = |ipv4, ipv6| Settings::new(ipv4, ipv6, BLOCK_QUARANTINE).unwrap_err();
    assert_eq!(refused(disabled(ipv4()), ipv6()), [ConfigError::ListOfDisabledFamily { key: "ipv4" }]);
    assert_eq!(refused(family(&[], 24), disabled(family(&[], 120))), [ConfigError::EmptyList { key: "ipv4" }]);
    assert_eq!(refused(ipv4(), disabled(ipv6())), [ConfigError::ListOfDisabledFamily { key: "ipv6" }]);
    assert_eq!(refused(ipv4(), family(&[], 120)), [ConfigError::EmptyList { key: "ipv6" }]);
    assert_eq!(refused(off(), off()), [ConfigError::NoFamily]);
    assert!(Settings::new(ipv4(), ipv6(), BLOCK_QUARANTINE).is_ok());
}

// case: ipam A7, A9, A13
#[test]
fn pools_that_cannot_be_carved_are_refused_with_every_reason() {
    let refused = |settings: FamilySettings| -> Vec<String> {
        let errors = if settings.cidrs.iter().any(|net| Family::of_net(net) == Family::Ipv6) {
            Settings::new(off(), settings, BLOCK_QUARANTINE).unwrap_err()
        } else {
            Settings::new(settings, off(), BLOCK_QUARANTINE).unwrap_err()
        };
        errors.iter().map(ToString::to_string).collect()
    };
    let errors = refused(family(&["fd4a::/40"], 60));
    assert!(errors.len() == 1 && errors[0].contains("2^20") && errors[0].contains("2^16"), "{errors:?}");
    let errors = refused(family(&["10.9.0.0/24"], 22));
    assert!(errors.len() == 1 && errors[0].contains("/22 is larger than 10.9.0.0/24"), "{errors:?}");
    let errors = refused(family(&["10.50.0.0/16", "10.50.128.0/17"], 24));
    assert!(
        errors.len() == 1 && errors[0].contains("10.50.0.0/16") && errors[0].contains("10.50.128.0/17"),
        "{errors:?}"
    );
    let errors = refused(family(&["10.50.0.0/16", "10.50.0.0/16"], 24));
    assert_eq!(errors.len(), 1);
    assert_eq!(refused(family(&["10.50.0.0/28", "10.51.0.0/16"], 24)).len(), 1);
    // No room for a router and a pod.
    for mask_size in [31, 32] {
        let errors = refused(family(&["10.50.0.0/16"], mask_size));
        assert!(errors.len() == 1 && errors[0].contains("expected 30 or less"), "{errors:?}");
    }
    assert!(refused(family(&["10.50.0.0/16"], 33))[0].contains("32 bits"));
    let (_, warnings) = Settings::new(family(&["10.50.0.0/16"], 30), off(), BLOCK_QUARANTINE).unwrap();
    assert_eq!(warnings, [ConfigWarning::OnePodPerNode]);
    let (_, warnings) = Settings::new(family(&["10.50.3.1/16"], 24), off(), BLOCK_QUARANTINE).unwrap();
    assert_eq!(
        warnings,
        [ConfigWarning::HostBits { key: "ipv4", cidr: net("10.50.3.1/16"), used: net("10.50.0.0/16") }]
    );
    let mixed = Settings::new(family(&["10.50.0.0/16", "fd00::/104"], 24), off(), BLOCK_QUARANTINE).unwrap_err();
    assert_eq!(mixed, [ConfigError::OtherFamily { key: "ipv4", cidr: net("fd00::/104") }]);
}

// The planning part of B14 and B16; conflicts and the rate of passes are tested with an API server.
#[test]
fn three_hundred_nodes_get_distinct_blocks_with_one_write_each_and_a_lost_one_is_planned_again() {
    let nodes = (0..300).map(|index| node(&format!("n{index:03}"), index, &[])).collect();
    let mut cluster = Cluster::new(pool(&["10.0.0.0/8"], 24), nodes);
    let mut plan = cluster.plan();
    assert_eq!(plan.nodes.len(), 300);
    let blocks: BTreeSet<IpNet> = plan.nodes.values().flat_map(|node| node.pod_cidrs.clone().unwrap()).collect();
    assert_eq!(blocks.len(), 300);
    // The write of one node has a conflict: it is read again, and the same write is planned.
    let lost = plan.nodes.remove("n150").unwrap();
    cluster.apply(plan);
    cluster.get_mut("n150").error = "an older error".to_owned();
    let again = cluster.plan();
    assert_eq!(again.nodes.len(), 1);
    assert_eq!(again.nodes["n150"].pod_cidrs, lost.pod_cidrs);
    assert_eq!(again.nodes["n150"].verdict, None);
    cluster.apply(again);
    assert!(cluster.round().is_empty());
}

// case: ipam B17
#[test]
fn a_known_node_with_an_empty_spec_is_given_the_same_block_again() {
    let mut cluster = five_nodes();
    cluster.get_mut("n1").pod_cidrs.clear();
    assert_eq!(cluster.round(), ["n1"]);
    assert_eq!(cluster.cidrs("n1"), ["10.33.0.0/26"]);
}

// case: ipam B19
#[test]
fn deleting_an_unknown_node_has_no_effect() {
    let mut cluster = Cluster::new(pool(&["10.33.0.0/25"], 26), vec![node("a", 1, &["192.168.0.0/24"])]);
    cluster.round();
    assert!(cluster.get("a").error.contains("out of range"));
    let before = cluster.ledger.clone();
    cluster.nodes.clear();
    assert!(cluster.round().is_empty());
    assert_eq!(cluster.set(Family::Ipv4), before.set(DEFAULT_POOL, Family::Ipv4).unwrap());
    assert_eq!(cluster.ledger.nodes, before.nodes);
    assert_eq!(cluster.records, cluster.settings.take_over(&RecordSet::new(), at(0)).records()[DEFAULT_POOL]);
}

// case: ipam A11
#[test]
fn a_claim_on_the_whole_pool_is_refused_and_blocks_no_other_node() {
    let nodes = vec![node("a", 1, &["10.0.0.0/8"]), node("b", 2, &["10.33.0.0/25"]), node("c", 3, &[])];
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), nodes);
    cluster.round();
    assert!(cluster.get("a").error.contains("not one aligned block"), "{}", cluster.get("a").error);
    assert!(cluster.get("b").error.contains("not one aligned block"));
    // b lists two blocks that it does not own; pods may have addresses of them, so they are not assigned to c.
    assert_eq!(cluster.cidrs("c"), ["10.33.0.128/26"]);
}

#[test]
fn the_block_of_a_deleted_node_is_quarantined_and_another_leader_knows_it() {
    let mut cluster = five_nodes();
    cluster.nodes.retain(|node| node.name != "n2");
    assert!(cluster.round().is_empty());
    assert_eq!(cluster.records.quarantine.len(), 1);
    assert_eq!(cluster.records.quarantine[0].node, "n2");
    cluster.new_leader();
    cluster.now = at(BLOCK_QUARANTINE.as_secs() as i64 - 1);
    assert!(cluster.round().is_empty());
    assert!(cluster.get("n5").error.contains("full"));
    // Another node's claim on it is refused during the quarantine.
    cluster.nodes.push(node("n6", 6, &["10.33.0.64/26"]));
    cluster.round();
    assert!(cluster.get("n6").error.contains("quarantine"), "{}", cluster.get("n6").error);
    cluster.nodes.retain(|node| node.name != "n6");
    cluster.round();
    cluster.now = at(BLOCK_QUARANTINE.as_secs() as i64);
    assert_eq!(cluster.round(), ["n5"]);
    assert_eq!(cluster.cidrs("n5"), ["10.33.0.64/26"]);
    assert_eq!(cluster.get("n5").error, "");
    assert!(cluster.records.quarantine.is_empty());
}

#[test]
fn an_edited_object_is_no_claim_for_the_next_leader() {
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("n1", 1, &[])]);
    cluster.round();
    cluster.get_mut("n1").pod_cidrs = vec!["10.33.0.128/26".to_owned()];
    cluster.new_leader();
    cluster.nodes.push(node("n2", 2, &[]));
    cluster.round();
    assert!(cluster.get("n1").error.contains("was given 10.33.0.0/26"), "{}", cluster.get("n1").error);
    assert_eq!(cluster.cidrs("n2"), ["10.33.0.64/26"]);
}

#[test]
fn the_block_of_a_node_deleted_without_a_leader_is_quarantined() {
    let mut cluster = five_nodes();
    cluster.nodes.retain(|node| node.name != "n2");
    cluster.now = at(100);
    cluster.new_leader();
    cluster.round();
    assert!(cluster.get("n5").error.contains("full"));
    assert_eq!(cluster.records.quarantine[0].until, at(100 + BLOCK_QUARANTINE.as_secs() as i64));
}

#[test]
fn until_it_has_settled_a_node_gets_no_block_but_its_own() {
    let mut cluster = five_nodes();
    cluster.settings = pool(&["10.33.0.0/25", "10.34.0.0/25", "10.35.0.0/25"], 26);
    cluster.nodes.retain(|node| node.name != "n2");
    cluster.round();
    cluster.nodes.push(Node { uid: "uid-again".to_owned(), ..node("n2", 2, &[]) });
    cluster.new_leader();
    let planned = plan(
        &Input { nodes: cluster.nodes.clone(), synced: true, settled: false },
        cluster.ledger.clone(),
        cluster.now,
    );
    cluster.apply(planned);
    assert_eq!(cluster.cidrs("n2"), ["10.33.0.64/26"]);
    assert!(cluster.get("n5").error.contains("restored from a backup"), "{}", cluster.get("n5").error);
    cluster.round();
    assert_eq!(cluster.cidrs("n5"), ["10.35.0.0/26"]);
    assert_eq!(cluster.get("n5").error, "");
}

#[test]
fn records_from_a_backup_keep_what_was_recorded_since_unless_they_contradict() {
    let of = |blocks: &[(&str, &str)]| Records {
        blocks: blocks.iter().map(|(name, block)| ((*name).to_owned(), vec![net(block)])).collect(),
        ..Records::default()
    };
    let backup = of(&[("n1", "10.33.0.0/26"), ("n2", "10.33.0.64/26")]);
    let since = of(&[("n1", "10.33.0.0/26"), ("n3", "10.33.0.64/26"), ("n4", "10.33.0.128/26")]);
    let both = of(&[("n1", "10.33.0.0/26"), ("n2", "10.33.0.64/26"), ("n4", "10.33.0.128/26")]);
    assert_eq!(backup.adopt(&since), both);
}

#[test]
fn a_node_that_was_deleted_under_a_live_agent_gets_its_block_back() {
    // With its claim (the agent recreated the CiliumNode), and without one; with and without a plan in between.
    for claims in [true, false] {
        for seen_absent in [true, false] {
            let mut cluster = five_nodes();
            let mut again = cluster.get("n2").clone();
            again.uid = "uid-again".to_owned();
            if !claims {
                again.pod_cidrs.clear();
            }
            cluster.nodes.retain(|node| node.name != "n2");
            if seen_absent {
                cluster.round();
            }
            cluster.nodes.push(again);
            cluster.round();
            assert_eq!(cluster.cidrs("n2"), ["10.33.0.64/26"], "{claims} {seen_absent}");
            assert_eq!(cluster.get("n2").error, "");
            assert!(cluster.records.quarantine.is_empty());
        }
    }
}

#[test]
fn a_node_that_claims_its_block_and_never_saw_another_keeps_it() {
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("a", 0, &[])]);
    let planned = cluster.plan();
    assert_eq!(planned.nodes["a"].pod_cidrs, Some(vec![net("10.33.0.0/26")]));
    // Recorded, and not written: the agent was faster.
    cluster.records = planned.records.unwrap().remove(DEFAULT_POOL).unwrap();
    cluster.new_leader();
    let a = cluster.get_mut("a");
    (a.pod_cidrs, a.claim) = (vec!["10.33.0.128/26".into()], Some(net("10.33.0.128/26")));
    cluster.nodes.push(node("b", 1, &[]));
    cluster.round();
    assert_eq!((cluster.cidrs("a"), cluster.get("a").error.as_str()), (vec!["10.33.0.128/26"], ""));
    assert_eq!(cluster.records.blocks["a"], [net("10.33.0.128/26")]);
    // It is no claim any more.
    assert_eq!(cluster.get("a").claim, None);
    // The other one is quarantined: it may have been visible for a moment.
    assert_eq!(cluster.records.quarantine[0].cidr, net("10.33.0.0/26"));
    assert_eq!(cluster.cidrs("b"), ["10.33.0.64/26"]);
    // A claim beside the assigned block is a conflict, and so is a claim on another node's block.
    let b = cluster.get_mut("b");
    b.pod_cidrs.insert(0, "10.33.0.192/26".into());
    b.claim = Some(net("10.33.0.192/26"));
    cluster.round();
    assert!(cluster.get("b").error.contains("given 10.33.0.64/26"), "{}", cluster.get("b").error);
    let b = cluster.get_mut("b");
    (b.pod_cidrs, b.claim) = (vec!["10.33.0.128/26".into()], Some(net("10.33.0.128/26")));
    cluster.round();
    assert_eq!(cluster.code("b"), Some(Code::Conflict));
    assert_eq!(cluster.records.blocks["b"], [net("10.33.0.64/26")]);
}

#[test]
fn a_claim_beats_an_older_record_of_a_node_that_does_not_list_the_block() {
    // A backup: its records give n3 a block that n2 was given since. n3 is a new machine and serves nothing.
    let mut cluster =
        Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("n2", 0, &[]), node("n3", 1, &["10.33.0.64/26"])]);
    cluster.round();
    let n2 = cluster.get_mut("n2");
    (n2.pod_cidrs, n2.claim) = (vec!["10.33.0.64/26".into()], Some(net("10.33.0.64/26")));
    cluster.records.blocks.remove("n2");
    let n3 = cluster.get_mut("n3");
    n3.uid = "uid-again".to_owned();
    n3.pod_cidrs.clear();
    cluster.new_leader();
    let plan_unsettled = |cluster: &Cluster| {
        let input = Input { nodes: cluster.nodes.clone(), synced: true, settled: false };
        plan(&input, cluster.ledger.clone(), cluster.now)
    };
    // n3's agent may still list it, so nobody is told that it is theirs.
    let mut listed_again = cluster.clone();
    for cluster in [&mut cluster, &mut listed_again] {
        cluster.apply(plan_unsettled(cluster));
        assert_eq!(cluster.cidrs("n3"), Vec::<&str>::new());
        assert_eq!(cluster.code("n3"), Some(Code::NotSettled));
        assert_eq!(cluster.code("n2"), Some(Code::AlreadyAllocated));
    }
    cluster.round();
    assert_eq!((cluster.cidrs("n2"), cluster.get("n2").error.as_str()), (vec!["10.33.0.64/26"], ""));
    assert_eq!((cluster.get("n2").claim, cluster.cidrs("n3")), (None, vec!["10.33.0.0/26"]));
    assert!(cluster.round().is_empty());

    let n3 = listed_again.get_mut("n3");
    (n3.pod_cidrs, n3.claim) = (vec!["10.33.0.64/26".into()], Some(net("10.33.0.64/26")));
    listed_again.round();
    assert_eq!((listed_again.code("n3"), listed_again.code("n2")), (None, Some(Code::AlreadyAllocated)));
}

#[test]
fn of_two_blocks_of_a_family_the_one_no_longer_listed_is_quarantined() {
    let mut cluster = Cluster::new(
        pool(&["10.33.0.0/24"], 26),
        vec![node("a", 0, &["10.33.0.0/26", "10.33.0.64/26"]), node("b", 1, &[])],
    );
    cluster.round();
    assert_eq!(cluster.records.blocks["a"].len(), 2);
    cluster.get_mut("a").pod_cidrs = vec!["10.33.0.64/26".into()];
    cluster.round();
    assert_eq!((cluster.cidrs("a"), cluster.get("a").error.as_str()), (vec!["10.33.0.64/26"], ""));
    assert_eq!(cluster.records.quarantine[0].cidr, net("10.33.0.0/26"));
    // An empty list is written again.
    cluster.get_mut("a").pod_cidrs.clear();
    cluster.round();
    assert_eq!(cluster.cidrs("a"), ["10.33.0.64/26"]);
}

#[test]
fn a_new_machine_under_the_name_of_a_deleted_one_is_judged_by_what_it_lists_itself() {
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("a", 1, &[])]);
    cluster.round();
    let replaced = cluster.get_mut("a");
    replaced.uid = "uid-again".to_owned();
    replaced.pod_cidrs = vec!["10.33.0.128/26".to_owned()];
    assert!(cluster.round().is_empty());
    assert_eq!(cluster.ledger.blocks("a"), Some(vec![net("10.33.0.128/26")]));
    let resting: Vec<IpNet> = cluster.records.quarantine.iter().map(|record| record.cidr).collect();
    assert_eq!(resting, [net("10.33.0.0/26")]);
}

#[test]
fn a_node_being_deleted_keeps_its_block_and_is_assigned_none() {
    let mut cluster = five_nodes();
    cluster.get_mut("n1").deleting = true;
    cluster.get_mut("n1").pod_cidrs.clear();
    let mut fresh = node("n0", 0, &[]);
    fresh.deleting = true;
    cluster.nodes.push(fresh);
    assert!(cluster.round().is_empty());
    assert_eq!(cluster.ledger.blocks("n1"), Some(vec![net("10.33.0.0/26")]));
}

#[test]
fn nodes_keep_blocks_of_a_former_pool_with_a_verdict() {
    let mut cluster = five_nodes();
    // Another mask, and the second element was removed.
    cluster.settings = pool(&["10.33.0.0/24"], 25);
    cluster.new_leader();
    cluster.round();
    for name in ["n1", "n2", "n3", "n4"] {
        assert!(cluster.get(name).error.contains("is kept"), "{}", cluster.get(name).error);
        assert_eq!(cluster.cidrs(name).len(), 1);
    }
    // n1 and n2 share the first block of the new mask size, which is not assigned.
    assert_eq!(cluster.cidrs("n5"), ["10.33.0.128/25"]);
    // The next leader has it from the records, and drops former elements that are not needed.
    cluster.new_leader();
    assert!(cluster.round().is_empty());
    let former = PoolRecord { cidr: net("10.34.0.0/25"), mask_size: 26 };
    assert!(cluster.records.pools.contains(&former));
    cluster.nodes.retain(|node| node.name != "n3" && node.name != "n4");
    cluster.round();
    assert!(cluster.records.pools.contains(&former), "its blocks still rest");
    cluster.now = at(BLOCK_QUARANTINE.as_secs() as i64);
    cluster.round();
    assert!(!cluster.records.pools.contains(&former));
}

#[test]
fn a_block_of_no_recorded_pool_is_refused_and_its_node_left_alone() {
    let mut cluster = Cluster::new(
        dual(family(&["10.33.0.0/24"], 26), family(&["fd33::/120"], 124)),
        vec![node("a", 1, &["10.34.0.0/26"]), node("b", 2, &["10.33.0.0/26", "10.33.0.0/26", "fd33::/124"])],
    );
    cluster.round();
    assert!(cluster.get("a").error.contains("out of range"));
    assert_eq!(cluster.cidrs("a"), ["10.34.0.0/26"]);
    assert_eq!(cluster.get("b").error, "", "the same block twice is one claim");
    // A family without pool.
    let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), vec![node("a", 1, &["10.33.0.0/26", "fd33::/124"])]);
    cluster.round();
    assert!(cluster.get("a").error.contains("allocator not configured"), "{}", cluster.get("a").error);
    assert_eq!(cluster.ledger.blocks("a"), None);
}

#[test]
fn allocation_stops_before_the_records_outgrow_their_object() {
    // Dual-stack, with names of 63 characters, the longest that cloud providers make.
    let settings = dual(family(&["10.0.0.0/8"], 24), family(&["fd00:1234:5678::/48"], 64));
    let name = |index: usize| format!("{:-<55}{index:08}", "node");
    let generation = |first: usize| (first..first + 5000).map(|index| node(&name(index), 0, &[])).collect::<Vec<_>>();
    let mut cluster = Cluster::new(settings, generation(0));
    cluster.round();
    assert_eq!(cluster.records.blocks.len(), 5000);
    let size = |records: &Records| {
        let data = records.to_data(&BTreeMap::new()).unwrap();
        assert_eq!(&Records::from_data(&data).unwrap(), records);
        data.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
    };
    assert!(size(&cluster.records) < LIMIT);
    // All machines are replaced at once: what the former ones had is in quarantine, and only some of the new ones fit in.
    cluster.nodes = generation(5000);
    cluster.round();
    let served = cluster.records.blocks.len();
    assert!((1..5000).contains(&served) && cluster.records.quarantine.len() == 10_000, "{served}");
    assert!(size(&cluster.records) < LIMIT, "{}", size(&cluster.records));
    let waiting = cluster.nodes.iter().find(|node| node.pod_cidrs.is_empty()).unwrap().name.clone();
    assert_eq!(cluster.code(&waiting), Some(Code::RecordsFull));
    assert!(cluster.round().is_empty());
    // The next leader reads them, and serves the others when the quarantine has ended.
    cluster.new_leader();
    cluster.now = at(BLOCK_QUARANTINE.as_secs() as i64);
    assert_eq!(cluster.round().len(), 5000 - served);
    assert!(cluster.nodes.iter().all(|node| node.pod_cidrs.len() == 2 && node.error.is_empty()));
}

#[test]
fn a_claim_without_room_in_the_records_is_booked_later_and_not_allocated_meanwhile() {
    let nodes = vec![node("a", 0, &["10.33.0.0/26"]), node("b", 1, &["10.33.0.64/26"]), node("c", 2, &[])];
    let cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), nodes);
    let within = |limit| {
        let input = Input { nodes: cluster.nodes.clone(), synced: true, settled: true };
        plan_within(limit, &input, cluster.ledger.clone(), at(0))
    };
    let small = within(40);
    assert_eq!(small.nodes["b"].verdict.as_ref().unwrap().code, Code::RecordsFull);
    assert_eq!(small.nodes["c"].verdict.as_ref().unwrap().code, Code::RecordsFull);
    assert_eq!(small.nodes["c"].pod_cidrs, None);
    let room = within(1000);
    assert_eq!(room.nodes["c"].pod_cidrs, Some(vec![net("10.33.0.128/26")]));
    assert_eq!(room.records.unwrap()[DEFAULT_POOL].blocks.len(), 3);
}

#[derive(Debug, Clone)]
enum Event {
    Create(u8, Option<u8>),
    Delete(u8),
    Edit(u8, Vec<u8>, bool),
    Clear(u8),
    NewLeader,
    Wait(u16),
    Resize(u8),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => (0_u8..8, proptest::option::of(0_u8..10)).prop_map(|(name, claim)| Event::Create(name, claim)),
        2 => (0_u8..8).prop_map(Event::Delete),
        3 => (0_u8..8, proptest::collection::vec(0_u8..10, 1..3), proptest::bool::ANY)
            .prop_map(|(name, claims, marked)| Event::Edit(name, claims, marked)),
        1 => (0_u8..8).prop_map(Event::Clear),
        2 => Just(Event::NewLeader),
        2 => (1_u16..700).prop_map(Event::Wait),
        1 => (25_u8..28).prop_map(Event::Resize),
    ];
    proptest::collection::vec(event, 1..40)
}

/// Blocks of two sizes, outside the pool, and invalid ones.
fn claim_text(index: u8) -> String {
    match index {
        0..=3 => format!("10.33.0.{}/26", u16::from(index) * 64),
        4 | 5 => format!("10.33.0.{}/25", u16::from(index - 4) * 128),
        6 => "10.33.0.0/24".to_owned(),
        7 => "10.9.0.0/26".to_owned(),
        8 => "10.33.0.7/26".to_owned(),
        _ => "none".to_owned(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn laws_of_planning(events in events()) {
        let mut cluster = Cluster::new(pool(&["10.33.0.0/24"], 26), Vec::new());
        for (step, event) in events.into_iter().enumerate() {
            let name = |index: u8| format!("n{index}");
            match event {
                Event::Create(index, claim) => {
                    if cluster.nodes.iter().all(|node| node.name != name(index)) {
                        let mut node = node(&name(index), i64::from(index % 3), &[]);
                        node.uid = format!("uid-{step}");
                        node.pod_cidrs.extend(claim.map(claim_text));
                        cluster.nodes.push(node);
                    }
                }
                Event::Delete(index) => cluster.nodes.retain(|node| node.name != name(index)),
                Event::Edit(index, claims, marked) => {
                    if let Some(node) = cluster.nodes.iter_mut().find(|node| node.name == name(index)) {
                        node.pod_cidrs = claims.into_iter().map(claim_text).collect();
                        // The agent lists a block itself, as first element.
                        node.claim = node.pod_cidrs.first().filter(|_| marked).and_then(|text| text.parse().ok());
                    }
                }
                Event::Clear(index) => {
                    if let Some(node) = cluster.nodes.iter_mut().find(|node| node.name == name(index)) {
                        node.pod_cidrs.clear();
                    }
                }
                Event::NewLeader => cluster.new_leader(),
                Event::Wait(seconds) => cluster.now = later(cluster.now, Duration::from_secs(seconds.into())),
                Event::Resize(mask_size) => {
                    cluster.settings = pool(&["10.33.0.0/24"], mask_size);
                    cluster.new_leader();
                }
            }
            let listed_before: Vec<(String, IpNet)> = listed(&cluster);

            // The order of the input does not matter.
            let mut reversed = cluster.clone();
            reversed.nodes.reverse();
            let planned = cluster.plan();
            prop_assert_eq!(&reversed.plan(), &planned);

            // Nothing is assigned that another node lists, and a quarantined block only to its former owner.
            for (name, change) in &planned.nodes {
                let had = cluster.ledger.nodes.get(name).filter(|known| known.uid.as_ref().is_none_or(|uid| *uid == change.uid));
                let had: Vec<IpNet> = had.iter().flat_map(|known| known.held.iter().map(|held| held.block.net)).collect();
                for given in change.pod_cidrs.iter().flatten().filter(|given| !had.contains(given)) {
                    for (other, listed) in &listed_before {
                        let holds_whole_pool = listed.contains(&net("10.33.0.0/24"));
                        prop_assert!(
                            other == name || holds_whole_pool || !overlaps(given, listed),
                            "{} given to {} while {} lists {}", given, name, other, listed
                        );
                    }
                    for resting in &cluster.records.quarantine {
                        let free = resting.until <= cluster.now || resting.node == *name;
                        prop_assert!(free || !overlaps(given, &resting.cidr));
                    }
                }
            }

            // Planning after an applied plan changes nothing, for this leader and the next.
            cluster.apply(planned);
            let again = cluster.plan();
            prop_assert_eq!(&again.nodes, &BTreeMap::new());
            prop_assert_eq!(&again.ledger, &cluster.ledger);

            // One owner for each address.
            let held: Vec<IpNet> = cluster.ledger.nodes.values().flat_map(|known| known.held.iter().map(|held| held.block.net)).collect();
            for (index, net) in held.iter().enumerate() {
                prop_assert!(held.iter().skip(index + 1).all(|other| !overlaps(net, other)));
            }
        }
    }
}

fn listed(cluster: &Cluster) -> Vec<(String, IpNet)> {
    let nets =
        |node: &Node| parse(&node.pod_cidrs).0.into_iter().map(|net| (node.name.clone(), net)).collect::<Vec<_>>();
    cluster.nodes.iter().flat_map(nets).collect()
}
