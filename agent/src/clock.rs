//! The only place where clocks are read.
//!
//! Decisions take time as an argument. Their callers read it here, so that a test can run the whole agent on tokio's
//! paused clock: there the wall clock follows the runtime's.

use cistern_core::moment::Moment;
use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;
use tokio::time::Instant;

/// Time since boot, including suspend, with the clock's full resolution: successive agents have to agree on it. `None`
/// if the kernel does not report it.
#[must_use]
pub fn uptime() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_BOOTTIME).ok().map(Duration::from)
}

/// The current boot, as [`Moment`] identifies it. `None` if the kernel does not report it.
#[must_use]
pub fn boot() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

/// The current moment on this machine. `None` if the kernel does not report it.
#[must_use]
pub fn moment() -> Option<Moment> {
    Some(Moment { boot: boot()?, uptime_ns: u64::try_from(uptime()?.as_nanos()).ok()? })
}

/// Wall-clock and monotonic time.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Without a base the system's wall clock is used.
    base: Option<Timestamp>,
    start: Instant,
}

impl Clock {
    /// The system's clocks; monotonic time starts now.
    #[must_use]
    pub fn system() -> Self {
        Self { base: None, start: Instant::now() }
    }

    /// A wall clock that reads `base` now and advances with the runtime's clock, independent of the system's.
    #[must_use]
    pub fn following_runtime(base: Timestamp) -> Self {
        Self { base: Some(base), start: Instant::now() }
    }

    /// Wall-clock time, for display and for persisted timestamps.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        match self.base {
            None => Timestamp::now(),
            Some(base) => base.checked_add(self.start.elapsed()).unwrap_or(Timestamp::MAX),
        }
    }

    /// A number for jitter: the wall clock's sub-second part, mixed. It is not secret, and depends on the time only, so
    /// that a run on the runtime's paused clock is reproducible.
    #[must_use]
    pub fn jitter(&self) -> u64 {
        // The finaliser of SplitMix64, so that neighbouring inputs give unrelated outputs.
        let mut mixed = u64::try_from(self.now().as_nanosecond()).unwrap_or_default();
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Time since this clock was created; never decreases. For expiry and back-off.
    #[must_use]
    pub fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }

    /// The runtime's instant at which [`Clock::monotonic`] reads `at`.
    #[must_use]
    pub fn instant(&self, at: Duration) -> Instant {
        self.start + at
    }
}
