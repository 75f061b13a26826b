//! Every decision of Cistern, as pure functions and small state machines.
//!
//! Nothing here does I/O, reads a clock or draws a random number: time, randomness and environment are arguments
//! (`clippy.toml` bans the functions that would break this). The package `cistern` does what is decided here, under the
//! same feature names.
//!
//! | module | decides |
//! |---|---|
//! | [`settings`] | what the configuration keys mean, and which are refused |
//! | [`ip`] | carving a CIDR into blocks, drawing addresses from a block |
//! | [`ipam`] | which node owns which block, which pod holds which address |
//! | [`masquerade`] | which packets leave under the node's address |
//! | [`cni`] | the CNI specification's types, and the steps of ADD, CHECK and DEL |
//! | [`lease`] | who leads, judged from a Lease object |
//! | [`format`] | whether a build understands a document that another build wrote |
//! | [`moment`] | which of two things came first, whatever the clocks say |
//! | [`uninstall`] | what a request to clean a node and its answer say |
//! | [`reconcile`] | what an error means for the next try, and when that is |

pub mod cni;
pub mod format;
pub mod ip;
pub mod ipam;
pub mod lease;
pub mod masquerade;
pub mod moment;
pub mod reconcile;
pub mod settings;
mod spelling;
pub mod uninstall;
