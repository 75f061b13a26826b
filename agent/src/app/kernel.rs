//! The kernel of this machine as the agent's targets.

use super::Refused;
use super::node_status::MapRows;
use super::targets::{DatapathTargets, Targets, target};
use crate::controllers::endpoint::EndpointMap;
use crate::datapath::{Datapath, Endpoints};
use crate::netlink::targets::{RouterAddress, Routes};
use crate::netlink::{Handle, monitor};
use crate::tables::rows::NetworkRow;
use anyhow::Context;
use cistern_core::masquerade::plan::EndpointEntry;
use cistern_core::settings::Settings;
use std::net::Ipv4Addr;
use std::sync::Arc;

/// Opens everything that the agent acts on, and the rows of the kernel maps for the CLI. Nothing is changed by it but
/// that the kernel programs' maps exist.
///
/// # Errors
/// What is missing, with the fix.
pub fn open(settings: &Settings) -> anyhow::Result<(Targets, Option<MapRows>)> {
    let (datapath, maps) = if settings.enable_ipv4_masquerade {
        let (targets, maps) = open_datapath(settings)?;
        (Some(targets), Some(maps))
    } else {
        (None, None)
    };
    let targets = Targets {
        network: Box::new(|table, cancel| Box::pin(async move { Ok(monitor::follow(table, cancel).await?) })),
        routes: target(Routes::open()?),
        router: target(RouterAddress::open()?),
        datapath,
    };
    Ok((targets, maps))
}

/// Devices and routes of this node now.
///
/// # Errors
/// When the kernel cannot be asked.
pub fn network_now() -> anyhow::Result<NetworkRow> {
    Ok(monitor::read(&mut Handle::open()?)?)
}

const RESERVED_PORTS: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// `ip_local_reserved_ports`: ports that the host keeps for itself. Without `/proc` none are known.
#[must_use]
pub fn reserved_ports() -> Vec<(u16, u16)> {
    parse_ports(&std::fs::read_to_string(RESERVED_PORTS).unwrap_or_default())
}

/// Ports and ranges as the kernel writes them: `8080,9148-9150`.
fn parse_ports(text: &str) -> Vec<(u16, u16)> {
    text.trim()
        .split(',')
        .filter_map(|item| {
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            Some((first.parse().ok()?, last.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_ports("8080,9148-9150\n"), [(8080, 8080), (9148, 9150)]);
        assert_eq!(parse_ports("\n"), []);
    }
}
