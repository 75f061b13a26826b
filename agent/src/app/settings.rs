//! Reads the layers of settings: the config directory, this process's environment and its flags. Changes take effect at
//! the next start, as with Cilium.

use cistern_core::settings::{Command, Directory, Layers, Settings, SettingsErrors, Warning};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The key of the config directory, which only flags and environment can set.
const CONFIG_DIR: &str = "config-dir";

/// Why there are no settings. Nothing was started or changed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Invalid values.
    #[error(transparent)]
    Settings(#[from] SettingsErrors),
    /// The config directory, or a file in it, cannot be read.
    #[error("reading settings from {}: {source}; expected a directory with one file per key (config-dir), nothing was started or changed", path.display())]
    Read {
        /// The directory or the file.
        path: PathBuf,
        /// The I/O error.
        source: std::io::Error,
    },
}

/// Reads all layers. `flags` are the given ones: key → value.
///
/// # Errors
/// An unreadable directory (a missing one only if it was configured), or invalid settings.
pub fn load(flags: BTreeMap<String, String>, command: Command) -> Result<(Settings, Vec<Warning>), LoadError> {
    // A variable that is not Unicode is not a setting.
    let variable = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let environment = std::env::vars_os().filter_map(variable).collect();
    // If it is missing or not a valid Node name, validation asks for node-name.
    let hostname = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    load_from(flags, environment, hostname, command)
}

fn load_from(
    flags: BTreeMap<String, String>,
    environment: BTreeMap<String, String>,
    hostname: String,
    command: Command,
) -> Result<(Settings, Vec<Warning>), LoadError> {
    let mut layers = Layers { directory: None, environment, flags, hostname };
    let (path, asked_for) = match asked_for(&layers) {
        Some(path) => (path, true),
        None => (Settings::default().config_dir, false),
    };
    layers.directory = read_directory(&path, asked_for)?;
    Ok(Settings::load(&layers, command)?)
}

/// The directory set by flags or environment, in order of precedence.
fn asked_for(layers: &Layers) -> Option<PathBuf> {
    let variables = ["CISTERN_CONFIG_DIR", "CILIUM_CONFIG_DIR"].map(|name| layers.environment.get(name));
    let named = layers.flags.get(CONFIG_DIR).into_iter().chain(variables.into_iter().flatten());
    named.map(|path| path.trim()).find(|path| !path.is_empty()).map(PathBuf::from)
}

/// One file per key. A mounted ConfigMap has links to files below `..data`, which kubelet swaps as a whole; names that
/// begin with a dot are kubelet's own.
fn read_directory(path: &Path, asked_for: bool) -> Result<Option<Directory>, LoadError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |source| LoadError::Read { path, source }
    };
    let entries = match std::fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound && !asked_for => return Ok(None),
        Err(error) => return Err(fail(path)(error)),
    };
    let mut files = BTreeMap::new();
    for entry in entries {
        let file = entry.map_err(fail(path))?.path();
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        // The metadata of the link's target.
        if name.starts_with('.') || std::fs::metadata(&file).map_err(fail(&file))?.is_dir() {
            continue;
        }
        files.insert(name, std::fs::read_to_string(&file).map_err(fail(&file))?);
    }
    Ok(Some(Directory { path: path.display().to_string(), files }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cistern_core::settings::Source;
    use std::os::unix::fs::symlink;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn load_with(flags: &[(&str, &str)], environment: &[(&str, &str)]) -> Result<Settings, LoadError> {
        load_from(map(flags), map(environment), "node-a".to_owned(), Command::Operator).map(|(settings, _)| settings)
    }

    /// A directory as kubelet mounts a ConfigMap.
    fn config_map(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("..2026_11_29_17_00_00.1234");
        std::fs::create_dir(&data).unwrap();
        symlink(&data, directory.path().join("..data")).unwrap();
        for (name, content) in files {
            std::fs::write(data.join(name), content).unwrap();
            symlink(Path::new("..data").join(name), directory.path().join(name)).unwrap();
        }
        directory
    }

    #[test]
    fn mounted_config_map_is_read() {
        let directory =
            config_map(&[("mtu", b"1450"), ("cluster-pool-ipv4-cidr", b"10.1.0.0/16\n"), ("enable-hubble", b"true")]);
        std::fs::create_dir(directory.path().join("lost+found")).unwrap();
        let path = directory.path().to_str().unwrap();
        for settings in [load_with(&[(CONFIG_DIR, path)], &[]), load_with(&[], &[("CILIUM_CONFIG_DIR", path)])] {
            let settings = settings.unwrap();
            assert_eq!((settings.mtu, settings.source("mtu")), (Some(1450), Source::File(format!("{path}/mtu"))));
            assert_eq!(settings.cluster_pool_ipv4, ["10.1.0.0/16".parse().unwrap()]);
            assert_eq!(settings.config_dir, directory.path());
        }
        let settings = load_with(&[(CONFIG_DIR, path), ("mtu", "1400")], &[("CISTERN_MTU", "1300")]).unwrap();
        assert_eq!(settings.mtu, Some(1400));
    }

    #[test]
    fn directory_that_was_asked_for_has_to_be_there() {
        let error = load_with(&[(CONFIG_DIR, "/nonexistent/config")], &[]).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/config") && error.contains("nothing was started"), "{error}");
        assert_eq!(read_directory(Path::new("/nonexistent/config"), false).unwrap(), None);
    }

    #[test]
    fn file_that_is_no_text_is_named() {
        let directory = config_map(&[("mtu", b"\xff\xfe")]);
        let error = load_with(&[(CONFIG_DIR, directory.path().to_str().unwrap())], &[]).unwrap_err().to_string();
        assert!(error.contains("/mtu"), "{error}");
    }

    #[test]
    fn link_that_leads_nowhere_is_named() {
        let directory = config_map(&[]);
        symlink("..data/mtu", directory.path().join("mtu")).unwrap();
        let error = load_with(&[(CONFIG_DIR, directory.path().to_str().unwrap())], &[]).unwrap_err().to_string();
        assert!(error.contains("/mtu"), "{error}");
    }

    #[test]
    fn bad_settings_are_listed() {
        let directory = config_map(&[("mtu", b"banana"), ("routing-mode", b"tunnel")]);
        let error = load_with(&[(CONFIG_DIR, directory.path().to_str().unwrap())], &[]).unwrap_err();
        assert!(matches!(&error, LoadError::Settings(errors) if errors.0.len() == 2), "{error}");
        assert_eq!(error.to_string().lines().count(), 3);
    }
}
