//! The node-wide settings: one slot, whose fields several handles write.

use super::{failed, typed};
use crate::datapath::error::DatapathError;
use crate::datapath::kernel;
use crate::datapath::pins::Pins;
use crate::reconciler::BlockingOperations;
use aya::maps::{Array, MapData};
use cistern_core::masquerade::plan::{DatapathSettings, FlowPolicy};
use cistern_ebpf_common::abi::{PortWord, SETTING_IMMEDIATE, SETTING_MASQUERADE, SettingsValue};
use cistern_ebpf_common::map;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The slot of node-wide settings. Several handles write fields of it, hence the lock.
pub(super) struct Slot {
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

    /// Makes the programs compare all entries of flows with the node's addresses and pods again. To be called after the
    /// change.
    pub(super) fn flows_may_end(&mut self) -> Result<(), DatapathError> {
        let mut value = self.read()?;
        value.epoch = value.epoch.wrapping_add(1).max(1);
        self.write(value)
    }

    /// Opens the time window in which TCP packets without an entry may belong to untranslated flows. To be called
    /// before the change that requires it.
    pub(super) fn policy_changes(&mut self) -> Result<(), DatapathError> {
        let mut value = self.read()?;
        value.policy_changed = kernel::monotonic_seconds();
        self.write(value)
    }
}

/// The settings slot, shared by the handles of a datapath.
#[derive(Debug, Clone)]
pub(in crate::datapath) struct SharedSlot(Arc<Mutex<Slot>>);

impl SharedSlot {
    /// Opens the slot. A process killed between a change and [`Slot::flows_may_end`] may have left entries that were
    /// not compared.
    pub(in crate::datapath) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        let mut slot = Slot { array: typed(pins, map::SETTINGS)? };
        slot.flows_may_end()?;
        Ok(Self(Arc::new(Mutex::new(slot))))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Slot> {
        // The slot is written atomically, so that a panic elsewhere leaves it consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        // The key is secret: with it, flows could be aimed at one port.
        f.debug_struct("Settings").finish_non_exhaustive()
    }
}

/// The reserved ports as words of the bitmap.
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

/// The bitmap as sorted, disjoint inclusive ranges.
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
    pub(in crate::datapath) fn open(pins: &Pins, slot: SharedSlot, fresh_key: [u64; 2]) -> Result<Self, DatapathError> {
        Ok(Self { slot, ports: typed(pins, map::PORTS)?, fresh_key })
    }

    /// Applies settings.
    ///
    /// The first settings of new maps, and enabling masquerading, open the time window for TCP flows that were not
    /// translated before.
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
            epoch: before.epoch,
            port_first: settings.port_min,
            port_last: settings.port_max,
            handover: before.handover,
            zero: 0,
            room: before.room,
        })
    }

    /// The settings in force; `None` if none have been set.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn get(&self) -> Result<Option<DatapathSettings>, DatapathError> {
        let value = self.slot.lock().read()?;
        settings_of(value, &self.ports)
    }
}

pub(super) fn settings_of(
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

    /// Disables masquerading, because a slot of an array cannot be deleted.
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
