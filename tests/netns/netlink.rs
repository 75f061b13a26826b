//! The netlink adapter against the kernel, read back through `ip`.

use cistern::blocking::Blocking;
use cistern::netlink::link::{self, Ipv4Setting, VethEnd};
use cistern::netlink::monitor;
use cistern::netlink::namespace::Namespace;
use cistern::netlink::route::{self, PROTOCOL_BOOT, PROTOCOL_NODE, PROTOCOL_POD, Route};
use cistern::netlink::{Handle, NetlinkError, address, neighbour};
use cistern::tables::Table;
use cistern_core::reconcile::{Classify, ErrorClass};
use cistern_tests::lab::{Lab, Machine};
use ipnet::IpNet;
use nix::errno::Errno;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

const HOST_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
const POD_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn node(lab: &Lab) -> Machine {
    lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap()
}

fn handle(machine: &Machine) -> Handle {
    Namespace::open(machine.namespace()).unwrap().run(Handle::open).unwrap().unwrap()
}

fn end<'a>(name: &'a str, mac: [u8; 6]) -> VethEnd<'a> {
    VethEnd { name, mac, namespace: None }
}

#[test]
fn a_pair_is_created_with_its_other_side_in_another_namespace() {
    let lab = Lab::new("e-link").unwrap();
    let node = node(&lab);
    let pod = node.pod("pod-1").unwrap();
    let namespace = Namespace::open(pod.namespace()).unwrap();
    let mut host = handle(&node);
    let peer = VethEnd { name: "eth0", mac: POD_MAC, namespace: Some(namespace.as_fd()) };
    host.apply(&[link::add_veth(end("cst1", HOST_MAC), peer, 1400)]).unwrap();

    let made = host.link_by_name("cst1").unwrap().unwrap();
    assert_eq!((made.mtu, made.mac.as_slice(), made.up), (1400, HOST_MAC.as_slice(), false));
    assert_eq!(made.kind.as_deref(), Some("veth"));
    assert_eq!(host.link_by_index(made.index).unwrap().unwrap(), made);
    host.apply(&[
        link::set_ipv4(made.index, &[(Ipv4Setting::ReversePathFilter, 1), (Ipv4Setting::AcceptRedirects, 0)]),
        link::no_ipv6_link_local(made.index),
        link::up(made.index),
    ])
    .unwrap();
    assert!(host.link_by_name("cst1").unwrap().unwrap().up);
    for (setting, value) in [("rp_filter", "1"), ("accept_redirects", "0")] {
        let path = format!("/proc/sys/net/ipv4/conf/cst1/{setting}");
        assert_eq!(node.run("cat", &[&path]).unwrap(), value, "{setting}");
    }
    let shown = pod.json("ip", &["-j", "link", "show", "eth0"]).unwrap();
    assert_eq!(shown[0]["address"], "02:00:00:00:00:02");
    assert_eq!(shown[0]["mtu"], 1400);
    // The peer's index is known without entering its namespace.
    assert_eq!(shown[0]["ifindex"], made.lower.unwrap());
    pod.run("ip", &["link", "set", "eth0", "up"]).unwrap();
    let addresses = node.json("ip", &["-j", "address", "show", "cst1"]).unwrap();
    assert_eq!(addresses[0]["addr_info"].as_array().unwrap().len(), 0, "{addresses}");

    assert!(host.remove(&link::delete_by_name("cst1")).unwrap());
    assert!(!host.remove(&link::delete_by_name("cst1")).unwrap());
    assert!(host.link_by_name("cst1").unwrap().is_none());
    assert!(pod.run("ip", &["link", "show", "eth0"]).is_err());
}

#[test]
fn a_batch_continues_after_an_error_and_returns_each_result() {
    let lab = Lab::new("e-batch").unwrap();
    let node = node(&lab);
    let mut handle = handle(&node);
    let outcomes = handle
        .apply_each(&[
            link::add_veth(end("one", HOST_MAC), end("two", POD_MAC), 1500),
            link::add_veth(end("one", HOST_MAC), end("three", POD_MAC), 1500),
            link::up(4_000_000),
            link::add_veth(end("four", HOST_MAC), end("five", POD_MAC), 1500),
        ])
        .unwrap();
    let errors: Vec<_> = outcomes.iter().map(|outcome| outcome.as_ref().err().and_then(NetlinkError::errno)).collect();
    assert_eq!(errors, [None, Some(Errno::EEXIST), Some(Errno::ENODEV), None]);
    let exists = outcomes[1].as_ref().unwrap_err();
    assert!(exists.is_exists());
    assert!(exists.to_string().starts_with("add veth pair one and three, MTU 1500: EEXIST"), "{exists}");
    let names: Vec<_> = handle.links().unwrap().into_iter().map(|link| link.name).collect();
    for name in ["lo", "eth0", "one", "two", "four", "five"] {
        assert!(names.iter().any(|found| found == name), "{name} in {names:?}");
    }
    assert!(handle.link_by_name("a-name-that-is-too-long-for-a-device").unwrap().is_none());
}

#[test]
fn an_error_has_the_operation_and_the_kernel_s_message() {
    let lab = Lab::new("e-words").unwrap();
    let mut handle = handle(&node(&lab));
    let error = handle.apply(&[route::replace(&Route::via(net("10.9.0.0/24"), ip("203.0.113.9"), 2))]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "set route 10.9.0.0/24 via 203.0.113.9 dev 2: ENETUNREACH: Network is unreachable \
         (Nexthop has invalid gateway)"
    );
    assert_eq!(error.class(), ErrorClass::Transient);
    let wrong = handle.apply(&[link::add_veth(end("one", HOST_MAC), end("two", POD_MAC), 10)]).unwrap_err();
    assert_eq!(wrong.errno(), Some(Errno::EINVAL));
    assert_eq!(wrong.class(), ErrorClass::Permanent);
}

#[test]
fn addresses_routes_and_neighbours_are_added_and_deleted() {
    let lab = Lab::new("e-route").unwrap();
    let node = node(&lab);
    let mut handle = handle(&node);
    let eth0 = handle.link_by_name("eth0").unwrap().unwrap().index;
    let router = net("10.244.1.1/32");

    let give = address::add(link::LOOPBACK, router);
    assert!(handle.add(&give).unwrap());
    assert!(!handle.add(&give).unwrap());
    handle.apply(&[address::replace(link::LOOPBACK, router)]).unwrap();
    let of_loopback: Vec<_> = handle.addresses_of(link::LOOPBACK).unwrap().iter().map(|a| a.net).collect();
    assert!(of_loopback.contains(&router) && of_loopback.contains(&net("127.0.0.1/8")), "{of_loopback:?}");

    let end_of_block = Route::unreachable(net("10.244.1.0/24"));
    let to_node = Route::via(net("10.244.2.0/24"), ip("192.0.2.2"), eth0);
    let to_pod =
        Route { source: Some(router.addr()), protocol: PROTOCOL_POD, ..Route::on_link(net("10.244.1.7/32"), eth0) };
    handle.apply(&[route::add(&end_of_block), route::add(&to_node), route::add(&to_pod)]).unwrap();
    assert!(handle.apply(&[route::add(&to_node)]).unwrap_err().is_exists());
    let moved = Route { gateway: Some(ip("192.0.2.3")), ..to_node };
    handle.apply(&[route::replace(&moved)]).unwrap();

    // Only those of the given protocol: the agent's full pass ignores the pods' routes.
    let mut mine = handle.routes(Some(PROTOCOL_NODE)).unwrap();
    mine.sort();
    assert_eq!(mine, [end_of_block, moved]);
    assert_eq!(handle.routes(Some(PROTOCOL_POD)).unwrap(), [to_pod]);
    assert!(handle.routes(None).unwrap().len() >= 4);
    let shown = node.run("ip", &["route", "show", "10.244.1.7"]).unwrap();
    assert_eq!(shown.trim(), "10.244.1.7 dev eth0 proto 198 scope link src 10.244.1.1");

    // A foreign route with the same destination is not ours.
    let foreign = Route { protocol: PROTOCOL_BOOT, ..moved };
    assert!(!handle.remove(&route::delete(&foreign)).unwrap());
    assert!(handle.remove(&route::delete(&moved)).unwrap());
    assert!(!handle.remove(&route::delete(&moved)).unwrap());

    handle.apply(&[neighbour::replace_permanent(eth0, ip("192.0.2.9"), POD_MAC)]).unwrap();
    let entry = handle.neighbours_of(eth0).unwrap().into_iter().find(|n| n.address == ip("192.0.2.9")).unwrap();
    assert!(entry.permanent && entry.mac == Some(POD_MAC));
    assert!(handle.neighbours_of(link::LOOPBACK).unwrap().iter().all(|n| n.address != ip("192.0.2.9")));
    assert!(handle.remove(&neighbour::delete(eth0, ip("192.0.2.9"))).unwrap());

    assert!(handle.remove(&address::delete(link::LOOPBACK, router)).unwrap());
    assert!(!handle.remove(&address::delete(link::LOOPBACK, router)).unwrap());
}

#[test]
fn each_next_hop_of_a_multipath_route_is_listed_and_other_tables_are_not() {
    let lab = Lab::new("e-multi").unwrap();
    let node = node(&lab);
    node.run("ip", &["route", "add", "default", "nexthop", "via", "192.0.2.2", "nexthop", "via", "192.0.2.3"]).unwrap();
    node.run("ip", &["route", "add", "10.5.0.0/16", "via", "192.0.2.4", "table", "100"]).unwrap();
    let routes = handle(&node).routes(None).unwrap();
    let mut gateways: Vec<_> = routes.iter().filter(|r| r.destination == net("0.0.0.0/0")).map(|r| r.gateway).collect();
    gateways.sort();
    assert_eq!(gateways, [Some(ip("192.0.2.2")), Some(ip("192.0.2.3"))]);
    assert!(routes.iter().all(|route| route.destination != net("10.5.0.0/16")));
}

#[test]
fn a_namespace_is_entered_by_one_thread_and_left_again() {
    let lab = Lab::new("e-namespace").unwrap();
    let node = node(&lab);
    let home = Namespace::current().unwrap();
    let other = Namespace::open(node.namespace()).unwrap();
    assert!(!other.is_same(&home).unwrap());
    assert!(other.run(|| Namespace::current().unwrap().is_same(&other).unwrap()).unwrap());
    assert!(Namespace::current().unwrap().is_same(&home).unwrap());
    {
        let _visit = other.visit().unwrap();
        assert!(Namespace::current().unwrap().is_same(&other).unwrap());
    }
    assert!(Namespace::current().unwrap().is_same(&home).unwrap());

    assert!(Namespace::open("/run/netns/e-none").unwrap_err().is_missing());
    let file = Namespace::open("/etc/passwd").unwrap();
    assert_eq!(file.visit().unwrap_err().errno(), Some(Errno::EINVAL));
    let mount = Namespace::open(format!("/proc/{}/ns/mnt", node.id())).unwrap();
    assert_eq!(mount.run(|| ()).unwrap_err().errno(), Some(Errno::EINVAL));
}

fn ipv4(link: &cistern::tables::rows::LinkRow) -> Vec<IpNet> {
    link.addresses.iter().copied().filter(|net| net.addr().is_ipv4()).collect()
}

#[test]
fn the_network_table_follows_changes_also_after_an_overflow() {
    let lab = Lab::new("e-monitor").unwrap();
    let node = node(&lab);
    let namespace = Namespace::open(node.namespace()).unwrap();
    let table = Arc::new(Table::new("network"));
    let mut reader = table.reader();
    let cancel = CancellationToken::new();
    std::thread::scope(|scope| {
        // A failed assertion must not leave the other thread waiting.
        let guard = cancel.clone().drop_guard();
        let (table, stop) = (Arc::clone(&table), cancel.clone());
        let follower = scope.spawn(|| {
            namespace
                .run(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(monitor::follow(table, Arc::new(Table::new("reads")), Blocking::inline(), stop))
                })
                .unwrap()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut until = |what: &str, seen: &dyn Fn(&cistern::tables::rows::NetworkRow) -> bool| {
            runtime.block_on(async {
                tokio::time::timeout(std::time::Duration::from_secs(30), async {
                    loop {
                        if reader.snapshot().rows.get(&()).is_some_and(seen) {
                            break;
                        }
                        reader.changed().await;
                    }
                })
                .await
                .unwrap_or_else(|_| panic!("{what} was not seen"));
            });
        };
        until("eth0", &|network| {
            network.links.values().any(|link| link.name == "eth0" && ipv4(link) == [net("192.0.2.1/24")])
        });
        node.run("ip", &["route", "add", "10.7.0.0/16", "via", "192.0.2.2"]).unwrap();
        until("the route", &|network| {
            network.routes.iter().any(|route| route.destination == "10.7.0.0/16".parse().unwrap())
        });
        node.run("ip", &["address", "add", "192.0.2.50/24", "dev", "eth0"]).unwrap();
        until("the address", &|network| {
            network.links.values().any(|link| ipv4(link) == [net("192.0.2.1/24"), net("192.0.2.50/24")])
        });
        // Far more events than fit in the socket's buffer.
        let many: Vec<_> = (0..4000_u32)
            .map(|i| {
                route::add(&Route::unreachable(IpNet::new(IpAddr::from((0x0a0a_0000 + i).to_be_bytes()), 32).unwrap()))
            })
            .collect();
        let mut handle = handle(&node);
        for batch in many.chunks(200) {
            handle.apply(batch).unwrap();
        }
        node.run("ip", &["link", "add", "last", "type", "bridge"]).unwrap();
        until("the last device", &|network| {
            network.links.values().any(|link| link.name == "last" && link.kind == "bridge" && !link.up)
        });
        drop(guard);
        follower.join().unwrap().unwrap();
    });
}
