//! IP addresses of network devices.

use super::{Handle, NetlinkError, Request};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use std::net::IpAddr;

/// Scope of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Valid everywhere. The kernel may choose it as the source of any packet.
    Global,
    /// Valid on its link: never the source of a packet that leaves by another device with an address.
    Link,
    /// Valid on this host only.
    Host,
}

/// An address of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The device.
    pub ifindex: u32,
    /// The address with the prefix of its network; the host bits are kept.
    pub net: IpNet,
    /// IPv4: another address of the same network is the primary one. IPv6: temporary.
    pub secondary: bool,
    /// Its scope.
    pub scope: Scope,
}

pub(super) fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn message(ifindex: u32, net: IpNet, scope: Scope) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.scope = match scope {
        Scope::Global => AddressScope::Universe,
        Scope::Link => AddressScope::Link,
        Scope::Host => AddressScope::Host,
    };
    message.header.family = family(net.addr());
    message.header.prefix_len = net.prefix_len();
    message.header.index = ifindex;
    message.attributes = vec![AddressAttribute::Local(net.addr()), AddressAttribute::Address(net.addr())];
    message
}

/// Adds a global address to the device. Fails with `EEXIST` if it has it.
#[must_use]
pub fn add(ifindex: u32, net: IpNet) -> Request {
    Request::new(
        RouteNetlinkMessage::NewAddress(message(ifindex, net, Scope::Global)),
        NLM_F_CREATE | NLM_F_EXCL,
        format!("add address {net} to network device {ifindex}"),
    )
}

/// Adds a global address to the device, unless it has it.
#[must_use]
pub fn replace(ifindex: u32, net: IpNet) -> Request {
    replace_in_scope(ifindex, net, Scope::Global)
}

/// As [`replace`], with a scope. The kernel does not change the scope of an existing address: delete it first.
#[must_use]
pub fn replace_in_scope(ifindex: u32, net: IpNet, scope: Scope) -> Request {
    Request::new(
        RouteNetlinkMessage::NewAddress(message(ifindex, net, scope)),
        NLM_F_CREATE | NLM_F_REPLACE,
        format!("set address {net} on network device {ifindex}"),
    )
}

/// Deletes an address of any scope.
#[must_use]
pub fn delete(ifindex: u32, net: IpNet) -> Request {
    Request::new(
        RouteNetlinkMessage::DelAddress(message(ifindex, net, Scope::Global)),
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
    // On a point-to-point device `Address` is the peer's.
    let net = IpNet::new(local.or(address)?, message.header.prefix_len).ok()?;
    let secondary = message.header.flags.contains(AddressHeaderFlags::Secondary);
    let scope = match message.header.scope {
        AddressScope::Link => Scope::Link,
        AddressScope::Host | AddressScope::Nowhere => Scope::Host,
        // Site and user-defined scopes are wider than the link.
        _ => Scope::Global,
    };
    Some(Address { ifindex: message.header.index, net, secondary, scope })
}

impl Handle {
    /// All addresses of all devices, in the kernel's order: primary before secondary.
    ///
    /// # Errors
    /// The list cannot be read.
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
    /// The list cannot be read.
    pub fn addresses_of(&mut self, ifindex: u32) -> Result<Vec<Address>, NetlinkError> {
        let mut addresses = self.addresses()?;
        addresses.retain(|address| address.ifindex == ifindex);
        Ok(addresses)
    }
}
