//! Cistern's decisions, as pure functions and small state machines.
//!
//! Nothing here does I/O, reads a clock or draws a random number: time, randomness and environment are arguments
//! (`clippy.toml` bans the functions that would break this). The package `cistern` executes the decisions.
//!
//! | module | decides |
//! |---|---|
//! | [`settings`] | meaning and validity of configuration keys |
//! | [`ip`] | division of CIDRs into blocks, choice of addresses |
//! | [`ipam`] | pod CIDRs of nodes, addresses of pods |
//! | [`masquerade`] | which packets leave with the node's address |
//! | [`cni`] | types of the CNI specification, steps of ADD, CHECK and DEL |
//! | [`election`] | leader election, by the state of a Lease object |
//! | [`format`](mod@format) | compatibility of persistent documents between builds |
//! | [`moment`] | order of events, independent of the wall clock |
//! | [`uninstall`] | requests to clean a node, and answers |
//! | [`reconcile`] | classes of errors, and retry times |

pub mod cni;
pub mod election;
pub mod format;
pub mod ip;
pub mod ipam;
pub mod masquerade;
pub mod moment;
pub mod reconcile;
pub mod settings;
mod spelling;
pub mod uninstall;
