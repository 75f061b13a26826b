//! Read-your-writes: a written value counts as current until the watch has caught up.

use crate::tables::{Followed, Snapshot};
use kube::ResourceExt;

/// A written value.
#[derive(Debug)]
pub(super) struct Written<V> {
    /// Progress of the table when the write started.
    begun: Followed,
    /// The resource version in the server's answer.
    version: Option<String>,
    /// The value.
    pub(super) value: V,
}

impl<V> Written<V> {
    /// Records that the server answered a write of `value` with `object`.
    pub(super) fn new(begun: Followed, object: &impl ResourceExt, value: V) -> Self {
        Self { begun, version: object.resource_version(), value }
    }

    /// Whether these rows may be older than the write.
    pub(super) fn is_newer_than<K: Ord, R>(&self, snapshot: &Snapshot<K, R>) -> bool {
        !snapshot.followed.reflects(self.version.as_deref(), self.begun)
    }
}
