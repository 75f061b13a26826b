//! Exponential back-off with jitter.
