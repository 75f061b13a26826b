//! The supply of addresses: the mode's plan, from the tables and from what is granted and held now.

use super::task::Task;
use crate::tables::findings::Found;
use crate::tables::rows::NetworkRow;
use cistern_core::ip::Family;
use cistern_core::ipam::Overlap;
use cistern_core::ipam::audit::{self, HostLink};
use cistern_core::ipam::lease::{
    Accepted, DEFAULT_POOL, Exclusion, LeaseState, Outcome, PodAttachment, RecordKey, Surroundings,
};
use cistern_core::ipam::node::pod_cidr::Addresses;
use cistern_core::ipam::node::{CiliumNodeFacts, Held, NodeFacts, NodeInput, NodePlan, Observed, kubernetes};
use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

/// Host sides of pods' veth pairs, with the address routed to each.
fn host_links(network: &NetworkRow) -> BTreeMap<String, HostLink> {
    let address = |ifindex: u32| {
        let routes = network.routes.iter().filter(|route| route.ifindex == Some(ifindex) && route.gateway.is_none());
        routes.filter(|route| route.destination.prefix_len() == 32).map(|route| route.destination.addr()).next()
    };
    let ours = network.links.iter().filter(|(_, link)| link.kind == "veth" && audit::is_host_side(&link.name));
    ours.map(|(ifindex, link)| (link.name.clone(), HostLink { ifindex: *ifindex, address: address(*ifindex) }))
        .collect()
}

/// A device keeps its address when its route is gone, as while it is down: the pod has it all the same.
fn keep_addresses(links: &mut BTreeMap<String, HostLink>, before: &BTreeMap<String, HostLink>) {
    for (name, link) in links {
        let known = before.get(name).filter(|known| known.ifindex == link.ifindex);
        link.address = link.address.or(known.and_then(|known| known.address));
    }
}

const NETWORK_UNKNOWN: &str = "the devices and routes of this node are not known yet";

/// A plan that was taken over is made again from what it changed. One that does not come to rest is a defect of the mode,
/// and must not stop everything else.
const PLANS: u8 = 4;

impl Task {
    /// Plans with what the tables say and with what is held, takes the plan over, and publishes what follows.
    pub(super) fn resupply(&mut self) {
        let network = self.parts.network.snapshot();
        let before = std::mem::take(&mut self.links);
        self.links = network.rows.get(&()).map(host_links).unwrap_or_default();
        keep_addresses(&mut self.links, &before);
        let ready = self.parts.peers.snapshot().synced && network.synced;
        self.parts.nodes.snapshot();
        self.others.follow(&self.parts.cilium_nodes.snapshot().rows, &self.parts.peers.peek().rows);
        let empty = NetworkRow::default();
        let seen = network.rows.get(&()).unwrap_or(&empty);
        // Before the kernel was seen nothing is chosen: records may be lost that it can replace, such as the router's.
        for _ in 0..if network.synced { PLANS } else { 0 } {
            let before = self.leases.supply().clone();
            self.planned_held = self.held_now();
            if ready {
                self.plan = Some(self.plan(seen));
            }
            let planned = self.plan.as_ref().and_then(|plan| plan.supply.clone());
            let (surroundings, draw) = (self.surroundings(seen), (self.parts.draw)());
            let supply = planned.unwrap_or_else(|| before.clone());
            let Outcome { answer, changes } =
                self.leases.set_supply(supply, surroundings, self.parts.clock.now(), draw);
            let Accepted { findings, still_held } = answer;
            for finding in findings {
                tracing::warn!(reason = %finding, "finding about pod leases");
            }
            for net in still_held {
                tracing::warn!(block = %net, "the pod CIDR stays until no address of it is held any more");
            }
            self.owed.extend(changes);
            if *self.leases.supply() == before {
                break;
            }
            self.log_change(before.served(DEFAULT_POOL, Family::Ipv4).map(|grant| grant.net));
        }
        let changes = self.leases.expire(self.parts.clock.now());
        self.owed.extend(changes);
        self.flush();
        let reason = if network.synced {
            let served = self.leases.supply().served(DEFAULT_POOL, Family::Ipv4).map(|grant| grant.net);
            served.filter(|_| self.owes_grant()).map(|net| format!("{net} is not on disk yet"))
        } else {
            Some(NETWORK_UNKNOWN.to_owned())
        };
        self.leases.hold_back(reason);
        self.report_plan();
        self.publish();
    }

    /// Plans again when other addresses are held than those that the last plan knew of.
    pub(super) fn follow_held(&mut self) {
        if self.planned_held != self.held_now() {
            self.resupply();
        }
    }

    /// Whether a pod CIDR could not be written to disk.
    pub(super) fn owes_grant(&self) -> bool {
        self.owed.keys().any(|key| matches!(key, RecordKey::Grant(..)))
    }

    /// All holders of an address of this node; `None` while pods without a record are not known.
    fn held_now(&self) -> Option<BTreeSet<IpAddr>> {
        if !self.parts.network.peek().synced {
            return None;
        }
        Some(self.leases.held().chain(self.unrecorded().into_keys().map(IpAddr::V4)).collect())
    }

    fn plan(&self, network: &NetworkRow) -> NodePlan {
        let name = &self.parts.node;
        let (cilium_nodes, nodes) = (self.parts.cilium_nodes.peek(), self.parts.nodes.peek());
        let cilium_node = match cilium_nodes.rows.get(name) {
            _ if !cilium_nodes.synced => Observed::Unknown,
            None => Observed::Absent,
            Some(row) => {
                Observed::Present(CiliumNodeFacts { resource_version: &row.resource_version, listed: row.listed() })
            }
        };
        let kubernetes_node = match nodes.rows.get(name) {
            _ if !nodes.synced => Observed::Unknown,
            None => Observed::Absent,
            Some(row) => {
                Observed::Present(NodeFacts { uid: &row.uid, pod_cidrs: &row.pod_cidrs, annotations: &row.annotations })
            }
        };
        let input = NodeInput {
            node: name,
            granted: self.leases.supply(),
            held: Held(self.planned_held.as_ref()),
            cilium_node,
            kubernetes_node,
            listed_elsewhere: &|net| cilium_nodes.synced && self.others.lists(name, net),
            contested: &|net| self.others.contest(name, net),
            covering: &|net| network.overlaps(&[*net]).into_iter().find(Overlap::covers),
        };
        self.parts.mode.plan(&input, self.parts.wall.now())
    }

    fn log_change(&self, before: Option<IpNet>) {
        let node = &self.parts.node;
        match (before, self.leases.supply().served(DEFAULT_POOL, Family::Ipv4).map(|grant| grant.net)) {
            (before, Some(block)) if before != Some(block) => {
                tracing::info!(node, %block, "{}", self.parts.mode.granted_message());
            }
            (Some(block), None) => tracing::warn!(node, %block, "this node has no pod CIDR any more"),
            _ => {}
        }
    }

    /// Waits and findings of the plan in force.
    fn report_plan(&mut self) {
        let Some(plan) = &self.plan else { return };
        for gone in self.waiting.iter().filter(|name| !plan.waits.contains_key(*name)) {
            self.parts.waits.end(gone);
        }
        for (name, reason) in &plan.waits {
            self.parts.waits.begin(name, reason.clone(), None);
        }
        self.waiting = plan.waits.keys().copied().collect();
        let planned = plan.findings.iter().map(|finding| Found {
            reason: finding.reason,
            subject: finding.subject.clone(),
            message: finding.message.clone(),
        });
        let network = self.parts.network.peek();
        let overlaps = network.rows.get(&()).map(|seen| self.partial_overlaps(seen)).unwrap_or_default();
        let overlaps = overlaps.into_iter().map(|Overlap { pods, network, what }| Found {
            reason: "pod-cidr-overlap",
            subject: network.to_string(),
            message: format!(
                "{network} ({what}) is inside the pod CIDR {pods}: its addresses are not allocated, and pods that have one keep it"
            ),
        });
        self.parts.findings.replace("pool", planned.chain(overlaps));
    }

    /// The surroundings of the pods, from the current tables.
    fn surroundings(&self, seen: &NetworkRow) -> Surroundings {
        let addresses = seen
            .links
            .values()
            // The router address itself is on the loopback device.
            .filter(|link| !link.loopback)
            .flat_map(|link| link.addresses.iter())
            .map(|address| Exclusion { address: address.addr(), label: "node-ip".to_owned(), of_pod: false });
        let unrecorded = self.unrecorded().into_iter().map(|(address, (link, _))| Exclusion {
            address: address.into(),
            label: format!("the unrecorded pod of {link}"),
            of_pod: true,
        });
        let exclusions = addresses.chain(unrecorded).collect();
        let peers = self.parts.peers.peek();
        let published = peers.rows.get(&self.parts.node).and_then(|row| row.router);
        let nodes = self.parts.nodes.peek();
        let annotated = nodes.rows.get(&self.parts.node).and_then(|row| kubernetes::router(&row.annotations));
        let ipv4 = |router| Addresses { ipv4: Some(router), ipv6: None };
        Surroundings {
            exclusions,
            networks: self.partial_overlaps(seen).into_iter().map(|overlap| (overlap.network, overlap.what)).collect(),
            configured_router: Addresses { ipv4: self.parts.configured_router, ipv6: None },
            seen_routers: self.routers_of_pods(seen).into_iter().chain(published).chain(annotated).map(ipv4).collect(),
        }
    }

    /// The networks of this node inside the pod CIDR that it serves.
    fn partial_overlaps(&self, seen: &NetworkRow) -> Vec<Overlap> {
        let served: Vec<IpNet> = self.leases.supply().grants().map(|grant| grant.net).collect();
        let mut overlaps = seen.overlaps(&served);
        overlaps.retain(|overlap| !overlap.covers());
        overlaps
    }

    /// Whether a network of this node covers a pod CIDR whose addresses nothing holds. Nothing of it is set in the kernel: its
    /// routes could cut the node off from its neighbours.
    pub(super) fn is_kept_out(&self, net: &IpNet, seen: &NetworkRow) -> bool {
        let is_held = self.held_now().is_none_or(|held| held.iter().any(|address| net.contains(address)));
        !is_held && seen.overlaps(&[*net]).iter().any(Overlap::covers)
    }

    /// The router addresses that pods use, as the kernel shows: the sources of the routes to them. They are known even when
    /// every file is lost.
    pub(super) fn routers_of_pods(&self, seen: &NetworkRow) -> BTreeSet<Ipv4Addr> {
        let is_host_side = |ifindex: Option<u32>| self.links.values().any(|link| Some(link.ifindex) == ifindex);
        seen.routes.iter().filter(|route| is_host_side(route.ifindex)).filter_map(|route| route.source).collect()
    }

    /// Addresses of unrecorded pods, with names and indexes of their devices.
    pub(super) fn unrecorded(&self) -> BTreeMap<Ipv4Addr, (String, u32)> {
        let leased: BTreeSet<String> = self
            .leases
            .pods()
            .filter_map(|lease| match &lease.state {
                LeaseState::Confirmed { interface: PodAttachment::Pair(pair), .. } => Some(pair.host_ifname.clone()),
                LeaseState::Confirmed { interface: PodAttachment::Plugin { .. }, .. } => None,
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
