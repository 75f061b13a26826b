//! The loop that makes a target equal to a table.
//!
//! It is level-triggered: a change of the table is applied as a difference to the last known state. At startup, every
//! few minutes and whenever the target reports a change, a full pass compares with the target's actual state. A full
//! pass adds and updates first and deletes last, so that a restart causes no gap.
//!
//! Up to [`Options::concurrency`] keys are applied concurrently, with at most one operation per key. A row published
//! while the target is being read or a long list is being applied neither waits for that nor is reverted by it.
//!
//! To be certain, publish the desired row and wait on the [`Handle`] until it is realised: the reconciler is the only
//! writer of its target.

mod blocking;
mod handle;
mod kept;
mod run;
#[cfg(test)]
mod tests;

pub use blocking::{BlockingOperations, Offloaded};
pub use handle::{Handle, NotRealised};
pub use kept::{Kept, KeptError};
pub use run::run;

use crate::clock::Clock;
use crate::tables::{Reader, Table};
use cistern_core::reconcile::Classify;
use cistern_core::reconcile::backoff::Backoff;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Operations on a target: a set of API objects, or, by [`Offloaded`], a kernel map, routes, attached programs.
///
/// `update` is idempotent, `delete` of an absent row succeeds, and `observe` returns what the target has of ours;
/// foreign rows are neither returned nor changed. Operations on different keys may run concurrently.
pub trait Operations: Send + Sync {
    /// Key of a row.
    type Key: Ord + Clone + Debug + Send + Sync + 'static;
    /// Desired content of a row.
    type Value: Clone + PartialEq + Debug + Send + Sync + 'static;
    /// Error of an operation.
    type Error: std::error::Error + Classify + Send + 'static;

    /// Sets `value` for `key`.
    fn update(&self, key: &Self::Key, value: &Self::Value) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Removes `key`.
    fn delete(&self, key: &Self::Key) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// All entries of ours in the target.
    fn observe(&self) -> impl Future<Output = Result<BTreeMap<Self::Key, Self::Value>, Self::Error>> + Send;

    /// Returns if the target may have changed without an operation of ours; a full pass follows. Targets that cannot
    /// detect this never return. Dropping the future does not lose a change.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// Options of a reconciler.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name of the target, for logs and status.
    pub name: &'static str,
    /// Interval of full passes.
    pub full_pass: Duration,
    /// Delays after failures.
    pub backoff: Backoff,
    /// Whether a full pass deletes surplus entries. Otherwise only rows removed from the table are deleted.
    pub prune: bool,
    /// Maximum number of keys applied concurrently.
    pub concurrency: NonZeroUsize,
}

/// One operation at a time.
pub const SERIAL: NonZeroUsize = NonZeroUsize::MIN;

/// Calls of the API server: enough that 5,000 objects do not wait for each other's round trips, few enough that one client
/// stays within its share of the server (`max-requests-inflight`, priority and fairness).
pub const API_CALLS: NonZeroUsize = SERIAL.saturating_add(15);

/// Inputs of a reconciler.
pub struct Reconcile<K: Ord, V> {
    /// Options.
    pub options: Options,
    /// The table to follow.
    pub desired: Reader<K, V>,
    /// Output: its status.
    pub published: Arc<Table<String, TargetStatus>>,
    /// Time.
    pub clock: Clock,
    /// Cancellation.
    pub cancel: CancellationToken,
    requests: handle::Requests<K, V>,
    handle: Handle<K, V>,
}

impl<K: Ord, V> Reconcile<K, V> {
    /// Follows `desired`.
    #[must_use]
    pub fn new(
        options: Options,
        desired: Reader<K, V>,
        published: Arc<Table<String, TargetStatus>>,
        clock: Clock,
        cancel: CancellationToken,
    ) -> Self {
        let (handle, requests) = handle::new(options.name, desired.clone());
        Self { options, desired, published, clock, cancel, requests, handle }
    }

    /// The handle for waiting until a row is realised.
    #[must_use]
    pub fn handle(&self) -> Handle<K, V> {
        self.handle.clone()
    }
}

/// State of a row that is not realised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowStatus {
    /// The last error.
    pub error: String,
    /// Consecutive failures.
    pub attempts: u32,
    /// Time of the next retry; `None` for a permanent error, which waits for the next full pass.
    pub next_try: Option<jiff::Timestamp>,
}

/// State of a reconciler.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TargetStatus {
    /// A full pass has succeeded since startup.
    pub complete: bool,
    /// Number of rows in sync.
    pub done: usize,
    /// Failed rows, by key as printed; the empty key stands for a full pass that could not read the target.
    pub failing: Arc<BTreeMap<String, RowStatus>>,
}
