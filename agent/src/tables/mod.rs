//! Tables: what is remembered between observing and deciding.
//!
//! A table is a snapshot behind a `watch` channel: readers see the latest rows and never queue. Each table has one
//! writer. Rows are ordered by key, so that plans made from them are deterministic, and shared between snapshots
//! ([`Rows`]): a change of one row among n costs O(log n), and so does finding it by the snapshot before
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

/// How far a table of API objects has followed the server. Versions are compared as numbers, which etcd's are and which
/// Kubernetes has promised since 1.35; one that is none counts as the oldest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Followed {
    /// Whole lists so far.
    lists: u64,
    /// The rows tell everything up to this resource version.
    version: u64,
}

impl Followed {
    /// Whether the rows tell of a write that the server has answered with this resource version, and that began when the
    /// table stood at `begun`. A list that came since tells what there is, even where it is older than the write: the
    /// server was restored from a backup then.
    #[must_use]
    pub fn tells(self, version: Option<&str>, begun: Self) -> bool {
        self.lists != begun.lists || self.version >= number(version)
    }

    /// Whether no whole list came since the table stood at `then`.
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
    /// Grows by one at each change of rows or of `synced`.
    pub revision: u64,
    /// False until the source of this table has been read whole once. Nothing is deleted on the word of a table
    /// that has not synced.
    pub synced: bool,
    /// Of a table of API objects.
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
    /// What follows on this one.
    fn next(&self, synced: bool, rows: Rows<K, V>) -> Self {
        Self { revision: self.revision + 1, synced, followed: self.followed, rows }
    }
}

/// The writing end of a table.
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

    /// Replaces the rows and marks the table synced. Rows that stay equal stay shared with the snapshot before. Readers
    /// wake only when something changed. Returns whether it did.
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

    /// Replaces the rows by a whole list of resource version `version`. Readers wake in any case: what they wrote a
    /// moment ago may be what the list lacks.
    pub fn publish_list(&self, rows: BTreeMap<K, V>, version: &str) {
        self.sender.send_modify(|current| {
            let followed = Followed { lists: current.followed.lists + 1, version: number(Some(version)) };
            let mut next = current.rows.clone();
            next.replace(rows);
            *current = Arc::new(Snapshot { followed, ..current.next(true, next) });
        });
    }

    /// Changes rows in place, by what the server tells up to resource version `version`. Readers wake only when rows
    /// changed.
    pub fn follow(&self, version: Option<&str>, change: impl FnOnce(&mut Rows<K, V>)) {
        self.sender.send_if_modified(|current| {
            let changed = changed(current, change);
            let snapshot = Arc::make_mut(current);
            snapshot.followed.version = snapshot.followed.version.max(number(version));
            changed
        });
    }

    /// Changes rows in place; snapshots that readers hold stay as they are. Returns whether anything changed.
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

    /// A reading end.
    #[must_use]
    pub fn reader(&self) -> Reader<K, V> {
        Reader { name: self.name, receiver: self.sender.subscribe() }
    }

    /// The rows now.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot<K, V>> {
        Arc::clone(&self.sender.borrow())
    }
}

/// Makes `current` what a change of its rows makes of it, if it makes a difference. Only what the change touched is
/// compared.
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

/// A reading end of a table.
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

    /// The rows now, marked as seen.
    pub fn snapshot(&mut self) -> Arc<Snapshot<K, V>> {
        Arc::clone(&self.receiver.borrow_and_update())
    }

    /// The rows now, without marking them as seen.
    #[must_use]
    pub fn peek(&self) -> Arc<Snapshot<K, V>> {
        Arc::clone(&self.receiver.borrow())
    }

    /// Waits for rows that were not seen yet. When the writer has gone nothing will change any more, and this
    /// waits for ever: the supervisor ends the process when a writer ends.
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
