//! Opening the datapath: what is rejected, reused and logged.

use crate::isolated::{isolated, run};
use crate::kernel::{CAPACITIES, Kernel, POD};
use cistern::datapath::{Capacities, Datapath, DatapathError, Pins, View};
use cistern::reconciler::BlockingOperations;
use cistern_core::masquerade::cases::{self, Machine, NODE, POD_A, POD_B, WEB};
use cistern_core::masquerade::decide::{Content, Direction, Packet, Verdict};
use cistern_core::masquerade::plan::{DeviceEntry, ExcludedReason};
use cistern_ebpf_common::counter::Counter;
use std::net::SocketAddrV4;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn udp(port: u16) -> Packet {
    Packet {
        content: Content::Udp,
        source: SocketAddrV4::new(POD_A, port),
        destination: SocketAddrV4::new(WEB, 53),
        device: cases::device(POD_A),
    }
}

#[test]
fn a_place_that_is_no_bpffs_is_refused_with_the_fix() {
    isolated(|_| {
        let error = Datapath::open("/run/cistern-pins", CAPACITIES).unwrap_err();
        assert!(matches!(&error, DatapathError::NotBpffs { path } if path.ends_with("run")), "{error}");
        assert!(error.to_string().contains("mount -t bpf bpf /sys/fs/bpf"), "{error}");
        assert!(!std::path::Path::new("/run/cistern-pins").exists(), "nothing was made");
    });
}

#[test]
fn a_map_of_flows_of_another_size_is_kept_and_any_other_difference_is_refused() {
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let mut kernel = Kernel::new(&root);
        kernel.send(Direction::Egress, &udp(41_000));
        drop(kernel);

        let larger = Capacities { flows: CAPACITIES.flows * 2, ..CAPACITIES };
        let (datapath, _) = Datapath::open(&root, larger).unwrap();
        let kept: Vec<String> = datapath.capacity_mismatches().iter().map(ToString::to_string).collect();
        let [fwd, rev] = &kept[..] else { panic!("{kept:?}") };
        assert!(rev.contains("cst_rev holds 4096 entries, and 8192 are configured"), "{rev}");
        assert!(fwd.contains("cst_fwd"), "{fwd}");

        let pins = Pins::new(&root);
        assert_eq!(View::open(&pins).unwrap().flows().unwrap().len(), 1, "the flow is still there");
        let path = pins.map("cst_devices");
        std::fs::remove_file(&path).unwrap();
        run(&format!("bpftool map create {} type array key 4 value 4 entries 1 name other", path.display()));
        let text = Datapath::open(&root, CAPACITIES).unwrap_err().to_string();
        assert!(text.contains("cst_devices") && text.contains("type Array") && text.contains("expects Hash"), "{text}");
    });
}

/// The counter map of a build with fewer or more counters.
#[test]
fn a_map_of_counters_of_any_capacity_is_used() {
    for entries in [3, 28, 512] {
        isolated(|bpffs| {
            let root = bpffs.join("cistern");
            drop(Datapath::open(&root, CAPACITIES).unwrap());
            let path = Pins::new(&root).map("cst_counters");
            std::fs::remove_file(&path).unwrap();
            let path = path.display();
            run(&format!(
                "bpftool map create {path} type percpu_array key 4 value 8 entries {entries} name cst_counters"
            ));
            let mut kernel = Kernel::new(&root);
            let (verdict, counters) = kernel.send(Direction::Egress, &udp(41_000));
            assert_eq!(verdict, Verdict::Source(SocketAddrV4::new(NODE, 41_000)), "{entries} entries");
            assert_eq!(counters.contains(&"translated".to_owned()), entries > Counter::Translated as u32);
            assert_eq!(kernel.view.counters().unwrap().len(), Counter::ALL.len(), "what has no slot reads 0");
        });
    }
}

#[test]
fn a_new_agent_takes_over_what_is_there() {
    isolated(|bpffs| {
        let root = bpffs.join("cistern");
        let mut first = Kernel::new(&root);
        first.send(Direction::Egress, &udp(900));
        let [flow] = first.view.flows().unwrap().try_into().unwrap();
        drop(first);

        let mut second = Kernel::new(&root);
        let [taken_over] = second.view.flows().unwrap().try_into().unwrap();
        assert_eq!((taken_over.origin, taken_over.external), (flow.origin, flow.external));
        second.lose_cache();
        let (verdict, _) = second.send(Direction::Egress, &udp(900));
        assert_eq!(verdict, Verdict::Source(flow.external), "the port walk has the key of before");
    });
}

#[test]
fn what_is_observed_is_what_was_written() {
    isolated(|bpffs| {
        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        assert_eq!(kernel.excluded.observe().unwrap(), cases::excluded());
        assert_eq!(kernel.endpoints.observe().unwrap(), cases::endpoints());
        let device = DeviceEntry { address: Some(NODE) };
        assert_eq!(kernel.devices.observe().unwrap(), [(1, device)].into());
        assert_eq!(kernel.settings.observe().unwrap(), [((), cases::settings())].into());

        // Updates are idempotent, and deleting an absent key succeeds.
        let prefix = "10.0.0.0/8".parse().unwrap();
        for reason in [ExcludedReason::IpMasqAgent, ExcludedReason::IpMasqAgent, ExcludedReason::NativeRouting] {
            kernel.excluded.update(&prefix, &reason).unwrap();
        }
        assert_eq!(kernel.excluded.observe().unwrap()[&prefix], ExcludedReason::NativeRouting);
        for _ in 0..2 {
            kernel.excluded.delete(&prefix).unwrap();
            kernel.endpoints.delete(&POD_B).unwrap();
            kernel.devices.delete(&1).unwrap();
        }
        assert!(!kernel.excluded.observe().unwrap().contains_key(&prefix));
        assert!(!kernel.endpoints.observe().unwrap().contains_key(&POD_B));
        assert!(kernel.devices.observe().unwrap().is_empty());
        kernel.settings.delete(&()).unwrap();
        assert!(!kernel.settings.observe().unwrap()[&()].masquerade);
    });
}

#[test]
fn a_flow_without_a_port_is_logged_once() {
    isolated(|bpffs| {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);

        let mut kernel = Kernel::new(&bpffs.join("cistern"));
        let events = kernel.events.take().unwrap();
        let mut settings = cases::settings();
        (settings.port_min, settings.port_max) = (2_000, 2_000);
        kernel.configure(&settings);
        kernel.endpoints.insert(POD_B, POD).unwrap();
        for port in [2_000, 2_001, 2_001, 2_001] {
            kernel.send(Direction::Egress, &udp(port));
        }
        kernel.readdress(None);
        kernel.send(Direction::Egress, &udp(2_003));

        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            // It reads until cancelled.
            assert!(tokio::time::timeout(Duration::from_secs(1), events.forward()).await.is_err());
        });
        let text = lines.text();
        assert!(text.contains("no free port: 10.61.4.11:2001 to 45.33.7.80:53 protocol 17 dropped"), "{text}");
        assert!(text.contains("no address on the egress device: 10.61.4.11:2003"), "{text}");
        // At most one line per second; the three packets took less than three seconds, but may have crossed a second's
        // boundary.
        assert!((1..=2).contains(&text.matches("no free port").count()), "{text}");
    });
}

/// Collects log output.
#[derive(Debug, Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
