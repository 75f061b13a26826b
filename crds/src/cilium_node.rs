//! `CiliumNode`: what each node is given, what it holds and how it is reached. Cluster-scoped, named like its Node.

use kube::CustomResource;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// What is asked of the node and what it is given.
///
/// Who writes what depends on the IPAM mode; each field names its writer. A CiliumNode is owned by its Node: the
/// operator deletes it when the Node is gone, and a live agent whose object was deleted writes it again.
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
    doc = "A node: the addresses it is reached under, the addresses it may give to pods, and what became of them.",
    printcolumn(
        name = "CiliumInternalIP",
        type_ = "string",
        description = "Address of the node inside its pod CIDR: the router that pods use",
        json_path = r#".spec.addresses[?(@.type=="CiliumInternalIP")].ip"#
    ),
    printcolumn(
        name = "InternalIP",
        type_ = "string",
        description = "Address of the node in the cluster's network",
        json_path = r#".spec.addresses[?(@.type=="InternalIP")].ip"#
    ),
    printcolumn(
        name = "PodCIDRs",
        type_ = "string",
        description = "Blocks the node gives addresses from",
        json_path = ".spec.ipam.podCIDRs"
    ),
    printcolumn(
        name = "Error",
        type_ = "string",
        description = "What the operator could not do for this node",
        json_path = ".status.ipam.operator-status.error",
        priority = "1"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        description = "Time since the object was made",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "kebab-case")]
pub struct CiliumNodeSpec {
    /// Identifier of the machine at its cloud provider. Azure: the provider ID without `azure://`, in lower case.
    /// Written by the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_id: Option<String>,

    /// Identifier that the kernel made at the last boot. Written by the agent.
    #[serde(default, rename = "bootid", skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,

    /// Every address of the node, with its type. Written by the agent, from the Node; `CiliumInternalIP` is the router
    /// address it chose, and the one it takes again after a restart.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<NodeAddress>,

    /// Addresses of Cilium's health endpoint. Cistern has none and keeps the field as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<EndpointAddresses>,

    /// Addresses of Cilium's ingress listener. Cistern has none and keeps the field as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<EndpointAddresses>,

    /// Encryption of traffic between nodes. Cistern has none and keeps the field as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<EncryptionSpec>,

    /// What is asked and given in addresses.
    #[serde(default, skip_serializing_if = "IpamSpec::is_empty")]
    pub ipam: IpamSpec,

    /// Mode `azure` alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub azure: Option<AzureSpec>,

    /// Fields of other versions and other clouds (`eni`, `alibaba-cloud`, …), kept as they are.
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

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Addresses of an endpoint that belongs to the node itself, one per family.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EndpointAddresses {
    /// The IPv4 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4: Option<String>,

    /// The IPv6 address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6: Option<String>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Encryption of traffic between nodes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EncryptionSpec {
    /// Index of the key in use; 0 when nothing is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<i64>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// What is asked and given in addresses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct IpamSpec {
    /// Modes `crd` and `azure`: the IPv4 addresses that the node may hand out. An address in use stays in here and
    /// appears in `status.ipam.used` as well. Written by the operator or, in `crd`, by anyone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pool: BTreeMap<String, AllocationIp>,

    /// The same for IPv6.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ipv6_pool: BTreeMap<String, AllocationIp>,

    /// Modes `cluster-pool` (written by the operator) and `kubernetes` (written by the agent, from the Node): the blocks
    /// the node gives addresses from. At most one per family, IPv4 first.
    #[serde(default, rename = "podCIDRs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "cidr_list")]
    pub pod_cidrs: Vec<String>,

    /// Mode `multi-pool`: what the node asks of each pool and what it has from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pools: Option<IpamPools>,

    /// Least number of addresses, in use or free, that the node has attached from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub min_allocate: Option<i64>,

    /// Most addresses that the node ever has attached. 0: as many as the machine allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_allocate: Option<i64>,

    /// Free addresses that are kept ready. 0 stands for 8, and the operator writes the 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub pre_allocate: Option<i64>,

    /// Addresses beyond what is needed that are taken in one go, to spare calls of the cloud's API; also the surplus that
    /// is kept before any is given back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max_above_watermark: Option<i64>,

    /// Tags that a public address or prefix must carry to be given to the node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub static_ip_tags: BTreeMap<String, String>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl IpamSpec {
    /// Whether nothing is set: then the field is left out, so that an apply does not claim it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// An address that may be handed out, or that is in use.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AllocationIp {
    /// In `status.ipam.used`: who holds it (`namespace/pod`, `router`). In `spec.ipam.pool`: empty, but in mode `crd` a
    /// name reserves the address for its bearer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,

    /// What the address is attached to, as the cloud names it: the ID of the network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<String>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Mode `multi-pool`: what the node asks of each pool and what it has from it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IpamPools {
    /// Addresses wanted from each pool. Written by the agent alone, sorted by pool; a pool of which nothing is wanted is
    /// left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requested: Vec<IpamPoolRequest>,

    /// Blocks given from each pool. The operator adds, the agent takes away what it gave up. Sorted by pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allocated: Vec<IpamPoolAllocation>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Addresses wanted from one pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IpamPoolRequest {
    /// Name of the pool.
    #[schemars(length(min = 1))]
    pub pool: String,

    /// How many addresses.
    #[serde(default)]
    pub needed: IpamDemand,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A number of addresses per family: the whole number wanted, not a difference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct IpamDemand {
    /// IPv4 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv4_addrs: Option<i64>,

    /// IPv6 addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ipv6_addrs: Option<i64>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Blocks given from one pool.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct IpamPoolAllocation {
    /// Name of the pool.
    #[schemars(length(min = 1))]
    pub pool: String,

    /// The blocks, IPv4 first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "cidr_list")]
    pub cidrs: Vec<String>,

    /// Whether the first address of each block may be handed out.
    #[serde(default, rename = "allowFirstIP", skip_serializing_if = "Option::is_none")]
    pub allow_first_ip: Option<bool>,

    /// Whether the last address of each block may be handed out.
    #[serde(default, rename = "allowLastIP", skip_serializing_if = "Option::is_none")]
    pub allow_last_ip: Option<bool>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// Mode `azure`: what the node asks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct AzureSpec {
    /// The only network interface that may get pod addresses. Empty: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface_name: Option<String>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// What became of what was asked.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CiliumNodeStatus {
    /// What became of the addresses.
    #[serde(default, skip_serializing_if = "IpamStatus::is_empty")]
    pub ipam: IpamStatus,

    /// Mode `azure`: the network interfaces, mirrored by the operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub azure: Option<AzureStatus>,

    /// Fields of other versions and other clouds (`eni`, `alibaba-cloud`, …), kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// What became of the addresses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct IpamStatus {
    /// Modes `crd` and `azure`: the IPv4 addresses in use, the router's included. Written by the agent, whole each time.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub used: BTreeMap<String, AllocationIp>,

    /// The same for IPv6.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ipv6_used: BTreeMap<String, AllocationIp>,

    /// Where the release of each IPv4 address stands. The operator marks and confirms, the agent answers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub release_ips: BTreeMap<String, ReleaseState>,

    /// The same for IPv6.
    #[serde(default, rename = "release-ipv6s", skip_serializing_if = "BTreeMap::is_empty")]
    pub release_ipv6s: BTreeMap<String, ReleaseState>,

    /// What the operator could not do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operator_status: Option<OperatorStatus>,

    /// The public address or prefix given to the node: an ID or an address. Written by the operator, once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned_static_ip: Option<String>,

    /// State of each block, in a mode that Cilium has withdrawn; kept as it is.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pod_cidrs: BTreeMap<String, PodCidrStatus>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

impl IpamStatus {
    /// Whether nothing is set: then the field is left out, so that an apply does not claim it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What the operator could not do for this node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OperatorStatus {
    /// The last error in words; empty when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// State of one block in a mode that Cilium has withdrawn.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PodCidrStatus {
    /// The state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<PodCidrState>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A word out of a list that later versions may lengthen: an unknown one is kept, not refused.
macro_rules! open_words {
    ($(#[$doc:meta])* $name:ident { $($(#[$word_doc:meta])* $word:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$word_doc])* #[serde(rename = $text)] $word,)+
            /// A word of another version, kept as it is.
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
    /// Where the release of an address stands.
    ReleaseState {
        /// The operator wants it back.
        MarkedForRelease = "marked-for-release",
        /// The agent will not hand it out any more.
        ReadyForRelease = "ready-for-release",
        /// The agent refuses: it is in use, or it is not this node's.
        DoNotRelease = "do-not-release",
        /// The operator has detached it.
        Released = "released",
    }
}

open_words! {
    /// State of a block.
    PodCidrState {
        /// Addresses of it are in use.
        InUse = "in-use",
        /// All addresses of it are in use.
        Depleted = "depleted",
        /// Given up by the node.
        Released = "released",
    }
}

/// Mode `azure`: the network interfaces of the node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AzureStatus {
    /// The interfaces, as Azure reports them. Written by the operator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<AzureInterface>,

    /// Fields of other versions, kept as they are.
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

    /// Secondary addresses; the primary one too when the operator was told so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<AzureAddress>,

    /// The subnet that the interface is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<AzureSubnet>,

    /// First host of the subnet: the gateway of Azure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,

    /// The gateway as older versions spelt it.
    #[serde(default, rename = "GatewayIP", skip_serializing_if = "Option::is_none")]
    pub gateway_ip: Option<String>,

    /// CIDR of the subnet, as older versions keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "optional_cidr")]
    pub cidr: Option<String>,

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// An address of a network interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AzureAddress {
    /// The address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,

    /// ARM resource ID of the subnet, as older versions keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet: Option<String>,

    /// Provisioning state in lower case; only `succeeded` can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,

    /// Fields of other versions, kept as they are.
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

    /// Fields of other versions, kept as they are.
    #[serde(flatten)]
    pub other: BTreeMap<String, Value>,
}

/// A list whose items the API server checks to be CIDRs.
fn cidr_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "string", "format": "cidr" } })
}

/// A string that the API server checks to be a CIDR.
fn optional_cidr(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "cidr" })
}
