//! Controllers, one loop per concern: wait until all inputs are synced; then, on any change, snapshot, plan, publish.
//! No I/O.

pub mod condition;
pub mod ipam_cluster;
pub mod masquerade;
pub mod next_hops;
pub mod node;
pub mod notices;
pub mod orphans;
pub mod peers;
pub mod routes;
pub mod uninstall;
