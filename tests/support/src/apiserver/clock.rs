//! The server's time: a start on the calendar plus what tokio's clock has counted since, so that a paused clock is the
//! server's clock too.

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

    /// What the clock shows now.
    pub fn now(&self) -> Timestamp {
        SignedDuration::try_from(self.origin.elapsed())
            .ok()
            .and_then(|elapsed| self.epoch.checked_add(elapsed).ok())
            .unwrap_or(self.epoch)
    }

    /// What the clock shows now, as API objects carry it: RFC 3339 in UTC, whole seconds.
    pub fn stamp(&self) -> String {
        stamp(self.now())
    }
}

/// RFC 3339 in UTC, whole seconds.
pub(super) fn stamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
