//! The demo: installs what is missing, builds, and runs `cistern-demo` of the tests package.

use crate::build;
use crate::cluster;
use crate::process;
use crate::setup;
use crate::test::is_root;
use crate::workspace::{TESTS_PACKAGE, Workspace};
use anyhow::{Context, Result, bail};
use std::process::Command;

const DEMO: &str = "cistern-demo";

/// Options of `demo`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Leave the two nodes running, and print how to inspect them
    #[arg(long)]
    keep: bool,
    /// Run in a real Kubernetes cluster, using kubectl
    #[arg(long)]
    cluster: bool,
}

/// Runs the demo; fails if one of its checks fails.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if !is_root() {
        bail!("the demo creates namespaces and loads kernel programs: run it as root");
    }
    if options.cluster {
        return cluster::demo(workspace, options.keep);
    }
    if !workspace.metadata()?.targets(TESTS_PACKAGE, "bin").contains(&DEMO) {
        bail!("the package {TESTS_PACKAGE} has no program {DEMO}");
    }
    setup::run(workspace)?;
    let artifacts = build::run(workspace, &build::Options::default())?;
    let directory = artifacts.cistern.parent().context("the path of the binaries has no parent")?;
    let mut demo = Command::new(directory.join(DEMO));
    demo.current_dir(workspace.root());
    if options.keep {
        demo.arg("--keep");
    }
    process::run(&mut demo)
}
