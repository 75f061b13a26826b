//! Addresses, blocks and ranges.
pub mod block;
