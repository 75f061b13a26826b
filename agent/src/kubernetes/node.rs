//! Writes annotations of the own Node (`annotate-k8s-node`).

use super::{AGENT, KubernetesError, write};
use crate::reconciler::Operations;
use crate::tables::rows::NodeRow;
use crate::tables::{Reader, Watched};
use cistern_core::ipam::node::kubernetes;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeMap;

/// The network annotations of this agent's Node. Others are not changed.
#[derive(Debug)]
pub struct Annotations {
    api: Api<Node>,
    seen: Watched<String, NodeRow>,
}

impl Annotations {
    /// Writes Nodes, and reads them back from `seen`.
    #[must_use]
    pub fn new(client: Client, seen: Reader<String, NodeRow>) -> Self {
        Self { api: Api::all(client), seen: seen.into() }
    }
}

impl Operations for Annotations {
    type Key = String;
    type Value = BTreeMap<String, String>;
    type Error = KubernetesError;

    async fn update(&self, name: &String, value: &BTreeMap<String, String>) -> Result<(), KubernetesError> {
        let patch = json!({"metadata": {"annotations": value}});
        let params = PatchParams { field_manager: Some(AGENT.to_owned()), ..PatchParams::default() };
        write("patch", "Node", name, self.api.patch(name, &params, &Patch::Merge(&patch))).await.map(drop)
    }

    async fn delete(&self, _name: &String) -> Result<(), KubernetesError> {
        // A node that serves always has something to say here.
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<String, BTreeMap<String, String>>, KubernetesError> {
        let seen = self.seen.synced().await;
        let ours = |row: &NodeRow| {
            let found = row.annotations.iter().filter(|(key, _)| kubernetes::is_written(key));
            found.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        Ok(seen.rows.iter().map(|(name, row)| (name.clone(), ours(row))).collect())
    }

    async fn changed(&self) {
        self.seen.changed().await;
    }
}
