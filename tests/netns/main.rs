//! Tests on real network namespaces, as root.

mod agent;
mod cni;
mod lab;
mod netlink;
mod process;
