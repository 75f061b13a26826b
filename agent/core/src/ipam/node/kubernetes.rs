//! Mode `kubernetes`: the pod CIDR of the Node (`ipam` 2.3).
//!
//! kube-controller-manager writes `spec.podCIDRs`; other allocators may use annotations. A range in use is kept while
//! any of its addresses is allocated, whatever the Node says later.

use super::cluster_pool::List;
use super::{NodeInput, NodeMode, NodePlan, Observed, POD_CIDR_WAIT};
use crate::ip::Family;
use crate::ipam::supply::{DEFAULT_POOL, Grant, Supply};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The prefixes of the annotations; the first is written and has precedence.
const PREFIXES: [&str; 2] = ["network.cilium.io/", "io.cilium.network."];
const IPV4_POD_CIDR: &str = "ipv4-pod-cidr";
const IPV6_POD_CIDR: &str = "ipv6-pod-cidr";
const IPV4_ROUTER: &str = "ipv4-cilium-host";

/// The mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kubernetes {
    /// `k8s-require-ipv6-pod-cidr`: wait for an IPv6 range, too.
    pub require_ipv6: bool,
}

impl NodeMode for Kubernetes {
    fn plan(&self, input: &NodeInput<'_>, _now: Timestamp) -> NodePlan {
        let granted = input.granted.served(DEFAULT_POOL, Family::Ipv4);
        let named = match &input.kubernetes_node {
            Observed::Unknown => {
                return NodePlan { supply: granted.map(|_| input.granted.clone()), ..NodePlan::default() };
            }
            Observed::Absent => None,
            Observed::Present(node) => Some(NodeCidrs::read(node.pod_cidrs, node.annotations)),
        };
        let current = granted.and_then(|grant| match grant.net {
            IpNet::V4(net) => Some(net),
            IpNet::V6(_) => None,
        });
        let held = granted.is_some_and(|grant| input.held.may_hold(&grant.net));
        let Choice { pod_cidr, wait } = choose(input.node, current, named.as_ref(), self.require_ipv6, held);
        let net = pod_cidr.map(IpNet::V4);
        let fix = "assign the Nodes pod CIDRs of a range that no node uses (--cluster-cidr)";
        let blocked = net.and_then(|net| input.blocked(&net, fix));
        let mut supply = Supply::of_grants(net.map(Grant::new));
        supply.block(blocked.as_deref());
        // The list of the CiliumNode is this agent's alone.
        let listed = input.cilium_node.present().map(|object| object.listed.pod_cidrs).unwrap_or_default();
        let wanted = net.map(|net| List { pod_cidrs: vec![net.to_string()], claim: None });
        NodePlan {
            supply: Some(supply),
            write: input.intent(wanted.filter(|list| list.pod_cidrs != listed), false),
            waits: blocked.or(wait).map(|reason| BTreeMap::from([(POD_CIDR_WAIT, reason)])).unwrap_or_default(),
            findings: Vec::new(),
        }
    }

    fn granted_message(&self) -> &'static str {
        "Retrieved local node information from kubernetes Node"
    }
}

/// Whether this mode reads or preserves an annotation of a Node.
#[must_use]
pub fn is_network_annotation(key: &str) -> bool {
    PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

fn annotation<'a>(annotations: &'a BTreeMap<String, String>, name: &str) -> Option<&'a str> {
    let values = PREFIXES.iter().filter_map(|prefix| annotations.get(&format!("{prefix}{name}")));
    values.map(|value| value.trim()).find(|value| !value.is_empty())
}

/// The router address in the Node's annotations, if valid.
#[must_use]
pub fn router(annotations: &BTreeMap<String, String>) -> Option<Ipv4Addr> {
    annotation(annotations, IPV4_ROUTER)?.parse().ok()
}

/// The annotations written with `annotate-k8s-node`. Those of Cilium's health and ingress addresses are not touched.
#[must_use]
pub fn annotations(pod_cidr: Ipv4Net, router: Ipv4Addr) -> BTreeMap<String, String> {
    let [prefix, _] = PREFIXES;
    [(IPV4_POD_CIDR, pod_cidr.to_string()), (IPV4_ROUTER, router.to_string())]
        .into_iter()
        .map(|(name, value)| (format!("{prefix}{name}"), value))
        .collect()
}

/// Whether an annotation is one of [`annotations`].
#[must_use]
pub fn is_written(key: &str) -> bool {
    let [prefix, _] = PREFIXES;
    key.strip_prefix(prefix).is_some_and(|name| [IPV4_POD_CIDR, IPV4_ROUTER].contains(&name))
}

/// The ranges of a Node, without host bits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeCidrs {
    /// The first IPv4 range.
    pub ipv4: Option<Ipv4Net>,
    /// The first IPv6 range. Required with `k8s-require-ipv6-pod-cidr`, but not served.
    pub ipv6: Option<Ipv6Net>,
    /// Invalid values.
    pub unreadable: Vec<String>,
}

impl NodeCidrs {
    /// Reads `spec.podCIDRs` (or `spec.podCIDR`), and for a family that it lacks, the annotation.
    #[must_use]
    pub fn read(spec: &[String], from: &BTreeMap<String, String>) -> Self {
        let mut found = Self::default();
        let annotated = [IPV4_POD_CIDR, IPV6_POD_CIDR].into_iter().filter_map(|name| annotation(from, name));
        for text in spec.iter().map(|text| text.trim()).chain(annotated) {
            match text.parse::<IpNet>() {
                Ok(IpNet::V4(net)) => found.ipv4 = found.ipv4.or(Some(net.trunc())),
                Ok(IpNet::V6(net)) => found.ipv6 = found.ipv6.or(Some(net.trunc())),
                Err(_) => found.unreadable.push(text.to_owned()),
            }
        }
        found
    }

    fn in_words(&self) -> String {
        let nets = self.ipv4.iter().map(ToString::to_string).chain(self.ipv6.iter().map(ToString::to_string));
        let bad = self.unreadable.iter().map(|text| format!("{text:?}, which is no CIDR"));
        let all: Vec<String> = nets.chain(bad).collect();
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    }
}

/// The decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The range to serve; `None` if there is none yet.
    pub pod_cidr: Option<Ipv4Net>,
    /// Why no range is served, or not the Node's, with the remedy.
    pub wait: Option<String>,
}

/// Decides between the range in use and that of the Node. `held`: an address of the range in use may be allocated.
#[must_use]
pub fn choose(
    node: &str,
    current: Option<Ipv4Net>,
    named: Option<&NodeCidrs>,
    require_ipv6: bool,
    held: bool,
) -> Choice {
    let keep = |wait: Option<String>| Choice { pod_cidr: current, wait };
    let Some(named) = named else {
        let wait = format!("required IPv4 PodCIDR not available: there is no Node {node:?} yet; kubelet registers it");
        return keep(current.is_none().then_some(wait));
    };
    match (current, named.ipv4) {
        (Some(current), Some(wanted)) if current != wanted && held => keep(Some(format!(
            "Node {node:?} names {wanted} as its IPv4 PodCIDR, but {current} is in use: pods keep their \
             addresses, and new ones come from {current}. {wanted} is taken when nothing on this node holds an address \
             any more: drain the node to have it"
        ))),
        // A removed range is a change, too; without a new one there is nothing else to serve.
        (Some(current), None) => keep(Some(format!(
            "Node {node:?} names no IPv4 PodCIDR any more (found: {}); {current} is in use and stays so",
            named.in_words()
        ))),
        (None, None) => keep(Some(format!(
            "required IPv4 PodCIDR not available: Node {node:?} has none in spec.podCIDRs and no annotation \
             network.cilium.io/ipv4-pod-cidr (found: {}); in mode kubernetes kube-controller-manager writes it when it \
             runs with --allocate-node-cidrs and --cluster-cidr",
            named.in_words()
        ))),
        (None, Some(_)) if require_ipv6 && named.ipv6.is_none() => keep(Some(format!(
            "required IPv6 PodCIDR not available: Node {node:?} has none in spec.podCIDRs and no annotation \
             network.cilium.io/ipv6-pod-cidr (found: {}); k8s-require-ipv6-pod-cidr=true asks for one",
            named.in_words()
        ))),
        (_, wanted) => Choice { pod_cidr: wanted, wait: None },
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{self, World};
    use super::*;

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    fn noted(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn net(text: &str) -> Ipv4Net {
        text.parse().unwrap()
    }

    #[test]
    fn the_spec_wins_over_annotations_family_by_family() {
        let annotated = noted(&[
            ("network.cilium.io/ipv4-pod-cidr", "10.7.0.0/24"),
            ("io.cilium.network.ipv4-pod-cidr", "10.8.0.0/24"),
            ("io.cilium.network.ipv6-pod-cidr", "fd31::/112"),
        ]);
        let both = NodeCidrs::read(&texts(&["10.201.3.9/24"]), &annotated);
        assert_eq!((both.ipv4, both.ipv6), (Some(net("10.201.3.0/24")), Some("fd31::/112".parse().unwrap())));
        let only = NodeCidrs::read(&[], &annotated);
        assert_eq!(only.ipv4, Some(net("10.7.0.0/24")), "the present spelling before the old one");
        // An invalid value in the spec does not hide a valid annotation, and is reported.
        let mended = NodeCidrs::read(&texts(&["10.201/24"]), &annotated);
        assert_eq!((mended.ipv4, mended.unreadable), (Some(net("10.7.0.0/24")), texts(&["10.201/24"])));
    }

    // case: ipam C2
    #[test]
    fn an_ipv6_range_alone_is_waited_with_and_named() {
        let named = NodeCidrs::read(&texts(&["fd31::3:0/112"]), &BTreeMap::new());
        let Choice { pod_cidr, wait } = choose("n1", None, Some(&named), false, false);
        assert_eq!(pod_cidr, None);
        let wait = wait.unwrap();
        assert!(wait.contains("required IPv4 PodCIDR") && wait.contains("fd31::3:0/112"), "{wait}");
    }

    // case: ipam C1
    #[test]
    fn both_families_are_waited_for_where_both_are_required() {
        let ipv4 = NodeCidrs::read(&texts(&["10.201.3.0/24"]), &BTreeMap::new());
        let waiting = choose("n1", None, Some(&ipv4), true, false);
        assert!(waiting.pod_cidr.is_none() && waiting.wait.unwrap().contains("required IPv6 PodCIDR"));
        let both = NodeCidrs::read(&texts(&["10.201.3.0/24", "fd31::3:0/112"]), &BTreeMap::new());
        let ready = Choice { pod_cidr: Some(net("10.201.3.0/24")), wait: None };
        assert_eq!(choose("n1", None, Some(&both), true, false), ready);
        assert!(choose("n1", None, None, true, false).wait.unwrap().contains("no Node"));
    }

    // case: ipam C4
    #[test]
    fn a_range_in_use_is_left_only_when_nothing_holds_an_address_of_it() {
        let named = NodeCidrs::read(&texts(&["10.201.9.0/24"]), &BTreeMap::new());
        let old = Some(net("10.201.3.0/24"));
        let kept = choose("n1", old, Some(&named), false, true);
        assert_eq!(kept.pod_cidr, old);
        let wait = kept.wait.unwrap();
        assert!(wait.contains("10.201.9.0/24") && wait.contains("10.201.3.0/24 is in use"), "{wait}");
        assert_eq!(choose("n1", old, Some(&named), false, false).pod_cidr, named.ipv4);
        // Removed, or the Node deleted: with or without allocated addresses there is nothing else to serve.
        let none = choose("n1", old, Some(&NodeCidrs::default()), false, false);
        assert!(none.pod_cidr == old && none.wait.is_some());
        assert_eq!(choose("n1", old, None, false, false), Choice { pod_cidr: old, wait: None });
    }

    #[test]
    fn what_is_annotated_is_read_again() {
        let written = annotations(net("10.201.3.0/24"), "10.201.3.77".parse().unwrap());
        assert_eq!(NodeCidrs::read(&[], &written).ipv4, Some(net("10.201.3.0/24")));
        assert_eq!(router(&written), Some("10.201.3.77".parse().unwrap()));
        assert!(written.keys().all(|key| is_network_annotation(key) && is_written(key)));
        assert_eq!(router(&noted(&[("io.cilium.network.ipv4-cilium-host", "10.1.1.1")])), "10.1.1.1".parse().ok());
        assert_eq!(router(&noted(&[("network.cilium.io/ipv4-cilium-host", "none")])), None);
    }

    #[test]
    fn the_node_names_the_pod_cidr_and_the_cilium_node_is_kept_equal_to_it() {
        let mode = Kubernetes::default();
        let elsewhere = Some(("n2", testing::net("10.201.3.0/25")));
        let mut world = World {
            node: Some(texts(&["10.201.3.0/24"])),
            listed: Some(texts(&["10.9.0.0/24"])),
            elsewhere,
            ..World::granted(&[])
        };
        let plan = world.plan(&mode);
        assert_eq!(World::served(&plan).as_deref(), Some("10.201.3.0/24"));
        assert!(plan.supply.as_ref().unwrap().refusal(DEFAULT_POOL).unwrap().contains("CiliumNode n2"));
        let write = plan.write.unwrap();
        assert_eq!((write.list.unwrap().pod_cidrs, write.contested), (texts(&["10.201.3.0/24"]), false));
        world.listed = Some(texts(&["10.201.3.0/24"]));
        assert_eq!(world.plan(&mode).write, None);
        // Another one is taken when nothing is held.
        world.granted = plan.supply.unwrap();
        world.node = Some(texts(&["10.201.9.0/24"]));
        assert_eq!(World::served(&world.plan(&mode)).as_deref(), Some("10.201.9.0/24"));
        world.held.insert("10.201.3.5".parse().unwrap());
        assert_eq!(World::served(&world.plan(&mode)).as_deref(), Some("10.201.3.0/24"));
    }
}
