//! Neighbour entries (ARP and NDP).

use super::address::family;
use super::{Handle, Mac, NetlinkError, Request};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use std::net::IpAddr;

/// A neighbour entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// Device.
    pub ifindex: u32,
    /// Address of the neighbour.
    pub address: IpAddr,
    /// Its hardware address, if known.
    pub mac: Option<Mac>,
    /// Statically configured: neither resolved nor aged out.
    pub permanent: bool,
}

fn message(ifindex: u32, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(address);
    message.header.ifindex = ifindex;
    message.attributes.push(NeighbourAttribute::Destination(match address {
        IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
        IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
    }));
    message
}

/// Creates or replaces a permanent entry for the address.
#[must_use]
pub fn replace_permanent(ifindex: u32, address: IpAddr, mac: Mac) -> Request {
    let mut message = message(ifindex, address);
    message.header.state = NeighbourState::Permanent;
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.to_vec()));
    Request::new(
        RouteNetlinkMessage::NewNeighbour(message),
        NLM_F_CREATE | NLM_F_REPLACE,
        format!("set permanent neighbour {address} on network device {ifindex}"),
    )
}

/// Deletes an entry.
#[must_use]
pub fn delete(ifindex: u32, address: IpAddr) -> Request {
    Request::new(
        RouteNetlinkMessage::DelNeighbour(message(ifindex, address)),
        0,
        format!("delete neighbour {address} of network device {ifindex}"),
    )
}

fn as_neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let mut address = None;
    let mut mac = None;
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => address = Some(IpAddr::V4(*ip)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => address = Some(IpAddr::V6(*ip)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok(),
            _ => {}
        }
    }
    let permanent = message.header.state == NeighbourState::Permanent;
    Some(Neighbour { ifindex: message.header.ifindex, address: address?, mac, permanent })
}

impl Handle {
    /// The IPv4 neighbours of one device.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn neighbours_of(&mut self, ifindex: u32) -> Result<Vec<Neighbour>, NetlinkError> {
        let mut question = NeighbourMessage::default();
        question.header.family = AddressFamily::Inet;
        // With strict checking the kernel rejects an index in the header of a dump; as an attribute it filters.
        question.attributes.push(NeighbourAttribute::IfIndex(ifindex));
        self.dump(&RouteNetlinkMessage::GetNeighbour(question), "list neighbours", |message| match message {
            RouteNetlinkMessage::NewNeighbour(message) => as_neighbour(&message).into_iter().collect(),
            _ => Vec::new(),
        })
    }
}
