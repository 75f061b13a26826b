//! Cistern's commands for developers and CI: `cargo xtask --help`.
//!
//! | module | command |
//! |---|---|
//! | [`setup`] | `setup`: installs what the other commands need |
//! | [`ebpf`] | `build-ebpf`: the kernel programs, with the first toolchain that can build them |
//! | [`build`] | `build`: kernel programs, then the binaries |
//! | [`image`] | `image`: the container image |
//! | [`generate`] | `gen`: generated files |
//! | [`check`] | `check`: static checks |
//! | [`test`](mod@test) | `test`: all of the above and every test |
//! | [`bench`](mod@bench) | `bench`: throughput, latency and size |
//! | [`simulate`] | `simulate`: operators and agents with random faults, by seed |
//! | [`demo`] | `demo`: two nodes on this machine |
//! | [`cluster`] | `cluster`: a real Kubernetes cluster on this machine |
//! | [`conformance`] | `conformance`: Kubernetes' network e2e specs in such a cluster |
//!
//! [`times`] records durations; [`workspace`] has the paths and Cargo's metadata; [`process`] starts other programs.

mod bench;
mod build;
mod check;
mod cluster;
mod conformance;
mod demo;
mod ebpf;
mod generate;
mod image;
mod process;
mod setup;
mod simulate;
mod test;
mod times;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use workspace::Workspace;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Cistern's developer commands", disable_version_flag = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs what is missing (Debian, as root), or prints it and fails
    Setup,
    /// Builds the kernel programs into target/ebpf/cistern.o
    BuildEbpf,
    /// Builds the kernel programs, cistern and cistern-cni
    Build(build::Options),
    /// Builds the container image: target/image/cistern.tar
    Image(image::Options),
    /// Writes all generated files
    Gen(generate::Options),
    /// Checks format, lints, layers, generated files and conventions
    Check(check::Options),
    /// Builds, checks and runs the tests; ends with one line of counts
    Test(test::Options),
    /// Measures throughput, latency and size, and prints medians
    Bench(bench::Options),
    /// Runs seeds of the simulation of operators and agents
    Simulate(simulate::Options),
    /// Runs two nodes, four pods and an external host on this machine (as root)
    Demo(demo::Options),
    /// Manages a real Kubernetes cluster on this machine (as root)
    #[command(disable_help_flag = true)]
    Cluster(cluster::Options),
    /// Runs Kubernetes' network e2e specs in a real cluster (as root)
    Conformance(conformance::Options),
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::locate()?;
    match command {
        Command::Setup => setup::run(&workspace)?,
        Command::BuildEbpf => drop(ebpf::build(&workspace)?),
        Command::Build(options) => build::run(&workspace, &options)?.print_sizes()?,
        Command::Image(options) => drop(image::run(&workspace, &options)?),
        Command::Gen(options) => generate::run(&workspace, &options)?,
        Command::Check(options) => return Ok(exit_code(check::run(&workspace, &options)?.is_empty())),
        Command::Test(options) => return Ok(exit_code(test::run(&workspace, &options)?)),
        Command::Bench(options) => bench::run(&workspace, &options)?,
        Command::Simulate(options) => simulate::run(&workspace, &options)?,
        Command::Demo(options) => demo::run(&workspace, &options)?,
        Command::Cluster(options) => cluster::run(&workspace, &options)?,
        Command::Conformance(options) => conformance::run(&workspace, &options)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn exit_code(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
