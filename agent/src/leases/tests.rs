use super::*;
use crate::tables::rows::{LinkRow, RouteRow};
use cistern_core::ipam::lease::{AddRequest, OwnerRequest};
use cistern_core::moment::Moment;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

struct Nowhere;

impl LeaseStore for Nowhere {
    fn write(&mut self, _change: &Change) -> Result<(), String> {
        Ok(())
    }
}

/// Every namespace is there, and devices are only ever removed.
struct Quiet;

impl Host for Quiet {
    fn namespace(&self, _path: &str) -> Namespace {
        Namespace::There
    }

    fn host_side(&self, _attachment: &Attachment) -> String {
        LINK.to_owned()
    }

    fn remove_device(&mut self, _name: &str) -> Result<(), String> {
        Ok(())
    }
}

struct Rig {
    ask: Endpoints,
    pool: Arc<Table<(), PoolRow>>,
    remembered: Arc<Table<(), PoolRow>>,
    network: Arc<Table<(), NetworkRow>>,
    held: Arc<Table<(), HeldRow>>,
    router: Arc<Table<Ipv4Addr, ()>>,
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

impl Rig {
    fn start() -> Self {
        Self::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"))
    }

    /// With the leases' clock and people's.
    fn with(clock: Clock, wall: Clock) -> Self {
        let pool = Arc::new(Table::new("pool"));
        pool.publish(BTreeMap::from([((), PoolRow::new(NET.parse().unwrap()))]));
        let remembered = Arc::new(Table::new("remembered-pool"));
        let network: Arc<Table<(), NetworkRow>> = Arc::new(Table::new("network"));
        network.publish(BTreeMap::from([((), NetworkRow::default())]));
        let (peers, nodes) = (Table::new("peers"), Table::new("nodes"));
        let held = Arc::new(Table::new("held"));
        let router = Arc::new(Table::new("router"));
        let mut drawn = 7;
        let parts = Parts {
            node: "a".into(),
            records: Vec::new(),
            timings: Timings::default(),
            configured_router: None,
            rebooted: false,
            times: RecordTimes::Continue,
            host: Box::new(Quiet),
            draw: Box::new(move || {
                drawn += 1;
                drawn
            }),
            store: Box::new(Nowhere),
            map: None,
            pool: pool.reader(),
            remembered: remembered.reader(),
            network: network.reader(),
            peers: peers.reader(),
            nodes: nodes.reader(),
            router: Arc::clone(&router),
            endpoints: Arc::new(Table::new("endpoints")),
            held: Arc::clone(&held),
            waits: Waits::new(clock),
            findings: Findings::new(clock),
            boot: String::new(),
            clock,
            wall,
        };
        let (ask, task) = start(parts, CancellationToken::new());
        tokio::spawn(async move {
            task.await;
            drop((peers, nodes));
        });
        Self { ask, pool, remembered, network, held, router }
    }

    async fn remember(&self) {
        self.remembered.publish(BTreeMap::from([((), PoolRow::new(NET.parse().unwrap()))]));
        self.settle().await;
    }

    async fn settle(&self) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    /// An address by name; the router has one of the two.
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

    fn held(&self) -> HeldRow {
        self.held.snapshot().rows[&()].clone()
    }
}

#[tokio::test(start_paused = true)]
async fn an_address_that_is_asked_for_by_name_is_held_until_it_is_given_back() {
    let rig = Rig::start();
    rig.remember().await;
    assert!(!rig.held().any);
    let address = rig.take().await.unwrap();
    assert!(rig.held().any);
    // Of another block, it is told as such.
    rig.pool.publish(BTreeMap::from([((), PoolRow::new("10.33.0.64/26".parse().unwrap()))]));
    rig.settle().await;
    let IpAddr::V4(ipv4) = address else { unreachable!() };
    assert_eq!((rig.held().any, rig.held().beyond), (false, vec![ipv4]));
    rig.ask.release(address, "default".into()).await.unwrap();
    assert!(rig.held().beyond.is_empty());
}

#[tokio::test(start_paused = true)]
async fn no_address_is_given_of_a_pod_cidr_that_is_not_on_disk_or_is_being_left() {
    let rig = Rig::start();
    rig.settle().await;
    assert_eq!((rig.held().pod_cidr, rig.take().await), (NET.parse().ok(), None));
    rig.remember().await;
    assert!(!rig.held().leaving);
    rig.pool.publish(BTreeMap::from([((), PoolRow { leaving: true, ..PoolRow::new(NET.parse().unwrap()) })]));
    rig.settle().await;
    assert_eq!((rig.held().leaving, rig.take().await), (true, None));
    let request = OwnerRequest { owner: "ns/x".into(), pool: None, family: None, expiration: None };
    assert!(rig.ask.allocate(request).await.unwrap_err().to_string().contains("being left"));
}

#[tokio::test(start_paused = true)]
async fn nobody_hears_of_a_router_address_of_a_pod_cidr_that_is_not_on_disk() {
    let rig = Rig::start();
    rig.settle().await;
    assert_eq!(rig.router(), None);
    rig.remember().await;
    let first = rig.router().unwrap();
    let next = PoolRow::new("10.33.0.64/26".parse().unwrap());
    rig.pool.publish(BTreeMap::from([((), next.clone())]));
    rig.settle().await;
    assert_eq!(rig.router(), Some(first));
    rig.remembered.publish(BTreeMap::from([((), next.clone())]));
    rig.settle().await;
    assert!(rig.router().is_some_and(|router| next.pod_cidr.contains(&router)), "{:?}", rig.router());
}

// An ADD was killed when it had made the pair and the route; nothing changes on the node since.
#[tokio::test(start_paused = true)]
async fn an_address_that_a_device_leads_to_is_given_to_nobody_when_its_lease_has_ended() {
    let rig = Rig::start();
    rig.remember().await;
    let address = rig.ask.add(request(None)).await.unwrap().lease.addresses.ipv4.unwrap();
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
    let route = RouteRow { destination: address.into(), ifindex: Some(7), gateway: None, source: None };
    let row = NetworkRow { links: BTreeMap::from([(7, link)]), routes: vec![route] };
    rig.network.publish(BTreeMap::from([((), row)]));
    tokio::time::sleep(Duration::from_secs(12 * 60)).await;
    let given = rig.ask.allocate_address(address.into(), "ns/x".into(), "default".into()).await;
    assert!(given.as_ref().is_err_and(|error| error.to_string().contains(LINK)), "{given:?}");
}

// The machine was started in 1970, and has the right time since.
#[tokio::test(start_paused = true)]
async fn refusals_show_the_time_that_peoples_clocks_show() {
    let rig = Rig::with(at("1970-01-01T00:05:00Z"), at("2026-01-01T00:00:00Z"));
    rig.remember().await;
    rig.ask.del(request(None).attachment, None).await.unwrap();
    let overtaken = rig.ask.add(request(None)).await.unwrap_err().to_string();
    assert!(overtaken.contains(" at 2026-01-01T00:00:"), "{overtaken}");
    let address = rig.take().await.unwrap();
    rig.ask.release(address, "default".into()).await.unwrap();
    let resting = rig.ask.allocate_address(address, "ns/y".into(), "default".into()).await.unwrap_err().to_string();
    assert!(resting.contains("2026-01-01T00:00:"), "{resting}");
}
