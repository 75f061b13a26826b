//! Logs and metrics.
//!
//! A log line has a human-readable message, and keys for searching: [`LOG_KEYS`] lists all of them.

pub mod metrics;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// All keys of log lines, with their meaning.
pub const LOG_KEYS: &[(&str, &str)] = &[
    ("address", "IP address"),
    ("attachment", "container ID and interface name of a pod"),
    ("attempts", "consecutive failures"),
    ("block", "pod CIDR"),
    ("container_id", "`CNI_CONTAINERID`"),
    ("crd", "name of a CustomResourceDefinition"),
    ("device", "name of a network device"),
    ("error", "what failed, with its causes"),
    ("excluded", "number of prefixes that are not masqueraded"),
    ("expected", "layout of a map as declared by this build"),
    ("finding", "machine-readable reason of a finding, as in `cistern status`"),
    ("flows", "numbers of translated flows"),
    ("found", "layout of a map as pinned"),
    ("identity", "name of this process in the leader election"),
    ("ifname", "`CNI_IFNAME`"),
    ("in_force", "what is in force in spite of the error"),
    ("ipam", "IPAM mode"),
    ("key", "row of a target"),
    ("keys", "settings"),
    ("kind", "kind of object in the kernel's answer"),
    ("leases", "number of leases"),
    ("map", "name of a map of the kernel programs"),
    ("message", "text of a finding"),
    ("next_try", "next retry, RFC 3339"),
    ("node", "name of a node"),
    ("nodes", "number of nodes"),
    ("owed", "number of records that are not on disk yet"),
    ("path", "file or directory"),
    ("pod", "`namespace/name`"),
    ("reason", "reason of a wait or decision; of a notice, the event's reason"),
    ("rebooted", "whether the machine was rebooted since the last start"),
    ("replayed", "number of queued DELs that were executed"),
    ("request", "uninstall request of a CiliumNode"),
    ("scope", "group of tasks with a common lifetime"),
    ("since", "start of a wait, RFC 3339"),
    ("source", "source of the ip-masq-agent list"),
    ("subject", "subject of a finding"),
    ("table", "name of an in-memory table"),
    ("target", "name of a reconciled target"),
    ("verb", "call of the CNI plugin"),
    ("version", "version of the build or of the object"),
    ("wait", "name of a wait, as in `cistern status`"),
];

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Human-readable, one line.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Initialises logging to standard error, once per process; later calls change nothing. `RUST_LOG` overrides `level`,
/// which applies to Cistern's own lines; with `debug`, libraries log from `info` on.
pub fn init(format: Format, level: &str) {
    let default = directives(level);
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_span_events(FmtSpan::NONE);
    // In a process with a second role, the first one's subscriber exists.
    let _ = match format {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().try_init(),
    };
}

/// Log levels by target. The API client logs every failed attempt as an error; each wait is logged once instead.
fn directives(level: &str) -> String {
    if level == "debug" { "info,cistern=debug".to_owned() } else { format!("{level},kube_client=off") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    /// The fields before the message of the macro call at the start of `text`: each key, without its sigil.
    fn keys(text: &str) -> Vec<&str> {
        let (mut depth, mut quoted, mut start, mut fields) = (0, false, 0, Vec::new());
        for (at, letter) in text.char_indices() {
            match letter {
                '"' if depth == 0 => break,
                '"' => quoted = !quoted,
                _ if quoted => {}
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth -= 1,
                ',' if depth == 0 => {
                    fields.push(&text[start..at]);
                    start = at + 1;
                }
                _ => {}
            }
        }
        let key = |field: &&str| !field.trim().starts_with("target:");
        fields
            .into_iter()
            .filter(key)
            .map(|field| field.split('=').next().unwrap().trim().trim_matches(['%', '?']))
            .collect()
    }

    #[test]
    fn log_lines_use_the_listed_keys_and_no_other() {
        let listed: BTreeSet<&str> = LOG_KEYS.iter().map(|(key, _)| *key).collect();
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
        let mut used = BTreeSet::new();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            for level in ["error", "warn", "info", "debug"] {
                for call in text.split(&format!("tracing::{level}!(")).skip(1) {
                    for key in keys(call) {
                        assert!(listed.contains(key), "{}: {key:?} is not in LOG_KEYS", file.display());
                        used.insert(key.to_owned());
                    }
                }
            }
        }
        let unused: Vec<_> = listed.iter().filter(|key| !used.contains(**key)).collect();
        assert!(unused.is_empty(), "no line uses {unused:?}");
    }
}
