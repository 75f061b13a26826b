//! Types of the CNI specification, the configuration that a runtime passes, and the ordered steps of the verbs.
pub mod conflist;
pub mod netconf;
pub mod plan;
pub mod refusal;
pub mod served;
pub mod spec;
