//! State that outlives a leader: which node has which pod CIDR of a pool, and which are in quarantine.
//!
//! One object (a ConfigMap) holds the records of one pool, and its `resourceVersion` guards them. Its keys are JSON:
//!
//! | key | holds |
//! |---|---|
//! | `version.json` | [`Version`]: absent in objects of the first format |
//! | `blocks.json` | node → pod CIDRs |
//! | `quarantine.json` | pod CIDRs of former nodes |
//! | `pools.json` | the pool as configured, and former elements with pod CIDRs in use |
//! | `refused.json` | UIDs of nodes whose list is refused |
//!
//! Other builds may lead in turn during a rolling upgrade. Keys that this build does not know are left alone. An entry of a
//! list with a field `kind` is of a kind that came later: it is kept as it is; so are unknown fields of entries that this build
//! does know, as long as the entry exists. A build whose records the build before would misread raises `oldest_reader`.
//!
//! An object holds 1 MiB. `quarantine.json` is a list of self-contained entries, as the first format has it, unless the object
//! would outgrow [`READABLE_BY_ALL`]: then it groups entries by time, which only readers of format 2 understand (the release
//! before stops allocating with an error instead of overlooking them). When what is recorded reaches [`FULL`], nothing more is
//! allocated: the rest is room for nodes that end up refused.

use super::PoolName;
use crate::format::Version;
use crate::ip::overlaps;
use ipnet::IpNet;
use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Kubernetes' limit on the keys and values of a ConfigMap.
pub const LIMIT: usize = 1024 * 1024;

/// Larger records group their quarantine. Well below [`LIMIT`], since the size of the long form is what is compared.
pub const READABLE_BY_ALL: usize = 768 * 1024;

/// Nothing is allocated that would make the records larger.
pub const FULL: usize = 896 * 1024;

/// The format of this build.
const FORMAT: u32 = 2;

/// `data` of the object.
pub type Data = BTreeMap<String, String>;

/// Records by pool.
pub type RecordSet = BTreeMap<PoolName, Records>;

/// A pod CIDR of a former node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineRecord {
    /// The pod CIDR.
    pub cidr: IpNet,
    /// The former owner, which may claim it again.
    pub node: String,
    /// When it was released.
    pub since: Timestamp,
    /// When it becomes free.
    pub until: Timestamp,
}

/// A current or former element of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PoolRecord {
    /// The CIDR.
    pub cidr: IpNet,
    /// Prefix length of its pod CIDRs.
    pub mask_size: u8,
}

/// The records of one pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Records {
    /// Pod CIDRs of former nodes, by address.
    pub quarantine: Vec<QuarantineRecord>,
    /// The pool as configured, and former elements that a node still has a pod CIDR of. A pod CIDR of a former element
    /// is kept by its node and never allocated.
    pub pools: Vec<PoolRecord>,
    /// UIDs of nodes whose `podCIDRs` are refused. The next leader judges their claims last, so that the owner of a pod
    /// CIDR keeps it.
    pub refused: BTreeSet<String>,
    /// The pod CIDRs of each node, by name. They are authoritative, even if a CiliumNode was edited; a new leader also
    /// detects deletions of nodes by them.
    pub blocks: BTreeMap<String, Vec<IpNet>>,
}

/// Records that cannot be read or written. Nothing is planned until an administrator repairs or deletes them, because
/// they may contain pod CIDRs in use.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// A value is damaged.
    #[error("key {key} cannot be read: {error}")]
    Key {
        /// Which.
        key: &'static str,
        /// The reason.
        error: serde_json::Error,
    },
    /// A newer build wrote them.
    #[error("key {VERSION_KEY}: {0}")]
    Unsupported(#[from] crate::format::Unsupported),
    /// They do not fit into an object.
    #[error(
        "the records of the pool need {size} bytes; an object holds {LIMIT}; delete CiliumNodes whose lists are refused"
    )]
    TooLarge {
        /// Their size.
        size: usize,
    },
}

const VERSION_KEY: &str = "version.json";
const QUARANTINE_KEY: &str = "quarantine.json";
const POOLS_KEY: &str = "pools.json";
const REFUSED_KEY: &str = "refused.json";
const BLOCKS_KEY: &str = "blocks.json";

/// Marks an entry of a list as one that this build does not know.
const KIND: &str = "kind";

/// Identifies an entry of a list.
const CIDR: &str = "cidr";

/// The grouped form of `quarantine.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Grouped {
    groups: Vec<Group>,
    /// Entries of other kinds, and those with fields that this build does not know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    entries: Vec<Value>,
}

/// What was released together.
#[derive(Debug, Serialize, Deserialize)]
struct Group {
    since: Timestamp,
    until: Timestamp,
    nodes: BTreeMap<String, Vec<IpNet>>,
}

impl Records {
    /// The keys to write over `seen`, which is what the object holds.
    ///
    /// # Errors
    /// Records that do not fit into an object.
    pub fn to_data(&self, seen: &Data) -> Result<Data, RecordsError> {
        let earlier = Entries::of(seen)?;
        let refused = text(REFUSED_KEY, &self.refused)?;
        let blocks = text(BLOCKS_KEY, &self.blocks)?;
        let pools = text(POOLS_KEY, &earlier.pools.merged(POOLS_KEY, &self.pools)?)?;
        let mut quarantine = text(QUARANTINE_KEY, &earlier.quarantine.merged(QUARANTINE_KEY, &self.quarantine)?)?;
        let foreign: usize = seen
            .iter()
            .filter(|(key, _)| {
                ![VERSION_KEY, QUARANTINE_KEY, POOLS_KEY, REFUSED_KEY, BLOCKS_KEY].contains(&key.as_str())
            })
            .map(|(key, value)| key.len() + value.len())
            .sum();
        let others = foreign + refused.len() + blocks.len() + pools.len();
        let mut oldest_reader = 1;
        if others + quarantine.len() > READABLE_BY_ALL && !self.quarantine.is_empty() {
            quarantine = text(QUARANTINE_KEY, &self.grouped(&earlier.quarantine)?)?;
            oldest_reader = FORMAT;
        }
        let version = text(VERSION_KEY, &Version::new(FORMAT, oldest_reader))?;
        let data: Data = [
            (VERSION_KEY, version),
            (QUARANTINE_KEY, quarantine),
            (POOLS_KEY, pools),
            (REFUSED_KEY, refused),
            (BLOCKS_KEY, blocks),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
        let size = foreign + data.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
        if size > LIMIT { Err(RecordsError::TooLarge { size }) } else { Ok(data) }
    }

    fn grouped(&self, earlier: &List) -> Result<Grouped, RecordsError> {
        let mut groups: BTreeMap<(Timestamp, Timestamp), BTreeMap<String, Vec<IpNet>>> = BTreeMap::new();
        let mut entries = earlier.of_other_kinds.clone();
        for record in &self.quarantine {
            if earlier.extras.contains_key(&record.cidr) {
                entries.push(earlier.with_extras(QUARANTINE_KEY, record.cidr, record)?);
            } else {
                let nodes = groups.entry((record.since, record.until)).or_default();
                nodes.entry(record.node.clone()).or_default().push(record.cidr);
            }
        }
        let groups = groups.into_iter().map(|((since, until), nodes)| Group { since, until, nodes }).collect();
        Ok(Grouped { groups, entries })
    }

    /// From `data` of the object; absent keys are empty.
    ///
    /// # Errors
    /// The invalid key, and the reason.
    pub fn from_data(data: &Data) -> Result<Self, RecordsError> {
        if let Some(version) = parse::<Option<Version>>(data, VERSION_KEY)? {
            version.check(FORMAT)?;
        }
        let Entries { quarantine, pools } = Entries::of(data)?;
        let mut quarantine: Vec<QuarantineRecord> = quarantine.known(QUARANTINE_KEY)?;
        quarantine.sort_by_key(|record| record.cidr);
        Ok(Self {
            quarantine,
            pools: pools.known(POOLS_KEY)?,
            refused: parse(data, REFUSED_KEY)?,
            blocks: parse(data, BLOCKS_KEY)?,
        })
    }

    /// These records, merged with the non-contradicting ones of `earlier`: what a leader wrote before the records were
    /// replaced, for example by a backup of the API server.
    #[must_use]
    pub fn adopt(mut self, earlier: &Self) -> Self {
        let mut known: Vec<IpNet> = self.quarantine.iter().map(|record| record.cidr).collect();
        known.extend(self.blocks.values().flatten());
        let new = |net: &IpNet| !known.iter().any(|known| overlaps(known, net));
        for (name, blocks) in earlier.blocks.iter().filter(|(_, blocks)| blocks.iter().all(new)) {
            self.blocks.entry(name.clone()).or_insert_with(|| blocks.clone());
        }
        self.quarantine.extend(earlier.quarantine.iter().filter(|record| new(&record.cidr)).cloned());
        self.pools.extend(earlier.pools.iter().filter(|pool| !self.pools.contains(pool)).copied().collect::<Vec<_>>());
        self.refused.extend(earlier.refused.iter().cloned());
        self
    }
}

/// How much room a node with these pod CIDRs takes, held or in quarantine.
pub(super) fn room_of<'a>(node: &str, pod_cidrs: impl IntoIterator<Item = &'a IpNet>) -> usize {
    struct Length(usize);
    impl std::fmt::Write for Length {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0 += text.len();
            Ok(())
        }
    }
    // `"name":["a","b"],`
    let mut length = Length(node.len() + 6);
    for net in pod_cidrs {
        length.0 += 3;
        // Writing into a number does not fail.
        let _ = write!(length, "{net}");
    }
    length.0
}

/// How much room a refused node takes: `"uid",`.
pub(super) fn room_of_refused(uid: &str) -> usize {
    uid.len() + 3
}

fn text(key: &'static str, value: &impl Serialize) -> Result<String, RecordsError> {
    serde_json::to_string(value).map_err(|error| RecordsError::Key { key, error })
}

fn parse<T: Default + DeserializeOwned>(data: &Data, key: &'static str) -> Result<T, RecordsError> {
    let Some(text) = data.get(key) else { return Ok(T::default()) };
    serde_json::from_str(text).map_err(|error| RecordsError::Key { key, error })
}

/// The lists of an object.
struct Entries {
    quarantine: List,
    pools: List,
}

/// A list whose entries may come from another build.
#[derive(Default)]
struct List {
    entries: Vec<Value>,
    of_other_kinds: Vec<Value>,
    /// Whole entries of this build's kind, by CIDR.
    extras: BTreeMap<IpNet, Map<String, Value>>,
}

impl Entries {
    fn of(data: &Data) -> Result<Self, RecordsError> {
        let mut quarantine = match parse::<Value>(data, QUARANTINE_KEY)? {
            Value::Null => List::default(),
            Value::Object(grouped) => {
                let error = |error| RecordsError::Key { key: QUARANTINE_KEY, error };
                let Grouped { groups, entries } = serde_json::from_value(Value::Object(grouped)).map_err(error)?;
                let mut list = List::new(entries);
                for Group { since, until, nodes } in groups {
                    for (node, cidrs) in nodes {
                        let record = |cidr| QuarantineRecord { cidr, node: node.clone(), since, until };
                        for entry in cidrs.into_iter().map(record) {
                            list.entries.push(serde_json::to_value(entry).map_err(error)?);
                        }
                    }
                }
                list
            }
            entries => List::new(
                serde_json::from_value(entries).map_err(|error| RecordsError::Key { key: QUARANTINE_KEY, error })?,
            ),
        };
        let mut pools = List::new(parse(data, POOLS_KEY)?);
        quarantine.find_extras(&["cidr", "node", "since", "until"]);
        pools.find_extras(&["cidr", "mask_size"]);
        Ok(Self { quarantine, pools })
    }
}

impl List {
    fn new(entries: Vec<Value>) -> Self {
        let (of_other_kinds, entries) = entries.into_iter().partition(|entry| entry.get(KIND).is_some());
        Self { entries, of_other_kinds, extras: BTreeMap::new() }
    }

    /// Remembers the entries that have more fields than these.
    fn find_extras(&mut self, fields: &[&str]) {
        for entry in &self.entries {
            let Value::Object(entry) = entry else { continue };
            let cidr = entry.get(CIDR).and_then(Value::as_str).and_then(|text| text.parse().ok());
            let extra: Map<String, Value> = entry
                .iter()
                .filter(|(key, _)| !fields.contains(&key.as_str()))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect();
            if let Some(cidr) = cidr.filter(|_| !extra.is_empty()) {
                self.extras.insert(cidr, extra);
            }
        }
    }

    fn known<T: DeserializeOwned>(self, key: &'static str) -> Result<Vec<T>, RecordsError> {
        serde_json::from_value(Value::Array(self.entries)).map_err(|error| RecordsError::Key { key, error })
    }

    /// The entries to write for these records.
    fn merged<T: Serialize + HasCidr>(&self, key: &'static str, records: &[T]) -> Result<Vec<Value>, RecordsError> {
        let own = records.iter().map(|record| self.with_extras(key, record.cidr(), record));
        own.chain(self.of_other_kinds.iter().cloned().map(Ok)).collect()
    }

    fn with_extras(&self, key: &'static str, cidr: IpNet, record: &impl Serialize) -> Result<Value, RecordsError> {
        let mut value = serde_json::to_value(record).map_err(|error| RecordsError::Key { key, error })?;
        if let (Value::Object(fields), Some(extra)) = (&mut value, self.extras.get(&cidr)) {
            fields.extend(extra.clone());
        }
        Ok(value)
    }
}

trait HasCidr {
    fn cidr(&self) -> IpNet;
}

impl HasCidr for QuarantineRecord {
    fn cidr(&self) -> IpNet {
        self.cidr
    }
}

impl HasCidr for PoolRecord {
    fn cidr(&self) -> IpNet {
        self.cidr
    }
}

#[cfg(test)]
mod tests;
