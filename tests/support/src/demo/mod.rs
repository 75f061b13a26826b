//! The demo: two nodes, four pods and an external host, on this machine's kernel.
//!
//! Every line that it prints is an observation. A failed check is printed and makes the demo fail; the remaining steps
//! run as far as possible.
//!
//! Limits: the API server is the small one of the tests, and no kubelet calls the plugin.

mod cluster;
mod story;

pub use cluster::PREFIX;
pub use story::{Options, clean, run};
