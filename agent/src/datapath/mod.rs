//! The kernel side of masquerading: loads the programs, keeps their maps equal to the tables, and attaches them to the
//! egress devices.
//!
//! ```text
//!  object ─► handover ─► loader ─► pins/maps ◄─ maps: Excluded, Endpoints, Devices, Settings (Operations)   View (reads)
//!                            │                    collector (deletes expired entries)
//!                            └────► pins/progs ─► attach: Attachments (Operations) ─► pins/links
//! ```
//!
//! Everything is pinned, so that packets are served while no agent runs. A new agent compares the pinned maps with those that it
//! declares. Maps that it can use it uses as they are, and swaps the programs of each link in place; otherwise new maps take over
//! with every row. The NAT maps are never cleared.
//!
//! | file | purpose |
//! |---|---|
//! | `object` | the embedded ELF object |
//! | `programs` | the table of programs: where each is attached, and what it needs from the kernel |
//! | `pins` | where things are pinned |
//! | `layout`, `btf` | the fields of rows, and when two builds can use the same |
//! | `handover` | from one build to another: the order of a takeover, and what a kill leaves |
//! | `loader` | loads the object with the pinned maps |
//! | `maps` | conversion of core values to the bytes of the maps, and back |
//! | `attach` | tcx links |
//! | `collector` | deletes expired entries |
//! | `events` | log events of the programs |
//! | `kernel` | system calls that aya does not provide |
//! | `error` | errors of all of them |

mod attach;
mod btf;
mod collector;
mod error;
mod events;
mod handover;
mod kernel;
mod layout;
mod loader;
mod maps;
mod object;
mod pins;
mod programs;

pub use attach::{Attachments, Chain, ChainProgram};
pub use collector::{Collected, Collector, SLICE};
pub use error::DatapathError;
pub use events::Events;
pub use handover::{CapacityMismatch, Observer, Step};
pub use loader::Capacities;
pub use maps::{Devices, Endpoints, Excluded, ExcludedRow, Settings, View};
pub use object::{build_id, present};
pub use pins::{DEFAULT_ROOT, Pins};
pub use programs::{Build, Feature, Hook, PROGRAMS, Program};

use handover::Opened;
use maps::SharedSlot;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The loaded datapath, which opens a handle for each target.
///
/// Handles own their file descriptors, so that they can be used in separate tasks. There must be only one `Datapath`
/// per root at a time, because handles cache what they wrote.
#[derive(Debug)]
pub struct Datapath {
    pins: Pins,
    slot: SharedSlot,
    kept: Vec<CapacityMismatch>,
    maps: BTreeSet<String>,
}

impl Datapath {
    /// Loads the programs with the maps pinned under `root`, creating missing ones. Nothing is attached, and programs
    /// attached by a previous agent continue until [`Attachments`] replaces them; if the rows of pinned maps differ,
    /// however, the programs take over here.
    ///
    /// # Errors
    /// [`DatapathError::NoObject`] if the agent was built without the eBPF object, [`DatapathError::NotBpffs`] if
    /// `root` is not on a bpffs, [`DatapathError::Incompatible`] if a pinned map is not ours, or the kernel's error.
    pub fn open(root: impl Into<PathBuf>, capacities: Capacities) -> Result<(Self, Events), DatapathError> {
        Self::open_build(root, &Build::embedded()?, capacities, &mut |_| Ok(()))
    }

    /// [`Datapath::open`] for a build of the programs, with an observer of the takeover's steps.
    ///
    /// # Errors
    /// As [`Datapath::open`], or the observer's.
    pub fn open_build(
        root: impl Into<PathBuf>,
        build: &Build<'_>,
        capacities: Capacities,
        observer: Observer<'_>,
    ) -> Result<(Self, Events), DatapathError> {
        let pins = Pins::new(root);
        let Opened { mut ebpf, declared, kept } = handover::open(&pins, build, capacities, observer)?;
        let slot = SharedSlot::open(&pins)?;
        let maps = declared.into_keys().collect();
        Ok((Self { pins, slot, kept, maps }, Events::take(&mut ebpf)?))
    }

    /// Maps with another capacity than requested.
    #[must_use]
    pub fn capacity_mismatches(&self) -> &[CapacityMismatch] {
        &self.kept
    }

    /// Excluded destinations.
    ///
    /// # Errors
    /// The pinned map cannot be opened or read.
    pub fn excluded(&self) -> Result<Excluded, DatapathError> {
        Excluded::open(&self.pins, self.slot.clone())
    }

    /// The pods of this node.
    ///
    /// # Errors
    /// The pinned map cannot be opened.
    pub fn endpoints(&self) -> Result<Endpoints, DatapathError> {
        Endpoints::open(&self.pins, self.slot.clone())
    }

    /// The egress devices and their addresses.
    ///
    /// # Errors
    /// The pinned map cannot be opened.
    pub fn devices(&self) -> Result<Devices, DatapathError> {
        Devices::open(&self.pins, self.slot.clone())
    }

    /// The node-wide settings. `fresh_key` becomes the key of the port selection, unless the maps have one already.
    ///
    /// # Errors
    /// The pinned maps cannot be opened.
    pub fn settings(&self, fresh_key: [u64; 2]) -> Result<Settings, DatapathError> {
        Settings::open(&self.pins, self.slot.clone(), fresh_key)
    }

    /// The programs on the egress devices.
    ///
    /// # Errors
    /// The pinned programs cannot be opened.
    pub fn attachments(&self) -> Result<Attachments, DatapathError> {
        self.attachments_of(&Build::embedded()?)
    }

    /// [`Datapath::attachments`] for a build of the programs.
    ///
    /// # Errors
    /// The pinned programs cannot be opened.
    pub fn attachments_of(&self, build: &Build<'_>) -> Result<Attachments, DatapathError> {
        Attachments::open(self.pins.serving(), build, self.maps.clone())
    }

    /// The collector of expired NAT entries.
    ///
    /// # Errors
    /// The pinned maps cannot be opened.
    pub fn collector(&self) -> Result<Collector, DatapathError> {
        Collector::open(&self.pins)
    }

    /// A reader of all maps, for listings.
    ///
    /// # Errors
    /// The pinned maps cannot be opened.
    pub fn view(&self) -> Result<View, DatapathError> {
        View::open(&self.pins)
    }

    /// The paths of pinned objects.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }
}
