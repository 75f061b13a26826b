//! HTTP/JSON over the unix socket of the agent, and probes over TCP.
//!
//! [`types`] is the contract; [`client`] is blocking and has no async runtime, because the CNI plugin must start in
//! about a millisecond.
pub mod client;
pub mod http;
pub mod server;
pub mod types;
