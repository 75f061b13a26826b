//! The CNI plugin in the host's plugin directory.

use super::{InstallError, bring_back, failed, remove as remove_file, replace, set_aside};
use cistern_core::cni::conflist::{ALIAS, PLUGIN, PORTMAP};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Copies `source` to `directory/cistern-cni` and makes `cilium-cni` a link to it. Cilium's own `cilium-cni` is set
/// aside.
///
/// # Errors
/// An I/O error; an installed plugin is unchanged.
pub fn install(source: &Path, directory: &Path) -> Result<(), InstallError> {
    fs::create_dir_all(directory).map_err(failed("create", directory))?;
    let content = fs::read(source).map_err(failed("read", source))?;
    replace(&directory.join(PLUGIN), &content, 0o755)?;
    let alias = directory.join(ALIAS);
    if leads_to_us(&alias) {
        return Ok(());
    }
    if alias.symlink_metadata().is_ok() {
        set_aside(&alias)?;
    }
    symlink(PLUGIN, &alias).map_err(failed("link", &alias))
}

fn leads_to_us(alias: &Path) -> bool {
    fs::read_link(alias).is_ok_and(|target| target == Path::new(PLUGIN))
}

/// Removes the plugin, and restores what was set aside for it.
///
/// # Errors
/// An I/O error.
pub fn remove(directory: &Path) -> Result<(), InstallError> {
    let alias = directory.join(ALIAS);
    if leads_to_us(&alias) {
        remove_file(&alias)?;
    }
    remove_file(&directory.join(PLUGIN))?;
    bring_back(directory)
}

/// Whether the plugin that implements hostPort is installed.
#[must_use]
pub fn has_portmap(directory: &Path) -> bool {
    directory.join(PORTMAP).exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_plugin_is_replaced_atomically_and_removed_without_remains() {
        let host = tempfile::tempdir().unwrap();
        let (source, directory) = (host.path().join("source"), host.path().join("opt/cni/bin"));
        fs::write(&source, "one").unwrap();
        install(&source, &directory).unwrap();
        let plugin = directory.join("cistern-cni");
        assert_eq!(fs::metadata(&plugin).unwrap().permissions().mode() & 0o777, 0o755);
        // A running plugin keeps its file open; the next call runs the new one.
        let running = fs::File::open(&plugin).unwrap();
        fs::write(&source, "two, longer").unwrap();
        install(&source, &directory).unwrap();
        assert_eq!(std::io::read_to_string(running).unwrap(), "one");
        assert_eq!(fs::read_to_string(directory.join("cilium-cni")).unwrap(), "two, longer");
        assert!(!has_portmap(&directory));
        remove(&directory).unwrap();
        remove(&directory).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn cilium_s_plugin_is_set_aside_and_restored() {
        let host = tempfile::tempdir().unwrap();
        let source = host.path().join("source");
        fs::write(&source, "ours").unwrap();
        let directory = host.path().join("bin");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("cilium-cni"), "theirs").unwrap();
        fs::write(directory.join("portmap"), "portmap").unwrap();
        for _ in 0..2 {
            install(&source, &directory).unwrap();
            assert_eq!(fs::read_to_string(directory.join("cilium-cni")).unwrap(), "ours");
        }
        assert!(has_portmap(&directory));
        remove(&directory).unwrap();
        assert_eq!(fs::read_to_string(directory.join("cilium-cni")).unwrap(), "theirs");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 2);
    }
}
