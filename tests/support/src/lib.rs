//! Shared by the tests, the demo and the benchmarks: replacements for the systems around Cistern.
//!
//! * [`apiserver`]: a small Kubernetes API server, in process or over HTTP.
//! * [`script`]: the engine of the script tests.
//! * [`lab`]: machines and pods made of namespaces.
//! * [`cluster`]: a real Kubernetes cluster on this machine.
//! * [`demo`]: the steps of `cargo xtask demo`.
//! * [`probe`]: clients and servers for test traffic.
//! * [`harness`]: shared by test programs with their own `main`.
//! * [`runtime`]: a container runtime, reduced to its calls of CNI plugins.

pub mod apiserver;
pub mod cluster;
pub mod demo;
pub mod harness;
pub mod lab;
pub mod probe;
pub mod runtime;
pub mod script;
