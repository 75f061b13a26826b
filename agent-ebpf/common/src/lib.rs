//! Shared by the kernel programs and user space: keys and values of the maps, their names and sizes, the counters, and
//! the arithmetic on packets and ports, which is tested on the host.
//!
//! Every key and value is `repr(C)` without implicit padding: hash maps compare keys byte by byte, and `bpftool map
//! dump` prints the fields by name. Addresses and ports are byte arrays in network order, as on the wire.
//! Numbers (`ifindex`, seconds) are in host byte order.
//!
//! | module | contents |
//! |---|---|
//! | [`abi`] | keys and values |
//! | [`map`] | names and capacities of the maps |
//! | [`counter`] | packet counters |
//! | [`checksum`] | the incremental Internet checksum (RFC 1624) |
//! | [`header`] | IPv4 and TCP header fields, and their rewriting |
//! | [`ports`] | order in which ports are tried for a flow |
#![no_std]
#![warn(missing_docs)]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod checksum;
pub mod counter;
pub mod header;
pub mod map;
pub mod ports;
