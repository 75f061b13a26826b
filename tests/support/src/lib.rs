//! Support for tests and for the demo: what stands in for the outside world.
//!
//! * [`apiserver`]: a small Kubernetes API server, in process or over HTTP.

pub mod apiserver;
