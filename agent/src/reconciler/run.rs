//! The loop.

use super::handle::{Request, Requests};
use super::{NotRealised, Operations, Options, Reconcile, RowStatus, TargetStatus};
use crate::clock::Clock;
use crate::tables::{Reader, Snapshot, Table};
use cistern_core::reconcile::backoff::{Retries, Retry};
use cistern_core::reconcile::{Classify, ErrorClass};
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Maximum delay of a due full pass by running operations: a target that reports a change after each write is read once
/// per batch of writes, not once per write.
const PASS_PATIENCE: Duration = Duration::from_secs(1);

/// Up to this many failing rows, each change of the status is published at once.
const FEW_FAILING: usize = 32;
/// Minimum interval of status updates beyond that: a status is copied as a whole for its readers.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// A completed operation.
struct Done<O: Operations> {
    key: O::Key,
    /// The operation; `None` for a deletion.
    wanted: Option<O::Value>,
    outcome: Result<(), O::Error>,
}

type Observed<O> = Result<BTreeMap<<O as Operations>::Key, <O as Operations>::Value>, <O as Operations>::Error>;

struct Waiter<V> {
    wanted: Option<V>,
    reply: oneshot::Sender<Result<(), NotRealised>>,
}

/// Keys that may need an operation. A key that needs none when its turn comes is skipped.
struct Queue<K> {
    /// Keys with waiting callers.
    awaited: VecDeque<K>,
    updates: VecDeque<K>,
    /// Started when no update is pending or running.
    deletions: VecDeque<K>,
}

struct Loop<O: Operations> {
    operations: Arc<O>,
    options: Options,
    clock: Clock,
    desired: Arc<Snapshot<O::Key, O::Value>>,
    /// Last known state of the target.
    realised: BTreeMap<O::Key, O::Value>,
    /// The target has been read since startup, so that `realised` is meaningful.
    known: bool,
    queue: Queue<O::Key>,
    running: FuturesUnordered<BoxFuture<'static, Done<O>>>,
    /// Keys of `running`; true for an update.
    busy: BTreeMap<O::Key, bool>,
    retries: Retries<O::Key>,
    /// Keys due up to this moment have been queued.
    retried_until: Option<Duration>,
    /// The failed operation of each key; `None` for a deletion.
    tried: BTreeMap<O::Key, Option<O::Value>>,
    /// Keys with a permanent error that the current full pass retries.
    second_chance: BTreeSet<O::Key>,
    waiters: BTreeMap<O::Key, Vec<Waiter<O::Value>>>,
    /// A running read of the target.
    reading: Option<BoxFuture<'static, Observed<O>>>,
    /// Keys with an operation since `reading` started, whose observed rows may be older than that.
    touched: BTreeSet<O::Key>,
    pass_at: Instant,
    pass_failures: u32,
    failing: BTreeMap<O::Key, RowStatus>,
    unreadable: Option<RowStatus>,
    status: TargetStatus,
    /// `failing` or `unreadable` changed since `status` was made from them.
    failing_changed: bool,
    published: Arc<Table<String, TargetStatus>>,
    published_at: Option<Instant>,
}

/// Makes the target follow the table until cancelled. Before the table is synced, only rows with waiting callers are
/// applied.
///
/// Cancellation does not interrupt operations: the loop ends when running ones have completed.
pub async fn run<O: Operations + 'static>(operations: O, with: Reconcile<O::Key, O::Value>) {
    let Reconcile { options, mut desired, published, clock, cancel, requests, handle } = with;
    // Without callers there are no requests.
    drop(handle);
    let mut requests = Some(requests);
    let mut this = Loop::new(operations, options, clock, desired.snapshot(), published);
    loop {
        let ending = cancel.is_cancelled();
        if ending {
            this.end();
            if this.running.is_empty() {
                return;
            }
        } else {
            this.queue_retries();
            this.begin_pass();
            this.begin_operations();
        }
        this.finish_pass();
        let status_due = this.publish();
        let wake = if ending { None } else { [this.wake(), status_due].into_iter().flatten().min() };
        tokio::select! {
            biased;
            () = cancel.cancelled(), if !ending => {}
            Some(done) = this.running.next(), if !this.running.is_empty() => this.done(done),
            request = next(&mut requests), if !ending => match request {
                Some(request) => this.asked(request, &mut desired),
                None => requests = None,
            },
            () = desired.changed(), if !ending => this.follow(desired.snapshot()),
            observed = read(&mut this.reading), if !ending => this.compare(observed),
            () = this.operations.changed(), if !ending && this.watches() => this.pass_at = Instant::now(),
            () = sleep_until(wake) => {}
        }
    }
}

async fn next<K, V>(requests: &mut Option<Requests<K, V>>) -> Option<Request<K, V>> {
    match requests {
        Some(requests) => requests.recv().await,
        None => pending().await,
    }
}

async fn read<T>(reading: &mut Option<BoxFuture<'static, T>>) -> T {
    let observed = match reading {
        Some(observed) => observed.await,
        None => pending().await,
    };
    *reading = None;
    observed
}

async fn sleep_until(wake: Option<Instant>) {
    match wake {
        Some(at) => tokio::time::sleep_until(at).await,
        None => pending().await,
    }
}

impl<O: Operations + 'static> Loop<O> {
    fn new(
        operations: O,
        options: Options,
        clock: Clock,
        desired: Arc<Snapshot<O::Key, O::Value>>,
        published: Arc<Table<String, TargetStatus>>,
    ) -> Self {
        Self {
            operations: Arc::new(operations),
            retries: Retries::new(options.backoff),
            options,
            clock,
            desired,
            realised: BTreeMap::new(),
            known: false,
            queue: Queue { awaited: VecDeque::new(), updates: VecDeque::new(), deletions: VecDeque::new() },
            running: FuturesUnordered::new(),
            busy: BTreeMap::new(),
            retried_until: None,
            tried: BTreeMap::new(),
            second_chance: BTreeSet::new(),
            waiters: BTreeMap::new(),
            reading: None,
            touched: BTreeSet::new(),
            pass_at: Instant::now(),
            pass_failures: 0,
            failing: BTreeMap::new(),
            unreadable: None,
            status: TargetStatus::default(),
            failing_changed: false,
            published,
            published_at: None,
        }
    }

    /// Starts nothing more, and answers all waiting callers.
    fn end(&mut self) {
        self.queue = Queue { awaited: VecDeque::new(), updates: VecDeque::new(), deletions: VecDeque::new() };
        self.reading = None;
        self.waiters.clear();
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty()
            && self.queue.awaited.is_empty()
            && self.queue.updates.is_empty()
            && self.queue.deletions.is_empty()
    }

    // === Full passes ===

    /// Whether a change reported by the target would start a full pass earlier.
    fn watches(&self) -> bool {
        self.desired.synced && self.pass_at > Instant::now()
    }

    fn begin_pass(&mut self) {
        let now = Instant::now();
        let due = self.pass_at <= now && (self.is_idle() || self.pass_at + PASS_PATIENCE <= now);
        if !due || !self.desired.synced || self.reading.is_some() {
            return;
        }
        self.pass_at = now + self.options.full_pass;
        self.touched = self.busy.keys().cloned().collect();
        let operations = Arc::clone(&self.operations);
        self.reading = Some(Box::pin(async move { operations.observe().await }));
    }

    /// Compares with the target's actual state.
    fn compare(&mut self, observed: Observed<O>) {
        let touched = std::mem::take(&mut self.touched);
        let mut observed = match observed {
            Ok(observed) => observed,
            Err(error) => return self.pass_failed(&error),
        };
        for key in touched {
            match self.realised.get(&key) {
                Some(value) => observed.insert(key, value.clone()),
                None => observed.remove(&key),
            };
        }
        if !self.options.prune {
            observed.retain(|key, _| self.desired.rows.contains_key(key) || self.realised.contains_key(key));
        }
        self.realised = observed;
        self.known = true;
        self.pass_failures = 0;
        self.failing_changed |= self.unreadable.take().is_some();
        // Permanent errors are retried here.
        self.second_chance = self.retries.permanent().cloned().collect();
        self.plan();
    }

    fn pass_failed(&mut self, error: &O::Error) {
        tracing::warn!(target = self.options.name, error = %error, "target cannot be read");
        self.pass_failures = self.pass_failures.saturating_add(1);
        let least = match error.class() {
            ErrorClass::Transient => Duration::ZERO,
            ErrorClass::Throttled { retry_after } => retry_after.unwrap_or(Duration::ZERO),
            ErrorClass::Permanent => self.options.full_pass,
        };
        let delay = least.max(self.options.backoff.delay(self.pass_failures, self.clock.jitter()));
        self.pass_at = self.pass_at.min(Instant::now() + delay);
        self.unreadable =
            Some(RowStatus { error: error.to_string(), attempts: self.pass_failures, next_try: self.after(delay) });
        self.failing_changed = true;
    }

    /// The first full pass is complete when everything it found has been tried.
    fn finish_pass(&mut self) {
        if self.known && self.is_idle() {
            self.second_chance.clear();
            self.status.complete = true;
        }
    }

    // === What to do ===

    /// Takes over the table. Changed rows are applied next.
    fn follow(&mut self, snapshot: Arc<Snapshot<O::Key, O::Value>>) {
        let before = std::mem::replace(&mut self.desired, snapshot);
        let changes = self.desired.rows.changes_from(&before.rows);
        let changed: Vec<O::Key> = changes.map(|change| change.key.clone()).collect();
        for key in &changed {
            self.supersede(key);
        }
        if !self.known {
            return;
        }
        let (updates, deletions): (Vec<_>, Vec<_>) =
            changed.into_iter().partition(|key| self.desired.rows.contains_key(key));
        for key in updates.into_iter().rev() {
            self.settle_if_as_desired(&key);
            self.queue.updates.push_front(key);
        }
        self.queue.deletions.extend(deletions);
    }

    /// Queues all differences: updates first, then deletions, each by key.
    fn plan(&mut self) {
        let desired = &self.desired.rows;
        let updates = desired.iter().filter(|(key, value)| self.realised.get(*key) != Some(*value));
        self.queue.updates = updates.map(|(key, _)| key.clone()).collect();
        let surplus = self.realised.keys().filter(|key| !desired.contains_key(*key));
        // A failed deletion must be retried although the target may have no entry any more.
        let owed = self.tried.keys().filter(|key| !desired.contains_key(*key) && !self.realised.contains_key(*key));
        self.queue.deletions = surplus.chain(owed).cloned().collect();
        let tried: Vec<O::Key> = self.tried.keys().cloned().collect();
        for key in tried {
            self.settle_if_as_desired(&key);
        }
    }

    /// Failed keys that are in the desired state now were corrected by another program, or are desired differently now.
    fn settle_if_as_desired(&mut self, key: &O::Key) {
        if self.is_as_desired(key) {
            self.settled(key);
        }
    }

    /// Answers callers that wait for a value that the table no longer has.
    fn supersede(&mut self, key: &O::Key) {
        let Some(waiters) = self.waiters.get_mut(key) else { return };
        let wanted = self.desired.rows.get(key);
        for waiter in waiters.extract_if(.., |waiter| waiter.wanted.as_ref() != wanted) {
            let _ = waiter.reply.send(Err(NotRealised::Superseded { target: self.options.name }));
        }
        if waiters.is_empty() {
            self.waiters.remove(key);
        }
    }

    /// The target is known to have the desired row. Not defined for a row that is not desired and whose deletion
    /// failed.
    fn is_as_desired(&self, key: &O::Key) -> bool {
        self.desired.rows.get(key).is_some_and(|value| self.realised.get(key) == Some(value))
    }

    fn needs_operation(&self, key: &O::Key) -> bool {
        let wanted = self.desired.rows.get(key);
        self.realised.get(key) != wanted || (wanted.is_none() && self.tried.contains_key(key))
    }

    fn is_due(&self, key: &O::Key, now: Duration) -> bool {
        match self.retries.state(key) {
            None => true,
            Some((_, Retry::At(at))) => at <= now,
            Some((_, Retry::FullPass)) => {
                self.second_chance.contains(key)
                    || self.tried.get(key).is_some_and(|tried| tried.as_ref() != self.desired.rows.get(key))
            }
        }
    }

    fn queue_retries(&mut self) {
        if !self.known {
            return;
        }
        let now = self.clock.monotonic();
        for key in self.retries.due(self.retried_until, now) {
            if self.desired.rows.contains_key(key) {
                self.queue.updates.push_back(key.clone());
            } else {
                self.queue.deletions.push_back(key.clone());
            }
        }
        self.retried_until = Some(now);
    }

    /// A caller waits for a row.
    fn asked(&mut self, request: Request<O::Key, O::Value>, desired: &mut Reader<O::Key, O::Value>) {
        let snapshot = desired.snapshot();
        if snapshot.revision != self.desired.revision {
            self.follow(snapshot);
        }
        let Request { key, wanted, reply } = request;
        let answer = if self.desired.rows.get(&key) != wanted.as_ref() {
            Err(NotRealised::Superseded { target: self.options.name })
        } else if self.known && !self.busy.contains_key(&key) && !self.needs_operation(&key) {
            Ok(())
        } else {
            self.queue.awaited.push_back(key.clone());
            let waiters = self.waiters.entry(key).or_default();
            // While the operation of a row hangs, callers may give up and new ones arrive.
            waiters.retain(|waiter| !waiter.reply.is_closed());
            waiters.push(Waiter { wanted, reply });
            return;
        };
        // The caller may have gone away.
        let _ = reply.send(answer);
    }

    // === Doing it ===

    fn begin_operations(&mut self) {
        while self.running.len() < self.options.concurrency.get() {
            let Some(key) = self.next_key() else { return };
            let wanted = self.desired.rows.get(&key).cloned();
            self.busy.insert(key.clone(), wanted.is_some());
            self.second_chance.remove(&key);
            if self.reading.is_some() {
                self.touched.insert(key.clone());
            }
            let operations = Arc::clone(&self.operations);
            self.running.push(Box::pin(async move {
                let outcome = match &wanted {
                    Some(value) => operations.update(&key, value).await,
                    None => operations.delete(&key).await,
                };
                Done { key, wanted, outcome }
            }));
        }
    }

    /// The next key that needs an operation and has none running.
    fn next_key(&mut self) -> Option<O::Key> {
        while let Some(key) = self.queue.awaited.pop_front() {
            // A busy key is checked again when its operation completes.
            if self.busy.contains_key(&key) || !self.waiters.contains_key(&key) {
                continue;
            }
            if !self.known || self.needs_operation(&key) {
                return Some(key);
            }
            // A full pass has found it in the desired state meanwhile.
            for waiter in self.waiters.remove(&key).unwrap_or_default() {
                let _ = waiter.reply.send(Ok(()));
            }
        }
        let now = self.clock.monotonic();
        while let Some(key) = self.queue.updates.pop_front() {
            if !self.desired.rows.contains_key(&key) {
                self.queue.deletions.push_back(key);
            } else if self.may_begin(&key, now) {
                return Some(key);
            }
        }
        if self.busy.values().any(|is_update| *is_update) {
            return None;
        }
        while let Some(key) = self.queue.deletions.pop_front() {
            if self.may_begin(&key, now) {
                return Some(key);
            }
        }
        None
    }

    /// A busy key is checked again when its operation completes.
    fn may_begin(&self, key: &O::Key, now: Duration) -> bool {
        !self.busy.contains_key(key) && self.needs_operation(key) && self.is_due(key, now)
    }

    fn done(&mut self, done: Done<O>) {
        let Done { key, wanted, outcome } = done;
        self.busy.remove(&key);
        let answer = match outcome {
            Ok(()) => {
                match &wanted {
                    Some(value) => self.realised.insert(key.clone(), value.clone()),
                    None => self.realised.remove(&key),
                };
                self.settled(&key);
                Ok(())
            }
            Err(error) => {
                // The target's entry is unknown now: neither certainly the new nor the old value.
                if wanted.is_some() {
                    self.realised.remove(&key);
                }
                let answer = Err(NotRealised::Failed(error.to_string()));
                self.failed(&key, wanted.clone(), &error);
                answer
            }
        };
        if let Some(waiters) = self.waiters.get_mut(&key) {
            for waiter in waiters.extract_if(.., |waiter| waiter.wanted == wanted) {
                let _ = waiter.reply.send(answer.clone());
            }
            if waiters.is_empty() {
                self.waiters.remove(&key);
            } else {
                self.queue.awaited.push_front(key.clone());
            }
        }
        // The row may have changed during the operation.
        if self.known && self.may_begin(&key, self.clock.monotonic()) {
            if self.desired.rows.contains_key(&key) {
                self.queue.updates.push_front(key);
            } else {
                self.queue.deletions.push_back(key);
            }
        }
    }

    fn settled(&mut self, key: &O::Key) {
        if self.tried.remove(key).is_some() {
            self.retries.reset(key);
            self.failing_changed |= self.failing.remove(key).is_some();
        }
    }

    fn failed(&mut self, key: &O::Key, tried: Option<O::Value>, error: &O::Error) {
        let now = self.clock.monotonic();
        let retry = self.retries.failed(key.clone(), error.class(), now, self.clock.jitter());
        self.tried.insert(key.clone(), tried);
        let attempts = self.retries.state(key).map_or(1, |(attempts, _)| attempts);
        let next_try = match retry {
            Retry::At(at) => self.after(at.saturating_sub(now)),
            Retry::FullPass => None,
        };
        tracing::warn!(
            target = self.options.name,
            key = ?key,
            attempts,
            error = %error,
            next_try = next_try.map(tracing::field::display),
            "not applied"
        );
        self.failing.insert(key.clone(), RowStatus { error: error.to_string(), attempts, next_try });
        self.failing_changed = true;
    }

    fn after(&self, delay: Duration) -> Option<jiff::Timestamp> {
        self.clock.now().checked_add(delay).ok()
    }

    // === Reporting ===

    /// When to wake up without an event.
    fn wake(&self) -> Option<Instant> {
        let retry = self.known.then(|| self.retries.next(self.retried_until)).flatten();
        let pass = (self.desired.synced && self.reading.is_none()).then(|| {
            // A due one waits for the running operations, each of which wakes the loop.
            if self.pass_at <= Instant::now() { self.pass_at + PASS_PATIENCE } else { self.pass_at }
        });
        [retry.map(|at| self.clock.instant(at)), pass].into_iter().flatten().min()
    }

    /// Publishes changes of the status; returns when the rest is due.
    fn publish(&mut self) -> Option<Instant> {
        let done = self.realised.len();
        if let Some(at) = self.published_at
            && self.failing.len() > FEW_FAILING
            && at + STATUS_EVERY > Instant::now()
        {
            return Some(at + STATUS_EVERY);
        }
        if self.failing_changed {
            let unreadable = self.unreadable.iter().map(|row| (String::new(), row.clone()));
            let failing = self.failing.iter().map(|(key, row)| (format!("{key:?}"), row.clone()));
            self.status.failing = Arc::new(unreadable.chain(failing).collect());
        }
        self.status.done = done;
        self.failing_changed = false;
        self.published_at = Some(Instant::now());
        let (name, status) = (self.options.name.to_owned(), &self.status);
        self.published.modify(|rows| {
            rows.insert(name, status.clone());
        });
        None
    }
}
