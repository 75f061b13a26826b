//! The rows of the tables that are observed: API objects, links, addresses and routes in our own types.

use cistern_core::ipam::node::CiliumNodeIntent;
use cistern_core::ipam::node::cluster_pool::Listed;
use cistern_core::ipam::verdict::Standing;
use cistern_core::ipam::{Overlap, find_overlaps};
use ipnet::{IpNet, Ipv4Net};
use jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// Names an object of a namespaced kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ObjectKey {
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
}

/// An address of a node with its type, as Node and CiliumNode list it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NodeAddress {
    /// `InternalIP`, `ExternalIP`, `CiliumInternalIP` or whatever else the object says.
    pub kind: String,
    /// The address.
    pub ip: IpAddr,
}

/// A Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct NodeRow {
    /// `metadata.uid`
    pub uid: String,
    /// `status.addresses` that are IP addresses.
    pub addresses: Vec<NodeAddress>,
    /// Our condition, and when it came into its state.
    pub condition: Option<(NodeCondition, Timestamp)>,
    /// `spec.podCIDRs`, else `spec.podCIDR`; text, since whoever uses it reports what is no CIDR.
    pub pod_cidrs: Vec<String>,
    /// Those `metadata.annotations` that name network addresses of the node.
    pub annotations: BTreeMap<String, String>,
}

/// The condition that says whether the agent of a node serves pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeCondition {
    /// `status` is `True`, else `False`.
    pub ready: bool,
    /// A fixed word.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// A CiliumNode. Fields that others may fill with anything stay text; whoever uses them parses them and reports.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct CiliumNodeRow {
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.resourceVersion`, the precondition of a write.
    pub resource_version: String,
    /// `metadata.creationTimestamp`
    pub created: Option<Timestamp>,
    /// `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Name and UID of the Node among `metadata.ownerReferences`.
    pub owner: Option<(String, String)>,
    /// `spec.addresses` that are IP addresses.
    pub addresses: Vec<NodeAddress>,
    /// `spec.ipam.podCIDRs`
    pub pod_cidrs: Vec<String>,
    /// The block that the node's agent listed by itself (annotation `cistern.io/claimed-pod-cidr`).
    pub claim: Option<Ipv4Net>,
    /// Why the object cannot be read as it is now; then the fields are those of before, if there was a before.
    pub unreadable: Option<String>,
    /// `status.ipam.operator-status.error`, absent when empty.
    pub operator_error: Option<String>,
    /// The operator's verdict on `pod_cidrs`.
    #[serde(skip)]
    pub standing: Standing,
    /// The annotation that holds the operator's verdict, as written.
    pub verdict_annotation: Option<String>,
    /// The request to take everything of ours off the node, if there ever was one.
    pub uninstall: Option<String>,
    /// What the node's agent answered to such a request last.
    pub uninstalled: Option<String>,
}

impl CiliumNodeRow {
    /// What it says of pod CIDRs.
    #[must_use]
    pub fn listed(&self) -> Listed<'_> {
        let Standing { is_contested, .. } = self.standing;
        let refusal = self.standing.refusal();
        Listed { pod_cidrs: &self.pod_cidrs, claim: self.claim, refusal, is_contested }
    }

    /// The first address of a kind, IPv4 only.
    #[must_use]
    pub fn ipv4(&self, kind: &str) -> Option<Ipv4Addr> {
        self.addresses.iter().filter(|address| address.kind == kind).find_map(|address| match address.ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
    }
}

/// A network device of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LinkRow {
    /// Its name now.
    pub name: String,
    /// `IFF_UP`
    pub up: bool,
    /// `IFF_LOOPBACK`
    pub loopback: bool,
    /// Kind as `ip -d link` prints it: `veth`, `bridge`, `bond`; empty for hardware.
    pub kind: String,
    /// Index of the bridge or bond that owns it.
    pub master: Option<u32>,
    /// In bytes.
    pub mtu: u32,
    /// Hardware address; empty where there is none.
    pub mac: Vec<u8>,
    /// Addresses in the order of the kernel: primary before secondary.
    pub addresses: Vec<IpNet>,
}

/// A route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RouteRow {
    /// Where to.
    pub destination: Ipv4Net,
    /// Device; none for an unreachable route.
    pub ifindex: Option<u32>,
    /// Next hop.
    pub gateway: Option<Ipv4Addr>,
    /// Source address that the route prefers.
    pub source: Option<Ipv4Addr>,
}

/// What the node's network looks like: devices by index, and the unicast routes of the main table.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct NetworkRow {
    /// Devices by index.
    pub links: BTreeMap<u32, LinkRow>,
    /// Unicast IPv4 routes.
    pub routes: Vec<RouteRow>,
}

impl NetworkRow {
    /// Networks of the node itself that one of these ranges overlaps. An address of its own (/32) is no network. The loopback
    /// device holds the router address; another device that has it too is the bridge of a plugin that gets its addresses
    /// from us, and its network is the pod CIDR.
    #[must_use]
    pub fn overlaps(&self, ranges: &[IpNet]) -> Vec<Overlap> {
        let (loopback, others): (Vec<_>, Vec<_>) = self.links.values().partition(|link| link.loopback);
        let is_router = |address: &IpNet| {
            loopback.iter().flat_map(|link| &link.addresses).any(|router| router.addr() == address.addr())
        };
        let networks: Vec<(IpNet, String)> = others
            .iter()
            .flat_map(|link| {
                link.addresses.iter().map(|address| (*address, format!("device {} of this node", link.name)))
            })
            .filter(|(address, _)| address.prefix_len() < address.max_prefix_len() && !is_router(address))
            .collect();
        find_overlaps(ranges, &networks)
    }
}

/// Something that the process waits for (`architecture` decision 11).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// What is waited for, and who must provide it.
    pub reason: String,
    /// Since when.
    pub since: Timestamp,
    /// When it is tried again by itself; absent when an event is awaited.
    pub next_try: Option<Timestamp>,
}

/// A node of the cluster with all that routing and masquerading need of it. Kept on disk, so that a restart while the
/// API is down serves from it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, serde::Deserialize)]
pub struct PeerRow {
    /// `InternalIP` addresses, in the object's order.
    pub internal_ips: Vec<Ipv4Addr>,
    /// The router address the node says it has (`CiliumInternalIP`).
    pub router: Option<Ipv4Addr>,
    /// Pod CIDRs that could be read; host bits are cut.
    pub pod_cidrs: Vec<Ipv4Net>,
}

/// What this node's pods get addresses from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PoolRow {
    /// The pod CIDR.
    pub pod_cidr: Ipv4Net,
    /// Why no new address may be allocated from it, with the fix. Pods that have one keep it.
    pub blocked: Option<String>,
    /// It is given up as soon as it has gone off the CiliumNode's list.
    pub leaving: bool,
    /// A restart would serve from it, too.
    pub on_disk: bool,
}

impl PoolRow {
    /// A pod CIDR that is on disk, and about which there is nothing else to say.
    #[must_use]
    pub fn new(pod_cidr: Ipv4Net) -> Self {
        Self { pod_cidr, blocked: None, leaving: false, on_disk: true }
    }
}

/// What this agent wants its CiliumNode to say. It writes nothing else there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnCiliumNode {
    /// `spec.addresses`
    pub addresses: Vec<NodeAddress>,
    /// Name and UID of the Node that owns the object.
    pub owner: Option<(String, String)>,
    /// What the IPAM mode writes; none when the object says it, or when that is not known yet.
    pub intent: Option<CiliumNodeIntent>,
}

/// A route that this agent wants in the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RouteTarget {
    /// By the other node's address, on the device that reaches it directly.
    Via {
        /// Address of the other node.
        gateway: Ipv4Addr,
        /// Device.
        ifindex: u32,
    },
    /// Addresses of the own pod CIDR that no pod holds: answered at once instead of sent to the default route.
    Unreachable,
}

/// What the operator wants a CiliumNode to say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CiliumNodeIpam {
    /// The object this is meant for; one of the same name that was made since is another one.
    pub uid: String,
    /// `metadata.resourceVersion` of the object that this was planned from. Once the object has changed, this is no longer
    /// meant: what somebody else wrote there must be planned with before it is written over.
    pub planned_from: String,
    /// `spec.ipam.podCIDRs`
    pub pod_cidrs: Vec<String>,
    /// What the node's agent listed by itself; none takes the annotation away, since it is the node's block by now.
    pub claim: Option<Ipv4Net>,
    /// `status.ipam.operator-status.error`; none clears it.
    pub error: Option<String>,
    /// The annotation that holds the verdict behind `error`; none removes it.
    pub verdict_annotation: Option<String>,
    /// The object shows a refusal that is withdrawn: its text goes before its annotation.
    pub withdraws_refusal: bool,
}

/// An egress device and why it was chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChosenDevice {
    /// Name.
    pub name: String,
    /// Address that pods leave under.
    pub address: Option<Ipv4Addr>,
    /// Why this device.
    pub reason: String,
}

/// How pod traffic that leaves the cluster is treated, for people.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct MasqueradeRow {
    /// By index.
    pub devices: BTreeMap<u32, ChosenDevice>,
    /// Why this node cannot masquerade; none when it can.
    pub not_ready: Option<String>,
    /// Where the ip-masq-agent list comes from.
    pub ip_masq_source: String,
    /// Warnings and the error of the last reading of the file.
    pub problems: Vec<String>,
}

/// What a file holds that somebody else writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileContent {
    /// There is no such file.
    Absent,
    /// The bytes of the file.
    Bytes(Vec<u8>),
    /// The file is there and cannot be read.
    Unreadable(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_with_the_router_address_is_no_network_of_the_node() {
        let link = |name: &str, loopback: bool, addresses: &[&str]| LinkRow {
            name: name.into(),
            up: true,
            loopback,
            kind: String::new(),
            master: None,
            mtu: 1500,
            mac: Vec::new(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        };
        let mut network =
            NetworkRow { links: BTreeMap::from([(2, link("cni0", false, &["10.244.1.7/24"]))]), routes: Vec::new() };
        let ranges = ["10.244.0.0/16".parse().unwrap()];
        assert_eq!(network.overlaps(&ranges).len(), 1);
        network.links.insert(1, link("lo", true, &["127.0.0.1/8", "10.244.1.7/32"]));
        assert_eq!(network.overlaps(&ranges), []);
    }
}
