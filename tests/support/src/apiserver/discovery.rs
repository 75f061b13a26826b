//! Discovery: `/api`, `/apis`, `/version` and the like.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::resource::{Registry, Resource};

/// The answer for a path that is not a resource's; `None` if there is none.
pub(super) fn answer(registry: &Registry, path: &str) -> Option<Value> {
    let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    match segments.as_slice() {
        ["version"] => Some(json!({
            "major": "1",
            "minor": "33",
            "gitVersion": "v1.33.0+cistern-test",
            "gitCommit": "",
            "gitTreeState": "clean",
            "buildDate": "1970-01-01T00:00:00Z",
            "goVersion": "none",
            "compiler": "rustc",
            "platform": "linux/amd64",
        })),
        ["api"] => Some(
            json!({"kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"], "serverAddressByClientCIDRs": []}),
        ),
        ["apis"] => Some(
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups(registry).into_values().collect::<Vec<_>>()}),
        ),
        ["apis", group] => groups(registry).remove(*group).map(|mut found| {
            if let Some(map) = found.as_object_mut() {
                map.insert("kind".to_owned(), json!("APIGroup"));
                map.insert("apiVersion".to_owned(), json!("v1"));
            }
            found
        }),
        ["api", version] => resources(registry, "", version),
        ["apis", group, version] => resources(registry, group, version),
        _ => None,
    }
}

fn groups(registry: &Registry) -> BTreeMap<String, Value> {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for resource in registry.iter().filter(|resource| !resource.group.is_empty()) {
        let list = versions.entry(resource.group.clone()).or_default();
        if !list.contains(&resource.version) {
            list.push(resource.version.clone());
        }
    }
    versions
        .into_iter()
        .map(|(group, mut list)| {
            // Stable versions come first, because clients prefer the first.
            list.sort_by_key(|version| (version.contains("alpha"), version.contains("beta"), version.clone()));
            let shown: Vec<Value> = list
                .iter()
                .map(|version| json!({"groupVersion": format!("{group}/{version}"), "version": version}))
                .collect();
            let preferred = shown.first().cloned().unwrap_or_default();
            (group.clone(), json!({"name": group, "versions": shown, "preferredVersion": preferred}))
        })
        .collect()
}

fn resources(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let found: Vec<Value> = registry
        .iter()
        .filter(|resource| resource.group == group && resource.version == version)
        .flat_map(|resource| entries(resource))
        .collect();
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    (!found.is_empty()).then(
        || json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": found}),
    )
}

fn entries(resource: &Resource) -> Vec<Value> {
    let verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
    let mut entries = vec![json!({
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": verbs,
        "shortNames": resource.short_names,
        "categories": resource.categories,
    })];
    if resource.status_subresource {
        entries.push(json!({
            "name": format!("{}/status", resource.plural),
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": ["get", "patch", "update"],
        }));
    }
    entries
}
