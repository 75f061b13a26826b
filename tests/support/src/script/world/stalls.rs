//! An agent on a hanging disk and kernel, run as in production: two workers, blocking work on threads, the wall clock.

use super::super::memory::MemoryError;
use super::*;
use cistern::api::http::Probe;
use cistern::api::server::AgentApi;
use cistern::api::types::AddRequest;
use cistern::app::targets::blocking_target;
use cistern::leases::LeaseStore;
use cistern::reconciler::BlockingOperations;
use cistern::tables::rows::RouteTarget;
use cistern_core::ipam::lease::Change;
use ipnet::Ipv4Net;
use std::sync::{Condvar, Mutex};

#[derive(Default)]
struct State {
    stalled: bool,
    /// Threads that hang.
    waiting: usize,
}

/// A switch that makes calls hang.
#[derive(Clone, Default)]
struct Stall(Arc<(Mutex<State>, Condvar)>);

impl Stall {
    fn set(&self, stalled: bool) {
        self.0.0.lock().unwrap().stalled = stalled;
        self.0.1.notify_all();
    }

    /// Blocks the calling thread while stalled.
    fn pass(&self) {
        let mut state = self.0.0.lock().unwrap();
        state.waiting += 1;
        let mut state = self.0.1.wait_while(state, |state| state.stalled).unwrap();
        state.waiting -= 1;
    }

    fn is_hanging(&self) -> bool {
        self.0.0.lock().unwrap().waiting > 0
    }
}

struct Disk {
    stall: Stall,
    below: Box<dyn LeaseStore>,
}

impl LeaseStore for Disk {
    fn write(&mut self, change: &Change) -> Result<(), String> {
        self.stall.pass();
        self.below.write(change)
    }
}

#[derive(Default)]
struct Routes {
    stall: Stall,
    rows: BTreeMap<Ipv4Net, RouteTarget>,
}

impl BlockingOperations for Routes {
    type Key = Ipv4Net;
    type Value = RouteTarget;
    type Error = MemoryError;

    fn update(&mut self, key: &Ipv4Net, value: &RouteTarget) -> Result<(), MemoryError> {
        self.stall.pass();
        self.rows.insert(*key, *value);
        Ok(())
    }

    fn delete(&mut self, key: &Ipv4Net) -> Result<(), MemoryError> {
        self.stall.pass();
        self.rows.remove(key);
        Ok(())
    }

    fn observe(&mut self) -> Result<BTreeMap<Ipv4Net, RouteTarget>, MemoryError> {
        self.stall.pass();
        Ok(self.rows.clone())
    }
}

pub(super) const SETTINGS: &str = r#"
cluster-pool-ipv4-cidr: 10.33.0.0/24
cluster-pool-ipv4-mask-size: "26"
auto-direct-node-routes: "true"
leader-election: "true"
leader-election-lease-duration: 3s
leader-election-renew-deadline: 2s
leader-election-retry-period: 200ms
"#;

/// Deadline of every wait: far beyond what anything here needs.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}

fn renewed(server: &ApiServer) -> Option<Value> {
    let lease = server.get("leases", "kube-system", "cistern-operator").ok()?;
    lease.pointer("/spec/renewTime").cloned()
}

async fn everything_answers(answers: &Answers) {
    let health = async {
        assert!(answers.live().await.ready);
        assert!(answers.ready().await.ready);
        assert!(answers.health().await.ready, "CNI STATUS asks this");
    };
    timeout(PATIENCE, health).await.expect("no probe hangs");
}

#[test]
fn a_hanging_disk_and_kernel_stop_neither_cni_status_nor_probes_nor_the_lease_renewal() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(&Archive::parse(""), 1, 0, None).unwrap();
        world.add_machine("a").unwrap();
        world.machine("a").unwrap().set_namespace("/run/netns/c1", true);
        let (disk, routes) = (Stall::default(), Routes::default());
        let kernel = routes.stall.clone();
        let stall = disk.clone();
        let change = move |mut agent: Agent| {
            agent.ports = Ports::threads();
            agent.targets.routes = blocking_target(routes, &agent.ports.kernel);
            agent.lease_store = Box::new(Disk { stall, below: agent.lease_store });
            agent
        };
        world.start_agent_as("a", SETTINGS, change, |_| {}).unwrap();
        let answers = world.agent("a").unwrap();
        eventually("the agent is ready", || answers.node.health().ready).await;

        disk.set(true);
        kernel.set(true);
        let asking = Arc::clone(&answers);
        let add = tokio::spawn(async move {
            let (container_id, ifname, netns) = ("c1".to_owned(), "eth0".to_owned(), "/run/netns/c1".to_owned());
            asking.add(AddRequest { container_id, ifname, netns, network: None, pod: None, began: None }).await
        });
        world.add_machine("b").unwrap();
        let other = json!({
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNode",
            "metadata": {"name": "b"},
            "spec": {
                "addresses": [{"type": "InternalIP", "ip": "192.168.7.2"}],
                "ipam": {"podCIDRs": ["10.33.0.192/26"]},
            },
        });
        world.server.create(&other).unwrap();
        eventually("the disk hangs", || disk.is_hanging()).await;
        eventually("the kernel hangs", || kernel.is_hanging()).await;

        for _ in 0..3 {
            let before = renewed(&world.server);
            assert!(before.is_some());
            eventually("the Lease is renewed", || renewed(&world.server) != before).await;
            everything_answers(&answers).await;
        }
        let status = timeout(PATIENCE, answers.status()).await.expect("status does not hang");
        assert!(status.waits.iter().any(|wait| wait.name == "lease owner"), "{:?}", status.waits);
        let metrics = timeout(PATIENCE, answers.metrics()).await.expect("metrics do not hang");
        assert!(metrics.contains("cistern_ready 1"), "{metrics}");
        assert!(!add.is_finished() && disk.is_hanging() && kernel.is_hanging());

        disk.set(false);
        kernel.set(false);
        timeout(PATIENCE, add).await.unwrap().unwrap().expect("an address, as soon as the disk answers");
        world.take_role("agent", "a").unwrap().stop().await.unwrap();
    });
}
