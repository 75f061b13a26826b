//! Decisions of the operator.
pub mod cluster_pool;
