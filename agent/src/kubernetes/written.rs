//! Reading one's own writes: what was written is taken for what is there until the watch has caught up.

use crate::tables::{Followed, Snapshot};
use kube::ResourceExt;

/// A value that was written.
#[derive(Debug)]
pub(super) struct Written<V> {
    /// How far the table had followed the server when the write began.
    begun: Followed,
    /// The resource version that the server answered with.
    version: Option<String>,
    /// What was written.
    pub(super) value: V,
}

impl<V> Written<V> {
    /// The server answered a write of `value` with `object`.
    pub(super) fn new(begun: Followed, object: &impl ResourceExt, value: V) -> Self {
        Self { begun, version: object.resource_version(), value }
    }

    /// Whether these rows may be older than what was written.
    pub(super) fn is_newer_than<K: Ord, R>(&self, snapshot: &Snapshot<K, R>) -> bool {
        !snapshot.followed.tells(self.version.as_deref(), self.begun)
    }
}
