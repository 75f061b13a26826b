//! Tests on real network namespaces, as root.

mod lab;
mod netlink;
mod process;
