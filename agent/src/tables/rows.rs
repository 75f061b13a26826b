//! The rows of the tables that are observed: API objects, links, addresses and routes in our own types.

use super::Rows;
use cistern_core::ipam::node::cluster_pool::{Listed, Served};
use cistern_core::ipam::verdict::Standing;
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct PoolRow {
    /// The pod CIDR.
    pub pod_cidr: Ipv4Net,
    /// Why no new address may be given from it, with the fix. Pods that have one keep it.
    pub blocked: Option<String>,
    /// It is given up as soon as it is certain that no address of it is given any more.
    #[serde(default)]
    pub leaving: bool,
    /// In mode `cluster-pool`: UID of the Node that the pod CIDR was last listed for.
    #[serde(default)]
    pub node_uid: Option<String>,
    /// In mode `cluster-pool`: it was listed for this node since the agent started.
    #[serde(skip)]
    pub confirmed: bool,
}

impl PoolRow {
    /// A pod CIDR about which there is nothing else to say.
    #[must_use]
    pub fn new(pod_cidr: Ipv4Net) -> Self {
        Self { pod_cidr, blocked: None, leaving: false, node_uid: None, confirmed: false }
    }

    /// As the choice of a block sees it.
    #[must_use]
    pub fn served(&self) -> Served {
        Served {
            block: self.pod_cidr,
            leaving: self.leaving,
            node_uid: self.node_uid.clone(),
            confirmed: self.confirmed,
        }
    }
}

/// What each CiliumNode lists, by name.
pub fn lists_of(rows: &Rows<String, CiliumNodeRow>) -> impl Iterator<Item = (&str, Listed<'_>)> {
    rows.iter().map(|(name, row)| {
        let Standing { is_contested, .. } = row.standing;
        let refusal = row.standing.refusal();
        (name.as_str(), Listed { pod_cidrs: &row.pod_cidrs, claim: row.claim, refusal, is_contested })
    })
}

impl From<Served> for PoolRow {
    fn from(Served { block, leaving, node_uid, confirmed }: Served) -> Self {
        Self { leaving, node_uid, confirmed, ..Self::new(block) }
    }
}

/// Whether addresses of this node are in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeldRow {
    /// The pod CIDR that this is about.
    pub pod_cidr: Option<Ipv4Net>,
    /// Something holds an address of it.
    pub any: bool,
    /// It is being left: no address of it is given any more.
    pub leaving: bool,
    /// Addresses that something holds, and that are not of the pod CIDR.
    pub beyond: Vec<Ipv4Addr>,
}

impl HeldRow {
    /// Whether something may hold an address of a pod CIDR. Before the leases are read, or have heard of it, every address
    /// may be in use.
    #[must_use]
    pub fn may_hold(this: Option<&Self>, pod_cidr: Ipv4Net) -> bool {
        this.is_none_or(|this| this.any || this.pod_cidr != Some(pod_cidr))
    }

    /// Whether nothing holds an address of a pod CIDR, and nothing will.
    #[must_use]
    pub fn has_left(this: Option<&Self>, pod_cidr: Ipv4Net) -> bool {
        this.is_some_and(|this| this.leaving) && !Self::may_hold(this, pod_cidr)
    }
}

/// What this agent wants its CiliumNode to say. It writes nothing else there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnCiliumNode {
    /// `spec.addresses`
    pub addresses: Vec<NodeAddress>,
    /// Name and UID of the Node that owns the object.
    pub owner: Option<(String, String)>,
    /// `spec.ipam.podCIDRs`, where the blocks are this agent's to say (mode `kubernetes`) and known. Elsewhere none stands for
    /// a list that is as it shall be.
    pub pod_cidrs: Option<Vec<Ipv4Net>>,
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
