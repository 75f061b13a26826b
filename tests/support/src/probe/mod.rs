//! Small TCP and UDP servers and clients that report what they observe: the source address of packets, and losses in a
//! stream.
//!
//! They run as a separate process (`cistern-probe`), so that a test or the demo can start them in a network namespace.
//! They do not check packet headers; checksums that only a strict receiver would reject are covered by `tests/ebpf`.

mod client;
mod server;

pub use client::{Answer, HttpAnswer, StreamReport, ask_http, ask_tcp, ask_udp, stream_tcp, stream_udp};
pub use server::serve;
