//! The loop with a target in memory, on the paused clock.

use super::*;
use crate::clock::Clock;
use cistern_core::reconcile::ErrorClass;
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
    /// All operations, in the order of their start.
    calls: Vec<String>,
    /// Results of the next operations on a key.
    refuse: BTreeMap<u32, Vec<ErrorClass>>,
    /// Results of the next reads.
    refuse_reading: Vec<ErrorClass>,
    /// Duration of an operation, and of a read.
    slow: Duration,
    slow_reading: Duration,
    /// Keys of the running operations, and their maximum number so far.
    under_way: Vec<u32>,
    most: usize,
}

#[derive(Clone, Default)]
struct Memory {
    state: Arc<Mutex<State>>,
    changed: Arc<tokio::sync::Notify>,
}

impl Memory {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    async fn call(&self, key: u32, value: Option<&str>) -> Result<(), Refused> {
        let slow = {
            let mut state = self.state();
            state.calls.push(value.map_or_else(|| format!("del {key}"), |value| format!("set {key}={value}")));
            assert!(!state.under_way.contains(&key), "two operations on {key} at a time");
            state.under_way.push(key);
            state.most = state.most.max(state.under_way.len());
            state.slow
        };
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        let mut state = self.state();
        state.under_way.retain(|under_way| *under_way != key);
        if let Some(class) = state.refuse.get_mut(&key).and_then(Vec::pop) {
            return Err(Refused(class));
        }
        match value {
            Some(value) => state.held.insert(key, value.to_owned()),
            None => state.held.remove(&key),
        };
        Ok(())
    }
}

impl Operations for Memory {
    type Key = u32;
    type Value = String;
    type Error = Refused;

    async fn update(&self, key: &u32, value: &String) -> Result<(), Refused> {
        self.call(*key, Some(value)).await
    }

    async fn delete(&self, key: &u32) -> Result<(), Refused> {
        self.call(*key, None).await
    }

    async fn observe(&self) -> Result<BTreeMap<u32, String>, Refused> {
        let (observed, slow) = {
            let mut state = self.state();
            if let Some(class) = state.refuse_reading.pop() {
                return Err(Refused(class));
            }
            (state.held.clone(), state.slow_reading)
        };
        if !slow.is_zero() {
            tokio::time::sleep(slow).await;
        }
        Ok(observed)
    }

    async fn changed(&self) {
        self.changed.notified().await;
    }
}

struct Rig {
    target: Memory,
    table: Table<u32, String>,
    status: Arc<Table<String, TargetStatus>>,
    handle: Handle<u32, String>,
    cancel: CancellationToken,
}

impl Rig {
    fn start(target: Memory) -> Self {
        Self::with(target, SERIAL)
    }

    fn with(target: Memory, concurrency: NonZeroUsize) -> Self {
        let (table, status) = (Table::new("desired"), Arc::new(Table::new("targets")));
        let options = Options {
            name: "memory",
            full_pass: Duration::from_secs(300),
            backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(30) },
            prune: true,
            concurrency,
        };
        let cancel = CancellationToken::new();
        let with = Reconcile::new(options, table.reader(), Arc::clone(&status), Clock::system(), cancel.clone());
        let handle = with.handle();
        tokio::spawn(run(target.clone(), with));
        Self { target, table, status, handle, cancel }
    }

    fn set(&self, key: u32, value: Option<&str>) {
        self.table.modify(|rows| match value {
            Some(value) => rows.insert(key, value.to_owned()),
            None => drop(rows.remove(&key)),
        });
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
async fn nothing_is_changed_before_the_table_is_synced() {
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
    assert_eq!(rig.status(), TargetStatus { complete: true, done: 2, failing: Arc::default() });
}

#[tokio::test(start_paused = true)]
async fn a_transient_error_is_retried_and_does_not_block_other_keys() {
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
    // Another row changes: still not retried. Another value: tried at once.
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
    let throttled = ErrorClass::Throttled { retry_after: Some(Duration::from_secs(17)) };
    rig.target.state().refuse.insert(1, vec![throttled]);
    rig.publish(&[(1, "a")]);
    seconds(16).await;
    assert_eq!(rig.calls(), ["set 1=a"]);
    seconds(2).await;
    assert_eq!(rig.calls(), ["set 1=a"]);
}

#[tokio::test(start_paused = true)]
async fn foreign_changes_are_corrected_when_the_target_reports_them_or_in_a_full_pass() {
    let rig = Rig::start(Memory::default());
    rig.publish(&[(1, "a")]);
    seconds(1).await;
    rig.calls();
    rig.target.state().held.clear();
    rig.target.changed.notify_one();
    seconds(1).await;
    assert_eq!(rig.calls(), ["set 1=a"]);
    rig.target.state().held.insert(5, "foreign".into());
    seconds(301).await;
    assert_eq!(rig.calls(), ["del 5"]);
}

#[tokio::test(start_paused = true)]
async fn a_target_that_cannot_be_read_is_retried_and_nothing_is_written_blindly() {
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
async fn a_failed_deletion_is_retried_unless_the_row_is_desired_again() {
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

const PATIENCE: Duration = Duration::from_secs(5);

fn many(keys: std::ops::Range<u32>) -> Vec<(u32, &'static str)> {
    keys.map(|key| (key, "a")).collect()
}

#[tokio::test(start_paused = true)]
async fn several_keys_are_applied_at_a_time_and_deletions_wait_for_all_of_them() {
    let target = Memory::default();
    target.state().held = (100..110).map(|key| (key, "old".into())).collect();
    target.state().slow = Duration::from_secs(1);
    let rig = Rig::with(target, SERIAL.saturating_add(3));
    rig.publish(&many(0..10));
    tokio::time::sleep(Duration::from_millis(2500)).await;
    // Two rounds of four are complete, and two keys are left for the third.
    let calls = rig.calls();
    assert_eq!(calls.len(), 10, "{calls:?}");
    assert!(calls.iter().all(|call| call.starts_with("set ")), "{calls:?}");
    assert!(!rig.status().complete);
    seconds(10).await;
    assert_eq!(rig.calls(), (100..110).map(|key| format!("del {key}")).collect::<Vec<_>>());
    assert_eq!(rig.target.state().most, 4);
    assert_eq!(rig.status(), TargetStatus { complete: true, done: 10, failing: Arc::default() });
}

#[tokio::test(start_paused = true)]
async fn a_hanging_key_blocks_no_other() {
    let rig = Rig::with(Memory::default(), SERIAL.saturating_add(1));
    rig.target.state().slow = Duration::from_secs(1000);
    rig.publish(&many(0..1));
    seconds(1).await;
    rig.target.state().slow = Duration::ZERO;
    rig.publish(&many(0..9));
    seconds(1).await;
    assert_eq!(rig.target.state().held.len(), 8);
}

#[tokio::test(start_paused = true)]
async fn a_row_that_changes_while_it_is_applied_ends_with_its_last_value() {
    let rig = Rig::with(Memory::default(), SERIAL.saturating_add(3));
    rig.target.state().slow = Duration::from_secs(1);
    rig.publish(&[(1, "a"), (2, "b")]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    rig.publish(&[(1, "b")]);
    tokio::time::sleep(Duration::from_millis(100)).await;
    rig.publish(&[(1, "c")]);
    seconds(10).await;
    assert_eq!(rig.calls(), ["set 1=a", "set 2=b", "set 1=c", "del 2"]);
    assert_eq!(rig.target.state().held, [(1, "c".to_owned())].into());
}

#[tokio::test(start_paused = true)]
async fn what_is_published_while_the_target_is_read_is_applied_at_once_and_not_undone() {
    let rig = Rig::start(Memory::default());
    rig.publish(&[(1, "a"), (2, "b")]);
    seconds(299).await;
    rig.calls();
    // The full pass of the fifth minute reads the state before the next two changes.
    rig.target.state().slow_reading = Duration::from_secs(10);
    seconds(3).await;
    rig.publish(&[(1, "a"), (3, "c")]);
    seconds(1).await;
    assert_eq!(rig.calls(), ["set 3=c", "del 2"]);
    seconds(30).await;
    assert_eq!(rig.calls(), [""; 0]);
    assert_eq!(rig.target.state().held.keys().copied().collect::<Vec<_>>(), [1, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_new_row_does_not_wait_for_the_end_of_a_long_list() {
    let rig = Rig::start(Memory::default());
    rig.target.state().slow = Duration::from_secs(1);
    rig.publish(&many(0..100));
    tokio::time::sleep(Duration::from_millis(2500)).await;
    rig.set(1000, Some("new"));
    seconds(1).await;
    assert_eq!(rig.calls().last().map(String::as_str), Some("set 1000=new"));
    seconds(200).await;
    assert_eq!(rig.target.state().held.len(), 101);
}

#[tokio::test(start_paused = true)]
async fn a_publisher_can_wait_until_a_row_is_realised() {
    let rig = Rig::start(Memory::default());
    rig.target.state().slow = Duration::from_secs(1);
    rig.publish(&many(0..100));
    rig.set(50, Some("b"));
    rig.handle.realised(50, PATIENCE).await.unwrap();
    // It was the next to be applied, before others.
    assert_eq!(rig.target.state().held.get(&50).map(String::as_str), Some("b"));
    assert!(rig.target.state().held.len() < 5);
    // The same for a deletion, and at once for a row that is in the desired state.
    rig.set(50, None);
    rig.handle.realised(50, PATIENCE).await.unwrap();
    assert!(!rig.target.state().held.contains_key(&50));
    rig.calls();
    rig.handle.realised(50, PATIENCE).await.unwrap();
    assert!(!rig.calls().iter().any(|call| call.ends_with(" 50")));
}

// An earlier row in the target is not the one that is waited for.
#[tokio::test(start_paused = true)]
async fn a_reader_can_wait_until_a_given_value_is_published_and_realised() {
    let rig = Rig::start(Memory::default());
    rig.publish(&[(1, "a")]);
    seconds(1).await;
    assert_eq!(rig.status().done, 1);
    let late = Err(NotRealised::Late { target: "memory", within: PATIENCE });
    assert_eq!(rig.handle.has(2, "b".into(), PATIENCE).await, late);
    assert_eq!(rig.handle.has(1, "b".into(), PATIENCE).await, late);
    rig.target.state().slow = Duration::from_secs(1);
    let waits = tokio::spawn(rig.handle.has(2, "b".into(), PATIENCE));
    seconds(1).await;
    rig.publish(&[(2, "b")]);
    assert_eq!(waits.await.unwrap(), Ok(()));
    assert_eq!(rig.target.state().held.get(&2).map(String::as_str), Some("b"));
    rig.calls();
    assert_eq!(rig.handle.has(2, "b".into(), PATIENCE).await, Ok(()));
    assert_eq!(rig.calls(), [] as [String; 0]);
    rig.target.state().refuse.insert(3, vec![ErrorClass::Transient]);
    rig.publish(&[(2, "b"), (3, "c")]);
    let refused = Err(NotRealised::Failed("target says Transient".to_owned()));
    assert_eq!(rig.handle.has(3, "c".into(), PATIENCE).await, refused);
}

#[tokio::test(start_paused = true)]
async fn a_row_is_realised_for_its_waiter_before_the_target_was_read_and_the_table_has_synced() {
    let target = Memory::default();
    target.state().held.insert(7, "of before".into());
    target.state().refuse_reading = vec![ErrorClass::Permanent];
    let rig = Rig::start(target);
    rig.set(1, Some("a"));
    rig.handle.realised(1, PATIENCE).await.unwrap();
    assert_eq!(rig.calls(), ["set 1=a"]);
    // Synced, but the target cannot be read: still only rows with waiting callers.
    rig.publish(&[(1, "a"), (2, "b")]);
    seconds(1).await;
    rig.set(2, None);
    rig.handle.realised(2, PATIENCE).await.unwrap();
    assert_eq!(rig.calls(), ["del 2"]);
    seconds(600).await;
    assert_eq!(rig.calls(), ["del 7"]);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_the_error_of_a_try_that_its_asking_makes() {
    let rig = Rig::start(Memory::default());
    rig.publish(&[]);
    seconds(1).await;
    rig.target.state().refuse.insert(1, vec![ErrorClass::Permanent; 2]);
    rig.publish(&[(1, "a")]);
    let refused = Err(NotRealised::Failed("target says Permanent".to_owned()));
    assert_eq!(rig.handle.realised(1, PATIENCE).await, refused);
    // A permanent error is not retried on a timer, but for a waiting caller.
    seconds(100).await;
    assert_eq!(rig.calls(), ["set 1=a"]);
    assert_eq!(rig.handle.realised(1, PATIENCE).await, refused);
    assert_eq!(rig.status().failing["1"].attempts, 2);
    assert_eq!(rig.handle.realised(1, PATIENCE).await, Ok(()));
    assert!(rig.status().failing.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_a_timeout_another_value_or_the_end_of_the_reconciler() {
    let rig = Rig::start(Memory::default());
    rig.target.state().slow = Duration::from_secs(1000);
    rig.publish(&[(1, "a")]);
    assert_eq!(rig.handle.realised(1, PATIENCE).await, Err(NotRealised::Late { target: "memory", within: PATIENCE }));
    let waits = tokio::spawn(rig.handle.realised(1, PATIENCE));
    seconds(1).await;
    rig.publish(&[(1, "b")]);
    assert_eq!(waits.await.unwrap(), Err(NotRealised::Superseded { target: "memory" }));
    let waits = tokio::spawn(rig.handle.realised(1, PATIENCE));
    seconds(1).await;
    rig.cancel.cancel();
    assert_eq!(waits.await.unwrap(), Err(NotRealised::Ended));
}

#[tokio::test(start_paused = true)]
async fn an_operation_under_way_is_finished_before_the_loop_ends() {
    let target = Memory::default();
    target.state().slow = Duration::from_secs(3);
    let (table, status) = (Table::new("desired"), Arc::new(Table::new("targets")));
    table.publish([(1, "a".to_owned()), (2, "b".to_owned())].into());
    let cancel = CancellationToken::new();
    let options = Options {
        name: "memory",
        full_pass: Duration::from_secs(300),
        backoff: Backoff::default(),
        prune: true,
        concurrency: SERIAL,
    };
    let with = Reconcile::new(options, table.reader(), status, Clock::system(), cancel.clone());
    let running = tokio::spawn(run(target.clone(), with));
    seconds(1).await;
    cancel.cancel();
    running.await.unwrap();
    assert_eq!(target.state().held, [(1, "a".to_owned())].into());
}

#[tokio::test(start_paused = true)]
async fn a_target_that_changes_with_each_write_is_read_once_for_many() {
    let target = Memory::default();
    target.state().slow = Duration::from_millis(10);
    let rig = Rig::start(target);
    rig.publish(&many(0..10));
    tokio::time::sleep(Duration::from_millis(50)).await;
    rig.target.state().refuse_reading = vec![ErrorClass::Transient];
    rig.target.changed.notify_one();
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(rig.target.state().refuse_reading.len(), 1, "not read while writes are under way");
    seconds(1).await;
    assert!(rig.target.state().refuse_reading.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_status_of_many_failing_rows_is_published_from_time_to_time() {
    let rig = Rig::with(Memory::default(), API_CALLS);
    rig.target.state().refuse = (0..100).map(|key| (key, vec![ErrorClass::Permanent])).collect();
    rig.publish(&many(0..100));
    seconds(2).await;
    assert_eq!(rig.status().failing.len(), 100);
    let revision = rig.status.snapshot().revision;
    seconds(100).await;
    assert_eq!(rig.status.snapshot().revision, revision, "nothing has changed");
}
