//! Writing the agent's own CiliumNode, as merge patches of its own fields only.

use super::written::Written;
use super::{AGENT, KubernetesError, write};
use crate::reconciler::Operations;
use crate::tables::rows::{CiliumNodeRow, HeldRow, NodeAddress, NodeRow, OwnCiliumNode, PoolRow, lists_of};
use crate::tables::{Snapshot, Watched};
use cistern_core::ipam::node::cluster_pool::{self, List};
use cistern_crds::CiliumNode;
use ipnet::Ipv4Net;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

const KIND: &str = "CiliumNode";

/// What the agent's own object follows from, beside what it shall say.
#[derive(Debug)]
pub struct Sources {
    /// The CiliumNodes.
    pub seen: Watched<String, CiliumNodeRow>,
    /// This node's Node.
    pub nodes: Watched<String, NodeRow>,
    /// Where this node's pods get their addresses from.
    pub pool: Watched<(), PoolRow>,
    /// What of `pool` is on disk.
    pub remembered: Watched<(), PoolRow>,
    /// Whether anybody holds an address of this node.
    pub held: Watched<(), HeldRow>,
}

/// The agent's own object.
#[derive(Debug)]
pub struct OwnNode {
    api: Api<CiliumNode>,
    name: String,
    sources: Sources,
    mirror: bool,
    past: Mutex<Past>,
}

/// What was done to the agent's own object.
#[derive(Debug, Default)]
struct Past {
    written: Option<Written<OwnCiliumNode>>,
    /// When the object was created last.
    made: Option<Instant>,
    /// When its blocks were written last.
    listed: Option<Instant>,
}

/// The object is made at most this often: garbage collection deletes it at once while its owner is a Node that is gone,
/// and this agent may not have heard of that yet. Blocks that somebody takes off its list are written there at most as
/// often.
const MADE_ANEW: Duration = Duration::from_secs(10);

/// How long it is until [`MADE_ANEW`] after a moment; none when that is over.
fn too_soon(after: Option<Instant>) -> Option<Duration> {
    let left = (after? + MADE_ANEW).checked_duration_since(Instant::now())?;
    (!left.is_zero()).then_some(left)
}

impl OwnNode {
    /// Writes the object `name`. One that is made anew, or that does not list what pods have addresses of, claims the
    /// block of the pool (`ipam` decision 11): whoever gives blocks may not know of it any more. With `mirror` the object's
    /// block is kept equal to that one.
    #[must_use]
    pub fn new(client: Client, name: String, sources: Sources, mirror: bool) -> Self {
        Self { api: Api::all(client), name, sources, mirror, past: Mutex::default() }
    }

    fn past(&self) -> MutexGuard<'_, Past> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the list of blocks has to become; none when it is as it shall be, or when it is not known yet what is served.
    fn list(&self, snapshot: &Snapshot<String, CiliumNodeRow>) -> Option<List> {
        let pool = self.sources.pool.peek();
        let pool = pool.rows.get(&())?;
        let row = snapshot.rows.get(&self.name);
        let listed = row.map(|row| row.pod_cidrs.as_slice()).unwrap_or_default();
        // What a crash would undo is not written: what is on disk must tell of it first.
        let remembered = self.sources.remembered.peek();
        let remembered = remembered.rows.get(&());
        let is_served =
            |block: Ipv4Net| [Some(pool), remembered].iter().all(|row| row.is_some_and(|row| row.pod_cidr == block));
        if self.mirror {
            let pod_cidrs = vec![pool.pod_cidr.to_string()];
            return (listed != pod_cidrs && is_served(pool.pod_cidr)).then_some(List { pod_cidrs, claim: None });
        }
        // Whoever serves the block decides from the same rows, perhaps a moment later; what it has not done yet is not
        // written.
        let held = self.sources.held.peek();
        let held = held.rows.get(&());
        let nodes = self.sources.nodes.peek();
        let node_uid = nodes.rows.get(&self.name).map(|row| row.uid.as_str());
        let (served, lists) = (pool.served(), lists_of(&snapshot.rows));
        let beyond = held.map(|held| held.beyond.as_slice());
        let may_hold = HeldRow::may_hold(held, pool.pod_cidr);
        let choice = cluster_pool::choose_among(&self.name, Some(&served), Some(lists), node_uid, may_hold, beyond);
        let is_done = match choice.served {
            Some(served) => is_served(served.block),
            None => HeldRow::has_left(held, pool.pod_cidr) && remembered.is_none_or(|row| row.leaving),
        };
        choice.list.filter(|_| is_done)
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
        let snapshot = self.sources.seen.peek();
        let mut metadata = Map::from_iter([("name".to_owned(), json!(name))]);
        // These rows may not tell yet of what was written last.
        let pending = self.past().written.as_ref().is_some_and(|written| written.is_newer_than(&snapshot));
        let list = if pending { None } else { self.list(&snapshot) };
        // Without a Node there is nothing to say about owners, and those that somebody else named stay.
        if let Some(owner) = &value.owner {
            metadata.insert("ownerReferences".to_owned(), owner_references(owner));
        }
        let has_claim = snapshot.rows.get(name).is_some_and(|row| row.claim.is_some());
        if let Some(List { claim, .. }) = &list
            && (claim.is_some() || has_claim)
        {
            let claim = claim.map(|claim| claim.to_string());
            metadata.insert("annotations".to_owned(), json!({cluster_pool::CLAIM: claim}));
        }
        let written = match snapshot.rows.get(name) {
            // One that was made a moment ago and is not told of yet is there.
            None if !pending => {
                if let Some(retry_after) = too_soon(self.past().made) {
                    return Err(KubernetesError::Vanished { kind: KIND, name: name.clone(), retry_after });
                }
                let object: CiliumNode = serde_json::from_value(json!({
                    "apiVersion": "cilium.io/v2", "kind": KIND, "metadata": metadata,
                    "spec": {
                        "addresses": addresses(&value.addresses),
                        "ipam": {"podCIDRs": list.map(|list| list.pod_cidrs).unwrap_or_default()},
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
                    if !self.mirror {
                        if let Some(retry_after) = too_soon(self.past().listed) {
                            return Err(KubernetesError::TooSoon { kind: KIND, name: name.clone(), retry_after });
                        }
                        // The operator may be giving it one at this moment.
                        metadata.insert("resourceVersion".to_owned(), json!(row.resource_version));
                    }
                    spec.insert("ipam".to_owned(), json!({"podCIDRs": list.pod_cidrs}));
                }
                let patch = json!({"metadata": metadata, "spec": spec});
                let params = PatchParams { field_manager: Some(AGENT.to_owned()), ..PatchParams::default() };
                let patched = write("patch", KIND, name, self.api.patch(name, &params, &Patch::Merge(&patch))).await?;
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
        // The object goes with its Node; this agent never deletes it.
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<String, OwnCiliumNode>, KubernetesError> {
        let snapshot = self.sources.seen.synced().await;
        // What changes after this moment is looked at again.
        self.sources.pool.snapshot();
        self.sources.remembered.snapshot();
        self.sources.held.snapshot();
        {
            let mut past = self.past();
            if let Some(written) = &past.written
                && written.is_newer_than(&snapshot)
            {
                return Ok(BTreeMap::from([(self.name.clone(), written.value.clone())]));
            }
            past.written = None;
        }
        // A range that is not known yet takes nothing away.
        let known = !self.sources.pool.peek().rows.is_empty();
        let differs = self.list(&snapshot).is_some();
        Ok(snapshot
            .rows
            .get(&self.name)
            .map(|row| {
                let value = OwnCiliumNode {
                    addresses: row.addresses.clone(),
                    owner: row.owner.clone(),
                    pod_cidrs: (if self.mirror { known } else { differs })
                        .then(|| cluster_pool::ipv4_blocks(&row.pod_cidrs).collect()),
                };
                (self.name.clone(), value)
            })
            .into_iter()
            .collect())
    }

    async fn changed(&self) {
        tokio::select! {
            () = self.sources.seen.changed() => {}
            () = self.sources.pool.changed() => {}
            () = self.sources.remembered.changed() => {}
            () = self.sources.held.changed() => {}
        }
    }
}
