//! What other nodes have: their pod CIDRs, searched by overlap. A change of one node costs that node's.

use crate::tables::Rows;
use crate::tables::rows::{CiliumNodeRow, PeerRow};
use cistern_core::ip::index::NetIndex;
use cistern_core::ipam::node::pod_cidr::{Contested, contested};
use ipnet::IpNet;

/// Follows two tables.
#[derive(Debug, Default)]
pub(super) struct Others {
    listed: Index<CiliumNodeRow>,
    known: Index<PeerRow>,
}

#[derive(Debug)]
struct Index<V> {
    /// The rows that `nets` was made from.
    of: Rows<String, V>,
    nets: NetIndex,
}

impl<V> Default for Index<V> {
    fn default() -> Self {
        Self { of: Rows::new(), nets: NetIndex::default() }
    }
}

impl<V: Clone + PartialEq> Index<V> {
    fn follow(&mut self, rows: &Rows<String, V>, nets: impl Fn(&V) -> Vec<IpNet>) {
        for change in rows.changes_from(&self.of) {
            for net in change.before.map(&nets).unwrap_or_default() {
                self.nets.remove(&net, change.key);
            }
            for net in change.after.map(&nets).unwrap_or_default() {
                self.nets.insert(&net, change.key);
            }
        }
        self.of = rows.clone();
    }
}

impl Others {
    /// Takes up the changes of the tables.
    pub(super) fn follow(&mut self, cilium_nodes: &Rows<String, CiliumNodeRow>, peers: &Rows<String, PeerRow>) {
        self.listed.follow(cilium_nodes, |row| row.pod_cidrs.iter().filter_map(|text| text.parse().ok()).collect());
        self.known.follow(peers, |row| row.pod_cidrs.iter().copied().map(IpNet::V4).collect());
    }

    /// Whether the CiliumNode of a node other than this one lists a pod CIDR that overlaps with this one.
    pub(super) fn lists(&self, own_name: &str, net: &IpNet) -> bool {
        self.listed.nets.overlapping(net).any(|(other, _)| other != own_name)
    }

    /// See [`contested`]; by what is known of the cluster, from disk as long as the API server has not answered.
    pub(super) fn contest(&self, own_name: &str, net: &IpNet) -> Option<Contested> {
        contested(net, own_name, self.known.nets.overlapping(net))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_what_the_tables_say_now() {
        let listed = |texts: &[&str]| CiliumNodeRow {
            pod_cidrs: texts.iter().map(|text| (*text).to_owned()).collect(),
            ..CiliumNodeRow::default()
        };
        let known =
            |text: &str| PeerRow { internal_ips: Vec::new(), router: None, pod_cidrs: vec![text.parse().unwrap()] };
        let own: IpNet = "10.33.0.0/26".parse().unwrap();
        let mut cilium_nodes = Rows::from([
            ("me".to_owned(), listed(&["10.33.0.0/26"])),
            ("b".to_owned(), listed(&["?", "10.33.0.9/24"])),
        ]);
        let mut peers = Rows::from([("b".to_owned(), known("10.33.0.0/24")), ("c".to_owned(), known("10.33.0.0/26"))]);
        let mut others = Others::default();
        others.follow(&cilium_nodes, &peers);
        assert!(others.lists("me", &own));
        assert_eq!(others.contest("me", &own).unwrap().node, "b");
        // An element moves from one node to another, and a node goes.
        cilium_nodes.insert("b".to_owned(), listed(&["10.33.1.0/24"]));
        peers.remove("b");
        others.follow(&cilium_nodes, &peers);
        assert!(!others.lists("me", &own));
        assert_eq!(others.contest("me", &own).unwrap().node, "c");
        cilium_nodes.insert("c".to_owned(), listed(&["10.33.0.0/26"]));
        peers.insert("c".to_owned(), known("10.33.2.0/24"));
        others.follow(&cilium_nodes, &peers);
        assert!(others.lists("me", &own));
        assert_eq!(others.contest("me", &own), None);
    }
}
