//! Where this node's pods get their addresses from.

use crate::tables::findings::{Findings, Found};
use crate::tables::rows::{CiliumNodeRow, HeldRow, NetworkRow, NodeRow, PeerRow, PoolRow, lists_of};
use crate::tables::{Reader, Rows, Table, Waits};
use cistern_core::ipam::node::host_scope::NodeCidrs;
use cistern_core::ipam::node::pod_cidr::contested;
use cistern_core::ipam::node::{cluster_pool, host_scope};
use cistern_core::ipam::{Overlap, find_overlaps};
use cistern_core::settings::IpamMode;
use ipnet::{IpNet, Ipv4Net};
use std::sync::Arc;

/// What the pool comes from.
#[derive(Debug)]
pub struct Inputs {
    /// Name of this node.
    pub node: String,
    /// Who names the block.
    pub mode: IpamMode,
    /// In mode `kubernetes`: wait for an IPv6 block, too.
    pub require_ipv6: bool,
    /// Every node of the cluster.
    pub peers: Reader<String, PeerRow>,
    /// The CiliumNodes as the API server tells of them: unlike `peers`, nothing is known of them at a start.
    pub cilium_nodes: Reader<String, CiliumNodeRow>,
    /// Devices and routes of this node.
    pub network: Reader<(), NetworkRow>,
    /// This node's Node.
    pub nodes: Reader<String, NodeRow>,
    /// Whether anybody holds an address of this node.
    pub held: Reader<(), HeldRow>,
    /// `cluster-pool-ipv4-cidr`; empty where only the operator is told.
    pub ranges: Vec<Ipv4Net>,
}

/// What the plan looks at.
#[derive(Debug)]
struct Input<'a> {
    node: &'a str,
    peers: &'a Rows<String, PeerRow>,
    network: &'a NetworkRow,
    /// What is served now.
    current: Option<&'a PoolRow>,
    /// None before the leases are read.
    held: Option<&'a HeldRow>,
    source: Source<'a>,
}

/// Who names the block of this node.
#[derive(Debug)]
enum Source<'a> {
    /// Its CiliumNode.
    CiliumNode {
        /// Every CiliumNode; none before the API server has told.
        all: Option<&'a Rows<String, CiliumNodeRow>>,
        /// UID of the Node, where it is known.
        node_uid: Option<&'a str>,
    },
    /// Its Node.
    Node { row: Option<&'a NodeRow>, require_ipv6: bool },
}

/// Follows the nodes and publishes the pool. A wait of this name says why there is none, or why it is another one than
/// the Node names.
pub const WAIT: &str = "pod CIDR";

/// Runs until dropped.
pub async fn run(mut inputs: Inputs, pool: Arc<Table<(), PoolRow>>, waits: Waits, findings: Findings) {
    loop {
        let peers = inputs.peers.synced().await;
        let network = inputs.network.synced().await;
        let network_row = network.rows.get(&()).cloned().unwrap_or_default();
        let nodes = match inputs.mode {
            IpamMode::ClusterPool => inputs.nodes.snapshot(),
            IpamMode::Kubernetes => inputs.nodes.synced().await,
        };
        let cilium_nodes = inputs.cilium_nodes.snapshot();
        let node = nodes.rows.get(&inputs.node);
        let source = match inputs.mode {
            IpamMode::ClusterPool => Source::CiliumNode {
                all: cilium_nodes.synced.then_some(&cilium_nodes.rows),
                node_uid: node.map(|row| row.uid.as_str()),
            },
            IpamMode::Kubernetes => Source::Node { row: node, require_ipv6: inputs.require_ipv6 },
        };
        let held = inputs.held.snapshot();
        let held = held.rows.get(&());
        let before = pool.snapshot();
        let current = before.rows.get(&());
        let Planned { row, wait } =
            plan(&Input { node: &inputs.node, peers: &peers.rows, network: &network_row, current, held, source });
        match wait {
            Some(reason) => waits.begin(WAIT, reason, None),
            None => waits.end(WAIT),
        }
        match (current.map(|row| row.pod_cidr), row.as_ref().map(|row| row.pod_cidr)) {
            (before, Some(block)) if before != Some(block) && inputs.mode == IpamMode::Kubernetes => {
                tracing::info!(node = inputs.node, %block, "Retrieved local node information from kubernetes Node");
            }
            (Some(block), None) => tracing::warn!(node = inputs.node, %block, "this node has no block any more"),
            _ => {}
        }
        if row.is_some() || current.is_some() {
            pool.publish(row.map(|row| ((), row)).into_iter().collect());
        }
        let in_use = pool.snapshot().rows.get(&()).map(|row| row.pod_cidr);
        let ranges: &[Ipv4Net] = if inputs.mode == IpamMode::ClusterPool { &inputs.ranges } else { &[] };
        findings.replace("pool", in_use.and_then(|pod_cidr| elsewhere(&inputs.node, pod_cidr, ranges)));
        tokio::select! {
            biased;
            () = inputs.peers.changed() => {}
            () = inputs.network.changed() => {}
            () = inputs.cilium_nodes.changed() => {}
            () = inputs.nodes.changed() => {}
            () = inputs.held.changed() => {}
        }
    }
}

/// A node keeps its block when the ranges are changed (`ipam` 7.1, report 4); that is said, with the way out.
fn elsewhere(node: &str, pod_cidr: Ipv4Net, ranges: &[Ipv4Net]) -> Option<Found> {
    if ranges.is_empty() || ranges.iter().any(|range| range.contains(&pod_cidr)) {
        return None;
    }
    let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    Some(Found {
        reason: "pod-cidr-not-configured",
        subject: pod_cidr.to_string(),
        message: format!(
            "cluster-pool-ipv4-cidr is {}, and this node is still on {pod_cidr}, because a node keeps its block while it may \
             have pods; to renumber it, drain it, stop its agent, delete its CiliumNode {node:?} and node.json in \
             state-dir, and start the agent again",
            ranges.join(",")
        ),
    })
}

/// The pool, and what is waited for.
#[derive(Debug, PartialEq)]
struct Planned {
    /// An object that was deleted or emptied takes nothing from pods (`ipam` decision 11).
    row: Option<PoolRow>,
    wait: Option<String>,
}

fn plan(input: &Input<'_>) -> Planned {
    let current = input.current.map(|row| row.pod_cidr);
    let held = current.is_some_and(|current| HeldRow::may_hold(input.held, current));
    let (row, listed, wait) = match &input.source {
        Source::CiliumNode { all, node_uid } => {
            let served = input.current.map(PoolRow::served);
            let lists = all.map(lists_of);
            let beyond = input.held.map(|held| held.beyond.as_slice());
            let choice = cluster_pool::choose_among(input.node, served.as_ref(), lists, *node_uid, held, beyond);
            (choice.served.map(PoolRow::from), choice.list.is_none(), choice.wait)
        }
        Source::Node { row, require_ipv6 } => {
            let told = row.map(|row| NodeCidrs::read(&row.pod_cidrs, &row.annotations));
            let choice = host_scope::choose(input.node, current, told.as_ref(), *require_ipv6, held);
            (choice.pod_cidr.map(PoolRow::new), true, choice.wait)
        }
    };
    // Nothing was held a moment ago. Before another block takes its place, whoever gives addresses must have heard of it,
    // so that nothing will be; and what is given up must have gone off the list, so that it is not taken from there again.
    if let Some(current) = input.current
        && row.as_ref().map(|row| row.pod_cidr) != Some(current.pod_cidr)
        && (!HeldRow::has_left(input.held, current.pod_cidr) || (row.is_none() && !listed))
    {
        return Planned { row: Some(PoolRow { leaving: true, ..current.clone() }), wait };
    }
    let row = row.map(|row| PoolRow { blocked: blocked(input, row.pod_cidr), ..row });
    let blocked = row.as_ref().and_then(|row| row.blocked.clone());
    Planned { row, wait: blocked.or(wait) }
}

fn blocked(input: &Input<'_>, pod_cidr: Ipv4Net) -> Option<String> {
    let listed: Vec<(&str, Vec<IpNet>)> = input
        .peers
        .iter()
        .map(|(name, peer)| (name.as_str(), peer.pod_cidrs.iter().copied().map(IpNet::V4).collect()))
        .collect();
    let others = listed.iter().map(|(name, cidrs)| (*name, cidrs.as_slice()));
    if let Some(contested) = contested(&[IpNet::V4(pod_cidr)], input.node, others) {
        return Some(contested.to_string());
    }
    let overlap = overlaps_of(input.network, &[pod_cidr]).into_iter().next()?;
    let fix = match input.source {
        Source::CiliumNode { .. } => {
            "set cluster-pool-ipv4-cidr to a range that no node uses and delete this node's CiliumNode"
        }
        Source::Node { .. } => "give the Nodes pod CIDRs of a range that no node uses (--cluster-cidr)",
    };
    Some(format!("{overlap}: {fix}"))
}

/// Networks of the node itself that one of these ranges overlaps. An address of its own (/32) is no network. The loopback
/// device holds the router address; another device that has it too is the bridge of a plugin that gets its addresses
/// from us, and its network is the pod CIDR.
#[must_use]
pub fn overlaps_of(network: &NetworkRow, ranges: &[Ipv4Net]) -> Vec<Overlap> {
    let (loopback, others): (Vec<_>, Vec<_>) = network.links.values().partition(|link| link.loopback);
    let is_router = |address: &IpNet| {
        loopback.iter().flat_map(|link| &link.addresses).any(|router| router.addr() == address.addr())
    };
    let networks: Vec<(IpNet, String)> = others
        .iter()
        .flat_map(|link| link.addresses.iter().map(|address| (*address, format!("device {} of this node", link.name))))
        .filter(|(address, _)| address.prefix_len() < address.max_prefix_len() && !is_router(address))
        .collect();
    let ranges: Vec<IpNet> = ranges.iter().copied().map(IpNet::V4).collect();
    find_overlaps(&ranges, &networks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::rows::LinkRow;
    use std::collections::BTreeMap;

    fn peers(rows: &[(&str, &[&str])]) -> Rows<String, PeerRow> {
        rows.iter()
            .map(|(name, cidrs)| {
                let pod_cidrs = cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect();
                ((*name).to_owned(), PeerRow { pod_cidrs, ..PeerRow::default() })
            })
            .collect()
    }

    fn network(address: &str) -> NetworkRow {
        let link = LinkRow {
            name: "eth0".into(),
            up: true,
            loopback: false,
            kind: "veth".into(),
            master: None,
            mtu: 1500,
            mac: vec![2, 0, 0, 0, 0, 1],
            addresses: vec![address.parse().unwrap()],
        };
        NetworkRow { links: BTreeMap::from([(2, link)]), routes: Vec::new() }
    }

    fn of_cilium_node(node: &str, peers: &Rows<String, PeerRow>) -> Planned {
        let network = network("172.29.8.20/24");
        let rows: Rows<String, CiliumNodeRow> = peers
            .iter()
            .map(|(name, peer)| {
                let pod_cidrs = peer.pod_cidrs.iter().map(ToString::to_string).collect();
                (name.clone(), CiliumNodeRow { pod_cidrs, ..CiliumNodeRow::default() })
            })
            .collect();
        let source = Source::CiliumNode { all: Some(&rows), node_uid: None };
        let held = HeldRow { pod_cidr: None, any: false, leaving: false, beyond: Vec::new() };
        plan(&Input { node, peers, network: &network, current: None, held: Some(&held), source })
    }

    #[test]
    fn the_first_pod_cidr_is_the_pool() {
        let peers = peers(&[("n1", &["10.244.1.0/24", "10.244.9.0/24"]), ("n2", &["10.244.2.0/24"])]);
        let row = PoolRow { confirmed: true, ..PoolRow::new("10.244.1.0/24".parse().unwrap()) };
        assert_eq!(of_cilium_node("n1", &peers), Planned { row: Some(row), wait: None });
        let unknown = of_cilium_node("n3", &peers);
        assert_eq!(unknown.row, None);
        assert!(unknown.wait.unwrap().contains("operator"));
    }

    #[test]
    fn a_pod_cidr_is_left_only_when_no_address_of_it_can_be_given_any_more() {
        let network = network("172.29.8.20/24");
        let node = NodeRow { pod_cidrs: vec!["10.201.9.0/24".into()], ..NodeRow::default() };
        let (old, new) = ("10.201.3.0/24".parse().unwrap(), "10.201.9.0/24".parse().unwrap());
        let planned = |current: &PoolRow, any: bool, leaving: bool| {
            let source = Source::Node { row: Some(&node), require_ipv6: false };
            let peers = Rows::new();
            let held = HeldRow { pod_cidr: Some(old), any, leaving, beyond: Vec::new() };
            let current = Some(current);
            plan(&Input { node: "n1", peers: &peers, network: &network, current, held: Some(&held), source }).row
        };
        let leaving = PoolRow { leaving: true, ..PoolRow::new(old) };
        assert_eq!(planned(&PoolRow::new(old), false, false), Some(leaving.clone()));
        assert_eq!(planned(&leaving, false, false), Some(leaving.clone()));
        assert_eq!(planned(&leaving, false, true), Some(PoolRow::new(new)));
        // An address was given meanwhile.
        assert_eq!(planned(&leaving, true, true), Some(PoolRow::new(old)));
        // What is held of another pod CIDR tells nothing.
        let elsewhere = PoolRow { leaving: true, ..PoolRow::new("10.201.4.0/24".parse().unwrap()) };
        assert_eq!(planned(&elsewhere, false, true).unwrap().pod_cidr, elsewhere.pod_cidr);
    }

    #[test]
    fn a_block_outside_of_the_configured_ranges_is_told_with_the_way_out() {
        let net = |text: &str| text.parse::<Ipv4Net>().unwrap();
        let block = net("10.244.1.0/24");
        assert_eq!(elsewhere("n1", block, &[]), None);
        assert_eq!(elsewhere("n1", block, &[net("10.99.0.0/16"), net("10.244.0.0/16")]), None);
        let message = elsewhere("n1", block, &[net("10.99.0.0/16")]).unwrap().message;
        assert!(message.contains("10.99.0.0/16") && message.contains("10.244.1.0/24") && message.contains("drain"));
    }

    #[test]
    fn a_block_that_another_node_lists_too_gives_nothing_new() {
        let peers = peers(&[("n1", &["10.244.1.0/24"]), ("n2", &["10.244.0.0/23"])]);
        let wait = of_cilium_node("n1", &peers).wait.unwrap();
        assert!(wait.contains("n2") && wait.contains("10.244.0.0/23"), "{wait}");
    }

    #[test]
    fn a_bridge_with_the_router_address_is_no_network_of_the_node() {
        let mut network = network("10.244.1.7/24");
        let ranges = ["10.244.0.0/16".parse().unwrap()];
        assert_eq!(overlaps_of(&network, &ranges).len(), 1);
        let mut loopback = network.links[&2].clone();
        loopback.loopback = true;
        loopback.addresses = vec!["127.0.0.1/8".parse().unwrap(), "10.244.1.7/32".parse().unwrap()];
        network.links.insert(1, loopback);
        assert_eq!(overlaps_of(&network, &ranges), []);
    }

    #[test]
    fn a_pod_cidr_over_the_node_network_gives_nothing_and_names_the_fix() {
        let planned = of_cilium_node("n1", &peers(&[("n1", &["172.29.0.0/16"])]));
        let blocked = planned.row.unwrap().blocked.unwrap();
        assert!(blocked.contains("172.29.8.0/24") && blocked.contains("cluster-pool-ipv4-cidr"), "{blocked}");
        assert_eq!(planned.wait, Some(blocked));
    }

    #[test]
    fn in_mode_kubernetes_the_cilium_node_does_not_count() {
        let peers = peers(&[("n1", &["10.9.0.0/24"]), ("n2", &["10.201.3.0/25"])]);
        let network = network("172.29.8.20/24");
        let node = NodeRow { pod_cidrs: vec!["10.201.3.0/24".into()], ..NodeRow::default() };
        let planned = plan(&Input {
            node: "n1",
            peers: &peers,
            network: &network,
            current: None,
            held: None,
            source: Source::Node { row: Some(&node), require_ipv6: false },
        });
        let row = planned.row.unwrap();
        assert_eq!(row.pod_cidr, "10.201.3.0/24".parse().unwrap());
        assert!(row.blocked.unwrap().contains("CiliumNode n2"));
    }
}
