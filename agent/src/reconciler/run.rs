//! The loop.

use super::{Operations, RowStatus, TargetStatus};
use crate::clock::Clock;
use crate::tables::{Reader, Table};
use cistern_core::reconcile::backoff::Backoff;
use cistern_core::reconcile::{Classify, ErrorClass};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How a reconciler works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name of the target, for logs and status.
    pub name: &'static str,
    /// Time between full passes.
    pub full_pass: Duration,
    /// Delays after failures.
    pub backoff: Backoff,
    /// Surplus that a full pass finds is deleted. Without it only rows that left the table are.
    pub prune: bool,
}

/// A key whose last try failed.
struct Retry<V> {
    attempts: u32,
    /// None after a permanent error: at the next full pass, or when something else is wanted.
    at: Option<Instant>,
    /// What was tried; none for a deletion.
    tried: Option<V>,
}

struct Loop<O: Operations> {
    operations: O,
    options: Options,
    clock: Clock,
    /// What the target holds as far as we know.
    realised: BTreeMap<O::Key, O::Value>,
    retries: BTreeMap<O::Key, Retry<O::Value>>,
    status: TargetStatus,
    published: Arc<Table<String, TargetStatus>>,
}

/// Makes the target follow `desired` until cancelled. Nothing is done before the table has synced.
///
/// Cancelling never interrupts an operation: the loop ends between two.
pub async fn run<O: Operations>(
    operations: O,
    options: Options,
    mut desired: Reader<O::Key, O::Value>,
    published: Arc<Table<String, TargetStatus>>,
    clock: Clock,
    cancel: CancellationToken,
) {
    let mut this = Loop {
        operations,
        options,
        clock,
        realised: BTreeMap::new(),
        retries: BTreeMap::new(),
        status: TargetStatus::default(),
        published,
    };
    tokio::select! {
        () = cancel.cancelled() => return,
        _ = desired.synced() => {}
    }
    let mut full_pass_due = Some(Instant::now());
    let mut full_pass_failures = 0_u32;
    loop {
        let rows = Arc::clone(&desired.snapshot());
        let due = full_pass_due.is_some_and(|at| at <= Instant::now());
        if due {
            match this.full_pass(&rows.rows, &cancel).await {
                Ok(()) => {
                    full_pass_failures = 0;
                    full_pass_due = Some(Instant::now() + this.options.full_pass);
                }
                Err(delay_attempt) => {
                    full_pass_failures += 1;
                    let delay = delay_attempt.unwrap_or(this.options.full_pass).max(this.delay(full_pass_failures));
                    full_pass_due = Some(Instant::now() + delay);
                }
            }
        } else {
            this.apply(&rows.rows, &cancel).await;
        }
        this.publish();
        if cancel.is_cancelled() {
            return;
        }
        let next_retry = this.retries.values().filter_map(|retry| retry.at).min();
        let wake = [full_pass_due, next_retry].into_iter().flatten().min();
        tokio::select! {
            () = cancel.cancelled() => return,
            () = desired.changed() => {}
            () = this.operations.changed() => full_pass_due = Some(Instant::now()),
            () = async { match wake { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } } => {}
        }
    }
}

impl<O: Operations> Loop<O> {
    /// Compares with what the target holds. Additions and updates first, the surplus last.
    ///
    /// An error is that of reading the target; how long to wait at least is in it.
    async fn full_pass(
        &mut self,
        desired: &BTreeMap<O::Key, O::Value>,
        cancel: &CancellationToken,
    ) -> Result<(), Option<Duration>> {
        match self.operations.observe().await {
            Ok(observed) => {
                self.status.failing.remove("");
                self.realised = observed;
                if !self.options.prune {
                    self.realised.retain(|key, _| desired.contains_key(key));
                }
            }
            Err(error) => {
                let class = error.class();
                tracing::warn!(target = self.options.name, error = %error, "cannot read what is there");
                let attempts = self.status.failing.get("").map_or(0, |row| row.attempts) + 1;
                self.status
                    .failing
                    .insert(String::new(), RowStatus { error: error.to_string(), attempts, next_try: None });
                return Err(match class {
                    ErrorClass::Transient => Some(Duration::ZERO),
                    ErrorClass::Throttled { retry_after } => retry_after.or(Some(Duration::ZERO)),
                    ErrorClass::Permanent => None,
                });
            }
        }
        // A permanent error gets its next chance here.
        self.retries.retain(|_, retry| retry.at.is_some());
        self.apply(desired, cancel).await;
        self.status.complete = true;
        Ok(())
    }

    /// Applies what changed since, and what is due again.
    async fn apply(&mut self, desired: &BTreeMap<O::Key, O::Value>, cancel: &CancellationToken) {
        let now = Instant::now();
        for (key, value) in desired {
            if cancel.is_cancelled() {
                return;
            }
            if self.realised.get(key) == Some(value) {
                self.settled(key);
                continue;
            }
            if !self.due(key, Some(value), now) {
                continue;
            }
            match self.operations.update(key, value).await {
                Ok(()) => {
                    self.realised.insert(key.clone(), value.clone());
                    self.settled(key);
                }
                Err(error) => {
                    // What the target holds is unknown now: not the new value, perhaps not the old one either.
                    self.realised.remove(key);
                    self.failed(key, Some(value), &error);
                }
            }
        }
        let surplus: Vec<O::Key> = self
            .realised
            .keys()
            .filter(|key| !desired.contains_key(key))
            .chain(self.retries.keys().filter(|key| !desired.contains_key(key) && !self.realised.contains_key(key)))
            .cloned()
            .collect();
        for key in surplus {
            if cancel.is_cancelled() {
                return;
            }
            if !self.due(&key, None, now) {
                continue;
            }
            match self.operations.delete(&key).await {
                Ok(()) => {
                    self.realised.remove(&key);
                    self.settled(&key);
                }
                Err(error) => self.failed(&key, None, &error),
            }
        }
    }

    fn due(&self, key: &O::Key, wanted: Option<&O::Value>, now: Instant) -> bool {
        self.retries.get(key).is_none_or(|retry| match retry.at {
            Some(at) => at <= now,
            None => retry.tried.as_ref() != wanted,
        })
    }

    fn settled(&mut self, key: &O::Key) {
        if self.retries.remove(key).is_some() {
            self.status.failing.remove(&format!("{key:?}"));
        }
    }

    fn failed(&mut self, key: &O::Key, tried: Option<&O::Value>, error: &O::Error) {
        let attempts = self.retries.get(key).map_or(0, |retry| retry.attempts) + 1;
        let delay = match error.class() {
            ErrorClass::Transient => Some(self.delay(attempts)),
            ErrorClass::Throttled { retry_after } => Some(retry_after.unwrap_or_default().max(self.delay(attempts))),
            ErrorClass::Permanent => None,
        };
        tracing::warn!(
            target = self.options.name,
            key = ?key,
            attempts,
            error = %error,
            next_try_ms = delay.map(|delay| u64::try_from(delay.as_millis()).unwrap_or(u64::MAX)),
            "not applied"
        );
        let at = delay.map(|delay| Instant::now() + delay);
        self.retries.insert(key.clone(), Retry { attempts, at, tried: tried.cloned() });
        let next_try = delay.and_then(|delay| self.clock.now().checked_add(delay).ok());
        self.status.failing.insert(format!("{key:?}"), RowStatus { error: error.to_string(), attempts, next_try });
    }

    fn delay(&self, attempts: u32) -> Duration {
        self.options.backoff.delay(attempts, rand::random())
    }

    fn publish(&mut self) {
        self.status.done = self.realised.len();
        let status = self.status.clone();
        let name = self.options.name.to_owned();
        self.published.modify(|rows| {
            rows.insert(name, status);
        });
    }
}
