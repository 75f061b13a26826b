//! API objects of an uninstall.

use super::election::LEASE_NAME;
use super::records::CONFIG_MAP;
use super::{AGENT, KubernetesError, write};
use cistern_core::uninstall::{ANSWER, REQUEST, answer};
use cistern_crds::CiliumNode;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use std::time::Duration;

/// Name of each CiliumNode, with its request and answer.
pub type Answers = Vec<(String, Option<String>, Option<String>)>;

/// CiliumNodes, and the operators' objects in their namespace.
pub struct Objects {
    nodes: Api<CiliumNode>,
    deployments: Api<Deployment>,
    leases: Api<Lease>,
    config_maps: Api<ConfigMap>,
}

/// Time within which a terminating operator releases its Lease.
const OPERATOR_END: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(500);

impl Objects {
    /// Of this cluster, with operators in this namespace.
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        Self {
            nodes: Api::all(client.clone()),
            deployments: Api::namespaced(client.clone(), namespace),
            leases: Api::namespaced(client.clone(), namespace),
            config_maps: Api::namespaced(client, namespace),
        }
    }

    /// Requests and answers of each node (or this one); `None` if the kind is not installed.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn answers(&self, node: Option<&str>) -> Result<Answers, KubernetesError> {
        let field_selector = node.map(|node| format!("metadata.name={node}"));
        let params = ListParams { field_selector, ..ListParams::default() };
        let listed = match write("list", "CiliumNode", "", self.nodes.list(&params)).await {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            listed => listed?,
        };
        let of = |node: &CiliumNode, key: &str| node.annotations().get(key).cloned();
        Ok(listed.items.iter().map(|node| (node.name_any(), of(node, REQUEST), of(node, ANSWER))).collect())
    }

    async fn annotate(&self, node: &str, key: &str, value: &str) -> Result<(), KubernetesError> {
        let patch = json!({"metadata": {"annotations": {key: value}}});
        let params = PatchParams { field_manager: Some(AGENT.to_owned()), ..PatchParams::default() };
        match write("patch", "CiliumNode", node, self.nodes.patch(node, &params, &Patch::Merge(&patch))).await {
            // Its Node was deleted, with everything on it.
            Err(error) if error.is_not_found() => Ok(()),
            outcome => outcome.map(drop),
        }
    }

    /// Writes the request to a node.
    ///
    /// # Errors
    /// The API server rejects it.
    pub async fn ask(&self, node: &str, request: &str) -> Result<(), KubernetesError> {
        self.annotate(node, REQUEST, request).await
    }

    /// Writes a node's answer.
    ///
    /// # Errors
    /// The API server rejects it.
    pub async fn answer(&self, node: &str, request: &str, failures: &[String]) -> Result<(), KubernetesError> {
        self.annotate(node, ANSWER, &answer(request, failures)).await
    }

    /// Scales the operators' Deployment to zero, waits until there is no leader, and deletes the Lease and the records.
    ///
    /// # Errors
    /// The API server rejects it.
    pub async fn end_operators(&self, deployment: Option<&str>) -> Result<(), KubernetesError> {
        if let Some(name) = deployment {
            let patch = json!({"spec": {"replicas": 0}});
            let params = PatchParams::default();
            let patch = Patch::Merge(&patch);
            let call = self.deployments.patch_scale(name, &params, &patch);
            absent_is_fine(write("scale", "Deployment", name, call).await.map(drop))?;
        }
        let mut waited = Duration::ZERO;
        while waited < OPERATOR_END && self.is_led().await? {
            tokio::time::sleep(LOOK).await;
            waited += LOOK;
        }
        let params = DeleteParams::default();
        let lease = write("delete", "Lease", LEASE_NAME, self.leases.delete(LEASE_NAME, &params)).await;
        absent_is_fine(lease.map(drop))?;
        let records = write("delete", "ConfigMap", CONFIG_MAP, self.config_maps.delete(CONFIG_MAP, &params)).await;
        absent_is_fine(records.map(drop))
    }

    async fn is_led(&self) -> Result<bool, KubernetesError> {
        let lease = write("get", "Lease", LEASE_NAME, self.leases.get_opt(LEASE_NAME)).await?;
        let holder = lease.and_then(|lease| lease.spec).and_then(|spec| spec.holder_identity);
        Ok(holder.is_some_and(|holder| !holder.is_empty()))
    }
}

fn absent_is_fine(outcome: Result<(), KubernetesError>) -> Result<(), KubernetesError> {
    match outcome {
        Err(error) if error.is_not_found() => Ok(()),
        outcome => outcome,
    }
}
