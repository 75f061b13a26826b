//! The pod's interface: a veth pair with addresses and routes.
//!
//! ```text
//!  pod's namespace                      node's namespace
//!  eth0  address/32 ◄─── veth ───► cst…  route address/32 dev cst… (source: router address)
//!  router dev eth0 (permanent neighbour)
//!  default via router
//! ```
//!
//! The router address itself is on the node's loopback device. The pod has a permanent neighbour entry for it, so none
//! of its packets waits for ARP; if that is flushed, the node answers for the router whatever its `arp_ignore` is
//! ([`link::HOST_SIDE`]). The node resolves the pod by ARP, because the pod's hardware address may be changed, as the chained
//! plugin `tuning` does.

use crate::netlink::namespace::Namespace;
use crate::netlink::targets::route_to_pod;
use crate::netlink::{Handle, Mac, NetlinkError, address, link, neighbour, route};
use ipnet::{IpNet, Ipv4Net};
use sha2::{Digest, Sha256};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;

/// Names and hardware addresses of a pair. They are derived from the attachment, so DEL does not need the result of
/// ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pair {
    /// Name of the host side.
    pub(super) host: String,
    /// Hardware address of the host side.
    pub(super) host_mac: Mac,
    /// Hardware address of the pod's side.
    pub(super) pod_mac: Mac,
}

impl Pair {
    pub(super) fn of(container_id: &str, ifname: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(container_id.as_bytes());
        // A container ID cannot contain a slash.
        hash.update(b"/");
        hash.update(ifname.as_bytes());
        let hash: [u8; 32] = hash.finalize().into();
        let hex: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        let [_, _, _, _, _, _, a, b, c, d, e, f, g, h, i, j, ..] = hash;
        Self {
            host: format!("cst{}", hex.get(..11).unwrap_or_default()),
            // 0x0a and 0x0e: locally administered unicast addresses.
            host_mac: [0x0a, a, b, c, d, e],
            pod_mac: [0x0e, f, g, h, i, j],
        }
    }
}

/// Parses a hardware address.
pub(super) fn parse_mac(text: &str) -> Option<Mac> {
    let mut mac = Mac::default();
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// Formats a hardware address.
pub(super) fn mac_text(mac: Mac) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// Result of creating a pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Made {
    /// It exists.
    Pair {
        /// Index of the host's side.
        host: u32,
        /// Index of the pod's side, in the pod's namespace.
        pod: u32,
    },
    /// A foreign device has the pod side's name.
    NameTaken {
        /// Kind of that device.
        kind: String,
    },
}

/// Netlink sockets in both namespaces.
pub(super) struct Ends {
    host: Handle,
    pod: Handle,
    namespace: Namespace,
}

fn host_net(address: Ipv4Addr) -> IpNet {
    IpNet::V4(Ipv4Net::from(address))
}

impl Ends {
    /// Opens both. Restores the calling thread's namespace.
    pub(super) fn open(netns: &str) -> Result<Self, NetlinkError> {
        let namespace = Namespace::open(netns)?;
        let host = Handle::open()?;
        let pod = {
            let _inside = namespace.visit()?;
            Handle::open()?
        };
        Ok(Self { host, pod, namespace })
    }

    /// Whether the pod's namespace is the node's own.
    pub(super) fn is_host(&self) -> Result<bool, NetlinkError> {
        self.namespace.is_same(&Namespace::current()?)
    }

    /// Creates the pair. Remains of a killed attempt are deleted first, but only searched for if the kernel reports
    /// that a name exists.
    pub(super) fn make(&mut self, pair: &Pair, ifname: &str, mtu: u32) -> Result<Made, NetlinkError> {
        let host = link::VethEnd { name: &pair.host, mac: pair.host_mac, namespace: None };
        let pod = link::VethEnd { name: ifname, mac: pair.pod_mac, namespace: Some(self.namespace.as_fd()) };
        let request = link::add_veth(host, pod, mtu);
        if !self.host.add(&request)? {
            self.host.remove(&link::delete_by_name(&pair.host))?;
            if let Some(taken) = self.pod.link_by_name(ifname)? {
                if taken.kind.as_deref() != Some("veth") {
                    return Ok(Made::NameTaken { kind: taken.kind.unwrap_or_else(|| "hardware".to_owned()) });
                }
                self.pod.remove(&link::delete(taken.index))?;
            }
            self.host.apply(&[request])?;
        }
        let made = self.host.link_by_name(&pair.host)?.ok_or_else(|| no_link(&pair.host))?;
        // The lower device (`IFLA_LINK`) of one side is the other side.
        Ok(Made::Pair { host: made.index, pod: made.lower.ok_or_else(|| no_link(ifname))? })
    }

    /// Address, routes and neighbour of the pod's side.
    pub(super) fn set_up_pod(
        &mut self,
        pair: &Pair,
        ifindex: u32,
        address: Ipv4Addr,
        router: Ipv4Addr,
    ) -> Result<(), NetlinkError> {
        let (own, gateway) = (host_net(address), IpAddr::V4(router));
        let boot = |route: route::Route| route::Route { protocol: route::PROTOCOL_BOOT, ..route };
        let everywhere = IpNet::V4(Ipv4Net::default());
        self.pod.apply(&[
            link::up(link::LOOPBACK),
            address::replace(ifindex, own),
            link::up(ifindex),
            neighbour::replace_permanent(ifindex, gateway, pair.host_mac),
            route::replace(&boot(route::Route::on_link(host_net(router), ifindex))),
            route::replace(&boot(route::Route::via(everywhere, gateway, ifindex))),
        ])
    }

    /// Sysctls and route of the host's side.
    pub(super) fn set_up_host(
        &mut self,
        ifindex: u32,
        address: Ipv4Addr,
        router: Ipv4Addr,
    ) -> Result<(), NetlinkError> {
        let to_pod = route_to_pod(address, ifindex, Some(router));
        let outcomes = self.host.apply_each(&[
            link::no_ipv6_link_local(ifindex),
            link::set_ipv4(ifindex, &link::HOST_SIDE),
            link::up(ifindex),
            route::replace(&to_pod),
        ])?;
        // A kernel without IPv6 needs no change.
        outcomes.into_iter().filter(|outcome| !outcome.as_ref().is_err_and(is_unknown_family)).collect()
    }

    /// Waits until both veth ends are operationally up, so that the pod's first packet is not dropped.
    pub(super) fn wait_until_they_send(&mut self, host: u32, pod: u32) -> Result<(), NetlinkError> {
        self.pod.wait_until_it_sends(pod)?;
        self.host.wait_until_it_sends(host)
    }

    /// The differences from the state after ADD. Additions of later plugins of the chain are ignored, and the hardware
    /// address must be that of the chain's result.
    pub(super) fn differences(
        &mut self,
        pair: &Pair,
        ifname: &str,
        pod_mac: Mac,
        address: Ipv4Addr,
        router: Ipv4Addr,
    ) -> Result<Vec<String>, NetlinkError> {
        let (own, gateway) = (host_net(address), IpAddr::V4(router));
        let mut found = Vec::new();
        match self.host.link_by_name(&pair.host)? {
            None => found.push(format!("host side {} does not exist", pair.host)),
            Some(link) => {
                link_differences(&format!("host side {}", pair.host), &link, pair.host_mac, &mut found);
                let routes = self.host.routes(Some(route::PROTOCOL_POD))?;
                if !routes.iter().any(|route| route.destination == own && route.ifindex == Some(link.index)) {
                    found.push(format!("the node has no route to {own} over {}", pair.host));
                }
            }
        }
        match self.pod.link_by_name(ifname)? {
            None => found.push(format!("the pod has no interface {ifname}")),
            Some(link) => {
                link_differences(&format!("the pod's interface {ifname}"), &link, pod_mac, &mut found);
                if !self.pod.addresses_of(link.index)?.iter().any(|found| found.net == own) {
                    found.push(format!("the pod's interface {ifname} has no address {own}"));
                }
                let routes = self.pod.routes(None)?;
                let over = |route: &&route::Route| route.ifindex == Some(link.index);
                if !routes.iter().filter(over).any(|route| route.destination == host_net(router)) {
                    found.push(format!("the pod has no route to {router} over {ifname}"));
                }
                let is_default =
                    |route: &route::Route| route.destination.prefix_len() == 0 && route.gateway == Some(gateway);
                if !routes.iter().filter(over).any(is_default) {
                    found.push(format!("the pod has no default route via {router}"));
                }
                // When a device's hardware address changes, the kernel flushes its neighbours; then the pod uses ARP.
                if pod_mac == pair.pod_mac && !is_permanent(&mut self.pod, link.index, gateway, pair.host_mac)? {
                    found.push(format!("the pod has no permanent neighbour {router} on {ifname}"));
                }
            }
        }
        Ok(found)
    }
}

fn link_differences(what: &str, link: &link::Link, mac: Mac, found: &mut Vec<String>) {
    if !link.up {
        found.push(format!("{what} is down"));
    }
    if link.mac != mac {
        found.push(format!("{what} has another hardware address than {}", mac_text(mac)));
    }
}

fn is_permanent(handle: &mut Handle, ifindex: u32, address: IpAddr, mac: Mac) -> Result<bool, NetlinkError> {
    let wanted = neighbour::Neighbour { ifindex, address, mac: Some(mac), permanent: true };
    Ok(handle.neighbours_of(ifindex)?.contains(&wanted))
}

fn is_unknown_family(error: &NetlinkError) -> bool {
    error.errno() == Some(nix::errno::Errno::EAFNOSUPPORT)
}

fn no_link(name: &str) -> NetlinkError {
    NetlinkError::NoLink { name: name.to_owned() }
}

/// Deletes a pair by its host side, if it exists. The pod's namespace need not exist.
pub(super) fn remove(pair: &Pair) -> Result<(), NetlinkError> {
    Handle::open()?.remove(&link::delete_by_name(&pair.host)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_the_attachment_and_fit_a_device() {
        let pair = Pair::of("abc", "eth0");
        assert_eq!(pair, Pair::of("abc", "eth0"));
        assert_ne!(pair.host, Pair::of("abc", "eth1").host);
        assert_eq!(pair.host.len(), 14);
        assert!(pair.host.starts_with("cst") && pair.host[3..].chars().all(|c| c.is_ascii_hexdigit()));
        for mac in [pair.host_mac, pair.pod_mac] {
            assert_eq!(mac[0] & 0b11, 0b10, "locally administered, not a group");
        }
        assert_eq!(mac_text([0x0a, 1, 2, 3, 4, 0xff]), "0a:01:02:03:04:ff");
        assert_eq!(parse_mac("0a:01:02:03:04:ff"), Some([0x0a, 1, 2, 3, 4, 0xff]));
        for text in ["", "0a:01:02:03:04", "0a:01:02:03:04:ff:00", "0a:01:02:03:04:fg"] {
            assert_eq!(parse_mac(text), None, "{text}");
        }
    }
}
