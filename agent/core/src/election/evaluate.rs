//! Leader election: acquire, renew, wait or step down.
//!
//! A Lease object is judged by when this process last observed a change, on its own monotonic clock, and never by the
//! time that its holder wrote: clocks of two machines may differ by more than the lease duration. `now` is time on that
//! clock.
//!
//! For the holder, the timers after a successful write, counted from *before* it was sent, are: retry period (renew) <
//! renew deadline (step down) < lease duration (others may take over). Between the last two, the work of the leader is
//! cancelled and joined.

use std::time::Duration;

/// Lease duration of Cilium's operator.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Renew deadline of Cilium's operator.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Retry period of Cilium's operator.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// Durations; validated by [`Timings::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    duration: Duration,
    renew_deadline: Duration,
    retry_period: Duration,
}

/// Durations with which two processes could lead at once, or a healthy leader could lose its lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "lease duration {duration:?}, renew deadline {renew_deadline:?} and retry period {retry_period:?} are refused: \
     expected whole seconds of duration, duration > renew deadline > retry period > 0"
)]
pub struct TimingsError {
    duration: Duration,
    renew_deadline: Duration,
    retry_period: Duration,
}

impl Timings {
    /// Validates durations.
    ///
    /// # Errors
    /// Unless duration > renew deadline > retry period > 0, with a duration in whole seconds (as in a Lease).
    pub fn new(duration: Duration, renew_deadline: Duration, retry_period: Duration) -> Result<Self, TimingsError> {
        let sound = duration > renew_deadline
            && renew_deadline > retry_period
            && !retry_period.is_zero()
            && duration.subsec_nanos() == 0
            && i32::try_from(duration.as_secs()).is_ok();
        if !sound {
            return Err(TimingsError { duration, renew_deadline, retry_period });
        }
        Ok(Self { duration, renew_deadline, retry_period })
    }

    /// Duration of a lease after the last change observed by others.
    #[must_use]
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// How long a holder leads after the start of its last successful write.
    #[must_use]
    pub fn renew_deadline(&self) -> Duration {
        self.renew_deadline
    }

    /// Until when a process whose last successful write started at `renewed` leads: all writes of the leader must have
    /// completed before the Lease can expire (`ipam` decision 14).
    #[must_use]
    pub fn leads_until(&self, renewed: Duration) -> Duration {
        renewed + self.renew_deadline
    }

    /// Interval of attempts.
    #[must_use]
    pub fn retry_period(&self) -> Duration {
        self.retry_period
    }
}

impl Default for Timings {
    fn default() -> Self {
        Self { duration: LEASE_DURATION, renew_deadline: RENEW_DEADLINE, retry_period: RETRY_PERIOD }
    }
}

/// Content of a Lease object. `renewed` and `resource_version` are only compared for equality.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// `spec.holderIdentity`; `None` or empty without a holder.
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds` as written by its holder.
    pub duration_seconds: Option<i32>,
    /// `spec.leaseTransitions`
    pub transitions: i32,
    /// `spec.renewTime`, as text.
    pub renewed: Option<String>,
}

impl Record {
    fn holder(&self) -> Option<&str> {
        self.holder.as_deref().filter(|holder| !holder.is_empty())
    }

    /// The duration written by the holder; ours if that is invalid.
    fn duration(&self, timings: &Timings) -> Duration {
        self.duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .filter(|seconds| *seconds > 0)
            .map_or(timings.duration, Duration::from_secs)
    }
}

/// A Lease as observed by this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// Its content; `None` if the object does not exist.
    pub record: Option<Record>,
    /// When this process first observed this content.
    pub changed: Duration,
}

impl Observation {
    /// The first observation.
    #[must_use]
    pub fn first(record: Option<Record>, now: Duration) -> Self {
        Self { record, changed: now }
    }

    /// Another observation: unchanged content keeps the time of its first observation. The caller must pass each state
    /// once and in order, including the results of its own writes, and nothing older than what was passed before.
    pub fn look(&mut self, record: Option<Record>, now: Duration) {
        if self.record != record {
            *self = Self::first(record, now);
        }
    }
}

/// Why leadership was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// The Lease has another holder, or none.
    #[error("the Lease is held by {holder:?} now")]
    Taken {
        /// The holder.
        holder: Option<String>,
    },
    /// The Lease object was deleted.
    #[error("the Lease object was deleted")]
    Deleted,
    /// No write succeeded in time, because of the API server, the network, or a pause of this process.
    #[error("not renewed for {since_renewal:?}, and the deadline is {deadline:?}")]
    Deadline {
        /// Time since the start of the last successful write.
        since_renewal: Duration,
        /// The renew deadline.
        deadline: Duration,
    },
}

/// The next action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Write a claim: create the Lease, or update it with its resource version as precondition, so that only one of two
    /// claimants succeeds. `transitions` is the value to write.
    Acquire {
        /// `spec.leaseTransitions` to write.
        transitions: i32,
        /// Timeout of the write.
        timeout: Duration,
    },
    /// Write a renewal, with the resource version as precondition.
    Renew {
        /// Timeout of the write, which ends at the renew deadline.
        timeout: Duration,
    },
    /// Nothing to do before this time, unless the Lease changes.
    Wait {
        /// When to evaluate again.
        until: Duration,
        /// The leader, human-readable; `None` if it is this process.
        holder: Option<String>,
    },
    /// Leadership is lost: cancel and join the leader's work at once, then evaluate as a candidate.
    StepDown {
        /// The reason.
        loss: Loss,
    },
}

/// Decides. `leading` is the time *before* the last successful write was sent if this process leads, else `None`. A
/// write without an answer does not count.
#[must_use]
pub fn evaluate(
    observed: &Observation,
    identity: &str,
    leading: Option<Duration>,
    timings: &Timings,
    now: Duration,
) -> Action {
    match leading {
        Some(renewed) => evaluate_leader(observed, identity, renewed, timings, now),
        None => evaluate_candidate(observed, identity, timings, now),
    }
}

fn evaluate_leader(
    observed: &Observation,
    identity: &str,
    renewed: Duration,
    timings: &Timings,
    now: Duration,
) -> Action {
    let Some(record) = &observed.record else { return Action::StepDown { loss: Loss::Deleted } };
    if record.holder() != Some(identity) {
        return Action::StepDown { loss: Loss::Taken { holder: record.holder().map(str::to_owned) } };
    }
    let deadline = timings.leads_until(renewed);
    if now >= deadline {
        let since_renewal = now.saturating_sub(renewed);
        return Action::StepDown { loss: Loss::Deadline { since_renewal, deadline: timings.renew_deadline } };
    }
    let next = renewed + timings.retry_period;
    if now < next {
        return Action::Wait { until: next, holder: None };
    }
    Action::Renew { timeout: deadline - now }
}

fn evaluate_candidate(observed: &Observation, identity: &str, timings: &Timings, now: Duration) -> Action {
    let timeout = timings.renew_deadline;
    let Some(record) = &observed.record else { return Action::Acquire { transitions: 0, timeout } };
    match record.holder() {
        None => Action::Acquire { transitions: record.transitions.saturating_add(1), timeout },
        // Our own claim without an answer, or a released one: there is no other holder, and the precondition of the
        // write ensures it.
        Some(holder) if holder == identity => Action::Acquire { transitions: record.transitions, timeout },
        Some(holder) => {
            let expiry = observed.changed + record.duration(timings);
            if now >= expiry {
                Action::Acquire { transitions: record.transitions.saturating_add(1), timeout }
            } else {
                Action::Wait { until: expiry.min(now + timings.retry_period), holder: Some(holder.to_owned()) }
            }
        }
    }
}

#[cfg(test)]
mod tests;
