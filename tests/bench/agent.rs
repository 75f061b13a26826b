//! Time until the agent is ready, and its memory with 250 pods: `cargo xtask bench agent`.
//!
//! Each round creates a node and an API server with the Node only, and starts the agent twice: a first start, in which
//! the same process is elected and assigns the node's pod CIDR, and one with all state on disk and in the kernel. Then
//! the second agent gets 250 pods, with the CNI plugin's requests.

#[path = "median.rs"]
mod median;

use anyhow::{Context as _, Result, bail, ensure};
use cistern::api::client::Client;
use cistern::api::types::{AddRequest, AddResponse, ConfirmRequest, Interface, PodAttachment};
use cistern_tests::lab::{Lab, Machine};
use median::median;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const ROUNDS: usize = 7;
const PODS: u32 = 250;
/// Timeout of a start, which is then reported as failed.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(2);

const NODE: &str = "\
apiVersion: v1
kind: Node
metadata: {name: n1}
status:
  addresses: [{type: InternalIP, address: 172.29.8.11}]
";

fn main() -> Result<()> {
    let programs = Programs::from_environment()?;
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        let measured = Measured::take(&programs)?;
        println!(
            "round {round}: first start {:.0} ms, restart {:.0} ms; {:.1} MB without pods, {:.1} MB with {PODS}",
            measured.first_ms, measured.restart_ms, measured.idle_mb, measured.full_mb
        );
        rounds.push(measured);
    }
    let of_rounds = |of: fn(&Measured) -> f64| median(rounds.iter().map(of));
    println!("medians of {ROUNDS} rounds");
    println!("  ready after its first start      {:>8.0} ms   to reach: 1000 ms", of_rounds(|round| round.first_ms));
    println!("  ready after a restart            {:>8.0} ms   to reach: 1000 ms", of_rounds(|round| round.restart_ms));
    println!("  resident without pods            {:>8.1} MB", of_rounds(|round| round.idle_mb));
    println!(
        "  resident with {PODS} pods           {:>8.1} MB   to reach: under 40 MB",
        of_rounds(|round| round.full_mb)
    );
    Ok(())
}

/// The measured process, and its environment.
struct Programs {
    cistern: PathBuf,
    apiserver: PathBuf,
}

impl Programs {
    /// `CISTERN` is the agent's path; Cargo puts the API server beside this bench's folder.
    fn from_environment() -> Result<Self> {
        let cistern =
            std::env::var_os("CISTERN").context("CISTERN must name the agent: run `cargo xtask bench agent`")?;
        let here = std::env::current_exe().context("where this bench is")?;
        let folder = here.ancestors().nth(2).context("this bench lies in no target folder")?;
        let apiserver = folder.join("cistern-apiserver");
        ensure!(apiserver.is_file(), "{} is missing: `cargo xtask build` makes it", apiserver.display());
        Ok(Self { cistern: cistern.into(), apiserver })
    }
}

/// One round.
struct Measured {
    first_ms: f64,
    restart_ms: f64,
    idle_mb: f64,
    full_mb: f64,
}

impl Measured {
    fn take(programs: &Programs) -> Result<Self> {
        let lab = Lab::new("f-bench")?;
        let node = lab.node("n1", "172.29.8.11/24".parse()?)?;
        node.run("ip", &["route", "add", "default", "via", "172.29.8.1"])?;
        std::fs::write(node.file("/run/objects.yaml"), NODE)?;
        let _apiserver = Running::start(
            &node,
            &programs.apiserver,
            &["--listen=127.0.0.1:6443", "--kubeconfig=/run/kubeconfig", "--objects=/run/objects.yaml"],
        )?;
        wait_for("the API server", || Ok(node.file("/run/kubeconfig").exists().then_some(())))?;

        let (first, first_ms) = start_agent(programs, &node)?;
        first.stop()?;
        let (second, restart_ms) = start_agent(programs, &node)?;
        let idle_mb = second.resident_mb()?;
        add_pods(&node)?;
        let full_mb = second.resident_mb()?;
        second.stop()?;
        Ok(Self { first_ms, restart_ms, idle_mb, full_mb })
    }
}

/// Starts the agent and returns it with the milliseconds until it was ready.
fn start_agent(programs: &Programs, node: &Machine) -> Result<(Running, f64)> {
    let start = Instant::now();
    let agent = Running::start(
        node,
        &programs.cistern,
        &[
            "agent",
            "--node-name=n1",
            "--leader-election=true",
            "--k8s-kubeconfig-path=/run/kubeconfig",
            "--cluster-pool-ipv4-cidr=10.244.0.0/16",
        ],
    )?;
    let socket = node.file("/run/cistern/cistern.sock");
    wait_for("the agent", || {
        Ok(Client::new(&socket, PATIENCE).health().is_ok_and(|health| health.ready).then_some(()))
    })?;
    Ok((agent, start.elapsed().as_secs_f64() * 1e3))
}

fn add_pods(node: &Machine) -> Result<()> {
    let mut client = Client::new(node.file("/run/cistern/cistern.sock"), PATIENCE);
    for number in 1..=PODS {
        let container_id = format!("{number:064x}");
        let given: AddResponse = client.post(
            "/v1/cni/add",
            &AddRequest {
                container_id: container_id.clone(),
                ifname: "eth0".to_owned(),
                netns: "/proc/self/ns/net".to_owned(),
                network: None,
                pod: None,
                began: None,
            },
        )?;
        let confirm = ConfirmRequest {
            container_id,
            ifname: "eth0".to_owned(),
            generation: given.generation,
            interface: PodAttachment::Pair(Interface {
                host_ifname: format!("cst{number:011x}"),
                host_ifindex: 1000 + number,
                mac: format!("0a:58:0a:f4:{:02x}:{:02x}", number / 256, number % 256),
            }),
            began: None,
        };
        let _: serde_json::Value = client.post("/v1/cni/confirm", &confirm)?;
    }
    Ok(())
}

/// A process that is killed when dropped.
struct Running(Child);

impl Running {
    fn start(node: &Machine, program: &Path, arguments: &[&str]) -> Result<Self> {
        let mut command = node.command(program);
        command.args(arguments).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(command.spawn().with_context(|| format!("starting {}", program.display()))?))
    }

    /// Resident memory of the process.
    fn resident_mb(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).context("reading its status")?;
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok())
            .context("its status has no VmRSS")?;
        Ok(kib * 1024.0 / 1e6)
    }

    fn stop(mut self) -> Result<()> {
        let id = i32::try_from(self.0.id()).context("a process ID")?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::SIGTERM)?;
        let status = self.0.wait()?;
        ensure!(status.success(), "the agent ended with {status}");
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it has terminated already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        std::thread::sleep(POLL);
    }
    bail!("{what} was not ready within {} s", PATIENCE.as_secs())
}
