//! Problems of a file that is nevertheless in force.

use super::file::{KEYS, MIN_RESYNC_INTERVAL};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A problem in the file that does not invalidate it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Warning {
    /// An unknown key.
    UnknownKey {
        /// As written.
        key: String,
        /// The most similar key.
        nearest: Option<String>,
    },
    /// An entry with host bits.
    HostBits {
        /// Position in the list, from 0.
        index: usize,
        /// As written.
        text: String,
        /// The CIDR in force.
        read_as: IpNet,
    },
    /// An entry without prefix length.
    BareAddress {
        /// Position in the list, from 0.
        index: usize,
        /// As written.
        text: String,
        /// The CIDR in force.
        read_as: IpNet,
    },
    /// A value of another type, with one obvious interpretation.
    Retyped {
        /// The key.
        key: String,
        /// As written.
        text: String,
        /// The CIDR in force.
        read_as: String,
    },
    /// The list is not set, so that the built-in one is in force.
    ListNotSet,
    /// The list is empty: everything except link-local destinations is masqueraded.
    ListEmpty,
    /// An entry that covers a whole family, which is not masqueraded at all.
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
    /// `resyncInterval` is too short; the minimum is in force.
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
