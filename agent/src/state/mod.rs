//! Persistent state of the agent: pod leases, last inputs from the API server, last valid ip-masq-agent list.
//!
//! Files are JSON, written under a temporary name and renamed, without fsync (`ipam` decision 8): `kill -9` leaves
//! complete files, and after a power loss the affected pods' namespaces no longer exist. A file that is unreadable or
//! of a format that this build would misread is set aside under another name and reported; it is never overwritten.

mod leases;
pub mod remembered;
mod served;

pub use leases::{KeptLeases, LeaseFiles};
pub use served::ServedMarker;

use cistern_core::cni::served::Served;
use cistern_core::format::Version;
use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default of `state-dir`.
pub const STATE_DIR: &str = "/var/lib/cistern";

/// Directory of queued DELs, below the state directory.
const QUEUE: &str = "cni-queue";

/// Reading or writing state failed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// An I/O error; the previous content is unchanged.
    #[error("{action} {path}: {source}")]
    Io {
        /// `read`, `write`, `rename`, `create`, `remove`
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The value cannot be serialised as JSON.
    #[error("encode {path}: {source}")]
    Encode {
        /// The file to write.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
}

/// An unreadable file that was set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// Its former path.
    pub path: PathBuf,
    /// Its current path; the former one if it could not be renamed.
    pub kept_as: PathBuf,
    /// Why it is unreadable.
    pub reason: String,
}

impl std::fmt::Display for SetAside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "state file {} cannot be read ({}); it was renamed to {} and is not used",
            self.path.display(),
            self.reason,
            self.kept_as.display()
        )
    }
}

/// A directory of state files.
#[derive(Debug, Clone)]
pub struct StateDir {
    root: PathBuf,
}

impl StateDir {
    /// Opens the directory, creating it if necessary.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StateError> {
        let root = root.into();
        make_dir(&root)?;
        Ok(Self { root })
    }

    /// The directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Waits until no other process uses this directory, and excludes others while the guard lives: two lease owners
    /// would allocate an address twice.
    ///
    /// # Errors
    /// The lock file cannot be created.
    pub async fn lock(&self) -> Result<DirLock, StateError> {
        let path = self.root.join("lock");
        let io = |action: &'static str, source: std::io::Error| StateError::Io { action, path: path.clone(), source };
        let mut warned = false;
        loop {
            // Opened for reading only: the file system may be, or become, read-only.
            if !path.exists() {
                std::fs::File::create(&path).map_err(|source| io("create", source))?;
            }
            let file = std::fs::File::open(&path).map_err(|source| io("open", source))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(DirLock { _lock: lock }),
                Err((_, Errno::EWOULDBLOCK)) => {
                    if !warned {
                        tracing::warn!(path = %path.display(), "waiting for another agent on this node to end");
                        warned = true;
                    }
                    tokio::time::sleep(LOCK_RETRY).await;
                }
                Err((_, errno)) => return Err(io("lock", errno.into())),
            }
        }
    }

    /// Deletes the agent's files, except lease records: pods may still have their addresses. The directory, which may
    /// be a mount, and foreign files are kept.
    ///
    /// # Errors
    /// The first error; the other files are deleted nevertheless.
    pub fn clear(&self) -> Result<(), StateError> {
        let entries = std::fs::read_dir(&self.root).map_err(|source| StateError::Io {
            action: "read",
            path: self.root.clone(),
            source,
        })?;
        let ours = |name: &str| name == "lock" || name.ends_with(".json") || name.contains(".unreadable-");
        let files = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(ours));
        // A queued DEL belongs to a lease that is kept.
        let lock = self.root.join(QUEUE).join("lock");
        // The pod CIDR goes with the installation; where pods have addresses of it, the next one finds it by those.
        let records = std::fs::read_dir(self.root.join(leases::DIRECTORY)).into_iter().flatten().flatten();
        let is_grant = |name: &str| name.starts_with("grant-");
        let grants = records.filter(|entry| entry.file_name().to_str().is_some_and(is_grant));
        let grants = grants.map(|entry| entry.path());
        let outcome = remove_files(files.map(|entry| entry.path()).chain([lock]).chain(grants));
        for directory in [leases::DIRECTORY, QUEUE] {
            // Kept if not empty.
            let _ = std::fs::remove_dir(self.root.join(directory));
        }
        outcome
    }

    /// Reads `name`. A file that is not there is none; one that cannot be read, or whose version says that a reader of
    /// `format` would misread it, is set aside and none, and the report says where it went.
    #[must_use]
    pub fn read<T: DeserializeOwned>(&self, name: &str, format: Option<u32>) -> (Option<T>, Option<SetAside>) {
        read_or_set_aside(&self.root.join(name), |bytes| {
            if let Some(format) = format {
                check_format(bytes, format)?;
            }
            serde_json::from_slice(bytes).map_err(|error| error.to_string())
        })
    }

    /// Writes `name` and renames it into place.
    ///
    /// # Errors
    /// An I/O error; the previous content is unchanged.
    pub fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StateError> {
        write_renamed(&self.root.join(name), value)
    }
}

/// Excludes other agents from a state directory while it lives; the kernel releases the lock with the process.
#[derive(Debug)]
pub struct DirLock {
    _lock: Flock<std::fs::File>,
}

const LOCK_RETRY: Duration = Duration::from_millis(100);

/// The marker of this boot, in a directory below `/run`, which a reboot empties (`ipam` decision 8).
#[derive(Debug, Clone)]
pub struct BootMarker {
    path: PathBuf,
}

impl BootMarker {
    /// The marker in this directory.
    #[must_use]
    pub fn new(run_dir: &Path) -> Self {
        Self { path: run_dir.join("boot") }
    }

    fn served(&self) -> PathBuf {
        self.path.with_file_name("served")
    }

    /// Writes the file beside it that says when this node served pods.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn set_served(&self, served: &Served) -> Result<(), StateError> {
        if let Some(directory) = self.path.parent() {
            make_dir(directory)?;
        }
        write_renamed(&self.served(), served)
    }

    /// Deletes the marker and the file beside it, so that the next agent checks the leases as after a reboot.
    ///
    /// # Errors
    /// A file cannot be deleted.
    pub fn clear(&self) -> Result<(), StateError> {
        remove_files([self.path.clone(), self.served()].into_iter())
    }

    /// Whether an agent has completed the cleanup after the reboot, since this boot.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.path.exists()
    }

    /// The time of the boot by the wall clock of this boot's first agent, which is the origin of the leases' clock.
    /// `None` before the first agent, or if the marker does not have it.
    #[must_use]
    pub fn began(&self) -> Option<Timestamp> {
        std::fs::read_to_string(&self.path).ok()?.trim().parse().ok()
    }

    /// Records that the cleanup after the reboot is complete, and the time of the boot.
    ///
    /// # Errors
    /// The marker cannot be created.
    pub fn set(&self, began: Timestamp) -> Result<(), StateError> {
        if let Some(directory) = self.path.parent() {
            make_dir(directory)?;
        }
        replace(&self.path, began.to_string().as_bytes())
    }
}

/// Deletes files, if they exist. All are tried; returns the first error.
fn remove_files(paths: impl Iterator<Item = PathBuf>) -> Result<(), StateError> {
    let mut outcome = Ok(());
    for path in paths {
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != ErrorKind::NotFound && outcome.is_ok() => {
                outcome = Err(StateError::Io { action: "remove", path, source });
            }
            _ => {}
        }
    }
    outcome
}

fn make_dir(path: &Path) -> Result<(), StateError> {
    std::fs::create_dir_all(path).map_err(|source| StateError::Io { action: "create", path: path.to_owned(), source })
}

/// The format is read first, because fields of other formats may differ.
fn check_format(bytes: &[u8], own: u32) -> Result<(), String> {
    let version: Version = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    version.check(own).map_err(|error| error.to_string())
}

/// Reads a file by `parse`. If it is unreadable, or a directory, it is set aside.
fn read_or_set_aside<T>(path: &Path, parse: impl FnOnce(&[u8]) -> Result<T, String>) -> (Option<T>, Option<SetAside>) {
    let value = match std::fs::read(path) {
        Err(source) if source.kind() == ErrorKind::NotFound => return (None, None),
        Err(source) => Err(source.to_string()),
        Ok(bytes) => parse(&bytes),
    };
    match value {
        Ok(value) => (Some(value), None),
        Err(reason) => (None, Some(set_aside(path, reason))),
    }
}

/// Renames `path` to the first free `NAME.unreadable-N`.
fn set_aside(path: &Path, reason: String) -> SetAside {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut number = 1_u32;
    let kept_as = loop {
        let candidate = path.with_file_name(format!("{name}.unreadable-{number}"));
        if !candidate.exists() {
            break candidate;
        }
        number += 1;
    };
    match std::fs::rename(path, &kept_as) {
        Ok(()) => SetAside { path: path.to_owned(), kept_as, reason },
        // Without a rename it cannot be overwritten either.
        Err(error) => {
            let reason = format!("{reason}; nor can it be renamed: {error}");
            SetAside { path: path.to_owned(), kept_as: path.to_owned(), reason }
        }
    }
}

/// Writes a file under a temporary name and renames it into place. Deletes incomplete ones.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), StateError> {
    let temporary = path.with_extension("new");
    let io = |action: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| StateError::Io { action, path, source }
    };
    let written = std::fs::write(&temporary, bytes)
        .map_err(io("write", &temporary))
        .and_then(|()| std::fs::rename(&temporary, path).map_err(io("rename", path)));
    if written.is_err() {
        // Even an empty file needs space on a full disk.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

fn write_renamed<T: Serialize>(path: &Path, value: &T) -> Result<(), StateError> {
    let bytes = serde_json::to_vec(value).map_err(|source| StateError::Encode { path: path.to_owned(), source })?;
    replace(path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path().join("state")).unwrap();
        assert_eq!(state.read::<u32>("node.json", None), (None, None));
        state.write("node.json", &7_u32).unwrap();
        assert_eq!(state.read::<u32>("node.json", None), (Some(7), None));
    }

    #[test]
    fn clearing_keeps_the_leases_of_pods_and_what_others_put_there() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path().join("state")).unwrap();
        LeaseFiles::open(&state).unwrap();
        state.write("node.json", &7_u32).unwrap();
        let (lease, other) = (state.root().join("leases/pod-1.json"), state.root().join("notes.txt"));
        std::fs::write(&lease, "{}").unwrap();
        std::fs::write(state.root().join("leases/grant-1.json"), "{}").unwrap();
        std::fs::write(&other, "somebody's").unwrap();
        state.clear().unwrap();
        assert!(lease.exists() && other.exists() && !state.root().join("node.json").exists());
        std::fs::remove_file(&lease).unwrap();
        std::fs::remove_file(&other).unwrap();
        state.clear().unwrap();
        assert_eq!(std::fs::read_dir(state.root()).unwrap().count(), 0);
        let marker = BootMarker::new(dir.path());
        marker.set(Timestamp::UNIX_EPOCH).unwrap();
        marker.clear().unwrap();
        marker.clear().unwrap();
        assert!(!marker.is_set());
    }

    #[test]
    fn the_marker_is_there_once_it_was_set() {
        let dir = tempfile::tempdir().unwrap();
        let marker = BootMarker::new(&dir.path().join("run"));
        assert_eq!((marker.is_set(), marker.began()), (false, None));
        let began = "2026-01-01T00:00:00.25Z".parse().unwrap();
        marker.set(began).unwrap();
        marker.set(began).unwrap();
        assert_eq!((marker.is_set(), marker.began()), (true, Some(began)));
        std::fs::write(dir.path().join("run/boot"), "").unwrap();
        assert_eq!((marker.is_set(), marker.began()), (true, None), "as an earlier version wrote it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_agent_waits_until_the_first_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let first = state.lock().await.unwrap();
        let second = tokio::time::timeout(Duration::from_secs(5), state.lock()).await;
        assert!(second.is_err());
        drop(first);
        state.lock().await.unwrap();
    }

    #[test]
    fn an_unreadable_file_is_kept_under_another_name_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        for number in 1..=2 {
            std::fs::write(dir.path().join("node.json"), b"{\"half\": ").unwrap();
            let (value, aside) = state.read::<u32>("node.json", None);
            let aside = aside.unwrap();
            assert_eq!(value, None);
            assert!(aside.kept_as.ends_with(format!("node.json.unreadable-{number}")));
            assert_eq!(std::fs::read(aside.kept_as).unwrap(), b"{\"half\": ");
        }
        assert!(!dir.path().join("node.json").exists());
    }

    #[test]
    fn a_directory_and_another_format_are_set_aside_too() {
        #[derive(Debug, PartialEq, serde::Deserialize)]
        struct Value {
            format: u32,
        }
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        std::fs::create_dir(dir.path().join("node.json")).unwrap();
        let (value, aside) = state.read::<Value>("node.json", Some(1));
        assert!(value.is_none() && aside.unwrap().kept_as.is_dir());
        std::fs::write(dir.path().join("node.json"), r#"{"format":2,"other":[]}"#).unwrap();
        let (value, aside) = state.read::<Value>("node.json", Some(1));
        assert!(value.is_none() && aside.unwrap().reason.contains("format 2"));
        std::fs::write(dir.path().join("node.json"), r#"{"format":1}"#).unwrap();
        assert_eq!(state.read("node.json", Some(1)), (Some(Value { format: 1 }), None));
    }

    #[test]
    fn a_write_that_fails_leaves_the_old_content() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        state.write("node.json", &1_u32).unwrap();
        // A directory where the temporary file must go makes the write fail before the rename.
        std::fs::create_dir(dir.path().join("node.new")).unwrap();
        assert!(state.write("node.json", &2_u32).is_err());
        assert_eq!(state.read::<u32>("node.json", None), (Some(1), None));
    }
}
