//! The Node condition that reports whether the agent serves pods.
//!
//! It is on the Node and not on the CiliumNode, because Cilium's CRD has no conditions and would prune them silently.
//! Requires the verb `patch` on `nodes/status`.

use super::{AGENT, KubernetesError, write};
use crate::clock::Clock;
use crate::reconciler::Operations;
use crate::tables::rows::{NodeCondition, NodeRow};
use crate::tables::{Reader, Watched};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The condition's `type`.
pub const TYPE: &str = "cistern.io/Ready";

const KIND: &str = "Node";

/// Conditions of this node's Node.
#[derive(Debug)]
pub struct NodeConditions {
    api: Api<Node>,
    name: String,
    seen: Watched<String, NodeRow>,
    clock: Clock,
    /// The condition last written, and its transition time: the watch may report it later.
    written: Mutex<Option<(NodeCondition, Timestamp)>>,
}

impl NodeConditions {
    /// Writes to the Node `name`, and reads it back from `seen`.
    #[must_use]
    pub fn new(client: Client, name: String, seen: Reader<String, NodeRow>, clock: Clock) -> Self {
        Self { api: Api::all(client), name, seen: seen.into(), clock, written: Mutex::new(None) }
    }

    fn written(&self) -> MutexGuard<'_, Option<(NodeCondition, Timestamp)>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current condition, and its transition time.
    async fn known(&self) -> Option<(NodeCondition, Timestamp)> {
        let snapshot = self.seen.synced().await;
        self.written().clone().or_else(|| snapshot.rows.get(&self.name)?.condition.clone())
    }
}

impl Operations for NodeConditions {
    type Key = String;
    type Value = NodeCondition;
    type Error = KubernetesError;

    async fn update(&self, name: &String, value: &NodeCondition) -> Result<(), KubernetesError> {
        let now = self.clock.now();
        let since = match self.known().await {
            Some((before, since)) if before.ready == value.ready => since,
            _ => now,
        };
        let seconds = |time: Timestamp| time.round(jiff::Unit::Second).unwrap_or(time).to_string();
        let patch = json!({"status": {"conditions": [{
            "type": TYPE,
            "status": if value.ready { "True" } else { "False" },
            "reason": value.reason,
            "message": value.message,
            "lastTransitionTime": seconds(since),
            "lastHeartbeatTime": seconds(now),
        }]}});
        let params = PatchParams { field_manager: Some(AGENT.to_owned()), ..PatchParams::default() };
        let patch = Patch::Strategic(&patch);
        let call = self.api.patch_status(name, &params, &patch);
        match write("patch status of", KIND, name, call).await {
            Ok(_) => {
                *self.written() = Some((value.clone(), since));
                Ok(())
            }
            // The agent may run before kubelet has registered its Node; the next full pass retries.
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn delete(&self, _name: &String) -> Result<(), KubernetesError> {
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<String, NodeCondition>, KubernetesError> {
        // The previous condition may have been deleted with the Node.
        *self.written() = None;
        Ok(self.known().await.map(|(condition, _)| (self.name.clone(), condition)).into_iter().collect())
    }
}
