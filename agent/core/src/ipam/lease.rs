//! Pod leases.
