//! `cistern agent`: the process around the agent's role.

use super::agent_api::{Answers, told_back};
use super::agent_role::{self, Agent, Shared};
use super::network_configuration::NetworkConfiguration;
use super::operator_role::Operator;
use super::remembered::{self, unreadable};
use super::{Refused, host, kernel, operator, signals, uninstall};
use crate::api::server;
use crate::blocking::Ports;
use crate::clock::{self, Clock};
use crate::cni::deletion_queue::{self, DeletionQueue, QueuedDel};
use crate::leases::{Endpoints, LeaseStore};
use crate::state::{BootMarker, LeaseFiles, StateDir};
use anyhow::Context;
use cistern_core::ipam::lease::{Attachment, Change, RecordTimes};
use cistern_core::settings::{IpamMode, Settings};
use jiff::Timestamp;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Runs until told to stop.
///
/// # Errors
/// What kept it from starting, or the part that ended by itself.
pub async fn run(settings: Settings) -> anyhow::Result<()> {
    let cancel = signals::cancelled_by_signal()?;
    let shared = Shared::new(Clock::system());
    let ports = Ports::threads();
    let stopped = "state-dir cannot be used; nothing was started or changed, pods that run go on";
    let state = StateDir::open(&settings.state_dir).context(stopped)?;
    let _lock = state.lock().await.context(stopped)?;
    refuse_overlaps(&settings)?;

    let client = crate::kubernetes::client::connect(
        settings.kubeconfig_path.as_deref(),
        settings.api_server.as_ref().map(|url| url.as_str()),
    )
    .await?;
    let (targets, maps) = kernel::open(&settings, &shared.findings, &ports.kernel)?;
    let (files, not_a_directory) = LeaseFiles::open(&state).context(stopped)?;
    let (leases, set_aside) = files.read().context(stopped)?;
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
            pool: operator::pool(&settings)?,
            leader: shared.leader.clone(),
            targets: shared.targets.clone(),
            waits: shared.waits.clone(),
            clock: shared.clock,
        })
    } else {
        None
    };
    let (configuration, waits) = (NetworkConfiguration::of(&settings), shared.waits.clone());
    let role = cancel.child_token();
    let running = agent_role::start(
        Agent {
            build: super::build_info::long(),
            reserved_ports: kernel::reserved_ports(),
            settings: settings.clone(),
            client: client.clone(),
            targets,
            state: state.clone(),
            leases,
            lease_store: Box::new(Files(files)),
            lease_clock,
            boot: clock::boot().unwrap_or_default(),
            rebooted,
            times,
            host: Box::new(host::ThisHost),
            draw: Box::new(rand::random),
            maps,
            operator,
            listener: Some(listener),
            shared,
        },
        &role,
    )?;
    let asked = uninstall::requested(settings.node_name.clone(), running.cilium_nodes.clone());
    let asked = tokio::spawn(async move {
        let request = asked.await;
        role.cancel();
        request
    });
    let replay = tokio::spawn(replay_deletions(running.answers.endpoints.clone()));
    let served = tokio::spawn(mark_served(marker.served(), running.answers.clone()));
    let marked = tokio::spawn(mark_boot(marker, began, running.answers.endpoints.clone()));
    let configured = configuration.map(|conf| tokio::spawn(conf.keep(running.answers.clone(), waits)));
    let outcome = running.join().await.context("the agent ends; pods go on with what is in the kernel");
    marked.abort();
    replay.abort();
    served.abort();
    configured.inspect(tokio::task::JoinHandle::abort);
    outcome?;
    if cancel.is_cancelled() {
        asked.abort();
    } else {
        let request = asked.await?;
        tokio::select! {
            () = cancel.cancelled() => {}
            () = uninstall::clean_and_answer(client, &settings, &state, request) => {}
        }
    }
    tracing::info!("stopped");
    Ok(())
}

/// The clock of leases: it counts on from the moment of the boot, as the first agent of this boot knew it, so that it
/// never jumps while the machine is up. Answered with that moment, and what it means for the times in the records.
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

/// Sets the marker of the boot when what the reboot left behind is dropped, and that is on disk. A disk that refuses for
/// long makes the next agent drop it again.
async fn mark_boot(marker: BootMarker, began: Timestamp, endpoints: Endpoints) {
    loop {
        match endpoints.view().await {
            Ok(view) if view.durable => break,
            Ok(_) => tokio::time::sleep(MARK_RETRY).await,
            Err(_) => return,
        }
    }
    if let Err(error) = marker.set(began) {
        tracing::error!(%error, "the boot is not marked: the next start takes itself for the first since the boot");
    }
}

const MARK_RETRY: Duration = Duration::from_secs(1);

/// A file beside the socket whose age tells `cistern-cni STATUS` how long ago this node could serve.
async fn mark_served(path: PathBuf, answers: Arc<Answers>) {
    loop {
        if answers.node.health().ready
            && let Err(error) = std::fs::File::create(&path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot say that this node serves");
        }
        tokio::time::sleep(MARK_SERVED).await;
    }
}

const MARK_SERVED: Duration = Duration::from_secs(10);

/// A DEL that cannot be carried out now is tried again after this long.
const REPLAY_RETRY: Duration = Duration::from_secs(5);

/// A plugin that gave up waiting for a slow agent queues its DEL too, so the queue is read as long as the agent runs.
const REPLAY_INTERVAL: Duration = Duration::from_secs(60);

/// Carries out the DELs that came while no agent answered, in their order.
async fn replay_deletions(endpoints: Endpoints) {
    let directory = Path::new(deletion_queue::QUEUE_DIR);
    loop {
        let pause = match replay_once(directory, &endpoints).await {
            Ok(replayed) => {
                if replayed > 0 {
                    tracing::info!(replayed, "DELs that waited were carried out, or had nothing left to end");
                }
                REPLAY_INTERVAL
            }
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "DELs from the time without agent wait");
                REPLAY_RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Carries out the DELs that wait in `directory`, and answers how many there were. To be called when the socket is
/// served: a plugin that finds no agent writes under the lock that this waits for.
///
/// # Errors
/// When one cannot be carried out; it stays, with those behind it.
pub async fn replay_once(directory: &Path, endpoints: &Endpoints) -> anyhow::Result<usize> {
    if !directory.exists() {
        return Ok(0);
    }
    let path = directory.to_owned();
    let queue = tokio::task::spawn_blocking(move || DeletionQueue::open_exclusive(&path)).await??;
    let (dels, unreadable) = queue.list()?;
    for path in unreadable {
        tracing::error!(path = %path.display(), "a queued DEL cannot be read and stays; its address is found by GC");
    }
    let replayed = dels.len();
    for del in dels {
        let attachment = Attachment { container_id: del.container_id.clone(), ifname: del.ifname.clone() };
        match endpoints.del(attachment, del.began.clone()).await? {
            Some(lease) => told_back(&lease, "address given back: its DEL came while no agent answered"),
            None => {
                let QueuedDel { container_id, ifname, .. } = &del;
                tracing::info!(
                    container_id,
                    ifname,
                    "a DEL that came while no agent answered finds no lease of its time"
                );
            }
        }
        queue.remove(&del)?;
    }
    Ok(replayed)
}

/// `architecture` decision 12: a pool over the node's own network cuts the node off (`ipam` 7.1, report 5).
fn refuse_overlaps(settings: &Settings) -> anyhow::Result<()> {
    if settings.ipam != IpamMode::ClusterPool {
        return Ok(());
    }
    let network = kernel::network_now()?;
    match crate::controllers::ipam_node::overlaps_of(&network, &settings.cluster_pool_ipv4).first() {
        None => Ok(()),
        Some(overlap) => {
            Err(Refused(format!("cluster-pool-ipv4-cidr: {overlap}; nothing was started or changed")).into())
        }
    }
}

/// Lease files behind the trait of their owner.
struct Files(LeaseFiles);

impl LeaseStore for Files {
    fn write(&mut self, change: &Change) -> Result<(), String> {
        self.0.write(change).map_err(|error| error.to_string())
    }
}
