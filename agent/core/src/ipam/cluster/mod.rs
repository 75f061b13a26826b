//! Decided by the operator.
pub mod cluster_pool;
