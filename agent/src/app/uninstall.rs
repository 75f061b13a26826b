//! Uninstallation: the agent's part on its node, and `cistern uninstall`, which requests it from all agents.

use crate::blocking::Blocking;
use crate::datapath::Pins;
use crate::install::{NetworkConfiguration, plugin};
use crate::kubernetes::client::{Client, connect};
use crate::kubernetes::uninstall::{Answers, Objects};
use crate::netlink::targets::{RouterAddress, Routes, release_pod_routes};
use crate::reconciler::BlockingOperations;
use crate::state::{BootMarker, StateDir};
use cistern_core::settings::Settings;
use cistern_core::uninstall::{Reply, pending, reply};
use clap::Args;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;

/// Polling interval of the own CiliumNode after the uninstallation.
const IDLE: Duration = Duration::from_secs(2);

/// Removes Cistern from this node, answers the request, and then only answers further requests, until dropped. The
/// agent's tasks must have ended. Running pods keep their interfaces and addresses; their leases remain on disk, so
/// that a later installation does not reallocate their addresses.
pub async fn clean_and_answer(
    client: Client,
    settings: &Settings,
    state: &StateDir,
    mut request: String,
    port: &Blocking,
) {
    let objects = Objects::new(client, &settings.namespace);
    let node = &settings.node_name;
    loop {
        tracing::warn!(request, "removing Cistern from this node, as requested by its CiliumNode");
        let (settings, state) = (settings.clone(), state.clone());
        let failures = port.run(move || clean(&settings, &state)).await;
        for failure in &failures {
            tracing::error!("{failure}");
        }
        while let Err(error) = objects.answer(node, &request, &failures).await {
            tracing::warn!(%error, "the answer to the uninstall request cannot be written");
            tokio::time::sleep(IDLE).await;
        }
        tracing::warn!("request answered; the agent is idle until it is terminated");
        request = loop {
            tokio::time::sleep(IDLE).await;
            // If the API server does not answer, poll again.
            let answers = objects.answers(Some(node)).await.unwrap_or_default();
            let next = answers.iter().find_map(|(_, asked, answer)| pending(asked.as_deref(), answer.as_deref()));
            if let Some(next) = next {
                break next.to_owned();
            }
        };
    }
}

/// First no new pods, then no new flows, then the rest; failures do not stop the other steps.
fn clean(settings: &Settings, state: &StateDir) -> Vec<String> {
    let mut failures = Vec::new();
    let mut note = |what: &str, outcome: Result<(), String>| {
        failures.extend(outcome.err().map(|error| format!("{what}: {error}")));
    };
    if let Some(configuration) = NetworkConfiguration::of(settings) {
        note("CNI configuration", configuration.remove());
    }
    note("CNI plugin", plugin::remove(&settings.cni_bin_path).map_err(|error| error.to_string()));
    note(
        "kernel programs",
        Pins::new(settings.pin_root()).remove_all().map(drop).map_err(|error| format!("{error:#}")),
    );
    note("routes", remove_all(Routes::open()));
    note("routes to pods", release_pod_routes().map_err(|error| error.to_string()));
    note("router address", remove_all(RouterAddress::open()));
    let run = settings.socket_path.parent().unwrap_or(Path::new("/run/cistern"));
    note("state", state.clear().map_err(|error| error.to_string()));
    // Without the marker of this boot, the next agent checks which of the leases' pods still exist.
    note("marker of this boot", BootMarker::new(run).clear().map_err(|error| error.to_string()));
    // The plugin is gone, and what the server removed at its end is gone already.
    let _ = std::fs::remove_file(&settings.socket_path);
    let _ = std::fs::remove_file(crate::cni::LOCK_FILE);
    failures
}

/// Deletes all entries of a target.
fn remove_all<O: BlockingOperations>(target: Result<O, O::Error>) -> Result<(), String>
where
    O::Error: std::fmt::Display,
{
    let mut target = target.map_err(|error| error.to_string())?;
    for key in target.observe().map_err(|error| error.to_string())?.into_keys() {
        target.delete(&key).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// `cistern uninstall`
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Time allowed for the nodes to answer, in seconds
    #[arg(long, default_value = "120s", value_parser = seconds, value_name = "TIME")]
    timeout: Duration,
    /// Continue without the nodes that do not answer or report errors
    #[arg(long)]
    ignore_unanswered: bool,
    /// Deployment of the operators, to be scaled to zero when the nodes are clean
    #[arg(long, value_name = "NAME")]
    operator_deployment: Option<String>,
    /// Namespace of agents and operators
    #[arg(long, env = "CISTERN_K8S_NAMESPACE", default_value = "kube-system", value_name = "NAME")]
    k8s_namespace: String,
    /// Kubeconfig file; default: the pod's service account
    #[arg(long, value_name = "PATH")]
    k8s_kubeconfig_path: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix('s').unwrap_or(text).parse().ok().filter(|seconds| *seconds > 0);
    number.map(Duration::from_secs).ok_or_else(|| "expected a number of seconds such as 120s".to_owned())
}

/// Polling interval of the answers.
const LOOK: Duration = Duration::from_millis(500);

/// Requests the uninstallation from the agent of every CiliumNode, waits for their answers, then stops the operators
/// and deletes their objects. Prints each node as it answers.
///
/// # Errors
/// The nodes that did not answer in time, or reported errors; or an error of the API server.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let client = connect(options.k8s_kubeconfig_path.as_deref(), None).await?;
    let objects = Objects::new(client, &options.k8s_namespace);
    let request = format!("{:016x}", rand::random::<u64>());
    let deadline = Instant::now() + options.timeout;
    let mut replies: BTreeMap<String, Reply> = BTreeMap::new();
    let open = loop {
        let answers: Answers = objects.answers(None).await?;
        for (node, asked, answer) in &answers {
            if asked.as_deref() != Some(request.as_str()) {
                objects.ask(node, &request).await?;
            }
            let now = reply(&request, answer.as_deref());
            if now != Reply::None && replies.insert(node.clone(), now.clone()).is_none() {
                match now {
                    Reply::Failed(why) => println!("{node}: not clean: {why}"),
                    _ => println!("{node}: clean"),
                }
            }
        }
        let open: Vec<String> =
            answers.iter().map(|(node, _, _)| node.clone()).filter(|node| !replies.contains_key(node)).collect();
        if open.is_empty() || Instant::now() >= deadline {
            break open;
        }
        tokio::time::sleep(LOOK).await;
    };
    let failed: Vec<String> = replies
        .iter()
        .filter_map(|(node, reply)| match reply {
            Reply::Failed(why) => Some(format!("{node} ({why})")),
            _ => None,
        })
        .chain(open.into_iter().map(|node| format!("{node} (no answer within {} s)", options.timeout.as_secs())))
        .collect();
    if !failed.is_empty() {
        let nodes = failed.join(", ");
        anyhow::ensure!(
            options.ignore_unanswered,
            "nodes that are not clean: {nodes}; the others are. Repeat the command when they can answer, delete the CiliumNodes of \
             deleted nodes, or continue without them by --ignore-unanswered (uninstall.ignoreUnanswered=true)"
        );
        println!("continuing without {nodes}");
    }
    objects.end_operators(options.operator_deployment.as_deref()).await?;
    println!("operators stopped, their Lease and records deleted; CiliumNodes and their CRD remain");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds() {
        assert_eq!(seconds("120s"), Ok(Duration::from_secs(120)));
        assert_eq!(seconds("5"), Ok(Duration::from_secs(5)));
        assert!(seconds("2m").is_err() && seconds("0s").is_err());
    }
}
