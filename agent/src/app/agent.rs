//! `cistern agent`: the process of the agent's role.

use super::agent_role::{self, Agent, Shared};
use super::operator_role::Operator;
use super::{host, kernel, operator, signals, uninstall};
use crate::api::server;
use crate::blocking::Ports;
use crate::clock::{self, Clock};
use crate::controllers;
use crate::install::NetworkConfiguration;
use crate::leases::{Endpoints, LeaseStore, deletions};
use crate::state::remembered::{self, unreadable};
use crate::state::{BootMarker, KeptLeases, LeaseFiles, ServedMarker, StateDir};
use anyhow::Context;
use cistern_core::ipam::lease::{Change, RecordTimes};
use cistern_core::settings::Settings;
use jiff::Timestamp;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::oneshot;
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
    let ports = Ports::threads();
    let stopped = "state-dir cannot be used; nothing was started or changed, running pods are not affected";
    let state = StateDir::open(&settings.state_dir).context(stopped)?;
    let _lock = tokio::select! {
        lock = state.lock() => lock.context(stopped)?,
        () = cancel.cancelled() => return Ok(()),
    };

    let client = crate::kubernetes::client::connect(
        settings.kubeconfig_path.as_deref(),
        settings.api_server.as_ref().map(|url| url.as_str()),
    )
    .await?;
    let (targets, maps) = kernel::open(&settings, &shared.findings, shared.clock, &ports.kernel)?;
    let (files, not_a_directory) = LeaseFiles::open(&state).context(stopped)?;
    let (leases, set_aside) = files.read().context(stopped)?;
    let incomplete = not_a_directory.is_some() || !set_aside.is_empty();
    shared.findings.add(remembered::STATE, not_a_directory.into_iter().chain(set_aside).map(|file| unreadable(&file)));
    let run_dir = settings.socket_path.parent().unwrap_or(Path::new("/run/cistern"));
    let marker = BootMarker::new(run_dir);
    let rebooted = !marker.is_set();
    let (lease_clock, began, times) = lease_clock(&marker);
    tracing::info!(
        node = settings.node_name,
        version = super::build_info::long(),
        ipam = settings.ipam.name(),
        leases = leases.len(),
        rebooted,
        "starting"
    );
    let listener = server::bind(&settings.socket_path)?;
    let operator = if settings.leader_election {
        Some(Operator {
            client: client.clone(),
            election: operator::election(&settings)?,
            ipam: operator::ipam(&settings)?,
            leader: shared.leader.clone(),
            targets: shared.targets.clone(),
            waits: shared.waits.clone(),
            clock: shared.clock,
        })
    } else {
        None
    };
    let (configuration, waits) = (NetworkConfiguration::of(&settings), shared.waits.clone());
    let (served, findings) = (ServedMarker::new(marker.clone(), ports.disk.clone()), shared.findings.clone());
    let lease_store = Box::new(Files(KeptLeases::new(files, &leases)));
    let role = cancel.child_token();
    let mut running = agent_role::start(
        Agent {
            build: super::build_info::long(),
            reserved_ports: kernel::reserved_ports(),
            settings: settings.clone(),
            client: client.clone(),
            targets,
            state: state.clone(),
            leases,
            incomplete,
            lease_store,
            lease_clock,
            boot: clock::boot().unwrap_or_default(),
            rebooted,
            times,
            host: Box::new(host::ThisHost),
            draw: Box::new(rand::random),
            maps,
            operator,
            listener: Some(listener),
            served: served.clone(),
            ports: ports.clone(),
            shared,
        },
        &role,
    )?;
    let answers = Arc::clone(&running.answers);
    let asked = controllers::uninstall::requested(settings.node_name.clone(), running.cilium_nodes.clone());
    let (request, mut requested) = oneshot::channel();
    running.spawn("uninstall", async move {
        // The receiver is there until the role has ended.
        let _ = request.send(asked.await);
        role.cancel();
    });
    let node = answers.node.clone();
    let is_ready = move || node.health().ready;
    running.spawn("replay DELs", deletions::replay(answers.endpoints.clone(), findings, ports.disk.clone()));
    running.spawn("mark served", served.keep(is_ready.clone()));
    running.spawn_blocking("mark boot", &ports.disk, mark_boot(marker, began, answers.endpoints.clone()));
    if let Some(configuration) = configuration {
        running.spawn_blocking("CNI configuration", &ports.disk, configuration.keep(is_ready, waits));
    }
    running.join().await.context("the agent terminates; pods continue with the kernel's state")?;
    if let Ok(request) = requested.try_recv()
        && !cancel.is_cancelled()
    {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = uninstall::clean_and_answer(client, &settings, &state, request, &ports.disk) => {}
        }
    }
    tracing::info!("stopped");
    Ok(())
}

/// The clock of leases: time since boot, added to the time of the boot as known by the first agent of this boot, so
/// that it never jumps while the machine is up. Returned with that time, and its relation to the times in the records.
fn lease_clock(marker: &BootMarker) -> (Clock, Timestamp, RecordTimes) {
    let now = Timestamp::now();
    let Some(uptime) = clock::uptime() else {
        return (Clock::following_runtime(now), now, RecordTimes::Continue);
    };
    let (began, times) = match marker.began() {
        Some(began) => (began, RecordTimes::Continue),
        None => (now.checked_sub(uptime).unwrap_or(now), RecordTimes::BeginAnew),
    };
    (Clock::following_runtime(began.checked_add(uptime).unwrap_or(now)), began, times)
}

/// Sets the marker of the boot once the cleanup after the reboot is complete and on disk; never returns. If the disk
/// fails for long, the next agent repeats the cleanup.
async fn mark_boot(marker: BootMarker, began: Timestamp, endpoints: Endpoints) {
    if endpoints.durable().await.is_ok()
        && let Err(error) = marker.set(began)
    {
        tracing::error!(%error, "the boot marker is not written: the next start repeats the cleanup after the reboot");
    }
    std::future::pending::<()>().await;
}

/// Lease files as the lease owner's store.
struct Files(KeptLeases);

impl LeaseStore for Files {
    fn write(&mut self, change: &Change) -> Result<(), String> {
        self.0.write(change).map_err(|error| error.to_string())
    }
}
