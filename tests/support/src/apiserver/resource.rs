//! A served resource: a kind at a version, its names, and its specific rules.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::schema::Schema;
use super::tree;

/// Store of a resource's objects: all versions of a kind share one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Storage {
    /// API group; empty for the core group.
    pub(super) group: Arc<str>,
    /// Plural name in lower case.
    pub(super) plural: Arc<str>,
}

/// Conversion between a version and the stored form.
#[derive(Clone, Copy)]
pub(super) struct Conversion {
    /// From the client's to the stored form.
    pub(super) to_stored: fn(&mut Value),
    /// From the stored form to that of this version.
    pub(super) from_stored: fn(&mut Value),
}

/// A column of `kubectl get`.
#[derive(Clone)]
pub(super) struct Column {
    /// Heading.
    pub(super) name: String,
    /// OpenAPI type, for example `string` or `date`.
    pub(super) kind: String,
    /// 0: always shown; otherwise with `-o wide` only.
    pub(super) priority: i64,
    /// Source of its cells.
    pub(super) cell: Cell,
}

/// Source of a cell.
#[derive(Clone)]
pub(super) enum Cell {
    /// A JSONPath as in CustomResourceDefinitions, such as `.status.ipam.operator-status.error`.
    Path(String),
    /// Computed from the object; the second argument is the server's time.
    Computed(fn(&Value, jiff::Timestamp) -> Value),
}

/// A kind at one version, as discovery lists it, with the rules of its registry.
#[derive(Clone)]
pub(super) struct Resource {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) kind: String,
    pub(super) plural: String,
    pub(super) singular: String,
    pub(super) short_names: Vec<String>,
    pub(super) categories: Vec<String>,
    pub(super) namespaced: bool,
    /// Whether `status` is a subresource.
    pub(super) status_subresource: bool,
    /// Whether a create may nevertheless set the status, as kubelet's of its Node does.
    pub(super) status_on_create: bool,
    /// Whether `metadata.generation` counts changes of the spec; older core kinds have none.
    pub(super) generation: bool,
    /// Whether an update may omit `metadata.resourceVersion`.
    pub(super) unconditional_update: bool,
    /// Whether an update creates an absent object.
    pub(super) create_on_update: bool,
    /// Whether strategic merge patches are supported; custom resources do not support them.
    pub(super) strategic_patch: bool,
    /// The kind's fields, as far as the server needs them.
    pub(super) schema: Arc<Schema>,
    /// Decodes and encodes by the kind's type: drops unknown fields and reports wrong types.
    pub(super) normalise: Option<fn(Value) -> Result<Value, serde_json::Error>>,
    pub(super) conversion: Option<Conversion>,
    pub(super) columns: Vec<Column>,
    /// Fields for field selectors besides `metadata.name` and `metadata.namespace`.
    pub(super) selectable: Vec<String>,
    /// Store of this version's objects.
    pub(super) storage: Storage,
}

impl Resource {
    /// `plural.group`, as in messages; only the plural for the core group.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// The `apiVersion` of objects of this version.
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Whether the kind is not that of a custom resource.
    pub(super) fn is_built_in(&self) -> bool {
        self.strategic_patch
    }

    /// Whether an owner reference or a manifest means this kind.
    pub(super) fn is_kind(&self, api_version: &str, kind: &str) -> bool {
        let (group, version) = api_version.rsplit_once('/').unwrap_or(("", api_version));
        self.kind == kind && self.group == group && self.version == version
    }

    /// A stored object in this version's form.
    pub(super) fn present<'a>(&self, stored: &'a Value) -> Cow<'a, Value> {
        if self.conversion.is_none() && self.is_kind(tree::text(stored, "/apiVersion"), tree::text(stored, "/kind")) {
            return Cow::Borrowed(stored);
        }
        let mut object = stored.clone();
        if let Some(conversion) = self.conversion {
            (conversion.from_stored)(&mut object);
        }
        let map = tree::as_map(&mut object);
        map.insert("apiVersion".to_owned(), Value::String(self.api_version()));
        map.insert("kind".to_owned(), Value::String(self.kind.clone()));
        Cow::Owned(object)
    }
}

/// All served resources: the built-in ones and those of CustomResourceDefinitions.
#[derive(Clone, Default)]
pub(super) struct Registry {
    /// Keyed by (group, version, plural), so that discovery lists them in a stable order.
    resources: BTreeMap<(String, String, String), Arc<Resource>>,
}

impl Registry {
    /// Adds or replaces a resource.
    pub(super) fn insert(&mut self, resource: Resource) {
        let key = (resource.group.clone(), resource.version.clone(), resource.plural.clone());
        self.resources.insert(key, Arc::new(resource));
    }

    /// Removes all versions of a custom resource.
    pub(super) fn remove(&mut self, group: &str, plural: &str) {
        self.resources.retain(|key, _| key.0 != group || key.2 != plural);
    }

    /// The resource at a path of the API.
    pub(super) fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        self.resources.get(&(group.to_owned(), version.to_owned(), plural.to_owned())).cloned()
    }

    /// The resource of a kind, as owner references name it.
    pub(super) fn find_kind(&self, api_version: &str, kind: &str) -> Option<Arc<Resource>> {
        self.resources.values().find(|resource| resource.is_kind(api_version, kind)).cloned()
    }

    /// Any version of a store's kind.
    pub(super) fn at(&self, storage: &Storage) -> Option<Arc<Resource>> {
        self.resources.values().find(|resource| resource.storage == *storage).cloned()
    }

    /// All, ordered by group, version and plural.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.resources.values()
    }
}
