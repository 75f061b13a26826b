//! Durations of stages and tests, in `target/times.json`, so that the time of CI is measured.

use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The file. A stage replaces its previous entry only, so that several commands fill one file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    stages: BTreeMap<String, StageTimes>,
}

/// A stage.
#[derive(Debug, Serialize, Deserialize)]
struct StageTimes {
    /// The commit that was checked out; empty without git.
    commit: String,
    /// Processors of the machine.
    processors: usize,
    /// Whether the run was a thorough one.
    thorough: bool,
    /// The whole stage, including compilation.
    seconds: f64,
    /// Its tests by name. They run in parallel, so the sum may exceed the whole. Tests in documentation are not listed.
    tests: BTreeMap<String, f64>,
}

/// Records the duration of a stage.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn record(
    workspace: &Workspace,
    stage: &str,
    thorough: bool,
    time: Duration,
    tests: &BTreeMap<String, f64>,
) -> Result<()> {
    let path = path(workspace)?;
    let mut times: Times =
        std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let entry = StageTimes {
        commit: commit(workspace).unwrap_or_default(),
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        thorough,
        seconds: rounded(time.as_secs_f64()),
        tests: tests.iter().map(|(name, seconds)| (name.clone(), rounded(*seconds))).collect(),
    };
    times.stages.insert(stage.to_owned(), entry);
    let mut json = serde_json::to_vec_pretty(&times)?;
    json.push(b'\n');
    std::fs::write(&path, json).with_context(|| format!("write {}", path.display()))
}

/// The path of the file.
///
/// # Errors
/// Cargo does not know its target folder.
pub(crate) fn path(workspace: &Workspace) -> Result<PathBuf> {
    Ok(workspace.metadata()?.target_directory.join("times.json"))
}

/// The commit that is checked out, in hexadecimal; `None` without git.
pub(crate) fn commit(workspace: &Workspace) -> Option<String> {
    let mut git = Command::new("git");
    git.current_dir(workspace.root()).args(["rev-parse", "--verify", "--quiet", "HEAD"]);
    process::output(&mut git).ok().map(|text| text.trim().to_owned())
}

fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}
