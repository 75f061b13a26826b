//! The demo: sets up, builds, and hands over to `cistern-demo`, which lives beside the test support it is made of.

use crate::build;
use crate::cluster;
use crate::process;
use crate::setup;
use crate::test::is_root;
use crate::workspace::{TESTS_PACKAGE, Workspace};
use anyhow::{Context, Result, bail};
use std::process::Command;

const DEMO: &str = "cistern-demo";

/// What `demo` can be told.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Leave the two nodes running, and say how to look around
    #[arg(long)]
    keep: bool,
    /// In a real Kubernetes cluster, told by kubectl
    #[arg(long)]
    cluster: bool,
}

/// Runs the demo; fails when anything it shows is not so.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if !is_root() {
        bail!("the demo makes namespaces and loads kernel programs: run it as root");
    }
    if options.cluster {
        return cluster::demo(workspace, options.keep);
    }
    if !workspace.metadata()?.targets(TESTS_PACKAGE, "bin").contains(&DEMO) {
        bail!("the package {TESTS_PACKAGE} has no program {DEMO}");
    }
    setup::run(workspace)?;
    let artifacts = build::run(workspace, &build::Options::default())?;
    let directory = artifacts.cistern.parent().context("the binaries lie in no folder")?;
    let mut demo = Command::new(directory.join(DEMO));
    demo.current_dir(workspace.root());
    if options.keep {
        demo.arg("--keep");
    }
    process::run(&mut demo)
}
