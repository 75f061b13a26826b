//! Desired rows of the datapath's maps, independent of their encoding.

use crate::settings::DeviceSelector;
use cistern_ebpf_common::abi::reason;
use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::Ipv4Addr;

/// Why a destination is excluded from masquerading (`masquerade` 2.4). All of them are in one longest-prefix-match map,
/// so that a new flow needs one lookup; of several reasons for a prefix, the first in this order counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum ExcludedReason {
    /// An address of this node.
    OwnNode = reason::OWN_NODE,
    /// `InternalIP` of another node, under native routing.
    NodeInternalIp = reason::NODE_INTERNAL_IP,
    /// The pod CIDR of a known node.
    PodCidr = reason::POD_CIDR,
    /// `ipv4-native-routing-cidr`.
    NativeRouting = reason::NATIVE_ROUTING,
    /// The ip-masq-agent list, or its built-in default.
    IpMasqAgent = reason::IP_MASQ_AGENT,
    /// 169.254.0.0/16, unless `masqLinkLocal`.
    LinkLocal = reason::LINK_LOCAL,
    /// Multicast and limited broadcast, which are never masqueraded.
    Multicast = reason::MULTICAST,
}

impl ExcludedReason {
    /// All reasons, in order of precedence.
    pub const ALL: [Self; 7] = [
        Self::OwnNode,
        Self::NodeInternalIp,
        Self::PodCidr,
        Self::NativeRouting,
        Self::IpMasqAgent,
        Self::LinkLocal,
        Self::Multicast,
    ];

    /// The reason with this number, as in the kernel map.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u8 == number)
    }

    /// Human-readable: completes "the destination is …".
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::OwnNode => "an address of this node",
            Self::NodeInternalIp => "the InternalIP of another node",
            Self::PodCidr => "in the pod CIDR of a known node",
            Self::NativeRouting => "in ipv4-native-routing-cidr",
            Self::IpMasqAgent => "in the ip-masq-agent list",
            Self::LinkLocal => "link-local",
            Self::Multicast => "multicast or broadcast",
        }
    }
}

impl fmt::Display for ExcludedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OwnNode => "own-node",
            Self::NodeInternalIp => "node-internal-ip",
            Self::PodCidr => "pod-cidr",
            Self::NativeRouting => "native-routing",
            Self::IpMasqAgent => "ip-masq-agent",
            Self::LinkLocal => "link-local",
            Self::Multicast => "multicast",
        })
    }
}

/// A pod of this node in the datapath.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointEntry {
    /// The host side of the pod's interface; 0 if another plugin attached the pod.
    pub ifindex: u32,
    /// The pod's traffic is never masqueraded.
    pub no_masquerade: bool,
    /// Distinguishes successive pods with this address: [`EndpointEntry::generation_of`] the lease, 0 if unknown. A
    /// flow ends with the generation that opened it.
    pub generation: u32,
}

impl EndpointEntry {
    /// The generation of the endpoint of a lease with this generation. Never 0, which means "unknown".
    #[must_use]
    pub fn generation_of(lease: u64) -> u32 {
        // Two leases of an address are never 2^32 apart, so the lower half distinguishes them.
        (lease as u32).max(1)
    }
}

/// An egress device in the datapath.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEntry {
    /// The masquerade address; without one, traffic passes unchanged and is counted.
    pub address: Option<Ipv4Addr>,
}

/// Whether a change of policy applies to established flows (`masquerade` decision 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlowPolicy {
    /// An established TCP flow keeps the treatment of its first packet.
    #[default]
    Sticky,
    /// The current policy applies to every packet.
    Immediate,
}

/// Node-wide settings of the datapath, one row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatapathSettings {
    /// `enable-ipv4-masquerade`: with false all traffic passes unchanged.
    pub masquerade: bool,
    /// See [`FlowPolicy`].
    pub flow_policy: FlowPolicy,
    /// First port for pod flows.
    pub port_min: u16,
    /// Last port for pod flows.
    pub port_max: u16,
    /// Ports not used for pod flows: NodePort range, `ip_local_reserved_ports`. Inclusive ranges, normalised by
    /// [`merge_ports`], so that rows read back from the kernel compare equal.
    pub ports_reserved: Vec<(u16, u16)>,
    /// TCP idle timeout of an established flow, in seconds; at least 7,260.
    pub tcp_idle_seconds: u32,
}

/// A device with both programs attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachmentEntry {
    /// Name of the device, for display; the row's key is its index.
    pub name: String,
    /// Both directions run this agent's programs. Always true in desired rows; observed as false if a program is
    /// missing, is an earlier agent's, or lost its device.
    pub complete: bool,
}

/// Sources of excluded destinations.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExclusionSources {
    /// Addresses of all devices of this node.
    pub own_addresses: BTreeSet<Ipv4Addr>,
    /// `InternalIP` of the other nodes; empty if traffic to them is masqueraded.
    pub node_internal_addresses: BTreeSet<Ipv4Addr>,
    /// Pod CIDRs of all known nodes, including this one, without host bits.
    pub pod_cidrs: BTreeSet<Ipv4Net>,
    /// `ipv4-native-routing-cidr`
    pub native_routing: Option<Ipv4Net>,
    /// The ip-masq-agent list in force; empty with `enable-ip-masq-agent: false`.
    pub ip_masq_agent: Vec<Ipv4Net>,
    /// `masqLinkLocal`: link-local destinations are masqueraded.
    pub masquerade_link_local: bool,
}

const LINK_LOCAL: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16);
const MULTICAST: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4);
const BROADCAST: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::BROADCAST, 32);

/// All excluded destinations with the reason shown for each: if several sources have the same prefix, the first in the
/// order of [`ExcludedReason`] counts. Host bits are masked, because the kernel map would otherwise have two keys for
/// one prefix.
#[must_use]
pub fn exclusions(sources: &ExclusionSources) -> BTreeMap<Ipv4Net, ExcludedReason> {
    let host = |address: &Ipv4Addr| Ipv4Net::from(*address);
    let named = sources
        .own_addresses
        .iter()
        .map(|address| (host(address), ExcludedReason::OwnNode))
        .chain(sources.node_internal_addresses.iter().map(|address| (host(address), ExcludedReason::NodeInternalIp)))
        .chain(sources.pod_cidrs.iter().map(|prefix| (*prefix, ExcludedReason::PodCidr)))
        .chain(sources.native_routing.iter().map(|prefix| (*prefix, ExcludedReason::NativeRouting)))
        .chain(sources.ip_masq_agent.iter().map(|prefix| (*prefix, ExcludedReason::IpMasqAgent)))
        .chain((!sources.masquerade_link_local).then_some((LINK_LOCAL, ExcludedReason::LinkLocal)))
        .chain([(MULTICAST, ExcludedReason::Multicast), (BROADCAST, ExcludedReason::Multicast)]);
    let mut rows = BTreeMap::new();
    for (prefix, reason) in named {
        rows.entry(prefix.trunc())
            .and_modify(|kept: &mut ExcludedReason| *kept = (*kept).min(reason))
            .or_insert(reason);
    }
    rows
}

/// The row of one prefix among [`exclusions`], without evaluating the others, so that its cost is independent of the
/// cluster's size. Only prefixes without host bits have one.
#[must_use]
pub fn exclusion(prefix: Ipv4Net, sources: &ExclusionSources) -> Option<ExcludedReason> {
    let host = (prefix.prefix_len() == prefix.max_prefix_len()).then(|| prefix.addr());
    let is_in = |addresses: &BTreeSet<Ipv4Addr>| host.is_some_and(|host| addresses.contains(&host));
    let is = |other: &Ipv4Net| other.trunc() == prefix;
    // In the order of precedence.
    [
        (is_in(&sources.own_addresses), ExcludedReason::OwnNode),
        (is_in(&sources.node_internal_addresses), ExcludedReason::NodeInternalIp),
        (sources.pod_cidrs.contains(&prefix), ExcludedReason::PodCidr),
        (sources.native_routing.iter().any(is), ExcludedReason::NativeRouting),
        (sources.ip_masq_agent.iter().any(is), ExcludedReason::IpMasqAgent),
        (!sources.masquerade_link_local && prefix == LINK_LOCAL, ExcludedReason::LinkLocal),
        (prefix == MULTICAST || prefix == BROADCAST, ExcludedReason::Multicast),
    ]
    .into_iter()
    .find_map(|(is_named, reason)| is_named.then_some(reason))
}

/// Sorted, disjoint and non-adjacent inclusive ranges that cover the same ports. A range with `first > last` is empty.
#[must_use]
pub fn merge_ports(ranges: &[(u16, u16)]) -> Vec<(u16, u16)> {
    let mut sorted: Vec<(u16, u16)> = ranges.iter().copied().filter(|(first, last)| first <= last).collect();
    sorted.sort_unstable();
    let mut merged: Vec<(u16, u16)> = Vec::with_capacity(sorted.len());
    for (first, last) in sorted {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = (*end).max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Facts about a network device for the selection of egress devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFacts {
    /// `ifindex`
    pub index: u32,
    /// Its name.
    pub name: String,
    /// `IFLA_INFO_KIND`, such as `bridge`, `veth`, `dummy`; `None` for hardware.
    pub kind: Option<String>,
    /// Administratively up, with carrier.
    pub up: bool,
    /// `IFF_LOOPBACK`
    pub loopback: bool,
    /// Frames have an Ethernet header, which the programs require.
    pub ethernet: bool,
    /// Its bond, bridge or team.
    pub master: Option<u32>,
}

/// An IPv4 address of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressFacts {
    /// The device.
    pub index: u32,
    /// The address.
    pub address: Ipv4Addr,
    /// Scope global (`RT_SCOPE_UNIVERSE`).
    pub global: bool,
    /// `IFA_F_SECONDARY`
    pub secondary: bool,
}

/// A unicast IPv4 route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteFacts {
    /// The destination.
    pub destination: Ipv4Net,
    /// The device.
    pub index: u32,
    /// Via a gateway, not to directly connected neighbours.
    pub gateway: bool,
}

/// Input of the selection of egress devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceFacts {
    /// All devices.
    pub links: Vec<LinkFacts>,
    /// All IPv4 addresses.
    pub addresses: Vec<AddressFacts>,
    /// All unicast routes.
    pub routes: Vec<RouteFacts>,
    /// The source address that the kernel chooses for packets by a device.
    pub chosen_by_kernel: BTreeMap<u32, Ipv4Addr>,
    /// Addresses of the Node: each `InternalIP`, then each `ExternalIP`.
    pub of_node: Vec<Ipv4Addr>,
    /// The masquerade addresses until now.
    pub in_use: BTreeMap<u32, Ipv4Addr>,
}

/// A selected egress device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SelectedDevice {
    /// Its name.
    pub name: String,
    /// The masquerade address of traffic by it.
    pub address: Option<Ipv4Addr>,
    /// Why it is selected, and why its address; human-readable.
    pub reason: String,
}

/// The egress devices, and for every other device the reason why it is not selected.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct DeviceSelection {
    /// By `ifindex`.
    pub selected: BTreeMap<u32, SelectedDevice>,
    /// By name.
    pub left_out: BTreeMap<String, String>,
}

/// Name prefixes of devices that container tools create inside a node.
const INSIDE_PREFIXES: [&str; 8] = ["cst", "lxc", "cni", "docker", "cilium_", "virbr", "kube-", "nodelocaldns"];

/// Selects the egress devices (`masquerade` 4.2).
///
/// If the setting `devices` selects devices by name, only it counts. Otherwise a device is selected if a default route
/// uses it, or if it has an address and a route to a destination outside `pod_cidrs`; a bridge needs a route via a
/// gateway, since container tools create bridges with addresses, too.
#[must_use]
pub fn select_devices(facts: &DeviceFacts, devices: &DeviceSelector, pod_cidrs: &BTreeSet<Ipv4Net>) -> DeviceSelection {
    let mut selection = DeviceSelection::default();
    for link in &facts.links {
        let detected = detect(link, facts, pod_cidrs);
        let choice = match (devices.selects(&link.name, detected.is_ok()), devices.is_automatic()) {
            (true, true) => detected,
            (true, false) if link.ethernet && !link.loopback => Ok(format!("devices names it: {devices}")),
            (true, false) => Err("has no Ethernet header".to_owned()),
            (false, true) if detected.is_ok() => Err(format!("devices excludes it: {devices}")),
            (false, true) => detected,
            (false, false) => Err(format!("devices does not name it: {devices}")),
        };
        match choice {
            Ok(reason) => {
                let source = device_address(link.index, facts);
                let reason = match source {
                    Some((address, why)) => format!("{reason}; {address} {why}"),
                    None => reason,
                };
                let device = SelectedDevice { name: link.name.clone(), address: source.map(|(ip, _)| ip), reason };
                selection.selected.insert(link.index, device);
            }
            Err(reason) => {
                selection.left_out.insert(link.name.clone(), reason);
            }
        }
    }
    selection
}

fn detect(link: &LinkFacts, facts: &DeviceFacts, pod_cidrs: &BTreeSet<Ipv4Net>) -> Result<String, String> {
    if link.loopback {
        return Err("loopback".to_owned());
    }
    if !link.ethernet {
        return Err("has no Ethernet header".to_owned());
    }
    if let Some(prefix) = INSIDE_PREFIXES.iter().find(|prefix| link.name.starts_with(**prefix)) {
        return Err(format!("its name has a prefix of node-internal devices: {prefix}"));
    }
    if link.kind.as_deref() == Some("dummy") {
        return Err("a dummy device has no peer".to_owned());
    }
    if link.master.is_some() {
        return Err("its bond, bridge or team device counts".to_owned());
    }
    if !link.up {
        return Err("down".to_owned());
    }
    // Looked up by prefix length: there are as many pod CIDRs as nodes, and with direct routes as many routes again.
    let inside = |route: &RouteFacts| {
        (0..=route.destination.prefix_len()).any(|length| {
            Ipv4Net::new(route.destination.addr(), length).is_ok_and(|prefix| pod_cidrs.contains(&prefix.trunc()))
        })
    };
    let outside: Vec<&RouteFacts> =
        facts.routes.iter().filter(|route| route.index == link.index && !inside(route)).collect();
    if outside.iter().any(|route| route.destination.prefix_len() == 0) {
        return Ok("a default route uses it".to_owned());
    }
    let through_gateway = outside.iter().find(|route| route.gateway);
    if link.kind.as_deref() == Some("bridge") && through_gateway.is_none() {
        return Err("a bridge without a route through a gateway".to_owned());
    }
    let has_address = facts.addresses.iter().any(|address| address.index == link.index && address.global);
    match through_gateway.or_else(|| outside.iter().min_by_key(|route| route.destination)) {
        Some(route) if has_address => Ok(format!("the route to {} uses it", route.destination)),
        Some(_) => Err("has a route but no global address".to_owned()),
        None => Err("no route to outside the pod CIDRs uses it".to_owned()),
    }
}

/// The masquerade address of a device and the reason for it (`masquerade` decision 13): the Node's `InternalIP` or
/// `ExternalIP` that the device has; else the one in use, so that an address which appears later does not displace it; else
/// the kernel's own choice, which may be an address of the loopback device; else the lowest primary address.
#[must_use]
pub fn device_address(index: u32, facts: &DeviceFacts) -> Option<(Ipv4Addr, &'static str)> {
    let of_device = || facts.addresses.iter().filter(|address| address.index == index && address.global);
    let is_on_device = |ip: &Ipv4Addr| of_device().any(|address| address.address == *ip);
    let is_on_node = |ip: &Ipv4Addr| facts.addresses.iter().any(|address| address.address == *ip && address.global);
    let of_node = facts.of_node.iter().copied().find(is_on_device);
    let in_use = facts.in_use.get(&index).copied().filter(is_on_device);
    let of_kernel = facts.chosen_by_kernel.get(&index).copied().filter(is_on_node);
    let lowest = of_device().min_by_key(|address| (address.secondary, address.address)).map(|address| address.address);
    let address = of_node.or(in_use).or(of_kernel).or(lowest)?;
    let why = match Some(address) {
        found if found == of_node => "is an address of the Node",
        found if found == of_kernel => "is the source that the kernel chooses",
        found if of_kernel.is_none() && found == lowest => "is its lowest primary address",
        _ => "has been its source before",
    };
    Some((address, why))
}

/// Why the datapath is not ready with these devices; `None` if it is. Without an egress device nothing would be
/// masqueraded, without any other symptom in the agent.
#[must_use]
pub fn not_ready(selection: &DeviceSelection, devices: &DeviceSelector) -> Option<String> {
    if !selection.selected.is_empty() {
        return None;
    }
    let seen: Vec<String> = selection.left_out.iter().map(|(name, reason)| format!("{name} ({reason})")).collect();
    let seen = if seen.is_empty() { "none".to_owned() } else { seen.join(", ") };
    Some(if devices.is_automatic() {
        format!("no egress device: none was detected among {seen}; name one in devices")
    } else {
        format!("no egress device: devices is {devices}, and what exists is {seen}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn net(text: &str) -> Ipv4Net {
        text.parse().unwrap()
    }

    fn link(index: u32, name: &str, kind: Option<&str>) -> LinkFacts {
        LinkFacts {
            index,
            name: name.to_owned(),
            kind: kind.map(str::to_owned),
            up: true,
            loopback: name == "lo",
            ethernet: name != "lo" && kind != Some("tun"),
            master: None,
        }
    }

    fn address(index: u32, address: [u8; 4]) -> AddressFacts {
        AddressFacts { index, address: address.into(), global: true, secondary: false }
    }

    fn route(destination: &str, index: u32, gateway: bool) -> RouteFacts {
        RouteFacts { destination: net(destination), index, gateway }
    }

    fn node() -> DeviceFacts {
        DeviceFacts {
            links: vec![
                link(1, "lo", None),
                link(2, "eth0", None),
                link(3, "eth1", None),
                link(4, "docker0", Some("bridge")),
                link(5, "cst0123456789a", Some("veth")),
                link(6, "tun0", Some("tun")),
            ],
            addresses: vec![
                AddressFacts { global: false, ..address(1, [127, 0, 0, 1]) },
                address(2, [172, 29, 8, 20]),
                address(3, [45, 33, 7, 20]),
                address(4, [172, 17, 0, 1]),
            ],
            routes: vec![
                route("0.0.0.0/0", 2, true),
                route("172.29.8.0/24", 2, false),
                route("45.33.7.0/24", 3, false),
                route("172.17.0.0/16", 4, false),
                route("10.61.4.11/32", 5, false),
            ],
            ..DeviceFacts::default()
        }
    }

    fn selector(text: &str) -> DeviceSelector {
        text.parse().unwrap()
    }

    fn automatic() -> DeviceSelector {
        DeviceSelector::default()
    }

    fn names(selection: &DeviceSelection) -> Vec<&str> {
        selection.selected.values().map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn uplinks_are_detected_and_inside_devices_are_not() {
        let selection = select_devices(&node(), &automatic(), &[net("10.61.0.0/16")].into());
        assert_eq!(names(&selection), ["eth0", "eth1"]);
        assert_eq!(selection.selected[&2].address, Some(Ipv4Addr::new(172, 29, 8, 20)));
        assert_eq!(selection.selected[&3].address, Some(Ipv4Addr::new(45, 33, 7, 20)));
        for name in ["lo", "docker0", "cst0123456789a", "tun0"] {
            assert!(selection.left_out.contains_key(name), "{name}");
        }
    }

    #[test]
    fn a_bridge_is_an_uplink_when_the_way_out_leads_over_it() {
        let mut facts = node();
        facts.links[1] = link(2, "br0", Some("bridge"));
        assert!(names(&select_devices(&facts, &automatic(), &BTreeSet::new())).contains(&"br0"));
        facts.routes.remove(0);
        assert!(!names(&select_devices(&facts, &automatic(), &BTreeSet::new())).contains(&"br0"));
    }

    #[test]
    fn patterns_decide_alone() {
        let named = |patterns: &[&str]| {
            let selection = select_devices(&node(), &selector(&patterns.join(",")), &BTreeSet::new());
            names(&selection).into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(named(&["eth+"]), ["eth0", "eth1"]);
        assert_eq!(named(&["eth1"]), ["eth1"]);
        assert_eq!(named(&["docker0", "eth1"]), ["eth1", "docker0"]);
        assert_eq!(named(&["!eth1"]), ["eth0"], "the others are detected");
        assert_eq!(named(&["!eth1", "eth+"]), ["eth0"], "the first match decides");
        assert_eq!(named(&["eth"]), [""; 0], "without + a pattern is a whole name");
        assert_eq!(named(&["tun+", "lo"]), [""; 0], "without an Ethernet header there is nothing to attach to");
    }

    #[test]
    fn a_device_behind_another_does_not_count() {
        let mut facts = node();
        facts.links[1].master = Some(9);
        facts.links[2].up = false;
        assert!(select_devices(&facts, &automatic(), &BTreeSet::new()).selected.is_empty());
    }

    fn source(facts: &DeviceFacts) -> Option<Ipv4Addr> {
        device_address(2, facts).map(|(address, _)| address)
    }

    #[test]
    fn the_address_is_the_nodes_or_the_one_in_use_or_the_kernels_choice_or_the_lowest_primary() {
        let (node_ip, virtual_ip) = (Ipv4Addr::new(172, 29, 8, 20), Ipv4Addr::new(172, 29, 8, 5));
        let mut facts = node();
        facts.addresses.push(address(2, [172, 29, 8, 5]));
        facts.addresses.push(AddressFacts { secondary: true, ..address(2, [172, 29, 8, 1]) });
        assert_eq!(source(&facts), Some(virtual_ip), "the lowest primary one");
        facts.chosen_by_kernel.insert(2, node_ip);
        assert_eq!(source(&facts), Some(node_ip), "the kernel's choice");
        facts.in_use.insert(2, virtual_ip);
        assert_eq!(source(&facts), Some(virtual_ip), "in use until now");
        facts.of_node = vec![Ipv4Addr::new(45, 33, 7, 20), node_ip];
        assert_eq!(source(&facts), Some(node_ip), "the Node's first address that the device has");
    }

    #[test]
    fn an_address_that_appears_later_displaces_none_and_one_that_went_is_not_used() {
        let mut facts = node();
        facts.in_use = BTreeMap::from([(2, Ipv4Addr::new(172, 29, 8, 20))]);
        facts.addresses.push(address(2, [172, 29, 8, 5]));
        assert_eq!(source(&facts), Some(Ipv4Addr::new(172, 29, 8, 20)));
        facts.addresses.retain(|address| address.address != Ipv4Addr::new(172, 29, 8, 20));
        assert_eq!(source(&facts), Some(Ipv4Addr::new(172, 29, 8, 5)));
        facts.chosen_by_kernel.insert(2, Ipv4Addr::new(8, 8, 8, 8));
        assert_eq!(source(&facts), Some(Ipv4Addr::new(172, 29, 8, 5)), "the kernel's choice is no address of the node");
    }

    #[test]
    fn an_uplink_without_an_address_takes_that_of_the_loopback_device_when_the_kernel_does() {
        let mut facts = node();
        facts.addresses = vec![address(1, [198, 51, 100, 7])];
        assert_eq!(source(&facts), None);
        facts.chosen_by_kernel.insert(2, Ipv4Addr::new(198, 51, 100, 7));
        assert_eq!(source(&facts), Some(Ipv4Addr::new(198, 51, 100, 7)));
    }

    #[test]
    fn a_device_of_the_default_route_is_chosen_even_without_address() {
        let mut facts = node();
        facts.addresses.clear();
        let selection = select_devices(&facts, &automatic(), &BTreeSet::new());
        assert_eq!(names(&selection), ["eth0"]);
        assert_eq!(selection.selected[&2].address, None);
    }

    // case: masquerade AT11
    #[test]
    fn without_a_device_the_datapath_is_not_ready_and_says_why() {
        let patterns = selector("wlan+");
        let selection = select_devices(&node(), &patterns, &BTreeSet::new());
        let reason = not_ready(&selection, &patterns).unwrap();
        assert!(reason.contains("wlan+") && reason.contains("eth0"), "{reason}");

        let empty = DeviceFacts::default();
        let reason = not_ready(&select_devices(&empty, &automatic(), &BTreeSet::new()), &automatic()).unwrap();
        assert!(reason.contains("no egress device"), "{reason}");

        assert_eq!(not_ready(&select_devices(&node(), &automatic(), &BTreeSet::new()), &automatic()), None);
    }

    #[test]
    fn sources_are_merged_by_precedence_and_masked() {
        let sources = ExclusionSources {
            own_addresses: [Ipv4Addr::new(172, 29, 8, 20)].into(),
            node_internal_addresses: [Ipv4Addr::new(172, 29, 8, 21), Ipv4Addr::new(172, 29, 8, 20)].into(),
            pod_cidrs: [net("10.61.4.0/24")].into(),
            native_routing: Some(net("10.61.0.0/16")),
            ip_masq_agent: vec![net("10.0.0.0/8"), net("10.61.0.9/16"), net("169.254.0.0/16")],
            masquerade_link_local: false,
        };
        let rows = exclusions(&sources);
        assert_eq!(rows[&net("172.29.8.20/32")], ExcludedReason::OwnNode);
        assert_eq!(rows[&net("172.29.8.21/32")], ExcludedReason::NodeInternalIp);
        assert_eq!(rows[&net("10.61.4.0/24")], ExcludedReason::PodCidr);
        assert_eq!(rows[&net("10.61.0.0/16")], ExcludedReason::NativeRouting, "host bits are masked, then it wins");
        assert_eq!(rows[&net("10.0.0.0/8")], ExcludedReason::IpMasqAgent);
        assert_eq!(rows[&net("169.254.0.0/16")], ExcludedReason::IpMasqAgent);
        assert_eq!(rows[&net("224.0.0.0/4")], ExcludedReason::Multicast);
        assert_eq!(rows[&net("255.255.255.255/32")], ExcludedReason::Multicast);
        assert_eq!(rows.len(), 8);
    }

    #[test]
    fn link_local_is_excluded_unless_it_is_asked_for() {
        let mut sources = ExclusionSources::default();
        assert_eq!(exclusions(&sources)[&LINK_LOCAL], ExcludedReason::LinkLocal);
        sources.masquerade_link_local = true;
        assert!(!exclusions(&sources).contains_key(&LINK_LOCAL));
    }

    #[test]
    fn reasons_have_the_numbers_that_the_kernel_map_holds() {
        for reason in ExcludedReason::ALL {
            assert_eq!(ExcludedReason::from_number(reason as u8), Some(reason));
        }
        assert_eq!(ExcludedReason::from_number(0), None);
    }

    /// Few prefixes, so that several sources have the same ones, including those that are always excluded.
    fn prefix() -> impl Strategy<Value = Ipv4Net> {
        let address = prop_oneof![
            (0_u8..4, 0_u8..3).prop_map(|(third, last)| Ipv4Addr::new(10, 0, third, last)),
            Just(LINK_LOCAL.addr()),
            Just(MULTICAST.addr()),
            Just(BROADCAST.addr()),
        ];
        let length = prop_oneof![Just(4_u8), Just(16), Just(24), Just(32)];
        (address, length).prop_map(|(address, length)| Ipv4Net::new(address, length).unwrap())
    }

    fn sources() -> impl Strategy<Value = ExclusionSources> {
        let prefixes = || proptest::collection::vec(prefix(), 0..5);
        (prefixes(), prefixes(), prefixes(), proptest::option::of(prefix()), prefixes(), any::<bool>()).prop_map(
            |(own, others, pods, native_routing, ip_masq_agent, masquerade_link_local)| ExclusionSources {
                own_addresses: own.iter().map(Ipv4Net::addr).collect(),
                node_internal_addresses: others.iter().map(Ipv4Net::addr).collect(),
                pod_cidrs: pods.iter().map(Ipv4Net::trunc).collect(),
                native_routing,
                ip_masq_agent,
                masquerade_link_local,
            },
        )
    }

    proptest! {
        #[test]
        fn one_prefix_by_itself_has_the_row_that_it_has_among_all(sources in sources(), asked in prefix()) {
            let rows = exclusions(&sources);
            for (prefix, reason) in &rows {
                prop_assert_eq!(exclusion(*prefix, &sources), Some(*reason));
            }
            prop_assert_eq!(exclusion(asked.trunc(), &sources), rows.get(&asked.trunc()).copied());
        }

        #[test]
        fn merged_ports_cover_the_same_and_are_apart(ranges: Vec<(u16, u16)>) {
            let merged = merge_ports(&ranges);
            let covers = |ranges: &[(u16, u16)], port: u16| ranges.iter().any(|(first, last)| (*first..=*last).contains(&port));
            for (first, last) in &ranges {
                for port in [first.saturating_sub(1), *first, *last, last.saturating_add(1)] {
                    prop_assert_eq!(covers(&ranges, port), covers(&merged, port));
                }
            }
            for pair in merged.windows(2) {
                prop_assert!(u32::from(pair[0].1) + 1 < u32::from(pair[1].0));
            }
            prop_assert_eq!(merge_ports(&merged), merged);
        }
    }
}
