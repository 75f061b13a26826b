//! Requests and answers of the agent API.

pub use cistern_core::ipam::explain::{AddressExplanation, NodeExplanation};
pub use cistern_core::ipam::lease::{Attachment, Behind, Interface};
pub use cistern_core::moment::Moment;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr};

/// Where the agent listens unless `socket-path` says otherwise.
pub const SOCKET_PATH: &str = "/run/cistern/cistern.sock";

/// The body of every answer that is not 2xx.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// A fixed word for programs, such as `pool-exhausted`.
    pub reason: String,
    /// For people: what was tried on what, what was expected, what is still in force.
    pub message: String,
    /// Whether the same call may succeed later without anybody changing a setting.
    pub retryable: bool,
}

/// The pod behind a CNI call, from `CNI_ARGS`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// `K8S_POD_NAMESPACE`
    pub namespace: String,
    /// `K8S_POD_NAME`
    pub name: String,
    /// `K8S_POD_UID`, which older runtimes leave out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// `POST /v1/cni/add`: a provisional lease for one interface. Asked again with the same key, it answers the same address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// `CNI_NETNS`
    pub netns: String,
    /// `name` of the configuration: GC is about one network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The pod, where the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// When the plugin began: an ADD that began after a DEL for the same key was not overtaken by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// Answer to [`AddRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddResponse {
    /// The pod's address. On our own interfaces it is used as /32.
    pub address: Ipv4Addr,
    /// Length of the pod CIDR that it is from; 32 when that is not the node's any more.
    pub prefix_len: u8,
    /// The router address of the node: the pod's gateway.
    pub router: Ipv4Addr,
    /// MTU of the pod's interface, in bytes.
    pub mtu: u32,
    /// Names this lease among all that the same address had before; to be given back in [`ConfirmRequest`].
    pub generation: u64,
}

/// `POST /v1/cni/confirm`: the interface exists, or another plugin is about to make it. The lease is no longer provisional and the datapath knows the pod
/// before the answer leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// From [`AddResponse`].
    pub generation: u64,
    /// What the address is behind.
    pub interface: Behind,
    /// When the plugin began, for the metric of how long an ADD takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// `POST /v1/cni/del`: gives the lease of this key back, whatever state it is in. Without one it is a success too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// When the plugin began: a lease that an ADD which began later asked for stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// Answer to [`DelRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelResponse {
    /// The address that was given back, if the key held one.
    pub released: Option<Ipv4Addr>,
}

/// `POST /v1/cni/gc`: ends every lease of a network that is not in the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcRequest {
    /// `name` of the configuration.
    pub network: String,
    /// What is still attached, by the runtime's word.
    pub valid: Vec<Attachment>,
}

/// Answer to [`GcRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcResponse {
    /// What was ended.
    pub released: Vec<Attachment>,
}

/// `POST /v1/cni/check`: what the agent holds for this key. 404 with reason `no-lease` when it holds nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

/// Answer to [`CheckRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckResponse {
    /// The pod's address.
    pub address: Ipv4Addr,
    /// The router address of the node.
    pub router: Ipv4Addr,
    /// What the address is behind; none while that is not confirmed.
    pub interface: Option<Behind>,
}

/// `GET /v1/healthz`: 200 when the agent serves pods, 503 when it does not, with the reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Whether pods can be served now.
    pub ready: bool,
    /// Why not; empty when ready.
    pub reasons: Vec<String>,
}

/// `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// What this build is: version, and whether it carries the kernel programs.
    pub build: String,
    /// Name of this node.
    pub node: String,
    /// IPAM mode.
    pub ipam_mode: String,
    /// As in `GET /v1/healthz`.
    pub health: Health,
    /// Everything that is waited for.
    pub waits: Vec<WaitReport>,
    /// What somebody should look at; none of it stops the node.
    #[serde(default)]
    pub findings: Vec<FindingReport>,
    /// The pod CIDR that addresses come from.
    pub pod_cidr: Option<String>,
    /// The router address of this node.
    pub router: Option<Ipv4Addr>,
    /// Addresses by state.
    pub addresses: AddressCounts,
    /// Masquerading on this node.
    pub masquerade: MasqueradeReport,
    /// Rows of each target that are not as desired.
    pub reconcilers: Vec<ReconcilerReport>,
    /// Who leads the operators; absent when this process does not take part.
    pub leader_election: Option<LeaderReport>,
    /// Nodes whose pod CIDRs this node knows, itself included.
    pub nodes: Vec<NodeReport>,
}

/// One wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitReport {
    /// Who waits.
    pub name: String,
    /// For what.
    pub reason: String,
    /// Since when, RFC 3339.
    pub since: String,
    /// Next try, RFC 3339; absent when an event is awaited.
    pub next_try: Option<String>,
}

/// Something that somebody should look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingReport {
    /// A fixed word for programs, such as `lease-without-pod`.
    pub reason: String,
    /// What it is about: an attachment, a device, a file, a setting.
    pub subject: String,
    /// What is so, and what follows.
    pub message: String,
    /// Since when it is known, RFC 3339.
    pub since: String,
}

/// How many addresses of the pod CIDR are in which state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AddressCounts {
    /// Addresses that pods can be given, the router's left out.
    pub capacity: u64,
    /// Leased to pods.
    pub used: u64,
    /// Given back a short while ago and not given out again yet.
    pub quarantined: u64,
}

/// How pod traffic that leaves the cluster is treated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasqueradeReport {
    /// `eBPF`, or why not.
    pub mode: String,
    /// Devices with programs attached, each with the address that pods leave under.
    pub devices: Vec<DeviceReport>,
    /// `ipv4-native-routing-cidr`.
    pub native_routing_cidr: Option<String>,
    /// Where the ip-masq-agent list comes from: `file …`, `built-in …`, `last good …`, `off`.
    pub ip_masq_source: String,
    /// Number of excluded prefixes in the kernel.
    pub excluded: usize,
    /// Warnings and the error of the last reading of the file.
    pub problems: Vec<String>,
}

/// One device that masquerades.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Name.
    pub name: String,
    /// Index.
    pub ifindex: u32,
    /// Address that pods leave under.
    pub address: Option<Ipv4Addr>,
    /// Why this device was chosen.
    pub reason: String,
}

/// The state of one reconciler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReconcilerReport {
    /// Target.
    pub name: String,
    /// Rows as desired.
    pub done: usize,
    /// Rows that are not, each with its error and next try.
    pub failing: Vec<RowReport>,
}

/// One row that is not as desired.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowReport {
    /// Key of the row.
    pub key: String,
    /// Last error.
    pub error: String,
    /// Failed tries.
    pub attempts: u32,
    /// Next try, RFC 3339; absent for a permanent error, which waits for the next full pass.
    pub next_try: Option<String>,
}

/// The leader election as this process sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderReport {
    /// This process leads.
    pub leading: bool,
    /// Who leads, as last seen.
    pub holder: Option<String>,
    /// Name of this process in the election.
    pub identity: String,
}

/// A node of the cluster as this node knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Name.
    pub name: String,
    /// `InternalIP`.
    pub internal_ip: Option<Ipv4Addr>,
    /// Pod CIDRs.
    pub pod_cidrs: Vec<String>,
}

/// `GET /v1/ip`: one address that is not free, or that is kept back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpReport {
    /// The address.
    pub address: Ipv4Addr,
    /// `confirmed`, `provisional`, `quarantined`, `reserved`.
    pub state: String,
    /// `namespace/pod`, or the role of a reserved address.
    pub owner: String,
    /// `CNI_CONTAINERID`, where a pod holds it.
    pub container_id: Option<String>,
    /// `CNI_IFNAME`, where a pod holds it.
    pub ifname: Option<String>,
    /// Since when, RFC 3339.
    pub since: Option<String>,
    /// When the state ends by itself, RFC 3339: expiry of a provisional lease, end of quarantine.
    pub until: Option<String>,
}

/// `POST /v1/explain/masquerade`: what would happen to a packet of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainMasqueradeRequest {
    /// Source address.
    pub from: Ipv4Addr,
    /// Source port; any when absent.
    #[serde(default)]
    pub from_port: Option<u16>,
    /// Destination address.
    pub to: Ipv4Addr,
    /// Destination port.
    #[serde(default)]
    pub to_port: Option<u16>,
    /// `tcp`, `udp`, `icmp`.
    pub protocol: String,
}

/// Answer to [`ExplainMasqueradeRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainMasqueradeResponse {
    /// `masqueraded` or `unchanged` or `dropped`.
    pub verdict: String,
    /// The rule that decides.
    pub rule: String,
    /// Why, in words.
    pub why: String,
    /// The address the packet leaves under.
    pub leaves_as: Option<Ipv4Addr>,
    /// Device it would leave by.
    pub device: Option<String>,
}

/// Answer to `GET /v1/explain/node/{name}`, and to `GET /v1/explain/node` for this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReply {
    /// What is known of the node.
    #[serde(flatten)]
    pub explanation: NodeExplanation,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// Its router address.
    pub router: Option<IpAddr>,
    /// `api` when the list of nodes was read since the start; `disk` when it is what was known before it.
    pub source: String,
    /// What only a node's own agent knows; absent for another node.
    pub own: Option<OwnNodeReply>,
}

/// What an agent knows of its own node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnNodeReply {
    /// As in `GET /v1/healthz`.
    pub health: Health,
    /// The block that pods get addresses from, whatever the CiliumNode says by now.
    pub pod_cidr: Option<String>,
    /// Addresses of it by state.
    pub addresses: AddressCounts,
    /// Everything that is waited for, the longest wait first.
    pub waits: Vec<WaitReport>,
}

/// Answer to `POST /v1/ipam` (`ipam` 5.1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IpamResponse {
    /// The addressing of this node.
    pub host_addressing: HostAddressing,
    /// What was allocated.
    pub address: AddressPair,
    /// Details of the IPv4 address; absent when none was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<IpamAddress>,
}

/// Addressing of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAddressing {
    /// IPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<HostFamily>,
}

/// Addressing of a node in one family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HostFamily {
    /// The family is on.
    pub enabled: bool,
    /// Router address.
    pub ip: Ipv4Addr,
    /// The pod CIDR.
    pub alloc_range: String,
}

/// Allocated addresses by family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddressPair {
    /// IPv4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<Ipv4Addr>,
    /// Pool of the IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4_pool_name: Option<String>,
}

/// One allocated address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IpamAddress {
    /// The address.
    pub ip: Ipv4Addr,
    /// Gateway of the pod.
    pub gateway: Ipv4Addr,
    /// CIDRs that are reached without masquerading.
    pub cidrs: Vec<String>,
    /// To be presented when the endpoint is created; absent when no expiration was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration_uuid: Option<String>,
}
