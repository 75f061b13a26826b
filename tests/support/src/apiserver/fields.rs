//! Ownership of fields: `managedFields` and server-side apply.
//!
//! A field is identified by its path, in the form of `FieldsV1`: `f:<name>` for a field of a map, `k:<keys as JSON>`
//! for an item of a keyed list, `v:<value as JSON>` for an element of a set. Atomic lists and maps, scalars and empty
//! maps are leaves. The rules are those of Kubernetes' server-side apply
//! (<https://kubernetes.io/docs/reference/using-api/server-side-apply/>): an update makes its author the owner of what
//! it changed; an apply owns all its fields and removes those that it no longer has and no other manager owns; only an
//! apply can conflict.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::error::{ApiError, ApiResult};
use super::schema::{ListKind, Schema};
use super::tree;

type Path = Vec<String>;
type FieldSet = BTreeSet<Path>;

/// Fields that only the server sets.
const SYSTEM: [&[&str]; 11] = [
    &["f:apiVersion"],
    &["f:kind"],
    &["f:metadata", "f:name"],
    &["f:metadata", "f:namespace"],
    &["f:metadata", "f:uid"],
    &["f:metadata", "f:creationTimestamp"],
    &["f:metadata", "f:deletionTimestamp"],
    &["f:metadata", "f:deletionGracePeriodSeconds"],
    &["f:metadata", "f:generation"],
    &["f:metadata", "f:managedFields"],
    &["f:metadata", "f:resourceVersion"],
];

/// The author of a write, as recorded in `managedFields`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Author {
    /// The field manager's name.
    pub(super) manager: String,
    /// The API version of the write.
    pub(super) api_version: String,
    /// `status` for writes of that subresource, else empty.
    pub(super) subresource: String,
    /// The time of the write, RFC 3339.
    pub(super) time: String,
}

#[derive(Clone, Debug)]
struct Entry {
    author: Author,
    apply: bool,
    owned: FieldSet,
}

impl Entry {
    fn is_of(&self, author: &Author, apply: bool) -> bool {
        self.apply == apply
            && self.author.manager == author.manager
            && self.author.api_version == author.api_version
            && self.author.subresource == author.subresource
    }
}

/// Sets the `managedFields` of `new`, the result of an update or a patch of `old` by `author`.
pub(super) fn record_update(old: &Value, new: &mut Value, schema: &Schema, author: &Author) {
    let mut entries = read(old);
    let (before, after) = (leaves(old, schema), leaves(new, schema));
    let changed: FieldSet =
        after.iter().filter(|(path, value)| before.get(*path) != Some(*value)).map(|(path, _)| path.clone()).collect();
    for entry in &mut entries {
        let own = entry.is_of(author, false);
        entry.owned.retain(|path| after.contains_key(path) && (own || !changed.contains(path)));
    }
    claim(&mut entries, author, false, &changed);
    write(new, entries);
}

/// Applies `config` to `live` and returns the result with its `managedFields`.
///
/// # Errors
/// A conflict, if `config` sets a field to another value than its owner did, unless `force`.
pub(super) fn apply(live: &Value, config: &Value, schema: &Schema, author: &Author, force: bool) -> ApiResult<Value> {
    let mut entries = read(live);
    let wanted: FieldSet = leaves(config, schema).into_keys().collect();
    let previous = entries.iter().find(|entry| entry.is_of(author, true)).map(|entry| entry.owned.clone());
    let mut merged = live.clone();
    merge(&mut merged, config, schema);

    let (before, after) = (leaves(live, schema), leaves(&merged, schema));
    let changed = |path: &Path| before.get(path) != after.get(path);
    let mut conflicts = Vec::new();
    for entry in entries.iter_mut().filter(|entry| !entry.is_of(author, true)) {
        let lost: Vec<Path> =
            entry.owned.iter().filter(|path| wanted.contains(*path) && changed(path)).cloned().collect();
        for path in lost {
            if force {
                entry.owned.remove(&path);
            } else {
                conflicts.push((entry.author.manager.clone(), display(&path)));
            }
        }
    }
    if !conflicts.is_empty() {
        return Err(ApiError::apply_conflict(&conflicts));
    }

    if let Some(previous) = previous {
        let others = entries.iter().filter(|entry| !entry.is_of(author, true)).flat_map(|entry| entry.owned.iter());
        let kept = with_ancestors(others.chain(wanted.iter()));
        for path in with_ancestors(previous.iter()).difference(&kept) {
            remove(&mut merged, path);
        }
        // A newly set empty map is no value for the real server.
        for path in &wanted {
            let was_full =
                map_at(&mut live.clone(), path).is_some_and(|map| map.as_object().is_some_and(|map| !map.is_empty()));
            if let Some(emptied) = map_at(&mut merged, path).filter(|map| was_full && **map == json!({})) {
                *emptied = Value::Null;
            }
        }
    }
    entries.retain(|entry| !entry.is_of(author, true));
    claim(&mut entries, author, true, &wanted);
    write(&mut merged, entries);
    Ok(merged)
}

/// Whether two objects are equal except for the owners of their fields.
pub(super) fn same_content(a: &Value, b: &Value) -> bool {
    let strip = |object: &Value| {
        let mut object = object.clone();
        // Versions of one kind only differ in this.
        tree::as_map(&mut object).remove("apiVersion");
        let metadata = tree::metadata_mut(&mut object);
        for field in ["managedFields", "resourceVersion", "generation"] {
            metadata.remove(field);
        }
        object
    };
    strip(a) == strip(b)
}

/// Whether two objects' fields have the same owners, regardless of time.
pub(super) fn same_owners(a: &Value, b: &Value) -> bool {
    let owners = |object: &Value| -> Vec<(String, String, String, bool, FieldSet)> {
        let mut list: Vec<_> = read(object)
            .into_iter()
            .map(|entry| {
                let Author { manager, api_version, subresource, time: _ } = entry.author;
                (manager, api_version, subresource, entry.apply, entry.owned)
            })
            .collect();
        list.sort();
        list
    };
    owners(a) == owners(b)
}

/// The path element of an item of a set or of a keyed list; `None` if the item lacks its keys.
pub(super) fn item_step(kind: &ListKind, item: &Value) -> Option<String> {
    match kind {
        ListKind::Atomic => None,
        ListKind::Set => Some(format!("v:{item}")),
        ListKind::Map(keys) => {
            let mut found = Map::new();
            for key in keys {
                if let Some(value) = item.get(key) {
                    found.insert(key.clone(), value.clone());
                }
            }
            (!found.is_empty()).then(|| format!("k:{}", Value::Object(found)))
        }
    }
}

fn claim(entries: &mut Vec<Entry>, author: &Author, apply: bool, fields: &FieldSet) {
    match entries.iter_mut().find(|entry| entry.is_of(author, apply)) {
        Some(entry) => {
            if !fields.is_subset(&entry.owned) {
                entry.author.time.clone_from(&author.time);
                entry.owned.extend(fields.iter().cloned());
            }
        }
        None => entries.push(Entry { author: author.clone(), apply, owned: fields.clone() }),
    }
}

/// All leaves with their values. Items of keyed lists are included themselves, with a null.
fn leaves(object: &Value, schema: &Schema) -> BTreeMap<Path, Value> {
    let mut found = BTreeMap::new();
    walk(object, schema, &mut Vec::new(), &mut found);
    found.retain(|path, _| !SYSTEM.iter().any(|system| path.iter().take(system.len()).eq(system.iter())));
    found
}

fn walk(value: &Value, schema: &Schema, path: &mut Path, found: &mut BTreeMap<Path, Value>) {
    match value {
        Value::Object(map) if !schema.atomic_map && !map.is_empty() => {
            for (name, value) in map {
                path.push(format!("f:{name}"));
                walk(value, schema.field(name), path, found);
                path.pop();
            }
        }
        Value::Array(list) if schema.list != ListKind::Atomic && !list.is_empty() => {
            for item in list {
                let Some(step) = item_step(&schema.list, item) else { continue };
                path.push(step);
                found.insert(path.clone(), Value::Null);
                if item.is_object() {
                    walk(item, schema.items(), path, found);
                }
                path.pop();
            }
        }
        leaf if !path.is_empty() => {
            found.insert(path.clone(), leaf.clone());
        }
        _ => {}
    }
}

fn merge(live: &mut Value, config: &Value, schema: &Schema) {
    match (live, config) {
        (Value::Object(live), Value::Object(config)) if !schema.atomic_map => {
            for (name, value) in config {
                merge(live.entry(name.clone()).or_insert(Value::Null), value, schema.field(name));
            }
        }
        (Value::Array(live), Value::Array(config)) if schema.list != ListKind::Atomic => {
            for item in config {
                let step = item_step(&schema.list, item);
                match live.iter_mut().find(|own| step.is_some() && item_step(&schema.list, own) == step) {
                    Some(own) => merge(own, item, schema.items()),
                    None => live.push(item.clone()),
                }
            }
        }
        (live, config) => *live = config.clone(),
    }
}

fn with_ancestors<'a>(paths: impl Iterator<Item = &'a Path>) -> FieldSet {
    paths.flat_map(|path| (1..=path.len()).map(|length| path.iter().take(length).cloned().collect())).collect()
}

fn remove(value: &mut Value, path: &[String]) {
    let Some((step, rest)) = path.split_first() else { return };
    match (value, step.split_once(':')) {
        (Value::Object(map), Some(("f", name))) => {
            if rest.is_empty() {
                map.remove(name);
            } else if let Some(inner) = map.get_mut(name) {
                remove(inner, rest);
            }
        }
        (Value::Array(list), Some((kind, text))) => {
            let Ok(wanted) = serde_json::from_str::<Value>(text) else { return };
            let matches = |item: &Value| match (kind, &wanted) {
                ("k", Value::Object(keys)) => keys.iter().all(|(key, value)| item.get(key) == Some(value)),
                _ => *item == wanted,
            };
            if rest.is_empty() {
                list.retain(|item| !matches(item));
            } else {
                list.iter_mut().filter(|item| matches(item)).for_each(|item| remove(item, rest));
            }
        }
        _ => {}
    }
}

/// The value at a path of maps.
fn map_at<'a>(value: &'a mut Value, path: &[String]) -> Option<&'a mut Value> {
    path.iter().try_fold(value, |value, step| value.get_mut(step.strip_prefix("f:")?))
}

/// A path as in messages: `.spec.ipam.podCIDRs`, `.status.conditions[type="Ready"].status`.
fn display(path: &[String]) -> String {
    path.iter()
        .map(|step| match step.split_once(':') {
            Some(("f", name)) => format!(".{name}"),
            Some(("k", keys)) => match serde_json::from_str::<Value>(keys) {
                Ok(Value::Object(keys)) => {
                    let list: Vec<String> = keys.iter().map(|(key, value)| format!("{key}={value}")).collect();
                    format!("[{}]", list.join(","))
                }
                _ => format!("[{keys}]"),
            },
            Some((_, value)) => format!("[={value}]"),
            None => step.clone(),
        })
        .collect()
}

fn read(object: &Value) -> Vec<Entry> {
    tree::list(object, "/metadata/managedFields")
        .iter()
        .map(|entry| {
            let mut owned = FieldSet::new();
            if let Some(fields) = entry.get("fieldsV1") {
                from_tree(fields, &mut Vec::new(), &mut owned);
            }
            Entry {
                author: Author {
                    manager: tree::text(entry, "/manager").to_owned(),
                    api_version: tree::text(entry, "/apiVersion").to_owned(),
                    subresource: tree::text(entry, "/subresource").to_owned(),
                    time: tree::text(entry, "/time").to_owned(),
                },
                apply: tree::text(entry, "/operation") == "Apply",
                owned,
            }
        })
        .collect()
}

fn write(object: &mut Value, mut entries: Vec<Entry>) {
    entries.retain(|entry| !entry.owned.is_empty());
    entries.sort_by(|a, b| {
        (!a.apply, &a.author.time, &a.author.manager).cmp(&(!b.apply, &b.author.time, &b.author.manager))
    });
    let list: Vec<Value> = entries
        .into_iter()
        .map(|Entry { author, apply, owned }| {
            let mut entry = json!({
                "manager": author.manager,
                "operation": if apply { "Apply" } else { "Update" },
                "apiVersion": author.api_version,
                "time": author.time,
                "fieldsType": "FieldsV1",
                "fieldsV1": to_tree(&owned),
            });
            if !author.subresource.is_empty() {
                tree::as_map(&mut entry).insert("subresource".to_owned(), Value::String(author.subresource));
            }
            entry
        })
        .collect();
    let metadata = tree::metadata_mut(object);
    if list.is_empty() {
        metadata.remove("managedFields");
    } else {
        metadata.insert("managedFields".to_owned(), Value::Array(list));
    }
}

fn from_tree(tree: &Value, path: &mut Path, owned: &mut FieldSet) {
    let Some(map) = tree.as_object() else { return };
    if map.is_empty() && !path.is_empty() {
        owned.insert(path.clone());
    }
    for (step, inner) in map {
        if step == "." {
            owned.insert(path.clone());
        } else {
            path.push(step.clone());
            from_tree(inner, path, owned);
            path.pop();
        }
    }
}

fn to_tree(owned: &FieldSet) -> Value {
    let mut tree = Value::Object(Map::new());
    for path in owned {
        let mut place = &mut tree;
        for step in path {
            place = tree::as_map(place).entry(step.clone()).or_insert_with(|| Value::Object(Map::new()));
        }
        // A field with owned fields below it is marked by a dot.
        let below = |other: &Path| other.len() > path.len() && other.starts_with(path);
        if owned.range(path.clone()..).take_while(|other| other.starts_with(path)).any(below) {
            tree::as_map(place).insert(".".to_owned(), json!({}));
        }
    }
    tree
}
