//! Findings about a file that is in force all the same.

use super::file::{KEYS, MIN_RESYNC_INTERVAL};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A finding about the file that keeps nothing of it from being in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Warning {
    /// A key that has no meaning.
    UnknownKey {
        /// As written.
        key: String,
        /// The key that may have been meant.
        nearest: Option<String>,
    },
    /// An entry with bits beyond its prefix.
    HostBits {
        /// Position in the list, from 0.
        index: usize,
        /// As written.
        text: String,
        /// As read.
        read_as: IpNet,
    },
    /// An entry without prefix length.
    BareAddress {
        /// Position in the list, from 0.
        index: usize,
        /// As written.
        text: String,
        /// As read.
        read_as: IpNet,
    },
    /// A value of another type than the format has, with one obvious reading.
    Retyped {
        /// The key.
        key: String,
        /// As written.
        text: String,
        /// As read.
        read_as: String,
    },
    /// The list is not set, so that the built-in one stays.
    ListNotSet,
    /// The list is empty: everything but link-local destinations is masqueraded.
    ListEmpty,
    /// An entry that covers a whole family: nothing of it is masqueraded.
    CoversEverything {
        /// The entry.
        cidr: IpNet,
    },
    /// More entries than the file's own `cidrLimit`.
    OverLimit {
        /// `cidrLimit`.
        limit: u64,
        /// How many entries there are.
        entries: usize,
    },
    /// `resyncInterval` is too short; the shortest one is in force.
    IntervalTooShort {
        /// As written.
        text: String,
    },
    /// IPv6 entries without effect, since IPv6 is off.
    Ipv6Inert {
        /// How many.
        entries: usize,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownKey { key, nearest: Some(nearest) } => {
                write!(formatter, "unknown key {key}: did you mean {nearest}?")
            }
            Self::UnknownKey { key, nearest: None } => {
                write!(formatter, "unknown key {key}: the keys are {}", KEYS.join(", "))
            }
            Self::HostBits { index, text, read_as } => {
                write!(
                    formatter,
                    "nonMasqueradeCIDRs[{index}]: {text} has bits beyond its prefix and is read as {read_as}"
                )
            }
            Self::BareAddress { index, text, read_as } => {
                write!(formatter, "nonMasqueradeCIDRs[{index}]: {text} has no prefix length and is read as {read_as}")
            }
            Self::Retyped { key, text, read_as } => write!(formatter, "{key}: {text} is read as {read_as}"),
            Self::ListNotSet => formatter.write_str("nonMasqueradeCIDRs is not set: the built-in list stays in force"),
            Self::ListEmpty => {
                formatter.write_str("nonMasqueradeCIDRs is empty: every destination but link-local ones is masqueraded")
            }
            Self::CoversEverything { cidr } => {
                write!(formatter, "nonMasqueradeCIDRs holds {cidr}: no traffic of this family is masqueraded")
            }
            Self::OverLimit { limit, entries } => {
                write!(
                    formatter,
                    "nonMasqueradeCIDRs has {entries} entries, more than cidrLimit ({limit}); all are in force"
                )
            }
            Self::IntervalTooShort { text } => {
                write!(formatter, "resyncInterval: {text} is too short; {}s is in force", MIN_RESYNC_INTERVAL.as_secs())
            }
            Self::Ipv6Inert { entries } => write!(formatter, "{entries} IPv6 entries have no effect: IPv6 is off"),
        }
    }
}
