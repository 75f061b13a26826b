//! One interface of one container: its names, its lock, the way to the agent, and DEL, which needs nothing else.

use super::deletion_queue::{DeletionQueue, QUEUE_DIR, QueuedDel};
use super::interface::{self, Pair};
use super::lock::{AttachmentLock, LOCK_FILE, LOCK_TIMEOUT, LockError};
use super::plugin::log;
use super::{agent_failure, kernel_failure};
use crate::api::client::{Client, ClientError};
use crate::api::types::{DelRequest, Moment, SOCKET_PATH};
use crate::clock;
use cistern_core::cni::netconf::Paths;
use cistern_core::cni::plan::{self, Undo};
use cistern_core::cni::spec::{Call, Code, Failure};
use jiff::Timestamp;
use serde::de::IgnoredAny;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A runtime waits minutes for an ADD; an agent that takes longer than this is stuck.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);

/// The agent of a configuration.
pub(super) fn client(paths: &Paths, timeout: Duration) -> Client {
    let socket = paths.socket.clone().unwrap_or_else(|| PathBuf::from(SOCKET_PATH));
    Client::new(socket, timeout)
}

/// An attachment that no other call is at work on.
pub(super) struct Attachment {
    pub(super) call: Call,
    pub(super) pair: Pair,
    pub(super) client: Client,
    /// When this call had the attachment to itself: calls take effect in the order of their locks, and the agent orders their
    /// requests by the same moments.
    pub(super) began: Option<Moment>,
    queue: PathBuf,
    _lock: Option<AttachmentLock>,
}

impl Attachment {
    /// Waits until no other call is at work on it.
    pub(super) fn locked(call: Call, paths: &Paths) -> Result<Self, Failure> {
        let lock = lock(&call).map_err(|error| match error {
            LockError::Busy { .. } => {
                Failure::new(Code::TryAgainLater, error.to_string()).with_details("nothing was changed")
            }
            LockError::Io { .. } => Failure::new(Code::Io, error.to_string()).with_details("nothing was changed"),
        })?;
        Ok(Self::new(call, paths, Some(lock)))
    }

    /// As [`Attachment::locked`] for DEL, which must not fail where there can be no lock: no other call has one there.
    pub(super) fn locked_for_del(call: Call, paths: &Paths) -> Result<Self, Failure> {
        match lock(&call) {
            Ok(lock) => Ok(Self::new(call, paths, Some(lock))),
            Err(error @ LockError::Busy { .. }) => Err(Failure::new(Code::TryAgainLater, error.to_string())),
            Err(error @ LockError::Io { .. }) => {
                log("DEL", &format_args!("{error}; it is carried out without a lock"));
                Ok(Self::new(call, paths, None))
            }
        }
    }

    fn new(call: Call, paths: &Paths, lock: Option<AttachmentLock>) -> Self {
        let pair = Pair::of(&call.container_id, &call.ifname);
        let queue = paths.queue.clone().unwrap_or_else(|| PathBuf::from(QUEUE_DIR));
        Self { pair, client: client(paths, AGENT_TIMEOUT), began: clock::moment(), queue, _lock: lock, call }
    }

    /// DEL: runs every step and reports every failure.
    pub(super) fn del(mut self) -> Result<(), Failure> {
        let mut failures = plan::DEL.into_iter().filter_map(|undo| self.undo_or_queue(undo).err());
        let Some(first) = failures.next() else { return Ok(()) };
        let rest: Vec<String> = failures.map(|failure| failure.message).collect();
        Err(first.with_details(rest.join("; ")))
    }

    fn undo(&mut self, undo: Undo) -> Result<(), Failure> {
        match undo {
            Undo::RemovePair => interface::remove(&self.pair).map_err(|error| kernel_failure(&error)),
            Undo::Release => self.release().map_err(|error| agent_failure(&error)),
        }
    }

    /// What the agent answers does not matter: it is of another build perhaps.
    fn release(&mut self) -> Result<(), ClientError> {
        let request = DelRequest {
            container_id: self.call.container_id.clone(),
            ifname: self.call.ifname.clone(),
            began: self.began.clone(),
        };
        self.client.post::<_, IgnoredAny>("/v1/cni/del", &request).map(drop)
    }

    /// Undoes a step. A release that the agent does not carry out, for whatever reason, waits on disk: the runtime has no other way
    /// to end the pod than to repeat this call.
    pub(super) fn undo_or_queue(&mut self, undo: Undo) -> Result<(), Failure> {
        match self.undo(undo) {
            Err(failure) if undo == Undo::Release => self.queue(&failure),
            outcome => outcome,
        }
    }

    /// Leaves the DEL for the agent. With the lock of the queue the agent is asked once more: it may have come back and read
    /// the queue in between.
    fn queue(&mut self, refused: &Failure) -> Result<(), Failure> {
        let later = |error: &dyn std::fmt::Display| {
            Failure::new(Code::TryAgainLater, format!("DEL cannot be kept for the agent: {error}"))
                .with_details(refused.message.clone())
        };
        let queue = DeletionQueue::open_shared(&self.queue).map_err(|error| later(&error))?;
        if self.release().is_ok() {
            return Ok(());
        }
        let (container_id, ifname) = (self.call.container_id.clone(), self.call.ifname.clone());
        let del = QueuedDel { queued: Timestamp::now(), began: self.began.clone(), container_id, ifname };
        queue.push(&del).map_err(|error| later(&error))
    }
}

fn lock(call: &Call) -> Result<AttachmentLock, LockError> {
    AttachmentLock::take(Path::new(LOCK_FILE), &call.container_id, &call.ifname, LOCK_TIMEOUT)
}
