//! The operator's IPAM: follows the CiliumNodes, has a mode plan, makes its records durable and publishes its writes.

use crate::clock::Clock;
use crate::tables::rows::{CiliumNodeIpam, CiliumNodeRow};
use crate::tables::{Reader, Rows, Table, Waits};
use cistern_core::ipam::cluster::records::{RecordSet, Records};
use cistern_core::ipam::cluster::{ClusterMode, Input, Node, NodePlan, Plan, PoolName};
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Records that outlive a leader.
pub trait RecordStorage: Send {
    /// Reads the records of these pools.
    ///
    /// # Errors
    /// The reason, human-readable.
    fn read(&mut self, pools: &BTreeSet<PoolName>) -> impl Future<Output = Result<RecordSet, String>> + Send;
    /// Replaces exactly the records of a pool that were read or written last.
    ///
    /// # Errors
    /// See [`NotWritten`].
    fn write(&mut self, pool: &str, records: &Records) -> impl Future<Output = Result<(), NotWritten>> + Send;
}

/// Why the records of a pool were not replaced.
#[derive(Debug)]
pub enum NotWritten {
    /// The reason, human-readable. The plan remains valid, and the write is retried.
    Failed(String),
    /// Another client replaced the records: plans made without them are void.
    Replaced(Records),
}

/// Minimum interval of passes, so that a burst of nodes is handled in one (`ipam` 2.2.9).
pub const PLAN_INTERVAL: Duration = Duration::from_secs(1);

/// Delay before reading or writing the records is retried.
const RECORDS_RETRY: Duration = Duration::from_secs(2);

/// After suspected data loss, only re-confirm existing pod CIDRs for this long, while agents list theirs again. Must
/// exceed `watch::DEAD_AFTER`.
pub const SETTLE: Duration = Duration::from_secs(120);

/// A write that timed out, also of an earlier leader, may still arrive within this time: kube-apiserver ends a request
/// after a minute. Then the records are read once more.
const LATE_WRITE_RECHECK: Duration = Duration::from_secs(70);

/// Without records, a CiliumNode older than this is from before the first leader; also the symptom of a restored etcd
/// snapshot.
const PREEXISTING_AGE: Duration = Duration::from_secs(120);

const WAIT: &str = "block records";

/// Runs until dropped. `cilium_nodes` must be from a list made after the election.
///
/// The records are durable before nodes are written: the quarantine of a pod CIDR must be recorded before any write
/// that depends on it.
pub async fn run<M: ClusterMode, R: RecordStorage>(
    mode: M,
    mut cilium_nodes: Reader<String, CiliumNodeRow>,
    mut store: R,
    mut doubted: watch::Receiver<Option<Instant>>,
    desired: Arc<Table<String, CiliumNodeIpam>>,
    waits: Waits,
    clock: Clock,
) {
    let pools = mode.pools();
    let recorded = loop {
        match store.read(&pools).await {
            Ok(records) => break records,
            Err(reason) => {
                waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                tokio::time::sleep(RECORDS_RETRY).await;
            }
        }
    };
    waits.end(WAIT);
    let mut ledger = mode.take_over(&recorded, clock.now());
    let mut trust = Trust { durable: recorded.clone(), recorded, surprised: None, attempted: BTreeMap::new() };
    let mut followed = None;
    let mut read_again = false;
    let mut last_doubt = None;
    let mut look_at = Instant::now() + LATE_WRITE_RECHECK;
    loop {
        let begun = Instant::now();
        let snapshot = cilium_nodes.synced().await;
        match followed {
            None if trust.is_empty() && has_preexisting(&snapshot.rows, clock.now()) => {
                trust.surprised = Some(begun);
            }
            Some(then) => read_again |= !snapshot.followed.is_same_list(then),
            None => {}
        }
        followed = Some(snapshot.followed);
        // A server restored to an older state has older records, too.
        let doubt = *doubted.borrow_and_update();
        read_again |= doubt != last_doubt;
        last_doubt = doubt;
        if look_at <= begun {
            (read_again, look_at) = (true, begun + MAX_IDLE);
        }
        if read_again {
            match store.read(&pools).await {
                Ok(now) => {
                    read_again = false;
                    if trust.replace_all(now, begun) {
                        ledger = mode.take_over(&trust.durable, clock.now());
                        continue;
                    }
                }
                Err(reason) => {
                    waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                    tokio::time::sleep(RECORDS_RETRY).await;
                    continue;
                }
            }
        }
        let settled_at = doubt.max(trust.surprised).map(|at| at + SETTLE).filter(|at| *at > begun);
        let input = input(&snapshot.rows, settled_at.is_none());
        let Plan { nodes, records, ledger: next } = mode.plan(&input, ledger, clock.now());
        ledger = next;
        let written = match records {
            Some(records) => make_durable(&mut store, &mut trust, records, begun, &waits).await,
            None => Written::NotYet,
        };
        match written {
            Written::Durable => waits.end(WAIT),
            Written::Failed => {
                look_at = begun + LATE_WRITE_RECHECK;
                tokio::time::sleep(RECORDS_RETRY).await;
                continue;
            }
            Written::Replaced => {
                ledger = mode.take_over(&trust.durable, clock.now());
                continue;
            }
            Written::NotYet => {
                tokio::time::sleep(RECORDS_RETRY).await;
                continue;
            }
        }
        let row = |(name, row): (&String, &CiliumNodeRow)| (name.clone(), write_of(row, nodes.get(name)));
        desired.publish(snapshot.rows.iter().map(row).collect());
        // Wake when a quarantine ends, which frees a pod CIDR for a waiting node; after an hour at most.
        tokio::select! {
            biased;
            () = cilium_nodes.changed() => {}
            _ = doubted.changed() => {}
            () = tokio::time::sleep(until_quarantine_ends(&trust.recorded, clock.now())) => {}
            () = tokio::time::sleep_until(settled_at.unwrap_or(begun + MAX_IDLE).min(look_at)) => {}
        }
        // The first node after a pause is served at once; a burst shares one pass.
        if !nodes.is_empty() {
            tokio::time::sleep_until(begun + PLAN_INTERVAL).await;
        }
    }
}

/// What became of the records of a plan.
enum Written {
    /// All are durable.
    Durable,
    /// Some are not; the write is retried.
    Failed,
    /// Another client replaced them.
    Replaced,
    /// The input is not synced.
    NotYet,
}

/// Writes the records that differ, pool by pool.
async fn make_durable<R: RecordStorage>(
    store: &mut R,
    trust: &mut Trust,
    records: RecordSet,
    begun: Instant,
    waits: &Waits,
) -> Written {
    for (pool, records) in records {
        if trust.recorded.get(&pool) == Some(&records) {
            continue;
        }
        match store.write(&pool, &records).await {
            Ok(()) => {
                trust.durable.insert(pool.clone(), records.clone());
                trust.recorded.insert(pool, records);
            }
            Err(NotWritten::Failed(reason)) => {
                trust.attempted.insert(pool, records);
                waits.begin(WAIT, reason, Some(RECORDS_RETRY));
                return Written::Failed;
            }
            Err(NotWritten::Replaced(now)) => {
                trust.replace(pool, now, begun);
                return Written::Replaced;
            }
        }
    }
    Written::Durable
}

/// The leader's view of the records.
struct Trust {
    /// Current content.
    recorded: RecordSet,
    /// What was durable at some time, even if another client replaced it.
    durable: RecordSet,
    /// When records were found that this leader did not write, which also suggests data loss.
    surprised: Option<Instant>,
    /// A write without an answer, which may still arrive.
    attempted: RecordSet,
}

impl Trust {
    fn is_empty(&self) -> bool {
        self.recorded.values().all(|records| *records == Records::default())
    }

    /// Takes over what is there now; answers whether it differs.
    fn replace_all(&mut self, now: RecordSet, at: Instant) -> bool {
        let none = Records::default();
        let differs = |(pool, records): &(PoolName, Records)| self.recorded.get(pool).unwrap_or(&none) != records;
        let different: Vec<(PoolName, Records)> = now.into_iter().filter(differs).collect();
        let any = !different.is_empty();
        for (pool, records) in different {
            self.replace(pool, records, at);
        }
        any
    }

    /// Other records were found, of another client or of a late write.
    fn replace(&mut self, pool: PoolName, now: Records, at: Instant) {
        if self.attempted.get(&pool) != Some(&now) {
            tracing::warn!("pod CIDR records of pool {pool} were replaced by another client; planning again with both");
            self.surprised = Some(at);
        }
        let durable = self.durable.entry(pool.clone()).or_default();
        *durable = now.clone().adopt(durable);
        self.recorded.insert(pool, now);
    }
}

/// The desired content of a row's object: the planned one, else the current one.
fn write_of(row: &CiliumNodeRow, planned: Option<&NodePlan>) -> CiliumNodeIpam {
    let pod_cidrs = planned
        .and_then(|node| node.pod_cidrs.as_ref())
        .map_or_else(|| row.pod_cidrs.clone(), |nets| nets.iter().map(ToString::to_string).collect());
    let (error, verdict_annotation) = planned.map_or_else(
        || (row.operator_error.clone(), row.verdict_annotation.clone()),
        |node| (node.verdict.as_ref().map(|verdict| verdict.text.clone()), node.annotation.clone()),
    );
    CiliumNodeIpam {
        uid: row.uid.clone(),
        planned_from: row.resource_version.clone(),
        pod_cidrs,
        claim: row.claim.filter(|_| !planned.is_some_and(|node| node.accepted)),
        error,
        withdraws_refusal: row.standing.is_contested && verdict_annotation.is_none(),
        verdict_annotation,
    }
}

fn has_preexisting(rows: &Rows<String, CiliumNodeRow>, now: Timestamp) -> bool {
    let age = |row: &CiliumNodeRow| Duration::try_from(now.duration_since(row.created?)).ok();
    rows.values().filter_map(age).any(|age| age > PREEXISTING_AGE)
}

const MAX_IDLE: Duration = Duration::from_secs(3600);

fn until_quarantine_ends(records: &RecordSet, now: Timestamp) -> Duration {
    records
        .values()
        .flat_map(|records| &records.quarantine)
        .map(|record| Duration::try_from(record.until.duration_since(now)).unwrap_or(Duration::ZERO))
        .min()
        .unwrap_or(MAX_IDLE)
        .clamp(PLAN_INTERVAL, MAX_IDLE)
}

fn input(rows: &Rows<String, CiliumNodeRow>, settled: bool) -> Input {
    let nodes = rows
        .iter()
        .map(|(name, row)| Node {
            name: name.clone(),
            uid: row.uid.clone(),
            created: row.created.unwrap_or(Timestamp::UNIX_EPOCH),
            deleting: row.deleting || row.unreadable.is_some(),
            pod_cidrs: row.pod_cidrs.clone(),
            claim: row.claim.map(IpNet::V4),
            error: row.operator_error.clone().unwrap_or_default(),
            annotation: row.verdict_annotation.clone(),
        })
        .collect();
    Input { nodes, synced: true, settled }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::sync::Mutex;

    /// A mode of two pools: nodes get one address of each, by the order of their names. All that a mode is.
    struct TwoAddresses;

    impl ClusterMode for TwoAddresses {
        type Ledger = RecordSet;

        fn pools(&self) -> BTreeSet<PoolName> {
            ["blue", "red"].map(str::to_owned).into()
        }

        fn take_over(&self, records: &RecordSet, _: Timestamp) -> RecordSet {
            records.clone()
        }

        fn plan(&self, input: &Input, mut ledger: RecordSet, _: Timestamp) -> Plan<RecordSet> {
            let mut nodes = BTreeMap::new();
            for node in &input.nodes {
                let mut address = |(pool, network): (&str, u8)| {
                    let records = ledger.entry(pool.to_owned()).or_default();
                    let next = u8::try_from(records.blocks.len()).unwrap();
                    let new = || vec![IpNet::from(std::net::IpAddr::V4(Ipv4Addr::new(192, 0, network, next)))];
                    records.blocks.entry(node.name.clone()).or_insert_with(new).clone()
                };
                let pod_cidrs: Vec<IpNet> = [("blue", 1), ("red", 2)].into_iter().flat_map(&mut address).collect();
                let listed: Vec<String> = pod_cidrs.iter().map(ToString::to_string).collect();
                let list = (node.pod_cidrs != listed).then_some(pod_cidrs);
                nodes.extend(NodePlan::new(node, list, None, false).map(|plan| (node.name.clone(), plan)));
            }
            Plan { nodes, records: Some(ledger.clone()), ledger }
        }
    }

    /// Objects by pool, with faults.
    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<State>>);

    #[derive(Default)]
    struct State {
        records: RecordSet,
        /// Answers of the next writes of a pool.
        refuse: BTreeMap<PoolName, Vec<NotWritten>>,
        writes: Vec<PoolName>,
    }

    impl RecordStorage for Memory {
        async fn read(&mut self, pools: &BTreeSet<PoolName>) -> Result<RecordSet, String> {
            let state = self.0.lock().unwrap();
            let of = |pool: &PoolName| (pool.clone(), state.records.get(pool).cloned().unwrap_or_default());
            Ok(pools.iter().map(of).collect())
        }

        async fn write(&mut self, pool: &str, records: &Records) -> Result<(), NotWritten> {
            let mut state = self.0.lock().unwrap();
            if let Some(refused) = state.refuse.get_mut(pool).and_then(Vec::pop) {
                if let NotWritten::Replaced(theirs) = &refused {
                    state.records.insert(pool.to_owned(), theirs.clone());
                }
                return Err(refused);
            }
            state.writes.push(pool.to_owned());
            state.records.insert(pool.to_owned(), records.clone());
            Ok(())
        }
    }

    struct Rig {
        store: Memory,
        nodes: Table<String, CiliumNodeRow>,
        desired: Arc<Table<String, CiliumNodeIpam>>,
        waits: Waits,
        task: tokio::task::JoinHandle<()>,
        _doubt: watch::Sender<Option<Instant>>,
    }

    impl Rig {
        fn start(store: Memory, names: &[&str]) -> Self {
            let clock = Clock::following_runtime("2026-01-01T00:00:00Z".parse().unwrap());
            let (nodes, desired) = (Table::new("nodes"), Arc::new(Table::new("desired")));
            let row =
                |name: &&str| ((*name).to_owned(), CiliumNodeRow { uid: format!("u-{name}"), ..Default::default() });
            nodes.publish(names.iter().map(row).collect());
            let (doubt, doubted) = watch::channel(None);
            let waits = Waits::new(clock);
            let run =
                run(TwoAddresses, nodes.reader(), store.clone(), doubted, Arc::clone(&desired), waits.clone(), clock);
            let task = tokio::spawn(run);
            Self { store, nodes, desired, waits, task, _doubt: doubt }
        }

        fn lists(&self) -> BTreeMap<String, Vec<String>> {
            self.desired.snapshot().rows.iter().map(|(name, row)| (name.clone(), row.pod_cidrs.clone())).collect()
        }
    }

    impl Drop for Rig {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_mode_is_a_value_whose_records_are_durable_before_its_writes_are_published() {
        let store = Memory::default();
        store.0.lock().unwrap().refuse.insert("red".into(), vec![NotWritten::Failed("disk full".into())]);
        let rig = Rig::start(store, &["a", "b"]);
        tokio::time::sleep(RECORDS_RETRY / 2).await;
        // One of the two objects could not be written: nothing is published of either.
        assert!(!rig.desired.snapshot().synced);
        assert!(rig.waits.reader().snapshot().rows.contains_key(WAIT));
        tokio::time::sleep(RECORDS_RETRY).await;
        assert_eq!(rig.lists()["a"], ["192.0.1.0/32", "192.0.2.0/32"]);
        assert_eq!(rig.lists()["b"], ["192.0.1.1/32", "192.0.2.1/32"]);
        assert!(!rig.waits.reader().snapshot().rows.contains_key(WAIT));
        // What is written already is not written again, and a pool without change is left alone.
        assert_eq!(rig.store.0.lock().unwrap().writes, ["blue", "red"]);
        rig.nodes.modify(|rows| {
            for name in ["a", "b"] {
                rows.get_mut(name).unwrap().resource_version = "2".to_owned();
            }
        });
        tokio::time::sleep(PLAN_INTERVAL * 2).await;
        assert_eq!(rig.store.0.lock().unwrap().writes.len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn the_records_of_another_writer_void_the_plan_and_are_planned_with() {
        let blocks = BTreeMap::from([("z".to_owned(), vec!["192.0.2.0/32".parse().unwrap()])]);
        let theirs = Records { blocks, ..Records::default() };
        let store = Memory::default();
        store.0.lock().unwrap().refuse.insert("red".into(), vec![NotWritten::Replaced(theirs)]);
        let rig = Rig::start(store, &["a"]);
        tokio::time::sleep(PLAN_INTERVAL).await;
        assert_eq!(rig.lists()["a"], ["192.0.1.0/32", "192.0.2.1/32"]);
        let records = rig.store.0.lock().unwrap().records.clone();
        assert_eq!(records["red"].blocks.len(), 2);
    }
}
