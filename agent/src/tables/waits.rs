//! Everything that this process waits for.

use super::rows::Wait;
use super::{Reader, Table};
use crate::clock::Clock;
use std::sync::Arc;
use std::time::Duration;

/// The waits of all components, each with a unique name.
#[derive(Debug, Clone)]
pub struct Waits {
    table: Arc<Table<String, Wait>>,
    clock: Clock,
}

impl Waits {
    /// No waits yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let table = Table::new("waits");
        table.mark_synced();
        Self { table: Arc::new(table), clock }
    }

    /// `name` waits because of `reason` and retries after `retry`. The start of an existing wait is kept; its reason
    /// and next retry are replaced. A new reason is logged once.
    pub fn begin(&self, name: &str, reason: impl Into<String>, retry: Option<Duration>) {
        let now = self.clock.now();
        let reason = reason.into();
        let next_try = retry.and_then(|delay| now.checked_add(delay).ok());
        let mut news = false;
        self.table.modify(|rows| {
            let since = match rows.get(name) {
                Some(wait) => {
                    news = wait.reason != reason;
                    wait.since
                }
                None => {
                    news = true;
                    now
                }
            };
            rows.insert(name.to_owned(), Wait { reason: reason.clone(), since, next_try });
        });
        if news {
            tracing::warn!(wait = name, reason, "waiting");
        }
    }

    /// `name` no longer waits.
    pub fn end(&self, name: &str) {
        let mut ended = None;
        self.table.modify(|rows| ended = rows.remove(name));
        if let Some(wait) = ended {
            tracing::info!(wait = name, since = %wait.since, "no longer waiting");
        }
    }

    /// A reader.
    #[must_use]
    pub fn reader(&self) -> Reader<String, Wait> {
        self.table.reader()
    }
}
