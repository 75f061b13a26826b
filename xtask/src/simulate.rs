//! More seeds of the simulation than the tests run.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

const PROGRAM: &str = "cistern-simulate";

/// Our own packages that a seed spends its time in. They are optimised a little for it, beside the ordinary build: the
/// dependencies stay as they are, so that nothing else is built anew.
const OPTIMISED: [&str; 4] = ["cistern-core", "cistern-crds", "cistern", "cistern-tests"];

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

/// Runs seeds on all processors; fails when one of them does.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["run", "--locked", "--bin", PROGRAM]);
    for package in OPTIMISED {
        command.args(["--config", &format!("profile.dev.package.{package}.opt-level=1")]);
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
