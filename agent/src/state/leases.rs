//! Lease records, one file each, so that the cost of a write does not depend on the number of pods.

use super::{SetAside, StateDir, StateError, make_dir, read_or_set_aside, replace, set_aside};
use cistern_core::ipam::lease::{Change, Record, RecordKey, Stored};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Name of the directory below the state directory.
pub(super) const DIRECTORY: &str = "leases";

/// The directory of lease records.
#[derive(Debug, Clone)]
pub struct LeaseFiles {
    directory: PathBuf,
}

impl LeaseFiles {
    /// Opens `leases` below the state directory. Another file of that name is set aside.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn open(state: &StateDir) -> Result<(Self, Option<SetAside>), StateError> {
        let directory = state.root().join(DIRECTORY);
        let in_place = directory.symlink_metadata().is_ok() && !directory.is_dir();
        let aside = in_place.then(|| set_aside(&directory, "expected a directory".to_owned()));
        make_dir(&directory)?;
        Ok((Self { directory }, aside))
    }

    /// Every record, and the files that could not be read and were set aside. Half-written files of a killed process
    /// were never in force and are removed. Records of an older format are written again; kinds of record that only a newer
    /// build knows are left as they are.
    ///
    /// # Errors
    /// When the directory cannot be read: then nothing is known, and nothing may be handed out.
    pub fn read(&self) -> Result<(Vec<Record>, Vec<SetAside>), StateError> {
        let failed = |source| StateError::Io { action: "read", path: self.directory.clone(), source };
        let (mut records, mut aside) = (Vec::new(), Vec::new());
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(failed)? {
            paths.push(entry.map_err(failed)?.path());
        }
        paths.sort();
        for path in paths {
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("json") => {}
                Some("new") => {
                    // One that remains is overwritten by the next write of its record.
                    if let Err(error) = std::fs::remove_file(&path) {
                        tracing::warn!(path = %path.display(), %error, "a half-written record is not removed");
                    }
                    continue;
                }
                _ => continue,
            }
            let parse = |bytes: &[u8]| {
                let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
                Record::from_json(text).map_err(|error| error.to_string())
            };
            let (stored, set_aside) = read_or_set_aside(&path, parse);
            aside.extend(set_aside);
            match stored {
                Some(Stored::Current(record)) => records.push(record),
                Some(Stored::Older(record)) => {
                    if let Err(error) = self.write(&Change::Put(record.clone())) {
                        tracing::warn!(path = %path.display(), %error, "a record of an older format stays as it is");
                    }
                    records.push(record);
                }
                Some(Stored::Unknown { kind }) => {
                    tracing::warn!(path = %path.display(), kind, "a record of a newer build is left alone");
                }
                None => {}
            }
        }
        Ok((records, aside))
    }

    /// Makes a change: a record is replaced by rename, so that a killed process leaves either the old or the new one.
    ///
    /// # Errors
    /// The failed operation and file.
    pub fn write(&self, change: &Change) -> Result<(), StateError> {
        match change {
            Change::Put(record) => {
                let path = self.path(&record.key());
                let text = record.to_json().map_err(|error| StateError::Io {
                    action: "encode",
                    path: path.clone(),
                    source: std::io::Error::other(error),
                })?;
                replace(&path, text.as_bytes())
            }
            Change::Remove(key) => {
                let path = self.path(key);
                match std::fs::remove_file(&path) {
                    Err(source) if source.kind() != ErrorKind::NotFound => {
                        Err(StateError::Io { action: "remove", path, source })
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// Keys have values chosen by others (container IDs), so the name is a hash, prefixed by the kind for readability.
    fn path(&self, key: &RecordKey) -> PathBuf {
        let text = key.to_string();
        let kind = text.split(' ').next().unwrap_or("record");
        let hash = Sha256::digest(text.as_bytes());
        let hex: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(format!("{kind}-{hex}.json"))
    }
}

/// The records as they are on disk: a directory that somebody deletes under a running agent is made again with all of them.
#[derive(Debug)]
pub struct KeptLeases {
    files: LeaseFiles,
    records: BTreeMap<RecordKey, Record>,
}

impl KeptLeases {
    /// Keeps these records, as read from `files`.
    #[must_use]
    pub fn new(files: LeaseFiles, records: &[Record]) -> Self {
        let records = records.iter().map(|record| (record.key(), record.clone())).collect();
        Self { files, records }
    }

    /// See [`LeaseFiles::write`].
    ///
    /// # Errors
    /// The failed operation and file.
    pub fn write(&mut self, change: &Change) -> Result<(), StateError> {
        if !self.files.directory.is_dir() {
            self.make_again()?;
        }
        self.files.write(change)?;
        match change {
            Change::Put(record) => self.records.insert(record.key(), record.clone()),
            Change::Remove(key) => self.records.remove(key),
        };
        Ok(())
    }

    fn make_again(&self) -> Result<(), StateError> {
        let directory = &self.files.directory;
        make_dir(directory)?;
        for record in self.records.values() {
            // One that is not written is missing at the next start, which then finds its pod by the device.
            self.files.write(&Change::Put(record.clone()))?;
        }
        tracing::warn!(
            path = %directory.display(),
            "the directory of lease records was deleted under the running agent; it is there again, with all records"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cistern_core::ipam::lease::{Attachment, Tombstone};

    fn tombstone(id: &str) -> Record {
        Record::Tombstone(Tombstone {
            began: None,
            attachment: Attachment { container_id: id.into(), ifname: "eth0".into() },
            since: "2026-01-01T00:00:00Z".parse().unwrap(),
            until: "2026-01-01T00:01:00Z".parse().unwrap(),
        })
    }

    #[test]
    fn records_survive_and_removed_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let files = LeaseFiles::open(&StateDir::open(dir.path()).unwrap()).unwrap().0;
        let (a, b) = (tombstone("a"), tombstone("../../b"));
        for change in [Change::Put(a.clone()), Change::Put(b.clone()), Change::Remove(a.key()), Change::Remove(a.key())]
        {
            files.write(&change).unwrap();
        }
        assert_eq!(files.read().unwrap(), (vec![b], vec![]));
    }

    #[test]
    fn a_directory_deleted_under_the_agent_is_made_again_with_all_records() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path().join("state")).unwrap();
        let files = LeaseFiles::open(&state).unwrap().0;
        files.write(&Change::Put(tombstone("a"))).unwrap();
        let mut kept = KeptLeases::new(files.clone(), &files.read().unwrap().0);
        for change in [Change::Put(tombstone("b")), Change::Put(tombstone("c")), Change::Remove(tombstone("c").key())] {
            kept.write(&change).unwrap();
        }
        std::fs::remove_dir_all(state.root()).unwrap();
        kept.write(&Change::Put(tombstone("d"))).unwrap();
        let mut records = files.read().unwrap().0;
        records.sort_by_key(Record::key);
        assert_eq!(records, ["a", "b", "d"].map(tombstone));
    }

    #[test]
    fn a_damaged_record_is_set_aside_and_the_others_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let files = LeaseFiles::open(&StateDir::open(dir.path()).unwrap()).unwrap().0;
        for id in ["a", "b"] {
            files.write(&Change::Put(tombstone(id))).unwrap();
        }
        let broken = files.path(&tombstone("a").key());
        std::fs::write(&broken, "{\"format\": 99, \"kind\": \"tombstone\"}").unwrap();
        std::fs::write(broken.with_extension("new"), "{\"for").unwrap();
        let (records, aside) = files.read().unwrap();
        assert_eq!(records, [tombstone("b")]);
        assert_eq!(aside.len(), 1);
        assert!(aside[0].reason.contains("99"), "{}", aside[0].reason);
        assert!(aside[0].kept_as.exists() && !broken.exists() && !broken.with_extension("new").exists());
    }

    #[test]
    fn an_older_format_is_written_again_and_what_only_a_newer_build_knows_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let files = LeaseFiles::open(&StateDir::open(dir.path()).unwrap()).unwrap().0;
        let record = tombstone("a");
        files.write(&Change::Put(record.clone())).unwrap();
        let path = files.path(&record.key());
        let current = std::fs::read_to_string(&path).unwrap();
        let version = current.split(r#""kind""#).next().unwrap();
        std::fs::write(&path, current.replace(version, r#"{"format":1,"#)).unwrap();
        let newer = path.with_file_name("volume-0123456789ab.json");
        let text = r#"{"format":7,"oldest_reader":2,"kind":"volume","size":[3]}"#;
        std::fs::write(&newer, text).unwrap();
        assert_eq!(files.read().unwrap(), (vec![record], vec![]));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), current);
        assert_eq!(std::fs::read_to_string(&newer).unwrap(), text);
    }
}
