//! The loop.

use super::{Operations, RowStatus, TargetStatus};
use crate::clock::Clock;
use crate::tables::{Reader, Rows, Table};
use cistern_core::reconcile::backoff::{Backoff, Retries, Retry};
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

struct Loop<O: Operations> {
    operations: O,
    options: Options,
    clock: Clock,
    /// What the target holds as far as we know. Rows that are as desired are shared with the table, so that a change costs
    /// what changed, and not a comparison of everything.
    realised: Rows<O::Key, O::Value>,
    retries: Retries<O::Key>,
    /// What was tried on each key that failed; none for a deletion.
    tried: BTreeMap<O::Key, Option<O::Value>>,
    status: TargetStatus,
    published: Arc<Table<String, TargetStatus>>,
}

/// Makes the target follow `desired` until cancelled. Nothing is done before the table has synced.
///
/// Cancelling never interrupts an operation that changes something: the loop ends between two.
pub async fn run<O: Operations>(
    operations: O,
    options: Options,
    mut desired: Reader<O::Key, O::Value>,
    published: Arc<Table<String, TargetStatus>>,
    clock: Clock,
    cancel: CancellationToken,
) {
    let backoff = options.backoff;
    let mut this = Loop {
        operations,
        options,
        clock,
        realised: Rows::new(),
        retries: Retries::new(backoff),
        tried: BTreeMap::new(),
        status: TargetStatus::default(),
        published,
    };
    tokio::select! {
        biased;
        () = cancel.cancelled() => return,
        _ = desired.synced() => {}
    }
    let mut full_pass_due = Some(Instant::now());
    let mut full_pass_failures = 0_u32;
    loop {
        let due = full_pass_due.is_some_and(|at| at <= Instant::now());
        if due {
            match this.full_pass(&mut desired, &cancel).await {
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
        } else if this.status.complete {
            // Before the target has been read once, a change would be applied blindly.
            let snapshot = desired.snapshot();
            this.apply(&snapshot.rows, false, &cancel).await;
        }
        this.publish();
        if cancel.is_cancelled() {
            return;
        }
        let next_retry = this.retries.next().map(|at| this.clock.instant(at));
        let wake = [full_pass_due, next_retry].into_iter().flatten().min();
        tokio::select! {
            biased;
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
        desired: &mut Reader<O::Key, O::Value>,
        cancel: &CancellationToken,
    ) -> Result<(), Option<Duration>> {
        // Reading may wait for what does not come any more, for example a table whose watch has ended with this scope.
        let observed = tokio::select! {
            biased;
            () = cancel.cancelled() => return Ok(()),
            observed = self.operations.observe() => observed,
        };
        let snapshot = desired.snapshot();
        let desired = &snapshot.rows;
        match observed {
            Ok(observed) => {
                self.status.failing.remove("");
                self.realised.replace(observed);
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
        self.apply(desired, true, cancel).await;
        self.status.complete = true;
        Ok(())
    }

    /// Applies what changed since and what is due again; in a full pass also what failed for good.
    async fn apply(&mut self, desired: &Rows<O::Key, O::Value>, full: bool, cancel: &CancellationToken) {
        // A deletion that failed is owed although the target may hold nothing any more.
        let owed: Vec<O::Key> = self.tried.keys().filter(|key| !desired.contains_key(key)).cloned().collect();
        // Additions and updates first, the surplus last: that opens no gap.
        let (mut steps, surplus): (Vec<_>, Vec<_>) = desired
            .changes_from(&self.realised)
            .map(|change| (change.key.clone(), change.after.cloned()))
            .partition(|(_, wanted)| wanted.is_some());
        steps.extend(surplus);
        steps.extend(owed.into_iter().filter(|key| !self.realised.contains_key(key)).map(|key| (key, None)));
        let now = self.clock.monotonic();
        for (key, wanted) in steps {
            if cancel.is_cancelled() {
                return;
            }
            if !self.due(&key, wanted.as_ref(), full, now) {
                continue;
            }
            let outcome = match &wanted {
                Some(value) => self.operations.update(&key, value).await,
                None => self.operations.delete(&key).await,
            };
            match outcome {
                Ok(()) => {
                    match wanted {
                        Some(value) => self.realised.insert(key.clone(), value),
                        None => {
                            self.realised.remove(&key);
                        }
                    }
                    self.settled(&key);
                }
                Err(error) => {
                    // What the target holds is unknown now: not the new value, perhaps not the old one either.
                    if wanted.is_some() {
                        self.realised.remove(&key);
                    }
                    self.failed(&key, wanted, &error);
                }
            }
        }
        self.share(desired);
        // What failed and is as desired by now was put right by somebody else, or is no longer asked for.
        let settled: Vec<O::Key> = self
            .tried
            .keys()
            .filter(|key| desired.get(key).is_some_and(|value| self.realised.get(key) == Some(value)))
            .cloned()
            .collect();
        for key in settled {
            self.settled(&key);
        }
    }

    /// Makes the rows that are as desired the same ones as in the table.
    fn share(&mut self, desired: &Rows<O::Key, O::Value>) {
        let differing: Vec<_> =
            desired.changes_from(&self.realised).map(|change| (change.key.clone(), change.before.cloned())).collect();
        self.realised = desired.clone();
        for (key, held) in differing {
            match held {
                Some(value) => self.realised.insert(key, value),
                None => {
                    self.realised.remove(&key);
                }
            }
        }
    }

    fn due(&self, key: &O::Key, wanted: Option<&O::Value>, full: bool, now: Duration) -> bool {
        match self.retries.state(key) {
            None => true,
            Some((_, Retry::At(at))) => at <= now,
            Some((_, Retry::FullPass)) => full || self.tried.get(key).is_some_and(|tried| tried.as_ref() != wanted),
        }
    }

    fn settled(&mut self, key: &O::Key) {
        if self.tried.remove(key).is_some() {
            self.retries.reset(key);
            self.status.failing.remove(&format!("{key:?}"));
        }
    }

    fn failed(&mut self, key: &O::Key, tried: Option<O::Value>, error: &O::Error) {
        let now = self.clock.monotonic();
        let retry = self.retries.failed(key.clone(), error.class(), now, self.clock.jitter());
        self.tried.insert(key.clone(), tried);
        let attempts = self.retries.state(key).map_or(1, |(attempts, _)| attempts);
        let next_try = match retry {
            Retry::At(at) => self.clock.now().checked_add(at.saturating_sub(now)).ok(),
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
        self.status.failing.insert(format!("{key:?}"), RowStatus { error: error.to_string(), attempts, next_try });
    }

    fn delay(&self, attempts: u32) -> Duration {
        self.options.backoff.delay(attempts, self.clock.jitter())
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Debug, Clone, thiserror::Error)]
    #[error("target says {0:?}")]
    struct Refused(ErrorClass);

    impl Classify for Refused {
        fn class(&self) -> ErrorClass {
            self.0
        }
    }

    #[derive(Debug, Default)]
    struct State {
        held: BTreeMap<u32, String>,
        /// Every call, in order.
        calls: Vec<String>,
        /// Answers of the next calls on a key.
        refuse: BTreeMap<u32, Vec<ErrorClass>>,
        /// Answers of the next readings.
        refuse_reading: Vec<ErrorClass>,
    }

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<State>>, Arc<tokio::sync::Notify>);

    impl Memory {
        fn state(&self) -> std::sync::MutexGuard<'_, State> {
            self.0.lock().unwrap()
        }

        fn call(&self, call: String, key: u32) -> Result<(), Refused> {
            let mut state = self.state();
            state.calls.push(call);
            match state.refuse.get_mut(&key).and_then(Vec::pop) {
                Some(class) => Err(Refused(class)),
                None => Ok(()),
            }
        }
    }

    impl Operations for Memory {
        type Key = u32;
        type Value = String;
        type Error = Refused;

        async fn update(&mut self, key: &u32, value: &String) -> Result<(), Refused> {
            self.call(format!("set {key}={value}"), *key)?;
            self.state().held.insert(*key, value.clone());
            Ok(())
        }

        async fn delete(&mut self, key: &u32) -> Result<(), Refused> {
            self.call(format!("del {key}"), *key)?;
            self.state().held.remove(key);
            Ok(())
        }

        async fn observe(&mut self) -> Result<BTreeMap<u32, String>, Refused> {
            let mut state = self.state();
            match state.refuse_reading.pop() {
                Some(class) => Err(Refused(class)),
                None => Ok(state.held.clone()),
            }
        }

        async fn changed(&mut self) {
            self.1.notified().await;
        }
    }

    struct Rig {
        target: Memory,
        table: Table<u32, String>,
        status: Arc<Table<String, TargetStatus>>,
        cancel: CancellationToken,
    }

    impl Rig {
        fn start(target: Memory) -> Self {
            let (table, status) = (Table::new("desired"), Arc::new(Table::new("targets")));
            let options = Options {
                name: "memory",
                full_pass: Duration::from_secs(300),
                backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(30) },
                prune: true,
            };
            let cancel = CancellationToken::new();
            tokio::spawn(run(
                target.clone(),
                options,
                table.reader(),
                Arc::clone(&status),
                Clock::system(),
                cancel.clone(),
            ));
            Self { target, table, status, cancel }
        }

        fn publish(&self, rows: &[(u32, &str)]) {
            self.table.publish(rows.iter().map(|(key, value)| (*key, (*value).to_owned())).collect());
        }

        fn calls(&self) -> Vec<String> {
            std::mem::take(&mut self.target.state().calls)
        }

        fn status(&self) -> TargetStatus {
            self.status.snapshot().rows["memory"].clone()
        }
    }

    async fn seconds(seconds: u64) {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_touched_before_the_table_has_synced() {
        let target = Memory::default();
        target.state().held.insert(7, "old".into());
        let rig = Rig::start(target);
        seconds(1000).await;
        assert!(rig.calls().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_pass_adds_before_it_deletes_and_leaves_what_is_right() {
        let target = Memory::default();
        target.state().held = BTreeMap::from([(1, "a".into()), (2, "old".into()), (3, "surplus".into())]);
        let rig = Rig::start(target);
        rig.publish(&[(1, "a"), (2, "b"), (9, "new")]);
        seconds(1).await;
        assert_eq!(rig.calls(), ["set 2=b", "set 9=new", "del 3"]);
        rig.publish(&[(1, "a"), (9, "newer")]);
        seconds(1).await;
        assert_eq!(rig.calls(), ["set 9=newer", "del 2"]);
        assert_eq!(rig.status(), TargetStatus { complete: true, done: 2, failing: BTreeMap::new() });
    }

    #[tokio::test(start_paused = true)]
    async fn a_transient_error_is_tried_again_by_itself_and_others_are_not_held_up() {
        let rig = Rig::start(Memory::default());
        rig.target.state().refuse.insert(1, vec![ErrorClass::Transient; 3]);
        rig.publish(&[(1, "a"), (2, "b")]);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(rig.calls(), ["set 1=a", "set 2=b"]);
        assert_eq!(rig.status().failing["1"].attempts, 1);
        assert!(rig.status().failing["1"].next_try.is_some());
        seconds(60).await;
        assert_eq!(rig.calls(), ["set 1=a"; 3]);
        assert!(rig.status().failing.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_permanent_error_waits_for_the_full_pass_or_for_another_value() {
        let rig = Rig::start(Memory::default());
        rig.target.state().refuse.insert(1, vec![ErrorClass::Permanent; 2]);
        rig.publish(&[(1, "a")]);
        seconds(200).await;
        assert_eq!(rig.calls(), ["set 1=a"]);
        assert_eq!(rig.status().failing["1"].next_try, None);
        // Something else changes: still not tried. Another value: tried at once.
        rig.publish(&[(1, "a"), (2, "b")]);
        seconds(1).await;
        assert_eq!(rig.calls(), ["set 2=b"]);
        rig.publish(&[(1, "other"), (2, "b")]);
        seconds(1).await;
        assert_eq!(rig.calls(), ["set 1=other"]);
        seconds(300).await;
        assert_eq!(rig.calls(), ["set 1=other"]);
        assert!(rig.status().failing.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn throttling_is_obeyed() {
        let rig = Rig::start(Memory::default());
        let told = ErrorClass::Throttled { retry_after: Some(Duration::from_secs(17)) };
        rig.target.state().refuse.insert(1, vec![told]);
        rig.publish(&[(1, "a")]);
        seconds(16).await;
        assert_eq!(rig.calls(), ["set 1=a"]);
        seconds(2).await;
        assert_eq!(rig.calls(), ["set 1=a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_somebody_else_changes_is_put_right_when_the_target_tells_or_at_the_full_pass() {
        let rig = Rig::start(Memory::default());
        rig.publish(&[(1, "a")]);
        seconds(1).await;
        rig.calls();
        rig.target.state().held.clear();
        rig.target.1.notify_one();
        seconds(1).await;
        assert_eq!(rig.calls(), ["set 1=a"]);
        rig.target.state().held.insert(5, "foreign".into());
        seconds(301).await;
        assert_eq!(rig.calls(), ["del 5"]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_target_that_cannot_be_read_is_tried_again_and_nothing_is_written_blindly() {
        let rig = Rig::start(Memory::default());
        rig.target.state().refuse_reading = vec![ErrorClass::Transient; 2];
        rig.publish(&[(1, "a")]);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(rig.calls().is_empty());
        assert!(!rig.status().complete && rig.status().failing.contains_key(""));
        seconds(60).await;
        assert_eq!(rig.calls(), ["set 1=a"]);
        assert!(rig.status().complete && rig.status().failing.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_deletion_is_tried_again_unless_the_row_is_wanted_again() {
        let rig = Rig::start(Memory::default());
        rig.publish(&[(1, "a"), (2, "b")]);
        seconds(1).await;
        rig.calls();
        rig.target.state().refuse.insert(1, vec![ErrorClass::Transient]);
        rig.publish(&[(2, "b")]);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(rig.calls(), ["del 1"]);
        seconds(2).await;
        assert_eq!(rig.calls(), ["del 1"]);
        assert_eq!(rig.target.state().held.len(), 1);
        rig.cancel.cancel();
    }
}
