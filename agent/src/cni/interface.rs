//! The pod's interface: a veth pair, and what makes packets find their way over it.
//!
//! ```text
//!  pod's namespace                      node's namespace
//!  eth0  address/32 ◄─── veth ───► cst…  route address/32 dev cst… (source: router address)
//!  router dev eth0 (permanent neighbour) permanent neighbour of the pod
//!  default via router
//! ```
//!
//! The router address itself is on the node's loopback device. Neighbours are permanent on both sides, so no packet waits
//! for ARP and no `arp_ignore` of the host stands in the way.

use crate::netlink::namespace::Namespace;
use crate::netlink::{Handle, Mac, NetlinkError, address, link, neighbour, route};
use ipnet::{IpNet, Ipv4Net};
use sha2::{Digest, Sha256};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;

/// Names and hardware addresses of a pair. They follow from the attachment alone, so DEL needs no result of ADD.
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
        // No container ID holds a slash.
        hash.update(b"/");
        hash.update(ifname.as_bytes());
        let hash: [u8; 32] = hash.finalize().into();
        let hex: String = hash.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        let [_, _, _, _, _, _, a, b, c, d, e, f, g, h, i, j, ..] = hash;
        Self {
            host: format!("cst{}", hex.get(..11).unwrap_or_default()),
            // 0x0a and 0x0e: locally administered, and no group address.
            host_mac: [0x0a, a, b, c, d, e],
            pod_mac: [0x0e, f, g, h, i, j],
        }
    }
}

/// Text of a hardware address.
pub(super) fn mac_text(mac: Mac) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// The two ends of the work: a socket in each namespace.
pub(super) struct Ends {
    host: Handle,
    pod: Handle,
    namespace: Namespace,
}

fn host_net(address: Ipv4Addr) -> IpNet {
    IpNet::V4(Ipv4Net::from(address))
}

impl Ends {
    /// Opens both. The calling thread is where it was afterwards.
    pub(super) fn open(netns: &str) -> Result<Self, NetlinkError> {
        let namespace = Namespace::open(netns)?;
        let host = Handle::open()?;
        let pod = {
            let _inside = namespace.visit()?;
            Handle::open()?
        };
        Ok(Self { host, pod, namespace })
    }

    /// Whether the pod's namespace is the node's own: an interface there would be the node's.
    pub(super) fn is_host(&self) -> Result<bool, NetlinkError> {
        self.namespace.is_same(&Namespace::current()?)
    }

    /// Removes what an attempt that was killed may have left.
    pub(super) fn remove_stale(&mut self, pair: &Pair, ifname: &str) -> Result<(), NetlinkError> {
        ignore_missing(self.host.apply(&[link::delete_by_name(&pair.host)]))?;
        ignore_missing(self.pod.apply(&[link::delete_by_name(ifname)]))
    }

    /// Makes the pair; answers the indexes of the host's and the pod's side.
    pub(super) fn make(&mut self, pair: &Pair, ifname: &str, mtu: u32) -> Result<(u32, u32), NetlinkError> {
        let host = link::VethEnd { name: &pair.host, mac: pair.host_mac, namespace: None };
        let pod = link::VethEnd { name: ifname, mac: pair.pod_mac, namespace: Some(self.namespace.as_fd()) };
        self.host.apply(&[link::add_veth(host, pod, mtu)])?;
        Ok((index(&mut self.host, &pair.host)?, index(&mut self.pod, ifname)?))
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

    /// Settings, route and neighbour of the host's side.
    pub(super) fn set_up_host(
        &mut self,
        pair: &Pair,
        ifindex: u32,
        address: Ipv4Addr,
        router: Ipv4Addr,
    ) -> Result<(), NetlinkError> {
        use link::Ipv4Setting::{AcceptRedirects, AcceptSourceRoute, Forwarding, ProxyArp, ReversePathFilter};
        let to_pod = route::Route {
            protocol: route::PROTOCOL_POD,
            source: Some(IpAddr::V4(router)),
            ..route::Route::on_link(host_net(address), ifindex)
        };
        // A kernel without IPv6 has nothing to switch off.
        let _ = self.host.apply(&[link::no_ipv6_link_local(ifindex)]);
        self.host.apply(&[
            link::set_ipv4(
                ifindex,
                &[
                    (Forwarding, 1),
                    (ProxyArp, 0),
                    (AcceptRedirects, 0),
                    (AcceptSourceRoute, 0),
                    // Strict: the pod's address comes from this device alone, whatever `all` says.
                    (ReversePathFilter, 1),
                ],
            ),
            link::up(ifindex),
            neighbour::replace_permanent(ifindex, IpAddr::V4(address), pair.pod_mac),
            route::replace(&to_pod),
        ])
    }

    /// What is not as ADD left it; empty when all is.
    pub(super) fn differences(
        &mut self,
        pair: &Pair,
        ifname: &str,
        address: Ipv4Addr,
        router: Ipv4Addr,
    ) -> Result<Vec<String>, NetlinkError> {
        let mut found = Vec::new();
        match self.host.link_by_name(&pair.host)? {
            None => found.push(format!("host side {} does not exist", pair.host)),
            Some(link) => {
                let wanted = host_net(address);
                let routes = self.host.routes(Some(route::PROTOCOL_POD))?;
                if !routes.iter().any(|route| route.destination == wanted && route.ifindex == Some(link.index)) {
                    found.push(format!("the node has no route to {wanted} over {}", pair.host));
                }
            }
        }
        match self.pod.link_by_name(ifname)? {
            None => found.push(format!("the pod has no interface {ifname}")),
            Some(link) => {
                let addresses = self.pod.addresses_of(link.index)?;
                if !addresses.iter().any(|found| found.net.addr() == IpAddr::V4(address)) {
                    found.push(format!("the pod's interface {ifname} has no address {address}"));
                }
                let default = self
                    .pod
                    .routes(None)?
                    .into_iter()
                    .any(|route| route.destination.prefix_len() == 0 && route.gateway == Some(IpAddr::V4(router)));
                if !default {
                    found.push(format!("the pod has no default route via {router}"));
                }
            }
        }
        Ok(found)
    }
}

fn index(handle: &mut Handle, name: &str) -> Result<u32, NetlinkError> {
    let link = handle.link_by_name(name)?;
    link.map(|link| link.index).ok_or_else(|| NetlinkError::NoLink { name: name.to_owned() })
}

fn ignore_missing(outcome: Result<(), NetlinkError>) -> Result<(), NetlinkError> {
    match outcome {
        Err(error) if error.is_missing() => Ok(()),
        other => other,
    }
}

/// Removes a pair by its host side; one that is gone is fine. The pod's namespace need not exist.
pub(super) fn remove(pair: &Pair) -> Result<(), NetlinkError> {
    ignore_missing(Handle::open()?.apply(&[link::delete_by_name(&pair.host)]))
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
    }
}
