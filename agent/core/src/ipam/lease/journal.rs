//! Changes of the durable records, in the order in which they must be written.

use super::record::{Record, RecordKey};
use std::collections::BTreeSet;

/// A change of the durable records.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "most changes are `Put`, and each lives until it is written")]
pub enum Change {
    /// Stores this record under its key.
    Put(Record),
    /// Removes the record of this key; succeeds if there is none.
    Remove(RecordKey),
}

impl Change {
    /// The key of the changed record.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        match self {
            Self::Put(record) => record.key(),
            Self::Remove(key) => key.clone(),
        }
    }
}

/// Changes of the state machine that are not on disk yet: those of the current call, and those that failed before
/// (because the disk was full, for example).
///
/// There is at most one change per key: a later one replaces an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owed(Vec<Change>);

impl Owed {
    /// Adds the changes of a call.
    pub fn extend(&mut self, changes: Vec<Change>) {
        if !self.0.is_empty() {
            let keys: BTreeSet<RecordKey> = changes.iter().map(Change::key).collect();
            self.0.retain(|owed| !keys.contains(&owed.key()));
        }
        self.0.extend(changes);
    }

    /// Writes the pending changes in order. If the disk refuses a record, removals are still executed: they need no
    /// space, and free some, with which the records are tried once more. A DEL therefore works on a full disk. A crash
    /// in between can only lose the quarantine of an address and changes that were not answered.
    ///
    /// # Errors
    /// The first error. What is not written stays pending.
    pub fn write<E>(&mut self, mut write: impl FnMut(&Change) -> Result<(), E>) -> Result<(), E> {
        loop {
            let (mut refused, mut removed) = (None, false);
            for change in std::mem::take(&mut self.0) {
                if refused.is_some() && matches!(change, Change::Put(_)) {
                    self.0.push(change);
                    continue;
                }
                match write(&change) {
                    Ok(()) if refused.is_some() => {
                        removed = true;
                        let key = change.key();
                        self.0.retain(|owed| owed.key() != key);
                    }
                    Ok(()) => {}
                    Err(error) => {
                        refused.get_or_insert(error);
                        self.0.push(change);
                    }
                }
            }
            match refused {
                None => return Ok(()),
                Some(error) if !removed => return Err(error),
                Some(_) => {}
            }
        }
    }

    /// Whether nothing is pending.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of pending changes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The keys of what is owed.
    pub fn keys(&self) -> impl Iterator<Item = RecordKey> + '_ {
        self.0.iter().map(Change::key)
    }

    /// Whether the record on disk of this key is outdated.
    #[must_use]
    pub fn owes(&self, key: &RecordKey) -> bool {
        self.0.iter().any(|change| change.key() == *key)
    }
}

/// An answer, and the changes that must be durable before it is sent.
///
/// Changes that could not be written stay pending ([`Owed`]), because the state machine has executed them already.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the changes must be written before the answer leaves"]
pub struct Outcome<T> {
    /// The answer to the caller.
    pub answer: T,
    /// To be written in this order.
    pub changes: Vec<Change>,
}
