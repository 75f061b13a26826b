//! What the tests, the demo and the benchmarks share: what stands in for the outside world.
//!
//! * [`apiserver`]: a small Kubernetes API server, in process or over HTTP.
//! * [`script`]: the engine of the script tests.
//! * [`lab`]: machines and pods out of namespaces.
//! * [`cluster`]: a real Kubernetes cluster on this machine.
//! * [`demo`]: the story that `cargo xtask demo` tells.
//! * [`probe`]: both ends of the traffic that tests and demo look at.
//! * [`harness`]: what test programs with a `main` of their own share.
//! * [`runtime`]: a container runtime, as far as it calls CNI plugins.

pub mod apiserver;
pub mod cluster;
pub mod demo;
pub mod harness;
pub mod lab;
pub mod probe;
pub mod runtime;
pub mod script;
