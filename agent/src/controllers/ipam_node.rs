//! Where this node's pods get their addresses from.

use crate::tables::findings::{Findings, Found};
use crate::tables::rows::{NetworkRow, PeerRow, PoolRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ipam::node::pod_cidr::contested;
use cistern_core::ipam::{Overlap, find_overlaps};
use ipnet::{IpNet, Ipv4Net};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the plan looks at.
#[derive(Debug)]
pub struct Input<'a> {
    /// Name of this node.
    pub node: &'a str,
    /// Every node of the cluster.
    pub peers: &'a BTreeMap<String, PeerRow>,
    /// Devices and routes of this node.
    pub network: &'a NetworkRow,
}

/// Follows the nodes and publishes the pool. A wait of this name says why there is none.
pub const WAIT: &str = "pod CIDR";

/// What the settings say of pod addresses.
#[derive(Debug, Clone)]
pub struct Configured {
    /// `ipam`
    pub mode: &'static str,
    /// `cluster-pool-ipv4-cidr`; empty where only the operator is told.
    pub ranges: Vec<Ipv4Net>,
}

/// Runs until dropped.
pub async fn run(
    node: String,
    configured: Configured,
    mut peers: Reader<String, PeerRow>,
    mut network: Reader<(), NetworkRow>,
    pool: Arc<Table<(), PoolRow>>,
    waits: Waits,
    findings: Findings,
) {
    loop {
        let peers_now = peers.synced().await;
        let network_now = network.synced().await;
        let network_row = network_now.rows.get(&()).cloned().unwrap_or_default();
        let planned = plan(&Input { node: &node, peers: &peers_now.rows, network: &network_row });
        match &planned {
            Some(PoolRow { blocked: Some(reason), .. }) => waits.begin(WAIT, reason.clone(), None),
            Some(_) => waits.end(WAIT),
            // A pool that was there stays: the object was deleted or emptied, and pods go on (`ipam` decision 11).
            None if !pool.snapshot().rows.is_empty() => waits.end(WAIT),
            None => waits.begin(WAIT, waiting_for(configured.mode, &node), None),
        }
        if let Some(row) = planned {
            pool.publish(BTreeMap::from([((), row)]));
        }
        let in_use = pool.snapshot().rows.get(&()).map(|row| row.pod_cidr);
        findings.replace("pool", in_use.and_then(|pod_cidr| elsewhere(&node, pod_cidr, &configured.ranges)));
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = network.changed() => {}
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

fn waiting_for(mode: &str, node: &str) -> String {
    format!(
        "required IPv4 PodCIDR not available: CiliumNode {node:?} has no IPv4 prefix in spec.ipam.podCIDRs yet; in mode \
         {mode} the operator writes it (see status.ipam.operator-status.error of the object, and whether an operator leads)"
    )
}

/// The pool of this node, or none while its CiliumNode names no IPv4 pod CIDR.
fn plan(input: &Input<'_>) -> Option<PoolRow> {
    let pod_cidr = *input.peers.get(input.node)?.pod_cidrs.first()?;
    Some(PoolRow { pod_cidr, blocked: blocked(input, pod_cidr) })
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
    Some(format!(
        "{overlap}: set cluster-pool-ipv4-cidr to a range that no node uses and delete this node's CiliumNode"
    ))
}

/// Networks of the node itself that one of these ranges overlaps. The loopback device holds the router address, and an
/// address of its own (/32) is no network.
#[must_use]
pub fn overlaps_of(network: &NetworkRow, ranges: &[Ipv4Net]) -> Vec<Overlap> {
    let networks: Vec<(IpNet, String)> = network
        .links
        .values()
        .filter(|link| !link.loopback)
        .flat_map(|link| link.addresses.iter().map(|address| (*address, format!("device {} of this node", link.name))))
        .filter(|(address, _)| address.prefix_len() < address.max_prefix_len())
        .collect();
    let ranges: Vec<IpNet> = ranges.iter().copied().map(IpNet::V4).collect();
    find_overlaps(&ranges, &networks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::rows::LinkRow;

    fn peers(rows: &[(&str, &[&str])]) -> BTreeMap<String, PeerRow> {
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

    #[test]
    fn the_first_pod_cidr_is_the_pool() {
        let peers = peers(&[("n1", &["10.244.1.0/24", "10.244.9.0/24"]), ("n2", &["10.244.2.0/24"])]);
        let network = network("172.29.8.20/24");
        let row = plan(&Input { node: "n1", peers: &peers, network: &network }).unwrap();
        assert_eq!(row, PoolRow { pod_cidr: "10.244.1.0/24".parse().unwrap(), blocked: None });
        assert_eq!(plan(&Input { node: "n3", peers: &peers, network: &network }), None);
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
        let row = plan(&Input { node: "n1", peers: &peers, network: &network("172.29.8.20/24") }).unwrap();
        let blocked = row.blocked.unwrap();
        assert!(blocked.contains("n2") && blocked.contains("10.244.0.0/23"), "{blocked}");
    }

    #[test]
    fn a_pod_cidr_over_the_node_network_gives_nothing_and_names_the_fix() {
        let peers = peers(&[("n1", &["172.29.0.0/16"])]);
        let row = plan(&Input { node: "n1", peers: &peers, network: &network("172.29.8.20/24") }).unwrap();
        let blocked = row.blocked.unwrap();
        assert!(blocked.contains("172.29.8.0/24") && blocked.contains("cluster-pool-ipv4-cidr"), "{blocked}");
    }
}
