//! Network devices.

use super::{Handle, Mac, NetlinkError, Request};
use netlink_packet_core::{DefaultNla, Emitable, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InetDevConf, InfoData, InfoKind, InfoVeth, LinkAttribute,
    LinkExtentMask, LinkFlags, LinkInfo, LinkMessage, State,
};
use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Index of the loopback device, the first in each network namespace.
pub const LOOPBACK: u32 = 1;

/// Maximum length of names (`IFNAMSIZ` without the terminating zero).
pub const NAME_LENGTH: usize = 15;

/// The kernel defers link-watch work of a device with a carrier by up to a second (linkwatch_schedule_work), and for as
/// long as the rtnl lock is held.
const SENDS_WITHIN: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index, unique in its namespace.
    pub index: u32,
    /// Name.
    pub name: String,
    /// `IFF_UP`: administratively up.
    pub up: bool,
    /// Its operational state (RFC 2863) is "up": packets sent over it are transmitted. `up` and a carrier are not
    /// sufficient, see [`Handle::wait_until_it_sends`].
    pub sends: bool,
    /// `IFF_LOOPBACK`
    pub loopback: bool,
    /// `veth`, `bridge`, `bond` and the like; `None` for hardware.
    pub kind: Option<String>,
    /// Its bridge or bond.
    pub master: Option<u32>,
    /// The lower device, or the peer of a veth device, by index in that device's namespace.
    pub lower: Option<u32>,
    /// That device is in another namespace (`IFLA_LINK_NETNSID`), which therefore exists.
    pub lower_is_elsewhere: bool,
    /// In bytes.
    pub mtu: u32,
    /// Hardware address; empty if there is none.
    pub mac: Vec<u8>,
}

impl Link {
    fn from_message(message: LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            name: String::new(),
            up: flags.contains(LinkFlags::Up),
            sends: false,
            loopback: flags.contains(LinkFlags::Loopback),
            kind: None,
            master: None,
            lower: None,
            lower_is_elsewhere: false,
            mtu: 0,
            mac: Vec::new(),
        };
        for attribute in message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name = name,
                LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                LinkAttribute::OperState(state) => link.sends = state == State::Up,
                LinkAttribute::Address(mac) => link.mac = mac,
                LinkAttribute::Controller(index) => link.master = Some(index),
                LinkAttribute::Link(index) => link.lower = Some(index),
                LinkAttribute::LinkNetNsId(_) => link.lower_is_elsewhere = true,
                LinkAttribute::LinkInfo(infos) => {
                    link.kind = infos.into_iter().find_map(|info| match info {
                        LinkInfo::Kind(kind) => Some(kind.to_string()),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
        link
    }
}

/// One side of a veth pair to create.
#[derive(Debug, Clone, Copy)]
pub struct VethEnd<'a> {
    /// Name.
    pub name: &'a str,
    /// Hardware address. Setting it keeps udev from choosing one, which would invalidate neighbour entries.
    pub mac: Mac,
    /// Its namespace; `None` for that of the handle. Creating it there saves moving the device, which would cost the
    /// kernel an RCU grace period.
    pub namespace: Option<BorrowedFd<'a>>,
}

/// Creates a veth pair, both sides down. Fails with `EEXIST` if either name exists.
#[must_use]
pub fn add_veth(host: VethEnd<'_>, peer: VethEnd<'_>, mtu: u32) -> Request {
    let end = |end: VethEnd<'_>| {
        let mut attributes = vec![
            LinkAttribute::IfName(end.name.to_owned()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::Address(end.mac.to_vec()),
        ];
        attributes.extend(end.namespace.map(|namespace| LinkAttribute::NetNsFd(namespace.as_raw_fd())));
        attributes
    };
    let mut peer_message = LinkMessage::default();
    peer_message.attributes = end(peer);
    let mut message = LinkMessage::default();
    message.attributes = end(host);
    message.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer_message))),
    ]));
    Request::new(
        RouteNetlinkMessage::NewLink(message),
        NLM_F_CREATE | NLM_F_EXCL,
        format!("add veth pair {} and {}, MTU {mtu}", host.name, peer.name),
    )
}

/// Sets the device up, if it is not.
#[must_use]
pub fn up(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    Request::new(RouteNetlinkMessage::SetLink(message), 0, format!("set network device {index} up"))
}

/// Deletes the device; a veth pair is deleted as a whole.
#[must_use]
pub fn delete(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    Request::new(RouteNetlinkMessage::DelLink(message), 0, format!("delete network device {index}"))
}

/// As [`delete`], by name.
#[must_use]
pub fn delete_by_name(name: &str) -> Request {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(name.to_owned()));
    Request::new(RouteNetlinkMessage::DelLink(message), 0, format!("delete network device {name}"))
}

/// An IPv4 sysctl of a device (`/proc/sys/net/ipv4/conf/DEVICE/`), by its number in `include/uapi/linux/ip.h`
/// (`IPV4_DEVCONF_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Ipv4Setting {
    /// `forwarding`
    Forwarding = 1,
    /// `proxy_arp`
    ProxyArp = 3,
    /// `accept_redirects`
    AcceptRedirects = 4,
    /// `rp_filter`
    ReversePathFilter = 8,
    /// `accept_source_route`
    AcceptSourceRoute = 9,
    /// `arp_ignore`
    ArpIgnore = 19,
}

/// The sysctls of the node's side of a pod's pair.
pub const HOST_SIDE: [(Ipv4Setting, u32); 6] = [
    (Ipv4Setting::Forwarding, 1),
    (Ipv4Setting::ProxyArp, 0),
    (Ipv4Setting::AcceptRedirects, 0),
    (Ipv4Setting::AcceptSourceRoute, 0),
    // Strict: a packet is accepted only if its source is routed to this device, so a pod can only send with its own address.
    // The kernel uses the larger of this and `all`, and 2 is loose.
    (Ipv4Setting::ReversePathFilter, 1),
    // The router address, which is on the loopback device, is answered to the pod. The kernel uses the larger of this and
    // `all`, and takes a number that it does not know (`arp_ignore` of `net/ipv4/arp.c`) for "ignore nothing".
    (Ipv4Setting::ArpIgnore, 9),
];

/// The IPv4 sysctls of a device that [`HOST_SIDE`] names, in its order.
fn host_side_settings(conf: &InetDevConf) -> [u32; HOST_SIDE.len()] {
    HOST_SIDE.map(|(setting, _)| {
        let value = match setting {
            Ipv4Setting::Forwarding => conf.forwarding,
            Ipv4Setting::ProxyArp => conf.proxy_arp,
            Ipv4Setting::AcceptRedirects => conf.accept_redirects,
            Ipv4Setting::ReversePathFilter => conf.rp_filter,
            Ipv4Setting::AcceptSourceRoute => conf.accept_source_route,
            Ipv4Setting::ArpIgnore => conf.arp_ignore,
        };
        value.cast_unsigned()
    })
}

/// `IFLA_INET_CONF`, of which the packet crate omits zero values.
const IFLA_INET_CONF: u16 = 1;
const NLA_F_NESTED: u16 = 1 << 15;

/// Changes IPv4 sysctls of the device. As part of a batch it needs no file access and no writable `/proc`.
#[must_use]
pub fn set_ipv4(index: u32, settings: &[(Ipv4Setting, u32)]) -> Request {
    let attributes: Vec<DefaultNla> = settings
        .iter()
        .map(|(setting, value)| DefaultNla::new(*setting as u16, value.to_ne_bytes().to_vec()))
        .collect();
    let mut bytes = vec![0; attributes.as_slice().buffer_len()];
    attributes.as_slice().emit(&mut bytes);
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet(vec![AfSpecInet::Other(
        DefaultNla::new(IFLA_INET_CONF | NLA_F_NESTED, bytes),
    )])]));
    Request::new(RouteNetlinkMessage::SetLink(message), 0, format!("set {settings:?} on network device {index}"))
}

/// Disables the IPv6 link-local address of the device. A kernel without IPv6 returns `EAFNOSUPPORT`.
#[must_use]
pub fn no_ipv6_link_local(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(
        In6AddrGenMode::None,
    )])]));
    Request::new(
        RouteNetlinkMessage::SetLink(message),
        0,
        format!("set the IPv6 address generation of network device {index} to none"),
    )
}

fn question() -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    message
}

fn as_link(message: RouteNetlinkMessage) -> Option<Link> {
    match message {
        RouteNetlinkMessage::NewLink(message) => Some(Link::from_message(message)),
        _ => None,
    }
}

impl Handle {
    /// All devices of the namespace.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn links(&mut self) -> Result<Vec<Link>, NetlinkError> {
        self.dump(&RouteNetlinkMessage::GetLink(question()), "list network devices", |message| {
            as_link(message).into_iter().collect()
        })
    }

    /// The indexes of the devices whose IPv4 sysctls are those of [`HOST_SIDE`].
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn host_sides(&mut self) -> Result<BTreeSet<u32>, NetlinkError> {
        let wanted = HOST_SIDE.map(|(_, value)| value);
        let is_one = |attribute: &LinkAttribute| {
            let LinkAttribute::AfSpecUnspec(families) = attribute else { return false };
            families.iter().any(|family| {
                let AfSpecUnspec::Inet(inet) = family else { return false };
                inet.iter().any(|one| matches!(one, AfSpecInet::DevConf(conf) if host_side_settings(conf) == wanted))
            })
        };
        let found =
            self.dump(&RouteNetlinkMessage::GetLink(question()), "list network devices", |message| match message {
                RouteNetlinkMessage::NewLink(link) if link.attributes.iter().any(is_one) => vec![link.header.index],
                _ => Vec::new(),
            })?;
        Ok(found.into_iter().collect())
    }

    /// The device of this name, if it exists.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn link_by_name(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        // The kernel rejects longer names; no device can have one.
        if name.is_empty() || name.len() > NAME_LENGTH {
            return Ok(None);
        }
        let mut message = question();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.get(RouteNetlinkMessage::GetLink(message), &format!("find network device {name}"), as_link)
    }

    /// The device of this index, if it exists.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn link_by_index(&mut self, index: u32) -> Result<Option<Link>, NetlinkError> {
        let mut message = question();
        message.header.index = index;
        self.get(RouteNetlinkMessage::GetLink(message), &format!("find network device {index}"), as_link)
    }

    /// Waits until a device that was just set up transmits packets. The side of a veth pair that is set up first gets
    /// its carrier with the other, and its queue only when the kernel processes link-watch events
    /// (`net/core/link_watch.c`); until then all packets are dropped silently.
    ///
    /// A query of one device makes Linux 6.8 and newer process these events before it answers; for earlier versions
    /// this polls. Gives up after some seconds without a carrier, or if the device is deleted.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn wait_until_it_sends(&mut self, index: u32) -> Result<(), NetlinkError> {
        let until = Instant::now() + SENDS_WITHIN;
        while self.link_by_index(index)?.is_some_and(|link| !link.sends) && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }
}
