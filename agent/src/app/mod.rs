//! Wiring.

pub mod supervisor;
