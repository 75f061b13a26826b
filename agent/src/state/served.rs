//! Records for CNI STATUS that this node serves pods (`cistern_core::cni::served`).

use super::BootMarker;
use crate::blocking::Blocking;
use crate::clock;
use cistern_core::cni::served::Served;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;

/// Interval of the readiness check until the node serves for the first time.
const UNTIL_READY: Duration = Duration::from_millis(200);

/// Interval at which the file is written while the node serves.
const INTERVAL: Duration = Duration::from_secs(10);

/// The file, and whether this agent has written it. Clones share both.
#[derive(Debug, Clone, Default)]
pub struct ServedMarker {
    /// `None` if no plugin reads the file.
    file: Option<(BootMarker, Blocking)>,
    marked: Arc<AtomicBool>,
    writing: Arc<Mutex<()>>,
}

impl ServedMarker {
    /// The file beside the marker of this boot, written through `port`.
    #[must_use]
    pub fn new(boot: BootMarker, port: Blocking) -> Self {
        Self { file: Some((boot, port)), ..Self::default() }
    }

    /// Whether the node has served since this agent started.
    #[must_use]
    pub fn is_marked(&self) -> bool {
        self.marked.load(Ordering::Relaxed)
    }

    /// Marks a node that serves, unless this agent has done so before. The file is written when this returns.
    pub async fn mark_first(&self) {
        if self.is_marked() {
            return;
        }
        let _writing = self.writing.lock().await;
        if !self.is_marked() {
            self.write().await;
        }
    }

    async fn write(&self) {
        if let Some(((boot, port), uptime)) = self.file.clone().zip(clock::uptime())
            && let Err(error) = port.run(move || boot.set_served(&Served::at(uptime))).await
        {
            tracing::warn!(%error, "the time when this node served is not on disk; CNI STATUS may fail during a restart");
        }
        self.marked.store(true, Ordering::Relaxed);
    }

    /// Keeps the file up to date while the node serves, until dropped.
    pub async fn keep(self, is_ready: impl Fn() -> bool + Send) {
        loop {
            if is_ready() {
                let _writing = self.writing.lock().await;
                self.write().await;
            }
            tokio::time::sleep(if self.is_marked() { INTERVAL } else { UNTIL_READY }).await;
        }
    }
}
