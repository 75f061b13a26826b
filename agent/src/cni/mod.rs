//! The CNI plugin: `cistern-cni`.
//!
//! ```text
//!  runtime ─ env, stdin ─► plugin ─ lease, confirm, release ─► agent (unix socket)
//!                            └───── interface ───────────────► rtnetlink
//! ```
//!
//! It has no async runtime and reads no files except those named in the call, because pod starts wait for it.

mod add;
mod attachment;
mod check;
pub mod deletion_queue;
mod interface;
mod lock;
mod node;
mod plugin;

pub use lock::LOCK_FILE;
pub use plugin::main;

use crate::api::client::ClientError;
use crate::netlink::NetlinkError;
use cistern_core::cni::spec::{Code, Failure};
use nix::errno::Errno;

/// Name of the host side of an attachment's pair.
#[must_use]
pub fn host_side(container_id: &str, ifname: &str) -> String {
    interface::Pair::of(container_id, ifname).host
}

/// The agent's error as reported to the runtime.
fn agent_failure(error: &ClientError) -> Failure {
    let code = match error {
        _ if error.is_retryable() => Code::TryAgainLater,
        ClientError::Refused { .. } => Code::Agent,
        _ => Code::Decode,
    };
    Failure::new(code, error.to_string())
}

fn kernel_failure(error: &NetlinkError) -> Failure {
    let code = match error {
        NetlinkError::Namespace { .. } if error.is_missing() => Code::UnknownContainer,
        // The path is not a network namespace.
        NetlinkError::Namespace { errno: Errno::EINVAL | Errno::ENOTDIR | Errno::EISDIR, .. } => Code::Environment,
        NetlinkError::Namespace { .. } => Code::Io,
        _ => Code::Kernel,
    };
    Failure::new(code, error.to_string())
}
