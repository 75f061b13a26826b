//! Machines of the cluster: nodes, the control plane, the router between the segments, external hosts.

use super::cgroup;
use super::daemon::Daemon;
use super::spec::{GATEWAY, OUTSIDE_GATEWAY, PREFIX_LENGTH, ROUTER_NAME};
use super::wait_for;
use crate::lab::{output, set_up};
use anyhow::{Context, Result, bail, ensure};
use cistern::netlink::namespace::Namespace;
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The control group of the holder of a machine's namespaces.
const HOLDER: &str = "holder";
/// The control group of commands that are not daemons.
const COMMANDS: &str = "commands";

/// Exists while a machine is on and set up.
const READY: &str = "/run/cistern-cluster-ready";

/// The segment that a machine's `eth0` is connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// Nodes and control plane.
    Nodes,
    /// Hosts outside the cluster.
    Outside,
}

impl Segment {
    /// Name of its bridge on the router.
    const fn bridge(self) -> &'static str {
        match self {
            Self::Nodes => "nodes",
            Self::Outside => "outside-hosts",
        }
    }

    const fn gateway(self) -> Ipv4Addr {
        match self {
            Self::Nodes => GATEWAY,
            Self::Outside => OUTSIDE_GATEWAY,
        }
    }
}

/// A machine: a network, mount and UTS namespace with a disk that outlives them.
#[derive(Debug, Clone)]
pub struct Machine {
    name: String,
    /// Its disk: what is in `/etc`, `/opt`, `/var/lib` and `/var/log`.
    disk: PathBuf,
    /// `PATH` of what runs on it.
    path: String,
    /// The segment of its `eth0`; the router has none.
    port: Option<(Segment, Ipv4Addr)>,
}

impl Machine {
    pub(super) fn new(name: &str, machines: &Path, path: &str, port: Option<(Segment, Ipv4Addr)>) -> Self {
        Self { name: name.to_owned(), disk: machines.join(name), path: path.to_owned(), port }
    }

    /// Its host name; a node's name in Kubernetes too.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of its `eth0`.
    ///
    /// # Errors
    /// For the router.
    pub fn address(&self) -> Result<Ipv4Addr> {
        self.port.map(|(_, address)| address).with_context(|| format!("{} has no eth0", self.name))
    }

    /// Process ID of the holder of its namespaces. It changes with a reboot.
    ///
    /// # Errors
    /// The machine is off.
    pub fn id(&self) -> Result<u32> {
        let holder = cgroup::daemon_processes(&self.name, HOLDER)?;
        let process = holder.first().with_context(|| format!("{} is switched off", self.name))?;
        Ok(u32::try_from(process.as_raw())?)
    }

    /// The machine's network.
    ///
    /// # Errors
    /// When the machine is off.
    pub(super) fn network(&self) -> Result<Namespace> {
        Ok(Namespace::open(format!("/proc/{}/ns/net", self.id()?))?)
    }

    /// A program on this machine: its network, files and name. The working directory is `/`.
    ///
    /// # Errors
    /// When the machine is off.
    pub fn command(&self, program: impl AsRef<Path>) -> Result<Command> {
        self.enter(&["--net", "--mount", "--uts"], program.as_ref())
    }

    /// A command of the host in this machine's network, with the host's files.
    ///
    /// # Errors
    /// The machine is off.
    pub fn command_in_network(&self, program: impl AsRef<Path>) -> Result<Command> {
        self.enter(&["--net"], program.as_ref())
    }

    /// A program of the host in the network of one of the machine's containers, given by its ID.
    ///
    /// # Errors
    /// When the machine is off, or the container does not run.
    pub fn command_in_container(&self, id: &str, program: impl AsRef<Path>) -> Result<Command> {
        let tasks = self.run("ctr", &["--namespace", "k8s.io", "tasks", "list"])?;
        let process = tasks.lines().find_map(|line| {
            let mut fields = line.split_whitespace();
            (fields.next() == Some(id)).then(|| fields.next()?.parse().ok()).flatten()
        });
        let process = process.with_context(|| format!("{}: container {id} does not run", self.name))?;
        self.enter_those_of(process, &["--net"], program.as_ref())
    }

    fn enter(&self, namespaces: &[&str], program: &Path) -> Result<Command> {
        self.enter_those_of(self.id()?, namespaces, program)
    }

    fn enter_those_of(&self, process: u32, namespaces: &[&str], program: &Path) -> Result<Command> {
        // In the machine's group, so that it is killed with the machine.
        let procs = cgroup::make_daemon(&self.name, COMMANDS)?;
        let mut command = in_group(&procs);
        command.args(["nsenter", "--target", &process.to_string()]).args(namespaces).arg("--").arg(program);
        command.env("PATH", &self.path);
        Ok(command)
    }

    /// Runs a program that must succeed, and returns its output.
    ///
    /// # Errors
    /// The machine is off, or the program cannot be started or fails; the error contains its output.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        output(self.command(program)?.args(arguments), &format!("{}: {program} {}", self.name, arguments.join(" ")))
    }

    /// As [`Machine::run`], for a program that prints JSON.
    ///
    /// # Errors
    /// As [`Machine::run`], or the output is not JSON.
    pub fn json(&self, program: &str, arguments: &[&str]) -> Result<Value> {
        let text = self.run(program, arguments)?;
        serde_json::from_str(&text).with_context(|| format!("{}: {program}: no JSON: {text}", self.name))
    }

    /// Path of a file of the machine, for this process.
    ///
    /// # Errors
    /// The machine is off.
    pub fn file(&self, path: &str) -> Result<PathBuf> {
        Ok(PathBuf::from(format!("/proc/{}/root/{}", self.id()?, path.trim_start_matches('/'))))
    }

    /// Writes a file on the machine, and creates its folder.
    ///
    /// # Errors
    /// The machine is off, or the file cannot be written.
    pub fn write(&self, path: &str, content: &[u8]) -> Result<()> {
        let file = self.file(path)?;
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&file, content).with_context(|| format!("{}: write {path}", self.name))
    }

    /// Whether it is on and set up.
    ///
    /// # Errors
    /// Control groups cannot be read.
    pub fn is_on(&self) -> Result<bool> {
        Ok(!cgroup::daemon_processes(&self.name, HOLDER)?.is_empty() && self.file(READY)?.exists())
    }

    /// Kills all processes on it, including pods. Its namespaces, mounts, `/run` and bpffs are lost; its disk is kept.
    ///
    /// # Errors
    /// A process does not terminate.
    pub fn power_off(&self) -> Result<()> {
        cgroup::end(Some(&self.name))
    }

    /// Creates namespaces, mounts and `eth0`, then runs `setup` (shell) and writes `files` on it. No-op if it is on.
    pub(super) fn power_on(&self, setup: &str, files: &[(String, Vec<u8>)], router: Option<&Self>) -> Result<()> {
        if self.is_on()? {
            return Ok(());
        }
        // Remains of a start that was killed.
        self.power_off()?;
        cgroup::make_machine(&self.name)?;
        for folder in ["etc", "etc.work", "opt", "opt.work", "lib", "log"] {
            fs::create_dir_all(self.disk.join(folder))?;
        }
        self.hold()?;
        if let (Some(router), Some((segment, address))) = (router, self.port) {
            router.plug_in(self, segment, address).with_context(|| format!("wire of {}", self.name))?;
        }
        self.run("sh", &["-e", "-c", setup])?;
        for (path, content) in files {
            self.write(path, content)?;
        }
        self.write(READY, b"")
    }

    /// Starts the process that holds the namespaces.
    fn hold(&self) -> Result<()> {
        let (name, disk) = (&self.name, self.disk.display());
        let script = format!(
            "set -e
            hostname {name}
            mount -t tmpfs -o mode=755 run /run
            mount -t overlay -o lowerdir=/etc,upperdir={disk}/etc,workdir={disk}/etc.work etc /etc
            mount -t overlay -o lowerdir=/opt,upperdir={disk}/opt,workdir={disk}/opt.work opt /opt
            mount --bind {disk}/log /var/log
            mount --bind {disk}/lib /var/lib
            mount -t bpf bpf /sys/fs/bpf
            cat /proc/sys/kernel/random/uuid >/run/boot_id
            mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
            mount --make-rshared /
            ip link set lo up
            echo ready
            exec sleep infinity >/dev/null 2>&1"
        );
        let mut child = in_group(&cgroup::make_daemon(name, HOLDER)?)
            .args([
                "setsid",
                "unshare",
                "--net",
                "--mount",
                "--uts",
                "--propagation",
                "private",
                "--",
                "sh",
                "-c",
                &script,
            ])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start a shell")?;
        set_up(&mut child, name)
    }

    /// On the router: connects the `eth0` of `machine`.
    fn plug_in(&self, machine: &Self, segment: Segment, address: Ipv4Addr) -> Result<()> {
        let (name, bridge, gateway) = (&machine.name, segment.bridge(), segment.gateway());
        let id = machine.id()?;
        self.run(
            "sh",
            &[
                "-e",
                "-c",
                &format!(
                    "ip link add {name} type veth peer name eth0 netns {id}\nip link set {name} master {bridge} up"
                ),
            ],
        )?;
        machine.run(
            "sh",
            &["-e", "-c", &format!(
                "ip address add {address}/{PREFIX_LENGTH} dev eth0\nip link set eth0 up\nip route add default via {gateway}"
            )],
        )?;
        Ok(())
    }

    /// The processes of a daemon, without those that it started.
    pub(super) fn processes(&self, daemon: Daemon) -> Result<Vec<Pid>> {
        let all = cgroup::daemon_processes(&self.name, daemon.name())?;
        let runs = |process: &Pid| {
            let program = fs::read_link(format!("/proc/{process}/exe")).ok();
            program.is_some_and(|path| path.file_name().is_some_and(|name| name == daemon.name()))
        };
        Ok(all.into_iter().filter(runs).collect())
    }

    /// Whether a daemon runs.
    ///
    /// # Errors
    /// When control groups cannot be read.
    pub fn runs(&self, daemon: Daemon) -> Result<bool> {
        Ok(!self.processes(daemon)?.is_empty())
    }

    /// Kills a daemon as a crash does, and waits for its termination. Its child processes (such as pods) continue.
    ///
    /// # Errors
    /// It does not terminate.
    pub fn kill(&self, daemon: Daemon) -> Result<()> {
        wait_for(&format!("{} on {} to end", daemon.name(), self.name), || {
            let found = self.processes(daemon)?;
            for process in &found {
                cgroup::kill_one(*process)?;
            }
            Ok(found.is_empty())
        })
    }

    /// Starts a daemon, unless it runs. Its output goes to `/var/log/NAME.log` of the machine.
    pub(super) fn start(&self, daemon: Daemon, program: &Path, arguments: &[String]) -> Result<()> {
        if self.runs(daemon)? {
            return Ok(());
        }
        let log = self.log(daemon);
        let output = fs::OpenOptions::new().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let mut child = in_group(&cgroup::make_daemon(&self.name, daemon.name())?)
            .args(["setsid", "nsenter", "--target", &self.id()?.to_string(), "--net", "--mount", "--uts", "--"])
            .arg(program)
            .args(arguments)
            .current_dir("/")
            .env("PATH", &self.path)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("start {} on {}", daemon.name(), self.name))?;
        // None of the wrapping programs forks: the child becomes the daemon.
        wait_for(&format!("{} on {} to start", daemon.name(), self.name), || {
            if let Some(status) = child.try_wait()? {
                bail!("{} on {} ended with {status}; see {}", daemon.name(), self.name, log.display());
            }
            self.runs(daemon)
        })
    }

    /// Path of a daemon's log, for this process.
    #[must_use]
    pub fn log(&self, daemon: Daemon) -> PathBuf {
        self.disk.join("log").join(format!("{}.log", daemon.name()))
    }

    /// The router's own part: a bridge per segment, and forwarding.
    pub(super) fn power_on_router(&self) -> Result<()> {
        ensure!(self.name == ROUTER_NAME, "{} is no router", self.name);
        let mut setup = "echo 1 >/proc/sys/net/ipv4/ip_forward\n".to_owned();
        for segment in [Segment::Nodes, Segment::Outside] {
            let (bridge, gateway) = (segment.bridge(), segment.gateway());
            let [a, b, c, d] = gateway.octets();
            // A fixed MAC address: otherwise it changes with the ports, and neighbours keep the old one.
            let address = format!("02:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}");
            setup.push_str(&format!(
                "ip link add {bridge} address {address} type bridge stp_state 0 forward_delay 0\n\
                 ip address add {gateway}/{PREFIX_LENGTH} dev {bridge}\n\
                 ip link set {bridge} up\n"
            ));
        }
        self.power_on(&setup, &[], None)
    }

    /// Loads images from an OCI or Docker archive into the node's containerd.
    ///
    /// # Errors
    /// containerd rejects them.
    pub fn load(&self, archive: &Path) -> Result<()> {
        // By standard input: the node has other files than the caller.
        let file = fs::File::open(archive).with_context(|| format!("open {}", archive.display()))?;
        let imported =
            self.command("ctr")?.args(["--namespace", "k8s.io", "images", "import", "-"]).stdin(file).output()?;
        let said = String::from_utf8_lossy(&imported.stderr);
        ensure!(imported.status.success(), "{}: import {}: {}", self.name, archive.display(), said.trim());
        Ok(())
    }

    /// Adds another name to an image of its containerd.
    pub(super) fn tag(&self, image: &str, name: &str) -> Result<()> {
        self.run("ctr", &["--namespace", "k8s.io", "images", "tag", "--force", image, name]).map(drop)
    }

    /// The names of the images that its containerd has.
    pub(super) fn images(&self) -> Result<Vec<String>> {
        let names = self.run("ctr", &["--namespace", "k8s.io", "images", "list", "--quiet"])?;
        Ok(names.lines().map(str::to_owned).collect())
    }
}

/// A command, given as arguments, that joins a control group before it starts.
fn in_group(procs: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(procs);
    command
}
