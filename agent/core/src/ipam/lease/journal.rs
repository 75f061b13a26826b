//! Changes of the durable records, in the order in which they must be written.

use super::record::{Record, RecordKey};
use std::collections::BTreeSet;

/// A change of the durable records.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "most changes are `Put`, and each lives until it is written")]
pub enum Change {
    /// Store this record under its key.
    Put(Record),
    /// Forget what is stored under this key; forgetting the absent succeeds.
    Remove(RecordKey),
}

impl Change {
    /// The key of the record that it is about.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        match self {
            Self::Put(record) => record.key(),
            Self::Remove(key) => key.clone(),
        }
    }
}

/// Changes that the state machine has made and that are not on disk yet: those of a call, and what a disk that refused
/// (because it is full, say) still owes.
///
/// It never holds more than one change for what there is: a later one for the same key takes the place of the earlier.
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

    /// Writes what is owed, in its order. When the disk refuses a record, what is to be removed is removed all the same:
    /// a removal needs no space, and makes some, with which the records are tried once more. So a DEL works while the
    /// disk is full. All that a crash can lose by that order is the rest of an address between two pods, and what was
    /// never answered.
    ///
    /// # Errors
    /// The first refusal. What is not written stays owed.
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

    /// Whether nothing is owed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many changes are owed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The keys of what is owed.
    pub fn keys(&self) -> impl Iterator<Item = RecordKey> + '_ {
        self.0.iter().map(Change::key)
    }

    /// Whether what is on disk under this key is not as it should be.
    #[must_use]
    pub fn owes(&self, key: &RecordKey) -> bool {
        self.0.iter().any(|change| change.key() == *key)
    }
}

/// An answer, and what must be durable before it leaves.
///
/// Changes that could not be written stay owed ([`Owed`]), since this state machine has made them already.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the changes must be written before the answer leaves"]
pub struct Outcome<T> {
    /// What the caller is told.
    pub answer: T,
    /// To be written in this order.
    pub changes: Vec<Change>,
}
