//! Routes of the main table, and the kernel's choice among all routes.

use super::address::family;
use super::{Handle, NetlinkError, Request};
use crate::tables::rows::Hop;
use ipnet::{IpNet, Ipv4Net};
use netlink_packet_core::{Emitable, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteProtocol,
    RouteScope, RouteType, RouteVia,
};
use netlink_packet_route::rule::RuleMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::net::{IpAddr, Ipv4Addr};

/// Protocol of the agent's routes: those to other nodes and the unreachable route of its own pod CIDR. Unassigned in
/// `include/uapi/linux/rtnetlink.h`; `ip route show proto 197` lists them.
pub const PROTOCOL_NODE: u8 = 197;

/// Protocol of routes to single pods, which the CNI plugin creates and the kernel deletes with their device. A separate
/// number excludes them from the agent's full pass.
pub const PROTOCOL_POD: u8 = 198;

/// `RT_TABLE_LOCAL`: the node's own addresses.
const TABLE_LOCAL: u8 = 255;

/// `RTPROT_BOOT`, as of `ip route add` and of routes inside pods.
pub const PROTOCOL_BOOT: u8 = 3;

/// Treatment of matching packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouteKind {
    /// Forwarded.
    Unicast,
    /// Dropped with ICMP host unreachable.
    Unreachable,
    /// Dropped silently.
    Blackhole,
}

/// A route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The destination; `0.0.0.0/0` or `::/0` for the default route.
    pub destination: IpNet,
    /// The treatment.
    pub kind: RouteKind,
    /// Next hop. Without one the destination is directly connected.
    pub gateway: Option<IpAddr>,
    /// Device; `None` for routes without one.
    pub ifindex: Option<u32>,
    /// Source address of this host's own packets.
    pub source: Option<IpAddr>,
    /// The next hop is directly connected although no route of the device says so.
    pub onlink: bool,
    /// Lower is preferred; 0 is the kernel's default for IPv4.
    pub metric: u32,
    /// The origin: [`PROTOCOL_NODE`] and the like.
    pub protocol: u8,
}

impl Route {
    /// Via a next hop, with the agent's protocol.
    #[must_use]
    pub fn via(destination: IpNet, gateway: IpAddr, ifindex: u32) -> Self {
        Self {
            gateway: Some(gateway),
            ifindex: Some(ifindex),
            ..Self::unreachable(destination).of_kind(RouteKind::Unicast)
        }
    }

    /// Directly connected to a device, with the agent's protocol.
    #[must_use]
    pub fn on_link(destination: IpNet, ifindex: u32) -> Self {
        Self { ifindex: Some(ifindex), ..Self::unreachable(destination).of_kind(RouteKind::Unicast) }
    }

    /// An unreachable route, with the agent's protocol.
    #[must_use]
    pub fn unreachable(destination: IpNet) -> Self {
        Self {
            destination,
            kind: RouteKind::Unreachable,
            gateway: None,
            ifindex: None,
            source: None,
            onlink: false,
            metric: 0,
            protocol: PROTOCOL_NODE,
        }
    }

    fn of_kind(self, kind: RouteKind) -> Self {
        Self { kind, ..self }
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = family(self.destination.addr());
        message.header.destination_prefix_length = self.destination.prefix_len();
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = self.protocol.into();
        message.header.kind = match self.kind {
            RouteKind::Unicast => RouteType::Unicast,
            RouteKind::Unreachable => RouteType::Unreachable,
            RouteKind::Blackhole => RouteType::BlackHole,
        };
        message.header.scope = match (self.kind, self.gateway, self.destination) {
            (RouteKind::Unicast, None, IpNet::V4(_)) => RouteScope::Link,
            _ => RouteScope::Universe,
        };
        if self.onlink {
            message.header.flags = RouteFlags::Onlink;
        }
        if self.destination.prefix_len() > 0 {
            message.attributes.push(RouteAttribute::Destination(self.destination.network().into()));
        }
        message.attributes.extend(self.gateway.map(|ip| RouteAttribute::Gateway(ip.into())));
        message.attributes.extend(self.ifindex.map(RouteAttribute::Oif));
        message.attributes.extend(self.source.map(|ip| RouteAttribute::PrefSource(ip.into())));
        if self.metric > 0 {
            message.attributes.push(RouteAttribute::Priority(self.metric));
        }
        message
    }
}

impl std::fmt::Display for Route {
    /// In the format of `ip route`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            RouteKind::Unicast => {}
            RouteKind::Unreachable => f.write_str("unreachable ")?,
            RouteKind::Blackhole => f.write_str("blackhole ")?,
        }
        write!(f, "{}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(ifindex) = self.ifindex {
            write!(f, " dev {ifindex}")?;
        }
        if let Some(source) = self.source {
            write!(f, " src {source}")?;
        }
        Ok(())
    }
}

/// Adds a route. Fails with `EEXIST` if there is one to the same destination with the same metric.
#[must_use]
pub fn add(route: &Route) -> Request {
    Request::new(
        RouteNetlinkMessage::NewRoute(route.message()),
        NLM_F_CREATE | NLM_F_EXCL,
        format!("add route {route}"),
    )
}

/// Adds or replaces the route to the same destination with the same metric.
#[must_use]
pub fn replace(route: &Route) -> Request {
    Request::new(
        RouteNetlinkMessage::NewRoute(route.message()),
        NLM_F_CREATE | NLM_F_REPLACE,
        format!("set route {route}"),
    )
}

/// Deletes the route with all of these properties, including the protocol.
#[must_use]
pub fn delete(route: &Route) -> Request {
    Request::new(RouteNetlinkMessage::DelRoute(route.message()), 0, format!("delete route {route}"))
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

fn next_hop(route: Route, hop: &RouteNextHop) -> Route {
    let gateway = hop.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        _ => None,
    });
    Route { gateway, ifindex: Some(hop.interface_index), ..route }
}

/// The routes of a message, one per next hop. None for other kinds than [`RouteKind`] and other tables.
fn as_routes(message: &RouteMessage) -> Vec<Route> {
    let header = &message.header;
    let kind = match header.kind {
        RouteType::Unicast => RouteKind::Unicast,
        RouteType::Unreachable => RouteKind::Unreachable,
        RouteType::BlackHole => RouteKind::Blackhole,
        _ => return Vec::new(),
    };
    let any: IpNet = match header.address_family {
        AddressFamily::Inet => Ipv4Net::default().into(),
        AddressFamily::Inet6 => ipnet::Ipv6Net::default().into(),
        _ => return Vec::new(),
    };
    let mut route = Route { protocol: header.protocol.into(), ..Route::unreachable(any) }.of_kind(kind);
    route.onlink = header.flags.contains(RouteFlags::Onlink);
    let mut table = u32::from(header.table);
    let mut hops: &[RouteNextHop] = &[];
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                let Some(net) = ip(address).and_then(|ip| IpNet::new(ip, header.destination_prefix_length).ok()) else {
                    return Vec::new();
                };
                route.destination = net;
            }
            RouteAttribute::Gateway(address) => route.gateway = ip(address),
            RouteAttribute::PrefSource(address) => route.source = ip(address),
            RouteAttribute::Oif(index) => route.ifindex = Some(*index),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::MultiPath(list) => hops = list,
            _ => {}
        }
    }
    if table != u32::from(RouteHeader::RT_TABLE_MAIN) {
        return Vec::new();
    }
    if hops.is_empty() { vec![route] } else { hops.iter().map(|hop| next_hop(route, hop)).collect() }
}

fn source_address(attributes: &[RouteAttribute]) -> Option<Ipv4Addr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(RouteAddress::Inet(ip)) => Some(*ip),
        _ => None,
    })
}

/// The answer to a look-up; `None` if the kernel would not send the packet by a device.
fn as_hop(message: &RouteMessage) -> Option<Hop> {
    if message.header.kind != RouteType::Unicast {
        return None;
    }
    let ifindex = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    })?;
    let gateway = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(ip)) => Some(IpAddr::V4(*ip)),
        RouteAttribute::Via(RouteVia::Inet6(ip)) => Some(IpAddr::V6(*ip)),
        _ => None,
    });
    let mtu = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => metrics.iter().find_map(|metric| match metric {
            RouteMetric::Mtu(bytes) if *bytes > 0 => Some(*bytes),
            _ => None,
        }),
        _ => None,
    });
    Some(Hop { ifindex, gateway, source: source_address(&message.attributes), mtu })
}

/// Changes with what the route says, not with how often or how recently it was used.
fn digest(message: &RouteMessage) -> u64 {
    let mut said = message.clone();
    said.attributes.retain(|attribute| !matches!(attribute, RouteAttribute::CacheInfo(_)));
    digest_of(&said)
}

fn digest_of(said: &impl Emitable) -> u64 {
    let mut bytes = vec![0; said.buffer_len()];
    said.emit(&mut bytes);
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

impl Handle {
    /// Where the kernel sends this node's packets to `destination`; with `device` only by that device. `None` if it
    /// rejects them, or keeps them because the destination is an address of this node.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn hop(&mut self, destination: Ipv4Addr, device: Option<u32>) -> Result<Option<Hop>, NetlinkError> {
        let mut question = RouteMessage::default();
        question.header.address_family = AddressFamily::Inet;
        question.header.destination_prefix_length = 32;
        question.attributes.push(RouteAttribute::Destination(destination.into()));
        question.attributes.extend(device.map(RouteAttribute::Oif));
        let what = format!("look up the route to {destination}");
        let answer = self.get(RouteNetlinkMessage::GetRoute(question), &what, |message| match message {
            RouteNetlinkMessage::NewRoute(message) => Some(as_hop(&message)),
            _ => None,
        });
        match answer {
            Ok(hop) => Ok(hop.flatten()),
            // No route; `unreachable`, `blackhole` and `prohibit` (`fib_props` of `net/ipv4/fib_semantics.c`); a device that
            // is down.
            Err(error)
                if matches!(
                    error.errno(),
                    Some(Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::EINVAL | Errno::EACCES | Errno::ENETDOWN)
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The IPv4 routes of the main table, and a number that differs when the answers of [`Handle::hop`] may: a digest of
    /// the rules, and of the routes of all tables but Cistern's own. Addresses of this node are not considered.
    ///
    /// # Errors
    /// One of the lists cannot be read.
    pub fn routing(&mut self) -> Result<(Vec<Route>, u64), NetlinkError> {
        let mut all = DefaultHasher::new();
        let mut question = RouteMessage::default();
        question.header.address_family = AddressFamily::Inet;
        let entries = self.dump(&RouteNetlinkMessage::GetRoute(question), "list routes", |message| match message {
            RouteNetlinkMessage::NewRoute(message) if message.header.table != TABLE_LOCAL => {
                let ours = [PROTOCOL_NODE, PROTOCOL_POD].contains(&message.header.protocol.into());
                vec![((!ours).then(|| digest(&message)), as_routes(&message))]
            }
            _ => Vec::new(),
        })?;
        let mut routes = Vec::new();
        for (digest, found) in entries {
            if let Some(digest) = digest {
                digest.hash(&mut all);
            }
            routes.extend(found);
        }
        let mut question = RuleMessage::default();
        question.header.family = AddressFamily::Inet;
        self.dump(&RouteNetlinkMessage::GetRule(question), "list rules", |message| match message {
            RouteNetlinkMessage::NewRule(message) => vec![digest_of(&message)],
            _ => Vec::new(),
        })?
        .hash(&mut all);
        Ok((routes, all.finish()))
    }

    /// The IPv4 routes of the main table; with `protocol` only those of that protocol.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn routes(&mut self, protocol: Option<u8>) -> Result<Vec<Route>, NetlinkError> {
        let mut question = RouteMessage::default();
        question.header.address_family = AddressFamily::Inet;
        question.header.table = RouteHeader::RT_TABLE_MAIN;
        question.header.protocol = protocol.map_or(RouteProtocol::Unspec, RouteProtocol::from);
        let mut routes =
            self.dump(&RouteNetlinkMessage::GetRoute(question), "list routes", |message| match message {
                RouteNetlinkMessage::NewRoute(message) => as_routes(&message),
                _ => Vec::new(),
            })?;
        // Kernels before 4.20 do not filter.
        routes.retain(|route| protocol.is_none_or(|wanted| route.protocol == wanted));
        Ok(routes)
    }
}
