//! Executes the DELs that the plugin queued on disk.

use super::{Endpoints, log_release};
use crate::blocking::Blocking;
use crate::cni::deletion_queue::{self, DeletionQueue, Kept, Listed, QueueError, QueuedDel};
use crate::tables::findings::{Findings, Found};
use cistern_core::ipam::lease::Attachment;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Delay before a DEL that failed is retried.
const RETRY: Duration = Duration::from_secs(5);

/// The plugin also queues a DEL if the agent is slow, so the queue is read while the agent runs.
const INTERVAL: Duration = Duration::from_secs(60);

/// Source of the findings.
const SOURCE: &str = "cni-queue";

/// Result of a replay.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replayed {
    /// DELs that were executed, or found no lease.
    pub done: usize,
    /// Entries that this build does not execute.
    pub kept: Vec<Kept>,
}

/// Executes the DELs queued while no agent answered, in order.
pub async fn replay(endpoints: Endpoints, findings: Findings, port: Blocking) {
    loop {
        let pause = match replay_once(Path::new(deletion_queue::QUEUE_DIR), &endpoints, &port).await {
            Ok(Replayed { done, kept }) => {
                if done > 0 {
                    tracing::info!(replayed = done, "queued DELs executed, or without a lease");
                }
                findings.replace(SOURCE, kept.into_iter().map(found));
                INTERVAL
            }
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "queued DELs cannot be executed yet");
                RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

fn found(kept: Kept) -> Found {
    let Kept { path, reason, is_foreign } = kept;
    let expected = if is_foreign { "the build that wrote it executes it" } else { "GC releases its address" };
    Found {
        reason: "queued-del-kept",
        subject: path.display().to_string(),
        message: format!("a queued DEL is not executed and is kept: {reason}; {expected}"),
    }
}

/// Executes the DELs queued in `directory`. Call it when the socket is served: a plugin that finds no agent writes under the
/// lock that this waits for.
///
/// # Errors
/// The queue cannot be used, or a DEL cannot be executed; it is kept, and the others are executed nevertheless.
pub async fn replay_once(directory: &Path, endpoints: &Endpoints, port: &Blocking) -> anyhow::Result<Replayed> {
    let path = directory.to_owned();
    let opened = port.run(move || open(&path)).await?;
    let Some((queue, Listed { dels, kept })) = opened else { return Ok(Replayed::default()) };
    let queue = Arc::new(queue);
    let (mut done, mut failed) = (0, None);
    for (path, del) in dels {
        match execute(&queue, path, del, endpoints, port).await {
            Ok(()) => done += 1,
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(Replayed { done, kept }), Err)
}

fn open(directory: &Path) -> Result<Option<(DeletionQueue, Listed)>, QueueError> {
    if !directory.exists() {
        return Ok(None);
    }
    let queue = DeletionQueue::open_exclusive(directory)?;
    let listed = queue.list()?;
    Ok(Some((queue, listed)))
}

async fn execute(
    queue: &Arc<DeletionQueue>,
    path: std::path::PathBuf,
    del: QueuedDel,
    endpoints: &Endpoints,
    port: &Blocking,
) -> anyhow::Result<()> {
    let QueuedDel { container_id, ifname, began, .. } = del;
    let attachment = Attachment { container_id: container_id.clone(), ifname: ifname.clone() };
    if let Some(lease) = endpoints.del(attachment, began).await? {
        log_release(&lease, "address released: its DEL was queued while no agent answered");
    } else {
        tracing::info!(container_id, ifname, "a DEL queued while no agent answered finds no lease older than itself");
    }
    let queue = Arc::clone(queue);
    Ok(port.run(move || queue.remove(&path)).await?)
}
