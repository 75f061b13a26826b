//! Decided on the node.
pub mod pod_cidr;
