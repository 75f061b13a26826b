//! The CNI plugin: `cistern-cni`.
//!
//! ```text
//!  runtime ─ env, stdin ─► plugin ─ lease, confirm, release ─► agent (unix socket)
//!                            └───── interface ───────────────► rtnetlink
//! ```
//!
//! It has no async runtime and reads no file but what the call names: a pod's start waits for it.

pub mod deletion_queue;
mod interface;
mod plugin;

pub use plugin::main;

/// Name of the host side of an attachment's pair.
#[must_use]
pub fn host_side(container_id: &str, ifname: &str) -> String {
    interface::Pair::of(container_id, ifname).host
}
