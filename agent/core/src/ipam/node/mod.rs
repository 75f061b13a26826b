//! IPAM decisions of the node.
//!
//! A [`NodeMode`] answers, in one pure call, what the node may allocate from *and* what its agent writes to its CiliumNode. The
//! owner of the leases asks it with what is granted and held at that moment, takes the answer over, and publishes what is to
//! be written once the grants that it rests on are on disk. A new IPAM mode is one file here, a
//! name in [`IpamMode`](crate::settings::IpamMode), and a line in the agent's role (`node_mode` in `app/agent_role.rs`). One that
//! reads more of its CiliumNode also extends [`CiliumNodeFacts`] and the row it is made from.

pub mod address_set;
mod bookings;
pub mod cluster_pool;
pub mod kubernetes;
pub mod pod_cidr;

use super::Overlap;
use super::supply::Supply;
use crate::ip::Family;
use cluster_pool::{List, Listed};
use ipnet::IpNet;
use jiff::Timestamp;
use pod_cidr::Contested;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// Name of the wait for a pod CIDR: why there is none, or why another one is served than the API object names.
pub const POD_CIDR_WAIT: &str = "pod CIDR";

/// The state of an object, as known from the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observed<T> {
    /// Unknown in this run.
    Unknown,
    /// The object does not exist.
    Absent,
    /// The object.
    Present(T),
}

impl<T> Observed<T> {
    /// The object, if there is one.
    pub fn present(&self) -> Option<&T> {
        match self {
            Self::Present(object) => Some(object),
            Self::Unknown | Self::Absent => None,
        }
    }
}

/// This node's CiliumNode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CiliumNodeFacts<'a> {
    /// `metadata.resourceVersion`
    pub resource_version: &'a str,
    /// Its list of pod CIDRs.
    pub listed: Listed<'a>,
}

/// This node's Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFacts<'a> {
    /// `metadata.uid`
    pub uid: &'a str,
    /// `spec.podCIDRs`, else `spec.podCIDR`.
    pub pod_cidrs: &'a [String],
    /// Its annotations with network addresses of the node.
    pub annotations: &'a BTreeMap<String, String>,
}

/// Addresses that pods and other lease holders have; none while that is not known.
#[derive(Debug, Clone, Copy)]
pub struct Held<'a>(pub Option<&'a BTreeSet<IpAddr>>);

impl Held<'_> {
    /// Whether something may hold an address of a pod CIDR. While it is not known, something may.
    #[must_use]
    pub fn may_hold(&self, net: &IpNet) -> bool {
        self.0.is_none_or(|held| held.iter().any(|address| net.contains(address)))
    }

    /// The held addresses of a family outside of a pod CIDR; none while they are not known.
    #[must_use]
    pub fn outside(&self, net: Option<&IpNet>, family: Family) -> Option<Vec<IpAddr>> {
        let outside =
            |address: &&IpAddr| Family::of(**address) == family && net.is_none_or(|net| !net.contains(*address));
        Some(self.0?.iter().filter(outside).copied().collect())
    }
}

/// The input of a plan. The questions about other nodes are asked only where the answer matters.
pub struct NodeInput<'a> {
    /// Name of this node.
    pub node: &'a str,
    /// The granted pod CIDRs.
    pub granted: &'a Supply,
    /// The addresses held now.
    pub held: Held<'a>,
    /// This node's CiliumNode.
    pub cilium_node: Observed<CiliumNodeFacts<'a>>,
    /// This node's Node.
    pub kubernetes_node: Observed<NodeFacts<'a>>,
    /// Whether another CiliumNode lists a pod CIDR that overlaps with this one; false before the API server has answered.
    pub listed_elsewhere: &'a dyn Fn(&IpNet) -> bool,
    /// The other node whose pod CIDR overlaps with this one, by what is known of the cluster.
    pub contested: &'a dyn Fn(&IpNet) -> Option<Contested>,
    /// The network of this node that covers the whole of this pod CIDR. A smaller one only keeps its own addresses from
    /// being allocated.
    pub covering: &'a dyn Fn(&IpNet) -> Option<Overlap>,
}

impl NodeInput<'_> {
    /// Why no address of a pod CIDR may be allocated, with the remedy.
    #[must_use]
    pub fn blocked(&self, net: &IpNet, fix: &str) -> Option<String> {
        if let Some(contested) = (self.contested)(net) {
            return Some(contested.to_string());
        }
        (self.covering)(net).map(|overlap| format!("{overlap}: {fix}"))
    }

    /// The intent to write a list; none where the object exists and lists what it should.
    fn intent(&self, list: Option<List>, contested: bool) -> Option<CiliumNodeIntent> {
        match &self.cilium_node {
            Observed::Unknown => None,
            Observed::Absent => Some(CiliumNodeIntent { planned_from: None, list, contested }),
            Observed::Present(object) => {
                let planned_from = Some(object.resource_version.to_owned());
                list.map(|list| CiliumNodeIntent { planned_from, list: Some(list), contested })
            }
        }
    }
}

/// What this node's agent writes to its CiliumNode, beside addresses and owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CiliumNodeIntent {
    /// The resource version of the object that this was planned from; none when there was no object. Once the object has
    /// changed this is void: the plan that knows of the change follows.
    pub planned_from: Option<String>,
    /// The list of pod CIDRs to write; none leaves it to others.
    pub list: Option<List>,
    /// Others write the list, too: it is written only over the version that it was planned from, and not too often.
    pub contested: bool,
}

/// A condition that is reported to the administrator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanFinding {
    /// A machine-readable reason.
    pub reason: &'static str,
    /// Its subject.
    pub subject: String,
    /// Human-readable text.
    pub message: String,
}

/// The plan of a mode.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodePlan {
    /// What the node may allocate from; none while that is not known, and then whatever was granted stays as it is.
    pub supply: Option<Supply>,
    /// What is written to the CiliumNode, once the pod CIDRs of `supply` are on disk; none when the object says it.
    pub write: Option<CiliumNodeIntent>,
    /// Waits, by name.
    pub waits: BTreeMap<&'static str, String>,
    /// Findings to report.
    pub findings: Vec<PlanFinding>,
}

/// An IPAM mode, as the node sees it. Planning an applied plan again changes nothing.
pub trait NodeMode: Send + Sync {
    /// Plans what is allocated from and what is written.
    fn plan(&self, input: &NodeInput<'_>, now: Timestamp) -> NodePlan;

    /// The log message for a changed pod CIDR.
    fn granted_message(&self) -> &'static str {
        "pod CIDR granted"
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::ipam::supply::{DEFAULT_POOL, Grant};

    /// A node with one granted pod CIDR or none, as its CiliumNode and Node describe it.
    pub(crate) struct World {
        pub(crate) granted: Supply,
        pub(crate) held: BTreeSet<IpAddr>,
        /// The list of its CiliumNode; none when there is no object.
        pub(crate) listed: Option<Vec<String>>,
        pub(crate) claim: Option<ipnet::Ipv4Net>,
        /// The list of its Node; none when there is no object.
        pub(crate) node: Option<Vec<String>>,
        /// A pod CIDR listed by another node.
        pub(crate) elsewhere: Option<(&'static str, IpNet)>,
        /// Another network of this node.
        pub(crate) network: Option<IpNet>,
    }

    pub(crate) fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    impl World {
        pub(crate) fn granted(nets: &[&str]) -> Self {
            Self {
                granted: Supply::of_grants(nets.iter().map(|text| Grant::new(net(text)))),
                held: BTreeSet::new(),
                listed: None,
                claim: None,
                node: None,
                elsewhere: None,
                network: None,
            }
        }

        pub(crate) fn plan(&self, mode: &dyn NodeMode) -> NodePlan {
            let annotations = BTreeMap::new();
            let listed = |pod_cidrs| Listed { pod_cidrs, claim: self.claim, ..Listed::default() };
            let cilium_node =
                self.listed.as_deref().map(|list| CiliumNodeFacts { resource_version: "7", listed: listed(list) });
            let node =
                self.node.as_deref().map(|pod_cidrs| NodeFacts { uid: "u1", pod_cidrs, annotations: &annotations });
            let overlapping = |own: &IpNet| self.elsewhere.filter(|(_, other)| crate::ip::overlaps(own, other));
            let input = NodeInput {
                node: "n1",
                granted: &self.granted,
                held: Held(Some(&self.held)),
                cilium_node: cilium_node.map_or(Observed::Absent, Observed::Present),
                kubernetes_node: node.map_or(Observed::Absent, Observed::Present),
                listed_elsewhere: &|own| overlapping(own).is_some(),
                contested: &|own| pod_cidr::contested(own, "n1", overlapping(own)),
                covering: &|own| {
                    let networks: Vec<_> = self.network.iter().map(|net| (*net, "eth0".to_owned())).collect();
                    crate::ipam::find_overlaps(&[*own], &networks).into_iter().find(Overlap::covers)
                },
            };
            mode.plan(&input, Timestamp::UNIX_EPOCH)
        }

        /// The plan after its supply was taken over.
        pub(crate) fn served(plan: &NodePlan) -> Option<String> {
            let supply = plan.supply.as_ref()?;
            supply.served(DEFAULT_POOL, Family::Ipv4).map(|grant| grant.net.to_string())
        }
    }
}
