//! The built-in kinds: those of Kubernetes that Cistern reads or writes, and those that `kubectl get` and `kubectl
//! describe` request.

use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event as NewEvent;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::metadata;
use super::resource::{Conversion, Registry, Resource, Storage};
use super::schema::Schema;
use super::table;
use super::tree;

/// The group of CustomResourceDefinitions.
pub(super) const DEFINITIONS: &str = "apiextensions.k8s.io";

/// Store of CustomResourceDefinitions.
pub(super) fn definitions() -> Storage {
    Storage { group: DEFINITIONS.into(), plural: "customresourcedefinitions".into() }
}

/// Store of Namespaces.
pub(super) fn namespaces() -> Storage {
    Storage { group: "".into(), plural: "namespaces".into() }
}

/// The registry before any CustomResourceDefinition.
pub(super) fn registry() -> Registry {
    let mut registry = Registry::default();
    for resource in resources() {
        registry.insert(resource);
    }
    registry
}

fn resources() -> Vec<Resource> {
    let conditions = |schema: Schema| schema.list_map("status.conditions", &["type"]);
    let mut list = vec![
        Resource {
            status_subresource: true,
            status_on_create: true,
            unconditional_update: true,
            schema: Arc::new(
                conditions(Schema::built_in()).list_set("spec.podCIDRs").list_map("status.addresses", &["type"]),
            ),
            columns: table::nodes(),
            selectable: selectable(&["spec.unschedulable"]),
            normalise: Some(node),
            ..built_in::<Node>("", "v1", "Node", "nodes", &["no"])
        },
        Resource {
            status_subresource: true,
            unconditional_update: true,
            schema: Arc::new(conditions(Schema::built_in())),
            columns: table::namespaces(),
            selectable: selectable(&["status.phase"]),
            ..built_in::<Namespace>("", "v1", "Namespace", "namespaces", &["ns"])
        },
        Resource {
            namespaced: true,
            status_subresource: true,
            generation: true,
            unconditional_update: true,
            schema: Arc::new(
                conditions(Schema::built_in())
                    .list_map("spec.containers", &["name"])
                    .list_map("spec.volumes", &["name"])
                    .list_map("status.podIPs", &["ip"]),
            ),
            columns: table::pods(),
            selectable: selectable(&["spec.nodeName", "spec.hostNetwork", "status.phase", "status.podIP"]),
            categories: vec!["all".to_owned()],
            ..built_in::<Pod>("", "v1", "Pod", "pods", &["po"])
        },
        Resource {
            namespaced: true,
            status_subresource: true,
            unconditional_update: true,
            create_on_update: true,
            schema: Arc::new(
                conditions(Schema::built_in())
                    .list_map("spec.ports", &["port", "protocol"])
                    .map_atomic("spec.selector"),
            ),
            columns: table::services(),
            selectable: selectable(&["spec.clusterIP", "spec.type"]),
            categories: vec!["all".to_owned()],
            ..built_in::<Service>("", "v1", "Service", "services", &["svc"])
        },
        Resource {
            namespaced: true,
            unconditional_update: true,
            columns: table::config_maps(),
            ..built_in::<ConfigMap>("", "v1", "ConfigMap", "configmaps", &["cm"])
        },
        Resource {
            namespaced: true,
            columns: table::leases(),
            create_on_update: true,
            ..built_in::<Lease>("coordination.k8s.io", "v1", "Lease", "leases", &[])
        },
        Resource {
            namespaced: true,
            unconditional_update: true,
            generation: true,
            ..built_in::<EndpointSlice>("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", &[])
        },
        Resource {
            status_subresource: true,
            generation: true,
            schema: Arc::new(conditions(Schema::built_in())),
            columns: table::definitions(),
            categories: vec!["api-extensions".to_owned()],
            ..built_in::<CustomResourceDefinition>(
                DEFINITIONS,
                "v1",
                "CustomResourceDefinition",
                "customresourcedefinitions",
                &["crd", "crds"],
            )
        },
    ];
    let event = Resource {
        namespaced: true,
        unconditional_update: true,
        create_on_update: true,
        columns: table::events(),
        selectable: selectable(&[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ]),
        ..built_in::<Event>("", "v1", "Event", "events", &["ev"])
    };
    list.push(Resource {
        group: "events.k8s.io".to_owned(),
        normalise: Some(normalise::<NewEvent>),
        conversion: Some(Conversion { to_stored: event_to_stored, from_stored: event_from_stored }),
        ..event.clone()
    });
    list.push(event);
    list
}

fn built_in<K: Serialize + DeserializeOwned>(
    group: &str,
    version: &str,
    kind: &str,
    plural: &str,
    short_names: &[&str],
) -> Resource {
    Resource {
        group: group.to_owned(),
        version: version.to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
        singular: kind.to_lowercase(),
        short_names: short_names.iter().map(|name| (*name).to_owned()).collect(),
        categories: Vec::new(),
        namespaced: false,
        status_subresource: false,
        status_on_create: false,
        generation: false,
        unconditional_update: false,
        create_on_update: false,
        strategic_patch: true,
        schema: Arc::new(Schema::built_in()),
        normalise: Some(normalise::<K>),
        conversion: None,
        columns: table::plain(),
        selectable: Vec::new(),
        storage: Storage { group: group.into(), plural: plural.into() },
    }
}

fn selectable(paths: &[&str]) -> Vec<String> {
    paths.iter().map(|path| (*path).to_owned()).collect()
}

fn normalise<K: Serialize + DeserializeOwned>(object: Value) -> Result<Value, serde_json::Error> {
    serde_json::from_value::<K>(object).and_then(serde_json::to_value)
}

/// Keeps `podCIDR` and `podCIDRs` of a Node consistent. If they differ, `podCIDR` counts.
fn node(object: Value) -> Result<Value, serde_json::Error> {
    let mut object = normalise::<Node>(object)?;
    for part in ["spec", "status"] {
        tree::as_map(&mut object).entry(part).or_insert_with(|| json!({}));
    }
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(object) };
    let first = spec.get("podCIDRs").and_then(|list| list.get(0)).cloned();
    let single = spec.get("podCIDR").filter(|block| block.as_str() != Some("")).cloned();
    match (single, first) {
        (None, Some(first)) => drop(spec.insert("podCIDR".to_owned(), first)),
        (Some(single), first) if first.as_ref() != Some(&single) => {
            spec.insert("podCIDRs".to_owned(), json!([single]));
        }
        _ => {}
    }
    Ok(object)
}

/// The rules of built-in kinds.
pub(super) fn problems(resource: &Resource, object: &Value, old: Option<&Value>) -> Vec<(String, String)> {
    let mut problems = match resource.storage.plural.as_ref() {
        "nodes" => node_problems(object, old),
        "configmaps" => config_map_problems(object, old),
        "events" if resource.group == "events.k8s.io" => event_problems(object, old),
        _ => Vec::new(),
    };
    if resource.normalise.is_some() {
        // Finalizers without a group are Kubernetes' own.
        let own = ["kubernetes", "orphan", "foregroundDeletion"];
        for (index, finalizer) in tree::list(object, "/metadata/finalizers").iter().enumerate() {
            if finalizer.as_str().is_some_and(|name| !name.contains('/') && !own.contains(&name)) {
                problems.push((
                    format!("metadata.finalizers[{index}]"),
                    format!(
                        "Invalid value: {finalizer}: name is neither a standard finalizer name nor is it fully qualified"
                    ),
                ));
            }
        }
    }
    problems
}

/// Rules of a ConfigMap's keys, and of an immutable one.
fn config_map_problems(map: &Value, old: Option<&Value>) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let keys = |field: &str| map.get(field).and_then(Value::as_object).into_iter().flatten().map(|(key, _)| key);
    for (field, key) in keys("data").map(|key| ("data", key)).chain(keys("binaryData").map(|key| ("binaryData", key))) {
        if key.is_empty() || !key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')) {
            let text = "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";
            problems.push((format!("{field}[{key}]"), format!("Invalid value: \"{key}\": {text}")));
        }
    }
    for key in keys("data").filter(|key| keys("binaryData").any(|other| other == *key)) {
        let text = format!("Invalid value: \"{key}\": duplicate of key present in binaryData");
        problems.push((format!("data[{key}]"), text));
    }
    if let Some(old) = old.filter(|old| old.get("immutable") == Some(&Value::Bool(true))) {
        let text = || "Forbidden: field is immutable when `immutable` is set".to_owned();
        if map.get("immutable") != Some(&Value::Bool(true)) {
            problems.push(("immutable".to_owned(), text()));
        }
        for field in ["data", "binaryData"].into_iter().filter(|field| map.get(*field) != old.get(*field)) {
            problems.push((field.to_owned(), text()));
        }
    }
    problems
}

/// Rules of `events.k8s.io`: an event is complete when created; later only its repetition may be updated.
fn event_problems(event: &Value, old: Option<&Value>) -> Vec<(String, String)> {
    /// In stored and in sent form.
    const FIXED: [(&str, &str); 7] = [
        ("involvedObject", "regarding"),
        ("reason", "reason"),
        ("action", "action"),
        ("message", "note"),
        ("type", "type"),
        ("reportingComponent", "reportingController"),
        ("reportingInstance", "reportingInstance"),
    ];
    let mut problems = Vec::new();
    if let Some(old) = old {
        for (stored, sent) in FIXED.into_iter().filter(|(stored, _)| event.get(*stored) != old.get(*stored)) {
            let value = event.get(stored).unwrap_or(&Value::Null);
            problems.push((sent.to_owned(), format!("Invalid value: {value}: field is immutable")));
        }
        return problems;
    }
    if event.get("eventTime").is_none_or(Value::is_null) {
        problems.push(("eventTime".to_owned(), "Required value".to_owned()));
        return problems;
    }
    for (stored, sent) in [FIXED[5], FIXED[6], FIXED[2], FIXED[1]] {
        let text = tree::text(event, &format!("/{stored}"));
        if text.is_empty() {
            problems.push((sent.to_owned(), "Required value".to_owned()));
        } else if stored == "reportingComponent" && !metadata::is_qualified_name(text) {
            problems.push((sent.to_owned(), format!("Invalid value: \"{text}\": name part must be a qualified name")));
        }
    }
    let kind = tree::text(event, "/type");
    if !["Normal", "Warning"].contains(&kind) {
        problems.push(("type".to_owned(), format!("Invalid value: \"\": has invalid value: {kind}")));
    }
    problems
}

/// Rules of a Node's pod CIDRs: valid, one per family, and immutable once set.
fn node_problems(node: &Value, old: Option<&Value>) -> Vec<(String, String)> {
    let blocks = tree::list(node, "/spec/podCIDRs");
    let mut problems = Vec::new();
    let mut families = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        match block.as_str().and_then(|text| text.parse::<ipnet::IpNet>().ok()) {
            Some(block) => families.push(block.addr().is_ipv4()),
            None => problems.push((
                format!("spec.podCIDRs[{index}]"),
                format!("Invalid value: {block}: must be a valid CIDR value"),
            )),
        }
    }
    let more_than_one = |family| families.iter().filter(|found| **found == family).count() > 1;
    if more_than_one(true) || more_than_one(false) {
        let list = Value::Array(blocks.to_vec());
        problems.push((
            "spec.podCIDRs".to_owned(),
            format!("Invalid value: {list}: may specify no more than one CIDR for each IP family"),
        ));
    }
    let given = old.map(|old| tree::list(old, "/spec/podCIDRs")).unwrap_or_default();
    if !given.is_empty() && given != blocks {
        let text = "Forbidden: node updates may not change podCIDR except from \"\" to valid";
        problems.push(("spec.podCIDRs".to_owned(), text.to_owned()));
    }
    problems
}

/// Fields with different names in `v1` and `events.k8s.io/v1`, which serve the same objects.
const EVENT_NAMES: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

fn event_to_stored(object: &mut Value) {
    let map = tree::as_map(object);
    for (stored, new) in EVENT_NAMES {
        rename(map, new, stored);
    }
    for part in ["involvedObject", "source"] {
        map.entry(part).or_insert_with(|| json!({}));
    }
}

fn event_from_stored(object: &mut Value) {
    let map = tree::as_map(object);
    for (stored, new) in EVENT_NAMES {
        rename(map, stored, new);
    }
}

fn rename(map: &mut Map<String, Value>, from: &str, to: &str) {
    if let Some(value) = map.remove(from) {
        map.insert(to.to_owned(), value);
    }
}
