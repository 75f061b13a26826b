//! The task: runs commands and timers one after the other, and writes the records before an answer leaves.

use super::{EndpointError, Parts};
use cistern_core::ipam::audit::{Audit, HostLink, Namespace};
use cistern_core::ipam::lease::{Leases, Network, Outcome, Owed, RecordKey, Restored};
use ipnet::Ipv4Net;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// A call, with its answer on the way.
pub(super) type Command = Box<dyn FnOnce(&mut Task) + Send>;

/// The leases, and what was done with them so far.
pub(super) struct Task {
    pub(super) leases: Leases,
    /// Made by the state machine, not on disk yet.
    pub(super) owed: Owed,
    /// When a disk that refused is tried again.
    retry: Option<Timestamp>,
    pub(super) audit: Audit,
    pub(super) next_audit: Timestamp,
    /// Host sides of pods' pairs, by name.
    pub(super) links: BTreeMap<String, HostLink>,
    /// The pod CIDR, and whether it is being left.
    pub(super) pool: Option<(Ipv4Net, bool)>,
    /// A restarted agent would have this pod CIDR, too.
    pub(super) on_disk: bool,
    pub(super) parts: Parts,
}

pub(super) async fn run(mut parts: Parts, mut receiver: mpsc::Receiver<Command>, cancel: CancellationToken) {
    let (records, boot) = (std::mem::take(&mut parts.records), std::mem::take(&mut parts.boot));
    let now = parts.clock.now();
    let draw = (parts.draw)();
    // Without a network first: which pods there are without a record is known when the leases are.
    let Restored { leases, findings, changes } =
        Leases::restore(records, parts.timings, Network::default(), parts.times, boot, now, draw);
    for finding in findings {
        tracing::warn!(reason = %finding, "finding about pod leases");
    }
    let (audit, links) = (Audit::default(), BTreeMap::new());
    let (owed, retry, next_audit, pool, on_disk) = (Owed::default(), None, now, None, false);
    let mut task = Task { leases, owed, retry, audit, next_audit, links, pool, on_disk, parts };
    task.owed.extend(changes);
    if task.parts.rebooted {
        let there = |netns: &str| task.parts.host.namespace(netns) == Namespace::There;
        let Outcome { answer, changes } = task.leases.drop_gone(there, now);
        task.owed.extend(changes);
        for lease in answer {
            tracing::info!(attachment = %lease.attachment, "lease ended: its network namespace is gone since the reboot");
        }
    }
    task.network_changed();
    loop {
        let deadline = task.next_wake();
        let mut asked = None;
        tokio::select! {
            // Commands first: a pool that changes at the same time is seen by the next one.
            biased;
            () = cancel.cancelled() => break,
            command = receiver.recv() => match command {
                Some(command) => asked = Some(command),
                None => break,
            },
            () = task.parts.pool.changed() => task.network_changed(),
            () = task.parts.remembered.changed() => task.network_changed(),
            () = task.parts.network.changed() => task.network_changed(),
            () = task.parts.peers.changed() => task.network_changed(),
            () = task.parts.nodes.changed() => task.network_changed(),
            () = tokio::time::sleep(deadline) => {}
        }
        // Whatever woke it: what asks again and again must not keep it from what is due, and a lease that has ended meanwhile
        // ends here, with all that has to follow.
        task.due();
        if let Some(command) = asked {
            command(&mut task);
        }
    }
    receiver.close();
    while let Some(command) = receiver.recv().await {
        command(&mut task);
    }
    task.flush();
    if !task.owed.is_empty() {
        tracing::error!(owed = task.owed.len(), "lease records could not be written before the end");
    }
}

/// A disk that refused is tried again after this long.
const DISK_RETRY: Duration = Duration::from_secs(1);

/// Name of the wait for a disk that refuses.
const WAIT: &str = "lease records";

fn not_durable(reason: &str) -> String {
    format!(
        "lease records cannot be written ({reason}): no address is given until they can; pods that run are not affected, \
         and DELs are carried out where the disk lets files be removed"
    )
}

impl Task {
    fn next_wake(&self) -> Duration {
        let now = self.parts.clock.now();
        let next = self.retry.into_iter().chain(self.leases.next_deadline()).fold(self.next_audit, Timestamp::min);
        Duration::try_from(next.duration_since(now)).unwrap_or(Duration::ZERO).max(Duration::from_millis(10))
    }

    /// Does what it is time for.
    fn due(&mut self) {
        let now = self.parts.clock.now();
        if self.retry.into_iter().chain(self.leases.next_deadline()).any(|at| at <= now) {
            let ended = self.leases.expire(now);
            self.owed.extend(ended);
            // What a device leads to is excluded when no record names it: that may just have come to be.
            self.network_changed();
        }
        self.audit();
    }

    /// Writes what is owed. A disk that refuses is waited for.
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

    /// The answer, once all of it is on disk.
    pub(super) fn durable<T>(&mut self, outcome: Outcome<T>) -> Result<T, EndpointError> {
        self.owed.extend(outcome.changes);
        self.flush();
        self.written(self.owed.is_empty()).map(|()| outcome.answer)
    }

    /// As [`Task::durable`] for what gives addresses back: that these keys are gone from the disk is enough.
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
