//! What the tests, the demo and the benchmarks share: what stands in for the outside world.
//!
//! * [`apiserver`]: a small Kubernetes API server, in process or over HTTP.
//! * [`script`]: the engine of the script tests.
//! * [`probe`]: both ends of the traffic that tests and demo look at.

pub mod apiserver;
pub mod lab;
pub mod probe;
pub mod script;
