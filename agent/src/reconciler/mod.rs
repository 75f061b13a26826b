//! The one loop that makes a target equal to a table.

use cistern_core::reconcile::Classify;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;

/// What the reconciler needs to know of a target: a kernel map, a set of routes, attached programs.
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
}
