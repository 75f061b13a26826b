//! The steps of the demo and their checks.

use super::cluster::{Cluster, OUTSIDE, PORT, PREFIX, PodAddress, ask, leftovers, wait_for};
use crate::lab::Lab;
use crate::probe::StreamReport;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Options of the demo.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Leave everything running.
    pub keep: bool,
}

/// Stops what an earlier `--keep`, or a killed run, left behind.
///
/// # Errors
/// A process does not terminate.
pub fn clean() -> Result<()> {
    let ended = Lab::remove_left(PREFIX)?;
    println!("{ended} processes ended");
    Ok(())
}

/// Prints the checks and counts failures.
struct Checks {
    failed: u32,
}

impl Checks {
    /// Reports one check: a line with the observation, or the failure.
    fn report(&mut self, item: &str, seen: Result<String>) {
        match seen {
            Ok(seen) => println!("  ok    {item:<34} {seen}"),
            Err(error) => {
                self.failed += 1;
                println!("  FAIL  {item:<34} {error:#}");
            }
        }
    }
}

/// Runs all steps. Returns whether all checks passed.
///
/// # Errors
/// The machines cannot be started.
pub fn run(options: Options) -> Result<bool> {
    let begun = Instant::now();
    let mut checks = Checks { failed: 0 };
    let ended = Lab::remove_left(PREFIX)?;
    if ended > 0 {
        println!("killed {ended} processes of an earlier run");
    }
    let mut cluster = Cluster::start(options.keep).context("two nodes, an external host and an API server")?;
    println!("node-a 172.29.8.20, node-b 172.29.8.21, an external host {OUTSIDE}, an API server\n");
    let mut traces = None;
    match pods(&mut cluster, &mut checks) {
        Ok(pods) => {
            traces = Some(cluster.traces(&pods));
            traffic(&cluster, &pods, &mut checks);
            let seen = survive(&mut cluster, &pods);
            checks.report("agent killed and restarted", seen);
            explain(&cluster, &pods, &mut checks);
            if !options.keep {
                let seen = remove(&mut cluster, &pods);
                checks.report("DEL of every pod", seen);
            }
        }
        Err(error) => checks.report("agents and pods", Err(error)),
    }
    if options.keep {
        println!("\n{}", cluster.tour());
    }
    drop(cluster);
    if let Some(traces) = traces.filter(|_| !options.keep) {
        checks.report("clean machine", traces.and_then(|traces| traces.wait_until_gone()));
    }
    let seconds = begun.elapsed().as_secs_f64();
    match checks.failed {
        0 => println!("\nAll checks passed in {seconds:.0} s."),
        failed => println!("\n{failed} checks FAILED in {seconds:.0} s."),
    }
    Ok(checks.failed == 0)
}

/// Starts the agents and two pods on each node.
fn pods(cluster: &mut Cluster, checks: &mut Checks) -> Result<Vec<PodAddress>> {
    for index in 0..cluster.nodes.len() {
        cluster.start_agent(index)?;
    }
    let mut leaders = Vec::new();
    for index in 0..cluster.nodes.len() {
        let status = cluster.ready(index)?;
        let name = text(&status, "/node");
        let seen = format!("{} router {}", text(&status, "/pod_cidr"), text(&status, "/router"));
        checks.report(&format!("pod CIDR of {name}"), Ok(seen));
        if status.pointer("/leader_election/leading") == Some(&Value::Bool(true)) {
            leaders.push(name);
        }
    }
    let one = match leaders.as_slice() {
        [leader] => Ok(format!("{leader} was elected, and assigned both nodes a pod CIDR")),
        others => Err(anyhow::anyhow!("leaders: {others:?}; expected one")),
    };
    checks.report("leader of the operators", one);
    let listed = cluster.kubectl(&["get", "ciliumnodes", "--no-headers", "-o", "name"]);
    let listed = listed.and_then(|names| {
        let names: Vec<&str> = names.split_whitespace().collect();
        let expected = ["ciliumnode.cilium.io/node-a", "ciliumnode.cilium.io/node-b"];
        ensure!(names == expected, "{names:?}; expected {expected:?}");
        Ok(names.join(" "))
    });
    checks.report("kubectl get ciliumnodes", listed);
    let mut pods = Vec::new();
    for index in 0..cluster.nodes.len() {
        for number in 1..=2 {
            let letter = if index == 0 { 'a' } else { 'b' };
            pods.push(cluster.add_pod(index, &format!("pod-{letter}{number}"))?);
        }
    }
    // The external host routes pod addresses via their node, as a router in front of a cluster does. It uses its public
    // address: the one on the nodes' network is excluded from masquerading anyway.
    for index in 0..cluster.nodes.len() {
        let status = cluster.ready(index)?;
        let (cidr, node) = (text(&status, "/pod_cidr"), cluster.nodes.get(index).context("node")?.machine.address());
        let source = OUTSIDE.to_string();
        cluster.outside.run("ip", &["route", "add", &cidr, "via", &node.to_string(), "src", &source])?;
    }
    let names: Vec<String> = pods.iter().map(|pod| format!("{} {}", pod.name, pod.address)).collect();
    checks.report("cistern-cni ADD", Ok(names.join(", ")));
    // Routes to the other node's pods are installed after its pod CIDR is known.
    let wanted = pods.iter().find(|pod| pod.node == 1).context("no pod on node-b")?.address;
    let machine = &cluster.nodes.first().context("no node-a")?.machine;
    wait_for("the route to node-b's pods", || {
        Ok(machine.run("ip", &["route", "get", &wanted.to_string()])?.contains("172.29.8.21"))
    })?;
    Ok(pods)
}

fn text(value: &Value, pointer: &str) -> String {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn traffic(cluster: &Cluster, pods: &[PodAddress], checks: &mut Checks) {
    let [a1, a2, b1, ..] = pods else {
        checks.report("pods", Err(anyhow::anyhow!("{} pods; expected four", pods.len())));
        return;
    };
    checks.report("pod to pod on one node", keeps_address(cluster, a1, a2.address));
    checks.report("pod to pod across nodes", keeps_address(cluster, a1, b1.address));
    for pod in [a1, b1] {
        for protocol in ["tcp", "udp"] {
            let item = format!("{} to outside, {protocol}", pod.name);
            checks.report(&item, leaves_as_node(cluster, pod, protocol));
        }
    }
    checks.report("outside to pod", answered_by_pod(cluster, b1));
    checks.report("bpftool map dump of that flow", inbound_in_map(cluster, b1));
    checks.report("bpftool map dump of pod to outside", translated_in_map(cluster, b1));
}

/// The other pod sees the pod's own address.
fn keeps_address(cluster: &Cluster, from: &PodAddress, to: Ipv4Addr) -> Result<String> {
    for protocol in ["tcp", "udp"] {
        let answer = ask(cluster.in_pod(from)?, protocol, to)?;
        ensure!(
            answer.seen_as.ip() == IpAddr::V4(from.address),
            "{protocol}: {} was seen as {}; expected its own address",
            from.name,
            answer.seen_as
        );
    }
    Ok(format!("{to} sees {} as {}", from.name, from.address))
}

/// The external host sees the node's address, and its answer reaches the pod.
fn leaves_as_node(cluster: &Cluster, pod: &PodAddress, protocol: &str) -> Result<String> {
    let answer = ask(cluster.in_pod(pod)?, protocol, OUTSIDE)?;
    let node = cluster.nodes.get(pod.node).context("node")?.machine.address();
    ensure!(
        answer.seen_as.ip() == IpAddr::V4(node),
        "{OUTSIDE} saw {}; expected the node's address {node}",
        answer.seen_as
    );
    ensure!(answer.answered_by.ip() == IpAddr::V4(OUTSIDE), "answered by {}", answer.answered_by);
    Ok(format!("{OUTSIDE} sees {} (the node), the answer reaches {}", answer.seen_as, pod.address))
}

/// The pod answers an external client with its own address.
fn answered_by_pod(cluster: &Cluster, pod: &PodAddress) -> Result<String> {
    for protocol in ["tcp", "udp"] {
        let answer = ask(cluster.outside.command(cluster.program("cistern-probe")), protocol, pod.address)?;
        ensure!(
            answer.answered_by.ip() == IpAddr::V4(pod.address),
            "{protocol}: answered by {}; expected {}",
            answer.answered_by,
            pod.address
        );
        ensure!(answer.seen_as.ip() == IpAddr::V4(OUTSIDE), "{protocol}: {} sees {}", pod.name, answer.seen_as);
    }
    Ok(format!("{} sees {OUTSIDE} and answers from its own address {}", pod.name, pod.address))
}

/// The flow that the external client opened, in the kernel's map, as bpftool prints it.
fn inbound_in_map(cluster: &Cluster, pod: &PodAddress) -> Result<String> {
    let answer = [("/key/source", pod.address.octets()), ("/key/destination", OUTSIDE.octets())];
    let row = find_row(cluster, pod.node, "cst_inbound", &answer)?;
    Ok(shown("cst_inbound", &row, &["/key/source", "/key/source_port", "/key/destination", "/key/destination_port"]))
}

/// The flow that the pod opened, in the kernel's map, as bpftool prints it.
fn translated_in_map(cluster: &Cluster, pod: &PodAddress) -> Result<String> {
    let row = find_row(cluster, pod.node, "cst_rev", &[("/value/origin", pod.address.octets())])?;
    let fields = ["/key/remote", "/key/external", "/key/external_port", "/value/origin", "/value/origin_port"];
    Ok(shown("cst_rev", &row, &fields))
}

/// The first entry of a map that has these addresses in these fields.
fn find_row(cluster: &Cluster, node: usize, map: &str, wanted: &[(&str, [u8; 4])]) -> Result<Value> {
    let rows = cluster.dump(node, map)?;
    let mut rows = rows.as_array().into_iter().flatten().map(|row| row.get("formatted").unwrap_or(row));
    let is_wanted =
        |row: &&Value| wanted.iter().all(|(field, address)| row.pointer(field) == Some(&Value::from(address.to_vec())));
    rows.find(is_wanted).cloned().with_context(|| format!("{map} holds no entry with {wanted:?}"))
}

fn shown(map: &str, row: &Value, fields: &[&str]) -> String {
    let mut text = format!("{map}:");
    for field in fields {
        let name = field.rsplit('/').next().unwrap_or_default();
        let value = row.pointer(field).map(ToString::to_string).unwrap_or_default();
        text.push_str(&format!(" {name} {value}"));
    }
    text
}

/// A stream that runs until its input is closed.
struct Stream {
    what: &'static str,
    child: Child,
}

impl Stream {
    fn start(mut command: Command, what: &'static str) -> Result<Self> {
        let to = SocketAddr::new(IpAddr::V4(OUTSIDE), PORT).to_string();
        command.args([what, &to]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Self { what, child: command.spawn()? })
    }

    fn finish(mut self) -> Result<StreamReport> {
        drop(self.child.stdin.take());
        let output = self.child.wait_with_output()?;
        let report: StreamReport =
            serde_json::from_slice(&output.stdout).with_context(|| format!("{}: no report", self.what))?;
        if let Some(error) = &report.error {
            anyhow::bail!("{}: {error} after {} of {} messages", self.what, report.received, report.sent);
        }
        ensure!(report.lost() == 0, "{}: {} of {} messages lost", self.what, report.lost(), report.sent);
        ensure!(report.sent > 100, "{}: only {} messages were sent", self.what, report.sent);
        Ok(report)
    }
}

/// `kill -9` of an agent under traffic, and its restart, lose no packet.
fn survive(cluster: &mut Cluster, pods: &[PodAddress]) -> Result<String> {
    let pod = pods.first().context("no pod")?;
    let tcp = Stream::start(cluster.in_pod(pod)?, "stream-tcp")?;
    let udp = Stream::start(cluster.in_pod(pod)?, "stream-udp")?;
    std::thread::sleep(Duration::from_secs(1));
    cluster.kill_agent(pod.node)?;
    std::thread::sleep(Duration::from_secs(2));
    // A flow that starts while no agent runs is translated, too.
    let without_agent = leaves_as_node(cluster, pod, "tcp").context("while no agent runs")?;
    cluster.start_agent(pod.node)?;
    cluster.ready(pod.node)?;
    std::thread::sleep(Duration::from_secs(1));
    let (tcp, udp) = (tcp.finish()?, udp.finish()?);
    ensure!(!without_agent.is_empty(), "no flow while no agent ran");
    Ok(format!(
        "kill -9 and restart: 0 of {} UDP datagrams (1,000 a second) and 0 of {} TCP messages lost, longest gap {} ms",
        udp.sent,
        tcp.sent,
        udp.longest_gap_ms.max(tcp.longest_gap_ms)
    ))
}

fn explain(cluster: &Cluster, pods: &[PodAddress], checks: &mut Checks) {
    let (Some(from), Some(other)) = (pods.first(), pods.iter().find(|pod| pod.node == 1)) else { return };
    for (to, verdict) in [(format!("{OUTSIDE}:443"), "masqueraded"), (format!("{}:443", other.address), "unchanged")] {
        let source = from.address.to_string();
        let arguments = ["explain", "masquerade", "--from", source.as_str(), "--to", to.as_str()];
        let seen = cluster.cistern_json(from.node, &arguments).and_then(|answer| {
            ensure!(text(&answer, "/verdict") == verdict, "{answer}; expected {verdict}");
            Ok(format!("{verdict} by rule {}: {}", text(&answer, "/rule"), text(&answer, "/why")))
        });
        checks.report(&format!("explain {to}"), seen);
    }
}

/// DEL of every pod leaves no trace of it.
fn remove(cluster: &mut Cluster, pods: &[PodAddress]) -> Result<String> {
    for pod in pods {
        cluster.cni(pod.node, "DEL", &pod.name)?;
        cluster.cni(pod.node, "DEL", &pod.name).context("the second DEL")?;
    }
    for index in 0..cluster.nodes.len() {
        let rows = cluster.dump(index, "cst_endpoints")?;
        let held = rows.as_array().map_or(0, Vec::len);
        ensure!(held == 0, "node {index}: {held} endpoints are left in the map");
        let status = cluster.cistern_json(index, &["status"])?;
        let used = status.pointer("/addresses/used").and_then(Value::as_u64);
        ensure!(used == Some(0), "node {index}: {used:?} addresses are still used");
        let left = leftovers(&cluster.nodes.get(index).context("node")?.machine)?;
        ensure!(left.is_empty(), "node {index}: {left:?} are left");
    }
    Ok("twice each; no device, route, endpoint or lease remains".to_owned())
}
