//! The table of what people should find with `kubectl describe`: it happened, and the next state no longer shows it.
//!
//! Whoever notices something publishes it and goes on. One writer makes Kubernetes events of the rows, in its own time.

use super::{Reader, Table};
use crate::clock::Clock;
use jiff::Timestamp;
use std::sync::Arc;

macro_rules! reasons {
    ($($variant:ident $text:literal $warning:literal $action:literal $help:literal;)+) => {
        /// Why there is a notice. `reason`, `type` and `action` of the event follow from it.
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

            /// Whether somebody should look: the event's `type` is `Warning`, else `Normal`.
            #[must_use]
            pub fn is_warning(self) -> bool {
                match self { $(Self::$variant => $warning),+ }
            }

            /// The event's `action`: what was being done.
            #[must_use]
            pub fn action(self) -> &'static str {
                match self { $(Self::$variant => $action),+ }
            }

            /// When it is published, for people.
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
        "The node got its first pod CIDR";
    PodCidrChanged "PodCIDRChanged" true "AllocatePodCIDR"
        "The node's pod CIDR is another one than before";
    PodCidrBlocked "PodCIDRBlocked" true "AllocatePodCIDR"
        "The node gives no new address: another node, or its own network, overlaps its pod CIDR";
    AddressesExhausted "AddressesExhausted" true "AddPod"
        "A pod got no address because none is free on the node";
    LeaseFinding "LeaseFinding" true "RestoreLeases"
        "The records of leases contradict each other or the node's network";
    StateFileSetAside "StateFileSetAside" true "RestoreLeases"
        "A state file could not be read and was kept under another name";
    PodCidrPoolExhausted "PodCIDRPoolExhausted" true "AllocatePodCIDR"
        "The operator has no free block for the node";
    PodCidrRefused "PodCIDRRefused" true "ClaimPodCIDR"
        "The operator refuses what the node lists: a duplicate, an overlap, no block, no CIDR";
    PodCidrOutsidePool "PodCIDROutsidePool" true "ClaimPodCIDR"
        "The node keeps a block that is none of the pool as it is configured now";
}

/// Something that happened, and how often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// For people.
    pub note: String,
    /// How often, since `first`.
    pub count: u64,
    /// When this note was first published.
    pub first: Timestamp,
    /// When it was last published.
    pub last: Timestamp,
}

/// Name of the node that it is about, and why.
pub type NoticeKey = (String, Reason);

/// More rows than this are not kept: the one that is silent longest makes room.
const ROWS: usize = 1000;

/// The publishing end.
#[derive(Debug, Clone)]
pub struct Notices {
    table: Arc<Table<NoticeKey, Notice>>,
    clock: Clock,
}

impl Notices {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        let table = Table::new("notices");
        table.mark_synced();
        Self { table: Arc::new(table), clock }
    }

    /// Something happened to `node`. The same note again is counted; another note of that reason takes the row and is
    /// logged.
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

    /// A reading end.
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
