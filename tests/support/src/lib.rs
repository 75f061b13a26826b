//! What the tests, the demo and the benchmarks share.

pub mod lab;
pub mod probe;
