//! `cistern operator`: the process of the operator's role.

use super::agent_role::Shared;
use super::operator_role::{self, Ipam, Operator};
use super::probes::OperatorProbe;
use super::supervisor::Supervisor;
use super::{Refused, metrics, signals};
use crate::api::http;
use crate::clock::Clock;
use crate::kubernetes::election::Election;
use crate::telemetry::metrics::render;
use anyhow::Context;
use cistern_core::election::evaluate::Timings;
use cistern_core::settings::{IpamMode, Settings};
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// An error at startup, or a task that ended unexpectedly.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    signals::until_signal(|cancel| run_until(settings, cancel)).await
}

async fn run_until(settings: Settings, cancel: CancellationToken) -> anyhow::Result<()> {
    let shared = Shared::new(Clock::system());
    let client = crate::kubernetes::client::connect(
        settings.kubeconfig_path.as_deref(),
        settings.api_server.as_ref().map(|url| url.as_str()),
    )
    .await?;
    let operator = Operator {
        client,
        election: election(&settings)?,
        ipam: ipam(&settings)?,
        leader: shared.leader.clone(),
        targets: shared.targets.clone(),
        waits: shared.waits.clone(),
        clock: shared.clock,
    };
    tracing::info!(version = super::build_info::long(), identity = operator.election.identity, "starting operator");
    let mut tasks = Supervisor::new("operator process", &cancel);
    let token = tasks.token();
    tasks.spawn("operator", operator_role::run(operator, token.clone()));
    if let Some(address) = settings.operator_api_address {
        let probe = OperatorProbe { leader: shared.leader.reader(), waits: shared.waits.reader() };
        let serve =
            http::serve(address.0, http::probes(Arc::new(probe)), "probes", shared.waits.clone(), token.clone());
        tasks.spawn("probes", async move { Ok(serve.await?) });
    }
    if let Some(address) = settings.operator_metrics_address {
        let (waits, targets, leader) = (shared.waits.reader(), shared.targets.reader(), shared.leader.reader());
        let gather: http::Metrics = Arc::new(move || {
            let text = render(&metrics::operator(&waits, &targets, &leader, shared.clock.now()));
            Box::pin(std::future::ready(text))
        });
        let serve = http::serve(address.0, http::metrics(gather), "metrics", shared.waits.clone(), token);
        tasks.spawn("metrics", async move { Ok(serve.await?) });
    }
    let outcome = tasks.join().await.context("the operator ends");
    tracing::info!("stopped");
    outcome
}

/// The election of this process. The identity ends in random digits: a process and its successor on the same node are
/// different candidates.
///
/// # Errors
/// Durations with which two processes could lead at once.
pub fn election(settings: &Settings) -> anyhow::Result<Election> {
    let timings = Timings::new(settings.lease_duration, settings.renew_deadline, settings.retry_period)
        .map_err(|error| Refused(format!("leader-election: {error}")))?;
    Ok(Election {
        namespace: settings.namespace.clone(),
        identity: format!("{}-{:08x}", settings.node_name, rand::random::<u32>()),
        timings,
    })
}

/// The operator's IPAM mode, by these settings.
///
/// # Errors
/// An invalid pool.
pub fn ipam(settings: &Settings) -> anyhow::Result<Ipam> {
    match settings.ipam {
        IpamMode::Kubernetes => Ok(Ipam::External),
        IpamMode::ClusterPool => {
            // The settings were checked with it, and its warnings are among theirs.
            let (pool, _) = settings.cluster_pool().map_err(|errors| {
                let errors: Vec<String> = errors.iter().map(|error| format!("{}: {error}", error.setting())).collect();
                Refused(format!("{}; nothing was started or changed", errors.join("; ")))
            })?;
            Ok(Ipam::ClusterPool(Box::new(pool)))
        }
    }
}
