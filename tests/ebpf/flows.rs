//! Flows in user space: listing, and the collector.

use crate::isolated::isolated;
use crate::kernel::{Kernel, LOOPBACK};
use aya::maps::{Array, HashMap, MapData};
use cistern::datapath::Collected;
use cistern_core::masquerade::cases::{self, Machine, NODE, NODE_OTHER, POD_A, POD_B, WEB};
use cistern_core::masquerade::decide::{Content, Direction, Packet, TcpFlags, Verdict};
use cistern_core::masquerade::expire::{FlowOwner, FlowState, Protocol};
use cistern_core::masquerade::plan::DeviceEntry;
use cistern_ebpf_common::abi::{FlowKey, FwdValue, OWNER_POD, RevKey, RevValue, SettingsValue, UDP, handover};
use cistern_ebpf_common::ports::{PortRange, PortWalk, TRIES, flow_hash};
use std::net::{Ipv4Addr, SocketAddrV4};

fn end(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}

fn packet(content: Content, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Packet {
    Packet { content, source: end(from.0, from.1), destination: end(to.0, to.1), device: cases::device(from.0) }
}

const A: (Ipv4Addr, u16) = (POD_A, 41_000);
const W: (Ipv4Addr, u16) = (WEB, 443);
const OUTSIDE: (Ipv4Addr, u16) = (NODE, 41_000);

/// One complete walk of the collector, `later` seconds from now.
fn collect(kernel: &Kernel, later: u32) -> Collected {
    let mut collector = kernel.datapath.collector().unwrap();
    let entries: HashMap<MapData, RevKey, RevValue> = kernel.map("cst_rev");
    let now = entries.iter().map(|row| row.unwrap().1.last_seen).max().unwrap_or(0);
    let mut total = Collected::default();
    loop {
        let slice = collector.step_at(now + later).unwrap();
        total.flows += slice.flows;
        total.expired += slice.expired;
        total.stale += slice.stale;
        total.inbound += slice.inbound;
        total.inbound_expired += slice.inbound_expired;
        if slice.complete {
            return total;
        }
    }
}

/// Sends a packet of each flow from pod A, and returns the translated ports.
fn ask(kernel: &mut Kernel, flows: &[(u16, u16)]) -> Vec<u16> {
    let mut port = |(source, remote): &(u16, u16)| match kernel
        .send(Direction::Egress, &packet(Content::Udp, (POD_A, *source), (WEB, *remote)))
        .0
    {
        Verdict::Source(external) => external.port(),
        other => panic!("{source} to {remote}: {other:?}"),
    };
    flows.iter().map(&mut port).collect()
}

/// A UDP flow of pod A all of whose tried ports have this parity, by its source port and its destination's.
fn walks_over(parity: u16, settings: &SettingsValue) -> (u16, u16) {
    let range = PortRange { first: settings.port_first, last: settings.port_last };
    let all_have_it = |(source, remote): &(u16, u16)| {
        let flow = FlowKey {
            source: POD_A.octets(),
            destination: WEB.octets(),
            source_port: source.to_be_bytes(),
            destination_port: remote.to_be_bytes(),
            protocol: UDP,
            zero: [0; 3],
        };
        let mut walk = PortWalk::new(range, flow_hash(settings.hash_key, &flow));
        source % 2 == parity && (1..TRIES).all(|_| walk.next_port() % 2 == parity)
    };
    let flows = (1_u16..1_000).flat_map(|remote| (2_000..60_000).map(move |source| (source, remote)));
    flows.into_iter().find(all_have_it).unwrap()
}

#[test]
fn each_flow_finds_a_port_while_two_builds_share_them_and_is_found_under_it() {
    for (role, parity) in [(handover::EVEN, 0), (handover::ODD, 1)] {
        isolated(|bpffs| {
            let mut kernel = Kernel::new(&bpffs.join("cistern"));
            let mut slot: Array<MapData, SettingsValue> = kernel.map("cst_settings");
            let settings = slot.get(&0, 0).unwrap();
            slot.set(0, SettingsValue { handover: role, ..settings }, 0).unwrap();
            let flows: Vec<(u16, u16)> =
                (300..700).map(|source| (source, 53)).chain([walks_over(1 - parity, &settings)]).collect();
            let ports = ask(&mut kernel, &flows);
            assert!(ports.iter().all(|port| port % 2 == parity), "{ports:?}");
            // Also when all ports may be allocated again, as by the programs that took over.
            slot.set(0, settings, 0).unwrap();
            kernel.lose_cache();
            assert_eq!(ask(&mut kernel, &flows), ports);
            assert_eq!(kernel.flows(), flows.len());
        });
    }
}

#[test]
fn the_listing_names_every_end_of_a_flow_and_its_state() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        kernel.send(Direction::Egress, &packet(Content::Tcp(TcpFlags::SYN), A, W));
        kernel.send(Direction::Egress, &packet(Content::Udp, (NODE, 50_000), (WEB, 80)));
        kernel.send(Direction::Ingress, &packet(Content::Tcp(TcpFlags::SYN), (WEB, 39_000), (POD_B, 80)));

        let flows = kernel.view.flows().unwrap();
        let [tcp, udp] = flows.as_slice() else { panic!("{flows:?}") };
        assert_eq!((tcp.origin, tcp.external, tcp.remote), (end(POD_A, 41_000), end(NODE, 41_000), end(WEB, 443)));
        assert_eq!((tcp.protocol, tcp.state, tcp.owner), (Protocol::Tcp, FlowState::Opening, FlowOwner::Pod));
        assert_eq!(tcp.ifindex, LOOPBACK);
        assert_eq!((udp.origin, udp.external, udp.owner), (end(NODE, 50_000), end(NODE, 50_000), FlowOwner::Host));

        let inbound = kernel.view.inbound().unwrap();
        let [flow] = inbound.as_slice() else { panic!("{inbound:?}") };
        assert_eq!((flow.pod, flow.remote), (end(POD_B, 80), end(WEB, 39_000)));

        kernel.send(Direction::Ingress, &packet(Content::Tcp(TcpFlags::SYN_ACK), W, OUTSIDE));
        assert_eq!(kernel.view.flows().unwrap()[0].state, FlowState::Established);
        kernel.send(Direction::Egress, &packet(Content::Tcp(TcpFlags::FIN), A, W));
        assert_eq!(kernel.view.flows().unwrap()[0].state, FlowState::Established, "the other end may go on sending");
        kernel.send(Direction::Ingress, &packet(Content::Tcp(TcpFlags::FIN), W, OUTSIDE));
        assert_eq!(kernel.view.flows().unwrap()[0].state, FlowState::Closing);
        kernel.send(Direction::Egress, &packet(Content::Tcp(TcpFlags::SYN), A, W));
        assert_eq!(kernel.view.flows().unwrap()[0].state, FlowState::Opening, "a SYN starts anew");
        kernel.send(Direction::Ingress, &packet(Content::Tcp(TcpFlags::RST), W, OUTSIDE));
        assert_eq!(kernel.view.flows().unwrap()[0].state, FlowState::Reset);
    });
}

// case: masquerade LT1
#[test]
fn an_idle_udp_flow_expires_and_its_port_is_free_again() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        let pod_b = packet(Content::Udp, (POD_B, 41_000), W);
        kernel.send(Direction::Egress, &packet(Content::Udp, A, W));
        assert_eq!(collect(&kernel, 29).expired, 0);
        assert_ne!(kernel.send(Direction::Egress, &pod_b).0, Verdict::Source(end(NODE, 41_000)));

        // Replied flows live longer.
        kernel.send(Direction::Ingress, &packet(Content::Udp, W, OUTSIDE));
        assert_eq!(collect(&kernel, 31).expired, 1, "only the one without an answer");
        assert_eq!(kernel.flows(), 1);
        let over = collect(&kernel, 180);
        assert_eq!((over.expired, kernel.flows()), (1, 0));
        let cache: HashMap<MapData, FlowKey, FwdValue> = kernel.map("cst_fwd");
        assert_eq!(cache.keys().count(), 0, "the cache forgets with the authority");
        assert_eq!(kernel.send(Direction::Egress, &pod_b).0, Verdict::Source(end(NODE, 41_000)), "the port is free");
    });
}

// case: masquerade LT2
#[test]
fn tcp_flows_expire_by_their_state() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        let mut send = |direction, flags, from, to| {
            kernel.send(direction, &packet(Content::Tcp(flags), from, to));
        };
        let ports: [u16; 4] = [41_000, 41_001, 41_002, 41_003];
        for port in ports {
            send(Direction::Egress, TcpFlags::SYN, (POD_A, port), W);
        }
        // 41000 remains half-open; the others get replies.
        for port in &ports[1..] {
            send(Direction::Ingress, TcpFlags::SYN_ACK, W, (NODE, *port));
        }
        send(Direction::Ingress, TcpFlags::RST, W, (NODE, 41_001));
        send(Direction::Egress, TcpFlags::FIN, (POD_A, 41_002), W);
        send(Direction::Ingress, TcpFlags::FIN, W, (NODE, 41_002));

        assert_eq!(collect(&kernel, 9).expired, 0);
        assert_eq!(collect(&kernel, 10).expired, 1, "the one that was reset");
        assert_eq!(collect(&kernel, 60).expired, 2, "half open, and closed by both ends");
        assert_eq!(collect(&kernel, 7_260).expired, 0);
        assert_eq!(collect(&kernel, 21_600).expired, 1, "established, after the setting's time");
        assert_eq!(kernel.flows(), 0);
    });
}

#[test]
fn flows_of_a_pod_that_has_ended_go_soon_and_those_of_others_stay() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        for (port, pod) in [(41_000, POD_A), (41_001, POD_B)] {
            kernel.send(Direction::Egress, &packet(Content::Tcp(TcpFlags::SYN), (pod, port), W));
            kernel.send(Direction::Ingress, &packet(Content::Tcp(TcpFlags::SYN_ACK), W, (NODE, port)));
        }
        assert_eq!(collect(&kernel, 100).expired, 0, "both are established");
        kernel.endpoint(POD_A, None);
        assert_eq!(collect(&kernel, 9).expired, 0);
        assert_eq!(collect(&kernel, 10).expired, 1);
        let [left] = kernel.view.flows().unwrap().try_into().unwrap();
        assert_eq!(*left.origin.ip(), POD_B);
    });
}

#[test]
fn inbound_entries_expire_too() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        kernel.send(Direction::Ingress, &packet(Content::Udp, (WEB, 39_000), (POD_A, 53)));
        // The NAT map has the time to compare with.
        kernel.send(Direction::Egress, &packet(Content::Tcp(TcpFlags::SYN), A, W));
        let kept = collect(&kernel, 28);
        assert_eq!((kept.inbound, kept.inbound_expired), (1, 0));
        assert_eq!(collect(&kernel, 32).inbound_expired, 1);
        assert!(kernel.view.inbound().unwrap().is_empty());
    });
}

// case: masquerade NM16, NM17
#[test]
fn flows_under_an_address_that_left_the_node_are_deleted_and_counted() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        kernel.close_windows();
        kernel.send(Direction::Egress, &packet(Content::Udp, A, W));
        kernel.send(Direction::Egress, &packet(Content::Udp, (POD_B, 41_001), W));
        assert_eq!(collect(&kernel, 0).stale, 0);

        // On another device, it is still the node's.
        kernel.readdress(Some(NODE_OTHER));
        assert_eq!(collect(&kernel, 0).stale, 0);

        kernel.include("172.29.8.20/32".parse().unwrap());
        let (verdict, counters) = kernel.send(Direction::Egress, &packet(Content::Udp, A, W));
        assert_eq!(verdict, Verdict::Source(end(NODE_OTHER, 41_000)));
        assert!(counters.contains(&"stale-address".to_owned()), "{counters:?}");
        assert_eq!(collect(&kernel, 0).stale, 1, "the one that sent nothing");
        assert_eq!(kernel.flows(), 1);

        kernel.devices.insert(LOOPBACK, DeviceEntry { address: Some(NODE) }).unwrap();
        let (verdict, _) = kernel.send(Direction::Egress, &packet(Content::Udp, (POD_B, 41_001), W));
        assert_eq!(verdict, Verdict::Source(end(NODE, 41_001)), "usable at once when it is back");
    });
}

// case: masquerade NM19
#[test]
fn many_flows_are_listed_whole() {
    isolated(|bpffs| {
        let capacities = cistern::datapath::Capacities { flows: 65_536, inbound: 64 };
        let kernel = Kernel::with(&bpffs.join("cistern"), capacities);
        let mut map: HashMap<MapData, RevKey, RevValue> = kernel.map("cst_rev");
        let flow = FlowKey {
            source: POD_A.octets(),
            destination: WEB.octets(),
            source_port: [0; 2],
            destination_port: [1, 187],
            protocol: 6,
            zero: [0; 3],
        };
        let value = RevValue { received: 1, ..RevValue::opened(&flow, OWNER_POD, 1, 2, 1) };
        for port in 0..60_000_u16 {
            let key = flow.outside(NODE.octets(), port.to_be_bytes());
            map.insert(key, RevValue { origin_port: port.to_be_bytes(), ..value }, 0).unwrap();
        }
        let flows = kernel.view.flows().unwrap();
        assert_eq!(flows.len(), 60_000);
        assert!(flows.iter().all(|flow| flow.origin.port() == flow.external.port()));
        let text = serde_json::to_string(&flows).unwrap();
        let back: Vec<cistern_core::masquerade::expire::FlowRecord> = serde_json::from_str(&text).unwrap();
        assert_eq!(back, flows);
    });
}
