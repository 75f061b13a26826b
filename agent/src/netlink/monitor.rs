//! Watches the node's devices, addresses and routes.
//!
//! A netlink event only triggers a complete read. An overflow of the socket's buffer therefore loses nothing, and the
//! order of events does not matter. Reading the devices of 250 pods takes about a millisecond, and [`SETTLE`] limits
//! the rate.

use super::{Handle, NetlinkError};
use crate::blocking::Blocking;
use crate::tables::Table;
use crate::tables::rows::{Hop, LinkRow, NetworkRow, RouteRow};
use ipnet::{IpNet, Ipv4Net};
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

use super::route::{PROTOCOL_NODE, PROTOCOL_POD, Route, RouteKind};

/// Changes within this time after the first are read together.
pub const SETTLE: Duration = Duration::from_millis(50);

/// Interval of complete reads in the absence of events.
pub const RESYNC: Duration = Duration::from_secs(300);

/// `RTNLGRP_LINK`, `RTNLGRP_IPV4_IFADDR`, `RTNLGRP_IPV4_ROUTE`, `RTNLGRP_IPV4_RULE`, `RTNLGRP_IPV6_IFADDR`,
/// `RTNLGRP_IPV4_NETCONF` of `linux/rtnetlink.h`. The last one has the changes of `forwarding`, `rp_filter` and `proxy_arp`; of
/// other sysctls the kernel tells nothing.
const GROUPS: [u32; 6] = [1, 5, 7, 8, 9, 24];

/// An address that only a default route leads to on any but its own network. Nothing is sent to it: the kernel is asked
/// for its route.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(1, 1, 1, 1);

/// Reads devices, addresses and unicast IPv4 routes of the main table, and where the kernel sends what leaves the node.
///
/// # Errors
/// One of the lists cannot be read.
pub fn read(handle: &mut Handle) -> Result<NetworkRow, NetlinkError> {
    let mut addresses: BTreeMap<u32, Vec<IpNet>> = BTreeMap::new();
    for address in handle.addresses()? {
        addresses.entry(address.ifindex).or_default().push(address.net);
    }
    let links = handle.links()?.into_iter().map(|link| {
        let row = LinkRow {
            addresses: addresses.remove(&link.index).unwrap_or_default(),
            name: link.name,
            up: link.up,
            loopback: link.loopback,
            kind: link.kind.unwrap_or_default(),
            master: link.master,
            mtu: link.mtu,
            mac: link.mac,
        };
        (link.index, row)
    });
    let links = links.collect();
    let (routes, routing) = handle.routing()?;
    let mut routes: Vec<RouteRow> = routes.iter().filter_map(route_row).collect();
    routes.sort_unstable();
    let outside = looked_up(handle, OUTSIDE, None);
    let mut row = NetworkRow { links, routes, outside, sources: BTreeMap::new(), routing };
    for ifindex in addressed(&row) {
        if let Some(source) = looked_up(handle, reached_by(&row, ifindex), Some(ifindex)).and_then(|hop| hop.source) {
            row.sources.insert(ifindex, source);
        }
    }
    Ok(row)
}

/// The kernel's route. Without an answer the choices that are made without one remain; the lists are what matters.
fn looked_up(handle: &mut Handle, destination: Ipv4Addr, device: Option<u32>) -> Option<Hop> {
    handle.hop(destination, device).unwrap_or_else(|error| {
        tracing::warn!(%error, "a route cannot be looked up");
        None
    })
}

/// The devices by which packets may leave the node: those of others than pods, which have no address in the node's
/// namespace and no route through a gateway.
fn addressed(row: &NetworkRow) -> Vec<u32> {
    let gateways: BTreeSet<u32> =
        row.routes.iter().filter(|route| route.gateway.is_some()).filter_map(|route| route.ifindex).collect();
    let has_address = |link: &LinkRow| link.addresses.iter().any(|address| address.addr().is_ipv4());
    row.links
        .iter()
        .filter(|(index, link)| link.up && !link.loopback && (has_address(link) || gateways.contains(index)))
        .map(|(index, _)| *index)
        .collect()
}

/// A destination behind the device's widest route through a gateway.
fn reached_by(row: &NetworkRow, ifindex: u32) -> Ipv4Addr {
    let of_device = row.routes.iter().filter(|route| route.ifindex == Some(ifindex) && route.gateway.is_some());
    match of_device.map(|route| route.destination).min_by_key(Ipv4Net::prefix_len) {
        Some(network) if network.prefix_len() > 0 => network.hosts().next().unwrap_or(network.addr()),
        _ => OUTSIDE,
    }
}

fn route_row(route: &Route) -> Option<RouteRow> {
    let IpNet::V4(destination) = route.destination else { return None };
    let ipv4 = |address: Option<IpAddr>| match address {
        Some(IpAddr::V4(ip)) => Some(ip),
        _ => None,
    };
    let (gateway, source) = (ipv4(route.gateway), ipv4(route.source));
    let ours = [PROTOCOL_NODE, PROTOCOL_POD].contains(&route.protocol);
    (route.kind == RouteKind::Unicast).then_some(RouteRow {
        destination,
        ifindex: route.ifindex,
        gateway,
        source,
        ours,
    })
}

/// Publishes the network of this process's namespace at once and after each change, until cancelled. `reads` counts the
/// reads: it changes with every event, also when a row was added and removed between two reads, and with changes that
/// [`NetworkRow`] does not show.
///
/// # Errors
/// The socket for events fails, or the network cannot be read.
pub async fn follow(
    table: Arc<Table<(), NetworkRow>>,
    reads: Arc<Table<(), u64>>,
    port: Blocking,
    cancel: CancellationToken,
) -> Result<(), NetlinkError> {
    let failed = |action: &'static str| move |source: io::Error| NetlinkError::Socket { action, source };
    let mut changes = TokioSocket::new(NETLINK_ROUTE).map_err(failed("socket for changes"))?;
    changes.socket_mut().bind(&SocketAddr::new(0, 0)).map_err(failed("bind for changes"))?;
    for group in GROUPS {
        changes.socket_mut().add_membership(group).map_err(failed("subscribe to changes"))?;
    }
    let mut handle = Handle::open()?;
    let mut buffer = Vec::new();
    let mut count = 0_u64;
    loop {
        // Subscribe before reading, so that no change is missed.
        let (row, returned) = read_apart(&port, handle).await?;
        handle = returned;
        table.publish(BTreeMap::from([((), row)]));
        count = count.wrapping_add(1);
        reads.publish(BTreeMap::from([((), count)]));
        tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            () = tokio::time::sleep(RESYNC) => {}
            seen = next(&mut changes, &mut buffer) => seen?,
        }
        let settled = tokio::time::sleep(SETTLE);
        tokio::pin!(settled);
        loop {
            tokio::select! {
                () = cancel.cancelled() => return Ok(()),
                () = &mut settled => break,
                seen = next(&mut changes, &mut buffer) => seen?,
            }
        }
    }
}

async fn read_apart(port: &Blocking, mut handle: Handle) -> Result<(NetworkRow, Handle), NetlinkError> {
    port.run(move || read(&mut handle).map(|row| (row, handle))).await
}

/// Waits for an event. A lost event (`ENOBUFS`) counts as one.
async fn next(changes: &mut TokioSocket, buffer: &mut Vec<u8>) -> Result<(), NetlinkError> {
    buffer.clear();
    // The content is not used, so it may be truncated.
    buffer.reserve(4_096);
    match changes.recv(buffer).await {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(()),
        Err(source) => Err(NetlinkError::Socket { action: "receive changes", source }),
    }
}
