//! The one loop that makes a target equal to a table.
//!
//! It is level-triggered: a change of the table is applied by the difference to what is known to be realised, a full
//! pass at start, every few minutes and whenever the target says that it changed compares with what the target really
//! holds. A full pass adds and updates first and deletes the surplus last, so that a restart opens no gap.

mod run;

pub use run::{Options, run};

use cistern_core::reconcile::Classify;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;

/// What the reconciler needs to know of a target: a kernel map, a set of routes, attached programs, API objects.
///
/// `update` is idempotent, `delete` of what is absent succeeds, and `observe` tells what the target really holds of
/// ours; what others put there is neither reported nor touched.
pub trait Operations: Send {
    /// Names a row.
    type Key: Ord + Clone + Debug + Send + Sync + 'static;
    /// What the row shall hold.
    type Value: Clone + PartialEq + Debug + Send + Sync + 'static;
    /// What can go wrong.
    type Error: std::error::Error + Classify + Send;

    /// Makes the target hold `value` under `key`.
    fn update(&mut self, key: &Self::Key, value: &Self::Value) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Makes the target hold nothing under `key`.
    fn delete(&mut self, key: &Self::Key) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Everything of ours that the target holds.
    fn observe(&mut self) -> impl Future<Output = Result<BTreeMap<Self::Key, Self::Value>, Self::Error>> + Send;

    /// Returns when the target may have been changed by somebody else; a full pass follows. Targets that cannot tell
    /// never return.
    fn changed(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// How far a row is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RowStatus {
    /// The last error; none while the first try is under way.
    pub error: String,
    /// Failed tries in a row.
    pub attempts: u32,
    /// When the next try is due; none for a permanent error, which waits for the next full pass.
    pub next_try: Option<jiff::Timestamp>,
}

/// What a reconciler tells about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Default)]
pub struct TargetStatus {
    /// A full pass has succeeded since the start.
    pub complete: bool,
    /// Rows as desired.
    pub done: usize,
    /// Rows that are not, by key as printed; the empty key stands for a full pass that could not read the target.
    pub failing: BTreeMap<String, RowStatus>,
}
