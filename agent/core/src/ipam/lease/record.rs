//! The durable records.

use super::{Timings, later};
use crate::format::{Unsupported, Version};
use crate::ip::Family;
use crate::ipam::node::pod_cidr::Addresses;
use crate::ipam::supply::Grant;
use crate::moment::Moment;
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// The format of [`Record`] as written. Format 1 has no grants, and is set aside by its readers as soon as it meets another
/// format.
pub const FORMAT: u32 = 2;

/// The oldest format whose reader understands the records of this one: since format 2 a record of unknown kind stays as it is.
const OLDEST_READER: u32 = 2;

/// Every kind of [`Record`], as it is written.
const KINDS: [&str; 6] = ["pod", "owner", "tombstone", "quarantine", "router", "grant"];

/// Identity of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attachment {
    /// `CNI_CONTAINERID`: the sandbox, which changes when the pod's sandbox is recreated.
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.container_id, self.ifname)
    }
}

/// The pod of an attachment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pod {
    /// `K8S_POD_NAMESPACE`
    pub namespace: String,
    /// `K8S_POD_NAME`
    pub name: String,
    /// `K8S_POD_UID`, which older runtimes omit. Without it nothing is superseded, because a name does not identify a
    /// pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The veth pair of a confirmed lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name of the host side.
    pub host_ifname: String,
    /// Index of the host side.
    pub host_ifindex: u32,
    /// MAC address of the pod's side, as `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
}

/// How the pod is attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PodAttachment {
    /// A veth pair created by `cistern-cni`.
    Pair(Interface),
    /// An interface that another plugin creates with this address.
    Plugin {
        /// The plugin.
        plugin: String,
        /// The pod's packets are routed by this node, so the datapath must know the pod in order to masquerade it.
        routed: bool,
    },
}

impl fmt::Display for PodAttachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pair(interface) => f.write_str(&interface.host_ifname),
            Self::Plugin { plugin, .. } => write!(f, "an interface of plugin {plugin}"),
        }
    }
}

/// State of a pod lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseState {
    /// Allocated, but the interface may not exist; expires.
    Provisional {
        /// Time of the allocation, or of a DEL that found that the lease was requested again.
        since: Timestamp,
        /// Expiry unless it is confirmed.
        expires: Timestamp,
    },
    /// The interface was created (or, for chained IPAM, will be).
    Confirmed {
        /// Time of the confirmation.
        since: Timestamp,
        /// The interface.
        interface: PodAttachment,
    },
}

/// The lease of a pod's interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodLease {
    /// The owner, and the only key for a release.
    pub attachment: Attachment,
    /// Name of the network of the attachment: a runtime runs GC for one network at a time. A lease without it is never
    /// collected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// The pod, if the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// Path of the pod's network namespace.
    pub netns: String,
    /// Start time of the last ADD that requested it, if reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
    /// `began` of the last ADD that confirmed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirmed: Option<Moment>,
    /// The pool of the addresses.
    pub pool: String,
    /// The addresses: one of each family that the node served at the time.
    pub addresses: Addresses,
    /// Distinguishes this lease from earlier ones of the same addresses.
    pub generation: u64,
    /// The state.
    pub state: LeaseState,
}

impl PodLease {
    /// Time of the last change of state.
    #[must_use]
    pub fn since(&self) -> Timestamp {
        match &self.state {
            LeaseState::Provisional { since, .. } | LeaseState::Confirmed { since, .. } => *since,
        }
    }

    pub(super) fn holder(&self) -> String {
        self.attachment.to_string()
    }
}

/// The expiration timer of an unconfirmed [`OwnerLease`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expiration {
    /// Identifies the timer when it is stopped.
    pub uuid: String,
    /// Expiry unless the timer is stopped.
    pub at: Timestamp,
}

/// A lease through the API calls with an owner string (`ipam` 5.1). Its key is (pool, address).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerLease {
    /// As passed by the caller: usually `namespace/pod`.
    pub owner: String,
    /// The pool of the address.
    pub pool: String,
    /// The address.
    pub address: IpAddr,
    /// Distinguishes this lease from earlier ones of the same address.
    pub generation: u64,
    /// Time of the allocation.
    pub since: Timestamp,
    /// The expiration timer, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration: Option<Expiration>,
}

impl OwnerLease {
    /// The prefix distinguishes it from attachments' keys, so that neither kind can release the other.
    pub(super) fn holder(&self) -> String {
        format!("owner {}", self.owner)
    }
}

/// A DEL that arrived before its ADD, which is rejected if it arrives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// The attachment of the DEL.
    pub attachment: Attachment,
    /// Time of the DEL.
    pub since: Timestamp,
    /// Start time of the DEL, if reported: an ADD that started later is not affected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
    /// Expiry.
    pub until: Timestamp,
}

/// An address that was released and is not available yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// Its pool.
    pub pool: String,
    /// The address.
    pub address: IpAddr,
    /// The generation of the lease that ended.
    pub generation: u64,
    /// The former owner, human-readable.
    pub last_holder: String,
    /// Time of the release.
    pub since: Timestamp,
    /// When it becomes available.
    pub until: Timestamp,
}

/// The router address of a family, chosen once and kept across restarts (`ipam` 2.1.6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Router {
    /// The address.
    pub address: IpAddr,
    /// Time of the choice.
    pub since: Timestamp,
}

/// A durable record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[expect(clippy::large_enum_variant, reason = "nearly all records are leases of pods")]
pub enum Record {
    /// A pod's lease.
    Pod(PodLease),
    /// A lease with an owner string.
    Owner(OwnerLease),
    /// A DEL that arrived before its ADD.
    Tombstone(Tombstone),
    /// A quarantined address.
    Quarantine(Quarantine),
    /// A router address.
    Router(Router),
    /// A pod CIDR of this node.
    Grant(Grant),
}

/// The key of a [`Record`]; a later record replaces an earlier one with the same key.
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
    /// Key of [`Record::Grant`]: pool and pod CIDR.
    Grant(String, IpNet),
}

impl fmt::Display for RecordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(attachment) => write!(f, "pod {attachment}"),
            Self::Owner(pool, address) => write!(f, "owner {pool} {address}"),
            Self::Tombstone(attachment) => write!(f, "tombstone {attachment}"),
            Self::Quarantine(address) => write!(f, "quarantine {address}"),
            Self::Router(family) => write!(f, "router {family}"),
            Self::Grant(pool, net) => write!(f, "grant {pool} {net}"),
        }
    }
}

/// Relation between the clock of [`super::Leases`] and the times in its records.
///
/// The clock of leases never goes back while the machine is up (`clock` of the agent), whatever happens to the wall
/// clock. It does not continue across a reboot: only the wall clock knows how long the machine was off, and that may be
/// years behind until the network is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordTimes {
    /// The records were written with this clock: the remaining times hold.
    Continue,
    /// The records were written with another clock: all timers restart with their full durations, so that none expires
    /// early, and none lasts longer than its duration from now.
    BeginAnew,
}

/// Why a stored record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Written by a build that says that this one would misread it.
    #[error("lease record of {0}")]
    Format(#[from] Unsupported),
    /// Invalid content.
    #[error("lease record is damaged: {0}")]
    Damaged(#[from] serde_json::Error),
}

/// A stored record as read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// A record of this format, or of one that reads the same.
    Current(Record),
    /// A record of an older format; it is to be written again.
    Older(Record),
    /// A kind of record of a newer build, which says that this build may leave it alone. It is neither used nor changed.
    Unknown {
        /// The kind.
        kind: String,
    },
}

/// A record as stored: the version beside its fields.
#[derive(Serialize, Deserialize)]
struct Document<R> {
    #[serde(flatten)]
    version: Version,
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
            Self::Grant(grant) => RecordKey::Grant(grant.pool.clone(), grant.net),
        }
    }

    /// Adjusts the expiry of the record to the current clock, and returns whether it changed. A timer never exceeds its
    /// full duration, whatever the record contains.
    pub(super) fn wait_again(&mut self, timings: &Timings, times: RecordTimes, now: Timestamp) -> bool {
        let (since, until, whole) = match self {
            Self::Pod(PodLease { state: LeaseState::Provisional { since, expires }, .. }) => {
                (since, expires, timings.provisional)
            }
            Self::Owner(OwnerLease { since, expiration: Some(expiration), .. }) => {
                (since, &mut expiration.at, timings.provisional)
            }
            Self::Tombstone(Tombstone { since, until, .. }) => (since, until, timings.tombstone),
            Self::Quarantine(Quarantine { since, until, .. }) => (since, until, timings.quarantine),
            Self::Pod(_) | Self::Owner(_) | Self::Router(_) | Self::Grant(_) => return false,
        };
        let before = (*since, *until);
        *since = before.0.min(now);
        *until = match times {
            RecordTimes::Continue => before.1.min(later(now, whole)),
            RecordTimes::BeginAnew => later(now, whole),
        };
        before != (*since, *until)
    }

    /// The record as one line of JSON, with its version.
    ///
    /// # Errors
    /// None in practice: every field has a JSON form.
    pub fn to_json(&self) -> Result<String, RecordError> {
        Ok(serde_json::to_string(&Document { version: Version::new(FORMAT, OLDEST_READER), record: self })?)
    }

    /// Reads what [`Self::to_json`] wrote, in this build or another.
    ///
    /// # Errors
    /// A format that this build would misread, or not a record. The caller sets the source aside and reports it.
    pub fn from_json(text: &str) -> Result<Stored, RecordError> {
        #[derive(Deserialize)]
        struct Head {
            #[serde(flatten)]
            version: Version,
            kind: String,
        }
        // The version is read first: fields of another format are not judged by the rules of this one.
        let version: Version = serde_json::from_str(text)?;
        version.check(FORMAT)?;
        let Head { version, kind } = serde_json::from_str(text)?;
        if version.format > FORMAT && !KINDS.contains(&kind.as_str()) {
            return Ok(Stored::Unknown { kind });
        }
        let Document { record, .. } = serde_json::from_str::<Document<Self>>(text)?;
        Ok(if version.format < FORMAT { Stored::Older(record) } else { Stored::Current(record) })
    }
}
