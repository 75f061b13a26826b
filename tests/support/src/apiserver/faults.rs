//! Faults: random ones derived from a seed, and injected ones.
//!
//! Random faults occur at a rate, so that scripts run with faults unless they disable them. Injected faults apply to
//! the next calls that match, for cases that need a specific one.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::calls::{Call, Verb};

/// kube-apiserver's default request timeout.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A fault, as observed by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Answered with this HTTP status (403, 404, 409, 429 with `Retry-After: 1`, 500, 503 or 504) without executing the
    /// call.
    Refused(u16),
    /// No answer for a minute, then 504. The call was not executed.
    TimeoutBefore,
    /// No answer for a minute, then 504. **The write took effect.**
    TimeoutAfter,
    /// The connection is reset before the call is executed.
    ResetBefore,
    /// The connection is reset instead of an answer. **The write took effect.**
    ResetAfter,
    /// A watch gets an error at once: its version is too old (410).
    WatchExpired,
    /// A watch ends without an error after this many events.
    WatchCut(usize),
    /// A watch gets its events with this delay.
    WatchDelayed(Duration),
}

/// The calls that an injected fault matches; an empty field matches all.
#[derive(Clone, Debug, Default)]
pub struct CallMatch {
    /// Name of the caller.
    pub client: Option<String>,
    /// Verb.
    pub verb: Option<Verb>,
    /// Plural name of the resource.
    pub resource: Option<String>,
    /// `status`, or empty for the object itself.
    pub subresource: Option<String>,
    /// The object's name.
    pub name: Option<String>,
}

impl CallMatch {
    /// Whether a call matches.
    pub fn matches(&self, call: &Call) -> bool {
        let Self { client, verb, resource, subresource, name } = self;
        verb.is_none_or(|verb| verb == call.verb)
            && [
                (client, &call.client),
                (resource, &call.resource),
                (subresource, &call.subresource),
                (name, &call.name),
            ]
            .iter()
            .all(|(wanted, found)| wanted.as_ref().is_none_or(|wanted| wanted == *found))
    }
}

/// The source of faults. Equal seeds and equal calls give equal faults.
pub(super) struct Faults {
    percent: u8,
    spared: Vec<String>,
    random: SmallRng,
    asked: Vec<(CallMatch, Fault, usize)>,
}

impl Faults {
    /// No faults until a rate is set.
    pub(super) fn new(seed: u64) -> Self {
        Self { percent: 0, spared: Vec::new(), random: SmallRng::seed_from_u64(seed), asked: Vec::new() }
    }

    pub(super) fn set_rate(&mut self, percent: u8, spared: &[&str]) {
        self.percent = percent.min(100);
        self.spared = spared.iter().map(|resource| (*resource).to_owned()).collect();
    }

    pub(super) fn clear(&mut self) {
        self.asked.clear();
    }

    pub(super) fn ask(&mut self, calls: CallMatch, fault: Fault, times: usize) {
        self.asked.push((calls, fault, times));
    }

    /// The fault of this call, if any.
    pub(super) fn draw(&mut self, call: &Call) -> Option<Fault> {
        if let Some((_, fault, times)) = self.asked.iter_mut().find(|(calls, _, _)| calls.matches(call)) {
            let fault = *fault;
            *times = times.saturating_sub(1);
            self.asked.retain(|(_, _, times)| *times > 0);
            return Some(fault);
        }
        if self.random.random_range(0..100_u8) >= self.percent || self.spared.contains(&call.resource) {
            return None;
        }
        let dice = self.random.random_range(0..6_u8);
        Some(match (call.verb, dice) {
            (Verb::Watch, 0) => Fault::WatchExpired,
            (Verb::Watch, 1 | 2) => Fault::WatchCut(self.random.random_range(0..6)),
            (Verb::Watch, 3) => Fault::WatchDelayed(Duration::from_millis(self.random.random_range(100..4_000))),
            (_, 0) => Fault::Refused(500),
            (_, 1) => Fault::Refused(429),
            (_, 2) => Fault::TimeoutBefore,
            (_, 3) => Fault::TimeoutAfter,
            (_, 4) => Fault::ResetBefore,
            _ => Fault::ResetAfter,
        })
    }
}
