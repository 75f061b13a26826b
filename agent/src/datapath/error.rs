//! What can go wrong between the agent and the kernel's eBPF.

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
    /// The place for pins is on no bpffs.
    #[error(
        "{} is not on a bpffs, so nothing there would outlive the agent: mount one first (`mount -t bpf bpf /sys/fs/bpf`)",
        path.display()
    )]
    NotBpffs {
        /// The nearest directory that exists.
        path: PathBuf,
    },
    /// A pinned map is not what this agent expects.
    #[error(
        "pinned map {} has {field} {found}, and this agent expects {expected}: the datapath of before goes on; run \
         `rm -r` on the directory of the pins, which ends the flows that are open, or go back to the former setting",
        path.display()
    )]
    Incompatible {
        /// The pin.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// What the pinned map has.
        found: String,
        /// What is expected.
        expected: String,
    },
    /// The eBPF object is not one that this agent can use.
    #[error("the eBPF object cannot be used: {0}")]
    Object(String),
    /// The kernel lacks what a program needs.
    #[error("program {program} needs {feature} (Linux {since} or newer): the datapath is not started")]
    Feature {
        /// The program's name.
        program: &'static str,
        /// What it needs.
        feature: &'static str,
        /// The first release that has it.
        since: &'static str,
    },
    /// The description of the pinned maps cannot be used.
    #[error(
        "the description of the pinned maps, {}, cannot be used: {error}: the programs that are attached continue; run the agent that \
         pinned it, or remove the directory of the pins, which ends the flows that are open",
        path.display()
    )]
    Layouts {
        /// The pin.
        path: PathBuf,
        /// Why.
        error: String,
    },
    /// The object could not be loaded.
    #[error("cannot load the eBPF programs")]
    Load(#[source] Box<aya::EbpfError>),
    /// A program was refused, or could not be attached.
    #[error("program {program}: cannot {action}")]
    Program {
        /// Its name.
        program: &'static str,
        /// What was tried, with its object.
        action: String,
        /// Why it failed.
        source: Box<aya::programs::ProgramError>,
    },
    /// A map could not be read or written.
    #[error("map {map}: cannot {action}")]
    Map {
        /// Its name.
        map: &'static str,
        /// What was tried, with its object.
        action: String,
        /// Why it failed.
        source: Box<aya::maps::MapError>,
    },
    /// A map is full.
    #[error("map {map} is full: {key} is not in force, the rows of before are")]
    Full {
        /// Its name.
        map: &'static str,
        /// What did not fit.
        key: String,
    },
    /// A value in a map is none that an agent of this version writes.
    #[error("map {map}, row {key}: unknown {field} {value}")]
    Foreign {
        /// The map's name.
        map: &'static str,
        /// The row.
        key: String,
        /// The field.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
    /// A file, a pin or a plain system call.
    #[error("cannot {action}")]
    Io {
        /// What was tried, with its object.
        action: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The device has gone.
    #[error("device {name} (ifindex {ifindex}) does not exist any more")]
    NoDevice {
        /// Its name.
        name: String,
        /// Its index.
        ifindex: u32,
    },
    /// The programs log nothing, since the ring buffer is missing.
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
