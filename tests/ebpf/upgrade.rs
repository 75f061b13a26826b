//! Takeovers between two builds: this one, and the variant of the programs with an additional counter, map and program,
//! and another order of fields in the rows of the reverse map.

use crate::isolated::{isolated, run};
use crate::kernel::Kernel;
use crate::live::{Site, connect_from, echo_server, uplink};
use cistern::datapath::{Build, Capacities, Datapath, Hook, PROGRAMS, Pins, Program, Step};
use cistern_core::masquerade::cases::{self, Machine as _, NODE, POD_A, WEB};
use cistern_core::masquerade::decide::{Content, Direction, Packet, TcpFlags, Verdict};
use cistern_core::masquerade::expire::FlowState;
use cistern_ebpf_common::counter::Counter;
use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddrV4, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Pause of a thread that sends, so that it leaves the processors to the takeover, which takes one for the verifier's work.
const BREATH: Duration = Duration::from_micros(200);

/// Enough for all flows of a test, so that nothing is evicted.
const CAPACITIES: Capacities = Capacities { flows: 32_768, inbound: 1_024 };

/// The additional program of the variant.
const VARIANT_PROGRAM: Program =
    Program { name: "cistern_variant", hook: Hook::Ingress, link: "variant", features: PROGRAMS[0].features };

const VARIANT_PROGRAMS: [Program; 3] = [PROGRAMS[0], PROGRAMS[1], VARIANT_PROGRAM];

fn this_build() -> Build<'static> {
    Build::embedded().unwrap()
}

fn variant(object: &[u8]) -> Build<'_> {
    Build { object, programs: &VARIANT_PROGRAMS }
}

/// The variant's object, which `cargo xtask build-ebpf` builds beside the embedded one.
fn variant_object() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/ebpf/cistern-test-variant.o");
    let object = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    // The loader requires the alignment of the ELF header.
    assert!(object.as_ptr().addr().is_multiple_of(8));
    object
}

/// A start of an agent with this build: opens the datapath, writes the rows of its tables, attaches.
fn start(root: &Path, build: &Build<'_>) -> Kernel {
    let mut kernel = Kernel::of(root, build, CAPACITIES);
    kernel.settings.set(&cases::settings()).unwrap();
    kernel.exclude_fixture();
    Site::configure(&mut kernel);
    kernel.datapath.attachments_of(build).unwrap().attach(uplink(), "eth0").unwrap();
    kernel
}

/// A start that stops after this step, as if it was killed.
fn killed(root: &Path, build: &Build<'_>, after: Step) {
    let mut reached = false;
    let result = Datapath::open_build(root, build, CAPACITIES, &mut |step| {
        reached |= step == after;
        if step == after { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    });
    assert!(result.is_err() && reached, "{after:?}");
}

/// Names of the programs on the uplink's two hooks.
fn attached(kernel: &Kernel) -> (Vec<String>, Vec<String>) {
    let chain = kernel.datapath.attachments().unwrap().chain(uplink()).unwrap();
    let names =
        |programs: &[cistern::datapath::ChainProgram]| programs.iter().map(|program| program.name.clone()).collect();
    (names(&chain.ingress), names(&chain.egress))
}

fn pinned(root: &Path, directory: &str) -> Vec<String> {
    let entries = std::fs::read_dir(root.join(directory)).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The state of the node must be that of one datapath, of either build.
#[track_caller]
fn assert_one_datapath(root: &Path, kernel: &Kernel, variant: bool) {
    assert_eq!(pinned(root, ""), ["links", "maps", "progs"]);
    let (ingress, egress) = attached(kernel);
    let expected = if variant { vec!["cistern_variant", "cistern_ingress"] } else { vec!["cistern_ingress"] };
    let mut sorted = ingress;
    sorted.sort();
    let mut expected_sorted = expected;
    expected_sorted.sort_unstable();
    assert_eq!(
        (sorted, egress),
        (expected_sorted.into_iter().map(str::to_owned).collect(), vec!["cistern_egress".to_owned()])
    );
    assert_eq!(pinned(root, "maps").contains(&"cst_variant".to_owned()), variant);
    assert_eq!(pinned(root, "progs").contains(&"cistern_variant".to_owned()), variant);
}

/// Endpoints of an open flow: its socket in the pod, and the translated source as seen by the mirror.
struct Open {
    socket: UdpSocket,
    external: String,
}

impl Open {
    fn new(site: &Site, port: u16) -> Self {
        let socket = site.pod.enter(|| UdpSocket::bind((POD_A, port)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let external = Self::seen(&socket).unwrap();
        assert!(external.starts_with(&format!("{NODE}:")), "{external}");
        Self { socket, external }
    }

    fn seen(socket: &UdpSocket) -> io::Result<String> {
        socket.send_to(b"?", (WEB, 53))?;
        let mut buffer = [0; 64];
        let (length, _) = socket.recv_from(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length]).split(' ').next().unwrap_or_default().to_owned())
    }

    /// The flow continues with the same translated source.
    #[track_caller]
    fn assert_open(&self, when: &str) {
        match Self::seen(&self.socket) {
            Ok(external) => assert_eq!(external, self.external, "{when}"),
            Err(error) => panic!("{when}: {error}"),
        }
    }
}

// case: masquerade AT2
#[test]
fn either_build_takes_over_from_the_other_under_traffic_and_no_packet_is_lost() {
    let object = variant_object();
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let site = Site::new();
        let _mirror = site.mirror();
        echo_server(&site, 443, |client| assert_eq!(client, IpAddr::from(NODE)));
        drop(start(&root, &this_build()));

        // Ports that are kept, and ports that are changed.
        let streams: Vec<TcpStream> = site.pod.enter(|| {
            let ports = (0..8).chain(0..8).zip([800, 42_000].into_iter().flat_map(|base| [base; 8]));
            ports.map(|(index, base)| connect_from(base + index, SocketAddrV4::new(WEB, 443))).collect()
        });
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let talker = scope.spawn(|| {
                let mut rounds = 0_u32;
                while !stop.load(Ordering::Relaxed) {
                    thread::sleep(BREATH);
                    rounds += 1;
                    for mut stream in &streams {
                        stream.write_all(&rounds.to_be_bytes()).unwrap();
                        let mut back = [0; 4];
                        stream.read_exact(&mut back).unwrap();
                        assert_eq!(back, rounds.to_be_bytes());
                    }
                }
                rounds
            });
            // Flows opened meanwhile, each with one request and one reply: a lost packet is a missing reply, and a
            // duplicate port is a reply to another flow.
            let opener = scope.spawn(|| {
                site.pod.enter(|| {
                    let mut asked = 0_u32;
                    let mut missing = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        thread::sleep(BREATH);
                        let port = 1_100 + (asked % 20_000) as u16;
                        let source = if asked.is_multiple_of(2) { 100 + port % 600 } else { port };
                        asked += 1;
                        let Ok(socket) = UdpSocket::bind((POD_A, source)) else { continue };
                        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                        let text = format!("{asked}");
                        socket.send_to(text.as_bytes(), (WEB, 53)).unwrap();
                        let mut buffer = [0; 64];
                        match socket.recv_from(&mut buffer) {
                            Ok((length, _)) => {
                                let answer = String::from_utf8_lossy(&buffer[..length]).into_owned();
                                assert!(
                                    answer.starts_with(&format!("{NODE}:")) && answer.ends_with(&format!(" {text}")),
                                    "{answer}"
                                );
                            }
                            Err(error) => missing.push(format!("{source}: {error}")),
                        }
                    }
                    (asked, missing)
                })
            });
            for round in 0..6 {
                thread::sleep(Duration::from_millis(200));
                let new = round % 2 == 0;
                let kernel = if new { start(&root, &variant(&object)) } else { start(&root, &this_build()) };
                assert_one_datapath(&root, &kernel, new);
            }
            thread::sleep(Duration::from_millis(200));
            stop.store(true, Ordering::Relaxed);
            let (asked, missing) = opener.join().unwrap();
            let rounds = talker.join().unwrap();
            assert!(asked > 1_000 && rounds > 100, "{asked} flows, {rounds} rounds");
            assert!(missing.is_empty(), "{} of {asked} answers are missing: {missing:?}", missing.len());
        });
        let kernel = start(&root, &this_build());
        let mut ends: BTreeMap<_, u32> = BTreeMap::new();
        for flow in kernel.view.flows().unwrap() {
            *ends.entry((flow.protocol, flow.external, flow.remote)).or_default() += 1;
        }
        assert!(ends.len() > 100 && ends.values().all(|flows| *flows == 1));
    });
}

// case: masquerade AT2
#[test]
fn a_kill_at_any_step_heals_at_the_next_start_of_either_build() {
    let object = variant_object();
    let committed = Step::ALL.iter().position(|step| *step == Step::Committed).unwrap();
    for (number, after) in Step::ALL.into_iter().enumerate() {
        // Before that step both builds find only the predecessor.
        for back in [false, true].into_iter().filter(|back| !back || number >= committed) {
            isolated(|bpffs| {
                let root = bpffs.join("cistern");
                let site = Site::new();
                let _mirror = site.mirror();
                drop(start(&root, &this_build()));
                // One whose port is changed, one whose port is kept.
                let mut flows = vec![Open::new(&site, 900), Open::new(&site, 41_000)];
                killed(&root, &variant(&object), after);
                for (port, when) in [(901, "moved"), (41_001, "kept"), (41_002, "kept")] {
                    for flow in &flows {
                        flow.assert_open(&format!("killed after {after:?}"));
                    }
                    assert!(site.ask(port + 10, "there").is_ok(), "killed after {after:?}, {when}");
                    flows.push(Open::new(&site, port));
                }
                let healed = if back { start(&root, &this_build()) } else { start(&root, &variant(&object)) };
                assert_one_datapath(&root, &healed, !back);
                for flow in &flows {
                    flow.assert_open(&format!("healed after {after:?}, back: {back}"));
                }
                let created =
                    healed.view.counters().unwrap().into_iter().find(|(kind, _)| *kind == Counter::FlowCreated);
                assert!(created.unwrap().1 <= flows.len() as u64 + 3, "counted twice after {after:?}: {created:?}");
                // The roles have ended: even and odd ports are allocated again.
                for port in [41_050, 41_051] {
                    assert_eq!(Open::new(&site, port).external, format!("{NODE}:{port}"), "{after:?}, back: {back}");
                }
                if !back {
                    drop(healed);
                    assert_one_datapath(&root, &start(&root, &this_build()), false);
                    for flow in &flows {
                        flow.assert_open(&format!("went back after {after:?}"));
                    }
                }
            });
        }
    }
}

#[test]
fn programs_that_this_build_does_not_know_are_taken_off_a_device_after_its_own_run() {
    isolated(|bpffs| {
        // The kernel does not attach a program twice to a hook.
        const UNKNOWN: &[Program] =
            &[Program { name: "cistern_egress", hook: Hook::Ingress, link: "unknown", features: &[] }];
        let root = bpffs.join("cistern");
        let _site = Site::new();
        let kernel = start(&root, &this_build());
        let other = Build { object: this_build().object, programs: UNKNOWN };
        kernel.datapath.attachments_of(&other).unwrap().attach(uplink(), "eth0").unwrap();
        assert_eq!(pinned(&root, "links"), [format!("unknown_{}", uplink())], "the other build knows its own alone");
        run(&format!(
            "bpftool map create {}/maps/cst_other type array key 4 value 4 entries 1 name cst_other",
            root.display()
        ));

        let mut attachments = kernel.datapath.attachments().unwrap();
        assert!(
            !attachments.attached().unwrap()[&uplink()].complete,
            "a program is on the device that is none of this build"
        );
        attachments.attach(uplink(), "eth0").unwrap();
        assert!(attachments.attached().unwrap()[&uplink()].complete);
        assert_eq!(attached(&kernel), (vec!["cistern_ingress".to_owned()], vec!["cistern_egress".to_owned()]));
        assert_eq!(pinned(&root, "links"), ["egress", "ingress"].map(|link| format!("{link}_{}", uplink())));
        assert!(!Pins::new(&root).map("cst_other").exists(), "nothing uses it");
    });
}

#[test]
fn counters_and_listings_go_on_over_a_takeover() {
    let object = variant_object();
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let site = Site::new();
        let _mirror = site.mirror();
        let before = start(&root, &this_build());
        let flow = Open::new(&site, 900);
        let [listed] = before.view.flows().unwrap().try_into().unwrap();
        let counted: BTreeMap<_, _> = before.view.counters().unwrap().into_iter().collect();
        drop(before);
        drop(start(&root, &variant(&object)));
        let after = start(&root, &this_build());
        let [same] = after.view.flows().unwrap().try_into().unwrap();
        assert_eq!(
            (same.origin, same.external, same.remote, same.state),
            (listed.origin, listed.external, listed.remote, listed.state)
        );
        for (kind, packets) in after.view.counters().unwrap() {
            assert!(packets >= counted[&kind], "{}: {packets} after {}", kind.name(), counted[&kind]);
        }
        flow.assert_open("after there and back");
    });
}

/// The maps of the first release had no description, and smaller rows.
#[test]
fn the_rows_of_the_first_release_are_carried_over() {
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        std::fs::create_dir_all(root.join("maps")).unwrap();
        for (name, shape) in [
            ("cst_rev", "hash key 16 value 24 entries 4096"),
            ("cst_fwd", "lru_hash key 16 value 16 entries 4096"),
            ("cst_inbound", "lru_hash key 16 value 16 entries 1024"),
            ("cst_endpoints", "hash key 4 value 8 entries 4096"),
            ("cst_devices", "hash key 4 value 4 entries 256"),
            ("cst_excluded", "lpm_trie key 8 value 8 entries 65536 flags 1"),
            ("cst_settings", "array key 4 value 40 entries 1"),
            ("cst_ports", "array key 4 value 8 entries 1024"),
            ("cst_tries", "array key 4 value 24 entries 1"),
            ("cst_events", "array key 4 value 12 entries 1"),
            ("cst_counters", "percpu_array key 4 value 8 entries 28"),
        ] {
            run(&format!("bpftool map create {}/maps/{name} type {shape} name {name}", root.display()));
        }
        let write = |name: &str, key: &str, value: &str| {
            run(&format!("bpftool map update pinned {}/maps/{name} key hex {key} value hex {value}", root.display()));
        };
        let (web, node, pod) = ("2d 21 07 50", "ac 1d 08 14", "0a 3d 04 0b");
        write(
            "cst_rev",
            &format!("{web} {node} 01 bb a0 28 06 00 00 00"),
            &format!("{pod} a0 28 01 01 10 00 00 00 08 00 00 00 02 00 00 00 00 00 00 00"),
        );
        write("cst_endpoints", pod, "07 00 00 00 00 00 00 00");
        write("cst_devices", "01 00 00 00", node);
        write("cst_excluded", "08 00 00 00 0a 00 00 00", "00 00 00 00 05 00 00 00");
        write(
            "cst_settings",
            "00 00 00 00",
            &format!("{} 01 00 00 00 60 54 00 00 00 00 00 00 07 00 00 00 00 04 ff ff 00 00 00 00", "5a ".repeat(16)),
        );

        let mut kernel = Kernel::of(&root, &this_build(), CAPACITIES);
        let settings = kernel.settings.get().unwrap().unwrap();
        assert_eq!((settings.masquerade, settings.port_min, settings.tcp_idle_seconds), (true, 1_024, 21_600));
        let [flow] = kernel.view.flows().unwrap().try_into().unwrap();
        let (origin, external) = (SocketAddrV4::new(POD_A, 41_000), SocketAddrV4::new(NODE, 41_000));
        assert_eq!((flow.origin, flow.external, flow.state), (origin, external, FlowState::Established));
        assert_eq!(kernel.view.excluded().unwrap().len(), 1);
        let ack = Content::Tcp(TcpFlags::ACK);
        let web = SocketAddrV4::new(WEB, 443);
        let answer = Packet { content: ack, source: web, destination: external, device: 0 };
        assert_eq!(kernel.send(Direction::Ingress, &answer).0, Verdict::Destination(origin));
        let device = cases::device(POD_A);
        let sent = Packet { content: ack, source: origin, destination: web, device };
        assert_eq!(kernel.send(Direction::Egress, &sent).0, Verdict::Source(external));
    });
}
