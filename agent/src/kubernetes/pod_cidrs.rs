//! Writes pod CIDRs and verdicts to CiliumNodes as operator, as merge patches of these fields only.

use super::written::Written;
use super::{KubernetesError, Leadership, OPERATOR};
use crate::reconciler::Operations;
use crate::tables::rows::{CiliumNodeIpam, CiliumNodeRow};
use crate::tables::{Reader, Watched};
use cistern_core::ipam::node::cluster_pool;
use cistern_core::ipam::verdict;
use cistern_crds::CiliumNode;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

const KIND: &str = "CiliumNode";

/// Pod CIDRs and verdicts of every node; writes only while this process leads.
#[derive(Debug)]
pub struct PodCidrs {
    api: Api<CiliumNode>,
    seen: Watched<String, CiliumNodeRow>,
    leadership: Leadership,
    written: Mutex<BTreeMap<String, Written<CiliumNodeIpam>>>,
}

impl PodCidrs {
    /// Writes the objects in `seen`.
    #[must_use]
    pub fn new(client: Client, seen: Reader<String, CiliumNodeRow>, leadership: Leadership) -> Self {
        Self { api: Api::all(client), seen: seen.into(), leadership, written: Mutex::default() }
    }

    fn written(&self) -> MutexGuard<'_, BTreeMap<String, Written<CiliumNodeIpam>>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the differences from `row`; returns the object if there are any.
    ///
    /// The annotation of a verdict is written before its text, so that no agent finds a text without its code. A
    /// withdrawn refusal is removed in reverse order: without its text the annotation is not in force, while a text
    /// without annotation would be taken for one of the previous release.
    async fn write(
        &self,
        name: &str,
        value: &CiliumNodeIpam,
        row: &CiliumNodeRow,
    ) -> Result<Option<CiliumNode>, KubernetesError> {
        let has_text = value.error == row.operator_error;
        let is_listed = value.pod_cidrs == row.pod_cidrs
            && value.claim == row.claim
            && value.verdict_annotation == row.verdict_annotation;
        // Precondition: the version that the plan was made from.
        let mut version = row.resource_version.clone();
        let mut answer = None;
        if !has_text && value.withdraws_refusal {
            let object = self.patch(name, &error_patch(value, Some(&version)), true).await?;
            version = object.resource_version().unwrap_or(version);
            answer = Some(object);
        }
        if !is_listed {
            let mut metadata = Map::from_iter([("resourceVersion".to_owned(), json!(version))]);
            let mut annotations = Map::new();
            if value.claim != row.claim {
                annotations.insert(cluster_pool::CLAIM.to_owned(), json!(value.claim));
            }
            if value.verdict_annotation != row.verdict_annotation {
                annotations.insert(verdict::ANNOTATION.to_owned(), json!(value.verdict_annotation));
            }
            if !annotations.is_empty() {
                metadata.insert("annotations".to_owned(), Value::Object(annotations));
            }
            let mut patch = Map::from_iter([("metadata".to_owned(), Value::Object(metadata))]);
            if value.pod_cidrs != row.pod_cidrs {
                patch.insert("spec".to_owned(), json!({"ipam": {"podCIDRs": value.pod_cidrs}}));
            }
            answer = Some(self.patch(name, &Value::Object(patch), false).await?);
        }
        if !has_text && !value.withdraws_refusal {
            answer = Some(self.patch(name, &error_patch(value, None), true).await?);
        }
        Ok(answer)
    }

    async fn patch(&self, name: &str, patch: &Value, status: bool) -> Result<CiliumNode, KubernetesError> {
        let verb = if status { "patch status of" } else { "patch" };
        let params = PatchParams { field_manager: Some(OPERATOR.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(patch);
        if status {
            self.leadership.write(verb, KIND, name, self.api.patch_status(name, &params, &patch)).await
        } else {
            self.leadership.write(verb, KIND, name, self.api.patch(name, &params, &patch)).await
        }
    }
}

impl Operations for PodCidrs {
    type Key = String;
    type Value = CiliumNodeIpam;
    type Error = KubernetesError;

    async fn update(&self, name: &String, value: &CiliumNodeIpam) -> Result<(), KubernetesError> {
        let snapshot = self.seen.peek();
        // Deleted since it was planned: nothing to write (`ipam` 2.2.9). Changed since: another plan follows.
        let Some(row) =
            snapshot.rows.get(name).filter(|row| row.uid == value.uid && row.resource_version == value.planned_from)
        else {
            return Ok(());
        };
        // Another plan also follows if the rows do not reflect the last write yet.
        if self.written().get(name).is_some_and(|written| written.is_newer_than(&snapshot)) {
            return Ok(());
        }
        match self.write(name, value, row).await {
            Ok(Some(object)) => {
                self.written().insert(name.clone(), Written::new(snapshot.followed, &object, value.clone()));
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn delete(&self, name: &String) -> Result<(), KubernetesError> {
        // A row is only removed from the plan if its object was deleted; existing objects keep their pod CIDRs.
        self.written().remove(name);
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<String, CiliumNodeIpam>, KubernetesError> {
        let snapshot = self.seen.synced().await;
        let mut written = self.written();
        written.retain(|_, written| written.is_newer_than(&snapshot));
        Ok(snapshot
            .rows
            .iter()
            .map(|(name, row)| {
                let value = written.get(name).map_or_else(
                    || CiliumNodeIpam {
                        uid: row.uid.clone(),
                        planned_from: row.resource_version.clone(),
                        pod_cidrs: row.pod_cidrs.clone(),
                        claim: row.claim,
                        error: row.operator_error.clone(),
                        verdict_annotation: row.verdict_annotation.clone(),
                        withdraws_refusal: row.standing.is_contested && row.verdict_annotation.is_none(),
                    },
                    |written| written.value.clone(),
                );
                (name.clone(), value)
            })
            .collect())
    }

    async fn changed(&self) {
        self.seen.changed().await;
    }
}

/// The text of a verdict, for the given version of the object only, if there is one.
fn error_patch(value: &CiliumNodeIpam, version: Option<&str>) -> Value {
    let status = json!({"ipam": {"operator-status": {"error": value.error.as_deref().unwrap_or_default()}}});
    match version {
        Some(version) => json!({"metadata": {"resourceVersion": version}, "status": status}),
        None => json!({"status": status}),
    }
}
