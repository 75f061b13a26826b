//! The rules of the kernel programs once more, for `explain` and for the table of cases that runs on both.
//!
//! [`Node`] holds what the maps hold, and [`Node::decide`] does to a packet what the programs would, with a reason in
//! words. Two things are left to the kernel: the order in which free ports are tried once the source port is taken
//! (here the lowest free one is given), and sockets of the host, which only the kernel can look up.

use super::expire::{FlowOwner, Protocol};
use super::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason, FlowPolicy};
use cistern_ebpf_common::abi::same_pod;
use cistern_ebpf_common::counter::Counter;
use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};

/// Which of the two programs sees the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// On its way out by an egress device.
    Egress,
    /// Coming in by one.
    Ingress,
}

/// TCP flags that matter here.
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
    /// A packet in the middle.
    pub const ACK: Self = Self { syn: false, ack: true, fin: false, rst: false };
    /// The last packet of one end.
    pub const FIN: Self = Self { syn: false, ack: true, fin: true, rst: false };
    /// A refusal.
    pub const RST: Self = Self { syn: false, ack: false, fin: false, rst: true };

    /// Whether they open a connection.
    #[must_use]
    pub const fn opens(self) -> bool {
        self.syn && !self.ack && !self.fin && !self.rst
    }

    /// Whether a packet with them and without an entry may never open a flow.
    #[must_use]
    pub const fn never_opens(self) -> bool {
        (self.syn || self.fin || self.rst) && !self.opens()
    }
}

/// What a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// TCP with ports.
    Tcp(TcpFlags),
    /// UDP with ports.
    Udp,
    /// ICMP echo request; the identifier stands as source port.
    EchoRequest,
    /// ICMP echo reply; the identifier stands as destination port.
    EchoReply,
    /// ICMP that reports an error, by its type.
    IcmpError(u8),
    /// Any other ICMP, by its type.
    IcmpOther(u8),
    /// Any other protocol, by its number.
    Other(u8),
    /// A part of a larger packet.
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

/// A packet, as far as the rules ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packet {
    /// What it carries.
    pub content: Content,
    /// From; port 0 where there is none.
    pub source: SocketAddrV4,
    /// To; port 0 where there is none.
    pub destination: SocketAddrV4,
    /// `ifindex` of the device by which it came to the node; 0 where the node itself sends it.
    pub device: u32,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It goes on unchanged.
    Pass,
    /// It goes on from this source.
    Source(SocketAddrV4),
    /// It goes on to this destination.
    Destination(SocketAddrV4),
    /// It ends here.
    Drop,
}

/// The rule that decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The flow has its entry.
    KnownFlow,
    /// The flow got an entry.
    NewFlow,
    /// The flow's entry was in the reverse map alone.
    FoundFlow,
    /// The destination is excluded.
    Excluded,
    /// The packet answers a flow that was opened from outside.
    InboundReply,
    /// The packet opens a flow from outside towards a pod.
    InboundCreated,
    /// The pod is never masqueraded.
    PodExempt,
    /// The source is a pod, but the packet came in by another device than the pod's.
    OtherDevice,
    /// The source is neither a pod of this node nor its address.
    ForeignSource,
    /// The host's own flow.
    HostFlow,
    /// The host's own flow was moved, since a pod flow has its port.
    HostTranslated,
    /// The flow may be older than the policy.
    PolicyWindow,
    /// FIN, RST or SYN+ACK without an entry.
    NeverOpens,
    /// Masquerading is switched off.
    Disabled,
    /// Fragments wait for a later release.
    Fragment,
    /// ICMP errors wait for a later release.
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
    /// Ingress: the answer to a translated flow.
    Reversed,
    /// Ingress: the answer to a flow whose pod has ended.
    PodEnded,
    /// Ingress: for the host, or a pod flow that needs nothing.
    NotOurs,
}

impl Rule {
    /// The counter that the programs raise for it; none where they count nothing.
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
    /// What becomes of the packet.
    pub verdict: Verdict,
    /// The rule that decided.
    pub rule: Rule,
    /// Why, in one sentence for people.
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

/// A flow as its local end sends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The local end.
    pub local: SocketAddrV4,
    /// The remote end.
    pub remote: SocketAddrV4,
}

/// The outside end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Outside {
    /// Transport protocol.
    pub protocol: Protocol,
    /// The remote end.
    pub remote: SocketAddrV4,
    /// The node's end.
    pub external: SocketAddrV4,
}

/// Who owns an outside end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The local end.
    pub origin: SocketAddrV4,
    /// Whose it is.
    pub kind: FlowOwner,
    /// [`EndpointEntry::generation`] of the pod; 0 for the host.
    pub generation: u32,
}

/// What the cache keeps of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cached {
    /// The node's end.
    pub external: SocketAddrV4,
    /// Whose it is.
    pub kind: FlowOwner,
    /// [`EndpointEntry::generation`] of the pod; 0 for the host.
    pub generation: u32,
    /// The device by which the pod's packets come in; 0 where any counts.
    pub device: u32,
}

/// Whose flow is looked for or opened.
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
    /// Why.
    pub reason: ExcludedReason,
    /// When it was added, in seconds; `None` when no flow can have been translated to it.
    pub since: Option<u32>,
}

/// What the maps hold, for one device.
#[derive(Debug, Clone)]
pub struct Node {
    /// Node-wide settings.
    pub settings: DatapathSettings,
    /// The device that packets leave and come by.
    pub device: DeviceEntry,
    /// The pods of this node.
    pub endpoints: BTreeMap<Ipv4Addr, EndpointEntry>,
    /// Excluded destinations.
    pub excluded: BTreeMap<Ipv4Net, Exclusion>,
    /// Translated flows: the authority.
    pub flows: BTreeMap<Outside, Owner>,
    /// Translated flows: the cache, which may have lost some.
    pub cache: BTreeMap<Flow, Cached>,
    /// Flows opened from outside, as the pod answers.
    pub inbound: BTreeSet<Flow>,
    /// When the policy last changed so that flows may be translated that were not, in seconds.
    pub policy_changed: Option<u32>,
}

impl Node {
    /// A node with these settings and nothing else.
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

    /// Decides about a packet at `now`, in seconds, and does to the maps what the programs do. Who only wants to know
    /// asks a copy.
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
        let not_ours = untouched(Rule::NotOurs, "no entry, hence for the host or as it stands");
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

    /// The longest excluded prefix that holds the address.
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

    /// Whether the source is still the endpoint that the cached flow is of.
    fn of_endpoint(&self, flow: &Flow, entry: &Cached) -> bool {
        entry.kind == FlowOwner::Host
            || self.endpoints.get(flow.local.ip()).is_some_and(|endpoint| {
                endpoint.ifindex == entry.device && same_pod(entry.generation, endpoint.generation)
            })
    }

    /// Caches a flow that has its entry. One that a former pod with the same address left becomes this pod's.
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
            return Decision::new(Verdict::Drop, Rule::NoPort, format!("every port towards {} is taken", flow.remote));
        };
        let Local { kind, generation, device } = local;
        self.flows.insert(outside(port), Owner { origin: flow.local, kind, generation });
        let external = SocketAddrV4::new(address, port);
        self.cache.insert(flow, Cached { external, kind, generation, device });
        let why = match kind {
            FlowOwner::Pod => format!("pod {} speaks to {}, which no rule excludes", flow.local.ip(), flow.remote.ip()),
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
        "the flow has its entry, which counts whatever the policy is now",
    )
}

fn within(since: Option<u32>, window: u32, now: u32) -> bool {
    since.is_some_and(|since| now.saturating_sub(since) < window)
}

#[cfg(test)]
mod tests {
    use super::super::cases::{self, CASES, Machine};
    use super::*;

    /// Runs cases on the model. Its clock stands still but for [`Machine::close_windows`].
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
            "leaves as 172.29.8.20:41000: pod 10.61.4.11 speaks to 45.33.7.80, which no rule excludes"
        );
        assert_eq!(ask(cases::POD_REMOTE), "unchanged: 10.61.9.30 is in the pod CIDR of a known node (10.61.9.0/24)");
    }
}
