//! What is durable: one record for each fact.

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

    pub(super) fn holder(&self) -> String {
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
    pub(super) fn holder(&self) -> String {
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
    /// A pod CIDR of this node.
    Grant(Grant),
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

/// How the time that [`super::Leases`] is given relates to the times in its records.
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

/// Why a stored record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Written by a build that says that this one would misread it.
    #[error("lease record of {0}")]
    Format(#[from] Unsupported),
    /// Not what was written.
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

    /// Adjusts the end of what the record waits for to the clock of now, and says whether that changed anything. A
    /// waiting never gets longer than its whole time, whatever the record says.
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
