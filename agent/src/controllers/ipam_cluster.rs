//! The operator's cluster-pool: one block for each CiliumNode.

use crate::clock::Clock;
use crate::tables::rows::{CiliumNodeIpam, CiliumNodeRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ipam::cluster::cluster_pool::{Input, Ledger, Node, Plan, Records, Settings, plan};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Where the records of blocks survive a change of leader.
pub trait BlockRecords: Send {
    /// What is recorded now.
    ///
    /// # Errors
    /// What failed, for people.
    fn read(&mut self) -> impl Future<Output = Result<Records, String>> + Send;
    /// Replaces what is recorded.
    ///
    /// # Errors
    /// What failed, for people.
    fn write(&mut self, records: &Records) -> impl Future<Output = Result<(), String>> + Send;
}

/// A pass is made at most this often, so that a burst of nodes is one (`ipam` 2.2.9).
pub const PASS: Duration = Duration::from_secs(1);

/// Records that cannot be read or written are tried again after this long.
const RECORDS_RETRY: Duration = Duration::from_secs(2);

const WAIT: &str = "block records";

/// Runs until dropped. `cilium_nodes` must come from a list that was taken after leadership was won.
///
/// The records are durable before a node is told what follows from them: a block that rests must be known to rest before
/// anything that was planned with it is seen.
pub async fn run<R: BlockRecords>(
    settings: Settings,
    mut cilium_nodes: Reader<String, CiliumNodeRow>,
    mut store: R,
    desired: Arc<Table<String, CiliumNodeIpam>>,
    waits: Waits,
    clock: Clock,
) {
    let mut recorded = loop {
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
    loop {
        let begun = Instant::now();
        let snapshot = cilium_nodes.synced().await;
        let Plan { nodes, records, ledger: next } = plan(&input(&snapshot.rows), ledger, clock.now());
        ledger = next;
        let durable = match records {
            Some(records) if records != recorded => match store.write(&records).await {
                Ok(()) => {
                    recorded = records;
                    waits.end(WAIT);
                    true
                }
                Err(reason) => {
                    waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                    false
                }
            },
            Some(_) => true,
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
                        let error = planned.and_then(|node| node.error.clone()).map_or_else(
                            || row.operator_error.clone(),
                            |error| Some(error).filter(|error| !error.is_empty()),
                        );
                        let planned_from = row.resource_version.clone();
                        (name.clone(), CiliumNodeIpam { uid: row.uid.clone(), planned_from, pod_cidrs, error })
                    })
                    .collect::<BTreeMap<_, _>>(),
            );
            // A block whose rest ends frees it for a node that waits; an hour at most without looking.
            tokio::select! {
                () = cilium_nodes.changed() => {}
                () = tokio::time::sleep(until_quarantine_ends(&recorded, clock.now())) => {}
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

fn until_quarantine_ends(records: &Records, now: Timestamp) -> Duration {
    const LONGEST: Duration = Duration::from_secs(3600);
    records
        .quarantine
        .iter()
        .map(|record| Duration::try_from(record.until.duration_since(now)).unwrap_or(Duration::ZERO))
        .min()
        .unwrap_or(LONGEST)
        .clamp(PASS, LONGEST)
}

fn input(rows: &BTreeMap<String, CiliumNodeRow>) -> Input {
    let nodes = rows
        .iter()
        .map(|(name, row)| Node {
            name: name.clone(),
            uid: row.uid.clone(),
            created: row.created.unwrap_or(Timestamp::UNIX_EPOCH),
            deleting: row.deleting,
            pod_cidrs: row.pod_cidrs.clone(),
            error: row.operator_error.clone().unwrap_or_default(),
        })
        .collect();
    Input { nodes, synced: true }
}
