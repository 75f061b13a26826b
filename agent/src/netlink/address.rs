//! IP addresses of network devices.

use super::{Handle, NetlinkError, Request};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use std::net::IpAddr;

/// An address of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The device.
    pub ifindex: u32,
    /// The address with the prefix of its network; the host bits are kept.
    pub net: IpNet,
    /// IPv4: another address of the same network is the primary one. IPv6: temporary.
    pub secondary: bool,
    /// How far the address is valid; the kernel never picks one of a narrower scope as a source by itself.
    pub scope: Scope,
}

/// Scope of an address (`RT_SCOPE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everywhere.
    Global,
    /// On the link only.
    Link,
    /// Inside the host only, or a scope without a name here.
    Host,
}

pub(super) fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn message(ifindex: u32, net: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(net.addr());
    message.header.prefix_len = net.prefix_len();
    message.header.index = ifindex;
    message.attributes = vec![AddressAttribute::Local(net.addr()), AddressAttribute::Address(net.addr())];
    message
}

/// Gives the device an address. Refused as existing when it has it.
#[must_use]
pub fn add(ifindex: u32, net: IpNet) -> Request {
    Request::new(
        RouteNetlinkMessage::NewAddress(message(ifindex, net)),
        NLM_F_CREATE | NLM_F_EXCL,
        format!("add address {net} to network device {ifindex}"),
    )
}

/// Gives the device an address, or leaves the one that is there.
#[must_use]
pub fn replace(ifindex: u32, net: IpNet) -> Request {
    Request::new(
        RouteNetlinkMessage::NewAddress(message(ifindex, net)),
        NLM_F_CREATE | NLM_F_REPLACE,
        format!("set address {net} on network device {ifindex}"),
    )
}

/// As [`replace`], with a scope of the caller's choice.
#[must_use]
pub fn replace_in_scope(ifindex: u32, net: IpNet, scope: Scope) -> Request {
    let mut message = message(ifindex, net);
    message.header.scope = match scope {
        Scope::Global => AddressScope::Universe,
        Scope::Link => AddressScope::Link,
        Scope::Host => AddressScope::Host,
    };
    Request::new(
        RouteNetlinkMessage::NewAddress(message),
        NLM_F_CREATE | NLM_F_REPLACE,
        format!("set address {net} on network device {ifindex}"),
    )
}

/// Takes an address away.
#[must_use]
pub fn delete(ifindex: u32, net: IpNet) -> Request {
    Request::new(
        RouteNetlinkMessage::DelAddress(message(ifindex, net)),
        0,
        format!("delete address {net} of network device {ifindex}"),
    )
}

fn as_address(message: &AddressMessage) -> Option<Address> {
    let mut address = None;
    let mut local = None;
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Local(ip) => local = Some(*ip),
            _ => {}
        }
    }
    // On a point-to-point device `Address` is the other end.
    let net = IpNet::new(local.or(address)?, message.header.prefix_len).ok()?;
    let secondary = message.header.flags.contains(AddressHeaderFlags::Secondary);
    let scope = match message.header.scope {
        AddressScope::Universe | AddressScope::Site => Scope::Global,
        AddressScope::Link => Scope::Link,
        _ => Scope::Host,
    };
    Some(Address { ifindex: message.header.index, net, secondary, scope })
}

impl Handle {
    /// Every address of every device, in the order of the kernel: primary before secondary.
    ///
    /// # Errors
    /// When the list cannot be had.
    pub fn addresses(&mut self) -> Result<Vec<Address>, NetlinkError> {
        let question = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        self.dump(&question, "list addresses", |message| match message {
            RouteNetlinkMessage::NewAddress(message) => as_address(&message).into_iter().collect(),
            _ => Vec::new(),
        })
    }

    /// The addresses of one device.
    ///
    /// # Errors
    /// When the list cannot be had.
    pub fn addresses_of(&mut self, ifindex: u32) -> Result<Vec<Address>, NetlinkError> {
        let mut addresses = self.addresses()?;
        addresses.retain(|address| address.ifindex == ifindex);
        Ok(addresses)
    }
}
