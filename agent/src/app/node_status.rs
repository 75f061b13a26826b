//! State of this node, gathered from the tables for status, health and explanations.

use crate::api::server::Failure;
use crate::api::types::{
    AddressCounts, AddressExplanation, DeviceReport, ExplainMasqueradeRequest, ExplainMasqueradeResponse,
    FindingReport, Health, LeaderReport, MasqueradeReport, NodeReply, NodeReport, OwnNodeReply, ReconcilerReport,
    RowReport, Status, WaitReport,
};
use crate::controllers::next_hops::Hops;
use crate::controllers::notices::SETTINGS;
use crate::kubernetes::election::LeaderRow;
use crate::leases::{self, View};
use crate::reconciler::{Handle, NotRealised, TargetStatus};
use crate::tables::Reader;
use crate::tables::findings::{FindingKey, FindingRow};
use crate::tables::rows::{CiliumNodeRow, LinkRow, MasqueradeRow, NetworkRow, NodeCondition, PeerRow, PoolRow, Wait};
use cistern_core::cni::refusal::Refusal;
use cistern_core::ipam::explain::{self, NodeFacts};
use cistern_core::ipam::supply::PoolUsage;
use cistern_core::masquerade::decide::{Content, TcpFlags};
use cistern_core::masquerade::explain as why;
use cistern_core::masquerade::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason};
use ipnet::{IpNet, Ipv4Net};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

/// The reconciler of the router address.
pub const ROUTER_ADDRESS: &str = "router address";

/// The reconciler of the routes to this node's pods.
pub const POD_ROUTES: &str = "pod routes";

/// How long an ADD waits for it before the caller is asked to retry.
const ROUTER_TIMEOUT: Duration = Duration::from_secs(2);

/// Reads the rows of a kernel map for the CLI.
pub type MapRows = Arc<dyn Fn(&str) -> Result<serde_json::Value, String> + Send + Sync>;

/// Readers of the tables for status and explanations.
#[derive(Clone)]
pub struct NodeStatus {
    /// What this build is.
    pub build: String,
    /// Name of this node.
    pub node: String,
    /// IPAM mode.
    pub ipam_mode: String,
    /// `mtu`; `None` for that of the route that leaves the node.
    pub mtu: Option<u32>,
    /// `ipv4-native-routing-cidr`
    pub native_routing_cidr: Option<Ipv4Net>,
    /// Identity of this process in the election; `None` if it does not take part.
    pub identity: Option<String>,
    /// What is waited for.
    pub waits: Reader<String, Wait>,
    /// Findings for the administrator.
    pub findings: Reader<FindingKey, FindingRow>,
    /// Devices and routes.
    pub network: Reader<(), NetworkRow>,
    /// Every CiliumNode, as the API server lists it.
    pub cilium_nodes: Reader<String, CiliumNodeRow>,
    /// Every node of the cluster.
    pub peers: Reader<String, PeerRow>,
    /// The pod CIDR that this node serves.
    pub pool: Reader<(), PoolRow>,
    /// Router address.
    pub router: Reader<Ipv4Addr, ()>,
    /// The reconciler of the router address.
    pub router_on_node: Handle<Ipv4Addr, ()>,
    /// The election.
    pub leader: Reader<(), LeaderRow>,
    /// State of the reconcilers.
    pub targets: Reader<String, TargetStatus>,
    /// Reconcilers that must have completed a full pass before this node is ready.
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
    /// Asks the kernel for routes.
    pub hops: Hops,
    /// Rows of the kernel maps; `None` if this node does not masquerade.
    pub maps: Option<MapRows>,
}

fn counts(view: &View) -> AddressCounts {
    let mut counts = AddressCounts::default();
    for PoolUsage { usage, .. } in &view.usage {
        counts.capacity += usage.size.saturating_sub(usage.reserved);
        counts.used += usage.used;
        counts.quarantined += usage.quarantined;
    }
    counts
}

/// A CiliumNode as input of explanations.
fn listed(name: &str, row: &CiliumNodeRow) -> NodeFacts {
    let mut facts = NodeFacts {
        name: name.to_owned(),
        operator_error: row.operator_error.clone(),
        deleting: row.deleting,
        ..NodeFacts::default()
    };
    for address in &row.addresses {
        match address.kind.as_str() {
            "CiliumInternalIP" => facts.router = facts.router.or(Some(address.ip)),
            _ => facts.addresses.push(address.ip),
        }
    }
    for text in &row.pod_cidrs {
        match text.parse::<IpNet>() {
            Ok(block) => facts.blocks.push(block.trunc()),
            Err(_) => facts.unreadable.push(text.clone()),
        }
    }
    facts
}

/// Fallback: that of Ethernet.
const DEFAULT_MTU: u32 = 1500;

impl NodeStatus {
    /// The pod CIDR in use.
    #[must_use]
    pub fn pod_cidr(&self) -> Option<Ipv4Net> {
        self.pool.peek().rows.get(&()).map(|row| row.pod_cidr)
    }

    /// MTU of pod interfaces: as configured, else that of the kernel's route to the outside, else of an egress device.
    #[must_use]
    pub fn pod_mtu(&self) -> u32 {
        self.mtu.unwrap_or_else(|| {
            let network = self.network.peek();
            network
                .rows
                .get(&())
                .and_then(|row| row.mtu(row.outside.as_ref()?))
                .or_else(|| {
                    let masquerade = self.masquerade.peek();
                    let ifindex = *masquerade.rows.get(&())?.devices.keys().next()?;
                    Some(network.rows.get(&())?.links.get(&ifindex)?.mtu)
                })
                .unwrap_or(DEFAULT_MTU)
        })
    }

    /// CIDRs that are not masqueraded, for the answer to an allocation call.
    #[must_use]
    pub fn native_cidrs(&self) -> Vec<String> {
        self.native_routing_cidr.iter().map(ToString::to_string).collect()
    }

    /// Whether pods can be served, and why not.
    #[must_use]
    pub fn health(&self) -> Health {
        let mut reasons = Vec::new();
        match self.pool.peek().rows.get(&()) {
            None => reasons.push("no pod CIDR yet; see the wait of that name".to_owned()),
            Some(row) => {
                reasons.extend(row.blocked.clone());
                let wait = leases::WAIT;
                reasons.extend((!row.on_disk).then(|| {
                    format!("pod CIDR {} is not on disk yet; see the wait {wait:?}, if there is one", row.pod_cidr)
                }));
            }
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
        Health::new(reasons)
    }

    /// Waits briefly until a granted router address is published and on this node.
    ///
    /// # Errors
    /// Why it is not.
    pub async fn router_is_set(&self, address: Ipv4Addr) -> Result<(), NotRealised> {
        self.router_on_node.has(address, (), ROUTER_TIMEOUT).await
    }

    /// The whole status.
    #[must_use]
    pub fn status(&self, view: &View) -> Status {
        let findings = self.findings.peek();
        let targets = self.targets.peek();
        let peers = self.peers.peek();
        Status {
            build: self.build.clone(),
            node: self.node.clone(),
            ipam_mode: self.ipam_mode.clone(),
            health: self.health(),
            waits: self.wait_reports(),
            findings: findings
                .rows
                .iter()
                .map(|((_, reason, subject), row)| FindingReport {
                    reason: (*reason).to_owned(),
                    subject: subject.clone(),
                    message: row.message.clone(),
                    since: row.since.to_string(),
                })
                .collect(),
            pod_cidr: self.pod_cidr().map(|cidr| cidr.to_string()),
            router: view.router.ipv4,
            addresses: counts(view),
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

    /// All waits, the longest first.
    fn wait_reports(&self) -> Vec<WaitReport> {
        let report = |(name, wait): (&String, &Wait)| WaitReport {
            name: name.clone(),
            reason: wait.reason.clone(),
            since: wait.since.to_string(),
            next_try: wait.next_try.map(|at| at.to_string()),
        };
        let waits = self.waits.peek();
        let mut rows: Vec<_> = waits.rows.iter().collect();
        rows.sort_by_key(|(_, wait)| wait.since);
        rows.into_iter().map(report).collect()
    }

    /// Explains an address.
    #[must_use]
    pub fn explain_ip(&self, view: &View, address: IpAddr) -> AddressExplanation {
        let pool = self.pool.peek();
        let row = pool.rows.get(&());
        let (nodes, _) = self.node_facts();
        let facts = explain::Facts {
            node: &self.node,
            block: row.map(|row| row.pod_cidr.into()),
            blocked: row.and_then(|row| row.blocked.as_deref()),
            rows: &view.rows,
            nodes: &nodes,
        };
        explain::address(&facts, address)
    }

    /// Explains a node; without a name, this one.
    #[must_use]
    pub fn explain_node(&self, view: &View, name: Option<&str>) -> NodeReply {
        let name = name.unwrap_or(&self.node);
        let (nodes, source) = self.node_facts();
        let found = nodes.iter().find(|node| node.name == name);
        let own = (name == self.node).then(|| OwnNodeReply {
            health: self.health(),
            pod_cidr: self.pod_cidr().map(|cidr| cidr.to_string()),
            addresses: counts(view),
            waits: self.wait_reports(),
        });
        NodeReply {
            explanation: explain::node(&nodes, name),
            addresses: found.map(|node| node.addresses.clone()).unwrap_or_default(),
            router: found.and_then(|node| node.router),
            source: source.to_owned(),
            own,
        }
    }

    /// All known nodes: from the API server's list or, before there is one, from the previous run.
    fn node_facts(&self) -> (Vec<NodeFacts>, &'static str) {
        let cilium_nodes = self.cilium_nodes.peek();
        if cilium_nodes.synced {
            return (cilium_nodes.rows.iter().map(|(name, row)| listed(name, row)).collect(), "api");
        }
        let remembered = |(name, peer): (&String, &PeerRow)| NodeFacts {
            name: name.clone(),
            addresses: peer.internal_ips.iter().copied().map(IpAddr::V4).collect(),
            router: peer.router.map(IpAddr::V4),
            blocks: peer.pod_cidrs.iter().copied().map(IpNet::V4).collect(),
            ..NodeFacts::default()
        };
        (self.peers.peek().rows.iter().map(remembered).collect(), "disk")
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
    /// There is no such map, no datapath, or it cannot be read.
    pub fn map(&self, name: &str) -> Result<serde_json::Value, Failure> {
        let maps = self.maps.as_ref().ok_or_else(no_datapath)?;
        maps(name).map_err(|reason| Failure::new(Refusal::Map, reason))
    }

    /// Packets by the kernel programs' counters; empty without a datapath, or if it cannot be read.
    #[must_use]
    pub fn packets(&self) -> Vec<(String, u64)> {
        let rows = self.maps.as_ref().and_then(|maps| maps("counters").ok()).unwrap_or_default();
        let row =
            |row: &serde_json::Value| Some((row.get("counter")?.as_str()?.to_owned(), row.get("packets")?.as_u64()?));
        rows.as_array().into_iter().flatten().filter_map(row).collect()
    }

    /// Explains the treatment of the first packet of a flow.
    ///
    /// # Errors
    /// This node does not masquerade, or the packet is invalid.
    pub async fn explain_masquerade(
        &self,
        request: &ExplainMasqueradeRequest,
    ) -> Result<ExplainMasqueradeResponse, Failure> {
        let settings = self.datapath.peek().rows.get(&()).cloned().filter(|_| self.maps.is_some());
        let settings = settings.ok_or_else(no_datapath)?;
        let content = match request.protocol.as_str() {
            "tcp" => Content::Tcp(TcpFlags::SYN),
            "udp" => Content::Udp,
            "icmp" => Content::EchoRequest,
            other => {
                let message = format!("protocol: {other:?}; expected tcp, udp or icmp");
                return Err(Failure::new(Refusal::BadRequest, message));
            }
        };
        let hops = (self.hops)(vec![request.to]).await.map_err(|error| {
            Failure::new(Refusal::Refused, format!("the kernel does not say where it sends packets: {error:#}"))
        })?;
        let network = self.network.peek().rows.get(&()).cloned().unwrap_or_default();
        let link = |row: LinkRow| why::Link { name: row.name, addresses: row.addresses };
        let facts = why::Facts {
            settings,
            endpoints: self.endpoints.peek().rows.to_map(),
            excluded: self.excluded.peek().rows.to_map(),
            devices: self.devices.peek().rows.to_map(),
            leaves_by: hops.get(&request.to).map(|hop| hop.ifindex),
            links: network.links.into_iter().map(|(ifindex, row)| (ifindex, link(row))).collect(),
        };
        let ExplainMasqueradeRequest { from, from_port, to, to_port, .. } = *request;
        let answer = why::explain(facts, &why::Question { from, from_port, to, to_port, content });
        Ok(ExplainMasqueradeResponse {
            verdict: word(answer.verdict),
            rule: word(answer.reason),
            why: answer.why,
            leaves_as: answer.leaves_as,
            device: answer.device,
        })
    }

    /// This node's readiness as a condition of its Node.
    #[must_use]
    pub fn condition(&self) -> NodeCondition {
        let health = self.health();
        let pool = self.pool.peek();
        let reason = match pool.rows.get(&()) {
            _ if health.ready => "PodsServed",
            None => "WaitingForPodCIDR",
            Some(row) if row.blocked.is_some() => "PodCIDRBlocked",
            Some(_) => "NotReady",
        };
        let mut message = if health.ready { "pods get addresses".to_owned() } else { health.reasons.join("; ") };
        let findings = self.findings.peek();
        for (_, row) in findings.rows.iter().filter(|((source, ..), _)| *source == SETTINGS) {
            message.push_str("; ");
            message.push_str(&row.message);
        }
        NodeCondition { ready: health.ready, reason: reason.to_owned(), message }
    }
}

/// The string that a unit variant serialises to.
fn word(value: impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn no_datapath() -> Failure {
    Failure::new(Refusal::NoDatapath, "this node does not masquerade: enable-ipv4-masquerade is false")
}
