//! The ip-masq-agent file and the list in force.

use serde::{Deserialize, Serialize};

/// What is exempt when the file says nothing: `ip-masq-default-exclusions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DefaultExclusions {
    /// Cilium's eleven ranges: private, shared, documentation, benchmark and reserved addresses.
    #[default]
    Reserved,
    /// ip-masq-agent's three ranges: the private ones.
    Rfc1918,
}
