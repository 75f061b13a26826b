//! The ip-masq-agent file and the CIDRs it excludes from masquerading.
//!
//! The file has the format of ip-masq-agent's first version, YAML or JSON. Other implementations read it in three
//! different ways (`masquerade` 1.5). Cistern's rules: an absent key keeps its default, an error anywhere invalidates
//! the whole file, and an invalid file leaves the previous state in force. A misspelling therefore never removes
//! exclusions, in particular not that of link-local addresses.
//!
//! | file | purpose |
//! |---|---|
//! | `file` | the format: keys, values, errors |
//! | `warning` | problems that do not invalidate the file |
//! | `in_force` | the CIDRs in force: the file's, those of the last valid file, or the defaults |

mod file;
mod in_force;
mod warning;

pub use file::{
    ConfigFile, DEFAULT_RESYNC_INTERVAL, EntryError, FileError, MAX_DESTINATIONS, MIN_RESYNC_INTERVAL, merge, parse,
};
pub use in_force::{DefaultExclusions, Exclusions, Found, Input, ListSource, Outcome, decide};
pub use warning::Warning;

#[cfg(test)]
mod tests;
