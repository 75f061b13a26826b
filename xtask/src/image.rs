//! The container image, from scratch.

use crate::build::{self, Artifacts, megabytes};
use crate::process::{self, find};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of `image`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Use the debug build and this machine's libraries: fast, for tests on this machine only
    #[arg(long)]
    pub(crate) debug: bool,
    /// Only fill target/image with what the Containerfile copies, for `docker build` and the like
    #[arg(long)]
    pub(crate) no_build: bool,
    /// The variant that tests upgrade to and come back from, as target/image/cistern-variant.tar
    #[arg(skip)]
    pub(crate) variant: bool,
    /// Name and tag
    #[arg(long, default_value = NAME, value_name = "NAME:TAG")]
    pub(crate) name: String,
}

/// The chart's default: the name that image builders use without a registry.
pub(crate) const NAME: &str = concat!("localhost/cistern:", env!("CARGO_PKG_VERSION"));

/// Name of the variant's image.
pub(crate) const VARIANT: &str = "localhost/cistern:variant";

/// A larger image contains files by mistake.
const LARGEST_MB: f64 = 40.0;

/// The CA certificates of this machine; the image has them at the path that TLS libraries expect.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Builds the image and returns the archive, `target/image/cistern.tar`, for `ctr images import`.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<PathBuf> {
    let artifacts = build::run(workspace, &build::Options { release: !options.debug, variant: options.variant })?;
    let directory = workspace.metadata()?.target_directory.join("image");
    let root = directory.join("root");
    remove_directory(&root)?;
    fill(&root, &artifacts, options.debug)?;
    let archive = directory.join(if options.variant { "cistern-variant.tar" } else { "cistern.tar" });
    if options.no_build {
        println!("{}: build it with `docker build --file Containerfile {}`", root.display(), directory.display());
        return Ok(archive);
    }
    if find("buildah").is_none() {
        bail!("buildah is missing: `cargo xtask setup` installs it");
    }
    remove_file(&archive)?;
    // A separate store, so that the user's is not touched and nothing remains.
    let store = Store { directory: directory.join("store") };
    remove_directory(&store.directory)?;
    let outcome = store.build(workspace, &directory, &options.name, &archive);
    remove_directory(&store.directory)?;
    outcome?;
    let size = megabytes(&archive)?;
    println!("{size:>9.2} MB  {} ({})", archive.display(), options.name);
    if size > LARGEST_MB && !options.debug {
        bail!("the image has {size:.1} MB; expected less than {LARGEST_MB} MB");
    }
    Ok(archive)
}

/// Writes the content of the image.
fn fill(root: &Path, artifacts: &Artifacts, debug: bool) -> Result<()> {
    for program in [&artifacts.cistern, &artifacts.cistern_cni] {
        let name = program.file_name().context("a program without a name")?;
        let target = root.join("usr/bin").join(name);
        copy(program, &target)?;
        if debug {
            process::run(Command::new("strip").arg("--strip-debug").arg(&target))?;
            for library in libraries(program)? {
                copy(&library, &root.join(library.strip_prefix("/").unwrap_or(&library)))?;
            }
        }
    }
    if !Path::new(AUTHORITIES).exists() {
        bail!("{AUTHORITIES} is missing: `cargo xtask setup` installs the package ca-certificates");
    }
    copy(Path::new(AUTHORITIES), &root.join(AUTHORITIES.trim_start_matches('/')))
}

/// The shared libraries of a program, by the paths that the dynamic linker resolves.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let listed = process::output(Command::new("ldd").arg(program))?;
    Ok(listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// Storage for buildah.
struct Store {
    directory: PathBuf,
}

impl Store {
    fn buildah(&self, arguments: &[&OsStr]) -> Command {
        let mut command = Command::new("buildah");
        command.arg("--root").arg(self.directory.join("root")).arg("--runroot").arg(self.directory.join("run"));
        // The driver works in containers, too, and no container is run by this build.
        command.args(["--storage-driver", "vfs"]).args(arguments);
        command
    }

    fn build(&self, workspace: &Workspace, context: &Path, name: &str, archive: &Path) -> Result<()> {
        let containerfile = workspace.root().join("Containerfile");
        let mut build = self.buildah(&["build".as_ref(), "--isolation".as_ref(), "chroot".as_ref()]);
        build.args(["--quiet", "--tag", name, "--file"]).arg(containerfile).arg(context);
        process::run(&mut build)?;
        let destination = format!("oci-archive:{}:{name}", archive.display());
        process::run(&mut self.buildah(&["push".as_ref(), "--quiet".as_ref(), name.as_ref(), destination.as_ref()]))
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(directory) = to.parent() {
        fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    }
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display())).map(drop)
}

fn remove_directory(path: &Path) -> Result<()> {
    if path.exists() {
        fs::remove_dir_all(path).with_context(|| format!("emptying {}", path.display()))
    } else {
        Ok(())
    }
}

fn remove_file(path: &Path) -> Result<()> {
    if path.exists() { fs::remove_file(path).with_context(|| format!("removing {}", path.display())) } else { Ok(()) }
}
