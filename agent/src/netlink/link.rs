//! Network devices.

use super::{Handle, Mac, NetlinkError, Request};
use netlink_packet_core::{DefaultNla, Emitable, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkExtentMask,
    LinkFlags, LinkInfo, LinkMessage, State,
};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

/// Index of the loopback device: the first that each network namespace gets.
pub const LOOPBACK: u32 = 1;

/// Names have at most this many bytes (`IFNAMSIZ` less the final zero).
pub const NAME_LENGTH: usize = 15;

/// The kernel puts off what has to be done for a device with a carrier by at most a second, and by as long as somebody
/// holds the rtnl lock.
const SENDS_WITHIN: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A network device as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index, which names it within its namespace for as long as it exists.
    pub index: u32,
    /// Name.
    pub name: String,
    /// `IFF_UP`: somebody wants it up.
    pub up: bool,
    /// Its operational state (RFC 2863) is "up": what is sent over it goes out. `up` and a carrier are not enough for
    /// that, see [`Handle::wait_until_it_sends`].
    pub sends: bool,
    /// `IFF_LOOPBACK`
    pub loopback: bool,
    /// `veth`, `bridge`, `bond` and the like; none for hardware.
    pub kind: Option<String>,
    /// Bridge or bond that owns it.
    pub master: Option<u32>,
    /// The device below it, or the other side of a veth pair. In another namespace that index counts there.
    pub lower: Option<u32>,
    /// That device is in another namespace (`IFLA_LINK_NETNSID`), which therefore exists.
    pub lower_is_elsewhere: bool,
    /// In bytes.
    pub mtu: u32,
    /// Hardware address; empty where there is none.
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

/// One side of a veth pair that is to be made.
#[derive(Debug, Clone, Copy)]
pub struct VethEnd<'a> {
    /// Name.
    pub name: &'a str,
    /// Hardware address. A given one also keeps udev from choosing its own, which would outdate neighbour entries.
    pub mac: Mac,
    /// Namespace that it is made in, open; none for that of the handle. Made there, the device needs no move, which
    /// would cost the kernel a grace period.
    pub namespace: Option<BorrowedFd<'a>>,
}

/// Makes a veth pair, both sides down. Refused as existing when either name is taken.
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

/// Sets the device up. One that is up stays so.
#[must_use]
pub fn up(index: u32) -> Request {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    Request::new(RouteNetlinkMessage::SetLink(message), 0, format!("set network device {index} up"))
}

/// Removes the device; a veth goes with its other side.
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

/// A setting below `/proc/sys/net/ipv4/conf/DEVICE/`, by its number in `include/uapi/linux/ip.h` (`IPV4_DEVCONF_*`).
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
}

/// `IFLA_INET_CONF`, whose values the packet crate leaves out when they are zero.
const IFLA_INET_CONF: u16 = 1;
const NLA_F_NESTED: u16 = 1 << 15;

/// Changes IPv4 settings of the device. Sent with other requests it costs no file access, and it needs no writable
/// `/proc`.
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

/// Keeps the kernel from giving the device an IPv6 link-local address when it is set up. A kernel without IPv6 refuses
/// with `EAFNOSUPPORT`.
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
    /// Every device of the namespace.
    ///
    /// # Errors
    /// When the list cannot be had.
    pub fn links(&mut self) -> Result<Vec<Link>, NetlinkError> {
        self.dump(&RouteNetlinkMessage::GetLink(question()), "list network devices", |message| {
            as_link(message).into_iter().collect()
        })
    }

    /// The device of this name, if there is one.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn link_by_name(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        // The kernel refuses a longer one; a device of such a name cannot be.
        if name.is_empty() || name.len() > NAME_LENGTH {
            return Ok(None);
        }
        let mut message = question();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.get(RouteNetlinkMessage::GetLink(message), &format!("find network device {name}"), as_link)
    }

    /// The device of this index, if there is one.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn link_by_index(&mut self, index: u32) -> Result<Option<Link>, NetlinkError> {
        let mut message = question();
        message.header.index = index;
        self.get(RouteNetlinkMessage::GetLink(message), &format!("find network device {index}"), as_link)
    }

    /// Waits until what is sent over a device that was just set up goes out. The side of a pair that is set up first gets
    /// its carrier with the other, and a queue for its packets only when the kernel comes to its list of carrier changes
    /// (`net/core/link_watch.c`): until then every packet is dropped, and its sender is told nothing.
    ///
    /// Asked about one device, Linux 6.8 and newer do that work before they answer; earlier ones are asked again. One that
    /// has no carrier after some seconds, or is gone, is left to itself.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn wait_until_it_sends(&mut self, index: u32) -> Result<(), NetlinkError> {
        let until = Instant::now() + SENDS_WITHIN;
        while self.link_by_index(index)?.is_some_and(|link| !link.sends) && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }
}
