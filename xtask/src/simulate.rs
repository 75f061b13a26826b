//! The simulation of operators and agents, by seed.

use crate::process;
use crate::times;
use crate::workspace::Workspace;
use anyhow::Result;
use std::collections::BTreeMap;
use std::time::Instant;

const PROGRAM: &str = "cistern-simulate";

/// Profile overrides. Optimising our own packages takes several times as long as the debug build. Assertions of the
/// standard library that cost a fifth of the time are disabled in packages without assertions of ours.
const PROFILE: [(&str, &[&str]); 4] = [
    ("cistern-core", &["opt-level=1"]),
    ("cistern-crds", &["opt-level=1"]),
    ("cistern", &["opt-level=1", "debug-assertions=false", "overflow-checks=true"]),
    ("cistern-tests", &["opt-level=1", "debug-assertions=false", "overflow-checks=true"]),
];

/// Options of `simulate`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Number of seeds [default: 2000]
    #[arg(long)]
    seeds: Option<u64>,
    /// First seed [default: derived from the commit, so that each change explores other seeds; 0 without git]
    #[arg(long)]
    from: Option<u64>,
    /// Print all events
    #[arg(long)]
    log: bool,
}

/// Default number of seeds. They take about as long as the optimised build.
const SEEDS: u64 = 2000;

/// The first seed of a commit: its first eight digits, so that seeds are short enough to type.
fn first_seed(commit: Option<&str>) -> u64 {
    commit.and_then(|commit| commit.get(..8)).and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
}

/// Builds the program and runs seeds on all processors; fails if one of them fails.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let seeds = options.seeds.unwrap_or(SEEDS);
    let from = options.from.unwrap_or_else(|| first_seed(times::commit(workspace).as_deref()));
    eprintln!("simulate: {seeds} seeds from {from}");
    let start = Instant::now();
    let mut command = workspace.cargo();
    // It would override the configuration, and seeds would not be reproducible.
    command.env_remove("RUSTFLAGS");
    // Incremental builds have more codegen units, and cost more run time than they save in compilation.
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
    fn the_first_seed_is_derived_from_the_commit() {
        assert_eq!(first_seed(Some("00000010deadbeef")), 16);
        assert_eq!(first_seed(Some("ffffffff00000000")), u64::from(u32::MAX));
        assert_eq!((first_seed(Some("no commit")), first_seed(Some("ab")), first_seed(None)), (0, 0, 0));
    }
}
