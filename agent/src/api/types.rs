//! Requests and answers of the agent API.
//!
//! Plugin, CLI and agent of a node may be of different builds: the plugin is replaced while an agent runs. So fields are only ever
//! added; a reader ignores those that it does not know and has a default for those that are absent. The tests below hold the bodies
//! of the first release.

use cistern_core::cni::refusal::Refusal;
pub use cistern_core::ipam::explain::{AddressExplanation, NodeExplanation};
pub use cistern_core::ipam::lease::{Attachment, Interface, PodAttachment};
pub use cistern_core::moment::Moment;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr};

/// Default of `socket-path`.
pub const SOCKET_PATH: &str = "/run/cistern/cistern.sock";

/// Body of all answers other than 2xx.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// [`Refusal::code`], such as `pool-exhausted`.
    pub reason: String,
    /// Human-readable: what was tried on what, what was expected, what is still in force.
    #[serde(default)]
    pub message: String,
    /// Whether the same call may succeed later without a change of the configuration.
    #[serde(default)]
    pub retryable: bool,
}

impl ApiError {
    /// The refusal; none for one that this build does not know.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        Refusal::from_code(&self.reason)
    }
}

/// The pod of a CNI call, from `CNI_ARGS`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PodRef {
    /// `K8S_POD_NAMESPACE`
    pub namespace: String,
    /// `K8S_POD_NAME`
    pub name: String,
    /// `K8S_POD_UID`, which older runtimes omit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// `POST /v1/cni/add`: allocates a provisional lease for an interface. Idempotent by container ID and interface name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// `CNI_NETNS`
    pub netns: String,
    /// `name` of the configuration, for GC of the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The pod, if the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
    /// Start time of the plugin, to order ADD and DEL of the same key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// Answer to [`AddRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddResponse {
    /// The pod's addresses, one for each family that the node serves. Agents of the first release leave it out.
    #[serde(default)]
    pub addresses: Vec<LeasedAddress>,
    /// The IPv4 address, for plugins of the first release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<Ipv4Addr>,
    /// Its `prefix_len`, for the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_len: Option<u8>,
    /// Its `router`, for the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router: Option<Ipv4Addr>,
    /// MTU of the pod's interface, in bytes.
    #[serde(default = "default_mtu")]
    pub mtu: u32,
    /// Names this lease among all that the same address had before; to be presented in [`ConfirmRequest`].
    pub generation: u64,
}

/// An address of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedAddress {
    /// The address. On our own interfaces it is used alone, without a prefix.
    pub address: IpAddr,
    /// Length of the pod CIDR that it is from; that of the address alone when the node does not serve that pod CIDR any more.
    pub prefix_len: u8,
    /// The router address of the node: the pod's gateway.
    pub router: IpAddr,
}

/// MTU of a link without a configured MTU: that of Ethernet.
pub const DEFAULT_MTU: u32 = 1_500;

fn default_mtu() -> u32 {
    DEFAULT_MTU
}

impl AddResponse {
    /// The answer for a lease.
    #[must_use]
    pub fn new(addresses: Vec<LeasedAddress>, mtu: u32, generation: u64) -> Self {
        let ipv4 = addresses.iter().find_map(|leased| match (leased.address, leased.router) {
            (IpAddr::V4(address), IpAddr::V4(router)) => Some((address, leased.prefix_len, router)),
            _ => None,
        });
        Self {
            address: ipv4.map(|(address, _, _)| address),
            prefix_len: ipv4.map(|(_, prefix_len, _)| prefix_len),
            router: ipv4.map(|(_, _, router)| router),
            addresses,
            mtu,
            generation,
        }
    }

    /// The addresses, whichever release the agent is of.
    #[must_use]
    pub fn leased(&self) -> Vec<LeasedAddress> {
        match (self.address, self.router) {
            (Some(address), Some(router)) if self.addresses.is_empty() => vec![LeasedAddress {
                address: address.into(),
                prefix_len: self.prefix_len.unwrap_or(32),
                router: router.into(),
            }],
            _ => self.addresses.clone(),
        }
    }
}

/// `POST /v1/cni/confirm`: the interface was created (or, for chained IPAM, will be). When the answer is sent, the
/// lease is confirmed and the pod is in the datapath.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// From [`AddResponse`].
    pub generation: u64,
    /// How the pod is attached.
    pub interface: PodAttachment,
    /// Start time of the plugin, for the metric of ADD's duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// `POST /v1/cni/del`: releases the lease of this key, in any state. Succeeds if there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// Start time of the plugin: a lease requested by a later ADD is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// Answer to [`DelRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelResponse {
    /// The address that was released, if the key held one.
    #[serde(default)]
    pub released: Option<Ipv4Addr>,
}

/// `POST /v1/cni/gc`: ends every lease of a network that is not in the list. With an empty list it ends those whose network
/// namespace is gone: nothing else distinguishes a node without pods from a runtime that has lost its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcRequest {
    /// `name` of the configuration.
    pub network: String,
    /// The attachments that the runtime considers valid.
    pub valid: Vec<Attachment>,
    /// Start time of the plugin: a lease requested by a later ADD is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
}

/// Answer to [`GcRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcResponse {
    /// The released attachments.
    #[serde(default)]
    pub released: Vec<Attachment>,
}

/// `POST /v1/cni/check`: the lease of this key. 404 with reason `no-lease` if there is none.
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
    /// How the pod is attached; none while that is not confirmed.
    #[serde(default)]
    pub interface: Option<PodAttachment>,
}

/// `GET /v1/healthz`: 200 if the agent serves pods, else 503 with the reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Whether pods can be served now.
    pub ready: bool,
    /// Why not; empty when ready.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// It is not ready and has not been since it started.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub starting: bool,
}

impl Health {
    /// Ready, unless there are reasons not to be.
    #[must_use]
    pub fn new(reasons: Vec<String>) -> Self {
        Self { ready: reasons.is_empty(), reasons, starting: false }
    }
}

/// `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the build, and whether it contains the kernel programs.
    pub build: String,
    /// Name of this node.
    pub node: String,
    /// IPAM mode.
    pub ipam_mode: String,
    /// As in `GET /v1/healthz`.
    pub health: Health,
    /// Everything that the agent waits for.
    pub waits: Vec<WaitReport>,
    /// Findings for the administrator; none of them stops the node.
    #[serde(default)]
    pub findings: Vec<FindingReport>,
    /// The pod CIDR that addresses are allocated from.
    pub pod_cidr: Option<String>,
    /// The router address of this node.
    pub router: Option<Ipv4Addr>,
    /// Counts of addresses by state.
    pub addresses: AddressCounts,
    /// Masquerading on this node.
    pub masquerade: MasqueradeReport,
    /// Rows of each target that are not in sync.
    pub reconcilers: Vec<ReconcilerReport>,
    /// The leader of the operators; absent if this process does not take part in the election.
    pub leader_election: Option<LeaderReport>,
    /// Nodes with pod CIDRs, including this one.
    pub nodes: Vec<NodeReport>,
}

/// One wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitReport {
    /// Name of the wait.
    pub name: String,
    /// The reason.
    pub reason: String,
    /// Start, RFC 3339.
    pub since: String,
    /// Next retry, RFC 3339; absent if it waits for an event.
    pub next_try: Option<String>,
}

/// A finding for the administrator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingReport {
    /// Machine-readable reason, such as `lease-without-pod`.
    pub reason: String,
    /// Subject: an attachment, a device, a file, a setting.
    pub subject: String,
    /// The finding and its consequence.
    pub message: String,
    /// When it was first found, RFC 3339.
    pub since: String,
}

/// Counts of addresses of the pod CIDR by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AddressCounts {
    /// Addresses available to pods, without the router's.
    pub capacity: u64,
    /// Leased to pods.
    pub used: u64,
    /// Quarantined after their release.
    pub quarantined: u64,
}

/// State of masquerading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasqueradeReport {
    /// `eBPF`, or why not.
    pub mode: String,
    /// Devices with attached programs, each with its masquerade address.
    pub devices: Vec<DeviceReport>,
    /// `ipv4-native-routing-cidr`.
    pub native_routing_cidr: Option<String>,
    /// Source of the ip-masq-agent list: `file …`, `built-in …`, `last good …`, `off`.
    pub ip_masq_source: String,
    /// Number of excluded prefixes in the kernel.
    pub excluded: usize,
    /// Warnings and the error of the file's last version.
    pub problems: Vec<String>,
}

/// A device with masquerading.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Name.
    pub name: String,
    /// Index.
    pub ifindex: u32,
    /// Masquerade address.
    pub address: Option<Ipv4Addr>,
    /// Reason for the selection.
    pub reason: String,
}

/// The state of one reconciler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReconcilerReport {
    /// Target.
    pub name: String,
    /// Number of rows in sync.
    pub done: usize,
    /// Failed rows, each with its error and next retry.
    pub failing: Vec<RowReport>,
}

/// A failed row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowReport {
    /// Key of the row.
    pub key: String,
    /// Last error.
    pub error: String,
    /// Consecutive failures.
    pub attempts: u32,
    /// Next retry, RFC 3339; absent for a permanent error, which waits for the next full pass.
    pub next_try: Option<String>,
}

/// The leader election as observed by this process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaderReport {
    /// This process is the leader.
    pub leading: bool,
    /// The leader, as last observed.
    pub holder: Option<String>,
    /// Identity of this process in the election.
    pub identity: String,
}

/// A node of the cluster as known by this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Name.
    pub name: String,
    /// `InternalIP`.
    pub internal_ip: Option<Ipv4Addr>,
    /// Pod CIDRs.
    pub pod_cidrs: Vec<String>,
}

/// `GET /v1/ip`: an address that is not free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpReport {
    /// The address.
    pub address: Ipv4Addr,
    /// `confirmed`, `provisional`, `quarantined`, `reserved`.
    pub state: String,
    /// `namespace/pod`, or the role of a reserved address.
    pub owner: String,
    /// `CNI_CONTAINERID`, if a pod has it.
    pub container_id: Option<String>,
    /// `CNI_IFNAME`, if a pod has it.
    pub ifname: Option<String>,
    /// Start, RFC 3339.
    pub since: Option<String>,
    /// End of the state, RFC 3339: expiry of a provisional lease, end of quarantine.
    pub until: Option<String>,
}

/// `POST /v1/explain/masquerade`: treatment of a pod's packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExplainMasqueradeRequest {
    /// Source address.
    pub from: Ipv4Addr,
    /// Source port; any if absent.
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
    /// The reason, human-readable.
    pub why: String,
    /// The source address after masquerading.
    pub leaves_as: Option<Ipv4Addr>,
    /// The egress device.
    pub device: Option<String>,
}

/// Answer to `GET /v1/explain/node/{name}`, and to `GET /v1/explain/node` for this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeReply {
    /// Explanation of the node.
    #[serde(flatten)]
    pub explanation: NodeExplanation,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// Its router address.
    pub router: Option<IpAddr>,
    /// `api` if the list of nodes was read since startup; `disk` if it is from the previous run.
    pub source: String,
    /// State that only a node's own agent knows; absent for other nodes.
    pub own: Option<OwnNodeReply>,
}

/// An agent's state of its own node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnNodeReply {
    /// As in `GET /v1/healthz`.
    pub health: Health,
    /// The pod CIDR that addresses are allocated from, independent of the CiliumNode.
    pub pod_cidr: Option<String>,
    /// Addresses of it by state.
    pub addresses: AddressCounts,
    /// Everything that the agent waits for, the longest wait first.
    pub waits: Vec<WaitReport>,
}

/// Answer to `POST /v1/ipam` (`ipam` 5.1).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IpamResponse {
    /// The addressing of this node.
    pub host_addressing: HostAddressing,
    /// The allocated addresses.
    pub address: AddressPair,
    /// Details of the IPv4 address; absent if none was requested.
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
    /// Whether the family is enabled.
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
    /// CIDRs that are not masqueraded.
    pub cidrs: Vec<String>,
    /// To be presented by [`EndpointRequest`]; absent when no expiration was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration_uuid: Option<String>,
}

/// `PUT /v1/endpoint/{id}` (`ipam` 5.2): the client that allocated addresses by `POST /v1/ipam` has created its endpoint, and presents
/// the UUIDs of their timers, so that the addresses stay. Cilium's other fields are ignored: endpoints of Cistern are created by its
/// CNI plugin.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EndpointRequest {
    /// The addresses.
    #[serde(default)]
    pub addressing: Option<EndpointAddressing>,
}

/// Addresses of an endpoint, with the UUIDs of their timers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct EndpointAddressing {
    /// IPv4 address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ipv4: String,
    /// Its pool; empty for the default one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ipv4_pool_name: String,
    /// UUID of its timer.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ipv4_expiration_uuid: String,
    /// IPv6 address.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ipv6: String,
    /// Its pool; empty for the default one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ipv6_pool_name: String,
    /// UUID of its timer.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ipv6_expiration_uuid: String,
}

impl EndpointAddressing {
    /// Address, pool and UUID of each timer that is to be stopped.
    pub fn presented(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        let ipv4 = (&self.ipv4, &self.ipv4_pool_name, &self.ipv4_expiration_uuid);
        let ipv6 = (&self.ipv6, &self.ipv6_pool_name, &self.ipv6_expiration_uuid);
        [ipv4, ipv6]
            .into_iter()
            .filter(|(address, _, uuid)| !address.is_empty() && !uuid.is_empty())
            .map(|(address, pool, uuid)| (address.as_str(), pool.as_str(), uuid.as_str()))
    }
}

/// Answer to [`EndpointRequest`]: what Cilium's clients read of the endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EndpointResponse {
    /// The state of the endpoint.
    #[serde(default)]
    pub status: EndpointStatus,
}

/// State of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EndpointStatus {
    /// Its network.
    #[serde(default)]
    pub networking: EndpointNetworking,
}

/// Network of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EndpointNetworking {
    /// Its addresses.
    #[serde(default)]
    pub addressing: Vec<EndpointAddressing>,
}

impl EndpointResponse {
    /// The answer for these addresses, whose timers are stopped.
    #[must_use]
    pub fn of(addressing: EndpointAddressing) -> Self {
        let stopped = EndpointAddressing {
            ipv4_expiration_uuid: String::new(),
            ipv6_expiration_uuid: String::new(),
            ..addressing
        };
        Self { status: EndpointStatus { networking: EndpointNetworking { addressing: vec![stopped] } } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    const ADD: &str = r#"{"container_id":"c1","ifname":"eth0","netns":"/run/netns/c1","network":"cistern","pod":{"namespace":"shop","name":"cart-0","uid":"u-1"},"began":{"boot":"b-1","uptime_ns":5}}"#;
    const ADDED: &str = r#"{"address":"10.244.1.5","prefix_len":24,"router":"10.244.1.1","mtu":1400,"generation":7}"#;
    const CONFIRM: &str = r#"{"container_id":"c1","ifname":"eth0","generation":7,"interface":{"host_ifname":"cst1","host_ifindex":9,"mac":"0e:00:00:00:00:01"},"began":{"boot":"b-1","uptime_ns":5}}"#;
    const CONFIRM_IPAM: &str =
        r#"{"container_id":"c1","ifname":"eth0","generation":7,"interface":{"plugin":"bridge","routed":true}}"#;
    const DEL: &str = r#"{"container_id":"c1","ifname":"eth0","began":{"boot":"b-1","uptime_ns":5}}"#;
    const DELETED: &str = r#"{"released":"10.244.1.5"}"#;
    const GC: &str = r#"{"network":"cistern","valid":[{"container_id":"c1","ifname":"eth0"}]}"#;
    const COLLECTED: &str = r#"{"released":[{"container_id":"c1","ifname":"eth0"}]}"#;
    const CHECK: &str = r#"{"container_id":"c1","ifname":"eth0"}"#;
    const CHECKED: &str = r#"{"address":"10.244.1.5","router":"10.244.1.1","interface":{"host_ifname":"cst1","host_ifindex":9,"mac":"0e:00:00:00:00:01"}}"#;
    const HEALTH: &str = r#"{"ready":false,"reasons":["no pod CIDR yet"]}"#;
    const REFUSED: &str = r#"{"reason":"pool-exhausted","message":"pool default is exhausted","retryable":true}"#;

    /// A body of the first release is understood, with fields of a later one as well; what is written for it has all that it had.
    fn holds<T: Serialize + DeserializeOwned>(recorded: &str) -> T {
        let recorded: Value = serde_json::from_str(recorded).unwrap();
        let read: T = serde_json::from_value(recorded.clone()).unwrap();
        let mut later = recorded.clone();
        later["of-a-later-release"] = json!({"more": [1]});
        let read_later: T = serde_json::from_value(later).unwrap();
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!(serde_json::to_value(&read_later).unwrap(), written);
        for (field, value) in recorded.as_object().unwrap() {
            assert_eq!(written.get(field), Some(value), "{field} of {recorded}");
        }
        read
    }

    #[test]
    fn bodies_of_the_first_release_are_read_and_written_still() {
        holds::<AddRequest>(ADD);
        holds::<ConfirmRequest>(CONFIRM);
        holds::<ConfirmRequest>(CONFIRM_IPAM);
        holds::<DelRequest>(DEL);
        holds::<DelResponse>(DELETED);
        holds::<GcRequest>(GC);
        holds::<GcResponse>(COLLECTED);
        holds::<CheckRequest>(CHECK);
        holds::<CheckResponse>(CHECKED);
        assert!(!holds::<Health>(HEALTH).starting);
        assert_eq!(holds::<ApiError>(REFUSED).refusal(), Some(Refusal::PoolExhausted));
        let leased = LeasedAddress {
            address: "10.244.1.5".parse().unwrap(),
            prefix_len: 24,
            router: "10.244.1.1".parse().unwrap(),
        };
        assert_eq!(holds::<AddResponse>(ADDED).leased(), [leased]);
        // An agent of this build, to a plugin of the first release.
        let answer = serde_json::to_value(AddResponse::new(vec![leased], 1400, 7)).unwrap();
        for (field, value) in serde_json::from_str::<Value>(ADDED).unwrap().as_object().unwrap() {
            assert_eq!(answer.get(field), Some(value), "{field}");
        }
    }

    #[test]
    fn an_answer_of_a_later_release_is_read_as_far_as_this_one_knows_it() {
        let dual = json!({
            "addresses": [
                {"address": "fd00::5", "prefix_len": 64, "router": "fd00::1"},
                {"address": "10.244.1.5", "prefix_len": 24, "router": "10.244.1.1", "pool": "gold"},
            ],
            "generation": 7,
        });
        let answer: AddResponse = serde_json::from_value(dual).unwrap();
        assert_eq!((answer.leased().len(), answer.mtu), (2, DEFAULT_MTU));
        let refused: ApiError = serde_json::from_str(r#"{"reason":"of-a-later-release"}"#).unwrap();
        assert_eq!((refused.refusal(), refused.retryable), (None, false));
        assert_eq!(serde_json::from_str::<DelResponse>("{}").unwrap(), DelResponse { released: None });
    }
}
