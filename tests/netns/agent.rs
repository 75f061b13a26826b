//! An agent reduced to its leases: the real API server and lease owner, without disk and kernel programs. Its answers
//! can be configured.
//!
//! It does not test that leases survive a restart, nor that the pod is in the datapath when ADD returns.

use cistern::api::server::{self, AgentApi, Failure, IpamQuery};
use cistern::api::types::{
    AddRequest, AddResponse, AddressExplanation, CheckRequest, CheckResponse, ConfirmRequest, DelRequest, DelResponse,
    EndpointRequest, EndpointResponse, ExplainMasqueradeRequest, ExplainMasqueradeResponse, GcRequest, GcResponse,
    Health, IpReport, IpamResponse, LeasedAddress, NodeReply, Status,
};
use cistern::blocking::Blocking;
use cistern::clock::{self, Clock};
use cistern::leases::deletions::{self, Replayed};
use cistern::leases::{self, Endpoints, Host, LeaseStore, Parts};
use cistern::tables::findings::Findings;
use cistern::tables::rows::NetworkRow;
use cistern::tables::{Table, Waits};
use cistern_core::cni::refusal::Refusal;
use cistern_core::ipam::audit::Namespace;
use cistern_core::ipam::lease::{self, Attachment, Change, LeaseState, RecordTimes, Timings};
use cistern_core::ipam::node::{NodeInput, NodeMode, NodePlan};
use cistern_core::ipam::supply::{Grant, Supply};
use cistern_tests::lab::Machine;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// MTU of pods.
pub(crate) const MTU: u32 = 1400;

/// Treatment of confirmations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Confirm {
    /// Executed.
    Carry,
    /// Rejected permanently.
    Refuse,
    /// Never answered.
    Ignore,
}

struct Answers {
    endpoints: Endpoints,
    health: Mutex<Health>,
    confirm: Mutex<Confirm>,
    confirm_seen: Mutex<Option<mpsc::Sender<()>>>,
}

fn attachment(container_id: String, ifname: String) -> Attachment {
    Attachment { container_id, ifname }
}

fn unavailable(error: &impl ToString) -> Failure {
    Failure::new(Refusal::PoolExhausted, error.to_string())
}

fn not_here() -> Failure {
    Failure::new(Refusal::NoDatapath, "this stand-in answers the CNI calls alone")
}

impl AgentApi for Answers {
    async fn add(&self, request: AddRequest) -> Result<AddResponse, Failure> {
        let granted = self
            .endpoints
            .add(lease::AddRequest {
                attachment: attachment(request.container_id, request.ifname),
                network: request.network,
                pod: request.pod.map(|pod| lease::Pod { namespace: pod.namespace, name: pod.name, uid: pod.uid }),
                netns: request.netns,
                began: request.began,
            })
            .await
            .map_err(|error| unavailable(&error))?;
        let leased = LeasedAddress {
            address: granted.lease.addresses.ipv4.unwrap().into(),
            prefix_len: 29,
            router: granted.router.ipv4.unwrap().into(),
        };
        Ok(AddResponse::new(vec![leased], MTU, granted.lease.generation))
    }

    async fn confirm(&self, request: ConfirmRequest) -> Result<(), Failure> {
        if let Some(seen) = self.confirm_seen.lock().unwrap().take() {
            seen.send(()).unwrap();
        }
        let wanted = self.confirm.lock().unwrap().clone();
        match wanted {
            Confirm::Carry => {}
            Confirm::Refuse => return Err(Failure::new(Refusal::OtherGeneration, "the lease is another one")),
            Confirm::Ignore => std::future::pending().await,
        }
        let attachment = attachment(request.container_id, request.ifname);
        let confirmed = self.endpoints.confirm(attachment, request.generation, request.interface, request.began).await;
        confirmed.map_err(|error| unavailable(&error))
    }

    async fn del(&self, request: DelRequest) -> Result<DelResponse, Failure> {
        let lease = self.endpoints.del(attachment(request.container_id, request.ifname), request.began).await.unwrap();
        Ok(DelResponse { released: lease.and_then(|lease| lease.addresses.ipv4) })
    }

    async fn check(&self, request: CheckRequest) -> Result<CheckResponse, Failure> {
        let held = self.endpoints.check(attachment(request.container_id, request.ifname)).await.unwrap();
        let (lease, router) = held.ok_or_else(|| Failure::new(Refusal::NoLease, "it holds no address"))?;
        let interface = match lease.state {
            LeaseState::Confirmed { interface, .. } => Some(interface),
            LeaseState::Provisional { .. } => None,
        };
        Ok(CheckResponse { address: lease.addresses.ipv4.unwrap(), router: router.ipv4.unwrap(), interface })
    }

    async fn gc(&self, request: GcRequest) -> Result<GcResponse, Failure> {
        let valid = request.valid.into_iter().map(|del| attachment(del.container_id, del.ifname)).collect();
        let request = lease::CollectRequest { network: request.network, valid, began: request.began };
        let ended = self.endpoints.collect(request).await.unwrap();
        let released = ended.into_iter().map(|lease| lease.attachment).collect();
        Ok(GcResponse { released })
    }

    async fn allocate(&self, _query: IpamQuery) -> Result<IpamResponse, Failure> {
        Err(not_here())
    }

    async fn allocate_ip(&self, _ip: String, _query: IpamQuery) -> Result<(), Failure> {
        Err(not_here())
    }

    async fn release_ip(&self, _ip: String, _query: IpamQuery) -> Result<(), Failure> {
        Err(not_here())
    }

    async fn create_endpoint(&self, _request: EndpointRequest) -> Result<EndpointResponse, Failure> {
        Err(not_here())
    }

    async fn addresses(&self) -> Result<Vec<IpReport>, Failure> {
        Err(not_here())
    }

    async fn health(&self) -> Health {
        self.health.lock().unwrap().clone()
    }

    async fn status(&self) -> Status {
        unreachable!("no test asks for it")
    }

    async fn map(&self, _name: String) -> Result<serde_json::Value, Failure> {
        Err(not_here())
    }

    async fn explain_ip(&self, _ip: String) -> Result<AddressExplanation, Failure> {
        Err(not_here())
    }

    async fn explain_node(&self, _name: Option<String>) -> NodeReply {
        unreachable!("no test asks for it")
    }

    async fn explain_masquerade(
        &self,
        _request: ExplainMasqueradeRequest,
    ) -> Result<ExplainMasqueradeResponse, Failure> {
        Err(not_here())
    }
}

struct Forget;

impl LeaseStore for Forget {
    fn write(&mut self, _change: &Change) -> Result<(), String> {
        Ok(())
    }
}

/// A mode that always grants the same pod CIDR.
struct Fixed;

impl NodeMode for Fixed {
    fn plan(&self, _input: &NodeInput<'_>, _now: jiff::Timestamp) -> NodePlan {
        let grant = Grant::new("10.244.1.0/29".parse().unwrap());
        NodePlan { supply: Some(Supply::of_grants([grant])), ..NodePlan::default() }
    }
}

/// Every namespace is there, and no device is removed.
/// What the machine shows, whose root is another than that of this process.
struct Still {
    root: PathBuf,
}

impl Host for Still {
    fn namespace(&self, path: &str) -> Namespace {
        if self.root.join(path.trim_start_matches('/')).exists() { Namespace::There } else { Namespace::Gone }
    }

    fn host_side(&self, attachment: &Attachment) -> String {
        attachment.to_string()
    }

    fn is_in_use(&self, _device: &str) -> bool {
        false
    }

    fn remove_device(&mut self, _name: &str) -> Result<(), String> {
        Ok(())
    }
}

/// A running agent. When dropped, it disappears like a killed one: its socket remains.
pub(crate) struct Agent {
    answers: Arc<Answers>,
    /// Path of its socket, for this process.
    socket: PathBuf,
    runtime: Option<Runtime>,
    serving: CancellationToken,
}

impl Agent {
    /// Starts one for a machine, with a pod CIDR of eight addresses (`10.244.1.0/29`), and adds the router address as
    /// the real one does.
    pub(crate) fn start(machine: &Machine) -> Self {
        let runtime = Runtime::new().unwrap();
        let network = Table::new("network");
        network.publish(BTreeMap::from([((), NetworkRow::default())]));
        let peers = Table::new("peers");
        peers.publish(BTreeMap::new());
        let clock = runtime.block_on(async { Clock::system() });
        let (nodes, cilium_nodes) = (Table::new("nodes"), Table::new("cilium-nodes"));
        let parts = Parts {
            node: machine.name().to_owned(),
            records: Vec::new(),
            incomplete: false,
            known_endpoints: BTreeMap::new(),
            timings: Timings::default(),
            configured_router: Some(ROUTER),
            rebooted: false,
            times: RecordTimes::Continue,
            host: Box::new(Still { root: machine.file("/") }),
            draw: Box::new(rand::random),
            store: Box::new(Forget),
            datapath: None,
            mode: Box::new(Fixed),
            cilium_nodes: cilium_nodes.reader(),
            network: network.reader(),
            peers: peers.reader(),
            nodes: nodes.reader(),
            router: Arc::new(Table::new("router")),
            endpoints: Arc::new(Table::new("endpoints")),
            pod_routes: Arc::new(Table::new("pod-routes")),
            pool: Arc::new(Table::new("pool")),
            intent: Arc::new(Table::new("cilium-node-intent")),
            waits: Waits::new(clock),
            findings: Findings::new(clock),
            boot: clock::boot().unwrap(),
            clock,
            wall: clock,
        };
        let (endpoints, task) = leases::start(parts, CancellationToken::new());
        runtime.spawn(async move {
            // The task waits for changes of these.
            let _writers = (network, peers, nodes, cilium_nodes);
            task.await;
        });
        let answers = Arc::new(Answers {
            endpoints,
            health: Mutex::new(Health::new(Vec::new())),
            confirm: Mutex::new(Confirm::Carry),
            confirm_seen: Mutex::new(None),
        });
        let router = format!("{ROUTER}/32");
        machine.run("ip", &["address", "replace", &router, "dev", "lo", "scope", "link"]).unwrap();
        let mut agent = Self {
            answers,
            socket: machine.file("/run/cistern/cistern.sock"),
            runtime: Some(runtime),
            serving: CancellationToken::new(),
        };
        agent.resume();
        agent
    }

    /// Stops listening, as a killed agent does: the socket remains and refuses connections. Its state is kept.
    pub(crate) fn pause(&mut self) {
        self.serving.cancel();
        // Return when the socket has no listener any more.
        while std::os::unix::net::UnixStream::connect(&self.socket).is_ok() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// Listens again.
    pub(crate) fn resume(&mut self) {
        let runtime = self.runtime.as_ref().unwrap();
        self.serving = CancellationToken::new();
        let listener = runtime.block_on(async { server::bind(&self.socket) }).unwrap();
        runtime.spawn(server::serve(listener, Arc::clone(&self.answers), self.serving.clone()));
    }

    /// Sets the treatment of confirmations from now on.
    pub(crate) fn confirm(&self, what: Confirm) {
        *self.answers.confirm.lock().unwrap() = what;
    }

    /// Receives a message when the next confirmation arrives.
    pub(crate) fn next_confirmation(&self) -> mpsc::Receiver<()> {
        let (sender, receiver) = mpsc::channel();
        *self.answers.confirm_seen.lock().unwrap() = Some(sender);
        receiver
    }

    /// Sets its readiness.
    pub(crate) fn set_health(&self, health: Health) {
        *self.answers.health.lock().unwrap() = health;
    }

    /// The allocated addresses, by container ID, and whether they are confirmed.
    pub(crate) fn leases(&self) -> BTreeMap<String, (Ipv4Addr, bool)> {
        let runtime = self.runtime.as_ref().unwrap();
        let view = runtime.block_on(self.answers.endpoints.view()).unwrap();
        let held = |row: lease::Row| {
            let confirmed = match row.state {
                lease::RowState::Confirmed => true,
                lease::RowState::Provisional => false,
                _ => return None,
            };
            let std::net::IpAddr::V4(address) = row.address else { return None };
            Some((row.holder.split('/').next()?.to_owned(), (address, confirmed)))
        };
        view.rows.into_iter().filter_map(held).collect()
    }

    /// Executes the queued DELs in a directory.
    pub(crate) fn replay(&self, queue: &std::path::Path) -> Replayed {
        let runtime = self.runtime.as_ref().unwrap();
        runtime.block_on(deletions::replay_once(queue, &self.answers.endpoints, &Blocking::threads(1))).unwrap()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A confirmation that is never answered must not block the shutdown.
            runtime.shutdown_background();
        }
    }
}

/// The router address.
pub(crate) const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);
