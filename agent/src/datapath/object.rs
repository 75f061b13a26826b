//! The embedded eBPF object.

use std::fmt::Write as _;
use std::sync::OnceLock;

use sha2::{Digest as _, Sha256};

#[cfg(cistern_ebpf)]
const OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/cistern.o"));
#[cfg(not(cistern_ebpf))]
const OBJECT: &[u8] = &[];

/// The object; `None` if the agent was built without it.
pub(super) fn object() -> Option<&'static [u8]> {
    present().then_some(OBJECT)
}

/// Whether the agent was built with the eBPF object.
#[must_use]
pub const fn present() -> bool {
    cfg!(cistern_ebpf)
}

/// Identifies the object: the first 12 hex digits of its SHA-256. `None` if there is none.
#[must_use]
pub fn build_id() -> Option<&'static str> {
    static ID: OnceLock<String> = OnceLock::new();
    object().map(|object| {
        ID.get_or_init(|| {
            Sha256::digest(object).iter().take(6).fold(String::new(), |mut text, byte| {
                // Writing to a string cannot fail.
                let _ = write!(text, "{byte:02x}");
                text
            })
        })
        .as_str()
    })
}
