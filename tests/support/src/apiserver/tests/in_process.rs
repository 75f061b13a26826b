use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node};
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, GroupVersionKind};
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

fn cilium_node(name: &str, spec: Value) -> DynamicObject {
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
    let created = nodes.create(&PostParams::default(), &cilium_node("n1", json!({}))).await.unwrap();
    assert!(created.uid().is_some() && created.metadata.generation == Some(1));
    server.delete("crd", "", "ciliumnodes.cilium.io").unwrap();
    assert_eq!(code(nodes.get("n1").await.unwrap_err()), 404);
}
