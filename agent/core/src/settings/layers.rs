//! Layers: config directory, environment, flags. Later layers win, and every value records its source.

use super::{KEYS, Settings, cilium, validate};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The command that loads the settings. Some keys are only required by the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// The node's agent; with `leader-election` also the operator's controllers.
    Agent,
    /// The operator alone.
    Operator,
}

/// A config directory: one file per key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directory {
    /// Path, as named in errors.
    pub path: String,
    /// File name → content.
    pub files: BTreeMap<String, String>,
}

/// All sources of settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layers {
    /// The config directory, if there is one.
    pub directory: Option<Directory>,
    /// The environment of the process.
    pub environment: BTreeMap<String, String>,
    /// The flags given: key → value.
    pub flags: BTreeMap<String, String>,
    /// The host name, used as node name if nothing else sets it.
    pub hostname: String,
}

/// Source of a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// Not set.
    Default,
    /// The file of this path in the config directory.
    File(String),
    /// The environment variable of this name.
    Environment(String),
    /// The flag of the key's name.
    Flag,
    /// The host name.
    Hostname,
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => formatter.write_str("default"),
            Self::File(path) => write!(formatter, "file {path}"),
            Self::Environment(name) => write!(formatter, "environment variable {name}"),
            Self::Flag => formatter.write_str("flag"),
            Self::Hostname => formatter.write_str("host name"),
        }
    }
}

/// One key as in force, for `cistern status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SettingInForce {
    /// The key.
    pub key: &'static str,
    /// Its value; parses to the same setting.
    pub value: String,
    /// The source of the value.
    pub source: Source,
}

/// A problem that does not prevent the start, to be reported to the administrator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// The keys concerned, sorted.
    pub keys: Vec<String>,
    /// The message, in one line, including the keys.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

/// A key whose value is rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingsError {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: String,
    /// The source of the value.
    pub source: Source,
    /// What is wrong and what was expected: the part after "key = value (source): ".
    pub reason: String,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} = {:?} ({}): {}", self.key, self.value, self.source, self.reason)
    }
}

/// All rejected keys, at least one. Nothing is started with these settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SettingsErrors(pub Vec<SettingsError>);

impl fmt::Display for SettingsErrors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, verb) = if self.0.len() == 1 {
            ("1 setting".to_owned(), "is")
        } else {
            (format!("{} settings", self.0.len()), "are")
        };
        write!(formatter, "{count} {verb} wrong; nothing was started or changed:")?;
        self.0.iter().try_for_each(|error| write!(formatter, "\n  - {error}"))
    }
}

impl std::error::Error for SettingsErrors {}

/// The value of a key from the layer that wins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Given {
    pub(super) text: String,
    pub(super) source: Source,
}

/// Keys that Cilium renamed. The old name is accepted unless the new name is set in the same layer.
const RENAMED: &[(&str, &str)] = &[
    ("k8s-api-server", "k8s-api-server-urls"),
    ("masquerade", "enable-ipv4-masquerade"),
    ("native-routing-cidr", "ipv4-native-routing-cidr"),
];

/// Prefixes of environment variables; the later one wins.
const ENVIRONMENT_PREFIXES: &[&str] = &["CILIUM_", "CISTERN_"];

/// The variable through which Kubernetes manifests pass the node's name.
const NODE_NAME_VARIABLE: &str = "K8S_NODE_NAME";

impl Settings {
    /// Reads the layers.
    ///
    /// Leading and trailing white space of values is ignored. An environment variable's name is `CISTERN_` or `CILIUM_`
    /// and the key in capitals with `_` for `-`. Variables that name no key are ignored, because Kubernetes creates
    /// some itself (`CISTERN_SERVICE_HOST` for a Service of that name).
    ///
    /// # Errors
    /// All keys that have an invalid value, are unknown flags (or, with `strict-config`, unknown at all), contradict another key, or request what Cistern does not
    /// implement.
    pub fn load(layers: &Layers, command: Command) -> Result<(Self, Vec<Warning>), SettingsErrors> {
        let mut warnings = Vec::new();
        let mut errors = Vec::new();
        let mut settings = Self::default();
        let mut foreign = BTreeMap::new();
        for (key, given) in merge(layers, &mut warnings) {
            match settings.set(&key, &given.text) {
                Ok(Some(name)) => {
                    settings.sources.insert(name, given.source);
                }
                Ok(None) => {
                    foreign.insert(key, given);
                }
                Err(expected) => errors.push(given.error(key, format!("expected {expected}"))),
            }
        }
        settings.unknown = cilium::judge(foreign, settings.strict_config, &mut warnings, &mut errors);
        validate::validate(&mut settings, command, &mut warnings, &mut errors);
        if errors.is_empty() { Ok((settings, warnings)) } else { Err(SettingsErrors(errors)) }
    }
}

impl Given {
    pub(super) fn error(self, key: String, reason: String) -> SettingsError {
        SettingsError { key, value: self.text, source: self.source, reason }
    }
}

/// The winning value of each key.
fn merge(layers: &Layers, warnings: &mut Vec<Warning>) -> BTreeMap<String, Given> {
    let mut merged = BTreeMap::new();
    let mut add = |layer: BTreeMap<String, Given>| merged.extend(under_new_names(layer, warnings));
    if let Some(directory) = &layers.directory {
        let given = |(name, content): (&String, &String)| {
            let source = Source::File(format!("{}/{name}", directory.path.trim_end_matches('/')));
            (name.clone(), Given { text: content.trim().to_owned(), source })
        };
        add(directory.files.iter().map(given).collect());
    }
    add(environment(&layers.environment));
    let flag =
        |(key, value): (&String, &String)| (key.clone(), Given { text: value.trim().to_owned(), source: Source::Flag });
    add(layers.flags.iter().map(flag).collect());
    merged.entry("node-name".to_owned()).or_insert_with(|| node_name(layers));
    merged
}

/// The keys set by environment variables.
fn environment(variables: &BTreeMap<String, String>) -> BTreeMap<String, Given> {
    let mut given = BTreeMap::new();
    for prefix in ENVIRONMENT_PREFIXES {
        for (name, value) in variables {
            let Some(rest) = name.strip_prefix(prefix) else { continue };
            let key = rest.to_ascii_lowercase().replace('_', "-");
            if is_known(&key) {
                given.insert(key, Given { text: value.trim().to_owned(), source: Source::Environment(name.clone()) });
            }
        }
    }
    given
}

/// The node's name if no layer sets the key. Node names are lower case; host names need not be.
fn node_name(layers: &Layers) -> Given {
    match layers.environment.get(NODE_NAME_VARIABLE).map(|name| name.trim()).filter(|name| !name.is_empty()) {
        Some(name) => Given { text: name.to_owned(), source: Source::Environment(NODE_NAME_VARIABLE.to_owned()) },
        None => Given { text: layers.hostname.trim().to_ascii_lowercase(), source: Source::Hostname },
    }
}

fn is_known(key: &str) -> bool {
    KEYS.iter().any(|known| known.name == key) || RENAMED.iter().any(|(old, _)| *old == key) || cilium::is_known(key)
}

fn under_new_names(mut layer: BTreeMap<String, Given>, warnings: &mut Vec<Warning>) -> BTreeMap<String, Given> {
    for (old, new) in RENAMED {
        let Some(given) = layer.remove(*old) else { continue };
        let message = if layer.contains_key(*new) {
            format!("{old} ({}) is ignored: it is the old name of {new}, which is set, too", given.source)
        } else {
            format!("{old} ({}) is the old name of {new}", given.source)
        };
        warnings.push(Warning { keys: vec![(*old).to_owned(), (*new).to_owned()], message });
        layer.entry((*new).to_owned()).or_insert(given);
    }
    layer
}

/// All accepted names, to suggest one after a misspelling.
pub(super) fn known_names() -> BTreeSet<&'static str> {
    let renamed = RENAMED.iter().map(|(old, _)| *old);
    KEYS.iter().map(|key| key.name).chain(renamed).chain(cilium::names()).collect()
}
