//! The ip-masq-agent file and the destinations it exempts.
//!
//! The file has the format of ip-masq-agent's first version, YAML or JSON. Its readers elsewhere read the same file in three ways
//! (`masquerade` 1.5); this is the one contract of Cistern: what is absent keeps its default, what is wrong anywhere
//! makes the whole file wrong, and a wrong file changes nothing that was in force before. So pods never lose their
//! exemptions, link-local addresses least of all, by a misspelling.
//!
//! | file | purpose |
//! |---|---|
//! | `file` | the format: keys, values, errors |
//! | `warning` | findings that keep nothing from being in force |
//! | `in_force` | which destinations are exempt: the file's, those of the last good file, or the defaults |

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
