//! Deletes CiliumNodes whose Node was deleted.

use super::{KubernetesError, Leadership};
use crate::reconciler::Operations;
use cistern_crds::CiliumNode;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client};
use std::collections::BTreeMap;

const KIND: &str = "CiliumNode";

/// CiliumNodes whose Node was deleted; deletes only while this process leads.
#[derive(Debug)]
pub struct Orphans {
    api: Api<CiliumNode>,
    leadership: Leadership,
}

impl Orphans {
    /// Deletes objects by name and UID.
    #[must_use]
    pub fn new(client: Client, leadership: Leadership) -> Self {
        Self { api: Api::all(client), leadership }
    }
}

impl Operations for Orphans {
    type Key = String;
    /// UID of the object, because one of the same name may have been created since.
    type Value = String;
    type Error = KubernetesError;

    async fn update(&self, name: &String, uid: &String) -> Result<(), KubernetesError> {
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        match self.leadership.write("delete", KIND, name, self.api.delete(name, &params)).await {
            Ok(_) => {
                tracing::info!(node = name, "CiliumNode deleted: its Node is gone");
                Ok(())
            }
            // Deleted already, or recreated.
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn delete(&self, _name: &String) -> Result<(), KubernetesError> {
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<String, String>, KubernetesError> {
        Ok(BTreeMap::new())
    }
}
