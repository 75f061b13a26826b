//! The only place that turns core values into the bytes of the maps, and back.
//!
//! | file | purpose |
//! |---|---|
//! | `excluded`, `endpoints`, `devices`, `settings` | one target each: the rows of a map, kept equal to a table |
//! | `flows` | the entries of flows, as the listings show them |
//! | `view` | reads of everything, which need the pins alone |
//! | `walk` | many entries of a hash map in each system call |

mod devices;
mod endpoints;
mod excluded;
mod flows;
mod settings;
mod view;
mod walk;

pub use devices::Devices;
pub use endpoints::Endpoints;
pub use excluded::{Excluded, ExcludedRow};
pub(super) use flows::{protocol, seen_bits};
pub use settings::Settings;
pub(super) use settings::SharedSlot;
pub use view::View;
pub(super) use walk::Walk;

use super::error::DatapathError;
use super::pins::Pins;
use aya::Pod;
use aya::maps::{HashMap, Map, MapData, MapError};
use std::fmt;

/// Adds the map and the operation to an error.
pub(in crate::datapath) fn failed(
    map: &'static str,
    action: impl Into<String>,
) -> impl FnOnce(MapError) -> DatapathError {
    let action = action.into();
    move |source| DatapathError::Map { map, action, source: Box::new(source) }
}

/// Opens a pinned map.
pub(in crate::datapath) fn open(pins: &Pins, name: &'static str) -> Result<MapData, DatapathError> {
    let path = pins.map(name);
    MapData::from_pin(&path).map_err(failed(name, format!("open its pin {}", path.display())))
}

/// Opens a pinned map as the type that it has.
pub(in crate::datapath) fn typed<T>(pins: &Pins, name: &'static str) -> Result<T, DatapathError>
where
    T: TryFrom<Map, Error = MapError>,
{
    let data = open(pins, name)?;
    Map::from_map_data(data).and_then(T::try_from).map_err(failed(name, "use it as its type"))
}

/// Opens a pinned hash map, LRU or not.
pub(in crate::datapath) fn hash<K: Pod, V: Pod>(
    pins: &Pins,
    name: &'static str,
) -> Result<HashMap<MapData, K, V>, DatapathError> {
    typed(pins, name)
}

/// `errno` of a failed map operation.
pub(in crate::datapath) fn errno(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(error) => error.io_error.raw_os_error(),
        _ => None,
    }
}

/// Converts "not found" to `None`.
pub(in crate::datapath) fn found<T>(result: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) if errno(&error) == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Distinguishes a full map from other failures of an insertion. Hash maps return `E2BIG`, LPM tries `ENOSPC`.
pub(in crate::datapath) fn inserted(
    map: &'static str,
    key: impl fmt::Display,
    result: Result<(), MapError>,
) -> Result<(), DatapathError> {
    result.map_err(|error| match errno(&error) {
        Some(libc::E2BIG | libc::ENOSPC) => DatapathError::Full { map, key: key.to_string() },
        _ => failed(map, format!("write {key}"))(error),
    })
}
