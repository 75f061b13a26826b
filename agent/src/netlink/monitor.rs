//! Watches the node's devices, addresses and routes.
//!
//! A netlink event only triggers a complete read. An overflow of the socket's buffer therefore loses nothing, and the
//! order of events does not matter. Reading the devices of 250 pods takes about a millisecond, and [`SETTLE`] limits
//! the rate.

use super::{Handle, NetlinkError};
use crate::blocking::Blocking;
use crate::tables::Table;
use crate::tables::rows::{LinkRow, NetworkRow, RouteRow};
use ipnet::IpNet;
use netlink_sys::{AsyncSocket, AsyncSocketExt, SocketAddr, TokioSocket, protocols::NETLINK_ROUTE};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

use super::route::{Route, RouteKind};

/// Changes within this time after the first are read together.
pub const SETTLE: Duration = Duration::from_millis(50);

/// Interval of complete reads in the absence of events.
pub const RESYNC: Duration = Duration::from_secs(300);

/// `RTNLGRP_LINK`, `RTNLGRP_IPV4_IFADDR`, `RTNLGRP_IPV4_ROUTE`, `RTNLGRP_IPV6_IFADDR` of `linux/rtnetlink.h`.
const GROUPS: [u32; 4] = [1, 5, 7, 9];

/// Reads devices, addresses and unicast IPv4 routes of the main table.
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
    let mut routes: Vec<RouteRow> = handle.routes(None)?.iter().filter_map(route_row).collect();
    routes.sort_unstable();
    Ok(NetworkRow { links, routes })
}

fn route_row(route: &Route) -> Option<RouteRow> {
    let IpNet::V4(destination) = route.destination else { return None };
    let ipv4 = |address: Option<IpAddr>| match address {
        Some(IpAddr::V4(ip)) => Some(ip),
        _ => None,
    };
    let (gateway, source) = (ipv4(route.gateway), ipv4(route.source));
    (route.kind == RouteKind::Unicast).then_some(RouteRow { destination, ifindex: route.ifindex, gateway, source })
}

/// Publishes the network of this process's namespace at once and after each change, until cancelled.
///
/// # Errors
/// The socket for events fails, or the network cannot be read.
pub async fn follow(
    table: Arc<Table<(), NetworkRow>>,
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
    loop {
        // Subscribe before reading, so that no change is missed.
        let (row, returned) = read_apart(&port, handle).await?;
        handle = returned;
        table.publish(BTreeMap::from([((), row)]));
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
