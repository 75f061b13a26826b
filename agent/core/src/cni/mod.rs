//! Types of the CNI specification, and the ordered steps of its verbs.
pub mod conflist;
pub mod plan;
pub mod spec;
