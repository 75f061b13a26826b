//! Links, addresses, routes and neighbours of the kernel, by rtnetlink (`man 7 rtnetlink`).
//!
//! One synchronous [`Handle`] serves the agent and the CNI plugin: a call is one `send` and one `recv` on a socket, which
//! the kernel answers within microseconds. The agent calls it from a blocking
//! context; the plugin has no async runtime.
//!
//! | module | purpose |
//! |---|---|
//! | [`link`] `address` `route` `neighbour` | build [`Request`]s, and read objects |
//! | `handle` | the socket |
//! | [`targets`] | routes and the router address as targets of the reconciler |
//! | [`monitor`] | publishes the node's network whenever it changes |
//! | [`namespace`] | network namespaces: open, compare, run code inside |
//!
//! A change is a [`Request`] value. Several of them are sent in one message and executed in order:
//!
//! ```no_run
//! use cistern::netlink::{Handle, link, route};
//! # fn main() -> Result<(), cistern::netlink::NetlinkError> {
//! let mut handle = Handle::open()?;
//! if let Some(device) = handle.link_by_name("eth0")? {
//!     let to_node = route::Route::via("10.244.2.0/24".parse().unwrap(), "192.0.2.2".parse().unwrap(), device.index);
//!     handle.apply(&[link::up(device.index), route::replace(&to_node)])?;
//! }
//! # Ok(())
//! # }
//! ```

pub mod address;
mod error;
mod handle;
pub mod link;
pub mod monitor;
pub mod namespace;
pub mod neighbour;
pub mod route;
pub mod targets;

pub use error::NetlinkError;
pub use handle::{Handle, Request};

/// An Ethernet address.
pub type Mac = [u8; 6];
