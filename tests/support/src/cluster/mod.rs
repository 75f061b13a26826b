//! A real Kubernetes cluster on this machine: kube-apiserver, etcd, kubelets and containerd in namespaces.
//!
//! ```text
//!   external hosts 45.33.7.0/24                       nodes and control plane 172.30.0.0/24
//!   ┌─────────────┐                 ┌────────┐        ┌───────────────┐ ┌────────────┐ ┌────────────┐
//!   │ outside .80 ├── bridge ── .1 ─┤ router ├─ .1 ───┤ control .10   │ │ node-1 .21 │ │ node-2 .22 │ …
//!   └─────────────┘                 └────────┘ bridge │ etcd          │ │ containerd │ │ containerd │
//!                                                     │ kube-apiserver│ │ kubelet    │ │ kubelet    │
//!                                                     │ …             │ │ kube-proxy │ │ kube-proxy │
//!                                                     └───────────────┘ └────────────┘ └────────────┘
//! ```
//!
//! Each box is a [`Machine`]: a network, mount and UTS namespace with its own `/run` and bpffs. Its `/etc`, `/opt`,
//! `/var/lib` and `/var/log` are its disk, which survives a reboot and is stored under [`DIRECTORY`]. The router has no
//! routes to pods: packets that leave a node with a pod's address get no answer.
//!
//! Nothing is created in the host's namespaces. All processes are in the control group [`cgroup::ROOT`], where [`down`]
//! finds them regardless of their parents. There can be one cluster on a machine.
//!
//! ```no_run
//! # use cistern_tests::cluster::{Cluster, Daemon, Spec};
//! # fn main() -> anyhow::Result<()> {
//! let cluster = Cluster::up(&Spec::default())?;
//! cluster.load("target/image/cistern.tar")?;
//! cluster.install_cistern(&[])?;
//! cluster.wait_ready()?;
//! cluster.kubectl(&["get", "nodes"])?;
//! let node = cluster.machine("node-1")?;
//! node.kill(Daemon::Kubelet)?;
//! cluster.start("node-1", Daemon::Kubelet)?;
//! node.power_off()?;
//! cluster.power_on("node-1")?;
//! # Ok(()) }
//! ```

pub mod binaries;
pub mod cgroup;
mod conformance;
pub mod control_plane;
mod daemon;
pub mod images;
mod install;
mod machine;
mod pki;
mod question;
mod spec;
mod state;
mod story;

pub use conformance::Suite;
pub use daemon::{Daemon, reference_conflist};
pub use machine::{Machine, Segment};
pub use spec::{
    CONTROL, Cni, DNS_SERVICE, Ipam, KUBERNETES_SERVICE, OUTSIDE, POD_NETWORK, SERVICE_NETWORK, Spec, minor_release,
};
pub use state::DIRECTORY;
pub use story::demo;

use crate::lab::output;
use anyhow::{Context, Result, bail, ensure};
use binaries::Binaries;
use ipnet::Ipv4Net;
use kube::api::ListParams;
use serde_json::Value;
use spec::{CONTROL_NAME, OUTSIDE_NAME, ROUTER_NAME, node_address};
use state::{Lock, State};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Timeout of every wait: more than is needed on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    spec: Spec,
    binaries: Binaries,
    /// `PATH` of its programs.
    path: String,
}

impl Cluster {
    /// Creates a cluster, or the missing parts of one, and returns when its nodes have registered. They become Ready
    /// without further steps with [`Cni::Reference`], and after [`Cluster::install_cistern`] with [`Cni::Cistern`].
    ///
    /// # Errors
    /// The caller is not root, a cluster of another kind is running, or a part does not start.
    pub fn up(spec: &Spec) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "a cluster consists of namespaces: run this as root");
        spec.node_names()?;
        let _lock = Lock::take()?;
        let binaries = Binaries::new(&spec.kubernetes)?;
        let path = binaries.path()?;
        let images = images::all(&binaries)?;
        if let Some(state) = State::read()? {
            ensure!(
                state.spec == *spec,
                "another cluster is up: {}; expected {}; take it down first",
                serde_json::to_string(&state.spec)?,
                serde_json::to_string(spec)?
            );
        } else {
            State::of_this_host(spec)?.write()?;
        }
        let cluster = Self { spec: spec.clone(), binaries, path };
        cluster.bring_up(&images)?;
        Ok(cluster)
    }

    /// The running cluster.
    ///
    /// # Errors
    /// There is none.
    pub fn open() -> Result<Self> {
        let state = State::read()?.context("no cluster is up")?;
        let binaries = Binaries::new(&state.spec.kubernetes)?;
        let path = binaries.path()?;
        Ok(Self { spec: state.spec, binaries, path })
    }

    fn bring_up(&self, images: &[(&'static str, PathBuf)]) -> Result<()> {
        install::keys(&self.spec, &pki_directory())?;
        self.power_on(ROUTER_NAME)?;
        self.power_on(OUTSIDE_NAME)?;
        // Load images on nodes while the API server starts.
        std::thread::scope(|scope| {
            let control = scope.spawn(|| self.power_on(CONTROL_NAME));
            let nodes = self.spec.node_names()?.into_iter().map(|name| {
                scope.spawn(move || {
                    self.switch_on(&name)?;
                    self.start(&name, Daemon::Containerd)?;
                    self.load_missing(&name, images)?;
                    // Wait for the API server first: a kubelet that cannot connect backs off.
                    self.wait_for_api()?;
                    self.power_on(&name)
                })
            });
            std::iter::once(control)
                .chain(nodes.collect::<Vec<_>>())
                .try_for_each(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
        })?;
        say(format_args!("control plane and {} nodes started", self.spec.nodes));
        install::register(self)
    }

    /// Loads the missing images on a node.
    fn load_missing(&self, node: &str, images: &[(&'static str, PathBuf)]) -> Result<()> {
        let node = self.machine(node)?;
        let there = node.images()?;
        for (image, archive) in images.iter().filter(|(image, _)| !there.iter().any(|one| one == image)) {
            node.load(archive).with_context(|| format!("load {image}"))?;
        }
        Ok(())
    }

    /// Its specification.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The nodes, in order.
    ///
    /// # Errors
    /// The cluster's specification is invalid.
    pub fn nodes(&self) -> Result<Vec<Machine>> {
        self.spec.node_names()?.iter().map(|name| self.machine(name)).collect()
    }

    /// A machine by name: `node-1` and so on, `control`, `outside`, `router`.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn machine(&self, name: &str) -> Result<Machine> {
        let port = match name {
            ROUTER_NAME => return Ok(self.router()),
            CONTROL_NAME => (Segment::Nodes, CONTROL),
            OUTSIDE_NAME => (Segment::Outside, OUTSIDE),
            node => (Segment::Nodes, node_address(self.index(node)?)),
        };
        Ok(self.machine_at(name, port))
    }

    /// All machines.
    ///
    /// # Errors
    /// The cluster's specification is invalid.
    pub fn machines(&self) -> Result<Vec<Machine>> {
        let others = [ROUTER_NAME, OUTSIDE_NAME, CONTROL_NAME].map(str::to_owned);
        others.iter().chain(&self.spec.node_names()?).map(|name| self.machine(name)).collect()
    }

    fn machine_at(&self, name: &str, port: (Segment, Ipv4Addr)) -> Machine {
        Machine::new(name, &machines(), &self.path, Some(port))
    }

    fn router(&self) -> Machine {
        Machine::new(ROUTER_NAME, &machines(), &self.path, None)
    }

    /// The number of a node, counted from 0.
    fn index(&self, node: &str) -> Result<u8> {
        let names = self.spec.node_names()?;
        let position = names.iter().position(|name| name == node);
        let position = position.with_context(|| {
            format!(
                "{node:?} is not a machine: expected {ROUTER_NAME}, {CONTROL_NAME}, {OUTSIDE_NAME}, {}",
                names.join(", ")
            )
        })?;
        Ok(u8::try_from(position)?)
    }

    /// Adds a host outside the cluster, or on the nodes' network. It is deleted with the cluster.
    ///
    /// # Errors
    /// An error from the kernel.
    pub fn add_host(&self, name: &str, segment: Segment, address: Ipv4Addr) -> Result<Machine> {
        let machine = self.machine_at(name, (segment, address));
        machine.power_on("", &[], Some(&self.router()))?;
        Ok(machine)
    }

    /// Powers a machine on and starts its daemons; those that run are left alone.
    ///
    /// # Errors
    /// A part of it does not start.
    pub fn power_on(&self, name: &str) -> Result<()> {
        self.switch_on(name)?;
        daemons(name).iter().try_for_each(|daemon| self.start(name, *daemon))
    }

    /// Creates the machine, without daemons.
    fn switch_on(&self, name: &str) -> Result<()> {
        let (setup, files) = match name {
            ROUTER_NAME => return self.router().power_on_router(),
            OUTSIDE_NAME => (String::new(), Vec::new()),
            CONTROL_NAME => (daemon::reference_routes(&self.spec, None), install::control_files(&pki_directory())?),
            node => {
                let index = self.index(node)?;
                (daemon::node_setup(&self.spec, index), install::node_files(&self.spec, node, index, &pki_directory())?)
            }
        };
        self.machine(name)?.power_on(&setup, &files, Some(&self.router()))
    }

    /// Starts a daemon of a machine, unless it runs; containerd is ready when this returns. The rest of the control
    /// plane is started once the API server is ready, because nothing would restart it.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(&self, machine: &str, daemon: Daemon) -> Result<()> {
        let machine = self.machine(machine)?;
        if matches!(daemon, Daemon::KubeControllerManager | Daemon::KubeScheduler) && !machine.runs(daemon)? {
            self.wait_for_api()?;
        }
        machine.start(daemon, &self.binaries.find(daemon.name())?, &daemon.arguments(&self.spec))?;
        if daemon == Daemon::Containerd {
            wait_for(&format!("containerd on {} to answer", machine.name()), || {
                Ok(machine.run("ctr", &["version"]).is_ok())
            })?;
        }
        Ok(())
    }

    /// Installs Cistern by its chart, or upgrades it to other `values` (`KEY=VALUE`, as for `helm --set`), and waits
    /// until it is ready. The image must be loaded.
    ///
    /// # Errors
    /// Helm fails or times out.
    pub fn install_cistern(&self, values: &[String]) -> Result<()> {
        install::cistern(self, values)
    }

    /// Waits until every node is Ready and CoreDNS answers.
    ///
    /// # Errors
    /// A timeout.
    pub fn wait_ready(&self) -> Result<()> {
        install::wait_ready(self)
    }

    /// Waits until the API server reports that it is ready.
    ///
    /// # Errors
    /// A timeout.
    pub fn wait_for_api(&self) -> Result<()> {
        wait_for("the API server to be ready", || Ok(self.get("/readyz").is_ok()))
    }

    /// Each registered node and whether it is Ready.
    ///
    /// # Errors
    /// The API server does not answer.
    pub fn node_conditions(&self) -> Result<Vec<(String, bool)>> {
        Ok(install::conditions(&self.list("/api/v1/nodes", &ListParams::default())?))
    }

    /// The pod CIDRs of a node's CiliumNode.
    ///
    /// # Errors
    /// The node has none, the API server does not answer, or one is invalid.
    pub fn blocks(&self, node: &str) -> Result<Vec<Ipv4Net>> {
        let node: Value = serde_json::from_str(&self.get(&format!("/apis/cilium.io/v2/ciliumnodes/{node}"))?)?;
        let blocks = node.pointer("/spec/ipam/podCIDRs").and_then(Value::as_array).into_iter().flatten();
        blocks.map(|block| Ok(block.as_str().unwrap_or_default().parse()?)).collect()
    }

    /// Adds routes to the pods on the control plane, which proxies to them: it is not a node, so no agent does.
    fn route_pods(&self) -> Result<()> {
        let control = self.machine(CONTROL_NAME)?;
        for node in self.nodes()? {
            let address = node.address()?.to_string();
            for block in self.blocks(node.name())? {
                control.run("ip", &["route", "replace", &block.to_string(), "via", &address])?;
            }
        }
        Ok(())
    }

    /// `kubectl …` as cluster administrator.
    ///
    /// # Errors
    /// It fails; the error contains its output.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(self.client("kubectl")?.args(arguments), &format!("kubectl {}", arguments.join(" ")))
    }

    /// The API server's answer at a path such as `/readyz`, as cluster administrator.
    ///
    /// # Errors
    /// No answer, or an error.
    pub fn get(&self, path: &str) -> Result<String> {
        question::text(&kubeconfig(), Some(&self.machine(CONTROL_NAME)?.network()?), path)
    }

    /// The objects of a collection, given by its path such as `/api/v1/nodes`, as cluster administrator.
    ///
    /// # Errors
    /// No answer, or an error.
    pub fn list(&self, path: &str, params: &ListParams) -> Result<Vec<Value>> {
        question::list(&kubeconfig(), Some(&self.machine(CONTROL_NAME)?.network()?), path, params)
    }

    /// `kubectl apply` of manifests.
    ///
    /// # Errors
    /// As [`Cluster::kubectl`].
    pub fn apply(&self, manifests: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new().context("create a file for manifests")?;
        fs::write(file.path(), manifests)?;
        self.kubectl(&["apply", "--filename", &file.path().to_string_lossy()]).map(drop)
    }

    /// A command of the host (`kubectl`, `helm`, a test of Kubernetes) in the network of the control plane, as cluster
    /// administrator.
    ///
    /// # Errors
    /// The control plane is off.
    pub fn client(&self, program: impl AsRef<Path>) -> Result<Command> {
        let mut command = self.machine(CONTROL_NAME)?.command_in_network(program)?;
        command.env("KUBECONFIG", kubeconfig());
        Ok(command)
    }

    /// `helm …` as cluster administrator.
    ///
    /// # Errors
    /// It fails; the error contains its output.
    pub fn helm(&self, arguments: &[&str]) -> Result<String> {
        output(self.client("helm")?.args(arguments), &format!("helm {}", arguments.join(" ")))
    }

    /// Loads an image on every node: a file in the OCI or Docker format, or a name in buildah's store.
    ///
    /// # Errors
    /// It is neither, or containerd rejects it.
    pub fn load(&self, image: &str) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let archive = images::archive(image, folder.path())?;
        self.nodes()?.iter().try_for_each(|node| node.load(&archive))
    }
}

/// Deletes the cluster, or the remains of one: processes, namespaces, mounts, control groups, files. Sysctls of the
/// host that kubelets changed are restored. Returns whether there was anything.
///
/// # Errors
/// A process does not terminate, or something cannot be removed.
pub fn down() -> Result<bool> {
    ensure!(nix::unistd::geteuid().is_root(), "a cluster consists of namespaces: run this as root");
    let _lock = Lock::take()?;
    cgroup::end(None)?;
    let state = State::read()?;
    if let Some(state) = &state {
        state.set_back()?;
    }
    match fs::remove_dir_all(DIRECTORY) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("remove {DIRECTORY}")),
    }
}

/// The daemons of a machine of this name.
#[must_use]
pub fn daemons(machine: &str) -> &'static [Daemon] {
    match machine {
        ROUTER_NAME | OUTSIDE_NAME => &[],
        CONTROL_NAME => &Daemon::CONTROL_PLANE,
        _ => &Daemon::NODE,
    }
}

fn machines() -> PathBuf {
    Path::new(DIRECTORY).join("machines")
}

fn pki_directory() -> PathBuf {
    Path::new(DIRECTORY).join("pki")
}

/// The cluster administrator's kubeconfig, for programs of the host in the network of the control plane.
#[must_use]
pub fn kubeconfig() -> PathBuf {
    pki_directory().join("admin.conf")
}

/// Reports progress.
fn say(what: std::fmt::Arguments<'_>) {
    eprintln!("cluster: {what}");
}

/// Polls until the condition holds; at most half of the time is spent evaluating it.
///
/// # Errors
/// A timeout, or an error of `is_so`.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let asked = Instant::now();
        if is_so()? {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "waited {} s for {what}", PATIENCE.as_secs());
        std::thread::sleep(asked.elapsed().max(Duration::from_millis(50)));
    }
}
