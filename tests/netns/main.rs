//! Tests on real network namespaces, as root.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what a test cannot do without ends the test, with the place"
)]

mod agent;
mod burst;
mod chain;
mod choice;
mod cni;
mod kill;
mod lab;
mod netlink;
mod overlap;
mod process;
mod repair;
mod restart;
mod state;
