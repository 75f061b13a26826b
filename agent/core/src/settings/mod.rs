//! What the configuration keys mean, and which are refused.
//!
//! ```text
//! config directory ─┐  one file per key: the mounted ConfigMap `cilium-config`
//! environment ──────┼─► Layers ─► Settings::load ─► (Settings, warnings) | every error at once
//! flags ────────────┘  later wins
//! ```
//!
//! Keys have Cilium's names and take Cilium's values, so that a `cilium-config` can be mounted as it is. A key that
//! neither Cistern nor Cilium knows is refused, since it is a misspelling whose effect somebody waits for. A key of
//! Cilium that Cistern does not implement is told of once; it is refused only with a value that would make traffic
//! take another way than the one asked for ([`cilium`]).
//!
//! One declaration per key ([`Settings`]) makes the field, its default, its documentation, its parser and its row in
//! the generated table ([`table`]).

mod cilium;
mod layers;
mod table;
#[cfg(test)]
mod tests;
mod validate;
mod value;

pub use layers::{Command, Directory, Layers, SettingInForce, SettingsError, SettingsErrors, Source, Warning};
pub use table::markdown;
pub use value::{
    ApiServerUrl, DevicePattern, DeviceSelector, IpamMode, LogFormat, LogLevel, LogOptions, PortRange, ServeAddress,
};

use crate::masquerade::excluded::DefaultExclusions;
use crate::masquerade::plan::FlowPolicy;
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;
use value::Value;

/// One key that Cistern implements, as command lines and documentation need it.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name of the key, of its file and of its flag.
    pub name: &'static str,
    /// What it is for, with unit and limits.
    pub meaning: &'static str,
    /// The values it takes.
    pub expected: &'static str,
    /// A flag without a value stands for `true`.
    pub is_switch: bool,
}

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $key:literal $field:ident: $type:ty = $default:expr;)+) => {
        /// The settings in force: every value has been checked, alone and against the others.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Settings {
            $($(#[doc = $doc])+ #[doc = ""] #[doc = concat!("Key `", $key, "`.")] pub $field: $type,)+
            /// Where the values that are not defaults come from.
            sources: BTreeMap<&'static str, Source>,
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($field: $default,)+ sources: BTreeMap::new() }
            }
        }

        /// Every key that Cistern implements, in the order of [`Settings`].
        pub const KEYS: &[Key] = &[$(Key {
            name: $key,
            meaning: concat!($($doc),+),
            expected: <$type as Value>::EXPECTED,
            is_switch: <$type as Value>::IS_SWITCH,
        },)+];

        impl Settings {
            /// Sets one key from text. `Ok(None)`: the key is not one of ours. The error is what was expected.
            fn set(&mut self, key: &str, text: &str) -> Result<Option<&'static str>, String> {
                match key {
                    $($key => {
                        self.$field = <$type as Value>::parse(text)?;
                        Ok(Some($key))
                    })+
                    _ => Ok(None),
                }
            }

            /// Name and value of every key, as text that would be accepted again.
            fn rendered(&self) -> Vec<(&'static str, String)> {
                vec![$(($key, self.$field.render()),)+]
            }
        }
    };
}

settings! {
    /// Log at level `debug`, whatever `log-opt` says.
    "debug" debug: bool = false;
    /// How to log: `level` is `debug`, `info`, `warning` or `error`; `format` is `text` or `json`.
    "log-opt" log_options: LogOptions = LogOptions::default();
    /// Name of this node's Node and CiliumNode. Without it `K8S_NODE_NAME` counts, then the host's name.
    "node-name" node_name: String = String::new();
    /// Directory with one file per key; read once, at start.
    "config-dir" config_dir: PathBuf = PathBuf::from("/etc/cistern/config");
    /// Unix socket that the agent serves and that `cistern` and `cistern-cni` call.
    "socket-path" socket_path: PathBuf = PathBuf::from("/run/cistern/cistern.sock");
    /// Directory of what survives a restart: pod leases, last inputs, last good ip-masq-agent file.
    "state-dir" state_dir: PathBuf = PathBuf::from("/var/lib/cistern");
    /// Where bpffs is mounted; everything of ours is pinned in `cistern` below it.
    "bpf-root" bpf_root: PathBuf = PathBuf::from("/sys/fs/bpf");

    /// Port on 127.0.0.1 where the agent answers `GET /healthz` (it runs) and `GET /readyz` (it serves pods). 0: none.
    "agent-health-port" agent_health_port: Option<u16> = Some(9879);
    /// Where `cistern operator` answers `GET /healthz` (it runs) and `GET /readyz` (it takes part in the election).
    "operator-api-serve-addr" operator_api_address: Option<ServeAddress> = Some(ServeAddress::localhost(9234));
    /// Where the agent serves metrics for Prometheus, at `/metrics`.
    "prometheus-serve-addr" metrics_address: Option<ServeAddress> = None;
    /// Where `cistern operator` serves metrics for Prometheus, at `/metrics`.
    "operator-prometheus-serve-addr" operator_metrics_address: Option<ServeAddress> = None;

    /// Kubeconfig file. Without it the service account of the pod counts.
    "k8s-kubeconfig-path" kubeconfig_path: Option<PathBuf> = None;
    /// URL of the API server, for nodes that cannot reach the one of the service account or the kubeconfig.
    "k8s-api-server-urls" api_server: Option<ApiServerUrl> = None;
    /// Namespace of the agent and the operator: of the leader's Lease and the quarantine.
    "k8s-namespace" namespace: String = "kube-system".to_owned();
    /// Whether the agent makes its CiliumNode; with `false` it waits until somebody else has.
    "auto-create-cilium-node-resource" auto_create_cilium_node: bool = true;

    /// Run the operator's controllers in the agent, too, while this process holds the leader's Lease.
    "leader-election" leader_election: bool = false;
    /// How long a leader that went silent is still taken for the leader.
    "leader-election-lease-duration" lease_duration: Duration = Duration::from_secs(15);
    /// A leader that could not renew for so long stops. Shorter than the lease duration.
    "leader-election-renew-deadline" renew_deadline: Duration = Duration::from_secs(10);
    /// Time between two tries to get or to renew the leader's Lease. Shorter than the renew deadline.
    "leader-election-retry-period" retry_period: Duration = Duration::from_secs(2);

    /// Give IPv4 addresses to pods. Has to be `true`.
    "enable-ipv4" enable_ipv4: bool = true;
    /// Give IPv6 addresses to pods. Not implemented: has to be `false`.
    "enable-ipv6" enable_ipv6: bool = false;
    /// Where pod addresses come from: `cluster-pool` has the operator give each node one block of the cluster's pool,
    /// `kubernetes` takes the block that the Node names (`spec.podCIDRs`, else `network.cilium.io/ipv4-pod-cidr`).
    "ipam" ipam: IpamMode = IpamMode::ClusterPool;
    /// Wait for an IPv4 pod CIDR of the Node. Always so with `ipam=kubernetes`, and of no effect without it.
    "k8s-require-ipv4-pod-cidr" require_ipv4_pod_cidr: bool = false;
    /// With `ipam=kubernetes`, wait for an IPv6 pod CIDR of the Node, too. No address of it is given: see `enable-ipv6`.
    "k8s-require-ipv6-pod-cidr" require_ipv6_pod_cidr: bool = false;
    /// Write the pod CIDR and the router address into annotations of the Node (`network.cilium.io/…`), too.
    "annotate-k8s-node" annotate_k8s_node: bool = false;
    /// The pool: CIDRs that the nodes' blocks are cut from, in order of use. Elements may be added; none may be
    /// changed or removed while in use. Must not overlap the nodes' network.
    "cluster-pool-ipv4-cidr" cluster_pool_ipv4: Vec<Ipv4Net> = default_pool();
    /// Prefix length of a node's block, at most 30: 24 holds 254 addresses, two of which are not for pods.
    "cluster-pool-ipv4-mask-size" cluster_pool_ipv4_mask_size: u8 = 24;
    /// CIDRs of the cluster's Services, if known. The pool must not overlap them.
    "service-cidr" service_cidrs: Vec<Ipv4Net> = Vec::new();
    /// Router address of the node, in place of one out of its pod CIDR.
    "local-router-ipv4" local_router_ipv4: Option<Ipv4Addr> = None;

    /// Where to write the container runtime's network configuration as soon as this node can serve pods; nothing: not at
    /// all. It stays when the agent ends.
    "write-cni-conf-when-ready" write_cni_conf_when_ready: Option<PathBuf> = None;
    /// File with the network configuration to write in the place of the default one, such as a mounted ConfigMap.
    "read-cni-conf" read_cni_conf: Option<PathBuf> = None;
    /// Leave the network configuration to somebody else, unless `read-cni-conf` names one to write.
    "custom-cni-conf" custom_cni_conf: bool = false;
    /// Set other network configurations beside ours aside, under another name.
    "cni-exclusive" cni_exclusive: bool = false;
    /// Directory of the container runtime's CNI plugins: `portmap`, which serves hostPorts, is chained if it is there.
    "cni-bin-path" cni_bin_path: PathBuf = PathBuf::from("/opt/cni/bin");

    /// MTU of pod interfaces in bytes, at least 576. 0: that of the device that leads to the other nodes.
    "mtu" mtu: Option<u16> = None;
    /// Install a route to every other node's pod CIDR, via that node's address. Needs all nodes on one network.
    "auto-direct-node-routes" auto_direct_node_routes: bool = false;

    /// Give pod traffic that leaves the cluster the node's address.
    "enable-ipv4-masquerade" enable_ipv4_masquerade: bool = true;
    /// Masquerade in eBPF. It is the only way there is; `false` changes nothing and is told of.
    "enable-bpf-masquerade" enable_bpf_masquerade: bool = true;
    /// Destinations in this CIDR keep the pod's address. Known pod CIDRs and nodes keep it anyway.
    "ipv4-native-routing-cidr" ipv4_native_routing_cidr: Option<Ipv4Net> = None;
    /// Exempt the destinations of an ip-masq-agent file, too.
    "enable-ip-masq-agent" enable_ip_masq_agent: bool = false;
    /// The ip-masq-agent file, YAML or JSON; watched.
    "ip-masq-agent-config-path" ip_masq_agent_config_path: PathBuf = PathBuf::from("/etc/config/ip-masq-agent");
    /// What is exempt when the ip-masq-agent file says nothing: `reserved` (11 ranges, as Cilium) or `rfc1918` (3
    /// ranges, as ip-masq-agent).
    "ip-masq-default-exclusions" ip_masq_default_exclusions: DefaultExclusions = DefaultExclusions::Reserved;
    /// When a change of the exempt destinations reaches TCP flows that are open: `sticky` (never) or `immediate`.
    "masquerade-flow-policy" masquerade_flow_policy: FlowPolicy = FlowPolicy::Sticky;
    /// First and last port that a masqueraded flow may get. NodePorts, `ip_local_reserved_ports` and ports the host
    /// uses are left out.
    "masquerade-port-range" masquerade_port_range: PortRange = PortRange { first: 1024, last: 65535 };
    /// First and last NodePort; no masqueraded flow gets one of these.
    "node-port-range" node_port_range: PortRange = PortRange { first: 30000, last: 32767 };
    /// Devices whose traffic is masqueraded, first match wins: a name, a prefix ending in `+`, or either after `!`
    /// to leave devices out. Without names: those with a default route or the node's address.
    "devices" devices: DeviceSelector = DeviceSelector::default();
    /// Take the masquerade address of this device for all devices.
    "derive-masq-ip-addr-from-device" derive_masq_ip_addr_from_device: Option<String> = None;
    /// Masquerade traffic from pods to other nodes' addresses.
    "enable-remote-node-masquerade" enable_remote_node_masquerade: bool = false;
    /// Most flows that are masqueraded at one time; 1024 to 16777216.
    "bpf-nat-global-max" bpf_nat_global_max: u32 = 524_288;
    /// How long an open TCP flow may stay silent before its entry goes. Never under 7260 s: keep-alives first speak
    /// after 7200 s.
    "bpf-ct-timeout-regular-tcp" tcp_idle_timeout: Duration = Duration::from_secs(6 * 3600);
}

/// The pool of Cilium's chart, which those who set nothing have.
fn default_pool() -> Vec<Ipv4Net> {
    vec![Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 8)]
}

impl Settings {
    /// Where the value of a key comes from.
    #[must_use]
    pub fn source(&self, key: &str) -> Source {
        self.sources.get(key).cloned().unwrap_or(Source::Default)
    }

    /// Every key with its value and where that comes from.
    #[must_use]
    pub fn in_force(&self) -> Vec<SettingInForce> {
        let row = |(key, value)| SettingInForce { key, value, source: self.source(key) };
        self.rendered().into_iter().map(row).collect()
    }

    /// The level to log at.
    #[must_use]
    pub fn log_level(&self) -> LogLevel {
        if self.debug { LogLevel::Debug } else { self.log_options.level }
    }

    /// The URL of the API server, when it is not the one of the service account or the kubeconfig.
    #[must_use]
    pub fn api_server_url(&self) -> Option<&str> {
        self.api_server.as_ref().map(ApiServerUrl::as_str)
    }

    /// The directory that everything of ours is pinned in.
    #[must_use]
    pub fn pin_root(&self) -> PathBuf {
        self.bpf_root.join("cistern")
    }
}
