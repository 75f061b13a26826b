//! Desired content of this node's own CiliumNode.

use crate::tables::rows::{LinkRow, NetworkRow, NodeAddress, NodeRow, OwnCiliumNode, PoolRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ipam::node::{CiliumNodeIntent, kubernetes};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// The wait of this name says why no object is written.
const WAIT: &str = "own CiliumNode";

/// Inputs.
pub struct Inputs {
    /// Name of this node.
    pub node: String,
    /// The Nodes.
    pub nodes: Reader<String, NodeRow>,
    /// Devices of this node.
    pub network: Reader<(), NetworkRow>,
    /// The router address.
    pub router: Reader<Ipv4Addr, ()>,
    /// What the IPAM mode writes.
    pub intent: Reader<(), CiliumNodeIntent>,
}

/// Publishes the desired CiliumNode under the node's name, from the Node, the router address and the intent of the IPAM
/// mode. Without a Node there is none: created for a node that is being removed, it would have no owner and keep its pod
/// CIDR forever.
pub async fn run(inputs: Inputs, desired: Arc<Table<String, OwnCiliumNode>>, waits: Waits) {
    let Inputs { node, mut nodes, mut network, mut router, mut intent } = inputs;
    loop {
        let nodes_now = nodes.synced().await;
        let network_now = network.synced().await;
        let router_now = router.snapshot();
        let intent_now = intent.snapshot();
        let planned = nodes_now.rows.get(&node).map(|row| {
            let router = router_now.rows.keys().next().copied();
            (node.clone(), plan(&node, row, network_now.rows.get(&()), router, intent_now.rows.get(&())))
        });
        match planned {
            Some(_) => waits.end(WAIT),
            None => waits.begin(
                WAIT,
                format!("there is no Node {node:?}; kubelet registers it; node-name must be its name"),
                None,
            ),
        }
        desired.publish(planned.into_iter().collect());
        tokio::select! {
            biased;
            () = nodes.changed() => {}
            () = network.changed() => {}
            () = router.changed() => {}
            () = intent.changed() => {}
        }
    }
}

/// Follows the persisted pool and the router address, and publishes the desired annotations of the Node.
pub async fn annotate(
    node: String,
    mut router: Reader<Ipv4Addr, ()>,
    mut pool: Reader<(), PoolRow>,
    desired: Arc<Table<String, BTreeMap<String, String>>>,
) {
    loop {
        let pool_now = pool.synced().await;
        let router_now = router.snapshot().rows.keys().next().copied();
        let on_disk = pool_now.rows.get(&()).filter(|row| row.on_disk);
        let annotations = on_disk.zip(router_now);
        let annotations = annotations.map(|(row, router)| kubernetes::annotations(row.pod_cidr, router));
        desired.publish(annotations.map(|annotations| (node.clone(), annotations)).into_iter().collect());
        tokio::select! {
            () = router.changed() => {}
            () = pool.changed() => {}
        }
    }
}

/// Addresses are those of the Node. Before kubelet has written any, the source of packets that leave the node is
/// used, so that the first node of a cluster does not block the others.
fn plan(
    name: &str,
    node: &NodeRow,
    network: Option<&NetworkRow>,
    router: Option<Ipv4Addr>,
    intent: Option<&CiliumNodeIntent>,
) -> OwnCiliumNode {
    let mut addresses: Vec<NodeAddress> = node.addresses.clone();
    if !addresses.iter().any(|address| address.kind == "InternalIP")
        && let Some(ip) = network.and_then(default_address)
    {
        addresses.push(NodeAddress { kind: "InternalIP".to_owned(), ip: IpAddr::V4(ip) });
    }
    if let Some(router) = router {
        addresses.push(NodeAddress { kind: "CiliumInternalIP".to_owned(), ip: IpAddr::V4(router) });
    }
    OwnCiliumNode { addresses, owner: Some((name.to_owned(), node.uid.clone())), intent: intent.cloned() }
}

/// The source address of packets that leave the node, else the first IPv4 address of a device.
fn default_address(network: &NetworkRow) -> Option<Ipv4Addr> {
    let address = |link: &LinkRow| {
        link.addresses.iter().filter(|_| !link.loopback).find_map(|net| match net {
            ipnet::IpNet::V4(net) => Some(net.addr()),
            ipnet::IpNet::V6(_) => None,
        })
    };
    network.outside.and_then(|hop| hop.source).or_else(|| network.links.values().find_map(address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::rows::Hop;
    use std::collections::BTreeMap;

    fn link(name: &str, address: &str) -> LinkRow {
        LinkRow {
            name: name.into(),
            up: true,
            loopback: false,
            kind: String::new(),
            master: None,
            mtu: 1500,
            mac: Vec::new(),
            addresses: vec![address.parse().unwrap()],
        }
    }

    #[test]
    fn the_nodes_own_addresses_win_over_the_default_route() {
        let network = NetworkRow {
            links: BTreeMap::from([(2, link("mgmt", "192.0.2.9/24")), (3, link("eth0", "172.29.8.20/24"))]),
            outside: Some(Hop {
                ifindex: 3,
                gateway: Some("172.29.8.1".parse().unwrap()),
                source: Some("172.29.8.20".parse().unwrap()),
                mtu: None,
            }),
            ..NetworkRow::default()
        };
        let kubelet = NodeRow {
            uid: "u1".into(),
            addresses: vec![NodeAddress { kind: "InternalIP".into(), ip: "172.29.8.99".parse().unwrap() }],
            ..NodeRow::default()
        };
        let planned = plan("n1", &kubelet, Some(&network), Some("10.244.1.3".parse().unwrap()), None);
        assert_eq!(planned.addresses.len(), 2);
        assert_eq!(planned.addresses[0].ip, "172.29.8.99".parse::<IpAddr>().unwrap());
        assert_eq!(planned.addresses[1].kind, "CiliumInternalIP");
        assert_eq!(planned.owner, Some(("n1".into(), "u1".into())));

        let bare = NodeRow { uid: "u1".into(), ..NodeRow::default() };
        let planned = plan("n1", &bare, Some(&network), None, None);
        assert_eq!(planned.addresses[0].ip, "172.29.8.20".parse::<IpAddr>().unwrap());
    }
}
