//! The table of cases on the kernel programs, and details beyond the model.

use crate::frame::{self, assert_checksums, build, ends, udp_checksum, with_options};
use crate::isolated::{isolated, run};
use crate::kernel::{Kernel, POD};
use cistern_core::masquerade::cases::{self, CASES, Machine, NODE, POD_A, POD_B, WEB};
use cistern_core::masquerade::decide::{Content, Direction, Packet, TcpFlags, Verdict};
use cistern_core::masquerade::plan::ExcludedReason;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};

fn end(address: Ipv4Addr, port: u16) -> SocketAddrV4 {
    SocketAddrV4::new(address, port)
}

fn udp(from: SocketAddrV4, to: SocketAddrV4) -> Packet {
    Packet { content: Content::Udp, source: from, destination: to, device: cases::device(*from.ip()) }
}

#[test]
fn the_programs_agree_with_the_table_of_cases() {
    isolated(|bpffs| {
        let failures: Vec<String> = (0..)
            .zip(CASES)
            .filter_map(|(number, case)| {
                let mut kernel = Kernel::new(&bpffs.join(format!("case_{number}")));
                cases::run(case, &mut kernel).err()
            })
            .collect();
        assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), CASES.len(), failures.join("\n"));
    });
}

// case: masquerade CS3
#[test]
fn a_udp_checksum_of_zero_stays_and_a_computed_zero_is_sent_as_ones() {
    isolated(|bpffs| {
        let kernel = Kernel::new(&bpffs.join("cistern"));
        // Port kept, then changed.
        for port in [41_000, 900] {
            let mut none = build(&udp(end(POD_A, port), end(WEB, 53)), b"payload");
            udp_checksum(&mut none).fill(0);
            let (_, after) = kernel.pass(Direction::Egress, &none);
            assert_ne!(after, none);
            assert_eq!(udp_checksum(&mut after.clone()), [0, 0], "no checksum stays no checksum");

            // With a word of payload that equals the checksum of the translated packet without it, the checksum of the
            // translated packet is zero.
            let probe = build(&udp(end(POD_A, port), end(WEB, 53)), &[0, 0]);
            let (_, mut translated) = kernel.pass(Direction::Egress, &probe);
            let word: [u8; 2] = udp_checksum(&mut translated).try_into().unwrap();
            let packet = build(&udp(end(POD_A, port), end(WEB, 53)), &word);
            let (_, mut after) = kernel.pass(Direction::Egress, &packet);
            assert_checksums(&after);
            assert_eq!(udp_checksum(&mut after), [0xff, 0xff], "zero would say that there is none");

            // The same in the other direction.
            let (source, _) = ends(&after);
            let mut answer = build(&udp(end(WEB, 53), source), b"payload");
            udp_checksum(&mut answer).fill(0);
            let (_, mut after) = kernel.pass(Direction::Ingress, &answer);
            assert_eq!(ends(&after).1, end(POD_A, port));
            assert_eq!(udp_checksum(&mut after), [0, 0]);
        }
    });
}

// case: masquerade CS5
#[test]
fn checksums_are_right_whatever_the_packet_holds() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for round in 0..2_000 {
            let pod = Ipv4Addr::from((10 << 24 | 61 << 16 | 4 << 8) + (next() as u32 & 0xff));
            kernel.endpoints.insert(pod, POD).unwrap();
            let remote = end(Ipv4Addr::from(0x2d21_0800 + (next() as u32 & 0xff)), next() as u16);
            let source = end(pod, next() as u16);
            let content = match next() % 3 {
                0 => Content::Tcp(TcpFlags::SYN),
                1 => Content::Udp,
                _ => Content::EchoRequest,
            };
            let payload: Vec<u8> = (0..next() % 700).map(|_| next() as u8).collect();
            let packet = Packet { content, source, destination: remote, device: 0 };
            let frame = with_options(build(&packet, &payload), (next() % 11) as usize * 4);
            let (number, after) = kernel.pass(Direction::Egress, &frame);
            assert_eq!(number, -1, "round {round}");
            let Verdict::Source(external) = frame::verdict(&frame, &after) else { panic!("round {round}: {packet:?}") };
            assert_eq!(*external.ip(), NODE);

            let (content, from) = match content {
                Content::EchoRequest => (Content::EchoReply, end(*remote.ip(), 0)),
                content => (content, remote),
            };
            let answer = Packet { content, source: from, destination: external, device: 0 };
            let frame = with_options(build(&answer, &payload), (next() % 11) as usize * 4);
            let (_, after) = kernel.pass(Direction::Ingress, &frame);
            assert_eq!(frame::verdict(&frame, &after), Verdict::Destination(source), "round {round}");
        }
    });
}

// case: masquerade NM9
#[test]
fn reserved_ports_are_never_allocated() {
    isolated(|bpffs| {
        let capacities = cistern::datapath::Capacities { flows: 16_384, inbound: 64 };
        let mut kernel = Kernel::with(&bpffs.join("cistern"), capacities);
        let reserved = vec![(8_080, 8_080), (9_148, 9_150), (30_000, 32_767), (40_000, 59_999)];
        let mut settings = cases::settings();
        settings.ports_reserved = reserved.clone();
        kernel.configure(&settings);
        assert_eq!(kernel.settings.get().unwrap(), Some(settings));

        // Ten thousand flows from reserved ports and from ports below the range, all of which must be translated to
        // others.
        for flow in 0..10_000_u32 {
            let port = if flow % 2 == 0 { 30_000 + (flow % 2_768) as u16 } else { (flow % 1_024) as u16 };
            let remote = end(WEB, 1 + (flow / 1_000) as u16);
            let pod = if flow % 4 < 2 { POD_A } else { POD_B };
            let packet = udp(end(pod, port), remote);
            let (verdict, _) = kernel.send(Direction::Egress, &packet);
            assert!(matches!(verdict, Verdict::Source(_)), "{packet:?}: {verdict:?}");
        }
        let flows = kernel.view.flows().unwrap();
        assert!(flows.len() > 5_000, "{}", flows.len());
        for flow in flows {
            let port = flow.external.port();
            assert!(port >= cases::PORT_MIN, "{flow:?}");
            assert!(!reserved.iter().any(|(first, last)| (*first..=*last).contains(&port)), "{flow:?}");
        }
    });
}

#[test]
fn a_port_of_a_socket_of_the_host_is_not_allocated_to_a_pod() {
    isolated(|bpffs| {
        run(&format!("ip address add {NODE}/32 dev lo"));
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        let listener = TcpListener::bind((NODE, 41_000)).unwrap();
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 41_001)).unwrap();
        let tcp = |port| Packet {
            device: cases::device(POD_A),
            content: Content::Tcp(TcpFlags::SYN),
            source: end(POD_A, port),
            destination: end(WEB, 443),
        };
        let given = |kernel: &mut Kernel, packet: &Packet| match kernel.send(Direction::Egress, packet).0 {
            Verdict::Source(source) => source.port(),
            other => panic!("{other:?}"),
        };
        assert_ne!(given(&mut kernel, &tcp(41_000)), 41_000, "a listener has it");
        assert_ne!(given(&mut kernel, &udp(end(POD_A, 41_001), end(WEB, 53))), 41_001, "a UDP socket has it");
        assert_eq!(given(&mut kernel, &tcp(41_001)), 41_001, "of the other protocol");
        drop((listener, socket));
        assert_eq!(given(&mut kernel, &udp(end(POD_B, 41_001), end(WEB, 54))), 41_001, "it is free again");
    });
}

#[test]
fn frames_without_a_complete_ipv4_packet_pass_unchanged_and_are_counted() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        let whole = build(&udp(end(POD_A, 41_000), end(WEB, 53)), b"payload");
        let ipv6 = [&whole[..12], &[0x86, 0xdd, 0x60], &[0; 39][..]].concat();
        let arp = [&whole[..12], &[8, 6], &[0; 28][..]].concat();
        let mut version = whole.clone();
        version[14] = 0x65;
        let mut length = whole.clone();
        length[14] = 0x44;
        let cut = whole[..14 + 20 + 2].to_vec();
        let tagged = [&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat();
        for direction in [Direction::Egress, Direction::Ingress] {
            for (frame, counters) in [
                (&ipv6, vec!["ipv6"]),
                (&arp, vec![]),
                (&version, vec!["malformed"]),
                (&length, vec!["malformed"]),
                (&cut, vec!["malformed"]),
                (&tagged, vec![]),
            ] {
                let (number, after) = kernel.pass_by(direction, 0, frame);
                assert_eq!((number, &after), (-1, frame), "{frame:02x?}");
                assert_eq!(kernel.counted(), counters, "{frame:02x?}");
            }
        }
    });
}

// case: masquerade NM13
#[test]
fn a_full_map_refuses_new_flows_and_keeps_those_that_are_open() {
    isolated(|bpffs| {
        let capacities = cistern::datapath::Capacities { flows: 64, inbound: 64 };
        let mut kernel = Kernel::with(&bpffs.join("cistern"), capacities);
        let packet = |port| udp(end(POD_A, port), end(WEB, 53));
        let mut open = Vec::new();
        let refused = (2_000..3_000)
            .find(|port| match kernel.send(Direction::Egress, &packet(*port)) {
                (Verdict::Source(_), _) => {
                    open.push(*port);
                    false
                }
                (Verdict::Drop, counters) => {
                    assert_eq!(counters, ["map-full"]);
                    true
                }
                other => panic!("{other:?}"),
            })
            .expect("the map is full at some time");
        assert_eq!(kernel.flows(), open.len());
        kernel.lose_cache();
        for port in &open {
            assert_eq!(kernel.send(Direction::Egress, &packet(*port)).0, Verdict::Source(end(NODE, *port)));
        }
        assert_eq!(kernel.send(Direction::Egress, &packet(refused)).0, Verdict::Drop);
        // Other rules do not depend on the map.
        kernel.exclude("45.33.7.64/26".parse().unwrap(), ExcludedReason::IpMasqAgent);
        assert_eq!(kernel.send(Direction::Egress, &packet(refused)).0, Verdict::Pass);
    });
}
