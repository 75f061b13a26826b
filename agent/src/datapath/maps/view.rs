//! Reader of all maps.

use super::devices::device_rows;
use super::endpoints::endpoint_rows;
use super::excluded::{ExcludedRow, reason, trie_rows};
use super::flows::{flow_record, inbound_record};
use super::settings::settings_of;
use super::walk::Walk;
use super::{failed, hash, open, typed};
use crate::datapath::error::DatapathError;
use crate::datapath::kernel;
use crate::datapath::pins::Pins;
use aya::maps::{Array, MapData, PerCpuArray};
use cistern_core::masquerade::expire::{FlowRecord, InboundRecord};
use cistern_core::masquerade::plan::{DatapathSettings, DeviceEntry, EndpointEntry};
use cistern_ebpf_common::abi::{CounterValue, FlowKey, InboundValue, RevKey, RevValue, SettingsValue};
use cistern_ebpf_common::counter::Counter;
use cistern_ebpf_common::map;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// Reader of all maps. It only needs the pins, so it works while no agent is running.
#[derive(Debug)]
pub struct View {
    pins: Pins,
}

impl View {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// They do not exist, or cannot be opened.
    pub fn open(pins: &Pins) -> Result<Self, DatapathError> {
        open(pins, map::SETTINGS)?;
        Ok(Self { pins: pins.clone() })
    }

    /// Excluded destinations, sorted.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn excluded(&self) -> Result<Vec<ExcludedRow>, DatapathError> {
        let rows = trie_rows(&typed(&self.pins, map::EXCLUDED)?)?;
        rows.iter().map(|(prefix, value)| Ok(ExcludedRow { prefix: *prefix, reason: reason(prefix, value)? })).collect()
    }

    /// Pods by address.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn endpoints(&self) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, DatapathError> {
        endpoint_rows(&hash(&self.pins, map::ENDPOINTS)?)
    }

    /// Egress devices by `ifindex`.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn devices(&self) -> Result<BTreeMap<u32, DeviceEntry>, DatapathError> {
        device_rows(&hash(&self.pins, map::DEVICES)?)
    }

    /// The settings in force; `None` if none have been set.
    ///
    /// # Errors
    /// The maps cannot be read.
    pub fn settings(&self) -> Result<Option<DatapathSettings>, DatapathError> {
        let slot: Array<MapData, SettingsValue> = typed(&self.pins, map::SETTINGS)?;
        let value = slot.get(&0, 0).map_err(failed(map::SETTINGS, "read it"))?;
        settings_of(value, &typed(&self.pins, map::PORTS)?)
    }

    /// NAT entries, sorted.
    ///
    /// # Errors
    /// The map cannot be read.
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
    /// The map cannot be read.
    pub fn inbound(&self) -> Result<Vec<InboundRecord>, DatapathError> {
        let now = kernel::monotonic_seconds();
        let mut records = Vec::new();
        let mut walk = Walk::<FlowKey, InboundValue>::open(&self.pins, map::INBOUND)?;
        while let Some(rows) = walk.next_rows()? {
            for (key, value) in rows {
                records.push(inbound_record(key, value, now)?);
            }
        }
        records.sort_unstable();
        Ok(records)
    }

    /// Packet counters, summed over all CPUs, in the order of [`Counter`].
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn counters(&self) -> Result<Vec<(Counter, u64)>, DatapathError> {
        let map: PerCpuArray<MapData, CounterValue> = typed(&self.pins, map::COUNTERS)?;
        // The map of an older build may have fewer slots than there are counters.
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
