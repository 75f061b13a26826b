//! DELs that came while the agent was away, on disk until it is back (`ipam` P10).
//!
//! One file for each attachment, named by a hash of it, so that a repeated DEL is one file. The plugin holds the lock
//! shared while it writes, the agent exclusively while it reads: a DEL is either seen by the agent's replay or finds the
//! agent answering.

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

/// Where the queue is unless the configuration says otherwise.
pub const QUEUE_DIR: &str = "/var/lib/cistern/cni-queue";

/// More are refused, and the runtime tries again: a node whose agent is away for so long needs somebody to act.
pub const LIMIT: usize = 256;

/// What files are called while they are written, before the process ID.
const TEMPORARY: &str = "new-";

/// How long the lock is waited for.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A DEL that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuedDel {
    /// When it was written, by the wall clock: for people, and the order in which DELs of different attachments are listed.
    pub queued: jiff::Timestamp,
    /// When its plugin began: an ADD that began later made another lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Moment>,
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

/// The queue cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The file system said no.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// Too many wait already.
    #[error("{LIMIT} DELs wait in {path} already; start the Cistern agent of this node")]
    Full {
        /// The queue.
        path: PathBuf,
    },
    /// Somebody else holds the lock.
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

fn read(path: &Path) -> Option<QueuedDel> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

impl DeletionQueue {
    /// Opens the queue for writing, beside other writers.
    ///
    /// # Errors
    /// See [`QueueError`].
    pub fn open_shared(directory: &Path) -> Result<Self, QueueError> {
        Self::open(directory, FlockArg::LockSharedNonblock)
    }

    /// Opens the queue alone. What writers that were killed have left half done goes: nobody was told that it was kept.
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

    /// Adds a DEL. Of those for one attachment, which a runtime sends one after the other, the latest is there.
    ///
    /// # Errors
    /// [`QueueError::Full`] at [`LIMIT`], or the file system's.
    pub fn push(&self, del: &QueuedDel) -> Result<(), QueueError> {
        let path = self.path(del);
        if !path.exists() && self.files(is_del)?.len() >= LIMIT {
            return Err(QueueError::Full { path: self.directory.clone() });
        }
        let waiting = read(&path).and_then(|waiting| waiting.began).zip(del.began.as_ref());
        if waiting.is_some_and(|(waiting, new)| waiting.is_after(new, &new.boot)) {
            return Ok(());
        }
        let temporary = path.with_extension(format!("{TEMPORARY}{}", std::process::id()));
        let text = serde_json::to_vec(del).map_err(std::io::Error::other).map_err(io("encode", &path))?;
        std::fs::write(&temporary, text).map_err(io("write", &temporary))?;
        std::fs::rename(&temporary, &path).map_err(io("rename", &path))
    }

    /// What waits, the longest first, and the files that cannot be read.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list(&self) -> Result<(Vec<QueuedDel>, Vec<PathBuf>), QueueError> {
        let (mut dels, mut unreadable) = (Vec::new(), Vec::new());
        for path in self.files(is_del)? {
            match read(&path) {
                Some(del) => dels.push(del),
                None => unreadable.push(path),
            }
        }
        dels.sort_by_key(|del| del.queued);
        Ok((dels, unreadable))
    }

    /// Forgets a DEL that was carried out.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn remove(&self, del: &QueuedDel) -> Result<(), QueueError> {
        let path = self.path(del);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(io("remove", &path)(error)),
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

    fn path(&self, del: &QueuedDel) -> PathBuf {
        let hash = Sha256::digest(format!("{}/{}", del.container_id, del.ifname).as_bytes());
        let hex: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        self.directory.join(format!("{hex}.json"))
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
        let (dels, unreadable) = queue.list().unwrap();
        assert_eq!((dels.len(), unreadable.len()), (LIMIT, 0));
        assert_eq!(dels[0], del(0), "in order of arrival");
        queue.remove(&del(0)).unwrap();
        queue.remove(&del(0)).unwrap();
        queue.push(&del(LIMIT)).unwrap();
    }

    // What undoes a failed ADD is later than a DEL of before that still waits for the lock.
    #[test]
    fn of_two_dels_for_an_attachment_the_later_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let queue = DeletionQueue::open_shared(dir.path()).unwrap();
        let began = |uptime_ns| QueuedDel { began: Some(Moment { boot: "this".to_owned(), uptime_ns }), ..del(20) };
        for (new, stays) in [(20, 20), (40, 40), (30, 40), (50, 50)] {
            queue.push(&began(new)).unwrap();
            assert_eq!(queue.list().unwrap().0, [began(stays)]);
        }
    }

    #[test]
    fn a_damaged_file_is_reported_and_stops_nobody() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("eeee.new-17"), "{").unwrap();
        let queue = DeletionQueue::open_exclusive(dir.path()).unwrap();
        assert!(!dir.path().join("eeee.new-17").exists(), "of a writer that was killed");
        queue.push(&del(1)).unwrap();
        std::fs::write(dir.path().join("ffff.json"), "{").unwrap();
        let (dels, unreadable) = queue.list().unwrap();
        assert_eq!((dels, unreadable.len()), (vec![del(1)], 1));
    }
}
