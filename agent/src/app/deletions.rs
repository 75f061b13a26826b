//! Carries out the DELs that the plugin left on disk.

use super::agent_api::log_release;
use crate::cni::deletion_queue::{self, DeletionQueue, Kept, Listed, QueueError, QueuedDel};
use crate::leases::Endpoints;
use crate::tables::findings::{Findings, Found};
use cistern_core::ipam::lease::Attachment;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Delay before a DEL that failed is retried.
const RETRY: Duration = Duration::from_secs(5);

/// The plugin also queues a DEL if the agent is slow, so the queue is read while the agent runs.
const INTERVAL: Duration = Duration::from_secs(60);

/// Whose findings these are.
const SOURCE: &str = "cni-queue";

/// What became of the queue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replayed {
    /// DELs that were carried out, or had nothing left to end.
    pub done: usize,
    /// Entries that are not this build's to carry out.
    pub kept: Vec<Kept>,
}

/// Executes the DELs queued while no agent answered, in order.
pub async fn replay(endpoints: Endpoints, findings: Findings) {
    loop {
        let pause = match replay_once(Path::new(deletion_queue::QUEUE_DIR), &endpoints).await {
            Ok(Replayed { done, kept }) => {
                if done > 0 {
                    tracing::info!(replayed = done, "DELs that waited were carried out, or had nothing left to end");
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
    let expected = if is_foreign { "the build that wrote it carries it out" } else { "its address is found by GC" };
    Found {
        reason: "queued-del-kept",
        subject: path.display().to_string(),
        message: format!("a queued DEL is not carried out and stays: {reason}; {expected}"),
    }
}

/// Carries out the DELs that wait in `directory`. To be called when the socket is served: a plugin that finds no agent
/// writes under the lock that this waits for.
///
/// # Errors
/// When the queue cannot be used, or one of the DELs cannot be carried out; it stays, and the others do not wait for it.
pub async fn replay_once(directory: &Path, endpoints: &Endpoints) -> anyhow::Result<Replayed> {
    let path = directory.to_owned();
    let opened = tokio::task::spawn_blocking(move || open(&path)).await??;
    let Some((queue, Listed { dels, kept })) = opened else { return Ok(Replayed::default()) };
    let queue = Arc::new(queue);
    let (mut done, mut failed) = (0, None);
    for (path, del) in dels {
        match carry_out(&queue, path, del, endpoints).await {
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

async fn carry_out(
    queue: &Arc<DeletionQueue>,
    path: std::path::PathBuf,
    del: QueuedDel,
    endpoints: &Endpoints,
) -> anyhow::Result<()> {
    let QueuedDel { container_id, ifname, began, .. } = del;
    let attachment = Attachment { container_id: container_id.clone(), ifname: ifname.clone() };
    if let Some(lease) = endpoints.del(attachment, began).await? {
        log_release(&lease, "address released: its DEL was queued while no agent answered");
    } else {
        tracing::info!(container_id, ifname, "a DEL that came while no agent answered finds no lease of its time");
    }
    let queue = Arc::clone(queue);
    Ok(tokio::task::spawn_blocking(move || queue.remove(&path)).await??)
}
