//! Wiring: the command line, the settings, the two roles.

pub mod operator_role;
pub mod supervisor;
