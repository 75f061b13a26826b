//! Benchmarks.

use crate::build;
use crate::image;
use crate::process;
use crate::workspace::{TESTS_PACKAGE, Workspace};
use anyhow::{Result, bail};
use std::path::PathBuf;

/// Options of `bench`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Only the bench of this name: sizes, or a bench target of the tests package
    name: Option<String>,
}

/// The benchmark implemented by this module.
const SIZES: &str = "sizes";

/// The benchmark in a real cluster, which runs the image.
const KUBELET: &str = "kubelet";

/// The benchmark with the small API server of 5,000 nodes, whose own cost should be small in the measured times.
const SCALE: &str = "scale";

/// Builds optimised binaries, then runs the benchmarks one after the other, so that they do not affect each other.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let metadata = workspace.metadata()?;
    let mut names = vec![SIZES];
    names.extend(metadata.targets(TESTS_PACKAGE, "bench"));
    if let Some(name) = &options.name {
        if !names.contains(&name.as_str()) {
            bail!("there is no bench {name:?}; the benches are {}", names.join(", "));
        }
        names.retain(|known| known == name);
    }
    let artifacts = build::run(workspace, &build::Options { release: true, variant: false })?;
    for name in names {
        println!("\n== {name} ==");
        if name == SIZES {
            artifacts.print_sizes()?;
            image(workspace)?;
            continue;
        }
        // The benchmark itself need not be optimised: it measures the programs above, and the kernel.
        let mut command = workspace.cargo();
        command.args(["bench", "--locked", "--profile", "dev", "--bench", name]);
        command.env("CISTERN", &artifacts.cistern).env("CISTERN_CNI", &artifacts.cistern_cni);
        if name == KUBELET {
            command.env("CISTERN_IMAGE", image(workspace)?);
        }
        if name == SCALE {
            command.args(["--config", "profile.dev.package.cistern-tests.opt-level=1"]);
        }
        process::run(&mut command)?;
    }
    Ok(())
}

/// The image of the optimised build.
fn image(workspace: &Workspace) -> Result<PathBuf> {
    image::run(
        workspace,
        &image::Options { debug: false, no_build: false, variant: false, name: image::NAME.to_owned() },
    )
}
