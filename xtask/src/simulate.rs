//! The simulation of operators and agents, by seed.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

const PROGRAM: &str = "cistern-simulate";

/// Our packages that it is made of. They are optimised for it alone: that takes several times as long as the debug build.
const PACKAGES: [&str; 4] = ["cistern", "cistern-core", "cistern-crds", "cistern-tests"];

/// How. Overflows are looked for all the same.
const OPTIMISED: [&str; 3] = ["opt-level=1", "debug-assertions=false", "overflow-checks=true"];

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
    command.args(["run", "--locked", "--bin", PROGRAM]).env("CARGO_INCREMENTAL", "0");
    for package in PACKAGES {
        command.args(
            OPTIMISED.iter().flat_map(|how| ["--config".to_owned(), format!("profile.dev.package.{package}.{how}")]),
        );
    }
    command.arg("--");
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
