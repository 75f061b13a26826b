//! Rows of the observed tables: API objects, links, addresses and routes in our own types.

use cistern_core::ipam::node::CiliumNodeIntent;
use cistern_core::ipam::node::cluster_pool::Listed;
use cistern_core::ipam::verdict::Standing;
use cistern_core::ipam::{Overlap, find_overlaps};
use ipnet::{IpNet, Ipv4Net};
use jiff::Timestamp;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

/// Names an object of a namespaced kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ObjectKey {
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
}

/// An address of a node with its type, as in Node and CiliumNode.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct NodeAddress {
    /// `InternalIP`, `ExternalIP`, `CiliumInternalIP` or another value.
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
    /// Our condition, and its transition time.
    pub condition: Option<(NodeCondition, Timestamp)>,
    /// `spec.podCIDRs`, else `spec.podCIDR`; unparsed, since the reader reports invalid ones.
    pub pod_cidrs: Vec<String>,
    /// `metadata.annotations` with network addresses of the node.
    pub annotations: BTreeMap<String, String>,
}

/// The condition that reports whether a node's agent serves pods.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeCondition {
    /// `status` is `True`, else `False`.
    pub ready: bool,
    /// Machine-readable reason.
    pub reason: String,
    /// Human-readable.
    pub message: String,
}

/// A CiliumNode. Fields with arbitrary content of others remain text, which readers parse and report.
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
    /// The pod CIDR that the node's agent listed itself (annotation `cistern.io/claimed-pod-cidr`).
    pub claim: Option<Ipv4Net>,
    /// Why the object is invalid; then the fields are its previous ones, if any.
    pub unreadable: Option<String>,
    /// `status.ipam.operator-status.error`, absent when empty.
    pub operator_error: Option<String>,
    /// The operator's verdict on `pod_cidrs`.
    #[serde(skip)]
    pub standing: Standing,
    /// The annotation with the operator's verdict, unparsed.
    pub verdict_annotation: Option<String>,
    /// The last request to uninstall Cistern from the node, if any.
    pub uninstall: Option<String>,
    /// The agent's last answer to such a request.
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
    /// Its current name.
    pub name: String,
    /// `IFF_UP`
    pub up: bool,
    /// `IFF_LOOPBACK`
    pub loopback: bool,
    /// Kind as printed by `ip -d link`: `veth`, `bridge`, `bond`; empty for hardware.
    pub kind: String,
    /// Index of the bridge or bond that owns it.
    pub master: Option<u32>,
    /// In bytes.
    pub mtu: u32,
    /// Hardware address; empty if there is none.
    pub mac: Vec<u8>,
    /// Addresses in the kernel's order: primary before secondary.
    pub addresses: Vec<IpNet>,
}

/// A route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RouteRow {
    /// The destination.
    pub destination: Ipv4Net,
    /// Device; `None` for an unreachable route.
    pub ifindex: Option<u32>,
    /// Next hop.
    pub gateway: Option<Ipv4Addr>,
    /// Preferred source address.
    pub source: Option<Ipv4Addr>,
    /// Cistern set it.
    pub ours: bool,
}

/// The kernel's answer to where a packet of this node to an IPv4 address goes: rules, tables, metrics and next hops that
/// are down are considered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Hop {
    /// Device.
    pub ifindex: u32,
    /// Next hop, of either family. Without one the destination is directly connected.
    pub gateway: Option<IpAddr>,
    /// Source address of the packet.
    pub source: Option<Ipv4Addr>,
    /// MTU of the route, in bytes, if it has one of its own.
    pub mtu: Option<u32>,
}

/// The node's network: devices by index, and the unicast routes of the main table.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct NetworkRow {
    /// Devices by index.
    pub links: BTreeMap<u32, LinkRow>,
    /// Unicast IPv4 routes.
    pub routes: Vec<RouteRow>,
    /// Where packets go that only a default route leads to; `None` if nowhere.
    pub outside: Option<Hop>,
    /// The source address that the kernel chooses for packets by a device, by its index.
    pub sources: BTreeMap<u32, Ipv4Addr>,
    /// Differs when a [`Hop`] may have changed: digest of the rules, and of the routes of all tables but Cistern's own.
    pub routing: u64,
}

impl NetworkRow {
    /// MTU of packets by a hop: that of its route, else of its device.
    #[must_use]
    pub fn mtu(&self, hop: &Hop) -> Option<u32> {
        hop.mtu.or_else(|| Some(self.links.get(&hop.ifindex)?.mtu))
    }

    /// The node's own networks that overlap one of these pod CIDRs (`ipam` decision 17): those of its devices' addresses, and
    /// destinations of routes of others inside a pod CIDR. A /32 is not a network. The loopback device has the router
    /// address; if another device has it, too, that is a bridge of a plugin that uses us for IPAM, and its network is the
    /// pod CIDR.
    #[must_use]
    pub fn overlaps(&self, pod_cidrs: &[IpNet]) -> Vec<Overlap> {
        let (loopback, others): (Vec<_>, Vec<_>) = self.links.iter().partition(|(_, link)| link.loopback);
        let is_router = |address: &IpNet| {
            loopback.iter().flat_map(|(_, link)| &link.addresses).any(|router| router.addr() == address.addr())
        };
        let (bridges, others): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(_, link)| link.addresses.iter().any(is_router));
        let name =
            |ifindex: u32| self.links.get(&ifindex).map_or_else(|| ifindex.to_string(), |link| link.name.clone());
        let of_addresses = others.iter().flat_map(|(_, link)| {
            link.addresses.iter().map(|address| (*address, format!("device {} of this node", link.name)))
        });
        let of_routes = self.routes.iter().filter_map(|route| {
            let ifindex = route.ifindex.filter(|ifindex| bridges.iter().all(|(bridge, _)| *bridge != ifindex))?;
            let destination = IpNet::V4(route.destination);
            let inside = pod_cidrs.iter().any(|pods| pods.contains(&destination));
            (!route.ours && inside).then(|| (destination, format!("a route by device {}", name(ifindex))))
        });
        let mut networks: Vec<(IpNet, String)> =
            of_addresses.chain(of_routes).filter(|(net, _)| net.prefix_len() < net.max_prefix_len()).collect();
        // A connected route says what the address says.
        let mut seen = BTreeSet::new();
        networks.retain(|(net, _)| seen.insert(net.trunc()));
        find_overlaps(pod_cidrs, &networks)
    }
}

/// Something that the process waits for (`architecture` decision 11).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// What is missing, and who must provide it.
    pub reason: String,
    /// Start of the wait.
    pub since: Timestamp,
    /// Next retry; absent if it waits for an event.
    pub next_try: Option<Timestamp>,
}

/// A node of the cluster, as needed for routing and masquerading. Persisted, so that a restarted agent works while the
/// API server is down.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, serde::Deserialize)]
pub struct PeerRow {
    /// `InternalIP` addresses, in the object's order.
    pub internal_ips: Vec<Ipv4Addr>,
    /// The router address of the node (`CiliumInternalIP`).
    pub router: Option<Ipv4Addr>,
    /// Valid pod CIDRs, without host bits.
    pub pod_cidrs: Vec<Ipv4Net>,
}

/// The pod CIDR that this node serves.
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
    /// A network of this node covers it, and no pod has an address of it: nothing of it is set in the kernel.
    pub kept_out: bool,
}

impl PoolRow {
    /// A pod CIDR that is on disk, and about which there is nothing else to say.
    #[must_use]
    pub fn new(pod_cidr: Ipv4Net) -> Self {
        Self { pod_cidr, blocked: None, leaving: false, on_disk: true, kept_out: false }
    }
}

/// Desired content of this agent's CiliumNode. It writes nothing else there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnCiliumNode {
    /// `spec.addresses`
    pub addresses: Vec<NodeAddress>,
    /// Name and UID of the Node that owns the object.
    pub owner: Option<(String, String)>,
    /// What the IPAM mode writes; none when the object says it, or when that is not known yet.
    pub intent: Option<CiliumNodeIntent>,
}

/// How this node reaches another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub enum NextHop {
    /// On a network of this node.
    Direct {
        /// Address of the other node.
        address: Ipv4Addr,
        /// Device.
        ifindex: u32,
    },
    /// Through routers, or not at all; human-readable.
    None(String),
}

/// A route that this agent installs in the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum RouteTarget {
    /// Via the other node's address, on the directly connected device.
    Via {
        /// Address of the other node.
        gateway: Ipv4Addr,
        /// Device.
        ifindex: u32,
    },
    /// Unallocated addresses of the own pod CIDR: rejected instead of forwarded to the default route.
    Unreachable,
}

/// The route to a pod of this node, over the host side of its pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PodRoute {
    /// The host side.
    pub ifindex: u32,
    /// Source of this node's own packets to the pod: the router address.
    pub source: Ipv4Addr,
}

/// Content of a CiliumNode as desired by the operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CiliumNodeIpam {
    /// UID of the object; one that was recreated since is another one.
    pub uid: String,
    /// `metadata.resourceVersion` of the object that the plan was made from. If the object has changed, the plan is
    /// void: it must not overwrite changes that it does not know.
    pub planned_from: String,
    /// `spec.ipam.podCIDRs`
    pub pod_cidrs: Vec<String>,
    /// The agent's claim; `None` removes the annotation, because the pod CIDR is assigned to the node now.
    pub claim: Option<Ipv4Net>,
    /// `status.ipam.operator-status.error`; `None` clears it.
    pub error: Option<String>,
    /// The annotation with the verdict of `error`; `None` removes it.
    pub verdict_annotation: Option<String>,
    /// The object has a refusal that is withdrawn: its text is removed before its annotation.
    pub withdraws_refusal: bool,
}

/// A selected egress device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChosenDevice {
    /// Name.
    pub name: String,
    /// The masquerade address.
    pub address: Option<Ipv4Addr>,
    /// The reason for the selection.
    pub reason: String,
}

/// State of masquerading, for display.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct MasqueradeRow {
    /// By index.
    pub devices: BTreeMap<u32, ChosenDevice>,
    /// Why this node cannot masquerade; `None` if it can.
    pub not_ready: Option<String>,
    /// Source of the ip-masq-agent list.
    pub ip_masq_source: String,
    /// Warnings and the error of the file's last version.
    pub problems: Vec<String>,
}

/// Content of a file that another program writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileContent {
    /// The file does not exist.
    Absent,
    /// The bytes of the file.
    Bytes(Vec<u8>),
    /// The file exists and cannot be read.
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
        let mut network = NetworkRow {
            links: BTreeMap::from([(2, link("cni0", false, &["10.244.1.7/24"]))]),
            ..NetworkRow::default()
        };
        let pod_cidrs = ["10.244.1.0/24".parse().unwrap()];
        let found = |network: &NetworkRow| -> Vec<String> {
            network
                .overlaps(&pod_cidrs)
                .into_iter()
                .map(|overlap| format!("{} {}", overlap.network, overlap.what))
                .collect()
        };
        assert_eq!(found(&network), ["10.244.1.0/24 device cni0 of this node"]);
        let route = |destination: &str, ifindex| RouteRow {
            destination: destination.parse().unwrap(),
            ifindex: Some(ifindex),
            gateway: None,
            source: None,
            ours: false,
        };
        network.routes = vec![route("10.244.1.0/24", 2)];
        assert_eq!(found(&network).len(), 1, "the route of that network");
        network.links.insert(1, link("lo", true, &["127.0.0.1/8", "10.244.1.7/32"]));
        assert!(found(&network).is_empty());
        // Inside the pod CIDR, and only there.
        network.links.insert(3, link("tun0", false, &["192.0.2.1/24"]));
        network.routes.extend([route("10.244.1.64/26", 3), route("10.0.0.0/8", 3), route("0.0.0.0/0", 3)]);
        network.routes.extend([route("10.244.1.9/32", 3), RouteRow { ours: true, ..route("10.244.1.128/26", 3) }]);
        assert_eq!(found(&network), ["10.244.1.64/26 a route by device tun0"]);
    }
}
