//! A node's kernel and disk in memory, with faults: the targets of an agent in a script.
//!
//! It outlives the agent, as a kernel does: a restarted agent finds the state left by the previous one.
//!
//! # Limits
//!
//! Nothing forwards packets, and nothing is rejected as by a kernel: a route via an unreachable gateway is accepted, a
//! map is never full. Devices and addresses of the node never change, and the agent's routes are not among those of the
//! network. Namespace and eBPF tests cover the real kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cistern::app::targets::{DatapathTargets, Targets, blocking_target};
use cistern::blocking::Blocking;
use cistern::leases::{Host, LeaseStore};
use cistern::reconciler::BlockingOperations;
use cistern::tables::rows::{Hop, LinkRow, NetworkRow, PodRoute, RouteRow, RouteTarget};
use cistern_core::ipam::audit::Namespace;
use cistern_core::ipam::lease::{Attachment, Change, Record, RecordKey};
use cistern_core::masquerade::plan::{AttachmentEntry, DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason};
use cistern_core::reconcile::{Classify, ErrorClass};
use ipnet::{IpNet, Ipv4Net};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The device with the route to the other nodes.
const DEVICE: u32 = 2;

/// The network of all nodes.
fn network_of(address: Ipv4Addr) -> Ipv4Net {
    Ipv4Net::new_assert(address, 24)
}

/// The route of the node with this address: direct in its network, else by the network's last address.
fn hop(address: Ipv4Addr, destination: Ipv4Addr) -> Hop {
    let network = network_of(address);
    let gateway = if network.contains(&destination) { None } else { network.hosts().next_back().map(IpAddr::V4) };
    Hop { ifindex: DEVICE, gateway, source: Some(address), mtu: None }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why an operation failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum MemoryError {
    /// A random fault.
    #[error("injected fault on {0}")]
    Fault(&'static str),
    /// The calling agent was killed.
    #[error("the process that asks is dead")]
    Dead,
}

impl Classify for MemoryError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Transient
    }
}

/// Makes operations of an agent fail: some at random, all once it was killed.
#[derive(Clone)]
struct Gate {
    alive: Arc<AtomicBool>,
    faults: Arc<Mutex<Faults>>,
}

struct Faults {
    percent: u8,
    random: SmallRng,
}

impl Gate {
    fn pass(&self, what: &'static str) -> Result<(), MemoryError> {
        if !self.alive.load(Ordering::Relaxed) {
            return Err(MemoryError::Dead);
        }
        let mut faults = lock(&self.faults);
        let percent = faults.percent;
        if faults.random.random_range(0..100_u8) < percent { Err(MemoryError::Fault(what)) } else { Ok(()) }
    }
}

type Rows<K, V> = Arc<Mutex<BTreeMap<K, V>>>;

/// A set of rows as the target of a reconciler.
struct MemoryTarget<K, V> {
    name: &'static str,
    rows: Rows<K, V>,
    gate: Gate,
}

impl<K, V> BlockingOperations for MemoryTarget<K, V>
where
    K: Ord + Clone + Debug + Send + Sync + 'static,
    V: Clone + PartialEq + Debug + Send + Sync + 'static,
{
    type Key = K;
    type Value = V;
    type Error = MemoryError;

    fn update(&mut self, key: &K, value: &V) -> Result<(), MemoryError> {
        self.gate.pass(self.name)?;
        lock(&self.rows).insert(key.clone(), value.clone());
        Ok(())
    }

    fn delete(&mut self, key: &K) -> Result<(), MemoryError> {
        self.gate.pass(self.name)?;
        lock(&self.rows).remove(key);
        Ok(())
    }

    fn observe(&mut self) -> Result<BTreeMap<K, V>, MemoryError> {
        self.gate.pass(self.name)?;
        Ok(lock(&self.rows).clone())
    }
}

/// The disk of the leases. A failed write keeps earlier ones.
struct MemoryLeases {
    records: Rows<RecordKey, Record>,
    full: Arc<AtomicBool>,
    /// After how many more writes the process ends, if it does.
    crash: Arc<Mutex<Option<u32>>>,
    gate: Gate,
    /// Ends what else the process does.
    dies: Box<dyn Fn() + Send>,
}

impl MemoryLeases {
    /// Whether the process ends before this write.
    fn crashes(&self) -> bool {
        let mut crash = lock(&self.crash);
        match &mut *crash {
            None => false,
            Some(0) => {
                *crash = None;
                self.gate.alive.store(false, Ordering::Relaxed);
                (self.dies)();
                true
            }
            Some(left) => {
                *left -= 1;
                false
            }
        }
    }
}

impl LeaseStore for MemoryLeases {
    fn write(&mut self, change: &Change) -> Result<(), String> {
        self.gate.pass("leases").map_err(|error| error.to_string())?;
        if self.crashes() {
            return Err(MemoryError::Dead.to_string());
        }
        if matches!(change, Change::Put(_)) && self.full.load(Ordering::Relaxed) {
            return Err("no space left on the disk".to_owned());
        }
        let mut records = lock(&self.records);
        match change {
            Change::Put(record) => records.insert(record.key(), record.clone()),
            Change::Remove(key) => records.remove(key),
        };
        Ok(())
    }
}

/// The namespaces of containers.
struct MemoryHost {
    namespaces: Arc<Mutex<BTreeSet<String>>>,
}

impl Host for MemoryHost {
    fn namespace(&self, path: &str) -> Namespace {
        if lock(&self.namespaces).contains(path) { Namespace::There } else { Namespace::Gone }
    }

    fn host_side(&self, attachment: &Attachment) -> String {
        format!("cst-{}", attachment.container_id)
    }

    fn is_in_use(&self, _device: &str) -> bool {
        false
    }

    fn remove_device(&mut self, _name: &str) -> Result<(), String> {
        Ok(())
    }
}

/// A directory that is deleted with its handle, in memory if possible: a rename over a file waits for a busy disk.
fn state_dir() -> std::io::Result<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir())
}

/// The machine of a node.
pub(super) struct Machine {
    /// The address of the node for other nodes.
    pub(super) address: Ipv4Addr,
    /// Path of the state other than leases.
    pub(super) state: tempfile::TempDir,
    routes: Rows<Ipv4Net, RouteTarget>,
    pod_routes: Rows<Ipv4Addr, PodRoute>,
    router: Rows<Ipv4Addr, ()>,
    excluded: Rows<Ipv4Net, ExcludedReason>,
    endpoints: Rows<Ipv4Addr, EndpointEntry>,
    devices: Rows<u32, DeviceEntry>,
    settings: Rows<(), DatapathSettings>,
    attachments: Rows<u32, AttachmentEntry>,
    records: Rows<RecordKey, Record>,
    full: Arc<AtomicBool>,
    crash: Arc<Mutex<Option<u32>>>,
    /// Every file was lost: the devices of pods are shown, since nothing else shows them.
    lost: AtomicBool,
    namespaces: Arc<Mutex<BTreeSet<String>>>,
    rebooted: AtomicBool,
    boots: AtomicU32,
    faults: Arc<Mutex<Faults>>,
}

/// What an agent is started with, and a handle to kill it.
pub(super) struct Grasp {
    pub(super) targets: Targets,
    pub(super) leases: Vec<Record>,
    pub(super) lease_store: Box<dyn LeaseStore>,
    pub(super) host: Box<dyn Host>,
    /// The machine was rebooted since the last agent.
    pub(super) rebooted: bool,
    /// False: no operation of the agent reaches the machine any more.
    pub(super) alive: Arc<AtomicBool>,
}

impl Machine {
    /// An empty machine.
    pub(super) fn new(address: Ipv4Addr, seed: u64, percent: u8) -> std::io::Result<Self> {
        Ok(Self {
            address,
            state: state_dir()?,
            routes: Rows::default(),
            pod_routes: Rows::default(),
            router: Rows::default(),
            excluded: Rows::default(),
            endpoints: Rows::default(),
            devices: Rows::default(),
            settings: Rows::default(),
            attachments: Rows::default(),
            records: Rows::default(),
            full: Arc::default(),
            crash: Arc::default(),
            lost: AtomicBool::new(false),
            namespaces: Arc::default(),
            rebooted: AtomicBool::new(false),
            boots: AtomicU32::new(1),
            faults: Arc::new(Mutex::new(Faults { percent, random: SmallRng::seed_from_u64(seed) })),
        })
    }

    /// Sets the percentage of operations that fail.
    pub(super) fn set_faults(&self, percent: u8) {
        lock(&self.faults).percent = percent;
    }

    /// Creates or deletes the network namespace of a container.
    pub(super) fn set_namespace(&self, path: &str, exists: bool) {
        let mut namespaces = lock(&self.namespaces);
        if exists {
            namespaces.insert(path.to_owned())
        } else {
            namespaces.remove(path)
        };
    }

    /// Lets the disk take no new lease record, as a full one, or take them again.
    pub(super) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    /// Lets the agent's process end after so many more writes of lease records, between two of them; or not any more.
    pub(super) fn crash_after(&self, writes: Option<u32>) {
        *lock(&self.crash) = writes;
    }

    /// Loses every lease record.
    pub(super) fn lose_records(&self) {
        lock(&self.records).clear();
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Loses the lease records that say which pod CIDRs were granted.
    pub(super) fn lose_grants(&self) {
        lock(&self.records).retain(|key, _| !matches!(key, RecordKey::Grant(..)));
    }

    /// Clears what a reboot clears: the kernel and `/run`. The disk is kept.
    pub(super) fn reboot(&self) {
        lock(&self.routes).clear();
        lock(&self.pod_routes).clear();
        lock(&self.router).clear();
        lock(&self.excluded).clear();
        lock(&self.endpoints).clear();
        lock(&self.devices).clear();
        lock(&self.settings).clear();
        lock(&self.attachments).clear();
        lock(&self.namespaces).clear();
        self.rebooted.store(true, Ordering::Relaxed);
        self.boots.fetch_add(1, Ordering::Relaxed);
    }

    /// ID of the current boot.
    pub(super) fn boot(&self) -> String {
        format!("boot-{}", self.boots.load(Ordering::Relaxed))
    }

    /// Hands the machine to an agent that starts. `dies` cuts its way to the API server when it ends by itself.
    pub(super) fn grasp(&self, dies: Box<dyn Fn() + Send>) -> Grasp {
        *lock(&self.crash) = None;
        let alive = Arc::new(AtomicBool::new(true));
        let gate = Gate { alive: Arc::clone(&alive), faults: Arc::clone(&self.faults) };
        let (network, address) = (self.network(), self.address);
        // The machine is as deterministic as the clock: no threads.
        let port = Blocking::inline();
        let targets = Targets {
            network: Box::new(move |table, cancel| {
                Box::pin(async move {
                    table.publish(BTreeMap::from([((), network)]));
                    cancel.cancelled().await;
                    Ok(())
                })
            }),
            hops: Arc::new(move |asked: Vec<Ipv4Addr>| {
                let hops = asked.into_iter().map(|destination| (destination, hop(address, destination))).collect();
                Box::pin(std::future::ready(Ok(hops)))
            }),
            routes: blocking_target(memory("routes", &self.routes, &gate), &port),
            pod_routes: blocking_target(memory("pod-routes", &self.pod_routes, &gate), &port),
            router: blocking_target(memory("router", &self.router, &gate), &port),
            datapath: Some(DatapathTargets {
                excluded: blocking_target(memory("excluded", &self.excluded, &gate), &port),
                endpoints: blocking_target(memory("endpoints", &self.endpoints, &gate), &port),
                known_endpoints: lock(&self.endpoints).clone(),
                devices: blocking_target(memory("devices", &self.devices, &gate), &port),
                known_devices: lock(&self.devices).clone(),
                settings: blocking_target(memory("settings", &self.settings, &gate), &port),
                attachments: blocking_target(memory("attachments", &self.attachments, &gate), &port),
                background: Box::new(|cancel| {
                    Box::pin(async move {
                        cancel.cancelled().await;
                        Ok(())
                    })
                }),
            }),
        };
        Grasp {
            targets,
            leases: lock(&self.records).values().cloned().collect(),
            lease_store: Box::new(MemoryLeases {
                records: Arc::clone(&self.records),
                full: Arc::clone(&self.full),
                crash: Arc::clone(&self.crash),
                gate,
                dies,
            }),
            host: Box::new(MemoryHost { namespaces: Arc::clone(&self.namespaces) }),
            rebooted: self.rebooted.swap(false, Ordering::Relaxed),
            alive,
        }
    }

    fn network(&self) -> NetworkRow {
        let link = |name: &str, address: IpNet, loopback: bool| LinkRow {
            name: name.to_owned(),
            up: true,
            loopback,
            kind: String::new(),
            master: None,
            mtu: if loopback { 65_536 } else { 1500 },
            mac: if loopback { Vec::new() } else { vec![2, 0, 0, 0, 0, 1] },
            addresses: vec![address],
        };
        let pods = if self.lost.load(Ordering::Relaxed) { lock(&self.endpoints).clone() } else { BTreeMap::new() };
        let pods: Vec<(Ipv4Addr, u32)> =
            pods.into_iter().filter(|(_, pod)| pod.ifindex > 0).map(|(address, pod)| (address, pod.ifindex)).collect();
        let pod_links = pods.iter().map(|(_, ifindex)| {
            let veth = LinkRow {
                name: format!("cst{ifindex:011x}"),
                up: true,
                loopback: false,
                kind: "veth".to_owned(),
                master: None,
                mtu: 1500,
                mac: vec![2, 0, 0, 0, 0, 2],
                addresses: Vec::new(),
            };
            (*ifindex, veth)
        });
        let router = lock(&self.router).keys().next().copied();
        let pod_routes = pods.iter().map(|(address, ifindex)| RouteRow {
            destination: Ipv4Net::from(*address),
            ifindex: Some(*ifindex),
            gateway: None,
            source: router,
            ours: true,
        });
        let net = network_of(self.address);
        let gateway = net.hosts().next_back();
        let route = |destination: Ipv4Net, gateway: Option<Ipv4Addr>, source: Option<Ipv4Addr>| RouteRow {
            destination,
            ifindex: Some(DEVICE),
            gateway,
            source,
            ours: false,
        };
        NetworkRow {
            links: [
                (1, link("lo", Ipv4Net::new_assert(Ipv4Addr::LOCALHOST, 8).into(), true)),
                (DEVICE, link("eth0", net.into(), false)),
            ]
            .into_iter()
            .chain(pod_links)
            .collect(),
            routes: [
                route(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0), gateway, None),
                route(net.trunc(), None, Some(self.address)),
            ]
            .into_iter()
            .chain(pod_routes)
            .collect(),
            outside: Some(hop(self.address, Ipv4Addr::UNSPECIFIED)),
            sources: BTreeMap::from([(DEVICE, self.address)]),
            routing: 0,
        }
    }

    /// The rows of a target by name, one per line: key and value.
    pub(super) fn shown(&self, target: &str) -> Result<String, String> {
        match target {
            "routes" => Ok(shown(&self.routes, |net| net.to_string())),
            "router" => Ok(shown(&self.router, |address| address.to_string())),
            "excluded" => Ok(shown(&self.excluded, |net| net.to_string())),
            "endpoints" => Ok(shown(&self.endpoints, |address| address.to_string())),
            "devices" => Ok(shown(&self.devices, |index| index.to_string())),
            "settings" => Ok(shown(&self.settings, |()| "node".to_owned())),
            "attachments" => Ok(shown(&self.attachments, |index| index.to_string())),
            "leases" => Ok(lock(&self.records).keys().map(|key| format!("{key}\n")).collect()),
            other => Err(format!(
                "{other}: expected routes, router, excluded, endpoints, devices, settings, attachments or leases"
            )),
        }
    }
}

fn memory<K, V>(name: &'static str, rows: &Rows<K, V>, gate: &Gate) -> MemoryTarget<K, V> {
    MemoryTarget { name, rows: Arc::clone(rows), gate: gate.clone() }
}

fn shown<K: Ord, V: serde::Serialize>(rows: &Rows<K, V>, key: impl Fn(&K) -> String) -> String {
    let line = |(row, value): (&K, &V)| {
        let value = serde_json::to_value(value).unwrap_or_default();
        let value =
            if value.is_null() { String::new() } else { format!(" {}", crate::apiserver::table::plain_text(&value)) };
        format!("{}{value}\n", key(row))
    };
    lock(rows).iter().map(line).collect()
}

impl Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("address", &self.address).finish_non_exhaustive()
    }
}
