//! Desired against observed: how an error is classed, when to try again.
pub mod backoff;

use std::time::Duration;

/// How an error is treated by everything that retries (`architecture` decision 11).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// Likely to pass by itself: retried with exponential back-off and jitter.
    Transient,
    /// The other side asked for silence; nothing is tried before `retry_after` has passed.
    Throttled {
        /// As told by the other side; without it the back-off's own delay counts.
        retry_after: Option<Duration>,
    },
    /// Will not pass without somebody acting: never enters the fast retry path, tried again at each full pass only.
    Permanent,
}

/// An error that knows its class.
pub trait Classify {
    /// The class that decides about the next try.
    fn class(&self) -> ErrorClass;
}
