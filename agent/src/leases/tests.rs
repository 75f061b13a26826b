use super::*;
use crate::tables::rows::{LinkRow, RouteRow};
use cistern_core::ipam::lease::{AddRequest, OwnerRequest};
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
            map: None,
            mode: Box::new(Scripted(Arc::clone(&supply))),
            cilium_nodes: cilium_nodes.reader(),
            network: network.reader(),
            peers: peers.reader(),
            nodes: nodes.reader(),
            router: Arc::clone(&router),
            endpoints: Arc::clone(&endpoints),
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
    let route = RouteRow { destination: address.into(), ifindex: Some(7), gateway: None, source: router };
    NetworkRow { links: BTreeMap::from([(7, link)]), routes: vec![route] }
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
