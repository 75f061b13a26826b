//! One call at a time for an attachment.
//!
//! A runtime that is restarted or that gives up on a call may leave a plugin behind that is still at work, and then calls another.
//! Two at once would each remove the pair of the other.
//!
//! The lock of an attachment is a byte of one file, at the offset that the attachment hashes to (an open file description lock,
//! `F_OFD_SETLK` in fcntl(2)). The kernel releases it when its process ends, however it ends; nothing is left for each attachment;
//! different attachments do not wait for each other.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Path of the lock file, independent of the configuration: an ADD and its DEL may come with different ones.
pub const LOCK_FILE: &str = "/run/cistern/attachments.lock";

/// How long a call waits for the one before it. With what an ADD waits for the agent it stays below the two minutes that
/// kubelet allows a call of the runtime by default (`runtimeRequestTimeout`).
pub(super) const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// Retry interval for a lock that is not free.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub(super) enum LockError {
    /// Another call holds it.
    #[error(
        "another call of cistern-cni for {attachment} has not ended within {} s; {} is locked by it", patience.as_secs(),
        path.display()
    )]
    Busy {
        /// Container and interface.
        attachment: String,
        /// Duration of the wait.
        patience: Duration,
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be used. No other call can have locked it.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Excludes other calls for the attachment until dropped.
#[derive(Debug)]
pub(super) struct AttachmentLock {
    _file: File,
}

impl AttachmentLock {
    /// Takes the lock of an attachment in the file at `path`.
    ///
    /// # Errors
    /// See [`LockError`].
    pub(super) fn take(path: &Path, container_id: &str, ifname: &str, patience: Duration) -> Result<Self, LockError> {
        // A container ID cannot contain a slash.
        let attachment = format!("{container_id}/{ifname}");
        let range = range_of(&attachment);
        let deadline = Instant::now() + patience;
        loop {
            let file = open(path)?;
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&range)) {
                // A lock in a file that was removed meanwhile does not exclude callers that open the new one.
                Ok(_) if is_at(&file, path) => return Ok(Self { _file: file }),
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => std::thread::sleep(RETRY_INTERVAL),
                Err(errno) => return Err(failed("lock", path)(errno.into())),
            }
            if Instant::now() >= deadline {
                return Err(LockError::Busy { attachment, patience, path: path.to_owned() });
            }
        }
    }
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> LockError + 'a {
    move |source| LockError::Io { action, path: path.to_owned(), source }
}

fn open(path: &Path) -> Result<File, LockError> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(failed("create", directory))?;
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path).map_err(failed("open", path))
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |(a, b): (std::fs::Metadata, std::fs::Metadata)| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(path.metadata().ok()).is_some_and(same)
}

/// The byte of an attachment. Two that share one wait for each other and nothing else.
fn range_of(attachment: &str) -> libc::flock {
    let hash: [u8; 32] = Sha256::digest(attachment.as_bytes()).into();
    let [a, b, c, d, e, f, g, h, ..] = hash;
    // The end of the range must fit its type, too.
    let start = i64::from_be_bytes([a, b, c, d, e, f, g, h]) & (i64::MAX >> 1);
    let (l_type, l_whence) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock { l_type, l_whence, l_start: start, l_len: 1, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(path: &Path, container_id: &str) -> Result<AttachmentLock, LockError> {
        AttachmentLock::take(path, container_id, "eth0", Duration::ZERO)
    }

    #[test]
    fn an_attachment_is_locked_by_itself_until_its_holder_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/attachments.lock");
        let held = take(&path, "c1").unwrap();
        let error = take(&path, "c1").unwrap_err();
        assert!(matches!(&error, LockError::Busy { attachment, .. } if attachment == "c1/eth0"), "{error}");
        take(&path, "c2").unwrap();
        AttachmentLock::take(&path, "c1", "net1", Duration::ZERO).unwrap();
        drop(held);
        take(&path, "c1").unwrap();
    }

    #[test]
    fn a_waiting_call_gets_the_lock_when_the_one_before_ends() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("attachments.lock");
        let held = take(&path, "c1").unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| AttachmentLock::take(&path, "c1", "eth0", Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            drop(held);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_lock_of_a_file_that_was_removed_is_taken_in_the_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("attachments.lock");
        let _old = take(&path, "c1").unwrap();
        std::fs::remove_file(&path).unwrap();
        let _new = take(&path, "c1").unwrap();
        assert!(matches!(take(&path, "c1"), Err(LockError::Busy { .. })));
        // A directory in its place.
        let error = take(directory.path(), "c1").unwrap_err();
        assert!(matches!(&error, LockError::Io { action: "open", .. }), "{error}");
    }
}
