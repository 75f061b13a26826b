//! IPAM: who owns a block, who holds an address.
pub mod cluster;
pub mod lease;
pub mod node;
