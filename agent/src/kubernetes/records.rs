//! The operator's ConfigMap: state that outlives a leader (`ipam` decision 13).

use super::{KubernetesError, Leadership, OPERATOR, write};
use cistern_core::ipam::cluster::cluster_pool::Records;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

/// Name of the ConfigMap.
pub const CONFIG_MAP: &str = "cistern-ipam";

const KIND: &str = "ConfigMap";

/// The ConfigMap cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// The API server failed.
    #[error(transparent)]
    Kubernetes(#[from] KubernetesError),
    /// Its content is invalid or cannot be written. It may contain pod CIDRs in use, so nothing is planned without it.
    #[error(
        "ConfigMap {namespace}/{CONFIG_MAP}: {reason}; no pod CIDR is allocated until an administrator repairs or deletes it"
    )]
    Content {
        /// Its namespace.
        namespace: String,
        /// The reason.
        reason: String,
    },
}

/// Why records were not replaced.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Nothing was written, or the result is unknown.
    #[error(transparent)]
    Failed(#[from] RecordsError),
    /// The records were replaced by another leader or from a backup. Plans made without them are void.
    #[error("ConfigMap {CONFIG_MAP} was changed by another client")]
    Replaced(Records),
}

/// Reads and writes the ConfigMap; writes only while this process leads.
///
/// A write replaces exactly the records that this store last saw. If two processes both believe to be leader, one of
/// them fails here, before it writes to any node.
#[derive(Debug)]
pub struct RecordStore {
    api: Api<ConfigMap>,
    namespace: String,
    leadership: Leadership,
    /// Resource version that the next write replaces, and its content; no version if the object does not exist.
    seen: (Option<String>, Records),
}

impl RecordStore {
    /// The ConfigMap of this namespace.
    #[must_use]
    pub fn new(client: Client, namespace: String, leadership: Leadership) -> Self {
        Self { api: Api::namespaced(client, &namespace), namespace, leadership, seen: (None, Records::default()) }
    }

    /// Reads the records; empty if the object does not exist.
    ///
    /// # Errors
    /// See [`RecordsError`].
    pub async fn read(&mut self) -> Result<Records, RecordsError> {
        let object = write("get", KIND, CONFIG_MAP, self.api.get_opt(CONFIG_MAP)).await?;
        let version = object.as_ref().and_then(ResourceExt::resource_version);
        let data = object.and_then(|object| object.data).unwrap_or_default();
        let records = Records::from_data(&data).map_err(|error| self.content(error.to_string()))?;
        self.seen = (version, records.clone());
        Ok(records)
    }

    /// Replaces the records, provided that no other client changed them since they were read or written here.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub async fn write(&mut self, records: &Records) -> Result<(), WriteError> {
        let data = records.to_data().map_err(|error| self.content(error.to_string()))?;
        let object = match &self.seen.0 {
            None => {
                let object = ConfigMap {
                    metadata: ObjectMeta { name: Some(CONFIG_MAP.to_owned()), ..ObjectMeta::default() },
                    data: Some(data),
                    ..ConfigMap::default()
                };
                let params = PostParams { field_manager: Some(OPERATOR.to_owned()), ..PostParams::default() };
                self.leadership.write("create", KIND, CONFIG_MAP, self.api.create(&params, &object)).await
            }
            Some(version) => {
                let patch = json!({"metadata": {"resourceVersion": version}, "data": data});
                let params = PatchParams { field_manager: Some(OPERATOR.to_owned()), ..PatchParams::default() };
                let patch = Patch::Merge(&patch);
                let call = self.api.patch(CONFIG_MAP, &params, &patch);
                self.leadership.write("patch", KIND, CONFIG_MAP, call).await
            }
        };
        match object {
            Ok(object) => {
                self.seen = (object.resource_version(), records.clone());
                Ok(())
            }
            Err(error) => {
                // The write may have succeeded in spite of the error: only what is read again can be replaced.
                let before = self.seen.1.clone();
                let now = self.read().await?;
                if now == *records {
                    Ok(())
                } else if now == before {
                    Err(WriteError::Failed(error.into()))
                } else {
                    Err(WriteError::Replaced(now))
                }
            }
        }
    }

    fn content(&self, reason: String) -> RecordsError {
        RecordsError::Content { namespace: self.namespace.clone(), reason }
    }
}
