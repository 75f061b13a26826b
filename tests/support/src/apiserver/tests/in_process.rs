use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Error, ResourceExt as _};
use serde_json::{Value, json};

use crate::apiserver::{ApiServer, CallMatch, Fault, Link, Options, Verb};

/// A CiliumNode's definition in small: a map and two lists of every kind, an enum, a status of its own.
fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "ciliumnodes.cilium.io"},
        "spec": {
            "group": "cilium.io",
            "scope": "Cluster",
            "names": {"kind": "CiliumNode", "plural": "ciliumnodes", "shortNames": ["cn", "ciliumn"]},
            "versions": [{
                "name": "v2",
                "served": true,
                "storage": true,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "required": ["metadata", "spec"], "properties": {
                    "spec": {"type": "object", "properties": {
                        "ipam": {"type": "object", "properties": {
                            "podCIDRs": {"type": "array", "items": {"type": "string"}},
                            "pre-allocate": {"type": "integer", "minimum": 0},
                            "pool": {"type": "object", "additionalProperties": {
                                "type": "object", "properties": {"owner": {"type": "string"}},
                            }},
                        }},
                    }},
                    "status": {"type": "object", "properties": {
                        "ipam": {"type": "object", "properties": {
                            "operator-status": {"type": "object", "properties": {"error": {"type": "string"}}},
                            "release-ips": {"type": "object", "additionalProperties": {
                                "type": "string", "enum": ["marked-for-release", "released"],
                            }},
                        }},
                        "conditions": {
                            "type": "array",
                            "x-kubernetes-list-type": "map",
                            "x-kubernetes-list-map-keys": ["type"],
                            "items": {"type": "object", "properties": {
                                "type": {"type": "string"}, "status": {"type": "string"},
                            }},
                        },
                    }},
                }}},
            }],
        },
    })
}

fn server() -> ApiServer {
    let server = ApiServer::new(Options::default());
    server.create(&definition()).unwrap();
    server
}

fn cilium_nodes(client: Client) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("cilium.io", "v2", "CiliumNode");
    Api::all_with(client, &ApiResource::from_gvk_with_plural(&gvk, "ciliumnodes"))
}

fn cilium_node(name: &str, spec: &Value) -> DynamicObject {
    let object = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name}, "spec": spec,
    });
    serde_json::from_value(object).unwrap()
}

fn node(name: &str) -> Node {
    serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
}

fn code(error: Error) -> u16 {
    match error {
        Error::Api(status) => status.code,
        other => panic!("not an answer: {other}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_kind_is_served_from_its_definition_on() {
    let server = ApiServer::new(Options::default());
    let nodes = cilium_nodes(server.client_as("agent"));
    assert_eq!(code(nodes.get("n1").await.unwrap_err()), 404);
    server.create(&definition()).unwrap();
    let status = server.get("crd", "", "ciliumnodes.cilium.io").unwrap();
    assert_eq!(status.pointer("/status/conditions/1/type"), Some(&json!("Established")));
    assert!(nodes.list(&ListParams::default()).await.unwrap().items.is_empty());
    let created = nodes.create(&PostParams::default(), &cilium_node("n1", &json!({}))).await.unwrap();
    assert!(created.uid().is_some() && created.metadata.generation == Some(1));
    server.delete("crd", "", "ciliumnodes.cilium.io").unwrap();
    assert_eq!(code(nodes.get("n1").await.unwrap_err()), 404);
}

#[tokio::test(start_paused = true)]
async fn fields_that_the_schema_does_not_know_are_pruned_and_wrong_ones_refused() {
    let nodes = cilium_nodes(server().client_as("agent"));
    let created = nodes
        .create(&PostParams::default(), &cilium_node("n1", &json!({"ipam": {"pool": {}}, "typo": 1})))
        .await
        .unwrap();
    assert_eq!(created.data.get("spec"), Some(&json!({"ipam": {"pool": {}}})));
    for (spec, what) in [
        (json!({"ipam": {"podCIDRs": "10.0.0.0/24"}}), "spec.ipam.podCIDRs"),
        (json!({"ipam": {"pre-allocate": -1}}), "greater than or equal to"),
        (json!({"ipam": {"pool": {"10.0.0.1": "x"}}}), "spec.ipam.pool.10.0.0.1"),
    ] {
        let Error::Api(status) = nodes.create(&PostParams::default(), &cilium_node("n2", &spec)).await.unwrap_err()
        else {
            panic!("no answer")
        };
        assert_eq!((status.code, status.reason.as_str()), (422, "Invalid"));
        assert!(status.message.contains(what), "{}", status.message);
    }
    let apply = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "spec": {"typo": 1}});
    let refused = nodes.patch("n1", &PatchParams::apply("x"), &Patch::Apply(&apply)).await.unwrap_err();
    assert!(refused.to_string().contains(".spec.typo: field not declared in schema"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn metadata_is_validated() {
    let nodes: Api<Node> = Api::all(server().client_as("agent"));
    for name in ["UPPER", "under_score", "-x", "x.", ""] {
        let error = nodes.create(&PostParams::default(), &node(name)).await.unwrap_err();
        assert_eq!(code(error), 422, "{name:?}");
    }
    let mut labelled = node("n1");
    labelled.labels_mut().insert("a".to_owned(), "not a value".to_owned());
    assert_eq!(code(nodes.create(&PostParams::default(), &labelled).await.unwrap_err()), 422);
    let leases: Api<Lease> = Api::namespaced(server().client_as("agent"), "kube-system");
    let lease = json!({"metadata": {"name": "l"}, "spec": {"leaseDurationSeconds": 0}});
    let error = leases.create(&PostParams::default(), &serde_json::from_value(lease).unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("spec.leaseDurationSeconds"), "{error}");
    let maps: Api<ConfigMap> = Api::namespaced(server().client_as("agent"), "nowhere");
    let map = serde_json::from_value(json!({"metadata": {"generateName": "c-"}})).unwrap();
    let error = maps.create(&PostParams::default(), &map).await.unwrap_err();
    assert!(error.to_string().contains("namespaces \"nowhere\" not found"), "{error}");
    let maps: Api<ConfigMap> = Api::namespaced(server().client_as("agent"), "default");
    let named = maps.create(&PostParams::default(), &map).await.unwrap().name_any();
    assert!(named.starts_with("c-") && named.len() == 7, "{named}");
}

#[tokio::test(start_paused = true)]
async fn an_update_of_an_old_version_conflicts() {
    let server = server();
    let nodes = cilium_nodes(server.client_as("agent"));
    let first = nodes.create(&PostParams::default(), &cilium_node("n1", &json!({}))).await.unwrap();
    assert_eq!(code(nodes.create(&PostParams::default(), &cilium_node("n1", &json!({}))).await.unwrap_err()), 409);

    let mut changed = first.clone();
    *changed.data.pointer_mut("/spec").unwrap() = json!({"ipam": {"podCIDRs": ["10.0.0.0/24"]}});
    let second = nodes.replace("n1", &PostParams::default(), &changed).await.unwrap();
    assert_eq!((first.metadata.generation, second.metadata.generation), (Some(1), Some(2)));
    assert_eq!(code(nodes.replace("n1", &PostParams::default(), &changed).await.unwrap_err()), 409);
    // A custom resource takes no update without a version; a patch without one always goes through.
    changed.metadata.resource_version = None;
    assert_eq!(code(nodes.replace("n1", &PostParams::default(), &changed).await.unwrap_err()), 422);
    let patch = json!({"metadata": {"resourceVersion": first.resource_version()}, "spec": {"ipam": null}});
    let stale = nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap_err();
    assert_eq!(code(stale), 409);
    let other = json!({"metadata": {"uid": "b75d8f6e-0000-4000-8000-000000000000"}});
    assert_eq!(code(nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&other)).await.unwrap_err()), 422);

    // Writing what is there changes nothing, not even the version.
    let same = nodes.replace("n1", &PostParams::default(), &second).await.unwrap();
    assert_eq!(same.resource_version(), second.resource_version());
    assert!(!server.calls().last().unwrap().changed);
}

#[tokio::test(start_paused = true)]
async fn spec_and_status_are_written_apart() {
    let nodes = cilium_nodes(server().client_as("agent"));
    let mut object = cilium_node("n1", &json!({}));
    object.data.as_object_mut().unwrap().insert("status".to_owned(), json!({"ipam": {}}));
    let mut object = nodes.create(&PostParams::default(), &object).await.unwrap();
    assert_eq!(object.data.get("status"), None);

    let both = json!({
        "metadata": {"labels": {"a": "b"}},
        "spec": {"ipam": {"podCIDRs": ["10.0.0.0/24"]}},
        "status": {"ipam": {"operator-status": {"error": "full"}}},
    });
    let status = nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&both)).await.unwrap();
    assert_eq!(status.data.get("spec"), Some(&json!({})));
    assert_eq!(status.data.pointer("/status/ipam/operator-status/error"), Some(&json!("full")));
    assert_eq!((status.metadata.generation, status.labels().len()), (Some(1), 0));

    object.metadata.resource_version = status.resource_version();
    object.data = json!({"spec": {"ipam": {"pre-allocate": 4}}, "status": null});
    let spec = nodes.replace("n1", &PostParams::default(), &object).await.unwrap();
    assert_eq!(spec.data.pointer("/status/ipam/operator-status/error"), Some(&json!("full")));
    assert_eq!(spec.metadata.generation, Some(2));
}

#[tokio::test(start_paused = true)]
async fn patches_of_each_kind() {
    let server = server();
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    nodes.create(&PostParams::default(), &node("n1")).await.unwrap();
    let params = PatchParams::default();
    let merge = json!({"spec": {"podCIDR": "10.0.0.0/24"}, "metadata": {"labels": {"a": "1", "b": "2"}}});
    nodes.patch("n1", &params, &Patch::Merge(&merge)).await.unwrap();
    let operations: json_patch::Patch = serde_json::from_value(json!([
        {"op": "test", "path": "/spec/podCIDR", "value": "10.0.0.0/24"},
        {"op": "remove", "path": "/metadata/labels/a"},
    ]))
    .unwrap();
    let patched = nodes.patch("n1", &params, &Patch::Json::<()>(operations.clone())).await.unwrap();
    assert_eq!(patched.labels(), &BTreeMap::from([("b".to_owned(), "2".to_owned())]));
    assert_eq!(code(nodes.patch("n1", &params, &Patch::Json::<()>(operations)).await.unwrap_err()), 422);

    let conditions = |kind: &str, status: &str| json!({"status": {"conditions": [{"type": kind, "status": status}]}});
    for (kind, status) in [("Ready", "True"), ("NetworkUnavailable", "True"), ("NetworkUnavailable", "False")] {
        let patch = conditions(kind, status);
        nodes.patch_status("n1", &params, &Patch::Strategic(&patch)).await.unwrap();
    }
    let found = server.get("node", "", "n1").unwrap();
    assert_eq!(
        found.pointer("/status/conditions"),
        Some(&json!([{"type": "NetworkUnavailable", "status": "False"}, {"type": "Ready", "status": "True"}]))
    );
    let custom = cilium_nodes(server.client_as("agent"));
    custom.create(&PostParams::default(), &cilium_node("n1", &json!({}))).await.unwrap();
    assert_eq!(code(custom.patch("n1", &params, &Patch::Strategic(json!({}))).await.unwrap_err()), 415);
}

fn applied(spec: &Value) -> Value {
    json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "spec": spec})
}

#[tokio::test(start_paused = true)]
async fn an_apply_owns_what_it_names() {
    let nodes = cilium_nodes(server().client_as("agent"));
    let apply = |manager: &'static str, spec: Value, force: bool| {
        let nodes = nodes.clone();
        let params = PatchParams { force, ..PatchParams::apply(manager) };
        async move { nodes.patch("n1", &params, &Patch::Apply(applied(&spec))).await }
    };
    apply("agent", json!({"ipam": {"pool": {"10.0.0.1": {}, "10.0.0.2": {}}, "pre-allocate": 8}}), false)
        .await
        .unwrap();
    // Another manager adds a field of the same map, and may share a value.
    let shared =
        apply("operator", json!({"ipam": {"pool": {"10.0.0.3": {}}, "pre-allocate": 8}}), false).await.unwrap();
    assert_eq!(shared.data.pointer("/spec/ipam/pool").unwrap().as_object().unwrap().len(), 3);
    // Changing a shared value conflicts, and says with whom; nothing has changed then.
    let conflict = apply("operator", json!({"ipam": {"pre-allocate": 9}}), false).await.unwrap_err();
    assert!(conflict.to_string().contains("conflict with \"agent\": .spec.ipam.pre-allocate"), "{conflict}");
    let forced = apply("operator", json!({"ipam": {"pre-allocate": 9}}), true).await.unwrap();
    // What the operator no longer names goes, what the agent owns stays.
    assert_eq!(
        forced.data.get("spec"),
        Some(&json!({"ipam": {"pool": {"10.0.0.1": {}, "10.0.0.2": {}}, "pre-allocate": 9}}))
    );
    // The agent has lost the field: leaving it out now does not remove it.
    let kept = apply("agent", json!({"ipam": {"pool": {"10.0.0.1": {}}}}), false).await.unwrap();
    assert_eq!(kept.data.get("spec"), Some(&json!({"ipam": {"pool": {"10.0.0.1": {}}, "pre-allocate": 9}})));
    // With its last owner a whole branch goes.
    let rest = apply("agent", json!({}), false).await.unwrap();
    assert_eq!(rest.data.get("spec"), Some(&json!({"ipam": {"pre-allocate": 9}})));
    // Applying the same again changes nothing.
    let again = apply("agent", json!({}), false).await.unwrap();
    assert_eq!(again.resource_version(), rest.resource_version());
}

#[tokio::test(start_paused = true)]
async fn an_update_takes_ownership_and_an_apply_finds_out() {
    let server = server();
    let nodes = cilium_nodes(server.client_as("agent"));
    let params = PatchParams::apply("operator");
    nodes.patch("n1", &params, &Patch::Apply(applied(&json!({"ipam": {"pre-allocate": 8}})))).await.unwrap();
    let edit = PatchParams { field_manager: Some("someone".to_owned()), ..PatchParams::default() };
    nodes.patch("n1", &edit, &Patch::Merge(json!({"spec": {"ipam": {"pre-allocate": 1}}}))).await.unwrap();
    let owners = server.get("cn", "", "n1").unwrap().pointer("/metadata/managedFields").cloned().unwrap();
    assert_eq!(owners.as_array().unwrap().len(), 1, "{owners}");
    assert_eq!(owners.pointer("/0/manager"), Some(&json!("someone")));
    assert_eq!(owners.pointer("/0/fieldsV1"), Some(&json!({"f:spec": {"f:ipam": {"f:pre-allocate": {}}}})));
    let apply = Patch::Apply(applied(&json!({"ipam": {"pre-allocate": 8}})));
    assert_eq!(code(nodes.patch("n1", &params, &apply).await.unwrap_err()), 409);

    let status = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    });
    nodes.patch_status("n1", &PatchParams::apply("agent"), &Patch::Apply(&status)).await.unwrap();
    let other = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
        "status": {"conditions": [{"type": "Synced", "status": "True"}]},
    });
    let both = nodes.patch_status("n1", &PatchParams::apply("operator"), &Patch::Apply(&other)).await.unwrap();
    assert_eq!(both.data.pointer("/status/conditions").unwrap().as_array().unwrap().len(), 2);
    let gone = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "status": {}});
    let one = nodes.patch_status("n1", &PatchParams::apply("agent"), &Patch::Apply(&gone)).await.unwrap();
    assert_eq!(one.data.pointer("/status/conditions"), Some(&json!([{"type": "Synced", "status": "True"}])));
}

#[tokio::test(start_paused = true)]
async fn deletes_heed_preconditions_finalizers_and_owners() {
    let server = server();
    let client = server.client_as("agent");
    let nodes: Api<Node> = Api::all(client.clone());
    let owner = nodes.create(&PostParams::default(), &node("n1")).await.unwrap();
    let mut owned = cilium_node("n1", &json!({}));
    owned.metadata.owner_references = Some(vec![
        serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": owner.uid().unwrap(),
        }))
        .unwrap(),
    ]);
    owned.metadata.finalizers = Some(vec!["cistern.io/blocks".to_owned()]);
    let custom = cilium_nodes(client);
    custom.create(&PostParams::default(), &owned).await.unwrap();

    let wrong = DeleteParams::default()
        .preconditions(kube::api::Preconditions { uid: Some("other".to_owned()), resource_version: None });
    assert_eq!(code(nodes.delete("n1", &wrong).await.unwrap_err()), 409);
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    // The dependent is marked, waits for its finalizer, and takes no new one.
    let marked = custom.get("n1").await.unwrap();
    assert!(marked.metadata.deletion_timestamp.is_some());
    let more = json!({"metadata": {"finalizers": ["cistern.io/blocks", "cistern.io/more"]}});
    let refused = custom.patch("n1", &PatchParams::default(), &Patch::Merge(&more)).await.unwrap_err();
    assert_eq!(code(refused), 422);
    custom
        .patch("n1", &PatchParams::default(), &Patch::Merge(json!({"metadata": {"finalizers": null}})))
        .await
        .unwrap();
    assert_eq!(code(custom.get("n1").await.unwrap_err()), 404);
    // Who names an owner that is no more is collected at once.
    owned.metadata.finalizers = None;
    custom.create(&PostParams::default(), &owned).await.unwrap();
    assert_eq!(code(custom.get("n1").await.unwrap_err()), 404);
}

#[tokio::test(start_paused = true)]
async fn lists_select_and_come_in_pages_of_one_state() {
    let server = server();
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    for index in 0..5 {
        let mut node = node(&format!("n{index}"));
        node.labels_mut().insert("zone".to_owned(), format!("z{}", index % 2));
        nodes.create(&PostParams::default(), &node).await.unwrap();
    }
    let names = |list: kube::core::ObjectList<Node>| list.items.iter().map(|node| node.name_any()).collect::<Vec<_>>();
    for (labels, wanted) in [
        ("zone=z1", vec!["n1", "n3"]),
        ("zone!=z1", vec!["n0", "n2", "n4"]),
        ("zone in (z0, z9),!absent", vec!["n0", "n2", "n4"]),
        ("absent", vec![]),
    ] {
        assert_eq!(names(nodes.list(&ListParams::default().labels(labels)).await.unwrap()), wanted, "{labels}");
    }
    assert_eq!(names(nodes.list(&ListParams::default().fields("metadata.name=n3")).await.unwrap()), ["n3"]);
    assert_eq!(code(nodes.list(&ListParams::default().fields("spec.podCIDR=x")).await.unwrap_err()), 400);

    let first = nodes.list(&ListParams::default().limit(2)).await.unwrap();
    server.delete("node", "", "n3").unwrap();
    server.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n5"}})).unwrap();
    let token = first.metadata.continue_.clone().unwrap();
    assert_eq!(names(first), ["n0", "n1"]);
    let rest = nodes.list(&ListParams::default().continue_token(&token)).await.unwrap();
    assert_eq!(names(rest), ["n2", "n3", "n4"], "the page shows the state of the first one");
    server.compact();
    server.delete("node", "", "n4").unwrap();
    assert_eq!(code(nodes.list(&ListParams::default().continue_token(&token)).await.unwrap_err()), 410);
}

/// The events that are there now, as `TYPE name`.
async fn seen(events: &mut (impl futures::Stream<Item = kube::Result<WatchEvent<Node>>> + Unpin)) -> Vec<String> {
    let mut found = Vec::new();
    while let Ok(Some(event)) = tokio::time::timeout(Duration::from_secs(1), events.next()).await {
        found.push(match event.unwrap() {
            WatchEvent::Added(node) => format!("ADDED {}", node.name_any()),
            WatchEvent::Modified(node) => format!("MODIFIED {}", node.name_any()),
            WatchEvent::Deleted(node) => format!("DELETED {}", node.name_any()),
            WatchEvent::Bookmark(bookmark) => format!("BOOKMARK {}", bookmark.metadata.resource_version),
            WatchEvent::Error(status) => format!("ERROR {}", status.code),
        });
    }
    found
}

#[tokio::test(start_paused = true)]
async fn a_watch_follows_its_version_and_its_selection() {
    let server = server();
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    let first = nodes.create(&PostParams::default(), &node("n1")).await.unwrap();
    let version = first.resource_version().unwrap();
    let mut all = nodes.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    let mut zone = nodes.watch(&WatchParams::default().labels("zone=a"), "0").await.unwrap().boxed();
    let label = |value: Value| json!({"metadata": {"labels": {"zone": value}}});
    for patch in [label(json!("a")), json!({"spec": {"podCIDR": "10.0.0.0/24"}}), label(Value::Null)] {
        nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }
    nodes.delete("n1", &DeleteParams::default()).await.unwrap();
    assert_eq!(seen(&mut all).await, ["MODIFIED n1", "MODIFIED n1", "MODIFIED n1", "DELETED n1"]);
    assert_eq!(seen(&mut zone).await, ["ADDED n1", "MODIFIED n1", "DELETED n1"]);
    tokio::time::sleep(Duration::from_secs(61)).await;
    let latest = nodes.list(&ListParams::default()).await.unwrap().metadata.resource_version.unwrap();
    assert_eq!(seen(&mut all).await, [format!("BOOKMARK {latest}")]);
    server.compact();
    let mut late = nodes.watch(&WatchParams::default(), &version).await.unwrap().boxed();
    assert_eq!(seen(&mut late).await, ["ERROR 410"]);
    let mut short = nodes.watch(&WatchParams::default().timeout(5), &latest).await.unwrap().boxed();
    assert!(tokio::time::timeout(Duration::from_secs(6), short.next()).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_streamed_list_ends_with_a_marked_bookmark() {
    let server = server();
    server.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})).unwrap();
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    let params = WatchParams::default().initial_events();
    let mut events = nodes.watch(&params, "0").await.unwrap().boxed();
    let added = events.try_next().await.unwrap().unwrap();
    assert!(matches!(added, WatchEvent::Added(_)));
    let Some(WatchEvent::Bookmark(bookmark)) = events.try_next().await.unwrap() else { panic!("no bookmark") };
    assert_eq!(bookmark.metadata.annotations.get("k8s.io/initial-events-end").map(String::as_str), Some("true"));
}

/// Follows a watcher's events for this long; what the watcher knows then is in `known`.
async fn follow(
    events: &mut (impl futures::Stream<Item = watcher::Result<watcher::Event<Node>>> + Unpin),
    known: &mut BTreeSet<String>,
    time: Duration,
) {
    let until = tokio::time::sleep(time);
    tokio::pin!(until);
    loop {
        let event = tokio::select! { () = &mut until => return, event = events.next() => event.unwrap() };
        match event {
            Ok(watcher::Event::Init) => known.clear(),
            Ok(watcher::Event::InitApply(node) | watcher::Event::Apply(node)) => {
                known.insert(node.name_any());
            }
            Ok(watcher::Event::Delete(node)) => {
                known.remove(&node.name_any());
            }
            Ok(watcher::Event::InitDone) | Err(_) => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_runtime_watcher_survives_all_faults() {
    let server = server();
    server.set_faults(30, &[]);
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    let mut known = BTreeSet::new();
    let mut events = watcher(nodes, watcher::Config::default()).default_backoff().boxed();
    for index in 0..40 {
        let name = format!("n{index}");
        server.create(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})).unwrap();
        if index % 3 == 0 {
            server.delete("node", "", &name).unwrap();
        }
        follow(&mut events, &mut known, Duration::from_secs(20)).await;
    }
    server.set_faults(0, &[]);
    follow(&mut events, &mut known, Duration::from_secs(2_000)).await;
    let listed = server.list("nodes").unwrap();
    let wanted = listed.iter().map(|node| node.pointer("/metadata/name").and_then(Value::as_str).unwrap().to_owned());
    assert_eq!(known, wanted.collect());
    assert!(server.calls().iter().any(|call| call.code != 200), "no fault was drawn");
}

#[tokio::test(start_paused = true)]
async fn asked_faults_hit_the_calls_they_name() {
    let server = server();
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    let creates = CallMatch { verb: Some(Verb::Create), ..CallMatch::default() };
    server.ask_fault(creates.clone(), Fault::Refused(409), 2);
    for _ in 0..2 {
        assert_eq!(code(nodes.create(&PostParams::default(), &node("n1")).await.unwrap_err()), 409);
    }
    server.ask_fault(creates.clone(), Fault::ResetBefore, 1);
    assert!(!matches!(nodes.create(&PostParams::default(), &node("n1")).await.unwrap_err(), Error::Api(_)));
    assert_eq!(code(nodes.get("n1").await.unwrap_err()), 404);
    server.ask_fault(creates.clone(), Fault::ResetAfter, 1);
    assert!(!matches!(nodes.create(&PostParams::default(), &node("n1")).await.unwrap_err(), Error::Api(_)));
    nodes.get("n1").await.unwrap();
    server.ask_fault(creates, Fault::TimeoutAfter, 1);
    assert_eq!(code(nodes.create(&PostParams::default(), &node("n2")).await.unwrap_err()), 504);
    nodes.get("n2").await.unwrap();
    server.ask_fault(CallMatch::default(), Fault::Refused(429), 1);
    let Error::Api(throttled) = nodes.get("n1").await.unwrap_err() else { panic!("no answer") };
    assert_eq!(throttled.details.unwrap().retry_after_seconds, 1);
    let written: Vec<String> =
        server.calls().iter().filter(|call| call.changed).map(|call| format!("{} {}", call.verb, call.code)).collect();
    assert_eq!(written, ["create 0", "create 504"]);
}

#[tokio::test(start_paused = true)]
async fn equal_seeds_draw_equal_faults() {
    let run = |seed: u64| async move {
        let server = ApiServer::new(Options { seed, ..Options::default() });
        server.set_faults(20, &[]);
        let nodes: Api<Node> = Api::all(server.client_as("agent"));
        for index in 0..50 {
            let _ = nodes.create(&PostParams::default(), &node(&format!("n{index}"))).await;
        }
        server.calls().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(run(7).await, run(7).await);
    assert_ne!(run(7).await, run(8).await);
}

#[tokio::test(start_paused = true)]
async fn links_refuse_and_go_silent_by_client() {
    let server = server();
    let (here, there): (Api<Node>, Api<Node>) =
        (Api::all(server.client_as("here")), Api::all(server.client_as("there")));
    let mut events = here.watch(&WatchParams::default(), "0").await.unwrap().boxed();
    server.set_client_link("here", Link::Silent);
    there.create(&PostParams::default(), &node("n1")).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_secs(30), here.get("n1")).await.is_err());
    assert!(seen(&mut events).await.is_empty());
    server.set_client_link("here", Link::Up);
    assert_eq!(seen(&mut events).await, ["ADDED n1"]);
    server.set_link(Link::Refused);
    assert!(!matches!(there.get("n1").await.unwrap_err(), Error::Api(_)));
    assert!(events.next().await.is_none_or(|event| event.is_err()));
}

#[tokio::test(start_paused = true)]
async fn a_restored_backup_loses_later_writes_and_ends_watches() {
    let server = server();
    let nodes: Api<Node> = Api::all(server.client_as("agent"));
    nodes.create(&PostParams::default(), &node("n1")).await.unwrap();
    let backup = server.snapshot().unwrap();
    let later = nodes.create(&PostParams::default(), &node("n2")).await.unwrap().resource_version().unwrap();
    let mut events = nodes.watch(&WatchParams::default(), &later).await.unwrap().boxed();
    server.restore_from(&backup).unwrap();
    assert!(events.next().await.is_none());
    assert_eq!(code(nodes.get("n2").await.unwrap_err()), 404);
    let params = ListParams::default().at(&later).matching(kube::api::VersionMatch::NotOlderThan);
    assert_eq!(code(nodes.list(&params).await.unwrap_err()), 504);
}

#[tokio::test(start_paused = true)]
async fn events_are_one_store_under_two_names() {
    let server = server();
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::namespaced(server.client_as("agent"), "default");
    let event = json!({
        "metadata": {"generateName": "n1."},
        "regarding": {"kind": "Node", "name": "n1"},
        "note": "no block is free", "reason": "PoolExhausted", "type": "Warning",
        "eventTime": "2026-01-01T12:00:00.000000Z", "reportingController": "cistern-operator", "reportingInstance": "x",
        "action": "Allocate",
    });
    events.create(&PostParams::default(), &serde_json::from_value(event).unwrap()).await.unwrap();
    let old: Api<Event> = Api::all(server.client_as("agent"));
    let found = old.list(&ListParams::default().fields("involvedObject.name=n1")).await.unwrap().items;
    assert_eq!(found.first().and_then(|event| event.message.as_deref()), Some("no block is free"));
}

// What the comparison with the real server (`tests/servers/requests`) has taught, in short.
#[tokio::test(start_paused = true)]
async fn what_kube_apiserver_refuses_is_refused() {
    let server = server();
    let create = |object: Value| server.create(&object).map(drop).map_err(|error| (error.code, error.message));
    let refused = |outcome: Result<(), (u16, String)>, code: u16, what: &str| {
        let (found, message) = outcome.unwrap_err();
        assert!(found == code && message.contains(what), "{found} {message}");
    };
    let config = |name: &str, rest: Value| {
        let mut map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}});
        map.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        map
    };
    refused(create(config("a", json!({"data": {"not a key": ""}}))), 422, "data[not a key]");
    refused(create(config("a", json!({"data": {"a": ""}, "binaryData": {"a": ""}}))), 422, "duplicate of key");
    create(config("a", json!({"immutable": true, "data": {"a": "1"}}))).unwrap();
    let patch = |kind: &str, name: &str, patch: Value| {
        server.patch(kind, "", name, &patch).map_err(|error| (error.code, error.message))
    };
    refused(patch("configmap", "a", json!({"data": {"a": "2"}})), 422, "field is immutable");

    create(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "spec": {"podCIDR": "10.1.0.0/24"}}))
        .unwrap();
    assert_eq!(server.get("node", "", "n").unwrap().pointer("/spec/podCIDRs/0"), Some(&json!("10.1.0.0/24")));
    refused(patch("node", "n", json!({"spec": {"podCIDR": null, "podCIDRs": ["10.2.0.0/24"]}})), 422, "Forbidden");
    let two = json!({"podCIDRs": ["10.1.0.0/24", "10.2.0.0/24"]});
    refused(create(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "m"}, "spec": two})), 422, "family");

    let event = |rest: Value| {
        let mut event = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e"},
            "eventTime": "2026-01-01T12:00:00.000000Z", "reportingController": "c", "reportingInstance": "i",
            "action": "A", "reason": "R", "type": "Normal", "regarding": {},
        });
        event.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        event
    };
    refused(create(event(json!({"eventTime": null}))), 422, "eventTime: Required value");
    refused(create(event(json!({"type": "Odd"}))), 422, "invalid value: Odd");
    create(event(json!({}))).unwrap();
}
