//! The difference between two ordered maps, adds and updates before deletes.

use std::collections::BTreeMap;

/// One thing to do to a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<'a, K, V> {
    /// The target lacks this row.
    Add(&'a K, &'a V),
    /// The target holds something else under this key.
    Update(&'a K, &'a V),
    /// The target holds a row that nobody wants: the surplus.
    Delete(&'a K),
}

/// What makes `observed` equal to `desired`, in an order that opens no gap: everything that is wanted first, the
/// surplus last, each by key. The surplus stays when `prune` is false, which is right while the source of `desired` has
/// not been read whole.
pub fn diff<'a, K: Ord, V: PartialEq>(
    desired: &'a BTreeMap<K, V>,
    observed: &'a BTreeMap<K, V>,
    prune: bool,
) -> impl Iterator<Item = Step<'a, K, V>> {
    let wanted = desired.iter().filter_map(|(key, value)| match observed.get(key) {
        None => Some(Step::Add(key, value)),
        Some(held) if held != value => Some(Step::Update(key, value)),
        Some(_) => None,
    });
    let surplus = observed.keys().filter(move |key| prune && !desired.contains_key(key)).map(Step::Delete);
    wanted.chain(surplus)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn adds_and_updates_come_first_and_deletes_last() {
        let desired = BTreeMap::from([("b", 1), ("c", 2), ("d", 3)]);
        let observed = BTreeMap::from([("a", 0), ("b", 1), ("c", 9)]);
        let steps: Vec<_> = diff(&desired, &observed, true).collect();
        assert_eq!(steps, [Step::Update(&"c", &2), Step::Add(&"d", &3), Step::Delete(&"a")]);
        let unpruned: Vec<_> = diff(&desired, &observed, false).collect();
        assert_eq!(unpruned, [Step::Update(&"c", &2), Step::Add(&"d", &3)]);
    }

    proptest! {
        #[test]
        fn applying_the_steps_makes_both_equal_and_deletes_come_last(
            desired in proptest::collection::btree_map(0_u8..20, 0_u8..3, 0..20),
            observed in proptest::collection::btree_map(0_u8..20, 0_u8..3, 0..20),
        ) {
            let mut target = observed.clone();
            let mut deleting = false;
            for step in diff(&desired, &observed, true) {
                match step {
                    Step::Add(key, value) => {
                        prop_assert!(!deleting);
                        prop_assert_eq!(target.insert(*key, *value), None);
                    }
                    Step::Update(key, value) => {
                        prop_assert!(!deleting);
                        prop_assert!(target.insert(*key, *value).is_some_and(|held| held != *value));
                    }
                    Step::Delete(key) => {
                        deleting = true;
                        prop_assert!(target.remove(key).is_some());
                    }
                }
            }
            prop_assert_eq!(&target, &desired);
            prop_assert_eq!(diff(&desired, &target, true).count(), 0);
        }
    }
}
