//! All checks and tests in one command: build, check, then the tests.
//!
//! A failed stage does not stop the others. The run ends with one line, `N passed, N failed, N skipped`, after the
//! duration of each stage and the names of what failed or was skipped; `target/times.json` has the duration of each
//! test. `passed` counts tests only. A stage that fails without a failed test (a compile error, a crash, a rule of
//! `check`) counts as one failure.

mod report;

use crate::build;
use crate::check;
use crate::process;
use crate::times;
use crate::workspace::{Metadata, TESTS_PACKAGE, Workspace};
use anyhow::{Result, bail};
use report::{Listing, Totals};
use std::time::{Duration, Instant};

/// Options of `test`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Only tests whose name contains this
    filter: Option<String>,
    /// Only these stages: build, check, unit, script, chart, netns, ebpf, servers, cluster
    #[arg(long, value_delimiter = ',', conflicts_with = "cluster")]
    stage: Vec<String>,
    /// The stages `servers` and `cluster`, which are not run by default: a real kube-apiserver, then a real cluster
    #[arg(long)]
    cluster: bool,
    /// Include what takes too long for every change: all stages, all scripts on the real API server, all rounds of the
    /// scripts, and the longest cases of the real cluster
    #[arg(long)]
    thorough: bool,
    /// Kubernetes version for these two stages: one of tests/kubernetes/kubernetes-*
    #[arg(long)]
    kubernetes: Option<String>,
    /// Accept that the stages that need root are skipped
    #[arg(long)]
    unprivileged: bool,
}

/// A stage of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Build,
    Check,
    /// Tests of single packages, including those in documentation.
    Unit,
    /// A test target of [`TESTS_PACKAGE`].
    Target {
        name: &'static str,
        /// Whether it creates namespaces or interfaces, or loads programs.
        privileged: bool,
        /// Number of tests in parallel per processor; the harness's default if `None`.
        per_processor: Option<usize>,
        /// Whether it has the standard harness, which can report durations.
        standard: bool,
    },
}

/// Tests against a real kube-apiserver. Not run by default: without a cache, it is built from source first.
const SERVERS: Stage = Stage::Target { name: "servers", privileged: false, per_processor: None, standard: false };

/// Tests in a real cluster, with the image of the debug build. Not run by default.
const CLUSTER: Stage = Stage::Target { name: "cluster", privileged: true, per_processor: None, standard: false };

const STAGES: [Stage; 9] = [
    Stage::Build,
    Stage::Check,
    Stage::Unit,
    Stage::Target { name: "script", privileged: false, per_processor: None, standard: false },
    Stage::Target { name: "chart", privileged: false, per_processor: None, standard: true },
    // Its tests mostly wait for the kernel and other processes.
    Stage::Target { name: "netns", privileged: true, per_processor: Some(2), standard: true },
    Stage::Target { name: "ebpf", privileged: true, per_processor: None, standard: true },
    SERVERS,
    CLUSTER,
];

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Self::Build => "build",
            Self::Check => "check",
            Self::Unit => "unit",
            Self::Target { name, .. } => name,
        }
    }
}

impl Options {
    fn wants(&self, stage: Stage) -> bool {
        if !self.stage.is_empty() {
            return self.stage.iter().any(|name| name == stage.name());
        }
        let needs_kubernetes = [SERVERS, CLUSTER].contains(&stage);
        if self.cluster { needs_kubernetes } else { self.thorough || !needs_kubernetes }
    }
}

/// Runs the stages and returns whether all succeeded.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<bool> {
    if let Some(unknown) = options.stage.iter().find(|name| !STAGES.iter().any(|stage| stage.name() == *name)) {
        let known: Vec<&str> = STAGES.iter().map(|stage| stage.name()).collect();
        bail!("there is no stage {unknown:?}; the stages are {}", known.join(", "));
    }
    let metadata = workspace.metadata()?;
    check_targets_are_known(&metadata)?;
    let missing = missing_privileges();
    let mut totals = Totals::default();
    let mut durations: Vec<(Stage, Duration)> = Vec::new();
    for stage in STAGES {
        if !options.wants(stage) {
            continue;
        }
        eprintln!("\n== {} ==", stage.name());
        let start = Instant::now();
        if let Err(error) = stage_run(workspace, options, stage, &missing, &mut totals) {
            eprintln!("{}: {error:#}", stage.name());
            totals.fail(stage.name(), &format!("{error:#}"));
        }
        let duration = start.elapsed();
        times::record(workspace, stage.name(), options.thorough, duration, &totals.take_times())?;
        durations.push((stage, duration));
    }
    println!();
    for (stage, time) in durations {
        println!("{:>8.1} s  {}", time.as_secs_f64(), stage.name());
    }
    print!("{totals}");
    Ok(totals.is_good())
}

fn stage_run(
    workspace: &Workspace,
    options: &Options,
    stage: Stage,
    missing: &[String],
    totals: &mut Totals,
) -> Result<()> {
    match stage {
        Stage::Build => drop(build::run(workspace, &build::Options::default())?),
        Stage::Check => {
            for rule in check::run(workspace, &check::Options::default())? {
                totals.fail("check", &rule);
            }
        }
        Stage::Unit => {
            // Build the tests of all stages at once: one after the other, each would keep a single processor busy.
            process::run(workspace.cargo().args(["test", "--locked", "--no-run"]))?;
            let mut tests = vec!["--lib".to_owned(), "--bins".to_owned()];
            for name in workspace.metadata()?.tests_of_packages() {
                tests.extend(["--test".to_owned(), name]);
            }
            tests.extend(options.filter.clone());
            cargo_test(workspace, options, "unit", &with_times(tests, &[]), totals)?;
            let mut documentation = vec!["--doc".to_owned()];
            documentation.extend(options.filter.clone());
            cargo_test(workspace, options, "unit", &documentation, totals)?;
        }
        Stage::Target { name, privileged: true, .. } if !missing.is_empty() => {
            let mut list = workspace.cargo();
            list.args(["test", "--locked", "--test", name, "--", "--list", "--format", "terse"]);
            let mut listing = Listing::default();
            let status = process::stream(&mut list, |line| listing.read(line))?;
            let filter = options.filter.as_deref().unwrap_or_default();
            let reason = missing.join(", ");
            for test in listing.tests().iter().filter(|test| test.contains(filter)) {
                totals.skip(name, test, &reason);
            }
            if !status.success() {
                bail!("listing the tests ended with {status}");
            }
            if !options.unprivileged {
                bail!("its tests need {reason}; --unprivileged accepts that they are skipped");
            }
        }
        Stage::Target { name, per_processor, standard, .. } => {
            if stage == CLUSTER {
                crate::cluster::variant_image(workspace)?;
                crate::cluster::image(workspace)?;
            }
            let mut arguments = vec!["--test".to_owned(), name.to_owned()];
            arguments.extend(options.filter.clone());
            let threads = per_processor.map(|per_processor| {
                let processors = std::thread::available_parallelism().map_or(1, usize::from);
                format!("--test-threads={}", processors.saturating_mul(per_processor))
            });
            let harness: Vec<String> = threads.into_iter().collect();
            if standard {
                arguments = with_times(arguments, &harness);
            } else if !harness.is_empty() {
                arguments.extend(["--".to_owned()].into_iter().chain(harness));
            }
            cargo_test(workspace, options, name, &arguments, totals)?;
        }
    }
    Ok(())
}

/// Arguments of `cargo test` with which the standard harness reports the duration of each test. On a stable toolchain
/// it does so only if RUSTC_BOOTSTRAP is set in its environment; set for the compiler, everything would be rebuilt.
fn with_times(tests: Vec<String>, harness: &[String]) -> Vec<String> {
    let runner = r#"target."cfg(unix)".runner=["env","RUSTC_BOOTSTRAP=1"]"#;
    let mut arguments = vec!["--config".to_owned(), runner.to_owned()];
    arguments.extend(tests);
    arguments.extend(["--", "-Zunstable-options", "--report-time"].map(str::to_owned));
    arguments.extend_from_slice(harness);
    arguments
}

/// Runs `cargo test` and adds its counts. The selected packages are always the same: another selection would unify
/// other features, and rebuild the dependencies.
fn cargo_test(
    workspace: &Workspace,
    options: &Options,
    stage: &'static str,
    arguments: &[String],
    totals: &mut Totals,
) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["test", "--locked", "--no-fail-fast"]).args(arguments);
    if let Some(release) = &options.kubernetes {
        command.env("CISTERN_KUBERNETES", release);
    }
    if options.thorough {
        command.env("CISTERN_THOROUGH", "1");
    }
    let before = totals.failures();
    let status = process::stream(&mut command, |line| totals.read(stage, line))?;
    if !status.success() && totals.failures() == before {
        bail!("`{}` ended with {status}", process::shown(&command));
    }
    Ok(())
}

/// A test target of the tests package without a stage would never run, and a stage without a target tests nothing.
fn check_targets_are_known(metadata: &Metadata) -> Result<()> {
    let staged: Vec<&str> = STAGES
        .iter()
        .filter_map(|stage| if let Stage::Target { name, .. } = stage { Some(*name) } else { None })
        .collect();
    for target in metadata.targets(TESTS_PACKAGE, "test") {
        if !staged.contains(&target) {
            bail!("no stage runs the test target {target} of {TESTS_PACKAGE}: name it in xtask/src/test.rs");
        }
    }
    Ok(())
}

/// Whether this process is root.
pub(crate) fn is_root() -> bool {
    status_field("Uid:").is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"))
}

/// The capabilities that this process lacks for namespaces, interfaces and kernel programs, by name.
fn missing_privileges() -> Vec<String> {
    /// Numbers from `capabilities(7)`.
    const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (21, "CAP_SYS_ADMIN"), (39, "CAP_BPF")];
    let mut missing = Vec::new();
    if !is_root() {
        missing.push("root".to_owned());
    }
    let effective = status_field("CapEff:").and_then(|hex| u64::from_str_radix(&hex, 16).ok()).unwrap_or(0);
    missing.extend(NEEDED.iter().filter(|(bit, _)| effective >> bit & 1 == 0).map(|(_, name)| (*name).to_owned()));
    missing
}

/// A field of `/proc/self/status`, without its name.
fn status_field(name: &str) -> Option<String> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned())
}
