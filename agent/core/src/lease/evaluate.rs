//! Whether to acquire, renew, wait or step down.
