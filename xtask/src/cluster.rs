//! The cluster: installs what is missing, builds, and runs `cistern-cluster` of the tests package.

use crate::image;
use crate::process;
use crate::setup;
use crate::test::is_root;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const CLUSTER: &str = "cistern-cluster";

/// Options of `cluster`, passed to `cistern-cluster`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// `up`, `down`, `status`, `kubectl …`, `helm …`, `shell NODE`, `load IMAGE`, `logs` and more; see `--help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Replaces this process by it.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let is = |word: &str| options.arguments.first().is_some_and(|first| first == word);
    let says = |option: &str| options.arguments.iter().any(|argument| argument.starts_with(option));
    let is_up = is("up") && !says("--help");
    if is_up && !is_root() {
        bail!("a cluster consists of namespaces: run it as root");
    }
    if is_up {
        setup::run(workspace)?;
    }
    let image = if is_up && !says("--image") && !says("--cni") { Some(image(workspace)?) } else { None };
    // The output of the other commands may be piped: keep the build quiet.
    let program = program(workspace, !is_up)?;
    let mut command = Command::new(&program);
    command.args(&options.arguments);
    if let Some(image) = image {
        command.arg("--image").arg(image);
    }
    let error = command.exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}

/// Brings a cluster up and runs the demo in it.
pub(crate) fn demo(workspace: &Workspace, keep: bool) -> Result<()> {
    with_cluster(workspace, keep, |program, image| {
        process::run(Command::new(program).arg("up").arg("--image").arg(image))?;
        process::run(Command::new(program).arg("demo"))
    })
}

/// Builds `cistern-cluster` and Cistern's image for a command that brings a cluster up and uses it; takes the cluster
/// down afterwards unless `keep` is set.
pub(crate) fn with_cluster(
    workspace: &Workspace,
    keep: bool,
    act: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<()> {
    setup::run(workspace)?;
    let image = image(workspace)?;
    let program = program(workspace, false)?;
    let outcome = act(&program, &image);
    if keep {
        println!("`cargo xtask cluster kubectl …` inspects it, `cargo xtask cluster down` deletes it");
        return outcome;
    }
    let down = process::run(Command::new(&program).arg("down"));
    outcome.and(down)
}

/// Builds `cistern-cluster`. No package is selected: that would unify other features than the other builds do, and
/// rebuild many crates.
fn program(workspace: &Workspace, quiet: bool) -> Result<PathBuf> {
    let mut build = workspace.cargo();
    build.args(["build", "--locked", "--bin", CLUSTER]);
    if quiet {
        process::output(build.arg("--quiet"))?;
    } else {
        process::run(&mut build)?;
    }
    Ok(workspace.metadata()?.target_directory.join("debug").join(CLUSTER))
}

/// Builds the image for a cluster on this machine.
pub(crate) fn image(workspace: &Workspace) -> Result<PathBuf> {
    image::run(workspace, &options(image::NAME, false))
}

/// Builds the image of the variant that the upgrade test rolls out. The programs of the normal build are put back in their place
/// by the next [`image`].
pub(crate) fn variant_image(workspace: &Workspace) -> Result<PathBuf> {
    image::run(workspace, &options(image::VARIANT, true))
}

fn options(name: &str, variant: bool) -> image::Options {
    image::Options { debug: true, no_build: false, variant, name: name.to_owned() }
}
