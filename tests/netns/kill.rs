//! `kill -9` of the plugin before each of its system calls with an effect outside the process, one after the other, by
//! `strace`, without support in the plugin.
//!
//! A first run lists the calls; then each of them is the last of one run (the kernel does not execute it). If the
//! plugin is killed while it waits for an answer, the agent or the kernel still executes the request.

use crate::process::{Rig, cni, program, start_cni, until};
use cistern_tests::lab::Machine;
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

/// System calls that change something outside, or wait for a change.
const CALLS: &str = "connect,sendto,sendmsg,recvfrom,recvmsg,write,setns,mkdir,rename,unlink,flock,fcntl";

const KILLED: i32 = 9;

struct Killing {
    rig: Rig,
}

/// A system call by name, and the number of earlier ones of that name.
type Point = (String, usize);

impl Killing {
    fn new(prefix: &str) -> Self {
        let mut rig = Rig::new(prefix);
        rig.start_api();
        rig.start_agent(&[]);
        until("readiness", || rig.is_ready());
        Self { rig }
    }

    fn node(&self) -> &Machine {
        &self.rig.node
    }

    /// Runs the plugin under `strace`; returns its exit status.
    fn traced(&self, options: &[&str], verb: &str, name: &str) -> std::process::ExitStatus {
        let mut command = self.node().command("strace");
        command.args(["-f", "-qq", "-o", "/run/strace", "-e", &format!("trace={CALLS}")]).args(options);
        command.arg("--").arg(program("cistern-cni"));
        start_cni(&mut command, verb, name, &Value::Null).wait_with_output().unwrap().status
    }

    /// The calls of a run that is not killed, in order.
    fn points(&self, verb: &str, name: &str) -> Vec<Point> {
        assert!(self.traced(&[], verb, name).success(), "{verb}");
        let text = std::fs::read_to_string(self.node().file("/run/strace")).unwrap();
        let mut count = BTreeMap::new();
        let mut points = Vec::new();
        for line in text.lines() {
            // `PID  sendto(3, …`; a line about the exit has no call.
            let Some((name, _)) = line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ').split_once('(')
            else {
                continue;
            };
            let number: &mut usize = count.entry(name.to_owned()).or_default();
            *number += 1;
            points.push((name.to_owned(), *number));
        }
        assert!(points.len() > 5, "{verb}: {text}");
        points
    }

    fn killed(&self, verb: &str, name: &str, (call, number): &Point) {
        let inject = format!("inject={call}:signal=SIGKILL:when={number}");
        let status = self.traced(&["-e", &inject], verb, name);
        // An answer may arrive in one part or two, so that there may be one call less.
        let fewer = call.starts_with("recv") && status.success();
        assert!(status.signal() == Some(KILLED) || fewer, "{verb} was not killed at {call} {number}: {status}");
    }

    fn add(&self, name: &str) -> Value {
        cni(self.node(), "ADD", name, &Value::Null).unwrap_or_else(|error| panic!("ADD {name}: {error}"))
    }

    fn del(&self, name: &str) {
        cni(self.node(), "DEL", name, &Value::Null).unwrap_or_else(|error| panic!("DEL {name}: {error}"));
    }

    fn rows(&self, arguments: &[&str]) -> Vec<Value> {
        let program = program("cistern");
        let arguments = [arguments, &["-o", "json"]].concat();
        self.node().json(program.to_str().unwrap(), &arguments).unwrap().as_array().unwrap().clone()
    }

    /// Nothing is left on the node, of any container.
    fn assert_empty(&self, what: &str) {
        let held = |row: &Value| row["state"] == "confirmed" || row["state"] == "provisional";
        assert_eq!(self.rows(&["ip", "list"]).into_iter().find(held), None, "{what}: leases");
        // The last row is deleted with the answer to DEL, or by the reconciler.
        until("an empty endpoint map", || self.rows(&["bpf", "endpoint", "list"]).is_empty());
        let seen = "ip route show proto 198; ip -o neigh show nud permanent; ip -o link | grep ' cst' || true; \
                    ls /var/lib/cistern/cni-queue 2>/dev/null | grep -v '^lock$' || true";
        assert_eq!(self.node().run("sh", &["-ec", seen]).unwrap(), "", "{what}: routes, neighbours, devices, queue");
    }

    /// Hides the agent's socket, as if there were no agent.
    fn hide_agent(&self) {
        self.node().run("mv", &["/run/cistern/cistern.sock", "/run/cistern/hidden"]).unwrap();
    }

    fn show_agent(&self) {
        self.node().run("mv", &["/run/cistern/hidden", "/run/cistern/cistern.sock"]).unwrap();
    }
}

#[test]
fn an_add_that_is_killed_anywhere_is_repaired_by_the_next_or_reverted_by_del() {
    let killing = Killing::new("k-add");
    killing.node().pod("model").unwrap();
    let points = killing.points("ADD", "model");
    killing.del("model");
    killing.assert_empty("the model");
    for (number, point) in points.iter().enumerate() {
        let name = format!("k{number}");
        let pod = killing.node().pod(&name).unwrap();
        killing.killed("ADD", &name, point);
        // Alternating, so that both are tested at each point or its neighbours.
        if number % 2 == 0 {
            let result = killing.add(&name);
            cni(killing.node(), "CHECK", &name, &result).unwrap_or_else(|error| panic!("{point:?}: {error}"));
            assert!(killing.rig.holds(&name), "{point:?}");
        }
        killing.del(&name);
        killing.assert_empty(&format!("ADD killed at {point:?}"));
        assert_eq!(pod.run("ip", &["-o", "link"]).unwrap().lines().count(), 1, "{point:?}: only lo is left");
        killing.killed("ADD", &name, point);
        if number % 2 == 1 {
            let result = killing.add(&name);
            cni(killing.node(), "CHECK", &name, &result).unwrap_or_else(|error| panic!("{point:?}: {error}"));
        }
        killing.del(&name);
        killing.assert_empty(&format!("ADD killed at {point:?}, the other way"));
        pod.remove().unwrap();
    }
}

#[test]
fn a_del_that_is_killed_anywhere_is_completed_by_the_next() {
    let killing = Killing::new("k-del");
    killing.node().pod("model").unwrap();
    killing.add("model");
    let points = killing.points("DEL", "model");
    killing.assert_empty("the model");
    for point in &points {
        killing.add("model");
        killing.killed("DEL", "model", point);
        killing.del("model");
        killing.assert_empty(&format!("DEL killed at {point:?}"));
    }
}

#[test]
fn a_del_without_agent_that_is_killed_anywhere_is_completed_by_the_next_or_by_the_replay() {
    let mut killing = Killing::new("k-queue");
    let add = |killing: &Killing, name: &str| {
        killing.node().pod(name).unwrap();
        killing.add(name);
    };
    add(&killing, "model");
    killing.hide_agent();
    let points = killing.points("DEL", "model");
    killing.show_agent();
    assert!(points.iter().any(|(call, _)| call == "rename"), "{points:?}");
    for number in 0..points.len() {
        add(&killing, &format!("a{number}"));
        add(&killing, &format!("b{number}"));
    }
    killing.hide_agent();
    for (number, point) in points.iter().enumerate() {
        // One is retried while the agent is down, the other when it is running again.
        for half in ["a", "b"] {
            killing.killed("DEL", &format!("{half}{number}"), point);
        }
        killing.del(&format!("a{number}"));
    }
    killing.rig.kill_agent();
    killing.rig.start_agent(&[]);
    until("readiness", || killing.rig.is_ready());
    for number in 0..points.len() {
        killing.del(&format!("b{number}"));
    }
    let queue = killing.node().file("/var/lib/cistern/cni-queue");
    until("the replay", || std::fs::read_dir(&queue).unwrap().all(|entry| entry.unwrap().file_name() == "lock"));
    killing.assert_empty("after the replay");
}
