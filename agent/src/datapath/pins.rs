//! Where things are pinned.
//!
//! ```text
//!  ROOT/{maps,progs,links}             the datapath that serves
//!  ROOT/next/{maps,progs,links}        one that is being prepared beside it
//!  ROOT/takeover/{maps,progs,links}    one that takes over from it
//! ```
//! The last two exist while the rows of maps change ([`handover`](super::handover)), and after an agent that was killed in the
//! middle of that. The pins of links are called `PROGRAM_IFINDEX`: by index, since a device may be renamed, and since bpffs takes
//! no dots.

use super::error::DatapathError;
use super::kernel::detach_link;
use super::programs::Program;
use nix::sys::statfs::{FsType, statfs};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Default directory of pinned objects.
pub const DEFAULT_ROOT: &str = "/sys/fs/bpf/cistern";

/// `BPF_FS_MAGIC` of `linux/magic.h`; the C library's headers lack it on some targets.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// The directories of a datapath.
const DIRECTORIES: [&str; 3] = ["maps", "links", "progs"];

/// The paths under one root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pins {
    root: PathBuf,
}

/// The pins of one datapath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Side {
    directory: PathBuf,
}

/// A pinned link, by its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PinnedLinkName {
    /// The program's [`Program::link`].
    pub(super) program: String,
    pub(super) ifindex: u32,
}

impl PinnedLinkName {
    fn parse(name: &str) -> Option<Self> {
        let (program, ifindex) = name.rsplit_once('_')?;
        Some(Self { program: program.to_owned(), ifindex: ifindex.parse().ok()? })
    }
}

impl Side {
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn map(&self, name: &str) -> PathBuf {
        self.directory.join("maps").join(name)
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.directory.join("progs").join(name)
    }

    pub(super) fn links_directory(&self) -> PathBuf {
        self.directory.join("links")
    }

    pub(super) fn link(&self, program: &str, ifindex: u32) -> PathBuf {
        self.links_directory().join(format!("{program}_{ifindex}"))
    }

    /// Creates the directories.
    pub(super) fn create(&self) -> Result<(), DatapathError> {
        for directory in DIRECTORIES {
            let path = self.directory.join(directory);
            fs::create_dir_all(&path).map_err(DatapathError::io(format!("create directory {}", path.display())))?;
        }
        Ok(())
    }

    /// Names of the pins in a directory; none if it does not exist.
    pub(super) fn names(&self, directory: &str) -> Result<Vec<String>, DatapathError> {
        let path = self.directory.join(directory);
        let failed = || DatapathError::io(format!("list {}", path.display()));
        let entries = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed())?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.extend(entry.map_err(failed())?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    /// The pinned links, those of ingress programs last: replies of open flows are translated until nothing new is
    /// sent.
    pub(super) fn links(&self) -> Result<Vec<PinnedLinkName>, DatapathError> {
        let mut links: Vec<PinnedLinkName> =
            self.names("links")?.iter().filter_map(|name| PinnedLinkName::parse(name)).collect();
        links.sort_by_key(|link| link.program.starts_with("ingress"));
        Ok(links)
    }

    /// Removes the pins of programs and maps that a build does not know; attached programs continue.
    pub(super) fn remove_unknown(&self, directory: &str, known: impl Fn(&str) -> bool) -> Result<(), DatapathError> {
        for name in self.names(directory)?.iter().filter(|name| !known(name)) {
            remove_pin(&self.directory.join(directory).join(name))?;
        }
        Ok(())
    }

    /// Removes all pinned objects of ours: links first, egress before ingress, then programs, then maps. Foreign
    /// programs and files are kept. Idempotent, so that an interrupted removal can be repeated. Returns whether there
    /// was anything.
    ///
    /// # Errors
    /// The first pin that could not be removed; the others are removed nevertheless.
    pub(super) fn remove(&self) -> Result<bool, DatapathError> {
        let (mut first, mut found) = (Ok(()), false);
        let mut keep = |result: Result<(), DatapathError>| {
            if first.is_ok() {
                first = result;
            }
        };
        match self.links() {
            Ok(links) => {
                for PinnedLinkName { program, ifindex } in links {
                    found = true;
                    keep(remove_link(&self.link(&program, ifindex)));
                }
            }
            Err(error) => keep(Err(error)),
        }
        for directory in ["progs", "maps"] {
            match self.names(directory) {
                Ok(names) => {
                    for name in names {
                        found = true;
                        keep(remove_pin(&self.directory.join(directory).join(name)));
                    }
                }
                Err(error) => keep(Err(error)),
            }
        }
        for path in ["links", "progs", "maps", ""].map(|directory| self.directory.join(directory)) {
            match fs::remove_dir(&path) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {}
                Err(error) => keep(Err(DatapathError::io(format!("remove directory {}", path.display()))(error))),
            }
        }
        first.map(|()| found)
    }
}

impl Pins {
    /// The paths under `root`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The root itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The serving datapath.
    pub(super) fn serving(&self) -> Side {
        Side { directory: self.root.clone() }
    }

    /// A datapath in preparation.
    pub(super) fn next(&self) -> Side {
        Side { directory: self.root.join("next") }
    }

    /// A datapath that takes over.
    pub(super) fn takeover(&self) -> Side {
        Side { directory: self.root.join("takeover") }
    }

    /// Path of a pinned map.
    #[must_use]
    pub fn map(&self, name: &str) -> PathBuf {
        self.serving().map(name)
    }

    /// Path of a pinned program.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.serving().program(name)
    }

    /// Directory of pinned links.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.serving().links_directory()
    }

    /// Path of the pinned link of a program and a device.
    #[must_use]
    pub fn link(&self, program: &Program, ifindex: u32) -> PathBuf {
        self.serving().link(program.link, ifindex)
    }

    /// Creates the directories.
    ///
    /// # Errors
    /// [`DatapathError::NotBpffs`] if files there would be plain ones, or an I/O error.
    pub(super) fn prepare(&self) -> Result<(), DatapathError> {
        let there = self.root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        let kind = statfs(there)
            .map_err(|errno| DatapathError::io(format!("ask what {} is mounted from", there.display()))(errno.into()))?
            .filesystem_type();
        if kind != FsType(BPF_FS_MAGIC) {
            return Err(DatapathError::NotBpffs { path: there.to_owned() });
        }
        self.serving().create()
    }

    /// Removes all pinned objects of ours, if there are any. Returns whether there were.
    ///
    /// # Errors
    /// The first pin that could not be removed; the others are removed nevertheless.
    pub fn remove_all(&self) -> Result<bool, DatapathError> {
        let results = [self.takeover().remove(), self.next().remove(), self.serving().remove()];
        results.into_iter().try_fold(false, |found, result| Ok(result? || found))
    }
}

/// Removes a pinned link, if it exists. The program is detached when this returns; without detaching, the kernel would
/// do so asynchronously.
pub(super) fn remove_link(path: &Path) -> Result<(), DatapathError> {
    // Ignore errors (such as a deleted device): without its pin the link ends.
    let _ = detach_link(path);
    remove_pin(path)
}

/// Removes a pin, if it exists.
pub(super) fn remove_pin(path: &Path) -> Result<(), DatapathError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(DatapathError::io(format!("remove pin {}", path.display()))(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_pins_beside_the_links_are_kept_without_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let pins = Pins::new(dir.path().join("cistern"));
        fs::create_dir_all(pins.links()).unwrap();
        let other = pins.links().join("other");
        let link = pins.serving().link("egress", 7);
        for path in [&link, &other] {
            fs::write(path, "").unwrap();
        }
        assert!(pins.remove_all().unwrap());
        assert!(!pins.remove_all().unwrap(), "nothing is ours any more");
        assert!(!link.exists() && other.exists());
    }
}
