//! Decided on the node.
pub mod host_scope;
pub mod pod_cidr;
