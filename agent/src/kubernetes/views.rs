//! Conversion of watched API objects to rows.

use super::node_condition;
use super::watch::{View, ViewError};
use crate::tables::rows::{CiliumNodeRow, NodeAddress, NodeCondition, NodeRow};
use cistern_core::ipam::node::cluster_pool::CLAIM;
use cistern_core::ipam::node::kubernetes::is_network_annotation;
use cistern_core::ipam::verdict::{self, Standing};
use cistern_core::uninstall;
use cistern_crds::CiliumNode;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Nodes. If one is invalid, its previous row is kept, or it is omitted: pods must not lose anything for want of a
/// Node.
#[must_use]
pub fn nodes() -> View<Node, NodeRow> {
    View { read: Box::new(node), unreadable: Box::new(|kept, _, _| kept) }
}

/// CiliumNodes. An invalid one keeps a row: the owner of its pod CIDRs is known from the records, and leaders must not
/// take it for deleted.
#[must_use]
pub fn cilium_nodes() -> View<CiliumNode, CiliumNodeRow> {
    View { read: Box::new(cilium_node), unreadable: Box::new(unreadable_cilium_node) }
}

/// CiliumNodes for the agent of node `own`. Of others it only keeps what the agent acts on or explains: most writes of
/// an object change none of that, so that such an event among thousands of nodes does not change the table.
#[must_use]
pub fn cilium_nodes_for(own: &str) -> View<CiliumNode, CiliumNodeRow> {
    let own = own.to_owned();
    let of_others = own.clone();
    View {
        read: Box::new(move |object| {
            let row = cilium_node(object)?;
            Ok(if object.metadata.name.as_ref() == Some(&own) { row } else { of_another_node(row) })
        }),
        unreadable: Box::new(move |kept, meta, problem| {
            let row = unreadable_cilium_node(kept, meta, problem)?;
            Some(if meta.name.as_ref() == Some(&of_others) { row } else { of_another_node(row) })
        }),
    }
}

/// Write metadata and uninstall requests of another node's object are irrelevant to this node's agent.
fn of_another_node(row: CiliumNodeRow) -> CiliumNodeRow {
    CiliumNodeRow {
        uid: String::new(),
        resource_version: String::new(),
        created: None,
        owner: None,
        standing: Standing::default(),
        verdict_annotation: None,
        uninstall: None,
        uninstalled: None,
        ..row
    }
}

fn unreadable_cilium_node(kept: Option<CiliumNodeRow>, meta: &ObjectMeta, problem: &str) -> Option<CiliumNodeRow> {
    Some(CiliumNodeRow {
        uid: meta.uid.clone()?,
        resource_version: meta.resource_version.clone().unwrap_or_default(),
        created: meta.creation_timestamp.as_ref().map(|time| time.0),
        deleting: meta.deletion_timestamp.is_some(),
        unreadable: Some(problem.to_owned()),
        ..kept.unwrap_or_default()
    })
}

/// Converts a Node.
///
/// # Errors
/// It has no UID, which the API server sets for every object.
pub fn node(node: &Node) -> Result<NodeRow, ViewError> {
    let uid = node.uid().ok_or_else(|| no_uid("Node", node))?;
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let spec = node.spec.as_ref();
    let listed = spec.and_then(|spec| spec.pod_cidrs.clone()).filter(|cidrs| !cidrs.is_empty());
    let annotations = node.annotations().iter().filter(|(key, _)| is_network_annotation(key));
    Ok(NodeRow {
        uid,
        addresses: read_addresses(addresses.map(|address| (&address.type_, &address.address))),
        condition: conditions.filter(|condition| condition.type_ == node_condition::TYPE).find_map(|condition| {
            let row = NodeCondition {
                ready: condition.status == "True",
                reason: condition.reason.clone().unwrap_or_default(),
                message: condition.message.clone().unwrap_or_default(),
            };
            Some((row, condition.last_transition_time.as_ref()?.0))
        }),
        pod_cidrs: listed.unwrap_or_else(|| spec.and_then(|spec| spec.pod_cidr.clone()).into_iter().collect()),
        annotations: annotations.map(|(key, value)| (key.clone(), value.clone())).collect(),
    })
}

/// Converts a CiliumNode. Invalid addresses are skipped with a warning; pod CIDRs remain text, since the operator
/// reports invalid ones.
///
/// # Errors
/// It has no UID, which the API server sets for every object.
pub fn cilium_node(object: &CiliumNode) -> Result<CiliumNodeRow, ViewError> {
    let uid = object.uid().ok_or_else(|| no_uid("CiliumNode", object))?;
    let spec = &object.spec;
    let owner = object.owner_references().iter().find(|owner| owner.kind == "Node");
    let operator_error = object
        .status
        .as_ref()
        .and_then(|status| status.ipam.operator_status.as_ref())
        .and_then(|status| status.error.clone())
        .filter(|error| !error.is_empty());
    let verdict_annotation = object.annotations().get(verdict::ANNOTATION).cloned();
    Ok(CiliumNodeRow {
        uid,
        resource_version: object.resource_version().unwrap_or_default(),
        created: object.creation_timestamp().map(|time| time.0),
        deleting: object.metadata.deletion_timestamp.is_some(),
        owner: owner.map(|owner| (owner.name.clone(), owner.uid.clone())),
        addresses: read_addresses(spec.addresses.iter().map(|address| (&address.kind, &address.ip))),
        pod_cidrs: spec.ipam.pod_cidrs.clone(),
        standing: Standing::read(verdict_annotation.as_deref(), &spec.ipam.pod_cidrs, operator_error.as_deref()),
        operator_error,
        verdict_annotation,
        claim: object.annotations().get(CLAIM).and_then(|text| text.parse().ok()),
        unreadable: None,
        uninstall: object.annotations().get(uninstall::REQUEST).cloned(),
        uninstalled: object.annotations().get(uninstall::ANSWER).cloned(),
    })
}

fn no_uid<K: ResourceExt>(kind: &'static str, object: &K) -> ViewError {
    ViewError { kind, name: object.name_any(), reason: "metadata.uid is missing".to_owned() }
}

/// Host names and DNS names of a Node are skipped. The order is preserved: the first address of a type counts.
fn read_addresses<'a>(addresses: impl Iterator<Item = (&'a String, &'a String)>) -> Vec<NodeAddress> {
    let mut seen = BTreeSet::new();
    addresses
        .filter_map(|(kind, text)| {
            let ip: IpAddr = text.parse().ok()?;
            let address = NodeAddress { kind: kind.clone(), ip };
            seen.insert(address.clone()).then_some(address)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_names_its_pod_cidrs_and_network_annotations() {
        let mut object = serde_json::json!({
            "metadata": {"name": "n1", "uid": "u1", "annotations": {
                "network.cilium.io/ipv4-cilium-host": "10.201.3.77", "kubectl.kubernetes.io/x": "y"
            }},
            "spec": {"podCIDR": "10.201.3.0/24"},
        });
        let row = |object: &serde_json::Value| node(&serde_json::from_value(object.clone()).unwrap()).unwrap();
        assert_eq!(row(&object).pod_cidrs, ["10.201.3.0/24"]);
        assert_eq!(row(&object).annotations.len(), 1);
        object["spec"]["podCIDRs"] = serde_json::json!(["10.201.3.0/24", "fd31::3:0/112"]);
        assert_eq!(row(&object).pod_cidrs, ["10.201.3.0/24", "fd31::3:0/112"]);
    }

    #[test]
    fn writes_of_other_nodes_that_change_nothing_for_this_one_make_no_difference() {
        let object = |name: &str, version: &str, owner: &str, cidr: &str| -> CiliumNode {
            serde_json::from_value(serde_json::json!({
                "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
                "metadata": {
                    "name": name, "uid": "u", "resourceVersion": version, "creationTimestamp": "2026-01-02T03:04:05Z",
                    "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": owner}],
                    "annotations": {uninstall::REQUEST: version}
                },
                "spec": {"ipam": {"podCIDRs": [cidr]}},
            }))
            .unwrap()
        };
        let view = cilium_nodes_for("n1");
        let row = |name: &str, version: &str, owner: &str, cidr: &str| {
            (view.read)(&object(name, version, owner, cidr)).unwrap()
        };
        assert_eq!(row("n2", "7", "a", "10.244.1.0/24"), row("n2", "8", "b", "10.244.1.0/24"));
        assert_ne!(row("n2", "7", "a", "10.244.1.0/24"), row("n2", "8", "a", "10.244.2.0/24"));
        assert_ne!(row("n1", "7", "a", "10.244.1.0/24"), row("n1", "8", "a", "10.244.1.0/24"));
    }

    #[test]
    fn a_cilium_node_keeps_what_is_needed_of_it() {
        let object: CiliumNode = serde_json::from_value(serde_json::json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
            "metadata": {
                "name": "n1", "uid": "u1", "resourceVersion": "7", "creationTimestamp": "2026-01-02T03:04:05Z",
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "nu1"}]
            },
            "spec": {
                "addresses": [
                    {"type": "InternalIP", "ip": "172.29.8.20"}, {"type": "InternalIP", "ip": "not an address"},
                    {"type": "CiliumInternalIP", "ip": "10.244.1.7"}
                ],
                "ipam": {"podCIDRs": ["10.244.1.0/24", "10.244/16"]}
            },
            "status": {"ipam": {"operator-status": {"error": ""}}}
        }))
        .unwrap();
        let row = cilium_node(&object).unwrap();
        assert_eq!(row.owner, Some(("n1".into(), "nu1".into())));
        assert_eq!(row.addresses.len(), 2);
        assert_eq!(row.pod_cidrs, ["10.244.1.0/24", "10.244/16"]);
        assert_eq!((row.operator_error, row.standing), (None, Standing::default()));
        assert_eq!(row.created, Some("2026-01-02T03:04:05Z".parse().unwrap()));
    }
}
