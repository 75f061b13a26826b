//! The kernel programs and the datapath in a real kernel. Requires root, and an agent with the eBPF object. Each test
//! runs in a thread with its own network and mount namespace, and so with its own devices and bpffs. Packets pass the
//! programs by `BPF_PROG_TEST_RUN`, or over veth pairs.
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
