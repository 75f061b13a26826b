//! Explanations for `cistern explain ip` and `cistern explain node`.
//!
//! Nothing is decided here; leases and nodes are described in human-readable form.

use super::lease::{Row, RowState};
use crate::ip::{net_bounds, overlaps};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// A node, as described by its CiliumNode.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// Its own addresses.
    pub addresses: Vec<IpAddr>,
    /// The router address that it published.
    pub router: Option<IpAddr>,
    /// `spec.ipam.podCIDRs` without invalid elements and host bits.
    pub blocks: Vec<IpNet>,
    /// Invalid elements of `spec.ipam.podCIDRs`.
    pub unreadable: Vec<String>,
    /// `status.ipam.operator-status.error`
    pub operator_error: Option<String>,
    /// The object is being deleted.
    pub deleting: bool,
}

/// The input of explanations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts<'a> {
    /// Name of this node.
    pub node: &'a str,
    /// The pod CIDR of this node.
    pub block: Option<IpNet>,
    /// Why allocation from it is suspended.
    pub blocked: Option<&'a str>,
    /// The addresses of this node that are not free.
    pub rows: &'a [Row],
    /// All known nodes, including this one.
    pub nodes: &'a [NodeFacts],
}

/// State of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AddressState {
    /// In use by a pod of this node.
    Confirmed,
    /// Allocated to a pod of this node whose interface is not confirmed yet.
    Provisional,
    /// Allocated through the API to an owner string.
    Owner,
    /// Released and quarantined.
    Quarantined,
    /// Reserved for the router or an address of this node.
    Reserved,
    /// The network address of the pod CIDR, which is not allocated to pods.
    Network,
    /// The broadcast address of the pod CIDR, which is not allocated to pods.
    Broadcast,
    /// In this node's pod CIDR, and free.
    Free,
    /// In the pod CIDR of another node, whose agent knows more.
    OtherNode,
    /// An address of a node itself.
    Node,
    /// In no pod CIDR of a known node.
    Unknown,
}

impl fmt::Display for AddressState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Confirmed => "confirmed",
            Self::Provisional => "provisional",
            Self::Owner => "owner",
            Self::Quarantined => "quarantined",
            Self::Reserved => "reserved",
            Self::Network => "network",
            Self::Broadcast => "broadcast",
            Self::Free => "free",
            Self::OtherNode => "other-node",
            Self::Node => "node",
            Self::Unknown => "unknown",
        })
    }
}

impl From<RowState> for AddressState {
    fn from(state: RowState) -> Self {
        match state {
            RowState::Confirmed => Self::Confirmed,
            RowState::Provisional => Self::Provisional,
            RowState::Owner => Self::Owner,
            RowState::Quarantined => Self::Quarantined,
            RowState::Reserved => Self::Reserved,
        }
    }
}

/// Explanation of an address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressExplanation {
    /// The address.
    pub address: IpAddr,
    /// Its state.
    pub state: AddressState,
    /// The node responsible for it, if known.
    pub node: Option<String>,
    /// The pod CIDR that contains it, if known.
    pub block: Option<IpNet>,
    /// `namespace/name` of its pod.
    pub pod: Option<String>,
    /// Attachment (`container/interface`), owner string, or reserved use; for a quarantined address, the former owner.
    pub holder: Option<String>,
    /// Start of this state.
    pub since: Option<Timestamp>,
    /// End of this state, if it expires.
    pub until: Option<Timestamp>,
    /// Human-readable explanation.
    pub why: String,
}

/// Explains an address.
#[must_use]
pub fn address(facts: &Facts<'_>, address: IpAddr) -> AddressExplanation {
    let node = Some(facts.node.to_owned());
    let block = facts.block.filter(|block| block.contains(&address));
    let explained = |state, node, block, why| AddressExplanation {
        address,
        state,
        node,
        block,
        pod: None,
        holder: None,
        since: None,
        until: None,
        why,
    };
    if let Some(row) = facts.rows.iter().find(|row| row.address == address) {
        let why = match (block, facts.block) {
            // Reserved addresses may be outside the pod CIDR.
            (Some(_), _) | (None, None) => why_held(row),
            (None, Some(_)) if row.state == RowState::Reserved => why_held(row),
            (None, Some(now)) => {
                format!("{}; it is in an earlier pod CIDR, and new addresses are allocated from {now}", why_held(row))
            }
        };
        return AddressExplanation {
            pod: row.pod.as_ref().map(ToString::to_string),
            holder: Some(row.holder.clone()),
            since: row.since,
            until: row.until,
            ..explained(row.state.into(), node, block, why)
        };
    }
    if let Some(block) = block {
        let (first, last) = net_bounds(&block);
        let bits = crate::ip::address_bits(address);
        let at_the_end = last - first > 1 && (bits == first || bits == last);
        let (state, why) = if at_the_end && bits == first {
            (
                AddressState::Network,
                format!("the first address of {block} is its network address, which is not allocated to pods"),
            )
        } else if at_the_end {
            (
                AddressState::Broadcast,
                format!("the last address of {block} is its broadcast address, which is not allocated to pods"),
            )
        } else {
            match facts.blocked {
                Some(reason) => {
                    (AddressState::Free, format!("it is not allocated, but allocation is suspended: {reason}"))
                }
                None => (AddressState::Free, format!("it is not allocated; it is available to pods of {}", facts.node)),
            }
        };
        return explained(state, node, Some(block), why);
    }
    let of_node = |found: &&NodeFacts| found.addresses.contains(&address) || found.router == Some(address);
    if let Some(found) = facts.nodes.iter().find(of_node) {
        let what = if found.router == Some(address) { "the router address" } else { "an address" };
        let block = found.blocks.iter().find(|block| block.contains(&address)).copied();
        return explained(
            AddressState::Node,
            Some(found.name.clone()),
            block,
            format!("{what} of the node {}, by its CiliumNode", found.name),
        );
    }
    let holders: Vec<(&str, IpNet)> = facts
        .nodes
        .iter()
        .flat_map(|found| found.blocks.iter().map(|block| (found.name.as_str(), *block)))
        .filter(|(_, block)| block.contains(&address))
        .collect();
    match holders.as_slice() {
        [] => explained(
            AddressState::Unknown,
            None,
            None,
            "it is in no pod CIDR of a known node; the pod CIDRs of recently deleted nodes are quarantined in the \
             ConfigMap cistern-ipam"
                .to_owned(),
        ),
        [(name, block)] => explained(
            AddressState::OtherNode,
            Some((*name).to_owned()),
            Some(*block),
            format!("it is in the pod CIDR {block} of {name}; `cistern explain ip {address}` there shows its owner"),
        ),
        [(name, block), ..] => {
            let names: Vec<String> = holders.iter().map(|(name, block)| format!("{name} ({block})")).collect();
            explained(
                AddressState::OtherNode,
                Some((*name).to_owned()),
                Some(*block),
                format!(
                    "several nodes list a pod CIDR with it, of which only one can be correct: {}",
                    names.join(", ")
                ),
            )
        }
    }
}

fn why_held(row: &Row) -> String {
    let holder = row.pod.as_ref().map_or_else(|| row.holder.clone(), |pod| format!("{pod} ({})", row.holder));
    match row.state {
        RowState::Confirmed => format!("pod {holder} has it: {}", row.why),
        RowState::Provisional => {
            format!(
                "allocated to pod {holder}, whose interface is not confirmed yet; without a confirmation the lease expires"
            )
        }
        RowState::Owner => format!("allocated through the API to {holder}"),
        RowState::Quarantined => format!("released by {holder}; it is quarantined before it is reallocated"),
        RowState::Reserved => format!("reserved for {holder}; not allocated to pods"),
    }
}

/// State of a node's pod CIDRs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    /// It has a pod CIDR without a problem.
    HasBlock,
    /// It has no pod CIDR yet.
    WaitsForBlock,
    /// Another node lists an overlapping pod CIDR.
    Overlaps,
    /// The operator reports an error for it, or its list is invalid.
    Refused,
    /// Its object is being deleted.
    Deleting,
    /// There is no CiliumNode of this name.
    Unknown,
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HasBlock => "has-block",
            Self::WaitsForBlock => "waits-for-block",
            Self::Overlaps => "overlaps",
            Self::Refused => "refused",
            Self::Deleting => "deleting",
            Self::Unknown => "unknown",
        })
    }
}

/// Explanation of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeExplanation {
    /// Its name.
    pub node: String,
    /// Its state.
    pub state: NodeState,
    /// `spec.ipam.podCIDRs` of its CiliumNode.
    pub blocks: Vec<IpNet>,
    /// Other nodes' blocks that overlap them.
    pub overlaps: Vec<BlockOverlap>,
    /// `status.ipam.operator-status.error` of its CiliumNode.
    pub operator_error: Option<String>,
    /// Human-readable explanation.
    pub why: String,
}

/// Two nodes' blocks that overlap.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockOverlap {
    /// The block of the node that was asked about.
    pub block: IpNet,
    /// The other node.
    pub other_node: String,
    /// Its block.
    pub other_block: IpNet,
}

/// Says what is known of a node.
#[must_use]
pub fn node(nodes: &[NodeFacts], name: &str) -> NodeExplanation {
    let Some(found) = nodes.iter().find(|node| node.name == name) else {
        return NodeExplanation {
            node: name.to_owned(),
            state: NodeState::Unknown,
            blocks: Vec::new(),
            overlaps: Vec::new(),
            operator_error: None,
            why: format!(
                "no CiliumNode is named {name}; the node's agent creates it when it first reaches the API server"
            ),
        };
    };
    let others = nodes.iter().filter(|other| other.name != name);
    let clashes: Vec<BlockOverlap> = others
        .flat_map(|other| other.blocks.iter().map(move |theirs| (other, *theirs)))
        .flat_map(|(other, theirs)| {
            found.blocks.iter().filter(move |ours| overlaps(ours, &theirs)).map(move |ours| BlockOverlap {
                block: *ours,
                other_node: other.name.clone(),
                other_block: theirs,
            })
        })
        .collect();
    let listed = found.blocks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let (state, why) = if found.deleting {
        (
            NodeState::Deleting,
            format!("its CiliumNode is being deleted; its pod CIDR ({listed}) is quarantined before it is reassigned"),
        )
    } else if let Some(clash) = clashes.first() {
        let why = format!(
            "its block {} overlaps {} of {}: neither allocates addresses until one of the two objects is corrected",
            clash.block, clash.other_block, clash.other_node
        );
        (NodeState::Overlaps, why)
    } else if let Some(text) = found.unreadable.first() {
        (NodeState::Refused, format!("spec.ipam.podCIDRs holds {text:?}; expected a CIDR such as 10.0.1.0/24"))
    } else {
        match (&found.operator_error, found.blocks.is_empty()) {
            (Some(error), true) => (NodeState::Refused, format!("the operator assigns it no pod CIDR: {error}")),
            (Some(error), false) => {
                (NodeState::Refused, format!("it lists {listed}, and the operator reports: {error}"))
            }
            (None, true) => {
                let why = "spec.ipam.podCIDRs of its CiliumNode is empty: the operators' leader writes it".to_owned();
                (NodeState::WaitsForBlock, why)
            }
            (None, false) => (NodeState::HasBlock, format!("{listed}, from spec.ipam.podCIDRs of its CiliumNode")),
        }
    };
    NodeExplanation {
        node: found.name.clone(),
        state,
        blocks: found.blocks.clone(),
        overlaps: clashes,
        operator_error: found.operator_error.clone(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipam::lease::{DEFAULT_POOL, Pod};

    fn row(address: &str, state: RowState, holder: &str) -> Row {
        Row {
            address: address.parse().unwrap(),
            pool: DEFAULT_POOL.into(),
            state,
            holder: holder.into(),
            pod: None,
            since: Some("2026-01-01T00:00:00Z".parse().unwrap()),
            until: None,
            why: "in use behind cst0".into(),
        }
    }

    fn known(name: &str, blocks: &[&str]) -> NodeFacts {
        NodeFacts {
            name: name.into(),
            blocks: blocks.iter().map(|block| block.parse().unwrap()).collect(),
            ..NodeFacts::default()
        }
    }

    #[test]
    fn each_kind_of_address_is_distinguished() {
        let pod = Pod { namespace: "default".into(), name: "web".into(), uid: None };
        let rows = [
            Row { pod: Some(pod), ..row("10.244.1.5", RowState::Confirmed, "c1/eth0") },
            row("10.244.1.6", RowState::Provisional, "c2/eth0"),
            Row {
                until: Some("2026-01-01T00:00:30Z".parse().unwrap()),
                ..row("10.244.1.7", RowState::Quarantined, "c3/eth0")
            },
            row("10.244.1.8", RowState::Owner, "default/old-style"),
            row("10.244.1.1", RowState::Reserved, "router"),
            row("10.200.0.9", RowState::Confirmed, "c9/eth0"),
        ];
        let mut other = known("b", &["10.244.2.0/24"]);
        other.addresses = vec!["192.168.7.2".parse().unwrap()];
        other.router = Some("10.244.2.9".parse().unwrap());
        let nodes =
            [known("a", &["10.244.1.0/24"]), other, known("c", &["10.244.3.0/24"]), known("d", &["10.244.2.0/23"])];
        let facts = Facts {
            node: "a",
            block: Some("10.244.1.0/24".parse().unwrap()),
            blocked: None,
            rows: &rows,
            nodes: &nodes,
        };
        for (text, state, node, words) in [
            ("10.244.1.5", AddressState::Confirmed, Some("a"), "default/web"),
            ("10.244.1.6", AddressState::Provisional, Some("a"), "c2/eth0"),
            ("10.244.1.7", AddressState::Quarantined, Some("a"), "c3/eth0"),
            ("10.244.1.8", AddressState::Owner, Some("a"), "default/old-style"),
            ("10.244.1.1", AddressState::Reserved, Some("a"), "router"),
            ("10.244.1.0", AddressState::Network, Some("a"), "network"),
            ("10.244.1.255", AddressState::Broadcast, Some("a"), "broadcast"),
            ("10.244.1.9", AddressState::Free, Some("a"), "available to pods of a"),
            // A lease of the block that the node had before.
            ("10.200.0.9", AddressState::Confirmed, Some("a"), "earlier pod CIDR"),
            ("192.168.7.2", AddressState::Node, Some("b"), "an address of the node b"),
            ("10.244.2.9", AddressState::Node, Some("b"), "router address"),
            ("10.244.2.10", AddressState::OtherNode, Some("b"), "d (10.244.2.0/23)"),
            ("8.8.8.8", AddressState::Unknown, None, "no pod CIDR"),
        ] {
            let explained = address(&facts, text.parse().unwrap());
            assert_eq!((explained.state, explained.node.as_deref()), (state, node), "{text}: {explained:?}");
            assert!(explained.why.contains(words), "{text}: {}", explained.why);
        }
        let resting = address(&facts, "10.244.1.7".parse().unwrap());
        assert!(resting.until.is_some() && resting.since.is_some());
        let held_back =
            address(&Facts { blocked: Some("node d lists it too"), ..facts }, "10.244.1.9".parse().unwrap());
        assert!(held_back.why.contains("node d lists it too"), "{}", held_back.why);
    }

    #[test]
    fn a_point_to_point_block_has_no_network_address() {
        let facts =
            Facts { node: "a", block: Some("10.244.1.0/31".parse().unwrap()), blocked: None, rows: &[], nodes: &[] };
        assert_eq!(address(&facts, "10.244.1.0".parse().unwrap()).state, AddressState::Free);
    }

    #[test]
    fn each_kind_of_node_is_distinguished() {
        let nodes = [
            known("fine", &["10.1.0.0/24"]),
            known("new", &[]),
            known("twin", &["10.2.0.0/24"]),
            known("wide", &["10.2.0.0/16"]),
            NodeFacts { operator_error: Some("the pool is full".into()), ..known("late", &[]) },
            NodeFacts { unreadable: vec!["10.3/16".into()], ..known("odd", &[]) },
            NodeFacts { deleting: true, ..known("gone", &["10.9.0.0/24"]) },
        ];
        for (name, state, words) in [
            ("fine", NodeState::HasBlock, "10.1.0.0/24"),
            ("new", NodeState::WaitsForBlock, "operator"),
            ("twin", NodeState::Overlaps, "10.2.0.0/16 of wide"),
            ("late", NodeState::Refused, "the pool is full"),
            ("odd", NodeState::Refused, "10.3/16"),
            ("gone", NodeState::Deleting, "10.9.0.0/24"),
            ("nobody", NodeState::Unknown, "nobody"),
        ] {
            let explained = node(&nodes, name);
            assert_eq!(explained.state, state, "{name}: {explained:?}");
            assert!(explained.why.contains(words), "{name}: {}", explained.why);
        }
    }

    /// Programs read these words.
    #[test]
    fn states_are_written_as_they_are_shown() {
        for state in [AddressState::OtherNode, AddressState::Confirmed, AddressState::Network] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
        }
        assert_eq!(serde_json::to_value(NodeState::WaitsForBlock).unwrap(), NodeState::WaitsForBlock.to_string());
    }
}
