//! The owner of the pod leases: one task, one state machine, commands by a bounded queue.
//!
//! | module | does |
//! |---|---|
//! | `handle` | the asking side: one method for each call |
//! | `task` | runs calls and timers one after the other |
//! | `calls` | what each call does: change, write the records, answer |
//! | `supply` | from the tables: what may be allocated |
//! | `audit` | compares leases with namespaces and devices |
//! | `publish` | the tables that follow from the leases |
//!
//! Every answer leaves after its records are on disk, and an interface is confirmed after the datapath knows the pod, so
//! that the pod's first packet is treated like its last one.
//!
//! Leases have a clock of their own ([`Parts::clock`]), which never jumps. Times that are reported are those of the wall
//! clock, and are translated here.
//!
//! A device of ours with a route to it is a pod even when no record names it: its record was damaged, or is of another
//! version. Such a pod stays in the datapath, and its address is not allocated.

mod audit;
mod calls;
mod handle;
mod publish;
mod supply;
mod task;

pub use handle::{Endpoints, expiration_ids, family};
pub use task::WAIT;

use crate::clock::Clock;
use crate::tables::findings::Findings;
use crate::tables::rows::{CiliumNodeRow, NetworkRow, NodeRow, PeerRow, PoolRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ipam::audit::Namespace;
use cistern_core::ipam::lease::{
    AddError, Attachment, Change, ConfirmError, OwnerError, Record, RecordTimes, Row, Timings,
};
use cistern_core::ipam::node::pod_cidr::Addresses;
use cistern_core::ipam::node::{CiliumNodeIntent, NodeMode};
use cistern_core::ipam::supply::PoolUsage;
use cistern_core::masquerade::plan::EndpointEntry;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Calls wait here for the one task; more than this many wait at the door.
const QUEUE: usize = 256;

/// Where the records survive.
pub trait LeaseStore: Send {
    /// Makes one change durable, or none of it.
    ///
    /// # Errors
    /// What failed on which file.
    fn write(&mut self, change: &Change) -> Result<(), String>;
}

/// The machine below the pods, as far as the leases need it.
pub trait Host: Send {
    /// State of the network namespace at a path.
    fn namespace(&self, path: &str) -> Namespace;

    /// Name of the host side of an attachment's pair.
    fn host_side(&self, attachment: &Attachment) -> String;

    /// Whether the other side of a pair is in a namespace that exists. One that cannot be looked at is.
    fn is_in_use(&self, device: &str) -> bool;

    /// Removes a device by name; removing the absent succeeds.
    ///
    /// # Errors
    /// What failed.
    fn remove_device(&mut self, name: &str) -> Result<(), String>;
}

/// Where the kernel programs look pods up.
pub trait EndpointMap: Send {
    /// Makes the pod known.
    ///
    /// # Errors
    /// What failed, for people.
    fn insert(&mut self, address: Ipv4Addr, entry: EndpointEntry) -> Result<(), String>;
    /// Makes it unknown; it need not be known.
    ///
    /// # Errors
    /// What failed, for people.
    fn remove(&mut self, address: Ipv4Addr) -> Result<(), String>;
}

/// Why a call was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// No address.
    #[error(transparent)]
    Add(#[from] AddError),
    /// Not confirmed.
    #[error(transparent)]
    Confirm(#[from] ConfirmError),
    /// A call by owner text was refused.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// The disk said no. The records are written as soon as it lets us; this call is not answered with an address.
    #[error("{reason}")]
    NotDurable {
        /// What failed.
        reason: String,
    },
    /// The kernel map said no.
    #[error("the datapath does not take endpoint {address}: {reason}; the lease stays provisional")]
    Datapath {
        /// Address of the pod.
        address: Ipv4Addr,
        /// What failed.
        reason: String,
    },
    /// The agent is ending.
    #[error("the agent is shutting down")]
    ShuttingDown,
}

/// Everything that is known of this node's addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// Addresses that are not free.
    pub rows: Vec<Row>,
    /// Counts by pod CIDR.
    pub usage: Vec<PoolUsage>,
    /// Router addresses.
    pub router: Addresses,
    /// Everything that was done is on disk.
    pub durable: bool,
}

/// What the task is made of.
pub struct Parts {
    /// Name of this node.
    pub node: String,
    /// Records from before.
    pub records: Vec<Record>,
    /// Records are missing: some could not be read.
    pub incomplete: bool,
    /// The pods that the datapath knew at the start.
    pub known_endpoints: BTreeMap<Ipv4Addr, EndpointEntry>,
    /// How long things wait.
    pub timings: Timings,
    /// `local-router-ipv4`
    pub configured_router: Option<Ipv4Addr>,
    /// Whether the records are from before a reboot: leases whose namespace is gone are dropped.
    pub rebooted: bool,
    /// Whether the times of the records are those of `clock`.
    pub times: RecordTimes,
    /// Namespaces and devices.
    pub host: Box<dyn Host>,
    /// Random numbers.
    pub draw: Box<dyn FnMut() -> u64 + Send>,
    /// Where records survive.
    pub store: Box<dyn LeaseStore>,
    /// Where the kernel programs look pods up; none without a datapath.
    pub map: Option<Box<dyn EndpointMap>>,
    /// The IPAM mode.
    pub mode: Box<dyn NodeMode>,
    /// Every CiliumNode, as the API server lists it.
    pub cilium_nodes: Reader<String, CiliumNodeRow>,
    /// Devices of this node: their addresses are given to no pod.
    pub network: Reader<(), NetworkRow>,
    /// Every node of the cluster: this node's own row names the router address that was published.
    pub peers: Reader<String, PeerRow>,
    /// This node's Node, whose annotations may name the router address, too.
    pub nodes: Reader<String, NodeRow>,
    /// Gets the router address.
    pub router: Arc<Table<Ipv4Addr, ()>>,
    /// Gets the pods whose interface exists.
    pub endpoints: Arc<Table<Ipv4Addr, EndpointEntry>>,
    /// Gets where this node's pods get their addresses from.
    pub pool: Arc<Table<(), PoolRow>>,
    /// Gets what is to be written to this node's CiliumNode.
    pub intent: Arc<Table<(), CiliumNodeIntent>>,
    /// What is waited for: here, a disk that refuses.
    pub waits: Waits,
    /// What the audit finds.
    pub findings: Findings,
    /// The boot that this machine is in, as a [`Moment`] names it.
    pub boot: String,
    /// Time of the leases: it only goes forward, over restarts too.
    pub clock: Clock,
    /// Time as people read it.
    pub wall: Clock,
}

/// Takes up the leases and returns the asking side and the task, which runs until cancelled and then answers what is
/// still in its queue.
pub fn start(parts: Parts, cancel: CancellationToken) -> (Endpoints, impl Future<Output = ()> + Send) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (Endpoints::new(sender), task::run(parts, receiver, cancel))
}

#[cfg(test)]
mod tests;
