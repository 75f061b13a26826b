//! Routes of this node: to pods of other nodes, and an unreachable route for unallocated addresses.

use crate::tables::rows::{LinkRow, NetworkRow, PeerRow, PoolRow, RouteTarget};
use crate::tables::{Change, Reader, Rows, Table, Waits};
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// What a route depends on beside the nodes.
#[derive(Debug, Clone, PartialEq)]
struct Surroundings {
    /// Name of this node.
    node: String,
    /// `auto-direct-node-routes`
    direct: bool,
    /// The pod CIDR that this node serves.
    own: Option<Ipv4Net>,
    /// Devices of this node, by index. Its routes do not matter: most of them are those published here.
    links: BTreeMap<u32, LinkRow>,
}

/// The routes that follow from the nodes, kept so that a change of one node costs that node's routes.
#[derive(Debug, PartialEq, Eq, Default)]
struct Plan {
    /// By destination and node. More than one node lists a pod CIDR while they contest it: the first by name counts.
    candidates: BTreeMap<Ipv4Net, BTreeMap<String, RouteTarget>>,
    /// Nodes without a route, each with the reason.
    unreachable: BTreeMap<String, String>,
}

impl Plan {
    fn new(around: &Surroundings, peers: &Rows<String, PeerRow>) -> Self {
        let mut plan = Self::default();
        for (name, peer) in peers.iter() {
            plan.add(around, name, peer);
        }
        plan
    }

    fn add(&mut self, around: &Surroundings, name: &str, peer: &PeerRow) {
        if !around.direct || name == around.node || peer.pod_cidrs.is_empty() {
            return;
        }
        let Some((gateway, ifindex)) = neighbour(&around.links, &peer.internal_ips) else {
            let reason = format!(
                "auto-direct-node-routes: none of its InternalIP addresses {:?} is on a network of this node; {:?} is only \
                 reachable by routes of the network",
                peer.internal_ips, peer.pod_cidrs
            );
            self.unreachable.insert(name.to_owned(), reason);
            return;
        };
        for pod_cidr in &peer.pod_cidrs {
            let via = RouteTarget::Via { gateway, ifindex };
            self.candidates.entry(*pod_cidr).or_default().insert(name.to_owned(), via);
        }
    }

    fn remove(&mut self, name: &str, peer: &PeerRow) {
        self.unreachable.remove(name);
        for pod_cidr in &peer.pod_cidrs {
            if let Some(of_nodes) = self.candidates.get_mut(pod_cidr) {
                of_nodes.remove(name);
                if of_nodes.is_empty() {
                    self.candidates.remove(pod_cidr);
                }
            }
        }
    }

    /// The route to a destination.
    fn target(&self, around: &Surroundings, destination: Ipv4Net) -> Option<RouteTarget> {
        // Another node that claims this node's own pod CIDR must not attract its pods' traffic.
        if around.own == Some(destination) {
            return Some(RouteTarget::Unreachable);
        }
        self.candidates.get(&destination)?.values().next().cloned()
    }

    fn routes(&self, around: &Surroundings) -> BTreeMap<Ipv4Net, RouteTarget> {
        let destinations = self.candidates.keys().copied().chain(around.own);
        destinations.filter_map(|destination| Some((destination, self.target(around, destination)?))).collect()
    }

    /// Follows the nodes that changed. Returns the destinations whose route may have.
    fn follow(
        &mut self,
        around: &Surroundings,
        before: &Rows<String, PeerRow>,
        now: &Rows<String, PeerRow>,
    ) -> Vec<Ipv4Net> {
        let mut touched = Vec::new();
        for Change { key, before, after } in now.changes_from(before) {
            if let Some(peer) = before {
                self.remove(key, peer);
                touched.extend(&peer.pod_cidrs);
            }
            if let Some(peer) = after {
                self.add(around, key, peer);
                touched.extend(&peer.pod_cidrs);
            }
        }
        touched
    }
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
    let mut planned: Option<(Surroundings, Rows<String, PeerRow>, Plan)> = None;
    loop {
        let peers_now = peers.synced().await;
        let network_now = network.synced().await;
        let pool_now = pool.snapshot();
        // Without the pod CIDR, which may only not be known yet, routes would be removed that pods need.
        if let Some(network_row) = network_now.rows.get(&()).filter(|_| pool_now.synced) {
            let around = Surroundings {
                node: node.clone(),
                direct,
                own: pool_now.rows.get(&()).map(|pool| pool.pod_cidr),
                links: network_row.links.clone(),
            };
            let plan = match planned.take() {
                Some((then, before, mut plan)) if then == around => {
                    let touched = plan.follow(&around, &before, &peers_now.rows);
                    routes.modify(|rows| update(rows, &touched, |destination| plan.target(&around, destination)));
                    plan
                }
                _ => {
                    let plan = Plan::new(&around, &peers_now.rows);
                    routes.publish(plan.routes(&around));
                    plan
                }
            };
            if plan.unreachable != waiting {
                for gone in waiting.keys().filter(|name| !plan.unreachable.contains_key(*name)) {
                    waits.end(&wait_name(gone));
                }
                for (name, reason) in &plan.unreachable {
                    waits.begin(&wait_name(name), reason.clone(), None);
                }
                waiting.clone_from(&plan.unreachable);
            }
            planned = Some((around, peers_now.rows.clone(), plan));
        }
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = pool.changed() => {}
            () = network.changed() => {}
        }
    }
}

fn update(rows: &mut Rows<Ipv4Net, RouteTarget>, touched: &[Ipv4Net], target: impl Fn(Ipv4Net) -> Option<RouteTarget>) {
    for destination in touched {
        match target(*destination) {
            Some(target) if rows.get(destination) == Some(&target) => {}
            Some(target) => rows.insert(*destination, target),
            None => {
                rows.remove(destination);
            }
        }
    }
}

fn wait_name(node: &str) -> String {
    format!("route to node {node}")
}

/// The first of `addresses` that is directly connected to a device of this node.
fn neighbour(links: &BTreeMap<u32, LinkRow>, addresses: &[Ipv4Addr]) -> Option<(Ipv4Addr, u32)> {
    addresses.iter().find_map(|address| {
        links.iter().filter(|(_, link)| link.up && !link.loopback).find_map(|(ifindex, link)| {
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

    fn links() -> BTreeMap<u32, LinkRow> {
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
        BTreeMap::from([(2, link)])
    }

    fn peer(ip: &str, cidr: &str) -> PeerRow {
        PeerRow { internal_ips: vec![ip.parse().unwrap()], router: None, pod_cidrs: vec![cidr.parse().unwrap()] }
    }

    fn around(direct: bool) -> Surroundings {
        let own = Some("10.244.1.0/24".parse().unwrap());
        Surroundings { node: "n1".to_owned(), direct, own, links: links() }
    }

    #[test]
    fn neighbours_get_a_route_and_distant_nodes_a_reason() {
        let peers = Rows::from([
            ("n1".to_owned(), peer("172.29.8.20", "10.244.1.0/24")),
            ("n2".to_owned(), peer("172.29.8.21", "10.244.2.0/24")),
            ("n3".to_owned(), peer("198.51.100.3", "10.244.3.0/24")),
        ]);
        let planned = Plan::new(&around(true), &peers);
        assert_eq!(
            planned.routes(&around(true)),
            BTreeMap::from([
                ("10.244.1.0/24".parse().unwrap(), RouteTarget::Unreachable),
                (
                    "10.244.2.0/24".parse().unwrap(),
                    RouteTarget::Via { gateway: "172.29.8.21".parse().unwrap(), ifindex: 2 }
                ),
            ])
        );
        assert!(planned.unreachable["n3"].contains("198.51.100.3"));
        assert_eq!(Plan::new(&around(false), &peers).routes(&around(false)).len(), 1);
    }

    #[test]
    fn a_node_that_claims_this_nodes_block_does_not_get_its_traffic() {
        let peers = Rows::from([("n2".to_owned(), peer("172.29.8.21", "10.244.1.0/24"))]);
        let planned = Plan::new(&around(true), &peers);
        let routes = planned.routes(&around(true));
        assert_eq!(routes["10.244.1.0/24".parse::<Ipv4Net>().as_ref().unwrap()], RouteTarget::Unreachable);
    }

    #[test]
    fn one_change_at_a_time_comes_to_the_same_plan() {
        let steps = [
            ("n2", Some(peer("172.29.8.21", "10.244.2.0/24"))),
            ("n3", Some(peer("172.29.8.22", "10.244.2.0/24"))),
            ("n4", Some(peer("198.51.100.3", "10.244.4.0/24"))),
            ("n2", None),
            ("n4", Some(peer("172.29.8.23", "10.244.4.0/24"))),
            ("n3", Some(peer("172.29.8.22", "10.244.1.0/24"))),
            ("n3", Some(peer("172.29.8.24", "10.244.3.0/24"))),
            ("n3", None),
        ];
        let around = around(true);
        let (mut peers, mut plan) = (Rows::new(), Plan::default());
        let mut routes: Rows<Ipv4Net, RouteTarget> =
            Rows::from([("10.244.1.0/24".parse().unwrap(), RouteTarget::Unreachable)]);
        for (name, peer) in steps {
            let before = peers.clone();
            match peer {
                Some(peer) => peers.insert(name.to_owned(), peer),
                None => {
                    peers.remove(name);
                }
            }
            let touched = plan.follow(&around, &before, &peers);
            update(&mut routes, &touched, |destination| plan.target(&around, destination));
            let anew = Plan::new(&around, &peers);
            assert_eq!((&plan, routes.to_map()), (&anew, anew.routes(&around)), "after {name}");
        }
    }
}
