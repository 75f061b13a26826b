use super::*;
use crate::tables::rows::{LinkRow, RouteRow};
use cistern_core::ipam::lease::{
    AddRequest, DEFAULT_POOL, Interface, LeaseState, OwnerRequest, PodAttachment, PodLease, RowState,
};
use cistern_core::ipam::node::cluster_pool::List;
use cistern_core::ipam::node::{NodeInput, NodePlan, Observed};
use cistern_core::ipam::supply::{Grant, GrantState, Supply};
use cistern_core::moment::Moment;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// All namespaces exist, and devices are only ever removed.
struct Quiet;

impl Host for Quiet {
    fn namespace(&self, _path: &str) -> Namespace {
        Namespace::There
    }

    fn host_side(&self, _attachment: &Attachment) -> String {
        LINK.to_owned()
    }

    fn is_in_use(&self, _device: &str) -> bool {
        false
    }

    fn remove_device(&mut self, _name: &str) -> Result<(), String> {
        Ok(())
    }
}

/// A mode that grants what the test says, and writes the pod CIDR to the list on request.
struct Scripted(Arc<Mutex<Supply>>);

impl NodeMode for Scripted {
    fn plan(&self, input: &NodeInput<'_>, _now: Timestamp) -> NodePlan {
        let supply = self.0.lock().unwrap().clone();
        let pod_cidrs = supply.grants().map(|grant| grant.net.to_string()).collect();
        let list = Some(List { pod_cidrs, claim: None });
        let write = matches!(input.cilium_node, Observed::Absent).then(|| CiliumNodeIntent {
            planned_from: None,
            list,
            contested: false,
        });
        NodePlan { supply: Some(supply), write, ..NodePlan::default() }
    }
}

#[derive(Clone, Default)]
struct Disk {
    refuses: Arc<AtomicBool>,
}

impl LeaseStore for Disk {
    fn write(&mut self, _change: &Change) -> Result<(), String> {
        if self.refuses.load(Ordering::Relaxed) { Err("no space".to_owned()) } else { Ok(()) }
    }
}

struct Rig {
    ask: Endpoints,
    supply: Arc<Mutex<Supply>>,
    disk: Disk,
    peers: Arc<Table<String, PeerRow>>,
    network: Arc<Table<(), NetworkRow>>,
    pool: Arc<Table<(), PoolRow>>,
    intent: Arc<Table<(), CiliumNodeIntent>>,
    router: Arc<Table<Ipv4Addr, ()>>,
    endpoints: Arc<Table<Ipv4Addr, EndpointEntry>>,
}

const NET: &str = "10.33.0.0/26";
const LINK: &str = "cst0123456789a";

fn at(text: &str) -> Clock {
    Clock::following_runtime(text.parse().unwrap())
}

fn request(began: Option<Moment>) -> AddRequest {
    AddRequest {
        attachment: Attachment { container_id: "c1".into(), ifname: "eth0".into() },
        network: None,
        pod: None,
        netns: "/run/netns/c1".into(),
        began,
    }
}

fn grants(nets: &[(&str, GrantState)]) -> Supply {
    Supply::of_grants(nets.iter().map(|(net, state)| Grant { state: *state, ..Grant::new(net.parse().unwrap()) }))
}

impl Rig {
    fn start() -> Self {
        Self::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"), |_| {})
    }

    /// With the leases' clock and the wall clock.
    fn with(clock: Clock, wall: Clock, change: impl FnOnce(&mut Parts)) -> Self {
        let supply = Arc::new(Mutex::new(grants(&[(NET, GrantState::Active)])));
        let disk = Disk::default();
        let network: Arc<Table<(), NetworkRow>> = Arc::new(Table::new("network"));
        network.publish(BTreeMap::from([((), NetworkRow::default())]));
        let peers: Arc<Table<String, PeerRow>> = Arc::new(Table::new("peers"));
        peers.publish(BTreeMap::new());
        let (cilium_nodes, nodes) = (Table::new("cilium-nodes"), Table::new("nodes"));
        cilium_nodes.publish(BTreeMap::new());
        let (pool, intent) = (Arc::new(Table::new("pool")), Arc::new(Table::new("intent")));
        let (router, endpoints) = (Arc::new(Table::new("router")), Arc::new(Table::new("endpoints")));
        let mut drawn = 7;
        let mut parts = Parts {
            node: "a".into(),
            records: Vec::new(),
            incomplete: false,
            known_endpoints: BTreeMap::new(),
            timings: Timings::default(),
            configured_router: None,
            rebooted: false,
            times: RecordTimes::Continue,
            host: Box::new(Quiet),
            draw: Box::new(move || {
                drawn += 1;
                drawn
            }),
            store: Box::new(disk.clone()),
            datapath: None,
            mode: Box::new(Scripted(Arc::clone(&supply))),
            cilium_nodes: cilium_nodes.reader(),
            network: network.reader(),
            peers: peers.reader(),
            nodes: nodes.reader(),
            router: Arc::clone(&router),
            endpoints: Arc::clone(&endpoints),
            pod_routes: Arc::new(Table::new("pod-routes")),
            pool: Arc::clone(&pool),
            intent: Arc::clone(&intent),
            waits: Waits::new(clock),
            findings: Findings::new(clock),
            boot: String::new(),
            clock,
            wall,
        };
        change(&mut parts);
        let (ask, task) = start(parts, CancellationToken::new());
        tokio::spawn(async move {
            task.await;
            drop((cilium_nodes, nodes));
        });
        Self { ask, supply, disk, peers, network, pool, intent, router, endpoints }
    }

    /// Grants this from now on.
    async fn grant(&self, nets: &[(&str, GrantState)]) {
        *self.supply.lock().unwrap() = grants(nets);
        // Any change of what is known makes it plan.
        self.peers.publish(BTreeMap::from([(format!("{nets:?}"), PeerRow::default())]));
        self.settle().await;
    }

    async fn settle(&self) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    /// Allocates a given address; the router has one of the two.
    async fn take(&self) -> Option<IpAddr> {
        for text in ["10.33.0.20", "10.33.0.21"] {
            let address = text.parse().unwrap();
            if self.ask.allocate_address(address, "ns/x".into(), "default".into()).await.is_ok() {
                return Some(address);
            }
        }
        None
    }

    fn router(&self) -> Option<Ipv4Addr> {
        self.router.snapshot().rows.keys().next().copied()
    }

    fn pool(&self) -> Option<PoolRow> {
        self.pool.snapshot().rows.get(&()).cloned()
    }

    fn intends(&self) -> Option<Vec<String>> {
        let snapshot = self.intent.snapshot();
        snapshot.rows.get(&()).and_then(|intent| Some(intent.list.as_ref()?.pod_cidrs.clone()))
    }
}

const NEXT: &str = "10.33.0.64/26";

#[tokio::test(start_paused = true)]
async fn a_pod_cidr_of_which_an_address_is_held_is_left_by_no_plan() {
    let rig = Rig::start();
    rig.settle().await;
    let address = rig.take().await.unwrap();
    rig.grant(&[(NEXT, GrantState::Active)]).await;
    assert_eq!(rig.pool().unwrap().pod_cidr.to_string(), NEXT);
    // A restart would still know of it; released, it is forgotten at once.
    let held = |view: View| view.rows.into_iter().any(|row| row.address == address && row.holder == "ns/x");
    assert!(held(rig.ask.view().await.unwrap()));
    rig.ask.release(address, "default".into()).await.unwrap();
    rig.settle().await;
    assert!(!held(rig.ask.view().await.unwrap()));
}

#[tokio::test(start_paused = true)]
async fn no_address_is_allocated_of_a_pod_cidr_that_is_not_on_disk_or_is_being_left() {
    let rig = Rig::start();
    rig.disk.refuses.store(true, Ordering::Relaxed);
    rig.grant(&[(NEXT, GrantState::Active)]).await;
    let error = rig.ask.allocate_address("10.33.0.70".parse().unwrap(), "ns/x".into(), "default".into()).await;
    assert!(error.unwrap_err().to_string().contains("not on disk yet"));
    assert!(!rig.pool().unwrap().on_disk);
    rig.disk.refuses.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(rig.pool().unwrap().on_disk);
    rig.grant(&[(NEXT, GrantState::Draining)]).await;
    assert!(rig.pool().unwrap().leaving);
    let request = OwnerRequest { owner: "ns/x".into(), pool: None, family: None, expiration: None };
    assert!(rig.ask.allocate(request).await.unwrap_err().to_string().contains("being released"));
}

#[tokio::test(start_paused = true)]
async fn router_address_and_list_of_a_pod_cidr_that_is_not_on_disk_are_published_to_no_writer() {
    let rig = Rig::start();
    rig.settle().await;
    let first = rig.router().unwrap();
    assert_eq!(rig.intends(), Some(vec![NET.to_owned()]));
    rig.disk.refuses.store(true, Ordering::Relaxed);
    rig.grant(&[(NEXT, GrantState::Active)]).await;
    assert_eq!((rig.router(), rig.intends()), (Some(first), Some(vec![NET.to_owned()])));
    rig.disk.refuses.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let next: ipnet::Ipv4Net = NEXT.parse().unwrap();
    assert!(rig.router().is_some_and(|router| next.contains(&router)), "{:?}", rig.router());
    assert_eq!(rig.intends(), Some(vec![NEXT.to_owned()]));
}

/// A pod's device with its route, whose source is the router address.
fn pod(address: Ipv4Addr, router: Option<Ipv4Addr>) -> NetworkRow {
    let link = LinkRow {
        name: LINK.to_owned(),
        up: true,
        loopback: false,
        kind: "veth".to_owned(),
        master: None,
        mtu: 1500,
        mac: Vec::new(),
        addresses: Vec::new(),
    };
    let route = RouteRow { destination: address.into(), ifindex: Some(7), gateway: None, source: router, ours: true };
    NetworkRow { links: BTreeMap::from([(7, link)]), routes: vec![route], ..NetworkRow::default() }
}

// Every file is lost, and pods run.
#[tokio::test(start_paused = true)]
async fn with_every_record_lost_the_router_address_of_the_pods_stays_and_their_addresses_are_held() {
    let (address, router) = (Ipv4Addr::new(10, 33, 0, 30), Ipv4Addr::new(10, 33, 0, 9));
    let plugin = Ipv4Addr::new(10, 33, 0, 31);
    let rig = Rig::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"), |parts| {
        parts.known_endpoints.insert(plugin, EndpointEntry { ifindex: 0, no_masquerade: false, generation: 9 });
    });
    rig.network.publish(BTreeMap::from([((), pod(address, Some(router)))]));
    // Nothing is granted yet: nothing is taken from the pod either.
    rig.grant(&[]).await;
    assert_eq!(rig.router(), Some(router));
    rig.grant(&[(NET, GrantState::Active)]).await;
    assert_eq!(rig.router(), Some(router));
    let known: Vec<Ipv4Addr> = rig.endpoints.snapshot().rows.keys().copied().collect();
    assert_eq!(known, [address, plugin]);
    assert_eq!(rig.endpoints.snapshot().rows.get(&plugin).map(|entry| entry.generation), Some(9), "its flows go on");
    for held in [address, plugin] {
        let named = rig.ask.allocate_address(held.into(), "ns/x".into(), "default".into()).await;
        assert!(named.is_err(), "{held}");
    }
    let rows = rig.ask.view().await.unwrap().rows;
    assert!([address, plugin].iter().all(|held| rows.iter().any(|row| row.address == IpAddr::V4(*held))), "{rows:?}");
    // A lease to come is distinguished from those that were named before.
    assert!(rig.ask.add(request(None)).await.unwrap().lease.generation > 9);
}

// Every file is lost, and the route to a pod goes and comes back, before the pod ends.
#[tokio::test(start_paused = true)]
async fn an_unrecorded_pod_keeps_its_address_without_a_route_and_leaves_it_in_quarantine() {
    let address = Ipv4Addr::new(10, 33, 0, 30);
    let rig = Rig::start();
    rig.network.publish(BTreeMap::from([((), pod(address, None))]));
    rig.settle().await;
    rig.network.publish(BTreeMap::from([((), NetworkRow { routes: Vec::new(), ..pod(address, None) })]));
    rig.settle().await;
    let state = async || {
        let rows = rig.ask.view().await.unwrap().rows;
        rows.into_iter().find(|row| row.address == IpAddr::V4(address)).map(|row| (row.state, row.until.is_some()))
    };
    assert_eq!(state().await, Some((RowState::Reserved, false)), "the device is there");
    rig.network.publish(BTreeMap::from([((), NetworkRow::default())]));
    rig.settle().await;
    assert_eq!(state().await, Some((RowState::Quarantined, true)), "the device is gone");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(state().await, None);
}

// The router's record is lost, the others are not, and the kernel is seen a little later.
#[tokio::test(start_paused = true)]
async fn no_router_address_is_chosen_before_the_kernel_has_shown_the_one_that_pods_use() {
    let (address, router) = (Ipv4Addr::new(10, 33, 0, 30), Ipv4Addr::new(10, 33, 0, 9));
    let network: Arc<Table<(), NetworkRow>> = Arc::new(Table::new("network"));
    let rig = Rig::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"), |parts| {
        parts.records = vec![Record::Grant(Grant::new(NET.parse().unwrap()))];
        parts.network = network.reader();
    });
    rig.settle().await;
    assert_eq!((rig.router(), rig.pool().map(|row| row.pod_cidr.to_string())), (None, Some(NET.to_owned())));
    network.publish(BTreeMap::from([((), pod(address, Some(router)))]));
    rig.settle().await;
    assert_eq!(rig.router(), Some(router));
}

// Before the API server has answered, an empty table is not a fact.
#[tokio::test(start_paused = true)]
async fn without_a_plan_nothing_is_published_that_would_remove_anything() {
    struct Unknown;
    impl NodeMode for Unknown {
        fn plan(&self, _input: &NodeInput<'_>, _now: Timestamp) -> NodePlan {
            NodePlan::default()
        }
    }
    let rig = Rig::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"), |parts| {
        parts.mode = Box::new(Unknown);
    });
    rig.settle().await;
    assert!(!rig.router.snapshot().synced && !rig.pool.snapshot().synced);
}

// An ADD was killed after it had created the pair and the route; nothing changes on the node afterwards.
#[tokio::test(start_paused = true)]
async fn an_address_routed_to_a_device_is_not_allocated_after_its_lease_has_ended() {
    let rig = Rig::start();
    rig.settle().await;
    let address = rig.ask.add(request(None)).await.unwrap().lease.addresses.ipv4.unwrap();
    rig.network.publish(BTreeMap::from([((), pod(address, None))]));
    tokio::time::sleep(Duration::from_secs(12 * 60)).await;
    let given = rig.ask.allocate_address(address.into(), "ns/x".into(), "default".into()).await;
    assert!(given.as_ref().is_err_and(|error| error.to_string().contains(LINK)), "{given:?}");
}

// The machine started with a clock in 1970, which has been corrected since.
#[tokio::test(start_paused = true)]
async fn errors_have_times_by_the_wall_clock() {
    let rig = Rig::with(at("1970-01-01T00:05:00Z"), at("2026-01-01T00:00:00Z"), |_| {});
    rig.settle().await;
    rig.ask.del(request(None).attachment, None).await.unwrap();
    let overtaken = rig.ask.add(request(None)).await.unwrap_err().to_string();
    assert!(overtaken.contains(" at 2026-01-01T00:00:"), "{overtaken}");
    let address = rig.take().await.unwrap();
    rig.ask.release(address, "default".into()).await.unwrap();
    let resting = rig.ask.allocate_address(address, "ns/y".into(), "default".into()).await.unwrap_err().to_string();
    assert!(resting.contains("2026-01-01T00:00:"), "{resting}");
}

/// The kernel programs' endpoint map: reads and writes take a while, or fail on request.
#[derive(Clone, Default)]
struct KernelMap {
    rows: Arc<Mutex<BTreeMap<Ipv4Addr, EndpointEntry>>>,
    deleted: Arc<Mutex<Vec<Ipv4Addr>>>,
    reading: Duration,
    writing: Duration,
    refuses: Arc<AtomicBool>,
}

#[derive(Debug, thiserror::Error)]
#[error("no space left in cst_endpoints")]
struct Full;

impl cistern_core::reconcile::Classify for Full {
    fn class(&self) -> cistern_core::reconcile::ErrorClass {
        cistern_core::reconcile::ErrorClass::Transient
    }
}

impl KernelMap {
    async fn write(&self) -> Result<(), Full> {
        tokio::time::sleep(self.writing).await;
        if self.refuses.load(Ordering::Relaxed) { Err(Full) } else { Ok(()) }
    }

    fn get(&self, address: Ipv4Addr) -> Option<u32> {
        self.rows.lock().unwrap().get(&address).map(|entry| entry.ifindex)
    }

    fn addresses(&self) -> Vec<Ipv4Addr> {
        self.rows.lock().unwrap().keys().copied().collect()
    }
}

impl crate::reconciler::Operations for KernelMap {
    type Key = Ipv4Addr;
    type Value = EndpointEntry;
    type Error = Full;

    async fn update(&self, address: &Ipv4Addr, entry: &EndpointEntry) -> Result<(), Full> {
        self.write().await?;
        self.rows.lock().unwrap().insert(*address, *entry);
        Ok(())
    }

    async fn delete(&self, address: &Ipv4Addr) -> Result<(), Full> {
        self.write().await?;
        self.rows.lock().unwrap().remove(address);
        self.deleted.lock().unwrap().push(*address);
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, Full> {
        let rows = self.rows.lock().unwrap().clone();
        tokio::time::sleep(self.reading).await;
        Ok(rows)
    }
}

/// How often the map is read.
const FULL_PASS: Duration = Duration::from_secs(3);

impl Rig {
    /// With a datapath.
    fn with_map(map: &KernelMap, change: impl FnOnce(&mut Parts)) -> Self {
        use crate::reconciler::{self, Options, Reconcile, SERIAL};
        let mut reconcile = None;
        let rig = Self::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"), |parts| {
            let options = Options {
                name: "endpoints",
                full_pass: FULL_PASS,
                backoff: cistern_core::reconcile::backoff::Backoff {
                    base: Duration::from_millis(100),
                    max: Duration::from_secs(15),
                },
                prune: true,
                concurrency: SERIAL,
            };
            let statuses = Arc::new(Table::new("targets"));
            let desired = parts.endpoints.reader();
            let with = Reconcile::new(options, desired, statuses, parts.clock, CancellationToken::new());
            parts.datapath = Some(with.handle());
            reconcile = Some(with);
            change(parts);
        });
        tokio::spawn(reconciler::run(map.clone(), reconcile.unwrap()));
        rig
    }

    /// An ADD before its confirmation.
    async fn add(&self, number: u32) -> (Attachment, u64, Ipv4Addr) {
        let attachment = Attachment { container_id: format!("c{number}"), ifname: "eth0".into() };
        let netns = format!("/run/netns/c{number}");
        let request = AddRequest { attachment: attachment.clone(), netns, ..request(None) };
        let lease = self.ask.add(request).await.unwrap().lease;
        (attachment, lease.generation, lease.addresses.ipv4.unwrap())
    }

    async fn is_confirmed(&self, attachment: &Attachment) -> bool {
        let (lease, _) = self.ask.check(attachment.clone()).await.unwrap().unwrap();
        matches!(lease.state, LeaseState::Confirmed { .. })
    }
}

fn pair(host_ifindex: u32) -> PodAttachment {
    PodAttachment::Pair(Interface { host_ifname: LINK.to_owned(), host_ifindex, mac: "02:00:00:00:00:01".to_owned() })
}

// A full pass reads the map before the pod is published, and compares it with the table afterwards.
#[tokio::test(start_paused = true)]
async fn a_pod_confirmed_during_a_full_pass_is_in_the_datapath_before_the_answer_and_stays_there() {
    let map = KernelMap { reading: Duration::from_secs(1), ..KernelMap::default() };
    let rig = Rig::with_map(&map, |_| {});
    for number in 0..20 {
        // At another moment of the full pass each time.
        tokio::time::sleep(Duration::from_millis(330)).await;
        let (attachment, generation, address) = rig.add(number).await;
        rig.ask.confirm(attachment.clone(), generation, pair(100 + number), None).await.unwrap();
        assert_eq!(map.get(address), Some(100 + number), "pod {number}");
        tokio::time::sleep(2 * FULL_PASS).await;
        assert_eq!(map.get(address), Some(100 + number), "pod {number}");
        assert!(map.deleted.lock().unwrap().is_empty(), "pod {number}");
        rig.ask.del(attachment, None).await.unwrap();
        assert_eq!(map.get(address), None, "pod {number}");
        map.deleted.lock().unwrap().clear();
    }
}

#[tokio::test(start_paused = true)]
async fn a_confirmation_and_a_release_are_answered_after_the_datapath_has_followed() {
    let map = KernelMap { writing: Duration::from_secs(2), ..KernelMap::default() };
    let rig = Rig::with_map(&map, |_| {});
    let (attachment, generation, address) = rig.add(1).await;
    let ask = rig.ask.clone();
    let (confirmed, of) = (attachment.clone(), attachment.clone());
    let confirm = tokio::spawn(async move { ask.confirm(confirmed, generation, pair(7), None).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The task serves others meanwhile.
    assert!(!confirm.is_finished() && map.get(address).is_none() && !rig.is_confirmed(&attachment).await);
    confirm.await.unwrap().unwrap();
    assert!(map.get(address) == Some(7) && rig.is_confirmed(&attachment).await);

    let ask = rig.ask.clone();
    let release = tokio::spawn(async move { ask.del(of, None).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!release.is_finished() && map.get(address) == Some(7));
    // The address is not reallocated while the datapath may have the pod.
    assert!(rig.ask.allocate_address(address.into(), "ns/x".into(), "default".into()).await.is_err());
    release.await.unwrap().unwrap();
    assert_eq!(map.get(address), None);
}

#[tokio::test(start_paused = true)]
async fn a_failed_write_to_the_datapath_fails_the_confirmation_with_its_reason_and_leaves_no_row() {
    let map = KernelMap::default();
    let rig = Rig::with_map(&map, |_| {});
    let (attachment, generation, address) = rig.add(1).await;
    map.refuses.store(true, Ordering::Relaxed);
    let error = rig.ask.confirm(attachment.clone(), generation, pair(7), None).await.unwrap_err();
    assert_eq!(error, EndpointError::Datapath { address, reason: Full.to_string() });
    assert!(!rig.is_confirmed(&attachment).await);
    assert!(!rig.endpoints.snapshot().rows.contains_key(&address));
    // A DEL succeeds all the same.
    let (other, of_other, _) = rig.add(2).await;
    assert!(rig.ask.confirm(other.clone(), of_other, pair(8), None).await.is_err());
    assert!(rig.ask.del(other, None).await.unwrap().is_some());
    map.refuses.store(false, Ordering::Relaxed);
    rig.ask.confirm(attachment.clone(), generation, pair(7), None).await.unwrap();
    assert!(rig.is_confirmed(&attachment).await);
    tokio::time::sleep(2 * FULL_PASS).await;
    assert_eq!(map.addresses(), [address]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_released_while_its_confirmation_waits_for_the_datapath_is_in_it_no_more() {
    let map = KernelMap { writing: Duration::from_secs(1), ..KernelMap::default() };
    let rig = Rig::with_map(&map, |_| {});
    let (attachment, generation, _) = rig.add(1).await;
    let (ask, of) = (rig.ask.clone(), attachment.clone());
    let confirm = tokio::spawn(async move { ask.confirm(of, generation, pair(7), None).await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    rig.ask.del(attachment.clone(), None).await.unwrap();
    let error = confirm.await.unwrap().unwrap_err();
    assert_eq!(error, EndpointError::Confirm(ConfirmError::NoLease { attachment }));
    assert_eq!(map.addresses(), [] as [Ipv4Addr; 0]);
}

// After a restart a confirmation may arrive before the devices of this node are known.
#[tokio::test(start_paused = true)]
async fn before_the_devices_are_known_a_pod_enters_and_leaves_the_datapath_and_no_other_does() {
    let map = KernelMap::default();
    let other = Ipv4Addr::new(10, 33, 0, 40);
    map.rows.lock().unwrap().insert(other, EndpointEntry { ifindex: 9, no_masquerade: false, generation: 1 });
    let (attachment, generation, address) = Rig::start().add(1).await;
    let lease = |state| {
        Record::Pod(PodLease {
            attachment: attachment.clone(),
            generation,
            addresses: Addresses { ipv4: Some(address), ipv6: None },
            network: None,
            pod: None,
            pool: DEFAULT_POOL.to_owned(),
            netns: "/run/netns/c1".into(),
            began: None,
            confirmed: None,
            state,
        })
    };
    let network: Arc<Table<(), NetworkRow>> = Arc::new(Table::new("network"));
    let rig = Rig::with_map(&map, |parts| {
        let now = parts.clock.now();
        let expires = now.checked_add(Duration::from_secs(60)).unwrap();
        parts.records = vec![
            Record::Grant(Grant::new(NET.parse().unwrap())),
            lease(LeaseState::Provisional { since: now, expires }),
        ];
        parts.network = network.reader();
    });
    rig.ask.confirm(attachment.clone(), generation, pair(7), None).await.unwrap();
    assert_eq!((map.get(address), map.get(other)), (Some(7), Some(9)));
    rig.ask.del(attachment, None).await.unwrap();
    tokio::time::sleep(2 * FULL_PASS).await;
    assert_eq!(map.addresses(), [other]);
    assert!(!rig.endpoints.snapshot().synced);
    // Now it is a row too many.
    network.publish(BTreeMap::from([((), NetworkRow::default())]));
    tokio::time::sleep(2 * FULL_PASS).await;
    assert_eq!(map.addresses(), [] as [Ipv4Addr; 0]);
}
