//! `cistern install`: prerequisites of the agent on a node; run as root, by the chart's init container.

use crate::install::{kernel, plugin};
use anyhow::Context;
use cistern_core::cni::conflist::PLUGIN;
use clap::Args;
use std::path::{Path, PathBuf};

/// Paths on the host.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Directory of the container runtime's CNI plugins
    #[arg(long, default_value = "/opt/cni/bin", value_name = "PATH")]
    cni_bin_path: PathBuf,
    /// Mount point of bpffs
    #[arg(long, default_value = "/sys/fs/bpf", value_name = "PATH")]
    bpf_root: PathBuf,
    /// The plugin to install; default: `cistern-cni` beside this program
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Do not install the plugin
    #[arg(long)]
    no_plugin: bool,
}

/// Installs everything, and prints what was done.
///
/// # Errors
/// The failed step; earlier ones are done, and the command can be repeated.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let source = match &options.plugin {
        Some(path) => path.clone(),
        None => std::env::current_exe().context("finding this program")?.with_file_name(PLUGIN),
    };
    let bpffs = if kernel::mount_bpffs(&options.bpf_root)? { "mounted" } else { "was mounted" };
    println!("{}: bpffs {bpffs}", options.bpf_root.display());
    for name in kernel::set_sysctls(Path::new("/proc/sys"))? {
        println!("/proc/sys/{name}: set");
    }
    if !options.no_plugin {
        plugin::install(&source, &options.cni_bin_path)?;
        println!("{}: installed", options.cni_bin_path.join(PLUGIN).display());
    }
    Ok(())
}
