//! The demo: two nodes, four pods and a host outside, on this machine's kernel.
//!
//! Every line that it prints is something that was seen, and anything that is not as it should be is printed and makes
//! the demo fail; the rest of the story goes on as far as it can.
//!
//! What it does not prove: the API server is the small one of the tests, and no kubelet calls the plugin.

mod cluster;
mod story;

pub use cluster::PREFIX;
pub use story::{Options, clean, run};
