//! Leader election, judged from a Lease object.
pub mod evaluate;
