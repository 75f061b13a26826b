//! The server's time: a calendar date plus the time of tokio's clock, so that it can be paused.

use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

/// Calendar time that runs with tokio's clock.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    epoch: Timestamp,
    origin: Instant,
}

impl Clock {
    /// A clock that shows `epoch` now.
    pub fn starting_at(epoch: Timestamp) -> Self {
        Self { epoch, origin: Instant::now() }
    }

    /// The current time.
    pub fn now(&self) -> Timestamp {
        SignedDuration::try_from(self.origin.elapsed())
            .ok()
            .and_then(|elapsed| self.epoch.checked_add(elapsed).ok())
            .unwrap_or(self.epoch)
    }

    /// The current time, as in API objects: RFC 3339 in UTC, whole seconds.
    pub fn stamp(&self) -> String {
        stamp(self.now())
    }
}

/// RFC 3339 in UTC, whole seconds.
pub(super) fn stamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
