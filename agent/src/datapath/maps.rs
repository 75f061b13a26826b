//! The only place that turns core values into the bytes of the maps, and back.

use super::error::DatapathError;
use super::kernel::{self, Cursor};
use super::pins::Pins;
use crate::reconciler::BlockingOperations;
use aya::Pod;
use aya::maps::lpm_trie::Key;
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray};
use cistern_core::masquerade::expire::{FlowOwner, FlowRecord, FlowState, InboundRecord, Protocol, Seen};
use cistern_core::masquerade::plan::{DatapathSettings, DeviceEntry, EndpointEntry, ExcludedReason, FlowPolicy};
use cistern_ebpf_common::abi::{
    CounterValue, DeviceKey, DeviceValue, ENDPOINT_EXEMPT, EndpointKey, EndpointValue, ExcludedAddress, ExcludedValue,
    FlowKey, ICMP, InboundValue, OWNER_HOST, PortWord, RevKey, RevValue, SETTING_IMMEDIATE, SETTING_MASQUERADE,
    SettingsValue, TCP, UDP, seen,
};
use cistern_ebpf_common::counter::Counter;
use cistern_ebpf_common::map;
use ipnet::Ipv4Net;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names a map and what was tried on it in an error.
pub(super) fn failed(map: &'static str, action: impl Into<String>) -> impl FnOnce(MapError) -> DatapathError {
    let action = action.into();
    move |source| DatapathError::Map { map, action, source: Box::new(source) }
}

/// Opens a pinned map.
pub(super) fn open(pins: &Pins, name: &'static str) -> Result<MapData, DatapathError> {
    let path = pins.map(name);
    MapData::from_pin(&path).map_err(failed(name, format!("open its pin {}", path.display())))
}

fn typed<T>(pins: &Pins, name: &'static str) -> Result<T, DatapathError>
where
    T: TryFrom<Map, Error = MapError>,
{
    let data = open(pins, name)?;
    Map::from_map_data(data).and_then(T::try_from).map_err(failed(name, "use it as its type"))
}

/// Opens a pinned hash map, LRU or not.
pub(super) fn hash<K: Pod, V: Pod>(pins: &Pins, name: &'static str) -> Result<HashMap<MapData, K, V>, DatapathError> {
    typed(pins, name)
}

/// `errno` of a failed map operation.
fn errno(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(error) => error.io_error.raw_os_error(),
        _ => None,
    }
}

/// Turns "there is none" into `None`.
fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) if errno(&error) == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Tells a full map from other failures of an insertion. Hash maps answer `E2BIG`, tries `ENOSPC`.
fn inserted(map: &'static str, key: impl fmt::Display, result: Result<(), MapError>) -> Result<(), DatapathError> {
    result.map_err(|error| match errno(&error) {
        Some(libc::E2BIG | libc::ENOSPC) => DatapathError::Full { map, key: key.to_string() },
        _ => failed(map, format!("write {key}"))(error),
    })
}

/// The slot of node-wide settings. Several handles write fields of it, hence the lock.
struct Slot {
    array: Array<MapData, SettingsValue>,
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

impl Slot {
    fn read(&self) -> Result<SettingsValue, DatapathError> {
        self.array.get(&0, 0).map_err(failed(map::SETTINGS, "read it"))
    }

    fn write(&mut self, value: SettingsValue) -> Result<(), DatapathError> {
        self.array.set(0, value, 0).map_err(failed(map::SETTINGS, "write it"))
    }

    /// Makes cached flows look at their address again. To be called after the change.
    fn addresses_changed(&mut self) -> Result<(), DatapathError> {
        let mut value = self.read()?;
        value.generation = value.generation.wrapping_add(1);
        self.write(value)
    }

    /// Opens the window in which TCP packets without an entry are taken for packets of a flow that was not translated.
    /// To be called before the change that makes it necessary.
    fn policy_changes(&mut self) -> Result<(), DatapathError> {
        let mut value = self.read()?;
        value.policy_changed = kernel::monotonic_seconds();
        self.write(value)
    }
}

/// The settings slot as the handles of one datapath share it.
#[derive(Debug, Clone)]
pub(super) struct SharedSlot(Arc<Mutex<Slot>>);

impl SharedSlot {
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        Ok(Self(Arc::new(Mutex::new(Slot { array: typed(pins, map::SETTINGS)? }))))
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        // The slot is written whole or not at all, so that a panic elsewhere leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The destinations that keep the pod's address.
#[derive(Debug)]
pub struct Excluded {
    trie: LpmTrie<MapData, ExcludedAddress, ExcludedValue>,
    flows: HashMap<MapData, RevKey, RevValue>,
    slot: SharedSlot,
    /// What the trie holds. Its look-up finds the longest prefix, so that it cannot be asked for one row.
    rows: BTreeMap<Ipv4Net, ExcludedValue>,
}

fn trie_key(prefix: Ipv4Net) -> Key<ExcludedAddress> {
    Key::new(u32::from(prefix.prefix_len()), ExcludedAddress { address: prefix.network().octets() })
}

/// Reads a whole trie.
fn trie_rows(
    trie: &LpmTrie<MapData, ExcludedAddress, ExcludedValue>,
) -> Result<BTreeMap<Ipv4Net, ExcludedValue>, DatapathError> {
    trie.iter()
        .map(|row| {
            let (key, value) = row.map_err(failed(map::EXCLUDED, "read its rows"))?;
            let address = Ipv4Addr::from(key.data().address);
            let length = key.prefix_len();
            let prefix = u8::try_from(length).ok().and_then(|length| Ipv4Net::new(address, length).ok());
            prefix.map(|prefix| (prefix, value)).ok_or(DatapathError::Foreign {
                map: map::EXCLUDED,
                key: address.to_string(),
                field: "prefix length",
                value: length.into(),
            })
        })
        .collect()
}

fn reason(prefix: &Ipv4Net, value: &ExcludedValue) -> Result<ExcludedReason, DatapathError> {
    ExcludedReason::from_number(value.reason).ok_or(DatapathError::Foreign {
        map: map::EXCLUDED,
        key: prefix.to_string(),
        field: "reason",
        value: value.reason.into(),
    })
}

impl Excluded {
    pub(super) fn open(pins: &Pins, slot: SharedSlot) -> Result<Self, DatapathError> {
        let trie = typed(pins, map::EXCLUDED)?;
        let rows = trie_rows(&trie)?;
        Ok(Self { trie, flows: hash(pins, map::REV)?, slot, rows })
    }

    /// Excludes a prefix; host bits are masked. A prefix that is excluded already only changes its reason.
    ///
    /// # Errors
    /// [`DatapathError::Full`], or the kernel's error.
    pub fn insert(&mut self, prefix: Ipv4Net, reason: ExcludedReason) -> Result<(), DatapathError> {
        let prefix = prefix.trunc();
        let since = match self.rows.get(&prefix) {
            Some(row) if row.reason == reason as u8 => return Ok(()),
            Some(row) => row.since,
            // Without any translated flow there is none that was translated to this prefix.
            None if self.flows.keys().next().is_none() => 0,
            None => kernel::monotonic_seconds(),
        };
        let value = ExcludedValue { since, reason: reason as u8, zero: [0; 3] };
        inserted(map::EXCLUDED, prefix, self.trie.insert(&trie_key(prefix), value, 0))?;
        let before = self.rows.insert(prefix, value);
        if before.is_some_and(|before| before.reason == ExcludedReason::OwnNode as u8) {
            self.slot.lock().addresses_changed()?;
        }
        Ok(())
    }

    /// Excludes a prefix no longer. An absent one is a success.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&mut self, prefix: Ipv4Net) -> Result<(), DatapathError> {
        let prefix = prefix.trunc();
        if !self.rows.contains_key(&prefix) {
            return Ok(());
        }
        self.slot.lock().policy_changes()?;
        found(self.trie.remove(&trie_key(prefix))).map_err(failed(map::EXCLUDED, format!("delete {prefix}")))?;
        self.rows.remove(&prefix);
        self.slot.lock().addresses_changed()
    }
}

impl BlockingOperations for Excluded {
    type Key = Ipv4Net;
    type Value = ExcludedReason;
    type Error = DatapathError;

    fn update(&mut self, key: &Ipv4Net, value: &ExcludedReason) -> Result<(), DatapathError> {
        self.insert(*key, *value)
    }

    fn delete(&mut self, key: &Ipv4Net) -> Result<(), DatapathError> {
        self.remove(*key)
    }

    fn observe(&mut self) -> Result<BTreeMap<Ipv4Net, ExcludedReason>, DatapathError> {
        self.rows = trie_rows(&self.trie)?;
        self.rows.iter().map(|(prefix, value)| Ok((*prefix, reason(prefix, value)?))).collect()
    }
}

/// The pods of this node.
#[derive(Debug)]
pub struct Endpoints {
    map: HashMap<MapData, EndpointKey, EndpointValue>,
    slot: SharedSlot,
}

fn endpoint_value(entry: EndpointEntry) -> EndpointValue {
    EndpointValue { ifindex: entry.ifindex, flags: if entry.no_masquerade { ENDPOINT_EXEMPT } else { 0 } }
}

fn endpoint_entry(value: EndpointValue) -> EndpointEntry {
    EndpointEntry { ifindex: value.ifindex, no_masquerade: value.flags & ENDPOINT_EXEMPT != 0 }
}

impl Endpoints {
    pub(super) fn open(pins: &Pins, slot: SharedSlot) -> Result<Self, DatapathError> {
        Ok(Self { map: hash(pins, map::ENDPOINTS)?, slot })
    }

    /// Makes a pod known. It is in force when this returns, which is what an ADD waits for.
    ///
    /// # Errors
    /// [`DatapathError::Full`], or the kernel's error.
    pub fn insert(&mut self, address: Ipv4Addr, entry: EndpointEntry) -> Result<(), DatapathError> {
        let key = EndpointKey { address: address.octets() };
        let before = found(self.map.get(&key, 0)).map_err(failed(map::ENDPOINTS, format!("read {address}")))?;
        if before.is_some_and(|before| endpoint_entry(before).no_masquerade) && !entry.no_masquerade {
            self.slot.lock().policy_changes()?;
        }
        inserted(map::ENDPOINTS, address, self.map.insert(key, endpoint_value(entry), 0))
    }

    /// Forgets a pod. An absent one is a success. Its NAT entries end by their own time.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&mut self, address: Ipv4Addr) -> Result<(), DatapathError> {
        let key = EndpointKey { address: address.octets() };
        found(self.map.remove(&key)).map_err(failed(map::ENDPOINTS, format!("delete {address}")))?;
        Ok(())
    }

    fn rows(&self) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, DatapathError> {
        endpoint_rows(&self.map)
    }
}

fn endpoint_rows(
    map: &HashMap<MapData, EndpointKey, EndpointValue>,
) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, DatapathError> {
    map.iter()
        .map(|row| {
            let (key, value) = row.map_err(failed(map::ENDPOINTS, "read its rows"))?;
            Ok((key.address.into(), endpoint_entry(value)))
        })
        .collect()
}

impl BlockingOperations for Endpoints {
    type Key = Ipv4Addr;
    type Value = EndpointEntry;
    type Error = DatapathError;

    fn update(&mut self, key: &Ipv4Addr, value: &EndpointEntry) -> Result<(), DatapathError> {
        self.insert(*key, *value)
    }

    fn delete(&mut self, key: &Ipv4Addr) -> Result<(), DatapathError> {
        self.remove(*key)
    }

    fn observe(&mut self) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, DatapathError> {
        self.rows()
    }
}

/// The egress devices and their addresses, by `ifindex`.
#[derive(Debug)]
pub struct Devices {
    map: HashMap<MapData, DeviceKey, DeviceValue>,
    slot: SharedSlot,
}

fn device_rows(map: &HashMap<MapData, DeviceKey, DeviceValue>) -> Result<BTreeMap<u32, DeviceEntry>, DatapathError> {
    map.iter()
        .map(|row| {
            let (key, value) = row.map_err(failed(map::DEVICES, "read its rows"))?;
            let address = Ipv4Addr::from(value.address);
            Ok((key.ifindex, DeviceEntry { address: (!address.is_unspecified()).then_some(address) }))
        })
        .collect()
}

impl Devices {
    pub(super) fn open(pins: &Pins, slot: SharedSlot) -> Result<Self, DatapathError> {
        Ok(Self { map: hash(pins, map::DEVICES)?, slot })
    }

    /// Sets the address that pods leave under by a device.
    ///
    /// # Errors
    /// [`DatapathError::Full`], or the kernel's error.
    pub fn insert(&mut self, ifindex: u32, entry: DeviceEntry) -> Result<(), DatapathError> {
        let value = DeviceValue { address: entry.address.unwrap_or(Ipv4Addr::UNSPECIFIED).octets() };
        inserted(map::DEVICES, ifindex, self.map.insert(DeviceKey { ifindex }, value, 0))?;
        self.slot.lock().addresses_changed()
    }

    /// Forgets a device. An absent one is a success.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        found(self.map.remove(&DeviceKey { ifindex })).map_err(failed(map::DEVICES, format!("delete {ifindex}")))?;
        self.slot.lock().addresses_changed()
    }
}

impl BlockingOperations for Devices {
    type Key = u32;
    type Value = DeviceEntry;
    type Error = DatapathError;

    fn update(&mut self, key: &u32, value: &DeviceEntry) -> Result<(), DatapathError> {
        self.insert(*key, *value)
    }

    fn delete(&mut self, key: &u32) -> Result<(), DatapathError> {
        self.remove(*key)
    }

    fn observe(&mut self) -> Result<BTreeMap<u32, DeviceEntry>, DatapathError> {
        device_rows(&self.map)
    }
}

/// The node-wide settings: one row.
pub struct Settings {
    slot: SharedSlot,
    ports: Array<MapData, PortWord>,
    fresh_key: [u64; 2],
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key stays out: who knows it can aim flows at one port.
        f.debug_struct("Settings").finish_non_exhaustive()
    }
}

/// The reserved ports as the words of the bitmap.
fn port_words(reserved: &[(u16, u16)]) -> [u64; map::PORT_WORDS] {
    let mut words = [0_u64; map::PORT_WORDS];
    for (first, last) in reserved {
        for port in *first..=*last {
            if let Some(word) = words.get_mut(usize::from(port >> 6)) {
                *word |= 1 << (port & 63);
            }
        }
    }
    words
}

/// The bitmap as inclusive ranges, sorted and apart.
fn port_ranges(words: &[u64]) -> Vec<(u16, u16)> {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for port in 0..=u16::MAX {
        let set = words.get(usize::from(port >> 6)).is_some_and(|word| word >> (port & 63) & 1 != 0);
        match ranges.last_mut() {
            _ if !set => {}
            Some((_, last)) if last.checked_add(1) == Some(port) => *last = port,
            _ => ranges.push((port, port)),
        }
    }
    ranges
}

impl Settings {
    pub(super) fn open(pins: &Pins, slot: SharedSlot, fresh_key: [u64; 2]) -> Result<Self, DatapathError> {
        Ok(Self { slot, ports: typed(pins, map::PORTS)?, fresh_key })
    }

    /// Puts settings in force.
    ///
    /// The first settings of new maps, and those that switch masquerading on, open the window for TCP flows that were
    /// not translated before.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set(&mut self, settings: &DatapathSettings) -> Result<(), DatapathError> {
        for (index, word) in (0..).zip(port_words(&settings.ports_reserved)) {
            let before = self.ports.get(&index, 0).map_err(failed(map::PORTS, "read it"))?;
            if before.reserved != word {
                self.ports.set(index, PortWord { reserved: word }, 0).map_err(failed(map::PORTS, "write it"))?;
            }
        }
        let mut slot = self.slot.lock();
        let before = slot.read()?;
        let fresh = before.hash_key == [0, 0];
        let mut flags = 0;
        if settings.masquerade {
            flags |= SETTING_MASQUERADE;
        }
        if settings.flow_policy == FlowPolicy::Immediate {
            flags |= SETTING_IMMEDIATE;
        }
        let starts = settings.masquerade && before.flags & SETTING_MASQUERADE == 0;
        slot.write(SettingsValue {
            hash_key: if fresh { self.fresh_key } else { before.hash_key },
            flags,
            window: settings.tcp_idle_seconds,
            policy_changed: if starts { kernel::monotonic_seconds() } else { before.policy_changed },
            generation: before.generation,
            port_first: settings.port_min,
            port_last: settings.port_max,
            zero: 0,
        })
    }

    /// The settings in force; `None` when none were ever set.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn get(&self) -> Result<Option<DatapathSettings>, DatapathError> {
        let value = self.slot.lock().read()?;
        settings_of(value, &self.ports)
    }
}

fn settings_of(
    value: SettingsValue,
    ports: &Array<MapData, PortWord>,
) -> Result<Option<DatapathSettings>, DatapathError> {
    if value.hash_key == [0, 0] {
        return Ok(None);
    }
    let words: Vec<u64> = ports
        .iter()
        .map(|word| word.map(|word| word.reserved).map_err(failed(map::PORTS, "read it")))
        .collect::<Result<_, _>>()?;
    Ok(Some(DatapathSettings {
        masquerade: value.flags & SETTING_MASQUERADE != 0,
        flow_policy: if value.flags & SETTING_IMMEDIATE == 0 { FlowPolicy::Sticky } else { FlowPolicy::Immediate },
        port_min: value.port_first,
        port_max: value.port_last,
        ports_reserved: port_ranges(&words),
        tcp_idle_seconds: value.window,
    }))
}

impl BlockingOperations for Settings {
    type Key = ();
    type Value = DatapathSettings;
    type Error = DatapathError;

    fn update(&mut self, _key: &(), value: &DatapathSettings) -> Result<(), DatapathError> {
        self.set(value)
    }

    /// Switches masquerading off: a slot of an array cannot be absent.
    fn delete(&mut self, _key: &()) -> Result<(), DatapathError> {
        let mut slot = self.slot.lock();
        let mut value = slot.read()?;
        value.flags &= !SETTING_MASQUERADE;
        slot.write(value)
    }

    fn observe(&mut self) -> Result<BTreeMap<(), DatapathSettings>, DatapathError> {
        Ok(self.get()?.map(|settings| ((), settings)).into_iter().collect())
    }
}

/// An excluded destination as people and programs read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ExcludedRow {
    /// The destinations.
    pub prefix: Ipv4Net,
    /// Why they keep the pod's address.
    pub reason: ExcludedReason,
}

/// Reads of everything in the maps. It needs the pins alone, hence works while no agent runs.
#[derive(Debug)]
pub struct View {
    pins: Pins,
}

impl View {
    /// A view of what is pinned.
    ///
    /// # Errors
    /// When nothing is pinned there, or it cannot be opened.
    pub fn open(pins: &Pins) -> Result<Self, DatapathError> {
        open(pins, map::SETTINGS)?;
        Ok(Self { pins: pins.clone() })
    }

    /// Excluded destinations, sorted.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn excluded(&self) -> Result<Vec<ExcludedRow>, DatapathError> {
        let rows = trie_rows(&typed(&self.pins, map::EXCLUDED)?)?;
        rows.iter().map(|(prefix, value)| Ok(ExcludedRow { prefix: *prefix, reason: reason(prefix, value)? })).collect()
    }

    /// Pods by address.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn endpoints(&self) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, DatapathError> {
        endpoint_rows(&hash(&self.pins, map::ENDPOINTS)?)
    }

    /// Egress devices by `ifindex`.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn devices(&self) -> Result<BTreeMap<u32, DeviceEntry>, DatapathError> {
        device_rows(&hash(&self.pins, map::DEVICES)?)
    }

    /// The settings in force; `None` when none were ever set.
    ///
    /// # Errors
    /// When the maps cannot be read.
    pub fn settings(&self) -> Result<Option<DatapathSettings>, DatapathError> {
        let slot: Array<MapData, SettingsValue> = typed(&self.pins, map::SETTINGS)?;
        let value = slot.get(&0, 0).map_err(failed(map::SETTINGS, "read it"))?;
        settings_of(value, &typed(&self.pins, map::PORTS)?)
    }

    /// NAT entries, sorted.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn flows(&self) -> Result<Vec<FlowRecord>, DatapathError> {
        let now = kernel::monotonic_seconds();
        let mut records = Vec::new();
        let mut walk = Walk::<RevKey, RevValue>::open(&self.pins, map::REV)?;
        while let Some(rows) = walk.next_rows()? {
            for (key, value) in rows {
                records.push(flow_record(key, value, now)?);
            }
        }
        records.sort_unstable();
        Ok(records)
    }

    /// Flows opened from outside, sorted.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn inbound(&self) -> Result<Vec<InboundRecord>, DatapathError> {
        let now = kernel::monotonic_seconds();
        let mut records = Vec::new();
        let mut walk = Walk::<FlowKey, InboundValue>::open(&self.pins, map::INBOUND)?;
        while let Some(rows) = walk.next_rows()? {
            for (key, value) in rows {
                let protocol = protocol(map::INBOUND, key.protocol)?;
                records.push(InboundRecord {
                    protocol,
                    pod: end(key.source, key.source_port),
                    remote: end(key.destination, key.destination_port),
                    state: FlowState::of(protocol, seen_bits(value.sent), seen_bits(value.received)),
                    age_seconds: now.saturating_sub(value.created),
                    idle_seconds: now.saturating_sub(value.last_seen),
                    ifindex: value.ifindex,
                });
            }
        }
        records.sort_unstable();
        Ok(records)
    }

    /// Packets by kind, summed over all CPUs, in the order of [`Counter`].
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn counters(&self) -> Result<Vec<(Counter, u64)>, DatapathError> {
        let map: PerCpuArray<MapData, CounterValue> = typed(&self.pins, map::COUNTERS)?;
        // The map of an older build may have fewer slots than this one has kinds.
        Counter::ALL
            .into_iter()
            .map(|kind| {
                if kind as u32 >= map.len() {
                    return Ok((kind, 0));
                }
                let values = map.get(&(kind as u32), 0).map_err(failed(map::COUNTERS, "read it"))?;
                Ok((kind, values.iter().map(|value| value.packets).sum()))
            })
            .collect()
    }
}

pub(super) fn protocol(map: &'static str, number: u8) -> Result<Protocol, DatapathError> {
    match number {
        TCP => Ok(Protocol::Tcp),
        UDP => Ok(Protocol::Udp),
        ICMP => Ok(Protocol::Icmp),
        _ => Err(DatapathError::Foreign { map, key: "of a flow".to_owned(), field: "protocol", value: number.into() }),
    }
}

pub(super) fn seen_bits(bits: u8) -> Seen {
    Seen { any: bits & seen::ANY != 0, fin: bits & seen::FIN != 0, rst: bits & seen::RST != 0 }
}

fn end(address: [u8; 4], port: [u8; 2]) -> SocketAddrV4 {
    SocketAddrV4::new(address.into(), u16::from_be_bytes(port))
}

fn flow_record(key: RevKey, value: RevValue, now: u32) -> Result<FlowRecord, DatapathError> {
    let protocol = protocol(map::REV, key.protocol)?;
    Ok(FlowRecord {
        protocol,
        origin: end(value.origin, value.origin_port),
        remote: end(key.remote, key.remote_port),
        external: end(key.external, key.external_port),
        owner: if value.owner == OWNER_HOST { FlowOwner::Host } else { FlowOwner::Pod },
        state: FlowState::of(protocol, seen_bits(value.sent), seen_bits(value.received)),
        age_seconds: now.saturating_sub(value.created),
        idle_seconds: now.saturating_sub(value.last_seen),
        ifindex: value.ifindex,
    })
}

/// A walk over a hash map, many entries for each system call.
#[derive(Debug)]
pub(super) struct Walk<K, V> {
    name: &'static str,
    data: MapData,
    keys: Vec<K>,
    values: Vec<V>,
    cursor: Option<Cursor>,
    over: bool,
}

/// Entries read at a time at first.
const BATCH: usize = 2_048;

impl<K: Pod, V: Pod> Walk<K, V> {
    pub(super) fn open(pins: &Pins, name: &'static str) -> Result<Self, DatapathError> {
        Ok(Self { name, data: open(pins, name)?, keys: Vec::new(), values: Vec::new(), cursor: None, over: false })
    }

    /// The next entries; `None` once after the last, and then from the start again.
    pub(super) fn next_rows(&mut self) -> Result<Option<impl Iterator<Item = (K, V)> + '_>, DatapathError> {
        if std::mem::take(&mut self.over) {
            self.cursor = None;
            return Ok(None);
        }
        if self.keys.is_empty() {
            self.resize(BATCH);
        }
        loop {
            match kernel::lookup_batch(self.data.fd().as_fd(), self.cursor, &mut self.keys, &mut self.values) {
                Ok((count, cursor)) => {
                    self.over = cursor.is_none();
                    self.cursor = cursor;
                    return Ok(Some(self.keys.iter().copied().zip(self.values.iter().copied()).take(count)));
                }
                // One bucket is longer than the buffer.
                Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => self.resize(self.keys.len() * 2),
                Err(source) => {
                    self.cursor = None;
                    let action = format!("read the rows of map {}", self.name);
                    return Err(DatapathError::Io { action, source });
                }
            }
        }
    }

    fn resize(&mut self, length: usize) {
        self.keys.resize_with(length, zeroed::<K>);
        self.values.resize_with(length, zeroed::<V>);
    }
}

/// A value of plain data with all bytes zero.
fn zeroed<T: Pod>() -> T {
    #[expect(unsafe_code, reason = "plain data has no invalid bit pattern, and no other constructor in general")]
    // SAFETY: `Pod` promises that every bit pattern is a value.
    unsafe {
        std::mem::zeroed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cistern_core::masquerade::plan::merge_ports;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
        #[test]
        fn reserved_ports_are_read_back_as_they_were_merged(ranges in proptest::collection::vec((any::<u16>(), any::<u16>()), 0..6)) {
            let merged = merge_ports(&ranges);
            prop_assert_eq!(port_ranges(&port_words(&merged)), merged);
        }
    }

    #[test]
    fn the_ends_of_the_port_space_are_ports_like_others() {
        let ranges = vec![(0, 0), (63, 64), (65_535, 65_535)];
        assert_eq!(port_ranges(&port_words(&ranges)), ranges);
        let all = vec![(0, 65_535)];
        assert_eq!(port_ranges(&port_words(&all)), all);
    }
}
