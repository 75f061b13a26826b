//! Paths of the workspace, and what Cargo and git know about it.

use crate::process;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Rust target of the kernel programs.
pub(crate) const EBPF_TARGET: &str = "bpfel-unknown-none";
/// The package of the kernel programs.
pub(crate) const EBPF_PACKAGE: &str = "cistern-ebpf";
/// The package of the tests that need more than one crate.
pub(crate) const TESTS_PACKAGE: &str = "cistern-tests";

/// The workspace that this program was built from.
#[derive(Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// The workspace above this package.
    pub(crate) fn locate() -> Result<Self> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().context("xtask lies in no workspace")?.to_owned();
        Ok(Self { root })
    }

    /// The folder of the root manifest.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Cargo, run in this workspace.
    pub(crate) fn cargo(&self) -> Command {
        process::cargo(&self.root)
    }

    /// The files that git tracks or would track, relative to the root, sorted, without deleted ones.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>> {
        let listed = process::output(Command::new("git").current_dir(&self.root).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "-z",
        ]))?;
        let mut files: Vec<PathBuf> =
            listed.split_terminator('\0').map(PathBuf::from).filter(|file| self.root.join(file).is_file()).collect();
        files.sort();
        files.dedup();
        Ok(files)
    }

    /// Cargo's metadata of our own packages.
    pub(crate) fn metadata(&self) -> Result<Metadata> {
        let mut command = self.cargo();
        command.args(["metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]);
        let json = process::output(&mut command)?;
        serde_json::from_str(&json).context("the output of `cargo metadata` has an unknown format")
    }
}

/// The part of `cargo metadata` that is needed here.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) target_directory: PathBuf,
}

impl Metadata {
    /// The targets of one kind (`bin`, `test`, `bench`) of one package, by name.
    pub(crate) fn targets(&self, package: &str, kind: &str) -> Vec<&str> {
        self.packages
            .iter()
            .filter(|candidate| candidate.name == package)
            .flat_map(|package| &package.targets)
            .filter(|target| target.kind.iter().any(|of| of == kind))
            .map(|target| target.name.as_str())
            .collect()
    }

    /// The test targets in the packages they test, by name.
    pub(crate) fn tests_of_packages(&self) -> Vec<String> {
        self.packages
            .iter()
            .filter(|package| package.name != TESTS_PACKAGE)
            .flat_map(|package| self.targets(&package.name, "test"))
            .map(str::to_owned)
            .collect()
    }
}

/// One of our packages.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
}

/// A line under `[dependencies]`, `[dev-dependencies]` or `[build-dependencies]`.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// None for a normal dependency, else `dev` or `build`.
    pub(crate) kind: Option<String>,
    /// None for a path dependency.
    pub(crate) source: Option<String>,
}

/// A build target.
#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
}
