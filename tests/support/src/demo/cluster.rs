//! The machines of the demo and the processes on them.

use crate::lab::{Lab, Machine, Pod};
use crate::probe::Answer;
use anyhow::{Context, Result, bail, ensure};
use aya::maps::{MapInfo, loaded_maps};
use aya::programs::{ProgramInfo, loaded_programs};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Prefix of the demo's lab.
pub const PREFIX: &str = "cistern-demo";

/// Timeout of every wait.
const PATIENCE: Duration = Duration::from_secs(20);

const KUBECONFIG: &str = "/run/kubeconfig";
const OBJECTS: &str = "/run/objects.yaml";
const POOL: &str = "10.244.0.0/16";
const NODE_NETWORK: u8 = 24;

/// Port of the probe's servers.
pub(super) const PORT: u16 = 8080;

/// An address outside the cluster that is in no private or reserved range.
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 80);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 29, 8, 1);

/// One node and its pods.
pub(super) struct Node {
    pub(super) machine: Machine,
    pub(super) agent: Option<Child>,
}

/// A pod and the address that the plugin assigned.
#[derive(Debug, Clone)]
pub(super) struct PodAddress {
    pub(super) node: usize,
    pub(super) name: String,
    pub(super) address: Ipv4Addr,
}

/// Everything that runs.
pub(super) struct Cluster {
    pub(super) nodes: Vec<Node>,
    pub(super) outside: Machine,
    control: Machine,
    children: Vec<Child>,
    binaries: PathBuf,
    kept: bool,
    // Dropped last: kills the remaining processes.
    _lab: Lab,
}

impl Cluster {
    /// Starts two nodes, an external host and the API server, without agents.
    pub(super) fn start(kept: bool) -> Result<Self> {
        let binaries =
            std::env::current_exe()?.parent().context("the path of the demo's program has no parent")?.to_owned();
        for program in ["cistern", "cistern-cni", "cistern-apiserver", "cistern-probe"] {
            let path = binaries.join(program);
            ensure!(path.exists(), "{} is missing; `cargo xtask demo` builds it", path.display());
        }
        // Check it here, because the agents would only log it.
        let version =
            Command::new(binaries.join("cistern")).arg("--version").output().context("run cistern --version")?;
        let version = String::from_utf8_lossy(&version.stdout).trim().to_owned();
        ensure!(!version.contains("without eBPF object"), "{version}; `cargo xtask demo` builds both");
        let lab = if kept { Lab::kept(PREFIX)? } else { Lab::new(PREFIX)? };
        let net = |last: u8| ipnet::Ipv4Net::new(Ipv4Addr::new(172, 29, 8, last), NODE_NETWORK).context("node network");
        let outside = lab.host("outside", net(1)?)?;
        outside.run("ip", &["address", "add", &format!("{OUTSIDE}/32"), "dev", "lo"])?;
        outside.run("sysctl", &["-qw", "net.ipv4.ip_forward=1"])?;
        let control = lab.host("control", net(2)?)?;
        let mut nodes = Vec::new();
        for (name, last) in [("node-a", 20), ("node-b", 21)] {
            let machine = lab.node(name, net(last)?)?;
            machine.run("ip", &["route", "add", "default", "via", &GATEWAY.to_string()])?;
            nodes.push(Node { machine, agent: None });
        }
        let mut cluster = Self { nodes, outside, control, children: Vec::new(), binaries, kept, _lab: lab };
        cluster.start_api_server()?;
        cluster.serve(cluster.outside.command(cluster.program("cistern-probe")), OUTSIDE)?;
        Ok(cluster)
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.binaries.join(name)
    }

    fn start_api_server(&mut self) -> Result<()> {
        let address = SocketAddr::new(IpAddr::V4(self.control.address()), 6443);
        // As kubelets create them: without a Node there is no CiliumNode.
        let nodes = self.nodes.iter().map(|Node { machine, .. }| {
            let (name, address) = (machine.name(), machine.address());
            format!(
                "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}}}\n\
                 status: {{addresses: [{{type: InternalIP, address: {address}}}]}}\n"
            )
        });
        std::fs::write(self.control.file(OBJECTS), nodes.collect::<Vec<_>>().join("---\n"))?;
        let mut command = self.control.command(self.program("cistern-apiserver"));
        command.args(["--listen", &address.to_string(), "--kubeconfig", KUBECONFIG, "--objects", OBJECTS]);
        self.children.push(self.quiet(&mut command)?);
        let written = self.control.file(KUBECONFIG);
        wait_for("the API server's kubeconfig", || Ok(written.exists()))?;
        let text = std::fs::read_to_string(&written)?;
        for node in &self.nodes {
            std::fs::write(node.machine.file(KUBECONFIG), &text)?;
        }
        Ok(())
    }

    /// Starts a program in the background without a terminal.
    fn quiet(&self, command: &mut Command) -> Result<Child> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().context("start a program of the demo")
    }

    /// Starts the probe's servers; returns when they are ready.
    fn serve(&mut self, mut command: Command, address: Ipv4Addr) -> Result<()> {
        command.args(["serve", &SocketAddr::new(IpAddr::V4(address), PORT).to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("start cistern-probe")?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line)?;
        }
        ensure!(line.starts_with("ready"), "cistern-probe on {address} does not serve");
        self.children.push(child);
        Ok(())
    }

    /// Starts the agent of a node; its log is `/run/agent.log` there.
    pub(super) fn start_agent(&mut self, index: usize) -> Result<()> {
        let program = self.program("cistern");
        let node = self.nodes.get_mut(index).context("no such node")?;
        let name = node.machine.name().to_owned();
        let log = std::fs::OpenOptions::new().create(true).append(true).open(node.machine.file("/run/agent.log"))?;
        let child = node
            .machine
            .command(program)
            .args(["agent", "--leader-election=true", "--auto-direct-node-routes=true"])
            .args(["--node-name", &name, "--k8s-kubeconfig-path", KUBECONFIG])
            .args(["--cluster-pool-ipv4-cidr", POOL, "--ipv4-native-routing-cidr", POOL])
            .stdin(Stdio::null())
            .stdout(Stdio::from(log.try_clone()?))
            .stderr(Stdio::from(log))
            .spawn()
            .context("start cistern agent")?;
        node.agent = Some(child);
        Ok(())
    }

    /// Kills an agent as a crash does.
    pub(super) fn kill_agent(&mut self, index: usize) -> Result<()> {
        let node = self.nodes.get_mut(index).context("no such node")?;
        if let Some(mut agent) = node.agent.take() {
            agent.kill()?;
            agent.wait()?;
        }
        Ok(())
    }

    fn node(&self, index: usize) -> Result<&Node> {
        self.nodes.get(index).context("no such node")
    }

    /// `cistern …` on a node.
    pub(super) fn cistern(&self, index: usize, arguments: &[&str]) -> Result<String> {
        let program = self.program("cistern");
        self.node(index)?.machine.run(&program.to_string_lossy(), arguments)
    }

    /// `cistern … -o json` on a node.
    pub(super) fn cistern_json(&self, index: usize, arguments: &[&str]) -> Result<Value> {
        let arguments: Vec<&str> = arguments.iter().copied().chain(["-o", "json"]).collect();
        Ok(serde_json::from_str(&self.cistern(index, &arguments)?)?)
    }

    /// Waits until the node reports that it is ready.
    pub(super) fn ready(&self, index: usize) -> Result<Value> {
        let mut last = String::new();
        let ready = wait_for("the node to be ready", || {
            match self.cistern_json(index, &["status"]) {
                Ok(status) if status.pointer("/health/ready") == Some(&Value::Bool(true)) => return Ok(true),
                Ok(status) => last = status.pointer("/health/reasons").map(ToString::to_string).unwrap_or_default(),
                Err(error) => last = format!("{error:#}"),
            }
            Ok(false)
        });
        ready.with_context(|| format!("{last}; its log ends with: {}", self.end_of_log(index)))?;
        self.cistern_json(index, &["status"])
    }

    /// The last lines of an agent's log.
    fn end_of_log(&self, index: usize) -> String {
        let log = self.node(index).map(|node| node.machine.file("/run/agent.log"));
        let text = log.ok().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
    }

    /// Kernel objects that must be freed when the cluster is deleted.
    pub(super) fn traces(&self, pods: &[PodAddress]) -> Result<Traces> {
        let machines = self.nodes.iter().map(|node| &node.machine).chain([&self.outside, &self.control]);
        let pods = pods.iter().map(|pod| Ok(self.node(pod.node)?.machine.existing_pod(&pod.name).namespace()));
        let mut traces = Traces::default();
        for machine in machines {
            for kind in ["net", "mnt", "uts"] {
                traces.namespaces.insert(inode(Path::new(&format!("/proc/{}/ns/{kind}", machine.id())))?);
            }
        }
        for path in pods.collect::<Result<Vec<_>>>()? {
            traces.namespaces.insert(inode(&path)?);
        }
        for node in &self.nodes {
            let pins = node.machine.file("/sys/fs/bpf/cistern");
            for name in files(&pins.join("maps"), "")? {
                traces.maps.insert(MapInfo::from_pin(pins.join("maps").join(name))?.id());
            }
            for name in files(&pins.join("progs"), "")? {
                traces.programs.insert(ProgramInfo::from_pin(pins.join("progs").join(name))?.id());
            }
        }
        ensure!(!traces.maps.is_empty() && !traces.programs.is_empty(), "nothing is pinned under /sys/fs/bpf/cistern");
        Ok(traces)
    }

    /// Calls the CNI plugin on a node as a container runtime does.
    pub(super) fn cni(&self, index: usize, verb: &str, name: &str) -> Result<Value> {
        let node = self.node(index)?;
        let mut child = node
            .machine
            .command(self.program("cistern-cni"))
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", name)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_NETNS", format!("/run/netns/{name}"))
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", format!("K8S_POD_NAMESPACE=demo;K8S_POD_NAME={name};K8S_POD_UID={name}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(br#"{"cniVersion":"1.1.0","name":"cistern","type":"cistern-cni"}"#)?;
        }
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "cistern-cni {verb} for {name}: {text}");
        if text.trim().is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_str(&text)?) }
    }

    /// Creates a pod's namespace, calls ADD, and starts the probe's servers in it.
    pub(super) fn add_pod(&mut self, index: usize, name: &str) -> Result<PodAddress> {
        self.node(index)?.machine.pod(name)?;
        let result = self.cni(index, "ADD", name)?;
        let text = result.pointer("/ips/0/address").and_then(Value::as_str).context("ADD answered no address")?;
        let address: Ipv4Addr = text.split('/').next().unwrap_or_default().parse()?;
        let command = self.node(index)?.machine.existing_pod(name).command(self.program("cistern-probe"));
        self.serve(command, address)?;
        Ok(PodAddress { node: index, name: name.to_owned(), address })
    }

    /// The probe in a pod.
    pub(super) fn in_pod(&self, pod: &PodAddress) -> Result<Command> {
        let pod: Pod<'_> = self.node(pod.node)?.machine.existing_pod(&pod.name);
        Ok(pod.command(self.program("cistern-probe")))
    }

    /// `bpftool map dump pinned` on a node.
    pub(super) fn dump(&self, index: usize, map: &str) -> Result<Value> {
        let path = format!("/sys/fs/bpf/cistern/maps/{map}");
        self.node(index)?.machine.json("bpftool", &["-j", "map", "dump", "pinned", &path])
    }

    /// `kubectl …` against the API server, from the machine it runs on.
    pub(super) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let arguments: Vec<&str> = ["--kubeconfig", KUBECONFIG].into_iter().chain(arguments.iter().copied()).collect();
        self.control.run("kubectl", &arguments)
    }

    /// How to inspect the running demo.
    pub(super) fn tour(&self) -> String {
        let mut text = String::from("It is still running. To inspect it:\n");
        let program = self.program("cistern");
        for node in &self.nodes {
            text.push_str(&format!(
                "  nsenter --target {} --net --mount --uts {} status\n",
                node.machine.id(),
                program.display()
            ));
        }
        text.push_str(&format!(
            "  nsenter --target {} --net --mount --uts kubectl --kubeconfig {KUBECONFIG} get ciliumnodes\n",
            self.control.id()
        ));
        text.push_str(&format!("To stop it:\n  {} --clean\n", self.program("cistern-demo").display()));
        text
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for child in self.nodes.iter_mut().filter_map(|node| node.agent.as_mut()).chain(&mut self.children) {
            // An error means that it has terminated already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The cluster's objects in the kernel, by ID, because their names are known inside the namespaces only.
#[derive(Debug, Default)]
pub(super) struct Traces {
    namespaces: BTreeSet<u64>,
    maps: BTreeSet<u32>,
    programs: BTreeSet<u32>,
}

impl Traces {
    /// Waits until no process is in any of the namespaces and the kernel has freed maps and programs, which it does
    /// asynchronously.
    pub(super) fn wait_until_gone(&self) -> Result<String> {
        wait_for("namespaces without process", || Ok(self.namespaces.is_disjoint(&namespaces_in_use()?)))?;
        wait_for("the kernel to free maps and programs", || {
            let maps: BTreeSet<u32> = loaded_maps().filter_map(Result::ok).map(|map| map.id()).collect();
            let programs: BTreeSet<u32> =
                loaded_programs().filter_map(Result::ok).map(|program| program.id()).collect();
            Ok(self.maps.is_disjoint(&maps) && self.programs.is_disjoint(&programs))
        })?;
        Ok(format!(
            "{} namespaces without process, {} maps and {} programs were freed by the kernel",
            self.namespaces.len(),
            self.maps.len(),
            self.programs.len()
        ))
    }
}

fn inode(path: &Path) -> Result<u64> {
    Ok(std::fs::metadata(path).with_context(|| format!("look at {}", path.display()))?.ino())
}

/// The namespaces that any process is in.
fn namespaces_in_use() -> Result<BTreeSet<u64>> {
    let mut used = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").context("read /proc")? {
        let namespaces = entry?.path().join("ns");
        // Entries that are not processes have none, and a process may terminate at any time.
        used.extend(["net", "mnt", "uts"].iter().filter_map(|kind| inode(&namespaces.join(kind)).ok()));
    }
    Ok(used)
}

/// Runs a client of the probe.
pub(super) fn ask(mut command: Command, protocol: &str, to: Ipv4Addr) -> Result<Answer> {
    let output = command
        .args([&format!("ask-{protocol}"), &SocketAddr::new(IpAddr::V4(to), PORT).to_string()])
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        bail!("{protocol} to {to}:{PORT}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Polls until the condition holds.
pub(super) fn wait_for(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "waited {} s for {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Devices, routes and leases of ours that remain on a node.
pub(super) fn leftovers(machine: &Machine) -> Result<Vec<String>> {
    let mut left = Vec::new();
    let links = machine.json("ip", &["-j", "link"])?;
    let names = links.as_array().into_iter().flatten().filter_map(|link| link.get("ifname")?.as_str());
    left.extend(names.filter(|name| name.starts_with("cst")).map(|name| format!("device {name}")));
    let routes = machine.run("ip", &["route", "show", "proto", "198"])?;
    left.extend(routes.lines().map(|route| format!("route {route}")));
    let leases = machine.file("/var/lib/cistern/leases");
    left.extend(files(&leases, "pod-")?.into_iter().map(|name| format!("lease {name}")));
    Ok(left)
}

fn files(directory: &Path, prefix: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(prefix) {
            names.push(name);
        }
    }
    Ok(names)
}
