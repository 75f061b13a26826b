//! The CNI network configuration: written when this node can serve, kept up to date, and not removed when the agent
//! terminates.

use super::{conflist, plugin};
use crate::files::read;
use crate::tables::Waits;
use crate::tables::rows::FileContent;
use cistern_core::cni::conflist::{custom_text, default_text};
use cistern_core::settings::Settings;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the wait with the reason why it is not written.
const WAIT: &str = "CNI configuration";

/// Interval of checks until this node can serve for the first time.
const UNTIL_READY: Duration = Duration::from_millis(200);
/// Interval for reading the user's file and setting foreign configurations aside.
const KEEP: Duration = Duration::from_secs(5);

/// Content and path.
#[derive(Debug, Clone)]
pub struct NetworkConfiguration {
    path: PathBuf,
    custom: Option<PathBuf>,
    exclusive: bool,
    plugins: PathBuf,
}

impl NetworkConfiguration {
    /// By the settings; `None` if the agent does not write it.
    #[must_use]
    pub fn of(settings: &Settings) -> Option<Self> {
        let by_another = settings.custom_cni_conf && settings.read_cni_conf.is_none();
        let path = settings.write_cni_conf_when_ready.clone().filter(|_| !by_another)?;
        Some(Self {
            path,
            custom: settings.read_cni_conf.clone(),
            exclusive: settings.cni_exclusive,
            plugins: settings.cni_bin_path.clone(),
        })
    }

    /// Writes it once.
    ///
    /// # Errors
    /// The reason, and what is in force instead.
    pub fn put(&self) -> Result<bool, String> {
        let text = match &self.custom {
            None => default_text(plugin::has_portmap(&self.plugins)),
            Some(file) => custom(file).map_err(|reason| {
                format!("read-cni-conf {}: {reason}; {} is unchanged", file.display(), self.path.display())
            })?,
        };
        conflist::put(&self.path, &text, self.exclusive).map_err(|error| error.to_string())
    }

    /// Removes it, and restores what was set aside for it.
    ///
    /// # Errors
    /// An I/O error.
    pub fn remove(&self) -> Result<(), String> {
        conflist::remove(&self.path).map_err(|error| error.to_string())
    }

    /// Keeps it up to date once this node can serve, until dropped.
    pub async fn keep(self, is_ready: impl Fn() -> bool + Send, waits: Waits) {
        while !is_ready() {
            tokio::time::sleep(UNTIL_READY).await;
        }
        if self.custom.is_none() && !plugin::has_portmap(&self.plugins) {
            let directory = self.plugins.display();
            tracing::warn!("hostPorts are not served: there is no plugin portmap in {directory} (cni-bin-path)");
        }
        loop {
            match self.put() {
                Ok(changed) => {
                    if changed {
                        tracing::info!(path = %self.path.display(), "CNI configuration written");
                    }
                    waits.end(WAIT);
                }
                Err(reason) => waits.begin(WAIT, reason, Some(KEEP)),
            }
            tokio::time::sleep(KEEP).await;
        }
    }
}

fn custom(file: &Path) -> Result<String, String> {
    match read(file) {
        FileContent::Bytes(bytes) => custom_text(&String::from_utf8_lossy(&bytes)),
        FileContent::Absent => Err("there is no such file".to_owned()),
        FileContent::Unreadable(reason) => Err(reason),
    }
}
