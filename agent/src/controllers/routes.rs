//! Routes of this node: to pods of other nodes, and an unreachable route for unallocated addresses.

use crate::tables::rows::{NextHop, PeerRow, PoolRow, RouteTarget};
use crate::tables::{Reader, Rows, Table, Waits};
use ipnet::Ipv4Net;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What a route depends on beside the nodes.
#[derive(Debug, Clone, PartialEq)]
struct Surroundings {
    /// Name of this node.
    node: String,
    /// `auto-direct-node-routes`
    direct: bool,
    /// The pod CIDR that this node serves, unless it is kept out of the kernel.
    own: Option<Ipv4Net>,
}

/// The nodes, and how this node reaches them.
#[derive(Debug, Clone, PartialEq, Default)]
struct Others {
    peers: Rows<String, PeerRow>,
    next_hops: Rows<String, NextHop>,
}

impl Others {
    /// The names of the nodes that differ.
    fn changed_from(&self, before: &Self) -> BTreeSet<String> {
        let peers = self.peers.changes_from(&before.peers).map(|change| change.key.clone());
        let next_hops = self.next_hops.changes_from(&before.next_hops).map(|change| change.key.clone());
        peers.chain(next_hops).collect()
    }
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
    fn new(around: &Surroundings, others: &Others) -> Self {
        let mut plan = Self::default();
        for (name, peer) in others.peers.iter() {
            plan.add(around, name, peer, others.next_hops.get(name));
        }
        plan
    }

    fn add(&mut self, around: &Surroundings, name: &str, peer: &PeerRow, next_hop: Option<&NextHop>) {
        if !around.direct || name == around.node || peer.pod_cidrs.is_empty() {
            return;
        }
        match next_hop {
            // The kernel has not been asked yet.
            None => {}
            Some(NextHop::None(why)) => {
                let reason = format!(
                    "auto-direct-node-routes: {why}, so it is on no network of this node; {:?} is only reachable by routes of \
                     the network",
                    peer.pod_cidrs
                );
                self.unreachable.insert(name.to_owned(), reason);
            }
            Some(NextHop::Direct { address, ifindex }) => {
                for pod_cidr in &peer.pod_cidrs {
                    let via = RouteTarget::Via { gateway: *address, ifindex: *ifindex };
                    self.candidates.entry(*pod_cidr).or_default().insert(name.to_owned(), via);
                }
            }
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
    fn follow(&mut self, around: &Surroundings, before: &Others, now: &Others) -> Vec<Ipv4Net> {
        let mut touched = Vec::new();
        for name in now.changed_from(before) {
            if let Some(peer) = before.peers.get(&name) {
                self.remove(&name, peer);
                touched.extend(&peer.pod_cidrs);
            }
            if let Some(peer) = now.peers.get(&name) {
                self.add(around, &name, peer, now.next_hops.get(&name));
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
    mut next_hops: Reader<String, NextHop>,
    routes: Arc<Table<Ipv4Net, RouteTarget>>,
    waits: Waits,
) {
    let mut waiting: BTreeMap<String, String> = BTreeMap::new();
    let mut planned: Option<(Surroundings, Others, Plan)> = None;
    loop {
        let others =
            Others { peers: peers.synced().await.rows.clone(), next_hops: next_hops.synced().await.rows.clone() };
        let pool_now = pool.snapshot();
        // Without the pod CIDR, which may only not be known yet, routes would be removed that pods need.
        if pool_now.synced {
            let own = pool_now.rows.get(&()).filter(|pool| !pool.kept_out).map(|pool| pool.pod_cidr);
            let around = Surroundings { node: node.clone(), direct, own };
            let plan = match planned.take() {
                Some((then, before, mut plan)) if then == around => {
                    let touched = plan.follow(&around, &before, &others);
                    routes.modify(|rows| update(rows, &touched, |destination| plan.target(&around, destination)));
                    plan
                }
                _ => {
                    let plan = Plan::new(&around, &others);
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
            planned = Some((around, others, plan));
        }
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = pool.changed() => {}
            () = next_hops.changed() => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(ip: &str, cidr: &str) -> PeerRow {
        PeerRow { internal_ips: vec![ip.parse().unwrap()], router: None, pod_cidrs: vec![cidr.parse().unwrap()] }
    }

    fn around(direct: bool) -> Surroundings {
        let own = Some("10.244.1.0/24".parse().unwrap());
        Surroundings { node: "n1".to_owned(), direct, own }
    }

    /// Nodes in 172.29.8.0/24 are on a network of this node.
    fn others(peers: impl IntoIterator<Item = (&'static str, PeerRow)>) -> Others {
        let peers: Rows<String, PeerRow> = peers.into_iter().map(|(name, peer)| (name.to_owned(), peer)).collect();
        let next_hop = |peer: &PeerRow| match peer.internal_ips[0] {
            address if address.octets()[0] == 172 => NextHop::Direct { address, ifindex: 2 },
            address => NextHop::None(format!("{address} is reached via 172.29.8.1")),
        };
        let next_hops = peers.iter().map(|(name, peer)| (name.clone(), next_hop(peer))).collect();
        Others { peers, next_hops }
    }

    #[test]
    fn neighbours_get_a_route_and_distant_nodes_a_reason() {
        let others = others([
            ("n1", peer("172.29.8.20", "10.244.1.0/24")),
            ("n2", peer("172.29.8.21", "10.244.2.0/24")),
            ("n3", peer("198.51.100.3", "10.244.3.0/24")),
        ]);
        let planned = Plan::new(&around(true), &others);
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
        assert_eq!(Plan::new(&around(false), &others).routes(&around(false)).len(), 1);
    }

    #[test]
    fn a_node_that_claims_this_nodes_block_does_not_get_its_traffic() {
        let planned = Plan::new(&around(true), &others([("n2", peer("172.29.8.21", "10.244.1.0/24"))]));
        let routes = planned.routes(&around(true));
        assert_eq!(routes["10.244.1.0/24".parse::<Ipv4Net>().as_ref().unwrap()], RouteTarget::Unreachable);
    }

    #[test]
    fn a_route_follows_the_kernels_choice_of_the_device() {
        let before = others([("n2", peer("172.29.8.21", "10.244.2.0/24"))]);
        let mut plan = Plan::new(&around(true), &before);
        let mut now = before.clone();
        let address = "172.29.8.21".parse().unwrap();
        now.next_hops.insert("n2".to_owned(), NextHop::Direct { address, ifindex: 3 });
        let destination = "10.244.2.0/24".parse().unwrap();
        assert_eq!(plan.follow(&around(true), &before, &now), [destination, destination]);
        let via = RouteTarget::Via { gateway: address, ifindex: 3 };
        assert_eq!(plan.target(&around(true), destination), Some(via));
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
        let (mut peers, mut before, mut plan) = (BTreeMap::new(), Others::default(), Plan::default());
        let mut routes: Rows<Ipv4Net, RouteTarget> =
            Rows::from([("10.244.1.0/24".parse().unwrap(), RouteTarget::Unreachable)]);
        for (name, peer) in steps {
            match peer {
                Some(peer) => peers.insert(name, peer),
                None => peers.remove(name),
            };
            let now = others(peers.clone());
            let touched = plan.follow(&around, &before, &now);
            update(&mut routes, &touched, |destination| plan.target(&around, destination));
            let anew = Plan::new(&around, &now);
            assert_eq!((&plan, routes.to_map()), (&anew, anew.routes(&around)), "after {name}");
            before = now;
        }
    }
}
