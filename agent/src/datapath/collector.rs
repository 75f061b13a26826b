//! Deletes expired NAT entries.
//!
//! The programs write time stamps to entries; the collector iterates over them in slices, so that a full map causes no
//! long pause. `cistern_core::masquerade::expire` decides what has expired. A flow whose pod has ended expires like one
//! that was reset: the programs deliver none of its packets any more.

use super::error::DatapathError;
use super::kernel;
use super::maps::{self, Walk, failed};
use super::pins::Pins;
use crate::blocking::Blocking;
use aya::maps::lpm_trie::Key;
use aya::maps::{HashMap, LpmTrie, Map, MapData, MapError, MapInfo};
use cistern_core::masquerade::expire::{FlowState, expired, under_pressure};
use cistern_core::masquerade::plan::ExcludedReason;
use cistern_ebpf_common::abi::{
    DeviceKey, DeviceValue, EndpointKey, EndpointValue, ExcludedAddress, ExcludedValue, FlowKey, FwdValue,
    InboundValue, OWNER_POD, RevKey, RevValue, SettingsValue, same_pod,
};
use cistern_ebpf_common::map;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

/// Approximate number of entries per call of [`Collector::step`]: the kernel returns whole buckets.
pub const SLICE: usize = 16_384;

/// Interval of walks over the maps.
const WALK_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of slices of a walk, and of walks while the map is nearly full.
const SLICE_INTERVAL: Duration = Duration::from_millis(100);

/// Result of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Collected {
    /// NAT entries examined.
    pub flows: u64,
    /// Expired entries deleted.
    pub expired: u64,
    /// Entries deleted because their address is no longer on the node.
    pub stale: u64,
    /// Inbound entries examined.
    pub inbound: u64,
    /// Inbound entries deleted.
    pub inbound_expired: u64,
    /// The iteration over both maps is complete; the next slice starts over.
    pub complete: bool,
}

/// The collector, with the position of its iteration. One per datapath.
#[derive(Debug)]
pub struct Collector {
    pins: Pins,
    flows: HashMap<MapData, RevKey, RevValue>,
    cache: HashMap<MapData, FlowKey, FwdValue>,
    inbound: HashMap<MapData, FlowKey, InboundValue>,
    flow_walk: Walk<RevKey, RevValue>,
    inbound_walk: Walk<FlowKey, InboundValue>,
    stage: Stage,
    capacity: u64,
    /// Entries seen in the current iteration, and in the previous one: the fill level of the map.
    seen: u64,
    seen_before: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Flows,
    Inbound,
}

impl Collector {
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let path = pins.map(map::REV);
        let info = MapInfo::from_pin(&path).map_err(failed(map::REV, format!("open its pin {}", path.display())))?;
        Ok(Self {
            pins: pins.clone(),
            flows: maps::hash(pins, map::REV)?,
            cache: maps::hash(pins, map::FWD)?,
            inbound: maps::hash(pins, map::INBOUND)?,
            flow_walk: Walk::open(pins, map::REV)?,
            inbound_walk: Walk::open(pins, map::INBOUND)?,
            stage: Stage::Flows,
            capacity: info.max_entries().into(),
            seen: 0,
            seen_before: 0,
        })
    }

    /// Whether the last complete iteration found the NAT map nearly full.
    #[must_use]
    pub fn under_pressure(&self) -> bool {
        under_pressure(self.seen_before.max(self.seen), self.capacity)
    }

    /// Deletes expired entries, until dropped.
    pub async fn run(mut self, port: Blocking) {
        loop {
            let outcome;
            (self, outcome) = port
                .run(move || {
                    let outcome = self.step();
                    (self, outcome)
                })
                .await;
            let pause = match outcome {
                Ok(collected) => {
                    if collected.expired + collected.stale + collected.inbound_expired > 0 {
                        tracing::debug!(flows = ?collected, "flows expired");
                    }
                    if collected.complete && !self.under_pressure() { WALK_INTERVAL } else { SLICE_INTERVAL }
                }
                Err(error) => {
                    tracing::error!(%error, "flows are not expired");
                    WALK_INTERVAL
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Processes one slice as of now.
    ///
    /// # Errors
    /// The kernel's error; the next slice starts over.
    pub fn step(&mut self) -> Result<Collected, DatapathError> {
        self.step_at(kernel::monotonic_seconds())
    }

    /// [`Collector::step`] as of `now`, in seconds of the monotonic clock.
    ///
    /// # Errors
    /// The kernel's error; the next slice starts over.
    pub fn step_at(&mut self, now: u32) -> Result<Collected, DatapathError> {
        let tcp_idle = self.tcp_idle()?;
        let mut collected = Collected::default();
        match self.stage {
            Stage::Flows => self.flow_slice(now, tcp_idle, &mut collected)?,
            Stage::Inbound => self.inbound_slice(now, tcp_idle, &mut collected)?,
        }
        Ok(collected)
    }

    fn tcp_idle(&self) -> Result<u32, DatapathError> {
        let data = maps::open(&self.pins, map::SETTINGS)?;
        let slot: aya::maps::Array<MapData, SettingsValue> = Map::from_map_data(data)
            .and_then(TryInto::try_into)
            .map_err(failed(map::SETTINGS, "use it as its type"))?;
        Ok(slot.get(&0, 0).map_err(failed(map::SETTINGS, "read it"))?.window)
    }

    fn flow_slice(&mut self, now: u32, tcp_idle: u32, collected: &mut Collected) -> Result<(), DatapathError> {
        let pressure = self.under_pressure();
        let own = OwnAddresses::open(&self.pins)?;
        let pods = Pods::open(&self.pins)?;
        let over_by_time = |key: &RevKey, value: &RevValue| -> Result<bool, DatapathError> {
            let state = if pods.have_ended(value) { FlowState::Reset } else { flow_state(key, value)? };
            Ok(expired(state, value.last_seen, now, tcp_idle, pressure))
        };
        let mut over = Vec::new();
        while collected.flows < SLICE as u64 {
            let Some(rows) = self.flow_walk.next_rows()? else {
                self.seen_before = self.seen;
                self.seen = 0;
                self.stage = Stage::Inbound;
                break;
            };
            for (key, value) in rows {
                collected.flows += 1;
                self.seen += 1;
                let stale = !own.contains(key.external)?;
                if stale || over_by_time(&key, &value)? {
                    over.push((key, stale));
                }
            }
        }
        for (key, stale) in over {
            // Read the entry again: a packet may have arrived since the slice was read.
            let value = match self.flows.get(&key, 0) {
                Ok(value) => value,
                Err(MapError::KeyNotFound) => continue,
                Err(error) => return Err(failed(map::REV, "read an entry")(error)),
            };
            if !stale && !over_by_time(&key, &value)? {
                continue;
            }
            // Delete the authoritative entry first: a packet in between misses the cache and creates a new entry. In
            // the other order, it would refill the cache from an entry that is then deleted.
            delete(&mut self.flows, map::REV, &key)?;
            delete(&mut self.cache, map::FWD, &key.flow(value.origin, value.origin_port))?;
            if stale {
                collected.stale += 1;
            } else {
                collected.expired += 1;
            }
        }
        Ok(())
    }

    fn inbound_slice(&mut self, now: u32, tcp_idle: u32, collected: &mut Collected) -> Result<(), DatapathError> {
        let mut over = Vec::new();
        while collected.inbound < SLICE as u64 {
            let Some(rows) = self.inbound_walk.next_rows()? else {
                self.stage = Stage::Flows;
                collected.complete = true;
                break;
            };
            for (key, value) in rows {
                collected.inbound += 1;
                if inbound_expired(&key, &value, now, tcp_idle)? {
                    over.push(key);
                }
            }
        }
        for key in over {
            delete(&mut self.inbound, map::INBOUND, &key)?;
            collected.inbound_expired += 1;
        }
        Ok(())
    }
}

fn flow_state(key: &RevKey, value: &RevValue) -> Result<FlowState, DatapathError> {
    let protocol = maps::protocol(map::REV, key.protocol)?;
    Ok(FlowState::of(protocol, maps::seen_bits(value.sent), maps::seen_bits(value.received)))
}

fn inbound_expired(key: &FlowKey, value: &InboundValue, now: u32, tcp_idle: u32) -> Result<bool, DatapathError> {
    let protocol = maps::protocol(map::INBOUND, key.protocol)?;
    let state = FlowState::of(protocol, maps::seen_bits(value.sent), maps::seen_bits(value.received));
    Ok(expired(state, value.last_seen, now, tcp_idle, false))
}

/// Deletes an entry; succeeds if there is none.
fn delete<K: aya::Pod, V: aya::Pod>(
    map: &mut HashMap<MapData, K, V>,
    name: &'static str,
    key: &K,
) -> Result<(), DatapathError> {
    match map.remove(key) {
        Err(MapError::SyscallError(error)) if error.io_error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result.map_err(failed(name, "delete an entry")),
    }
}

/// The generations of the pods of this node, by address.
struct Pods(BTreeMap<[u8; 4], u32>);

impl Pods {
    fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let map: HashMap<MapData, EndpointKey, EndpointValue> = maps::hash(pins, map::ENDPOINTS)?;
        let pods = map
            .iter()
            .map(|row| row.map(|(key, value)| (key.address, value.generation)))
            .collect::<Result<_, _>>()
            .map_err(failed(map::ENDPOINTS, "read its rows"))?;
        Ok(Self(pods))
    }

    /// Whether the pod that opened the flow no longer exists.
    fn have_ended(&self, flow: &RevValue) -> bool {
        let generation = self.0.get(&flow.origin);
        flow.owner == OWNER_POD && !generation.is_some_and(|pod| same_pod(flow.endpoint_generation, *pod))
    }
}

/// Valid translated addresses: those of the egress devices, and all others of the node, since a flow keeps its address
/// if its route changes to another device.
struct OwnAddresses {
    devices: BTreeSet<Ipv4Addr>,
    excluded: LpmTrie<MapData, ExcludedAddress, ExcludedValue>,
}

impl OwnAddresses {
    fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let map: HashMap<MapData, DeviceKey, DeviceValue> = maps::hash(pins, map::DEVICES)?;
        let devices = map
            .iter()
            .map(|row| row.map(|(_, value)| value.address.into()).map_err(failed(map::DEVICES, "read its rows")))
            .collect::<Result<_, _>>()?;
        let excluded = Map::from_map_data(maps::open(pins, map::EXCLUDED)?)
            .and_then(TryInto::try_into)
            .map_err(failed(map::EXCLUDED, "use it as its type"))?;
        Ok(Self { devices, excluded })
    }

    fn contains(&self, address: [u8; 4]) -> Result<bool, DatapathError> {
        if self.devices.contains(&Ipv4Addr::from(address)) {
            return Ok(true);
        }
        match self.excluded.get(&Key::new(32, ExcludedAddress { address }), 0) {
            Ok(value) => Ok(value.reason == ExcludedReason::OwnNode as u8),
            Err(MapError::KeyNotFound) => Ok(false),
            Err(error) => Err(failed(map::EXCLUDED, "look an address up")(error)),
        }
    }
}
