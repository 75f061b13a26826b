//! Limits how often a row that other programs take away is put back.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// So many repairs of a row within [`WINDOW`] make it contested.
pub const REPAIRS: usize = 10;

/// A contested row is put back once in this time.
pub const WINDOW: Duration = Duration::from_secs(60);

/// A row that needed no repair for this long is no longer contested. Longer than [`WINDOW`], in which a contested row is not
/// repaired whatever happens to it.
const CALM: Duration = Duration::from_secs(120);

#[derive(Debug, Default)]
struct History {
    /// Times of the last repairs, at most [`REPAIRS`].
    repairs: VecDeque<Duration>,
    contested: bool,
}

impl History {
    fn last(&self) -> Duration {
        self.repairs.back().copied().unwrap_or_default()
    }

    fn is_calm(&self, now: Duration) -> bool {
        now.saturating_sub(self.last()) >= CALM
    }
}

/// The repairs of the rows of a target. Times are monotonic.
#[derive(Debug)]
pub struct Contention<K> {
    rows: BTreeMap<K, History>,
}

impl<K> Default for Contention<K> {
    fn default() -> Self {
        Self { rows: BTreeMap::new() }
    }
}

impl<K: Ord + Clone> Contention<K> {
    /// Records that a row is put back now.
    ///
    /// # Errors
    /// It is contested: how long to wait.
    pub fn repair(&mut self, key: &K, now: Duration) -> Result<(), Duration> {
        self.rows.retain(|_, history| !history.is_calm(now));
        let history = self.rows.entry(key.clone()).or_default();
        let since = |then: Option<&Duration>| then.map(|then| now.saturating_sub(*then));
        history.contested |=
            history.repairs.len() == REPAIRS && since(history.repairs.front()).is_some_and(|age| age < WINDOW);
        if history.contested
            && let Some(age) = since(history.repairs.back()).filter(|age| *age < WINDOW)
        {
            return Err(WINDOW.saturating_sub(age));
        }
        if history.repairs.len() == REPAIRS {
            history.repairs.pop_front();
        }
        history.repairs.push_back(now);
        Ok(())
    }

    /// Forgets a row that is no longer desired, or differently.
    pub fn forget(&mut self, key: &K) {
        self.rows.remove(key);
    }

    /// The contested rows.
    pub fn contested(&self, now: Duration) -> impl Iterator<Item = &K> {
        self.rows.iter().filter(move |(_, history)| history.contested && !history.is_calm(now)).map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contested(contention: &Contention<u8>, now: Duration) -> Vec<u8> {
        contention.contested(now).copied().collect()
    }

    #[test]
    fn ten_repairs_in_a_minute_are_followed_by_one_a_minute() {
        let mut contention = Contention::default();
        let at = Duration::from_secs;
        for second in 0..10 {
            assert_eq!(contention.repair(&1, at(second)), Ok(()));
        }
        assert!(contested(&contention, at(9)).is_empty());
        assert_eq!(contention.repair(&1, at(19)), Err(at(50)));
        assert_eq!(contention.repair(&2, at(19)), Ok(()), "another row");
        assert_eq!(contested(&contention, at(19)), [1]);
        assert_eq!(contention.repair(&1, at(69)), Ok(()));
        assert_eq!(contention.repair(&1, at(70)), Err(at(59)), "still one a minute");
        assert_eq!(contention.repair(&1, at(129)), Ok(()));
        assert_eq!(contested(&contention, at(248)), [1]);
        assert!(contested(&contention, at(249)).is_empty(), "not taken for two minutes");
        assert_eq!(contention.repair(&1, at(249)), Ok(()));
        assert_eq!(contention.repair(&1, at(250)), Ok(()), "counted from the beginning");
    }

    #[test]
    fn repairs_that_are_further_apart_are_not_limited() {
        let mut contention = Contention::default();
        for minute in 0..40 {
            assert_eq!(contention.repair(&1, Duration::from_secs(7 * minute)), Ok(()));
        }
        assert!(contested(&contention, Duration::from_secs(280)).is_empty());
    }

    #[test]
    fn a_forgotten_row_is_put_back_at_once() {
        let mut contention = Contention::default();
        while contention.repair(&1, Duration::ZERO).is_ok() {}
        contention.forget(&1);
        assert_eq!(contention.repair(&1, Duration::ZERO), Ok(()));
    }
}
