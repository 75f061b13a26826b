//! The egress devices and their addresses.

use super::settings::SharedSlot;
use super::{failed, found, hash, inserted};
use crate::datapath::error::DatapathError;
use crate::datapath::pins::Pins;
use crate::reconciler::BlockingOperations;
use aya::maps::{HashMap, MapData};
use cistern_core::masquerade::plan::DeviceEntry;
use cistern_ebpf_common::abi::{DeviceKey, DeviceValue};
use cistern_ebpf_common::map;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The egress devices and their addresses, by `ifindex`.
#[derive(Debug)]
pub struct Devices {
    map: HashMap<MapData, DeviceKey, DeviceValue>,
    slot: SharedSlot,
}

pub(super) fn device_rows(
    map: &HashMap<MapData, DeviceKey, DeviceValue>,
) -> Result<BTreeMap<u32, DeviceEntry>, DatapathError> {
    map.iter()
        .map(|row| {
            let (key, value) = row.map_err(failed(map::DEVICES, "read its rows"))?;
            let address = Ipv4Addr::from(value.address);
            Ok((key.ifindex, DeviceEntry { address: (!address.is_unspecified()).then_some(address) }))
        })
        .collect()
}

impl Devices {
    pub(in crate::datapath) fn open(pins: &Pins, slot: SharedSlot) -> Result<Self, DatapathError> {
        Ok(Self { map: hash(pins, map::DEVICES)?, slot })
    }

    /// Sets the masquerade address of a device.
    ///
    /// # Errors
    /// [`DatapathError::Full`], or the kernel's error.
    pub fn insert(&mut self, ifindex: u32, entry: DeviceEntry) -> Result<(), DatapathError> {
        let value = DeviceValue { address: entry.address.unwrap_or(Ipv4Addr::UNSPECIFIED).octets(), room: [0; 12] };
        inserted(map::DEVICES, ifindex, self.map.insert(DeviceKey { ifindex }, value, 0))?;
        self.slot.lock().flows_may_end()
    }

    /// Removes a device, if it exists.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        found(self.map.remove(&DeviceKey { ifindex })).map_err(failed(map::DEVICES, format!("delete {ifindex}")))?;
        self.slot.lock().flows_may_end()
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
