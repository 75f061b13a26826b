//! IPAM: who owns a block, who holds an address.
//!
//! | module | owns |
//! |---|---|
//! | [`cluster`] | blocks: which node has which pod CIDR |
//! | [`node`] | addresses of this node's pod CIDR |
//! | [`lease`] | who holds an address of this node, since when, and whether that is final |
pub mod cluster;
pub mod lease;
pub mod node;

use jiff::Timestamp;
use std::time::Duration;

/// The moment `by` after `from`; the end of time when that is past it.
fn later(from: Timestamp, by: Duration) -> Timestamp {
    from.checked_add(by).unwrap_or(Timestamp::MAX)
}
