//! The tasks of a node.

use super::agent_api::Answers;
use super::node_status::{MapRows, NodeStatus, POD_ROUTES, ROUTER_ADDRESS};
use super::operator_role::{self, Operator, until};
use super::supervisor::Supervisor;
use super::targets::{Target, Targets};
use crate::api::{http, server};
use crate::blocking::{Blocking, Ports};
use crate::clock::Clock;
use crate::controllers::{condition, masquerade, next_hops, node, notices as tell, peers, routes};
use crate::files;
use crate::kubernetes::cilium_node::OwnNode;
use crate::kubernetes::client::Client;
use crate::kubernetes::node::Annotations;
use crate::kubernetes::node_condition::NodeConditions;
use crate::kubernetes::{self, events, views, watch as watches};
use crate::leases;
use crate::reconciler::{Handle, Options, Reconcile, SERIAL, TargetStatus};
use crate::state::{ServedMarker, StateDir, remembered};
use crate::tables::findings::{Findings, Found};
use crate::tables::notices::Notices;
use crate::tables::rows::{CiliumNodeRow, NodeRow, PoolRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ipam::lease::{Record, RecordTimes, Timings};
use cistern_core::ipam::node::NodeMode;
use cistern_core::ipam::node::cluster_pool::ClusterPool;
use cistern_core::ipam::node::kubernetes::Kubernetes;
use cistern_core::ipam::supply::Grant;
use cistern_core::reconcile::backoff::Backoff;
use cistern_core::settings::{IpamMode, Settings};
use ipnet::IpNet;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

/// Parts of the role. Script tests replace the kernel by memory and the clock.
pub struct Agent {
    /// What this build is.
    pub build: String,
    /// The settings in force.
    pub settings: Settings,
    /// The API server.
    pub client: Client,
    /// The targets.
    pub targets: Targets,
    /// Persistent state.
    pub state: StateDir,
    /// The pod leases' records.
    pub leases: Vec<Record>,
    /// Some of them could not be read.
    pub incomplete: bool,
    /// Persistence of pod leases.
    pub lease_store: Box<dyn leases::LeaseStore>,
    /// Clock of the leases.
    pub lease_clock: Clock,
    /// The machine's current boot.
    pub boot: String,
    /// The machine was rebooted since the leases were written.
    pub rebooted: bool,
    /// Whether the times of the records are those of `lease_clock`.
    pub times: RecordTimes,
    /// Namespaces and devices.
    pub host: Box<dyn leases::Host>,
    /// Random numbers.
    pub draw: Box<dyn FnMut() -> u64 + Send>,
    /// Rows of the kernel maps for the CLI.
    pub maps: Option<MapRows>,
    /// Ports reserved by the host (`ip_local_reserved_ports`).
    pub reserved_ports: Vec<(u16, u16)>,
    /// The operator's controllers, if this process takes part in the election.
    pub operator: Option<Operator>,
    /// The API's socket; `None` if the caller uses [`Running::answers`] directly, and then no probes are served either.
    pub listener: Option<UnixListener>,
    /// Records for CNI STATUS that this node serves.
    pub served: ServedMarker,
    /// Ports for work that may block on the disk or the kernel.
    pub ports: Ports,
    /// State shared with the operator's controllers.
    pub shared: Shared,
}

/// State that agent and operator report to.
#[derive(Clone)]
pub struct Shared {
    /// Time.
    pub clock: Clock,
    /// What is waited for.
    pub waits: Waits,
    /// Findings for the administrator.
    pub findings: Findings,
    /// State of the reconcilers.
    pub targets: Arc<Table<String, TargetStatus>>,
    /// State of the election.
    pub leader: Arc<Table<(), kubernetes::election::LeaderRow>>,
    /// Notices to be published as events about this node.
    pub notices: Notices,
}

impl Shared {
    /// Empty tables.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let targets = Table::new("targets");
        targets.mark_synced();
        Self {
            clock,
            waits: Waits::new(clock),
            findings: Findings::new(clock),
            targets: Arc::new(targets),
            leader: Arc::new(Table::new("leader")),
            notices: Notices::new(clock),
        }
    }
}

/// Time for the tasks to end. kubelet kills the process after 30 s by default (`terminationGracePeriodSeconds`); a task may
/// be in a call to the disk or the kernel that does not return.
const GRACE: Duration = Duration::from_secs(25);

/// A started agent.
pub struct Running {
    /// The implementation of the API.
    pub answers: Arc<Answers>,
    /// All CiliumNodes, including the own one.
    pub cilium_nodes: Reader<String, CiliumNodeRow>,
    tasks: Supervisor,
}

impl Running {
    /// Adds a task of the process to those of the role, to be dropped when the role is cancelled.
    pub fn spawn(&mut self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let token = self.tasks.token();
        self.tasks.spawn_loop(name, until(token, work));
    }

    /// As [`Running::spawn`], for a task that blocks between its awaits.
    pub fn spawn_blocking(
        &mut self,
        name: &'static str,
        port: &Blocking,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let work = until(self.tasks.token(), work);
        self.tasks.spawn_loop(name, hosted(port, work));
    }

    /// Runs until cancelled, or until a task ends unexpectedly.
    ///
    /// # Errors
    /// The task that ended, or the tasks that did not end, by name.
    pub async fn join(self) -> anyhow::Result<()> {
        self.tasks.join_within(GRACE).await
    }
}

/// Starts all tasks of a node. Cancelling `cancel` stops them; the kernel's state is kept.
///
/// # Errors
/// The persistent state cannot be read, so that nothing may be allocated.
pub fn start(agent: Agent, cancel: &CancellationToken) -> anyhow::Result<Running> {
    let Agent { settings, client, targets, ports, shared, .. } = agent;
    let Shared { clock, waits, findings, targets: statuses, leader, notices } = shared;
    let name = settings.node_name.clone();
    findings.replace(
        tell::SETTINGS,
        settings.unknown().iter().map(|(key, message)| Found {
            reason: "unknown-setting",
            subject: key.clone(),
            message: message.clone(),
        }),
    );
    let mut tasks = Supervisor::new("agent", cancel);
    let token = tasks.token();

    // === Tables ===
    let nodes: Arc<Table<String, NodeRow>> = Arc::new(Table::new("nodes"));
    let cilium_nodes: Arc<Table<String, CiliumNodeRow>> = Arc::new(Table::new("cilium-nodes"));
    let (mut leases, mut lease_store) = (agent.leases, agent.lease_store);
    let remembered = remembered::tables(&agent.state, &findings, &mut leases, &mut |change| lease_store.write(change));
    let peers = Arc::clone(&remembered.peers);
    let pool = Arc::new(Table::new("pool"));
    let intent = Arc::new(Table::new("cilium-node-intent"));
    let network = Arc::new(Table::new("network"));
    let router = Arc::new(Table::new("router"));
    let endpoints = Arc::new(Table::new("endpoints"));
    let own_node = Arc::new(Table::new("own-cilium-node"));
    let routes = Arc::new(Table::new("routes"));
    let next_hops = Arc::new(Table::new("next-hops"));
    let pod_routes = Arc::new(Table::new("pod-routes"));
    let ip_masq_file = Arc::new(Table::new("ip-masq-file"));
    let masquerade = masquerade::Tables::default();

    // === Observe ===
    let own = watches::Which::Named(name.clone());
    let watch = (client.clone(), waits.clone(), token.clone());
    let (c, w, t) = watch.clone();
    tasks.spawn_loop("watch node", watches::run("node", c, own, Arc::clone(&nodes), views::nodes(), w, t));
    let (c, w, t) = watch;
    let all = watches::Which::AllOf(name.clone());
    tasks.spawn_loop(
        "watch ciliumnodes",
        watches::run("ciliumnodes", c, all, Arc::clone(&cilium_nodes), views::cilium_nodes_for(&name), w, t),
    );
    tasks.spawn("network", (targets.network)(Arc::clone(&network), token.clone()));
    if settings.enable_ip_masq_agent {
        let follow = files::follow(settings.ip_masq_agent_config_path.clone(), Arc::clone(&ip_masq_file));
        tasks.spawn_loop("ip-masq-agent file", hosted(&ports.disk, until(token.clone(), follow)));
    }

    // === Decide ===
    let mut decide = |name: &'static str, work: futures::future::BoxFuture<'static, ()>| {
        tasks.spawn_loop(name, until(token.clone(), work));
    };
    decide("peers", Box::pin(peers::run(cilium_nodes.reader(), Arc::clone(&peers))));
    decide(
        "own CiliumNode",
        Box::pin(node::run(
            node::Inputs {
                node: name.clone(),
                nodes: nodes.reader(),
                network: network.reader(),
                router: router.reader(),
                intent: intent.reader(),
            },
            Arc::clone(&own_node),
            waits.clone(),
        )),
    );
    decide(
        "routes",
        Box::pin(routes::run(
            name.clone(),
            settings.auto_direct_node_routes,
            peers.reader(),
            pool.reader(),
            next_hops.reader(),
            Arc::clone(&routes),
            waits.clone(),
        )),
    );
    if settings.auto_direct_node_routes {
        let of = (name.clone(), peers.reader(), network.reader());
        let publish = Arc::clone(&next_hops);
        decide(
            "next hops",
            Box::pin(next_hops::run(of.0, of.1, of.2, Arc::clone(&targets.hops), publish, waits.clone())),
        );
    } else {
        next_hops.mark_synced();
    }
    decide(
        "masquerade",
        Box::pin(masquerade::run(
            masquerade::Inputs {
                node: name.clone(),
                settings: settings.clone(),
                reserved_ports: agent.reserved_ports,
                last_good: remembered::last_good(&agent.state, &findings),
                peers: peers.reader(),
                nodes: nodes.reader(),
                known_devices: targets.datapath.as_ref().map(|of| of.known_devices.clone()).unwrap_or_default(),
                network: network.reader(),
                file: settings.enable_ip_masq_agent.then(|| ip_masq_file.reader()),
            },
            masquerade.clone(),
        )),
    );
    let known = leases.iter().find_map(|record| match record {
        Record::Grant(Grant { net: IpNet::V4(pod_cidr), .. }) => Some(PoolRow::new(*pod_cidr)),
        _ => None,
    });
    decide(
        "notices",
        Box::pin(tell::node(name.clone(), pool.reader(), waits.reader(), findings.reader(), known, notices.clone())),
    );
    let remember = remembered::run(agent.state.clone(), remembered, masquerade.last_good.reader(), waits.clone());
    tasks.spawn_loop("remember", hosted(&ports.disk, until(token.clone(), remember)));

    // === Do ===
    let reconcile = Reconcilers { statuses: Arc::clone(&statuses), clock, token: token.clone() };
    let mut required = vec!["routes", POD_ROUTES, ROUTER_ADDRESS];
    tasks.spawn_loop("apply routes", reconcile.run("routes", targets.routes, routes.reader()));
    tasks.spawn_loop("apply pod routes", reconcile.run(POD_ROUTES, targets.pod_routes, pod_routes.reader()));
    let (apply, router_on_node) = reconcile.awaited(ROUTER_ADDRESS, targets.router, router.reader());
    tasks.spawn_loop("apply router address", apply);
    let reporter = events::Reporter { controller: kubernetes::AGENT, instance: name.clone() };
    let write = events::run(client.clone(), reporter, notices.reader(), cilium_nodes.reader(), clock, token.clone());
    tasks.spawn_loop("write events", write);
    if settings.auto_create_cilium_node {
        let target = super::targets::target(OwnNode::new(client.clone(), name.clone(), Arc::clone(&cilium_nodes)));
        tasks.spawn_loop("write own CiliumNode", reconcile.run("own CiliumNode", target, own_node.reader()));
    }
    if settings.annotate_k8s_node {
        let annotations = Arc::new(Table::new("node-annotations"));
        let follow = node::annotate(name.clone(), router.reader(), pool.reader(), Arc::clone(&annotations));
        tasks.spawn_loop("annotate Node", until(token.clone(), follow));
        let target = super::targets::target(Annotations::new(client.clone(), nodes.reader()));
        tasks.spawn_loop("write annotations", reconcile.run("Node annotations", target, annotations.reader()));
    }
    let (mut in_datapath, mut known_endpoints) = (None, BTreeMap::new());
    if let Some(datapath) = targets.datapath {
        required.extend(["excluded destinations", "endpoints", "devices", "datapath settings", "attachments"]);
        let m = &masquerade;
        tasks.spawn_loop(
            "apply excluded",
            reconcile.run("excluded destinations", datapath.excluded, m.excluded.reader()),
        );
        let (apply, handle) = reconcile.awaited("endpoints", datapath.endpoints, endpoints.reader());
        tasks.spawn_loop("apply endpoints", apply);
        in_datapath = Some(handle);
        tasks.spawn_loop("apply devices", reconcile.run("devices", datapath.devices, m.devices.reader()));
        tasks.spawn_loop("apply settings", reconcile.run("datapath settings", datapath.settings, m.settings.reader()));
        tasks.spawn_loop("attach programs", reconcile.run("attachments", datapath.attachments, m.attachments.reader()));
        tasks.spawn("datapath background", (datapath.background)(token.clone()));
        known_endpoints = datapath.known_endpoints;
    }
    let (ask, owner) = leases::start(
        leases::Parts {
            node: name.clone(),
            records: leases,
            incomplete: agent.incomplete,
            known_endpoints,
            timings: Timings::default(),
            configured_router: settings.local_router_ipv4,
            rebooted: agent.rebooted,
            times: agent.times,
            host: agent.host,
            draw: agent.draw,
            store: lease_store,
            datapath: in_datapath,
            mode: node_mode(&settings),
            cilium_nodes: cilium_nodes.reader(),
            network: network.reader(),
            peers: peers.reader(),
            nodes: nodes.reader(),
            router: Arc::clone(&router),
            endpoints: Arc::clone(&endpoints),
            pod_routes: Arc::clone(&pod_routes),
            pool: Arc::clone(&pool),
            intent,
            waits: waits.clone(),
            findings: findings.clone(),
            boot: agent.boot,
            clock: agent.lease_clock,
            wall: clock,
        },
        token.clone(),
    );
    // It writes records, examines namespaces and deletes devices between its awaits.
    tasks.spawn_loop("pod leases", hosted(&ports.disk, owner));

    // === Lead ===
    let identity = agent.operator.as_ref().map(|operator| operator.election.identity.clone());
    if let Some(operator) = agent.operator {
        tasks.spawn("operator", operator_role::run(operator, token.clone()));
    }

    // === Tell ===
    let conditions = Arc::new(Table::new("node-conditions"));
    let target = super::targets::target(NodeConditions::new(client, name.clone(), nodes.reader(), clock));
    tasks.spawn_loop("write node condition", reconcile.run("node condition", target, conditions.reader()));
    let answers = Arc::new(Answers {
        endpoints: ask,
        inspection: ports.inspection.clone(),
        notices,
        served: agent.served,
        clock,
        node: NodeStatus {
            build: agent.build,
            node: name,
            ipam_mode: settings.ipam.name().to_owned(),
            mtu: settings.mtu.map(u32::from),
            native_routing_cidr: settings.ipv4_native_routing_cidr,
            identity,
            waits: waits.reader(),
            findings: findings.reader(),
            network: network.reader(),
            cilium_nodes: cilium_nodes.reader(),
            peers: peers.reader(),
            pool: pool.reader(),
            router: router.reader(),
            router_on_node,
            leader: leader.reader(),
            targets: statuses.reader(),
            required_targets: required,
            masquerade: masquerade.report.reader(),
            excluded: masquerade.excluded.reader(),
            endpoints: endpoints.reader(),
            devices: masquerade.devices.reader(),
            datapath: masquerade.settings.reader(),
            hops: targets.hops,
            maps: agent.maps,
        },
    });
    let node = answers.node.clone();
    let follow = condition::run(node.node.clone(), move || node.condition(), conditions);
    tasks.spawn_loop("node condition", until(token.clone(), follow));
    if let Some(listener) = agent.listener {
        let serve = server::serve(listener, Arc::clone(&answers), token.clone());
        tasks.spawn("API", async move { Ok(serve.await?) });
        if let Some(port) = settings.agent_health_port {
            let address = (Ipv4Addr::LOCALHOST, port).into();
            let serve =
                http::serve(address, http::probes(Arc::clone(&answers)), "probes", waits.clone(), token.clone());
            tasks.spawn("probes", async move { Ok(serve.await?) });
        }
        if let Some(address) = settings.metrics_address {
            let answers = Arc::clone(&answers);
            let gather: http::Metrics = Arc::new(move || {
                let answers = Arc::clone(&answers);
                Box::pin(async move { answers.metrics().await })
            });
            let serve = http::serve(address.0, http::metrics(gather), "metrics", waits, token);
            tasks.spawn("metrics", async move { Ok(serve.await?) });
        }
    }
    Ok(Running { answers, cilium_nodes: cilium_nodes.reader(), tasks })
}

/// The IPAM mode on the node.
#[must_use]
pub fn node_mode(settings: &Settings) -> Box<dyn NodeMode> {
    match settings.ipam {
        IpamMode::ClusterPool => Box::new(ClusterPool { ranges: settings.cluster_pool_ipv4.clone() }),
        IpamMode::Kubernetes => Box::new(Kubernetes { require_ipv6: settings.require_ipv6_pod_cidr }),
    }
}

/// Moves a task that blocks between its awaits off the async workers.
fn hosted(
    port: &Blocking,
    work: impl Future<Output = ()> + Send + 'static,
) -> impl Future<Output = ()> + Send + 'static {
    let port = port.clone();
    async move { port.host(work).await }
}

/// Starts reconcilers that only differ in name, target and table.
struct Reconcilers {
    statuses: Arc<Table<String, TargetStatus>>,
    clock: Clock,
    token: CancellationToken,
}

impl Reconcilers {
    fn run<K: Ord, V>(
        &self,
        name: &'static str,
        target: Target<K, V>,
        desired: Reader<K, V>,
    ) -> futures::future::BoxFuture<'static, ()> {
        self.awaited(name, target, desired).0
    }

    /// As [`Self::run`], also with the handle that waits for rows.
    fn awaited<K: Ord, V>(
        &self,
        name: &'static str,
        target: Target<K, V>,
        desired: Reader<K, V>,
    ) -> (futures::future::BoxFuture<'static, ()>, Handle<K, V>) {
        let options = Options {
            name,
            full_pass: Duration::from_secs(300),
            backoff: Backoff { base: Duration::from_millis(100), max: Duration::from_secs(15) },
            prune: true,
            // Each target is a kernel object, or one API object.
            concurrency: SERIAL,
        };
        let with = Reconcile::new(options, desired, Arc::clone(&self.statuses), self.clock, self.token.clone());
        let handle = with.handle();
        (target(with), handle)
    }
}
