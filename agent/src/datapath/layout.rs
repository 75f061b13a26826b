//! Layouts of map rows, to detect differences between builds, and to carry rows from one map to another.
//!
//! A row is described by the names, offsets and sizes of its fields. This build's description is derived from the type
//! information of its eBPF object; that of pinned maps is pinned with them, in the map `cst_layouts`, because the
//! kernel only exposes the type information of a map to `CAP_SYS_ADMIN`, which the agent does not have.
//!
//! Rules for changing a row:
//! * A new field uses bytes of a field `spare` or `room`, which are zero in all rows written by a build without it:
//!   **zero in an added field means "unknown"**. Such a row grows in place, and both builds can use the same map.
//! * A field whose meaning changes gets another name, since rows are carried over by name.
//! * Any other change makes maps incompatible: see [`handover`](super::handover).

use super::btf::Btf;
use super::error::DatapathError;
use super::kernel::{self, RawMap};
use super::pins::Side;
use cistern_core::format::Version;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// A field of a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) offset: usize,
    pub(super) size: usize,
}

impl Field {
    /// Unused bytes.
    fn is_room(&self) -> bool {
        ["zero", "spare", "room"].contains(&self.name.as_str())
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.offset + other.size && other.offset < self.offset + self.size
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {} of {} bytes", self.name, self.offset, self.size)
    }
}

/// The fields of a key or value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) size: usize,
    pub(super) fields: Vec<Field>,
}

impl Row {
    pub(super) fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name && !field.is_room())
    }

    fn named(&self) -> impl Iterator<Item = &Field> {
        self.fields.iter().filter(|field| !field.is_room())
    }

    /// The first difference that prevents two builds from using the same rows; `None` if each reads what the other
    /// writes.
    pub(super) fn conflict(&self, pinned: &Self) -> Option<(String, String)> {
        if self.size != pinned.size {
            return Some((format!("{} bytes", pinned.size), format!("{} bytes", self.size)));
        }
        let describe = |field: Option<&Field>| field.map_or_else(|| "no such field".to_owned(), ToString::to_string);
        self.named().find_map(|own| {
            let there = match pinned.field(&own.name) {
                Some(same) if same == own => return None,
                None => pinned.named().find(|field| field.overlaps(own))?,
                Some(moved) => moved,
            };
            Some((describe(Some(there)), describe(Some(own))))
        })
    }

    /// The fields of both, which must not conflict.
    fn united(&self, other: &Self) -> Self {
        let mut fields: Vec<Field> = self.named().cloned().collect();
        fields.extend(other.named().filter(|field| self.field(&field.name).is_none()).cloned());
        fields.sort_by_key(|field| field.offset);
        Self { size: self.size, fields }
    }

    /// Converts `row` with the fields of `from` to a row with these fields, by name. Fields that `from` lacks, or has
    /// in another size, are zero.
    pub(super) fn converted(&self, from: &Self, row: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; self.size];
        for field in self.named() {
            if let Some(source) = from.field(&field.name)
                && source.size == field.size
                && let Some(source) = row.get(source.offset..source.offset + source.size)
                && let Some(target) = bytes.get_mut(field.offset..field.offset + field.size)
            {
                target.copy_from_slice(source);
            }
        }
        bytes
    }
}

/// Key and value of a map.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Layout {
    pub(super) key: Row,
    pub(super) value: Row,
}

/// A map as declared by a build.
#[derive(Debug, Clone)]
pub(super) struct Declared {
    pub(super) kind: u32,
    pub(super) capacity: u32,
    pub(super) flags: u32,
    pub(super) layout: Layout,
}

/// The maps of a build by name: those in its object with our prefix.
pub(super) fn declared(object: &[u8]) -> Result<BTreeMap<String, Declared>, DatapathError> {
    let failed = |what: &str| DatapathError::Object(what.to_owned());
    let parsed = aya_obj::Object::parse(object).map_err(|error| DatapathError::Object(error.to_string()))?;
    let types = parsed.btf.as_ref().ok_or_else(|| failed("it has no type information"))?.to_bytes();
    let btf = Btf::parse(&types).ok_or_else(|| failed("its type information is damaged"))?;
    let ours = parsed.maps.iter().filter(|(name, _)| name.starts_with(PREFIX));
    ours.map(|(name, map)| {
        let aya_obj::Map::Btf(typed) = map else {
            return Err(failed(&format!("the fields of map {name} are unknown")));
        };
        let row = |number| btf.row(number).ok_or_else(|| failed(&format!("the fields of map {name} cannot be read")));
        let layout = Layout { key: row(typed.def.btf_key_type_id)?, value: row(typed.def.btf_value_type_id)? };
        let declared = Declared { kind: map.map_type(), capacity: map.max_entries(), flags: map.map_flags(), layout };
        Ok((name.clone(), declared))
    })
    .collect()
}

/// Prefix of our maps' names.
const PREFIX: &str = "cst_";

/// The map with the description of the others.
pub(super) const LAYOUTS: &str = "cst_layouts";

/// Size of its single value: a description has about 3,000 bytes.
const TEXT: usize = 32_768;

/// The format of the description.
const FORMAT: u32 = 1;

/// The rows of the maps pinned in one directory.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Layouts {
    #[serde(flatten)]
    version: Option<Version>,
    pub(super) maps: BTreeMap<String, Layout>,
}

impl Layouts {
    /// The rows of the pinned maps; without a description, those of the first release.
    pub(super) fn read(side: &Side) -> Result<Self, DatapathError> {
        let mut layouts = Self::described(side)?;
        layouts.maps.retain(|name, _| side.map(name).exists());
        Ok(layouts)
    }

    fn described(side: &Side) -> Result<Self, DatapathError> {
        let path = side.map(LAYOUTS);
        if !path.exists() {
            return Ok(Self { version: None, maps: first_release() });
        }
        let failed = DatapathError::io(format!("read {}", path.display()));
        let map = RawMap::open(&path).map_err(failed)?;
        let text = map.lookup(&0_u32.to_ne_bytes()).map_err(DatapathError::io(format!("read {}", path.display())))?;
        let text = text.unwrap_or_default();
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        let invalid = |error: String| DatapathError::Layouts { path: path.clone(), error };
        let read: Self =
            serde_json::from_slice(text.get(..end).unwrap_or_default()).map_err(|error| invalid(error.to_string()))?;
        if let Some(version) = read.version {
            version.check(FORMAT).map_err(|error| invalid(error.to_string()))?;
        }
        Ok(read)
    }

    /// Pins the description of a build's maps, which keeps the fields that others added to the rows. Must be called
    /// before the maps are created: rows without a description are assumed to be those of the first release.
    pub(super) fn write(
        side: &Side,
        declared: &BTreeMap<String, Declared>,
        pinned: &Self,
    ) -> Result<(), DatapathError> {
        let maps = declared
            .iter()
            .map(|(name, own)| {
                let before = pinned.maps.get(name);
                let layout = before.map_or_else(
                    || own.layout.clone(),
                    |before| Layout {
                        key: own.layout.key.united(&before.key),
                        value: own.layout.value.united(&before.value),
                    },
                );
                (name.clone(), layout)
            })
            .collect();
        let path = side.map(LAYOUTS);
        let invalid = |error: String| DatapathError::Layouts { path: path.clone(), error };
        let written = Self { version: Some(Version::new(FORMAT, 1)), maps };
        let mut text = serde_json::to_vec(&written).map_err(|error| invalid(error.to_string()))?;
        if text.len() >= TEXT {
            return Err(invalid(format!("{} bytes are more than fit", text.len())));
        }
        text.resize(TEXT, 0);
        let failed = || DatapathError::io(format!("write {}", path.display()));
        let map = if path.exists() { RawMap::open(&path) } else { kernel::create_array(LAYOUTS, TEXT as u32, &path) };
        map.and_then(|map| map.update(&0_u32.to_ne_bytes(), &text, kernel::ANY)).map(drop).map_err(failed())
    }
}

/// The rows of the first release, which pinned no description.
fn first_release() -> BTreeMap<String, Layout> {
    fn row(fields: &[(&str, usize)]) -> Row {
        let mut size = 0;
        let fields = fields
            .iter()
            .map(|(name, length)| {
                let offset = size;
                size += length;
                Field { name: (*name).to_owned(), offset, size: *length }
            })
            .collect();
        Row { size, fields }
    }
    type Fields = &'static [(&'static str, usize)];
    const FLOW: Fields =
        &[("source", 4), ("destination", 4), ("source_port", 2), ("destination_port", 2), ("protocol", 1), ("zero", 3)];
    const INDEX: Fields = &[("", 4)];
    let maps: [(&str, Fields, Fields); 11] = [
        (
            "cst_rev",
            &[("remote", 4), ("external", 4), ("remote_port", 2), ("external_port", 2), ("protocol", 1), ("zero", 3)],
            &[
                ("origin", 4),
                ("origin_port", 2),
                ("sent", 1),
                ("received", 1),
                ("last_seen", 4),
                ("created", 4),
                ("ifindex", 4),
                ("owner", 1),
                ("zero", 3),
            ],
        ),
        // The name of this field in the first release is used for endpoints now; `epoch` is read again after the first
        // change.
        (
            "cst_fwd",
            FLOW,
            &[("external", 4), ("external_port", 2), ("zero", 2), ("checked", 4), ("address_generation", 4)],
        ),
        (
            "cst_inbound",
            FLOW,
            &[("last_seen", 4), ("created", 4), ("ifindex", 4), ("sent", 1), ("received", 1), ("zero", 2)],
        ),
        ("cst_endpoints", &[("address", 4)], &[("ifindex", 4), ("flags", 4)]),
        ("cst_devices", &[("ifindex", 4)], &[("address", 4)]),
        ("cst_excluded", &[("prefix_len", 4), ("data", 4)], &[("since", 4), ("reason", 1), ("zero", 3)]),
        (
            "cst_settings",
            INDEX,
            &[
                ("hash_key", 16),
                ("flags", 4),
                ("window", 4),
                ("policy_changed", 4),
                ("address_generation", 4),
                ("port_first", 2),
                ("port_last", 2),
                ("zero", 4),
            ],
        ),
        ("cst_ports", INDEX, &[("reserved", 8)]),
        ("cst_tries", INDEX, &[("used", 17), ("moved", 1), ("zero", 6)]),
        ("cst_events", INDEX, &[("no_port", 4), ("map_full", 4), ("no_device_address", 4)]),
        ("cst_counters", INDEX, &[("packets", 8)]),
    ];
    maps.into_iter().map(|(name, key, value)| (name.to_owned(), Layout { key: row(key), value: row(value) })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(size: usize, fields: &[(&str, usize, usize)]) -> Row {
        let fields =
            fields.iter().map(|(name, offset, size)| Field { name: (*name).to_owned(), offset: *offset, size: *size });
        Row { size, fields: fields.collect() }
    }

    #[test]
    fn a_field_in_the_room_of_another_build_is_no_conflict_in_either_direction() {
        let before = row(12, &[("origin", 0, 4), ("room", 4, 8)]);
        let after = row(12, &[("origin", 0, 4), ("generation", 4, 4), ("room", 8, 4)]);
        assert_eq!(before.conflict(&after), None);
        assert_eq!(after.conflict(&before), None);
        let united = before.united(&after);
        assert_eq!(
            united.field("generation"),
            after.field("generation"),
            "the older build keeps what the newer one added"
        );
        let third = row(12, &[("origin", 0, 4), ("identity", 4, 4), ("room", 8, 4)]);
        let (there, own) = third.conflict(&united).unwrap();
        assert!(there.contains("generation") && own.contains("identity"), "{there} {own}");
    }

    #[test]
    fn another_size_or_place_is_a_conflict_and_rows_are_carried_over_by_name() {
        let before = row(8, &[("origin", 0, 4), ("port", 4, 2), ("zero", 6, 2)]);
        let after = row(12, &[("port", 0, 2), ("spare", 2, 2), ("origin", 4, 4), ("generation", 8, 4)]);
        assert!(after.conflict(&before).is_some() && before.conflict(&after).is_some());
        let moved = row(8, &[("origin", 4, 4), ("port", 0, 2), ("zero", 2, 2)]);
        assert!(moved.conflict(&before).unwrap().0.contains("origin at byte 0"));
        let carried = after.converted(&before, &[1, 2, 3, 4, 5, 6, 9, 9]);
        assert_eq!(carried, [5, 6, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0], "padding is not carried over");
        assert_eq!(before.converted(&after, &carried), [1, 2, 3, 4, 5, 6, 0, 0]);
    }

    #[test]
    fn a_newer_description_is_read_as_long_as_it_names_an_older_reader() {
        let text = r#"{"format":7,"oldest_reader":1,"maps":{"cst_x":{"key":{"size":4,"fields":[]},"value":{"size":1,"fields":[]}}}}"#;
        let read: Layouts = serde_json::from_str(text).unwrap();
        assert!(read.version.unwrap().check(FORMAT).is_ok() && read.maps.contains_key("cst_x"));
    }

    #[test]
    fn the_rows_of_the_first_release_have_the_sizes_that_its_maps_have() {
        let sizes: Vec<(usize, usize)> = first_release().values().map(|map| (map.key.size, map.value.size)).collect();
        // Sorted by name: counters, devices, endpoints, events, excluded, fwd, inbound, ports, rev, settings, tries.
        let expected =
            [(4, 8), (4, 4), (4, 8), (4, 12), (8, 8), (16, 16), (16, 16), (4, 8), (16, 24), (4, 40), (4, 24)];
        assert_eq!(sizes, expected);
    }
}
