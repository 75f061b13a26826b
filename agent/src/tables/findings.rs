//! The table of what somebody should look at: nothing that stops the node, nothing that is waited for.

use super::{Reader, Table};
use crate::clock::Clock;
use jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a part of the agent found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// A fixed word for programs, such as `lease-without-pod`.
    pub reason: &'static str,
    /// What it is about: an attachment, a device, a file, a setting.
    pub subject: String,
    /// What is so, and what follows.
    pub message: String,
}

/// Key of a finding: the part that found it, its reason and its subject.
pub type FindingKey = (&'static str, &'static str, String);

/// A finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FindingRow {
    /// What is so, and what follows.
    pub message: String,
    /// Since when it is known.
    pub since: Timestamp,
}

/// Where each part says what it found. Each change is one line of the log, with the keys `finding`, `subject` and
/// `message`.
#[derive(Debug, Clone)]
pub struct Findings {
    table: Arc<Table<FindingKey, FindingRow>>,
    clock: Clock,
}

impl Findings {
    /// Nothing is found yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let table = Table::new("findings");
        table.mark_synced();
        Self { table: Arc::new(table), clock }
    }

    /// Adds to what a part found. It stays until the part replaces it.
    pub fn add(&self, source: &'static str, found: impl IntoIterator<Item = Found>) {
        self.change(source, found, false);
    }

    /// This is all that a part finds now; what it found before and does not find now has ended.
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

    /// A reading end.
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
