//! Explains the treatment of the first packet of a flow.

use super::decide::{Content, Direction, Exclusion, Node, Packet, Rule, Verdict as Decided};
use super::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason};
use ipnet::{IpNet, Ipv4Net};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};

/// Used if no port is given: a port in the range for flows.
const ANY_PORT: u16 = 40_000;

/// The first packet of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// Source address.
    pub from: Ipv4Addr,
    /// Source port; `None` if any.
    pub from_port: Option<u16>,
    /// Destination address.
    pub to: Ipv4Addr,
    /// Destination port; `None` if any.
    pub to_port: Option<u16>,
    /// Protocol.
    pub content: Content,
}

/// A device of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Name of the device.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<IpNet>,
}

/// State of this node that decides on a packet.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Settings of the datapath.
    pub settings: DatapathSettings,
    /// Pods of this node.
    pub endpoints: BTreeMap<Ipv4Addr, EndpointEntry>,
    /// Destinations that are not masqueraded.
    pub excluded: BTreeMap<Ipv4Net, ExcludedReason>,
    /// Egress devices, by index.
    pub devices: BTreeMap<u32, DeviceEntry>,
    /// All devices, by index.
    pub links: BTreeMap<u32, Link>,
    /// The device by which the kernel sends packets to the destination, if any.
    pub leaves_by: Option<u32>,
}

/// Treatment of the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It keeps its source address.
    Unchanged,
    /// Its source address becomes the node's.
    Masqueraded,
    /// Its destination is translated.
    Redirected,
    /// It is dropped.
    Dropped,
}

/// The rule or fact that decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The packet does not leave the node.
    StaysOnNode,
    /// The node has no route to the destination.
    NoRoute,
    /// The packet leaves by a device that is not an egress device.
    OtherDevice,
    /// A rule of the kernel programs.
    #[serde(untagged)]
    Rule(Rule),
}

/// The explanation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Treatment of the packet.
    pub verdict: Verdict,
    /// The rule or fact that decided.
    pub reason: Reason,
    /// Human-readable explanation.
    pub why: String,
    /// Its translated source address, if masqueraded.
    pub leaves_as: Option<Ipv4Addr>,
    /// Name of the output device.
    pub device: Option<String>,
}

/// Explains the first packet of a flow.
#[must_use]
pub fn explain(facts: Facts, question: &Question) -> Answer {
    let to = question.to;
    let unchanged = |reason, why| Answer { verdict: Verdict::Unchanged, reason, why, leaves_as: None, device: None };
    if facts.endpoints.contains_key(&to) {
        let why = format!("{to} is a pod of this node: the packet never reaches an egress device");
        return unchanged(Reason::StaysOnNode, why);
    }
    if let Some(link) = facts.links.values().find(|link| link.addresses.iter().any(|net| net.addr() == to)) {
        let why = format!("{to} is an address of this node ({}): the packet is delivered here", link.name);
        return unchanged(Reason::StaysOnNode, why);
    }
    let Some(ifindex) = facts.leaves_by else {
        return unchanged(Reason::NoRoute, format!("this node has no route to {to}"));
    };
    let name = facts.links.get(&ifindex).map_or_else(|| ifindex.to_string(), |link| link.name.clone());
    let Some(device) = facts.devices.get(&ifindex) else {
        let why = format!("the route to {to} uses {name}, which is not an egress device");
        return Answer { device: Some(name), ..unchanged(Reason::OtherDevice, why) };
    };
    let came_by = facts.endpoints.get(&question.from).map_or(0, |endpoint| endpoint.ifindex);
    let mut node = Node {
        device: *device,
        endpoints: facts.endpoints,
        excluded: facts
            .excluded
            .into_iter()
            .map(|(prefix, reason)| (prefix, Exclusion { reason, since: None }))
            .collect(),
        ..Node::new(facts.settings)
    };
    let packet = Packet {
        content: question.content,
        source: SocketAddrV4::new(question.from, question.from_port.unwrap_or(ANY_PORT)),
        destination: SocketAddrV4::new(to, question.to_port.unwrap_or(ANY_PORT)),
        device: came_by,
    };
    let decision = node.decide(Direction::Egress, &packet, 0);
    let (verdict, leaves_as) = match decision.verdict {
        Decided::Pass => (Verdict::Unchanged, None),
        Decided::Source(source) => (Verdict::Masqueraded, Some(*source.ip())),
        Decided::Destination(_) => (Verdict::Redirected, None),
        Decided::Drop => (Verdict::Dropped, None),
    };
    Answer { verdict, reason: Reason::Rule(decision.rule), why: decision.why, leaves_as, device: Some(name) }
}

#[cfg(test)]
mod tests {
    use super::super::cases::{self, NODE, POD_A, POD_B, WEB};
    use super::*;

    const DEVICE: u32 = 7;

    fn facts() -> Facts {
        let link = |name: &str, address: IpNet| Link { name: name.to_owned(), addresses: vec![address] };
        Facts {
            settings: cases::settings(),
            endpoints: cases::endpoints(),
            excluded: cases::excluded(),
            devices: [(DEVICE, DeviceEntry { address: Some(NODE) })].into(),
            links: [
                (DEVICE, link("eth0", format!("{NODE}/24").parse().unwrap())),
                (8, link("eth1", "198.18.0.1/24".parse().unwrap())),
            ]
            .into(),
            leaves_by: Some(DEVICE),
        }
    }

    fn ask(facts: Facts, to: Ipv4Addr) -> Answer {
        explain(facts, &Question { from: POD_A, from_port: None, to, to_port: Some(53), content: Content::Udp })
    }

    #[test]
    fn packets_that_stay_on_the_node_are_not_masqueraded() {
        for to in [POD_B, NODE] {
            let answer = ask(facts(), to);
            assert_eq!((answer.verdict, answer.reason), (Verdict::Unchanged, Reason::StaysOnNode), "{}", answer.why);
        }
        let answer = ask(facts(), WEB);
        assert_eq!((answer.verdict, answer.leaves_as), (Verdict::Masqueraded, Some(NODE)), "{}", answer.why);
        assert_eq!(answer.device.as_deref(), Some("eth0"));
    }

    #[test]
    fn the_kernels_route_names_the_device() {
        let answer = ask(Facts { leaves_by: Some(8), ..facts() }, WEB);
        assert_eq!((answer.reason, answer.device.as_deref()), (Reason::OtherDevice, Some("eth1")));
        let answer = ask(Facts { leaves_by: None, ..facts() }, WEB);
        assert_eq!((answer.reason, answer.device), (Reason::NoRoute, None));
    }

    #[test]
    fn reasons_serialise_to_words() {
        let words = |reason| serde_json::to_value(reason).unwrap();
        assert_eq!(words(Reason::StaysOnNode), "stays-on-node");
        assert_eq!(words(Reason::Rule(Rule::NewFlow)), "new-flow");
    }
}
