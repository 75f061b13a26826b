//! Real packets: a pod, a node and an external host, each a network namespace, connected by veth pairs.

use crate::isolated::{Netns, isolated, run};
use crate::kernel::{CAPACITIES, Kernel};
use cistern::datapath::{Attachments, ChainProgram, Datapath, DatapathError, Pins};
use cistern::reconciler::BlockingOperations;
use cistern_core::masquerade::cases::{NODE, POD_A, WEB};
use cistern_core::masquerade::plan::{AttachmentEntry, DeviceEntry, EndpointEntry};
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket, sockopt::RcvBufForce,
    sockopt::ReuseAddr,
};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The topology. This thread is in the node's namespace. The external host has no route to pods, so it can only answer
/// to the node.
pub(crate) struct Site {
    pub(crate) pod: Netns,
    pub(crate) outside: Netns,
}

impl Site {
    pub(crate) fn new() -> Self {
        let (pod, outside) = (Netns::new("pod"), Netns::new("outside"));
        run(&format!(
            "ip link add cstpod type veth peer name eth0 netns pod
             ip link add eth0 type veth peer name eth0 netns outside
             echo 1 >/proc/sys/net/ipv4/ip_forward
             ip address add {NODE}/24 dev eth0
             ip link set cstpod up; ip link set eth0 up
             ip route add default via 172.29.8.1
             ip route add {POD_A}/32 dev cstpod
             ip -n pod address add {POD_A}/32 dev eth0
             ip -n pod link set eth0 up
             ip -n pod route add {NODE} dev eth0
             ip -n pod route add default via {NODE}
             ip -n outside address add 172.29.8.1/24 dev eth0
             ip -n outside address add {WEB}/32 dev lo
             ip -n outside link set eth0 up"
        ));
        Self { pod, outside }
    }

    /// Programs and maps under `root`, attached to the uplink.
    pub(crate) fn serve(root: &Path) -> (Kernel, Attachments) {
        let mut kernel = Kernel::new(root);
        Self::configure(&mut kernel);
        let mut attachments = kernel.datapath.attachments().unwrap();
        attachments.attach(uplink(), "eth0").unwrap();
        (kernel, attachments)
    }

    /// The uplink and the pod, as configured in the datapath.
    pub(crate) fn configure(kernel: &mut Kernel) {
        kernel.devices.insert(uplink(), DeviceEntry { address: Some(NODE) }).unwrap();
        let pod = EndpointEntry { ifindex: if_nametoindex("cstpod").unwrap(), no_masquerade: false, generation: 1 };
        kernel.endpoints.insert(POD_A, pod).unwrap();
    }

    /// An external UDP server that sends each client its address.
    pub(crate) fn mirror(&self) -> UdpSocket {
        let server = self.outside.enter(|| UdpSocket::bind((WEB, 53)).unwrap());
        let answering = server.try_clone().unwrap();
        thread::spawn(move || {
            let mut buffer = [0; 2_048];
            while let Ok((length, client)) = answering.recv_from(&mut buffer) {
                if length == 0 {
                    return;
                }
                let text = format!("{client} {}", String::from_utf8_lossy(&buffer[..length]));
                let _ = answering.send_to(text.as_bytes(), client);
            }
        });
        server
    }

    /// The server's answer to a pod with this source port.
    pub(crate) fn ask(&self, port: u16, text: &str) -> std::io::Result<String> {
        let socket = self.pod.enter(|| UdpSocket::bind((POD_A, port)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(5)))?;
        socket.send_to(text.as_bytes(), (WEB, 53))?;
        let mut buffer = [0; 2_048];
        let (length, _) = socket.recv_from(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).into_owned())
    }

    /// Packets rejected because of their checksum anywhere.
    fn checksum_errors(&self) -> u64 {
        [&self.pod, &self.outside]
            .iter()
            .map(|namespace| {
                let text = namespace.run("cat /proc/net/snmp");
                let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
                lines
                    .chunks(2)
                    .filter(|pair| pair[0][0] == "Tcp:" || pair[0][0] == "Udp:")
                    .map(|pair| {
                        let at = pair[0].iter().position(|name| *name == "InCsumErrors").unwrap();
                        pair[1][at].parse::<u64>().unwrap()
                    })
                    .sum::<u64>()
            })
            .sum()
    }
}

pub(crate) fn uplink() -> u32 {
    if_nametoindex("eth0").unwrap()
}

/// A TCP connection from this port, from this thread's namespace.
pub(crate) fn connect_from(port: u16, to: SocketAddrV4) -> TcpStream {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    setsockopt(&fd, ReuseAddr, &true).unwrap();
    bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(POD_A, port))).unwrap();
    connect(fd.as_raw_fd(), &SockaddrIn::from(to)).unwrap();
    TcpStream::from(fd)
}

/// An external TCP echo server.
pub(crate) fn echo_server(site: &Site, port: u16, seen: impl Fn(IpAddr) + Send + Sync + 'static) {
    let listener = site.outside.enter(|| TcpListener::bind((WEB, port)).unwrap());
    let seen = std::sync::Arc::new(seen);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            seen(stream.peer_addr().unwrap().ip());
            thread::spawn(move || {
                let mut buffer = vec![0; 65_536];
                while let Ok(length) = stream.read(&mut buffer) {
                    if length == 0 || stream.write_all(&buffer[..length]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

// case: masquerade CS1
#[test]
fn checksums_are_right_with_transmit_offload_on_and_off() {
    isolated(|bpffs| {
        let site = Site::new();
        let (_kernel, _attachments) = Site::serve(&bpffs.join("cistern"));
        let _mirror = site.mirror();
        echo_server(&site, 443, |client| assert_eq!(client, NODE));

        // With offload enabled at the sender, packets reach the programs with a partial checksum of the pseudo-header.
        // With offload disabled after the programs, the kernel completes it there, and the receiver verifies it.
        for (round, (sender, behind)) in (0..).zip([("on", "on"), ("on", "off"), ("off", "off")]) {
            run(&format!(
                "ethtool -K eth0 tx {behind} >/dev/null; ethtool -K cstpod tx {behind} >/dev/null
                 ip netns exec pod ethtool -K eth0 tx {sender} >/dev/null
                 ip netns exec outside ethtool -K eth0 tx {sender} >/dev/null"
            ));
            // Ports that are kept, and ports that must be changed.
            for port in [42_000 + round, 800 + round] {
                for length in [1, 2, 1_001] {
                    let text = "x".repeat(length);
                    let answer =
                        site.ask(port, &text).unwrap_or_else(|error| panic!("{sender} {behind} {port}: {error}"));
                    assert!(answer.starts_with(&format!("{NODE}:")) && answer.ends_with(&text), "{answer}");
                }
                let bytes: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
                let stream = site.pod.enter(|| connect_from(port, SocketAddrV4::new(WEB, 443)));
                let mut writer = stream.try_clone().unwrap();
                let mut back = vec![0; bytes.len()];
                thread::scope(|scope| {
                    scope.spawn(|| writer.write_all(&bytes).unwrap());
                    (&stream).read_exact(&mut back).unwrap();
                });
                assert_eq!(back, bytes);
            }
        }
        assert_eq!(site.checksum_errors(), 0);
    });
}

// case: masquerade AT1
#[test]
fn traffic_continues_without_an_agent() {
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let site = Site::new();
        let _mirror = site.mirror();
        let (kernel, attachments) = Site::serve(&root);
        assert!(site.ask(41_000, "there").unwrap().starts_with("172.29.8.20:41000 "));
        for link in ["ingress", "egress"] {
            assert!(root.join(format!("links/{link}_{}", uplink())).exists(), "{link}");
        }
        drop((kernel, attachments));
        assert!(site.ask(41_000, "an open flow").unwrap().starts_with("172.29.8.20:41000 "));
        assert!(site.ask(41_001, "a new flow").unwrap().starts_with("172.29.8.20:41001 "));
    });
}

// case: masquerade AT2
#[test]
fn a_restart_under_traffic_loses_nothing() {
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let site = Site::new();
        let served = Site::serve(&root);
        let first_chain = served.1.chain(uplink()).unwrap();
        echo_server(&site, 443, |client| assert_eq!(client, NODE));
        let sink = site.outside.enter(|| UdpSocket::bind((WEB, 9)).unwrap());
        setsockopt(&sink, RcvBufForce, &(256 << 20)).unwrap();
        sink.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let source = site.pod.enter(|| UdpSocket::bind((POD_A, 43_000)).unwrap());
        source.connect((WEB, 9)).unwrap();
        let mut streams: Vec<TcpStream> =
            (0..200).map(|n| site.pod.enter(|| connect_from(44_000 + n, SocketAddrV4::new(WEB, 443)))).collect();

        let stop = AtomicBool::new(false);
        let (sent, received, rounds) = thread::scope(|scope| {
            // 10,000 packets per second, ten each millisecond.
            let sender = scope.spawn(|| {
                let (start, mut sent) = (Instant::now(), 0_u64);
                while !stop.load(Ordering::Relaxed) {
                    while u128::from(sent) < start.elapsed().as_millis() * 10 {
                        source.send(&sent.to_be_bytes()).unwrap();
                        sent += 1;
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                sent
            });
            let receiver = scope.spawn(|| {
                let (mut received, mut buffer) = (0_u64, [0; 64]);
                while let Ok((_, from)) = sink.recv_from(&mut buffer) {
                    assert_eq!(from.ip(), NODE);
                    received += 1;
                }
                received
            });
            let talker = scope.spawn(|| {
                let mut rounds = 0_u32;
                while !stop.load(Ordering::Relaxed) {
                    rounds += 1;
                    let word = rounds.to_be_bytes();
                    for stream in &mut streams {
                        stream.write_all(&word).unwrap();
                    }
                    for stream in &mut streams {
                        let mut back = [0; 4];
                        stream.read_exact(&mut back).unwrap();
                        assert_eq!(back, word);
                    }
                }
                rounds
            });

            drop(served);
            for _ in 0..3 {
                thread::sleep(Duration::from_millis(300));
                // A new agent: loads, finds that the links are not its own, replaces their programs, and terminates,
                // too.
                let (datapath, _events) = Datapath::open(&root, CAPACITIES).unwrap();
                let mut attachments = datapath.attachments().unwrap();
                assert!(!attachments.attached().unwrap()[&uplink()].complete);
                attachments.attach(uplink(), "eth0").unwrap();
                assert!(attachments.attached().unwrap()[&uplink()].complete);
                let chain = attachments.chain(uplink()).unwrap();
                assert_eq!((chain.ingress.len(), chain.egress.len()), (1, 1), "{chain:?}");
                assert_ne!(chain.egress[0].id, first_chain.egress[0].id);
            }
            thread::sleep(Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
            (sender.join().unwrap(), receiver.join().unwrap(), talker.join().unwrap())
        });
        assert!(sent > 5_000 && rounds > 10, "{sent} packets, {rounds} rounds");
        assert_eq!(received, sent);
    });
}

// case: masquerade AT9
#[test]
fn removal_deletes_our_objects_only() {
    isolated(|bpffs| {
        let (root, foreign_root) = (bpffs.join("cistern"), bpffs.join("foreign"));
        let _site = Site::new();
        // Foreign objects on the same device: tcx programs, and a clsact qdisc.
        let (_foreign, foreign) = Site::serve(&foreign_root);
        run("tc qdisc add dev eth0 clsact");
        let (kernel, attachments) = Site::serve(&root);

        let chain = attachments.chain(uplink()).unwrap();
        let ours = |programs: &[ChainProgram]| programs.iter().map(|program| program.ours).collect::<Vec<_>>();
        assert_eq!(ours(&chain.ingress), [true, false], "reverse translation comes first");
        assert_eq!(ours(&chain.egress), [false, true], "translation comes last");
        assert_eq!(chain.egress[1].name, "cistern_egress");

        let pins = Pins::new(&root);
        drop((kernel, attachments));
        pins.remove_all().unwrap();
        pins.remove_all().unwrap();
        assert!(!root.exists());
        // Immediately: otherwise the kernel detaches a link some time after its last reference was dropped
        // (`bpf_link_put` defers it).
        let chain = foreign.chain(uplink()).unwrap();
        assert_eq!((ours(&chain.ingress), ours(&chain.egress)), (vec![true], vec![true]), "{chain:?}");
        assert!(foreign_root.join(format!("links/egress_{}", uplink())).exists());
        assert!(run("tc qdisc show dev eth0").contains("clsact"));
    });
}

#[test]
fn a_recreated_device_is_attached_again() {
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let site = Site::new();
        let (mut kernel, mut attachments) = Site::serve(&root);
        let old = uplink();
        run(&format!(
            "ip link delete eth0
             ip link add eth0 type veth peer name eth0 netns outside
             ip address add {NODE}/24 dev eth0; ip link set eth0 up
             ip route add default via 172.29.8.1
             ip -n outside address add 172.29.8.1/24 dev eth0; ip -n outside link set eth0 up"
        ));
        let new = uplink();
        assert_ne!(old, new);
        let _mirror = site.mirror();
        let gone = AttachmentEntry { name: String::new(), complete: false };
        assert_eq!(attachments.attached().unwrap(), [(old, gone)].into());

        let entry = AttachmentEntry { name: "eth0".to_owned(), complete: true };
        assert!(attachments.update(&old, &entry).is_err(), "there is no such device");
        attachments.update(&new, &entry).unwrap();
        attachments.delete(&old).unwrap();
        attachments.delete(&old).unwrap();
        assert_eq!(attachments.observe().unwrap(), [(new, entry)].into());
        kernel.devices.insert(new, DeviceEntry { address: Some(NODE) }).unwrap();
        assert!(site.ask(41_000, "there").unwrap().starts_with("172.29.8.20:41000 "));
    });
}

#[test]
fn a_device_that_left_the_namespace_is_no_attachment_any_more() {
    isolated(|bpffs| {
        let site = Site::new();
        let (_kernel, mut attachments) = Site::serve(&bpffs.join("cistern"));
        let index = uplink();
        run("ip link set eth0 name moved && ip link set moved netns pod");
        let gone = AttachmentEntry { name: String::new(), complete: false };
        assert_eq!(attachments.attached().unwrap(), [(index, gone)].into());
        let error = attachments.attach(index, "eth0").unwrap_err();
        assert!(matches!(error, DatapathError::NoDevice { .. }), "{error}");
        attachments.detach(index).unwrap();
        assert!(attachments.attached().unwrap().is_empty());
        site.pod.run("ip link show moved");
    });
}

/// A remote end on its way to a pod: the pod answers with its own address.
#[test]
fn a_client_outside_reaches_a_pod_and_is_answered_by_the_pod() {
    isolated(|bpffs| {
        let site = Site::new();
        let (kernel, _attachments) = Site::serve(&bpffs.join("cistern"));
        run(&format!("ip -n outside route add {POD_A}/32 via {NODE}"));
        let server = site.pod.enter(|| TcpListener::bind((POD_A, 8_080)).unwrap());
        let (client, accepted) = thread::scope(|scope| {
            let accept = scope.spawn(|| server.accept().unwrap());
            let client = site.outside.enter(|| {
                TcpStream::connect_timeout(&SocketAddrV4::new(POD_A, 8_080).into(), Duration::from_secs(5)).unwrap()
            });
            (client, accept.join().unwrap())
        });
        let (mut stream, peer) = accepted;
        assert_eq!(peer.ip(), IpAddr::from(Ipv4Addr::new(172, 29, 8, 1)));
        stream.write_all(b"hello").unwrap();
        let mut back = [0; 5];
        (&client).read_exact(&mut back).unwrap();
        assert_eq!(&back, b"hello");
        assert!(kernel.view.flows().unwrap().is_empty());
        assert_eq!(kernel.view.inbound().unwrap().len(), 1);
    });
}
