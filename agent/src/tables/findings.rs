//! Findings for the administrator, which do not stop the node and are not waited for.

use super::{Reader, Table};
use crate::clock::Clock;
use jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A finding of a component of the agent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// A machine-readable reason, such as `lease-without-pod`.
    pub reason: &'static str,
    /// The subject: an attachment, a device, a file, a setting.
    pub subject: String,
    /// The finding and its consequence.
    pub message: String,
}

/// Key of a finding: its component, reason and subject.
pub type FindingKey = (&'static str, &'static str, String);

/// A finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FindingRow {
    /// The finding and its consequence.
    pub message: String,
    /// When it was first found.
    pub since: Timestamp,
}

/// The findings of all components. Each change is logged, with the keys `finding`, `subject` and `message`.
#[derive(Debug, Clone)]
pub struct Findings {
    table: Arc<Table<FindingKey, FindingRow>>,
    clock: Clock,
}

impl Findings {
    /// No findings yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let table = Table::new("findings");
        table.mark_synced();
        Self { table: Arc::new(table), clock }
    }

    /// Adds to the findings of a component, until it replaces them.
    pub fn add(&self, source: &'static str, found: impl IntoIterator<Item = Found>) {
        self.change(source, found, false);
    }

    /// Replaces the findings of a component; others of it have ended.
    pub fn replace(&self, source: &'static str, found: impl IntoIterator<Item = Found>) {
        self.change(source, found, true);
    }

    fn change(&self, source: &'static str, found: impl IntoIterator<Item = Found>, all: bool) {
        let now = self.clock.now();
        let found: BTreeMap<FindingKey, String> =
            found.into_iter().map(|Found { reason, subject, message }| ((source, reason, subject), message)).collect();
        let (mut news, mut ended) = (Vec::new(), Vec::new());
        self.table.modify(|rows| {
            if all {
                rows.retain(|key, _| {
                    let kept = key.0 != source || found.contains_key(key);
                    if !kept {
                        ended.push(key.clone());
                    }
                    kept
                });
            }
            for (key, message) in found {
                match rows.get_mut(&key) {
                    Some(row) => row.message = message,
                    None => {
                        news.push((key.clone(), message.clone()));
                        rows.insert(key, FindingRow { message, since: now });
                    }
                }
            }
        });
        for ((_, reason, subject), message) in news {
            tracing::warn!(finding = reason, subject, message, "found");
        }
        for (_, reason, subject) in ended {
            tracing::info!(finding = reason, subject, "no longer found");
        }
    }

    /// A reader.
    #[must_use]
    pub fn reader(&self) -> Reader<FindingKey, FindingRow> {
        self.table.reader()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(subject: &str, message: &str) -> Found {
        Found { reason: "r", subject: subject.to_owned(), message: message.to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_part_replaces_what_it_found_and_nothing_of_others() {
        let findings = Findings::new(Clock::following_runtime(Timestamp::UNIX_EPOCH));
        findings.add("state", [found("file", "f")]);
        findings.replace("audit", [found("a", "1"), found("b", "1")]);
        tokio::time::sleep(std::time::Duration::from_secs(5)).await;
        findings.replace("audit", [found("b", "2"), found("c", "2")]);
        let rows = findings.reader().peek().rows.clone();
        let seen: Vec<(&str, &str, &str, i64)> = rows
            .iter()
            .map(|((source, _, subject), row)| (*source, subject.as_str(), row.message.as_str(), row.since.as_second()))
            .collect();
        assert_eq!(seen, [("audit", "b", "2", 0), ("audit", "c", "2", 5), ("state", "file", "f", 0)]);
    }
}
