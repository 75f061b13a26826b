//! The pods of this node.

use super::settings::SharedSlot;
use super::{failed, found, hash, inserted};
use crate::datapath::error::DatapathError;
use crate::datapath::pins::Pins;
use crate::reconciler::BlockingOperations;
use aya::maps::{HashMap, MapData};
use cistern_core::masquerade::plan::EndpointEntry;
use cistern_ebpf_common::abi::{ENDPOINT_EXEMPT, EndpointKey, EndpointValue};
use cistern_ebpf_common::map;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// The pods of this node.
#[derive(Debug)]
pub struct Endpoints {
    map: HashMap<MapData, EndpointKey, EndpointValue>,
    slot: SharedSlot,
}

fn endpoint_value(entry: EndpointEntry) -> EndpointValue {
    EndpointValue {
        ifindex: entry.ifindex,
        flags: if entry.no_masquerade { ENDPOINT_EXEMPT } else { 0 },
        generation: entry.generation,
        room: [0; 12],
    }
}

fn endpoint_entry(value: EndpointValue) -> EndpointEntry {
    EndpointEntry {
        ifindex: value.ifindex,
        no_masquerade: value.flags & ENDPOINT_EXEMPT != 0,
        generation: value.generation,
    }
}

impl Endpoints {
    pub(in crate::datapath) fn open(pins: &Pins, slot: SharedSlot) -> Result<Self, DatapathError> {
        Ok(Self { map: hash(pins, map::ENDPOINTS)?, slot })
    }

    /// Inserts or replaces a pod. It is in force when this returns, which ADD waits for.
    ///
    /// # Errors
    /// [`DatapathError::Full`], or the kernel's error.
    pub fn insert(&mut self, address: Ipv4Addr, entry: EndpointEntry) -> Result<(), DatapathError> {
        let key = EndpointKey { address: address.octets() };
        let before = found(self.map.get(&key, 0)).map_err(failed(map::ENDPOINTS, format!("read {address}")))?;
        if before.is_some_and(|before| endpoint_entry(before).no_masquerade) && !entry.no_masquerade {
            self.slot.lock().policy_changes()?;
        }
        inserted(map::ENDPOINTS, address, self.map.insert(key, endpoint_value(entry), 0))?;
        match before {
            Some(before) if endpoint_entry(before) != entry => self.slot.lock().flows_may_end(),
            _ => Ok(()),
        }
    }

    /// Removes a pod, if it exists. Its flows end: their entries translate no packet any more, and the collector
    /// deletes them.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(&mut self, address: Ipv4Addr) -> Result<(), DatapathError> {
        let key = EndpointKey { address: address.octets() };
        found(self.map.remove(&key)).map_err(failed(map::ENDPOINTS, format!("delete {address}")))?;
        self.slot.lock().flows_may_end()
    }

    /// The pods that the kernel programs know.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn rows(&self) -> Result<BTreeMap<Ipv4Addr, EndpointEntry>, DatapathError> {
        endpoint_rows(&self.map)
    }
}

pub(super) fn endpoint_rows(
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
