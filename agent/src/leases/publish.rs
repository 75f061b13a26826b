//! The tables that follow from the leases.

use super::task::Task;
use crate::tables::rows::HeldRow;
use cistern_core::ipam::lease::{Behind, LeaseState, PodLease};
use cistern_core::masquerade::plan::EndpointEntry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

impl Task {
    /// The kernel forgets the pod before its address can be given to another.
    pub(super) fn forget(&mut self, lease: &PodLease) {
        if let Some(address) = lease.addresses.ipv4
            && let Some(map) = self.parts.map.as_mut()
            && let Err(reason) = map.remove(address)
        {
            tracing::warn!(%address, reason, "endpoint not removed at once; the reconciler does it");
        }
    }

    /// Publishes what others follow.
    pub(super) fn publish(&self) {
        // Others would write down an address that a restart may undo; until then the former one stays.
        if self.on_disk {
            let router = self.leases.router().ipv4.map(|address| (address, ())).into_iter().collect();
            self.parts.router.publish(router);
        }
        // Nothing is taken out of the datapath before it is known which pods there are without a record.
        if !self.parts.network.peek().synced {
            return;
        }
        let unrecorded = self.unrecorded();
        let held = self.leases.held().filter_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        let held: BTreeSet<Ipv4Addr> = held.chain(unrecorded.keys().copied()).collect();
        let (pod_cidr, leaving) = self.pool.unzip();
        let (within, beyond): (Vec<_>, Vec<_>) =
            held.into_iter().partition(|address| pod_cidr.is_some_and(|pod_cidr| pod_cidr.contains(address)));
        let leaving = leaving.unwrap_or_default();
        self.parts.held.publish(BTreeMap::from([((), HeldRow { pod_cidr, any: !within.is_empty(), leaving, beyond })]));
        let unrecorded = unrecorded.into_iter().map(|(address, (_, ifindex))| (address, entry(ifindex, 0)));
        let leased = self.leases.pods().filter_map(|lease| match (&lease.state, lease.addresses.ipv4) {
            (LeaseState::Confirmed { interface, .. }, Some(address)) => {
                Some((address, endpoint(interface, lease.generation)?))
            }
            _ => None,
        });
        self.parts.endpoints.publish(unrecorded.chain(leased).collect());
    }
}

/// What the kernel programs know of a pod. One that another plugin attached has no device of ours; one whose packets do
/// not pass this node's routing is left unknown, so that its packets pass unchanged where they leave.
pub(super) fn endpoint(interface: &Behind, lease: u64) -> Option<EndpointEntry> {
    let ifindex = match interface {
        Behind::Pair(pair) => pair.host_ifindex,
        Behind::Plugin { routed: true, .. } => 0,
        Behind::Plugin { routed: false, .. } => return None,
    };
    Some(entry(ifindex, EndpointEntry::generation_of(lease)))
}

fn entry(ifindex: u32, generation: u32) -> EndpointEntry {
    EndpointEntry { ifindex, no_masquerade: false, generation }
}
