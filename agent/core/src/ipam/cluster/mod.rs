//! Decisions of the operator: which node has which pod CIDRs.
//!
//! | module | owns |
//! |---|---|
//! | [`ClusterMode`] | what a mode of the operator has to decide |
//! | [`records`] | state that outlives a leader: one object for each pool |
//! | [`ledger`] | state of a leader between plans, by pool and family |
//! | [`cluster_pool`] | mode `cluster-pool`: one pod CIDR of each family for each node |
//!
//! A new mode of the operator is one file here that implements [`ClusterMode`], and a line in the operator's role
//! (`Ipam` in `app/operator_role.rs`).
//!
//! # Claims, contests and restores
//!
//! Three parties write about a node's pod CIDRs, and each may have lost what it wrote: the operator records them and writes
//! `spec.ipam.podCIDRs`; the agent lists there by itself what its pods have addresses of, and marks it with the annotation
//! `cistern.io/claimed-pod-cidr`; administrators edit objects, delete them, and restore the API server from a backup. A pod
//! keeps its address whatever they do, so what a node lists is never changed under it.
//!
//! A **pod CIDR** of a pool is in one of these states; the [`Ledger`](ledger::Ledger) holds which are held, in
//! quarantine and avoided, and the [`Records`](records::Records) make the first two outlive a leader:
//!
//! ```text
//!             take, claim                         forget, release
//!   free ─────────────────────▶ held by a node ─────────────────────▶ in quarantine of its former node
//!     ▲                            ▲                                       │    │
//!     │                            └── claim, or complete: the same node ──┘    │
//!     └──────────────────────────── expire: 10 minutes later ───────────────────┘
//!
//!   free ──▶ avoided: a node lists it that does not hold it; not allocated ──▶ in quarantine, once it is listed no more
//! ```
//!
//! A **node** is in one of these states, judged anew in every plan from its list and the ledger (`judge`):
//!
//! | state | when | what follows |
//! |---|---|---|
//! | new | no record, no list | `complete`: its former pod CIDR if that is in quarantine for it, else the next free one |
//! | claiming | no record, a list | every element is one free, aligned pod CIDR: `book`; otherwise *refused* |
//! | known | a record, and a list of nothing else | `complete` adds a missing family; an incomplete list is written again |
//! | conflicting | a record, and a list with another element | *refused* with [`Code::Conflict`](super::verdict::Code) |
//! | refused | see above | nothing changes but its verdict; what it lists is avoided, and nothing is allocated to it |
//! | gone | a record, and no object of that UID | `forget`: what it held is in quarantine |
//!
//! Three contests are settled before a node is judged, the first by `contested`, the others by `reconcile_listed`:
//!
//! * A node holds a pod CIDR that it does not list, and the agent of another node claims it (marked): the record is older than
//!   the claim. As long as the cluster is not settled (see below) it is written to neither; then the claim has it.
//! * Of several pod CIDRs of one family, those that the node does not list beside another one are released.
//! * A node that lists a valid claim of its own (marked) and none of what is recorded for it has had the claim all along: its
//!   record was written and never reached it. The record is released and the claim booked.
//!
//! **Who wins** a pod CIDR that several nodes list: the one in the ledger. For a new leader without record: a node that was not
//! refused before (`refused` in the records), then the older object, then the smaller UID. So a change of leader changes no
//! winner.
//!
//! **Order of writes:** records, then the CiliumNode's annotation and list, then the text in its status. What is
//! published to a node is recorded already, so a new leader knows all writes of a leader that died in between. A write
//! replaces exactly the object that was planned from (its `resourceVersion`): if two processes both believe to be leader, one
//! of them fails at the records, before it writes to any node.
//!
//! **A restore** takes objects and records back to an earlier state, while agents still serve what was allocated since. The
//! leader *doubts* what it reads when the API server's list goes back in time, when it finds records that are not those it
//! wrote, or when there are no records and a CiliumNode older than the first leader can be. Then
//!
//! 1. the records are read again, and the ledger starts anew from them and from all that this leader ever made durable
//!    (`adopt`: whatever the restored records do not contradict);
//! 2. for two minutes (`SETTLE`) nothing is allocated but what the records say the node had: agents list again what they
//!    serve, as claims, and those are booked as above;
//! 3. then the cluster is *settled*, and nodes that still have nothing are completed.

pub mod cluster_pool;
pub mod ledger;
pub mod records;
mod verdicts;

use super::verdict::Verdict;
use ipnet::IpNet;
use jiff::Timestamp;
use records::RecordSet;
use std::collections::{BTreeMap, BTreeSet};

/// Name of a pool.
pub type PoolName = String;

/// What a mode of the operator decides. A mode is a value made of the settings; a leader keeps its ledger between plans.
///
/// `plan` obeys two laws: planning an applied plan changes nothing, and the order of `input.nodes` does not matter.
pub trait ClusterMode: Send + Sync + 'static {
    /// State of a leader between plans.
    type Ledger: Clone + Send + Sync;

    /// The pools whose records are read before the first plan.
    fn pools(&self) -> BTreeSet<PoolName>;

    /// The ledger of a new leader.
    fn take_over(&self, records: &RecordSet, now: Timestamp) -> Self::Ledger;

    /// Plans the records and the writes to CiliumNodes.
    fn plan(&self, input: &Input, ledger: Self::Ledger, now: Timestamp) -> Plan<Self::Ledger>;
}

/// A mode's view of a CiliumNode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`: the name of the Kubernetes node.
    pub name: String,
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.creationTimestamp`
    pub created: Timestamp,
    /// `metadata.deletionTimestamp` is set, or the object cannot be parsed: it keeps its pod CIDRs and is allocated
    /// none.
    pub deleting: bool,
    /// `spec.ipam.podCIDRs` as written.
    pub pod_cidrs: Vec<String>,
    /// The pod CIDR that the node's agent listed itself, because its pods have addresses of it.
    pub claim: Option<IpNet>,
    /// `status.ipam.operator-status.error`; empty when absent.
    pub error: String,
    /// The annotation [`ANNOTATION`](super::verdict::ANNOTATION) as written.
    pub annotation: Option<String>,
}

/// Input of [`ClusterMode::plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// All CiliumNodes, in any order.
    pub nodes: Vec<Node>,
    /// Whether `nodes` is a complete list from after the election, and the records have been read. Nothing is planned
    /// before.
    pub synced: bool,
    /// Whether nodes have had time to list their pod CIDRs. Before that, a node only gets its own: the API server may
    /// have lost writes of earlier leaders.
    pub settled: bool,
}

/// The planned writes for a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// UID of the CiliumNode, a precondition of the write.
    pub uid: String,
    /// `spec.ipam.podCIDRs` to write; `None` if it is correct or must not be changed.
    pub pod_cidrs: Option<Vec<IpNet>>,
    /// The verdict for the annotation and `status.ipam.operator-status.error`; `None` clears both.
    pub verdict: Option<Verdict>,
    /// The annotation of that verdict on the list after the write.
    pub annotation: Option<String>,
    /// The agent's claim is accepted: its annotation is removed.
    pub accepted: bool,
}

impl NodePlan {
    /// The plan for a node; `None` if its object is up to date.
    #[must_use]
    pub fn new(node: &Node, pod_cidrs: Option<Vec<IpNet>>, verdict: Option<Verdict>, accepted: bool) -> Option<Self> {
        let list = pod_cidrs.as_ref().map(|nets| nets.iter().map(ToString::to_string).collect::<Vec<_>>());
        let annotation = verdict.as_ref().map(|verdict| verdict.annotation(list.as_ref().unwrap_or(&node.pod_cidrs)));
        let text = verdict.as_ref().map_or("", |verdict| verdict.text.as_str());
        let is_shown = annotation == node.annotation && text == node.error;
        let differs = pod_cidrs.is_some() || !is_shown || accepted;
        differs.then(|| Self { uid: node.uid.clone(), pod_cidrs, verdict, annotation, accepted })
    }
}

/// Result of [`ClusterMode::plan`]. It is kept (its ledger is the input of the next plan) even if writes failed: failed
/// writes are planned again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan<L> {
    /// The nodes to write, by name. Nodes that are up to date are omitted.
    pub nodes: BTreeMap<String, NodePlan>,
    /// The records to write before any of `nodes`, by pool. `None` before the input is synced.
    pub records: Option<RecordSet>,
    /// The input of the next plan.
    pub ledger: L,
}
