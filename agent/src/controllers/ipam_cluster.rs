//! The operator's cluster pool: pod CIDRs of CiliumNodes.

use crate::clock::Clock;
use crate::tables::rows::{CiliumNodeIpam, CiliumNodeRow};
use crate::tables::{Reader, Rows, Table, Waits};
use cistern_core::ipam::cluster::cluster_pool::{Input, Ledger, Node, Plan, Records, Settings, plan};
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Records that outlive a leader.
pub trait BlockRecords: Send {
    /// Reads the records.
    ///
    /// # Errors
    /// The reason, human-readable.
    fn read(&mut self) -> impl Future<Output = Result<Records, String>> + Send;
    /// Replaces exactly what was read or written last.
    ///
    /// # Errors
    /// See [`NotWritten`].
    fn write(&mut self, records: &Records) -> impl Future<Output = Result<(), NotWritten>> + Send;
}

/// Why records were not replaced.
#[derive(Debug)]
pub enum NotWritten {
    /// The reason, human-readable. The plan remains valid, and the write is retried.
    Failed(String),
    /// Another client replaced the records: plans made without them are void.
    Replaced(Records),
}

/// Minimum interval of passes, so that a burst of nodes is handled in one (`ipam` 2.2.9).
pub const PLAN_INTERVAL: Duration = Duration::from_secs(1);

/// Delay before reading or writing the records is retried.
const RECORDS_RETRY: Duration = Duration::from_secs(2);

/// After suspected data loss, only re-confirm existing pod CIDRs for this long, while agents list theirs again. Must
/// exceed `watch::DEAD_AFTER`.
pub const SETTLE: Duration = Duration::from_secs(120);

/// A write that timed out, also of an earlier leader, may still arrive within this time: kube-apiserver ends a request
/// after a minute. Then the records are read once more.
const LATE_WRITE_RECHECK: Duration = Duration::from_secs(70);

/// Without records, a CiliumNode older than this is from before the first leader; also the symptom of a restored etcd
/// snapshot.
const PREEXISTING_AGE: Duration = Duration::from_secs(120);

const WAIT: &str = "block records";

/// Runs until dropped. `cilium_nodes` must be from a list made after the election.
///
/// The records are durable before nodes are written: the quarantine of a pod CIDR must be recorded before any write
/// that depends on it.
pub async fn run<R: BlockRecords>(
    settings: Settings,
    mut cilium_nodes: Reader<String, CiliumNodeRow>,
    mut store: R,
    mut doubted: watch::Receiver<Option<Instant>>,
    desired: Arc<Table<String, CiliumNodeIpam>>,
    waits: Waits,
    clock: Clock,
) {
    let recorded = loop {
        match store.read().await {
            Ok(records) => break records,
            Err(reason) => {
                waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                tokio::time::sleep(RECORDS_RETRY).await;
            }
        }
    };
    waits.end(WAIT);
    let mut ledger = Ledger::take_over(&settings, &recorded, clock.now());
    let mut kept = Kept { known: recorded.clone(), recorded, surprised: None, attempted: None };
    let mut followed = None;
    let mut read_again = false;
    let mut last_doubt = None;
    let mut look_at = Instant::now() + LATE_WRITE_RECHECK;
    loop {
        let begun = Instant::now();
        let snapshot = cilium_nodes.synced().await;
        match followed {
            None if kept.recorded == Records::default() && has_old(&snapshot.rows, clock.now()) => {
                kept.surprised = Some(begun);
            }
            Some(then) => read_again |= !snapshot.followed.is_same_list(then),
            None => {}
        }
        followed = Some(snapshot.followed);
        // A server restored to an older state has older records, too.
        let doubt = *doubted.borrow_and_update();
        read_again |= doubt != last_doubt;
        last_doubt = doubt;
        if look_at <= begun {
            (read_again, look_at) = (true, begun + MAX_IDLE);
        }
        if read_again {
            match store.read().await {
                Ok(now) => {
                    read_again = false;
                    if now != kept.recorded {
                        ledger = Ledger::take_over(&settings, kept.replaced(now, begun), clock.now());
                        continue;
                    }
                }
                Err(reason) => {
                    waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                    tokio::time::sleep(RECORDS_RETRY).await;
                    continue;
                }
            }
        }
        let settled_at = doubt.max(kept.surprised).map(|at| at + SETTLE).filter(|at| *at > begun);
        let input = input(&snapshot.rows, settled_at.is_none());
        let Plan { nodes, records, ledger: next } = plan(&input, ledger, clock.now());
        ledger = next;
        let durable = match records {
            Some(records) if records != kept.recorded => match store.write(&records).await {
                Ok(()) => {
                    kept.known.clone_from(&records);
                    kept.recorded = records;
                    waits.end(WAIT);
                    true
                }
                Err(NotWritten::Failed(reason)) => {
                    kept.attempted = Some(records);
                    look_at = begun + LATE_WRITE_RECHECK;
                    waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                    false
                }
                Err(NotWritten::Replaced(now)) => {
                    ledger = Ledger::take_over(&settings, kept.replaced(now, begun), clock.now());
                    continue;
                }
            },
            Some(_) => {
                waits.end(WAIT);
                true
            }
            None => false,
        };
        if durable {
            desired.publish(
                snapshot
                    .rows
                    .iter()
                    .map(|(name, row)| {
                        let planned = nodes.get(name);
                        let pod_cidrs = planned.and_then(|node| node.pod_cidrs.as_ref()).map_or_else(
                            || row.pod_cidrs.clone(),
                            |nets| nets.iter().map(ToString::to_string).collect(),
                        );
                        let (error, verdict_annotation) = planned.map_or_else(
                            || (row.operator_error.clone(), row.verdict_annotation.clone()),
                            |node| (node.verdict.as_ref().map(|verdict| verdict.text.clone()), node.annotation.clone()),
                        );
                        let withdraws_refusal = row.standing.is_contested && verdict_annotation.is_none();
                        let planned_from = row.resource_version.clone();
                        let claim = row.claim.filter(|_| !planned.is_some_and(|node| node.accepted));
                        let uid = row.uid.clone();
                        let ipam = CiliumNodeIpam {
                            uid,
                            planned_from,
                            pod_cidrs,
                            claim,
                            error,
                            verdict_annotation,
                            withdraws_refusal,
                        };
                        (name.clone(), ipam)
                    })
                    .collect::<BTreeMap<_, _>>(),
            );
            // Wake when a quarantine ends, which frees a pod CIDR for a waiting node; after an hour at most.
            tokio::select! {
                biased;
                () = cilium_nodes.changed() => {}
                _ = doubted.changed() => {}
                () = tokio::time::sleep(until_quarantine_ends(&kept.recorded, clock.now())) => {}
                () = tokio::time::sleep_until(settled_at.unwrap_or(begun + MAX_IDLE).min(look_at)) => {}
            }
            // The first node after a pause is served at once; a burst shares one pass.
            if !nodes.is_empty() {
                tokio::time::sleep_until(begun + PLAN_INTERVAL).await;
            }
        } else {
            tokio::time::sleep(RECORDS_RETRY).await;
        }
    }
}

/// The leader's view of the records.
struct Kept {
    /// Current content.
    recorded: Records,
    /// What was durable at some time, even if another client replaced it.
    known: Records,
    /// When records were found that this leader did not write, which also suggests data loss.
    surprised: Option<Instant>,
    /// A write without an answer, which may still arrive.
    attempted: Option<Records>,
}

impl Kept {
    /// Other records were found, of another client or of a late write. Returns the merged ones.
    fn replaced(&mut self, now: Records, at: Instant) -> &Records {
        if self.attempted.as_ref() != Some(&now) {
            tracing::warn!("pod CIDR records were replaced by another client; planning again with both");
            self.surprised = Some(at);
        }
        self.known = now.clone().adopt(&self.known);
        self.recorded = now;
        &self.known
    }
}

fn has_old(rows: &Rows<String, CiliumNodeRow>, now: Timestamp) -> bool {
    let age = |row: &CiliumNodeRow| Duration::try_from(now.duration_since(row.created?)).ok();
    rows.values().filter_map(age).any(|age| age > PREEXISTING_AGE)
}

const MAX_IDLE: Duration = Duration::from_secs(3600);

fn until_quarantine_ends(records: &Records, now: Timestamp) -> Duration {
    records
        .quarantine
        .iter()
        .map(|record| Duration::try_from(record.until.duration_since(now)).unwrap_or(Duration::ZERO))
        .min()
        .unwrap_or(MAX_IDLE)
        .clamp(PLAN_INTERVAL, MAX_IDLE)
}

fn input(rows: &Rows<String, CiliumNodeRow>, settled: bool) -> Input {
    let nodes = rows
        .iter()
        .map(|(name, row)| Node {
            name: name.clone(),
            uid: row.uid.clone(),
            created: row.created.unwrap_or(Timestamp::UNIX_EPOCH),
            deleting: row.deleting || row.unreadable.is_some(),
            pod_cidrs: row.pod_cidrs.clone(),
            claim: row.claim.map(IpNet::V4),
            error: row.operator_error.clone().unwrap_or_default(),
            annotation: row.verdict_annotation.clone(),
        })
        .collect();
    Input { nodes, synced: true, settled }
}
