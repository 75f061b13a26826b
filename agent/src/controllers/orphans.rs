//! CiliumNodes without a Node (`ipam` decision 11).

use crate::tables::rows::{CiliumNodeRow, NodeRow};
use crate::tables::{Reader, Rows, Table};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Minimum time without a Node: a Node that is recreated under its name keeps its CiliumNode and pod CIDR.
pub const GRACE: Duration = Duration::from_secs(30);

/// Follows both lists and publishes name and UID of each CiliumNode to delete. Runs until dropped.
pub async fn run(
    mut nodes: Reader<String, NodeRow>,
    mut cilium_nodes: Reader<String, CiliumNodeRow>,
    desired: Arc<Table<String, String>>,
) {
    let mut suspects: BTreeMap<String, (String, tokio::time::Instant)> = BTreeMap::new();
    loop {
        let nodes_now = nodes.synced().await;
        let cilium_nodes_now = cilium_nodes.synced().await;
        let found = orphans(&nodes_now.rows, &cilium_nodes_now.rows);
        let now = tokio::time::Instant::now();
        suspects.retain(|name, (uid, _)| found.get(name) == Some(uid));
        for (name, uid) in found {
            suspects.entry(name).or_insert((uid, now));
        }
        let due = |since: &tokio::time::Instant| *since + GRACE;
        desired.publish(
            suspects
                .iter()
                .filter(|(_, (_, since))| due(since) <= now)
                .map(|(name, (uid, _))| (name.clone(), uid.clone()))
                .collect(),
        );
        let next = suspects.values().map(|(_, since)| due(since)).filter(|at| *at > now).min();
        tokio::select! {
            biased;
            () = nodes.changed() => {}
            () = cilium_nodes.changed() => {}
            () = async { match next { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {}
        }
    }
}

/// Objects with an owner, without a Node of their name. An object that never had an owner was created by an
/// administrator and is kept.
fn orphans(nodes: &Rows<String, NodeRow>, cilium_nodes: &Rows<String, CiliumNodeRow>) -> BTreeMap<String, String> {
    cilium_nodes
        .iter()
        .filter(|(name, row)| row.owner.is_some() && !row.deleting && !nodes.contains_key(*name))
        .map(|(name, row)| (name.clone(), row.uid.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cilium_node(owner: Option<&str>) -> CiliumNodeRow {
        CiliumNodeRow {
            uid: "u".into(),
            resource_version: "1".into(),
            owner: owner.map(|owner| (owner.to_owned(), "nu".to_owned())),
            ..CiliumNodeRow::default()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_an_owned_object_without_node_is_deleted_and_only_after_the_grace() {
        let (nodes, cilium_nodes) = (Table::new("nodes"), Table::new("cilium-nodes"));
        nodes.publish(BTreeMap::from([("n1".to_owned(), NodeRow { uid: "nu".into(), ..NodeRow::default() })]));
        cilium_nodes.publish(BTreeMap::from([
            ("n1".to_owned(), cilium_node(Some("n1"))),
            ("n2".to_owned(), cilium_node(Some("n2"))),
            ("n3".to_owned(), cilium_node(None)),
        ]));
        let desired = Arc::new(Table::new("orphans"));
        let task = tokio::spawn(run(nodes.reader(), cilium_nodes.reader(), Arc::clone(&desired)));
        tokio::time::sleep(GRACE / 2).await;
        assert!(desired.snapshot().synced && desired.snapshot().rows.is_empty());
        tokio::time::sleep(GRACE).await;
        assert_eq!(desired.snapshot().rows, BTreeMap::from([("n2".to_owned(), "u".to_owned())]));
        task.abort();
    }
}
