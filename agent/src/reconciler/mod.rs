//! The one loop that makes a target equal to a table.
//!
//! It is level-triggered: a change of the table is applied by the difference to what is known to be realised; a full pass at
//! start, every few minutes and whenever the target reports a change compares with what the target really holds. A full pass
//! adds and updates first and deletes the surplus last, so that a restart opens no gap.
//!
//! Up to [`Options::concurrency`] keys are applied at a time, and never two operations on one key. A row that is published
//! while a target is read or a long list is applied does not wait for the end of that, and is not undone by it.
//!
//! Whoever needs certainty publishes the desired row and waits on the [`Handle`] until it is realised: the reconciler stays
//! the one writer of its target.

mod blocking;
mod handle;
mod run;
#[cfg(test)]
mod tests;

pub use blocking::{BlockingOperations, Offloaded};
pub use handle::{Handle, NotRealised};
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

/// What the reconciler needs to know of a target: a set of API objects, or, by [`Offloaded`], a kernel map, routes,
/// attached programs.
///
/// `update` is idempotent, `delete` of an absent row succeeds, and `observe` returns what the target really holds of ours;
/// rows of others are neither reported nor touched. Operations on different keys may run at the same time.
pub trait Operations: Send + Sync {
    /// Names a row.
    type Key: Ord + Clone + Debug + Send + Sync + 'static;
    /// What the row shall hold.
    type Value: Clone + PartialEq + Debug + Send + Sync + 'static;
    /// What can go wrong.
    type Error: std::error::Error + Classify + Send + 'static;

    /// Makes the target hold `value` under `key`.
    fn update(&self, key: &Self::Key, value: &Self::Value) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Makes the target hold nothing under `key`.
    fn delete(&self, key: &Self::Key) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Everything of ours that the target holds.
    fn observe(&self) -> impl Future<Output = Result<BTreeMap<Self::Key, Self::Value>, Self::Error>> + Send;

    /// Returns when the target may have changed without an operation of ours; a full pass follows. Targets that cannot know
    /// never return. Dropping it before it returns loses no change.
    fn changed(&self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// How a reconciler works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name of the target, for logs and status.
    pub name: &'static str,
    /// Time between full passes.
    pub full_pass: Duration,
    /// Delays after failures.
    pub backoff: Backoff,
    /// Surplus that a full pass finds is deleted. Without it only rows that left the table are.
    pub prune: bool,
    /// How many keys are applied at a time.
    pub concurrency: NonZeroUsize,
}

/// One operation at a time.
pub const SERIAL: NonZeroUsize = NonZeroUsize::MIN;

/// Calls of the API server: enough that 5,000 objects do not wait for each other's round trips, few enough that one client
/// stays within its share of the server (`max-requests-inflight`, priority and fairness).
pub const API_CALLS: NonZeroUsize = SERIAL.saturating_add(15);

/// What a reconciler runs with.
pub struct Reconcile<K: Ord, V> {
    /// How it works.
    pub options: Options,
    /// The table to follow.
    pub desired: Reader<K, V>,
    /// Where it reports its state.
    pub published: Arc<Table<String, TargetStatus>>,
    /// Time.
    pub clock: Clock,
    /// When to end.
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

    /// The handle by which others wait until a row is realised.
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
    /// Failed tries in a row.
    pub attempts: u32,
    /// When the next try is due; none for a permanent error, which waits for the next full pass.
    pub next_try: Option<jiff::Timestamp>,
}

/// What a reconciler reports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TargetStatus {
    /// A full pass has succeeded since the start.
    pub complete: bool,
    /// Rows as desired.
    pub done: usize,
    /// Rows that are not, by key as printed; the empty key stands for a full pass that could not read the target.
    pub failing: Arc<BTreeMap<String, RowStatus>>,
}
