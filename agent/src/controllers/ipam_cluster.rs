//! The operator's cluster-pool: one block for each CiliumNode.

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

/// Where the records of blocks survive a change of leader.
pub trait BlockRecords: Send {
    /// What is recorded now.
    ///
    /// # Errors
    /// What failed, for people.
    fn read(&mut self) -> impl Future<Output = Result<Records, String>> + Send;
    /// Replaces what was read or written last, and nothing else.
    ///
    /// # Errors
    /// See [`NotWritten`].
    fn write(&mut self, records: &Records) -> impl Future<Output = Result<(), NotWritten>> + Send;
}

/// Why records were not replaced.
#[derive(Debug)]
pub enum NotWritten {
    /// What failed, for people. What was planned stands, and is written later.
    Failed(String),
    /// What somebody else recorded meanwhile: what was planned without it is void.
    Replaced(Records),
}

/// A pass is made at most this often, so that a burst of nodes is one (`ipam` 2.2.9).
pub const PASS: Duration = Duration::from_secs(1);

/// Records that cannot be read or written are tried again after this long.
const RECORDS_RETRY: Duration = Duration::from_secs(2);

/// After a doubt about what earlier leaders wrote, no block is given for this long that its node did not have: agents
/// list their blocks again meanwhile. Longer than a watch stays open that tells nothing any more.
pub const SETTLE: Duration = Duration::from_secs(120);

/// A write that was given up may arrive for so long, an earlier leader's too: kube-apiserver ends a request after a minute.
/// Then the records are looked at once more.
const LATE: Duration = Duration::from_secs(70);

/// Where nothing is recorded, a CiliumNode of this age is older than its cluster's first leader: an API server that went
/// back to before there was one looks so, too.
const OLD: Duration = Duration::from_secs(120);

const WAIT: &str = "block records";

/// Runs until dropped. `cilium_nodes` must come from a list that was taken after leadership was won.
///
/// The records are durable before a node is told what follows from them: a block that rests must be known to rest before
/// anything that was planned with it is seen.
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
    let mut look_at = Instant::now() + LATE;
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
        // A server that went back to an older state has older records, too.
        let doubt = *doubted.borrow_and_update();
        read_again |= doubt != last_doubt;
        last_doubt = doubt;
        if look_at <= begun {
            (read_again, look_at) = (true, begun + LONGEST);
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
                    look_at = begun + LATE;
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
            // A block whose rest ends frees it for a node that waits; an hour at most without looking.
            tokio::select! {
                biased;
                () = cilium_nodes.changed() => {}
                _ = doubted.changed() => {}
                () = tokio::time::sleep(until_quarantine_ends(&kept.recorded, clock.now())) => {}
                () = tokio::time::sleep_until(settled_at.unwrap_or(begun + LONGEST).min(look_at)) => {}
            }
            // The first node of a quiet cluster is served at once; a burst of them shares one pass.
            if !nodes.is_empty() {
                tokio::time::sleep_until(begun + PASS).await;
            }
        } else {
            tokio::time::sleep(RECORDS_RETRY).await;
        }
    }
}

/// What a leader remembers of the records.
struct Kept {
    /// What is there.
    recorded: Records,
    /// What was durable once, even where somebody put something else in its place.
    known: Records,
    /// When records were found that were not what this leader knew: a doubt as well.
    surprised: Option<Instant>,
    /// What was written, and may arrive yet.
    attempted: Option<Records>,
}

impl Kept {
    /// Others are there, somebody else's or a late arrival of one's own. Answers what is known with them.
    fn replaced(&mut self, now: Records, at: Instant) -> &Records {
        if self.attempted.as_ref() != Some(&now) {
            tracing::warn!("block records were replaced by somebody else; planning anew with both");
            self.surprised = Some(at);
        }
        self.known = now.clone().adopt(&self.known);
        self.recorded = now;
        &self.known
    }
}

fn has_old(rows: &Rows<String, CiliumNodeRow>, now: Timestamp) -> bool {
    let age = |row: &CiliumNodeRow| Duration::try_from(now.duration_since(row.created?)).ok();
    rows.values().filter_map(age).any(|age| age > OLD)
}

const LONGEST: Duration = Duration::from_secs(3600);

fn until_quarantine_ends(records: &Records, now: Timestamp) -> Duration {
    records
        .quarantine
        .iter()
        .map(|record| Duration::try_from(record.until.duration_since(now)).unwrap_or(Duration::ZERO))
        .min()
        .unwrap_or(LONGEST)
        .clamp(PASS, LONGEST)
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
