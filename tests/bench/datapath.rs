//! Nanoseconds per packet in the kernel programs, and the time to load them.
//!
//! `BPF_PROG_TEST_RUN` runs a program on a packet and reports the duration. A translated packet cannot be run twice,
//! since it has changed, so each run is a separate call, and medians of many calls are compared. The base is a non-IP
//! frame, which the program passes at its first comparison, like an empty program: its duration is the overhead of the
//! measurement. Rounds are interleaved, so that other load affects all measurements.
#![expect(clippy::panic, clippy::indexing_slicing, reason = "a bench ends where it cannot measure")]

use aya::programs::{SchedClassifier, TestRun, TestRunOptions};
use cistern::datapath::{Capacities, Datapath};
use cistern_core::masquerade::cases::{self, NODE, POD_A, POD_REMOTE, WEB};
use cistern_core::masquerade::decide::{Content, Packet, TcpFlags};
use cistern_core::masquerade::plan::DeviceEntry;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::error::Error;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Instant;

#[path = "../ebpf/frame.rs"]
#[expect(dead_code, reason = "a bench builds frames; the tests judge them too")]
mod frame;

/// Rounds over all measurements.
const ROUNDS: usize = 15;
/// Calls in one round of one measurement.
const CALLS: u32 = 4_000;
/// Runs per call, if the packet does not change.
const REPEAT: u32 = 200_000;

fn main() -> Result<(), Box<dyn Error>> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let directory = tempfile::tempdir()?;
    mount(Some("bpf"), directory.path(), Some("bpf"), MsFlags::empty(), none)?;

    let start = Instant::now();
    let (datapath, events) = Datapath::open(directory.path().join("cistern"), Capacities::default())?;
    let first = start.elapsed();
    drop((datapath, events));
    let start = Instant::now();
    let (datapath, _events) = Datapath::open(directory.path().join("cistern"), Capacities::default())?;
    println!("load: {first:.1?} with new maps, {:.1?} over pinned ones", start.elapsed());

    let mut endpoints = datapath.endpoints()?;
    for (address, entry) in cases::endpoints() {
        endpoints.insert(address, entry)?;
    }
    let mut excluded = datapath.excluded()?;
    for (prefix, reason) in cases::excluded() {
        excluded.insert(prefix, reason)?;
    }
    datapath.settings([1, 2])?.set(&cases::settings())?;
    datapath.devices()?.insert(1, DeviceEntry { address: Some(NODE) })?;
    let program = |name| SchedClassifier::from_pin(datapath.pins().program(name));
    let (egress, ingress) = (program("cistern_egress")?, program("cistern_ingress")?);

    for (name, program) in [("egress", &egress), ("ingress", &ingress)] {
        let info = program.info()?;
        let looked_at =
            info.verified_instruction_count().map_or_else(|| "unknown".to_owned(), |count| count.to_string());
        println!(
            "{name}: {} bytes of machine code; the verifier looked at {looked_at} instructions",
            info.size_jitted()
        );
    }

    let (pod, low, web) = ((POD_A, 41_000), (POD_A, 900), (WEB, 443));
    run(&egress, &frame(TcpFlags::SYN, pod, web), 1)?;
    run(&egress, &frame(TcpFlags::SYN, low, web), 1)?;
    run(&ingress, &frame(TcpFlags::SYN_ACK, web, (NODE, 41_000)), 1)?;
    let none = [&[2; 12][..], &[8, 6], &[0; 98]].concat();
    let kept = frame(TcpFlags::ACK, pod, web);
    let moved = frame(TcpFlags::ACK, low, web);
    let answer = frame(TcpFlags::ACK, web, (NODE, 41_000));
    let unlisted = frame(TcpFlags::ACK, pod, (POD_REMOTE, 80));
    let host = frame(TcpFlags::ACK, web, (NODE, 22));

    let mut single: [(&str, Vec<u64>); 7] = [
        ("no IP (the measuring itself)", Vec::new()),
        ("egress: existing flow, port kept", Vec::new()),
        ("egress: existing flow, port moved", Vec::new()),
        ("egress: excluded destination", Vec::new()),
        ("egress: new flow", Vec::new()),
        ("ingress: answer to a flow", Vec::new()),
        ("ingress: packet for the host", Vec::new()),
    ];
    let mut repeated: [(&str, Vec<u64>); 3] = [
        ("no IP (the measuring itself)", Vec::new()),
        ("egress: excluded destination", Vec::new()),
        ("ingress: packet for the host", Vec::new()),
    ];
    let mut opened = 0_u16;
    for _ in 0..ROUNDS {
        let remote = (WEB, 1_000 + opened / 28_000);
        let new_flows = calls(|| {
            opened += 1;
            run(&egress, &frame(TcpFlags::SYN, (POD_A, 2_000 + opened % 28_000), remote), 1)
        })?;
        let values = [
            calls(|| run(&egress, &none, 1))?,
            calls(|| run(&egress, &kept, 1))?,
            calls(|| run(&egress, &moved, 1))?,
            calls(|| run(&egress, &unlisted, 1))?,
            new_flows,
            calls(|| run(&ingress, &answer, 1))?,
            calls(|| run(&ingress, &host, 1))?,
        ];
        for ((_, rounds), value) in single.iter_mut().zip(values) {
            rounds.push(value);
        }
        let values = [run(&egress, &none, REPEAT)?, run(&egress, &unlisted, REPEAT)?, run(&ingress, &host, REPEAT)?];
        for ((_, rounds), value) in repeated.iter_mut().zip(values) {
            rounds.push(value);
        }
    }
    println!("nanoseconds for a packet, a call each; median of {ROUNDS} rounds (least, most; above the first row)");
    print(&mut single);
    println!("nanoseconds for a packet, {REPEAT} runs in a call, where the packet stays as it is");
    print(&mut repeated);
    Ok(())
}

fn frame(flags: TcpFlags, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Vec<u8> {
    let (source, destination) = (SocketAddrV4::new(from.0, from.1), SocketAddrV4::new(to.0, to.1));
    frame::build(&Packet { content: Content::Tcp(flags), source, destination, device: 0 }, &[0; 64])
}

/// The duration of a call in nanoseconds per run.
fn run(program: &SchedClassifier, frame: &[u8], repeat: u32) -> Result<u64, Box<dyn Error>> {
    let context = frame::context(cases::device(POD_A));
    let options = TestRunOptions { data_in: Some(frame), ctx_in: Some(&context), repeat, ..TestRunOptions::new() };
    Ok(u64::try_from(program.test_run(options)?.duration.as_nanos())?)
}

/// The median of many calls.
fn calls(mut call: impl FnMut() -> Result<u64, Box<dyn Error>>) -> Result<u64, Box<dyn Error>> {
    let mut values = (0..CALLS).map(|_| call()).collect::<Result<Vec<_>, _>>()?;
    values.sort_unstable();
    Ok(values[values.len() / 2])
}

fn print(rows: &mut [(&str, Vec<u64>)]) {
    let mut base = None;
    for (name, values) in rows {
        values.sort_unstable();
        let middle = values[values.len() / 2];
        let above = middle.saturating_sub(*base.get_or_insert(middle));
        println!("  {name:36} {middle:6}  ({}, {}; +{above})", values[0], values[values.len() - 1]);
    }
}
