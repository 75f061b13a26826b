//! The cluster: sets up, builds, and hands over to `cistern-cluster`, which lives beside the test support it is made of.

use crate::image;
use crate::process;
use crate::setup;
use crate::test::is_root;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
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
    let says = |option: &str| options.arguments.iter().any(|argument| argument.starts_with(option));
    let is_up = is("up") && !says("--help");
    if is_up && !is_root() {
        bail!("a cluster is made of namespaces: run it as root");
    }
    if is_up {
        setup::run(workspace)?;
    }
    let image = if is_up && !says("--image") && !says("--cni") { Some(image(workspace)?) } else { None };
    let mut build = workspace.cargo();
    // No package is named: it would unite other features than every other build does, and build much anew.
    build.args(["build", "--locked", "--bin", CLUSTER]);
    // What the other commands print is read by programs and by people in a hurry.
    if is_up {
        process::run(&mut build)?;
    } else {
        process::output(build.arg("--quiet"))?;
    }
    let program = workspace.metadata()?.target_directory.join("debug").join(CLUSTER);
    let mut command = Command::new(&program);
    command.args(&options.arguments);
    if let Some(image) = image {
        command.arg("--image").arg(image);
    }
    let error = command.exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}

/// Builds the image for a cluster on this machine.
pub(crate) fn image(workspace: &Workspace) -> Result<PathBuf> {
    image::run(workspace, &image::Options { debug: true, no_build: false, name: image::NAME.to_owned() })
}
