//! Script tests: the real agent and operator with the small API server, or a real one behind the small one's faults and
//! links ([`run_on_real`]), on a virtual clock, driven by a text file.
//!
//! ```text
//!  case.txtar ─ archive ─┬─ script ─ line ──► run ──► commands ──► World: API server, operators, agents, files
//!                        └─ files ───────────────────────────────►
//! ```
//!
//! `tests/script/README.md` describes the language. Each run has its own runtime with a paused clock: time only
//! advances when all tasks wait, so that a lease of fifteen seconds costs nothing and no test depends on the speed of
//! the machine. One call in ten has a fault unless the script disables them.
//!
//! Runs are *nearly* reproducible: equal seeds give equal UIDs, faults and jitter, but tokio chooses the order in which
//! a channel wakes its readers at random, unless it is built to derive it from the seed ([`runtime`]). A script that
//! fails for one seed is wrong, or has found a defect. [`simulation`] generates scripts.
//!
//! Limits: see [`crate::apiserver`] for the API, and [`memory`] for the kernel.

mod archive;
mod commands;
mod line;
pub mod memory;
pub mod simulation;
mod world;

use std::fmt::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use cistern::telemetry;

use crate::apiserver::Upstream;
use crate::harness::is_thorough;
use archive::Archive;
use line::{Line, Mark};
use world::World;

/// Default percentage of calls with faults in scripts.
const FAULT_PERCENT: u8 = 10;

/// Virtual time between two attempts of a paragraph, and their timeout.
const RETRY_EVERY: Duration = Duration::from_millis(500);
const RETRY_FOR: Duration = Duration::from_secs(15 * 60);

/// Rounds of a script in a run that is not thorough.
const ROUNDS: u64 = 3;

/// Overrides the seed of all scripts.
const SEED: &str = "CISTERN_SCRIPT_SEED";

/// Log level (`debug`, `info`, …) of agents and operators on standard error; without it they do not log.
const LOG: &str = "CISTERN_SCRIPT_LOG";

/// Number of the last API calls shown for a failure.
const SHOWN_CALLS: usize = 4000;

/// A script that is invalid, or failed.
#[derive(thiserror::Error)]
#[error("{0}")]
pub struct ScriptError(String);

/// Test harnesses print errors for programmers; this one is a text of several lines.
impl fmt::Debug for ScriptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Runs the script in a file, once per seed.
///
/// Seeds are derived from the file's name; a script with a comment `# rounds: N` runs with N of them, with three at
/// most unless the run is thorough ([`is_thorough`]): exploring seeds is the simulation's task. The environment
/// variable `CISTERN_SCRIPT_SEED` selects a single seed.
///
/// # Errors
/// The error of the first failing line, with its number, the seed and the last calls to the API.
pub fn run(path: &Path) -> Result<(), ScriptError> {
    run_on(path, None)
}

/// Runs the script in a file once against a real server, with the first of its seeds.
///
/// # Errors
/// As [`run`].
pub fn run_on_real(path: &Path, real: &Arc<Upstream>) -> Result<(), ScriptError> {
    run_on(path, Some(real))
}

/// Whether a script also runs on the real server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum When {
    /// In every run, since it depends on behaviour of the real server: `# server: real, WHAT`.
    Always,
    /// In thorough runs only: it tests the agent's own state, not the server.
    #[default]
    Thorough,
    /// Never, for this reason: `# server: small, REASON`.
    Never(String),
}

/// Directives for the real server in the comment of a script.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnReal {
    /// When it runs there.
    pub when: When,
    /// Values of the chart, as for `helm --set`, whose permissions it requires: `# values: KEY=VALUE…`.
    pub values: Vec<String>,
}

/// Parses the directives for the real server in the comment of a script.
///
/// # Errors
/// The file cannot be read, or an unknown server is named.
pub fn on_real(path: &Path) -> Result<OnReal, ScriptError> {
    let error = |text: String| ScriptError(format!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    let archive = Archive::parse(&text);
    let when = match line::asked(&archive.comment, "server").map(|text| text.split_once(", ").ok_or(text)) {
        None => When::Thorough,
        Some(Ok(("real", _))) => When::Always,
        Some(Ok(("small", reason))) => When::Never(reason.to_owned()),
        Some(Ok((text, _)) | Err(text)) => {
            return Err(error(format!("# server: {text}: expected real or small, and after a comma why")));
        }
    };
    let values = line::asked(&archive.comment, "values").unwrap_or_default();
    Ok(OnReal { when, values: values.split_whitespace().map(str::to_owned).collect() })
}

fn run_on(path: &Path, real: Option<&Arc<Upstream>>) -> Result<(), ScriptError> {
    let error = |text: String| ScriptError(format!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    let archive = Archive::parse(&text);
    let lines = line::parse(&archive.comment).map_err(error)?;
    let seeds = match std::env::var(SEED) {
        Ok(seed) => vec![seed.parse().map_err(|_| error(format!("{SEED}={seed}: expected a number")))?],
        Err(_) => {
            let first = fnv1a(path.file_name().unwrap_or_default().as_encoded_bytes());
            let rounds = line::rounds(&archive.comment).map_err(error)?;
            let rounds = if is_thorough() { rounds } else { rounds.min(ROUNDS) };
            (0..if real.is_some() { 1 } else { rounds }).map(|round| first.wrapping_add(round)).collect()
        }
    };
    if let Ok(level) = std::env::var(LOG) {
        telemetry::init(telemetry::Format::Text, &level);
    }
    for seed in seeds {
        let runtime = runtime(seed).map_err(|cause| error(cause.to_string()))?;
        runtime.block_on(run_lines(&archive, &lines, seed, real)).map_err(error)?;
    }
    Ok(())
}

/// A runtime whose clock is stopped while any task can run. Its random choices (the order in which a channel wakes its
/// readers, the first branch of a `select!`) are derived from the seed, too, where tokio supports it: in builds with
/// `--cfg tokio_unstable` (`.cargo/config.toml`).
fn runtime(seed: u64) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    #[cfg(tokio_unstable)]
    builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
    #[cfg(not(tokio_unstable))]
    let _ = seed;
    builder.build()
}

async fn run_lines(archive: &Archive, lines: &[Line], seed: u64, real: Option<&Arc<Upstream>>) -> Result<(), String> {
    let mut world = World::new(archive, seed, FAULT_PERCENT, real.cloned()).map_err(|cause| cause.to_string())?;
    let outcome = match run_all(&mut world, lines).await {
        Ok(()) => world.end().await,
        Err(failure) => Err(failure),
    };
    outcome.map_err(|failure| {
        let mut text = format!("{failure}\nseed {seed} ({SEED}={seed} repeats it); the last calls were\n");
        let calls = world.server.calls();
        for call in calls.iter().skip(calls.len().saturating_sub(SHOWN_CALLS)) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "    {call}");
        }
        text
    })
}

async fn run_all(world: &mut World, lines: &[Line]) -> Result<(), String> {
    let mut rest = lines;
    while let Some(first) = rest.first() {
        let length = rest.iter().take_while(|line| line.paragraph == first.paragraph).count();
        let (paragraph, after) = rest.split_at(length);
        run_paragraph(world, paragraph).await?;
        rest = after;
    }
    Ok(())
}

/// Runs the lines of a paragraph. If a line with `*` fails, the whole paragraph is repeated a little later.
async fn run_paragraph(world: &mut World, lines: &[Line]) -> Result<(), String> {
    let until = Instant::now() + RETRY_FOR;
    'again: loop {
        for line in lines {
            let outcome = run_line(world, line).await;
            let Err(failure) = outcome else { continue };
            if line.has(Mark::Retry) && Instant::now() < until {
                sleep(RETRY_EVERY).await;
                world.check_roles()?;
                continue 'again;
            }
            return Err(format!("line {}: {}\n    {failure}", line.number, line.text));
        }
        return Ok(());
    }
}

async fn run_line(world: &mut World, line: &Line) -> Result<(), String> {
    let outcome = commands::run(world, &line.words).await;
    let expected_failure = line.has(Mark::Fail);
    // `stdout` and similar commands check the output of the last other command.
    match outcome {
        Ok(printed) if expected_failure => Err(format!("succeeded, though it must fail; it printed: {printed}")),
        Ok(printed) => {
            if let Some(printed) = printed.into_text() {
                match &line.redirect {
                    Some(file) => world.files.insert(file.clone(), printed.clone()),
                    None => None,
                };
                world.stdout = printed;
                world.stderr.clear();
            }
            Ok(())
        }
        Err(failure) if expected_failure => {
            world.stdout.clear();
            world.stderr = failure;
            Ok(())
        }
        Err(failure) => Err(failure),
    }
}

/// A hash of a text (FNV-1a).
fn fnv1a(text: &[u8]) -> u64 {
    fnv1a_after(0xcbf2_9ce4_8422_2325, text)
}

/// The hash of a text that continues one with this hash.
fn fnv1a_after(hash: u64, text: &[u8]) -> u64 {
    text.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
