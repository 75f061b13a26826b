//! The simulation of operators and agents, by seed.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

const PROGRAM: &str = "cistern-simulate";

/// How our packages are built for it alone: to optimise them takes several times as long as the debug build. Those of the
/// standard library's assertions that cost a fifth of the time are left out where we have none of our own.
const PROFILE: [(&str, &[&str]); 4] = [
    ("cistern-core", &["opt-level=1"]),
    ("cistern-crds", &["opt-level=1"]),
    ("cistern", &["opt-level=1", "debug-assertions=false", "overflow-checks=true"]),
    ("cistern-tests", &["opt-level=1", "debug-assertions=false", "overflow-checks=true"]),
];

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
    // In more pieces, for a next build, it would run longer than that saves.
    command.args(["run", "--locked", "--bin", PROGRAM]).env("CARGO_INCREMENTAL", "0");
    for (package, settings) in PROFILE {
        for setting in settings {
            command.args(["--config", &format!("profile.dev.package.{package}.{setting}")]);
        }
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
