//! The simulation of operators and agents, by seed.

use crate::process;
use crate::times;
use crate::workspace::Workspace;
use anyhow::Result;
use std::collections::BTreeMap;
use std::time::Instant;

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
    /// How many seeds to run [default: 2000]
    #[arg(long)]
    seeds: Option<u64>,
    /// The first seed [default: follows from the commit, so that each change explores seeds of its own; 0 without git]
    #[arg(long)]
    from: Option<u64>,
    /// Print everything that happened
    #[arg(long)]
    log: bool,
}

/// Seeds of a run that names no number. They cost about as much as the optimised build.
const SEEDS: u64 = 2000;

/// Where the seeds of a commit begin: its first eight digits, so that seeds stay short enough to type.
fn first_seed(commit: Option<&str>) -> u64 {
    commit.and_then(|commit| commit.get(..8)).and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
}

/// Builds the program and runs seeds on all processors; fails when one of them does.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let seeds = options.seeds.unwrap_or(SEEDS);
    let from = options.from.unwrap_or_else(|| first_seed(times::commit(workspace).as_deref()));
    eprintln!("simulate: {seeds} seeds from {from}");
    let start = Instant::now();
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
    command.args(["--seeds", &seeds.to_string(), "--from", &from.to_string()]);
    if options.log {
        command.arg("--log");
    }
    let outcome = process::run(&mut command);
    times::record(workspace, "simulate", false, start.elapsed(), &BTreeMap::new())?;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_names_its_first_seed() {
        assert_eq!(first_seed(Some("00000010deadbeef")), 16);
        assert_eq!(first_seed(Some("ffffffff00000000")), u64::from(u32::MAX));
        assert_eq!((first_seed(Some("no commit")), first_seed(Some("ab")), first_seed(None)), (0, 0, 0));
    }
}
