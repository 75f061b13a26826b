//! kubernetes
