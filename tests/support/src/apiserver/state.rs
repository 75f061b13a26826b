//! The server's state and the rules of all reads and writes, as a synchronous state machine: `mod.rs` adds a lock and
//! HTTP.

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::builtin;
use super::clock::Clock;
use super::definition;
use super::error::{ApiError, ApiResult};
use super::fields::{self, Author};
use super::metadata;
use super::patch::{self, PatchKind};
use super::resource::{Registry, Resource};
use super::store::{Key, Store};
use super::tree;

/// The target of a write.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) namespace: String,
    /// Empty for create.
    pub(super) name: String,
    /// Empty, or `status`.
    pub(super) subresource: String,
}

/// Options of a write.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteOptions {
    pub(super) manager: String,
    /// For an apply: take fields over from other managers.
    pub(super) force: bool,
    /// Answer as usual, but do not store anything.
    pub(super) dry_run: bool,
}

/// Options of a delete.
#[derive(Clone, Debug, Default)]
pub(super) struct DeleteOptions {
    pub(super) uid: Option<String>,
    pub(super) resource_version: Option<String>,
    /// Do not delete dependents.
    pub(super) orphan: bool,
    pub(super) dry_run: bool,
}

/// The outcome of a delete.
pub(super) enum Deleted {
    /// Deleted; the object as it was.
    Gone(Arc<Value>),
    /// Marked for deletion, until its finalizers are removed.
    Marked(Arc<Value>),
}

/// Objects, kinds, clock and random numbers.
#[derive(Clone)]
pub(super) struct State {
    pub(super) store: Store,
    pub(super) registry: Registry,
    random: SmallRng,
    clock: Clock,
}

impl State {
    /// A cluster with its initial namespaces only.
    pub(super) fn new(clock: Clock, seed: u64, keep_changes: usize) -> Self {
        let mut state = Self {
            store: Store::new(keep_changes),
            registry: builtin::registry(),
            random: SmallRng::seed_from_u64(seed),
            clock,
        };
        for name in ["default", "kube-node-lease", "kube-public", "kube-system"] {
            let key = Key { storage: builtin::namespaces(), namespace: String::new(), name: name.to_owned() };
            let object = json!({
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": name,
                    "uid": state.uid(),
                    "creationTimestamp": clock.stamp(),
                    "labels": {"kubernetes.io/metadata.name": name},
                },
                "spec": {"finalizers": ["kubernetes"]},
                "status": {"phase": "Active"},
            });
            state.store.put(key, object);
        }
        state
    }

    /// Continues the random numbers of another state, which this one replaces.
    pub(super) fn keep_drawing_from(&mut self, other: Self) {
        self.random = other.random;
    }

    /// A version 4 UUID from the server's own source of randomness.
    fn uid(&mut self) -> String {
        let (high, low) = (self.random.random::<u64>(), self.random.random::<u64>());
        let value =
            (u128::from(high) << 64 | u128::from(low)) & !(0xf << 76) & !(0x3 << 62) | (0x4 << 76) | (0x2 << 62);
        let hex = format!("{value:032x}");
        let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default().to_owned();
        [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)].join("-")
    }

    pub(super) fn key(resource: &Resource, namespace: &str, name: &str) -> Key {
        Key { storage: resource.storage.clone(), namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// An object as stored.
    pub(super) fn get(&self, resource: &Resource, namespace: &str, name: &str) -> ApiResult<Arc<Value>> {
        let found = self.store.get(&Self::key(resource, namespace, name));
        found.cloned().ok_or_else(|| ApiError::not_found(resource, name))
    }

    /// Creates an object; if `place.name` is empty, the name is that of the body.
    pub(super) fn create(
        &mut self,
        resource: &Resource,
        place: &Place,
        body: Value,
        options: &WriteOptions,
    ) -> ApiResult<Arc<Value>> {
        let object = self.new_object(resource, place, body)?;
        let mut object = self.admit(resource, object, None)?;
        let author = self.author(resource, place, options);
        fields::record_update(&Value::Null, &mut object, &resource.schema, &author);
        self.insert(resource, object, options)
    }

    /// Converts a body to a new object: sets its name and the server's fields, and removes a status that it must not
    /// have.
    fn new_object(&mut self, resource: &Resource, place: &Place, body: Value) -> ApiResult<Value> {
        let mut object = self.decode(resource, body)?;
        if !tree::text(&object, "/metadata/resourceVersion").is_empty() {
            return Err(ApiError::unexpected("resourceVersion should not be set on objects to be created"));
        }
        let mut name = tree::text(&object, "/metadata/name").to_owned();
        let prefix = tree::text(&object, "/metadata/generateName").to_owned();
        if name.is_empty() && !prefix.is_empty() {
            name = metadata::generate_name(&prefix, || self.random.random());
        }
        if name.is_empty() && place.name.is_empty() {
            let problem = ("metadata.name".to_owned(), "Required value: name or generateName is required".to_owned());
            return Err(ApiError::invalid(resource, "", &[problem]));
        }
        settle_names(resource, place, &mut object, &name)?;
        self.require_namespace(resource, &place.namespace)?;
        let uid = self.uid();
        let created = self.clock.stamp();
        let fields = tree::metadata_mut(&mut object);
        for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink", "generation"] {
            fields.remove(field);
        }
        fields.insert("uid".to_owned(), Value::String(uid));
        fields.insert("creationTimestamp".to_owned(), Value::String(created));
        if resource.generation {
            fields.insert("generation".to_owned(), json!(1));
        }
        if resource.status_subresource && !resource.status_on_create {
            tree::as_map(&mut object).remove("status");
        }
        Ok(object)
    }

    fn insert(&mut self, resource: &Resource, mut object: Value, options: &WriteOptions) -> ApiResult<Arc<Value>> {
        let name = tree::text(&object, "/metadata/name").to_owned();
        let key = Self::key(resource, tree::text(&object, "/metadata/namespace"), &name);
        if self.store.get(&key).is_some() {
            return Err(ApiError::already_exists(resource, &name));
        }
        match (resource.group.as_str(), resource.plural.as_str()) {
            (builtin::DEFINITIONS, _) => definition::establish(&mut object, &self.clock.stamp()),
            ("", "namespaces") => {
                tree::as_map(&mut object).insert("status".to_owned(), json!({"phase": "Active"}));
                let metadata = tree::metadata_mut(&mut object);
                let labels = tree::as_map(metadata.entry("labels").or_insert_with(|| json!({})));
                labels.insert("kubernetes.io/metadata.name".to_owned(), Value::String(name));
            }
            _ => {}
        }
        if options.dry_run {
            return Ok(Arc::new(object));
        }
        Ok(self.commit(resource, &key, object))
    }

    /// Replaces an object, or its status.
    pub(super) fn update(
        &mut self,
        resource: &Resource,
        place: &Place,
        body: Value,
        options: &WriteOptions,
    ) -> ApiResult<Arc<Value>> {
        let Ok(old) = self.get(resource, &place.namespace, &place.name) else {
            if resource.create_on_update && place.subresource.is_empty() {
                return self.create(resource, place, body, options);
            }
            return Err(ApiError::not_found(resource, &place.name));
        };
        let mut object = self.decode(resource, body)?;
        settle_names(resource, place, &mut object, tree::text(&old, "/metadata/name"))?;
        if tree::text(&object, "/metadata/resourceVersion").is_empty() && !resource.unconditional_update {
            let problem = "Invalid value: 0x0: must be specified for an update".to_owned();
            return Err(ApiError::invalid(resource, &place.name, &[("metadata.resourceVersion".to_owned(), problem)]));
        }
        self.replace(resource, place, &old, object, options)
    }

    /// Patches an object, or its status; an apply creates what is absent.
    pub(super) fn patch(
        &mut self,
        resource: &Resource,
        place: &Place,
        kind: PatchKind,
        patch: &Value,
        options: &WriteOptions,
    ) -> ApiResult<Arc<Value>> {
        if kind == PatchKind::Apply {
            return self.apply(resource, place, patch.clone(), options);
        }
        let old = self.get(resource, &place.namespace, &place.name)?;
        let current = resource.present(&old);
        let body = patch::patched(resource, &current, kind, patch)?;
        refuse_other_identity(resource, &old, &body)?;
        let mut object = self.decode(resource, body)?;
        settle_names(resource, place, &mut object, &place.name)?;
        self.replace(resource, place, &old, object, options)
    }

    fn apply(
        &mut self,
        resource: &Resource,
        place: &Place,
        config: Value,
        options: &WriteOptions,
    ) -> ApiResult<Arc<Value>> {
        if options.manager.is_empty() {
            let text = "Required value: is required for apply patch";
            return Err(ApiError::invalid_option("PatchOptions", "fieldManager", text));
        }
        if config.pointer("/metadata/managedFields").is_some() {
            return Err(ApiError::bad_request("metadata.managedFields must be nil"));
        }
        let expected = (tree::text(&config, "/apiVersion"), tree::text(&config, "/kind"));
        if expected != (resource.api_version().as_str(), resource.kind.as_str()) {
            return Err(ApiError::bad_request(format!(
                "apiVersion and kind of the applied object must be {} and {}",
                resource.api_version(),
                resource.kind
            )));
        }
        let unknown = resource.schema.unknown("", &config).or_else(|| unknown_to_kind(resource, &config));
        if let Some(field) = unknown {
            let name = tree::text(&config, "/metadata/name");
            return Err(ApiError::unexpected(format!(
                "failed to create typed patch object ({}/{name}; {}, Kind={}): {field}: field not declared in schema",
                place.namespace,
                resource.api_version(),
                resource.kind
            )));
        }
        let author = self.author(resource, place, options);
        let mut config = config;
        if let Some(conversion) = resource.conversion {
            (conversion.to_stored)(&mut config);
        }
        // An apply to one of spec and status owns no fields of the other.
        if place.subresource == "status" {
            let version = config.pointer("/metadata/resourceVersion").cloned();
            tree::as_map(&mut config).retain(|field, _| ["apiVersion", "kind", "status"].contains(&field.as_str()));
            if let Some(version) = version {
                tree::metadata_mut(&mut config).insert("resourceVersion".to_owned(), version);
            }
        } else if resource.status_subresource {
            tree::as_map(&mut config).remove("status");
        }
        match self.get(resource, &place.namespace, &place.name) {
            Ok(old) => {
                let object = fields::apply(&old, &config, &resource.schema, &author, options.force)?;
                refuse_other_identity(resource, &old, &object)?;
                let mut object = self.decode(resource, object)?;
                settle_names(resource, place, &mut object, &place.name)?;
                self.finish(resource, place, &old, object, options, None)
            }
            Err(missing) if !place.subresource.is_empty() => Err(missing),
            Err(_) => {
                tree::metadata_mut(&mut config).remove("resourceVersion");
                let object = self.new_object(resource, place, config)?;
                let managed = fields::apply(&Value::Null, &object, &resource.schema, &author, true)?;
                let mut object = self.admit(resource, object, None)?;
                tree::copy_metadata(&mut object, &managed, "managedFields");
                self.insert(resource, object, options)
            }
        }
    }

    /// Common end of update and patch: `object` replaces `old`.
    fn replace(
        &mut self,
        resource: &Resource,
        place: &Place,
        old: &Arc<Value>,
        object: Value,
        options: &WriteOptions,
    ) -> ApiResult<Arc<Value>> {
        let author = self.author(resource, place, options);
        self.finish(resource, place, old, object, options, Some(&author))
    }

    /// Protects the server's fields and the separation of spec and status, validates, and stores the object if anything
    /// has changed. `author` records an update; without it, the object has its new `managedFields` (an apply).
    fn finish(
        &mut self,
        resource: &Resource,
        place: &Place,
        old: &Arc<Value>,
        mut object: Value,
        options: &WriteOptions,
        author: Option<&Author>,
    ) -> ApiResult<Arc<Value>> {
        let name = tree::text(old, "/metadata/name");
        let version = tree::text(&object, "/metadata/resourceVersion");
        if !version.is_empty() && version != tree::text(old, "/metadata/resourceVersion") {
            let why = "the object has been modified; please apply your changes to the latest version and try again";
            return Err(ApiError::conflict(resource, name, why));
        }
        let (uid, old_uid) = (tree::text(&object, "/metadata/uid"), tree::text(old, "/metadata/uid"));
        if !uid.is_empty() && uid != old_uid {
            let why = format!("Precondition failed: UID in precondition: {uid}, UID in object meta: {old_uid}");
            return Err(ApiError::conflict(resource, name, &why));
        }
        let managed = object.pointer("/metadata/managedFields").cloned();
        let guarded = [
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "resourceVersion",
        ];
        if place.subresource == "status" {
            // A write of the status subresource changes the status only; for built-in kinds also metadata.
            let status = object.get("status").cloned();
            let metadata = object.get("metadata").filter(|_| resource.normalise.is_some()).cloned();
            object = Value::clone(old);
            if let Some(metadata) = metadata {
                tree::as_map(&mut object).insert("metadata".to_owned(), metadata);
                for field in guarded {
                    tree::copy_metadata(&mut object, old, field);
                }
            }
            match status {
                Some(status) => tree::as_map(&mut object).insert("status".to_owned(), status),
                None => tree::as_map(&mut object).remove("status"),
            };
            if let (None, Some(managed)) = (author, managed) {
                tree::metadata_mut(&mut object).insert("managedFields".to_owned(), managed);
            }
        } else {
            for field in guarded {
                tree::copy_metadata(&mut object, old, field);
            }
            if resource.status_subresource {
                tree::copy_field(&mut object, old, "status");
            }
        }
        let mut object = self.admit(resource, object, Some(old))?;
        if let Some(author) = author {
            fields::record_update(old, &mut object, &resource.schema, author);
        }
        if fields::same_content(old, &object) && fields::same_owners(old, &object) {
            return Ok(Arc::clone(old));
        }
        if resource.generation && wanted(resource, old) != wanted(resource, &object) {
            let generation = old.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or_default() + 1;
            tree::metadata_mut(&mut object).insert("generation".to_owned(), json!(generation));
        }
        if resource.group == builtin::DEFINITIONS && place.subresource.is_empty() {
            definition::establish(&mut object, &self.clock.stamp());
        }
        if options.dry_run {
            return Ok(Arc::new(object));
        }
        let key = Self::key(resource, &place.namespace, name);
        Ok(self.commit(resource, &key, object))
    }

    /// Converts a body to the stored form: checks version and kind, prunes unknown fields.
    fn decode(&self, resource: &Resource, mut body: Value) -> ApiResult<Value> {
        if !body.is_object() {
            return Err(ApiError::bad_request("the object provided is not a JSON object"));
        }
        let (api_version, kind) = (tree::text(&body, "/apiVersion"), tree::text(&body, "/kind"));
        if resource.normalise.is_none() {
            decode_custom(resource, &body)?;
        }
        let same_group = api_version.rsplit_once('/').map_or("", |(group, _)| group) == resource.group;
        if !api_version.is_empty() && !same_group || !kind.is_empty() && kind != resource.kind {
            return Err(ApiError::bad_request(format!(
                "the object provided is {api_version} {kind}, not {} {}",
                resource.api_version(),
                resource.kind
            )));
        }
        let map = tree::as_map(&mut body);
        map.insert("apiVersion".to_owned(), Value::String(resource.api_version()));
        map.insert("kind".to_owned(), Value::String(resource.kind.clone()));
        map.entry("metadata").or_insert_with(|| json!({}));
        let mut object = match resource.normalise {
            Some(normalise) => normalise(body).map_err(|error| {
                ApiError::bad_request(format!(
                    "{} in version \"{}\" cannot be handled as a {}: {error}",
                    resource.kind, resource.version, resource.kind
                ))
            })?,
            None => {
                resource.schema.prune(&mut body);
                body
            }
        };
        if let Some(conversion) = resource.conversion {
            (conversion.to_stored)(&mut object);
        }
        let map = tree::as_map(&mut object);
        map.insert("apiVersion".to_owned(), Value::String(resource.api_version()));
        map.insert("kind".to_owned(), Value::String(resource.kind.clone()));
        Ok(object)
    }

    /// Rejects violations of the rules of metadata, of the schema or of the kind.
    fn admit(&self, resource: &Resource, object: Value, old: Option<&Value>) -> ApiResult<Value> {
        let name = tree::text(&object, "/metadata/name");
        let mut problems = metadata::problems(resource, &object);
        if resource.normalise.is_none() {
            resource.schema.check("", &object, &mut problems);
            // Unchanged violations of the old object are tolerated.
            if let Some(old) = old.filter(|_| !problems.is_empty()) {
                let mut known = Vec::new();
                resource.schema.check("", old, &mut known);
                problems.retain(|problem| !known.contains(problem));
            }
        }
        if resource.group == builtin::DEFINITIONS {
            problems.extend(definition::problems(&object));
        }
        problems.extend(builtin::problems(resource, &object, old));
        if resource.storage.plural.as_ref() == "leases" {
            problems.extend(lease_problems(&object));
        }
        if let Some(old) = old.filter(|old| !tree::text(old, "/metadata/deletionTimestamp").is_empty()) {
            let before = tree::list(old, "/metadata/finalizers");
            for added in tree::list(&object, "/metadata/finalizers").iter().filter(|name| !before.contains(name)) {
                let text = format!(
                    "Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers [{added}]"
                );
                problems.push(("metadata.finalizers".to_owned(), text));
            }
        }
        if problems.is_empty() { Ok(object) } else { Err(ApiError::invalid(resource, name, &problems)) }
    }

    fn require_namespace(&self, resource: &Resource, namespace: &str) -> ApiResult<()> {
        if !resource.namespaced {
            return Ok(());
        }
        let key = Key { storage: builtin::namespaces(), namespace: String::new(), name: namespace.to_owned() };
        if self.store.get(&key).is_some() {
            return Ok(());
        }
        let namespaces = self.registry.at(&builtin::namespaces());
        Err(namespaces.map_or_else(ApiError::no_such_path, |kind| ApiError::not_found(&kind, namespace)))
    }

    fn author(&self, resource: &Resource, place: &Place, options: &WriteOptions) -> Author {
        Author {
            manager: options.manager.clone(),
            api_version: resource.api_version(),
            subresource: place.subresource.clone(),
            time: self.clock.stamp(),
        }
    }

    /// Stores an object, updates the kinds of a CRD, completes a deletion whose last finalizer was removed, and
    /// collects garbage.
    fn commit(&mut self, resource: &Resource, key: &Key, object: Value) -> Arc<Value> {
        let finished = !tree::text(&object, "/metadata/deletionTimestamp").is_empty()
            && tree::list(&object, "/metadata/finalizers").is_empty();
        if finished {
            // Deleted at once: watches do not see the write, and its answer has the previous version.
            let mut object = object;
            if let Some(before) = self.store.get(key) {
                tree::copy_metadata(&mut object, before, "resourceVersion");
            }
            self.erase(key);
            return Arc::new(object);
        }
        let kept = self.store.put(key.clone(), object);
        if resource.group == builtin::DEFINITIONS {
            self.registry.remove(tree::text(&kept, "/spec/group"), tree::text(&kept, "/spec/names/plural"));
            for resource in definition::resources(&kept) {
                self.registry.insert(resource);
            }
        }
        if self.is_orphan(key, &kept) {
            self.collect_garbage();
        }
        kept
    }

    /// Deletes an object, or marks it if it has finalizers.
    pub(super) fn delete(
        &mut self,
        resource: &Resource,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> ApiResult<Deleted> {
        let old = self.get(resource, namespace, name)?;
        for (field, wanted) in [("uid", &options.uid), ("resourceVersion", &options.resource_version)] {
            let found = tree::text(&old, &format!("/metadata/{field}"));
            if let Some(wanted) = wanted.as_deref().filter(|wanted| *wanted != found) {
                let label = if field == "uid" { "UID" } else { "ResourceVersion" };
                let why =
                    format!("Precondition failed: {label} in precondition: {wanted}, {label} in object meta: {found}");
                return Err(ApiError::conflict(resource, name, &why));
            }
        }
        let key = Self::key(resource, namespace, name);
        if options.dry_run {
            return Ok(Deleted::Gone(old));
        }
        if options.orphan {
            self.orphan(tree::text(&old, "/metadata/uid"));
        }
        if tree::list(&old, "/metadata/finalizers").is_empty() {
            return Ok(Deleted::Gone(self.erase(&key).unwrap_or(old)));
        }
        if !tree::text(&old, "/metadata/deletionTimestamp").is_empty() {
            return Ok(Deleted::Marked(old));
        }
        let mut object = Value::clone(&old);
        let generation = old.pointer("/metadata/generation").and_then(Value::as_i64);
        let fields = tree::metadata_mut(&mut object);
        fields.insert("deletionTimestamp".to_owned(), Value::String(self.clock.stamp()));
        fields.insert("deletionGracePeriodSeconds".to_owned(), json!(0));
        if let Some(generation) = generation {
            fields.insert("generation".to_owned(), json!(generation + 1));
        }
        Ok(Deleted::Marked(self.store.put(key, object)))
    }

    /// Removes an object and what depends on it: a namespace's content, a CRD's objects, dependents.
    fn erase(&mut self, key: &Key) -> Option<Arc<Value>> {
        let gone = self.store.remove(key)?;
        let content: Vec<Key> = if key.storage == builtin::namespaces() {
            self.store.iter().map(|(inner, _)| inner).filter(|inner| inner.namespace == key.name).cloned().collect()
        } else if key.storage == builtin::definitions() {
            let (group, plural) = (tree::text(&gone, "/spec/group"), tree::text(&gone, "/spec/names/plural"));
            self.registry.remove(group, plural);
            let of_kind = |inner: &Key| &*inner.storage.group == group && &*inner.storage.plural == plural;
            self.store.iter().map(|(inner, _)| inner).filter(|inner| of_kind(inner)).cloned().collect()
        } else {
            Vec::new()
        };
        for inner in content {
            self.store.remove(&inner);
        }
        self.collect_garbage();
        Some(gone)
    }

    /// Deletes objects all of whose owners are gone, recursively. A real cluster does so asynchronously. An owner of a
    /// kind that is not served counts as existing, as for the real garbage collector.
    fn collect_garbage(&mut self) {
        loop {
            let orphans: Vec<Key> = self
                .store
                .iter()
                .filter(|(key, object)| self.is_orphan(key, object))
                .map(|(key, _)| key.clone())
                .collect();
            if orphans.is_empty() {
                return;
            }
            for key in orphans {
                let Some(resource) = self.registry.at(&key.storage) else { continue };
                // The object exists under this lock; a delete without preconditions cannot fail.
                let _ = self.delete(&resource, &key.namespace, &key.name, &DeleteOptions::default());
            }
        }
    }

    /// Whether an object has owners, and none of them exists any more.
    fn is_orphan(&self, key: &Key, object: &Value) -> bool {
        let owners = tree::list(object, "/metadata/ownerReferences");
        let pending = !tree::text(object, "/metadata/deletionTimestamp").is_empty();
        !pending && !owners.is_empty() && owners.iter().all(|owner| self.is_gone(key, owner))
    }

    fn is_gone(&self, dependent: &Key, owner: &Value) -> bool {
        let text = |field: &str| tree::text(owner, &format!("/{field}"));
        let Some(kind) = self.registry.find_kind(text("apiVersion"), text("kind")) else { return false };
        let namespace = if kind.namespaced { dependent.namespace.as_str() } else { "" };
        let found = self.store.get(&Self::key(&kind, namespace, text("name")));
        found.is_none_or(|object| tree::text(object, "/metadata/uid") != text("uid"))
    }

    /// Removes an owner from the owner references of all objects.
    fn orphan(&mut self, owner: &str) {
        let owned = |object: &Value| {
            tree::list(object, "/metadata/ownerReferences")
                .iter()
                .any(|reference| tree::text(reference, "/uid") == owner)
        };
        let dependents: BTreeMap<Key, Value> = self
            .store
            .iter()
            .filter(|(_, object)| owned(object))
            .map(|(key, object)| (key.clone(), Value::clone(object)))
            .collect();
        for (key, mut object) in dependents {
            if let Some(Value::Array(list)) = tree::metadata_mut(&mut object).get_mut("ownerReferences") {
                list.retain(|reference| tree::text(reference, "/uid") != owner);
            }
            self.store.put(key, object);
        }
    }
}

/// Sets the name and namespace of a body to those of its path, and rejects others.
fn settle_names(resource: &Resource, place: &Place, object: &mut Value, name: &str) -> ApiResult<()> {
    let path_name = if place.name.is_empty() { name } else { place.name.as_str() };
    let found = tree::text(object, "/metadata/name");
    if !found.is_empty() && found != path_name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({found}) does not match the name on the URL ({path_name})"
        )));
    }
    let namespace = tree::text(object, "/metadata/namespace");
    if !namespace.is_empty() && resource.namespaced && namespace != place.namespace {
        return Err(ApiError::bad_request(format!(
            "the namespace of the provided object does not match the namespace sent on the request: {namespace}, {}",
            place.namespace
        )));
    }
    let fields = tree::metadata_mut(object);
    fields.insert("name".to_owned(), Value::String(path_name.to_owned()));
    if resource.namespaced {
        fields.insert("namespace".to_owned(), Value::String(place.namespace.clone()));
    } else {
        fields.remove("namespace");
    }
    Ok(())
}

/// A patch must not change the identity of its object, nor remove spec or metadata.
fn refuse_other_identity(resource: &Resource, old: &Value, patched: &Value) -> ApiResult<()> {
    let mut problems = Vec::new();
    let (uid, old_uid) = (tree::text(patched, "/metadata/uid"), tree::text(old, "/metadata/uid"));
    if !uid.is_empty() && uid != old_uid {
        problems.push(("metadata.uid".to_owned(), format!("Invalid value: \"{uid}\": field is immutable")));
    }
    if resource.normalise.is_none() {
        let kind = tree::text(patched, "/kind");
        if kind != resource.kind {
            let text = format!("Invalid value: \"{kind}\": must be {}", resource.kind);
            problems.push(("kind".to_owned(), text));
        }
        if patched.get("spec") == Some(&Value::Null) {
            let text = "Invalid value: \"null\": spec in body must be of type object: \"null\"";
            problems.push(("spec".to_owned(), text.to_owned()));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid(resource, tree::text(old, "/metadata/name"), &problems))
}

/// The path of the first field that the type of a built-in kind does not have.
fn unknown_to_kind(resource: &Resource, config: &Value) -> Option<String> {
    fn lost(path: &str, sent: &Value, kept: &Value) -> Option<String> {
        match (sent, kept) {
            (Value::Object(sent), Value::Object(kept)) => sent.iter().find_map(|(name, value)| {
                let place = format!("{path}.{name}");
                match kept.get(name) {
                    Some(kept) => lost(&place, value, kept),
                    None => (!value.is_null()).then_some(place),
                }
            }),
            (Value::Array(sent), Value::Array(kept)) => {
                let items = sent.iter().zip(kept).enumerate();
                items.map(|(index, (sent, kept))| lost(&format!("{path}[{index}]"), sent, kept)).find_map(|found| found)
            }
            _ => None,
        }
    }
    let kept = (resource.normalise?)(config.clone()).ok()?;
    lost("", config, &kept)
}

/// Required fields of a custom resource. Bodies of built-in kinds may omit their kind.
fn decode_custom(resource: &Resource, body: &Value) -> ApiResult<()> {
    let (api_version, kind) = (tree::text(body, "/apiVersion"), tree::text(body, "/kind"));
    if kind.is_empty() || api_version.is_empty() {
        let field = if kind.is_empty() { "Kind" } else { "apiVersion" };
        return Err(ApiError::bad_request(format!(
            "the object provided is unrecognized (must be of type {}): Object '{field}' is missing",
            resource.kind
        )));
    }
    if api_version != resource.api_version() {
        return Err(ApiError::bad_request(format!(
            "the API version in the data ({api_version}) does not match the expected API version ({})",
            resource.api_version()
        )));
    }
    for field in ["labels", "annotations"] {
        let map = body.pointer(&format!("/metadata/{field}")).and_then(Value::as_object);
        if let Some(wrong) = map.into_iter().flatten().map(|(_, value)| value).find(|value| !value.is_string()) {
            return Err(ApiError::bad_request(format!(
                "{kind} in version \"{}\" cannot be handled as a {kind}: {wrong} in {field}: expected a text",
                resource.version
            )));
        }
    }
    Ok(())
}

/// The part of an object that counts for its generation.
fn wanted(resource: &Resource, object: &Value) -> Value {
    let mut object = object.clone();
    let map = tree::as_map(&mut object);
    map.remove("metadata");
    map.remove("apiVersion");
    if resource.status_subresource {
        map.remove("status");
    }
    object
}

/// The rules of a Lease: positive duration, non-negative number of transitions.
fn lease_problems(lease: &Value) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let number = |field: &str| lease.pointer(&format!("/spec/{field}")).and_then(Value::as_i64);
    if let Some(seconds) = number("leaseDurationSeconds").filter(|seconds| *seconds <= 0) {
        problems.push((
            "spec.leaseDurationSeconds".to_owned(),
            format!("Invalid value: {seconds}: must be greater than 0"),
        ));
    }
    if let Some(count) = number("leaseTransitions").filter(|count| *count < 0) {
        problems.push((
            "spec.leaseTransitions".to_owned(),
            format!("Invalid value: {count}: must be greater than or equal to 0"),
        ));
    }
    problems
}
