//! Changes of tables to be published as events.

use crate::tables::findings::{FindingKey, FindingRow};
use crate::tables::notices::{Notices, Reason};
use crate::tables::rows::{CiliumNodeRow, PoolRow, Wait};
use crate::tables::{Reader, Rows};
use cistern_core::ipam::node::POD_CIDR_WAIT;
use cistern_core::ipam::verdict::Code;
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// A shorter wait for the pod CIDR is normal for a new node.
const SHORT_WAIT: Duration = Duration::from_secs(30);

/// The component that finds unreadable state files.
pub const STATE_FILES: &str = "state";

/// The component that finds keys without effect among the settings.
pub const SETTINGS: &str = "settings";

/// Follows the pod CIDR of a node, until dropped. Its state at startup is not published.
pub async fn node(
    node: String,
    mut pool: Reader<(), PoolRow>,
    mut waits: Reader<String, Wait>,
    mut findings: Reader<FindingKey, FindingRow>,
    known: Option<PoolRow>,
    notices: Notices,
) {
    let mut before = known;
    let mut published: BTreeSet<FindingKey> = BTreeSet::new();
    // The current wait, and when it becomes long; `None` once it was published.
    let mut waiting: Option<(Timestamp, Option<Instant>)> = None;
    loop {
        let now = pool.snapshot().rows.get(&()).cloned();
        for (reason, note) in changes(before.as_ref(), now.as_ref()) {
            notices.publish(&node, reason, note);
        }
        before = now;
        let found = findings.snapshot();
        for ((source, reason, subject), row) in found.rows.iter().filter(|(key, _)| !published.contains(*key)) {
            let event = match *source {
                STATE_FILES => Reason::StateFileSetAside,
                SETTINGS => Reason::UnknownSetting,
                _ => Reason::LeaseFinding,
            };
            notices.publish(&node, event, format!("{reason} {subject}: {}", row.message));
        }
        published = found.rows.keys().cloned().collect();
        let wait = waits.snapshot().rows.get(POD_CIDR_WAIT).cloned();
        // A pod CIDR without allocation has its own notice.
        let wait = wait.filter(|_| before.is_none());
        waiting = wait.as_ref().map(|wait| match waiting {
            Some(known) if known.0 == wait.since => known,
            _ => (wait.since, Some(Instant::now() + SHORT_WAIT)),
        });
        let long_at = waiting.and_then(|(_, at)| at);
        tokio::select! {
            () = pool.changed() => {}
            () = waits.changed() => {}
            () = findings.changed() => {}
            () = async { match long_at { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {
                waiting = waiting.map(|(since, _)| (since, None));
                if let Some(wait) = wait {
                    notices.publish(&node, Reason::WaitingForPodCidr, wait.reason);
                }
            }
        }
    }
}

fn changes(before: Option<&PoolRow>, now: Option<&PoolRow>) -> Vec<(Reason, String)> {
    let Some(now) = now else { return Vec::new() };
    let mut changes = Vec::new();
    match before {
        None => changes.push((Reason::PodCidrReceived, format!("pods get addresses from {}", now.pod_cidr))),
        Some(before) if before.pod_cidr != now.pod_cidr => changes.push((
            Reason::PodCidrChanged,
            format!(
                "new pods get addresses from {} in place of {}; running pods keep theirs",
                now.pod_cidr, before.pod_cidr
            ),
        )),
        Some(_) => {}
    }
    if let Some(blocked) =
        now.blocked.as_ref().filter(|blocked| before.and_then(|row| row.blocked.as_ref()) != Some(*blocked))
    {
        changes.push((Reason::PodCidrBlocked, format!("no address is allocated: {blocked}")));
    }
    changes
}

/// Follows the operator's errors, until dropped. Those written by a former leader are not published.
pub async fn cluster(mut cilium_nodes: Reader<String, CiliumNodeRow>, notices: Notices) {
    let mut before = cilium_nodes.synced().await;
    loop {
        cilium_nodes.changed().await;
        let now = cilium_nodes.snapshot();
        for (node, reason, error) in errors(&before.rows, &now.rows) {
            notices.publish(node, reason, error);
        }
        before = now;
    }
}

/// Nodes among the changed ones whose verdict changed. A text without code is another operator's.
fn errors<'a>(
    before: &'a Rows<String, CiliumNodeRow>,
    now: &'a Rows<String, CiliumNodeRow>,
) -> impl Iterator<Item = (&'a str, Reason, &'a str)> {
    now.changes_from(before).filter_map(|change| {
        let verdict = change.after?.standing.verdict.as_ref()?;
        if change.before.and_then(|row| row.standing.verdict.as_ref()) == Some(verdict) {
            return None;
        }
        Some((change.key.as_str(), reason(verdict.code), verdict.text.as_str()))
    })
}

fn reason(code: Code) -> Reason {
    match code {
        Code::OutsidePool => Reason::PodCidrOutsidePool,
        Code::NotSettled | Code::PoolExhausted | Code::RecordsFull => Reason::PodCidrPoolExhausted,
        Code::InvalidCidr
        | Code::Conflict
        | Code::OutOfRange
        | Code::NotAligned
        | Code::Overlapping
        | Code::AlreadyAllocated
        | Code::InQuarantine
        | Code::NoPool => Reason::PodCidrRefused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::tables::findings::Findings;
    use crate::tables::{Table, Waits};
    use std::collections::BTreeMap;
    use std::sync::Arc;

    fn pool(cidr: &str, blocked: Option<&str>) -> PoolRow {
        PoolRow { blocked: blocked.map(str::to_owned), ..PoolRow::new(cidr.parse().unwrap()) }
    }

    #[test]
    fn a_block_is_news_when_it_comes_changes_or_is_blocked() {
        let (a, b, bad) = (pool("10.1.0.0/24", None), pool("10.2.0.0/24", None), pool("10.1.0.0/24", Some("clash")));
        let reasons = |before, now| changes(before, now).into_iter().map(|(reason, _)| reason).collect::<Vec<_>>();
        assert_eq!(reasons(None, None), []);
        assert_eq!(reasons(None, Some(&a)), [Reason::PodCidrReceived]);
        assert_eq!(reasons(Some(&a), Some(&a)), []);
        assert_eq!(reasons(Some(&a), Some(&b)), [Reason::PodCidrChanged]);
        assert_eq!(reasons(Some(&a), Some(&bad)), [Reason::PodCidrBlocked]);
        assert_eq!(reasons(Some(&bad), Some(&bad)), []);
        assert_eq!(reasons(Some(&bad), Some(&a)), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_news_once_and_only_when_it_is_long() {
        let clock = Clock::following_runtime("2026-01-01T00:00:00Z".parse().unwrap());
        let (waits, notices) = (Waits::new(clock), Notices::new(clock));
        let table: Arc<Table<(), PoolRow>> = Arc::new(Table::new("pool"));
        let count =
            || notices.reader().peek().rows.get(&("n".to_owned(), Reason::WaitingForPodCidr)).map(|row| row.count);
        let task = tokio::spawn(node(
            "n".into(),
            table.reader(),
            waits.reader(),
            Findings::new(clock).reader(),
            None,
            notices.clone(),
        ));
        waits.begin(POD_CIDR_WAIT, "no block yet", None);
        tokio::time::sleep(SHORT_WAIT / 2).await;
        assert_eq!(count(), None);
        tokio::time::sleep(SHORT_WAIT * 20).await;
        assert_eq!(count(), Some(1));
        table.publish(BTreeMap::from([((), pool("10.1.0.0/24", None))]));
        waits.end(POD_CIDR_WAIT);
        tokio::time::sleep(SHORT_WAIT).await;
        assert!(notices.reader().peek().rows.contains_key(&("n".to_owned(), Reason::PodCidrReceived)));
        assert_eq!(count(), Some(1));
        task.abort();
    }
}
