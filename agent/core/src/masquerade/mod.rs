//! Masquerading: which packets leave with the node's address, and which with the pod's.
#[cfg(any(test, feature = "cases"))]
pub mod cases;
pub mod decide;
pub mod expire;
pub mod explain;
pub mod ip_masq;
pub mod plan;
