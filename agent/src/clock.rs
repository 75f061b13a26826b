//! The one place where a clock is read.
//!
//! Decisions take time as an argument. Whoever calls them reads it here, so that a test can run the whole agent on
//! tokio's paused clock: there the wall clock follows the runtime's.

use cistern_core::moment::Moment;
use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};
use std::time::Duration;
use tokio::time::Instant;

/// Time since the machine was started, sleep included, to the nanosecond: agents that run one after the other have to
/// agree. None where the kernel does not say.
#[must_use]
pub fn uptime() -> Option<Duration> {
    clock_gettime(ClockId::CLOCK_BOOTTIME).ok().map(Duration::from)
}

/// The boot that this machine is in, as [`Moment`] names it. None where the kernel does not say.
#[must_use]
pub fn boot() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

/// This moment in the life of this machine. None where the kernel does not say.
#[must_use]
pub fn moment() -> Option<Moment> {
    Some(Moment { boot: boot()?, uptime_ns: u64::try_from(uptime()?.as_nanos()).ok()? })
}

/// Wall-clock and monotonic time.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// Without a base the system's wall clock counts.
    base: Option<Timestamp>,
    start: Instant,
}

impl Clock {
    /// The system's clocks; monotonic time counts from now.
    #[must_use]
    pub fn system() -> Self {
        Self { base: None, start: Instant::now() }
    }

    /// A wall clock that reads `base` now and goes on as the runtime's clock does, whatever is done to the system's.
    #[must_use]
    pub fn following_runtime(base: Timestamp) -> Self {
        Self { base: Some(base), start: Instant::now() }
    }

    /// Wall-clock time, for what people read and what outlives the process.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        match self.base {
            None => Timestamp::now(),
            Some(base) => base.checked_add(self.start.elapsed()).unwrap_or(Timestamp::MAX),
        }
    }

    /// A number to spread the retries of many processes with: what the wall clock shows below the second, mixed. It is no
    /// secret, and follows from the time alone, so that a run on the runtime's paused clock can be repeated.
    #[must_use]
    pub fn jitter(&self) -> u64 {
        // The finaliser of SplitMix64: neighbouring inputs give outputs that have nothing in common.
        let mut mixed = u64::try_from(self.now().as_nanosecond()).unwrap_or_default();
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Time since this clock was made, never going back: for expiry and back-off.
    #[must_use]
    pub fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }

    /// The runtime's instant at which [`Clock::monotonic`] will read `at`.
    #[must_use]
    pub fn instant(&self, at: Duration) -> Instant {
        self.start + at
    }
}
