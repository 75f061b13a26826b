//! Requests and answers of the agent API.

use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

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
    /// The pod, where the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodRef>,
}

/// Answer to [`AddRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddResponse {
    /// The pod's address, used as /32.
    pub address: Ipv4Addr,
    /// The router address of the node: the pod's gateway.
    pub router: Ipv4Addr,
    /// MTU of the pod's interface, in bytes.
    pub mtu: u32,
    /// Names this lease among all that the same address had before; to be given back in [`ConfirmRequest`].
    pub generation: u64,
}

/// `POST /v1/cni/confirm`: the interface exists. The lease is no longer provisional and the datapath knows the pod
/// before the answer leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// From [`AddResponse`].
    pub generation: u64,
    /// Name of the host side of the pair.
    pub host_ifname: String,
    /// Index of the host side of the pair.
    pub host_ifindex: u32,
    /// MAC address of the pod's side, as `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
}

/// `POST /v1/cni/del`: gives the lease of this key back, whatever state it is in. Without one it is a success too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelRequest {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

/// Answer to [`DelRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DelResponse {
    /// The address that was given back, if the key held one.
    pub released: Option<Ipv4Addr>,
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
    /// The host side of the pair, as confirmed.
    pub host_ifname: Option<String>,
}
