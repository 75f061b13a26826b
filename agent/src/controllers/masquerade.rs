//! Treatment of pod traffic that leaves the cluster: devices, excluded destinations, settings of the datapath.

use crate::tables::rows::{ChosenDevice, FileContent, MasqueradeRow, NetworkRow, NodeRow, PeerRow};
use crate::tables::{Reader, Rows, Table};
use cistern_core::masquerade::ip_masq::{self, ConfigFile, Found, ListSource, Outcome};
use cistern_core::masquerade::plan::{
    AddressFacts, AttachmentEntry, DatapathSettings, DeviceEntry, DeviceFacts, ExcludedReason, ExclusionSources,
    LinkFacts, RouteFacts, exclusion, exclusions, merge_ports, not_ready, select_devices,
};
use cistern_core::settings::Settings;
use ipnet::{IpNet, Ipv4Net};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

/// Inputs and configuration.
pub struct Inputs {
    /// Name of this node.
    pub node: String,
    /// The settings in force.
    pub settings: Settings,
    /// `ip_local_reserved_ports` of the host.
    pub reserved_ports: Vec<(u16, u16)>,
    /// The last valid ip-masq-agent file, from disk.
    pub last_good: Option<ConfigFile>,
    /// Every node of the cluster.
    pub peers: Reader<String, PeerRow>,
    /// The Node of this node.
    pub nodes: Reader<String, NodeRow>,
    /// The egress devices of an earlier agent, as in the kernel.
    pub known_devices: BTreeMap<u32, DeviceEntry>,
    /// Devices and routes of this node.
    pub network: Reader<(), NetworkRow>,
    /// The ip-masq-agent file; `None` if it is not enabled.
    pub file: Option<Reader<(), FileContent>>,
}

/// Outputs.
#[derive(Debug, Clone)]
pub struct Tables {
    /// Excluded destinations.
    pub excluded: Arc<Table<Ipv4Net, ExcludedReason>>,
    /// Egress devices by index.
    pub devices: Arc<Table<u32, DeviceEntry>>,
    /// Settings of the datapath.
    pub settings: Arc<Table<(), DatapathSettings>>,
    /// Devices with attached programs.
    pub attachments: Arc<Table<u32, AttachmentEntry>>,
    /// The last valid file, if any.
    pub last_good: Arc<Table<(), Option<ConfigFile>>>,
    /// For display.
    pub report: Arc<Table<(), MasqueradeRow>>,
}

impl Default for Tables {
    fn default() -> Self {
        Self {
            excluded: Arc::new(Table::new("excluded")),
            devices: Arc::new(Table::new("devices")),
            settings: Arc::new(Table::new("datapath-settings")),
            attachments: Arc::new(Table::new("attachments")),
            last_good: Arc::new(Table::new("last-good-ip-masq")),
            report: Arc::new(Table::new("masquerade")),
        }
    }
}

/// Runs until dropped. Devices and settings depend on this node only and are published as soon as it is known; excluded
/// destinations wait for the nodes of the cluster, because they include their pod CIDRs.
pub async fn run(mut inputs: Inputs, tables: Tables) {
    tables.settings.publish(BTreeMap::from([((), datapath_settings(&inputs.settings, &inputs.reserved_ports))]));
    let mut in_use: BTreeMap<u32, Ipv4Addr> =
        inputs.known_devices.iter().filter_map(|(index, device)| Some((*index, device.address?))).collect();
    let mut last_good = inputs.last_good.take();
    let mut logged = None;
    let mut decided: Option<(Option<FileContent>, Outcome)> = None;
    let mut cluster = Cluster::default();
    // The node's own part of `excluded`, as published.
    let mut published: Option<ExclusionSources> = None;
    loop {
        let network = inputs.network.synced().await;
        let network = network.rows.get(&()).cloned().unwrap_or_default();
        let content = match &mut inputs.file {
            Some(file) => file.synced().await.rows.get(&()).cloned(),
            None => None,
        };
        // Changes of nodes do not require reading the file again.
        let outcome = match decided.take() {
            Some((of, outcome)) if of == content && outcome.last_good == last_good => outcome,
            _ => ip_masq(&inputs.settings, content.as_ref(), last_good.as_ref()),
        };
        log_outcome(&outcome, &mut logged);
        tables.last_good.publish(BTreeMap::from([((), outcome.last_good.clone())]));

        let peers = inputs.peers.snapshot();
        let touched = cluster.follow(&inputs.node, !inputs.settings.enable_remote_node_masquerade, &peers.rows);
        let node = inputs.nodes.snapshot();
        // A device that is down keeps its address.
        in_use.retain(|ifindex, _| network.links.contains_key(ifindex));
        let facts = DeviceFacts {
            // What is in use was chosen when the Node was known.
            of_node: addresses_of_node(
                node.rows.get(&inputs.node),
                peers.rows.get(&inputs.node).filter(|_| in_use.is_empty()),
            ),
            in_use: in_use.clone(),
            ..facts(&network)
        };
        let selection = select_devices(&facts, &inputs.settings.devices, &cluster.pod_cidrs.named);
        let fallback = derived_address(&inputs.settings, &network);
        let mut devices = BTreeMap::new();
        let mut report = MasqueradeRow {
            not_ready: inputs
                .settings
                .enable_ipv4_masquerade
                .then(|| not_ready(&selection, &inputs.settings.devices))
                .flatten()
                .or_else(|| fallback.as_ref().err().cloned()),
            ip_masq_source: source(&inputs.settings, &outcome),
            problems: outcome
                .error
                .iter()
                .map(|error| format!("ip-masq-agent file is not in force: {error}"))
                .chain(outcome.warnings.iter().map(ToString::to_string))
                .collect(),
            ..MasqueradeRow::default()
        };
        for (ifindex, device) in &selection.selected {
            let address = fallback.clone().ok().flatten().or(device.address);
            in_use.extend(address.map(|address| (*ifindex, address)));
            devices.insert(*ifindex, DeviceEntry { address });
            report
                .devices
                .insert(*ifindex, ChosenDevice { name: device.name.clone(), address, reason: device.reason.clone() });
        }
        tables.attachments.publish(
            selection
                .selected
                .iter()
                .map(|(ifindex, device)| (*ifindex, AttachmentEntry { name: device.name.clone(), complete: true }))
                .collect(),
        );
        if report.not_ready.is_none()
            && let Some(device) = report.devices.values().find(|device| device.address.is_none())
            && inputs.settings.enable_ipv4_masquerade
        {
            report.not_ready = Some(format!(
                "device {} has no IPv4 address: pod traffic passes it without masquerading; add an address, or exclude it \
                 in devices",
                device.name
            ));
        }
        tables.devices.publish(devices);
        tables.report.publish(BTreeMap::from([((), report)]));
        if peers.synced {
            let own = own_sources(&inputs.settings, &network, &outcome);
            let sources = cluster.add_to(own.clone());
            if published.as_ref() == Some(&own) {
                tables.excluded.modify(|rows| update(rows, &touched, &sources));
            } else {
                tables.excluded.publish(exclusions(&sources));
                published = Some(own);
            }
            cluster.take_back(sources);
        }
        last_good.clone_from(&outcome.last_good);
        decided = Some((content, outcome));
        let file_changed = async {
            match &mut inputs.file {
                Some(file) => file.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = inputs.peers.changed() => {}
            () = inputs.network.changed() => {}
            () = inputs.nodes.changed() => {}
            () = file_changed => {}
        }
    }
}

fn ip_masq(settings: &Settings, content: Option<&FileContent>, last_good: Option<&ConfigFile>) -> Outcome {
    let found = match content {
        None | Some(FileContent::Absent) => Found::Absent,
        Some(FileContent::Bytes(bytes)) => match std::str::from_utf8(bytes) {
            Ok(text) => Found::Content(text.to_owned()),
            Err(error) => Found::Unreadable(format!("it is not UTF-8: {error}")),
        },
        Some(FileContent::Unreadable(reason)) => Found::Unreadable(reason.clone()),
    };
    ip_masq::decide(ip_masq::Input {
        enabled: settings.enable_ip_masq_agent,
        defaults: settings.ip_masq_default_exclusions,
        ipv6: false,
        found: &found,
        last_good,
    })
}

/// Logs what is in force when it changes, and every problem once.
fn log_outcome(outcome: &Outcome, logged: &mut Option<Outcome>) {
    if logged.as_ref() == Some(outcome) {
        return;
    }
    if let Some(error) = &outcome.error {
        tracing::error!(%error, in_force = %outcome.source, "ip-masq-agent file is not used");
    }
    for warning in &outcome.warnings {
        tracing::warn!("ip-masq-agent file: {warning}");
    }
    tracing::info!(source = %outcome.source, excluded = outcome.exclusions.ipv4.len(), "ip-masq-agent list in force");
    *logged = Some(outcome.clone());
}

fn source(settings: &Settings, outcome: &Outcome) -> String {
    match outcome.source {
        ListSource::File => format!("file {}", settings.ip_masq_agent_config_path.display()),
        source => source.to_string(),
    }
}

/// Sources of excluded destinations, except the nodes of the cluster.
fn own_sources(settings: &Settings, network: &NetworkRow, outcome: &Outcome) -> ExclusionSources {
    ExclusionSources {
        own_addresses: ipv4_addresses(network).map(|(_, net)| net.addr()).collect(),
        node_internal_addresses: BTreeSet::new(),
        pod_cidrs: BTreeSet::new(),
        native_routing: settings.ipv4_native_routing_cidr,
        ip_masq_agent: outcome.exclusions.ipv4.iter().copied().collect(),
        masquerade_link_local: !outcome.exclusions.link_local_ipv4,
    }
}

/// Updates the rows of these prefixes.
fn update(rows: &mut Rows<Ipv4Net, ExcludedReason>, prefixes: &BTreeSet<Ipv4Net>, sources: &ExclusionSources) {
    for prefix in prefixes {
        match exclusion(*prefix, sources) {
            Some(reason) if rows.get(prefix) == Some(&reason) => {}
            Some(reason) => rows.insert(*prefix, reason),
            None => {
                rows.remove(prefix);
            }
        }
    }
}

/// The part of the cluster's nodes, updated one change at a time.
#[derive(Debug, Default)]
struct Cluster {
    /// The nodes that the other fields are derived from.
    seen: Rows<String, PeerRow>,
    pod_cidrs: Named<Ipv4Net>,
    /// `InternalIP` of other nodes.
    addresses: Named<Ipv4Addr>,
}

impl Cluster {
    /// Follows the nodes; returns the prefixes that changed nodes have or had. `addresses` is false if the addresses of
    /// other nodes are not excluded.
    fn follow(&mut self, own: &str, addresses: bool, peers: &Rows<String, PeerRow>) -> BTreeSet<Ipv4Net> {
        let mut touched = BTreeSet::new();
        for change in peers.changes_from(&self.seen) {
            let addresses = addresses && change.key != own;
            // Add before removing, so that what a node still has is never removed.
            for (row, is_named) in [(change.after, true), (change.before, false)] {
                let Some(row) = row else { continue };
                for prefix in &row.pod_cidrs {
                    self.pod_cidrs.count(*prefix, is_named);
                    touched.insert(prefix.trunc());
                }
                for address in row.internal_ips.iter().filter(|_| addresses) {
                    self.addresses.count(*address, is_named);
                    touched.insert((*address).into());
                }
            }
        }
        self.seen = peers.clone();
        touched
    }

    /// Moves the nodes' part to the sources until [`Cluster::take_back`].
    fn add_to(&mut self, own: ExclusionSources) -> ExclusionSources {
        ExclusionSources {
            node_internal_addresses: std::mem::take(&mut self.addresses.named),
            pod_cidrs: std::mem::take(&mut self.pod_cidrs.named),
            ..own
        }
    }

    fn take_back(&mut self, sources: ExclusionSources) {
        self.addresses.named = sources.node_internal_addresses;
        self.pod_cidrs.named = sources.pod_cidrs;
    }
}

/// Values of nodes. Several nodes may have the same one, which is kept until the last of them no longer has it.
#[derive(Debug)]
struct Named<T> {
    named: BTreeSet<T>,
    /// Number of nodes, for values of more than one node.
    often: BTreeMap<T, usize>,
}

impl<T> Default for Named<T> {
    fn default() -> Self {
        Self { named: BTreeSet::new(), often: BTreeMap::new() }
    }
}

impl<T: Ord + Copy> Named<T> {
    fn count(&mut self, name: T, is_named: bool) {
        match (is_named, self.often.get_mut(&name)) {
            (true, Some(times)) => *times += 1,
            (true, None) => {
                if !self.named.insert(name) {
                    self.often.insert(name, 2);
                }
            }
            (false, Some(times)) if *times > 2 => *times -= 1,
            (false, Some(_)) => {
                self.often.remove(&name);
            }
            (false, None) => {
                self.named.remove(&name);
            }
        }
    }
}

fn ipv4_addresses(network: &NetworkRow) -> impl Iterator<Item = (u32, Ipv4Net)> {
    network.links.iter().flat_map(|(index, link)| {
        link.addresses.iter().filter_map(|net| match net {
            IpNet::V4(net) => Some((*index, *net)),
            IpNet::V6(_) => None,
        })
    })
}

/// `derive-masq-ip-addr-from-device`: the address for all devices, or why there is none.
fn derived_address(settings: &Settings, network: &NetworkRow) -> Result<Option<Ipv4Addr>, String> {
    let Some(name) = &settings.derive_masq_ip_addr_from_device else { return Ok(None) };
    let address = network.links.values().filter(|link| link.name == *name).find_map(|link| {
        link.addresses.iter().find_map(|net| match net {
            IpNet::V4(net) => Some(net.addr()),
            IpNet::V6(_) => None,
        })
    });
    address.map(Some).ok_or_else(|| {
        format!("derive-masq-ip-addr-from-device: device {name:?} does not exist or has no IPv4 address")
    })
}

fn facts(network: &NetworkRow) -> DeviceFacts {
    /// Length of an Ethernet address; other devices have none or another length.
    const ETHERNET: usize = 6;
    let mut networks = BTreeSet::new();
    DeviceFacts {
        links: network
            .links
            .iter()
            .map(|(index, link)| LinkFacts {
                index: *index,
                name: link.name.clone(),
                kind: Some(link.kind.clone()).filter(|kind| !kind.is_empty()),
                up: link.up,
                loopback: link.loopback,
                ethernet: link.mac.len() == ETHERNET && !link.loopback,
                master: link.master,
            })
            .collect(),
        addresses: ipv4_addresses(network)
            .map(|(index, net)| AddressFacts {
                index,
                address: net.addr(),
                global: !net.addr().is_loopback() && !net.addr().is_link_local(),
                // The kernel lists the primary address of a network first.
                secondary: !networks.insert((index, net.trunc())),
            })
            .collect(),
        routes: network
            .routes
            .iter()
            .filter_map(|route| {
                Some(RouteFacts {
                    destination: route.destination,
                    index: route.ifindex?,
                    gateway: route.gateway.is_some(),
                })
            })
            .collect(),
        chosen_by_kernel: network.sources.clone(),
        of_node: Vec::new(),
        in_use: BTreeMap::new(),
    }
}

/// Each `InternalIP` of the Node, then each `ExternalIP`. While the API server has not answered, those last `known`.
fn addresses_of_node(node: Option<&NodeRow>, known: Option<&PeerRow>) -> Vec<Ipv4Addr> {
    let Some(node) = node else { return known.map(|peer| peer.internal_ips.clone()).unwrap_or_default() };
    let of_kind = |kind: &'static str| {
        node.addresses.iter().filter(move |address| address.kind == kind).filter_map(|address| match address.ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
    };
    of_kind("InternalIP").chain(of_kind("ExternalIP")).collect()
}

fn datapath_settings(settings: &Settings, reserved: &[(u16, u16)]) -> DatapathSettings {
    let mut ports = reserved.to_vec();
    ports.push((settings.node_port_range.first, settings.node_port_range.last));
    DatapathSettings {
        masquerade: settings.enable_ipv4_masquerade,
        flow_policy: settings.masquerade_flow_policy,
        port_min: settings.masquerade_port_range.first,
        port_max: settings.masquerade_port_range.last,
        ports_reserved: merge_ports(&ports),
        tcp_idle_seconds: u32::try_from(settings.tcp_idle_timeout.as_secs()).unwrap_or(u32::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peer() -> impl Strategy<Value = PeerRow> {
        let cidrs = proptest::collection::vec((0_u8..6).prop_map(|third| net(third, 24)), 0..3);
        let addresses = proptest::collection::vec((0_u8..6).prop_map(|last| Ipv4Addr::new(172, 16, 0, last)), 0..3);
        (cidrs, addresses).prop_map(|(pod_cidrs, internal_ips)| PeerRow { internal_ips, router: None, pod_cidrs })
    }

    fn net(third: u8, length: u8) -> Ipv4Net {
        Ipv4Net::new(Ipv4Addr::new(10, 0, third, 0), length).unwrap()
    }

    proptest! {
        #[test]
        fn following_the_nodes_one_by_one_excludes_what_all_of_them_name(
            steps in proptest::collection::vec((0_u8..5, proptest::option::of(peer())), 1..40),
            addresses: bool,
        ) {
            // One prefix is also excluded by this node, for a reason of lower precedence.
            let own = ExclusionSources { native_routing: Some(net(3, 24)), ..ExclusionSources::default() };
            let (mut peers, mut cluster, mut rows) = (Rows::new(), Cluster::default(), Rows::from(exclusions(&own)));
            for (node, row) in steps {
                let node = format!("n{node}");
                match row {
                    Some(row) => peers.insert(node, row),
                    None => {
                        peers.remove(&node);
                    }
                }
                let touched = cluster.follow("n0", addresses, &peers);
                let sources = cluster.add_to(own.clone());
                update(&mut rows, &touched, &sources);
                let others = peers.iter().filter(|(name, _)| addresses && *name != "n0");
                let expected = ExclusionSources {
                    pod_cidrs: peers.values().flat_map(|peer| peer.pod_cidrs.clone()).collect(),
                    node_internal_addresses: others.flat_map(|(_, peer)| peer.internal_ips.clone()).collect(),
                    ..own.clone()
                };
                prop_assert_eq!(&sources, &expected);
                prop_assert_eq!(&rows, &exclusions(&expected));
                cluster.take_back(sources);
            }
        }
    }
}
