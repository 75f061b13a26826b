//! The rows of a table: an ordered map that is cheap to copy and cheap to compare with an earlier copy of itself.
//!
//! A height-balanced tree whose nodes are shared between copies. A copy is one reference count, a change copies the
//! O(log n) nodes on its path, and [`Rows::changes_from`] skips every subtree that two copies share: after `d` changes it
//! costs O(d log n), not O(n). The persistent maps of crates.io under a licence of `deny.toml` (`rpds`,
//! `immutable-chunkmap`) keep their nodes private, so that two versions can only be compared row by row.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

/// An ordered, persistent map.
pub struct Rows<K, V> {
    root: Link<K, V>,
}

type Link<K, V> = Option<Arc<Node<K, V>>>;

struct Node<K, V> {
    /// Shared separately: copying a node copies neither key nor value.
    row: Arc<(K, V)>,
    left: Link<K, V>,
    right: Link<K, V>,
    height: u8,
    len: usize,
}

impl<K, V> Clone for Node<K, V> {
    fn clone(&self) -> Self {
        Self {
            row: Arc::clone(&self.row),
            left: self.left.clone(),
            right: self.right.clone(),
            height: self.height,
            len: self.len,
        }
    }
}

impl<K, V> Clone for Rows<K, V> {
    fn clone(&self) -> Self {
        Self { root: self.root.clone() }
    }
}

impl<K, V> Default for Rows<K, V> {
    fn default() -> Self {
        Self { root: None }
    }
}

impl<K, V> Rows<K, V> {
    /// A map without rows.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        len(&self.root)
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// The rows by key.
    #[must_use]
    pub fn iter(&self) -> Iter<'_, K, V> {
        Iter { todo: self.root.iter().map(Part::Tree).collect() }
    }

    /// The keys in order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// The values, ordered by key.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }
}

impl<K: Ord, V> Rows<K, V> {
    /// The value under a key.
    #[must_use]
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        let mut link = &self.root;
        while let Some(node) = link {
            link = match key.cmp(node.row.0.borrow()) {
                Ordering::Less => &node.left,
                Ordering::Greater => &node.right,
                Ordering::Equal => return Some(&node.row.1),
            };
        }
        None
    }

    /// Whether there is a row under a key.
    #[must_use]
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.get(key).is_some()
    }

    /// The rows whose keys are within bounds, by key. The first one costs O(log n).
    pub fn range<'a, Q: Ord + ?Sized, R: RangeBounds<Q> + 'a>(
        &'a self,
        range: R,
    ) -> impl Iterator<Item = (&'a K, &'a V)>
    where
        K: Borrow<Q>,
    {
        let mut todo = Vec::new();
        let mut link = &self.root;
        while let Some(node) = link {
            let key = node.row.0.borrow();
            let too_low = match range.start_bound() {
                Bound::Included(start) => key < start,
                Bound::Excluded(start) => key <= start,
                Bound::Unbounded => false,
            };
            link = if too_low {
                &node.right
            } else {
                todo.extend(node.right.iter().map(Part::Tree));
                todo.push(Part::Row(&node.row));
                &node.left
            };
        }
        Iter { todo }.take_while(move |(key, _)| match range.end_bound() {
            Bound::Included(end) => (*key).borrow() <= end,
            Bound::Excluded(end) => (*key).borrow() < end,
            Bound::Unbounded => true,
        })
    }

    /// What changed since `before`, by key. Where `before` is an earlier copy of this map, only the changed rows and the
    /// paths to them are visited.
    #[must_use]
    pub fn changes_from<'a>(&'a self, before: &'a Self) -> Changes<'a, K, V> {
        Changes { before: before.iter().todo, after: self.iter().todo }
    }

    /// Puts a value under a key.
    pub fn insert(&mut self, key: K, value: V) {
        insert(&mut self.root, Arc::new((key, value)));
    }

    /// Removes the row under a key and returns its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        V: Clone,
    {
        // An absent key must not unshare its path.
        self.get(key)?;
        let row = remove(&mut self.root, key)?;
        Some(match Arc::try_unwrap(row) {
            Ok((_, value)) => value,
            Err(shared) => shared.1.clone(),
        })
    }

    /// The value under a key, for modification.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q> + Clone,
        V: Clone,
    {
        self.get(key)?;
        let mut link = &mut self.root;
        loop {
            let node = Arc::make_mut(link.as_mut()?);
            link = match key.cmp(node.row.0.borrow()) {
                Ordering::Less => &mut node.left,
                Ordering::Greater => &mut node.right,
                Ordering::Equal => return Some(&mut Arc::make_mut(&mut node.row).1),
            };
        }
    }

    /// Removes the rows for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        let before = self.clone();
        for (key, value) in &before {
            if !keep(key, value) {
                remove(&mut self.root, key);
            }
        }
    }

    /// Makes this map equal to `desired`. Equal rows are kept, including all sharing with earlier copies.
    pub fn replace(&mut self, desired: BTreeMap<K, V>)
    where
        V: PartialEq,
    {
        if self.is_empty() {
            *self = Self::from(desired);
            return;
        }
        let before = self.clone();
        let mut held = before.iter().peekable();
        for (key, value) in desired {
            while let Some((gone, _)) = held.next_if(|(held, _)| **held < key) {
                remove(&mut self.root, gone);
            }
            if held.next_if(|(held, _)| **held == key).is_none_or(|(_, held)| *held != value) {
                self.insert(key, value);
            }
        }
        for (gone, _) in held {
            remove(&mut self.root, gone);
        }
    }

    /// The same rows as a standard map.
    #[must_use]
    pub fn to_map(&self) -> BTreeMap<K, V>
    where
        K: Clone,
        V: Clone,
    {
        self.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }
}

fn len<K, V>(link: &Link<K, V>) -> usize {
    link.as_ref().map_or(0, |node| node.len)
}

fn height<K, V>(link: &Link<K, V>) -> u8 {
    link.as_ref().map_or(0, |node| node.height)
}

impl<K, V> Node<K, V> {
    fn new(row: Arc<(K, V)>, left: Link<K, V>, right: Link<K, V>) -> Arc<Self> {
        let mut node = Self { row, left, right, height: 0, len: 0 };
        node.measure();
        Arc::new(node)
    }

    fn measure(&mut self) {
        self.height = 1 + height(&self.left).max(height(&self.right));
        self.len = 1 + len(&self.left) + len(&self.right);
    }
}

/// Rebalances a node. Its sides are balanced, and their heights differ by two at most.
fn balance<K, V>(link: &mut Link<K, V>) {
    let Some(node) = link.as_mut().map(Arc::make_mut) else { return };
    let (left, right) = (height(&node.left), height(&node.right));
    if left > right + 1 {
        if node.left.as_ref().is_some_and(|side| height(&side.right) > height(&side.left)) {
            rotate_left(&mut node.left);
        }
        rotate_right(link);
    } else if right > left + 1 {
        if node.right.as_ref().is_some_and(|side| height(&side.left) > height(&side.right)) {
            rotate_right(&mut node.right);
        }
        rotate_left(link);
    } else {
        node.measure();
    }
}

/// Rotation: the left child becomes the parent.
fn rotate_right<K, V>(link: &mut Link<K, V>) {
    let Some(mut parent) = link.take() else { return };
    let node = Arc::make_mut(&mut parent);
    if let Some(mut child) = node.left.take() {
        let top = Arc::make_mut(&mut child);
        node.left = top.right.take();
        node.measure();
        top.right = Some(parent);
        top.measure();
        *link = Some(child);
    } else {
        *link = Some(parent);
    }
}

/// Rotation: the right child becomes the parent.
fn rotate_left<K, V>(link: &mut Link<K, V>) {
    let Some(mut parent) = link.take() else { return };
    let node = Arc::make_mut(&mut parent);
    if let Some(mut child) = node.right.take() {
        let top = Arc::make_mut(&mut child);
        node.right = top.left.take();
        node.measure();
        top.left = Some(parent);
        top.measure();
        *link = Some(child);
    } else {
        *link = Some(parent);
    }
}

fn insert<K: Ord, V>(link: &mut Link<K, V>, row: Arc<(K, V)>) {
    let Some(node) = link.as_mut().map(Arc::make_mut) else {
        *link = Some(Node::new(row, None, None));
        return;
    };
    match row.0.cmp(&node.row.0) {
        Ordering::Less => insert(&mut node.left, row),
        Ordering::Greater => insert(&mut node.right, row),
        Ordering::Equal => {
            node.row = row;
            return;
        }
    }
    balance(link);
}

fn remove<K: Ord + Borrow<Q>, V, Q: Ord + ?Sized>(link: &mut Link<K, V>, key: &Q) -> Option<Arc<(K, V)>> {
    let node = Arc::make_mut(link.as_mut()?);
    let removed = match key.cmp(node.row.0.borrow()) {
        Ordering::Less => remove(&mut node.left, key),
        Ordering::Greater => remove(&mut node.right, key),
        Ordering::Equal => {
            let removed = Arc::clone(&node.row);
            match remove_first(&mut node.right) {
                Some(next) => node.row = next,
                None => *link = node.left.take(),
            }
            Some(removed)
        }
    };
    balance(link);
    removed
}

fn remove_first<K, V>(link: &mut Link<K, V>) -> Option<Arc<(K, V)>> {
    let node = Arc::make_mut(link.as_mut()?);
    if node.left.is_none() {
        let first = Arc::clone(&node.row);
        *link = node.right.take();
        return Some(first);
    }
    let first = remove_first(&mut node.left);
    balance(link);
    first
}

/// A balanced tree of the next `len` rows, which come in order.
fn build<K, V>(rows: &mut impl Iterator<Item = (K, V)>, len: usize) -> Link<K, V> {
    if len == 0 {
        return None;
    }
    let left = build(rows, len / 2);
    let row = rows.next()?;
    let right = build(rows, len - len / 2 - 1);
    Some(Node::new(Arc::new(row), left, right))
}

/// The nodes that an iteration has yet to visit.
enum Part<'a, K, V> {
    Tree(&'a Arc<Node<K, V>>),
    Row(&'a Arc<(K, V)>),
}

/// Expands the subtree on top of the stack: left side, row, right side.
fn expand<K, V>(todo: &mut Vec<Part<'_, K, V>>) {
    if let Some(Part::Tree(node)) = todo.pop() {
        todo.extend(node.right.iter().map(Part::Tree));
        todo.push(Part::Row(&node.row));
        todo.extend(node.left.iter().map(Part::Tree));
    }
}

/// Rows by key.
pub struct Iter<'a, K, V> {
    /// The next one is on top.
    todo: Vec<Part<'a, K, V>>,
}

impl<'a, K, V> Iterator for Iter<'a, K, V> {
    type Item = (&'a K, &'a V);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(Part::Tree(_)) = self.todo.last() {
            expand(&mut self.todo);
        }
        match self.todo.pop()? {
            Part::Row(row) => Some((&row.0, &row.1)),
            Part::Tree(_) => None,
        }
    }
}

/// A row that differs between two maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change<'a, K, V> {
    /// Its key.
    pub key: &'a K,
    /// Its value before; `None` if it was added.
    pub before: Option<&'a V>,
    /// Its value now; `None` if it was removed.
    pub after: Option<&'a V>,
}

/// The rows that differ between two maps, by key.
pub struct Changes<'a, K, V> {
    before: Vec<Part<'a, K, V>>,
    after: Vec<Part<'a, K, V>>,
}

impl<'a, K: Ord, V: PartialEq> Iterator for Changes<'a, K, V> {
    type Item = Change<'a, K, V>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match (self.before.last(), self.after.last()) {
                (Some(Part::Tree(before)), Some(Part::Tree(after))) => {
                    if Arc::ptr_eq(before, after) {
                        self.before.pop();
                        self.after.pop();
                    } else if before.height >= after.height {
                        // A shared subtree has the same height in both: the taller one may contain it, the other
                        // cannot.
                        expand(&mut self.before);
                    } else {
                        expand(&mut self.after);
                    }
                }
                (Some(Part::Tree(_)), _) => expand(&mut self.before),
                (_, Some(Part::Tree(_))) => expand(&mut self.after),
                (Some(&Part::Row(before)), Some(&Part::Row(after))) => match before.0.cmp(&after.0) {
                    Ordering::Less => return self.removed(before),
                    Ordering::Greater => return self.added(after),
                    Ordering::Equal => {
                        self.before.pop();
                        self.after.pop();
                        if !Arc::ptr_eq(before, after) && before.1 != after.1 {
                            return Some(Change { key: &after.0, before: Some(&before.1), after: Some(&after.1) });
                        }
                    }
                },
                (Some(&Part::Row(before)), None) => return self.removed(before),
                (None, Some(&Part::Row(after))) => return self.added(after),
                (None, None) => return None,
            }
        }
    }
}

impl<'a, K, V> Changes<'a, K, V> {
    fn removed(&mut self, row: &'a Arc<(K, V)>) -> Option<Change<'a, K, V>> {
        self.before.pop();
        Some(Change { key: &row.0, before: Some(&row.1), after: None })
    }

    fn added(&mut self, row: &'a Arc<(K, V)>) -> Option<Change<'a, K, V>> {
        self.after.pop();
        Some(Change { key: &row.0, before: None, after: Some(&row.1) })
    }
}

impl<'a, K, V> IntoIterator for &'a Rows<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Iter<'a, K, V> {
        self.iter()
    }
}

impl<K: Ord, V> From<BTreeMap<K, V>> for Rows<K, V> {
    fn from(map: BTreeMap<K, V>) -> Self {
        let len = map.len();
        Self { root: build(&mut map.into_iter(), len) }
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for Rows<K, V> {
    fn from(rows: [(K, V); N]) -> Self {
        BTreeMap::from(rows).into()
    }
}

impl<K: Ord, V> FromIterator<(K, V)> for Rows<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(rows: I) -> Self {
        BTreeMap::from_iter(rows).into()
    }
}

impl<K: Ord, V> Extend<(K, V)> for Rows<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, rows: I) {
        for (key, value) in rows {
            self.insert(key, value);
        }
    }
}

impl<K: Ord, V: PartialEq> PartialEq for Rows<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.changes_from(other).next().is_none()
    }
}

impl<K: Ord, V: Eq> Eq for Rows<K, V> {}

impl<K: Ord, V: PartialEq> PartialEq<BTreeMap<K, V>> for Rows<K, V> {
    fn eq(&self, other: &BTreeMap<K, V>) -> bool {
        self.len() == other.len() && self.iter().eq(other)
    }
}

impl<K: Debug, V: Debug> Debug for Rows<K, V> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self).finish()
    }
}

impl<K: Serialize, V: Serialize> Serialize for Rows<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self)
    }
}

impl<'de, K: Deserialize<'de> + Ord, V: Deserialize<'de>> Deserialize<'de> for Rows<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        BTreeMap::deserialize(deserializer).map(Self::from)
    }
}

/// In tests only: product code does not panic because of an absent row.
#[cfg(test)]
impl<K: Ord + Borrow<Q>, V, Q: Ord + ?Sized> std::ops::Index<&Q> for Rows<K, V> {
    type Output = V;

    fn index(&self, key: &Q) -> &V {
        self.get(key).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    #[derive(Debug, Clone)]
    enum Edit {
        Insert(u8, u8),
        Remove(u8),
        Change(u8, u8),
        Retain(u8),
        Replace(BTreeMap<u8, u8>),
        Copy,
    }

    fn edit() -> impl Strategy<Value = Edit> {
        prop_oneof![
            8 => (any::<u8>(), 0_u8..4).prop_map(|(key, value)| Edit::Insert(key, value)),
            6 => any::<u8>().prop_map(Edit::Remove),
            3 => (any::<u8>(), 0_u8..4).prop_map(|(key, value)| Edit::Change(key, value)),
            1 => (2_u8..6).prop_map(Edit::Retain),
            1 => proptest::collection::btree_map(any::<u8>(), 0_u8..4, 0..60).prop_map(Edit::Replace),
            3 => Just(Edit::Copy),
        ]
    }

    /// Ordered, balanced, and with correct heights and lengths.
    fn check<K: Ord, V>(link: &Link<K, V>) -> (u8, usize) {
        let Some(node) = link else { return (0, 0) };
        let ((left, before), (right, after)) = (check(&node.left), check(&node.right));
        assert!(left.abs_diff(right) <= 1);
        assert_eq!((node.height, node.len), (1 + left.max(right), 1 + before + after));
        assert!(node.left.as_ref().is_none_or(|left| left.row.0 < node.row.0));
        assert!(node.right.as_ref().is_none_or(|right| right.row.0 > node.row.0));
        (node.height, node.len)
    }

    proptest! {
        #[test]
        fn it_behaves_as_a_map_and_finds_the_changes_between_any_two_copies(
            edits in proptest::collection::vec(edit(), 0..300),
            bounds in (any::<u8>(), any::<u8>()),
        ) {
            let (mut rows, mut model) = (Rows::new(), BTreeMap::new());
            let mut copies = vec![(rows.clone(), model.clone())];
            for edit in edits {
                match edit {
                    Edit::Insert(key, value) => {
                        rows.insert(key, value);
                        model.insert(key, value);
                    }
                    Edit::Remove(key) => prop_assert_eq!(rows.remove(&key), model.remove(&key)),
                    Edit::Change(key, value) => {
                        let (row, expected) = (rows.get_mut(&key), model.get_mut(&key));
                        prop_assert_eq!(&row, &expected);
                        row.into_iter().chain(expected).for_each(|row| *row = value);
                    }
                    Edit::Retain(by) => {
                        rows.retain(|key, _| key % by != 0);
                        model.retain(|key, _| key % by != 0);
                    }
                    Edit::Replace(all) => {
                        rows.replace(all.clone());
                        model = all;
                    }
                    Edit::Copy => copies.push((rows.clone(), model.clone())),
                }
                check(&rows.root);
                prop_assert_eq!(&rows, &model);
            }
            prop_assert_eq!(rows.to_map(), model.clone());
            let bounds = bounds.0.min(bounds.1)..bounds.1;
            prop_assert!(rows.range(bounds.clone()).eq(model.range(bounds)));
            for (before, known) in &copies {
                prop_assert_eq!(before, known, "a copy changed");
                let mut patched = known.clone();
                let mut last = None;
                for Change { key, before, after } in rows.changes_from(before) {
                    prop_assert!(last < Some(*key));
                    last = Some(*key);
                    prop_assert_eq!(before, known.get(key));
                    prop_assert!(before != after);
                    match after {
                        Some(value) => patched.insert(*key, *value),
                        None => patched.remove(key),
                    };
                }
                prop_assert_eq!(&patched, &model);
                prop_assert_eq!(&rows == before, model == *known);
            }
        }
    }

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
        static COPIED: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts operations on it.
    #[derive(Debug, PartialEq, Eq)]
    struct Counted(u32);

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARED.set(COMPARED.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl Clone for Counted {
        fn clone(&self) -> Self {
            COPIED.set(COPIED.get() + 1);
            Self(self.0)
        }
    }

    fn counted(work: impl FnOnce()) -> (usize, usize) {
        COMPARED.set(0);
        COPIED.set(0);
        work();
        (COMPARED.get(), COPIED.get())
    }

    #[test]
    fn a_change_among_many_rows_costs_the_path_to_it_and_not_the_rows() {
        const MANY: u32 = 10_000;
        let before: Rows<Counted, u32> = (0..MANY).map(|key| (Counted(key), key)).collect();
        let mut after = before.clone();
        let (compared, copied) = counted(|| {
            after.insert(Counted(5_000), 1);
            after.remove(&Counted(7_000));
            after.insert(Counted(MANY), 1);
        });
        assert!(compared < 100 && copied == 0, "{compared} comparisons, {copied} copies of keys");
        let (compared, copied) = counted(|| {
            let keys: Vec<u32> = after.changes_from(&before).map(|change| change.key.0).collect();
            assert_eq!(keys, [5_000, 7_000, MANY]);
        });
        assert!(compared < 200 && copied == 0, "{compared} comparisons, {copied} copies of keys");

        // A complete list that differs in one row leaves the others shared.
        let mut again = after.clone();
        let mut list = after.to_map();
        list.insert(Counted(3), 0);
        again.replace(list);
        let (compared, _) = counted(|| assert_eq!(again.changes_from(&after).count(), 1));
        assert!(compared < 100, "{compared} comparisons");
    }
}
