//! Our plugin with the reference plugins: in a chain before `portmap`, `bandwidth` and `tuning`, and as IPAM plugin of
//! `bridge` and `ptp`. Tests the traffic that each of them enables.

use crate::process::{Rig, program, until};
use cistern_tests::lab::{Machine, Pod};
use cistern_tests::probe::Answer;
use cistern_tests::runtime::{Attachment, Runtime};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};

const OUTSIDE: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 80);
const PORT: u16 = 8080;

/// A serving node, and an external host that reports clients' addresses.
struct Site {
    servers: RefCell<Vec<Child>>,
    rig: Rig,
    outside: Machine,
}

impl Drop for Site {
    fn drop(&mut self) {
        for server in self.servers.get_mut() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

impl Site {
    fn new(prefix: &str) -> Self {
        let mut rig = Rig::new(prefix);
        let outside = rig.lab.host("outside", "172.29.8.1/24".parse().unwrap()).unwrap();
        outside.run("ip", &["address", "add", &format!("{OUTSIDE}/32"), "dev", "lo"]).unwrap();
        rig.start_api();
        rig.start_agent(&[]);
        until("readiness", || rig.is_ready());
        let site = Self { servers: RefCell::new(Vec::new()), rig, outside };
        let server = site.outside.command(program("cistern-probe"));
        site.serve(server, OUTSIDE);
        site
    }

    fn serve(&self, mut command: Command, address: Ipv4Addr) {
        command.args(["serve", &format!("{address}:{PORT}")]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready"), "{address}: {line}");
        self.servers.borrow_mut().push(child);
    }

    /// A container of this name, with its namespace.
    fn container(&self, name: &str) -> Attachment {
        self.rig.node.pod(name).unwrap();
        Attachment { container: name.to_owned(), ifname: "eth0".to_owned(), netns: format!("/run/netns/{name}") }
    }

    fn pod(&self, name: &str) -> Pod<'_> {
        self.rig.node.existing_pod(name)
    }

    fn cistern(&self, arguments: &[&str]) -> Vec<Value> {
        let program = program("cistern");
        let printed = self.rig.node.json(program.to_str().unwrap(), &[arguments, &["-o", "json"]].concat()).unwrap();
        printed.as_array().unwrap().clone()
    }

    /// State of a container's address in the agent.
    fn state(&self, container: &str) -> Option<String> {
        let rows = self.cistern(&["ip", "list"]);
        let row = rows.into_iter().find(|row| row["container_id"] == container)?;
        Some(row["state"].as_str()?.to_owned())
    }

    /// The pod in the kernel programs' map.
    fn endpoint(&self, address: Ipv4Addr) -> Option<Value> {
        self.cistern(&["bpf", "endpoint", "list"]).into_iter().find(|row| row["address"] == json!(address))
    }

    /// Nothing of ours is left of any container.
    fn assert_empty(&self, what: &str) {
        let held = |row: &Value| row["state"] == "confirmed" || row["state"] == "provisional";
        assert_eq!(self.cistern(&["ip", "list"]).into_iter().find(held), None, "{what}");
        until("an empty endpoint map", || self.cistern(&["bpf", "endpoint", "list"]).is_empty());
        assert_eq!(self.rig.node.run("ip", &["route", "show", "proto", "198"]).unwrap(), "", "{what}");
        assert!(!self.rig.node.run("ip", &["-o", "link"]).unwrap().contains(" cst"), "{what}");
    }
}

fn address_of(result: &Value) -> Ipv4Addr {
    result["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap()
}

/// Asks a server for the client's address. `None` without an answer.
fn ask(mut from: Command, protocol: &str, to: Ipv4Addr, port: u16) -> Option<Answer> {
    let output = from.args([&format!("ask-{protocol}"), &SocketAddr::from((to, port)).to_string()]).output().unwrap();
    serde_json::from_slice(&output.stdout).ok()
}

fn seen(answer: Option<Answer>) -> String {
    answer.map_or_else(|| "no answer".to_owned(), |answer| answer.seen_as.ip().to_string())
}

const MAC: &str = "0e:11:22:33:44:55";

fn chain() -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "cistern",
        "plugins": [
            {"type": "cistern-cni"},
            {"type": "portmap", "snat": true, "capabilities": {"portMappings": true}},
            {"type": "bandwidth", "capabilities": {"bandwidth": true}},
            {"type": "tuning", "sysctl": {"net.ipv4.tcp_keepalive_time": "77"}, "mac": MAC},
        ],
    })
}

/// The plugins whose CHECK can succeed: that of portmap 1.1.1 looks for IPv6 rules, which a pod without IPv6 address
/// does not have.
fn checked() -> Value {
    let mut list = chain();
    list["plugins"].as_array_mut().unwrap().retain(|plugin| plugin["type"] != "portmap");
    list
}

#[test]
fn portmap_bandwidth_and_tuning_work_in_a_chain() {
    let site = Site::new("c-chain");
    let container = site.container("web");
    let arguments = json!({
        "portMappings": [
            {"hostPort": 8081, "containerPort": PORT, "protocol": "tcp"},
            {"hostPort": 8082, "containerPort": PORT, "protocol": "udp"},
        ],
        "bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 8_000_000, "egressRate": 8_000_000, "egressBurst": 8_000_000},
    });
    let node_address = site.rig.node.address();
    let links = site.rig.node.run("ip", &["-o", "link"]).unwrap().lines().count();
    for cached in [true, false] {
        let node = &site.rig.node;
        let mut runtime = Runtime::new(node, &program("cistern-cni")).unwrap();
        let result = runtime.add(&chain(), &container, &arguments).unwrap();
        let address = address_of(&result);
        runtime.check(&checked(), &container, &arguments).unwrap();
        runtime.status(&chain()).unwrap();
        runtime.gc(&chain(), &[&container]).unwrap();
        runtime.check(&checked(), &container, &arguments).unwrap();

        // tuning
        let pod = site.pod("web");
        assert_eq!(pod.run("cat", &["/proc/sys/net/ipv4/tcp_keepalive_time"]).unwrap(), "77");
        assert_eq!(pod.json("ip", &["-j", "link", "show", "eth0"]).unwrap()[0]["address"], MAC);
        // bandwidth: limits traffic to the pod on the pair, and from it on an ifb.
        let host = result["interfaces"][0]["name"].as_str().unwrap();
        assert!(node.run("tc", &["qdisc", "show", "dev", host]).unwrap().contains("tbf"));
        assert!(node.run("tc", &["qdisc"]).unwrap().matches("tbf").count() == 2);

        // portmap, from outside; the server runs in the pod.
        let server = site.pod("web").command(program("cistern-probe"));
        site.serve(server, address);
        for (protocol, port) in [("tcp", 8081), ("udp", 8082)] {
            let answer = ask(site.outside.command(program("cistern-probe")), protocol, node_address, port);
            assert_eq!(seen(answer), site.outside.address().to_string(), "host port {port}/{protocol}");
            let answer = ask(site.outside.command(program("cistern-probe")), protocol, node_address, PORT);
            assert_eq!(seen(answer), "no answer", "{protocol}: no host port");
            // The pod itself reaches the external host with the node's address, and its own host port.
            let pod = site.pod("web");
            let answer = ask(pod.command(program("cistern-probe")), protocol, OUTSIDE, PORT);
            assert_eq!(seen(answer), node_address.to_string(), "{protocol} to outside");
            let answer = ask(pod.command(program("cistern-probe")), protocol, node_address, port);
            assert_ne!(seen(answer), "no answer", "{protocol}: the pod's own host port");
        }

        if !cached {
            runtime.forget();
        }
        runtime.del(&chain(), &container, &arguments).unwrap();
        // Once more, as if the runtime had lost the result of the first.
        runtime.del(&chain(), &container, &arguments).unwrap();
        site.assert_empty("after DEL");
        let node = &site.rig.node;
        assert!(!node.run("iptables-save", &["-t", "nat"]).unwrap().contains("CNI-DN"));
        if cached {
            assert!(!node.run("tc", &["qdisc"]).unwrap().contains("tbf"));
            assert_eq!(node.run("ip", &["-o", "link"]).unwrap().lines().count(), links);
        }
        std::fs::remove_dir_all(node.file("/run/cni")).unwrap();
    }
}

fn network(name: &str, plugin: &Value) -> Value {
    json!({"cniVersion": "1.0.0", "name": name, "plugins": [plugin]})
}

#[test]
fn bridge_and_ptp_use_us_for_ipam_and_their_pods_are_masqueraded() {
    let mut site = Site::new("c-ipam");
    let bridged = network(
        "bridged",
        &json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": {"type": "cistern-cni"}}),
    );
    // By the other name, and with an MTU that we do not validate.
    let routed = network("routed", &json!({"type": "ptp", "mtu": 500, "ipam": {"type": "cilium-cni"}}));
    let ours = network("cistern", &json!({"type": "cistern-cni"}));
    let none = Value::Null;
    let pods = [("b1", &bridged), ("b2", &bridged), ("p1", &routed), ("o1", &ours)];
    let containers = pods.map(|(name, _)| site.container(name));
    let node_address = site.rig.node.address().to_string();
    let mut addresses = Vec::new();
    for ((name, list), container) in pods.iter().zip(&containers) {
        let mut runtime = Runtime::new(&site.rig.node, &program("cistern-cni")).unwrap();
        let result = runtime.add(list, container, &none).unwrap();
        runtime.check(list, container, &none).unwrap();
        std::fs::remove_dir_all(site.rig.node.file("/run/cni")).unwrap();
        let address = address_of(&result);
        assert_eq!(site.state(name).as_deref(), Some("confirmed"), "{name}");
        let endpoint = site.endpoint(address).unwrap();
        assert_eq!(endpoint["device"] == "-", *name != "o1", "{name}: {endpoint}");
        let server = site.pod(name).command(program("cistern-probe"));
        site.serve(server, address);
        addresses.push(address);
    }
    let [b1, b2, p1, o1] = addresses[..] else { panic!("{addresses:?}") };
    // With proxy_arp, a bridge answers for addresses in its prefix that are not on its ports.
    site.rig.node.run("sysctl", &["-qw", "net.ipv4.conf.cni0.proxy_arp=1"]).unwrap();
    let look = |site: &Site, when: &str| {
        for (from, own, to, seen_as) in [
            ("b1", b1, OUTSIDE, &node_address),
            ("p1", p1, OUTSIDE, &node_address),
            ("o1", o1, OUTSIDE, &node_address),
            ("b1", b1, b2, &b1.to_string()),
            ("p1", p1, b1, &p1.to_string()),
            ("p1", p1, o1, &p1.to_string()),
            ("o1", o1, p1, &o1.to_string()),
            ("b2", b2, o1, &b2.to_string()),
            ("o1", o1, b2, &o1.to_string()),
        ] {
            for protocol in ["tcp", "udp"] {
                let answer = ask(site.pod(from).command(program("cistern-probe")), protocol, to, PORT);
                assert_eq!(seen(answer), *seen_as, "{when}: {protocol} from {from} ({own}) to {to}");
            }
        }
    };
    look(&site, "after ADD");

    // The bridge has the router address with the whole pod CIDR, which must not prevent a restarted agent from serving.
    site.rig.kill_agent();
    site.rig.start_agent(&[]);
    until("readiness after the restart", || site.rig.is_ready());
    look(&site, "after the restart");
    let later = site.container("late");
    let mut runtime = Runtime::new(&site.rig.node, &program("cistern-cni")).unwrap();
    runtime.add(&bridged, &later, &none).unwrap();
    runtime.del(&bridged, &later, &none).unwrap();

    // GC of one network does not affect those of others.
    let mut newer = bridged;
    newer["cniVersion"] = json!("1.1.0");
    // Debian's bridge does not support 1.1.0; a newer one passes its own arguments on to its IPAM plugin.
    let gc = |valid: Value| {
        let mut conf = newer["plugins"][0].clone();
        conf["cniVersion"] = json!("1.1.0");
        conf["name"] = json!("bridged");
        conf["cni.dev/valid-attachments"] = valid;
        for verb in ["STATUS", "GC"] {
            let mut command = site.rig.node.command(program("cistern-cni"));
            command.env("CNI_COMMAND", verb).env("CNI_PATH", "/usr/lib/cni").stdin(Stdio::piped());
            let mut child = command.spawn().unwrap();
            std::io::Write::write_all(&mut child.stdin.take().unwrap(), conf.to_string().as_bytes()).unwrap();
            assert!(child.wait().unwrap().success(), "{verb}");
        }
    };
    gc(json!([{"containerID": "b1", "ifname": "eth0"}]));
    let states = ["b1", "b2", "p1", "o1"].map(|name| site.state(name).is_some());
    assert_eq!(states, [true, false, true, true]);
    assert_eq!(site.endpoint(b2), None, "the kernel programs do not know it any more");
    runtime.forget();
    for ((name, list), container) in [("b1", &network("bridged", &newer["plugins"][0])), ("p1", &routed), ("o1", &ours)]
        .iter()
        .zip([&containers[0], &containers[2], &containers[3]])
    {
        runtime.del(list, container, &none).unwrap();
        runtime.del(list, container, &none).unwrap();
        assert_eq!(site.state(name), None);
    }
    site.assert_empty("after every DEL");
}

#[test]
fn a_pod_on_the_external_network_is_not_masqueraded() {
    let site = Site::new("c-beside");
    let call = |verb: &str, conf: &Value| {
        let mut command = site.rig.node.command(program("cistern-cni"));
        let attachment = [("CNI_CONTAINERID", "m1"), ("CNI_IFNAME", "eth0"), ("CNI_NETNS", "/run/netns/m1")];
        command.env("CNI_COMMAND", verb).env("CNI_PATH", "/usr/lib/cni").envs(attachment);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), conf.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if output.status.success() { Ok(printed) } else { Err(printed) }
    };
    let mut conf = json!({
        "cniVersion": "1.0.0", "name": "beside", "type": "macvlan", "master": "eth0", "ipam": {"type": "cistern-cni"},
    });
    let result = call("ADD", &conf).unwrap();
    assert_eq!(result["interfaces"], Value::Null);
    assert_eq!(call("ADD", &conf).unwrap(), result, "asked again, the same");
    assert_eq!(site.state("m1").as_deref(), Some("confirmed"));
    assert_eq!(site.endpoint(address_of(&result)), None);
    // CHECK compares with the agent's lease.
    conf["prevResult"] = result;
    call("CHECK", &conf).unwrap();
    conf["prevResult"]["ips"][0]["address"] = json!("10.244.9.9/24");
    assert_eq!(call("CHECK", &conf).unwrap_err()["code"], 100);
    for _ in 0..2 {
        call("DEL", &conf).unwrap();
    }
    assert_eq!(call("CHECK", &conf).unwrap_err()["code"], 3);
    site.assert_empty("after DEL");
}
