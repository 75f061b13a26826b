//! What is put on the host besides the agent: the CNI plugin, the network configuration, bpffs and forwarding; and how
//! it is taken away.
//!
//! Files are put into place by rename, so that a runtime sees the old or the new one and never half of it. What was there
//! and is not ours is set aside under another name, and comes back with [`conflist::remove`] and [`plugin::remove`].

pub mod conflist;
pub mod kernel;
pub mod plugin;

use cistern_core::cni::conflist::SET_ASIDE;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A step on the host that failed; what was there before is still there.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}: {source}")]
pub struct InstallError {
    /// `write`, `rename`, `mount bpffs on` …
    pub action: &'static str,
    /// Which file or directory.
    pub path: PathBuf,
    /// The reason.
    pub source: io::Error,
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError {
    let path = path.to_owned();
    move |source| InstallError { action, path, source }
}

fn beside(path: &Path, before: &str, after: &str) -> PathBuf {
    let mut name = OsString::from(before);
    name.push(path.file_name().unwrap_or_default());
    name.push(after);
    path.with_file_name(name)
}

/// Writes a file under another name, on the disk, and renames it into place.
fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), InstallError> {
    let temporary = beside(path, ".", ".new");
    fs::write(&temporary, content).map_err(failed("write", &temporary))?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(mode)).map_err(failed("write", &temporary))?;
    // A plugin or a configuration of no bytes after a power cut would keep every pod from starting.
    fs::File::open(&temporary).and_then(|file| file.sync_all()).map_err(failed("write", &temporary))?;
    fs::rename(&temporary, path).map_err(failed("rename", &temporary))
}

/// Renames a file of somebody else's so that nobody reads it.
fn set_aside(path: &Path) -> Result<(), InstallError> {
    fs::rename(path, beside(path, "", SET_ASIDE)).map_err(failed("set aside", path))
}

/// Undoes every [`set_aside`] of a directory. A file that has come back by itself since is newer and stays.
fn bring_back(directory: &Path) -> Result<(), InstallError> {
    for path in list(directory)? {
        let Some(name) = path.to_str().and_then(|text| text.strip_suffix(SET_ASIDE)).map(PathBuf::from) else {
            continue;
        };
        if name.exists() {
            remove(&path)?;
        } else {
            fs::rename(&path, &name).map_err(failed("bring back", &path))?;
        }
    }
    Ok(())
}

fn list(directory: &Path) -> Result<Vec<PathBuf>, InstallError> {
    match fs::read_dir(directory) {
        Ok(entries) => {
            let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            paths.sort();
            Ok(paths)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed("list", directory)(error)),
    }
}

/// Removes a file; one that is not there is fine.
fn remove(path: &Path) -> Result<(), InstallError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}
