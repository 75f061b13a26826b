//! Targets of the agent, as values: the kernel in production, memory in script tests.

use crate::blocking::Blocking;
use crate::clock::Clock;
use crate::controllers::next_hops::Hops;
use crate::reconciler::{self, BlockingOperations, Kept, Offloaded, Operations, Reconcile};
use crate::tables::findings::Findings;
use crate::tables::rows::{NetworkRow, PodRoute, RouteTarget};
use crate::tables::{Reader, Table};
use cistern_core::masquerade::plan::{AttachmentEntry, DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason};
use futures::future::BoxFuture;
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// A target with an erased type: given a table, it follows it.
pub type Target<K, V> = Box<dyn FnOnce(Reconcile<K, V>) -> BoxFuture<'static, ()> + Send>;

/// Erases the type of a target.
pub fn target<O: Operations + 'static>(operations: O) -> Target<O::Key, O::Value> {
    Box::new(move |with| Box::pin(reconciler::run(operations, with)))
}

/// As [`target`], for one with blocking operations.
pub fn blocking_target<T: BlockingOperations>(operations: T, port: &Blocking) -> Target<T::Key, T::Value> {
    target(Offloaded::new(operations, port.clone()))
}

/// As [`blocking_target`], for one that other programs of the node change, too: `seen` changes with it. `name` is that of
/// the reconciler.
pub fn kept_target<T: BlockingOperations, K: Ord + Send + Sync + 'static, V: Send + Sync + 'static>(
    operations: T,
    seen: Reader<K, V>,
    name: &'static str,
    findings: &Findings,
    clock: Clock,
    port: &Blocking,
) -> Target<T::Key, T::Value> {
    target(Kept::new(Offloaded::new(operations, port.clone()), seen, name, findings.clone(), clock))
}

/// Fills the table of the node's devices and routes until cancelled.
pub type NetworkSource =
    Box<dyn FnOnce(Arc<Table<(), NetworkRow>>, CancellationToken) -> BoxFuture<'static, anyhow::Result<()>> + Send>;

/// All targets of the agent.
pub struct Targets {
    /// Devices, addresses and routes of this node.
    pub network: NetworkSource,
    /// Asks the kernel for routes.
    pub hops: Hops,
    /// Routes of the main table.
    pub routes: Target<Ipv4Net, RouteTarget>,
    /// Routes to this node's pods.
    pub pod_routes: Target<Ipv4Addr, PodRoute>,
    /// The router address on the loopback device.
    pub router: Target<Ipv4Addr, ()>,
    /// The kernel programs; `None` if this node does not masquerade.
    pub datapath: Option<DatapathTargets>,
}

/// The kernel programs and their maps.
pub struct DatapathTargets {
    /// Destinations that are not masqueraded.
    pub excluded: Target<Ipv4Net, ExcludedReason>,
    /// Pods of this node.
    pub endpoints: Target<Ipv4Addr, EndpointEntry>,
    /// The pods that the map had at the start.
    pub known_endpoints: BTreeMap<Ipv4Addr, EndpointEntry>,
    /// Egress devices and their addresses.
    pub devices: Target<u32, DeviceEntry>,
    /// The egress devices that the map had at the start.
    pub known_devices: BTreeMap<u32, DeviceEntry>,
    /// Node-wide settings.
    pub settings: Target<(), DatapathSettings>,
    /// Devices with attached programs, by index.
    pub attachments: Target<u32, AttachmentEntry>,
    /// Expires flows and logs events; runs until cancelled.
    pub background: Box<dyn FnOnce(CancellationToken) -> BoxFuture<'static, anyhow::Result<()>> + Send>,
}
