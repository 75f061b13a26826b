//! Routes and the router address as targets of the reconciler.

use super::{Handle, NetlinkError, address, link, route};
use crate::reconciler::BlockingOperations;
use crate::tables::rows::{PodRoute, RouteTarget};
use ipnet::{IpNet, Ipv4Net};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

/// The routes of the main table with [`route::PROTOCOL_NODE`]; others are ignored.
#[derive(Debug)]
pub struct Routes {
    handle: Handle,
}

impl Routes {
    /// Routes of the calling thread's network namespace.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self { handle: Handle::open()? })
    }
}

/// Metric of the unreachable route of the own pod CIDR: higher than that of a bridge's route for the same prefix, as
/// created by another plugin that uses us for IPAM.
const END_METRIC: u32 = 4096;

fn as_route(destination: Ipv4Net, target: RouteTarget) -> route::Route {
    let destination = IpNet::V4(destination);
    match target {
        RouteTarget::Via { gateway, ifindex } => route::Route::via(destination, IpAddr::V4(gateway), ifindex),
        RouteTarget::Unreachable => route::Route { metric: END_METRIC, ..route::Route::unreachable(destination) },
    }
}

fn as_target(route: &route::Route) -> Option<(Ipv4Net, RouteTarget)> {
    let IpNet::V4(destination) = route.destination else { return None };
    let target = match (route.kind, route.gateway, route.ifindex) {
        (route::RouteKind::Unicast, Some(IpAddr::V4(gateway)), Some(ifindex)) => RouteTarget::Via { gateway, ifindex },
        (route::RouteKind::Unreachable, _, _) => RouteTarget::Unreachable,
        _ => return None,
    };
    Some((destination, target))
}

impl BlockingOperations for Routes {
    type Key = Ipv4Net;
    type Value = RouteTarget;
    type Error = NetlinkError;

    fn update(&mut self, destination: &Ipv4Net, target: &RouteTarget) -> Result<(), NetlinkError> {
        let route = as_route(*destination, *target);
        match self.handle.apply(&[route::replace(&route)]) {
            // The kernel reaches the next hop by another table, or has the node's address as a /32: the main table does not
            // know that the next hop is on the device.
            Err(error) if route.gateway.is_some() && error.errno() == Some(Errno::ENETUNREACH) => {
                self.handle.apply(&[route::replace(&route::Route { onlink: true, ..route })])
            }
            other => other,
        }
    }

    fn delete(&mut self, destination: &Ipv4Net) -> Result<(), NetlinkError> {
        let ours = self.handle.routes(Some(route::PROTOCOL_NODE))?;
        let gone: Vec<_> =
            ours.iter().filter(|route| route.destination == IpNet::V4(*destination)).map(route::delete).collect();
        for outcome in self.handle.apply_each(&gone)? {
            match outcome {
                Err(error) if !error.is_missing() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn observe(&mut self) -> Result<BTreeMap<Ipv4Net, RouteTarget>, NetlinkError> {
        Ok(self.handle.routes(Some(route::PROTOCOL_NODE))?.iter().filter_map(as_target).collect())
    }
}

/// The routes to pods ([`route::PROTOCOL_POD`]) and the sysctls of their devices ([`link::HOST_SIDE`]), which the plugin sets
/// and which go with the devices. They are only put back: one of a pod whose ADD is still running is nobody else's to delete.
#[derive(Debug)]
pub struct PodRoutes {
    handle: Handle,
}

impl PodRoutes {
    /// Routes of the calling thread's network namespace.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self { handle: Handle::open()? })
    }
}

/// The route to a pod. Without `source` it does not depend on the router address.
#[must_use]
pub fn route_to_pod(address: Ipv4Addr, ifindex: u32, source: Option<Ipv4Addr>) -> route::Route {
    route::Route {
        protocol: route::PROTOCOL_POD,
        source: source.map(IpAddr::V4),
        ..route::Route::on_link(host(address), ifindex)
    }
}

impl BlockingOperations for PodRoutes {
    type Key = Ipv4Addr;
    type Value = PodRoute;
    type Error = NetlinkError;

    fn update(&mut self, address: &Ipv4Addr, route: &PodRoute) -> Result<(), NetlinkError> {
        match self.set(*address, *route) {
            // The device was deleted or set down just now, and its route with it: the row goes as soon as that is seen.
            Err(error) if matches!(error.errno(), Some(Errno::ENODEV | Errno::ENETDOWN)) => Ok(()),
            outcome => outcome,
        }
    }

    fn delete(&mut self, _address: &Ipv4Addr) -> Result<(), NetlinkError> {
        Ok(())
    }

    fn observe(&mut self) -> Result<BTreeMap<Ipv4Addr, PodRoute>, NetlinkError> {
        let routes = self.handle.routes(Some(route::PROTOCOL_POD))?;
        let complete = self.handle.host_sides()?;
        let row = |route: route::Route| match (route.destination, route.ifindex, route.source) {
            (IpNet::V4(net), Some(ifindex), Some(IpAddr::V4(source)))
                if net.prefix_len() == 32 && complete.contains(&ifindex) =>
            {
                Some((net.addr(), PodRoute { ifindex, source }))
            }
            _ => None,
        };
        Ok(routes.into_iter().filter_map(row).collect())
    }
}

impl PodRoutes {
    fn set(&mut self, address: Ipv4Addr, PodRoute { ifindex, source }: PodRoute) -> Result<(), NetlinkError> {
        self.handle.apply(&[link::set_ipv4(ifindex, &link::HOST_SIDE)])?;
        // Only our own route is replaced.
        let ours = self.handle.routes(Some(route::PROTOCOL_POD))?;
        let replaces = ours.iter().any(|route| route.destination == host(address));
        let set = |source| {
            let route = route_to_pod(address, ifindex, source);
            if replaces { route::replace(&route) } else { route::add(&route) }
        };
        match self.handle.apply(&[set(Some(source))]) {
            // The router address is not on the node now. Pods need the route all the same.
            Err(error) if error.errno() == Some(Errno::EINVAL) => {
                self.handle.apply(&[set(None)])?;
                Err(NetlinkError::Answer {
                    what: format!("set route to {address}"),
                    reason: format!("the source {source} is not on this node; the route is set without it"),
                })
            }
            Err(error) if error.is_exists() => {
                let foreign = self.handle.routes(None)?.into_iter().find(|route| route.destination == host(address));
                let Some(foreign) = foreign else { return Err(error) };
                Err(NetlinkError::Answer {
                    what: format!("set route to pod {address}"),
                    reason: format!(
                        "the route `{foreign} proto {}` of another program is in its place; `ip route del {foreign}` removes it",
                        foreign.protocol
                    ),
                })
            }
            outcome => outcome,
        }
    }
}

/// The router address on the loopback device: /32 with link scope, so that the kernel does not choose it as a source.
/// The scope also distinguishes it from foreign addresses.
#[derive(Debug)]
pub struct RouterAddress {
    handle: Handle,
}

impl RouterAddress {
    /// The loopback device of the calling thread's network namespace.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Self, NetlinkError> {
        Ok(Self { handle: Handle::open()? })
    }
}

/// Makes the routes to pods independent of the router address: the kernel deletes routes whose preferred source is
/// deleted.
///
/// # Errors
/// The kernel's error.
pub fn release_pod_routes() -> Result<(), NetlinkError> {
    let mut handle = Handle::open()?;
    let routes = handle.routes(Some(route::PROTOCOL_POD))?;
    let without: Vec<_> =
        routes.into_iter().map(|route| route::replace(&route::Route { source: None, ..route })).collect();
    handle.apply(&without)
}

fn host(address: Ipv4Addr) -> IpNet {
    IpNet::V4(Ipv4Net::from(address))
}

impl BlockingOperations for RouterAddress {
    type Key = Ipv4Addr;
    type Value = ();
    type Error = NetlinkError;

    fn update(&mut self, address: &Ipv4Addr, _value: &()) -> Result<(), NetlinkError> {
        let set = address::replace_in_scope(link::LOOPBACK, host(*address), address::Scope::Link);
        self.handle.apply(&[link::up(link::LOOPBACK), set])
    }

    fn delete(&mut self, address: &Ipv4Addr) -> Result<(), NetlinkError> {
        match self.handle.apply(&[address::delete(link::LOOPBACK, host(*address))]) {
            Err(error) if !error.is_missing() => Err(error),
            _ => Ok(()),
        }
    }

    fn observe(&mut self) -> Result<BTreeMap<Ipv4Addr, ()>, NetlinkError> {
        Ok(self
            .handle
            .addresses_of(link::LOOPBACK)?
            .into_iter()
            .filter(|address| address.scope == address::Scope::Link)
            .filter_map(|address| match address.net {
                IpNet::V4(net) if net.prefix_len() == 32 => Some((net.addr(), ())),
                _ => None,
            })
            .collect())
    }
}
