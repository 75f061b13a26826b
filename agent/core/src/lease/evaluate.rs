//! Whether to acquire, renew, wait or step down.
//!
//! A Lease object is judged by when this process last saw it change, on a monotonic clock of its own, and never by the
//! time that its holder wrote into it: clocks of two machines may differ by more than a lease lasts. `now` is always the
//! time since some fixed moment of this process.
//!
//! For the holder the order of moments after a successful write, counted from *before* it was sent, is: retry period
//! (renew) < renew deadline (step down) < lease duration (others may take over). The gap between the last two is the
//! time to cancel and join what only a leader may do.

use std::time::Duration;

/// Lease duration of Cilium's operator.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Renew deadline of Cilium's operator.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Retry period of Cilium's operator.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// How long things last; made by [`Timings::new`], so that the order holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timings {
    duration: Duration,
    renew_deadline: Duration,
    retry_period: Duration,
}

/// Durations that would let two processes lead at once, or a leader lose its lease while it is healthy.
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
    /// Timings whose order is sound.
    ///
    /// # Errors
    /// Unless duration > renew deadline > retry period > 0, with a duration of whole seconds (a Lease holds no others).
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

    /// How long a lease lasts after others last saw it change.
    #[must_use]
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// How long a holder goes on after its last successful write was begun.
    #[must_use]
    pub fn renew_deadline(&self) -> Duration {
        self.renew_deadline
    }

    /// Until when a process whose last successful write was begun at `renewed` leads: what only a leader may write must
    /// have ended by then, and with it before the Lease can (`ipam` decision 14).
    #[must_use]
    pub fn leads_until(&self, renewed: Duration) -> Duration {
        renewed + self.renew_deadline
    }

    /// How often is tried.
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

/// What a Lease object says. `renewed` and `resource_version` are compared for change and never read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// `spec.holderIdentity`; `None` or empty when nobody holds it.
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds` as its holder wrote it.
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

    /// How long the holder says that its lease lasts; ours where it says nothing sensible.
    fn duration(&self, timings: &Timings) -> Duration {
        self.duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .filter(|seconds| *seconds > 0)
            .map_or(timings.duration, Duration::from_secs)
    }
}

/// The Lease as this process saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// What it says; `None` when the object does not exist.
    pub record: Option<Record>,
    /// When this process first saw it say that.
    pub changed: Duration,
}

impl Observation {
    /// The first look.
    #[must_use]
    pub fn first(record: Option<Record>, now: Duration) -> Self {
        Self { record, changed: now }
    }

    /// Another look: what says the same as before keeps the time at which that was first seen. The caller shows each
    /// state of the object once and in order: what a write of its own made of it, as soon as the write is answered, and
    /// nothing that is older than what was shown already.
    pub fn look(&mut self, record: Option<Record>, now: Duration) {
        if self.record != record {
            *self = Self::first(record, now);
        }
    }
}

/// Why leadership is over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Loss {
    /// The Lease names somebody else, or nobody.
    #[error("the Lease is held by {holder:?} now")]
    Taken {
        /// Who is named.
        holder: Option<String>,
    },
    /// The Lease object is gone.
    #[error("the Lease object was deleted")]
    Deleted,
    /// No write succeeded in time, for whatever reason: the API, the network, or this process was paused.
    #[error("not renewed for {since_renewal:?}, and the deadline is {deadline:?}")]
    Deadline {
        /// Time since the last successful write was begun.
        since_renewal: Duration,
        /// The renew deadline.
        deadline: Duration,
    },
}

/// What to do now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Write a claim: create the Lease, or update it with its resource version as precondition, so that of two
    /// claimants one wins. `transitions` is the value to write.
    Acquire {
        /// `spec.leaseTransitions` to write.
        transitions: i32,
        /// The write must have ended within this.
        timeout: Duration,
    },
    /// Write a renewal, with the resource version as precondition.
    Renew {
        /// The write must have ended within this; past it the renew deadline has come.
        timeout: Duration,
    },
    /// Nothing to do before this moment, unless the Lease is seen to change.
    Wait {
        /// When to evaluate again.
        until: Duration,
        /// Who leads, for people; `None` when this process does.
        holder: Option<String>,
    },
    /// Leadership is over: cancel and join at once what only a leader may do, then evaluate as one that does not lead.
    StepDown {
        /// Why.
        loss: Loss,
    },
}

/// Decides. `leading` is the moment *before* the last successful write was sent while this process leads, and `None`
/// while it does not. A write whose answer never came does not move it.
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
        // A claim of ours whose answer never came, or one that we let go: nobody else holds it, and the precondition
        // of the write makes sure of that.
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
