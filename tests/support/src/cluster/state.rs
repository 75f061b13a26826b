//! Persistent state of a running cluster, and the lock for changing it.

use super::spec::Spec;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

/// Directory of the cluster.
pub const DIRECTORY: &str = "/var/lib/cistern-cluster";
const FILE: &str = "/var/lib/cistern-cluster/state.json";

/// Sysctls of the host that kubelets change.
const SETTINGS: [&str; 6] = [
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
];

/// The cluster, and the previous sysctls of the host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) spec: Spec,
    settings: BTreeMap<String, String>,
}

impl State {
    /// Records the host's sysctls.
    pub(super) fn of_this_host(spec: &Spec) -> Result<Self> {
        let read = |name: &&str| {
            let value =
                fs::read_to_string(Path::new("/proc/sys").join(name)).with_context(|| format!("read {name}"))?;
            Ok(((*name).to_owned(), value.trim().to_owned()))
        };
        Ok(Self { spec: spec.clone(), settings: SETTINGS.iter().map(read).collect::<Result<_>>()? })
    }

    /// The recorded state.
    pub(super) fn read() -> Result<Option<Self>> {
        match fs::read_to_string(FILE) {
            Ok(text) => serde_json::from_str(&text).map(Some).with_context(|| format!("read {FILE}")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {FILE}")),
        }
    }

    pub(super) fn write(&self) -> Result<()> {
        fs::create_dir_all(DIRECTORY).with_context(|| format!("create {DIRECTORY}"))?;
        let unfinished = format!("{FILE}.unfinished");
        fs::write(&unfinished, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&unfinished, FILE).with_context(|| format!("write {FILE}"))
    }

    /// Restores the host's sysctls.
    pub(super) fn set_back(&self) -> Result<()> {
        for (name, value) in &self.settings {
            let path = Path::new("/proc/sys").join(name);
            if fs::read_to_string(&path)?.trim() != value {
                fs::write(&path, value).with_context(|| format!("restore {name} to {value}"))?;
            }
        }
        Ok(())
    }
}

/// Permission to change the cluster; released with the process.
#[derive(Debug)]
pub(super) struct Lock(#[expect(dead_code, reason = "closing it is what unlocks")] File);

impl Lock {
    /// Waits until it is free.
    pub(super) fn take() -> Result<Self> {
        // Lock the parent folder: a lock file of our own would have to remain.
        let parent = Path::new(DIRECTORY).parent().unwrap_or(Path::new("/"));
        let file = File::open(parent).with_context(|| format!("open {}", parent.display()))?;
        file.lock().with_context(|| format!("lock {}", parent.display()))?;
        Ok(Self(file))
    }
}
