//! The operator's ConfigMaps: state that outlives a leader, one object for each pool (`ipam` decision 13).

use super::{KubernetesError, Leadership, OPERATOR, write};
use cistern_core::ipam::cluster::PoolName;
use cistern_core::ipam::cluster::records::{Data, RecordSet, Records};
use cistern_core::ipam::lease::DEFAULT_POOL;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Name of the ConfigMap of the pool `default`, and the beginning of those of other pools.
pub const CONFIG_MAP: &str = "cistern-ipam";

const KIND: &str = "ConfigMap";

/// Name of the ConfigMap of a pool.
#[must_use]
pub fn config_map(pool: &str) -> String {
    if pool == DEFAULT_POOL { CONFIG_MAP.to_owned() } else { format!("{CONFIG_MAP}-{pool}") }
}

/// A ConfigMap cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// The API server failed.
    #[error(transparent)]
    Kubernetes(#[from] KubernetesError),
    /// Its content is invalid or cannot be written. It may contain pod CIDRs in use, so nothing is planned without it.
    #[error(
        "ConfigMap {namespace}/{name}: {reason}; no pod CIDR is allocated until an administrator repairs or deletes it"
    )]
    Content {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
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
    #[error("the records were changed by another client")]
    Replaced(Records),
}

/// Reads and writes the ConfigMaps; writes only while this process leads.
///
/// A write replaces exactly the object that this store last saw. If two processes both believe to be leader, one of
/// them fails here, before it writes to any node.
#[derive(Debug)]
pub struct RecordStore {
    api: Api<ConfigMap>,
    namespace: String,
    leadership: Leadership,
    seen: BTreeMap<PoolName, Seen>,
}

/// An object as it was read or written last.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// Resource version that the next write replaces; `None` if the object does not exist.
    version: Option<String>,
    /// Keys and fields of other builds are kept.
    data: Data,
    records: Records,
}

impl RecordStore {
    /// The ConfigMaps of this namespace.
    #[must_use]
    pub fn new(client: Client, namespace: String, leadership: Leadership) -> Self {
        Self { api: Api::namespaced(client, &namespace), namespace, leadership, seen: BTreeMap::new() }
    }

    /// Reads the records of these pools; empty if the object does not exist.
    ///
    /// # Errors
    /// See [`RecordsError`].
    pub async fn read(&mut self, pools: &BTreeSet<PoolName>) -> Result<RecordSet, RecordsError> {
        let mut records = RecordSet::new();
        for pool in pools {
            records.insert(pool.clone(), self.read_pool(pool).await?);
        }
        Ok(records)
    }

    async fn read_pool(&mut self, pool: &str) -> Result<Records, RecordsError> {
        let name = config_map(pool);
        let object = write("get", KIND, &name, self.api.get_opt(&name)).await?;
        let version = object.as_ref().and_then(ResourceExt::resource_version);
        let data = object.and_then(|object| object.data).unwrap_or_default();
        let records = Records::from_data(&data).map_err(|error| self.content(pool, error.to_string()))?;
        self.seen.insert(pool.to_owned(), Seen { version, data, records: records.clone() });
        Ok(records)
    }

    /// Replaces the records of a pool, provided that no other client changed them since they were read or written here.
    ///
    /// # Errors
    /// See [`WriteError`].
    pub async fn write(&mut self, pool: &str, records: &Records) -> Result<(), WriteError> {
        let name = config_map(pool);
        let seen = self.seen.get(pool).cloned().unwrap_or_default();
        let data = records.to_data(&seen.data).map_err(|error| self.content(pool, error.to_string()))?;
        let object = match &seen.version {
            None => {
                let object = ConfigMap {
                    metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
                    data: Some(data),
                    ..ConfigMap::default()
                };
                let params = PostParams { field_manager: Some(OPERATOR.to_owned()), ..PostParams::default() };
                self.leadership.write("create", KIND, &name, self.api.create(&params, &object)).await
            }
            Some(version) => {
                let patch = json!({"metadata": {"resourceVersion": version}, "data": data});
                let params = PatchParams { field_manager: Some(OPERATOR.to_owned()), ..PatchParams::default() };
                let patch = Patch::Merge(&patch);
                let call = self.api.patch(&name, &params, &patch);
                self.leadership.write("patch", KIND, &name, call).await
            }
        };
        match object {
            Ok(object) => {
                let version = object.resource_version();
                let data = object.data.unwrap_or_default();
                self.seen.insert(pool.to_owned(), Seen { version, data, records: records.clone() });
                Ok(())
            }
            Err(error) => {
                // The write may have succeeded in spite of the error: only what is read again can be replaced.
                let now = self.read_pool(pool).await?;
                if now == *records {
                    Ok(())
                } else if now == seen.records {
                    Err(WriteError::Failed(error.into()))
                } else {
                    Err(WriteError::Replaced(now))
                }
            }
        }
    }

    fn content(&self, pool: &str, reason: String) -> RecordsError {
        RecordsError::Content { namespace: self.namespace.clone(), name: config_map(pool), reason }
    }
}
