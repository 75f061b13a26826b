//! Small TCP and UDP servers and clients that say what they saw: the source address of a packet, and what of a stream
//! got lost.
//!
//! They run as a process of their own (`cistern-probe`), so that a test or the demo can put them into a network
//! namespace. What they do not prove: nothing here looks at headers, so a checksum that only a strict receiver refuses
//! is for the tests under `tests/ebpf`.

mod client;
mod server;

pub use client::{Answer, HttpAnswer, StreamReport, ask_http, ask_tcp, ask_udp, stream_tcp, stream_udp};
pub use server::serve;
