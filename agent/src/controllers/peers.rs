//! CiliumNodes into what routing and masquerading need of them.

use crate::tables::rows::{CiliumNodeRow, PeerRow};
use crate::tables::{Reader, Table};
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// Follows `cilium_nodes` and publishes `peers`. Until the first list has arrived, `peers` keeps what it was seeded
/// with from disk.
pub async fn run(mut cilium_nodes: Reader<String, CiliumNodeRow>, peers: Arc<Table<String, PeerRow>>) {
    loop {
        let snapshot = cilium_nodes.synced().await;
        peers.publish(plan(&snapshot.rows));
        cilium_nodes.changed().await;
    }
}

/// One row for each CiliumNode.
fn plan(cilium_nodes: &BTreeMap<String, CiliumNodeRow>) -> BTreeMap<String, PeerRow> {
    cilium_nodes.iter().map(|(name, row)| (name.clone(), peer(row))).collect()
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
    fn what_cannot_be_read_is_left_out_and_the_rest_stays() {
        let peer = peer(&row(
            &[("InternalIP", "fd00::1"), ("InternalIP", "172.29.8.20"), ("CiliumInternalIP", "10.244.1.7")],
            &["10.244.1.9/24", "10.244/24", "fd00::/112"],
        ));
        assert_eq!(peer.internal_ips, ["172.29.8.20".parse::<Ipv4Addr>().unwrap()]);
        assert_eq!(peer.router, Some("10.244.1.7".parse().unwrap()));
        assert_eq!(peer.pod_cidrs, ["10.244.1.0/24".parse::<Ipv4Net>().unwrap()]);
    }
}
