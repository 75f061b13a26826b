//! Identity of this build.

use crate::datapath;

/// The version alone.
#[must_use]
pub fn short() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The version, and whether the build carries the kernel programs.
#[must_use]
pub fn long() -> String {
    match datapath::build_id() {
        Some(id) => format!("{} (eBPF object {id})", short()),
        None => format!(
            "{} (built without eBPF object: masquerading is refused; build it with `cargo xtask build`)",
            short()
        ),
    }
}
