//! The kernel of this machine as targets of the agent.

use super::node_status::{MapRows, POD_ROUTES, ROUTER_ADDRESS};
use super::targets::{DatapathTargets, Targets, blocking_target, kept_target};
use crate::blocking::Blocking;
use crate::clock::Clock;
use crate::datapath::{Capacities, Collector, Datapath, Events, Pins, View};
use crate::netlink::targets::{PodRoutes, RouterAddress, Routes};
use crate::netlink::{Handle, NetlinkError, link, monitor};
use crate::reconciler::BlockingOperations as _;
use crate::tables::Table;
use crate::tables::findings::{Findings, Found};
use crate::tables::rows::Hop;
use anyhow::{Context, bail};
use cistern_core::settings::Settings;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Opens all targets, and the kernel maps for the CLI. The only change is that the kernel programs' maps are created if
/// necessary.
///
/// # Errors
/// What is missing, with the remedy.
pub fn open(
    settings: &Settings,
    findings: &Findings,
    clock: Clock,
    port: &Blocking,
) -> anyhow::Result<(Targets, Option<MapRows>)> {
    let (datapath, maps) = if settings.enable_ipv4_masquerade {
        let (targets, maps) = open_datapath(settings, findings, port)?;
        (Some(targets), Some(maps))
    } else {
        remove_datapath(settings)?;
        (None, None)
    };
    let (reading, asking) = (port.clone(), port.clone());
    let reads = Arc::new(Table::new("network-reads"));
    let (of_routes, of_router) = (reads.reader(), reads.reader());
    let of_pods = reads.reader();
    let targets = Targets {
        network: Box::new(move |table, cancel| {
            Box::pin(async move { Ok(monitor::follow(table, reads, reading, cancel).await?) })
        }),
        hops: Arc::new(move |destinations| {
            let port = asking.clone();
            Box::pin(async move {
                let looked_up =
                    port.run(move || Handle::open().and_then(|mut handle| hops(&mut handle, &destinations)));
                Ok(looked_up.await?)
            })
        }),
        routes: kept_target(Routes::open()?, of_routes, "routes", findings, clock, port),
        pod_routes: kept_target(PodRoutes::open()?, of_pods, POD_ROUTES, findings, clock, port),
        router: kept_target(RouterAddress::open()?, of_router, ROUTER_ADDRESS, findings, clock, port),
        datapath,
    };
    Ok((targets, maps))
}

/// Removes the datapath of an earlier agent with masquerading, which would otherwise continue. Maps are recreated empty
/// if masquerading is enabled again.
fn remove_datapath(settings: &Settings) -> anyhow::Result<()> {
    let pins = Pins::new(settings.pin_root());
    if !pins.root().exists() {
        return Ok(());
    }
    let removed = pins
        .remove_all()
        .context("enable-ipv4-masquerade is false, but the kernel programs of before cannot be removed")?;
    if removed {
        tracing::warn!(
            "enable-ipv4-masquerade is false now: the kernel programs are removed, and flows that they translated end"
        );
    }
    Ok(())
}

/// Deletes a device by name, if it exists.
///
/// # Errors
/// The kernel's error.
pub fn remove_device(name: &str) -> Result<(), String> {
    let mut handle = Handle::open().map_err(|error| error.to_string())?;
    handle.remove(&link::delete_by_name(name)).map(|_| ()).map_err(|error| error.to_string())
}

fn open_datapath(
    settings: &Settings,
    findings: &Findings,
    port: &Blocking,
) -> anyhow::Result<(DatapathTargets, MapRows)> {
    let capacities = Capacities { flows: settings.bpf_nat_global_max, ..Capacities::default() };
    let (datapath, events) = Datapath::open(settings.pin_root(), capacities).context(
        "masquerading needs the kernel programs (enable-ipv4-masquerade=false starts without them); nothing was changed",
    )?;
    findings.add(
        "datapath",
        datapath.capacity_mismatches().iter().map(|kept| Found {
            reason: "map-capacity-kept",
            subject: kept.map.to_owned(),
            message: kept.to_string(),
        }),
    );
    let view = datapath.view()?;
    let collector = datapath.collector()?;
    let (collecting, pins) = (port.clone(), settings.pin_root());
    let targets = DatapathTargets {
        excluded: blocking_target(datapath.excluded()?, port),
        endpoints: blocking_target(datapath.endpoints()?, port),
        known_endpoints: datapath.endpoints()?.rows()?,
        devices: blocking_target(datapath.devices()?, port),
        known_devices: datapath.devices()?.observe()?,
        settings: blocking_target(datapath.settings(rand::random())?, port),
        attachments: blocking_target(datapath.attachments()?, port),
        background: Box::new(move |cancel| Box::pin(background(events, collector, pins, collecting, cancel))),
    };
    Ok((targets, Arc::new(move |name| rows(&view, name).map_err(|error| format!("{error:#}")))))
}

/// Expires flows and logs events of the kernel programs, until cancelled.
async fn background(
    events: Events,
    collector: Collector,
    pins: PathBuf,
    port: Blocking,
    cancel: CancellationToken,
) -> anyhow::Result<()> {
    tokio::select! {
        () = cancel.cancelled() => Ok(()),
        ended = events.forward() => Ok(ended?),
        () = pins_are_gone(&pins, &port) => bail!(
            "the pins below {} were removed under the running agent, and with them the kernel programs of the devices; the next \
             start loads them again",
            pins.display()
        ),
        () = collector.run(port.clone()) => Ok(()),
    }
}

/// Interval of the look at the pins: bpffs reports no changes.
const PINS_LOOK: Duration = Duration::from_secs(2);

/// Waits until the pins do not exist any more: deleted, or bpffs unmounted. Nothing else keeps the programs on the devices.
async fn pins_are_gone(pins: &Path, port: &Blocking) {
    loop {
        tokio::time::sleep(PINS_LOOK).await;
        let links = Pins::new(pins).links();
        if !port.run(move || links.is_dir()).await {
            return;
        }
    }
}

/// The rows of a kernel map as flat objects, for the CLI.
fn rows(view: &View, name: &str) -> anyhow::Result<Value> {
    let device = |ifindex: u32| {
        if ifindex == 0 {
            return "-".to_owned();
        }
        Handle::open()
            .and_then(|mut handle| handle.link_by_index(ifindex))
            .ok()
            .flatten()
            .map_or_else(|| ifindex.to_string(), |link| link.name)
    };
    let rows: Vec<Value> = match name {
        "ipmasq" => view.excluded()?.iter().map(|row| json!({"prefix": row.prefix, "reason": row.reason})).collect(),
        "endpoint" => view
            .endpoints()?
            .iter()
            .map(|(address, entry)| {
                json!({
                    "address": address,
                    "ifindex": entry.ifindex,
                    "device": device(entry.ifindex),
                    "masquerade": !entry.no_masquerade,
                    "generation": entry.generation,
                })
            })
            .collect(),
        "snat" => {
            let mut names = BTreeMap::new();
            view.flows()?
                .iter()
                .map(|flow| {
                    json!({
                        "protocol": flow.protocol,
                        "origin": flow.origin,
                        "external": flow.external,
                        "remote": flow.remote,
                        "owner": flow.owner,
                        "state": flow.state,
                        "age_seconds": flow.age_seconds,
                        "idle_seconds": flow.idle_seconds,
                        "device": names.entry(flow.ifindex).or_insert_with(|| device(flow.ifindex)).clone(),
                    })
                })
                .collect()
        }
        "counters" => view
            .counters()?
            .iter()
            .map(|(counter, packets)| json!({"counter": counter.name(), "packets": packets}))
            .collect(),
        other => anyhow::bail!("map {other:?}: expected ipmasq, snat, endpoint or counters"),
    };
    Ok(Value::Array(rows))
}

/// The kernel's routes to these destinations; those without one are left out.
fn hops(handle: &mut Handle, destinations: &[Ipv4Addr]) -> Result<BTreeMap<Ipv4Addr, Hop>, NetlinkError> {
    let mut found = BTreeMap::new();
    for destination in destinations {
        if let Some(hop) = handle.hop(*destination, None)? {
            found.insert(*destination, hop);
        }
    }
    Ok(found)
}

const RESERVED_PORTS: &str = "/proc/sys/net/ipv4/ip_local_reserved_ports";

/// `ip_local_reserved_ports`: ports reserved by the host. Empty without `/proc`.
#[must_use]
pub fn reserved_ports() -> Vec<(u16, u16)> {
    parse_ports(&std::fs::read_to_string(RESERVED_PORTS).unwrap_or_default())
}

/// Parses ports and ranges in the kernel's format: `8080,9148-9150`.
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
