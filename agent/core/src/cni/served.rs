//! The file by which CNI STATUS distinguishes a restarting agent from a node that cannot serve pods (`ipam` decision 6).
//!
//! The agent writes it while it serves; it lies below `/run`, so that it does not outlive the boot. Its age is counted by the
//! kernel's time since the boot: the wall clock is set, back too. Agents of the first release left the file empty; the age of those is
//! that of the file.

use crate::format::Version;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long an agent may be away or starting without the node being reported as unable to serve: kubelet takes the pods of a
/// node that is not ready out of Services.
pub const ABSENCE_GRACE: Duration = Duration::from_secs(300);

/// The format of [`Served`].
const FORMAT: u32 = 1;

/// Contents of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// Format of the file.
    #[serde(flatten)]
    version: Version,
    /// Time since the boot when this node served, in nanoseconds (`CLOCK_BOOTTIME`, clock_gettime(2)).
    uptime_ns: u64,
}

impl Served {
    /// A node that serves at this time since the boot.
    #[must_use]
    pub fn at(uptime: Duration) -> Self {
        let uptime_ns = u64::try_from(uptime.as_nanos()).unwrap_or(u64::MAX);
        Self { version: Version::new(FORMAT, 1), uptime_ns }
    }
}

/// Whether a node served within [`ABSENCE_GRACE`]: by the contents of the file and, where those do not say, by its age on the wall
/// clock, which is none for a file that this clock takes to be of the future.
#[must_use]
pub fn served_lately(contents: &[u8], uptime: Option<Duration>, file_age: Option<Duration>) -> bool {
    let by_uptime = || {
        let served: Served = serde_json::from_slice(contents).ok()?;
        served.version.check(FORMAT).ok()?;
        Some(uptime?.checked_sub(Duration::from_nanos(served.uptime_ns)).is_some_and(|age| age < ABSENCE_GRACE))
    };
    by_uptime().unwrap_or_else(|| file_age.unwrap_or_default() < ABSENCE_GRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_counted_by_the_uptime_whatever_the_wall_clock_says() {
        let contents = serde_json::to_vec(&Served::at(Duration::from_secs(1_000))).unwrap();
        let hour = Duration::from_secs(3_600);
        for (uptime, lately) in [(1_000, true), (1_299, true), (1_300, false), (9_999, false), (999, false)] {
            // The clock was set back, was not set, and was set forward.
            for file_age in [None, Some(Duration::ZERO), Some(hour)] {
                assert_eq!(served_lately(&contents, Some(Duration::from_secs(uptime)), file_age), lately, "{uptime}");
            }
        }
    }

    #[test]
    fn a_file_that_does_not_say_is_as_old_as_the_file_system_says() {
        let later_format = br#"{"format":2,"oldest_reader":2,"uptime":"PT1H"}"#;
        for contents in [&b""[..], b"{", later_format] {
            let lately = |age| served_lately(contents, Some(Duration::from_secs(9_999)), age);
            assert!(lately(Some(Duration::from_secs(299))) && !lately(Some(ABSENCE_GRACE)));
            assert!(lately(None), "the clock was set back since");
        }
        let newer = br#"{"format":2,"oldest_reader":1,"uptime_ns":5,"more":true}"#;
        assert!(served_lately(newer, Some(Duration::from_secs(1)), Some(Duration::from_secs(9_999))));
    }
}
