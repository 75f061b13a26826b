//! Data of CiliumNodes for routing and masquerading.

use crate::tables::rows::{CiliumNodeRow, PeerRow};
use crate::tables::{Reader, Rows, Table};
use ipnet::Ipv4Net;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// Follows `cilium_nodes` and publishes `peers`. Until the first list has arrived, `peers` has the rows loaded from
/// disk; afterwards, a change of one node only costs that node's row.
pub async fn run(mut cilium_nodes: Reader<String, CiliumNodeRow>, peers: Arc<Table<String, PeerRow>>) {
    let mut before = cilium_nodes.synced().await;
    peers.publish(before.rows.iter().map(|(name, row)| (name.clone(), peer(row))).collect());
    loop {
        cilium_nodes.changed().await;
        let now = cilium_nodes.snapshot();
        peers.modify(|peers| update(peers, &before.rows, &now.rows));
        before = now;
    }
}

/// Changes the rows of the nodes that changed.
fn update(peers: &mut Rows<String, PeerRow>, before: &Rows<String, CiliumNodeRow>, now: &Rows<String, CiliumNodeRow>) {
    for change in now.changes_from(before) {
        match change.after.map(peer) {
            Some(row) if peers.get(change.key) == Some(&row) => {}
            Some(row) => peers.insert(change.key.clone(), row),
            None => {
                peers.remove(change.key);
            }
        }
    }
}

fn peer(row: &CiliumNodeRow) -> PeerRow {
    PeerRow {
        internal_ips: row
            .addresses
            .iter()
            .filter(|address| address.kind == "InternalIP")
            .filter_map(|address| match address.ip {
                IpAddr::V4(ip) => Some(ip),
                IpAddr::V6(_) => None,
            })
            .collect::<Vec<Ipv4Addr>>(),
        router: row.ipv4("CiliumInternalIP"),
        pod_cidrs: row
            .pod_cidrs
            .iter()
            .filter_map(|text| text.parse::<Ipv4Net>().ok())
            .map(|net| net.trunc())
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::rows::NodeAddress;

    fn row(addresses: &[(&str, &str)], pod_cidrs: &[&str]) -> CiliumNodeRow {
        CiliumNodeRow {
            uid: "u".into(),
            resource_version: "1".into(),
            addresses: addresses
                .iter()
                .map(|(kind, ip)| NodeAddress { kind: (*kind).into(), ip: ip.parse().unwrap() })
                .collect(),
            pod_cidrs: pod_cidrs.iter().map(|text| (*text).into()).collect(),
            ..CiliumNodeRow::default()
        }
    }

    #[test]
    fn invalid_values_are_skipped_and_others_kept() {
        let peer = peer(&row(
            &[("InternalIP", "fd00::1"), ("InternalIP", "172.29.8.20"), ("CiliumInternalIP", "10.244.1.7")],
            &["10.244.1.9/24", "10.244/24", "fd00::/112"],
        ));
        assert_eq!(peer.internal_ips, ["172.29.8.20".parse::<Ipv4Addr>().unwrap()]);
        assert_eq!(peer.router, Some("10.244.1.7".parse().unwrap()));
        assert_eq!(peer.pod_cidrs, ["10.244.1.0/24".parse::<Ipv4Net>().unwrap()]);
    }
}
