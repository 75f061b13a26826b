//! A model of the kernel programs' rules, for `explain` and for test cases that run on both.
//!
//! [`Node`] has the content of the maps, and [`Node::decide`] treats a packet like the programs, with a human-readable
//! reason. Two differences: the order in which free ports are tried if the source port is taken (here the lowest free
//! one is used), and sockets of the host, which only the kernel can look up.

use super::expire::{FlowOwner, Protocol};
use super::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason, FlowPolicy};
use cistern_ebpf_common::abi::same_pod;
use cistern_ebpf_common::counter::Counter;
use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};

/// The program that processes the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Leaving by an egress device.
    Egress,
    /// Arriving by an egress device.
    Ingress,
}

/// Relevant TCP flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TcpFlags {
    /// SYN
    pub syn: bool,
    /// ACK
    pub ack: bool,
    /// FIN
    pub fin: bool,
    /// RST
    pub rst: bool,
}

impl TcpFlags {
    /// The first packet of a connection.
    pub const SYN: Self = Self { syn: true, ack: false, fin: false, rst: false };
    /// The answer to it.
    pub const SYN_ACK: Self = Self { syn: true, ack: true, fin: false, rst: false };
    /// A packet of an established connection.
    pub const ACK: Self = Self { syn: false, ack: true, fin: false, rst: false };
    /// The last packet from one end.
    pub const FIN: Self = Self { syn: false, ack: true, fin: true, rst: false };
    /// A reset.
    pub const RST: Self = Self { syn: false, ack: false, fin: false, rst: true };

    /// Whether they open a connection.
    #[must_use]
    pub const fn opens(self) -> bool {
        self.syn && !self.ack && !self.fin && !self.rst
    }

    /// Whether a packet with them never creates a flow.
    #[must_use]
    pub const fn never_opens(self) -> bool {
        (self.syn || self.fin || self.rst) && !self.opens()
    }
}

/// Payload of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// TCP with ports.
    Tcp(TcpFlags),
    /// UDP with ports.
    Udp,
    /// ICMP echo request; the identifier is the source port.
    EchoRequest,
    /// ICMP echo reply; the identifier is the destination port.
    EchoReply,
    /// ICMP error, by type.
    IcmpError(u8),
    /// Other ICMP, by type.
    IcmpOther(u8),
    /// Other protocol, by number.
    Other(u8),
    /// A fragment.
    Fragment,
}

impl Content {
    fn protocol(self) -> Option<Protocol> {
        match self {
            Self::Tcp(_) => Some(Protocol::Tcp),
            Self::Udp => Some(Protocol::Udp),
            Self::EchoRequest | Self::EchoReply => Some(Protocol::Icmp),
            Self::IcmpError(_) | Self::IcmpOther(_) | Self::Other(_) | Self::Fragment => None,
        }
    }

    fn flags(self) -> TcpFlags {
        if let Self::Tcp(flags) = self { flags } else { TcpFlags::default() }
    }
}

/// The relevant fields of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packet {
    /// Payload.
    pub content: Content,
    /// Source; port 0 if it has none.
    pub source: SocketAddrV4,
    /// Destination; port 0 if it has none.
    pub destination: SocketAddrV4,
    /// `ifindex` of the device by which it arrived at the node; 0 if the node itself sends it.
    pub device: u32,
}

/// Result for a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Passed unchanged.
    Pass,
    /// Source translated to this.
    Source(SocketAddrV4),
    /// Destination translated to this.
    Destination(SocketAddrV4),
    /// Dropped.
    Drop,
}

/// The rule that decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The flow has an entry.
    KnownFlow,
    /// An entry was created for the flow.
    NewFlow,
    /// The flow's entry was found in the reverse map only.
    FoundFlow,
    /// The destination is excluded.
    Excluded,
    /// A reply of a flow that was opened from outside.
    InboundReply,
    /// The first packet of a flow from outside to a pod.
    InboundCreated,
    /// The pod is never masqueraded.
    PodExempt,
    /// The source is a pod, but the packet arrived by another device than the pod's.
    OtherDevice,
    /// The source is neither a pod of this node nor its address.
    ForeignSource,
    /// A flow of the host itself.
    HostFlow,
    /// A flow of the host itself, translated because a pod flow has its port.
    HostTranslated,
    /// The flow may be older than the policy.
    PolicyWindow,
    /// FIN, RST or SYN+ACK without an entry.
    NeverOpens,
    /// Masquerading is disabled.
    Disabled,
    /// Not implemented: fragments pass untranslated.
    Fragment,
    /// Not implemented: ICMP errors pass untranslated.
    IcmpError,
    /// An echo reply.
    EchoReply,
    /// ICMP of another type.
    IcmpOther,
    /// A protocol other than TCP, UDP and ICMP.
    ProtocolOther,
    /// The device has no address.
    NoDeviceAddress,
    /// No port is free.
    NoPort,
    /// Ingress: a reply of a translated flow.
    Reversed,
    /// Ingress: the reply of a flow whose pod has ended.
    PodEnded,
    /// Ingress: for the host, or a pod flow without translation.
    NotOurs,
}

impl Rule {
    /// The counter that the programs increment; `None` if they count nothing.
    #[must_use]
    pub const fn counter(self) -> Option<Counter> {
        Some(match self {
            Self::KnownFlow => Counter::Translated,
            Self::NewFlow => Counter::FlowCreated,
            Self::FoundFlow => Counter::CacheRefilled,
            Self::Excluded => Counter::Excluded,
            Self::InboundReply => Counter::InboundReply,
            Self::InboundCreated => Counter::InboundCreated,
            Self::PodExempt => Counter::PodExempt,
            Self::OtherDevice => Counter::OtherDevice,
            Self::ForeignSource => Counter::ForeignSource,
            Self::HostFlow => Counter::HostFlow,
            Self::HostTranslated => Counter::HostTranslated,
            Self::PolicyWindow => Counter::PolicyWindow,
            Self::NeverOpens => Counter::NeverOpens,
            Self::Disabled => Counter::Disabled,
            Self::Fragment => Counter::Fragment,
            Self::IcmpError => Counter::IcmpError,
            Self::EchoReply => Counter::EchoReply,
            Self::IcmpOther => Counter::IcmpOther,
            Self::ProtocolOther => Counter::ProtocolOther,
            Self::NoDeviceAddress => Counter::NoDeviceAddress,
            Self::NoPort => Counter::NoPort,
            Self::Reversed => Counter::Reversed,
            Self::PodEnded => Counter::PodEnded,
            Self::NotOurs => return None,
        })
    }
}

/// A verdict with its reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Result for the packet.
    pub verdict: Verdict,
    /// The rule that decided.
    pub rule: Rule,
    /// Human-readable reason, in one sentence.
    pub why: String,
}

impl Decision {
    fn new(verdict: Verdict, rule: Rule, why: impl Into<String>) -> Self {
        Self { verdict, rule, why: why.into() }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verdict {
            Verdict::Pass => write!(f, "unchanged: {}", self.why),
            Verdict::Source(source) => write!(f, "leaves as {source}: {}", self.why),
            Verdict::Destination(destination) => write!(f, "goes to {destination}: {}", self.why),
            Verdict::Drop => write!(f, "dropped: {}", self.why),
        }
    }
}

/// A flow in its local form, before translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The pre-NAT source.
    pub local: SocketAddrV4,
    /// The remote endpoint.
    pub remote: SocketAddrV4,
}

/// The translated tuple: remote endpoint and post-NAT source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Outside {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The remote endpoint.
    pub remote: SocketAddrV4,
    /// The translated source: the node's address and port.
    pub external: SocketAddrV4,
}

/// Owner of a translated tuple.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The pre-NAT source.
    pub origin: SocketAddrV4,
    /// Kind of the owner.
    pub kind: FlowOwner,
    /// [`EndpointEntry::generation`] of the pod; 0 for the host.
    pub generation: u32,
}

/// A cache entry of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cached {
    /// The translated source: the node's address and port.
    pub external: SocketAddrV4,
    /// Kind of the owner.
    pub kind: FlowOwner,
    /// [`EndpointEntry::generation`] of the pod; 0 for the host.
    pub generation: u32,
    /// The device by which the pod's packets arrive; 0 for any.
    pub device: u32,
}

/// The owner of a flow that is searched or created.
#[derive(Debug, Clone, Copy)]
struct Local {
    kind: FlowOwner,
    generation: u32,
    device: u32,
}

const HOST: Local = Local { kind: FlowOwner::Host, generation: 0, device: 0 };

/// An excluded prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exclusion {
    /// The reason.
    pub reason: ExcludedReason,
    /// When it was added, in seconds; `None` if no flow can have been translated to it.
    pub since: Option<u32>,
}

/// Content of the maps, for one device.
#[derive(Debug, Clone)]
pub struct Node {
    /// Node-wide settings.
    pub settings: DatapathSettings,
    /// The device of the packets.
    pub device: DeviceEntry,
    /// The pods of this node.
    pub endpoints: BTreeMap<Ipv4Addr, EndpointEntry>,
    /// Excluded destinations.
    pub excluded: BTreeMap<Ipv4Net, Exclusion>,
    /// Translated flows: authoritative.
    pub flows: BTreeMap<Outside, Owner>,
    /// Translated flows: the cache, which may be incomplete.
    pub cache: BTreeMap<Flow, Cached>,
    /// Flows opened from outside, in the direction of the pod's replies.
    pub inbound: BTreeSet<Flow>,
    /// Time in seconds of the last policy change by which existing flows may newly be translated.
    pub policy_changed: Option<u32>,
}

impl Node {
    /// A node with these settings and empty maps.
    #[must_use]
    pub fn new(settings: DatapathSettings) -> Self {
        Self {
            settings,
            device: DeviceEntry { address: None },
            endpoints: BTreeMap::new(),
            excluded: BTreeMap::new(),
            flows: BTreeMap::new(),
            cache: BTreeMap::new(),
            inbound: BTreeSet::new(),
            policy_changed: None,
        }
    }

    /// Decides about a packet at `now`, in seconds, and updates the maps like the programs. Use a copy to only query.
    pub fn decide(&mut self, direction: Direction, packet: &Packet, now: u32) -> Decision {
        let protocol = match packet.content {
            Content::Fragment => return untouched(Rule::Fragment, "fragments are not translated yet"),
            Content::IcmpError(kind) => {
                return untouched(Rule::IcmpError, format!("ICMP errors (type {kind}) are not translated yet"));
            }
            Content::IcmpOther(kind) => {
                return untouched(Rule::IcmpOther, format!("ICMP type {kind} is neither echo nor error"));
            }
            Content::Other(number) => {
                return untouched(Rule::ProtocolOther, format!("IP protocol {number} is not translated yet"));
            }
            content => content.protocol().unwrap_or(Protocol::Icmp),
        };
        let flow = Flow { protocol, local: packet.source, remote: packet.destination };
        match direction {
            Direction::Egress => self.egress(packet, flow, now),
            Direction::Ingress => self.ingress(packet.content, flow, now),
        }
    }

    fn egress(&mut self, packet: &Packet, flow: Flow, now: u32) -> Decision {
        let content = packet.content;
        let came_by = |device: u32| device == 0 || device == packet.device;
        if content == Content::EchoReply {
            return untouched(Rule::EchoReply, "an echo reply answers a request from outside");
        }
        if !self.settings.masquerade {
            return untouched(Rule::Disabled, "enable-ipv4-masquerade is false");
        }
        let flags = content.flags();
        let opens = flags.opens();
        let sticky = self.settings.flow_policy == FlowPolicy::Sticky;

        let mut cached = None;
        if let Some(entry) = self.cache.get(&flow).copied() {
            let external = entry.external;
            if !self.is_own(*external.ip()) {
                self.forget(&flow, external);
            } else if !came_by(entry.device) {
                // Of another pod than the one that opened the flow, or of none.
            } else if !self.of_endpoint(&flow, &entry) {
                self.cache.remove(&flow);
            } else if !opens && sticky {
                if self.owns(&flow, external) {
                    return known(external);
                }
                self.cache.remove(&flow);
            } else {
                cached = Some(external);
            }
        }

        let Some(endpoint) = self.endpoints.get(flow.local.ip()).copied() else {
            if self.device.address == Some(*flow.local.ip()) {
                return self.host(flags, flow);
            }
            return untouched(
                Rule::ForeignSource,
                format!("{} is neither a pod of this node nor the device's address", flow.local.ip()),
            );
        };
        if !came_by(endpoint.ifindex) {
            let why = format!("{} is a pod, but the packet came in by another device than the pod's", flow.local.ip());
            return untouched(Rule::OtherDevice, why);
        }
        if endpoint.no_masquerade {
            return untouched(Rule::PodExempt, format!("pod {} is never masqueraded", flow.local.ip()));
        }
        let pod = Local { kind: FlowOwner::Pod, generation: endpoint.generation, device: endpoint.ifindex };

        if let Some((prefix, exclusion)) = self.exclusion(*flow.remote.ip()) {
            return self.keep_or_pass(flags, flow, (prefix, exclusion), pod, cached, now);
        }

        if opens {
            self.inbound.remove(&flow);
        } else if self.inbound.contains(&flow) {
            return untouched(Rule::InboundReply, format!("{} opened this flow towards the pod", flow.remote));
        }

        if let Some(external) = cached
            && self.owns(&flow, external)
        {
            self.adopt(&flow, external, pod);
            return known(external);
        }
        let Some(address) = self.device.address else {
            return untouched(Rule::NoDeviceAddress, "the egress device has no IPv4 address");
        };
        if let Some(external) = self.find(&flow, address) {
            self.adopt(&flow, external, pod);
            return Decision::new(
                Verdict::Source(external),
                Rule::FoundFlow,
                "the flow has its entry in the reverse map",
            );
        }
        if flow.protocol == Protocol::Tcp && !opens {
            if flags.never_opens() {
                return untouched(Rule::NeverOpens, "FIN, RST and SYN+ACK open no flow, and this one has no entry");
            }
            if sticky && within(self.policy_changed, self.settings.tcp_idle_seconds, now) {
                return untouched(
                    Rule::PolicyWindow,
                    "no entry and no SYN, shortly after a change of policy: the flow may be older than that",
                );
            }
        }
        self.open(flow, address, pod, Rule::NewFlow)
    }

    fn keep_or_pass(
        &mut self,
        flags: TcpFlags,
        flow: Flow,
        (prefix, exclusion): (Ipv4Net, Exclusion),
        pod: Local,
        cached: Option<SocketAddrV4>,
        now: u32,
    ) -> Decision {
        let pass =
            untouched(Rule::Excluded, format!("{} is {} ({prefix})", flow.remote.ip(), exclusion.reason.describe()));
        if flow.protocol != Protocol::Tcp || self.settings.flow_policy == FlowPolicy::Immediate {
            return pass;
        }
        if flags.opens()
            && let Some(external) = cached
        {
            self.forget(&flow, external);
        } else if within(exclusion.since, self.settings.tcp_idle_seconds, now)
            && let Some(external) = self.device.address.and_then(|address| self.find(&flow, address))
        {
            if flags.opens() {
                self.forget(&flow, external);
            } else {
                self.adopt(&flow, external, pod);
                let why = format!("the flow was translated before {prefix} was excluded");
                return Decision::new(Verdict::Source(external), Rule::FoundFlow, why);
            }
        }
        pass
    }

    fn host(&mut self, flags: TcpFlags, flow: Flow) -> Decision {
        let pass = untouched(Rule::HostFlow, "the host's own flow");
        let opens = flow.protocol != Protocol::Tcp || flags.opens();
        if !self.givable(flow.protocol, flow.local.port()) || self.exclusion(*flow.remote.ip()).is_some() {
            return pass;
        }
        let outside = Outside { protocol: flow.protocol, remote: flow.remote, external: flow.local };
        match self.flows.get(&outside) {
            Some(owner) if owner.origin == flow.local => pass,
            Some(owner) => {
                let why = format!("the host's own flow, but {} has its port", owner.origin);
                if let Some(external) = self.find(&flow, *flow.local.ip()) {
                    self.adopt(&flow, external, HOST);
                    return Decision::new(Verdict::Source(external), Rule::HostTranslated, why);
                }
                if flow.protocol == Protocol::Tcp && flags.never_opens() {
                    return untouched(Rule::NeverOpens, "FIN, RST and SYN+ACK open no flow, and this one has no entry");
                }
                self.open(flow, *flow.local.ip(), HOST, Rule::HostTranslated)
            }
            None => {
                if opens {
                    self.flows.insert(outside, Owner { origin: flow.local, kind: FlowOwner::Host, generation: 0 });
                }
                pass
            }
        }
    }

    fn ingress(&mut self, content: Content, flow: Flow, _now: u32) -> Decision {
        let not_ours = untouched(Rule::NotOurs, "no entry: for the host, or not translated");
        if content == Content::EchoRequest {
            return not_ours;
        }
        let outside = Outside { protocol: flow.protocol, remote: flow.local, external: flow.remote };
        if let Some(owner) = self.flows.get(&outside) {
            let of_endpoint = owner.kind == FlowOwner::Host
                || self.endpoints.get(owner.origin.ip()).is_some_and(|pod| same_pod(owner.generation, pod.generation));
            if !of_endpoint {
                let why = format!("answers a flow of {}, but the pod that opened it has ended", owner.origin);
                return Decision::new(Verdict::Drop, Rule::PodEnded, why);
            }
            if owner.origin == outside.external {
                return not_ours;
            }
            let why = format!("answers the flow of {}", owner.origin);
            return Decision::new(Verdict::Destination(owner.origin), Rule::Reversed, why);
        }
        let answer = Flow { protocol: flow.protocol, local: flow.remote, remote: flow.local };
        if flow.protocol == Protocol::Icmp
            || !self.endpoints.contains_key(answer.local.ip())
            || self.inbound.contains(&answer)
            || (flow.protocol == Protocol::Tcp && !content.flags().opens())
            || self.exclusion(*answer.remote.ip()).is_some()
            || self.cache.contains_key(&answer)
            || self.device.address.is_some_and(|address| self.find(&answer, address).is_some())
        {
            return not_ours;
        }
        self.inbound.insert(answer);
        untouched(Rule::InboundCreated, format!("opens a flow towards pod {}", answer.local))
    }

    /// The longest excluded prefix that contains the address.
    fn exclusion(&self, address: Ipv4Addr) -> Option<(Ipv4Net, Exclusion)> {
        (0..=32).rev().find_map(|length| {
            let prefix = Ipv4Net::new(address, length).ok()?.trunc();
            self.excluded.get(&prefix).map(|exclusion| (prefix, *exclusion))
        })
    }

    fn is_own(&self, address: Ipv4Addr) -> bool {
        self.device.address == Some(address)
            || self.exclusion(address).is_some_and(|(_, exclusion)| exclusion.reason == ExcludedReason::OwnNode)
    }

    /// Whether the source is still the endpoint of the cached flow.
    fn of_endpoint(&self, flow: &Flow, entry: &Cached) -> bool {
        entry.kind == FlowOwner::Host
            || self.endpoints.get(flow.local.ip()).is_some_and(|endpoint| {
                endpoint.ifindex == entry.device && same_pod(entry.generation, endpoint.generation)
            })
    }

    /// Caches a flow that has an entry. An entry of a former pod with the same address becomes this pod's.
    fn adopt(&mut self, flow: &Flow, external: SocketAddrV4, local: Local) {
        let outside = Outside { protocol: flow.protocol, remote: flow.remote, external };
        if let Some(owner) = self.flows.get_mut(&outside) {
            owner.generation = local.generation;
        }
        let Local { kind, generation, device } = local;
        self.cache.insert(*flow, Cached { external, kind, generation, device });
    }

    fn owns(&self, flow: &Flow, external: SocketAddrV4) -> bool {
        let outside = Outside { protocol: flow.protocol, remote: flow.remote, external };
        self.flows.get(&outside).is_some_and(|owner| owner.origin == flow.local)
    }

    fn find(&self, flow: &Flow, address: Ipv4Addr) -> Option<SocketAddrV4> {
        self.flows
            .iter()
            .find(|(outside, owner)| {
                outside.protocol == flow.protocol
                    && outside.remote == flow.remote
                    && *outside.external.ip() == address
                    && owner.origin == flow.local
            })
            .map(|(outside, _)| outside.external)
    }

    fn forget(&mut self, flow: &Flow, external: SocketAddrV4) {
        if self.owns(flow, external) {
            self.flows.remove(&Outside { protocol: flow.protocol, remote: flow.remote, external });
        }
        self.cache.remove(flow);
    }

    fn givable(&self, protocol: Protocol, port: u16) -> bool {
        protocol == Protocol::Icmp
            || ((self.settings.port_min..=self.settings.port_max).contains(&port)
                && !self.settings.ports_reserved.iter().any(|(first, last)| (*first..=*last).contains(&port)))
    }

    fn open(&mut self, flow: Flow, address: Ipv4Addr, local: Local, rule: Rule) -> Decision {
        let outside =
            |port| Outside { protocol: flow.protocol, remote: flow.remote, external: SocketAddrV4::new(address, port) };
        let own = flow.local.port();
        let free = |port: &u16| self.givable(flow.protocol, *port) && !self.flows.contains_key(&outside(*port));
        let Some(port) = std::iter::once(own).chain(0..=u16::MAX).find(free) else {
            return Decision::new(Verdict::Drop, Rule::NoPort, format!("all ports towards {} are in use", flow.remote));
        };
        let Local { kind, generation, device } = local;
        self.flows.insert(outside(port), Owner { origin: flow.local, kind, generation });
        let external = SocketAddrV4::new(address, port);
        self.cache.insert(flow, Cached { external, kind, generation, device });
        let why = match kind {
            FlowOwner::Pod => format!("pod {} sends to {}, which no rule excludes", flow.local.ip(), flow.remote.ip()),
            FlowOwner::Host => "the host's own flow, but a pod has its port".to_owned(),
        };
        Decision::new(Verdict::Source(external), rule, why)
    }
}

fn untouched(rule: Rule, why: impl Into<String>) -> Decision {
    Decision::new(Verdict::Pass, rule, why)
}

fn known(external: SocketAddrV4) -> Decision {
    Decision::new(
        Verdict::Source(external),
        Rule::KnownFlow,
        "the flow has an entry, which has precedence over the current policy",
    )
}

fn within(since: Option<u32>, window: u32, now: u32) -> bool {
    since.is_some_and(|since| now.saturating_sub(since) < window)
}

#[cfg(test)]
mod tests {
    use super::super::cases::{self, CASES, Machine};
    use super::*;

    /// Runs cases on the model. Its clock only advances in [`Machine::close_windows`].
    struct Model {
        node: Node,
        now: u32,
    }

    impl Model {
        fn new() -> Self {
            let mut node = Node::new(cases::settings());
            node.device.address = Some(cases::NODE);
            node.endpoints = cases::endpoints();
            node.excluded = cases::excluded()
                .into_iter()
                .map(|(prefix, reason)| (prefix, Exclusion { reason, since: None }))
                .collect();
            node.policy_changed = Some(1_000);
            Self { node, now: 1_000 }
        }
    }

    impl Machine for Model {
        fn send(&mut self, direction: Direction, packet: &Packet) -> (Verdict, Vec<String>) {
            let decision = self.node.decide(direction, packet, self.now);
            (decision.verdict, decision.rule.counter().map(|counter| counter.name().to_owned()).into_iter().collect())
        }

        fn exclude(&mut self, prefix: Ipv4Net, reason: ExcludedReason) {
            let since = (!self.node.flows.is_empty()).then_some(self.now);
            self.node.excluded.insert(prefix, Exclusion { reason, since });
        }

        fn include(&mut self, prefix: Ipv4Net) {
            self.node.policy_changed = Some(self.now);
            self.node.excluded.remove(&prefix);
        }

        fn endpoint(&mut self, address: Ipv4Addr, entry: Option<EndpointEntry>) {
            match entry {
                Some(entry) => self.node.endpoints.insert(address, entry),
                None => self.node.endpoints.remove(&address),
            };
        }

        fn configure(&mut self, settings: &DatapathSettings) {
            self.node.settings = settings.clone();
        }

        fn readdress(&mut self, address: Option<Ipv4Addr>) {
            self.node.device.address = address;
        }

        fn lose_cache(&mut self) {
            self.node.cache.clear();
        }

        fn close_windows(&mut self) {
            self.now += self.node.settings.tcp_idle_seconds;
        }

        fn flows(&mut self) -> usize {
            self.node.flows.len()
        }
    }

    #[test]
    fn the_rules_agree_with_the_table_of_cases() {
        let failures: Vec<String> = CASES.iter().filter_map(|case| cases::run(case, &mut Model::new()).err()).collect();
        assert!(failures.is_empty(), "{} of {} cases:\n{}", failures.len(), CASES.len(), failures.join("\n"));
    }

    #[test]
    fn a_decision_reads_as_a_sentence() {
        let mut model = Model::new();
        let from = SocketAddrV4::new(cases::POD_A, 41_000);
        let mut ask = |to: Ipv4Addr| {
            let destination = SocketAddrV4::new(to, 443);
            let packet = Packet {
                content: Content::Tcp(TcpFlags::SYN),
                source: from,
                destination,
                device: cases::device(cases::POD_A),
            };
            model.node.decide(Direction::Egress, &packet, 0).to_string()
        };
        assert_eq!(
            ask(cases::WEB),
            "leaves as 172.29.8.20:41000: pod 10.61.4.11 sends to 45.33.7.80, which no rule excludes"
        );
        assert_eq!(ask(cases::POD_REMOTE), "unchanged: 10.61.9.30 is in the pod CIDR of a known node (10.61.9.0/24)");
    }
}
