//! `CiliumNode`: addresses and IPAM state of a node. Cluster-scoped, named like its Node.

use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Requested and assigned configuration of the node.
///
/// Which component writes a field depends on the IPAM mode; each field names its writer. A CiliumNode is owned by its
/// Node: the operator deletes it when the Node is gone, and a running agent recreates its object if it is deleted.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "cilium.io",
    version = "v2",
    kind = "CiliumNode",
    plural = "ciliumnodes",
    singular = "ciliumnode",
    shortname = "cn",
    shortname = "ciliumn",
    category = "cilium",
    status = "CiliumNodeStatus",
    derive = "PartialEq",
    doc = "A node's addresses, and the state of its IPAM.",
    printcolumn(
        name = "CiliumInternalIP",
        type_ = "string",
        description = "Router address: the node's address in its pod CIDR, the gateway of its pods",
        json_path = r#".spec.addresses[?(@.type=="CiliumInternalIP")].ip"#
    ),
    printcolumn(
        name = "InternalIP",
        type_ = "string",
        description = "Internal IP address of the node",
        json_path = r#".spec.addresses[?(@.type=="InternalIP")].ip"#
    ),
    printcolumn(
        name = "PodCIDRs",
        type_ = "string",
        description = "Pod CIDRs of the node",
        json_path = ".spec.ipam.podCIDRs"
    ),
    printcolumn(
        name = "Error",
        type_ = "string",
        description = "Last error of the operator for this node",
        json_path = ".status.ipam.operator-status.error",
        priority = "1"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        description = "Time since creation",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "kebab-case")]
pub struct CiliumNodeSpec {
    /// Instance ID of the machine at its cloud provider. Azure: the provider ID without `azure://`, in lower case.
    /// Written by the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,

    /// The kernel's boot ID (`/proc/sys/kernel/random/boot_id`). Written by the agent.
    #[serde(default, rename = "bootid", skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,

    /// All addresses of the node, with their types. Written by the agent, from the Node; `CiliumInternalIP` is the
    /// router address that the agent allocated, and reuses after a restart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<NodeAddress>,

    /// Addresses of Cilium's health endpoint. Not used by Cistern, which preserves the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<EndpointAddresses>,

    /// Addresses of Cilium's ingress listener. Not used by Cistern, which preserves the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<EndpointAddresses>,

    /// Encryption of traffic between nodes. Not used by Cistern, which preserves the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionSpec>,

    /// IPAM configuration and assignments.
    #[serde(default, skip_serializing_if = "IpamSpec::is_empty")]
    pub ipam: IpamSpec,

    /// Mode `azure` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub azure: Option<AzureSpec>,

    /// Fields of other versions and other clouds (`eni`, `alibaba-cloud`, …), preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// One address of a node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeAddress {
    /// `InternalIP`, `ExternalIP`, `Hostname` and the like as in the Node, or `CiliumInternalIP` for the router address.
    #[serde(default, rename = "type", skip_serializing_if = "String::is_empty")]
    pub kind: String,

    /// The address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ip: String,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Addresses of an endpoint of the node itself, one per family.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EndpointAddresses {
    /// The IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<String>,

    /// The IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Encryption of traffic between nodes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EncryptionSpec {
    /// Index of the key in use; 0 if nothing is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<i64>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// IPAM configuration and assignments.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct IpamSpec {
    /// Modes `crd` and `azure`: the IPv4 addresses that the node may allocate. An address in use remains in here and is
    /// listed in `status.ipam.used` as well. Written by the operator or, in mode `crd`, by any client.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pool: BTreeMap<String, AllocationIp>,

    /// As `pool`, for IPv6.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ipv6_pool: BTreeMap<String, AllocationIp>,

    /// The node's pod CIDRs. Written by the operator in mode `cluster-pool`, by the agent from the Node in mode
    /// `kubernetes`, and by the agent where its pods have addresses of a pod CIDR that is not listed.
    /// At most one per family, IPv4 first.
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "cidr_list")]
    pub pod_cidrs: Vec<String>,

    /// Mode `multi-pool`: what the node requests and has from each pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pools: Option<IpamPools>,

    /// Minimum number of addresses, in use or free, that are attached to the node from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub min_allocate: Option<i64>,

    /// Maximum number of addresses attached to the node. 0: the limit of the machine type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_allocate: Option<i64>,

    /// Number of free addresses to keep available. 0 means 8, and the operator writes the 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub pre_allocate: Option<i64>,

    /// Number of addresses to attach beyond what is needed, to save calls of the cloud's API; also the surplus that is
    /// kept before addresses are released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_above_watermark: Option<i64>,

    /// Tags that a public address or prefix must have to be assigned to the node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub static_ip_tags: BTreeMap<String, String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl IpamSpec {
    /// Whether nothing is set. The field is omitted then, so that an apply does not own it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// An address that may be allocated, or that is in use.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AllocationIp {
    /// In `status.ipam.used`: the owner (`namespace/pod`, `router`). In `spec.ipam.pool`: empty, except in mode `crd`,
    /// where a name reserves the address for that owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,

    /// The cloud's resource that the address is attached to: the ID of the network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Mode `multi-pool`: what the node requests and has from each pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IpamPools {
    /// Addresses requested from each pool. Written by the agent only, sorted by pool; pools without a request are
    /// omitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requested: Vec<IpamPoolRequest>,

    /// Pod CIDRs allocated from each pool. The operator adds, the agent removes what it releases. Sorted by pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allocated: Vec<IpamPoolAllocation>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Addresses requested from one pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IpamPoolRequest {
    /// Name of the pool.
    #[schemars(length(min = 1))]
    pub pool: String,

    /// Number of addresses.
    #[serde(default)]
    pub needed: IpamDemand,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A number of addresses per family: the total, not a difference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct IpamDemand {
    /// IPv4 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4_addrs: Option<i64>,

    /// IPv6 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6_addrs: Option<i64>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Pod CIDRs allocated from one pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IpamPoolAllocation {
    /// Name of the pool.
    #[schemars(length(min = 1))]
    pub pool: String,

    /// The pod CIDRs, IPv4 first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "cidr_list")]
    pub cidrs: Vec<String>,

    /// Whether the first address of each pod CIDR may be allocated.
    #[serde(default, rename = "allowFirstIP", skip_serializing_if = "Option::is_none")]
    pub allow_first_ip: Option<bool>,

    /// Whether the last address of each pod CIDR may be allocated.
    #[serde(default, rename = "allowLastIP", skip_serializing_if = "Option::is_none")]
    pub allow_last_ip: Option<bool>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Mode `azure`: configuration of the node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct AzureSpec {
    /// The only network interface that may have pod addresses. Empty: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface_name: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Observed state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CiliumNodeStatus {
    /// State of the node's IPAM.
    #[serde(default, skip_serializing_if = "IpamStatus::is_empty")]
    pub ipam: IpamStatus,

    /// Mode `azure`: the network interfaces, mirrored by the operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub azure: Option<AzureStatus>,

    /// Fields of other versions and other clouds (`eni`, `alibaba-cloud`, …), preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// State of the node's IPAM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct IpamStatus {
    /// Modes `crd` and `azure`: the IPv4 addresses in use, including the router's. Written by the agent, as a whole
    /// each time.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub used: BTreeMap<String, AllocationIp>,

    /// As `used`, for IPv6.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ipv6_used: BTreeMap<String, AllocationIp>,

    /// Release handshake of each IPv4 address. The operator marks and confirms, the agent answers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub release_ips: BTreeMap<String, ReleaseState>,

    /// As `release_ips`, for IPv6.
    #[serde(default, rename = "release-ipv6s", skip_serializing_if = "BTreeMap::is_empty")]
    pub release_ipv6s: BTreeMap<String, ReleaseState>,

    /// The operator's errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator_status: Option<OperatorStatus>,

    /// The public address or prefix assigned to the node: an ID or an address. Written by the operator, once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned_static_ip: Option<String>,

    /// State of each pod CIDR, in a mode that Cilium has removed; preserved.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pod_cidrs: BTreeMap<String, PodCidrStatus>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl IpamStatus {
    /// Whether nothing is set. The field is omitted then, so that an apply does not own it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The operator's errors for this node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OperatorStatus {
    /// The last error message; empty if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// State of one pod CIDR in a mode that Cilium has removed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PodCidrStatus {
    /// The state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<PodCidrState>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// An enumeration that later versions may extend: an unknown value is preserved, not rejected.
macro_rules! open_words {
    ($(#[$doc:meta])* $name:ident { $($(#[$word_doc:meta])* $word:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$word_doc])* #[serde(rename = $text)] $word,)+
            /// A value of another version, preserved.
            #[serde(untagged)]
            Other(String),
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "enum": [$($text),+] })
            }
        }
    };
}

open_words! {
    /// State of the release handshake of an address.
    ReleaseState {
        /// The operator requests the release.
        MarkedForRelease = "marked-for-release",
        /// The agent will not allocate it any more.
        ReadyForRelease = "ready-for-release",
        /// The agent refuses: the address is in use, or not this node's.
        DoNotRelease = "do-not-release",
        /// The operator has detached it.
        Released = "released",
    }
}

open_words! {
    /// State of a pod CIDR.
    PodCidrState {
        /// Addresses of it are in use.
        InUse = "in-use",
        /// All addresses of it are in use.
        Depleted = "depleted",
        /// Released by the node.
        Released = "released",
    }
}

/// Mode `azure`: the network interfaces of the node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AzureStatus {
    /// The interfaces, as Azure reports them. Written by the operator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<AzureInterface>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A network interface of the node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct AzureInterface {
    /// ARM resource ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,

    /// Name of the interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,

    /// MAC address with `:` between its bytes, in the case that Azure sends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,

    /// Provisioning state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,

    /// ARM resource ID of the network security group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub security_group: Option<String>,

    /// Primary address of the interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,

    /// Secondary addresses; also the primary one if the operator is so configured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AzureAddress>,

    /// The subnet of the interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<AzureSubnet>,

    /// First host of the subnet: Azure's gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,

    /// The gateway, as older versions name it.
    #[serde(default, rename = "GatewayIP", skip_serializing_if = "Option::is_none")]
    pub gateway_ip: Option<String>,

    /// CIDR of the subnet, as older versions store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_cidr")]
    pub cidr: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// An address of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AzureAddress {
    /// The address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,

    /// ARM resource ID of the subnet, as older versions store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<String>,

    /// Provisioning state in lower case; only `succeeded` is usable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A subnet of Azure.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AzureSubnet {
    /// ARM resource ID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,

    /// CIDR of the subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_cidr")]
    pub cidr: Option<String>,

    /// Fields of other versions, preserved.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A list whose items the API server validates as CIDRs.
fn cidr_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "string", "format": "cidr" } })
}

/// A string that the API server validates as a CIDR.
fn optional_cidr(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "cidr" })
}
