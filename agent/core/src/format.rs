//! Versions of persistent documents: state files, queue entries, ConfigMaps and annotations.
//!
//! Every such document has the format it was written in and the oldest format whose reader understands it. A build that
//! adds a field or a kind of record increments [`Version::format`] only: the previous build reads the document and
//! ignores what it does not know. A change that the previous build would misread also raises
//! [`Version::oldest_reader`].

use serde::{Deserialize, Serialize};

/// The version fields of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The format that the document was written in.
    pub format: u32,
    /// The oldest format whose reader understands the document. Documents of the first release do not have it: only
    /// their own format understands them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_reader: Option<u32>,
}

/// A document of a format that this build does not understand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("format {format} needs a reader of format {oldest_reader} or newer; this build reads format {own}")]
pub struct Unsupported {
    /// The format that the document was written in.
    pub format: u32,
    /// The oldest format whose reader understands it.
    pub oldest_reader: u32,
    /// The format of this build.
    pub own: u32,
}

impl Version {
    /// The version that a build writes. The variant for tests of upgrades writes the next format, which the build before has to
    /// read.
    #[must_use]
    pub const fn new(format: u32, oldest_reader: u32) -> Self {
        let format = if cfg!(feature = "test-variant") { format + 1 } else { format };
        Self { format, oldest_reader: Some(oldest_reader) }
    }

    /// Checks that a reader of format `own` understands the document. Documents of older formats are always accepted;
    /// the reader migrates them.
    ///
    /// # Errors
    /// The oldest reader is newer than `own`.
    pub fn check(self, own: u32) -> Result<(), Unsupported> {
        let oldest_reader = self.oldest_reader.unwrap_or(self.format);
        if oldest_reader <= own { Ok(()) } else { Err(Unsupported { format: self.format, oldest_reader, own }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_document_is_read_as_long_as_it_names_an_older_reader() {
        assert_eq!(Version::new(3, 1).check(2), Ok(()));
        assert_eq!(Version::new(3, 3).check(2), Err(Unsupported { format: 3, oldest_reader: 3, own: 2 }));
        let first: Version = serde_json::from_str(r#"{"format":2}"#).unwrap();
        assert!(first.check(2).is_ok() && first.check(3).is_ok() && first.check(1).is_err());
    }
}
