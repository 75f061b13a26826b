//! The simulation of operators and agents, by seed.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

const PROGRAM: &str = "cistern-simulate";

/// What `simulate` can be told.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// How many seeds to run [default: 10000]
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed [default: 0]
    #[arg(long)]
    from: Option<u64>,
    /// Print everything that happened
    #[arg(long)]
    log: bool,
}

/// Builds the program and runs seeds on all processors; fails when one of them does.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let mut command = workspace.cargo();
    // It would win over the configuration, and seeds would not replay.
    command.env_remove("RUSTFLAGS");
    command.args(["run", "--locked", "--bin", PROGRAM, "--"]);
    for (flag, value) in [("--seeds", options.seeds), ("--from", options.from)] {
        if let Some(value) = value {
            command.arg(flag).arg(value.to_string());
        }
    }
    if options.log {
        command.arg("--log");
    }
    process::run(&mut command)
}
