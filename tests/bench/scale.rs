//! A cluster of 5,000 nodes: `cargo xtask bench scale`.
//!
//! One real operator and one real agent; the other 4,999 nodes are clients of the small API server that create their
//! CiliumNode and wait for its pod CIDR. They and the server are one process in the network of the agent's node, so what
//! the server costs is in the times, and not in the memory and processor time of the two programs.
//!
//! 1. **Cold start**: operator, agent and clients begin at once. Measured until the last CiliumNode has its pod CIDR.
//! 2. **Steady state**: nothing changes. Every write but the renewal of the leader's Lease is an error.
//! 3. **Churn**: ten writes of other nodes' objects a second. Eight change an annotation, one deletes a node's object, one
//!    creates it again, so that each second one node leaves and one is served.

use anyhow::{Context as _, Result, bail, ensure};
use cistern_tests::apiserver::{ApiServer, Call, Options, kubeconfig, serve};
use cistern_tests::lab::Lab;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval, sleep};

const NODES: u32 = 5_000;
const OWN: &str = "node-0";
/// Maximum number of concurrent writes of clients; in a real cluster each has its own connection, and kube-apiserver a
/// limit.
const AT_ONCE: usize = 32;
const SETTLE: Duration = Duration::from_secs(20);
const STEADY: Duration = Duration::from_secs(60);
const CHURN: Duration = Duration::from_secs(60);
const EVENTS_A_SECOND: u32 = 10;
/// Timeout of a cold start, which is then reported as failed.
const PATIENCE: Duration = Duration::from_secs(300);
/// Set for the process inside the node's network.
const INSIDE: &str = "CISTERN_BENCH_SCALE_INSIDE";

fn main() -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting tokio")?;
        return runtime.block_on(measure());
    }
    let cistern = std::env::var_os("CISTERN").context("CISTERN must name the agent: run `cargo xtask bench scale`")?;
    let lab = Lab::new("f-scale")?;
    let node = lab.node(OWN, "172.16.0.1/12".parse()?)?;
    let mut inside = node.command(std::env::current_exe().context("where this bench is")?);
    let status = inside.env(INSIDE, "1").env("CISTERN", cistern).status().context("starting the inner half")?;
    ensure!(status.success(), "the inner half ended with {status}");
    Ok(())
}

/// The whole measurement, in the node's network.
async fn measure() -> Result<()> {
    let cistern = PathBuf::from(std::env::var_os("CISTERN").context("CISTERN names no program")?);
    let server = ApiServer::new(Options { epoch: jiff::Timestamp::now(), ..Options::default() });
    server.create(&json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": OWN},
        "status": {"addresses": [{"type": "InternalIP", "address": "172.16.0.1"}]},
    }))?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:6443").await.context("listening")?;
    std::fs::write("/run/kubeconfig", kubeconfig(listener.local_addr()?)).context("writing a kubeconfig")?;
    tokio::spawn(serve(server.clone(), listener, std::future::pending()));
    let objects: Api<cistern_crds::CiliumNode> = Api::all(server.client_as("nodes"));

    let begun = Instant::now();
    let operator = Program::start(&cistern, &["operator", "--cluster-pool-ipv4-cidr=10.0.0.0/8"])?;
    let agent = Program::start(&cistern, &["agent", &format!("--node-name={OWN}")])?;
    wait_for("the CRD", || server.list("ciliumnodes").is_ok()).await?;
    stream::iter(1..NODES)
        .map(Ok)
        .try_for_each_concurrent(AT_ONCE, |number| {
            let objects = objects.clone();
            async move { create(&objects, number).await }
        })
        .await?;
    let created = begun.elapsed();
    wait_for("the pod CIDRs", || served(&server) == usize::try_from(NODES).ok()).await?;
    let cold = begun.elapsed();
    report("every node has its pod CIDR after", cold.as_secs_f64(), "s", "30 s");
    println!("  (its clients had created the last object after {:.1} s)", created.as_secs_f64());
    ensure!(distinct(&server)?, "two nodes share a pod CIDR");
    report("operator, most memory so far", operator.memory_mb("VmHWM:")?, "MB", "under 200 MB");

    sleep(SETTLE).await;
    server.clear_calls();
    let (operator_before, agent_before) = (operator.processor_time()?, agent.processor_time()?);
    sleep(STEADY).await;
    let writes = writes(&server.calls());
    report("writes in steady state", writes.values().sum::<usize>(), "", "none");
    for (what, times) in writes {
        println!("  {what}: {times}");
    }
    report("operator in steady state", operator.share_since(operator_before, STEADY)?, "% of a core", "");
    report("agent in steady state", agent.share_since(agent_before, STEADY)?, "% of a core", "");

    server.clear_calls();
    let (operator_before, agent_before) = (operator.processor_time()?, agent.processor_time()?);
    churn(&objects).await?;
    report("agent in churn", agent.share_since(agent_before, CHURN)?, "% of a core", "under 1 %");
    report("operator in churn", operator.share_since(operator_before, CHURN)?, "% of a core", "");
    report("agent, resident", agent.memory_mb("VmRSS:")?, "MB", "under 60 MB");
    report("operator, most memory", operator.memory_mb("VmHWM:")?, "MB", "under 200 MB");
    for (what, times) in self::writes(&server.calls()) {
        println!("  writes in churn: {what}: {times}");
    }
    wait_for("the pod CIDRs after the churn", || served(&server) == usize::try_from(NODES).ok()).await?;
    ensure!(distinct(&server)?, "two nodes share a pod CIDR");
    Ok(())
}

fn report(what: &str, value: impl Into<Figure>, unit: &str, bound: &str) {
    let bound = if bound.is_empty() { String::new() } else { format!("   to reach: {bound}") };
    println!("{what:<36}{:>9} {unit}{bound}", value.into().0);
}

/// A number as printed.
struct Figure(String);

impl From<f64> for Figure {
    fn from(value: f64) -> Self {
        Self(format!("{value:.2}"))
    }
}

impl From<usize> for Figure {
    fn from(value: usize) -> Self {
        Self(value.to_string())
    }
}

fn name(number: u32) -> String {
    format!("node-{number}")
}

async fn create(objects: &Api<cistern_crds::CiliumNode>, number: u32) -> Result<()> {
    let address = std::net::Ipv4Addr::from(u32::from(std::net::Ipv4Addr::new(172, 16, 0, 1)) + number);
    let object = serde_json::from_value(json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name(number)},
        "spec": {"addresses": [{"type": "InternalIP", "ip": address.to_string()}]},
    }))?;
    objects.create(&PostParams::default(), &object).await.with_context(|| format!("creating {}", name(number)))?;
    Ok(())
}

/// Ten events per second, for [`CHURN`].
async fn churn(objects: &Api<cistern_crds::CiliumNode>) -> Result<()> {
    let mut tick = interval(Duration::from_secs(1) / EVENTS_A_SECOND);
    tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let begun = Instant::now();
    // Spread over the cluster, without this agent's node.
    let mut chosen = (0..).map(|step: u32| 1 + step.wrapping_mul(1_237) % (NODES - 1));
    let mut left = None;
    for step in 0_u32.. {
        tick.tick().await;
        if begun.elapsed() >= CHURN {
            break;
        }
        match (step % EVENTS_A_SECOND, chosen.next().unwrap_or(1)) {
            (0, number) if left.is_none() => {
                objects.delete(&name(number), &DeleteParams::default()).await.context("deleting a node")?;
                left = Some(number);
            }
            (5, number) => match left.take() {
                Some(gone) => create(objects, gone).await?,
                None => touch(objects, number, step).await?,
            },
            (_, number) if left != Some(number) => touch(objects, number, step).await?,
            _ => {}
        }
    }
    match left {
        Some(gone) => create(objects, gone).await,
        None => Ok(()),
    }
}

async fn touch(objects: &Api<cistern_crds::CiliumNode>, number: u32, step: u32) -> Result<()> {
    let patch = json!({"metadata": {"annotations": {"bench.cistern.io/step": step.to_string()}}});
    objects
        .patch(&name(number), &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .with_context(|| format!("changing {}", name(number)))?;
    Ok(())
}

fn pod_cidrs(object: &Value) -> &[Value] {
    object.pointer("/spec/ipam/podCIDRs").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// The number of nodes with a pod CIDR; `None` if the kind is not served yet.
fn served(server: &ApiServer) -> Option<usize> {
    let objects = server.list("ciliumnodes").ok()?;
    Some(objects.iter().filter(|object| !pod_cidrs(object).is_empty()).count())
}

/// Whether no two nodes list the same pod CIDR.
fn distinct(server: &ApiServer) -> Result<bool> {
    let objects = server.list("ciliumnodes")?;
    let all: Vec<&str> = objects.iter().flat_map(pod_cidrs).filter_map(Value::as_str).collect();
    Ok(all.iter().collect::<std::collections::BTreeSet<_>>().len() == all.len())
}

/// The writes of the two programs, by manager and resource, without renewals of the Lease.
fn writes(calls: &[Call]) -> BTreeMap<String, usize> {
    let mut counted = BTreeMap::new();
    for call in calls.iter().filter(|call| call.verb.is_write() && call.client != "nodes" && call.resource != "leases")
    {
        *counted.entry(format!("{} {} {}", call.manager, call.verb, call.resource)).or_default() += 1;
    }
    counted
}

async fn wait_for(what: &str, mut ready: impl FnMut() -> bool) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if ready() {
            return Ok(());
        }
        // Counting costs the server time.
        sleep(Duration::from_millis(250)).await;
    }
    bail!("{what} did not come within {} s", PATIENCE.as_secs())
}

/// A process that is killed when dropped.
struct Program(Child);

impl Program {
    fn start(cistern: &Path, arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(cistern);
        command.args(arguments).arg("--k8s-kubeconfig-path=/run/kubeconfig").stdin(Stdio::null());
        let role = arguments.first().copied().unwrap_or_default();
        let log = std::fs::File::create(format!("/run/{role}.log")).context("making a log")?;
        command.stdout(log.try_clone().context("a second handle to the log")?).stderr(log);
        Ok(Self(command.spawn().with_context(|| format!("starting {}", cistern.display()))?))
    }

    fn proc(&self, file: &str) -> Result<String> {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.0.id())).context("the program has ended")
    }

    /// A line of its status, in millions of bytes.
    fn memory_mb(&self, field: &str) -> Result<f64> {
        let kib = self
            .proc("status")?
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok())
            .with_context(|| format!("its status has no {field}"))?;
        Ok(kib * 1024.0 / 1e6)
    }

    /// CPU time so far, user and system.
    fn processor_time(&self) -> Result<f64> {
        let stat = self.proc("stat")?;
        // The name in parentheses may contain blanks; utime and stime are fields 14 and 15 of proc_pid_stat(5).
        let fields = stat.rsplit_once(") ").context("a stat without a name")?.1;
        let ticks: f64 = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
        let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock tick")?;
        #[expect(clippy::cast_precision_loss, reason = "a hundred or a thousand")]
        Ok(ticks / per_second as f64)
    }

    /// Share of a core since `before`, in percent.
    fn share_since(&self, before: f64, during: Duration) -> Result<f64> {
        Ok((self.processor_time()? - before) / during.as_secs_f64() * 100.0)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // An error means that it has terminated already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
