//! Pod leases: who holds an address of this node (`architecture` decision 9, `ipam` decisions 7-9).
//!
//! [`Leases`] is a synchronous state machine owned by one task. Each call takes the time (and a random draw where an
//! address is chosen) and returns an [`Outcome`]: the answer, and the changes of the durable records that must be
//! written, in their order, before the answer leaves. A process that ends between two of those writes restarts into a
//! state in which no address has two owners and everything that was answered still holds.
//!
//! ```text
//!            ADD                     confirm
//!   free ─────────► Provisional ─────────────► Confirmed
//!    ▲                  │ DEL, expiry,             │ DEL, superseded,
//!    │                  │ superseded               │ collected
//!    │  quarantine ends ▼                          ▼
//!    └────────────── Quarantined ◄─────────────────┘
//! ```
//!
//! A confirmed lease is provisional again when a DEL has its turn that began before an ADD which asked again, and that ADD
//! has not confirmed it yet.
//!
//! # How long an address can be away that nobody holds
//! Each of these ends by itself, over restarts and reboots too: a waiting is on disk, and counted by a clock that no
//! change of the wall clock moves.
//!
//! | after | free within |
//! |---|---|
//! | DEL, GC, supersession | 30 s ([`Timings::quarantine`]); at once when nothing else is left |
//! | an ADD that was never finished | 10 min 30 s ([`Timings::provisional`], then the quarantine) |
//! | a pod that vanished without DEL | 7 min 30 s (see [`super::audit`], then the quarantine) |
//! | a reboot | 30 s from the agent's start |
//!
//! A lease is given back by its attachment (container ID and interface name) and by nothing else, so a late or
//! repeated DEL can never take an address from the pod that has it now. Leases made through the calls that Cilium's
//! API also has are kept apart ([`OwnerLease`]): those calls see no others.

use super::later;
use super::node::pod_cidr::{AddressError, Addresses, PodCidr, PodCidrs, Usage};
use crate::ip::Family;
use crate::moment::Moment;
use crate::reconcile::{Classify, ErrorClass};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// The format of [`Record`] as written. A record of another format is refused by [`Record::from_json`].
pub const FORMAT: u32 = 1;

/// The one pool that host-scope allocation has (`ipam` 2.1.2).
pub const DEFAULT_POOL: &str = "default";

const ROUTER: &str = "router";

/// What a lease of a pod is known by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// `CNI_CONTAINERID`: the sandbox, which is new whenever a pod's sandbox is made anew.
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.container_id, self.ifname)
    }
}

/// The pod behind an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pod {
    /// `K8S_POD_NAMESPACE`
    pub namespace: String,
    /// `K8S_POD_NAME`
    pub name: String,
    /// `K8S_POD_UID`, which older runtimes leave out. Without it nothing is superseded: a name is no identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The interface pair of a confirmed lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name of the host side.
    pub host_ifname: String,
    /// Index of the host side.
    pub host_ifindex: u32,
    /// MAC address of the pod's side, as `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
}

/// What the address of a confirmed lease is behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Behind {
    /// A pair that `cistern-cni` made.
    Pair(Interface),
    /// An interface that another plugin makes with this address.
    Plugin {
        /// That plugin.
        plugin: String,
        /// Packets of the pod pass this node's routing, so the datapath must know the pod: it may leave under the
        /// node's address.
        routed: bool,
    },
}

impl fmt::Display for Behind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair(interface) => f.write_str(&interface.host_ifname),
            Self::Plugin { plugin, .. } => write!(f, "an interface of plugin {plugin}"),
        }
    }
}

/// How far a pod lease has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseState {
    /// Given, but the interface is not known to exist; ends by itself.
    Provisional {
        /// When it was given, or a DEL found that it had been asked for again.
        since: Timestamp,
        /// When it ends unless it is confirmed before.
        expires: Timestamp,
    },
    /// The interface exists, or another plugin is about to make it.
    Confirmed {
        /// When that was said.
        since: Timestamp,
        /// The interface.
        interface: Behind,
    },
}

/// The lease of a pod's interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodLease {
    /// Whose it is; the only key it is released by.
    pub attachment: Attachment,
    /// Name of the network that it was attached to: a runtime collects the garbage of one network at a time. A lease
    /// without it is never garbage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The pod, where the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// Path of the pod's network namespace.
    pub netns: String,
    /// When the plugin began whose ADD asked for it last, if it said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
    /// `began` of the ADD that confirmed it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<Moment>,
    /// The pool that the addresses came from.
    pub pool: String,
    /// The addresses: one of each family that the node served when they were given.
    pub addresses: Addresses,
    /// Names this lease among all that the same addresses had before.
    pub generation: u64,
    /// How far it has come.
    pub state: LeaseState,
}

impl PodLease {
    /// When it came into its present state.
    #[must_use]
    pub fn since(&self) -> Timestamp {
        match &self.state {
            LeaseState::Provisional { since, .. } | LeaseState::Confirmed { since, .. } => *since,
        }
    }

    fn holder(&self) -> String {
        self.attachment.to_string()
    }
}

/// The timer of an [`OwnerLease`] that nobody confirmed yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expiration {
    /// To be presented by whoever stops the timer.
    pub uuid: String,
    /// When the lease ends unless the timer is stopped before.
    pub at: Timestamp,
}

/// A lease made through the API calls that name an owner by text (`ipam` 5.1). Its key is (pool, address).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerLease {
    /// As given by the caller: mostly `namespace/pod`.
    pub owner: String,
    /// The pool that the address came from.
    pub pool: String,
    /// The address.
    pub address: IpAddr,
    /// Names this lease among all that the same address had before.
    pub generation: u64,
    /// When it was given.
    pub since: Timestamp,
    /// The timer, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration: Option<Expiration>,
}

impl OwnerLease {
    /// Told apart from the attachments' keys by the leading word, so that neither kind can release the other.
    fn holder(&self) -> String {
        format!("owner {}", self.owner)
    }
}

/// A DEL that arrived before its ADD: that ADD is refused when it comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// What the DEL was for.
    pub attachment: Attachment,
    /// When the DEL came.
    pub since: Timestamp,
    /// When its plugin began, if it said so: an ADD that began later was not overtaken by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
    /// When it is forgotten.
    pub until: Timestamp,
}

/// An address that was given back and is not given to anybody yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// The pool it belongs to.
    pub pool: String,
    /// The address.
    pub address: IpAddr,
    /// The generation of the lease that ended.
    pub generation: u64,
    /// Who had it, for people.
    pub last_holder: String,
    /// When it was given back.
    pub since: Timestamp,
    /// When it becomes free.
    pub until: Timestamp,
}

/// The router address of a family, chosen once and kept over restarts (`ipam` 2.1.6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Router {
    /// The address.
    pub address: IpAddr,
    /// When it was chosen.
    pub since: Timestamp,
}

/// One durable fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[expect(clippy::large_enum_variant, reason = "nearly all records are leases of pods")]
pub enum Record {
    /// A pod's lease.
    Pod(PodLease),
    /// A lease by owner text.
    Owner(OwnerLease),
    /// A DEL that overtook its ADD.
    Tombstone(Tombstone),
    /// A resting address.
    Quarantine(Quarantine),
    /// A router address.
    Router(Router),
}

/// What a [`Record`] is stored under; a later record of the same key replaces the earlier.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecordKey {
    /// Key of [`Record::Pod`]
    Pod(Attachment),
    /// Key of [`Record::Owner`]: pool and address.
    Owner(String, IpAddr),
    /// Key of [`Record::Tombstone`]
    Tombstone(Attachment),
    /// Key of [`Record::Quarantine`]
    Quarantine(IpAddr),
    /// Key of [`Record::Router`]
    Router(Family),
}

impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(attachment) => write!(f, "pod {attachment}"),
            Self::Owner(pool, address) => write!(f, "owner {pool} {address}"),
            Self::Tombstone(attachment) => write!(f, "tombstone {attachment}"),
            Self::Quarantine(address) => write!(f, "quarantine {address}"),
            Self::Router(family) => write!(f, "router {family}"),
        }
    }
}

/// Why a stored record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Written by another version of Cistern.
    #[error("lease record has format {found}; this version reads format {FORMAT}")]
    Format {
        /// The format it says to have.
        found: u32,
    },
    /// Not what was written.
    #[error("lease record is damaged: {0}")]
    Damaged(#[from] serde_json::Error),
}

/// A record as stored: the format beside its fields.
#[derive(Serialize, Deserialize)]
struct Stored<R> {
    format: u32,
    #[serde(flatten)]
    record: R,
}

impl Record {
    /// The key it is stored under.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        match self {
            Self::Pod(lease) => RecordKey::Pod(lease.attachment.clone()),
            Self::Owner(lease) => RecordKey::Owner(lease.pool.clone(), lease.address),
            Self::Tombstone(tombstone) => RecordKey::Tombstone(tombstone.attachment.clone()),
            Self::Quarantine(quarantine) => RecordKey::Quarantine(quarantine.address),
            Self::Router(router) => RecordKey::Router(Family::of(router.address)),
        }
    }

    /// Adjusts the end of what the record waits for to the clock of now, and says whether that changed anything. A
    /// waiting never gets longer than its whole time, whatever the record says.
    fn wait_again(&mut self, timings: &Timings, times: RecordTimes, now: Timestamp) -> bool {
        let (since, until, whole) = match self {
            Self::Pod(PodLease { state: LeaseState::Provisional { since, expires }, .. }) => {
                (since, expires, timings.provisional)
            }
            Self::Owner(OwnerLease { since, expiration: Some(expiration), .. }) => {
                (since, &mut expiration.at, timings.provisional)
            }
            Self::Tombstone(Tombstone { since, until, .. }) => (since, until, timings.tombstone),
            Self::Quarantine(Quarantine { since, until, .. }) => (since, until, timings.quarantine),
            Self::Pod(_) | Self::Owner(_) | Self::Router(_) => return false,
        };
        let before = (*since, *until);
        *since = before.0.min(now);
        *until = match times {
            RecordTimes::Continue => before.1.min(later(now, whole)),
            RecordTimes::BeginAnew => later(now, whole),
        };
        before != (*since, *until)
    }

    /// The record as one line of JSON, with its [`FORMAT`].
    ///
    /// # Errors
    /// None in practice: every field has a JSON form.
    pub fn to_json(&self) -> Result<String, RecordError> {
        Ok(serde_json::to_string(&Stored { format: FORMAT, record: self })?)
    }

    /// Reads what [`Self::to_json`] wrote.
    ///
    /// # Errors
    /// Another format, or not a record. The caller sets the source aside and reports it.
    pub fn from_json(text: &str) -> Result<Self, RecordError> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        // The format is read first: fields of another format are not judged by the rules of this one.
        let Head { format } = serde_json::from_str(text)?;
        if format != FORMAT {
            return Err(RecordError::Format { found: format });
        }
        Ok(serde_json::from_str::<Stored<Self>>(text)?.record)
    }
}

/// A change of the durable records.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "most changes are `Put`, and each lives until it is written")]
pub enum Change {
    /// Store this record under its key.
    Put(Record),
    /// Forget what is stored under this key; forgetting the absent succeeds.
    Remove(RecordKey),
}

impl Change {
    /// The key of the record that it is about.
    #[must_use]
    pub fn key(&self) -> RecordKey {
        match self {
            Self::Put(record) => record.key(),
            Self::Remove(key) => key.clone(),
        }
    }
}

/// Changes that the state machine has made and that are not on disk yet: those of a call, and what a disk that refused
/// (because it is full, say) still owes.
///
/// It never holds more than one change for what there is: a later one for the same key takes the place of the earlier.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owed(Vec<Change>);

impl Owed {
    /// Adds the changes of a call.
    pub fn extend(&mut self, changes: Vec<Change>) {
        if !self.0.is_empty() {
            let keys: BTreeSet<RecordKey> = changes.iter().map(Change::key).collect();
            self.0.retain(|owed| !keys.contains(&owed.key()));
        }
        self.0.extend(changes);
    }

    /// Writes what is owed, in its order. When the disk refuses a record, what is to be removed is removed all the same:
    /// a removal needs no space, and makes some, with which the records are tried once more. So a DEL works while the
    /// disk is full. All that a crash can lose by that order is the rest of an address between two pods, and what was
    /// never answered.
    ///
    /// # Errors
    /// The first refusal. What is not written stays owed.
    pub fn write<E>(&mut self, mut write: impl FnMut(&Change) -> Result<(), E>) -> Result<(), E> {
        loop {
            let (mut refused, mut removed) = (None, false);
            for change in std::mem::take(&mut self.0) {
                if refused.is_some() && matches!(change, Change::Put(_)) {
                    self.0.push(change);
                    continue;
                }
                match write(&change) {
                    Ok(()) if refused.is_some() => {
                        removed = true;
                        let key = change.key();
                        self.0.retain(|owed| owed.key() != key);
                    }
                    Ok(()) => {}
                    Err(error) => {
                        refused.get_or_insert(error);
                        self.0.push(change);
                    }
                }
            }
            match refused {
                None => return Ok(()),
                Some(error) if !removed => return Err(error),
                Some(_) => {}
            }
        }
    }

    /// Whether nothing is owed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many changes are owed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether what is on disk under this key is not as it should be.
    #[must_use]
    pub fn owes(&self, key: &RecordKey) -> bool {
        self.0.iter().any(|change| change.key() == *key)
    }
}

/// An answer, and what must be durable before it leaves.
///
/// Changes that could not be written stay owed ([`Owed`]), since this state machine has made them already.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the changes must be written before the answer leaves"]
pub struct Outcome<T> {
    /// What the caller is told.
    pub answer: T,
    /// To be written in this order.
    pub changes: Vec<Change>,
}

/// How long things wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    /// Life of a lease that nobody confirms.
    pub provisional: Duration,
    /// Rest of an address between two holders.
    pub quarantine: Duration,
    /// How long a DEL without lease is remembered. Short, since a runtime may attach the same container again.
    pub tombstone: Duration,
}

impl Default for Timings {
    fn default() -> Self {
        Self {
            provisional: Duration::from_secs(600),
            quarantine: Duration::from_secs(30),
            tombstone: Duration::from_secs(60),
        }
    }
}

/// How the time that [`Leases`] is given relates to the times in its records.
///
/// The clock of leases only ever goes forward while the machine is up (`clock` of the agent), whatever becomes of the
/// wall clock. It cannot be carried over a reboot: how long the machine was off is told by the wall clock alone, which
/// may be years behind until the network is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordTimes {
    /// The records were written by this clock: what was left to wait is left now.
    Continue,
    /// They were written by another clock, and how long ago is unknown: every waiting begins anew, with its whole time.
    /// So none ends early, and none takes longer than its time from here on.
    BeginAnew,
}

/// An address of the pod CIDR that no pod may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusion {
    /// The address; outside the pod CIDR it has no effect.
    pub address: IpAddr,
    /// What it is kept for, such as `node-ip`.
    pub label: String,
}

/// What the node was given to hand out, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Network {
    /// IPv4 pod CIDR.
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 pod CIDR.
    pub ipv6: Option<Ipv6Net>,
    /// Addresses that no pod may have.
    pub exclusions: Vec<Exclusion>,
    /// `local-router-ipv4` and `-ipv6`: used as they are, inside or outside the pod CIDR.
    pub configured_router: Addresses,
    /// Router addresses seen elsewhere than in our own records, the most trusted first: the host's device before
    /// `CiliumInternalIP` of the CiliumNode.
    pub seen_routers: Vec<Addresses>,
}

/// Something that whoever operates the node should know. None of them stops the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// Two records named one address; the younger lease is the truth, since an address is given anew only when it
    /// was given back.
    #[error(
        "{address}: the records name two holders, {kept} and {dropped}; the lease of {kept} is the younger and is kept"
    )]
    TwoHolders {
        /// The address.
        address: IpAddr,
        /// Whose lease was kept.
        kept: String,
        /// Whose lease was dropped.
        dropped: String,
    },
    /// A live lease has an address of an earlier pod CIDR.
    #[error("{holder} keeps {address}, which is outside the node's pod CIDR {net}; new addresses come from {net}")]
    OutsidePodCidr {
        /// Who holds it.
        holder: String,
        /// The address.
        address: IpAddr,
        /// The pod CIDR now.
        net: IpNet,
    },
    /// An address that no pod should have belongs to a pod already.
    #[error("{address} should be kept for {label}, but {holder} has it and keeps it until it ends")]
    ExclusionHeld {
        /// The address.
        address: IpAddr,
        /// What it should be kept for.
        label: String,
        /// Who has it.
        holder: String,
    },
    /// A configured router address lies inside the pod CIDR.
    #[error(
        "configured router address {address} is inside the pod CIDR {net}; it is used as it is and given to no pod"
    )]
    RouterInsidePodCidr {
        /// The router address.
        address: IpAddr,
        /// The pod CIDR.
        net: IpNet,
    },
    /// The sources disagree about the router address.
    #[error("router address {used} is used; {other} was found too and is ignored")]
    RouterMismatch {
        /// The one in use.
        used: IpAddr,
        /// The other.
        other: IpAddr,
    },
    /// The former router address cannot be kept.
    #[error("router address {old} cannot be kept ({reason}); {new} replaces it, which interrupts traffic briefly")]
    RouterReplaced {
        /// The former address.
        old: IpAddr,
        /// The new address.
        new: IpAddr,
        /// Why the former one is not possible.
        reason: AddressError,
    },
    /// No address is left for the router.
    #[error("no router address: {reason}; no pod is added before one is free")]
    NoRouter {
        /// Why.
        reason: AddressError,
    },
}

/// A CNI ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddRequest {
    /// What it is for.
    pub attachment: Attachment,
    /// Name of the network, if the plugin said so.
    pub network: Option<String>,
    /// The pod, where the runtime named it.
    pub pod: Option<Pod>,
    /// Path of the pod's network namespace.
    pub netns: String,
    /// When the plugin began, if it said so: an ADD that began after a DEL was not overtaken by it.
    pub began: Option<Moment>,
}

/// Answer to [`Leases::add`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// The lease.
    pub lease: PodLease,
    /// The pod's gateways.
    pub router: Addresses,
}

/// Why an ADD gets no address. Nothing is held for it then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// No pod CIDR yet.
    #[error(
        "this node has no pod CIDR yet; addresses are given as soon as its CiliumNode lists one in spec.ipam.podCIDRs"
    )]
    WaitingForPodCidr,
    /// The caller said [`Leases::hold_back`].
    #[error("no new address is given: {reason}")]
    HeldBack {
        /// As given by the caller.
        reason: String,
    },
    /// There is no address for the router, and without one no pod can reach anything.
    #[error("no router address: {reason}")]
    NoRouter {
        /// Why.
        reason: AddressError,
    },
    /// Nothing is left in the pod CIDR.
    #[error("pool {pool} is exhausted: {reason}")]
    Exhausted {
        /// The pool.
        pool: String,
        /// The numbers.
        reason: AddressError,
    },
    /// The DEL for this attachment came first.
    #[error("a DEL for {attachment} at {at} came before this ADD; the address would never be given back")]
    Overtaken {
        /// The attachment.
        attachment: Attachment,
        /// When the DEL came.
        at: Timestamp,
    },
}

impl AddError {
    /// A fixed word for programs.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::WaitingForPodCidr => "waiting-for-pod-cidr",
            Self::HeldBack { .. } => "held-back",
            Self::NoRouter { .. } => "no-router",
            Self::Exhausted { .. } => "pool-exhausted",
            Self::Overtaken { .. } => "overtaken-by-del",
        }
    }
}

impl Classify for AddError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::WaitingForPodCidr | Self::HeldBack { .. } | Self::NoRouter { .. } | Self::Exhausted { .. } => {
                ErrorClass::Transient
            }
            Self::Overtaken { .. } => ErrorClass::Permanent,
        }
    }
}

/// Why a lease is not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmError {
    /// Nothing is held: never given, given back, or expired.
    #[error("{attachment} holds no lease; it was given back or expired")]
    NoLease {
        /// The attachment.
        attachment: Attachment,
    },
    /// The lease was given anew since.
    #[error("{attachment} presents generation {presented}, but its lease has generation {current}")]
    OtherGeneration {
        /// The attachment.
        attachment: Attachment,
        /// As presented.
        presented: u64,
        /// As held.
        current: u64,
    },
}

/// Why a call by owner text is refused. Nothing changes then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    /// As for an ADD.
    #[error(transparent)]
    Add(#[from] AddError),
    /// The address cannot be given.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Host scope has one pool.
    #[error("pool {pool} is not known; this node has the pool {DEFAULT_POOL}")]
    UnknownPool {
        /// The pool asked for.
        pool: String,
    },
    /// A pod has the address.
    #[error("{address} is in use by endpoint {attachment}; it is given back by a CNI DEL for that endpoint")]
    InUse {
        /// The address.
        address: IpAddr,
        /// Who has it.
        attachment: Attachment,
    },
    /// Nothing was given through these calls under (pool, address).
    #[error("{address} of pool {pool} is not allocated through this call")]
    NotAllocated {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
    },
    /// There is no timer to stop.
    #[error("no expiration timer registered for {address} of pool {pool}")]
    NoTimer {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
    },
    /// The timer belongs to an earlier allocation.
    #[error("expiration UUID {presented} does not match the timer of {address} of pool {pool}")]
    OtherTimer {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
        /// The UUID as presented.
        presented: String,
    },
}

impl Classify for OwnerError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Add(error) => error.class(),
            Self::Address(AddressError::RangeFull { .. } | AddressError::InQuarantine { .. }) => ErrorClass::Transient,
            _ => ErrorClass::Permanent,
        }
    }
}

/// `POST /ipam`: an address for an owner text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerRequest {
    /// One family, or every family that the node serves.
    pub family: Option<Family>,
    /// Who will hold it.
    pub owner: String,
    /// A pool, or the node's choice.
    pub pool: Option<String>,
    /// UUIDs of the timers to start, one for each family.
    pub expiration: Option<ExpirationIds>,
}

/// Fresh UUIDs, drawn by the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpirationIds {
    /// For the IPv4 address.
    pub ipv4: String,
    /// For the IPv6 address.
    pub ipv6: String,
}

/// What an address is doing, for `cistern ip list`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowState {
    /// Given to a pod whose interface is not confirmed.
    Provisional,
    /// In use by a pod.
    Confirmed,
    /// Given through the calls by owner text.
    Owner,
    /// Resting between two holders.
    Quarantined,
    /// Kept for the router or another address of the node.
    Reserved,
}

impl fmt::Display for RowState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Provisional => "provisional",
            Self::Confirmed => "confirmed",
            Self::Owner => "owner",
            Self::Quarantined => "quarantined",
            Self::Reserved => "reserved",
        })
    }
}

/// An address that is not free, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The address.
    pub address: IpAddr,
    /// Its pool.
    pub pool: String,
    /// What it is doing.
    pub state: RowState,
    /// Attachment, owner text or label.
    pub holder: String,
    /// The pod, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// Since when, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// When this ends by itself, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// Why it is not free, for people.
    pub why: String,
}

/// A [`Leases`] made from records.
#[derive(Debug)]
pub struct Restored {
    /// The state machine.
    pub leases: Leases,
    /// What should be known.
    pub findings: Vec<Finding>,
    /// To be written before the first answer leaves.
    pub changes: Vec<Change>,
}

/// Who holds what of this node's addresses.
///
/// Invariant: an address is in at most one of `pods`, `owners`, `resting`, and is not the router's.
#[derive(Debug, Clone)]
pub struct Leases {
    timings: Timings,
    boot: String,
    network: Network,
    router: BTreeMap<Family, Router>,
    pods: BTreeMap<Attachment, PodLease>,
    owners: BTreeMap<(String, IpAddr), OwnerLease>,
    tombstones: BTreeMap<Attachment, Tombstone>,
    resting: BTreeMap<IpAddr, Quarantine>,
    generation: u64,
    held_back: Option<String>,
    /// Follows from the fields above; built anew when the network changes.
    pools: PodCidrs,
}

impl Leases {
    /// Takes up from the stored records: first the pods' addresses, then the router's, which may be chosen anew
    /// while a live pod's may not (`ipam` 2.1.5). Works without any pod CIDR: leases are known, released and
    /// confirmed; new ones wait. `boot` is that of the machine now (see [`Moment`]).
    #[must_use]
    pub fn restore(
        records: impl IntoIterator<Item = Record>,
        timings: Timings,
        network: Network,
        times: RecordTimes,
        boot: String,
        now: Timestamp,
        draw: u64,
    ) -> Restored {
        let mut leases = Self {
            timings,
            boot,
            network: Network::default(),
            router: BTreeMap::new(),
            pods: BTreeMap::new(),
            owners: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            resting: BTreeMap::new(),
            generation: 0,
            held_back: None,
            pools: PodCidrs::default(),
        };
        let mut findings = Vec::new();
        let mut changes = Vec::new();
        let mut holders: Vec<Record> = Vec::new();
        for mut record in records {
            if record.wait_again(&timings, times, now) {
                changes.push(Change::Put(record.clone()));
            }
            match record {
                Record::Pod(lease) => {
                    leases.generation = leases.generation.max(lease.generation);
                    holders.push(Record::Pod(lease));
                }
                Record::Owner(lease) => {
                    leases.generation = leases.generation.max(lease.generation);
                    holders.push(Record::Owner(lease));
                }
                Record::Tombstone(tombstone) => {
                    leases.tombstones.insert(tombstone.attachment.clone(), tombstone);
                }
                Record::Quarantine(quarantine) => {
                    leases.generation = leases.generation.max(quarantine.generation);
                    leases.resting.insert(quarantine.address, quarantine);
                }
                Record::Router(router) => {
                    leases.router.insert(Family::of(router.address), router);
                }
            }
        }
        leases.restore_holders(holders, &mut findings, &mut changes);
        let mut outcome = leases.set_network(network, now, draw);
        findings.append(&mut outcome.answer);
        changes.append(&mut outcome.changes);
        Restored { leases, findings, changes }
    }

    /// The youngest lease of an address wins; an address with a holder does not rest.
    fn restore_holders(&mut self, mut holders: Vec<Record>, findings: &mut Vec<Finding>, changes: &mut Vec<Change>) {
        let generation = |record: &Record| match record {
            Record::Pod(lease) => lease.generation,
            Record::Owner(lease) => lease.generation,
            _ => 0,
        };
        holders.sort_by_key(|record| (std::cmp::Reverse(generation(record)), record.key()));
        let mut taken: BTreeMap<IpAddr, String> = BTreeMap::new();
        for record in holders {
            let (addresses, holder): (Vec<IpAddr>, String) = match &record {
                Record::Pod(lease) => (lease.addresses.iter().collect(), lease.holder()),
                Record::Owner(lease) => (vec![lease.address], lease.holder()),
                _ => continue,
            };
            let conflict = addresses.iter().find_map(|address| taken.get(address).map(|kept| (*address, kept.clone())));
            if let Some((address, kept)) = conflict {
                findings.push(Finding::TwoHolders { address, kept, dropped: holder });
                changes.push(Change::Remove(record.key()));
                continue;
            }
            for address in addresses {
                taken.insert(address, holder.clone());
                if self.resting.remove(&address).is_some() {
                    changes.push(Change::Remove(RecordKey::Quarantine(address)));
                }
            }
            match record {
                Record::Pod(lease) => {
                    self.pods.insert(lease.attachment.clone(), lease);
                }
                Record::Owner(lease) => {
                    self.owners.insert((lease.pool.clone(), lease.address), lease);
                }
                _ => {}
            }
        }
    }

    /// Takes over what the node was given. Live leases keep their addresses; new ones come from the new CIDR. The same
    /// network again changes nothing.
    pub fn set_network(&mut self, mut network: Network, now: Timestamp, draw: u64) -> Outcome<Vec<Finding>> {
        let mut changes = self.expire(now);
        let mut findings = Vec::new();
        // Plugins that get their addresses from us put the gateway on devices of their own. It is the router's still.
        network.exclusions.retain(|exclusion| self.router.values().all(|router| router.address != exclusion.address));
        if self.network == network {
            return Outcome { answer: findings, changes };
        }
        self.pools = PodCidrs {
            ipv4: network.ipv4.map(|net| PodCidr::new(net.into())),
            ipv6: network.ipv6.map(|net| PodCidr::new(net.into())),
        };
        self.network = network;
        self.book_holders(now, &mut findings);
        self.book_exclusions(&mut findings);
        for quarantine in self.resting.values() {
            if let Ok(pool) = self.pools.family(Family::of(quarantine.address)) {
                pool.restore_quarantine(quarantine.address, quarantine.since, quarantine.until);
            }
        }
        for family in [Family::Ipv4, Family::Ipv6] {
            self.choose_router(family, now, draw, &mut findings, &mut changes);
        }
        Outcome { answer: findings, changes }
    }

    fn book_holders(&mut self, now: Timestamp, findings: &mut Vec<Finding>) {
        let held: Vec<(IpAddr, String)> = self.holders().collect();
        for (address, holder) in held {
            let Ok(pool) = self.pools.family(Family::of(address)) else { continue };
            // The allocator is new and holders are distinct, so the only refusal is an address from an earlier CIDR.
            if pool.allocate(address, &holder, now).is_err() {
                findings.push(Finding::OutsidePodCidr { holder, address, net: pool.net() });
            }
        }
    }

    fn book_exclusions(&mut self, findings: &mut Vec<Finding>) {
        for Exclusion { address, label } in &self.network.exclusions {
            let Ok(pool) = self.pools.family(Family::of(*address)) else { continue };
            if let Err(AddressError::AlreadyAllocated { owner: holder, .. }) = pool.exclude(*address, label) {
                findings.push(Finding::ExclusionHeld { address: *address, label: label.clone(), holder });
            }
        }
    }

    /// Configured, else kept from our records, else as seen elsewhere, else drawn.
    fn choose_router(
        &mut self,
        family: Family,
        now: Timestamp,
        draw: u64,
        findings: &mut Vec<Finding>,
        changes: &mut Vec<Change>,
    ) {
        let of_family = |addresses: &Addresses| addresses.iter().find(|address| Family::of(*address) == family);
        if let Some(address) = of_family(&self.network.configured_router) {
            if let Ok(pool) = self.pools.family(family)
                && pool.net().contains(&address)
            {
                findings.push(Finding::RouterInsidePodCidr { address, net: pool.net() });
                if let Err(AddressError::AlreadyAllocated { owner: holder, .. }) = pool.exclude(address, ROUTER) {
                    findings.push(Finding::ExclusionHeld { address, label: ROUTER.to_owned(), holder });
                }
            }
            self.set_router(address, now, changes);
            return;
        }
        let seen: Vec<IpAddr> = self
            .router
            .get(&family)
            .map(|router| router.address)
            .into_iter()
            .chain(self.network.seen_routers.iter().filter_map(of_family))
            .collect();
        let Ok(pool) = self.pools.family(family) else { return };
        let mut refused: Option<(IpAddr, AddressError)> = None;
        let mut chosen = None;
        for address in &seen {
            // `allocate` and not `exclude` alone: a router outside the CIDR would belong to another node by now.
            match pool.allocate(*address, ROUTER, now).and_then(|()| pool.undo(*address, ROUTER)) {
                Ok(()) => {
                    chosen = Some(*address);
                    break;
                }
                Err(reason) => refused = refused.or(Some((*address, reason))),
            }
        }
        let address = match chosen {
            Some(address) => Ok(address),
            None => {
                pool.allocate_next(ROUTER, now, draw).and_then(|address| pool.undo(address, ROUTER).map(|()| address))
            }
        };
        let address = match address {
            Ok(address) => address,
            Err(reason) => {
                findings.push(Finding::NoRouter { reason });
                if self.router.remove(&family).is_some() {
                    changes.push(Change::Remove(RecordKey::Router(family)));
                }
                return;
            }
        };
        // Free a moment ago, so this is not refused.
        if let Err(reason) = pool.exclude(address, ROUTER) {
            findings.push(Finding::NoRouter { reason });
            return;
        }
        match refused {
            Some((old, reason)) => findings.push(Finding::RouterReplaced { old, new: address, reason }),
            None => {
                let others: BTreeSet<IpAddr> = seen.into_iter().filter(|other| *other != address).collect();
                findings.extend(others.into_iter().map(|other| Finding::RouterMismatch { used: address, other }));
            }
        }
        self.set_router(address, now, changes);
    }

    fn set_router(&mut self, address: IpAddr, now: Timestamp, changes: &mut Vec<Change>) {
        let family = Family::of(address);
        if self.router.get(&family).is_none_or(|router| router.address != address) {
            let router = Router { address, since: now };
            changes.push(Change::Put(Record::Router(router.clone())));
            self.router.insert(family, router);
        }
        if self.resting.remove(&address).is_some() {
            changes.push(Change::Remove(RecordKey::Quarantine(address)));
        }
    }

    /// The router addresses in force.
    #[must_use]
    pub fn router(&self) -> Addresses {
        let mut addresses = Addresses::default();
        for router in self.router.values() {
            addresses.set(router.address);
        }
        addresses
    }

    /// Gives no new address while there is a reason not to, such as another CiliumNode that lists the same block
    /// (`ipam` decision 14). Leases that exist are not touched. `None` ends it.
    pub fn hold_back(&mut self, reason: Option<String>) {
        self.held_back = reason;
    }

    /// An address for an attachment. Asked again with the same attachment, it answers the same lease. Before it gives
    /// a new one, older leases of the same pod UID and interface name whose network namespace is gone are ended: a
    /// runtime that re-creates a sandbox may never send their DEL.
    pub fn add(
        &mut self,
        request: AddRequest,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
        draw: u64,
    ) -> Outcome<Result<Granted, AddError>> {
        let mut changes = self.expire(now);
        let answer = self.add_expired(request, netns_exists, now, draw, &mut changes);
        Outcome { answer, changes }
    }

    fn add_expired(
        &mut self,
        request: AddRequest,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
        draw: u64,
        changes: &mut Vec<Change>,
    ) -> Result<Granted, AddError> {
        let AddRequest { attachment, network, pod, netns, began } = request;
        if let Some(tombstone) = self.tombstones.get(&attachment)
            && !self.is_after(began.as_ref(), tombstone.began.as_ref())
        {
            return Err(AddError::Overtaken { attachment, at: tombstone.since });
        }
        let router = self.router();
        if let Some(lease) = self.pods.get(&attachment).filter(|lease| self.asked_since(lease, began.as_ref())) {
            return Ok(Granted { lease: lease.clone(), router });
        }
        if let Some(lease) = self.pods.get_mut(&attachment) {
            let mut renewed = lease.clone();
            renewed.network = network.or(renewed.network);
            renewed.pod = pod.or(renewed.pod);
            renewed.netns = netns;
            renewed.began = began.or(renewed.began);
            if let LeaseState::Provisional { expires, .. } = &mut renewed.state {
                *expires = later(now, self.timings.provisional);
            }
            if renewed != *lease {
                *lease = renewed;
                changes.push(Change::Put(Record::Pod(lease.clone())));
            }
            return Ok(Granted { lease: lease.clone(), router });
        }
        self.supersede(&attachment, pod.as_ref(), netns_exists, now, changes);
        self.ready(now, draw, changes)?;
        let holder = attachment.to_string();
        let addresses = self
            .pools
            .allocate_next(None, &holder, now, draw)
            .map_err(|reason| AddError::Exhausted { pool: DEFAULT_POOL.to_owned(), reason })?;
        self.generation += 1;
        let lease = PodLease {
            attachment: attachment.clone(),
            network,
            pod,
            netns,
            began,
            confirmed: None,
            pool: DEFAULT_POOL.to_owned(),
            addresses,
            generation: self.generation,
            state: LeaseState::Provisional { since: now, expires: later(now, self.timings.provisional) },
        };
        // The new lease is written before the end of the rest: with only one of the two on disk, the lease counts.
        changes.push(Change::Put(Record::Pod(lease.clone())));
        self.wake(addresses.iter(), changes);
        if self.tombstones.remove(&attachment).is_some() {
            changes.push(Change::Remove(RecordKey::Tombstone(attachment.clone())));
        }
        self.pods.insert(attachment, lease.clone());
        Ok(Granted { lease, router: self.router() })
    }

    fn supersede(
        &mut self,
        attachment: &Attachment,
        pod: Option<&Pod>,
        netns_exists: impl Fn(&str) -> bool,
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) {
        let Some(uid) = pod.and_then(|pod| pod.uid.as_deref()) else { return };
        let gone: Vec<Attachment> = self
            .pods
            .values()
            .filter(|lease| lease.attachment.ifname == attachment.ifname)
            .filter(|lease| lease.pod.as_ref().and_then(|pod| pod.uid.as_deref()) == Some(uid))
            .filter(|lease| !netns_exists(&lease.netns))
            .map(|lease| lease.attachment.clone())
            .collect();
        for attachment in gone {
            self.end_pod(&attachment, now, changes);
        }
    }

    fn may_give(&self) -> Result<(), AddError> {
        self.held_back.clone().map_or(Ok(()), |reason| Err(AddError::HeldBack { reason }))
    }

    /// Whether new addresses can be given at all.
    fn ready(&mut self, now: Timestamp, draw: u64, changes: &mut Vec<Change>) -> Result<(), AddError> {
        if self.pools.is_empty() {
            return Err(AddError::WaitingForPodCidr);
        }
        self.may_give()?;
        for family in self.pools.iter().map(|pool| Family::of_net(&pool.net())).collect::<Vec<_>>() {
            if !self.router.contains_key(&family) {
                let mut findings = Vec::new();
                self.choose_router(family, now, draw, &mut findings, changes);
                for finding in findings {
                    if let Finding::NoRouter { reason } = finding {
                        return Err(AddError::NoRouter { reason });
                    }
                }
            }
        }
        Ok(())
    }

    /// The interface exists, or is about to: the lease no longer ends by itself. Said again, it takes over the interface as
    /// said last. `began` is the moment of the ADD that says so: once another has asked for the lease since, that one's
    /// interface counts, and nothing changes.
    pub fn confirm(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: Behind,
        began: Option<&Moment>,
        now: Timestamp,
    ) -> Outcome<Result<PodLease, ConfirmError>> {
        let mut changes = self.expire(now);
        let asked_since = self.pods.get(attachment).is_some_and(|lease| self.asked_since(lease, began));
        let answer = match self.pods.get_mut(attachment) {
            None => Err(ConfirmError::NoLease { attachment: attachment.clone() }),
            Some(lease) if lease.generation != generation => Err(ConfirmError::OtherGeneration {
                attachment: attachment.clone(),
                presented: generation,
                current: lease.generation,
            }),
            Some(lease) if asked_since => Ok(lease.clone()),
            Some(lease) => {
                let same =
                    matches!(&lease.state, LeaseState::Confirmed { interface: known, .. } if *known == interface);
                if !same || lease.confirmed != lease.began {
                    lease.confirmed.clone_from(&lease.began);
                    lease.state = LeaseState::Confirmed { since: now, interface };
                    changes.push(Change::Put(Record::Pod(lease.clone())));
                }
                Ok(lease.clone())
            }
        };
        Outcome { answer, changes }
    }

    /// Gives the lease of this attachment back, whatever its state, and answers what it was. Without a lease it is a
    /// success too, and leaves a tombstone in case the ADD is still under way.
    ///
    /// A DEL may have waited since it `began`, on disk for an agent or in a socket. A lease that an ADD which began later
    /// has asked for, the first time or again, is not the one that was to end: it stays, and the answer is none. While that
    /// ADD has not confirmed it, it is provisional.
    pub fn del(&mut self, attachment: &Attachment, began: Option<Moment>, now: Timestamp) -> Outcome<Option<PodLease>> {
        let mut changes = self.expire(now);
        if let Some(lease) = self.pods.get(attachment).filter(|lease| self.asked_since(lease, began.as_ref())) {
            let confirmed_since = self.is_after(lease.confirmed.as_ref(), began.as_ref());
            if matches!(lease.state, LeaseState::Confirmed { .. }) && !confirmed_since {
                let state = LeaseState::Provisional { since: now, expires: later(now, self.timings.provisional) };
                let lease = PodLease { state, ..lease.clone() };
                changes.push(Change::Put(Record::Pod(lease.clone())));
                self.pods.insert(attachment.clone(), lease);
            }
            return Outcome { answer: None, changes };
        }
        let answer = self.end_pod(attachment, now, &mut changes);
        if answer.is_none() {
            let until = later(now, self.timings.tombstone);
            let known = self.tombstones.get(attachment).and_then(|tombstone| tombstone.began.as_ref());
            let began = if self.is_after(known, began.as_ref()) { known.cloned() } else { began };
            let tombstone = Tombstone { attachment: attachment.clone(), since: now, began, until };
            changes.push(Change::Put(Record::Tombstone(tombstone.clone())));
            self.tombstones.insert(attachment.clone(), tombstone);
        }
        Outcome { answer, changes }
    }

    /// Whether an ADD that began later than `began` has asked for a lease.
    #[must_use]
    pub fn asked_since(&self, lease: &PodLease, began: Option<&Moment>) -> bool {
        self.is_after(lease.began.as_ref(), began)
    }

    /// Whether one moment is known to be later than the other.
    fn is_after(&self, one: Option<&Moment>, other: Option<&Moment>) -> bool {
        one.zip(other).is_some_and(|(one, other)| one.is_after(other, &self.boot))
    }

    /// What an attachment holds now.
    #[must_use]
    pub fn check(&self, attachment: &Attachment, now: Timestamp) -> Option<&PodLease> {
        self.pods
            .get(attachment)
            .filter(|lease| !matches!(lease.state, LeaseState::Provisional { expires, .. } if expires <= now))
    }

    /// Ends every lease of a network whose attachment is not in the list of valid ones (CNI GC). The list has the
    /// attachments of that network alone.
    pub fn collect(&mut self, network: &str, valid: &BTreeSet<Attachment>, now: Timestamp) -> Outcome<Vec<PodLease>> {
        let of_network = |lease: &PodLease| lease.network.as_deref() == Some(network);
        self.end_all(|lease| of_network(lease) && !valid.contains(&lease.attachment), now)
    }

    /// Ends every lease whose network namespace is gone. Only right after a reboot, which no namespace outlives:
    /// while a runtime is at work, a namespace may be missing for other reasons.
    pub fn drop_gone(&mut self, netns_exists: impl Fn(&str) -> bool, now: Timestamp) -> Outcome<Vec<PodLease>> {
        self.end_all(|lease| !netns_exists(&lease.netns), now)
    }

    /// Ends confirmed leases that an audit found to be nobody's, each with the generation that was looked at.
    pub fn end_lost(&mut self, lost: &[(Attachment, u64)], now: Timestamp) -> Outcome<Vec<PodLease>> {
        let is_lost = |lease: &PodLease| lost.iter().any(|(a, g)| *a == lease.attachment && *g == lease.generation);
        self.end_all(|lease| matches!(lease.state, LeaseState::Confirmed { .. }) && is_lost(lease), now)
    }

    fn end_all(&mut self, ended: impl Fn(&PodLease) -> bool, now: Timestamp) -> Outcome<Vec<PodLease>> {
        let mut changes = self.expire(now);
        let attachments: Vec<Attachment> =
            self.pods.values().filter(|lease| ended(lease)).map(|lease| lease.attachment.clone()).collect();
        let answer = attachments.iter().filter_map(|attachment| self.end_pod(attachment, now, &mut changes)).collect();
        Outcome { answer, changes }
    }

    /// Lets time pass: unconfirmed leases end, rested addresses become free, tombstones are forgotten. Every call
    /// does this first; a timer at [`Self::next_deadline`] keeps the records short in between.
    pub fn expire(&mut self, now: Timestamp) -> Vec<Change> {
        let mut changes = Vec::new();
        let expired: Vec<Attachment> = self
            .pods
            .values()
            .filter(|lease| matches!(lease.state, LeaseState::Provisional { expires, .. } if expires <= now))
            .map(|lease| lease.attachment.clone())
            .collect();
        for attachment in expired {
            self.end_pod(&attachment, now, &mut changes);
        }
        let expired: Vec<(String, IpAddr)> = self
            .owners
            .iter()
            .filter(|(_, lease)| lease.expiration.as_ref().is_some_and(|expiration| expiration.at <= now))
            .map(|(key, _)| key.clone())
            .collect();
        for key in expired {
            self.end_owner(&key, now, &mut changes);
        }
        self.tombstones.retain(|attachment, tombstone| {
            let kept = tombstone.until > now;
            if !kept {
                changes.push(Change::Remove(RecordKey::Tombstone(attachment.clone())));
            }
            kept
        });
        self.resting.retain(|address, quarantine| {
            let kept = quarantine.until > now;
            if !kept {
                changes.push(Change::Remove(RecordKey::Quarantine(*address)));
            }
            kept
        });
        for pool in self.pools.ipv4.iter_mut().chain(&mut self.pools.ipv6) {
            pool.expire(now);
        }
        changes
    }

    /// When [`Self::expire`] has something to do next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let provisional = self.pods.values().filter_map(|lease| match lease.state {
            LeaseState::Provisional { expires, .. } => Some(expires),
            LeaseState::Confirmed { .. } => None,
        });
        let timers = self.owners.values().filter_map(|lease| lease.expiration.as_ref().map(|timer| timer.at));
        let tombstones = self.tombstones.values().map(|tombstone| tombstone.until);
        let resting = self.resting.values().map(|quarantine| quarantine.until);
        provisional.chain(timers).chain(tombstones).chain(resting).min()
    }

    /// `POST /ipam`: an address for an owner text, of one family or of each that the node serves.
    pub fn allocate_for_owner(
        &mut self,
        request: OwnerRequest,
        now: Timestamp,
        draw: u64,
    ) -> Outcome<Result<Vec<OwnerLease>, OwnerError>> {
        let mut changes = self.expire(now);
        let answer = self.allocate_for_owner_expired(request, now, draw, &mut changes);
        Outcome { answer, changes }
    }

    fn allocate_for_owner_expired(
        &mut self,
        request: OwnerRequest,
        now: Timestamp,
        draw: u64,
        changes: &mut Vec<Change>,
    ) -> Result<Vec<OwnerLease>, OwnerError> {
        let OwnerRequest { family, owner, pool, expiration } = request;
        known_pool(pool.as_deref().unwrap_or(DEFAULT_POOL))?;
        self.ready(now, draw, changes)?;
        let addresses = self.pools.allocate_next(family, &format!("owner {owner}"), now, draw)?;
        let leases = addresses
            .iter()
            .map(|address| {
                let uuid = expiration.as_ref().map(|ids| match Family::of(address) {
                    Family::Ipv4 => ids.ipv4.clone(),
                    Family::Ipv6 => ids.ipv6.clone(),
                });
                self.hold_for_owner(owner.clone(), address, uuid, now, changes)
            })
            .collect();
        Ok(leases)
    }

    /// `POST /ipam/{ip}`: this address for an owner text. The pool is compulsory.
    pub fn allocate_address_for_owner(
        &mut self,
        address: IpAddr,
        owner: String,
        pool: &str,
        now: Timestamp,
    ) -> Outcome<Result<OwnerLease, OwnerError>> {
        let mut changes = self.expire(now);
        let answer = match known_pool(pool)
            .and_then(|()| Ok(self.may_give()?))
            .and_then(|()| Ok(self.pools.family(Family::of(address))?))
            .and_then(|pool| Ok(pool.allocate(address, &format!("owner {owner}"), now)?))
        {
            Ok(()) => Ok(self.hold_for_owner(owner, address, None, now, &mut changes)),
            Err(error) => Err(error),
        };
        Outcome { answer, changes }
    }

    fn hold_for_owner(
        &mut self,
        owner: String,
        address: IpAddr,
        uuid: Option<String>,
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) -> OwnerLease {
        self.generation += 1;
        let lease = OwnerLease {
            owner,
            pool: DEFAULT_POOL.to_owned(),
            address,
            generation: self.generation,
            since: now,
            expiration: uuid.map(|uuid| Expiration { uuid, at: later(now, self.timings.provisional) }),
        };
        changes.push(Change::Put(Record::Owner(lease.clone())));
        self.wake([address].into_iter(), changes);
        self.owners.insert((lease.pool.clone(), address), lease.clone());
        lease
    }

    /// Stops the timer of a lease by owner text: whoever presents its UUID has made the endpoint.
    pub fn stop_expiration(
        &mut self,
        address: IpAddr,
        pool: &str,
        uuid: &str,
        now: Timestamp,
    ) -> Outcome<Result<(), OwnerError>> {
        let mut changes = self.expire(now);
        let no_timer = || OwnerError::NoTimer { address, pool: pool.to_owned() };
        let answer = match self.owners.get_mut(&(pool.to_owned(), address)) {
            None => Err(no_timer()),
            Some(lease) => match &lease.expiration {
                None => Err(no_timer()),
                Some(timer) if timer.uuid != uuid => {
                    Err(OwnerError::OtherTimer { address, pool: pool.to_owned(), presented: uuid.to_owned() })
                }
                Some(_) => {
                    lease.expiration = None;
                    changes.push(Change::Put(Record::Owner(lease.clone())));
                    Ok(())
                }
            },
        };
        Outcome { answer, changes }
    }

    /// `DELETE /ipam/{ip}`: gives an address back that was given by owner text. A pod's address is refused.
    pub fn release_for_owner(
        &mut self,
        address: IpAddr,
        pool: &str,
        now: Timestamp,
    ) -> Outcome<Result<OwnerLease, OwnerError>> {
        let mut changes = self.expire(now);
        let endpoint = self.pods.values().find(|lease| lease.addresses.iter().any(|held| held == address));
        let answer = match endpoint {
            Some(lease) => Err(OwnerError::InUse { address, attachment: lease.attachment.clone() }),
            None => self
                .end_owner(&(pool.to_owned(), address), now, &mut changes)
                .ok_or_else(|| OwnerError::NotAllocated { address, pool: pool.to_owned() }),
        };
        Outcome { answer, changes }
    }

    /// Every pod lease, by attachment.
    pub fn pods(&self) -> impl Iterator<Item = &PodLease> {
        self.pods.values()
    }

    /// Every address that somebody holds, for good or provisionally.
    pub fn held(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let of_pods = self.pods.values().flat_map(|lease| {
            let ipv4 = lease.addresses.ipv4.map(IpAddr::V4);
            ipv4.into_iter().chain(lease.addresses.ipv6.map(IpAddr::V6))
        });
        of_pods.chain(self.owners.keys().map(|(_, address)| *address))
    }

    /// Addresses of each pod CIDR by state, IPv4 first.
    #[must_use]
    pub fn usage(&self) -> Vec<(IpNet, Usage)> {
        self.pools.iter().map(|pool| (pool.net(), pool.usage())).collect()
    }

    /// Every address that is not free, by address.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for lease in self.pods.values() {
            let (state, since, until, why) = match &lease.state {
                LeaseState::Provisional { since, expires } => (
                    RowState::Provisional,
                    *since,
                    Some(*expires),
                    "given; its interface is not confirmed yet".to_owned(),
                ),
                LeaseState::Confirmed { since, interface } => {
                    (RowState::Confirmed, *since, None, format!("in use behind {interface}"))
                }
            };
            rows.extend(lease.addresses.iter().map(|address| Row {
                address,
                pool: lease.pool.clone(),
                state,
                holder: lease.holder(),
                pod: lease.pod.clone(),
                since: Some(since),
                until,
                why: why.clone(),
            }));
        }
        rows.extend(self.owners.values().map(|lease| Row {
            address: lease.address,
            pool: lease.pool.clone(),
            state: RowState::Owner,
            holder: lease.owner.clone(),
            pod: None,
            since: Some(lease.since),
            until: lease.expiration.as_ref().map(|timer| timer.at),
            why: "given through the API by owner".to_owned(),
        }));
        rows.extend(self.resting.values().map(|quarantine| Row {
            address: quarantine.address,
            pool: quarantine.pool.clone(),
            state: RowState::Quarantined,
            holder: quarantine.last_holder.clone(),
            pod: None,
            since: Some(quarantine.since),
            until: Some(quarantine.until),
            why: "given back; rests before it is given again".to_owned(),
        }));
        let reserved = |address: IpAddr, label: &str, since: Option<Timestamp>| Row {
            address,
            pool: DEFAULT_POOL.to_owned(),
            state: RowState::Reserved,
            holder: label.to_owned(),
            pod: None,
            since,
            until: None,
            why: format!("kept for {label}"),
        };
        rows.extend(self.router.values().map(|router| reserved(router.address, ROUTER, Some(router.since))));
        let excluded = |exclusion: &&Exclusion| {
            let address = exclusion.address;
            self.pools.iter().any(|pool| pool.usable(address)) && self.holders().all(|(held, _)| held != address)
        };
        let exclusions = self.network.exclusions.iter().filter(excluded);
        rows.extend(exclusions.map(|exclusion| reserved(exclusion.address, &exclusion.label, None)));
        rows.sort_by(|a, b| (a.address, &a.holder).cmp(&(b.address, &b.holder)));
        rows
    }

    fn holders(&self) -> impl Iterator<Item = (IpAddr, String)> {
        let pods = self.pods.values().flat_map(|lease| {
            let holder = lease.holder();
            lease.addresses.iter().map(move |address| (address, holder.clone())).collect::<Vec<_>>()
        });
        pods.chain(self.owners.values().map(|lease| (lease.address, lease.holder())))
    }

    fn end_pod(&mut self, attachment: &Attachment, now: Timestamp, changes: &mut Vec<Change>) -> Option<PodLease> {
        let lease = self.pods.remove(attachment)?;
        for address in lease.addresses.iter() {
            self.rest(address, &lease.pool, lease.generation, lease.holder(), now, changes);
        }
        changes.push(Change::Remove(RecordKey::Pod(attachment.clone())));
        Some(lease)
    }

    fn end_owner(&mut self, key: &(String, IpAddr), now: Timestamp, changes: &mut Vec<Change>) -> Option<OwnerLease> {
        let lease = self.owners.remove(key)?;
        self.rest(lease.address, &lease.pool, lease.generation, lease.holder(), now, changes);
        changes.push(Change::Remove(RecordKey::Owner(lease.pool.clone(), lease.address)));
        Some(lease)
    }

    /// Sends an address to quarantine. Its record is written before the lease's is removed: with both on disk, the
    /// lease counts, and the release that was never answered is asked for again.
    fn rest(
        &mut self,
        address: IpAddr,
        pool: &str,
        generation: u64,
        holder: String,
        now: Timestamp,
        changes: &mut Vec<Change>,
    ) {
        let until = later(now, self.timings.quarantine);
        if let Ok(allocator) = self.pools.family(Family::of(address)) {
            // Refused only for an address of an earlier pod CIDR, which nothing is drawn from.
            let released = allocator.release(address, &holder, now, until).is_ok();
            let exclusion = self.network.exclusions.iter().find(|exclusion| exclusion.address == address);
            if let Some(exclusion) = exclusion.filter(|_| released)
                && allocator.exclude(address, &exclusion.label).is_ok()
            {
                return;
            }
        }
        let quarantine =
            Quarantine { pool: pool.to_owned(), address, generation, last_holder: holder, since: now, until };
        changes.push(Change::Put(Record::Quarantine(quarantine.clone())));
        self.resting.insert(address, quarantine);
    }

    /// Ends the rest of addresses that were given out early, because nothing else was left.
    fn wake(&mut self, addresses: impl Iterator<Item = IpAddr>, changes: &mut Vec<Change>) {
        for address in addresses {
            if self.resting.remove(&address).is_some() {
                changes.push(Change::Remove(RecordKey::Quarantine(address)));
            }
        }
    }
}

fn known_pool(pool: &str) -> Result<(), OwnerError> {
    if pool == DEFAULT_POOL { Ok(()) } else { Err(OwnerError::UnknownPool { pool: pool.to_owned() }) }
}

#[cfg(test)]
mod tests;
