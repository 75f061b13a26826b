//! The binaries.

use crate::ebpf;
use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Options of `build`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Optimised and statically linked
    #[arg(long)]
    pub(crate) release: bool,
    /// The variant that tests upgrade to and come back from (feature `test-variant`)
    #[arg(skip)]
    pub(crate) variant: bool,
}

/// The built files.
#[derive(Debug)]
pub(crate) struct Artifacts {
    /// The agent, operator and command line.
    pub(crate) cistern: PathBuf,
    /// The CNI plugin.
    pub(crate) cistern_cni: PathBuf,
    object: PathBuf,
}

impl Artifacts {
    /// Prints each file with its size.
    pub(crate) fn print_sizes(&self) -> Result<()> {
        for path in [&self.cistern, &self.cistern_cni, &self.object] {
            println!("{:>9.2} MB  {}", megabytes(path)?, path.display());
        }
        Ok(())
    }
}

/// The size of a file in millions of bytes.
pub(crate) fn megabytes(path: &Path) -> Result<f64> {
    let length = std::fs::metadata(path).with_context(|| format!("looking at {}", path.display()))?.len();
    #[expect(clippy::cast_precision_loss, reason = "files are far smaller than 2^52 bytes")]
    Ok(length as f64 / 1e6)
}

/// Builds the kernel programs, then the binaries that embed them.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<Artifacts> {
    let object = ebpf::build(workspace)?;
    let target_directory = workspace.metadata()?.target_directory;
    let mut command = workspace.cargo();
    command.args(["build", "--locked", "--bins"]);
    if options.variant {
        command.args(["--features", "cistern/test-variant"]);
    }
    let output = if options.release {
        // With an explicit target the flag below applies to the binaries only, and not to build scripts and macros,
        // which cannot be linked statically.
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        command.args(["--release", "--package", "cistern", "--target", &target]);
        command.env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static").env_remove("RUSTFLAGS");
        target_directory.join(target).join("release")
    } else {
        target_directory.join("debug")
    };
    process::run(&mut command)?;
    Ok(Artifacts { cistern: output.join("cistern"), cistern_cni: output.join("cistern-cni"), object })
}
