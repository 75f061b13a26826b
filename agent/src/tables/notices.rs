//! Notices for `kubectl describe`: events that the next state no longer shows.
//!
//! Publishing does not block. One writer creates Kubernetes events from the rows, at its own pace.

use super::{Reader, Table};
use crate::clock::Clock;
use jiff::Timestamp;
use std::sync::Arc;

macro_rules! reasons {
    ($($variant:ident $text:literal $warning:literal $action:literal $help:literal;)+) => {
        /// Why there is a notice. Determines `reason`, `type` and `action` of the event.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $(#[doc = $help] $variant,)+
        }

        impl Reason {
            /// Every reason, for the documentation.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The event's `reason`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// Whether the event's `type` is `Warning`, else `Normal`.
            #[must_use]
            pub fn is_warning(self) -> bool {
                match self { $(Self::$variant => $warning),+ }
            }

            /// The event's `action`.
            #[must_use]
            pub fn action(self) -> &'static str {
                match self { $(Self::$variant => $action),+ }
            }

            /// When it is published, human-readable.
            #[must_use]
            pub fn help(self) -> &'static str {
                match self { $(Self::$variant => $help),+ }
            }
        }
    };
}

reasons! {
    WaitingForPodCidr "WaitingForPodCIDR" true "AllocatePodCIDR"
        "The node has had no pod CIDR for 30 seconds";
    PodCidrReceived "PodCIDRReceived" false "AllocatePodCIDR"
        "The node was assigned its first pod CIDR";
    PodCidrChanged "PodCIDRChanged" true "AllocatePodCIDR"
        "The node's pod CIDR changed";
    PodCidrBlocked "PodCIDRBlocked" true "AllocatePodCIDR"
        "The node allocates no addresses: another node, or its own network, overlaps its pod CIDR";
    AddressesExhausted "AddressesExhausted" true "AddPod"
        "A pod got no address because none is free on the node";
    LeaseFinding "LeaseFinding" true "RestoreLeases"
        "The records of leases contradict each other or the node's network";
    StateFileSetAside "StateFileSetAside" true "RestoreLeases"
        "A state file could not be read and was renamed";
    UnknownSetting "UnknownSetting" true "ReadSettings"
        "The ConfigMap has a key that neither Cistern nor Cilium knows; it has no effect";
    PodCidrPoolExhausted "PodCIDRPoolExhausted" true "AllocatePodCIDR"
        "The pool has no free pod CIDR for the node";
    PodCidrRefused "PodCIDRRefused" true "ClaimPodCIDR"
        "The operator refuses the node's list: a duplicate, an overlap, or an invalid or unaligned CIDR";
    PodCidrOutsidePool "PodCIDROutsidePool" true "ClaimPodCIDR"
        "The node keeps a pod CIDR that is not in the configured pool";
}

/// An event and the number of its repetitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Human-readable.
    pub note: String,
    /// Number of occurrences since `first`.
    pub count: u64,
    /// When this note was first published.
    pub first: Timestamp,
    /// When it was last published.
    pub last: Timestamp,
}

/// Name of the node, and the reason.
pub type NoticeKey = (String, Reason);

/// Maximum number of rows: beyond it the least recently published one is dropped.
const ROWS: usize = 1000;

/// The writer.
#[derive(Debug, Clone)]
pub struct Notices {
    table: Arc<Table<NoticeKey, Notice>>,
    clock: Clock,
}

impl Notices {
    /// No notices yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let table = Table::new("notices");
        table.mark_synced();
        Self { table: Arc::new(table), clock }
    }

    /// Publishes a notice about `node`. Repetitions of the same note are counted; another note with that reason
    /// replaces the row and is logged.
    pub fn publish(&self, node: &str, reason: Reason, note: impl Into<String>) {
        let (note, now) = (note.into(), self.clock.now());
        let mut news = true;
        self.table.modify(|rows| {
            let key = (node.to_owned(), reason);
            if let Some(row) = rows.get_mut(&key).filter(|row| row.note == note) {
                row.count += 1;
                row.last = now;
                news = false;
                return;
            }
            if !rows.contains_key(&key) && rows.len() >= ROWS {
                let silent = rows.iter().min_by_key(|(_, row)| row.last).map(|(key, _)| key.clone());
                silent.and_then(|key| rows.remove(&key));
            }
            rows.insert(key, Notice { note: note.clone(), count: 1, first: now, last: now });
        });
        match (news, reason.is_warning()) {
            (false, _) => {}
            (true, true) => tracing::warn!(node, reason = reason.name(), "{note}"),
            (true, false) => tracing::info!(node, reason = reason.name(), "{note}"),
        }
    }

    /// A reader.
    #[must_use]
    pub fn reader(&self) -> Reader<NoticeKey, Notice> {
        self.table.reader()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_note_is_counted_another_one_begins_anew_and_the_table_has_a_bound() {
        let notices = Notices::new(Clock::following_runtime("2026-01-01T00:00:00Z".parse().unwrap()));
        let row = |node: &str| notices.reader().peek().rows.get(&(node.to_owned(), Reason::LeaseFinding)).cloned();
        notices.publish("n", Reason::LeaseFinding, "a");
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        notices.publish("n", Reason::LeaseFinding, "a");
        let counted = row("n").unwrap();
        assert_eq!((counted.count, counted.last > counted.first), (2, true));
        notices.publish("n", Reason::LeaseFinding, "b");
        assert_eq!(row("n").unwrap().count, 1);
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        for number in 0..ROWS {
            notices.publish(&format!("n{number}"), Reason::LeaseFinding, "a");
        }
        assert_eq!(notices.reader().peek().rows.len(), ROWS);
        assert_eq!(row("n"), None);
    }
}
