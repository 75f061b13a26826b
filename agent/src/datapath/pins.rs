//! Where things are pinned, and whether a pinned map is what it should be.

use super::error::DatapathError;
use super::kernel::detach_link;
use super::loader::Capacities;
use aya::maps::{MapInfo, MapType, lpm_trie};
use aya::programs::tc::TcAttachType;
use cistern_ebpf_common::abi::{
    CounterValue, DeviceKey, DeviceValue, EndpointKey, EndpointValue, EventsValue, ExcludedAddress, ExcludedValue,
    FlowKey, FwdValue, InboundValue, PortWord, RevKey, RevValue, SettingsValue, TriesValue,
};
use cistern_ebpf_common::map;
use nix::sys::statfs::{FsType, statfs};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where everything is pinned unless a setting says otherwise.
pub const DEFAULT_ROOT: &str = "/sys/fs/bpf/cistern";

/// `BPF_FS_MAGIC` of `linux/magic.h`; the C library's headers lack it on some targets.
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

/// `BPF_F_NO_PREALLOC`, which the kernel demands of tries.
const NO_PREALLOC: u32 = 1;

/// The paths under one root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pins {
    root: PathBuf,
}

/// A map of flows that has another capacity than was asked for. It is used as it is: a new one would end every flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptCapacity {
    /// Its name.
    pub map: &'static str,
    /// Entries that it holds.
    pub found: String,
    /// Entries that were asked for.
    pub expected: String,
}

impl fmt::Display for KeptCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { map, found, expected } = self;
        write!(
            f,
            "{map} holds {found} entries, and {expected} are configured: it stays as it is, since a new one would end the \
             flows that are open; it gets its new capacity with the next boot of the machine"
        )
    }
}

/// What a map has to be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected {
    pub(super) name: &'static str,
    pub(super) kind: MapType,
    pub(super) key_size: usize,
    pub(super) value_size: usize,
    pub(super) capacity: usize,
    pub(super) flags: u32,
}

/// All maps, as this agent makes them.
pub(super) fn expected(capacities: Capacities) -> [Expected; map::ALL.len()] {
    const fn row<K, V>(name: &'static str, kind: MapType, capacity: usize) -> Expected {
        let flags = if matches!(kind, MapType::LpmTrie) { NO_PREALLOC } else { 0 };
        Expected { name, kind, key_size: size_of::<K>(), value_size: size_of::<V>(), capacity, flags }
    }
    let flows = capacities.flows as usize;
    let inbound = capacities.inbound as usize;
    [
        row::<RevKey, RevValue>(map::REV, MapType::Hash, flows),
        row::<FlowKey, FwdValue>(map::FWD, MapType::LruHash, flows),
        row::<FlowKey, InboundValue>(map::INBOUND, MapType::LruHash, inbound),
        row::<EndpointKey, EndpointValue>(map::ENDPOINTS, MapType::Hash, map::ENDPOINT_ENTRIES),
        row::<DeviceKey, DeviceValue>(map::DEVICES, MapType::Hash, map::DEVICE_ENTRIES),
        row::<lpm_trie::Key<ExcludedAddress>, ExcludedValue>(map::EXCLUDED, MapType::LpmTrie, map::EXCLUDED_ENTRIES),
        row::<u32, SettingsValue>(map::SETTINGS, MapType::Array, 1),
        row::<u32, PortWord>(map::PORTS, MapType::Array, map::PORT_WORDS),
        row::<u32, TriesValue>(map::TRIES, MapType::Array, 1),
        row::<u32, EventsValue>(map::EVENTS, MapType::Array, 1),
        row::<u32, CounterValue>(map::COUNTERS, MapType::PerCpuArray, map::COUNTER_ENTRIES),
    ]
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

    /// Where a map is pinned.
    #[must_use]
    pub fn map(&self, name: &str) -> PathBuf {
        self.root.join("maps").join(name)
    }

    /// Where a program is pinned.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.root.join("progs").join(name)
    }

    /// Where the links are pinned.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.root.join("links")
    }

    /// Where the link of a device is pinned. By index, since a device may be renamed, and since bpffs takes no dots.
    #[must_use]
    pub fn link(&self, direction: TcAttachType, ifindex: u32) -> PathBuf {
        let direction = if direction == TcAttachType::Ingress { "ingress" } else { "egress" };
        self.links().join(format!("{direction}_{ifindex}"))
    }

    /// Makes the directories.
    ///
    /// # Errors
    /// [`DatapathError::NotBpffs`] when pins there would be plain files, or the error of making a directory.
    pub(super) fn prepare(&self) -> Result<(), DatapathError> {
        let there = self.root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        let kind = statfs(there)
            .map_err(|errno| DatapathError::io(format!("ask what {} is mounted from", there.display()))(errno.into()))?
            .filesystem_type();
        if kind != FsType(BPF_FS_MAGIC) {
            return Err(DatapathError::NotBpffs { path: there.to_owned() });
        }
        for directory in ["maps", "links", "progs"] {
            let path = self.root.join(directory);
            fs::create_dir_all(&path).map_err(DatapathError::io(format!("make directory {}", path.display())))?;
        }
        Ok(())
    }

    /// Compares the pinned maps with those that this agent would create. A missing map is no difference, and neither is a
    /// capacity that another build left and that this one can use. Maps of flows with another capacity are returned.
    ///
    /// # Errors
    /// [`DatapathError::Incompatible`] with the first difference.
    pub(super) fn compare(&self, capacities: Capacities) -> Result<Vec<KeptCapacity>, DatapathError> {
        let mut kept = Vec::new();
        for map in expected(capacities) {
            let path = self.map(map.name);
            if !path.exists() {
                continue;
            }
            let info = MapInfo::from_pin(&path).map_err(|source| DatapathError::Map {
                map: map.name,
                action: format!("open its pin {}", path.display()),
                source: Box::new(source),
            })?;
            let kind = info.map_type().map_or_else(|error| error.to_string(), |kind| format!("{kind:?}"));
            for (field, found, expected) in [
                ("type", kind, format!("{:?}", map.kind)),
                ("key size", info.key_size().to_string(), map.key_size.to_string()),
                ("value size", info.value_size().to_string(), map.value_size.to_string()),
                ("flags", info.map_flags().to_string(), map.flags.to_string()),
            ] {
                if found != expected {
                    return Err(DatapathError::Incompatible { path, field, found, expected });
                }
            }
            let (found, expected) = (info.max_entries() as usize, map.capacity);
            match map.name {
                map::REV | map::FWD | map::INBOUND if found != expected => {
                    kept.push(KeptCapacity { map: map.name, found: found.to_string(), expected: expected.to_string() });
                }
                // A kind without a slot is not counted; everything else works.
                map::COUNTERS => {}
                _ if found < expected => {
                    let (found, expected) = (found.to_string(), format!("{expected} or more"));
                    return Err(DatapathError::Incompatible { path, field: "capacity", found, expected });
                }
                _ => {}
            }
        }
        Ok(kept)
    }

    /// Removes everything of ours: links first, egress before ingress, so that answers to open flows still come back
    /// until nothing new is sent; then programs, then maps. What others put on the same devices or into our folders stays.
    /// Absent pins are a success, so that an interrupted removal can be repeated. Whether there was anything of ours.
    ///
    /// # Errors
    /// The first pin that could not be removed; the rest is tried all the same.
    pub fn remove_all(&self) -> Result<bool, DatapathError> {
        let (mut first, mut found) = (Ok(()), false);
        let mut keep = |result: Result<(), DatapathError>| {
            if first.is_ok() {
                first = result;
            }
        };
        type Remove = fn(&Path) -> Result<(), DatapathError>;
        let all: [(&str, &str, Remove); 4] = [
            ("links", "egress_", remove_link),
            ("links", "ingress_", remove_link),
            ("progs", "", remove_pin),
            ("maps", "", remove_pin),
        ];
        for (directory, prefix, remove) in all {
            let path = self.root.join(directory);
            match fs::read_dir(&path) {
                Ok(entries) => {
                    for entry in entries.flatten() {
                        if entry.file_name().to_string_lossy().starts_with(prefix) {
                            found = true;
                            keep(remove(&entry.path()));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => keep(Err(DatapathError::io(format!("list {}", path.display()))(error))),
            }
        }
        for path in ["links", "progs", "maps", ""].map(|directory| self.root.join(directory)) {
            match fs::remove_dir(&path) {
                Ok(()) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {}
                Err(error) => keep(Err(DatapathError::io(format!("remove directory {}", path.display()))(error))),
            }
        }
        first.map(|()| found)
    }
}

/// Removes a pinned link; an absent one is a success. The program runs no more when this returns: without a pin the
/// kernel would take it off some time later.
pub(super) fn remove_link(path: &Path) -> Result<(), DatapathError> {
    // Whatever the kernel has against it (the device has gone, say), without its pin the link ends.
    let _ = detach_link(path);
    remove_pin(path)
}

/// Removes a pin; an absent one is a success.
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
    fn what_somebody_else_pinned_beside_the_links_stays_and_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let pins = Pins::new(dir.path().join("cistern"));
        fs::create_dir_all(pins.links()).unwrap();
        let other = pins.links().join("other");
        for path in [&pins.link(TcAttachType::Egress, 7), &other] {
            fs::write(path, "").unwrap();
        }
        assert!(pins.remove_all().unwrap());
        assert!(!pins.remove_all().unwrap(), "nothing is ours any more");
        assert!(!pins.link(TcAttachType::Egress, 7).exists() && other.exists());
    }
}
