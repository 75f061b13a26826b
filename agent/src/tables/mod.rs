//! Tables: state between observation and decision.
//!
//! A table is a snapshot behind a `watch` channel: readers see the latest rows and never queue. Each table has one
//! writer. Rows are ordered by key, so that plans made from them are deterministic, and shared between snapshots
//! ([`Rows`]): a change of one row among n costs O(log n), and so does finding it by the previous snapshot
//! ([`Rows::changes_from`]).

pub mod findings;
mod map;
pub mod notices;
pub mod rows;
mod waits;
mod watched;

pub use map::{Change, Changes, Iter, Rows};
pub use waits::Waits;
pub use watched::Watched;

use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// Progress of a table of API objects. Versions are compared as numbers, which etcd's are and Kubernetes guarantees
/// since 1.35; an invalid one counts as the oldest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Followed {
    /// Number of complete lists so far.
    lists: u64,
    /// The resource version up to which the rows are complete.
    version: u64,
}

impl Followed {
    /// Whether the rows reflect a write that the server answered with this resource version, and that started when the
    /// table was at `begun`. A later list is authoritative even if it is older than the write: the server was restored
    /// from a backup.
    #[must_use]
    pub fn reflects(self, version: Option<&str>, begun: Self) -> bool {
        self.lists != begun.lists || self.version >= number(version)
    }

    /// Whether there was no complete list since `then`.
    #[must_use]
    pub fn is_same_list(self, then: Self) -> bool {
        self.lists == then.lists
    }
}

fn number(version: Option<&str>) -> u64 {
    version.and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// The rows of a table at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot<K: Ord, V> {
    /// Incremented with every change of rows or of `synced`.
    pub revision: u64,
    /// False until the source of this table has been read completely once. Nothing is deleted because of a table that
    /// is not synced.
    pub synced: bool,
    /// For a table of API objects.
    pub followed: Followed,
    /// The rows.
    pub rows: Rows<K, V>,
}

impl<K: Ord, V> Default for Snapshot<K, V> {
    fn default() -> Self {
        Self { revision: 0, synced: false, followed: Followed::default(), rows: Rows::new() }
    }
}

impl<K: Ord, V> Snapshot<K, V> {
    /// The next snapshot.
    fn next(&self, synced: bool, rows: Rows<K, V>) -> Self {
        Self { revision: self.revision + 1, synced, followed: self.followed, rows }
    }
}

/// The writer of a table.
#[derive(Debug)]
pub struct Table<K: Ord, V> {
    name: &'static str,
    sender: watch::Sender<Arc<Snapshot<K, V>>>,
}

impl<K: Ord + Clone, V: Clone + PartialEq> Table<K, V> {
    /// An empty table that has not synced.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self { name, sender: watch::Sender::new(Arc::default()) }
    }

    /// The name, as printed and logged.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Replaces the rows and marks the table synced. Equal rows remain shared with the previous snapshot. Readers only
    /// wake if something changed. Returns whether it did.
    pub fn publish(&self, rows: BTreeMap<K, V>) -> bool {
        self.sender.send_if_modified(|current| {
            let mut next = current.rows.clone();
            next.replace(rows);
            if current.synced && next == current.rows {
                return false;
            }
            *current = Arc::new(current.next(true, next));
            true
        })
    }

    /// Replaces the rows by a complete list of resource version `version`. Always wakes readers: the list may lack what
    /// they wrote just before.
    pub fn publish_list(&self, rows: BTreeMap<K, V>, version: &str) {
        self.sender.send_modify(|current| {
            let followed = Followed { lists: current.followed.lists + 1, version: number(Some(version)) };
            let mut next = current.rows.clone();
            next.replace(rows);
            *current = Arc::new(Snapshot { followed, ..current.next(true, next) });
        });
    }

    /// Changes rows in place, by an event of resource version `version`. Readers only wake if rows changed.
    pub fn follow(&self, version: Option<&str>, change: impl FnOnce(&mut Rows<K, V>)) {
        self.sender.send_if_modified(|current| {
            let changed = changed(current, change);
            let snapshot = Arc::make_mut(current);
            snapshot.followed.version = snapshot.followed.version.max(number(version));
            changed
        });
    }

    /// Changes rows in place; snapshots of readers are not affected. Returns whether anything changed.
    pub fn modify(&self, change: impl FnOnce(&mut Rows<K, V>)) -> bool {
        self.sender.send_if_modified(|current| changed(current, change))
    }

    /// Marks the table synced.
    pub fn mark_synced(&self) {
        self.sender.send_if_modified(|current| {
            if current.synced {
                return false;
            }
            *current = Arc::new(current.next(true, current.rows.clone()));
            true
        });
    }

    /// A reader.
    #[must_use]
    pub fn reader(&self) -> Reader<K, V> {
        Reader { name: self.name, receiver: self.sender.subscribe() }
    }

    /// The current rows.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot<K, V>> {
        Arc::clone(&self.sender.borrow())
    }
}

/// Applies a change to the rows of `current`, if it makes a difference. Only the changed rows are compared.
fn changed<K: Ord + Clone, V: Clone + PartialEq>(
    current: &mut Arc<Snapshot<K, V>>,
    change: impl FnOnce(&mut Rows<K, V>),
) -> bool {
    let mut rows = current.rows.clone();
    change(&mut rows);
    if rows == current.rows {
        return false;
    }
    *current = Arc::new(current.next(current.synced, rows));
    true
}

/// A reader of a table.
#[derive(Debug)]
pub struct Reader<K: Ord, V> {
    name: &'static str,
    receiver: watch::Receiver<Arc<Snapshot<K, V>>>,
}

impl<K: Ord, V> Clone for Reader<K, V> {
    fn clone(&self) -> Self {
        Self { name: self.name, receiver: self.receiver.clone() }
    }
}

impl<K: Ord, V> Reader<K, V> {
    /// The name of the table.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The current rows, marked as seen.
    pub fn snapshot(&mut self) -> Arc<Snapshot<K, V>> {
        Arc::clone(&self.receiver.borrow_and_update())
    }

    /// The current rows, without marking them as seen.
    #[must_use]
    pub fn peek(&self) -> Arc<Snapshot<K, V>> {
        Arc::clone(&self.receiver.borrow())
    }

    /// Waits for rows that have not been seen yet. If the writer has been dropped this waits forever: the supervisor
    /// terminates the process when a writer ends.
    pub async fn changed(&mut self) {
        if self.receiver.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the table has synced.
    pub async fn synced(&mut self) -> Arc<Snapshot<K, V>>
    where
        K: Clone,
        V: Clone,
    {
        loop {
            let snapshot = self.snapshot();
            if snapshot.synced {
                return snapshot;
            }
            self.changed().await;
        }
    }
}
