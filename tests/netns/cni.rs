//! The real `cistern-cni`, called as by a container runtime; its results are read back with `ip`.

use crate::agent::{Agent, Confirm, MTU, ROUTER};
use cistern::api::types::Health;
use cistern_tests::lab::{Lab, Machine, Pod};
use serde_json::{Value, json};
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The plugin: `CISTERN_CNI`, or the one built beside this program.
fn plugin() -> PathBuf {
    let path = std::env::var_os("CISTERN_CNI").map_or_else(
        || std::env::current_exe().unwrap().parent().unwrap().with_file_name("cistern-cni"),
        PathBuf::from,
    );
    assert!(path.is_file(), "{} is not there: cargo build --bin cistern-cni", path.display());
    path
}

fn conf(version: &str) -> Value {
    json!({"cniVersion": version, "name": "cistern", "type": "cistern-cni"})
}

/// A call to make.
struct Call<'a> {
    node: &'a Machine,
    variables: Vec<(&'static str, String)>,
    conf: String,
}

/// Result of a call.
#[derive(Debug)]
struct Outcome {
    success: bool,
    output: String,
    errors: String,
}

impl Outcome {
    /// Its output, if it succeeded.
    fn result(&self) -> Value {
        assert!(self.success, "{self:?}");
        if self.output.is_empty() { Value::Null } else { serde_json::from_str(&self.output).unwrap() }
    }

    /// Code and message of the error object, if it failed.
    fn error(&self) -> (u64, String) {
        assert!(!self.success, "{self:?}");
        let object: Value = serde_json::from_str(&self.output).unwrap_or_else(|_| panic!("no JSON: {self:?}"));
        assert!(VERSIONS.contains(&object["cniVersion"].as_str().unwrap()), "{object}");
        let message = object["msg"].as_str().unwrap().to_owned();
        // Standard error must have the message, too.
        assert!(self.errors.contains(&message), "{self:?}");
        (object["code"].as_u64().unwrap(), format!("{message}; {}", object["details"].as_str().unwrap_or_default()))
    }
}

impl<'a> Call<'a> {
    fn new(node: &'a Machine, command: &str, container: &str, netns: &str) -> Self {
        let variables = vec![
            ("CNI_COMMAND", command.to_owned()),
            ("CNI_CONTAINERID", container.to_owned()),
            ("CNI_IFNAME", "eth0".to_owned()),
            ("CNI_NETNS", netns.to_owned()),
            ("CNI_PATH", "/opt/cni/bin".to_owned()),
            ("CNI_ARGS", format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={container}")),
        ];
        Self { node, variables, conf: conf("1.1.0").to_string() }
    }

    fn with_conf(self, conf: &Value) -> Self {
        Self { conf: conf.to_string(), ..self }
    }

    fn with_stdin(self, stdin: &str) -> Self {
        Self { conf: stdin.to_owned(), ..self }
    }

    fn set(mut self, name: &'static str, value: &str) -> Self {
        self.variables.retain(|(known, _)| *known != name);
        self.variables.push((name, value.to_owned()));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.variables.retain(|(known, _)| *known != name);
        self
    }

    fn start(&self) -> Child {
        let mut command: Command = self.node.command(plugin());
        command.envs(self.variables.iter().map(|(name, value)| (*name, value)));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A plugin that fails early may not read it.
        let _ = child.stdin.take().unwrap().write_all(self.conf.as_bytes());
        child
    }

    fn run(&self) -> Outcome {
        let output = self.start().wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Outcome { success: output.status.success(), output: text(output.stdout), errors: text(output.stderr) }
    }
}

struct Node {
    // Dropped in this order.
    agent: Agent,
    machine: Machine,
    _lab: Lab,
}

fn node(prefix: &str) -> Node {
    let lab = Lab::new(prefix).unwrap();
    let machine = lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let agent = Agent::start(&machine);
    Node { agent, machine, _lab: lab }
}

impl Node {
    fn call(&self, command: &str, container: &str, pod: &Pod<'_>) -> Call<'_> {
        Call::new(&self.machine, command, container, &pod.netns())
    }

    fn add(&self, container: &str, pod: &Pod<'_>) -> Value {
        self.call("ADD", container, pod).run().result()
    }

    /// Names of the host sides of pods' pairs.
    fn host_sides(&self) -> Vec<String> {
        let links = self.machine.json("ip", &["-j", "link"]).unwrap();
        let names = links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap().to_owned());
        names.filter(|name| name.starts_with("cst")).collect()
    }

    fn pods_routes(&self) -> Value {
        self.machine.json("ip", &["-j", "route", "show", "proto", "198"]).unwrap()
    }

    /// Nothing is left of a failed or reverted ADD.
    fn assert_empty(&self, what: &str) {
        assert_eq!(self.agent.leases(), [].into(), "{what}: leases");
        assert_eq!(self.host_sides(), [""; 0], "{what}: devices");
        assert_eq!(self.pods_routes(), json!([]), "{what}: routes");
    }
}

fn address_of(result: &Value) -> Ipv4Addr {
    result["ips"][0]["address"].as_str().unwrap().strip_suffix("/32").unwrap().parse().unwrap()
}

fn pings(from: &Pod<'_>, to: Ipv4Addr) -> bool {
    from.run("ping", &["-c1", "-W2", &to.to_string()]).is_ok()
}

#[test]
fn add_creates_what_it_returns() {
    let node = node("e-add");
    let pod = node.machine.pod("pod-1").unwrap();
    let result = node.add("c1", &pod);
    let address = address_of(&result);
    let host = result["interfaces"][0]["name"].as_str().unwrap().to_owned();
    assert_eq!(node.agent.leases(), [("c1".to_owned(), (address, true))].into());
    assert_eq!(node.host_sides(), std::slice::from_ref(&host));
    assert!(host.len() == 14 && host[3..].chars().all(|c| c.is_ascii_hexdigit()), "{host}");

    // The pod's side.
    let link = &pod.json("ip", &["-j", "link", "show", "eth0"]).unwrap()[0];
    assert_eq!((&link["mtu"], &link["address"]), (&json!(MTU), &result["interfaces"][1]["mac"]));
    assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
    let addresses = &pod.json("ip", &["-j", "-4", "address", "show", "eth0"]).unwrap()[0]["addr_info"];
    assert_eq!((&addresses[0]["local"], &addresses[0]["prefixlen"]), (&json!(address), &json!(32)));
    let lines = pod.run("ip", &["route"]).unwrap();
    let mut routes: Vec<&str> = lines.lines().map(str::trim).collect();
    routes.sort_unstable();
    assert_eq!(routes, [format!("{ROUTER} dev eth0 scope link"), format!("default via {ROUTER} dev eth0")]);
    let neighbour = &pod.json("ip", &["-j", "neigh", "show", &ROUTER.to_string()]).unwrap()[0];
    assert_eq!((&neighbour["lladdr"], &neighbour["state"]), (&result["interfaces"][0]["mac"], &json!(["PERMANENT"])));
    assert!(pings(&pod, Ipv4Addr::LOCALHOST), "lo is up");

    // The host's side.
    let link = &node.machine.json("ip", &["-j", "link", "show", &host]).unwrap()[0];
    assert_eq!((&link["mtu"], &link["address"]), (&json!(MTU), &result["interfaces"][0]["mac"]));
    let route = &node.pods_routes()[0];
    assert_eq!((&route["dst"], &route["dev"]), (&json!(address), &json!(host)));
    assert_eq!((&route["scope"], &route["prefsrc"]), (&json!("link"), &json!(ROUTER)));
    for (setting, value) in [
        ("forwarding", "1"),
        ("rp_filter", "1"),
        ("proxy_arp", "0"),
        ("accept_redirects", "0"),
        ("accept_source_route", "0"),
    ] {
        let path = format!("/proc/sys/net/ipv4/conf/{host}/{setting}");
        assert_eq!(node.machine.run("cat", &[&path]).unwrap(), value, "{setting}");
    }
    let own = node.machine.json("ip", &["-j", "address", "show", &host]).unwrap();
    assert_eq!(own[0]["addr_info"], json!([]), "the host's side has no address, link-local ones included");

    // Packets are forwarded.
    let other = node.machine.pod("pod-2").unwrap();
    let second = address_of(&node.add("c2", &other));
    assert!(pings(&pod, ROUTER) && pings(&pod, second));
    node.machine.run("ping", &["-c1", "-W2", &address.to_string()]).unwrap();
    // A pod can only send with its own address.
    pod.run("ip", &["address", "add", "10.244.1.99/32", "dev", "lo"]).unwrap();
    assert!(pod.run("ping", &["-c1", "-W1", "-I", "10.244.1.99", &second.to_string()]).is_err());
}

#[test]
fn results_have_the_form_of_the_version_and_use_the_configuration() {
    let node = node("e-versions");
    let pod = node.machine.pod("pod-1").unwrap();
    for version in VERSIONS {
        let mut conf = conf(version);
        conf["dns"] = json!({"nameservers": ["10.96.0.10"]});
        conf["mtu"] = json!(1300);
        let result = node.call("ADD", "c1", &pod).with_conf(&conf).run().result();
        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["dns"], conf["dns"]);
        assert_eq!(result["ips"][0]["gateway"], json!(ROUTER));
        assert_eq!(result["ips"][0]["interface"], 1);
        assert_eq!(result["interfaces"][1]["sandbox"], pod.netns());
        assert_eq!(result["interfaces"][0].get("sandbox"), None, "the node's side is in no sandbox");
        assert_eq!(result["routes"], json!([{"dst": "0.0.0.0/0", "gw": ROUTER}]));
        // Required before 1.0.0, unknown since (specification 1.0.0, changes).
        assert_eq!(result["ips"][0].get("version").is_some(), version < "1.0.0", "{result}");
        assert_eq!(result["interfaces"][1].get("mtu").is_some(), version >= "1.1.0", "{result}");
        assert_eq!(pod.json("ip", &["-j", "link", "show", "eth0"]).unwrap()[0]["mtu"], 1300);
        // The runtime passes the result back.
        conf["prevResult"] = result;
        if version >= "0.4.0" {
            assert_eq!(node.call("CHECK", "c1", &pod).with_conf(&conf).run().result(), Value::Null);
        }
        assert_eq!(node.call("DEL", "c1", &pod).with_conf(&conf).run().result(), Value::Null);
        node.assert_empty(version);
        assert!(pod.run("ip", &["link", "show", "eth0"]).is_err());
    }
}

#[test]
fn version_lists_supported_versions_and_an_interactive_call_prints_help() {
    let lab = Lab::new("e-version").unwrap();
    let machine = lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let version = Call::new(&machine, "VERSION", "", "").with_stdin(r#"{"cniVersion":"1.0.0"}"#).run().result();
    assert_eq!(version, json!({"cniVersion": "1.0.0", "supportedVersions": VERSIONS}));
    let version = Call::new(&machine, "VERSION", "", "").with_stdin("").run().result();
    assert_eq!(version["supportedVersions"], json!(VERSIONS));

    let by_hand = Call::new(&machine, "", "", "").without("CNI_COMMAND").run();
    assert!(by_hand.success && by_hand.output.contains("container runtime"), "{by_hand:?}");
}

// case: ipam P9
#[test]
fn del_may_be_repeated_late_and_without_namespace_and_affects_no_other_pod() {
    let mut node = node("e-del");
    let pod = node.machine.pod("pod-1").unwrap();
    let first = node.add("c1", &pod);
    let mut stale = conf("1.1.0");
    stale["prevResult"] = first.clone();
    for _ in 0..2 {
        node.call("DEL", "c1", &pod).with_conf(&stale).run().result();
        node.assert_empty("DEL");
    }
    // Others get all addresses, including that of the first one.
    let mut others = Vec::new();
    let mut number = 0;
    while node.agent.leases().values().all(|(address, _)| *address != address_of(&first)) {
        number += 1;
        let other = node.machine.pod(&format!("other-{number}")).unwrap();
        node.add(&format!("o{number}"), &other);
        others.push(other);
    }
    let held = node.agent.leases();
    node.call("DEL", "c1", &pod).with_conf(&stale).run().result();
    assert_eq!(node.agent.leases(), held);
    assert!(pings(others.last().unwrap(), ROUTER));
    assert_eq!(node.host_sides().len(), held.len());

    // The namespace is deleted, and the runtime has no result.
    let last = others.pop().unwrap();
    last.remove().unwrap();
    let container = format!("o{number}");
    node.call("DEL", &container, &last).run().result();
    node.call("DEL", &container, &last).without("CNI_NETNS").run().result();
    assert!(!node.agent.leases().contains_key(&container));
    assert_eq!(node.host_sides().len(), held.len() - 1);
    // A configuration that made ADD fail must not make its DEL fail.
    node.call("DEL", "o1", &last).set("CNI_ARGS", "no pair").run().result();
    assert!(!node.agent.leases().contains_key("o1"));
    node.agent.pause();
}

/// Standard inputs that an ADD would refuse, or that no runtime should send.
fn damaged(plugin: &Value) -> Vec<String> {
    let without = |key: &str| {
        let mut conf = plugin.clone();
        conf.as_object_mut().unwrap().remove(key);
        conf.to_string()
    };
    let with = |key: &str, value: Value| {
        let mut conf = plugin.clone();
        conf[key] = value;
        conf.to_string()
    };
    let mut inputs = ["", "no JSON", "{\"cniVersion\": ", "[]", "null", "7", "{}"].map(str::to_owned).to_vec();
    inputs.push("[".repeat(5_000));
    inputs.extend(["cniVersion", "name", "type"].map(without));
    for key in [
        "cniVersion",
        "name",
        "type",
        "ipam",
        "mtu",
        "prevResult",
        "dns",
        "args",
        "capabilities",
        "runtimeConfig",
        "socket-path",
        "queue-dir",
        "cni.dev/valid-attachments",
        "of-a-later-release",
    ] {
        inputs.extend(
            [Value::Null, json!(""), json!(5), json!(["x"]), json!({"type": 5}), json!("1450")].map(|v| with(key, v)),
        );
    }
    inputs.push(with("cniVersion", json!("0.2.0")));
    inputs.push(with("cniVersion", json!("2.0.0")));
    inputs.push(with("prevResult", json!({"cniVersion": "1.0.0", "ips": "damaged", "interfaces": [5]})));
    inputs
}

#[test]
fn del_needs_the_attachment_and_nothing_else() {
    let mut node = node("e-damaged");
    let pod = node.machine.pod("pod-1").unwrap();
    let ipam = json!({"cniVersion": "1.0.0", "name": "n", "type": "bridge", "ipam": {"type": "cistern-cni"}});
    for (plugin, inputs) in [(conf("1.0.0"), damaged(&conf("1.0.0"))), (ipam.clone(), damaged(&ipam))] {
        for input in inputs {
            let shown: String = input.chars().take(200).collect();
            node.call("ADD", "c1", &pod).with_conf(&plugin).run().result();
            assert_eq!(node.agent.leases().len(), 1);
            let outcome = node.call("DEL", "c1", &pod).with_stdin(&input).run();
            assert!(outcome.success && outcome.output.is_empty(), "{shown}: {outcome:?}");
            node.assert_empty(&shown);
        }
    }
    // What is missing is the attachment: the answer has a version, whatever was asked for.
    let (code, message) = node.call("DEL", "c1", &pod).without("CNI_CONTAINERID").with_stdin("").run().error();
    assert!(code == 4 && message.contains("CNI_CONTAINERID"), "{message}");

    // It waits for the agent as any other.
    let queue = node.machine.file("/var/lib/cistern/cni-queue");
    node.add("c1", &pod);
    node.agent.pause();
    for input in damaged(&conf("1.0.0")) {
        node.call("DEL", "c1", &pod).with_stdin(&input).run().result();
    }
    assert_eq!(queued(&queue), 1);
    node.agent.resume();
    assert_eq!(node.agent.replay(&queue).done, 1);
    node.assert_empty("after the replay");
}

#[test]
fn a_del_that_the_agent_refuses_waits_on_disk_and_stops_no_other() {
    let node = node("e-refused");
    let pod = node.machine.pod("pod-1").unwrap();
    let queue = node.machine.file("/var/lib/cistern/cni-queue");
    // Another program answers at the socket that a damaged configuration names.
    let mut elsewhere = conf("1.0.0");
    elsewhere["socket-path"] = json!("/run/elsewhere.sock");
    let listener = std::os::unix::net::UnixListener::bind(node.machine.file("/run/elsewhere.sock")).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
        }
    });
    for name in ["c1", "c2"] {
        node.add(name, &pod);
        node.call("DEL", name, &pod).with_conf(&elsewhere).run().result();
    }
    assert_eq!((queued(&queue), node.agent.leases().len()), (2, 2));
    // One of a later build, which that build carries out.
    let later = queue.join("later.json");
    std::fs::write(&later, r#"{"format":9,"oldest_reader":9}"#).unwrap();
    let replayed = node.agent.replay(&queue);
    assert_eq!((replayed.done, replayed.kept.len()), (2, 1));
    assert!(later.exists());
    node.assert_empty("after the replay");
}

#[test]
fn calls_at_once_for_an_attachment_end_with_one_working_interface_or_with_none() {
    let node = node("e-at-once");
    let pod = node.machine.pod("pod-1").unwrap();
    let run = |verbs: &[&str]| -> Vec<Outcome> {
        let children: Vec<Child> = verbs.iter().map(|verb| node.call(verb, "c1", &pod).start()).collect();
        children
            .into_iter()
            .map(|child| {
                let output = child.wait_with_output().unwrap();
                let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
                Outcome { success: output.status.success(), output: text(output.stdout), errors: text(output.stderr) }
            })
            .collect()
    };
    let works = |result: &Value| {
        let mut conf = conf("1.1.0");
        conf["prevResult"] = result.clone();
        node.call("CHECK", "c1", &pod).with_conf(&conf).run().result();
        assert_eq!(node.agent.leases(), [("c1".to_owned(), (address_of(result), true))].into());
        assert_eq!((node.host_sides().len(), node.pods_routes().as_array().unwrap().len()), (1, 1));
    };
    for round in 0..75 {
        let results: Vec<Value> = run(&["ADD", "ADD"]).iter().map(Outcome::result).collect();
        assert_eq!(results[0], results[1], "round {round}: one address and one pair");
        works(&results[0]);
        assert!(round % 10 != 0 || pings(&pod, ROUTER));
        node.call("DEL", "c1", &pod).run().result();
        node.assert_empty("DEL");

        let mut outcomes = run(if round % 2 == 0 { &["ADD", "DEL", "ADD"] } else { &["DEL", "ADD", "DEL"] });
        match node.agent.leases().get("c1") {
            None => node.assert_empty(&format!("round {round}: a DEL came last")),
            Some((address, _)) => {
                let mut added = outcomes.iter().filter(|outcome| !outcome.output.is_empty()).map(Outcome::result);
                works(&added.rfind(|result| address_of(result) == *address).unwrap());
            }
        }
        outcomes.retain(|outcome| !outcome.success);
        assert!(outcomes.is_empty(), "round {round}: {outcomes:?}");
        node.call("DEL", "c1", &pod).run().result();
        node.assert_empty("the last DEL");
    }
}

#[test]
fn a_del_waits_for_an_add_that_is_at_work_and_for_none_that_was_killed() {
    let node = node("e-waits");
    let pod = node.machine.pod("pod-1").unwrap();
    node.agent.confirm(Confirm::Ignore);
    let arrived = node.agent.next_confirmation();
    let mut add = node.call("ADD", "c1", &pod).start();
    arrived.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    let mut del = node.call("DEL", "c1", &pod).start();
    // Others are not kept waiting meanwhile: this one needs no confirmation.
    node.call("DEL", "c2", &pod).run().result();
    assert_eq!(del.try_wait().unwrap(), None, "the ADD has the attachment");
    assert_eq!((node.host_sides().len(), node.agent.leases().len()), (1, 1));
    add.kill().unwrap();
    add.wait().unwrap();
    let output = del.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    node.assert_empty("the DEL after a killed ADD");
}

// case: ipam P8
#[test]
fn an_add_that_fails_after_its_lease_leaves_nothing() {
    let node = node("e-undo");
    let pod = node.machine.pod("pod-1").unwrap();

    node.agent.confirm(Confirm::Refuse);
    let (code, message) = node.call("ADD", "c1", &pod).run().error();
    assert_eq!(code, 102, "{message}");
    assert!(message.contains("the lease is another one"), "{message}");
    node.assert_empty("refused confirmation");
    assert!(pod.run("ip", &["link", "show", "eth0"]).is_err());

    node.agent.confirm(Confirm::Carry);
    let router = format!("{ROUTER}/32");
    node.machine.run("ip", &["address", "delete", &router, "dev", "lo"]).unwrap();
    let (code, message) = node.call("ADD", "c1", &pod).run().error();
    assert_eq!(code, 101, "{message}");
    assert!(message.contains(&format!("src {ROUTER}: EINVAL")), "{message}");
    node.assert_empty("no router address");

    node.machine.run("ip", &["address", "add", &router, "dev", "lo", "scope", "link"]).unwrap();
    node.add("c1", &pod);
    assert_eq!(node.agent.leases().len(), 1);
}

#[test]
fn an_add_that_was_killed_is_repaired_by_the_next() {
    let node = node("e-kill");
    let pod = node.machine.pod("pod-1").unwrap();
    node.agent.confirm(Confirm::Ignore);
    let arrived = node.agent.next_confirmation();
    let mut killed = node.call("ADD", "c1", &pod).start();
    arrived.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    let left = node.agent.leases();
    assert!(left.len() == 1 && !left["c1"].1, "an unconfirmed lease: {left:?}");
    let index = |pod: &Pod<'_>| pod.json("ip", &["-j", "link", "show", "eth0"]).unwrap()[0]["ifindex"].clone();
    let before = index(&pod);

    node.agent.confirm(Confirm::Carry);
    let result = node.add("c1", &pod);
    assert_eq!(node.agent.leases()["c1"], (left["c1"].0, true), "the same address, confirmed");
    assert_eq!(address_of(&result), left["c1"].0);
    assert_eq!(node.host_sides().len(), 1);
    assert_ne!(index(&pod), before, "the pair is a new one");
    assert!(pings(&pod, ROUTER));
}

#[test]
fn a_remaining_pair_is_replaced_and_a_foreign_device_is_not() {
    let node = node("e-names");
    let pod = node.machine.pod("pod-1").unwrap();
    pod.run("ip", &["link", "add", "eth0", "type", "veth", "peer", "name", "left"]).unwrap();
    node.add("c1", &pod);
    assert!(pod.run("ip", &["link", "show", "left"]).is_err());
    node.call("DEL", "c1", &pod).run().result();

    pod.run("ip", &["link", "add", "eth0", "type", "bridge"]).unwrap();
    let (code, message) = node.call("ADD", "c1", &pod).run().error();
    assert_eq!(code, 4, "{message}");
    assert!(message.starts_with("CNI_IFNAME: \"eth0\"") && message.contains("bridge"), "{message}");
    node.assert_empty("a device of others");
    pod.run("ip", &["link", "show", "eth0"]).unwrap();
    let second = node.call("ADD", "c1", &pod).set("CNI_IFNAME", "net1").run().result();
    assert_eq!(second["interfaces"][1]["name"], "net1");
}

// case: ipam P13
#[test]
fn check_finds_what_is_missing() {
    let mut node = node("e-check");
    let pod = node.machine.pod("pod-1").unwrap();
    let mut with_result = conf("1.0.0");
    with_result["prevResult"] = node.add("c1", &pod);
    let host = with_result["prevResult"]["interfaces"][0]["name"].as_str().unwrap().to_owned();
    let address = address_of(&with_result["prevResult"]);
    let on_node = |line: &str| node.machine.run("sh", &["-ec", line]).unwrap();
    let in_pod = |line: &str| pod.run("sh", &["-ec", line]).unwrap();
    let again = |node: &Node| {
        node.call("DEL", "c1", &pod).run().result();
        node.add("c1", &pod)
    };
    type Run<'a> = &'a dyn Fn(&str) -> String;
    let breaks: [(Run<'_>, String, &str); 8] = [
        (&in_pod, format!("ip address delete {address}/32 dev eth0"), "has no address"),
        (&in_pod, "ip route delete default".into(), "no default route"),
        (&in_pod, format!("ip route delete {ROUTER} dev eth0"), "no route to"),
        (&in_pod, format!("ip neigh delete {ROUTER} dev eth0"), "no permanent neighbour"),
        (&in_pod, "ip link set eth0 address 0e:00:00:00:00:01".into(), "another hardware address"),
        (&in_pod, "ip link delete eth0".into(), "does not exist"),
        (&on_node, format!("ip link set {host} down"), "is down"),
        (&on_node, format!("ip route delete {address}"), "the node has no route to"),
    ];
    for (run, line, expected) in breaks {
        with_result["prevResult"] = again(&node);
        // The address may differ now, unless the pool returned the same one.
        let now = address_of(&with_result["prevResult"]);
        let line = line.replace(&address.to_string(), &now.to_string());
        assert_eq!(node.call("CHECK", "c1", &pod).with_conf(&with_result).run().result(), Value::Null);
        run(&line);
        let (code, message) = node.call("CHECK", "c1", &pod).with_conf(&with_result).run().error();
        assert_eq!(code, 100, "{line}: {message}");
        assert!(message.contains(expected), "{line}: {message}");
    }
    with_result["prevResult"] = again(&node);
    // Additions of later plugins of the chain are ignored.
    in_pod("ip route add 10.99.0.0/16 dev eth0; ip address add 10.98.0.1/32 dev eth0");
    node.call("CHECK", "c1", &pod).with_conf(&with_result).run().result();

    let mut other = with_result.clone();
    other["prevResult"]["ips"][0]["address"] = json!("10.244.1.77/32");
    let (code, message) = node.call("CHECK", "c1", &pod).with_conf(&other).run().error();
    assert!(code == 100 && message.contains("prevResult does not name"), "{message}");
    let (code, message) = node.call("CHECK", "c1", &pod).run().error();
    assert!(code == 7 && message.starts_with("prevResult: absent"), "{message}");
    let (code, _) = node.call("CHECK", "nobody", &pod).with_conf(&with_result).run().error();
    assert_eq!(code, 3);

    node.agent.pause();
    let (code, message) = node.call("CHECK", "c1", &pod).with_conf(&with_result).run().error();
    assert_eq!(code, 11, "{message}");
}

fn queued(directory: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(directory) else { return 0 };
    entries.filter(|entry| entry.as_ref().unwrap().path().extension().is_some_and(|e| e == "json")).count()
}

// case: ipam P10
#[test]
fn a_del_without_agent_is_queued_and_the_257th_is_refused() {
    let mut node = node("e-queue");
    let pod = node.machine.pod("pod-1").unwrap();
    let queue = node.machine.file("/var/lib/cistern/cni-queue");
    node.add("c1", &pod);
    node.agent.pause();
    for _ in 0..2 {
        node.call("DEL", "c1", &pod).run().result();
        assert_eq!(queued(&queue), 1, "one file for one attachment");
    }
    assert_eq!(node.host_sides(), [""; 0], "the device does not wait for the agent");
    assert_eq!(node.agent.leases().len(), 1);
    // 255 more, as plugins write them; then one by the plugin itself.
    {
        use cistern::cni::deletion_queue::{DeletionQueue, QueuedDel};
        let waiting = DeletionQueue::open_shared(&queue).unwrap();
        for number in 0..255 {
            let del = QueuedDel {
                queued: jiff::Timestamp::UNIX_EPOCH,
                began: None,
                container_id: format!("w{number}"),
                ifname: "eth0".into(),
            };
            waiting.push(&del).unwrap();
        }
    }
    let (code, message) = node.call("DEL", "c2", &pod).run().error();
    assert!(code == 11 && message.contains("256 DELs wait"), "{message}");
    // One that is queued already is not added again.
    node.call("DEL", "c1", &pod).run().result();
    assert_eq!(queued(&queue), 256);

    node.agent.resume();
    assert_eq!(node.agent.replay(&queue).done, 256);
    assert_eq!(queued(&queue), 0);
    node.assert_empty("replay");
    node.call("DEL", "c2", &pod).run().result();
    assert_eq!(queued(&queue), 0, "with an agent nothing is queued");
}

#[test]
fn a_queued_del_does_not_release_a_later_attachment() {
    let mut node = node("e-again");
    let pod = node.machine.pod("pod-1").unwrap();
    let queue = node.machine.file("/var/lib/cistern/cni-queue");
    node.add("c1", &pod);
    node.agent.pause();
    node.call("DEL", "c1", &pod).run().result();
    node.agent.resume();
    node.add("c1", &pod);
    assert_eq!(node.agent.replay(&queue).done, 1);
    assert_eq!(queued(&queue), 0);
    assert!(node.agent.leases()["c1"].1, "the pod that runs keeps its address");
    assert!(pings(&pod, ROUTER));
}

#[test]
fn the_first_packet_of_a_pod_is_not_lost() {
    // The kernel's link-watch work for a new carrier waits for the rtnl lock, which these hold most of the time.
    const BUSY: &str = "while unshare --net ip link add x type veth peer y; do :; done";
    let node = node("e-first");
    let mut busy = [(); 8].map(|()| node.machine.command("sh").args(["-c", BUSY]).spawn().unwrap());
    let lost: Vec<String> = (0..40)
        .map(|number| format!("pod-{number}"))
        .filter(|name| {
            let pod = node.machine.pod(name).unwrap();
            node.add(name, &pod);
            let answered = pings(&pod, ROUTER);
            node.call("DEL", name, &pod).run().result();
            !answered
        })
        .collect();
    for one in &mut busy {
        assert_eq!(one.try_wait().unwrap(), None, "the machine was not busy");
        one.kill().unwrap();
        one.wait().unwrap();
    }
    assert_eq!(lost, [""; 0]);
}

// case: ipam P14
#[test]
fn status_distinguishes_a_restart_from_a_node_that_cannot_serve() {
    let mut node = node("e-status");
    let run = |node: &Node| Call::new(&node.machine, "STATUS", "", "").run();
    run(&node).result();
    let starting = Health { starting: true, ..Health::new(vec!["no full pass yet".to_owned()]) };
    let serves_no_more = Health::new(vec!["waiting for podCIDRs".to_owned()]);
    for health in [&starting, &serves_no_more] {
        node.agent.set_health(health.clone());
        let (code, message) = run(&node).error();
        assert!(code == 50 && message.contains(&health.reasons[0]), "this node never served: {message}");
    }
    node.agent.pause();
    assert_eq!(run(&node).error().0, 50, "this node never served");

    node.machine.run("touch", &["/run/cistern/served"]).unwrap();
    run(&node).result();
    node.machine.run("touch", &["-d", "1 hour", "/run/cistern/served"]).unwrap();
    assert_eq!(run(&node).result(), Value::Null, "the clock was set back");
    node.agent.resume();
    node.agent.set_health(starting);
    assert_eq!(run(&node).result(), Value::Null, "a restart");
    node.agent.set_health(serves_no_more);
    assert_eq!(run(&node).error().0, 50, "it has served, and cannot any more");
    node.agent.pause();
    node.machine.run("touch", &["-d", "6 minutes ago", "/run/cistern/served"]).unwrap();
    assert_eq!(run(&node).error().0, 50, "that is no restart any more");

    let mut refused = conf("1.1.0");
    refused["mtu"] = json!("1450");
    let (code, message) = Call::new(&node.machine, "STATUS", "", "").with_conf(&refused).run().error();
    assert!(code == 7 && message.contains("mtu"), "no ADD can be served with it: {message}");
}

#[test]
fn gc_releases_what_is_not_in_the_list() {
    let node = node("e-gc");
    let pods: Vec<Pod<'_>> = (1..=3).map(|number| node.machine.pod(&format!("pod-{number}")).unwrap()).collect();
    for (number, pod) in (1..).zip(&pods) {
        node.add(&format!("c{number}"), pod);
    }
    let call = |conf: &Value| Call::new(&node.machine, "GC", "", "").with_conf(conf).run();
    let with = |key: &str, value: Value| {
        let mut conf = conf("1.1.0");
        conf[key] = value;
        conf
    };
    let list = |value: Value| with("cni.dev/valid-attachments", value);
    let c2 = json!({"containerID": "c2", "ifname": "eth0"});
    for refused in [
        conf("1.1.0"),
        list(Value::Null),
        list(json!("c2")),
        list(json!([c2, null])),
        list(json!([c2, {"containerID": "c1"}])),
        list(json!([c2, {"containerID": "c1", "ifname": 0}])),
        with("cni.dev/attachments", json!({})),
        json!({"cniVersion": "1.1.0", "type": "cistern-cni", "cni.dev/valid-attachments": [c2]}),
    ] {
        let (code, message) = call(&refused).error();
        assert!(code == 7 && message.contains("nothing was released"), "{refused}: {message}");
        assert_eq!(node.agent.leases().len(), 3, "{refused}: nothing is released");
    }
    assert_eq!(call(&json!(["cni.dev/valid-attachments"])).error().0, 6);
    // A runtime that has lost its state knows no attachment, and its pods run.
    call(&list(json!([]))).result();
    assert_eq!(node.agent.leases().len(), 3, "every namespace is alive");
    assert_eq!(node.host_sides().len(), 3);

    let mut valid = conf("1.1.0");
    valid["cni.dev/valid-attachments"] = json!([c2]);
    // GC needs the network and the list alone.
    valid["mtu"] = json!("1450");
    call(&valid).result();
    assert_eq!(node.agent.leases().into_keys().collect::<Vec<_>>(), ["c2"]);
    assert_eq!(node.host_sides().len(), 1);
    assert!(pings(&pods[1], ROUTER));
    for pod in pods {
        pod.remove().unwrap();
    }
    call(&list(json!([]))).result();
    node.assert_empty("an empty list, and no namespace is alive");
}

#[test]
fn errors_of_a_call_are_reported_and_nothing_is_left() {
    let mut node = node("e-wrong");
    let pod = node.machine.pod("pod-1").unwrap();
    let host_netns = format!("/proc/{}/ns/net", node.machine.id());
    node.machine.run("touch", &["/run/netns/empty"]).unwrap();
    let add = || node.call("ADD", "c1", &pod);
    let changed = |key: &str, value: Value| {
        let mut conf = conf("1.0.0");
        conf[key] = value;
        add().with_conf(&conf)
    };
    let calls = [
        (add().with_stdin("{\"cniVersion\": \"1.0.0\", "), 6, "network configuration on standard input"),
        (add().with_stdin(""), 6, "network configuration on standard input"),
        (changed("cniVersion", json!("0.2.0")), 1, "cniVersion: \"0.2.0\"; expected one of 0.3.1"),
        (changed("cniVersion", json!("2.0.0")), 1, "cniVersion: \"2.0.0\""),
        (changed("cniVersion", json!("")), 1, "cniVersion: \"\""),
        (changed("name", json!("")), 7, "name: \"\""),
        (changed("mtu", json!(68)), 7, "mtu: 68"),
        (changed("mtu", json!("big")), 7, "mtu: \"big\"; expected a number from 576 to 65535"),
        (changed("ipam", json!({"type": "host-local"})), 2, "ipam.type: \"host-local\""),
        (changed("ipam", json!({"type": "cistern-cni"})), 2, "ipam.type: \"cistern-cni\""),
        (changed("prevResult", json!({"ips": []})), 2, "prevResult: present"),
        (add().set("CNI_COMMAND", "REMOVE"), 4, "CNI_COMMAND: \"REMOVE\""),
        (add().without("CNI_CONTAINERID"), 4, "CNI_CONTAINERID: \"\""),
        (add().set("CNI_CONTAINERID", "../c"), 4, "CNI_CONTAINERID: \"../c\""),
        (add().without("CNI_IFNAME"), 4, "CNI_IFNAME: \"\""),
        (add().set("CNI_IFNAME", "lo"), 4, "CNI_IFNAME: \"lo\""),
        (add().set("CNI_IFNAME", "a name"), 4, "CNI_IFNAME: \"a name\""),
        (add().set("CNI_ARGS", "no pair"), 4, "CNI_ARGS: \"no pair\""),
        (add().without("CNI_NETNS"), 4, "CNI_NETNS: \"\""),
        (add().set("CNI_NETNS", "/run/netns/none"), 3, "/run/netns/none: open: ENOENT"),
        (add().set("CNI_NETNS", "/run/netns/empty"), 4, "/run/netns/empty: enter as a network namespace"),
        (add().set("CNI_NETNS", &host_netns), 4, "the node's own network namespace"),
        (node.call("CHECK", "c1", &pod).with_conf(&conf("0.3.1")), 1, "CHECK belongs to CNI 0.4.0"),
        (node.call("STATUS", "c1", &pod).with_conf(&conf("1.0.0")), 1, "STATUS belongs to CNI 1.1.0"),
        (node.call("GC", "c1", &pod).with_conf(&conf("1.0.0")), 1, "GC belongs to CNI 1.1.0"),
    ];
    for (call, code, expected) in calls {
        let (given, message) = call.run().error();
        assert_eq!(given, code, "{message}");
        assert!(message.contains(expected), "{expected:?} is not in {message:?}");
        node.assert_empty(expected);
    }

    // Six addresses, one of them the router's.
    for number in 1..=5 {
        let pod = node.machine.pod(&format!("full-{number}")).unwrap();
        node.add(&format!("f{number}"), &pod);
    }
    let (code, message) = add().run().error();
    assert_eq!(code, 11, "{message}");
    assert!(message.contains("10.244.1.0/29"), "{message}");
    assert_eq!(node.host_sides().len(), 5);

    node.agent.pause();
    let (code, message) = node.call("ADD", "c1", &pod).run().error();
    assert_eq!(code, 11, "{message}");
    assert!(message.contains("the agent cannot be reached at /run/cistern/cistern.sock"), "{message}");
    assert!(pod.run("ip", &["link", "show", "eth0"]).is_err());
}
