//! The table of cases for the rules in [`decide`](super::decide) and the kernel programs, which run on both, packet in,
//! packet out. Built for tests only, with the feature `cases`.
//!
//! The fixture is a node with two pods, an uplink, a neighbour node, and remote endpoints outside the built-in lists.

use super::decide::{Content, Direction, Packet, Rule, TcpFlags, Verdict};
use super::plan::{DatapathSettings, EndpointEntry, ExcludedReason, ExclusionSources, FlowPolicy, exclusions};
use ipnet::Ipv4Net;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};

/// A pod of the node.
pub const POD_A: Ipv4Addr = Ipv4Addr::new(10, 61, 4, 11);
/// Another one.
pub const POD_B: Ipv4Addr = Ipv4Addr::new(10, 61, 4, 12);
/// A pod of the node that is never masqueraded.
pub const POD_EXEMPT: Ipv4Addr = Ipv4Addr::new(10, 61, 4, 13);
/// The node, by its masquerade address.
pub const NODE: Ipv4Addr = Ipv4Addr::new(172, 29, 8, 20);
/// The node, by the address of its other uplink.
pub const NODE_OTHER: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 20);
/// The neighbour node.
pub const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(172, 29, 8, 21);
/// A pod of the neighbour.
pub const POD_REMOTE: Ipv4Addr = Ipv4Addr::new(10, 61, 9, 30);
/// An external remote endpoint.
pub const WEB: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 80);
/// Another one.
pub const WEB_2: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 81);
/// A private remote endpoint.
pub const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 200, 1, 5);
/// The cloud's metadata service.
pub const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// First port of the fixture's range.
pub const PORT_MIN: u16 = 1024;
/// The fixture's reserved ports: the NodePort range.
pub const NODE_PORTS: (u16, u16) = (30_000, 32_767);

/// Settings of the fixture.
#[must_use]
pub fn settings() -> DatapathSettings {
    DatapathSettings {
        masquerade: true,
        flow_policy: FlowPolicy::Sticky,
        port_min: PORT_MIN,
        port_max: u16::MAX,
        ports_reserved: vec![NODE_PORTS],
        tcp_idle_seconds: 21_600,
    }
}

/// Excluded destinations of the fixture.
#[must_use]
pub fn excluded() -> BTreeMap<Ipv4Net, ExcludedReason> {
    let net = |address: Ipv4Addr, length| Ipv4Net::new_assert(address, length);
    exclusions(&ExclusionSources {
        own_addresses: [NODE, NODE_OTHER].into(),
        node_internal_addresses: [NEIGHBOUR].into(),
        pod_cidrs: [net(POD_A, 24).trunc(), net(POD_REMOTE, 24).trunc()].into(),
        native_routing: Some(net(Ipv4Addr::new(10, 61, 0, 0), 16)),
        ip_masq_agent: Vec::new(),
        masquerade_link_local: false,
    })
}

/// Pods of the fixture.
#[must_use]
pub fn endpoints() -> BTreeMap<Ipv4Addr, EndpointEntry> {
    (1..)
        .zip([(POD_A, false), (POD_B, false), (POD_EXEMPT, true)])
        .map(|(generation, (address, no_masquerade))| {
            (address, EndpointEntry { ifindex: device(address), no_masquerade, generation })
        })
        .collect()
}

/// The device by which packets with this source arrive: the pod's, or none if the node itself sends them.
#[must_use]
pub fn device(source: Ipv4Addr) -> u32 {
    match source {
        POD_A => 7,
        POD_B => 8,
        POD_EXEMPT => 9,
        _ => 0,
    }
}

/// An implementation that runs a case: the model, or the kernel.
pub trait Machine {
    /// Processes a packet, and returns the verdict and the counters that increased, if known.
    fn send(&mut self, direction: Direction, packet: &Packet) -> (Verdict, Vec<String>);
    /// Excludes a prefix.
    fn exclude(&mut self, prefix: Ipv4Net, reason: ExcludedReason);
    /// Removes an excluded prefix.
    fn include(&mut self, prefix: Ipv4Net);
    /// Changes the endpoint at an address, or removes it.
    fn endpoint(&mut self, address: Ipv4Addr, entry: Option<EndpointEntry>);
    /// Applies settings.
    fn configure(&mut self, settings: &DatapathSettings);
    /// Changes the address of the device.
    fn readdress(&mut self, address: Option<Ipv4Addr>);
    /// Empties the forward cache.
    fn lose_cache(&mut self);
    /// Advances time by a TCP idle timeout after every change of policy.
    fn close_windows(&mut self);
    /// The number of NAT entries.
    fn flows(&mut self) -> usize;
}

/// A port in a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// This port.
    Is(u16),
    /// The port of the flow with this name.
    Of(&'static str),
}

/// One step of a case.
#[derive(Debug, Clone, Copy)]
pub enum Step {
    /// A packet, and the expected result.
    Send(Direction, Content, (Ipv4Addr, Port), (Ipv4Addr, Port), Expect),
    /// A leaving packet that arrived by this device, and the expected result.
    By(u32, Content, (Ipv4Addr, u16), (Ipv4Addr, u16), Expect),
    /// [`Machine::endpoint`]
    Endpoint(Ipv4Addr, Option<EndpointEntry>),
    /// [`Machine::exclude`]
    Exclude(Ipv4Addr, u8, ExcludedReason),
    /// [`Machine::include`]
    Include(Ipv4Addr, u8),
    /// [`Machine::configure`], from the fixture's settings.
    Configure(fn(&mut DatapathSettings)),
    /// [`Machine::readdress`]
    Readdress(Option<Ipv4Addr>),
    /// [`Machine::lose_cache`]
    LoseCache,
    /// [`Machine::close_windows`]
    CloseWindows,
    /// Expected result of [`Machine::flows`].
    Flows(usize),
}

/// Expected result for a packet.
#[derive(Debug, Clone, Copy)]
pub enum Expect {
    /// Unchanged, by this rule.
    Unchanged(Rule),
    /// Source translated to this address with its own port, by this rule.
    Kept(Ipv4Addr, Rule),
    /// Source translated to this address with another valid port, which gets this name, by this rule.
    Moved(Ipv4Addr, &'static str, Rule),
    /// Source translated to this address with the port of the flow with this name, by this rule.
    Same(Ipv4Addr, &'static str, Rule),
    /// Destination translated to this endpoint, by the rule for replies.
    Back(Ipv4Addr, u16),
    /// Dropped, by this rule.
    Dropped(Rule),
}

/// A case: steps on a fresh fixture.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What it shows.
    pub name: &'static str,
    /// In order.
    pub steps: &'static [Step],
}

/// Runs a case.
///
/// # Errors
/// The first step with another result.
pub fn run(case: &Case, machine: &mut impl Machine) -> Result<(), String> {
    let mut given: BTreeMap<&str, u16> = BTreeMap::new();
    for (index, step) in case.steps.iter().enumerate() {
        let fail = |what: String| format!("{}, step {index} {step:?}: {what}", case.name);
        match *step {
            Step::Send(direction, content, from, to, expect) => {
                let end = |(address, port): (Ipv4Addr, Port)| match port {
                    Port::Is(port) => Ok(SocketAddrV4::new(address, port)),
                    Port::Of(name) => given
                        .get(name)
                        .map(|port| SocketAddrV4::new(address, *port))
                        .ok_or_else(|| fail(format!("no flow is named {name}"))),
                };
                let packet = Packet { content, source: end(from)?, destination: end(to)?, device: device(from.0) };
                given.extend(send(machine, direction, &packet, expect, &given).map_err(fail)?);
            }
            Step::By(device, content, from, to, expect) => {
                let (source, destination) = (SocketAddrV4::new(from.0, from.1), SocketAddrV4::new(to.0, to.1));
                let packet = Packet { content, source, destination, device };
                given.extend(send(machine, Direction::Egress, &packet, expect, &given).map_err(fail)?);
            }
            Step::Endpoint(address, entry) => machine.endpoint(address, entry),
            Step::Exclude(address, length, reason) => machine.exclude(Ipv4Net::new_assert(address, length), reason),
            Step::Include(address, length) => machine.include(Ipv4Net::new_assert(address, length)),
            Step::Configure(change) => {
                let mut changed = settings();
                change(&mut changed);
                machine.configure(&changed);
            }
            Step::Readdress(address) => machine.readdress(address),
            Step::LoseCache => machine.lose_cache(),
            Step::CloseWindows => machine.close_windows(),
            Step::Flows(expected) => {
                let flows = machine.flows();
                if flows != expected {
                    return Err(fail(format!("there are {flows} NAT entries")));
                }
            }
        }
    }
    Ok(())
}

/// Sends a packet and compares verdict and counters; returns the name of a port.
fn send(
    machine: &mut impl Machine,
    direction: Direction,
    packet: &Packet,
    expect: Expect,
    given: &BTreeMap<&'static str, u16>,
) -> Result<Option<(&'static str, u16)>, String> {
    let (verdict, counters) = machine.send(direction, packet);
    let name =
        check(packet, verdict, expect, given).map_err(|what| format!("{what}, got {verdict:?} ({counters:?})"))?;
    let rule = match expect {
        Expect::Unchanged(rule)
        | Expect::Kept(_, rule)
        | Expect::Moved(_, _, rule)
        | Expect::Same(_, _, rule)
        | Expect::Dropped(rule) => rule,
        Expect::Back(..) => Rule::Reversed,
    };
    let counted = match rule.counter() {
        Some(counter) => counters.iter().any(|name| name == counter.name()),
        None => counters.is_empty(),
    };
    if counted { Ok(name) } else { Err(format!("expected {rule:?} to be counted, got {counters:?}")) }
}

/// Compares; returns the name of a port.
fn check(
    packet: &Packet,
    verdict: Verdict,
    expect: Expect,
    given: &BTreeMap<&'static str, u16>,
) -> Result<Option<(&'static str, u16)>, String> {
    let own = packet.source.port();
    match (expect, verdict) {
        (Expect::Unchanged(_), Verdict::Pass) | (Expect::Dropped(_), Verdict::Drop) => Ok(None),
        (Expect::Kept(address, _), Verdict::Source(source)) if source == SocketAddrV4::new(address, own) => Ok(None),
        (Expect::Moved(address, name, _), Verdict::Source(source)) if *source.ip() == address => {
            let port = source.port();
            let echo = packet.content == Content::EchoRequest;
            let reserved = (NODE_PORTS.0..=NODE_PORTS.1).contains(&port) || port < PORT_MIN;
            if port == own || (reserved && !echo) {
                Err("a port that may not be given".to_owned())
            } else {
                Ok(Some((name, port)))
            }
        }
        (Expect::Same(address, name, _), Verdict::Source(source))
            if given.get(name).is_some_and(|port| source == SocketAddrV4::new(address, *port)) =>
        {
            Ok(None)
        }
        (Expect::Back(address, port), Verdict::Destination(destination))
            if destination == SocketAddrV4::new(address, port) =>
        {
            Ok(None)
        }
        _ => Err("another result".to_owned()),
    }
}

const SYN: Content = Content::Tcp(TcpFlags::SYN);
const SYN_ACK: Content = Content::Tcp(TcpFlags::SYN_ACK);
const ACK: Content = Content::Tcp(TcpFlags::ACK);
const FIN: Content = Content::Tcp(TcpFlags::FIN);
const RST: Content = Content::Tcp(TcpFlags::RST);
const UDP: Content = Content::Udp;

const fn out(content: Content, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), expect: Expect) -> Step {
    Step::Send(Direction::Egress, content, (from.0, Port::Is(from.1)), (to.0, Port::Is(to.1)), expect)
}

const fn come(content: Content, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), expect: Expect) -> Step {
    Step::Send(Direction::Ingress, content, (from.0, Port::Is(from.1)), (to.0, Port::Is(to.1)), expect)
}

/// A reply to the port of the flow with this name.
const fn answer(content: Content, from: (Ipv4Addr, u16), name: &'static str, expect: Expect) -> Step {
    Step::Send(Direction::Ingress, content, (from.0, Port::Is(from.1)), (NODE, Port::Of(name)), expect)
}

const fn unchanged(rule: Rule) -> Expect {
    Expect::Unchanged(rule)
}

const fn kept(rule: Rule) -> Expect {
    Expect::Kept(NODE, rule)
}

const fn moved(name: &'static str, rule: Rule) -> Expect {
    Expect::Moved(NODE, name, rule)
}

const fn same(name: &'static str, rule: Rule) -> Expect {
    Expect::Same(NODE, name, rule)
}

const A: (Ipv4Addr, u16) = (POD_A, 41_000);
const W: (Ipv4Addr, u16) = (WEB, 443);
const TEN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 0);
const WEB_NET: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 64);

/// All cases.
pub const CASES: &[Case] = &[
    // case: masquerade DT1
    Case {
        name: "a pod's TCP flow to the outside leaves under the node's address with its own port",
        steps: &[out(SYN, A, W, kept(Rule::NewFlow)), out(ACK, A, W, kept(Rule::KnownFlow))],
    },
    Case {
        name: "UDP and echo too",
        steps: &[
            out(UDP, A, (WEB, 53), kept(Rule::NewFlow)),
            come(UDP, (WEB, 53), (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            out(Content::EchoRequest, (POD_A, 700), (WEB, 0), kept(Rule::NewFlow)),
            come(Content::EchoReply, (WEB, 0), (NODE, 700), Expect::Back(POD_A, 700)),
        ],
    },
    // case: masquerade DT2
    Case {
        name: "inside the native prefix a pod keeps its address, and nothing is remembered",
        steps: &[
            out(SYN, A, (POD_REMOTE, 80), unchanged(Rule::Excluded)),
            out(UDP, A, (Ipv4Addr::new(10, 61, 77, 1), 80), unchanged(Rule::Excluded)),
            Step::Flows(0),
        ],
    },
    // case: masquerade DT3
    Case {
        name: "a listed destination keeps the pod's address; taken off the list, a new flow is translated",
        steps: &[
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            out(SYN, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            Step::Include(TEN, 8),
            out(SYN, (POD_A, 41_001), (PRIVATE, 80), kept(Rule::NewFlow)),
        ],
    },
    Case {
        name: "an open TCP flow that was excluded keeps the pod's address after the change, and its next SYN does not",
        steps: &[
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            out(SYN, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            Step::Include(TEN, 8),
            out(ACK, A, (PRIVATE, 80), unchanged(Rule::PolicyWindow)),
            out(SYN, A, (PRIVATE, 80), kept(Rule::NewFlow)),
            out(ACK, A, (PRIVATE, 80), kept(Rule::KnownFlow)),
        ],
    },
    Case {
        name: "an open TCP flow that was translated stays so after the change, even when the cache lost it",
        steps: &[
            out(SYN, A, (PRIVATE, 80), kept(Rule::NewFlow)),
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            out(ACK, A, (PRIVATE, 80), kept(Rule::KnownFlow)),
            Step::LoseCache,
            out(ACK, A, (PRIVATE, 80), kept(Rule::FoundFlow)),
            out(ACK, A, (PRIVATE, 80), kept(Rule::KnownFlow)),
            come(ACK, (PRIVATE, 80), (NODE, 41_000), Expect::Back(POD_A, 41_000)),
        ],
    },
    Case {
        name: "a SYN follows the present policy and ends what an older flow of the same ends had",
        steps: &[
            out(SYN, A, (PRIVATE, 80), kept(Rule::NewFlow)),
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            out(SYN, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            out(ACK, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            Step::Flows(0),
        ],
    },
    Case {
        name: "the same when the cache had lost the older flow",
        steps: &[
            out(SYN, A, (PRIVATE, 80), kept(Rule::NewFlow)),
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            Step::LoseCache,
            out(SYN, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            out(ACK, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            Step::Flows(0),
        ],
    },
    Case {
        name: "outside the window an excluded packet is not searched for, and one without an entry is picked up",
        steps: &[
            out(SYN, A, (PRIVATE, 80), kept(Rule::NewFlow)),
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            Step::LoseCache,
            Step::CloseWindows,
            out(ACK, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            out(ACK, (POD_A, 41_009), W, kept(Rule::NewFlow)),
        ],
    },
    Case {
        name: "UDP that was excluded follows the present policy at once",
        steps: &[
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            out(UDP, A, (PRIVATE, 53), unchanged(Rule::Excluded)),
            Step::Include(TEN, 8),
            out(UDP, A, (PRIVATE, 53), kept(Rule::NewFlow)),
        ],
    },
    Case {
        name: "with the immediate policy every packet follows the present policy",
        steps: &[
            Step::Configure(|settings| settings.flow_policy = FlowPolicy::Immediate),
            out(SYN, A, (PRIVATE, 80), kept(Rule::NewFlow)),
            Step::Exclude(TEN, 8, ExcludedReason::IpMasqAgent),
            out(ACK, A, (PRIVATE, 80), unchanged(Rule::Excluded)),
            Step::Include(TEN, 8),
            out(ACK, A, (PRIVATE, 80), kept(Rule::KnownFlow)),
            out(ACK, (POD_B, 41_000), W, kept(Rule::NewFlow)),
        ],
    },
    Case {
        name: "FIN, RST and SYN+ACK without an entry open no flow",
        steps: &[
            Step::CloseWindows,
            out(FIN, A, W, unchanged(Rule::NeverOpens)),
            out(RST, A, W, unchanged(Rule::NeverOpens)),
            out(SYN_ACK, A, W, unchanged(Rule::NeverOpens)),
            Step::Flows(0),
        ],
    },
    // case: masquerade DT6
    Case {
        name: "the metadata service sees the pod's address unless masqLinkLocal says otherwise",
        steps: &[
            out(SYN, A, (METADATA, 80), unchanged(Rule::Excluded)),
            Step::Include(Ipv4Addr::new(169, 254, 0, 0), 16),
            out(SYN, (POD_A, 41_001), (METADATA, 80), kept(Rule::NewFlow)),
        ],
    },
    Case {
        name: "multicast and broadcast keep the pod's address",
        steps: &[
            out(UDP, A, (Ipv4Addr::new(224, 0, 0, 251), 5353), unchanged(Rule::Excluded)),
            out(UDP, A, (Ipv4Addr::new(239, 255, 255, 250), 1900), unchanged(Rule::Excluded)),
            out(UDP, A, (Ipv4Addr::BROADCAST, 67), unchanged(Rule::Excluded)),
        ],
    },
    // case: masquerade DT7
    Case {
        name: "a pod that is never masqueraded keeps its address",
        steps: &[out(SYN, (POD_EXEMPT, 41_000), W, unchanged(Rule::PodExempt)), Step::Flows(0)],
    },
    Case {
        name: "a packet with a pod's address that came in by another device is not the pod's, on the cached path as well",
        steps: &[
            Step::By(3, SYN, A, W, unchanged(Rule::OtherDevice)),
            Step::By(0, SYN, A, W, unchanged(Rule::OtherDevice)),
            Step::Flows(0),
            out(SYN, A, W, kept(Rule::NewFlow)),
            Step::By(3, ACK, A, W, unchanged(Rule::OtherDevice)),
            Step::By(0, ACK, A, W, unchanged(Rule::OtherDevice)),
            Step::By(3, UDP, A, (WEB, 53), unchanged(Rule::OtherDevice)),
            out(ACK, A, W, kept(Rule::KnownFlow)),
            come(ACK, W, (NODE, 41_000), Expect::Back(POD_A, 41_000)),
        ],
    },
    Case {
        name: "packets of a pod that another plugin attached may come in by any device",
        steps: &[
            Step::Endpoint(POD_A, Some(EndpointEntry { ifindex: 0, no_masquerade: false, generation: 1 })),
            Step::By(3, SYN, A, W, kept(Rule::NewFlow)),
            Step::By(4, ACK, A, W, kept(Rule::KnownFlow)),
        ],
    },
    Case {
        name: "a flow ends with its pod: what answers it reaches no pod that has the address next",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            come(SYN_ACK, W, (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            Step::Endpoint(POD_A, None),
            come(ACK, W, (NODE, 41_000), Expect::Dropped(Rule::PodEnded)),
            out(ACK, A, W, unchanged(Rule::ForeignSource)),
            Step::Endpoint(POD_A, Some(EndpointEntry { ifindex: 7, no_masquerade: false, generation: 9 })),
            come(ACK, W, (NODE, 41_000), Expect::Dropped(Rule::PodEnded)),
            Step::Flows(1),
        ],
    },
    Case {
        name: "the next pod with the address takes the ends that the former one used over, and by its own device alone",
        steps: &[
            out(UDP, A, (WEB, 53), kept(Rule::NewFlow)),
            Step::Endpoint(POD_A, Some(EndpointEntry { ifindex: 17, no_masquerade: false, generation: 9 })),
            come(UDP, (WEB, 53), (NODE, 41_000), Expect::Dropped(Rule::PodEnded)),
            out(UDP, A, (WEB, 53), unchanged(Rule::OtherDevice)),
            Step::By(17, UDP, A, (WEB, 53), kept(Rule::FoundFlow)),
            Step::By(17, UDP, A, (WEB, 53), kept(Rule::KnownFlow)),
            come(UDP, (WEB, 53), (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            Step::Flows(1),
        ],
    },
    Case {
        name: "a flow whose pod's generation was not known is kept when it becomes known",
        steps: &[
            Step::Endpoint(POD_A, Some(EndpointEntry { ifindex: 7, no_masquerade: false, generation: 0 })),
            out(SYN, A, W, kept(Rule::NewFlow)),
            Step::Endpoint(POD_A, Some(EndpointEntry { ifindex: 7, no_masquerade: false, generation: 4 })),
            come(SYN_ACK, W, (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            out(ACK, A, W, kept(Rule::KnownFlow)),
        ],
    },
    // case: masquerade DT9
    Case {
        name: "the host keeps its port, and a pod is given another one towards the same remote end",
        steps: &[
            out(UDP, (NODE, 50_000), (WEB, 80), unchanged(Rule::HostFlow)),
            Step::Flows(1),
            out(UDP, (POD_A, 50_000), (WEB, 80), moved("pod", Rule::NewFlow)),
            come(UDP, (WEB, 80), (NODE, 50_000), unchanged(Rule::NotOurs)),
            answer(UDP, (WEB, 80), "pod", Expect::Back(POD_A, 50_000)),
            out(UDP, (NODE, 50_000), (WEB, 80), unchanged(Rule::HostFlow)),
        ],
    },
    Case {
        name: "where the pod came first, the host's flow is moved, and both get their answers",
        steps: &[
            out(UDP, (POD_A, 50_000), (WEB, 80), kept(Rule::NewFlow)),
            out(UDP, (NODE, 50_000), (WEB, 80), moved("host", Rule::HostTranslated)),
            out(UDP, (NODE, 50_000), (WEB, 80), same("host", Rule::KnownFlow)),
            Step::LoseCache,
            out(UDP, (NODE, 50_000), (WEB, 80), same("host", Rule::HostTranslated)),
            come(UDP, (WEB, 80), (NODE, 50_000), Expect::Back(POD_A, 50_000)),
            answer(UDP, (WEB, 80), "host", Expect::Back(NODE, 50_000)),
        ],
    },
    Case {
        name: "the host's packets hold no port that no pod is given, none inside the cluster, and none by an answer",
        steps: &[
            out(UDP, (NODE, 68), (WEB, 67), unchanged(Rule::HostFlow)),
            out(SYN, (NODE, 30_080), (WEB, 4_000), unchanged(Rule::HostFlow)),
            out(SYN, (NODE, 50_001), (NEIGHBOUR, 10_250), unchanged(Rule::HostFlow)),
            out(SYN_ACK, (NODE, 10_250), (WEB, 4_000), unchanged(Rule::HostFlow)),
            Step::Flows(0),
        ],
    },
    // case: masquerade DT11
    Case {
        name: "the host's tunnels are none of ours",
        steps: &[out(Content::Other(4), (NODE, 0), (WEB, 0), unchanged(Rule::ProtocolOther))],
    },
    // case: masquerade DT12
    Case {
        name: "the host's ICMP of other types passes",
        steps: &[
            out(Content::IcmpOther(13), (NODE, 0), (WEB, 0), unchanged(Rule::IcmpOther)),
            out(Content::IcmpOther(14), (POD_A, 0), (WEB, 0), unchanged(Rule::IcmpOther)),
        ],
    },
    Case {
        name: "what waits for a later release passes untouched, and is counted by its kind",
        steps: &[
            out(Content::Fragment, A, W, unchanged(Rule::Fragment)),
            come(Content::Fragment, W, (NODE, 41_000), unchanged(Rule::Fragment)),
            out(Content::IcmpError(3), (POD_A, 0), (WEB, 0), unchanged(Rule::IcmpError)),
            come(Content::IcmpError(11), (WEB, 0), (NODE, 0), unchanged(Rule::IcmpError)),
            out(Content::Other(47), (POD_A, 0), (WEB, 0), unchanged(Rule::ProtocolOther)),
            out(Content::Other(132), (POD_A, 0), (WEB, 0), unchanged(Rule::ProtocolOther)),
        ],
    },
    // case: masquerade DT14
    Case {
        name: "every address of the node sees the pod's address",
        steps: &[
            out(SYN, A, (NODE, 10_250), unchanged(Rule::Excluded)),
            out(SYN, A, (NODE_OTHER, 10_250), unchanged(Rule::Excluded)),
        ],
    },
    Case {
        name: "the neighbour's InternalIP sees the pod's address",
        steps: &[out(SYN, A, (NEIGHBOUR, 10_250), unchanged(Rule::Excluded))],
    },
    Case {
        name: "a source that is no pod of this node is left alone",
        steps: &[
            out(SYN, (POD_REMOTE, 41_000), W, unchanged(Rule::ForeignSource)),
            out(SYN, (Ipv4Addr::new(172, 17, 0, 2), 41_000), W, unchanged(Rule::ForeignSource)),
            out(SYN, (NODE_OTHER, 41_000), W, unchanged(Rule::ForeignSource)),
        ],
    },
    // case: masquerade DT18
    Case {
        name: "a TCP connection from outside is answered by the pod's own address",
        steps: &[
            come(SYN, (WEB, 39_000), (POD_A, 8080), unchanged(Rule::InboundCreated)),
            out(SYN_ACK, (POD_A, 8080), (WEB, 39_000), unchanged(Rule::InboundReply)),
            come(ACK, (WEB, 39_000), (POD_A, 8080), unchanged(Rule::NotOurs)),
            out(ACK, (POD_A, 8080), (WEB, 39_000), unchanged(Rule::InboundReply)),
            out(FIN, (POD_A, 8080), (WEB, 39_000), unchanged(Rule::InboundReply)),
            Step::Flows(0),
        ],
    },
    // case: masquerade DT20
    Case {
        name: "a UDP query from outside is answered by the pod's own address, and the pod's own flow is translated",
        steps: &[
            come(UDP, (WEB, 39_000), (POD_A, 53), unchanged(Rule::InboundCreated)),
            out(UDP, (POD_A, 53), (WEB, 39_000), unchanged(Rule::InboundReply)),
            out(UDP, (POD_A, 41_000), (WEB, 39_000), kept(Rule::NewFlow)),
        ],
    },
    Case {
        name: "a late packet of the pod's own flow opens nothing, so that the next connection is translated",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            come(FIN, W, A, unchanged(Rule::NotOurs)),
            come(SYN, W, A, unchanged(Rule::NotOurs)),
            out(SYN, A, W, kept(Rule::KnownFlow)),
        ],
    },
    Case {
        name: "a stray UDP packet to a translated flow's own port opens nothing, cache or no cache",
        steps: &[
            out(UDP, A, (WEB, 53), kept(Rule::NewFlow)),
            come(UDP, (WEB, 53), A, unchanged(Rule::NotOurs)),
            Step::LoseCache,
            come(UDP, (WEB, 53), A, unchanged(Rule::NotOurs)),
            out(UDP, A, (WEB, 53), kept(Rule::FoundFlow)),
        ],
    },
    Case {
        name: "a SYN of the pod ends an entry from outside between the same ends",
        steps: &[
            come(SYN, (WEB, 443), (POD_A, 41_000), unchanged(Rule::InboundCreated)),
            out(SYN, A, W, kept(Rule::NewFlow)),
            out(ACK, A, W, kept(Rule::KnownFlow)),
        ],
    },
    Case {
        name: "an echo request from outside is answered by the pod's own address, beside its own ping",
        steps: &[
            out(Content::EchoRequest, (POD_A, 700), (WEB, 0), kept(Rule::NewFlow)),
            come(Content::EchoRequest, (WEB, 700), (POD_A, 0), unchanged(Rule::NotOurs)),
            out(Content::EchoReply, (POD_A, 0), (WEB, 700), unchanged(Rule::EchoReply)),
        ],
    },
    Case {
        name: "packets from excluded remote ends need no entry, and are answered by the pod's own address",
        steps: &[
            come(SYN, (POD_REMOTE, 39_000), (POD_A, 8080), unchanged(Rule::NotOurs)),
            out(SYN_ACK, (POD_A, 8080), (POD_REMOTE, 39_000), unchanged(Rule::Excluded)),
        ],
    },
    // case: masquerade NM1
    Case {
        name: "one flow is one entry, whatever it sends",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            Step::Flows(1),
            out(ACK, A, W, kept(Rule::KnownFlow)),
            out(SYN, A, W, kept(Rule::KnownFlow)),
            Step::Flows(1),
        ],
    },
    // case: masquerade NM2
    Case {
        name: "the answer goes back to the pod",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            come(SYN_ACK, W, (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            come(SYN_ACK, (WEB_2, 443), (NODE, 41_000), unchanged(Rule::NotOurs)),
            come(SYN_ACK, (WEB, 444), (NODE, 41_000), unchanged(Rule::NotOurs)),
        ],
    },
    // case: masquerade NM3
    Case {
        name: "two pods with one source port and one remote end do not mix",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            out(SYN, (POD_B, 41_000), W, moved("b", Rule::NewFlow)),
            come(SYN_ACK, W, (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            answer(SYN_ACK, W, "b", Expect::Back(POD_B, 41_000)),
        ],
    },
    Case {
        name: "two pods with one echo identifier do not mix",
        steps: &[
            out(Content::EchoRequest, (POD_A, 700), (WEB, 0), kept(Rule::NewFlow)),
            out(Content::EchoRequest, (POD_B, 700), (WEB, 0), moved("b", Rule::NewFlow)),
            come(Content::EchoReply, (WEB, 0), (NODE, 700), Expect::Back(POD_A, 700)),
            answer(Content::EchoReply, (WEB, 0), "b", Expect::Back(POD_B, 700)),
        ],
    },
    // case: masquerade NM4
    Case {
        name: "one source port to two remote ends may be one external port",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            out(SYN, (POD_B, 41_000), (WEB_2, 443), kept(Rule::NewFlow)),
            come(SYN_ACK, W, (NODE, 41_000), Expect::Back(POD_A, 41_000)),
            come(SYN_ACK, (WEB_2, 443), (NODE, 41_000), Expect::Back(POD_B, 41_000)),
        ],
    },
    // case: masquerade NM10
    Case {
        name: "a source port below the range is mapped into it, and restored in the answer",
        steps: &[
            out(UDP, (POD_A, 900), (WEB, 123), moved("low", Rule::NewFlow)),
            answer(UDP, (WEB, 123), "low", Expect::Back(POD_A, 900)),
        ],
    },
    Case {
        name: "a source port that is reserved is mapped to one that is not",
        steps: &[out(SYN, (POD_A, 30_500), W, moved("reserved", Rule::NewFlow))],
    },
    // case: masquerade NM11
    Case {
        name: "a flow that the cache lost keeps its port",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            out(SYN, (POD_B, 41_000), W, moved("b", Rule::NewFlow)),
            Step::LoseCache,
            out(ACK, (POD_B, 41_000), W, same("b", Rule::FoundFlow)),
            out(ACK, A, W, kept(Rule::FoundFlow)),
            Step::Flows(2),
        ],
    },
    Case {
        name: "an entry under an address that left the node is not used, and the flow gets a new one",
        steps: &[
            Step::CloseWindows,
            out(UDP, A, (WEB, 53), kept(Rule::NewFlow)),
            Step::Include(NODE, 32),
            Step::Readdress(Some(NODE_OTHER)),
            out(UDP, A, (WEB, 53), Expect::Kept(NODE_OTHER, Rule::NewFlow)),
            Step::Flows(1),
        ],
    },
    Case {
        name: "an entry under another address of the node goes on",
        steps: &[
            out(SYN, A, W, kept(Rule::NewFlow)),
            Step::Readdress(Some(NODE_OTHER)),
            out(ACK, A, W, kept(Rule::KnownFlow)),
            out(SYN, (POD_B, 41_000), W, Expect::Kept(NODE_OTHER, Rule::NewFlow)),
        ],
    },
    Case {
        name: "a device without an address translates nothing",
        steps: &[Step::Readdress(None), out(SYN, A, W, unchanged(Rule::NoDeviceAddress)), Step::Flows(0)],
    },
    // case: masquerade NM7
    Case {
        name: "a full range drops the flow that needs a port, and no other",
        steps: &[
            Step::Configure(|settings| (settings.port_min, settings.port_max) = (2_000, 2_001)),
            out(UDP, (POD_A, 2_000), (WEB, 53), kept(Rule::NewFlow)),
            out(UDP, (POD_B, 2_001), (WEB, 53), kept(Rule::NewFlow)),
            out(UDP, (POD_B, 2_000), (WEB, 53), Expect::Dropped(Rule::NoPort)),
            out(UDP, (POD_B, 2_000), (WEB_2, 53), kept(Rule::NewFlow)),
            out(UDP, (POD_A, 2_000), (WEB, 53), kept(Rule::KnownFlow)),
        ],
    },
    Case {
        name: "switched off, everything passes",
        steps: &[
            Step::Configure(|settings| settings.masquerade = false),
            out(SYN, A, W, unchanged(Rule::Disabled)),
            Step::Flows(0),
        ],
    },
    Case {
        name: "the prefix that is longest gives the reason, and any is enough",
        steps: &[
            Step::Exclude(WEB_NET, 27, ExcludedReason::IpMasqAgent),
            out(SYN, A, W, unchanged(Rule::Excluded)),
            out(SYN, A, (Ipv4Addr::new(45, 33, 7, 40), 443), kept(Rule::NewFlow)),
        ],
    },
];
