//! The objects and the history of their changes, under one revision counter, as in etcd.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::Value;

use super::error::{ApiError, ApiResult};
use super::resource::Storage;
use super::tree;

/// The key of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) storage: Storage,
    /// Empty for cluster-scoped objects.
    pub(super) namespace: String,
    pub(super) name: String,
}

/// One write.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) revision: u64,
    pub(super) key: Key,
    /// The object before; `None` if the write created it.
    pub(super) before: Option<Arc<Value>>,
    /// The object after; for a deletion, its last form with the revision of the deletion.
    pub(super) after: Arc<Value>,
    pub(super) deleted: bool,
}

/// Objects by key, the current revision, and the changes since the last compaction.
#[derive(Clone)]
pub(super) struct Store {
    revision: u64,
    compacted: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    changes: VecDeque<Change>,
    keep: usize,
}

impl Store {
    /// An empty store that keeps the last `keep` changes for watches and continued lists.
    pub(super) fn new(keep: usize) -> Self {
        Self { revision: 1, compacted: 0, objects: BTreeMap::new(), changes: VecDeque::new(), keep }
    }

    /// The revision of the latest write.
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    /// Skips this many revisions, as if other clients had written.
    pub(super) fn skip(&mut self, count: u64) {
        self.revision += count;
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// Writes an object with the new revision and returns it.
    pub(super) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        self.revision += 1;
        stamp(&mut object, self.revision);
        let after = Arc::new(object);
        let before = self.objects.insert(key.clone(), Arc::clone(&after));
        self.log(Change { revision: self.revision, key, before, after: Arc::clone(&after), deleted: false });
        after
    }

    /// Deletes an object and returns its last form with the revision of the deletion.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        self.revision += 1;
        let mut object = Value::clone(&before);
        stamp(&mut object, self.revision);
        let after = Arc::new(object);
        self.log(Change {
            revision: self.revision,
            key: key.clone(),
            before: Some(before),
            after: Arc::clone(&after),
            deleted: true,
        });
        Some(after)
    }

    fn log(&mut self, change: Change) {
        self.changes.push_back(change);
        while self.changes.len() > self.keep {
            if let Some(oldest) = self.changes.pop_front() {
                self.compacted = oldest.revision;
            }
        }
    }

    /// Compacts the history: watches and continued lists from before now get 410.
    pub(super) fn compact(&mut self) {
        self.changes.clear();
        self.compacted = self.revision;
    }

    /// All objects.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.objects.iter()
    }

    /// The objects of a resource, ordered by namespace and name.
    pub(super) fn list<'a>(
        &'a self,
        storage: &'a Storage,
        namespace: Option<&'a str>,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let first =
            Key { storage: storage.clone(), namespace: namespace.unwrap_or_default().to_owned(), name: String::new() };
        self.objects.range(first..).take_while(move |(key, _)| {
            key.storage == *storage && namespace.is_none_or(|wanted| key.namespace == wanted)
        })
    }

    /// The objects of a resource at a revision.
    ///
    /// # Errors
    /// 410 if the history does not reach back that far.
    pub(super) fn list_at(
        &self,
        storage: &Storage,
        namespace: Option<&str>,
        revision: u64,
    ) -> ApiResult<BTreeMap<Key, Arc<Value>>> {
        if revision < self.compacted {
            return Err(ApiError::expired(revision, self.compacted));
        }
        let mut objects: BTreeMap<Key, Arc<Value>> =
            self.list(storage, namespace).map(|(key, object)| (key.clone(), Arc::clone(object))).collect();
        let covers = |key: &Key| key.storage == *storage && namespace.is_none_or(|wanted| key.namespace == wanted);
        for change in self.changes.iter().rev().take_while(|change| change.revision > revision) {
            if !covers(&change.key) {
                continue;
            }
            match &change.before {
                Some(before) => objects.insert(change.key.clone(), Arc::clone(before)),
                None => objects.remove(&change.key),
            };
        }
        Ok(objects)
    }

    /// The changes after a revision, oldest first.
    ///
    /// # Errors
    /// 410 if some of them have been compacted.
    pub(super) fn changes_after(&self, revision: u64) -> ApiResult<impl Iterator<Item = &Change>> {
        if revision < self.compacted {
            return Err(ApiError::expired(revision, self.compacted));
        }
        let start = self.changes.partition_point(|change| change.revision <= revision);
        Ok(self.changes.range(start..))
    }

    /// The recorded versions of an object, oldest first; `None` for a deletion.
    pub(super) fn history<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = Option<&'a Value>> {
        let changes = self.changes.iter().filter(move |change| change.key == *key);
        changes.map(|change| (!change.deleted).then_some(&*change.after))
    }
}

fn stamp(object: &mut Value, revision: u64) {
    tree::metadata_mut(object).insert("resourceVersion".to_owned(), Value::String(revision.to_string()));
}
