//! Decided on the node.
pub mod cluster_pool;
pub mod host_scope;
pub mod pod_cidr;
