//! The real `cistern agent` with a state directory that is damaged, full, read-only, absent, or used by another agent.

use crate::process::{Rig, program, until};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Stdio;

const STATE: &str = "/var/lib/cistern";

fn address(result: &Value) -> String {
    result["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32").to_owned()
}

fn endpoints(rig: &Rig) -> Vec<String> {
    rig.rows(&["bpf", "endpoint", "list"]).iter().map(|row| row["address"].as_str().unwrap().to_owned()).collect()
}

/// The record of a container's lease.
fn record(leases: &Path, container: &str) -> std::path::PathBuf {
    let names = std::fs::read_dir(leases).unwrap().map(|entry| entry.unwrap().path());
    let is_its = |path: &std::path::PathBuf| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.contains("\"kind\":\"pod\"") && text.contains(&format!("\"container_id\":\"{container}\""))
    };
    names.into_iter().find(is_its).unwrap()
}

/// A separate tmpfs as state directory.
fn small_disk(rig: &Rig) {
    rig.node.run("mkdir", &["-p", STATE]).unwrap();
    rig.node.run("mount", &["-t", "tmpfs", "-o", "size=128k", "small", STATE]).unwrap();
}

fn message(error: &Value) -> &str {
    error["msg"].as_str().unwrap()
}

#[test]
fn a_damaged_record_is_set_aside_and_its_pod_keeps_its_address() {
    let mut rig = Rig::new("s-damaged");
    rig.start_api();
    rig.start_agent(&["--cluster-pool-ipv4-mask-size", "29"]);
    until("readiness", || rig.is_ready());
    let held: Vec<String> = ["cut", "newer", "dir", "good"].map(|name| address(&rig.add(name).unwrap())).to_vec();
    let node_json = rig.node.file("/var/lib/cistern/node.json");
    until("the pool on disk", || node_json.exists());
    rig.kill_agent();

    let leases = rig.node.file("/var/lib/cistern/leases");
    let (cut, newer, dir) = (record(&leases, "cut"), record(&leases, "newer"), record(&leases, "dir"));
    let text = std::fs::read_to_string(&cut).unwrap();
    std::fs::write(&cut, &text[..text.len() / 2]).unwrap();
    let text = std::fs::read_to_string(&newer).unwrap();
    let of_newer = text.replacen("\"format\":2,\"oldest_reader\":2", "\"format\":7,\"oldest_reader\":7", 1);
    std::fs::write(&newer, &of_newer).unwrap();
    std::fs::remove_file(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(&node_json, "{\"format\":7,\"pools\":[]}").unwrap();
    std::fs::write(rig.node.file("/var/lib/cistern/ip-masq.json"), [0xff, 0xfe, 0]).unwrap();

    rig.start_agent(&["--cluster-pool-ipv4-mask-size", "29"]);
    until("readiness", || rig.is_ready());
    for path in [&cut, &newer, &dir, &node_json, &rig.node.file("/var/lib/cistern/ip-masq.json")] {
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(path.with_file_name(format!("{name}.unreadable-1")).exists(), "{name}");
        assert!(rig.finds("state-file-unreadable", name), "{name}: {}", rig.status().unwrap()["findings"]);
    }
    let kept = newer.with_file_name(format!("{}.unreadable-1", newer.file_name().unwrap().to_str().unwrap()));
    assert_eq!(std::fs::read_to_string(kept).unwrap(), of_newer, "nothing of it was changed");
    assert!(rig.log().contains("reads format 2"), "{}", rig.log());
    // Every pod is in the kernel programs' map, and its address is not reallocated: of five, one is left.
    until("every pod in the datapath", || held.iter().all(|address| endpoints(&rig).contains(address)));
    let fresh = address(&rig.add("fresh").unwrap());
    assert!(!held.contains(&fresh), "{fresh} in {held:?}");
    let error = rig.add("one-too-many").unwrap_err();
    assert!(message(&error).contains("2 in use"), "{error}");
    // Its DEL releases the lease, and then its address is free.
    rig.cni("DEL", "cut").unwrap();
    until("the address of the pod that ended", || {
        rig.cni("ADD", "one-too-many").is_ok_and(|result| address(&result) == held[0])
    });
}

#[test]
fn on_a_full_disk_nothing_is_allocated_dels_work_and_the_agent_recovers() {
    let mut rig = Rig::new("s-full");
    small_disk(&rig);
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    for name in ["a", "b", "c"] {
        rig.add(name).unwrap();
    }
    until("the pool on disk", || rig.node.file("/var/lib/cistern/node.json").exists());
    let fill = rig.node.file("/var/lib/cistern/fill");
    let full = || {
        // Ends with an error when the disk is full.
        let _ = rig.node.run("dd", &["if=/dev/zero", "of=/var/lib/cistern/fill", "bs=4k"]);
    };
    full();
    let error = rig.add("d").unwrap_err();
    assert_eq!(error["code"], 11, "{error}");
    for words in ["No space left", STATE, "running pods are not affected"] {
        assert!(message(&error).contains(words), "{error} lacks {words}");
    }
    assert!(rig.wait("lease records").is_some(), "{:?}", rig.status());
    rig.cni("DEL", "a").unwrap();
    rig.cni("DEL", "d").unwrap();
    rig.cni("DEL", "never-there").unwrap();
    full();
    // An agent that starts on a full disk serves what needs no space.
    rig.kill_agent();
    rig.start_agent(&[]);
    until("readiness on a full disk", || rig.is_ready());
    assert!(!rig.holds("a") && rig.holds("b") && rig.holds("c"));
    rig.cni("DEL", "b").unwrap();
    assert!(rig.cni("ADD", "d").is_err());
    std::fs::remove_file(&fill).unwrap();
    until("an address with space", || rig.cni("ADD", "d").is_ok());
    until("the end of the wait", || rig.wait("lease records").is_none());
    rig.kill_agent();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    assert!(!rig.holds("a") && !rig.holds("b") && rig.holds("c") && rig.holds("d"));
}

#[test]
fn on_a_read_only_disk_pods_continue_and_the_agent_recovers_when_it_is_writable() {
    let mut rig = Rig::new("s-ro");
    small_disk(&rig);
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    let before = rig.add("a").unwrap();
    until("the pool on disk", || rig.node.file("/var/lib/cistern/node.json").exists());
    rig.node.run("mount", &["-o", "remount,ro", STATE]).unwrap();
    for verb in ["ADD", "DEL"] {
        // A DEL that a restart would undo must not succeed: the runtime must retry.
        if verb == "ADD" {
            rig.node.pod("b").unwrap();
        }
        let error = rig.cni(verb, if verb == "ADD" { "b" } else { "a" }).unwrap_err();
        assert_eq!(error["code"], 11, "{error}");
        assert!(message(&error).contains("Read-only file system"), "{error}");
    }
    rig.node.run("mount", &["-o", "remount,rw", STATE]).unwrap();
    until("the end of the wait", || rig.wait("lease records").is_none());
    rig.cni("DEL", "a").unwrap();
    let again = rig.cni("ADD", "a").unwrap();
    assert_ne!(before["ips"], again["ips"], "the address rests");
    rig.node.run("mount", &["-o", "remount,ro", STATE]).unwrap();
    rig.kill_agent();
    rig.start_agent(&[]);
    until("readiness on a read-only disk", || rig.is_ready());
    assert!(rig.holds("a") && endpoints(&rig).contains(&address(&again)));
    assert!(rig.cni("ADD", "b").is_err());
    rig.node.run("mount", &["-o", "remount,rw", STATE]).unwrap();
    until("an address", || rig.cni("ADD", "b").is_ok());
}

#[test]
fn without_a_state_directory_the_agent_fails_and_reports_the_path() {
    let rig = Rig::new("s-none");
    rig.write_kubeconfig();
    rig.node.run("touch", &[STATE]).unwrap();
    let (code, text) = rig.refused(&[]);
    assert_eq!(code, 1, "{text}");
    for words in ["state-dir", STATE, "nothing was started or changed", "running pods are not affected"] {
        assert!(text.contains(words), "{text} lacks {words}");
    }
    assert!(!rig.node.file("/sys/fs/bpf/cistern").exists());
}

#[test]
fn of_two_agents_one_serves_and_the_other_takes_over_after_its_end() {
    let mut rig = Rig::new("s-two");
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    let before = rig.add("a").unwrap();
    let log = rig.node.file("/run/second.log");
    let output = std::fs::File::create(&log).unwrap();
    let second = rig.command(&[]).stdout(Stdio::null()).stderr(output).spawn().unwrap();
    let text = || std::fs::read_to_string(&log).unwrap();
    until("the second to say what it waits for", || text().contains("waiting for another agent on this node to end"));
    assert!(!text().contains("starting"), "{}", text());
    rig.add("b").unwrap();
    rig.kill_agent();
    rig.agent = Some(second);
    until("the second to serve", || rig.is_ready());
    assert!(rig.holds("a") && rig.holds("b"));
    assert_eq!(rig.cni("ADD", "a").unwrap()["ips"], before["ips"]);
    assert_eq!(rig.status().unwrap()["findings"], json!([]), "{}", program("cistern").display());
}
