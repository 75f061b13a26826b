//! What is known of this node, gathered from the tables for status, health and explanations.

use crate::api::server::Failure;
use crate::api::types::{
    AddressCounts, DeviceReport, ExplainMasqueradeRequest, ExplainMasqueradeResponse, Health, LeaderReport,
    MasqueradeReport, NodeReport, ReconcilerReport, RowReport, Status, WaitReport,
};
use crate::controllers::endpoint::View;
use crate::kubernetes::lease::LeaderRow;
use crate::reconciler::TargetStatus;
use crate::tables::Reader;
use crate::tables::rows::{MasqueradeRow, NetworkRow, PeerRow, PoolRow, Wait};
use cistern_core::masquerade::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason};
use ipnet::Ipv4Net;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// Reads the rows of a kernel map as the CLI prints them.
pub type MapRows = Arc<dyn Fn(&str) -> Result<serde_json::Value, String> + Send + Sync>;

/// Readers of everything that status and explanations are made from.
#[derive(Clone)]
pub struct NodeStatus {
    /// What this build is.
    pub build: String,
    /// Name of this node.
    pub node: String,
    /// IPAM mode.
    pub ipam_mode: String,
    /// `mtu`; none takes that of the device with the default route.
    pub mtu: Option<u32>,
    /// `ipv4-native-routing-cidr`
    pub native_routing_cidr: Option<Ipv4Net>,
    /// Name of this process in the election; none when it does not take part.
    pub identity: Option<String>,
    /// What is waited for.
    pub waits: Reader<String, Wait>,
    /// Devices and routes.
    pub network: Reader<(), NetworkRow>,
    /// Every node of the cluster.
    pub peers: Reader<String, PeerRow>,
    /// Where this node's pods get their addresses from.
    pub pool: Reader<(), PoolRow>,
    /// Router address.
    pub router: Reader<Ipv4Addr, ()>,
    /// The election.
    pub leader: Reader<(), LeaderRow>,
    /// State of the reconcilers.
    pub targets: Reader<String, TargetStatus>,
    /// Names of the reconcilers that must have made a full pass before this node is ready.
    pub required_targets: Vec<&'static str>,
    /// Masquerading.
    pub masquerade: Reader<(), MasqueradeRow>,
    /// Excluded destinations.
    pub excluded: Reader<Ipv4Net, ExcludedReason>,
    /// Pods of this node.
    pub endpoints: Reader<Ipv4Addr, EndpointEntry>,
    /// Egress devices.
    pub devices: Reader<u32, DeviceEntry>,
    /// Node-wide settings of the datapath.
    pub datapath: Reader<(), DatapathSettings>,
    /// Rows of the kernel maps; none when this node does not masquerade.
    pub maps: Option<MapRows>,
}

/// Without any other word, what Ethernet carries.
const DEFAULT_MTU: u32 = 1500;

impl NodeStatus {
    /// The pod CIDR in use.
    #[must_use]
    pub fn pod_cidr(&self) -> Option<Ipv4Net> {
        self.pool.peek().rows.get(&()).map(|row| row.pod_cidr)
    }

    /// MTU of pods' interfaces: as configured, else that of the device with the default route.
    #[must_use]
    pub fn pod_mtu(&self) -> u32 {
        self.mtu.unwrap_or_else(|| {
            let network = self.network.peek();
            network
                .rows
                .get(&())
                .and_then(|row| {
                    let default = row.routes.iter().find(|route| route.destination.prefix_len() == 0)?;
                    Some(row.links.get(&default.ifindex?)?.mtu)
                })
                .or_else(|| {
                    let masquerade = self.masquerade.peek();
                    let ifindex = *masquerade.rows.get(&())?.devices.keys().next()?;
                    Some(network.rows.get(&())?.links.get(&ifindex)?.mtu)
                })
                .unwrap_or(DEFAULT_MTU)
        })
    }

    /// CIDRs that pods reach under their own address, as the allocation call tells them.
    #[must_use]
    pub fn native_cidrs(&self) -> Vec<String> {
        self.native_routing_cidr.iter().map(ToString::to_string).collect()
    }

    /// Whether pods can be served now, and why not.
    #[must_use]
    pub fn health(&self) -> Health {
        let mut reasons = Vec::new();
        match self.pool.peek().rows.get(&()) {
            None => reasons.push("no pod CIDR yet; see the wait of that name".to_owned()),
            Some(row) => reasons.extend(row.blocked.clone()),
        }
        if self.router.peek().rows.is_empty() {
            reasons.push("no router address yet".to_owned());
        }
        let targets = self.targets.peek();
        for name in &self.required_targets {
            match targets.rows.get(*name) {
                Some(status) if !status.complete => {
                    let error = status.failing.values().next().map_or("no full pass yet", |row| row.error.as_str());
                    reasons.push(format!("{name}: {error}"));
                }
                Some(status) => {
                    reasons.extend(status.failing.iter().map(|(key, row)| format!("{name} {key}: {}", row.error)));
                }
                None => reasons.push(format!("{name}: no full pass yet")),
            }
        }
        reasons.extend(self.masquerade.peek().rows.get(&()).and_then(|row| row.not_ready.clone()));
        Health { ready: reasons.is_empty(), reasons }
    }

    /// Everything in one answer.
    #[must_use]
    pub fn status(&self, view: &View) -> Status {
        let mut addresses = AddressCounts::default();
        for (_, usage) in &view.usage {
            addresses.capacity += usage.size.saturating_sub(usage.reserved);
            addresses.used += usage.used;
            addresses.quarantined += usage.quarantined;
        }
        let waits = self.waits.peek();
        let targets = self.targets.peek();
        let peers = self.peers.peek();
        Status {
            build: self.build.clone(),
            node: self.node.clone(),
            ipam_mode: self.ipam_mode.clone(),
            health: self.health(),
            waits: waits
                .rows
                .iter()
                .map(|(name, wait)| WaitReport {
                    name: name.clone(),
                    reason: wait.reason.clone(),
                    since: wait.since.to_string(),
                    next_try: wait.next_try.map(|at| at.to_string()),
                })
                .collect(),
            pod_cidr: self.pod_cidr().map(|cidr| cidr.to_string()),
            router: view.router.ipv4,
            addresses,
            masquerade: self.masquerade_report(),
            reconcilers: targets
                .rows
                .iter()
                .map(|(name, status)| ReconcilerReport {
                    name: name.clone(),
                    done: status.done,
                    failing: status
                        .failing
                        .iter()
                        .map(|(key, row)| RowReport {
                            key: key.clone(),
                            error: row.error.clone(),
                            attempts: row.attempts,
                            next_try: row.next_try.map(|at| at.to_string()),
                        })
                        .collect(),
                })
                .collect(),
            leader_election: self.identity.as_ref().map(|identity| {
                let leader = self.leader.peek();
                let row = leader.rows.get(&());
                LeaderReport {
                    leading: row.is_some_and(|row| row.leading),
                    holder: row.and_then(|row| row.holder.clone()),
                    identity: identity.clone(),
                }
            }),
            nodes: peers
                .rows
                .iter()
                .map(|(name, peer)| NodeReport {
                    name: name.clone(),
                    internal_ip: peer.internal_ips.first().copied(),
                    pod_cidrs: peer.pod_cidrs.iter().map(ToString::to_string).collect(),
                })
                .collect(),
        }
    }

    fn masquerade_report(&self) -> MasqueradeReport {
        let masquerade = self.masquerade.peek();
        let row = masquerade.rows.get(&()).cloned().unwrap_or_default();
        let mode = match (&self.maps, &row.not_ready) {
            (None, _) => "off: enable-ipv4-masquerade is false".to_owned(),
            (Some(_), Some(reason)) => format!("eBPF, not ready: {reason}"),
            (Some(_), None) => "eBPF".to_owned(),
        };
        MasqueradeReport {
            mode,
            devices: row
                .devices
                .into_iter()
                .map(|(ifindex, device)| DeviceReport {
                    name: device.name,
                    ifindex,
                    address: device.address,
                    reason: device.reason,
                })
                .collect(),
            native_routing_cidr: self.native_routing_cidr.map(|cidr| cidr.to_string()),
            ip_masq_source: row.ip_masq_source,
            excluded: self.excluded.peek().rows.len(),
            problems: row.problems,
        }
    }

    /// The rows of a kernel map.
    ///
    /// # Errors
    /// When there is no such map, no datapath, or the kernel does not let it be read.
    pub fn map(&self, name: &str) -> Result<serde_json::Value, Failure> {
        let Some(maps) = &self.maps else {
            return Err(Failure::permanent(
                501,
                "no-datapath",
                "this node does not masquerade: enable-ipv4-masquerade is false",
            ));
        };
        maps(name).map_err(|reason| Failure::permanent(500, "map", reason))
    }

    /// Which rule decides about a packet.
    ///
    /// # Errors
    /// When this node does not masquerade.
    pub fn explain_masquerade(
        &self,
        _request: &ExplainMasqueradeRequest,
    ) -> Result<ExplainMasqueradeResponse, Failure> {
        Err(Failure::permanent(501, "no-datapath", "this node does not masquerade"))
    }
}
