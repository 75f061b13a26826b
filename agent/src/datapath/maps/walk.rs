//! Iteration over hash maps with batch lookups.

use super::open;
use crate::datapath::error::DatapathError;
use crate::datapath::kernel::{self, Cursor};
use crate::datapath::pins::Pins;
use aya::Pod;
use aya::maps::MapData;
use std::os::fd::AsFd as _;

/// Iteration over a hash map with batch lookups.
#[derive(Debug)]
pub(in crate::datapath) struct Walk<K, V> {
    name: &'static str,
    data: MapData,
    keys: Vec<K>,
    values: Vec<V>,
    cursor: Option<Cursor>,
    over: bool,
}

/// Initial batch size.
const BATCH: usize = 2_048;

impl<K: Pod, V: Pod> Walk<K, V> {
    pub(in crate::datapath) fn open(pins: &Pins, name: &'static str) -> Result<Self, DatapathError> {
        Ok(Self { name, data: open(pins, name)?, keys: Vec::new(), values: Vec::new(), cursor: None, over: false })
    }

    /// The next entries; `None` once after the last, then from the start again.
    pub(in crate::datapath) fn next_rows(
        &mut self,
    ) -> Result<Option<impl Iterator<Item = (K, V)> + '_>, DatapathError> {
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
                // A bucket exceeds the buffer.
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

/// An all-zero value of plain data.
fn zeroed<T: Pod>() -> T {
    #[expect(unsafe_code, reason = "plain data has no invalid bit pattern, and no other constructor in general")]
    // SAFETY: `Pod` promises that every bit pattern is a value.
    unsafe {
        std::mem::zeroed()
    }
}
