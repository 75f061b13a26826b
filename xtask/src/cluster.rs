//! The cluster: sets up, builds, and hands over to `cistern-cluster`, which lives beside the test support it is made of.

use crate::process;
use crate::setup;
use crate::test::is_root;
use crate::workspace::{TESTS_PACKAGE, Workspace};
use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::process::Command;

const CLUSTER: &str = "cistern-cluster";

/// What `cluster` can be told: `cistern-cluster` knows.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// `up`, `down`, `status`, `kubectl …`, `helm …`, `shell NODE`, `load IMAGE`, `logs` and more; `--help` explains them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs it in place of this program.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let is = |word: &str| options.arguments.first().is_some_and(|first| first == word);
    if is("up") && !is_root() {
        bail!("a cluster is made of namespaces: run it as root");
    }
    if is("up") {
        setup::run(workspace)?;
    }
    let mut build = workspace.cargo();
    build.args(["build", "--locked", "--package", TESTS_PACKAGE, "--bin", CLUSTER]);
    // What the other commands print is read by programs and by people in a hurry.
    if is("up") {
        process::run(&mut build)?;
    } else {
        process::output(build.arg("--quiet"))?;
    }
    let target = workspace.metadata()?.target_directory;
    let program = target.join("debug").join(CLUSTER);
    let mut command = Command::new(&program);
    command.args(&options.arguments);
    let says = |option: &str| options.arguments.iter().any(|argument| argument.starts_with(option));
    if is("up") && !says("--image") && !says("--cni") {
        command.arg("--image").arg(target.join("image/cistern.tar"));
    }
    let error = command.exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}
