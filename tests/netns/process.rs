//! The real `cistern agent` as a process on a node of the lab, with the small API server: invalid input and faults.

use cistern_tests::lab::{Lab, Machine};
use cistern_tests::probe::HttpAnswer;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) fn program(name: &str) -> PathBuf {
    let path = std::env::current_exe().unwrap().parent().unwrap().with_file_name(name);
    assert!(path.is_file(), "{} is not there: cargo build --bins", path.display());
    path
}

const KUBECONFIG: &str = "/run/kubeconfig";
const NODE: &str = "/run/node.yaml";
const LISTEN: &str = "127.0.0.1:6443";

/// A node with its own API server, so that each test can stop either.
pub(crate) struct Rig {
    pub(crate) agent: Option<Child>,
    api: Option<Child>,
    pub(crate) node: Machine,
    pub(crate) lab: Lab,
}

impl Drop for Rig {
    fn drop(&mut self) {
        for child in [&mut self.agent, &mut self.api].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "waited for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Runs the plugin for the interface `eth0` of a container whose namespace has its name. CHECK needs the result of ADD.
pub(crate) fn cni(node: &Machine, verb: &str, name: &str, previous: &Value) -> Result<Value, Value> {
    finish(&mut start_cni(&mut node.command(program("cistern-cni")), verb, name, previous))
}

pub(crate) fn start_cni(command: &mut Command, verb: &str, name: &str, previous: &Value) -> Child {
    let mut child = command
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", name), ("CNI_IFNAME", "eth0"), ("CNI_PATH", "/")])
        .env("CNI_NETNS", format!("/run/netns/{name}"))
        .env("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_UID=u-1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "cistern-cni", "prevResult": previous});
    // If it is killed early, it does not read it.
    let _ = child.stdin.take().unwrap().write_all(conf.to_string().as_bytes());
    child
}

/// The plugin's output: the result, or the error object.
fn finish(child: &mut Child) -> Result<Value, Value> {
    let mut printed = String::new();
    child.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    let value = if printed.is_empty() { Value::Null } else { serde_json::from_str(&printed).unwrap() };
    if child.wait().unwrap().success() { Ok(value) } else { Err(value) }
}

impl Rig {
    pub(crate) fn new(prefix: &str) -> Self {
        let lab = Lab::new(prefix).unwrap();
        let node = lab.node("node-a", "172.29.8.20/24".parse().unwrap()).unwrap();
        node.run("ip", &["route", "add", "default", "via", "172.29.8.1"]).unwrap();
        Self { agent: None, api: None, node, lab }
    }

    pub(crate) fn start_api(&mut self) {
        // As kubelet creates it: without a Node there is no CiliumNode.
        self.start_api_with("apiVersion: v1\nkind: Node\nmetadata:\n  name: node-a\n");
    }

    /// With these objects.
    pub(crate) fn start_api_with(&mut self, objects: &str) {
        let mut command = self.node.command(program("cistern-apiserver"));
        command.args(["--listen", LISTEN, "--kubeconfig", KUBECONFIG, "--objects", NODE]);
        std::fs::write(self.node.file(NODE), objects).unwrap();
        self.api = Some(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
        let written = self.node.file(KUBECONFIG);
        until("the kubeconfig", || written.exists());
    }

    pub(crate) fn stop_api(&mut self) {
        let mut api = self.api.take().unwrap();
        api.kill().unwrap();
        api.wait().unwrap();
    }

    /// A kubeconfig for a server that is not running.
    pub(crate) fn write_kubeconfig(&self) {
        let address = LISTEN.parse().unwrap();
        std::fs::write(self.node.file(KUBECONFIG), cistern_tests::apiserver::kubeconfig(address)).unwrap();
    }

    pub(crate) fn command(&self, settings: &[&str]) -> Command {
        let mut command = self.node.command(program("cistern"));
        command.args(["agent", "--leader-election=true", "--node-name", "node-a", "--k8s-kubeconfig-path", KUBECONFIG]);
        if !settings.contains(&"--cluster-pool-ipv4-cidr") {
            command.args(["--cluster-pool-ipv4-cidr", "10.244.0.0/16"]);
        }
        command.args(settings).stdin(Stdio::null());
        command
    }

    pub(crate) fn start_agent(&mut self, settings: &[&str]) {
        let log = std::fs::File::create(self.node.file("/run/agent.log")).unwrap();
        let mut command = self.command(settings);
        self.agent = Some(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
    }

    pub(crate) fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    /// The log of the agent started last.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.node.file("/run/agent.log")).unwrap()
    }

    /// Whether the agent reports a finding of this reason whose subject has this suffix.
    pub(crate) fn finds(&self, reason: &str, subject: &str) -> bool {
        let status = self.status().unwrap();
        let found = status["findings"].as_array().unwrap();
        found.iter().any(|f| f["reason"] == reason && f["subject"].as_str().is_some_and(|s| s.ends_with(subject)))
    }

    /// Rows printed by `cistern ...`.
    pub(crate) fn rows(&self, arguments: &[&str]) -> Vec<Value> {
        let arguments = [arguments, &["-o", "json"]].concat();
        let rows = self.node.json(program("cistern").to_str().unwrap(), &arguments).unwrap();
        rows.as_array().unwrap().clone()
    }

    /// Runs an agent that must terminate with an error.
    pub(crate) fn refused(&self, settings: &[&str]) -> (i32, String) {
        let mut child = self.command(settings).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                panic!("the agent started with {settings:?}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        (status.code().unwrap(), String::from_utf8(stderr).unwrap())
    }

    pub(crate) fn status(&self) -> Option<Value> {
        let output = self
            .node
            .command(program("cistern"))
            .args(["status", "-o", "json"])
            .stderr(Stdio::null())
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Status and body of a page of the agent's TCP servers.
    fn http(&self, port: u16, path: &str) -> Option<HttpAnswer> {
        let to = format!("127.0.0.1:{port}");
        let program = program("cistern-probe");
        let answer = self.node.run(program.to_str().unwrap(), &["ask-http", &to, path]).ok()?;
        Some(serde_json::from_str(&answer).unwrap())
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.status().is_some_and(|status| status["health"]["ready"] == json!(true))
    }

    pub(crate) fn wait(&self, name: &str) -> Option<String> {
        let status = self.status()?;
        let waits = status["waits"].as_array()?.clone();
        let wait = waits.into_iter().find(|wait| wait["name"] == name)?;
        Some(wait["reason"].as_str()?.to_owned())
    }

    pub(crate) fn cni(&self, verb: &str, name: &str) -> Result<Value, Value> {
        cni(&self.node, verb, name, &Value::Null)
    }

    /// Whether the agent has a confirmed address for a container.
    pub(crate) fn holds(&self, name: &str) -> bool {
        self.rows(&["ip", "list"]).iter().any(|row| row["container_id"] == name && row["state"] == "confirmed")
    }

    pub(crate) fn add(&self, name: &str) -> Result<Value, Value> {
        self.node.pod(name).unwrap();
        self.cni("ADD", name)
    }
}

#[test]
fn invalid_settings_exit_with_64_and_name_the_remedy() {
    let rig = Rig::new("p-settings");
    rig.write_kubeconfig();
    for (settings, words) in [
        (&["--cluster-pool-ipv4-cidr", "10.244/16"][..], &["cluster-pool-ipv4-cidr", "10.244/16"][..]),
        (
            &["--cluster-pool-ipv4-cidr", "10.244.0.0/16", "--service-cidr", "10.244.96.0/20"],
            &["10.244.96.0/20", "service-cidr"],
        ),
        (&["--cluster-pool-ipv4-mask-size", "31"], &["mask", "31"]),
        (&["--ipam", "clusterpool"], &["ipam", "clusterpool"]),
    ] {
        let (code, text) = rig.refused(settings);
        assert_eq!(code, 64, "{settings:?}: {text}");
        for word in words {
            assert!(text.contains(word), "{settings:?}: {text} lacks {word}");
        }
    }
    std::fs::create_dir_all(rig.node.file("/run/config")).unwrap();
    std::fs::write(rig.node.file("/run/config/enable-ipv4-masqurade"), "true").unwrap();
    let (code, text) = rig.refused(&["--config-dir", "/run/config", "--strict-config"]);
    assert_eq!(code, 64);
    assert!(text.contains("enable-ipv4-masqurade") && text.contains("enable-ipv4-masquerade"), "{text}");
}

#[test]
fn without_bpffs_the_agent_reports_how_to_mount_it() {
    let rig = Rig::new("p-bpffs");
    rig.write_kubeconfig();
    rig.node.run("umount", &["/sys/fs/bpf"]).unwrap();
    let (code, text) = rig.refused(&[]);
    assert_ne!(code, 0);
    assert!(text.contains("/sys/fs/bpf") && text.contains("mount"), "{text}");
}

#[test]
fn with_the_api_server_down_the_agent_reports_the_wait_and_serves_afterwards() {
    let mut rig = Rig::new("p-api-start");
    rig.write_kubeconfig();
    rig.start_agent(&[]);
    until("the wait to be reported", || rig.wait("watch ciliumnodes").is_some());
    let reason = rig.wait("watch ciliumnodes").unwrap();
    assert!(reason.contains("refused"), "{reason}");
    let error = rig.add("early").unwrap_err();
    assert_eq!(error["code"], 11, "{error}");
    assert!(error["msg"].as_str().unwrap().contains("pod CIDR"), "{error}");
    rig.start_api();
    until("readiness", || rig.is_ready());
    rig.cni("ADD", "early").unwrap();
}

#[test]
fn sigterm_ends_an_agent_also_while_it_waits_for_the_state_directory() {
    let mut rig = Rig::new("p-sigterm");
    rig.write_kubeconfig();
    rig.start_agent(&[]);
    until("the wait to be reported", || rig.wait("watch ciliumnodes").is_some());
    let log = rig.node.file("/run/second.log");
    let mut command = rig.command(&[]);
    command.stdout(Stdio::null()).stderr(std::fs::File::create(&log).unwrap());
    let mut second = command.spawn().unwrap();
    until("the lock to be waited for", || {
        std::fs::read_to_string(&log).unwrap().contains("waiting for another agent on this node")
    });
    for agent in [&mut second, rig.agent.as_mut().unwrap()] {
        assert!(agent.try_wait().unwrap().is_none(), "each agent runs until its own signal");
        let pid = agent.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let deadline = Instant::now() + Duration::from_secs(20);
        let status = loop {
            if let Some(status) = agent.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                agent.kill().unwrap();
                agent.wait().unwrap();
                panic!("SIGTERM does not end the agent");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(status.success(), "{status}");
    }
}

#[test]
fn a_waiting_node_is_alive_for_kubelet_and_not_ready() {
    let mut rig = Rig::new("p-probes");
    rig.write_kubeconfig();
    rig.start_agent(&["--agent-health-port", "9880"]);
    until("an answer", || rig.http(9880, "/healthz").is_some());
    assert_eq!(rig.http(9880, "/healthz").unwrap().status, 200);
    let answer = rig.http(9880, "/readyz").unwrap();
    assert_eq!(answer.status, 503);
    assert!(answer.body.contains("pod CIDR"), "{}", answer.body);
    rig.start_api();
    until("readiness", || rig.http(9880, "/readyz").is_some_and(|answer| answer.status == 200));
    assert!(rig.is_ready());
    // Metrics are off by default.
    assert_eq!(rig.http(9880, "/metrics").unwrap().status, 404);
}

/// Parses a page of metrics as strictly as Prometheus does: each sample belongs to the family whose type was declared
/// before it, and no series occurs twice.
fn samples(page: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut family = (String::new(), String::new());
    let mut seen = std::collections::BTreeSet::new();
    for line in page.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(["gauge", "counter", "histogram"].contains(&kind), "{line}");
            assert!(seen.insert(name.to_owned()), "declared twice: {line}");
            family = (name.to_owned(), kind.to_owned());
        } else if !line.starts_with("# HELP ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let base = match family.1.as_str() {
                "histogram" => {
                    ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
                }
                _ => name,
            };
            assert_eq!(base, family.0, "{line}");
            assert!(samples.insert(series.to_owned(), value.parse().unwrap()).is_none(), "occurs twice: {line}");
        }
    }
    samples
}

#[test]
fn metrics_move_with_the_pods() {
    let mut rig = Rig::new("p-metrics");
    rig.start_api();
    rig.start_agent(&["--prometheus-serve-addr", ":9962", "--cluster-pool-ipv4-mask-size", "29"]);
    until("readiness", || rig.is_ready());
    let scrape = || samples(&rig.http(9962, "/metrics").unwrap().body);
    let before = scrape();
    assert_eq!(before["cistern_leases{state=\"confirmed\"}"], 0.0);
    assert_eq!(before["cistern_ready"], 1.0);
    assert_eq!(before["cistern_leader"], 1.0);
    assert_eq!(before["cistern_target_synced{target=\"routes\"}"], 1.0);
    assert!(before.keys().any(|series| series.starts_with("cistern_datapath_packets_total{")));
    assert!(before.keys().any(|series| series.starts_with("cistern_kubernetes_calls_total{verb=\"create\"")));
    let free = |samples: &BTreeMap<String, f64>| {
        *samples.iter().find(|(series, _)| series.ends_with(",state=\"free\"}")).unwrap().1
    };
    for number in 0..5 {
        rig.add(&format!("p{number}")).unwrap();
    }
    rig.add("p5").unwrap_err();
    let after = scrape();
    let calls = |verb: &str, result: &str| {
        format!("cistern_cni_request_duration_seconds_count{{verb=\"{verb}\",result=\"{result}\"}}")
    };
    assert_eq!(after["cistern_leases{state=\"confirmed\"}"], 5.0);
    assert_eq!((free(&before), free(&after)), (5.0, 0.0));
    assert_eq!(after[&calls("add", "ok")], 5.0);
    assert!(after[&calls("add", "pool-exhausted")] >= 1.0);
    assert_eq!(after["cistern_cni_add_duration_seconds_count"], 5.0);
    rig.cni("DEL", "p0").unwrap();
    let last = scrape();
    assert_eq!(last["cistern_leases{state=\"confirmed\"}"], 4.0);
    assert!(last[&calls("del", "ok")] >= 1.0);
}

#[test]
fn pods_are_served_while_the_api_server_is_down_even_across_a_restart() {
    let mut rig = Rig::new("p-api-later");
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    let before = rig.add("one").unwrap();
    // State for a restart is on disk half a second after it was received.
    until("the pool on disk", || rig.node.file("/var/lib/cistern/node.json").exists());
    rig.stop_api();
    rig.add("two").unwrap();
    rig.kill_agent();
    rig.start_agent(&[]);
    until("readiness without API server", || rig.is_ready());
    rig.add("three").unwrap();
    // The lease is the same one.
    let again = rig.cni("ADD", "one").unwrap();
    assert_eq!(again["ips"], before["ips"]);
    assert!(rig.holds("one"));
    for name in ["one", "two", "three"] {
        rig.cni("DEL", name).unwrap();
    }
}

#[test]
fn an_exhausted_pool_is_reported_with_its_counts_and_serves_again_after_a_del() {
    let mut rig = Rig::new("p-full");
    rig.start_api();
    rig.start_agent(&["--cluster-pool-ipv4-mask-size", "29"]);
    until("readiness", || rig.is_ready());
    // Eight addresses, of which network, broadcast and router are reserved.
    for number in 0..5 {
        rig.add(&format!("p{number}")).unwrap();
    }
    let error = rig.add("p5").unwrap_err();
    assert_eq!(error["code"], 11, "{error}");
    let message = error["msg"].as_str().unwrap();
    assert!(message.contains("/29") && message.contains("5 in use"), "{message}");
    rig.cni("DEL", "p0").unwrap();
    rig.cni("ADD", "p5").unwrap();
}

#[test]
fn a_device_without_address_makes_the_node_not_ready_and_traffic_passes() {
    let mut rig = Rig::new("p-address");
    rig.start_api();
    rig.start_agent(&["--devices", "eth0"]);
    until("readiness", || rig.is_ready());
    rig.node.run("ip", &["address", "flush", "dev", "eth0"]).unwrap();
    until("the device without address", || {
        rig.status().is_some_and(|status| status["masquerade"]["devices"][0]["address"] == Value::Null)
    });
    let status = rig.status().unwrap();
    assert_eq!(status["health"]["ready"], json!(false), "{}", status["health"]);
    assert!(status["health"]["reasons"].to_string().contains("eth0"), "{}", status["health"]);
    rig.node.run("ip", &["address", "add", "172.29.8.20/24", "dev", "eth0"]).unwrap();
    until("readiness again", || rig.is_ready());
}

#[test]
fn without_a_device_the_node_is_not_ready_and_reports_the_reason() {
    let mut rig = Rig::new("p-device");
    rig.start_api();
    rig.start_agent(&["--devices", "wlan+"]);
    until("the reason", || {
        rig.status().is_some_and(|status| status["health"]["reasons"].to_string().contains("wlan+"))
    });
    assert!(!rig.is_ready());
}

#[test]
fn a_damaged_lease_is_set_aside_and_other_pods_continue() {
    let mut rig = Rig::new("p-damaged");
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    rig.add("good").unwrap();
    rig.kill_agent();
    let leases = rig.node.file("/var/lib/cistern/leases");
    std::fs::write(leases.join("pod-000000000000000000000000.json"), "{\"format\":").unwrap();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    assert!(rig.holds("good"));
    assert!(leases.join("pod-000000000000000000000000.json.unreadable-1").exists());
}

fn names(node: &Machine, path: &str) -> Vec<String> {
    let entries = std::fs::read_dir(node.file(path)).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Runs a command of the program: whether it succeeded, and its output.
fn cistern(node: &Machine, arguments: &[&str]) -> (bool, String) {
    let Output { status, stdout, stderr } = node.command(program("cistern")).args(arguments).output().unwrap();
    (status.success(), String::from_utf8(stdout).unwrap() + &String::from_utf8(stderr).unwrap())
}

// Forwarding, bpffs and the plugin first; the configuration once the node serves; and everything removed on request.
#[test]
fn a_node_is_prepared_configured_and_cleaned_again() {
    const NONE: [&str; 0] = [];
    let mut rig = Rig::new("p-uninstall");
    rig.node.run("umount", &["/sys/fs/bpf"]).unwrap();
    // Read inside: the file shows the reader's network namespace.
    let forwarding = "/proc/sys/net/ipv4/ip_forward";
    rig.node.run("sh", &["-c", &format!("echo 0 >{forwarding}")]).unwrap();
    for _ in 0..2 {
        let (good, text) = cistern(&rig.node, &["install", "--cni-bin-path", "/run/cni/bin"]);
        assert!(good, "{text}");
    }
    assert_eq!(rig.node.run("stat", &["-f", "-c", "%T", "/sys/fs/bpf"]).unwrap().trim(), "bpf_fs");
    assert_eq!(rig.node.run("cat", &[forwarding]).unwrap().trim(), "1");
    assert_eq!(names(&rig.node, "/run/cni/bin"), ["cilium-cni", "cistern-cni"]);

    std::fs::create_dir_all(rig.node.file("/run/cni/net.d")).unwrap();
    std::fs::write(rig.node.file("/run/cni/net.d/10-other.conflist"), "{}").unwrap();
    rig.write_kubeconfig();
    rig.start_agent(&[
        "--write-cni-conf-when-ready",
        "/run/cni/net.d/05-cistern.conflist",
        "--cni-exclusive=true",
        "--cni-bin-path",
        "/run/cni/bin",
    ]);
    until("the wait for the API server", || rig.wait("watch ciliumnodes").is_some());
    // A node that cannot serve must not be offered pods.
    assert_eq!(names(&rig.node, "/run/cni/net.d"), ["10-other.conflist"]);
    rig.start_api();
    until("the configuration, and the other one's set aside", || {
        names(&rig.node, "/run/cni/net.d") == ["05-cistern.conflist", "10-other.conflist.cistern_bak"]
    });
    assert!(rig.is_ready());
    rig.add("stays").unwrap();

    let ask = ["uninstall", "--k8s-kubeconfig-path", KUBECONFIG, "--timeout", "30s"];
    let (good, text) = cistern(&rig.node, &ask);
    assert!(good && text.contains("node-a: clean"), "{text}");
    assert_eq!(names(&rig.node, "/run/cni/net.d"), ["10-other.conflist"]);
    for empty in ["/run/cni/bin", "/run/cistern"] {
        assert_eq!(names(&rig.node, empty), NONE, "{empty}");
    }
    assert!(!rig.node.file("/sys/fs/bpf/cistern").exists());
    // Leases of running pods are kept: a new installation must not reallocate their addresses.
    assert_eq!(names(&rig.node, "/var/lib/cistern"), ["leases"]);
    assert_eq!(rig.node.run("ip", &["-4", "-o", "address", "show", "dev", "lo"]).unwrap().lines().count(), 1);
    // And the node still reaches them.
    let routes = rig.node.run("ip", &["route", "show", "table", "main"]).unwrap();
    assert!(!routes.contains("unreachable") && routes.contains("dev cst"), "{routes}");
    let kubectl = ["--kubeconfig", KUBECONFIG, "--namespace", "kube-system", "get", "leases,configmaps", "-o", "name"];
    assert_eq!(rig.node.run("kubectl", &kubectl).unwrap().trim(), "");

    // A repeated request is answered by the idle agent; one without an agent is reported.
    let (good, text) = cistern(&rig.node, &ask);
    assert!(good && text.contains("node-a: clean"), "{text}");
    assert!(rig.agent.as_mut().unwrap().try_wait().unwrap().is_none(), "the agent has ended");
    rig.kill_agent();
    let ask = ["uninstall", "--k8s-kubeconfig-path", KUBECONFIG, "--timeout", "1s"];
    let (good, text) = cistern(&rig.node, &ask);
    assert!(!good && text.contains("node-a (no answer within 1 s)"), "{text}");
    let (good, text) = cistern(&rig.node, &[&ask[..], &["--ignore-unanswered"]].concat());
    assert!(good, "{text}");
}
