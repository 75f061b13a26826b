//! What a node needs to serve while the API server is away, on disk (`architecture` section 4).

use crate::state::{StateDir, StateError};
use crate::tables::rows::{PeerRow, PoolRow};
use crate::tables::{Reader, Table};
use cistern_core::masquerade::excluded::ConfigFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The last inputs from the API.
const NODE: &str = "node.json";
/// The last ip-masq-agent file that could be used.
const LAST_GOOD: &str = "ip-masq.json";

/// Of another format, nothing of the file is used; the API server tells all of it again.
const FORMAT: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Remembered {
    format: u32,
    pool: Option<PoolRow>,
    peers: BTreeMap<String, PeerRow>,
}

/// The tables `peers` and `pool`.
pub type Seeded = (Arc<Table<String, PeerRow>>, Arc<Table<(), PoolRow>>);

/// The tables `peers` and `pool`, holding what was known last. They count as synced then: routes and exclusions that
/// follow from them are those that the kernel has already.
///
/// # Errors
/// When the disk cannot be read.
pub fn tables(state: &StateDir) -> Result<Seeded, StateError> {
    let (peers, pool) = (Table::new("peers"), Table::new("pool"));
    let (remembered, set_aside) = state.read::<Remembered>(NODE)?;
    if let Some(set_aside) = set_aside {
        tracing::error!("{set_aside}");
    }
    if let Some(remembered) = remembered.filter(|remembered| remembered.format == FORMAT) {
        tracing::info!(pool = ?remembered.pool, nodes = remembered.peers.len(), "serving from what was known last");
        peers.publish(remembered.peers);
        if let Some(row) = remembered.pool {
            pool.publish(BTreeMap::from([((), row)]));
        }
    }
    Ok((Arc::new(peers), Arc::new(pool)))
}

/// The last ip-masq-agent list that could be used.
///
/// # Errors
/// When the disk cannot be read.
pub fn last_good(state: &StateDir) -> Result<Option<ConfigFile>, StateError> {
    let (last_good, set_aside) = state.read::<Option<ConfigFile>>(LAST_GOOD)?;
    if let Some(set_aside) = set_aside {
        tracing::error!("{set_aside}");
    }
    Ok(last_good.flatten())
}

/// A change of a busy cluster is written at most this often.
const PAUSE: Duration = Duration::from_millis(500);

/// Keeps the files equal to the tables until dropped. A disk that refuses is tried again with each change.
pub async fn run(
    state: StateDir,
    mut peers: Reader<String, PeerRow>,
    mut pool: Reader<(), PoolRow>,
    mut last_good: Reader<(), Option<ConfigFile>>,
) {
    let mut written = None;
    let mut written_list = 0;
    loop {
        let now = Remembered {
            format: FORMAT,
            pool: pool.snapshot().rows.get(&()).cloned(),
            peers: peers.snapshot().rows.clone(),
        };
        if written.as_ref() != Some(&now) && (now.pool.is_some() || !now.peers.is_empty()) {
            match state.write(NODE, &now) {
                Ok(()) => written = Some(now),
                Err(error) => tracing::error!(%error, "what a restart without API server needs is not on disk"),
            }
        }
        let list = last_good.snapshot();
        if let Some(value) = list.rows.get(&()).filter(|_| list.revision != written_list) {
            match state.write(LAST_GOOD, value) {
                Ok(()) => written_list = list.revision,
                Err(error) => tracing::error!(%error, "the last good ip-masq-agent list is not on disk"),
            }
        }
        tokio::time::sleep(PAUSE).await;
        tokio::select! {
            () = peers.changed() => {}
            () = pool.changed() => {}
            () = last_good.changed() => {}
        }
    }
}
