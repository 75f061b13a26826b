//! The format of the file.

use super::warning::Warning;
use crate::spelling::nearest;
use ipnet::IpNet;
use jiff::SignedDuration;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

/// Maximum number of CIDRs per family in a file, the capacity of the kernel's table.
pub const MAX_DESTINATIONS: usize = 16_384;

/// Default interval for re-reading the file (ip-masq-agent's default).
pub const DEFAULT_RESYNC_INTERVAL: Duration = Duration::from_secs(60);

/// Minimum interval.
pub const MIN_RESYNC_INTERVAL: Duration = Duration::from_secs(1);

/// A valid file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigFile {
    /// `nonMasqueradeCIDRs`, without host bits and duplicates, sorted. `None`: the file does not set it.
    pub cidrs: Option<BTreeSet<IpNet>>,
    /// `masqLinkLocal`: 169.254.0.0/16 is not excluded.
    pub masq_link_local: bool,
    /// `masqLinkLocalIPv6`: fe80::/10 is not excluded.
    pub masq_link_local_ipv6: bool,
    /// `resyncInterval`: interval for re-reading the file, even if it is watched.
    pub resync_interval: Duration,
}

impl Default for ConfigFile {
    fn default() -> Self {
        Self {
            cidrs: None,
            masq_link_local: false,
            masq_link_local_ipv6: false,
            resync_interval: DEFAULT_RESYNC_INTERVAL,
        }
    }
}

/// An invalid entry of the list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryError {
    /// Position in the list, from 0.
    pub index: usize,
    /// As written.
    pub text: String,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for EntryError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "nonMasqueradeCIDRs[{}] = {:?}: {}", self.index, self.text, self.reason)
    }
}

/// Why a file is not used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FileError {
    /// It exists but cannot be read.
    #[error("the file cannot be read: {reason}")]
    Unreadable {
        /// The I/O error.
        reason: String,
    },
    /// It is neither YAML nor JSON, or a key is in it twice.
    #[error("the file is neither YAML nor JSON with each key once: {reason}")]
    Syntax {
        /// The parser's error, with the position.
        reason: String,
    },
    /// A key has a value of a wrong type.
    #[error("{key} = {text}: expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// As written.
        text: String,
        /// What was expected.
        expected: String,
    },
    /// Invalid entries of the list.
    #[error("{}", entries.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Entries {
        /// All of them, in order.
        entries: Vec<EntryError>,
    },
    /// The list exceeds the capacity of the kernel's table.
    #[error("nonMasqueradeCIDRs has {entries} different entries of one family, more than {MAX_DESTINATIONS}")]
    TooMany {
        /// How many.
        entries: usize,
    },
}

const CIDRS: &str = "nonMasqueradeCIDRs";
const LINK_LOCAL: &str = "masqLinkLocal";
const LINK_LOCAL_V6: &str = "masqLinkLocalIPv6";
const INTERVAL: &str = "resyncInterval";
const LIMIT: &str = "cidrLimit";
/// Cistern's own key: entries with host bits or without prefix length are errors. Other implementations ignore it.
const STRICT: &str = "strict";
pub(super) const KEYS: &[&str] = &[CIDRS, LINK_LOCAL, LINK_LOCAL_V6, INTERVAL, LIMIT, STRICT];

/// Parses a file. Returns `Ok(None)` if it only has white space and comments, which counts as no file.
///
/// # Errors
/// Any error invalidates the whole file.
pub fn parse(text: &str) -> Result<Option<(ConfigFile, Vec<Warning>)>, FileError> {
    let Some(entries) = read(text)? else { return Ok(None) };
    let mut parser = Parser::default();
    let values = parser.by_key(entries)?;
    let value = |key: &str| values.get(key).filter(|value| !value.is_null());
    let strict = boolean(STRICT, value(STRICT))?;
    let mut file = ConfigFile {
        masq_link_local: boolean(LINK_LOCAL, value(LINK_LOCAL))?,
        masq_link_local_ipv6: boolean(LINK_LOCAL_V6, value(LINK_LOCAL_V6))?,
        resync_interval: parser.interval(value(INTERVAL))?,
        cidrs: None,
    };
    let limit = value(LIMIT).map(limit).transpose()?;
    match values.get(CIDRS) {
        None => parser.warnings.push(Warning::ListNotSet),
        Some(list) => file.cidrs = Some(parser.list(list, strict, limit)?),
    }
    Ok(Some((file, parser.warnings)))
}

/// The top level of a file, with keys in order. JSON is tried first where it looks like JSON, since not all JSON is
/// YAML (tabs); syntax errors are those of the YAML parser.
fn read(text: &str) -> Result<Option<Entries>, FileError> {
    if text.trim_start().starts_with('{')
        && let Ok(entries) = serde_json::from_str::<Entries>(text)
    {
        return Ok(Some(entries));
    }
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Ok(None);
    }
    serde_saphyr::from_str(text).map_err(|error| FileError::Syntax { reason: error.to_string() })
}

/// Keys and values in order, including duplicates.
struct Entries(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;

        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("keys and values at the top level")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(EntriesVisitor)
    }
}

#[derive(Default)]
struct Parser {
    warnings: Vec<Warning>,
}

impl Parser {
    /// The values by normalised key. Go's decoders, which the other implementations use, ignore the case of keys, and
    /// so does this one.
    fn by_key(&mut self, Entries(entries): Entries) -> Result<BTreeMap<&'static str, Value>, FileError> {
        let mut values = BTreeMap::new();
        for (key, value) in entries {
            match KEYS.iter().find(|known| known.eq_ignore_ascii_case(&key)) {
                Some(known) if values.contains_key(known) => {
                    return Err(FileError::Syntax { reason: format!("the key {key} is there twice") });
                }
                Some(known) => {
                    values.insert(*known, value);
                }
                None => {
                    let nearest = nearest(&key, KEYS.iter().copied()).map(str::to_owned);
                    self.warnings.push(Warning::UnknownKey { key, nearest });
                }
            }
        }
        Ok(values)
    }

    fn interval(&mut self, value: Option<&Value>) -> Result<Duration, FileError> {
        const EXPECTED: &str = "a duration such as 60s or 5m";
        let (interval, text) = match value {
            None => return Ok(DEFAULT_RESYNC_INTERVAL),
            Some(Value::String(text)) => {
                let parsed = text.parse::<SignedDuration>();
                (parsed.map_err(|_| wrong(INTERVAL, &Value::String(text.clone()), EXPECTED))?, text.clone())
            }
            Some(number) => {
                let seconds = number.as_i64().ok_or_else(|| wrong(INTERVAL, number, EXPECTED))?;
                let read_as = format!("{seconds}s");
                self.warnings.push(Warning::Retyped { key: INTERVAL.to_owned(), text: number.to_string(), read_as });
                (SignedDuration::from_secs(seconds), number.to_string())
            }
        };
        match Duration::try_from(interval) {
            Ok(interval) if interval >= MIN_RESYNC_INTERVAL => Ok(interval),
            _ => {
                self.warnings.push(Warning::IntervalTooShort { text });
                Ok(MIN_RESYNC_INTERVAL)
            }
        }
    }

    fn list(&mut self, list: &Value, strict: bool, limit: Option<u64>) -> Result<BTreeSet<IpNet>, FileError> {
        let entries: &[Value] = match list {
            Value::Null => &[],
            Value::Array(entries) => entries,
            other => return Err(wrong(CIDRS, other, "a list of CIDRs")),
        };
        if entries.is_empty() {
            self.warnings.push(Warning::ListEmpty);
        }
        if let Some(limit) = limit.filter(|limit| usize::try_from(*limit).is_ok_and(|limit| entries.len() > limit)) {
            self.warnings.push(Warning::OverLimit { limit, entries: entries.len() });
        }
        let (mut cidrs, mut errors) = (BTreeSet::new(), Vec::new());
        for (index, entry) in entries.iter().enumerate() {
            match self.entry(index, entry, strict) {
                Ok(cidr) => {
                    cidrs.insert(cidr);
                }
                Err(error) => errors.push(error),
            }
        }
        if !errors.is_empty() {
            return Err(FileError::Entries { entries: errors });
        }
        let ipv4 = cidrs.iter().filter(|cidr| matches!(cidr, IpNet::V4(_))).count();
        let entries = ipv4.max(cidrs.len() - ipv4);
        if entries > MAX_DESTINATIONS {
            return Err(FileError::TooMany { entries });
        }
        let everything = cidrs.iter().filter(|cidr| cidr.prefix_len() == 0);
        self.warnings.extend(everything.map(|cidr| Warning::CoversEverything { cidr: *cidr }));
        Ok(cidrs)
    }

    fn entry(&mut self, index: usize, entry: &Value, strict: bool) -> Result<IpNet, EntryError> {
        let text = match entry {
            Value::String(text) => text.trim().to_owned(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        let error = |reason: &str| EntryError { index, text: text.clone(), reason: reason.to_owned() };
        if text.is_empty() {
            return Err(error("expected a CIDR such as 10.0.0.0/8, found nothing"));
        }
        let (cidr, bare) = match (text.parse::<IpNet>(), text.parse::<IpAddr>()) {
            (Ok(cidr), _) => (cidr, false),
            (Err(_), Ok(address)) => (IpNet::from(address), true),
            (Err(_), Err(_)) => return Err(error("expected a CIDR such as 10.0.0.0/8")),
        };
        if let IpNet::V6(cidr) = cidr
            && cidr.addr().to_ipv4_mapped().is_some()
        {
            return Err(error("an IPv4 address inside an IPv6 one matches no packet; expected the IPv4 form"));
        }
        let read_as = cidr.trunc();
        if bare && strict {
            return Err(error(&format!("expected a prefix length, such as {read_as} (the file asks to be strict)")));
        }
        if cidr != read_as && strict {
            return Err(error(&format!("has bits beyond its prefix; expected {read_as} (the file asks to be strict)")));
        }
        if bare {
            self.warnings.push(Warning::BareAddress { index, text, read_as });
        } else if cidr != read_as {
            self.warnings.push(Warning::HostBits { index, text, read_as });
        }
        Ok(read_as)
    }
}

/// The YAML parser has already converted the words of YAML 1.1 (`yes`, `on`), as in the other implementations.
fn boolean(key: &str, value: Option<&Value>) -> Result<bool, FileError> {
    match value {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(*value),
        Some(other) => Err(wrong(key, other, "true or false")),
    }
}

fn limit(value: &Value) -> Result<u64, FileError> {
    value.as_u64().ok_or_else(|| wrong(LIMIT, value, "a whole number"))
}

fn wrong(key: &str, value: &Value, expected: &str) -> FileError {
    FileError::Value { key: key.to_owned(), text: value.to_string(), expected: expected.to_owned() }
}

/// Merges several files, as the second version of ip-masq-agent does for a directory: the union of their lists, and a
/// link-local range is masqueraded if any file says so. If no file sets the list, it keeps its default.
#[must_use]
pub fn merge(files: &[ConfigFile]) -> ConfigFile {
    let mut lists = files.iter().filter_map(|file| file.cidrs.as_ref()).peekable();
    ConfigFile {
        cidrs: lists.peek().is_some().then(|| lists.flatten().copied().collect()),
        masq_link_local: files.iter().any(|file| file.masq_link_local),
        masq_link_local_ipv6: files.iter().any(|file| file.masq_link_local_ipv6),
        resync_interval: files.iter().map(|file| file.resync_interval).min().unwrap_or(DEFAULT_RESYNC_INTERVAL),
    }
}
