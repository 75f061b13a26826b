//! A real Kubernetes cluster on this machine; `cargo xtask cluster` builds and runs this.

use anyhow::{Context, Result, bail};
use cistern_tests::cluster::{
    self, Cluster, Cni, Daemon, Ipam, Machine, Spec, Suite, binaries::Binaries, minor_release,
};
use clap::{Args, Parser, Subcommand};
use regex::Regex;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command as Program, ExitCode};

/// A real Kubernetes cluster on this machine, with its components in namespaces instead of containers (as root).
#[derive(Parser)]
#[command(name = "cargo xtask cluster", disable_version_flag = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Creates a cluster, or the missing parts of one
    Up(Up),
    /// Deletes everything: processes, namespaces, mounts, control groups, files
    Down,
    /// Shows machines, daemons and nodes
    Status,
    /// `kubectl` as cluster administrator
    #[command(disable_help_flag = true)]
    Kubectl(Rest),
    /// `helm` as cluster administrator
    #[command(disable_help_flag = true)]
    Helm(Rest),
    /// Runs a shell, or a command, on a machine: node-1 and so on, control, outside, router
    Shell {
        machine: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Loads an image on every node: a file in the OCI or Docker format, or a name in buildah's store
    Load { image: String },
    /// Prints the logs of all machines, of one, or of one daemon
    Logs {
        machine: Option<String>,
        daemon: Option<Daemon>,
        /// Only the last lines
        #[arg(long, default_value_t = 20)]
        lines: usize,
    },
    /// Kills a daemon as a crash does; its child processes continue
    Kill { machine: String, daemon: Daemon },
    /// Starts a stopped daemon
    Start { machine: String, daemon: Daemon },
    /// Kills everything on a machine and starts it again; its disk is kept
    Reboot { machine: String },
    /// Runs the demo with kubectl, in a cluster with Cistern
    Demo,
    /// Runs Kubernetes' network e2e specs in a cluster with Cistern, which is created if necessary
    Conformance(Conformance),
    /// Finds or builds all programs, and prints their paths
    Binaries {
        /// Kubernetes version
        #[arg(long, value_parser = minor_release, default_value_t = Spec::default().kubernetes)]
        kubernetes: String,
    },
}

#[derive(Args)]
struct Up {
    /// Number of nodes
    #[arg(long, default_value_t = Spec::default().nodes)]
    nodes: u8,
    /// Kubernetes version: one of tests/kubernetes/kubernetes-*
    #[arg(long, value_parser = minor_release, default_value_t = Spec::default().kubernetes)]
    kubernetes: String,
    /// CNI plugin of the cluster
    #[arg(long, value_enum, default_value_t = Spec::default().cni)]
    cni: Cni,
    /// Component that assigns pod CIDRs to nodes
    #[arg(long, value_enum, default_value_t = Spec::default().ipam)]
    ipam: Ipam,
    /// Cistern's image: a file in the OCI format
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,
    /// Value for Cistern's chart, in addition to those of the cluster
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Args)]
struct Conformance {
    /// Only specs that match this
    #[arg(long, value_name = "REGEX")]
    focus: Option<Regex>,
    /// Kubernetes version: one of tests/kubernetes/kubernetes-*
    #[arg(long, value_parser = minor_release, default_value_t = Spec::default().kubernetes)]
    kubernetes: String,
    /// Cistern's image: a file in the OCI format
    #[arg(long, value_name = "FILE")]
    image: PathBuf,
    /// Folder for log and report
    #[arg(long, value_name = "FOLDER")]
    output: PathBuf,
}

#[derive(Args)]
struct Rest {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

fn main() -> ExitCode {
    run(Arguments::parse().command).unwrap_or_else(|error| {
        eprintln!("cluster: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Up(options) => return status(&up(options)?),
        Command::Down => {
            println!("{}", if cluster::down()? { "the cluster is deleted" } else { "there was no cluster" });
        }
        Command::Status => return status(&Cluster::open()?),
        Command::Kubectl(Rest { arguments }) => become_program(Cluster::open()?.client("kubectl")?.args(arguments))?,
        Command::Helm(Rest { arguments }) => become_program(Cluster::open()?.client("helm")?.args(arguments))?,
        Command::Shell { machine, command } => {
            let machine = Cluster::open()?.machine(&machine)?;
            let (program, arguments) = command.split_first().map_or(("sh", [].as_slice()), |(one, rest)| (one, rest));
            become_program(machine.command(program)?.args(arguments))?;
        }
        Command::Load { image } => Cluster::open()?.load(&image)?,
        Command::Logs { machine, daemon, lines } => logs(&Cluster::open()?, machine.as_deref(), daemon, lines)?,
        Command::Kill { machine, daemon } => Cluster::open()?.machine(&machine)?.kill(daemon)?,
        Command::Start { machine, daemon } => Cluster::open()?.start(&machine, daemon)?,
        Command::Reboot { machine } => {
            let cluster = Cluster::open()?;
            cluster.machine(&machine)?.power_off()?;
            cluster.power_on(&machine)?;
        }
        Command::Demo => return Ok(exit_code(cluster::demo(&Cluster::open()?)?)),
        Command::Conformance(options) => return conformance(options).map(exit_code),
        Command::Binaries { kubernetes } => {
            for path in Binaries::new(&kubernetes)?.find_all()? {
                println!("{}", path.display());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn up(Up { nodes, kubernetes, cni, ipam, image, set }: Up) -> Result<Cluster> {
    if cni == Cni::Cistern && image.is_none() {
        bail!("--image is missing: expected the archive with Cistern's image, or another --cni");
    }
    let cluster = Cluster::up(&Spec { nodes, kubernetes, cni, ipam })?;
    if cni == Cni::Cistern
        && let Some(image) = image
    {
        cluster.load(image.to_str().context("the image's path is not UTF-8")?)?;
        cluster.install_cistern(&set)?;
    }
    if cni != Cni::None {
        cluster.wait_ready()?;
    }
    Ok(cluster)
}

/// Returns whether all specs passed. The selection of specs is validated before the cluster is created.
fn conformance(Conformance { focus, kubernetes, image, output }: Conformance) -> Result<bool> {
    let suite = Suite::new(&kubernetes, focus.as_ref(), &output)?;
    let Spec { cni, ipam, .. } = Spec::default();
    let cluster = up(Up { nodes: Suite::NODES, kubernetes, cni, ipam, image: Some(image), set: Vec::new() })?;
    suite.run(&cluster)
}

/// Replaces this process by a program; returns on failure only.
fn become_program(program: &mut Program) -> Result<()> {
    Err(program.exec()).with_context(|| format!("start {}", program.get_program().display()))
}

/// Prints the state of every machine; succeeds if everything is running.
fn status(cluster: &Cluster) -> Result<ExitCode> {
    let spec = cluster.spec();
    println!(
        "Kubernetes {}, {} nodes, pods' network: {:?}, blocks: {:?}",
        spec.kubernetes, spec.nodes, spec.cni, spec.ipam
    );
    let ready = cluster.node_conditions();
    let mut good = ready.is_ok();
    for machine in cluster.machines()? {
        let on = machine.is_on()?;
        good &= on;
        print!("{:<10} {}", machine.name(), if on { "on " } else { "off" });
        for daemon in cluster::daemons(machine.name()) {
            let runs = machine.runs(*daemon)?;
            good &= runs;
            print!("  {} {}", daemon.name(), if runs { "runs" } else { "ended" });
        }
        if let Some((_, ready)) = ready.iter().flatten().find(|(name, _)| name == machine.name()) {
            good &= *ready || spec.cni == Cni::None;
            print!("  {}", if *ready { "Ready" } else { "NotReady" });
        }
        println!();
    }
    if let Err(error) = ready {
        println!("API server: {error:#}");
    }
    Ok(exit_code(good))
}

fn exit_code(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn logs(cluster: &Cluster, machine: Option<&str>, daemon: Option<Daemon>, lines: usize) -> Result<()> {
    let machines = machine.map_or_else(|| cluster.machines(), |name| Ok(vec![cluster.machine(name)?]))?;
    let of = |machine: &Machine| {
        cluster::daemons(machine.name())
            .iter()
            .copied()
            .filter(|one| daemon.is_none_or(|only| only == *one))
            .collect::<Vec<_>>()
    };
    if machines.iter().all(|machine| of(machine).is_empty()) {
        bail!("there is no such daemon on this machine");
    }
    for machine in &machines {
        for daemon in of(machine) {
            let path = machine.log(daemon);
            println!("==> {} on {}: {} <==", daemon.name(), machine.name(), path.display());
            // Absent before the daemon's first start; need not be UTF-8.
            let bytes = std::fs::read(&path).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().collect();
            for line in all.iter().skip(all.len().saturating_sub(lines)) {
                println!("{line}");
            }
        }
    }
    Ok(())
}
