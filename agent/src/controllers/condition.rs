//! Publishes this node's readiness as a condition of its Node, at a limited rate.

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

/// Publishes the condition of `node`, until dropped.
pub async fn run(
    node: String,
    condition: impl Fn() -> NodeCondition + Send,
    desired: Arc<Table<String, NodeCondition>>,
) {
    let mut published: Option<(NodeCondition, Instant)> = None;
    loop {
        let condition = condition();
        let due = published.as_ref().is_none_or(|(before, at)| {
            before.ready != condition.ready || (*before != condition && at.elapsed() >= SAME_STATE)
        });
        if due {
            desired.publish(BTreeMap::from([(node.clone(), condition.clone())]));
            published = Some((condition, Instant::now()));
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[tokio::test(start_paused = true)]
    async fn a_change_of_the_state_is_published_at_once_and_of_the_reason_within_a_minute() {
        let now = |ready: bool, message: &str| NodeCondition {
            ready,
            reason: "NotReady".to_owned(),
            message: message.to_owned(),
        };
        let (table, state) = (Arc::new(Table::new("conditions")), Arc::new(Mutex::new(now(false, "a"))));
        let (look, desired) = (Arc::clone(&state), Arc::clone(&table));
        tokio::spawn(run("n".to_owned(), move || look.lock().unwrap().clone(), desired));
        let published = || table.snapshot().rows.get("n").cloned();
        let after = |seconds| tokio::time::sleep(Duration::from_secs(seconds));
        after(1).await;
        assert_eq!(published(), Some(now(false, "a")));
        *state.lock().unwrap() = now(false, "b");
        after(30).await;
        assert_eq!(published(), Some(now(false, "a")));
        after(40).await;
        assert_eq!(published(), Some(now(false, "b")));
        *state.lock().unwrap() = now(true, "c");
        after(6).await;
        assert_eq!(published(), Some(now(true, "c")));
    }
}
