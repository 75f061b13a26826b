//! Mode `cluster-pool`: the pod CIDR listed in the node's CiliumNode (`ipam` 2.2.11, decision 11).
//!
//! The operator assigns a pod CIDR by writing it there. Administrators may edit the list, too, and a restored API
//! server has an old one. A pod CIDR is served and listed while any of its addresses is allocated: the operator must
//! know every pod CIDR that pods have addresses of.

use super::{NodeInput, NodeMode, NodePlan, Observed, POD_CIDR_WAIT, PlanFinding};
use crate::ip::Family;
use crate::ipam::supply::{DEFAULT_POOL, Grant, GrantState, Supply};
use crate::ipam::verdict::{Code, Verdict};
use ipnet::{IpNet, Ipv4Net};
use jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// Annotation of a CiliumNode: the pod CIDR that its agent listed itself, because pods have addresses of it. It is
/// written and removed together with the list, so no other record is needed.
pub const CLAIM: &str = "cistern.io/claimed-pod-cidr";

/// The mode.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterPool {
    /// `cluster-pool-ipv4-cidr`; empty where the operator alone is configured with it.
    pub ranges: Vec<Ipv4Net>,
}

impl NodeMode for ClusterPool {
    fn plan(&self, input: &NodeInput<'_>, _now: Timestamp) -> NodePlan {
        let granted = input.granted.served(DEFAULT_POOL, Family::Ipv4);
        let served = granted.and_then(Served::of_grant);
        let held = granted.is_some_and(|grant| input.held.may_hold(&grant.net));
        let beyond = input.held.outside(granted.map(|grant| &grant.net), Family::Ipv4).map(|held| ipv4(&held));
        let listed = match &input.cilium_node {
            Observed::Unknown => None,
            Observed::Absent => Some(Listed::default()),
            Observed::Present(object) => Some(object.listed),
        };
        let is_known = listed.is_some() && beyond.is_some();
        // A pod CIDR in use is kept, even if others list it.
        let taken = !held && granted.is_some_and(|grant| (input.listed_elsewhere)(&grant.net));
        let Choice { served: chosen, list, mut wait } = choose(&Input {
            node: input.node,
            served: served.as_ref(),
            listed,
            taken,
            node_uid: input.kubernetes_node.present().map(|node| node.uid),
            held,
            beyond: beyond.as_deref(),
        });
        let grant = match (chosen, granted) {
            (Some(chosen), _) => Some(chosen.into_grant()),
            // It must have gone off the list before it is given up, so that it is not taken from there again.
            (None, Some(granted)) if list.is_some() => Some(Grant { state: GrantState::Draining, ..granted.clone() }),
            (None, _) => None,
        };
        let findings = grant.iter().filter_map(|grant| self.elsewhere(input.node, grant.net)).collect();
        let fix = "set cluster-pool-ipv4-cidr to a range that no node uses and delete this node's CiliumNode";
        let active = grant.as_ref().filter(|grant| grant.state == GrantState::Active);
        let blocked = active.and_then(|grant| input.blocked(&grant.net, fix));
        let supply = (grant.is_some() || is_known).then(|| {
            let mut supply = Supply::of_grants(grant);
            supply.block(blocked.as_deref());
            supply
        });
        wait = blocked.or(wait);
        NodePlan {
            supply,
            write: input.intent(list, true),
            waits: wait.map(|reason| BTreeMap::from([(POD_CIDR_WAIT, reason)])).unwrap_or_default(),
            findings,
        }
    }
}

impl ClusterPool {
    /// A node keeps its pod CIDR when the ranges are changed (`ipam` 7.1, report 4).
    fn elsewhere(&self, node: &str, net: IpNet) -> Option<PlanFinding> {
        let within = |range: &Ipv4Net| IpNet::V4(*range).contains(&net);
        if self.ranges.is_empty() || self.ranges.iter().any(within) {
            return None;
        }
        let ranges: Vec<String> = self.ranges.iter().map(ToString::to_string).collect();
        Some(PlanFinding {
            reason: "pod-cidr-not-configured",
            subject: net.to_string(),
            message: format!(
                "cluster-pool-ipv4-cidr is {}, and this node still serves {net}, because a node keeps its pod CIDR while it \
                 may have pods; to renumber it, drain it, stop its agent, delete its CiliumNode {node:?} and leases/grant-* in \
                 state-dir, and start the agent again",
                ranges.join(",")
            ),
        })
    }
}

fn ipv4(addresses: &[IpAddr]) -> Vec<Ipv4Addr> {
    let ipv4 = |address: &IpAddr| match address {
        IpAddr::V4(address) => Some(*address),
        IpAddr::V6(_) => None,
    };
    addresses.iter().filter_map(ipv4).collect()
}

/// The pod CIDR that the node serves, and its persistent state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Served {
    /// The pod CIDR, without host bits.
    pub block: Ipv4Net,
    /// Allocation from it has stopped, so that it can be released.
    pub leaving: bool,
    /// UID of the Node that it was last listed for.
    pub node_uid: Option<String>,
    /// The pod CIDR has been listed for this node since the agent started. Otherwise it may have been reassigned while
    /// the machine was off.
    pub confirmed: bool,
}

impl Served {
    /// What a granted IPv4 pod CIDR is served as.
    fn of_grant(grant: &Grant) -> Option<Self> {
        let IpNet::V4(block) = grant.net else { return None };
        let leaving = grant.state == GrantState::Draining;
        Some(Self { block, leaving, node_uid: grant.node_uid.clone(), confirmed: grant.confirmed })
    }

    fn into_grant(self) -> Grant {
        let state = if self.leaving { GrantState::Draining } else { GrantState::Active };
        Grant { state, node_uid: self.node_uid, confirmed: self.confirmed, ..Grant::new(IpNet::V4(self.block)) }
    }
}

/// The pod CIDRs of a CiliumNode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Listed<'a> {
    /// `spec.ipam.podCIDRs`
    pub pod_cidrs: &'a [String],
    /// The value of [`CLAIM`].
    pub claim: Option<Ipv4Net>,
    /// The operator's verdict on the list, if it is a refusal.
    pub refusal: Option<&'a Verdict>,
    /// The operator refuses the list, or refused an earlier list and has not judged this one yet.
    pub is_contested: bool,
}

/// Input of the decision.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// The pod CIDR served now.
    pub served: Option<&'a Served>,
    /// The node's own CiliumNode, empty if it does not exist; `None` before the first list from the API server.
    pub listed: Option<Listed<'a>>,
    /// Another CiliumNode lists an overlapping pod CIDR. Irrelevant while `held`.
    pub taken: bool,
    /// UID of the Node; `None` while it is unknown or does not exist.
    pub node_uid: Option<&'a str>,
    /// An address of the served pod CIDR may be allocated.
    pub held: bool,
    /// Allocated addresses outside that pod CIDR; `None` before the leases are loaded.
    pub beyond: Option<&'a [Ipv4Addr]>,
}

/// The list to write, with [`CLAIM`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct List {
    /// `spec.ipam.podCIDRs`. Foreign elements are preserved.
    pub pod_cidrs: Vec<String>,
    /// The pod CIDR that this node lists itself.
    pub claim: Option<Ipv4Net>,
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The pod CIDR to serve; `None` if there is none yet, or the previous one belongs to another node now.
    pub served: Option<Served>,
    /// What to write to the CiliumNode once this is served; without a pod CIDR to serve, once allocation from the
    /// former one has stopped. `None` if no change is needed.
    pub list: Option<List>,
    /// Why no pod CIDR is served, or not the listed one, with the remedy.
    pub wait: Option<String>,
}

/// The IPv4 pod CIDRs of a list, without host bits, in order. The operator reports invalid elements.
pub fn ipv4_blocks(listed: &[String]) -> impl Iterator<Item = Ipv4Net> + '_ {
    listed.iter().filter_map(|text| text.parse::<Ipv4Net>().ok()).map(|net| net.trunc())
}

/// The list without a pod CIDR.
fn without(listed: &[String], block: Ipv4Net) -> List {
    let is = |text: &String| text.parse::<Ipv4Net>().is_ok_and(|net| net.trunc() == block);
    List { pod_cidrs: listed.iter().filter(|text| !is(text)).cloned().collect(), claim: None }
}

/// The list with a pod CIDR as first element.
fn with(listed: &[String], block: Ipv4Net) -> List {
    let pod_cidrs = std::iter::once(block.to_string()).chain(listed.iter().cloned()).collect();
    List { pod_cidrs, claim: Some(block) }
}

/// Decides between the served pod CIDR and the list of the CiliumNode.
#[must_use]
pub fn choose(input: &Input<'_>) -> Choice {
    let node = input.node;
    let Some(served) = input.served else { return first(input) };
    // A pod CIDR that is being released may be off the list already, and belong to another node.
    let Some(Listed { pod_cidrs, claim, refusal, is_contested }) = input.listed else {
        return Choice { served: Some(served.clone()), list: None, wait: None };
    };
    let as_it_is = Served { leaving: false, ..served.clone() };
    let blocks: Vec<Ipv4Net> = ipv4_blocks(pod_cidrs).collect();
    let block = served.block;
    let claim = claim.filter(|claim| blocks.contains(claim));
    let claimed = claim == Some(block);
    // A former claim of this node must be removed from the list.
    let leftover = claim.filter(|claim| *claim != block);
    let others: Vec<Ipv4Net> =
        blocks.iter().copied().filter(|other| *other != block && Some(*other) != leftover).collect();
    if !blocks.contains(&block) {
        let Some(other) = others.first().copied().or(leftover) else {
            let of_another = !served.confirmed && is_of_another(served, input.node_uid);
            if !input.held && (served.leaving || input.taken || of_another) {
                return Choice { served: None, list: None, wait: Some(lost(block)) };
            }
            return Choice { served: Some(as_it_is), list: Some(with(pod_cidrs, block)), wait: None };
        };
        if input.held {
            let wait = Some(kept(node, block, other));
            return Choice { served: Some(as_it_is), list: Some(with(pod_cidrs, block)), wait };
        }
        return move_to(other, input);
    }
    let node_uid = input.node_uid.map(str::to_owned).or_else(|| served.node_uid.clone());
    let confirmed = Served { node_uid, confirmed: true, ..as_it_is };
    let is_held =
        |leftover: &Ipv4Net| input.beyond.is_none_or(|beyond| beyond.iter().any(|held| leftover.contains(held)));
    let list = || {
        // The replacement was refused together with the list: claim the served one, so that the operator can accept it.
        let claim = is_contested.then_some(block);
        leftover.filter(|leftover| !is_held(leftover)).map(|leftover| List { claim, ..without(pod_cidrs, leftover) })
    };
    let Some(other) = others.first().copied() else {
        // A claim of this node that nothing replaced is accepted once the operator has seen it.
        let is_refused = refusal.is_some_and(|refusal| {
            refusal.refuses(IpNet::V4(block)) && (input.taken || (claimed && refusal.code != Code::Conflict))
        });
        if !input.held && is_refused {
            return Choice { served: None, list: Some(without(pod_cidrs, block)), wait: Some(lost(block)) };
        }
        return Choice { served: Some(confirmed), list: list(), wait: None };
    };
    if input.held || (!claimed && blocks.first() == Some(&block)) {
        let wait = if claimed {
            Some(kept(node, block, other))
        } else {
            refusal.map(|Verdict { text, .. }| {
                format!("CiliumNode {node:?} lists {other} beside {block}, which is served: {text}")
            })
        };
        return Choice { served: Some(confirmed), list: list(), wait };
    }
    move_to(other, input)
}

/// No pod CIDR is served yet, or the state was lost: serve the one that allocated addresses belong to, listed or not,
/// assuming the size of the listed ones.
fn first(input: &Input<'_>) -> Choice {
    let blocks = || input.listed.into_iter().flat_map(|listed| ipv4_blocks(listed.pod_cidrs));
    let Some(beyond) = input.beyond else {
        return Choice { served: None, list: None, wait: Some("the leases of this node are not read yet".to_owned()) };
    };
    let in_use = blocks().find(|block| beyond.iter().any(|address| block.contains(address)));
    let around = |block: Ipv4Net| {
        let around = Ipv4Net::new(*beyond.first()?, block.prefix_len()).ok()?;
        Some(Choice {
            served: Some(Served { confirmed: false, ..served_of(around.trunc(), input) }),
            list: None,
            wait: None,
        })
    };
    match (in_use, blocks().next()) {
        (Some(block), _) => move_to(block, input),
        (None, Some(block)) => around(block).unwrap_or_else(|| move_to(block, input)),
        (None, None) => {
            let wait = format!(
                "required IPv4 PodCIDR not available: CiliumNode {:?} has no IPv4 prefix in spec.ipam.podCIDRs yet; in mode \
                 cluster-pool the operator writes it (see status.ipam.operator-status.error of the object, and whether an \
                 operator leads)",
                input.node
            );
            Choice { served: None, list: None, wait: Some(wait) }
        }
    }
}

fn served_of(block: Ipv4Net, input: &Input<'_>) -> Served {
    Served { block, leaving: false, node_uid: input.node_uid.map(str::to_owned), confirmed: true }
}

fn move_to(block: Ipv4Net, input: &Input<'_>) -> Choice {
    Choice { served: Some(served_of(block, input)), list: None, wait: None }
}

fn kept(node: &str, block: Ipv4Net, other: Ipv4Net) -> String {
    format!(
        "CiliumNode {node:?} lists {other}, but {block} is in use: pods keep their addresses, new ones are allocated from \
         {block}, and it is listed, too. {other} is taken when nothing on this node holds an address any more: drain the \
         node to have it"
    )
}

fn lost(block: Ipv4Net) -> String {
    format!(
        "required IPv4 PodCIDR not available: {block}, which this node had, is not its own any more, and nothing on this \
         node holds an address of it; the operator gives another (see status.ipam.operator-status.error of the \
         CiliumNode, and whether an operator leads)"
    )
}

/// Whether a pod CIDR was listed for another Node than the current one.
fn is_of_another(served: &Served, node_uid: Option<&str>) -> bool {
    served.node_uid.as_deref().zip(node_uid).is_some_and(|(then, now)| then != now)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, World};
    use super::*;

    fn net(text: &str) -> Ipv4Net {
        text.parse().unwrap()
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    fn served(block: &str) -> Served {
        Served { block: net(block), leaving: false, node_uid: Some("u1".into()), confirmed: true }
    }

    const A: &str = "10.33.0.0/26";
    const B: &str = "10.33.0.64/26";
    fn refusal(code: Code, block: &str) -> Verdict {
        Verdict { code, cidr: Some(IpNet::V4(net(block))), text: format!("{block}: {}", code.help()) }
    }

    /// The pod CIDR to serve, and the list to write with its claim.
    type Short = (Option<String>, Option<(Vec<String>, Option<String>)>);

    /// The view of node n1, whose Node has UID u1.
    struct Seen<'a> {
        now: Option<&'a Served>,
        listed: &'a [&'a str],
        claim: Option<&'a str>,
        refusal: Option<&'a Verdict>,
        taken: bool,
        node_uid: Option<&'a str>,
    }

    const NOTHING: Seen<'static> =
        Seen { now: None, listed: &[], claim: None, refusal: None, taken: false, node_uid: Some("u1") };

    impl Seen<'_> {
        fn choice(&self, held: bool) -> Choice {
            let pod_cidrs = texts(self.listed);
            let (refusal, is_contested) = (self.refusal, self.refusal.is_some());
            let listed = Listed { pod_cidrs: &pod_cidrs, claim: self.claim.map(net), refusal, is_contested };
            choose(&Input {
                node: "n1",
                served: self.now,
                listed: Some(listed),
                taken: self.taken,
                node_uid: self.node_uid,
                held,
                beyond: Some(&[]),
            })
        }

        fn short(&self, held: bool) -> Short {
            let Choice { served, list, .. } = self.choice(held);
            let list = list.map(|list| (list.pod_cidrs, list.claim.map(|claim| claim.to_string())));
            (served.map(|served| served.block.to_string()), list)
        }
    }

    fn is(block: &str) -> Short {
        (Some(block.to_owned()), None)
    }

    fn writes(block: &str, list: &[&str], claim: Option<&str>) -> Short {
        (Some(block.to_owned()), Some((texts(list), claim.map(str::to_owned))))
    }

    #[test]
    fn the_first_block_of_the_list_is_served() {
        let seen = Seen { listed: &["fd31::/112", A, B], ..NOTHING };
        assert_eq!(seen.choice(false), Choice { served: Some(served(A)), list: None, wait: None });
        let nothing = Seen { listed: &["fd31::/112", "10.33/16"], ..NOTHING }.choice(false);
        assert!(nothing.served.is_none() && nothing.wait.unwrap().contains("operator"));
        // Of two, the one that pods have addresses of, after a loss of state.
        let (pod_cidrs, beyond) = (texts(&[A, B]), ["10.33.0.70".parse().unwrap()]);
        let listed = Some(Listed { pod_cidrs: &pod_cidrs, ..Listed::default() });
        let input = Input {
            node: "n1",
            served: None,
            listed,
            taken: false,
            node_uid: None,
            held: false,
            beyond: Some(&beyond),
        };
        assert_eq!(choose(&input).served.unwrap().block, net(B));
        assert_eq!(choose(&Input { beyond: None, ..input }).served, None);
        // It is served even if it is not listed.
        let pod_cidrs = texts(&[A]);
        let other = Input { listed: Some(Listed { pod_cidrs: &pod_cidrs, ..Listed::default() }), ..input };
        let guessed = choose(&other).served.unwrap();
        assert_eq!(guessed.block, net(B));
        let claimed = choose(&Input { served: Some(&guessed), held: true, beyond: Some(&[]), ..other });
        assert_eq!(claimed.list.unwrap().pod_cidrs, texts(&[B, A]));
        // Before the first list from the API server, the last known state is served.
        let unknown = Input { served: Some(&served(A)), listed: None, taken: true, ..input };
        assert_eq!(choose(&unknown), Choice { served: Some(served(A)), list: None, wait: None });
        let leaving = Served { leaving: true, ..served(A) };
        assert!(choose(&Input { served: Some(&leaving), ..unknown }).served.unwrap().leaving);
    }

    #[test]
    fn a_block_that_pods_have_addresses_of_is_kept_and_listed_beside_another() {
        let now = served(A);
        let seen = Seen { now: Some(&now), listed: &[B], ..NOTHING };
        assert_eq!(seen.short(true), writes(A, &[A, B], Some(A)));
        let wait = seen.choice(true).wait.unwrap();
        assert!(wait.contains(A) && wait.contains(B) && wait.contains("drain"), "{wait}");
        // Then nothing changes and nothing is written.
        let conflict = refusal(Code::Conflict, A);
        let claimed = Seen { listed: &[A, B], claim: Some(A), refusal: Some(&conflict), ..seen };
        assert_eq!(claimed.short(true), is(A));
        assert!(claimed.choice(true).wait.is_some());
    }

    #[test]
    fn the_other_block_is_taken_when_nothing_is_held_and_the_first_goes_off_the_list() {
        let (a, b) = (served(A), served(B));
        let conflict = refusal(Code::Conflict, A);
        let claimed = Seen { now: Some(&a), listed: &[A, B], claim: Some(A), refusal: Some(&conflict), ..NOTHING };
        assert_eq!(claimed.short(false), is(B));
        assert_eq!(Seen { now: Some(&b), ..claimed }.short(true), writes(B, &[B], Some(B)));
        assert_eq!(Seen { now: Some(&b), refusal: None, ..claimed }.short(true), writes(B, &[B], None));
        assert_eq!(Seen { now: Some(&b), listed: &[B], claim: Some(A), ..NOTHING }.short(true), is(B));
        // An element that this node did not list is not removed.
        assert_eq!(Seen { now: Some(&a), listed: &[B], ..NOTHING }.short(false), is(B));
        let turned = Seen { now: Some(&a), listed: &[B, A], ..NOTHING };
        assert_eq!((turned.short(false), turned.short(true)), (is(B), is(A)));
        // Two pod CIDRs listed for a node: the first is served.
        assert_eq!(Seen { now: Some(&a), listed: &[A, B], ..NOTHING }.short(false), is(A));
    }

    #[test]
    fn a_list_without_a_block_gets_the_one_that_is_served() {
        let now = served(A);
        for (listed, wanted) in
            [(&[][..], &[A][..]), (&["fd31::/112"], &[A, "fd31::/112"]), (&["10.33/16"], &[A, "10.33/16"])]
        {
            assert_eq!(Seen { now: Some(&now), listed, ..NOTHING }.short(false), writes(A, wanted, Some(A)));
        }
        // If it is the only one, it is written once.
        assert_eq!(Seen { now: Some(&now), listed: &[A], claim: Some(A), ..NOTHING }.short(false), is(A));
    }

    #[test]
    fn a_drained_node_gives_up_what_is_refused_to_it() {
        let now = served(A);
        let belongs = refusal(Code::AlreadyAllocated, A);
        let seen = Seen { now: Some(&now), listed: &[A], refusal: Some(&belongs), taken: true, ..NOTHING };
        assert_eq!(seen.short(true), is(A));
        assert_eq!(seen.short(false), (None, Some((Vec::new(), None))));
        // Also its own claim, even if no other node lists it. Administrators' entries are preserved.
        assert_eq!(Seen { taken: false, claim: Some(A), ..seen }.short(false), (None, Some((Vec::new(), None))));
        assert_eq!(Seen { taken: false, ..seen }.short(false), is(A));
        // The owner keeps it.
        assert_eq!(Seen { refusal: None, ..seen }.short(false), is(A));
        // So does a node whose claim will be accepted once an operator sees it.
        let conflict = refusal(Code::Conflict, A);
        let alone = Seen { taken: false, claim: Some(A), refusal: Some(&conflict), ..seen };
        assert_eq!(alone.short(false), is(A));
        // The refusal of another pod CIDR, whose text contains this one's.
        let other = refusal(Code::AlreadyAllocated, "110.33.0.0/26");
        assert_eq!(Seen { refusal: Some(&other), ..seen }.short(false), is(A));
        // Once off the list, it is not claimed again.
        let leaving = Served { leaving: true, ..now.clone() };
        assert_eq!(Seen { now: Some(&leaving), listed: &[], taken: false, ..seen }.short(false), (None, None));
    }

    #[test]
    fn a_machine_that_comes_back_claims_nothing_that_is_not_its_own_any_more() {
        let before = Served { confirmed: false, ..served(A) };
        let seen = Seen { now: Some(&before), node_uid: Some("u2"), ..NOTHING };
        assert_eq!(seen.short(false), (None, None));
        assert!(seen.choice(false).wait.unwrap().contains(A));
        assert_eq!(Seen { taken: true, node_uid: Some("u1"), ..seen }.short(false), (None, None));
        // With running pods it is kept even if it was reassigned, and so it is if the Node is unknown.
        assert_eq!(Seen { taken: true, ..seen }.short(true), writes(A, &[A], Some(A)));
        assert_eq!(Seen { node_uid: None, ..seen }.short(false), writes(A, &[A], Some(A)));
        // An agent that served it without interruption claims it for its new Node.
        assert_eq!(Seen { now: Some(&served(A)), ..seen }.short(false), writes(A, &[A], Some(A)));
        // Listed again for the new Node, it belongs to it.
        let again = Seen { listed: &[A], ..seen }.choice(false).served.unwrap();
        assert_eq!(again.node_uid.as_deref(), Some("u2"));
    }

    fn list(pod_cidrs: &[&str], claim: Option<&str>) -> Option<List> {
        Some(List { pod_cidrs: texts(pod_cidrs), claim: claim.map(net) })
    }

    #[test]
    fn the_first_pod_cidr_of_the_list_is_served_and_without_one_the_operator_is_waited_for() {
        let mode = ClusterPool::default();
        let mut world = World { listed: Some(texts(&[A, B])), ..World::granted(&[]) };
        let plan = world.plan(&mode);
        assert_eq!((World::served(&plan).as_deref(), plan.write, plan.waits), (Some(A), None, BTreeMap::new()));
        world.listed = Some(Vec::new());
        let plan = world.plan(&mode);
        assert_eq!((plan.supply, plan.write), (Some(Supply::default()), None));
        assert!(plan.waits[POD_CIDR_WAIT].contains("operator"));
        // The object is created with an empty list, which the operator fills.
        world.listed = None;
        let write = world.plan(&mode).write.unwrap();
        assert_eq!((write.planned_from, write.list), (None, None));
    }

    #[test]
    fn a_pod_cidr_is_exchanged_in_one_step_when_nothing_is_held() {
        let mode = ClusterPool::default();
        let mut world = World { listed: Some(texts(&[B])), ..World::granted(&[A]) };
        world.held.insert("10.33.0.7".parse().unwrap());
        let plan = world.plan(&mode);
        assert_eq!(World::served(&plan).as_deref(), Some(A));
        let write = plan.write.unwrap();
        assert_eq!(
            (write.planned_from.as_deref(), write.list, write.contested),
            (Some("7"), list(&[A, B], Some(A)), true)
        );
        world.held.clear();
        let plan = world.plan(&mode);
        assert_eq!(World::served(&plan).as_deref(), Some(B));
        // Planning an applied plan changes nothing.
        world.granted = plan.supply.clone().unwrap();
        assert_eq!(world.plan(&mode), plan);
    }

    #[test]
    fn what_is_given_up_goes_off_the_list_before_it_is_forgotten() {
        let mode = ClusterPool::default();
        let refusal = refusal(Code::AlreadyAllocated, A);
        let mut world = World::granted(&[A]);
        let plan = |world: &World, listed: &[&str]| {
            let pod_cidrs = texts(listed);
            let listed = Listed { pod_cidrs: &pod_cidrs, claim: None, refusal: Some(&refusal), is_contested: true };
            let input = NodeInput {
                node: "n1",
                granted: &world.granted,
                held: super::super::Held(Some(&world.held)),
                cilium_node: Observed::Present(super::super::CiliumNodeFacts { resource_version: "7", listed }),
                kubernetes_node: Observed::Unknown,
                listed_elsewhere: &|_| true,
                contested: &|_| None,
                covering: &|_| None,
            };
            mode.plan(&input, Timestamp::UNIX_EPOCH)
        };
        let first = plan(&world, &[A]);
        world.granted = first.supply.clone().unwrap();
        assert_eq!(world.granted.served(DEFAULT_POOL, Family::Ipv4).unwrap().state, GrantState::Draining);
        assert_eq!(first.write.clone().unwrap().list, list(&[], None));
        assert_eq!(plan(&world, &[A]).supply, first.supply, "until that is written");
        let then = plan(&world, &[]);
        assert_eq!((then.supply, then.write), (Some(Supply::default()), None));
    }

    #[test]
    fn before_the_api_server_answers_what_is_granted_is_served_and_nothing_is_concluded() {
        let mode = ClusterPool::default();
        let unknown = |granted: &Supply, held: Option<&std::collections::BTreeSet<IpAddr>>| {
            let input = NodeInput {
                node: "n1",
                granted,
                held: super::super::Held(held),
                cilium_node: Observed::Unknown,
                kubernetes_node: Observed::Unknown,
                listed_elsewhere: &|_| false,
                contested: &|_| None,
                covering: &|_| None,
            };
            mode.plan(&input, Timestamp::UNIX_EPOCH)
        };
        let world = World::granted(&[A]);
        let plan = unknown(&world.granted, None);
        assert_eq!((World::served(&plan).as_deref(), plan.write), (Some(A), None));
        assert_eq!(unknown(&Supply::default(), Some(&world.held)).supply, None);
        assert_eq!(unknown(&Supply::default(), None).supply, None);
    }

    #[test]
    fn a_pod_cidr_that_another_node_lists_or_that_covers_the_nodes_network_gives_nothing_new() {
        let mode = ClusterPool::default();
        let elsewhere = Some(("n2", testing::net("10.33.0.0/25")));
        let world = World { listed: Some(texts(&[A])), elsewhere, ..World::granted(&[A]) };
        let plan = world.plan(&mode);
        let wait = &plan.waits[POD_CIDR_WAIT];
        assert!(wait.contains("n2") && wait.contains("10.33.0.0/25"), "{wait}");
        assert_eq!(plan.supply.unwrap().refusal(DEFAULT_POOL).as_ref(), Some(wait));
        let world = World { elsewhere: None, network: Some(testing::net("10.33.0.9/24")), ..world };
        let wait = world.plan(&mode).waits[POD_CIDR_WAIT].clone();
        assert!(wait.contains("10.33.0.0/24") && wait.contains("cluster-pool-ipv4-cidr"), "{wait}");
    }

    #[test]
    fn a_pod_cidr_outside_of_the_configured_ranges_is_reported_with_the_way_out() {
        let world = World { listed: Some(texts(&[A])), ..World::granted(&[A]) };
        for (ranges, found) in [(&[][..], false), (&["10.99.0.0/16", "10.33.0.0/16"], false), (&["10.99.0.0/16"], true)]
        {
            let mode = ClusterPool { ranges: ranges.iter().map(|text| net(text)).collect() };
            let findings = world.plan(&mode).findings;
            assert_eq!(!findings.is_empty(), found, "{ranges:?}");
            let good =
                |finding: &PlanFinding| ["10.99.0.0/16", A, "drain"].iter().all(|part| finding.message.contains(part));
            assert!(findings.iter().all(good), "{findings:?}");
        }
    }
}
