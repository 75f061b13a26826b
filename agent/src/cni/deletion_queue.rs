//! DELs queued on disk until an agent executes them (`ipam` P10).
//!
//! One file for each attachment, named by a hash of it, so that a repeated DEL is one file. The plugin holds the lock
//! shared while it writes, the agent exclusively while it reads: a DEL is either seen by the agent's replay or finds the
//! agent answering.
//!
//! Plugin and agent may be of different builds. An entry names its format and the oldest format whose reader understands it; those of
//! the first release name neither. An entry that this build does not understand is kept as it is, for the build that does.

use cistern_core::format::Version;
use cistern_core::moment::Moment;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Default directory of the queue.
pub const QUEUE_DIR: &str = "/var/lib/cistern/cni-queue";

/// More are refused, and the runtime tries again: a node whose agent is away for so long needs an administrator.
pub const LIMIT: usize = 256;

/// Name prefix of temporary files, followed by the process ID.
const TEMPORARY: &str = "new-";

/// The format of an entry. Format 1, of the first release, has neither version nor kind.
const FORMAT: u32 = 2;

/// Readers of format 1 ignore what format 2 adds.
const OLDEST_READER: u32 = 1;

/// The kind of every entry of this build.
const DEL: &str = "del";

/// Timeout for the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A queued DEL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedDel {
    /// When it was written, by the wall clock: DELs of different attachments are listed in this order.
    pub queued: jiff::Timestamp,
    /// Start time of its plugin: an ADD that started later created another lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

/// An entry as stored.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    version: Version,
    kind: &'static str,
    #[serde(flatten)]
    del: &'a QueuedDel,
}

/// What is read of an entry first: fields of another kind or format are not judged by the rules of this one.
#[derive(Deserialize)]
struct Head {
    #[serde(default = "first_format")]
    format: u32,
    #[serde(default)]
    oldest_reader: Option<u32>,
    #[serde(default = "del_kind")]
    kind: String,
}

fn first_format() -> u32 {
    1
}

fn del_kind() -> String {
    DEL.to_owned()
}

/// An entry that this build leaves as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Its file.
    pub path: PathBuf,
    /// Why it is not executed.
    pub reason: String,
    /// It is of another build, which understands it.
    pub is_foreign: bool,
}

/// The entries of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listed {
    /// DELs with their files, the one that waits longest first.
    pub dels: Vec<(PathBuf, QueuedDel)>,
    /// All other entries.
    pub kept: Vec<Kept>,
}

/// The queue cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// An I/O error.
    #[error("{action} {path}: {source}")]
    Io {
        /// The operation.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The queue is full.
    #[error("{LIMIT} DELs wait in {path} already; start the Cistern agent of this node")]
    Full {
        /// The queue.
        path: PathBuf,
    },
    /// Another process holds the lock.
    #[error("the lock of {path} was not free within {} s", LOCK_TIMEOUT.as_secs())]
    Locked {
        /// The queue.
        path: PathBuf,
    },
}

/// A locked queue.
#[derive(Debug)]
pub struct DeletionQueue {
    directory: PathBuf,
    _lock: Flock<File>,
}

fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> QueueError + 'a {
    move |source| QueueError::Io { action, path: path.to_owned(), source }
}

fn is_del(extension: &str) -> bool {
    extension == "json"
}

fn read(path: &Path) -> Result<QueuedDel, Kept> {
    let kept = |is_foreign| move |reason: String| Kept { path: path.to_owned(), reason, is_foreign };
    // Nothing can be renamed over a directory.
    let is_directory = |error: &std::io::Error| error.kind() == ErrorKind::IsADirectory;
    let bytes = std::fs::read(path).map_err(|error| kept(is_directory(&error))(error.to_string()))?;
    let Head { format, oldest_reader, kind } =
        serde_json::from_slice(&bytes).map_err(|error| kept(false)(error.to_string()))?;
    Version { format, oldest_reader }.check(FORMAT).map_err(|error| kept(true)(error.to_string()))?;
    if kind != DEL {
        return Err(kept(true)(format!("kind {kind:?} is not known to this build; expected {DEL:?}")));
    }
    serde_json::from_slice(&bytes).map_err(|error| kept(false)(error.to_string()))
}

impl DeletionQueue {
    /// Opens the queue for writing, concurrently with other writers.
    ///
    /// # Errors
    /// See [`QueueError`].
    pub fn open_shared(directory: &Path) -> Result<Self, QueueError> {
        Self::open(directory, FlockArg::LockSharedNonblock)
    }

    /// Opens the queue alone. What writers that were killed left half written is removed: none of them answered.
    ///
    /// # Errors
    /// See [`QueueError`].
    pub fn open_exclusive(directory: &Path) -> Result<Self, QueueError> {
        let queue = Self::open(directory, FlockArg::LockExclusiveNonblock)?;
        for path in queue.files(|extension| extension.starts_with(TEMPORARY))? {
            std::fs::remove_file(&path).map_err(io("remove", &path))?;
        }
        Ok(queue)
    }

    fn open(directory: &Path, how: FlockArg) -> Result<Self, QueueError> {
        std::fs::create_dir_all(directory).map_err(io("create", directory))?;
        let path = directory.join("lock");
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            let file = File::create(&path).map_err(io("create", &path))?;
            match Flock::lock(file, how) {
                Ok(lock) => return Ok(Self { directory: directory.to_owned(), _lock: lock }),
                Err((_, Errno::EWOULDBLOCK)) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err((_, Errno::EWOULDBLOCK)) => return Err(QueueError::Locked { path: directory.to_owned() }),
                Err((_, errno)) => return Err(io("lock", &path)(errno.into())),
            }
        }
    }

    /// Adds a DEL. Of those for one attachment, which a runtime sends one after the other, the latest stays.
    ///
    /// # Errors
    /// [`QueueError::Full`] at [`LIMIT`], or the file system's.
    pub fn push(&self, del: &QueuedDel) -> Result<(), QueueError> {
        let mut path = self.path(del, "");
        let mut waiting = path.exists().then(|| read(&path));
        for suffix in ["-2", "-3", "-4"] {
            if matches!(&waiting, Some(Err(kept)) if kept.is_foreign) {
                path = self.path(del, suffix);
                waiting = path.exists().then(|| read(&path));
            }
        }
        if waiting.is_none() && self.files(is_del)?.len() >= LIMIT && self.list()?.dels.len() >= LIMIT {
            return Err(QueueError::Full { path: self.directory.clone() });
        }
        let waiting = waiting.and_then(|waiting| waiting.ok()?.began).zip(del.began.as_ref());
        if waiting.is_some_and(|(waiting, new)| waiting.is_after(new, &new.boot)) {
            return Ok(());
        }
        let temporary = path.with_extension(format!("{TEMPORARY}{}", std::process::id()));
        let document = Document { version: Version::new(FORMAT, OLDEST_READER), kind: DEL, del };
        let text = serde_json::to_vec(&document).map_err(std::io::Error::other).map_err(io("encode", &path))?;
        std::fs::write(&temporary, text).map_err(io("write", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(io("rename", &path))
    }

    /// The queued entries.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Listed, QueueError> {
        let mut listed = Listed::default();
        for path in self.files(is_del)? {
            match read(&path) {
                Ok(del) => listed.dels.push((path, del)),
                Err(kept) => listed.kept.push(kept),
            }
        }
        listed.dels.sort_by_key(|(_, del)| del.queued);
        Ok(listed)
    }

    /// Removes the file of an executed DEL.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self, path: &Path) -> Result<(), QueueError> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove", path)(error)),
            _ => Ok(()),
        }
    }

    fn files(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, QueueError> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(io("read", &self.directory))? {
            let path = entry.map_err(io("read", &self.directory))?.path();
            if path.extension().and_then(OsStr::to_str).is_some_and(&wanted) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    fn path(&self, del: &QueuedDel, suffix: &str) -> PathBuf {
        let hash = Sha256::digest(format!("{}/{}", del.container_id, del.ifname).as_bytes());
        let hex: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(format!("{hex}{suffix}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn del(number: usize) -> QueuedDel {
        QueuedDel {
            queued: jiff::Timestamp::UNIX_EPOCH + Duration::from_secs(number as u64),
            began: None,
            container_id: format!("c{number}"),
            ifname: "eth0".into(),
        }
    }

    fn dels(queue: &DeletionQueue) -> Vec<QueuedDel> {
        queue.list().unwrap().dels.into_iter().map(|(_, del)| del).collect()
    }

    // case: ipam P10
    #[test]
    fn the_257th_is_refused_and_a_repeated_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let queue = DeletionQueue::open_shared(&dir.path().join("queue")).unwrap();
        for number in 0..LIMIT {
            queue.push(&del(number)).unwrap();
        }
        assert!(matches!(queue.push(&del(LIMIT)), Err(QueueError::Full { .. })));
        queue.push(&del(3)).unwrap();
        let Listed { dels, kept } = queue.list().unwrap();
        assert_eq!((dels.len(), kept.len()), (LIMIT, 0));
        assert_eq!(dels[0].1, del(0), "in order of arrival");
        queue.remove(&dels[0].0).unwrap();
        queue.remove(&dels[0].0).unwrap();
        queue.push(&del(LIMIT)).unwrap();
    }

    // The DEL that reverts a failed ADD is later than one that still waits for the lock.
    #[test]
    fn of_two_dels_for_an_attachment_the_later_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let queue = DeletionQueue::open_shared(dir.path()).unwrap();
        let began = |uptime_ns| QueuedDel { began: Some(Moment { boot: "this".to_owned(), uptime_ns }), ..del(20) };
        for (new, stays) in [(20, 20), (40, 40), (30, 40), (50, 50)] {
            queue.push(&began(new)).unwrap();
            assert_eq!(dels(&queue), [began(stays)]);
        }
    }

    #[test]
    fn a_damaged_file_is_reported_and_stops_no_other() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("eeee.new-17"), "{").unwrap();
        let queue = DeletionQueue::open_exclusive(dir.path()).unwrap();
        assert!(!dir.path().join("eeee.new-17").exists(), "of a writer that was killed");
        queue.push(&del(1)).unwrap();
        std::fs::write(dir.path().join("ffff.json"), "{").unwrap();
        let listed = queue.list().unwrap();
        assert_eq!((dels(&queue), listed.kept.len()), (vec![del(1)], 1));
        assert!(!listed.kept[0].is_foreign);
    }

    /// As the first release wrote it.
    const FIRST: &str =
        r#"{"queued":"2026-01-01T00:00:00Z","began":{"boot":"b-1","uptime_ns":5},"container_id":"c1","ifname":"eth0"}"#;

    /// As the first release read it.
    #[derive(Deserialize)]
    struct FirstReader {
        queued: jiff::Timestamp,
        began: Option<Moment>,
        container_id: String,
        ifname: String,
    }

    #[test]
    fn entries_of_the_first_release_are_read_and_those_of_this_one_are_read_by_it() {
        let dir = tempfile::tempdir().unwrap();
        let queue = DeletionQueue::open_shared(dir.path()).unwrap();
        std::fs::write(dir.path().join("0000.json"), FIRST).unwrap();
        let first = queue.list().unwrap().dels.remove(0).1;
        assert_eq!((first.container_id.as_str(), first.began.as_ref().unwrap().uptime_ns), ("c1", 5));
        queue.push(&first).unwrap();
        let path = queue.path(&first, "");
        let read: FirstReader = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let FirstReader { queued, began, container_id, ifname } = read;
        assert_eq!(QueuedDel { queued, began, container_id, ifname }, first);
    }

    #[test]
    fn entries_of_later_builds_are_kept_as_they_are_and_take_no_place() {
        let dir = tempfile::tempdir().unwrap();
        let queue = DeletionQueue::open_shared(dir.path()).unwrap();
        let later = [
            r#"{"format":3,"oldest_reader":3,"attachment":"c1/eth0"}"#,
            r#"{"format":3,"oldest_reader":2,"kind":"release","container_id":"c1","ifname":"eth0"}"#,
        ];
        let own = queue.path(&del(1), "");
        for (number, text) in later.iter().enumerate() {
            std::fs::write(&own, text).unwrap();
            queue.push(&del(1)).unwrap();
            queue.push(&del(1)).unwrap();
            assert_eq!(std::fs::read_to_string(&own).unwrap(), *text);
            assert_eq!(dels(&queue), [del(1)], "beside it");
            assert!(queue.list().unwrap().kept.iter().all(|kept| kept.is_foreign && kept.path == own), "{number}");
        }
        // Of a later format that this build understands, with a field of its own.
        let understood =
            FIRST.replacen('{', r#"{"format":3,"oldest_reader":2,"kind":"del","netns":"/run/netns/c1","#, 1);
        std::fs::write(dir.path().join("0000.json"), understood).unwrap();
        assert_eq!(dels(&queue).len(), 2);
        for number in 0..LIMIT {
            std::fs::write(dir.path().join(format!("later-{number}.json")), later[0]).unwrap();
        }
        queue.push(&del(7)).unwrap();
    }

    #[test]
    fn a_directory_in_the_place_of_an_entry_stops_no_del() {
        let dir = tempfile::tempdir().unwrap();
        let queue = DeletionQueue::open_shared(dir.path()).unwrap();
        for suffix in ["", "-2"] {
            std::fs::create_dir(queue.path(&del(1), suffix)).unwrap();
        }
        queue.push(&del(1)).unwrap();
        assert_eq!(dels(&queue), [del(1)]);
        assert_eq!(queue.list().unwrap().kept.len(), 2);
    }
}
