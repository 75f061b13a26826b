//! What is remembered of a cluster while it is up, and the lock of those who change it.

use super::spec::Spec;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

/// Where everything of the cluster lies.
pub const DIRECTORY: &str = "/var/lib/cistern-cluster";
const FILE: &str = "/var/lib/cistern-cluster/state.json";

/// Settings of the whole machine that a kubelet changes.
const SETTINGS: [&str; 6] = [
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
];

/// A cluster, and the machine before it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) spec: Spec,
    settings: BTreeMap<String, String>,
}

impl State {
    /// Remembers the machine's settings.
    pub(super) fn of_this_host(spec: &Spec) -> Result<Self> {
        let read = |name: &&str| {
            let value =
                fs::read_to_string(Path::new("/proc/sys").join(name)).with_context(|| format!("read {name}"))?;
            Ok(((*name).to_owned(), value.trim().to_owned()))
        };
        Ok(Self { spec: spec.clone(), settings: SETTINGS.iter().map(read).collect::<Result<_>>()? })
    }

    /// What an earlier one remembered.
    pub(super) fn read() -> Result<Option<Self>> {
        match fs::read_to_string(FILE) {
            Ok(text) => serde_json::from_str(&text).map(Some).with_context(|| format!("read {FILE}")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {FILE}")),
        }
    }

    pub(super) fn write(&self) -> Result<()> {
        fs::create_dir_all(DIRECTORY).with_context(|| format!("make {DIRECTORY}"))?;
        let unfinished = format!("{FILE}.unfinished");
        fs::write(&unfinished, serde_json::to_vec_pretty(self)?)?;
        fs::rename(&unfinished, FILE).with_context(|| format!("write {FILE}"))
    }

    /// Gives the machine its settings back.
    pub(super) fn set_back(&self) -> Result<()> {
        for (name, value) in &self.settings {
            let path = Path::new("/proc/sys").join(name);
            if fs::read_to_string(&path)?.trim() != value {
                fs::write(&path, value).with_context(|| format!("set {name} back to {value}"))?;
            }
        }
        Ok(())
    }
}

/// Whoever has it changes the cluster; it ends with the process.
#[derive(Debug)]
pub(super) struct Lock(#[expect(dead_code, reason = "closing it is what unlocks")] File);

impl Lock {
    /// Waits for its turn.
    pub(super) fn take() -> Result<Self> {
        // The folder that the cluster's is made in: a file of our own would have to be left behind.
        let parent = Path::new(DIRECTORY).parent().unwrap_or(Path::new("/"));
        let file = File::open(parent).with_context(|| format!("open {}", parent.display()))?;
        file.lock().with_context(|| format!("lock {}", parent.display()))?;
        Ok(Self(file))
    }
}
