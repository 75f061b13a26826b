//! The destinations that keep the pod's address.

use super::settings::SharedSlot;
use super::{failed, found, hash, inserted, typed};
use crate::datapath::error::DatapathError;
use crate::datapath::kernel;
use crate::datapath::pins::Pins;
use crate::reconciler::BlockingOperations;
use aya::maps::lpm_trie::Key;
use aya::maps::{HashMap, LpmTrie, MapData};
use cistern_core::masquerade::plan::ExcludedReason;
use cistern_ebpf_common::abi::{ExcludedAddress, ExcludedValue, RevKey, RevValue};
use cistern_ebpf_common::map;
use ipnet::Ipv4Net;
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::Ipv4Addr;

/// An excluded destination, for listings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ExcludedRow {
    /// The CIDRs.
    pub prefix: Ipv4Net,
    /// The reason.
    pub reason: ExcludedReason,
}

/// Excluded destinations.
#[derive(Debug)]
pub struct Excluded {
    trie: LpmTrie<MapData, ExcludedAddress, ExcludedValue>,
    flows: HashMap<MapData, RevKey, RevValue>,
    slot: SharedSlot,
    /// Content of the trie. Its lookup finds the longest prefix, so that it cannot be queried for an exact key.
    rows: BTreeMap<Ipv4Net, ExcludedValue>,
}

fn trie_key(prefix: Ipv4Net) -> Key<ExcludedAddress> {
    Key::new(u32::from(prefix.prefix_len()), ExcludedAddress { address: prefix.network().octets() })
}

/// Reads the whole trie.
pub(super) fn trie_rows(
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

pub(super) fn reason(prefix: &Ipv4Net, value: &ExcludedValue) -> Result<ExcludedReason, DatapathError> {
    ExcludedReason::from_number(value.reason).ok_or(DatapathError::Foreign {
        map: map::EXCLUDED,
        key: prefix.to_string(),
        field: "reason",
        value: value.reason.into(),
    })
}

impl Excluded {
    pub(in crate::datapath) fn open(pins: &Pins, slot: SharedSlot) -> Result<Self, DatapathError> {
        let trie = typed(pins, map::EXCLUDED)?;
        let rows = trie_rows(&trie)?;
        Ok(Self { trie, flows: hash(pins, map::REV)?, slot, rows })
    }

    /// Excludes a prefix; host bits are masked. For an excluded prefix only the reason changes.
    ///
    /// # Errors
    /// [`DatapathError::Full`], or the kernel's error.
    pub fn insert(&mut self, prefix: Ipv4Net, reason: ExcludedReason) -> Result<(), DatapathError> {
        let prefix = prefix.trunc();
        let since = match self.rows.get(&prefix) {
            Some(row) if row.reason == reason as u8 => return Ok(()),
            Some(row) => row.since,
            // Without translated flows there is none to this prefix.
            None if self.flows.keys().next().is_none() => 0,
            None => kernel::monotonic_seconds(),
        };
        let value = ExcludedValue { since, reason: reason as u8, room: [0; 11] };
        inserted(map::EXCLUDED, prefix, self.trie.insert(&trie_key(prefix), value, 0))?;
        let before = self.rows.insert(prefix, value);
        if before.is_some_and(|before| before.reason == ExcludedReason::OwnNode as u8) {
            self.slot.lock().flows_may_end()?;
        }
        Ok(())
    }

    /// Removes an excluded prefix, if it exists.
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
        self.slot.lock().flows_may_end()
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
