//! The task: runs commands and timers sequentially, and writes the records before answers are sent.

use super::others::Others;
use super::{EndpointError, Parts};
use cistern_core::ipam::audit::{Audit, HostLink, Namespace};
use cistern_core::ipam::lease::{Attachment, Leases, Outcome, Owed, RecordKey, Restored};
use cistern_core::ipam::node::NodePlan;
use cistern_core::masquerade::plan::EndpointEntry;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// A call with its reply channel.
pub(super) type Command = Box<dyn FnOnce(&mut Task) + Send>;

/// The leases, and state derived from them.
pub(super) struct Task {
    pub(super) leases: Leases,
    /// Changes that are not on disk yet.
    pub(super) owed: Owed,
    /// When a failed write is retried.
    retry: Option<Timestamp>,
    pub(super) audit: Audit,
    pub(super) next_audit: Timestamp,
    /// Host sides of pods' veth pairs, by name.
    pub(super) links: BTreeMap<String, HostLink>,
    /// The plan in force; none before there was one in this run.
    pub(super) plan: Option<NodePlan>,
    /// What was held when that was made.
    pub(super) planned_held: Option<BTreeSet<IpAddr>>,
    /// Names of the plan's waits that were begun.
    pub(super) waiting: Vec<&'static str>,
    /// The pod CIDRs of other nodes.
    pub(super) others: Others,
    /// Entries of pods whose confirmation waits for the datapath, with the generations of their leases.
    pub(super) presented: BTreeMap<Attachment, (u64, EndpointEntry)>,
    pub(super) parts: Parts,
}

pub(super) async fn run(mut parts: Parts, mut receiver: mpsc::Receiver<Command>, cancel: CancellationToken) {
    let (records, boot) = (std::mem::take(&mut parts.records), std::mem::take(&mut parts.boot));
    let now = parts.clock.now();
    let Restored { leases, findings, changes } = Leases::restore(records, parts.timings, parts.times, boot, now);
    for finding in findings {
        tracing::warn!(reason = %finding, "finding about pod leases");
    }
    let mut task = Task {
        leases,
        owed: Owed::default(),
        retry: None,
        audit: Audit::default(),
        next_audit: now,
        links: BTreeMap::new(),
        plan: None,
        planned_held: None,
        waiting: Vec::new(),
        presented: BTreeMap::new(),
        others: Others::default(),
        parts,
    };
    task.owed.extend(changes);
    if task.parts.rebooted {
        let there = |netns: &str| task.parts.host.namespace(netns) == Namespace::There;
        let Outcome { answer, changes } = task.leases.drop_gone(there, now);
        task.owed.extend(changes);
        for lease in answer {
            tracing::info!(attachment = %lease.attachment, "lease ended: its network namespace did not survive the reboot");
        }
    }
    task.adopt();
    task.resupply();
    loop {
        let deadline = task.next_wake();
        let mut asked = None;
        tokio::select! {
            // Commands first: they see changes of the tables in the next iteration.
            biased;
            () = cancel.cancelled() => break,
            command = receiver.recv() => match command {
                Some(command) => asked = Some(command),
                None => break,
            },
            () = task.parts.network.changed() => task.resupply(),
            () = task.parts.peers.changed() => task.resupply(),
            () = task.parts.nodes.changed() => task.resupply(),
            () = task.parts.cilium_nodes.changed() => task.resupply(),
            () = tokio::time::sleep(deadline) => {}
        }
        // Run expired timers before serving a command, so that a busy queue cannot starve them.
        task.due();
        if let Some(command) = asked {
            command(&mut task);
        }
        task.follow_held();
    }
    receiver.close();
    while let Some(command) = receiver.recv().await {
        command(&mut task);
    }
    task.flush();
    if !task.owed.is_empty() {
        tracing::error!(owed = task.owed.len(), "lease records could not be written before the shutdown");
    }
}

/// Delay before a failed write is retried.
const DISK_RETRY: Duration = Duration::from_secs(1);

/// Name of the wait for a failing disk.
pub const WAIT: &str = "lease records";

fn not_durable(reason: &str) -> String {
    format!(
        "lease records cannot be written ({reason}): no address is allocated until they can; running pods are not affected, \
         and DELs are executed if files can be deleted"
    )
}

impl Task {
    /// Takes up the pods that only the datapath knows, when records were lost: their interfaces are another plugin's, so
    /// no device shows them.
    fn adopt(&mut self) {
        let known = self.parts.known_endpoints.clone();
        let is_new = self.leases.supply().is_empty() && self.leases.router().is_empty();
        if !self.parts.incomplete && !is_new {
            return;
        }
        // A lease to come must not be taken for one of before.
        self.leases.continue_after(known.values().map(|entry| entry.generation.into()).max().unwrap_or_default());
        for (address, entry) in known.into_iter().filter(|(_, entry)| entry.ifindex == 0) {
            let generation = entry.generation.into();
            let Outcome { answer, changes } = self.leases.adopt(address.into(), generation, self.parts.clock.now());
            self.owed.extend(changes);
            if let Some(lease) = answer {
                tracing::warn!(%address, attachment = %lease.attachment, "the datapath has a pod without a record; its address stays allocated until a reboot");
            }
        }
    }

    fn next_wake(&self) -> Duration {
        let now = self.parts.clock.now();
        let next = self.retry.into_iter().chain(self.leases.next_deadline()).fold(self.next_audit, Timestamp::min);
        Duration::try_from(next.duration_since(now)).unwrap_or(Duration::ZERO).max(Duration::from_millis(10))
    }

    /// Runs expired timers.
    fn due(&mut self) {
        let now = self.parts.clock.now();
        if self.retry.into_iter().chain(self.leases.next_deadline()).any(|at| at <= now) {
            let ended = self.leases.expire(now);
            self.owed.extend(ended);
            // Addresses of unrecorded pods are excluded, and an expired lease may leave one.
            self.resupply();
        }
        self.audit();
    }

    /// Writes pending changes. If the disk fails, they are retried.
    pub(super) fn flush(&mut self) {
        let store = &mut self.parts.store;
        let outcome = self.owed.write(|change| store.write(change));
        self.retry = match outcome {
            Ok(()) => {
                self.parts.waits.end(WAIT);
                None
            }
            Err(reason) => {
                self.parts.waits.begin(WAIT, not_durable(&reason), Some(DISK_RETRY));
                self.parts.clock.now().checked_add(DISK_RETRY).ok()
            }
        };
    }

    /// The answer, once all of it is on disk. A refusal waits for no disk.
    pub(super) fn durable<T, E>(&mut self, outcome: Outcome<Result<T, E>>) -> Result<T, EndpointError>
    where
        EndpointError: From<E>,
    {
        self.owed.extend(outcome.changes);
        self.flush();
        let answer = outcome.answer?;
        self.written(self.owed.is_empty()).map(|()| answer)
    }

    /// As [`Task::durable`] for releases: it suffices that these keys are removed from the disk.
    pub(super) fn given_back<T>(
        &mut self,
        outcome: Outcome<T>,
        keys: impl Fn(&T) -> Vec<RecordKey>,
    ) -> Result<T, EndpointError> {
        let keys = keys(&outcome.answer);
        self.owed.extend(outcome.changes);
        self.flush();
        self.written(!keys.iter().any(|key| self.owed.owes(key))).map(|()| outcome.answer)
    }

    fn written(&self, is_so: bool) -> Result<(), EndpointError> {
        if is_so {
            return Ok(());
        }
        let waits = self.parts.waits.reader();
        let reason = waits.peek().rows.get(WAIT).map(|wait| wait.reason.clone()).unwrap_or_default();
        Err(EndpointError::NotDurable { reason })
    }
}
