//! The ip-masq-agent file and the destinations it exempts.
//!
//! The file has the format of ip-masq-agent's first version, YAML or JSON. The peers read the same file in three ways
//! (`masquerade` 1.5); this is the one contract of Cistern: what is absent keeps its default, what is wrong anywhere
//! makes the whole file wrong, and a wrong file changes nothing that was in force before. So pods never lose their
//! exemptions, link-local addresses least of all, by a misspelling.

use super::plan::ExcludedReason;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use jiff::SignedDuration;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use crate::spelling::nearest;

/// Most destinations of one family that a file may name: what the kernel's table is made for.
pub const MAX_DESTINATIONS: usize = 16_384;

/// How often the file is read again if it says nothing (ip-masq-agent's default).
pub const DEFAULT_RESYNC_INTERVAL: Duration = Duration::from_secs(60);

/// The shortest interval that is kept to.
pub const MIN_RESYNC_INTERVAL: Duration = Duration::from_secs(1);

/// Exempt unless `masqLinkLocal`; the cloud's metadata service is in here.
pub const LINK_LOCAL_IPV4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16);

/// Exempt unless `masqLinkLocalIPv6`.
pub const LINK_LOCAL_IPV6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10);

/// What is exempt when the file does not say: `ip-masq-default-exclusions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DefaultExclusions {
    /// Cilium's eleven ranges: private, shared, documentation, benchmark and reserved addresses.
    #[default]
    Reserved,
    /// ip-masq-agent's three ranges: the private ones.
    Rfc1918,
}

impl DefaultExclusions {
    /// The ranges, all of IPv4.
    #[must_use]
    pub fn ranges(self) -> &'static [Ipv4Net] {
        const RFC1918: [Ipv4Net; 3] = [range(10, 0, 0, 0, 8), range(172, 16, 0, 0, 12), range(192, 168, 0, 0, 16)];
        const RESERVED: [Ipv4Net; 11] = [
            RFC1918[0],
            RFC1918[1],
            RFC1918[2],
            range(100, 64, 0, 0, 10),
            range(192, 0, 0, 0, 24),
            range(192, 0, 2, 0, 24),
            range(192, 88, 99, 0, 24),
            range(198, 18, 0, 0, 15),
            range(198, 51, 100, 0, 24),
            range(203, 0, 113, 0, 24),
            range(240, 0, 0, 0, 4),
        ];
        match self {
            Self::Reserved => &RESERVED,
            Self::Rfc1918 => &RFC1918,
        }
    }
}

const fn range(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

/// A file that was read without error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigFile {
    /// `nonMasqueradeCIDRs`, without host bits and duplicates, sorted. `None`: the file does not set it.
    pub cidrs: Option<BTreeSet<IpNet>>,
    /// `masqLinkLocal`: 169.254.0.0/16 is no exemption.
    pub masq_link_local: bool,
    /// `masqLinkLocalIPv6`: fe80::/10 is no exemption.
    pub masq_link_local_ipv6: bool,
    /// `resyncInterval`: the file is read again so often, watched or not.
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

/// Something in the file that a person should look at, which keeps it from nothing.
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

/// One entry of the list that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryError {
    /// Position in the list, from 0.
    pub index: usize,
    /// As written.
    pub text: String,
    /// What is wrong with it.
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
    /// It is there but cannot be read.
    #[error("the file cannot be read: {reason}")]
    Unreadable {
        /// What the system says.
        reason: String,
    },
    /// It is neither YAML nor JSON, or a key is in it twice.
    #[error("the file is neither YAML nor JSON with each key once: {reason}")]
    Syntax {
        /// What the parser says, with the place.
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
    /// Entries of the list cannot be read.
    #[error("{}", entries.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Entries {
        /// All of them, in the order of the list.
        entries: Vec<EntryError>,
    },
    /// The list is longer than the kernel's table.
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
/// Cistern's own: entries with host bits or without prefix length are errors. Other agents ignore it.
const STRICT: &str = "strict";
const KEYS: &[&str] = &[CIDRS, LINK_LOCAL, LINK_LOCAL_V6, INTERVAL, LIMIT, STRICT];

/// Reads a file. `Ok(None)`: it holds nothing (only white space and comments), which counts as no file.
///
/// # Errors
/// Anything that cannot be read makes the whole file unusable.
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

/// The top level of a file, keys in order. JSON is tried first where it looks like JSON, since not all of it is YAML
/// (tabs); what the YAML parser says of a mistake is what people see.
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

/// Keys and values in order, duplicates included.
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
    /// The values under the keys as this module spells them. Go, in which the other agents are written, does not look at
    /// the case of letters, so neither does this.
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

/// The YAML parser has already read the words of YAML 1.1 (`yes`, `on`), as it does in the other agents.
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

/// Several files as one, as the second version of ip-masq-agent reads a directory of them: every destination of any, and
/// a link-local range is masqueraded if any says so. Where no file sets the list it keeps its default.
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

/// The file as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// There is none.
    Absent,
    /// Its content.
    Content(String),
    /// It is there but cannot be read: what the system says.
    Unreadable(String),
}

/// What the destinations in force are decided from.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `enable-ip-masq-agent`
    pub enabled: bool,
    /// `ip-masq-default-exclusions`
    pub defaults: DefaultExclusions,
    /// `enable-ipv6`
    pub ipv6: bool,
    /// The file as it is now.
    pub found: &'a Found,
    /// [`Outcome::last_good`] of the last time: of this process or, at its start, from disk.
    pub last_good: Option<&'a ConfigFile>,
}

/// Where the list in force comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ListSource {
    /// The feature is off: only link-local destinations are exempt.
    Off,
    /// There is no file, it holds nothing, or it is wrong and was never right.
    BuiltIn,
    /// The file as it is.
    File,
    /// The file as it was before it went wrong.
    LastGood,
}

impl fmt::Display for ListSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Off => "off",
            Self::BuiltIn => "built-in",
            Self::File => "file",
            Self::LastGood => "last good file",
        })
    }
}

/// The destinations that keep the pod's address on the word of the file or its defaults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusions {
    /// The list's IPv4 entries.
    pub ipv4: BTreeSet<Ipv4Net>,
    /// The list's IPv6 entries; empty while IPv6 is off.
    pub ipv6: BTreeSet<Ipv6Net>,
    /// Whether 169.254.0.0/16 is exempt, too.
    pub link_local_ipv4: bool,
    /// Whether fe80::/10 is exempt, too.
    pub link_local_ipv6: bool,
}

impl Exclusions {
    /// Every IPv4 destination with its reason. A list entry that is the link-local range keeps the list's reason: it
    /// stays when `masqLinkLocal` comes.
    #[must_use]
    pub fn ipv4_reasons(&self) -> BTreeMap<Ipv4Net, ExcludedReason> {
        let link_local = self.link_local_ipv4.then_some((LINK_LOCAL_IPV4, ExcludedReason::LinkLocal));
        link_local.into_iter().chain(self.ipv4.iter().map(|cidr| (*cidr, ExcludedReason::IpMasqAgent))).collect()
    }
}

/// What is in force and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The destinations.
    pub exclusions: Exclusions,
    /// Where the list comes from.
    pub source: ListSource,
    /// When the file is read again, watched or not.
    pub resync_interval: Duration,
    /// What a person should look at.
    pub warnings: Vec<Warning>,
    /// Why the file as it is now is not in force.
    pub error: Option<FileError>,
    /// What the next decision goes back to if the file is wrong then; to be kept on disk. `None`: the defaults.
    pub last_good: Option<ConfigFile>,
}

/// Decides what is in force (`masquerade` decisions 1 and 2). Whatever the file holds, the outcome exempts something
/// sensible: a wrong file leaves the last good one in force, and without one the defaults.
#[must_use]
pub fn decide(input: Input<'_>) -> Outcome {
    if !input.enabled {
        let exclusions = Exclusions { link_local_ipv4: true, link_local_ipv6: true, ..Exclusions::default() };
        return Outcome {
            exclusions,
            source: ListSource::Off,
            resync_interval: DEFAULT_RESYNC_INTERVAL,
            warnings: Vec::new(),
            error: None,
            last_good: input.last_good.cloned(),
        };
    }
    let parsed = match input.found {
        Found::Absent => Ok(None),
        Found::Content(text) => parse(text),
        Found::Unreadable(reason) => Err(FileError::Unreadable { reason: reason.clone() }),
    };
    let (file, source, mut warnings, error) = match parsed {
        Ok(None) => (None, ListSource::BuiltIn, Vec::new(), None),
        Ok(Some((file, warnings))) => (Some(file), ListSource::File, warnings, None),
        Err(error) => match input.last_good {
            Some(file) => (Some(file.clone()), ListSource::LastGood, Vec::new(), Some(error)),
            None => (None, ListSource::BuiltIn, Vec::new(), Some(error)),
        },
    };
    let in_force = file.clone().unwrap_or_default();
    let (exclusions, inert) = exclusions(&in_force, input.defaults, input.ipv6);
    if inert > 0 {
        warnings.push(Warning::Ipv6Inert { entries: inert });
    }
    let resync_interval = in_force.resync_interval;
    Outcome { exclusions, source, resync_interval, warnings, error, last_good: file }
}

/// The destinations that a file exempts, and how many of its entries have no effect.
fn exclusions(file: &ConfigFile, defaults: DefaultExclusions, ipv6: bool) -> (Exclusions, usize) {
    let mut exclusions = Exclusions {
        link_local_ipv4: !file.masq_link_local,
        link_local_ipv6: !file.masq_link_local_ipv6,
        ..Exclusions::default()
    };
    let Some(cidrs) = &file.cidrs else {
        exclusions.ipv4 = defaults.ranges().iter().copied().collect();
        return (exclusions, 0);
    };
    for cidr in cidrs {
        match cidr {
            IpNet::V4(cidr) => {
                exclusions.ipv4.insert(*cidr);
            }
            IpNet::V6(cidr) => {
                exclusions.ipv6.insert(*cidr);
            }
        }
    }
    let inert = if ipv6 { 0 } else { std::mem::take(&mut exclusions.ipv6).len() };
    (exclusions, inert)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(list: &[&str]) -> BTreeSet<IpNet> {
        list.iter().map(|cidr| cidr.parse().unwrap()).collect()
    }

    fn v4(list: &[&str]) -> BTreeSet<Ipv4Net> {
        list.iter().map(|cidr| cidr.parse().unwrap()).collect()
    }

    fn file(text: &str) -> (ConfigFile, Vec<Warning>) {
        parse(text).unwrap().expect("a file that holds something")
    }

    fn found(text: &str, last_good: Option<&ConfigFile>) -> Outcome {
        decide_with(&Found::Content(text.to_owned()), last_good, false)
    }

    fn decide_with(found: &Found, last_good: Option<&ConfigFile>, ipv6: bool) -> Outcome {
        decide(Input { enabled: true, defaults: DefaultExclusions::Reserved, ipv6, found, last_good })
    }

    fn built_in() -> BTreeSet<Ipv4Net> {
        DefaultExclusions::Reserved.ranges().iter().copied().collect()
    }

    const YAML: &str = "\
nonMasqueradeCIDRs:
  - 10.32.0.0/14
  - 198.18.0.0/15
masqLinkLocal: true
resyncInterval: 7s
";

    // case: masquerade CF1
    #[test]
    fn yaml_is_read_exactly() {
        let outcome = found(YAML, None);
        assert_eq!(outcome.exclusions.ipv4, v4(&["10.32.0.0/14", "198.18.0.0/15"]));
        assert!(!outcome.exclusions.link_local_ipv4 && outcome.exclusions.link_local_ipv6);
        assert_eq!(outcome.resync_interval, Duration::from_secs(7));
        assert_eq!((outcome.source, outcome.warnings, outcome.error), (ListSource::File, vec![], None));
    }

    // case: masquerade CF2
    #[test]
    fn json_is_read_like_yaml() {
        let json =
            r#"{"nonMasqueradeCIDRs":["10.32.0.0/14","198.18.0.0/15"],"masqLinkLocal":true,"resyncInterval":"7s"}"#;
        let escaped = json.replace("7s", "\\u0037s");
        let indented = json.replace(',', ",\n\t");
        for text in [json, &escaped, &indented] {
            assert_eq!(file(text), file(YAML), "{text}");
        }
    }

    // case: masquerade CF4
    #[test]
    fn file_without_list_keeps_the_other_defaults() {
        let outcome = found("resyncInterval: 90s\n", None);
        assert_eq!(outcome.exclusions.ipv4, built_in());
        assert!(outcome.exclusions.link_local_ipv4 && outcome.exclusions.link_local_ipv6);
        assert_eq!(outcome.resync_interval, Duration::from_secs(90));
        assert_eq!(outcome.warnings, [Warning::ListNotSet]);

        let outcome = found("masqLinkLocal: true\n", None);
        assert_eq!(outcome.exclusions.ipv4, built_in());
        assert!(!outcome.exclusions.link_local_ipv4);
        assert_eq!(outcome.warnings, [Warning::ListNotSet]);
    }

    // case: masquerade CF5
    #[test]
    fn no_file_and_an_empty_file_mean_the_built_in_list() {
        let empty = ["", "\n", "  \n\t\n", "# nothing\n  # yet\n", "---\n", "null\n"]
            .map(|text| Found::Content(text.to_owned()));
        for found in [Found::Absent].iter().chain(&empty) {
            let outcome = decide_with(found, None, true);
            assert_eq!(outcome.exclusions.ipv4, built_in(), "{found:?}");
            assert_eq!(outcome.exclusions.ipv4.len(), 11);
            assert!(outcome.exclusions.link_local_ipv4 && outcome.exclusions.link_local_ipv6);
            assert_eq!((outcome.source.to_string().as_str(), outcome.error), ("built-in", None));
        }
        let input = Input {
            enabled: true,
            defaults: DefaultExclusions::Rfc1918,
            ipv6: false,
            found: &Found::Absent,
            last_good: None,
        };
        assert_eq!(decide(input).exclusions.ipv4, v4(&["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]));
    }

    #[test]
    fn feature_off_exempts_link_local_alone() {
        let found = Found::Content(YAML.to_owned());
        let outcome = decide(Input {
            enabled: false,
            defaults: DefaultExclusions::Reserved,
            ipv6: false,
            found: &found,
            last_good: None,
        });
        assert_eq!(outcome.source, ListSource::Off);
        assert_eq!(outcome.exclusions.ipv4_reasons(), BTreeMap::from([(LINK_LOCAL_IPV4, ExcludedReason::LinkLocal)]));
    }

    // case: masquerade CF7
    #[test]
    fn host_bits_are_masked_or_in_strict_refused() {
        let text = "nonMasqueradeCIDRs: [10.77.5.9/16, 10.77.0.0/16]\n";
        let (read, warnings) = file(text);
        assert_eq!(read.cidrs, Some(nets(&["10.77.0.0/16"])));
        let words = warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(words.contains("10.77.5.9/16") && words.contains("10.77.0.0/16"), "{words}");

        let before = file("nonMasqueradeCIDRs: [10.1.0.0/16]").0;
        let outcome = found(&format!("strict: true\n{text}"), Some(&before));
        assert_eq!(outcome.source, ListSource::LastGood);
        assert_eq!(outcome.exclusions.ipv4, v4(&["10.1.0.0/16"]));
        let words = outcome.error.expect("strict refuses host bits").to_string();
        assert!(words.contains("nonMasqueradeCIDRs[0]") && words.contains("10.77.5.9/16"), "{words}");
    }

    #[test]
    fn bare_address_is_one_host_or_in_strict_refused() {
        let (read, warnings) = file("nonMasqueradeCIDRs: [10.1.1.1, 'fd00::1']\n");
        assert_eq!(read.cidrs, Some(nets(&["10.1.1.1/32", "fd00::1/128"])));
        assert!(matches!(
            warnings.as_slice(),
            [Warning::BareAddress { index: 0, .. }, Warning::BareAddress { index: 1, .. }]
        ));
        assert!(parse("strict: true\nnonMasqueradeCIDRs: [10.1.1.1]\n").is_err());
    }

    // case: masquerade CF8
    #[test]
    fn one_bad_entry_leaves_the_last_good_list() {
        let good = found("nonMasqueradeCIDRs: [10.9.0.0/16]\nmasqLinkLocal: true\n", None);
        let bad = "nonMasqueradeCIDRs: [10.1.0.0/16, banana, 10.2.0.0/16, '', ~, 10.0.0.0/33, 17, [1]]\n";
        let outcome = found(bad, good.last_good.as_ref());
        assert_eq!(outcome.exclusions, good.exclusions);
        assert_eq!(outcome.source, ListSource::LastGood);
        assert_eq!(outcome.last_good, good.last_good, "the next bad file goes back to the same list");
        let Some(FileError::Entries { entries }) = &outcome.error else { panic!("{:?}", outcome.error) };
        assert_eq!(entries.iter().map(|entry| entry.index).collect::<Vec<_>>(), [1, 3, 4, 5, 6, 7]);
        let words = outcome.error.as_ref().map(ToString::to_string).unwrap();
        assert!(words.contains("nonMasqueradeCIDRs[1] = \"banana\""), "{words}");

        let first_start = found(bad, None);
        assert_eq!(first_start.source, ListSource::BuiltIn);
        assert_eq!(first_start.exclusions.ipv4, built_in());
        assert!(first_start.exclusions.link_local_ipv4);
        assert!(first_start.error.is_some() && first_start.last_good.is_none());
    }

    #[test]
    fn file_that_cannot_be_read_leaves_the_last_good_list() {
        let good = file(YAML).0;
        let outcome = decide_with(&Found::Unreadable("permission denied".to_owned()), Some(&good), false);
        assert_eq!((outcome.source, outcome.exclusions.ipv4.len()), (ListSource::LastGood, 2));
        assert!(outcome.error.unwrap().to_string().contains("permission denied"));
    }

    #[test]
    fn wrong_shapes_are_refused_with_the_key() {
        let cases = [
            ("nonMasqueradeCIDRs: 10.0.0.0/8\n", "nonMasqueradeCIDRs"),
            ("nonMasqueradeCIDRs: {a: b}\n", "nonMasqueradeCIDRs"),
            ("masqLinkLocal: 1\n", "masqLinkLocal"),
            ("masqLinkLocal: perhaps\n", "masqLinkLocal"),
            ("masqLinkLocal: \"true\"\n", "masqLinkLocal"),
            ("masqLinkLocalIPv6: []\n", "masqLinkLocalIPv6"),
            ("resyncInterval: soon\n", "resyncInterval"),
            ("resyncInterval: 1.5\n", "resyncInterval"),
            ("cidrLimit: many\n", "cidrLimit"),
            ("cidrLimit: -1\n", "cidrLimit"),
            ("masqLinkLocal: true\nmasqLinkLocal: false\n", "masqLinkLocal"),
            ("masqLinkLocal: true\nMASQLINKLOCAL: false\n", "MASQLINKLOCAL"),
            (r#"{"masqLinkLocal": true, "masqLinkLocal": true}"#, "masqLinkLocal"),
            ("nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n - 10.1.0.0/16\n", "neither YAML nor JSON"),
            ("nonMasqueradeCIDRs: [10.0.0.0/8", "neither YAML nor JSON"),
            ("- 10.0.0.0/8\n", "neither YAML nor JSON"),
            ("10.0.0.0/8\n", "neither YAML nor JSON"),
        ];
        for (text, named) in cases {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn ipv4_inside_ipv6_is_refused() {
        for entry in ["::ffff:10.0.0.0/104", "::ffff:10.1.1.1"] {
            let error = parse(&format!("nonMasqueradeCIDRs: ['{entry}']\n")).expect_err(entry).to_string();
            assert!(error.contains(entry) && error.contains("IPv4"), "{error}");
        }
    }

    #[test]
    fn empty_list_masquerades_everything_but_link_local() {
        for text in ["nonMasqueradeCIDRs: []\n", "nonMasqueradeCIDRs:\n", "nonMasqueradeCIDRs: null\n"] {
            let outcome = found(text, None);
            assert_eq!(
                outcome.exclusions,
                Exclusions { link_local_ipv4: true, link_local_ipv6: true, ..Exclusions::default() }
            );
            assert_eq!((outcome.warnings, outcome.source), (vec![Warning::ListEmpty], ListSource::File));
        }
    }

    #[test]
    fn null_keeps_the_default_of_every_other_key() {
        let (read, _) = file("masqLinkLocal:\nmasqLinkLocalIPv6: ~\nresyncInterval: null\ncidrLimit:\n");
        assert_eq!(read, ConfigFile::default());
    }

    #[test]
    fn keys_and_words_of_the_other_agents_are_understood() {
        let (read, warnings) = file("NonMasqueradeCidrs: [10.1.0.0/16]\nmasqlinklocal: yes\nmasqLinkLocalIPv6: on\n");
        assert_eq!(read.cidrs, Some(nets(&["10.1.0.0/16"])));
        assert!(read.masq_link_local && read.masq_link_local_ipv6);
        assert_eq!(warnings, []);
    }

    // case: masquerade CF13
    #[test]
    fn file_that_goes_leaves_the_defaults_and_counts_again_when_it_comes_back() {
        let before = found(YAML, None);
        let gone = decide_with(&Found::Absent, before.last_good.as_ref(), false);
        assert_eq!((gone.source, &gone.exclusions.ipv4), (ListSource::BuiltIn, &built_in()));
        assert_eq!(gone.last_good, None, "a bad file after this goes back to the defaults");
        let back = found(YAML, gone.last_good.as_ref());
        assert_eq!(back, before);
    }

    // case: masquerade CF15
    #[test]
    fn ipv6_entry_counts_with_ipv6_alone() {
        let content = Found::Content("nonMasqueradeCIDRs: [10.1.0.0/16, 'fd00:1::/48']\n".to_owned());
        let off = decide_with(&content, None, false);
        assert_eq!((off.exclusions.ipv4.len(), off.exclusions.ipv6.len()), (1, 0));
        assert_eq!((off.source, off.warnings), (ListSource::File, vec![Warning::Ipv6Inert { entries: 1 }]));
        let on = decide_with(&content, None, true);
        assert_eq!(on.exclusions.ipv4, v4(&["10.1.0.0/16"]));
        assert_eq!(on.exclusions.ipv6, BTreeSet::from(["fd00:1::/48".parse().unwrap()]));
        assert_eq!(on.warnings, []);
    }

    // case: masquerade CF17
    #[test]
    fn list_that_does_not_fit_is_refused_as_a_whole() {
        let list = |count: u32| {
            let entry = |number: u32| format!("- {}/24\n", Ipv4Addr::from(0x0b00_0000 + (number << 8)));
            format!("nonMasqueradeCIDRs:\n{}", (0..count).map(entry).collect::<String>())
        };
        let before = file(YAML).0;
        let fits = found(&list(16_384), Some(&before));
        assert_eq!((fits.source, fits.exclusions.ipv4.len()), (ListSource::File, 16_384));
        let outcome = found(&list(16_385), Some(&before));
        assert_eq!(outcome.error, Some(FileError::TooMany { entries: 16_385 }));
        assert_eq!((outcome.source, outcome.exclusions.ipv4.len()), (ListSource::LastGood, 2));
    }

    #[test]
    fn more_entries_than_the_files_own_limit_are_told_of() {
        let list = |count: u8| (0..count).map(|number| format!("  - 10.{number}.0.0/16\n")).collect::<String>();
        let (read, warnings) = file(&format!("cidrLimit: 64\nnonMasqueradeCIDRs:\n{}", list(65)));
        assert_eq!(read.cidrs.unwrap().len(), 65);
        assert_eq!(warnings, [Warning::OverLimit { limit: 64, entries: 65 }]);
        assert_eq!(
            file(&format!("nonMasqueradeCIDRs:\n{}", list(65))).1,
            [],
            "without a limit of its own there is none"
        );
    }

    // case: masquerade CF18
    #[test]
    fn misspelt_key_is_told_of_with_the_right_one() {
        let outcome = found("nonMasqueradeCIDR: [10.1.0.0/16]\n", None);
        assert_eq!(outcome.exclusions.ipv4, built_in());
        let words = outcome.warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(words.contains("nonMasqueradeCIDR: did you mean nonMasqueradeCIDRs?"), "{words}");
    }

    // case: masquerade CF19
    #[test]
    fn several_files_are_united() {
        let one =
            file("nonMasqueradeCIDRs: [10.9.0.0/16, 10.8.0.0/16]\nmasqLinkLocalIPv6: true\nresyncInterval: 90s\n").0;
        let two = file("nonMasqueradeCIDRs: [10.8.0.0/16, 11.0.0.0/8]\nmasqLinkLocal: true\n").0;
        let merged = merge(&[one.clone(), two.clone()]);
        assert_eq!(merged.cidrs, Some(nets(&["10.8.0.0/16", "10.9.0.0/16", "11.0.0.0/8"])));
        assert!(merged.masq_link_local && merged.masq_link_local_ipv6);
        assert_eq!(merge(&[two, one]), merged, "the order of the files does not matter");
        assert_eq!(merge(&[file("masqLinkLocal: true\n").0]).cidrs, None, "no list in any file: the built-in one");
        assert_eq!(merge(&[]), ConfigFile::default());
    }

    // case: masquerade CF21
    #[test]
    fn everything_exempt_is_told_of() {
        let outcome = found("nonMasqueradeCIDRs: [0.0.0.0/0]\n", None);
        assert_eq!(outcome.exclusions.ipv4, v4(&["0.0.0.0/0"]));
        let words = outcome.warnings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        assert!(words.contains("no traffic of this family is masqueraded"), "{words}");
        let removed = found("nonMasqueradeCIDRs: [10.0.0.0/8]\n", outcome.last_good.as_ref());
        assert_eq!((removed.exclusions.ipv4, removed.warnings), (v4(&["10.0.0.0/8"]), vec![]));
    }

    // case: masquerade CF22
    #[test]
    fn interval_is_never_shorter_than_a_second() {
        for text in ["0s", "-3s", "300ms", "0", "-3"] {
            let (read, warnings) = file(&format!("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: {text}\n"));
            assert_eq!(read.resync_interval, Duration::from_secs(1), "{text}");
            assert!(warnings.contains(&Warning::IntervalTooShort { text: text.to_owned() }), "{warnings:?}");
        }
        let (read, warnings) = file("nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 60\n");
        assert_eq!(read.resync_interval, Duration::from_secs(60));
        assert!(matches!(warnings.as_slice(), [Warning::Retyped { .. }]), "a number is told of: {warnings:?}");
        assert_eq!(file("resyncInterval: 1h2m3s\n").0.resync_interval, Duration::from_secs(3723));
    }

    #[test]
    fn last_good_file_survives_the_disk() {
        let good = found(YAML, None).last_good.unwrap();
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(serde_json::from_str::<ConfigFile>(&text).unwrap(), good);
    }

    #[test]
    fn link_local_in_the_list_stays_when_the_switch_is_on() {
        let outcome = found("nonMasqueradeCIDRs: [169.254.0.0/16]\nmasqLinkLocal: true\n", None);
        assert_eq!(outcome.exclusions.ipv4_reasons(), BTreeMap::from([(LINK_LOCAL_IPV4, ExcludedReason::IpMasqAgent)]));
        let both = found("nonMasqueradeCIDRs: [169.254.0.0/16]\n", None);
        assert_eq!(both.exclusions.ipv4_reasons().len(), 1);
    }

    proptest::proptest! {
        /// Whatever is in the file, the outcome exempts something, and a wrong file never changes what was in force.
        #[test]
        fn any_text_is_taken_or_changes_nothing(text in "(nonMasqueradeCIDRs|masqLinkLocal|[a-z-]{0,6}):? ?[\\[\\]{}0-9a-f./:, \n\"'&*!|>-]{0,40}") {
            let good = file(YAML).0;
            let before = exclusions(&good, DefaultExclusions::Reserved, false).0;
            let outcome = found(&text, Some(&good));
            if outcome.error.is_some() {
                proptest::prop_assert_eq!(outcome.exclusions, before);
                proptest::prop_assert_eq!(outcome.last_good, Some(good));
            }
        }
    }
}
