//! Network namespaces.

use super::NetlinkError;
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The calling thread's own namespace. Not `self`: threads of a process may be in different ones.
const OWN: &str = "/proc/thread-self/ns/net";

/// An open network namespace, which exists at least as long as this value.
#[derive(Debug)]
pub struct Namespace {
    file: File,
    path: PathBuf,
}

impl Namespace {
    /// Opens the namespace at a path such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    ///
    /// # Errors
    /// [`NetlinkError::Namespace`]; `ENOENT` if it does not exist. Whether the file is a network namespace is only
    /// known when it is entered.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, NetlinkError> {
        let path = path.into();
        match File::open(&path) {
            Ok(file) => Ok(Self { file, path }),
            Err(error) => Err(failure(&path, "open", &error)),
        }
    }

    /// The calling thread's namespace.
    ///
    /// # Errors
    /// [`NetlinkError::Namespace`] if `/proc` cannot be read.
    pub fn current() -> Result<Self, NetlinkError> {
        Self::open(OWN)
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same namespace, regardless of their paths.
    ///
    /// # Errors
    /// [`NetlinkError::Namespace`] if a file's metadata cannot be read.
    pub fn is_same(&self, other: &Self) -> Result<bool, NetlinkError> {
        Ok(self.identity()? == other.identity()?)
    }

    fn identity(&self) -> Result<(u64, u64), NetlinkError> {
        let metadata = self.file.metadata().map_err(|error| failure(&self.path, "examine", &error))?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Runs code inside on a separate thread, which then terminates, so that no other code runs on a thread in another
    /// namespace.
    ///
    /// # Errors
    /// [`NetlinkError::Namespace`] if it cannot be entered; then nothing was run.
    pub fn run<T: Send>(&self, code: impl FnOnce() -> T + Send) -> Result<T, NetlinkError> {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter()?;
                Ok(code())
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread inside until the guard is dropped. For single-threaded processes, which
    /// [`Namespace::run`] would cost a thread.
    ///
    /// # Errors
    /// [`NetlinkError::Namespace`]; the thread's namespace is unchanged. `EINVAL`: the file is not a network namespace.
    pub fn visit(&self) -> Result<Visit, NetlinkError> {
        let home = Self::current()?;
        self.enter()?;
        Ok(Visit { home, not_send: PhantomData })
    }

    fn enter(&self) -> Result<(), NetlinkError> {
        setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|errno| NetlinkError::Namespace {
            path: self.path.clone(),
            action: "enter as a network namespace",
            errno,
        })
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// While this lives, its thread is in another network namespace.
#[derive(Debug)]
pub struct Visit {
    home: Namespace,
    /// Only the thread that entered can return.
    not_send: PhantomData<*const ()>,
}

impl Drop for Visit {
    fn drop(&mut self) {
        if let Err(error) = self.home.enter() {
            // Continuing would change another namespace's network instead of this node's.
            eprintln!("cannot leave a network namespace: {error}");
            std::process::abort();
        }
    }
}

fn failure(path: &Path, action: &'static str, error: &io::Error) -> NetlinkError {
    NetlinkError::Namespace {
        path: path.to_owned(),
        action,
        errno: error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw),
    }
}
