//! The kinds that are served from the start: those of Kubernetes that Cistern reads or writes, and what `kubectl get` and
//! `kubectl describe` ask for on the way.

use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event as NewEvent;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::resource::{Conversion, Registry, Resource, Storage};
use super::schema::Schema;
use super::table;
use super::tree;

/// The group of CustomResourceDefinitions.
pub(super) const DEFINITIONS: &str = "apiextensions.k8s.io";

/// Where CustomResourceDefinitions are kept.
pub(super) fn definitions() -> Storage {
    Storage { group: DEFINITIONS.into(), plural: "customresourcedefinitions".into() }
}

/// Where Namespaces are kept.
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

/// Fields that have one name in `v1` and another in `events.k8s.io/v1`; both versions show the same objects.
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
    map.entry("involvedObject").or_insert_with(|| json!({}));
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
