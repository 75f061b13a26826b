//! A reader shared by concurrent operations.

use super::{Reader, Snapshot};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A [`Reader`] whose mark of seen rows is shared: several operations of one target read it concurrently.
#[derive(Debug)]
pub struct Watched<K: Ord, V>(Mutex<Reader<K, V>>);

impl<K: Ord, V> From<Reader<K, V>> for Watched<K, V> {
    fn from(reader: Reader<K, V>) -> Self {
        Self(Mutex::new(reader))
    }
}

impl<K: Ord, V> Watched<K, V> {
    fn lock(&self) -> MutexGuard<'_, Reader<K, V>> {
        // A panic cannot leave a reader in an inconsistent state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Reader::snapshot`].
    pub fn snapshot(&self) -> Arc<Snapshot<K, V>> {
        self.lock().snapshot()
    }

    /// See [`Reader::peek`].
    pub fn peek(&self) -> Arc<Snapshot<K, V>> {
        self.lock().peek()
    }

    /// Waits for rows that have not been seen yet, and marks them as seen. See [`Reader::changed`].
    pub async fn changed(&self) {
        let mut reader = self.lock().clone();
        reader.changed().await;
        self.lock().snapshot();
    }

    /// Waits until the table has synced, and marks its rows as seen. See [`Reader::synced`].
    pub async fn synced(&self) -> Arc<Snapshot<K, V>>
    where
        K: Clone,
        V: Clone,
    {
        let mut reader = self.lock().clone();
        reader.synced().await;
        // At least as new as the awaited rows.
        self.lock().snapshot()
    }
}
