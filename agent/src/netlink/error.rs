//! Errors of rtnetlink.

use cistern_core::reconcile::{Classify, ErrorClass};
use nix::errno::Errno;
use std::io;
use std::path::PathBuf;

/// A failed netlink call, or namespace operation.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket cannot be created or used.
    #[error("rtnetlink socket: {action}: {source}")]
    Socket {
        /// The operation on the socket.
        action: &'static str,
        /// The I/O error.
        source: io::Error,
    },
    /// The kernel rejected the request.
    #[error("{what}: {errno}{}", explanation(.message))]
    Refused {
        /// The operation and its object.
        what: String,
        /// The kernel's error number.
        errno: Errno,
        /// The kernel's message (extended acknowledgement), if any.
        message: Option<String>,
    },
    /// The kernel's answer is not usable.
    #[error("{what}: the kernel's answer cannot be used: {reason}")]
    Answer {
        /// The operation and its object.
        what: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// A required link does not exist.
    #[error("no network device {name}")]
    NoLink {
        /// Its name.
        name: String,
    },
    /// A network namespace cannot be used.
    #[error("network namespace {}: {action}: {errno}", path.display())]
    Namespace {
        /// Its path.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// The I/O error.
        errno: Errno,
    },
}

fn explanation(message: &Option<String>) -> String {
    message.as_ref().map(|text| format!(" ({text})")).unwrap_or_default()
}

impl NetlinkError {
    /// The error number, if there is one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Socket { source, .. } => source.raw_os_error().map(Errno::from_raw),
            Self::Refused { errno, .. } | Self::Namespace { errno, .. } => Some(*errno),
            Self::Answer { .. } | Self::NoLink { .. } => None,
        }
    }

    /// The object exists already.
    #[must_use]
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(Errno::EEXIST)
    }

    /// The object does not exist. The error number depends on its kind: `ENODEV` for a link, `ESRCH` for a route,
    /// `EADDRNOTAVAIL` for an address, `ENOENT` for a neighbour or a namespace.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::NoLink { .. })
            || matches!(
                self.errno(),
                Some(Errno::ENODEV | Errno::ESRCH | Errno::EADDRNOTAVAIL | Errno::ENOENT | Errno::ENXIO)
            )
    }
}

impl Classify for NetlinkError {
    fn class(&self) -> ErrorClass {
        match self.errno() {
            // The request itself is wrong, so retrying does not help.
            Some(
                Errno::EPERM | Errno::EACCES | Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT | Errno::ERANGE,
            ) => ErrorClass::Permanent,
            // A missing device or next hop may appear; memory may become available.
            _ => ErrorClass::Transient,
        }
    }
}
