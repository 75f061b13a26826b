//! Settings: the keys that configure Cistern, their values and their validation.
//!
//! ```text
//! config directory ─┐  one file per key: the mounted ConfigMap `cilium-config`
//! environment ──────┼─► Layers ─► Settings::load ─► (Settings, warnings) | all errors
//! flags ────────────┘  later wins
//! ```
//!
//! Keys have the names and accept the values of Cilium's, so that an existing `cilium-config` can be mounted unchanged.
//! A key that neither Cistern nor Cilium knows is probably misspelt: in the config directory it is reported and has no
//! effect, because other components and installers add keys to the ConfigMap; as a flag, or with `strict-config`, it is
//! rejected. A Cilium key that Cistern does not implement is logged once; it is rejected only if its value would change
//! where traffic goes or how it is protected (`cilium`).
//!
//! One declaration per key ([`Settings`]) generates the field, its default, its documentation, its parser and its row
//! in the settings table (`table`).

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

use crate::ipam::cluster::cluster_pool::{self, BLOCK_QUARANTINE, ConfigError, ConfigWarning, FamilySettings};
use crate::masquerade::ip_masq::DefaultExclusions;
use crate::masquerade::plan::FlowPolicy;
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;
use value::Value;

/// A key that Cistern implements, as the command line and the documentation present it.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Name of the key, of its file and of its flag.
    pub name: &'static str,
    /// Description, with unit and limits.
    pub meaning: &'static str,
    /// The accepted values.
    pub expected: &'static str,
    /// Whether the flag without a value means `true`.
    pub is_switch: bool,
}

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $key:literal $field:ident: $type:ty = $default:expr;)+) => {
        /// The settings in force. Every value has been validated, by itself and against the others.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Settings {
            $($(#[doc = $doc])+ #[doc = ""] #[doc = concat!("Key `", $key, "`.")] pub $field: $type,)+
            /// The source of each value that is not a default.
            sources: BTreeMap<&'static str, Source>,
            /// Keys without effect, because neither Cistern nor Cilium knows them: key → message.
            unknown: BTreeMap<String, String>,
        }

        impl Default for Settings {
            fn default() -> Self {
                Self { $($field: $default,)+ sources: BTreeMap::new(), unknown: BTreeMap::new() }
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
            /// Sets one key from text. Returns `Ok(None)` if the key is not Cistern's, and what was expected if the
            /// value is invalid.
            fn set(&mut self, key: &str, text: &str) -> Result<Option<&'static str>, String> {
                match key {
                    $($key => {
                        self.$field = <$type as Value>::parse(text)?;
                        Ok(Some($key))
                    })+
                    _ => Ok(None),
                }
            }

            /// Name and value of every key. The value parses to the same setting.
            fn rendered(&self) -> Vec<(&'static str, String)> {
                vec![$(($key, self.$field.render()),)+]
            }
        }
    };
}

settings! {
    /// Log at level `debug`, regardless of `log-opt`.
    "debug" debug: bool = false;
    /// Log format and level: `level` is `debug`, `info`, `warning` or `error`; `format` is `text` or `json`.
    "log-opt" log_options: LogOptions = LogOptions::default();
    /// Name of this node's Node and CiliumNode. Default: `K8S_NODE_NAME`, else the host name.
    "node-name" node_name: String = String::new();
    /// Directory with one file per key; read once, at startup.
    "config-dir" config_dir: PathBuf = PathBuf::from("/etc/cistern/config");
    /// Refuse to start if the config directory has a key that neither Cistern nor Cilium knows. With `false` such a key is
    /// reported and has no effect.
    "strict-config" strict_config: bool = false;
    /// Unix socket on which the agent serves `cistern` and `cistern-cni`.
    "socket-path" socket_path: PathBuf = PathBuf::from("/run/cistern/cistern.sock");
    /// Directory for state that survives a restart: pod leases, last inputs, last valid ip-masq-agent file.
    "state-dir" state_dir: PathBuf = PathBuf::from("/var/lib/cistern");
    /// Mount point of bpffs; maps and programs are pinned in its directory `cistern`.
    "bpf-root" bpf_root: PathBuf = PathBuf::from("/sys/fs/bpf");

    /// Port on 127.0.0.1 for the agent's `GET /healthz` (process is alive) and `GET /readyz` (pods are served). 0
    /// disables it.
    "agent-health-port" agent_health_port: Option<u16> = Some(9879);
    /// Address of `cistern operator` for `GET /healthz` (process is alive) and `GET /readyz` (leads, or a
    /// leader is known).
    "operator-api-serve-addr" operator_api_address: Option<ServeAddress> = Some(ServeAddress::localhost(9234));
    /// Address on which the agent serves Prometheus metrics at `/metrics`.
    "prometheus-serve-addr" metrics_address: Option<ServeAddress> = None;
    /// Address on which `cistern operator` serves Prometheus metrics at `/metrics`.
    "operator-prometheus-serve-addr" operator_metrics_address: Option<ServeAddress> = None;

    /// Kubeconfig file. Default: the pod's service account.
    "k8s-kubeconfig-path" kubeconfig_path: Option<PathBuf> = None;
    /// URL of the API server, for nodes that cannot reach the address in the service account or the kubeconfig.
    "k8s-api-server-urls" api_server: Option<ApiServerUrl> = None;
    /// Namespace of the agent and the operator, where the leader election Lease and the operator's records are kept.
    "k8s-namespace" namespace: String = "kube-system".to_owned();
    /// Create this node's CiliumNode. With `false` the agent waits until it exists.
    "auto-create-cilium-node-resource" auto_create_cilium_node: bool = true;

    /// Run the operator's controllers in the agent while this process is the elected leader.
    "leader-election" leader_election: bool = false;
    /// Time after the last renewal until another candidate may become leader.
    "leader-election-lease-duration" lease_duration: Duration = Duration::from_secs(15);
    /// A leader that cannot renew for this long steps down. Must be less than the lease duration.
    "leader-election-renew-deadline" renew_deadline: Duration = Duration::from_secs(10);
    /// Interval between attempts to acquire or renew the leader election Lease. Must be less than the renew deadline.
    "leader-election-retry-period" retry_period: Duration = Duration::from_secs(2);

    /// Allocate IPv4 addresses to pods. Must be `true`.
    "enable-ipv4" enable_ipv4: bool = true;
    /// Allocate IPv6 addresses to pods. Not implemented: must be `false`.
    "enable-ipv6" enable_ipv6: bool = false;
    /// Source of pod addresses: with `cluster-pool` the operator assigns each node a pod CIDR of the cluster's pool,
    /// with `kubernetes` the Node's pod CIDR is used (`spec.podCIDRs`, else `network.cilium.io/ipv4-pod-cidr`).
    "ipam" ipam: IpamMode = IpamMode::ClusterPool;
    /// Wait for an IPv4 pod CIDR of the Node. Always on with `ipam=kubernetes`; no effect in other modes.
    "k8s-require-ipv4-pod-cidr" require_ipv4_pod_cidr: bool = false;
    /// With `ipam=kubernetes`, also wait for an IPv6 pod CIDR of the Node. No address of it is allocated: see
    /// `enable-ipv6`.
    "k8s-require-ipv6-pod-cidr" require_ipv6_pod_cidr: bool = false;
    /// Also write the pod CIDR and the router address to annotations of the Node (`network.cilium.io/…`).
    "annotate-k8s-node" annotate_k8s_node: bool = false;
    /// CIDRs of the pool that the nodes' pod CIDRs are allocated from, in order of use. CIDRs may be added, but not
    /// changed or removed while in use. Addresses that a network of a node has, too, are not
    /// allocated on that node.
    "cluster-pool-ipv4-cidr" cluster_pool_ipv4: Vec<Ipv4Net> = default_pool();
    /// Prefix length of each node's pod CIDR, at most 30. A /24 has 254 addresses, two of which are not available to
    /// pods.
    "cluster-pool-ipv4-mask-size" cluster_pool_ipv4_mask_size: u8 = 24;
    /// CIDRs of the cluster's Services, if known. The pool must not overlap them.
    "service-cidr" service_cidrs: Vec<Ipv4Net> = Vec::new();
    /// Router address of the node, instead of one from its pod CIDR.
    "local-router-ipv4" local_router_ipv4: Option<Ipv4Addr> = None;

    /// Path at which to write the CNI network configuration once this node can serve pods; empty disables it. The file
    /// remains when the agent terminates.
    "write-cni-conf-when-ready" write_cni_conf_when_ready: Option<PathBuf> = None;
    /// File with the CNI network configuration to write instead of the built-in one, such as a mounted ConfigMap.
    "read-cni-conf" read_cni_conf: Option<PathBuf> = None;
    /// Do not write a CNI network configuration, unless `read-cni-conf` names one.
    "custom-cni-conf" custom_cni_conf: bool = false;
    /// Rename other CNI network configurations in the directory so that the container runtime ignores them.
    "cni-exclusive" cni_exclusive: bool = false;
    /// Directory of the container runtime's CNI plugins. `portmap`, which implements hostPort, is chained if it is
    /// installed there.
    "cni-bin-path" cni_bin_path: PathBuf = PathBuf::from("/opt/cni/bin");

    /// MTU of pod interfaces in bytes, at least 576. 0: the MTU of the route by which packets leave the node.
    "mtu" mtu: Option<u16> = None;
    /// Install a route to every other node's pod CIDR via that node's address. Requires all nodes on one L2 network.
    "auto-direct-node-routes" auto_direct_node_routes: bool = false;

    /// Masquerade pod traffic that leaves the cluster with the node's address.
    "enable-ipv4-masquerade" enable_ipv4_masquerade: bool = true;
    /// Masquerade in eBPF. There is no other implementation; `false` is ignored with a warning.
    "enable-bpf-masquerade" enable_bpf_masquerade: bool = true;
    /// Traffic to this CIDR is not masqueraded. Traffic to known pod CIDRs and nodes never is.
    "ipv4-native-routing-cidr" ipv4_native_routing_cidr: Option<Ipv4Net> = None;
    /// Do not masquerade traffic to the CIDRs of an ip-masq-agent file.
    "enable-ip-masq-agent" enable_ip_masq_agent: bool = false;
    /// Path of the ip-masq-agent file, YAML or JSON. Changes are applied without a restart.
    "ip-masq-agent-config-path" ip_masq_agent_config_path: PathBuf = PathBuf::from("/etc/config/ip-masq-agent");
    /// CIDRs that are not masqueraded if the ip-masq-agent file lists none: `reserved` (11 ranges, as Cilium) or
    /// `rfc1918` (3 ranges, as ip-masq-agent).
    "ip-masq-default-exclusions" ip_masq_default_exclusions: DefaultExclusions = DefaultExclusions::Reserved;
    /// Whether a change of the excluded CIDRs applies to established TCP flows: `sticky` (no) or `immediate` (yes).
    "masquerade-flow-policy" masquerade_flow_policy: FlowPolicy = FlowPolicy::Sticky;
    /// First and last source port for masqueraded flows. NodePorts, `ip_local_reserved_ports` and ports in use by the
    /// host are skipped.
    "masquerade-port-range" masquerade_port_range: PortRange = PortRange { first: 1024, last: 65535 };
    /// First and last NodePort; not used as source ports of masqueraded flows.
    "node-port-range" node_port_range: PortRange = PortRange { first: 30000, last: 32767 };
    /// Devices whose traffic is masqueraded, first match wins: a name, a prefix ending in `+`, or either after `!` to
    /// exclude it. Default: devices with a default route or the node's address.
    "devices" devices: DeviceSelector = DeviceSelector::default();
    /// Use the address of this device as the masquerade address on all devices.
    "derive-masq-ip-addr-from-device" derive_masq_ip_addr_from_device: Option<String> = None;
    /// Masquerade traffic from pods to other nodes' addresses.
    "enable-remote-node-masquerade" enable_remote_node_masquerade: bool = false;
    /// Maximum number of masqueraded flows, from 1024 to 16777216.
    "bpf-nat-global-max" bpf_nat_global_max: u32 = 524_288;
    /// Idle timeout of established TCP flows. At least 7260 s: the kernel sends the first keep-alive after 7200 s.
    "bpf-ct-timeout-regular-tcp" tcp_idle_timeout: Duration = Duration::from_secs(6 * 3600);
}

/// Default of Cilium's chart, in force where the key is not set.
fn default_pool() -> Vec<Ipv4Net> {
    vec![Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 8)]
}

impl Settings {
    /// The pool of mode `cluster-pool`, checked.
    ///
    /// # Errors
    /// Everything that is wrong with it, not only the first.
    pub fn cluster_pool(&self) -> Result<(cluster_pool::Settings, Vec<ConfigWarning>), Vec<ConfigError>> {
        let ipv4 = FamilySettings {
            enabled: self.enable_ipv4,
            cidrs: self.cluster_pool_ipv4.iter().copied().map(Into::into).collect(),
            mask_size: self.cluster_pool_ipv4_mask_size,
        };
        let ipv6 = FamilySettings { enabled: false, cidrs: Vec::new(), mask_size: 120 };
        cluster_pool::Settings::new(ipv4, ipv6, BLOCK_QUARANTINE)
    }

    /// The source of a key's value.
    #[must_use]
    pub fn source(&self, key: &str) -> Source {
        self.sources.get(key).cloned().unwrap_or(Source::Default)
    }

    /// The keys of the config directory that neither Cistern nor Cilium knows, with a message about each.
    #[must_use]
    pub fn unknown(&self) -> &BTreeMap<String, String> {
        &self.unknown
    }

    /// Every key with its value and source.
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

    /// The directory in which maps and programs are pinned.
    #[must_use]
    pub fn pin_root(&self) -> PathBuf {
        self.bpf_root.join("cistern")
    }
}
