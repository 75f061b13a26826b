//! `cistern install`: what a node has to have before the agent starts; run as root, by the chart's init container.

use crate::install::{kernel, plugin};
use anyhow::Context;
use cistern_core::cni::conflist::PLUGIN;
use clap::Args;
use std::path::{Path, PathBuf};

/// Where things are on the host.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Directory that the container runtime takes CNI plugins from
    #[arg(long, default_value = "/opt/cni/bin", value_name = "PATH")]
    cni_bin_path: PathBuf,
    /// Where bpffs is mounted, or to be mounted
    #[arg(long, default_value = "/sys/fs/bpf", value_name = "PATH")]
    bpf_root: PathBuf,
    /// The plugin to install; `cistern-cni` beside this program by default
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Leave the plugin to somebody else
    #[arg(long)]
    no_plugin: bool,
}

/// Does it, and prints what was done.
///
/// # Errors
/// The step that failed; those before it are done, and the command can be repeated.
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
