//! The real `cistern agent` killed and restarted under real traffic: crash loops, changed settings, maps of another
//! version, a replaced device, a reboot.

use crate::process::{Rig, program, until};
use cistern_tests::lab::{Machine, Pod};
use cistern_tests::probe::{Answer, StreamReport};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::BufRead;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// In no private or reserved range.
const OUTSIDE: &str = "45.33.7.80";
const SERVER: &str = "45.33.7.80:8080";
const NODE: IpAddr = IpAddr::V4(Ipv4Addr::new(172, 29, 8, 20));

/// A rig with an external host, which is the node's default gateway and has the address [`OUTSIDE`].
struct Site {
    rig: Rig,
    _outside: Machine,
    server: Child,
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Site {
    fn new(prefix: &str) -> Self {
        let mut rig = Rig::new(prefix);
        let outside = rig.lab.host("outside", "172.29.8.1/24".parse().unwrap()).unwrap();
        outside.run("ip", &["address", "add", &format!("{OUTSIDE}/32"), "dev", "lo"]).unwrap();
        outside.run("ip", &["route", "add", "10.244.0.0/16", "via", &NODE.to_string(), "src", OUTSIDE]).unwrap();
        let mut command = outside.command(program("cistern-probe"));
        command.args(["serve", SERVER]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = command.spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready"), "{line}");
        rig.start_api();
        Self { rig, _outside: outside, server }
    }

    fn start(&mut self, settings: &[&str]) {
        self.rig.start_agent(settings);
        until("readiness", || self.rig.is_ready());
    }

    /// Kills the agent and starts one with other settings.
    fn restart(&mut self, settings: &[&str]) {
        self.rig.kill_agent();
        self.start(settings);
    }

    fn pod(&self, name: &str) -> Pod<'_> {
        self.rig.node.existing_pod(name)
    }

    /// The client address of a pod's connection as seen by the external host.
    fn seen_as(&self, pod: &str) -> IpAddr {
        let program = program("cistern-probe");
        let text = self.pod(pod).run(program.to_str().unwrap(), &["ask-tcp", SERVER]).unwrap();
        serde_json::from_str::<Answer>(&text).unwrap().seen_as.ip()
    }

    fn stream(&self, pod: &str, what: &str) -> Stream {
        let mut command: Command = self.pod(pod).command(program("cistern-probe"));
        command.args([what, SERVER]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Stream(command.spawn().unwrap())
    }

    /// A TCP stream with an established connection.
    fn open_flow(&self, pod: &str) -> Stream {
        let stream = self.stream(pod, "stream-tcp");
        until("the flow to be open", || {
            self.pod(pod).run("ss", &["-Htn", "state", "established"]).unwrap().contains(SERVER)
        });
        stream
    }
}

/// A stream from a pod to the external host.
struct Stream(Child);

impl Stream {
    /// Stops it; nothing must be lost.
    fn count_whole(mut self) -> u64 {
        drop(self.0.stdin.take());
        let output = self.0.wait_with_output().unwrap();
        let report: StreamReport = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((report.lost(), &report.error), (0, &None), "{report:?}");
        report.sent
    }
}

fn address(result: &Value) -> IpAddr {
    result["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32").parse().unwrap()
}

/// Addresses on the pods' interfaces, independent of the agent's state.
fn on_the_interface(rig: &Rig, name: &str) -> Option<IpAddr> {
    let links = rig.node.existing_pod(name).json("ip", &["-j", "-4", "address", "show", "dev", "eth0"]).ok()?;
    links[0]["addr_info"][0]["local"].as_str()?.parse().ok()
}

#[test]
fn a_repeatedly_killed_agent_loses_and_duplicates_nothing() {
    let mut site = Site::new("r-storm");
    site.start(&["--cluster-pool-ipv4-mask-size", "26"]);
    let steady = address(&site.rig.add("steady").unwrap());
    let (tcp, udp) = (site.stream("steady", "stream-tcp"), site.stream("steady", "stream-udp"));
    for number in 0..8 {
        site.rig.node.pod(&format!("p{number}")).unwrap();
    }
    // The last answer to ADD for each pod, until its DEL starts.
    let mut answered: BTreeMap<String, IpAddr> = BTreeMap::from([("steady".to_owned(), steady)]);
    let end = Instant::now() + Duration::from_secs(10);
    let (mut turn, mut added, mut failed, mut kills) = (0_u32, 0, 0, 0);
    let mut killed = Instant::now();
    // A slow machine gets the time that it needs for as many kills and ADDs.
    while Instant::now() < end || ((kills < 4 || added < 4) && Instant::now() < end + Duration::from_secs(60)) {
        let name = format!("p{}", turn % 8);
        turn += 1;
        if answered.contains_key(&name) {
            answered.remove(&name);
            match site.rig.cni("DEL", &name) {
                Ok(_) => {}
                // Requested again below.
                Err(error) => assert_eq!(error["code"], 11, "{error}"),
            }
        } else {
            match site.rig.cni("ADD", &name) {
                Ok(result) => {
                    let given = address(&result);
                    let holder = answered.iter().find(|(_, held)| **held == given);
                    assert_eq!(holder, None, "{given} for {name}");
                    answered.insert(name.clone(), given);
                    added += 1;
                }
                Err(error) => {
                    assert_eq!(error["code"], 11, "{error}");
                    failed += 1;
                }
            }
        }
        // Sometimes before it serves, sometimes during a call, sometimes after some.
        if killed.elapsed() > Duration::from_millis(200 + u64::from(turn % 5) * 200) {
            site.rig.kill_agent();
            kills += 1;
            site.rig.start_agent(&["--cluster-pool-ipv4-mask-size", "26"]);
            killed = Instant::now();
        }
    }
    assert!(added > 3 && kills > 3, "{added} ADDs came through, {failed} did not, {kills} kills");
    until("readiness after the storm", || site.rig.is_ready());
    for (name, given) in &answered {
        assert_eq!(on_the_interface(&site.rig, name), Some(*given), "{name}");
        until("every pod with an answered ADD to have its address", || site.rig.holds(name));
        assert_eq!(site.seen_as(name), NODE, "{name}");
    }
    assert!(tcp.count_whole() > 100 && udp.count_whole() > 1_000);
    for number in 0..8 {
        site.rig.cni("DEL", &format!("p{number}")).unwrap();
    }
    until("no lease but that of the steady pod", || {
        let rows = site.rig.rows(&["ip", "list"]);
        let held = rows.iter().filter(|row| row["state"] == "confirmed" || row["state"] == "provisional");
        held.map(|row| row["container_id"].as_str().unwrap()).collect::<Vec<_>>() == ["steady"]
    });
    let links = site.rig.node.json("ip", &["-j", "link", "show", "type", "veth"]).unwrap();
    let ours = links.as_array().unwrap().iter().filter(|link| link["ifname"].as_str().unwrap().starts_with("cst"));
    assert_eq!(ours.count(), 1, "{links}");
    until("no pod but the steady one in the datapath", || site.rig.rows(&["bpf", "endpoint", "list"]).len() == 1);
}

#[test]
fn settings_changed_while_the_agent_was_down_are_in_force_or_explained_with_the_api_down() {
    let mut site = Site::new("r-settings");
    site.start(&["--enable-ipv4-masquerade=false"]);
    let pod = address(&site.rig.add("a").unwrap());
    assert_eq!(site.seen_as("a"), pod, "nothing masquerades");
    until("the pool on disk", || site.rig.node.file("/var/lib/cistern/node.json").exists());
    site.rig.stop_api();
    // A flow that is open when masquerading is enabled keeps the pod's address, and loses nothing.
    let open = site.open_flow("a");
    site.restart(&[]);
    assert_eq!(site.seen_as("a"), NODE, "masquerading is on");
    assert!(open.count_whole() > 0);

    site.restart(&["--ipv4-native-routing-cidr", "45.33.0.0/16"]);
    until("the native CIDR to be in force", || site.seen_as("a") == pod);
    site.restart(&[]);
    until("the native CIDR to be gone", || site.seen_as("a") == NODE);

    // An unsupported mode is rejected, and the error says what continues.
    site.rig.kill_agent();
    let (code, text) = site.rig.refused(&["--ipam", "crd"]);
    assert!(code == 64 && text.contains("cluster-pool"), "{code}: {text}");
    assert_eq!(site.seen_as("a"), NODE, "pods continue");

    // Other ranges: the node keeps its pod CIDR, and reports it.
    site.start(&["--cluster-pool-ipv4-cidr", "10.99.0.0/16"]);
    assert!(site.rig.finds("pod-cidr-not-configured", "/24"), "{:?}", site.rig.status());
    let text = site.rig.node.run(program("cistern").to_str().unwrap(), &["status"]).unwrap();
    assert!(text.contains("cluster-pool-ipv4-cidr is 10.99.0.0/16, and this node still serves 10.244."), "{text}");
    let other = address(&site.rig.add("b").unwrap());
    assert!(other.to_string().starts_with("10.244.") && other != pod, "{other}");
    assert_eq!(site.rig.cni("ADD", "a").map(|result| address(&result)).unwrap(), pod);

    // Other capacities of maps: existing maps are kept, with their flows.
    let open = site.open_flow("a");
    site.restart(&["--bpf-nat-global-max", "131072"]);
    assert!(site.rig.finds("map-capacity-kept", "cst_rev"), "{:?}", site.rig.status());
    assert_eq!(site.seen_as("a"), NODE);
    assert!(open.count_whole() > 0);

    site.restart(&["--enable-ipv4-masquerade=false"]);
    assert_eq!(site.seen_as("a"), pod, "masquerading is off");
    assert!(!site.rig.node.file("/sys/fs/bpf/cistern").exists());
}

#[test]
fn a_map_of_another_layout_is_refused_with_the_remedy_and_packets_are_served_as_before() {
    let mut site = Site::new("r-layout");
    site.start(&[]);
    let pod = address(&site.rig.add("a").unwrap());
    let open = site.stream("a", "stream-tcp");
    let pin = "/sys/fs/bpf/cistern/maps/cst_endpoints";
    site.rig.kill_agent();
    std::fs::remove_file(site.rig.node.file(pin)).unwrap();
    let other = ["map", "create", pin, "type", "hash", "key", "4", "value", "16", "entries", "8", "name", "other"];
    site.rig.node.run("bpftool", &other).unwrap();
    let (code, text) = site.rig.refused(&[]);
    assert_eq!(code, 1, "{text}");
    for words in [pin, "value size 16", "the previous datapath continues"] {
        assert!(text.contains(words), "{text} lacks {words}");
    }
    assert!(site.rig.node.file(pin).exists(), "nothing of it was touched");
    assert_eq!(site.seen_as("a"), NODE, "{pod} is translated by the programs of before");
    assert!(open.count_whole() > 0);
    // The remedy: without the pins everything is recreated.
    site.rig.node.run("rm", &["-r", "/sys/fs/bpf/cistern"]).unwrap();
    site.start(&[]);
    until("the pod in the new datapath", || site.seen_as("a") == NODE);
}

#[test]
fn an_eth0_that_is_replaced_under_a_running_agent_gets_the_programs_again() {
    let mut site = Site::new("r-eth0");
    site.start(&[]);
    site.rig.add("a").unwrap();
    assert_eq!(site.seen_as("a"), NODE);
    for _ in 0..2 {
        site.rig.lab.replace_eth0(&site.rig.node).unwrap();
        site.rig.node.run("ip", &["route", "add", "default", "via", "172.29.8.1"]).unwrap();
        let index = || {
            let link = site.rig.node.json("ip", &["-j", "link", "show", "dev", "eth0"]).unwrap();
            link[0]["ifindex"].clone()
        };
        until("the programs on the new device", || {
            let status = site.rig.status().unwrap();
            status["masquerade"]["devices"][0]["ifindex"] == index() && site.rig.is_ready()
        });
        until("a flow under the node's address", || site.seen_as("a") == NODE);
    }
}

#[test]
fn after_a_reboot_leases_without_namespace_are_released_and_queued_dels_are_executed() {
    let mut site = Site::new("r-boot");
    site.start(&["--cluster-pool-ipv4-mask-size", "29"]);
    for name in ["a", "b", "c", "d"] {
        site.rig.add(name).unwrap();
    }
    until("the pool on disk", || site.rig.node.file("/var/lib/cistern/node.json").exists());
    let cidr = site.rig.status().unwrap()["pod_cidr"].clone();
    site.rig.kill_agent();
    // A DEL without an agent is queued on disk, also across the reboot.
    site.rig.cni("DEL", "a").unwrap();
    let queue = site.rig.node.file("/var/lib/cistern/cni-queue");
    let waiting = || {
        let names = std::fs::read_dir(&queue).unwrap().map(|entry| entry.unwrap().path());
        names.filter(|path| path.extension().is_some_and(|extension| extension == "json")).count()
    };
    assert_eq!(waiting(), 1);
    // Effects of a reboot: the kernel's objects and everything below /run are lost.
    for name in ["a", "b", "c", "d"] {
        site.rig.node.run("ip", &["netns", "delete", name]).unwrap();
    }
    let shell = "rm -rf /run/cistern /sys/fs/bpf/cistern; ip address flush dev lo scope link";
    site.rig.node.run("sh", &["-c", shell]).unwrap();
    site.start(&["--cluster-pool-ipv4-mask-size", "29"]);
    assert_eq!(site.rig.status().unwrap()["pod_cidr"], cidr);
    assert!(site.rig.log().contains("did not survive the reboot"), "{}", site.rig.log());
    for name in ["a", "b", "c", "d"] {
        assert!(!site.rig.holds(name), "{name}");
    }
    until("the queued DEL to be executed", || waiting() == 0);
    let given: Vec<IpAddr> = ["e", "f", "g", "h", "i"].map(|name| address(&site.rig.add(name).unwrap())).to_vec();
    assert_eq!(given.len(), 5, "all addresses are allocated again");
    assert_eq!(site.seen_as("e"), NODE);
    // The next start is not the first one after the reboot.
    site.restart(&["--cluster-pool-ipv4-mask-size", "29"]);
    assert!(!site.rig.log().contains("did not survive the reboot") && site.rig.holds("e"));
}

/// Loses every state file of the node: they are gone, or of a format that no build of today understands.
fn lose_state(node: &Machine, as_another_format: bool) {
    let directory = node.file("/var/lib/cistern");
    let mut files: Vec<_> =
        std::fs::read_dir(directory.join("leases")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.push(directory.join("node.json"));
    for file in files.into_iter().filter(|file| file.extension().is_some_and(|extension| extension == "json")) {
        if as_another_format {
            std::fs::write(file, r#"{"format":900,"oldest_reader":900,"kind":"pod"}"#).unwrap();
        } else {
            let _ = std::fs::remove_file(file);
        }
    }
}

#[test]
fn lost_state_costs_no_pod_its_network_with_the_api_server_away_or_there() {
    let mut site = Site::new("r-lost");
    site.start(&["--cluster-pool-ipv4-mask-size", "26"]);
    let pod = address(&site.rig.add("a").unwrap());
    until("the state on disk", || site.rig.node.file("/var/lib/cistern/node.json").exists());
    let router =
        |rig: &Rig| rig.node.json("ip", &["-j", "-4", "address", "show", "dev", "lo", "scope", "link"]).unwrap();
    let address_of_router = router(&site.rig);
    assert!(address_of_router.to_string().contains("10.244."), "{address_of_router}");
    for as_another_format in [false, true] {
        let (tcp, open) = (site.stream("a", "stream-tcp"), site.open_flow("a"));
        site.rig.kill_agent();
        lose_state(&site.rig.node, as_another_format);
        site.rig.stop_api();
        site.rig.start_agent(&["--cluster-pool-ipv4-mask-size", "26"]);
        until("the agent to answer, with the pod in the datapath", || {
            let rows = site.rig.status().map(|_| site.rig.rows(&["bpf", "endpoint", "list"])).unwrap_or_default();
            rows.iter().any(|row| row.to_string().contains(&pod.to_string()))
        });
        assert_eq!(router(&site.rig), address_of_router, "with the API server away");
        assert_eq!(site.seen_as("a"), NODE);
        site.rig.start_api();
        until("readiness", || site.rig.is_ready());
        assert_eq!(router(&site.rig), address_of_router, "with the API server there");
        assert_eq!(site.seen_as("a"), NODE);
        until("the pod's address to be held", || {
            site.rig.rows(&["ip", "list"]).iter().any(|row| row["address"] == pod.to_string().as_str())
        });
        let other = address(&site.rig.add(&format!("b-{as_another_format}")).unwrap());
        assert_ne!(other, pod);
        assert_eq!(site.seen_as(&format!("b-{as_another_format}")), NODE);
        assert_eq!(on_the_interface(&site.rig, "a"), Some(pod));
        assert!(tcp.count_whole() > 0 && open.count_whole() > 0, "nothing of the pod's flows is lost");
    }
}
