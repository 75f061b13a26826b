//! Errors of the kernel's eBPF subsystem.

use cistern_core::reconcile::{Classify, ErrorClass};
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// An error of the datapath.
#[derive(Debug, Error)]
pub enum DatapathError {
    /// The agent was built without the eBPF object.
    #[error("this cistern was built without its eBPF object: run `cargo xtask build-ebpf` and build again")]
    NoObject,
    /// The directory for pins is not on a bpffs.
    #[error(
        "{} is not on a bpffs, so pins there would not outlive the agent: mount one first (`mount -t bpf bpf /sys/fs/bpf`)",
        path.display()
    )]
    NotBpffs {
        /// The nearest existing directory.
        path: PathBuf,
    },
    /// A pinned map differs from what this agent expects.
    #[error(
        "pinned map {} has {field} {found}, and this agent expects {expected}: the previous datapath continues; run \
         `rm -r` on the directory of the pins, which ends open flows, or revert the setting",
        path.display()
    )]
    Incompatible {
        /// The pinned map.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// The value of the pinned map.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// This agent cannot use the eBPF object.
    #[error("the eBPF object cannot be used: {0}")]
    Object(String),
    /// The kernel lacks a feature that a program requires.
    #[error("program {program} needs {feature} (Linux {since} or newer): the datapath is not started")]
    Feature {
        /// The program's name.
        program: &'static str,
        /// The feature.
        feature: &'static str,
        /// The first kernel version that has it.
        since: &'static str,
    },
    /// The description of the pinned maps is invalid.
    #[error(
        "the description of the pinned maps, {}, cannot be used: {error}: the programs that are attached continue; run the agent that \
         pinned it, or remove the directory of the pins, which ends the flows that are open",
        path.display()
    )]
    Layouts {
        /// The pinned map.
        path: PathBuf,
        /// The reason.
        error: String,
    },
    /// The object could not be loaded.
    #[error("cannot load the eBPF programs")]
    Load(#[source] Box<aya::EbpfError>),
    /// A program was rejected, or could not be attached.
    #[error("program {program}: cannot {action}")]
    Program {
        /// Its name.
        program: &'static str,
        /// The operation and its object.
        action: String,
        /// The cause.
        source: Box<aya::programs::ProgramError>,
    },
    /// A map could not be read or written.
    #[error("map {map}: cannot {action}")]
    Map {
        /// Its name.
        map: &'static str,
        /// The operation and its object.
        action: String,
        /// The cause.
        source: Box<aya::maps::MapError>,
    },
    /// A map is full.
    #[error("map {map} is full: {key} is not in force, the rows of before are")]
    Full {
        /// Its name.
        map: &'static str,
        /// The key that was not inserted.
        key: String,
    },
    /// A map has a value that this version does not know.
    #[error("map {map}, row {key}: unknown {field} {value}")]
    Foreign {
        /// The map's name.
        map: &'static str,
        /// The row.
        key: String,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A file, a pin or a plain system call.
    #[error("cannot {action}")]
    Io {
        /// The operation and its object.
        action: String,
        /// The cause.
        source: io::Error,
    },
    /// The device no longer exists.
    #[error("device {name} (ifindex {ifindex}) does not exist any more")]
    NoDevice {
        /// Its name.
        name: String,
        /// Its index.
        ifindex: u32,
    },
    /// Events of the programs cannot be read, because the ring buffer is missing.
    #[error("cannot read what the programs log")]
    Events(#[source] Box<aya_log::Error>),
}

impl DatapathError {
    pub(super) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

impl Classify for DatapathError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoObject
            | Self::Object(_)
            | Self::Feature { .. }
            | Self::Layouts { .. }
            | Self::NotBpffs { .. }
            | Self::Incompatible { .. }
            | Self::Load(_)
            | Self::Foreign { .. }
            | Self::Full { .. }
            | Self::Events(_) => ErrorClass::Permanent,
            Self::Program { .. } | Self::Map { .. } | Self::Io { .. } | Self::NoDevice { .. } => ErrorClass::Transient,
        }
    }
}
