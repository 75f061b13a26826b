//! Tests against the small API server and a real kube-apiserver: scripts, with the chart's permissions (all of them in
//! a thorough run), and requests that both servers must answer alike.
//!
//! A case has a server to itself, and passes it on to the next one. Cases mostly wait for the API server, so a few
//! servers in parallel take a third of the time.

mod compare;

use anyhow::Result;
use cistern_tests::apiserver::Upstream;
use cistern_tests::cluster::Spec;
use cistern_tests::cluster::control_plane::ControlPlane;
use cistern_tests::harness::{files, is_thorough, timed};
use cistern_tests::script::{self, OnReal, When};
use libtest_mimic::{Arguments, Failed};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A server, and the connection to it.
struct Real {
    control_plane: Arc<ControlPlane>,
    upstream: Arc<Upstream>,
}

impl Real {
    fn start() -> Result<Self> {
        let start = Instant::now();
        let control_plane = Arc::new(ControlPlane::start(&Spec::of_tests()?.kubernetes)?);
        control_plane.install(&[])?;
        let upstream = Arc::new(control_plane.connect()?);
        eprintln!("servers: kube-apiserver {} after {} s", control_plane.version()?, start.elapsed().as_secs());
        Ok(Self { control_plane, upstream })
    }
}

/// Maximum number of servers, and thereby of parallel cases.
const SERVERS: usize = 4;

/// The idle servers. A case that finds none starts one; that of a case that panicked is stopped with it.
type Shared = Arc<Mutex<Vec<Real>>>;

fn with_real(shared: &Shared, case: impl FnOnce(&Real) -> Result<()>) -> Result<(), Failed> {
    let free = || shared.lock().unwrap_or_else(PoisonError::into_inner);
    let idle = free().pop();
    let running = match idle {
        Some(running) => running,
        None => Real::start().map_err(|error| format!("{error:#}"))?,
    };
    let outcome = case(&running);
    free().push(running);
    outcome.map_err(|error| format!("{error:#}").into())
}

fn main() -> Result<ExitCode> {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(arguments.test_threads.map_or(SERVERS, |asked| asked.min(SERVERS)));
    let shared = Shared::default();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut trials, mut left_out, mut deferred) = (Vec::new(), Vec::new(), 0);
    let cases = tests.join("script/cases");
    for path in files(&cases, ".txtar")? {
        let name = path.strip_prefix(&cases)?.display().to_string();
        let OnReal { when, values } = script::on_real(&path)?;
        match when {
            When::Never(reason) => {
                left_out.push(format!("{name}: {reason}"));
                continue;
            }
            When::Thorough if !is_thorough() => {
                deferred += 1;
                continue;
            }
            When::Always | When::Thorough => {}
        }
        let shared = Arc::clone(&shared);
        trials.push(timed(&name, move || {
            with_real(&shared, |real| {
                real.control_plane.install(&values)?;
                let outcome = script::run_on_real(&path, &real.upstream);
                if real.upstream.has_been_redefined() {
                    real.control_plane.distrust_installation();
                }
                Ok(outcome?)
            })
        }));
    }
    let scripts = trials.len();
    for path in files(&tests.join("servers/requests"), ".txt")? {
        let name = format!("requests/{}", path.file_name().unwrap_or_default().display());
        let shared = Arc::clone(&shared);
        trials.push(timed(&name, move || {
            with_real(&shared, |real| {
                real.control_plane.install(&[])?;
                compare::run(&path, &real.upstream)
            })
        }));
    }
    if !arguments.list {
        eprintln!(
            "servers: {scripts} scripts on the real server, {deferred} more in thorough runs, {} on the small one only",
            left_out.len()
        );
        left_out.iter().for_each(|script| eprintln!("servers: skipped: {script}"));
    }
    Ok(libtest_mimic::run(&arguments, trials).exit_code())
}
