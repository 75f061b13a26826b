//! Errors and retries of operations on a target.
pub mod backoff;
pub mod contention;

use std::time::Duration;

/// How retries treat an error (`architecture` decision 11).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// Likely temporary: retried with exponential back-off and jitter.
    Transient,
    /// The server asked for a pause; nothing is tried before `retry_after` has passed.
    Throttled {
        /// As requested by the server; without it the back-off's own delay applies.
        retry_after: Option<Duration>,
    },
    /// Needs an administrator or another change: not retried on a timer, only at each full pass.
    Permanent,
}

/// An error that knows its class.
pub trait Classify {
    /// The class, which decides about the next try.
    fn class(&self) -> ErrorClass;
}
