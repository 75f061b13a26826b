//! Writes the agent's own CiliumNode, as merge patches of its own fields only.

use super::written::Written;
use super::{AGENT, KubernetesError, write};
use crate::reconciler::Operations;
use crate::tables::rows::{CiliumNodeRow, NodeAddress, OwnCiliumNode};
use crate::tables::{Table, Watched};
use cistern_core::ipam::node::cluster_pool::{self, List};
use cistern_crds::CiliumNode;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

const KIND: &str = "CiliumNode";

/// The agent's own object.
#[derive(Debug)]
pub struct OwnNode {
    api: Api<CiliumNode>,
    name: String,
    /// The CiliumNodes.
    seen: Watched<String, CiliumNodeRow>,
    table: Arc<Table<String, CiliumNodeRow>>,
    past: Mutex<Past>,
}

/// Times of past writes to the agent's own object.
#[derive(Debug, Default)]
struct Past {
    written: Option<Written<OwnCiliumNode>>,
    /// When the object was last created.
    made: Option<Instant>,
    /// When its pod CIDRs were last written.
    listed: Option<Instant>,
}

/// Minimum interval between creations of the object: garbage collection deletes it at once if its owner is a deleted
/// Node, of which this agent may not know yet. Also for rewriting pod CIDRs that another client removed.
const RECREATE_INTERVAL: Duration = Duration::from_secs(10);

/// The remaining time of [`RECREATE_INTERVAL`] since a moment, if any.
fn too_soon(after: Option<Instant>) -> Option<Duration> {
    let left = (after? + RECREATE_INTERVAL).checked_duration_since(Instant::now())?;
    (!left.is_zero()).then_some(left)
}

impl OwnNode {
    /// Writes the object `name`, as it is wanted. What is wanted of its list of pod CIDRs was planned from a version of the
    /// object, and is written over no other.
    #[must_use]
    pub fn new(client: Client, name: String, table: Arc<Table<String, CiliumNodeRow>>) -> Self {
        Self { api: Api::all(client), name, seen: table.reader().into(), table, past: Mutex::default() }
    }

    /// The server has no object of which `version` was the last one seen. The watch may not say so for a while: it may have
    /// broken, or the server may have been restored from a backup. What is to be created then is planned at once.
    fn vanished(&self, name: &str, version: &str) {
        self.table.modify(|rows| {
            if rows.get(name).is_some_and(|row| row.resource_version == version) {
                rows.remove(name);
            }
        });
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn addresses(addresses: &[NodeAddress]) -> Value {
    addresses.iter().map(|address| json!({"type": address.kind, "ip": address.ip.to_string()})).collect()
}

fn owner_references((name, uid): &(String, String)) -> Value {
    json!([{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}])
}

impl Operations for OwnNode {
    type Key = String;
    type Value = OwnCiliumNode;
    type Error = KubernetesError;

    async fn update(&self, name: &String, value: &OwnCiliumNode) -> Result<(), KubernetesError> {
        let snapshot = self.seen.peek();
        let row = snapshot.rows.get(name);
        let mut metadata = Map::from_iter([("name".to_owned(), json!(name))]);
        // The rows may not reflect the last write yet.
        let written = self
            .past()
            .written
            .as_ref()
            .filter(|written| written.is_newer_than(&snapshot))
            .map(|written| written.value.clone());
        let pending = written.is_some();
        let planned_from = row.map(|row| row.resource_version.as_str());
        let intent = value.intent.as_ref().filter(|intent| intent.planned_from.as_deref() == planned_from);
        let list = intent.filter(|_| !pending).and_then(|intent| intent.list.as_ref());
        let (known_addresses, known_owner) = match &written {
            Some(value) => (Some(&value.addresses), value.owner.as_ref()),
            None => (row.map(|row| &row.addresses), row.and_then(|row| row.owner.as_ref())),
        };
        // Without a Node the owner is unknown, and owner references of other writers are preserved.
        let owner_differs = value.owner.is_some() && known_owner != value.owner.as_ref();
        if known_addresses == Some(&value.addresses) && !owner_differs && list.is_none() {
            return Ok(());
        }
        // The plan that knows that there is no object follows, and with it what the new one has to list from its beginning.
        if row.is_none() && !pending && intent.is_none() {
            return Ok(());
        }
        if let Some(owner) = &value.owner {
            metadata.insert("ownerReferences".to_owned(), owner_references(owner));
        }
        let has_claim = row.is_some_and(|row| row.claim.is_some());
        if let Some(List { claim, .. }) = list
            && (claim.is_some() || has_claim)
        {
            let claim = claim.map(|claim| claim.to_string());
            metadata.insert("annotations".to_owned(), json!({cluster_pool::CLAIM: claim}));
        }
        let written = match row {
            // An object that was created just now may not be in the rows yet.
            None if !pending => {
                if let Some(retry_after) = too_soon(self.past().made) {
                    return Err(KubernetesError::Vanished { kind: KIND, name: name.clone(), retry_after });
                }
                let object: CiliumNode = serde_json::from_value(json!({
                    "apiVersion": "cilium.io/v2", "kind": KIND, "metadata": metadata,
                    "spec": {
                        "addresses": addresses(&value.addresses),
                        "ipam": {"podCIDRs": list.map(|list| list.pod_cidrs.as_slice()).unwrap_or_default()},
                    },
                }))
                .map_err(|source| KubernetesError::Call {
                    verb: "create",
                    kind: KIND,
                    name: name.clone(),
                    source: Box::new(kube::Error::SerdeError(source)),
                })?;
                let params = PostParams { field_manager: Some(AGENT.to_owned()), ..PostParams::default() };
                let made = write("create", KIND, name, self.api.create(&params, &object)).await?;
                self.past().made = Some(Instant::now());
                made
            }
            Some(CiliumNodeRow { unreadable: Some(reason), .. }) => {
                return Err(KubernetesError::Unreadable { kind: KIND, name: name.clone(), reason: reason.clone() });
            }
            row => {
                let mut spec = Map::from_iter([("addresses".to_owned(), addresses(&value.addresses))]);
                let lists = list.is_some();
                if let (Some(list), Some(row)) = (list, row) {
                    if intent.is_some_and(|intent| intent.contested) {
                        if let Some(retry_after) = too_soon(self.past().listed) {
                            return Err(KubernetesError::TooSoon { kind: KIND, name: name.clone(), retry_after });
                        }
                        // The operator may be assigning one concurrently.
                        metadata.insert("resourceVersion".to_owned(), json!(row.resource_version));
                    }
                    spec.insert("ipam".to_owned(), json!({"podCIDRs": list.pod_cidrs}));
                }
                let patch = json!({"metadata": metadata, "spec": spec});
                let params = PatchParams { field_manager: Some(AGENT.to_owned()), ..PatchParams::default() };
                let patched = write("patch", KIND, name, self.api.patch(name, &params, &Patch::Merge(&patch))).await;
                if let (Err(error), Some(row)) = (&patched, row)
                    && error.is_not_found()
                {
                    self.vanished(name, &row.resource_version);
                }
                let patched = patched?;
                if lists {
                    self.past().listed = Some(Instant::now());
                }
                patched
            }
        };
        self.past().written = Some(Written::new(snapshot.followed, &written, value.clone()));
        Ok(())
    }

    async fn delete(&self, _name: &String) -> Result<(), KubernetesError> {
        // The object is garbage-collected with its Node; the agent never deletes it.
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<String, OwnCiliumNode>, KubernetesError> {
        let snapshot = self.seen.synced().await;
        {
            let mut past = self.past();
            if let Some(written) = &past.written
                && written.is_newer_than(&snapshot)
            {
                return Ok(BTreeMap::from([(self.name.clone(), written.value.clone())]));
            }
            past.written = None;
        }
        // What is wanted of the list differs from it by definition: else nothing is wanted.
        let value = |row: &CiliumNodeRow| OwnCiliumNode {
            addresses: row.addresses.clone(),
            owner: row.owner.clone(),
            intent: None,
        };
        Ok(snapshot.rows.get(&self.name).map(|row| (self.name.clone(), value(row))).into_iter().collect())
    }

    async fn changed(&self) {
        self.seen.changed().await;
    }
}
