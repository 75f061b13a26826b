//! What may be allocated, from the tables.

use super::task::Task;
use crate::tables::Rows;
use crate::tables::rows::NetworkRow;
use cistern_core::ipam::audit::{self, HostLink};
use cistern_core::ipam::lease::{Behind, Exclusion, LeaseState, Network, Outcome};
use cistern_core::ipam::node::host_scope;
use cistern_core::ipam::node::pod_cidr::Addresses;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

/// Host sides of pods' pairs, with the address that is routed to each.
fn host_links(network: &NetworkRow) -> BTreeMap<String, HostLink> {
    let address = |ifindex: u32| {
        let routes = network.routes.iter().filter(|route| route.ifindex == Some(ifindex) && route.gateway.is_none());
        routes.filter(|route| route.destination.prefix_len() == 32).map(|route| route.destination.addr()).next()
    };
    let ours = network.links.iter().filter(|(_, link)| link.kind == "veth" && audit::is_host_side(&link.name));
    ours.map(|(ifindex, link)| (link.name.clone(), HostLink { ifindex: *ifindex, address: address(*ifindex) }))
        .collect()
}

const NETWORK_UNKNOWN: &str = "the devices and routes of this node are not known yet";

impl Task {
    pub(super) fn network_changed(&mut self) {
        let seen = self.parts.network.snapshot();
        self.links = seen.rows.get(&()).map(host_links).unwrap_or_default();
        let network = self.network(&seen.rows);
        let pool = self.parts.pool.snapshot();
        let pool = pool.rows.get(&());
        let remembered = self.parts.remembered.snapshot().rows.get(&()).map(|row| row.pod_cidr);
        self.on_disk = pool.is_none_or(|row| remembered == Some(row.pod_cidr));
        let not_yet = pool.and_then(|row| {
            let block = row.pod_cidr;
            if row.leaving {
                Some(format!("{block} is being left for another pod CIDR"))
            } else {
                (!self.on_disk).then(|| format!("{block} is not on disk yet"))
            }
        });
        let blocked = pool.and_then(|row| row.blocked.clone()).or(not_yet);
        self.pool = pool.map(|row| (row.pod_cidr, row.leaving));
        self.leases.hold_back(blocked.or_else(|| (!seen.synced).then(|| NETWORK_UNKNOWN.to_owned())));
        let draw = (self.parts.draw)();
        let Outcome { answer, changes } = self.leases.set_network(network, self.parts.clock.now(), draw);
        for finding in answer {
            tracing::warn!(reason = %finding, "finding about pod leases");
        }
        self.owed.extend(changes);
        let changes = self.leases.expire(self.parts.clock.now());
        self.owed.extend(changes);
        self.flush();
        self.publish();
    }

    /// What the node was given to hand out, as the tables say now.
    fn network(&mut self, seen: &Rows<(), NetworkRow>) -> Network {
        let addresses = seen
            .values()
            .flat_map(|row| row.links.values())
            // The router address itself sits on the loopback device.
            .filter(|link| !link.loopback)
            .flat_map(|link| link.addresses.iter())
            .map(|address| Exclusion { address: address.addr(), label: "node-ip".to_owned() });
        let unrecorded = self.unrecorded().into_iter().map(|(address, (link, _))| Exclusion {
            address: address.into(),
            label: format!("the pod behind {link}, which no record names"),
        });
        let exclusions = addresses.chain(unrecorded).collect();
        let peers = self.parts.peers.snapshot();
        let published = peers.rows.get(&self.parts.node).and_then(|row| row.router);
        let nodes = self.parts.nodes.snapshot();
        let annotated = nodes.rows.get(&self.parts.node).and_then(|row| host_scope::router(&row.annotations));
        Network {
            ipv4: self.parts.pool.snapshot().rows.get(&()).map(|row| row.pod_cidr),
            ipv6: None,
            exclusions,
            configured_router: Addresses { ipv4: self.parts.configured_router, ipv6: None },
            seen_routers: published
                .into_iter()
                .chain(annotated)
                .map(|router| Addresses { ipv4: Some(router), ipv6: None })
                .collect(),
        }
    }

    /// Addresses of pods that no record names, with name and index of their devices.
    pub(super) fn unrecorded(&self) -> BTreeMap<Ipv4Addr, (String, u32)> {
        let leased: BTreeSet<String> = self
            .leases
            .pods()
            .filter_map(|lease| match &lease.state {
                LeaseState::Confirmed { interface: Behind::Pair(pair), .. } => Some(pair.host_ifname.clone()),
                LeaseState::Confirmed { interface: Behind::Plugin { .. }, .. } => None,
                LeaseState::Provisional { .. } => Some(self.parts.host.host_side(&lease.attachment)),
            })
            .collect();
        let held: BTreeSet<Ipv4Addr> = self.leases.pods().filter_map(|lease| lease.addresses.ipv4).collect();
        self.links
            .iter()
            .filter(|(name, _)| !leased.contains(*name))
            .filter_map(|(name, link)| Some((link.address?, (name.clone(), link.ifindex))))
            .filter(|(address, _)| !held.contains(address))
            .collect()
    }
}
