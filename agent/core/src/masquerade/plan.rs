//! What the datapath shall hold: the desired rows of its maps, independent of their bytes.

use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

/// Why a destination keeps the pod's own address (`masquerade` 2.4). One longest-prefix map holds all of them, so
/// that a new flow costs one look-up; where sources name the same prefix, the first in this order is the one kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum ExcludedReason {
    /// An address of this node.
    OwnNode = 1,
    /// `InternalIP` of another node, under native routing.
    NodeInternalIp = 2,
    /// The pod CIDR of a known node.
    PodCidr = 3,
    /// `ipv4-native-routing-cidr`.
    NativeRouting = 4,
    /// The ip-masq-agent list, or its built-in default.
    IpMasqAgent = 5,
    /// 169.254.0.0/16, unless `masqLinkLocal`.
    LinkLocal = 6,
    /// Multicast and limited broadcast: never masqueraded.
    Multicast = 7,
}

/// A pod of this node as the datapath knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointEntry {
    /// The host side of the pod's interface.
    pub ifindex: u32,
    /// The pod's traffic is never masqueraded.
    pub no_masquerade: bool,
}

/// An egress device as the datapath knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEntry {
    /// The address that pods leave under; without one, traffic passes unchanged and is counted.
    pub address: Option<Ipv4Addr>,
}

/// When a change of policy reaches a flow that is already open (`masquerade` decision 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowPolicy {
    /// An open TCP flow keeps what its first packet got.
    #[default]
    Sticky,
    /// Every packet follows the present policy.
    Immediate,
}

/// Node-wide settings of the datapath; one row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatapathSettings {
    /// `enable-ipv4-masquerade`: false passes everything untouched.
    pub masquerade: bool,
    /// See [`FlowPolicy`].
    pub flow_policy: FlowPolicy,
    /// First port that a pod flow may be given.
    pub port_min: u16,
    /// Last port that a pod flow may be given.
    pub port_max: u16,
    /// Ports inside the range that are never given: NodePort range, `ip_local_reserved_ports`; inclusive pairs, sorted.
    pub ports_reserved: Vec<(u16, u16)>,
    /// TCP idle timeout of an established flow, in seconds; at least 7,260.
    pub tcp_idle_seconds: u32,
}
