//! Routes of this node: to pods of other nodes, and an unreachable route for unallocated addresses.

use crate::tables::rows::{NetworkRow, PeerRow, PoolRow, RouteTarget};
use crate::tables::{Reader, Rows, Table, Waits};
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// Input of the plan.
#[derive(Debug)]
pub struct Input<'a> {
    /// Name of this node.
    pub node: &'a str,
    /// `auto-direct-node-routes`
    pub direct: bool,
    /// Every node of the cluster.
    pub peers: &'a Rows<String, PeerRow>,
    /// The pod CIDR that this node serves.
    pub pool: Option<&'a PoolRow>,
    /// Devices and routes of this node.
    pub network: &'a NetworkRow,
}

/// Routes, and the nodes without a route, each with the reason.
#[derive(Debug, PartialEq, Eq, Default)]
pub struct Plan {
    /// By destination.
    pub routes: BTreeMap<Ipv4Net, RouteTarget>,
    /// By node.
    pub unreachable: BTreeMap<String, String>,
}

/// Follows the nodes and publishes `routes`. Nothing is published before all inputs are synced.
pub async fn run(
    node: String,
    direct: bool,
    mut peers: Reader<String, PeerRow>,
    mut pool: Reader<(), PoolRow>,
    mut network: Reader<(), NetworkRow>,
    routes: Arc<Table<Ipv4Net, RouteTarget>>,
    waits: Waits,
) {
    let mut waiting: BTreeMap<String, String> = BTreeMap::new();
    loop {
        let peers_now = peers.synced().await;
        let network_now = network.synced().await;
        let pool_now = pool.snapshot();
        // Without the pod CIDR, which may only not be known yet, routes would be removed that pods need.
        if let Some(network_row) = network_now.rows.get(&()).filter(|_| pool_now.synced) {
            let planned = plan(&Input {
                node: &node,
                direct,
                peers: &peers_now.rows,
                pool: pool_now.rows.get(&()),
                network: network_row,
            });
            for gone in waiting.keys().filter(|name| !planned.unreachable.contains_key(*name)) {
                waits.end(&wait_name(gone));
            }
            for (name, reason) in &planned.unreachable {
                waits.begin(&wait_name(name), reason.clone(), None);
            }
            waiting = planned.unreachable;
            routes.publish(planned.routes);
        }
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = pool.changed() => {}
            () = network.changed() => {}
        }
    }
}

fn wait_name(node: &str) -> String {
    format!("route to node {node}")
}

fn plan(input: &Input<'_>) -> Plan {
    let mut plan = Plan::default();
    if let Some(pool) = input.pool {
        plan.routes.insert(pool.pod_cidr, RouteTarget::Unreachable);
    }
    if !input.direct {
        return plan;
    }
    for (name, peer) in input.peers.iter().filter(|(name, _)| *name != input.node) {
        if peer.pod_cidrs.is_empty() {
            continue;
        }
        match neighbour(input.network, &peer.internal_ips) {
            Some((gateway, ifindex)) => {
                for pod_cidr in &peer.pod_cidrs {
                    // Another node that claims this node's own pod CIDR must not attract its pods' traffic.
                    plan.routes.entry(*pod_cidr).or_insert(RouteTarget::Via { gateway, ifindex });
                }
            }
            None => {
                plan.unreachable.insert(
                    name.clone(),
                    format!(
                        "auto-direct-node-routes: none of its InternalIP addresses {:?} is on a network of this \
                         node; {:?} is only reachable by routes of the network",
                        peer.internal_ips, peer.pod_cidrs
                    ),
                );
            }
        }
    }
    plan
}

/// The first of `addresses` that is directly connected to a device of this node.
fn neighbour(network: &NetworkRow, addresses: &[Ipv4Addr]) -> Option<(Ipv4Addr, u32)> {
    addresses.iter().find_map(|address| {
        network.links.iter().filter(|(_, link)| link.up && !link.loopback).find_map(|(ifindex, link)| {
            link.addresses.iter().find_map(|net| match net {
                ipnet::IpNet::V4(net) if net.prefix_len() < 32 && net.contains(address) => Some((*address, *ifindex)),
                _ => None,
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::rows::LinkRow;

    fn network() -> NetworkRow {
        let link = LinkRow {
            name: "eth0".into(),
            up: true,
            loopback: false,
            kind: String::new(),
            master: None,
            mtu: 1500,
            mac: vec![2, 0, 0, 0, 0, 1],
            addresses: vec!["172.29.8.20/24".parse().unwrap()],
        };
        NetworkRow { links: BTreeMap::from([(2, link)]), routes: Vec::new() }
    }

    fn peer(ip: &str, cidr: &str) -> PeerRow {
        PeerRow { internal_ips: vec![ip.parse().unwrap()], router: None, pod_cidrs: vec![cidr.parse().unwrap()] }
    }

    #[test]
    fn neighbours_get_a_route_and_distant_nodes_a_reason() {
        let peers = Rows::from([
            ("n1".to_owned(), peer("172.29.8.20", "10.244.1.0/24")),
            ("n2".to_owned(), peer("172.29.8.21", "10.244.2.0/24")),
            ("n3".to_owned(), peer("198.51.100.3", "10.244.3.0/24")),
        ]);
        let pool = PoolRow::new("10.244.1.0/24".parse().unwrap());
        let mut input = Input { node: "n1", direct: true, peers: &peers, pool: Some(&pool), network: &network() };
        let planned = plan(&input);
        assert_eq!(
            planned.routes,
            BTreeMap::from([
                ("10.244.1.0/24".parse().unwrap(), RouteTarget::Unreachable),
                (
                    "10.244.2.0/24".parse().unwrap(),
                    RouteTarget::Via { gateway: "172.29.8.21".parse().unwrap(), ifindex: 2 }
                ),
            ])
        );
        assert!(planned.unreachable["n3"].contains("198.51.100.3"));
        input.direct = false;
        assert_eq!(plan(&input).routes.len(), 1);
    }

    #[test]
    fn a_node_that_claims_this_nodes_block_does_not_get_its_traffic() {
        let peers = Rows::from([("n2".to_owned(), peer("172.29.8.21", "10.244.1.0/24"))]);
        let pool = PoolRow::new("10.244.1.0/24".parse().unwrap());
        let planned = plan(&Input { node: "n1", direct: true, peers: &peers, pool: Some(&pool), network: &network() });
        assert_eq!(planned.routes["10.244.1.0/24".parse::<Ipv4Net>().as_ref().unwrap()], RouteTarget::Unreachable);
    }
}
