//! How this node reaches the other nodes, as the kernel answers: by rules, tables, metrics and devices that are up.

use crate::tables::rows::{Hop, NetworkRow, NextHop, PeerRow};
use crate::tables::{Reader, Rows, Table, Waits};
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

/// The wait of this name says why the routes to other nodes stay as they are.
const WAIT: &str = "kernel's routes to other nodes";

/// Asks the kernel for its routes to these addresses; those without one are left out of the answer.
pub type Hops = Arc<dyn Fn(Vec<Ipv4Addr>) -> BoxFuture<'static, anyhow::Result<BTreeMap<Ipv4Addr, Hop>>> + Send + Sync>;

/// Until the next attempt after the kernel gave no answer.
const RETRY: Duration = Duration::from_secs(5);

/// Follows the nodes and this node's routing, and publishes the next hop of every other node that has a pod CIDR. A change
/// of one node costs one look-up; a change of rules or routes costs one for each node.
pub async fn run(
    node: String,
    mut peers: Reader<String, PeerRow>,
    mut network: Reader<(), NetworkRow>,
    hops: Hops,
    next_hops: Arc<Table<String, NextHop>>,
    waits: Waits,
) {
    let mut done: Option<(u64, Rows<String, PeerRow>)> = None;
    loop {
        let peers_now = peers.synced().await.rows.clone();
        let routing = network.synced().await.rows.get(&()).map(|row| row.routing).unwrap_or_default();
        let before = done.as_ref().filter(|(of, _)| *of == routing).map(|(_, peers)| peers.clone());
        let all = before.is_none();
        let changed: BTreeMap<String, Option<PeerRow>> = peers_now
            .changes_from(&before.unwrap_or_default())
            .filter(|change| *change.key != node)
            .map(|change| (change.key.clone(), change.after.filter(|peer| !peer.pod_cidrs.is_empty()).cloned()))
            .collect();
        let asked = changed.values().flatten().flat_map(|peer| peer.internal_ips.clone()).collect();
        match hops(asked).await {
            Ok(found) => {
                waits.end(WAIT);
                let rows = changed.into_iter().map(|(name, peer)| (name, peer.map(|peer| next_hop(&peer, &found))));
                if all {
                    next_hops.publish(rows.filter_map(|(name, next)| Some((name, next?))).collect());
                } else {
                    next_hops.modify(|current| rows.for_each(|(name, next)| set(current, name, next)));
                }
                done = Some((routing, peers_now));
            }
            Err(error) => {
                waits.begin(WAIT, format!("{error:#}; the routes in force stay, and it is asked again"), None);
                tokio::time::sleep(RETRY).await;
                continue;
            }
        }
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = network.changed() => {}
        }
    }
}

fn set(rows: &mut Rows<String, NextHop>, name: String, next: Option<NextHop>) {
    match next {
        Some(next) if rows.get(&name) == Some(&next) => {}
        Some(next) => rows.insert(name, next),
        None => {
            rows.remove(&name);
        }
    }
}

/// The first address that the kernel reaches without another router; such a router would not know the pod CIDR.
fn next_hop(peer: &PeerRow, found: &BTreeMap<Ipv4Addr, Hop>) -> NextHop {
    let direct = peer.internal_ips.iter().find_map(|ip| {
        let hop = found.get(ip)?;
        let is_direct = hop.gateway.is_none_or(|gateway| gateway == IpAddr::V4(*ip));
        is_direct.then_some(NextHop::Direct { address: *ip, ifindex: hop.ifindex })
    });
    direct.unwrap_or_else(|| {
        let of = |ip: &Ipv4Addr| match found.get(ip) {
            Some(Hop { gateway: Some(gateway), .. }) => format!("{ip} is reached via {gateway}"),
            _ => format!("the kernel has no route to {ip}"),
        };
        let reasons: Vec<String> = peer.internal_ips.iter().map(of).collect();
        NextHop::None(if reasons.is_empty() { "it has no InternalIP".to_owned() } else { reasons.join(", ") })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(ifindex: u32, gateway: Option<&str>) -> Hop {
        Hop { ifindex, gateway: gateway.map(|ip| ip.parse().unwrap()), source: None, mtu: None }
    }

    #[test]
    fn a_node_is_reached_by_its_first_address_on_a_network_of_this_node() {
        let ip = |text: &str| text.parse::<Ipv4Addr>().unwrap();
        let internal_ips = vec![ip("198.51.100.3"), ip("172.29.8.21"), ip("172.29.9.21")];
        let peer = PeerRow { internal_ips, ..PeerRow::default() };
        let mut found = BTreeMap::from([
            (ip("198.51.100.3"), hop(2, Some("172.29.8.1"))),
            (ip("172.29.8.21"), hop(3, None)),
            (ip("172.29.9.21"), hop(4, Some("172.29.9.21"))),
        ]);
        assert_eq!(next_hop(&peer, &found), NextHop::Direct { address: ip("172.29.8.21"), ifindex: 3 });
        found.remove(&ip("172.29.8.21"));
        assert_eq!(next_hop(&peer, &found), NextHop::Direct { address: ip("172.29.9.21"), ifindex: 4 });
        found.insert(ip("172.29.9.21"), hop(4, Some("fe80::1")));
        let NextHop::None(reason) = next_hop(&peer, &found) else { panic!("there is no way without a router") };
        for part in
            ["198.51.100.3 is reached via 172.29.8.1", "no route to 172.29.8.21", "172.29.9.21 is reached via fe80::1"]
        {
            assert!(reason.contains(part), "{reason}");
        }
    }
}
