//! Publishes this node's readiness as a condition of its Node.

use super::node_status::NodeStatus;
use crate::tables::Table;
use crate::tables::rows::NodeCondition;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Interval of checks.
const LOOK: Duration = Duration::from_secs(5);
/// Minimum interval for publishing another reason of the same state; changes of the state are published at once.
const SAME_STATE: Duration = Duration::from_secs(60);

/// Runs until dropped.
pub async fn run(node: NodeStatus, desired: Arc<Table<String, NodeCondition>>) {
    let mut published: Option<(NodeCondition, Instant)> = None;
    loop {
        let condition = condition(&node);
        let due = published.as_ref().is_none_or(|(before, at)| {
            before.ready != condition.ready || (*before != condition && at.elapsed() >= SAME_STATE)
        });
        if due {
            desired.publish(BTreeMap::from([(node.node.clone(), condition.clone())]));
            published = Some((condition, Instant::now()));
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn condition(node: &NodeStatus) -> NodeCondition {
    let health = node.health();
    let pool = node.pool.peek();
    let reason = match pool.rows.get(&()) {
        _ if health.ready => "PodsServed",
        None => "WaitingForPodCIDR",
        Some(row) if row.blocked.is_some() => "PodCIDRBlocked",
        Some(_) => "NotReady",
    };
    let message = if health.ready { "pods get addresses".to_owned() } else { health.reasons.join("; ") };
    NodeCondition { ready: health.ready, reason: reason.to_owned(), message }
}
