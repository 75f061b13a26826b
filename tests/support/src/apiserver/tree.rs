//! Access to parts of a JSON object by path.

use serde_json::{Map, Value};

/// The string at a JSON pointer; empty if there is none.
pub(super) fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// The list at a JSON pointer; empty if there is none.
pub(super) fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    value.pointer(pointer).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// The map at a top-level field, created if it is missing or not a map.
pub(super) fn map_mut<'a>(value: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    let slot = as_map(value).entry(field).or_insert_with(|| Value::Object(Map::new()));
    as_map(slot)
}

/// The value as a map; anything else is replaced by an empty one.
pub(super) fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("made a map above"),
    }
}

/// The `metadata` of an object.
pub(super) fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    map_mut(object, "metadata")
}

/// Copies a top-level field from another object, or removes it if that has none.
pub(super) fn copy_field(target: &mut Value, source: &Value, field: &str) {
    match source.get(field) {
        Some(value) => {
            as_map(target).insert(field.to_owned(), value.clone());
        }
        None => {
            as_map(target).remove(field);
        }
    }
}

/// Copies a field of `metadata` from another object, or removes it if that has none.
pub(super) fn copy_metadata(target: &mut Value, source: &Value, field: &str) {
    match source.get("metadata").and_then(|metadata| metadata.get(field)) {
        Some(value) => {
            metadata_mut(target).insert(field.to_owned(), value.clone());
        }
        None => {
            metadata_mut(target).remove(field);
        }
    }
}
