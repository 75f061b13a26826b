//! All addresses that are not free, for `cistern ip list`.

use super::record::{LeaseState, Pod};
use super::{DEFAULT_POOL, Exclusion, Leases, ROUTER};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;

/// State of an address, for `cistern ip list`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RowState {
    /// Allocated to a pod whose interface is not confirmed.
    Provisional,
    /// In use by a pod.
    Confirmed,
    /// Allocated through the calls with an owner string.
    Owner,
    /// Quarantined after a release.
    Quarantined,
    /// Reserved for the router or another address of the node.
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
    /// Its state.
    pub state: RowState,
    /// Attachment, owner string or label.
    pub holder: String,
    /// The pod, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    /// Start of this state, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// End of this state, if it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// Why it is not free, human-readable.
    pub why: String,
}

impl Leases {
    /// All addresses that are not free, by address.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for lease in self.pods.values() {
            let (state, since, until, why) = match &lease.state {
                LeaseState::Provisional { since, expires } => (
                    RowState::Provisional,
                    *since,
                    Some(*expires),
                    "allocated; its interface is not confirmed yet".to_owned(),
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
            why: "allocated through the API by owner".to_owned(),
        }));
        rows.extend(self.resting.values().map(|quarantine| Row {
            address: quarantine.address,
            pool: quarantine.pool.clone(),
            state: RowState::Quarantined,
            holder: quarantine.last_holder.clone(),
            pod: None,
            since: Some(quarantine.since),
            until: Some(quarantine.until),
            why: "released; quarantined before it is reallocated".to_owned(),
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
            self.pools.usable(address) && self.holders().all(|(held, _)| held != address)
        };
        let exclusions = self.surroundings.iter().flat_map(|around| &around.exclusions).filter(excluded);
        rows.extend(exclusions.map(|exclusion| reserved(exclusion.address, &exclusion.label, None)));
        rows.sort_by(|a, b| (a.address, &a.holder).cmp(&(b.address, &b.holder)));
        rows
    }
}
