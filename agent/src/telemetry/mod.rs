//! Logs and metrics.
//!
//! A log line has a message for people, and keys for whoever searches: [`LOG_KEYS`] lists them, and no line uses another.

pub mod metrics;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Every key of a log line, with what it holds.
pub const LOG_KEYS: &[(&str, &str)] = &[
    ("address", "IP address"),
    ("attachment", "container ID and interface name of a pod"),
    ("attempts", "failed tries in a row"),
    ("block", "pod CIDR"),
    ("container_id", "`CNI_CONTAINERID`"),
    ("crd", "name of a CustomResourceDefinition"),
    ("device", "name of a network device"),
    ("error", "what failed, with its causes"),
    ("excluded", "number of prefixes that are not masqueraded"),
    ("finding", "fixed word of what was found, as in `cistern status`"),
    ("flows", "numbers of translated flows"),
    ("identity", "name of this process in the leader election"),
    ("ifname", "`CNI_IFNAME`"),
    ("in_force", "what counts in spite of the error"),
    ("ipam", "IPAM mode"),
    ("key", "row of a target"),
    ("keys", "settings"),
    ("kind", "kind of object in the kernel's answer"),
    ("leases", "number of leases"),
    ("message", "what was found, in words"),
    ("next_try", "when it is tried again by itself, RFC 3339"),
    ("node", "name of a node"),
    ("nodes", "number of nodes"),
    ("owed", "number of records that are not on disk yet"),
    ("path", "file or directory"),
    ("pod", "`namespace/name`"),
    ("reason", "why it waits or was decided; of a notice, the event's reason"),
    ("rebooted", "whether the machine was rebooted since the last start"),
    ("replayed", "number of DELs that waited on disk"),
    ("request", "what a CiliumNode asks its agent for"),
    ("scope", "the tasks that live and end together"),
    ("since", "since when, RFC 3339"),
    ("source", "where the ip-masq-agent list comes from"),
    ("subject", "what a finding is about"),
    ("table", "table of what is remembered"),
    ("target", "what is reconciled"),
    ("verb", "what the CNI plugin asked the agent for"),
    ("version", "version of the build or of the object"),
    ("wait", "name of what waits, as in `cistern status`"),
];

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// One line of text.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging to standard error, once per process; later calls change nothing. `RUST_LOG` wins over `level`, which is
/// that of Cistern's own lines; with `debug`, libraries speak from `info` on.
pub fn init(format: Format, level: &str) {
    let default = directives(level);
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_span_events(FmtSpan::NONE);
    // A second role in the same process finds the first one's subscriber.
    let _ = match format {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().try_init(),
    };
}

/// Who speaks from which level on. The client for the API server logs every failed try as an error; each wait says once
/// what it waits for.
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

    /// The fields before the message of the macro call that `text` begins with: each key, without its mark.
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
