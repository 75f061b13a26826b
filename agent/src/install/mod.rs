//! Installation on the host of what the agent depends on: the CNI plugin, the network configuration, bpffs and
//! forwarding; and their removal.
//!
//! Files are replaced by rename, so that a runtime reads either the old or the new one. A foreign file in their place
//! is set aside under another name, and restored by [`conflist::remove`] and [`plugin::remove`].

pub mod conflist;
pub mod kernel;
mod network_configuration;
pub mod plugin;

pub use network_configuration::NetworkConfiguration;

use cistern_core::cni::conflist::SET_ASIDE;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// An installation step that failed; the previous state is unchanged.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}: {source}")]
pub struct InstallError {
    /// `write`, `rename`, `mount bpffs on` …
    pub action: &'static str,
    /// The file or directory.
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

/// Writes a file under a temporary name, syncs it, and renames it into place.
fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), InstallError> {
    let temporary = beside(path, ".", ".new");
    fs::write(&temporary, content).map_err(failed("write", &temporary))?;
    fs::set_permissions(&temporary, fs::Permissions::from_mode(mode)).map_err(failed("write", &temporary))?;
    // After a power loss, an empty plugin or configuration would prevent every pod from starting.
    fs::File::open(&temporary).and_then(|file| file.sync_all()).map_err(failed("write", &temporary))?;
    fs::rename(&temporary, path).map_err(failed("rename", &temporary))
}

/// Renames a foreign file so that it is ignored.
fn set_aside(path: &Path) -> Result<(), InstallError> {
    fs::rename(path, beside(path, "", SET_ASIDE)).map_err(failed("set aside", path))
}

/// Undoes every [`set_aside`] in a directory. A file that was recreated since is newer and stays.
fn bring_back(directory: &Path) -> Result<(), InstallError> {
    for path in list(directory)? {
        let Some(name) = path.to_str().and_then(|text| text.strip_suffix(SET_ASIDE)).map(PathBuf::from) else {
            continue;
        };
        if name.exists() {
            remove(&path)?;
        } else {
            fs::rename(&path, &name).map_err(failed("restore", &path))?;
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

/// Removes a file, if it exists.
fn remove(path: &Path) -> Result<(), InstallError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}
