//! Configuration keys.
