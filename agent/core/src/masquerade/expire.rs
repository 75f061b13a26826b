//! When a NAT entry has had its time.
