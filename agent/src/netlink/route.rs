//! Routes of the main table.

use super::address::family;
use super::{Handle, NetlinkError, Request};
use ipnet::{IpNet, Ipv4Net};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteNextHop, RouteProtocol, RouteScope,
    RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use std::net::IpAddr;

/// Protocol of the routes that the agent makes and takes away: those to other nodes and the end of the own pod CIDR.
/// Free numbers as of `include/uapi/linux/rtnetlink.h`; `ip route show proto 197` lists them.
pub const PROTOCOL_NODE: u8 = 197;

/// Protocol of the routes to single pods. The CNI plugin makes them; they go with their device. A number of their own
/// keeps the agent's full pass from taking them for surplus.
pub const PROTOCOL_POD: u8 = 198;

/// `RTPROT_BOOT`: what `ip route add` writes, and what routes inside a pod carry.
pub const PROTOCOL_BOOT: u8 = 3;

/// What becomes of a packet that the route matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouteKind {
    /// It is sent on.
    Unicast,
    /// It is dropped and answered: host unreachable.
    Unreachable,
    /// It is dropped in silence.
    Blackhole,
}

/// A route of the main table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Where to; `0.0.0.0/0` or `::/0` is the default route.
    pub destination: IpNet,
    /// What happens.
    pub kind: RouteKind,
    /// Next hop. Without one the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Device; none for a route that ends here.
    pub ifindex: Option<u32>,
    /// Source address of this host's own packets.
    pub source: Option<IpAddr>,
    /// The next hop is on the link although no route of the device says so.
    pub onlink: bool,
    /// Lower is preferred; 0 is the kernel's default for IPv4.
    pub metric: u32,
    /// Who made it: [`PROTOCOL_NODE`] and the like.
    pub protocol: u8,
}

impl Route {
    /// By a next hop, made by the agent.
    #[must_use]
    pub fn via(destination: IpNet, gateway: IpAddr, ifindex: u32) -> Self {
        Self {
            gateway: Some(gateway),
            ifindex: Some(ifindex),
            ..Self::unreachable(destination).of_kind(RouteKind::Unicast)
        }
    }

    /// On the link of a device, made by the agent.
    #[must_use]
    pub fn on_link(destination: IpNet, ifindex: u32) -> Self {
        Self { ifindex: Some(ifindex), ..Self::unreachable(destination).of_kind(RouteKind::Unicast) }
    }

    /// An end that is answered, made by the agent.
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
    /// As `ip route` words it.
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

/// Makes a route. Refused as existing when there is one to the same destination with the same metric.
#[must_use]
pub fn add(route: &Route) -> Request {
    Request::new(
        RouteNetlinkMessage::NewRoute(route.message()),
        NLM_F_CREATE | NLM_F_EXCL,
        format!("add route {route}"),
    )
}

/// Makes a route in place of the one to the same destination with the same metric, if there is one.
#[must_use]
pub fn replace(route: &Route) -> Request {
    Request::new(
        RouteNetlinkMessage::NewRoute(route.message()),
        NLM_F_CREATE | NLM_F_REPLACE,
        format!("set route {route}"),
    )
}

/// Takes a route away: the one that has every property given here, its protocol included.
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

/// The routes of one message: one for each next hop. Kinds that are none of [`RouteKind`] and other tables give none.
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

impl Handle {
    /// The IPv4 routes of the main table; with `protocol` only those that carry it.
    ///
    /// # Errors
    /// When the list cannot be had.
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
        // A kernel older than 4.20 does not filter.
        routes.retain(|route| protocol.is_none_or(|wanted| route.protocol == wanted));
        Ok(routes)
    }
}
