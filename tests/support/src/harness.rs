//! Shared by test programs with their own `main`: test cases, durations, and thorough runs.

use anyhow::{Context, Result};
use libtest_mimic::{Failed, Trial};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Set by `cargo xtask test --thorough`.
const THOROUGH: &str = "CISTERN_THOROUGH";

/// Whether this run includes what takes too long for every change: all scripts on the real API server, all rounds of a
/// script, and the longest cases of the real cluster.
#[must_use]
pub fn is_thorough() -> bool {
    std::env::var_os(THOROUGH).is_some()
}

/// A test that reports its duration in the form that `cargo xtask test` reads: a line `time: NAME SECONDS` on standard
/// output.
pub fn timed(name: &str, test: impl FnOnce() -> Result<(), Failed> + Send + 'static) -> Trial {
    let label = name.to_owned();
    Trial::test(name, move || {
        let start = Instant::now();
        let outcome = test();
        println!("time: {label} {:.3}", start.elapsed().as_secs_f64());
        outcome
    })
}

/// All files below a folder whose names have this ending, in order.
///
/// # Errors
/// A folder cannot be read.
pub fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path, ending)?);
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
