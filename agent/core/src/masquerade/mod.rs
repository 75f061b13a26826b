//! Masquerading: which packets leave with the node's address, and which with the pod's.
//!
//! [`decide`] is a model of the kernel programs; a table of cases (`cases`) runs on both. A new rule is a counter
//! (`agent-ebpf/common/src/counter.rs`), a [`decide::Rule`] with its place in `decide.rs`, the same place in
//! `agent-ebpf/src/egress.rs` (`consider` for pods, `host` for the node's own flows), and rows in the table. The cache is asked
//! before the rules: a change that applies to open flows increments the settings' `epoch`. What a rule is configured with goes
//! from [`crate::settings`] through [`plan`] into a map (`agent/src/datapath/maps`).
#[cfg(any(test, feature = "cases"))]
pub mod cases;
pub mod decide;
pub mod expire;
pub mod explain;
pub mod ip_masq;
pub mod plan;
