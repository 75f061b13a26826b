//! A real Kubernetes cluster on this machine: kube-apiserver, etcd, kubelets, containerd, without containers around them.
//!
//! ```text
//!   outside hosts 45.33.7.0/24                        nodes and control plane 172.30.0.0/24
//!   ┌─────────────┐                 ┌────────┐        ┌───────────────┐ ┌────────────┐ ┌────────────┐
//!   │ outside .80 ├── bridge ── .1 ─┤ router ├─ .1 ───┤ control .10   │ │ node-1 .21 │ │ node-2 .22 │ …
//!   └─────────────┘                 └────────┘ bridge │ etcd          │ │ containerd │ │ containerd │
//!                                                     │ kube-apiserver│ │ kubelet    │ │ kubelet    │
//!                                                     │ …             │ │ kube-proxy │ │ kube-proxy │
//!                                                     └───────────────┘ └────────────┘ └────────────┘
//! ```
//!
//! Each of the boxes is a [`Machine`]: a network, mount and UTS namespace with its own `/run` and bpffs. What it has in
//! `/etc`, `/opt`, `/var/lib` and `/var/log` is its disk, which outlives a reboot and lies under [`DIRECTORY`]. The router
//! knows no pods: what leaves a node under a pod's address gets no answer.
//!
//! Nothing is made in the host's namespaces. The processes are those of the control group [`cgroup::ROOT`], so whoever
//! starts or kills what, [`down`] finds all of them and no other. There is one cluster on a machine.
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
pub use story::tell;

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

/// Everything waits at most this long for anything: longer than it takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster that is up.
#[derive(Debug)]
pub struct Cluster {
    spec: Spec,
    binaries: Binaries,
    /// `PATH` of its programs.
    path: String,
}

impl Cluster {
    /// Brings up what is missing of a cluster, and returns when its nodes have registered. They become Ready by
    /// themselves with [`Cni::Reference`], and by [`Cluster::install_cistern`] with [`Cni::Cistern`].
    ///
    /// # Errors
    /// When the caller is not root, a cluster of another kind is up, or a part does not come up.
    pub fn up(spec: &Spec) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "a cluster is made of namespaces: run this as root");
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

    /// The cluster that is up.
    ///
    /// # Errors
    /// When there is none.
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
        // Nodes get their images while the API server starts.
        std::thread::scope(|scope| {
            let control = scope.spawn(|| self.power_on(CONTROL_NAME));
            let nodes = self.spec.node_names()?.into_iter().map(|name| {
                scope.spawn(move || {
                    self.switch_on(&name)?;
                    self.start(&name, Daemon::Containerd)?;
                    self.load_missing(&name, images)?;
                    // A kubelet that is refused waits longer each time.
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

    /// Gives a node the images that it misses.
    fn load_missing(&self, node: &str, images: &[(&'static str, PathBuf)]) -> Result<()> {
        let node = self.machine(node)?;
        let there = node.images()?;
        for (image, archive) in images.iter().filter(|(image, _)| !there.iter().any(|one| one == image)) {
            node.load(archive).with_context(|| format!("load {image}"))?;
        }
        Ok(())
    }

    /// What it is.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The nodes, in order.
    ///
    /// # Errors
    /// When the cluster's description is wrong.
    pub fn nodes(&self) -> Result<Vec<Machine>> {
        self.spec.node_names()?.iter().map(|name| self.machine(name)).collect()
    }

    /// A machine by name: `node-1` and so on, `control`, `outside`, `router`.
    ///
    /// # Errors
    /// When there is none of the name.
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
    /// When the cluster's description is wrong.
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
                "{node:?} is no machine: expected {ROUTER_NAME}, {CONTROL_NAME}, {OUTSIDE_NAME}, {}",
                names.join(", ")
            )
        })?;
        Ok(u8::try_from(position)?)
    }

    /// Adds a host outside of the cluster, or beside the nodes. It goes with the cluster.
    ///
    /// # Errors
    /// When the kernel refuses part of it.
    pub fn add_host(&self, name: &str, segment: Segment, address: Ipv4Addr) -> Result<Machine> {
        let machine = self.machine_at(name, (segment, address));
        machine.power_on("", &[], Some(&self.router()))?;
        Ok(machine)
    }

    /// Switches a machine on and starts its daemons; what is on and runs already is left alone.
    ///
    /// # Errors
    /// When a part of it does not come up.
    pub fn power_on(&self, name: &str) -> Result<()> {
        self.switch_on(name)?;
        daemons(name).iter().try_for_each(|daemon| self.start(name, *daemon))
    }

    /// Makes what a machine is, without daemons.
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

    /// Starts a daemon of a machine, unless it runs; containerd answers when this returns. The rest of the control plane,
    /// which nobody would restart, is started when the API server is ready.
    ///
    /// # Errors
    /// When it does not start.
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

    /// Installs Cistern by its chart, or upgrades it to other `values` (`KEY=VALUE`, as for `helm --set`), and waits until
    /// all of it is ready. The image has to be loaded.
    ///
    /// # Errors
    /// When Helm fails or waits in vain.
    pub fn install_cistern(&self, values: &[String]) -> Result<()> {
        install::cistern(self, values)
    }

    /// Waits until every node is Ready and CoreDNS answers.
    ///
    /// # Errors
    /// When that does not happen.
    pub fn wait_ready(&self) -> Result<()> {
        install::wait_ready(self)
    }

    /// Waits until the API server says that it is ready.
    ///
    /// # Errors
    /// When it does not become so.
    pub fn wait_for_api(&self) -> Result<()> {
        wait_for("the API server to be ready", || Ok(self.get("/readyz").is_ok()))
    }

    /// Each registered node and whether it is Ready.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub fn node_conditions(&self) -> Result<Vec<(String, bool)>> {
        Ok(install::conditions(&self.list("/api/v1/nodes", &ListParams::default())?))
    }

    /// The blocks of a node, as its CiliumNode has them.
    ///
    /// # Errors
    /// When the node has none, the API server does not answer, or one is no block.
    pub fn blocks(&self, node: &str) -> Result<Vec<Ipv4Net>> {
        let node: Value = serde_json::from_str(&self.get(&format!("/apis/cilium.io/v2/ciliumnodes/{node}"))?)?;
        let blocks = node.pointer("/spec/ipam/podCIDRs").and_then(Value::as_array).into_iter().flatten();
        blocks.map(|block| Ok(block.as_str().unwrap_or_default().parse()?)).collect()
    }

    /// Gives the control plane the ways to the pods that it proxies to: it is no node, so no agent does.
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

    /// `kubectl …` with every right.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(self.client("kubectl")?.args(arguments), &format!("kubectl {}", arguments.join(" ")))
    }

    /// What the API server answers at a path such as `/readyz`, to somebody with every right.
    ///
    /// # Errors
    /// When it does not answer, or refuses.
    pub fn get(&self, path: &str) -> Result<String> {
        question::text(&kubeconfig(), Some(&self.machine(CONTROL_NAME)?.network()?), path)
    }

    /// The objects of a collection, given by its path such as `/api/v1/nodes`, for somebody with every right.
    ///
    /// # Errors
    /// When the API server does not answer, or refuses.
    pub fn list(&self, path: &str, params: &ListParams) -> Result<Vec<Value>> {
        question::list(&kubeconfig(), Some(&self.machine(CONTROL_NAME)?.network()?), path, params)
    }

    /// `kubectl apply` of manifests.
    ///
    /// # Errors
    /// As [`Cluster::kubectl`].
    pub fn apply(&self, manifests: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new().context("make a file for manifests")?;
        fs::write(file.path(), manifests)?;
        self.kubectl(&["apply", "--filename", &file.path().to_string_lossy()]).map(drop)
    }

    /// A program of the host (`kubectl`, `helm`, a test of Kubernetes) in the network of the control plane, with every
    /// right.
    ///
    /// # Errors
    /// When the control plane is switched off.
    pub fn client(&self, program: impl AsRef<Path>) -> Result<Command> {
        let mut command = self.machine(CONTROL_NAME)?.command_in_network(program)?;
        command.env("KUBECONFIG", kubeconfig());
        Ok(command)
    }

    /// `helm …` with every right.
    ///
    /// # Errors
    /// When it fails, with what it said.
    pub fn helm(&self, arguments: &[&str]) -> Result<String> {
        output(self.client("helm")?.args(arguments), &format!("helm {}", arguments.join(" ")))
    }

    /// Puts an image on every node: a file in the OCI or Docker format, or a name in buildah's store.
    ///
    /// # Errors
    /// When it is neither, or a containerd refuses.
    pub fn load(&self, image: &str) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let archive = images::archive(image, folder.path())?;
        self.nodes()?.iter().try_for_each(|node| node.load(&archive))
    }
}

/// Takes down the cluster, or what is left of one: processes, namespaces, mounts, control groups, files. What kubelets
/// changed of the machine's own settings is set back. Returns whether there was anything.
///
/// # Errors
/// When a process does not end, or something cannot be removed.
pub fn down() -> Result<bool> {
    ensure!(nix::unistd::geteuid().is_root(), "a cluster is made of namespaces: run this as root");
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

/// What runs on a machine of this name.
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

/// A kubeconfig with every right, for programs of the host in the network of the control plane.
#[must_use]
pub fn kubeconfig() -> PathBuf {
    pki_directory().join("admin.conf")
}

/// Says what is going on.
fn say(what: std::fmt::Arguments<'_>) {
    eprintln!("cluster: {what}");
}

/// Polls until it is so; at most half of the time goes into asking.
///
/// # Errors
/// When it is not so for very long, and what `is_so` fails with.
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
