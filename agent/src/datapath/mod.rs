//! The kernel side of masquerading: loading the programs, keeping their maps equal to the tables, attaching them to the
//! egress devices.
//!
//! ```text
//!  object ─► handover ─► loader ─► pins/maps ◄─ maps: Excluded, Endpoints, Devices, Settings (Operations)   View (reads)
//!                            │                    collector (deletes what has had its time)
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
//! | `loader` | loads the object over the pinned maps |
//! | `maps` | the only place that turns core values into the bytes of the maps, and back |
//! | `attach` | tcx links |
//! | `collector` | deletes entries whose time is over |
//! | `events` | what the programs log |
//! | `kernel` | the system calls that aya does not offer |

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
pub use handover::{KeptCapacity, Observer, Step};
pub use loader::Capacities;
pub use maps::{Devices, Endpoints, Excluded, ExcludedRow, Settings, View};
pub use object::{build_id, present};
pub use pins::{DEFAULT_ROOT, Pins};
pub use programs::{Build, Feature, Hook, PROGRAMS, Program};

use handover::Opened;
use maps::SharedSlot;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The loaded datapath: hands out one handle for each target.
///
/// Every handle owns its file descriptors, so that each can live in a task of its own. There must be one `Datapath` at a
/// time for each root: the handles remember what they wrote.
#[derive(Debug)]
pub struct Datapath {
    pins: Pins,
    slot: SharedSlot,
    kept: Vec<KeptCapacity>,
    maps: BTreeSet<String>,
}

impl Datapath {
    /// Loads the programs over the maps pinned under `root`, which are created where they are missing. Nothing is attached, and
    /// what an agent before attached goes on with its programs until [`Attachments`] swaps them; but where the rows of pinned maps
    /// are others, the programs take over here.
    ///
    /// # Errors
    /// [`DatapathError::NoObject`] when the agent was built without the eBPF object, [`DatapathError::NotBpffs`] when
    /// `root` is on no bpffs, [`DatapathError::Incompatible`] when a pinned map is none of ours, and the kernel's errors.
    pub fn open(root: impl Into<PathBuf>, capacities: Capacities) -> Result<(Self, Events), DatapathError> {
        Self::open_build(root, &Build::embedded()?, capacities, &mut |_| Ok(()))
    }

    /// [`Datapath::open`] for a build of the programs, with an observer of the steps of a takeover.
    ///
    /// # Errors
    /// As [`Datapath::open`], and the observer's.
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

    /// Maps that have another capacity than was asked for.
    #[must_use]
    pub fn kept_capacities(&self) -> &[KeptCapacity] {
        &self.kept
    }

    /// The destinations that keep the pod's address.
    ///
    /// # Errors
    /// When the pinned map cannot be opened or read.
    pub fn excluded(&self) -> Result<Excluded, DatapathError> {
        Excluded::open(&self.pins, self.slot.clone())
    }

    /// The pods of this node.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn endpoints(&self) -> Result<Endpoints, DatapathError> {
        Endpoints::open(&self.pins, self.slot.clone())
    }

    /// The egress devices and their addresses.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn devices(&self) -> Result<Devices, DatapathError> {
        Devices::open(&self.pins, self.slot.clone())
    }

    /// The node-wide settings. `fresh_key` becomes the key of the port walk, unless the maps have one already.
    ///
    /// # Errors
    /// When the pinned maps cannot be opened.
    pub fn settings(&self, fresh_key: [u64; 2]) -> Result<Settings, DatapathError> {
        Settings::open(&self.pins, self.slot.clone(), fresh_key)
    }

    /// The programs on the egress devices.
    ///
    /// # Errors
    /// When the pinned programs cannot be opened.
    pub fn attachments(&self) -> Result<Attachments, DatapathError> {
        self.attachments_of(&Build::embedded()?)
    }

    /// [`Datapath::attachments`] for a build of the programs.
    ///
    /// # Errors
    /// When the pinned programs cannot be opened.
    pub fn attachments_of(&self, build: &Build<'_>) -> Result<Attachments, DatapathError> {
        Attachments::open(self.pins.serving(), build, self.maps.clone())
    }

    /// What deletes NAT entries whose time is over.
    ///
    /// # Errors
    /// When the pinned maps cannot be opened.
    pub fn collector(&self) -> Result<Collector, DatapathError> {
        Collector::open(&self.pins)
    }

    /// Reads of everything, for listings.
    ///
    /// # Errors
    /// When the pinned maps cannot be opened.
    pub fn view(&self) -> Result<View, DatapathError> {
        View::open(&self.pins)
    }

    /// Where everything is pinned.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }
}
