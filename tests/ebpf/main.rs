//! The kernel programs and the datapath in a real kernel. Needs root, and the eBPF object in the agent.
//!
//! Each test runs in a thread with a network and a mount namespace of its own, hence with devices and a bpffs of its
//! own. Packets go through the programs by `BPF_PROG_TEST_RUN`, or over virtual Ethernet pairs.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, in the functions that tests share too"
)]

mod cases;
mod dump;
mod flows;
mod frame;
mod isolated;
mod kernel;
mod live;
mod pins;
mod upgrade;
