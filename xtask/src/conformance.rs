//! Kubernetes' network e2e specs, in a real cluster with Cistern.

use crate::cluster;
use crate::process;
use crate::test::is_root;
use crate::workspace::Workspace;
use anyhow::{Result, bail};
use std::process::Command;

/// Options of `conformance`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Only specs whose name matches this
    #[arg(long, value_name = "REGEX")]
    focus: Option<String>,
    /// Kubernetes version: one of tests/kubernetes/kubernetes-*
    #[arg(long, value_name = "VERSION")]
    kubernetes: Option<String>,
    /// Leave the cluster up
    #[arg(long)]
    keep: bool,
}

/// Runs the specs that tests/conformance does not exclude; fails unless all of them pass.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    if !is_root() {
        bail!("a cluster consists of namespaces: run it as root");
    }
    let output = workspace.metadata()?.target_directory.join("conformance");
    cluster::with_cluster(workspace, options.keep, |program, image| {
        let mut command = Command::new(program);
        command.arg("conformance").arg("--image").arg(image).arg("--output").arg(&output);
        for (flag, value) in [("--focus", &options.focus), ("--kubernetes", &options.kubernetes)] {
            if let Some(value) = value {
                command.arg(flag).arg(value);
            }
        }
        process::run(&mut command)
    })
}
