//! Order of events on one node, independent of its wall clock.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A point in time on one node. The CNI plugin and the agent read it from the same kernel, so it orders their actions
/// even if the wall clock is set back while a DEL is queued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// `/proc/sys/kernel/random/boot_id`, which differs for each boot (random(4)). In a node that is a container the
    /// plugin may read another value than the agent; their order is then only known within a boot.
    pub boot: String,
    /// Nanoseconds since boot, including suspend (`CLOCK_BOOTTIME`, clock_gettime(2)).
    pub uptime_ns: u64,
}

impl Moment {
    /// Time since boot.
    #[must_use]
    pub fn uptime(&self) -> Duration {
        Duration::from_nanos(self.uptime_ns)
    }

    /// Whether this is known to be later than `other`, on a machine whose current boot is `boot`. The order of two
    /// earlier boots is unknown.
    #[must_use]
    pub fn is_after(&self, other: &Self, boot: &str) -> bool {
        if self.boot == other.boot { self.uptime_ns > other.uptime_ns } else { self.boot == boot }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(boot: &str, uptime_ns: u64) -> Moment {
        Moment { boot: boot.to_owned(), uptime_ns }
    }

    #[test]
    fn moments_of_one_boot_are_ordered_by_uptime_and_this_boot_is_after_any_other() {
        let (early, late) = (moment("now", 1), moment("now", 2));
        assert!(late.is_after(&early, "now") && !early.is_after(&late, "now") && !early.is_after(&early, "now"));
        assert!(late.is_after(&early, "later"), "also when that boot is over");
        let before = moment("before", 9);
        assert!(early.is_after(&before, "now") && !before.is_after(&early, "now"));
        assert!(!before.is_after(&early, "later") && !early.is_after(&before, "later"), "two earlier boots");
    }
}
