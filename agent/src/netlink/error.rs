//! What can go wrong between this process and rtnetlink.

use cistern_core::reconcile::{Classify, ErrorClass};
use nix::errno::Errno;
use std::io;
use std::path::PathBuf;

/// A netlink call, or a step into a namespace, that did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum NetlinkError {
    /// The socket cannot be made, or does not carry messages.
    #[error("rtnetlink socket: {action}: {source}")]
    Socket {
        /// What was tried on the socket.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("{what}: {errno}{}", explanation(.message))]
    Refused {
        /// What was tried on what.
        what: String,
        /// The kernel's error number.
        errno: Errno,
        /// The kernel's own words (extended acknowledgement), where it gave any.
        message: Option<String>,
    },
    /// The kernel answered something that is no answer to the question.
    #[error("{what}: the kernel's answer cannot be used: {reason}")]
    Answer {
        /// What was tried on what.
        what: String,
        /// What is wrong with the answer.
        reason: String,
    },
    /// A link that must be there is not.
    #[error("no network device {name}")]
    NoLink {
        /// Its name.
        name: String,
    },
    /// A network namespace cannot be used.
    #[error("network namespace {}: {action}: {errno}", path.display())]
    Namespace {
        /// Where it was looked for.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        errno: Errno,
    },
}

fn explanation(message: &Option<String>) -> String {
    message.as_ref().map(|text| format!(" ({text})")).unwrap_or_default()
}

impl NetlinkError {
    /// The error number, where the system gave one.
    #[must_use]
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Self::Socket { source, .. } => source.raw_os_error().map(Errno::from_raw),
            Self::Refused { errno, .. } | Self::Namespace { errno, .. } => Some(*errno),
            Self::Answer { .. } | Self::NoLink { .. } => None,
        }
    }

    /// What was to be made is there already.
    #[must_use]
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(Errno::EEXIST)
    }

    /// What was to be changed or removed is not there. Which number says so differs: `ENODEV` for a link, `ESRCH` for a
    /// route, `EADDRNOTAVAIL` for an address, `ENOENT` for a neighbour or a namespace.
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
            // Refused for what was asked, not for the moment: it stays so until somebody acts.
            Some(
                Errno::EPERM | Errno::EACCES | Errno::EINVAL | Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT | Errno::ERANGE,
            ) => ErrorClass::Permanent,
            // A device or a next hop that is away comes back; so does memory.
            _ => ErrorClass::Transient,
        }
    }
}
