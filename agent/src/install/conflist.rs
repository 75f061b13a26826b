//! The CNI network configuration in the directory that the container runtime watches.

use super::{InstallError, bring_back, list, remove as remove_file, replace, set_aside};
use cistern_core::cni::conflist::is_configuration;
use std::fs;
use std::path::Path;

/// Writes `text` to `path`, and with `exclusive` renames all other configurations in its directory. Returns whether
/// anything changed.
///
/// # Errors
/// An I/O error. The previous configuration stays in force.
pub fn put(path: &Path, text: &str, exclusive: bool) -> Result<bool, InstallError> {
    let mut changed = false;
    if fs::read_to_string(path).ok().as_deref() != Some(text) {
        // Readable by root only, as the CIS Kubernetes benchmark requires.
        replace(path, text.as_bytes(), 0o600)?;
        changed = true;
    }
    if exclusive && let Some(directory) = path.parent() {
        let is_foreign = |other: &Path| {
            other != path && other.file_name().and_then(|name| name.to_str()).is_some_and(is_configuration)
        };
        // Write ours before renaming the others: a runtime without any configuration reports its node as not ready.
        for other in list(directory)?.iter().filter(|other| is_foreign(other)) {
            tracing::info!(path = %other.display(), "network configuration of another plugin set aside (cni-exclusive)");
            set_aside(other)?;
            changed = true;
        }
    }
    Ok(changed)
}

/// Restores what was set aside, then removes our configuration.
///
/// # Errors
/// An I/O error.
pub fn remove(path: &Path) -> Result<(), InstallError> {
    if let Some(directory) = path.parent() {
        bring_back(directory)?;
    }
    remove_file(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let paths = list(directory).unwrap();
        paths.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn ours_is_the_only_one_until_it_is_removed() {
        let host = tempfile::tempdir().unwrap();
        let (directory, ours) = (host.path(), host.path().join("05-cistern.conflist"));
        for name in ["10-kindnet.conflist", "99-loopback.conf", "README"] {
            fs::write(directory.join(name), name).unwrap();
        }
        assert!(put(&ours, "{}", true).unwrap());
        assert!(!put(&ours, "{}", true).unwrap());
        let aside =
            ["05-cistern.conflist", "10-kindnet.conflist.cistern_bak", "99-loopback.conf.cistern_bak", "README"];
        assert_eq!(names(directory), aside);
        // The other plugin's agent writes its configuration again: set aside again.
        fs::write(directory.join("10-kindnet.conflist"), "anew").unwrap();
        assert!(put(&ours, "{}", true).unwrap());
        assert_eq!(names(directory), aside);
        assert!(put(&ours, "{ }", true).unwrap());
        remove(&ours).unwrap();
        remove(&ours).unwrap();
        assert_eq!(names(directory), ["10-kindnet.conflist", "99-loopback.conf", "README"]);
        assert_eq!(fs::read_to_string(directory.join("10-kindnet.conflist")).unwrap(), "anew");
    }

    #[test]
    fn others_remain_unless_ours_is_exclusive() {
        let host = tempfile::tempdir().unwrap();
        fs::write(host.path().join("10-other.conf"), "{}").unwrap();
        put(&host.path().join("05-cistern.conflist"), "{}", false).unwrap();
        assert_eq!(names(host.path()), ["05-cistern.conflist", "10-other.conf"]);
        let absent = host.path().join("absent/05-cistern.conflist");
        let error = put(&absent, "{}", true).unwrap_err().to_string();
        assert!(error.contains("absent"), "{error}");
    }
}
