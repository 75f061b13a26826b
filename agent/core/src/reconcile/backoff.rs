//! Exponential back-off with jitter.
//!
//! `now` is time on a monotonic clock with an arbitrary origin; `draw` is a fresh random number.

use super::ErrorClass;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

/// Growth of the delays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Upper bound of the first delay.
    pub base: Duration,
    /// Upper bound of every delay.
    pub max: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_millis(100), max: Duration::from_secs(30) }
    }
}

impl Backoff {
    /// The delay after this many consecutive failures (at least 1): between half of `base * 2^(failures-1)`, capped at
    /// `max`, and all of it. The random half avoids synchronised retries.
    #[must_use]
    pub fn delay(&self, failures: u32, draw: u64) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        let ceiling = self.base.saturating_mul(1 << doublings).min(self.max);
        let half = ceiling / 2;
        half + spread(ceiling - half, draw)
    }
}

/// A part of `span`, from none to all of it, derived from `draw`.
fn spread(span: Duration, draw: u64) -> Duration {
    let nanos = span.as_nanos().saturating_mul(u128::from(draw)) / u128::from(u64::MAX);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// When a key is retried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// At this moment.
    At(Duration),
    /// Not on a timer: at the next full pass, or when its row changes.
    FullPass,
}

/// The keys that failed, and when each is retried.
#[derive(Debug, Clone)]
pub struct Retries<K> {
    backoff: Backoff,
    failed: BTreeMap<K, (u32, Retry)>,
    /// The same keys by the time of their next retry.
    moments: BTreeMap<Duration, BTreeSet<K>>,
}

impl<K: Ord + Clone> Retries<K> {
    /// Nothing has failed.
    #[must_use]
    pub fn new(backoff: Backoff) -> Self {
        Self { backoff, failed: BTreeMap::new(), moments: BTreeMap::new() }
    }

    /// Records a failure and returns when the key is retried. A permanent error gets no timer; a throttled one is not
    /// retried before the server allows it.
    pub fn failed(&mut self, key: K, class: ErrorClass, now: Duration, draw: u64) -> Retry {
        let failures = self.failed.get(&key).map_or(0, |(failures, _)| *failures).saturating_add(1);
        let delay = self.backoff.delay(failures, draw);
        let retry = match class {
            ErrorClass::Transient | ErrorClass::Throttled { retry_after: None } => Retry::At(now.saturating_add(delay)),
            // Add jitter to the requested delay: other clients were given the same one.
            ErrorClass::Throttled { retry_after: Some(silence) } => Retry::At(
                now.saturating_add(silence)
                    .saturating_add(spread(self.backoff.base, draw))
                    .max(now.saturating_add(delay)),
            ),
            ErrorClass::Permanent => Retry::FullPass,
        };
        self.reset(&key);
        if let Retry::At(at) = retry {
            self.moments.entry(at).or_default().insert(key.clone());
        }
        self.failed.insert(key, (failures, retry));
        retry
    }

    /// Forgets the failures of a key: it succeeded, or its row changed so that a retry is due at once.
    pub fn reset(&mut self, key: &K) {
        let Some((_, Retry::At(at))) = self.failed.remove(key) else { return };
        if let Some(keys) = self.moments.get_mut(&at) {
            keys.remove(key);
            if keys.is_empty() {
                self.moments.remove(&at);
            }
        }
    }

    /// Keys that became due after `since`, up to and including `now`, in the order of their retry times.
    pub fn due(&self, since: Option<Duration>, now: Duration) -> impl Iterator<Item = &K> {
        let from = since.map_or(Bound::Unbounded, Bound::Excluded);
        // A range that ends before it starts must be empty instead of a panic.
        let until = Bound::Included(since.map_or(now, |since| since.max(now)));
        self.moments.range((from, until)).flat_map(|(_, keys)| keys)
    }

    /// The first time after `since` at which a key is due.
    #[must_use]
    pub fn next(&self, since: Option<Duration>) -> Option<Duration> {
        let from = since.map_or(Bound::Unbounded, Bound::Excluded);
        self.moments.range((from, Bound::Unbounded)).next().map(|(at, _)| *at)
    }

    /// The number of consecutive failures of the key, and when it is retried.
    #[must_use]
    pub fn state(&self, key: &K) -> Option<(u32, Retry)> {
        self.failed.get(key).copied()
    }

    /// The keys that are only retried at the next full pass.
    pub fn permanent(&self) -> impl Iterator<Item = &K> {
        self.failed.iter().filter(|(_, (_, retry))| *retry == Retry::FullPass).map(|(key, _)| key)
    }

    /// The number of keys that failed and have not succeeded since.
    #[must_use]
    pub fn len(&self) -> usize {
        self.failed.len()
    }

    /// Whether no key has failed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.failed.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff { base: Duration::from_secs(1), max: Duration::from_secs(60) };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn delays_double_up_to_the_cap_with_the_upper_half_random() {
        for (failures, ceiling) in [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (8, 60), (u32::MAX, 60)] {
            assert_eq!(BACKOFF.delay(failures, 0), seconds(ceiling) / 2, "{failures}");
            assert_eq!(BACKOFF.delay(failures, u64::MAX), seconds(ceiling), "{failures}");
            let middle = BACKOFF.delay(failures, u64::MAX / 2);
            assert!(middle > seconds(ceiling) / 2 && middle < seconds(ceiling), "{failures}");
        }
    }

    #[test]
    fn each_key_has_its_own_back_off_and_success_forgets_it() {
        let mut retries = Retries::new(BACKOFF);
        assert_eq!(retries.failed("a", ErrorClass::Transient, seconds(10), u64::MAX), Retry::At(seconds(11)));
        assert_eq!(retries.failed("a", ErrorClass::Transient, seconds(11), u64::MAX), Retry::At(seconds(13)));
        assert_eq!(retries.failed("b", ErrorClass::Transient, seconds(11), u64::MAX), Retry::At(seconds(12)));
        let due = |since: Option<u64>, now| retries.due(since.map(seconds), seconds(now)).copied().collect::<Vec<_>>();
        assert_eq!(retries.next(None), Some(seconds(12)));
        assert_eq!(due(None, 12), ["b"]);
        assert_eq!(due(None, 13), ["b", "a"]);
        // Keys that were due at the last query are not returned again.
        assert_eq!(retries.next(Some(seconds(12))), Some(seconds(13)));
        assert_eq!(due(Some(12), 13), ["a"]);
        assert_eq!((due(Some(13), 13), due(Some(14), 13)), (vec![], vec![]));
        assert_eq!(retries.next(Some(seconds(13))), None);
        retries.reset(&"a");
        assert_eq!(retries.due(None, seconds(13)).collect::<Vec<_>>(), [&"b"]);
        assert_eq!(retries.state(&"a"), None);
        assert_eq!(retries.failed("a", ErrorClass::Transient, seconds(20), u64::MAX), Retry::At(seconds(21)));
    }

    #[test]
    fn a_permanent_error_is_never_due_and_does_not_wait_at_a_full_pass() {
        let mut retries = Retries::new(BACKOFF);
        assert_eq!(retries.failed("a", ErrorClass::Permanent, seconds(1), 7), Retry::FullPass);
        assert_eq!(retries.next(None), None);
        assert_eq!(retries.due(None, seconds(1_000_000)).count(), 0);
        assert_eq!(retries.permanent().collect::<Vec<_>>(), [&"a"]);
        assert_eq!(retries.len(), 1);
    }

    #[test]
    fn throttling_is_obeyed_to_the_second_and_beyond() {
        let mut retries = Retries::new(BACKOFF);
        let throttled = ErrorClass::Throttled { retry_after: Some(seconds(17)) };
        assert_eq!(retries.failed("a", throttled, seconds(100), 0), Retry::At(seconds(117)));
        assert_eq!(retries.failed("b", throttled, seconds(100), u64::MAX), Retry::At(seconds(118)));
        // No delay requested: the back-off's own applies.
        let silent = ErrorClass::Throttled { retry_after: None };
        assert_eq!(retries.failed("c", silent, seconds(100), u64::MAX), Retry::At(seconds(101)));
        // A short requested delay does not undercut the back-off of a key that keeps failing.
        for _ in 0..5 {
            retries.failed("d", ErrorClass::Transient, seconds(100), 0);
        }
        let short = ErrorClass::Throttled { retry_after: Some(seconds(1)) };
        assert_eq!(retries.failed("d", short, seconds(100), 0), Retry::At(seconds(116)));
    }
}
