//! What a node needs to serve while the API server is away, on disk (`architecture` section 4).

use crate::state::{SetAside, StateDir};
use crate::tables::findings::{Findings, Found};
use crate::tables::rows::{PeerRow, PoolRow};
use crate::tables::{Reader, Rows, Table, Waits};
use cistern_core::masquerade::ip_masq::ConfigFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The last inputs from the API.
const NODE: &str = "node.json";
/// The last ip-masq-agent file that could be used.
const LAST_GOOD: &str = "ip-masq.json";

/// Of another format, nothing of the file is used, and it is set aside; the API server tells all of it again.
const FORMAT: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Remembered {
    format: u32,
    pool: Option<PoolRow>,
    peers: Rows<String, PeerRow>,
}

/// Tables that begin with what was known last.
pub struct Seeded {
    /// The nodes of the cluster.
    pub peers: Arc<Table<String, PeerRow>>,
    /// Where this node's pods get their addresses from.
    pub pool: Arc<Table<(), PoolRow>>,
    /// What of `pool` is on disk.
    pub remembered: Arc<Table<(), PoolRow>>,
}

/// The tables, holding what was known last. They count as synced then: routes and exclusions that follow from them are
/// those that the kernel has already.
#[must_use]
pub fn tables(state: &StateDir, findings: &Findings) -> Seeded {
    let (peers, pool, on_disk) = (Table::new("peers"), Table::new("pool"), Table::new("remembered-pool"));
    let (remembered, set_aside) = state.read::<Remembered>(NODE, Some(FORMAT));
    findings.add(STATE, set_aside.as_ref().map(unreadable));
    if let Some(remembered) = remembered {
        tracing::info!(block = ?remembered.pool.as_ref().map(|row| row.pod_cidr), nodes = remembered.peers.len(), "serving from what was known last");
        peers.publish(remembered.peers.to_map());
        if let Some(row) = remembered.pool {
            on_disk.publish(BTreeMap::from([((), row.clone())]));
            pool.publish(BTreeMap::from([((), row)]));
        }
    }
    Seeded { peers: Arc::new(peers), pool: Arc::new(pool), remembered: Arc::new(on_disk) }
}

/// Source of findings about state files.
pub const STATE: &str = "state";

/// What is told of a file that was set aside.
#[must_use]
pub fn unreadable(file: &SetAside) -> Found {
    Found { reason: "state-file-unreadable", subject: file.path.display().to_string(), message: file.to_string() }
}

/// The last ip-masq-agent list that could be used.
#[must_use]
pub fn last_good(state: &StateDir, findings: &Findings) -> Option<ConfigFile> {
    let (last_good, set_aside) = state.read::<Option<ConfigFile>>(LAST_GOOD, None);
    findings.add(STATE, set_aside.as_ref().map(unreadable));
    last_good.flatten()
}

/// A change of a busy cluster is written at most this often.
const PAUSE: Duration = Duration::from_millis(500);

/// A disk that refused is tried again after this long.
const DISK_RETRY: Duration = Duration::from_secs(5);

/// Name of the wait for a disk that refuses.
pub const WAIT: &str = "node state on disk";

/// Keeps the files equal to the tables until dropped, and says in `remembered` which pool is there. A disk that refuses
/// is tried again.
pub async fn run(
    state: StateDir,
    mut peers: Reader<String, PeerRow>,
    mut pool: Reader<(), PoolRow>,
    mut last_good: Reader<(), Option<ConfigFile>>,
    remembered: Arc<Table<(), PoolRow>>,
    waits: Waits,
) {
    let mut written = None;
    let mut written_list = 0;
    loop {
        let mut refused = false;
        let now = Remembered {
            format: FORMAT,
            pool: pool.snapshot().rows.get(&()).cloned(),
            peers: peers.snapshot().rows.clone(),
        };
        if written.as_ref() != Some(&now) && (now.pool.is_some() || !now.peers.is_empty()) {
            match state.write(NODE, &now) {
                Ok(()) => {
                    remembered.publish(now.pool.clone().map(|row| ((), row)).into_iter().collect());
                    waits.end(WAIT);
                    written = Some(now);
                }
                Err(error) => {
                    refused = true;
                    tracing::error!(%error, "what a restart without API server needs is not on disk");
                    let reason = format!("{error}; no address of a pod CIDR that is not on disk is given");
                    waits.begin(WAIT, reason, Some(DISK_RETRY));
                }
            }
        }
        let list = last_good.snapshot();
        if let Some(value) = list.rows.get(&()).filter(|_| list.revision != written_list) {
            match state.write(LAST_GOOD, value) {
                Ok(()) => written_list = list.revision,
                Err(error) => {
                    refused = true;
                    tracing::error!(%error, "the last good ip-masq-agent list is not on disk");
                }
            }
        }
        // What addresses are given from is waited for.
        tokio::select! {
            biased;
            () = pool.changed() => continue,
            () = tokio::time::sleep(PAUSE) => {}
        }
        tokio::select! {
            biased;
            () = peers.changed() => {}
            () = pool.changed() => {}
            () = last_good.changed() => {}
            () = tokio::time::sleep(DISK_RETRY), if refused => {}
        }
    }
}
