//! Tables derived from the leases.

use super::task::Task;
use crate::tables::findings::Found;
use crate::tables::rows::{NetworkRow, PodRoute, PoolRow};
use cistern_core::ip::Family;
use cistern_core::ipam::audit;
use cistern_core::ipam::lease::{Attachment, DEFAULT_POOL, LeaseState, PodAttachment};
use cistern_core::ipam::supply::GrantState;
use cistern_core::masquerade::plan::EndpointEntry;
use ipnet::IpNet;
use std::collections::BTreeMap;

impl Task {
    /// Publishes the derived tables.
    pub(super) fn publish(&mut self) {
        let (leases, now) = (&self.leases, self.parts.clock.now());
        let generation = |attachment: &Attachment| leases.check(attachment, now).map(|lease| lease.generation);
        self.presented.retain(|attachment, (presented, _)| generation(attachment) == Some(*presented));
        let network = self.parts.network.peek();
        let owes_grant = self.owes_grant();
        let is_known = self.plan.as_ref().is_some_and(|plan| plan.supply.is_some());
        let supply = self.leases.supply();
        let served = supply.served(DEFAULT_POOL, Family::Ipv4);
        let pool = served.and_then(|grant| match grant.net {
            IpNet::V4(pod_cidr) => Some(PoolRow {
                pod_cidr,
                kept_out: network.rows.get(&()).is_some_and(|seen| self.is_kept_out(&grant.net, seen)),
                blocked: supply.blocked(DEFAULT_POOL, Family::Ipv4).map(str::to_owned),
                leaving: grant.state == GrantState::Draining,
                on_disk: !owes_grant,
            }),
            IpNet::V6(_) => None,
        });
        if pool.is_some() || is_known {
            self.parts.pool.publish(pool.clone().map(|row| ((), row)).into_iter().collect());
        }
        // Others would write down what a restart may undo; until it is on disk they keep what was there.
        if !owes_grant {
            let intent = self.plan.as_ref().and_then(|plan| plan.write.clone());
            self.parts.intent.publish(intent.map(|intent| ((), intent)).into_iter().collect());
            if pool.as_ref().is_some_and(|pool| pool.kept_out) {
                self.parts.router.publish(BTreeMap::new());
            } else if let Some(router) = self.leases.router().ipv4 {
                self.parts.router.publish(BTreeMap::from([(router, ())]));
            } else if is_known && network.synced {
                // Records may have been lost: what a pod routes by is not taken from it.
                let routers = network.rows.get(&()).map(|row| self.routers_of_pods(row)).unwrap_or_default();
                self.parts.router.publish(routers.into_iter().map(|router| (router, ())).collect());
            }
        }
        let leased = self.leases.pods().filter_map(|lease| match (&lease.state, lease.addresses.ipv4) {
            (LeaseState::Confirmed { interface, .. }, Some(address)) => {
                Some((address, endpoint(interface, lease.generation)?))
            }
            _ => None,
        });
        let presented = self.presented.iter().filter_map(|(attachment, (_, entry))| {
            let lease = self.leases.check(attachment, now)?;
            Some((lease.addresses.ipv4?, *entry))
        });
        let recorded = leased.chain(presented);
        // Nothing is removed from the datapath before the pods without a record are known: the table is not synced, and
        // the reconciler applies only rows that calls wait for.
        if !network.synced {
            self.parts.endpoints.modify(|rows| {
                rows.replace(recorded.collect());
            });
            return;
        }
        let unrecorded = self.unrecorded();
        // Its flows go on: they belong to the generation that the datapath knows it by.
        let unrecorded = unrecorded.into_iter().map(|(address, (_, ifindex))| {
            let known = self.parts.known_endpoints.get(&address).filter(|known| known.ifindex == ifindex);
            (address, known.copied().unwrap_or_else(|| entry(ifindex, 0)))
        });
        self.parts.endpoints.publish(unrecorded.chain(recorded).collect());
        self.publish_routes(network.rows.get(&()));
    }

    /// The routes to pods whose devices are up. A device that was set down stays down, and is reported.
    fn publish_routes(&self, network: Option<&NetworkRow>) {
        let (Some(network), Some(source)) = (network, self.leases.router().ipv4) else { return };
        let recorded = self.leases.pods().filter_map(|lease| match &lease.state {
            LeaseState::Confirmed { interface: PodAttachment::Pair(pair), .. } => {
                let pod = lease.pod.as_ref().map(|pod| format!("pod {}/{}", pod.namespace, pod.name));
                Some((lease.addresses.ipv4?, (pair.host_ifindex, pod.unwrap_or_else(|| lease.attachment.to_string()))))
            }
            _ => None,
        });
        let unrecorded = self
            .unrecorded()
            .into_iter()
            .map(|(address, (link, ifindex))| (address, (ifindex, format!("the unrecorded pod of {link}"))));
        let (mut routes, mut down) = (BTreeMap::new(), Vec::new());
        for (address, (ifindex, pod)) in unrecorded.chain(recorded) {
            match network.links.get(&ifindex).filter(|link| audit::is_host_side(&link.name)) {
                Some(link) if link.up => {
                    routes.insert(address, PodRoute { ifindex, source });
                }
                Some(link) => down.push(Found {
                    reason: "pod-device-down",
                    message: format!(
                        "{pod} has no network: its device {name} on this node is down. `ip link set {name} up` ends that, and its \
                         route is set again then",
                        name = link.name
                    ),
                    subject: address.to_string(),
                }),
                // It is being deleted, and its route with it.
                None => {}
            }
        }
        self.parts.findings.replace("pod devices", down);
        self.parts.pod_routes.publish(routes);
    }
}

/// The kernel programs' entry of a pod. A pod attached by another plugin has no device of ours; one that is not routed
/// by this node has no entry, so that its packets pass unchanged.
pub(super) fn endpoint(interface: &PodAttachment, lease: u64) -> Option<EndpointEntry> {
    let ifindex = match interface {
        PodAttachment::Pair(pair) => pair.host_ifindex,
        PodAttachment::Plugin { routed: true, .. } => 0,
        PodAttachment::Plugin { routed: false, .. } => return None,
    };
    Some(entry(ifindex, EndpointEntry::generation_of(lease)))
}

fn entry(ifindex: u32, generation: u32) -> EndpointEntry {
    EndpointEntry { ifindex, no_masquerade: false, generation }
}
