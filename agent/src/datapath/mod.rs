//! The kernel side of masquerading: loading the programs, keeping their maps equal to the tables, attaching them to the
//! egress devices.
//!
//! ```text
//!  object ─► loader ─► pins/maps ◄─ maps: Excluded, Endpoints, Devices, Settings (Operations)   View (reads)
//!               │                    collector (deletes what has had its time)
//!               └────► pins/progs ─► attach: Attachments (Operations) ─► pins/links
//! ```
//!
//! Everything is pinned, so that packets are served while no agent runs. A new agent compares the pinned maps with what
//! it expects, uses them as they are, and swaps the programs of each link in place. The NAT maps are never cleared.
//!
//! | file | purpose |
//! |---|---|
//! | `object` | the embedded ELF object |
//! | `pins` | where things are pinned, and whether a pinned map is what it should be |
//! | `loader` | loads the object over the pinned maps |
//! | `maps` | the only place that turns core values into the bytes of the maps, and back |
//! | `attach` | tcx links |
//! | `collector` | deletes entries whose time is over |
//! | `events` | what the programs log |
//! | `kernel` | the system calls that aya does not offer |

mod attach;
mod collector;
mod error;
mod events;
mod kernel;
mod loader;
mod maps;
mod object;
mod pins;

pub use attach::{Attachments, Chain, ChainProgram};
pub use collector::{Collected, Collector, SLICE};
pub use error::DatapathError;
pub use events::Events;
pub use loader::Capacities;
pub use maps::{Devices, Endpoints, Excluded, ExcludedRow, Settings, View};
pub use object::{build_id, present};
pub use pins::{DEFAULT_ROOT, KeptCapacity, Pins};

use maps::SharedSlot;
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
}

impl Datapath {
    /// Loads the programs over the maps pinned under `root`, which are made where they are missing. Nothing is attached,
    /// and what an agent before attached goes on with its programs until [`Attachments`] swaps them.
    ///
    /// # Errors
    /// [`DatapathError::NoObject`] when the agent was built without the eBPF object, [`DatapathError::NotBpffs`] when
    /// `root` is on no bpffs, [`DatapathError::Incompatible`] when a pinned map is not what this agent expects, and the
    /// kernel's errors.
    pub fn open(root: impl Into<PathBuf>, capacities: Capacities) -> Result<(Self, Events), DatapathError> {
        let pins = Pins::new(root);
        let (events, kept) = loader::load(&pins, capacities)?;
        let slot = SharedSlot::open(&pins)?;
        Ok((Self { pins, slot, kept }, events))
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
        Attachments::open(&self.pins)
    }

    /// What deletes NAT entries whose time is over.
    ///
    /// # Errors
    /// When the pinned maps cannot be opened.
    pub fn collector(&self) -> Result<Collector, DatapathError> {
        Collector::open(&self.pins)
    }

    /// Reads of everything, for people.
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
