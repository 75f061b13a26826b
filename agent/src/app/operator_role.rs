//! The tasks of the operator: always the election, the others while this process leads.

use super::supervisor::Supervisor;
use crate::clock::Clock;
use crate::controllers::ipam_cluster::{NotWritten, RecordStorage};
use crate::controllers::{ipam_cluster, notices, orphans};
use crate::kubernetes::client::Client;
use crate::kubernetes::election::{self, Election, LeaderRow, Scope};
use crate::kubernetes::orphans::Orphans;
use crate::kubernetes::pod_cidrs::PodCidrs;
use crate::kubernetes::records::{RecordStore, WriteError};
use crate::kubernetes::{Leadership, OPERATOR, crd, events, views, watch as watches};
use crate::reconciler::{self, API_CALLS, Options, Reconcile, TargetStatus};
use crate::tables::notices::Notices;
use crate::tables::rows::{CiliumNodeIpam, CiliumNodeRow, NodeRow};
use crate::tables::{Table, Waits};
use cistern_core::ipam::cluster::records::{RecordSet, Records};
use cistern_core::ipam::cluster::{ClusterMode, PoolName, cluster_pool};
use cistern_core::reconcile::backoff::Backoff;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Parts of the role.
#[derive(Clone)]
pub struct Operator {
    /// The API server.
    pub client: Client,
    /// Parameters of the election; its namespace is also that of the records.
    pub election: Election,
    /// What allocates.
    pub ipam: Ipam,
    /// Output: state of the election.
    pub leader: Arc<Table<(), LeaderRow>>,
    /// Output: state of the reconcilers.
    pub targets: Arc<Table<String, TargetStatus>>,
    /// Output: waits.
    pub waits: Waits,
    /// Time.
    pub clock: Clock,
}

/// The mode of the operator.
#[derive(Debug, Clone)]
pub enum Ipam {
    /// Another program writes what nodes allocate from.
    External,
    /// Mode `cluster-pool`.
    ClusterPool(Box<cluster_pool::Settings>),
}

/// Takes part in the election until cancelled. The leader's tasks are cancelled *and joined* before the Lease can
/// expire or be released, so that no two processes act as leader.
///
/// # Errors
/// A task that ended unexpectedly, by name.
pub async fn run(operator: Operator, cancel: CancellationToken) -> anyhow::Result<()> {
    let (until, mut leading) = watch::channel(None);
    let (busy, busy_seen) = watch::channel(false);
    let (doubt, doubted) = watch::channel(None);
    let election_cancel = CancellationToken::new();
    let mut election = tokio::spawn(election::run(
        operator.client.clone(),
        operator.election.clone(),
        Scope { until, busy: busy_seen, doubt },
        Arc::clone(&operator.leader),
        operator.waits.clone(),
        operator.clock,
        election_cancel.clone(),
    ));
    let outcome = loop {
        tokio::select! {
            biased;
            () = cancel.cancelled() => break Ok(()),
            // Also while leading: without the election, leadership has ended.
            ended = &mut election => return Err(unexpected(ended)),
            () = begun(&mut leading) => {}
        }
        busy.send_replace(true);
        let scope = CancellationToken::new();
        let lead = lead(&operator, Leadership::new(leading.clone()), doubted.clone(), &scope);
        tokio::pin!(lead);
        let outcome = tokio::select! {
            biased;
            outcome = &mut lead => outcome,
            () = cancel.cancelled() => { scope.cancel(); lead.await }
            () = ended(&mut leading) => { scope.cancel(); lead.await }
        };
        busy.send_replace(false);
        if let Err(error) = outcome {
            break Err(error);
        }
        if cancel.is_cancelled() {
            break Ok(());
        }
    };
    election_cancel.cancel();
    election.await.map_err(|error| unexpected(Err(error)))?;
    outcome
}

/// The election ended without being cancelled.
fn unexpected(ended: Result<(), tokio::task::JoinError>) -> anyhow::Error {
    const TASK: &str = "task \"election\" of operator";
    match ended {
        Ok(()) => anyhow::anyhow!("{TASK} ended unexpectedly"),
        Err(error) => anyhow::Error::new(error).context(TASK),
    }
}

/// Returns when this process leads. A deadline that has passed does not count, even before the election reports it:
/// otherwise the leader's tasks would start and stop repeatedly until then.
async fn begun(leading: &mut watch::Receiver<Option<Instant>>) {
    if leading.wait_for(|until| until.is_some_and(|until| until > Instant::now())).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Returns when leadership ends, by the election or by the clock.
async fn ended(leading: &mut watch::Receiver<Option<Instant>>) {
    loop {
        let until = *leading.borrow_and_update();
        let Some(until) = until else { return };
        tokio::select! {
            biased;
            () = tokio::time::sleep_until(until) => return,
            changed = leading.changed() => if changed.is_err() { return },
        }
    }
}

/// All tasks of the leader, until `scope` is cancelled.
async fn lead(
    operator: &Operator,
    leadership: Leadership,
    doubted: watch::Receiver<Option<Instant>>,
    scope: &CancellationToken,
) -> anyhow::Result<()> {
    tokio::select! {
        biased;
        () = scope.cancelled() => return Ok(()),
        () = apply_crds(operator, &leadership) => {}
    }
    let mut tasks = Supervisor::new("operator", scope);
    let token = tasks.token();
    let Operator { client, waits, targets, clock, .. } = operator.clone();
    let cilium_nodes: Arc<Table<String, CiliumNodeRow>> = Arc::new(Table::new("operator-cilium-nodes"));
    let nodes: Arc<Table<String, NodeRow>> = Arc::new(Table::new("operator-nodes"));
    let orphaned: Arc<Table<String, String>> = Arc::new(Table::new("operator-orphans"));

    tasks.spawn_loop(
        "watch ciliumnodes",
        watches::run(
            "operator ciliumnodes",
            client.clone(),
            watches::Which::All,
            Arc::clone(&cilium_nodes),
            views::cilium_nodes(),
            waits.clone(),
            token.clone(),
        ),
    );
    tasks.spawn_loop(
        "watch nodes",
        watches::run(
            "operator nodes",
            client.clone(),
            watches::Which::All,
            Arc::clone(&nodes),
            views::nodes(),
            waits.clone(),
            token.clone(),
        ),
    );
    let ipam = IpamScope { operator, leadership: &leadership, cilium_nodes: &cilium_nodes, doubted };
    match operator.ipam.clone() {
        Ipam::External => {}
        Ipam::ClusterPool(settings) => ipam.spawn("ipam cluster-pool", *settings, &mut tasks),
    }
    let notices_table = Notices::new(clock);
    tasks.spawn_loop("notices", until(token.clone(), notices::cluster(cilium_nodes.reader(), notices_table.clone())));
    let reporter = events::Reporter { controller: OPERATOR, instance: operator.election.identity.clone() };
    let write =
        events::run(client.clone(), reporter, notices_table.reader(), cilium_nodes.reader(), clock, token.clone());
    tasks.spawn_loop("write events", write);
    let plan = orphans::run(nodes.reader(), cilium_nodes.reader(), Arc::clone(&orphaned));
    tasks.spawn_loop("orphaned CiliumNodes", until(token.clone(), plan));
    tasks.spawn_loop(
        "delete orphaned CiliumNodes",
        reconciler::run(
            Orphans::new(client, leadership),
            Reconcile::new(options("orphaned CiliumNodes"), orphaned.reader(), targets, clock, token),
        ),
    );
    tasks.join().await
}

/// What a leader's IPAM mode works with.
struct IpamScope<'a> {
    operator: &'a Operator,
    leadership: &'a Leadership,
    cilium_nodes: &'a Arc<Table<String, CiliumNodeRow>>,
    doubted: watch::Receiver<Option<Instant>>,
}

impl IpamScope<'_> {
    /// Runs a mode, and the writer of what it plans.
    fn spawn<M: ClusterMode>(self, name: &'static str, mode: M, tasks: &mut Supervisor) {
        let Self { operator, leadership, cilium_nodes, doubted } = self;
        let Operator { client, waits, targets, clock, .. } = operator.clone();
        let token = tasks.token();
        let desired: Arc<Table<String, CiliumNodeIpam>> = Arc::new(Table::new("operator-pod-cidrs"));
        let store = Durable(RecordStore::new(client.clone(), operator.election.namespace.clone(), leadership.clone()));
        let plan = ipam_cluster::run(mode, cilium_nodes.reader(), store, doubted, Arc::clone(&desired), waits, clock);
        tasks.spawn_loop(name, until(token.clone(), plan));
        tasks.spawn_loop(
            "write pod CIDRs",
            reconciler::run(
                PodCidrs::new(client, cilium_nodes.reader(), leadership.clone()),
                Reconcile::new(options("CiliumNode pod CIDRs"), desired.reader(), targets, clock, token),
            ),
        );
    }
}

/// The first retry of a write is soon; a full pass every five minutes finds what a watch missed.
fn options(name: &'static str) -> Options {
    Options {
        name,
        full_pass: Duration::from_secs(300),
        backoff: Backoff { base: Duration::from_millis(200), max: Duration::from_secs(15) },
        prune: false,
        concurrency: API_CALLS,
    }
}

const CRD_RETRY: Duration = Duration::from_secs(2);

async fn apply_crds(operator: &Operator, leadership: &Leadership) {
    const WAIT: &str = "CRDs";
    while let Err(error) = crd::apply(&operator.client, leadership).await {
        operator.waits.begin(WAIT, error.to_string(), Some(CRD_RETRY));
        tokio::time::sleep(CRD_RETRY).await;
    }
    operator.waits.end(WAIT);
}

/// Runs a controller, which never ends itself, until cancelled.
pub(super) async fn until(cancel: CancellationToken, work: impl Future<Output = ()>) {
    tokio::select! {
        biased;
        () = cancel.cancelled() => {}
        () = work => {}
    }
}

/// The operator's ConfigMaps as the planner's records.
struct Durable(RecordStore);

impl RecordStorage for Durable {
    async fn read(&mut self, pools: &BTreeSet<PoolName>) -> Result<RecordSet, String> {
        self.0.read(pools).await.map_err(|error| error.to_string())
    }

    async fn write(&mut self, pool: &str, records: &Records) -> Result<(), NotWritten> {
        self.0.write(pool, records).await.map_err(|error| match error {
            WriteError::Replaced(records) => NotWritten::Replaced(records),
            WriteError::Failed(error) => NotWritten::Failed(error.to_string()),
        })
    }
}
