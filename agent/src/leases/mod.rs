//! The owner of the pod leases: a task with the state machine, commanded by a bounded queue.
//!
//! | module | responsibility |
//! |---|---|
//! | `handle` | the caller's side: one method per call |
//! | `task` | runs calls and timers sequentially |
//! | `calls` | execution of calls: change, write the records, answer |
//! | `supply` | what may be allocated, from the tables |
//! | `others` | the pod CIDRs of other nodes |
//! | `audit` | comparison of leases with namespaces and devices |
//! | `publish` | tables derived from the leases |
//! | [`deletions`] | execution of DELs that the plugin queued |
//!
//! Answers are sent after their records are on disk, and an interface is confirmed after the pod is in the datapath, so
//! that the pod's first packet is treated like later ones. The task does not write the datapath: it publishes the desired
//! rows, and callers wait outside of the task until the reconciler of the table has realised theirs.
//!
//! Leases have their own clock ([`Parts::clock`]), which is monotonic. Reported times are converted to the wall clock
//! here.
//!
//! A device of ours with a route is a pod even without a record, which may have been damaged or of a newer format.
//! Such a pod remains in the datapath, and its address is not allocated.

mod audit;
mod calls;
pub mod deletions;
mod handle;
mod others;
mod publish;
mod supply;
mod task;

pub use handle::{Endpoints, expiration_ids, family};
pub use task::WAIT;

use crate::clock::Clock;
use crate::reconciler::Handle;
use crate::tables::findings::Findings;
use crate::tables::rows::{CiliumNodeRow, NetworkRow, NodeRow, PeerRow, PodRoute, PoolRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ipam::audit::Namespace;
use cistern_core::ipam::lease::{
    AddError, Attachment, Change, ConfirmError, OwnerError, PodLease, Record, RecordTimes, Row, Timings,
};
use cistern_core::ipam::node::pod_cidr::Addresses;
use cistern_core::ipam::node::{CiliumNodeIntent, NodeMode};
use cistern_core::ipam::supply::PoolUsage;
use cistern_core::masquerade::plan::EndpointEntry;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Capacity of the command queue; further callers wait.
const QUEUE: usize = 256;

/// Persistence of the records.
pub trait LeaseStore: Send {
    /// Makes a change durable, atomically.
    ///
    /// # Errors
    /// The failed operation and file.
    fn write(&mut self, change: &Change) -> Result<(), String>;
}

/// The machine's kernel, as needed by the leases.
pub trait Host: Send {
    /// State of the network namespace at a path.
    fn namespace(&self, path: &str) -> Namespace;

    /// Name of the host side of an attachment's pair.
    fn host_side(&self, attachment: &Attachment) -> String;

    /// Whether the other side of a pair is in a namespace that exists. One that cannot be looked at is.
    fn is_in_use(&self, device: &str) -> bool;

    /// Deletes a device by name; succeeds if there is none.
    ///
    /// # Errors
    /// The kernel's error.
    fn remove_device(&mut self, name: &str) -> Result<(), String>;
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// No address.
    #[error(transparent)]
    Add(#[from] AddError),
    /// Not confirmed.
    #[error(transparent)]
    Confirm(#[from] ConfirmError),
    /// A call with an owner string was rejected.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// The records could not be written; they will be, but this call does not return an address.
    #[error("{reason}")]
    NotDurable {
        /// The reason.
        reason: String,
    },
    /// The reconciler has not added the pod to the datapath.
    #[error("endpoint {address} cannot be added to the datapath: {reason}; the lease remains provisional")]
    Datapath {
        /// The pod's address.
        address: Ipv4Addr,
        /// The reason.
        reason: String,
    },
    /// The task is in a call to the disk or the kernel that does not return.
    #[error("the owner of the leases has not answered for {} s: the disk or the kernel does not respond", VIEW_DEADLINE.as_secs())]
    NoAnswer,
    /// The agent is shutting down.
    #[error("the agent is shutting down")]
    ShuttingDown,
}

/// Deadline of [`Endpoints::view`].
const VIEW_DEADLINE: Duration = Duration::from_secs(2);

/// Logs a released lease.
pub fn log_release(lease: &PodLease, message: &str) {
    let Attachment { container_id, ifname } = &lease.attachment;
    let pod = lease.pod.as_ref().map(tracing::field::display);
    let address = lease.addresses.ipv4.as_ref().map(tracing::field::display);
    tracing::info!(container_id, ifname, pod, address, "{message}");
}

/// State of this node's addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// The addresses that are not free.
    pub rows: Vec<Row>,
    /// Counts by pod CIDR.
    pub usage: Vec<PoolUsage>,
    /// Router addresses.
    pub router: Addresses,
    /// Everything is on disk.
    pub durable: bool,
}

/// Inputs and outputs of the task.
pub struct Parts {
    /// Name of this node.
    pub node: String,
    /// The records of earlier processes.
    pub records: Vec<Record>,
    /// Records are missing: some could not be read.
    pub incomplete: bool,
    /// The pods that the datapath knew at the start.
    pub known_endpoints: BTreeMap<Ipv4Addr, EndpointEntry>,
    /// Durations of timers.
    pub timings: Timings,
    /// `local-router-ipv4`
    pub configured_router: Option<Ipv4Addr>,
    /// Whether the records are from before a reboot: leases whose namespace does not exist are released.
    pub rebooted: bool,
    /// Whether the times of the records are those of `clock`.
    pub times: RecordTimes,
    /// Namespaces and devices.
    pub host: Box<dyn Host>,
    /// Random numbers.
    pub draw: Box<dyn FnMut() -> u64 + Send>,
    /// Persistence of the records.
    pub store: Box<dyn LeaseStore>,
    /// The reconciler of `endpoints`, which alone writes the kernel programs' map; `None` without a datapath.
    pub datapath: Option<Handle<Ipv4Addr, EndpointEntry>>,
    /// The IPAM mode.
    pub mode: Box<dyn NodeMode>,
    /// Every CiliumNode, as the API server lists it.
    pub cilium_nodes: Reader<String, CiliumNodeRow>,
    /// Devices of this node: their addresses are not allocated to pods.
    pub network: Reader<(), NetworkRow>,
    /// All nodes of the cluster: this node's own row has the published router address.
    pub peers: Reader<String, PeerRow>,
    /// This node's Node, whose annotations may have the router address, too.
    pub nodes: Reader<String, NodeRow>,
    /// Output: the router address.
    pub router: Arc<Table<Ipv4Addr, ()>>,
    /// Output: the pods with an interface.
    pub endpoints: Arc<Table<Ipv4Addr, EndpointEntry>>,
    /// Routes to pods whose devices are up.
    pub pod_routes: Arc<Table<Ipv4Addr, PodRoute>>,
    /// Gets where this node's pods get their addresses from.
    pub pool: Arc<Table<(), PoolRow>>,
    /// Gets what is to be written to this node's CiliumNode.
    pub intent: Arc<Table<(), CiliumNodeIntent>>,
    /// Waits: here, for a failing disk.
    pub waits: Waits,
    /// Findings of the audit.
    pub findings: Findings,
    /// The machine's current boot, as in [`Moment`](cistern_core::moment::Moment).
    pub boot: String,
    /// Clock of the leases: monotonic, also across restarts.
    pub clock: Clock,
    /// Wall clock, for display.
    pub wall: Clock,
}

/// Restores the leases and returns a handle and the task, which runs until cancelled and then answers the remaining
/// commands in its queue.
pub fn start(parts: Parts, cancel: CancellationToken) -> (Endpoints, impl Future<Output = ()> + Send) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (Endpoints::new(sender), task::run(parts, receiver, cancel))
}

#[cfg(test)]
mod tests;
