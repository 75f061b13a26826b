//! Loads the object over the pinned maps.

use super::error::DatapathError;
use super::events::Events;
use super::object;
use super::pins::{KeptCapacity, Pins, remove_pin};
use aya::EbpfLoader;
use aya::programs::{ProgramError, SchedClassifier};
use cistern_ebpf_common::map;

/// The egress program.
pub(super) const EGRESS: &str = "cistern_egress";
/// The ingress program.
pub(super) const INGRESS: &str = "cistern_ingress";

/// How many entries the flow maps hold. Maps that are pinned already keep what they have ([`KeptCapacity`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacities {
    /// Translated flows; about 100 bytes of kernel memory each, in two maps.
    pub flows: u32,
    /// Flows opened from outside that are remembered.
    pub inbound: u32,
}

impl Default for Capacities {
    fn default() -> Self {
        Self { flows: map::REV_ENTRIES as u32, inbound: map::INBOUND_ENTRIES as u32 }
    }
}

/// Loads both programs, makes the maps that are missing, and pins all of it. The programs replace what is pinned as
/// programs; the links keep what they run.
pub(super) fn load(pins: &Pins, capacities: Capacities) -> Result<(Events, Vec<KeptCapacity>), DatapathError> {
    let object = object::object().ok_or(DatapathError::NoObject)?;
    pins.prepare()?;
    let kept = pins.compare(capacities)?;

    let paths = map::ALL.map(|name| (name, pins.map(name)));
    let mut loader = EbpfLoader::new();
    for (name, path) in &paths {
        loader.map_pin_path(name, path.as_path());
    }
    loader.map_max_entries(map::REV, capacities.flows);
    loader.map_max_entries(map::FWD, capacities.flows);
    loader.map_max_entries(map::INBOUND, capacities.inbound);
    let mut ebpf = loader.load(object).map_err(|error| DatapathError::Load(Box::new(error)))?;

    for name in [INGRESS, EGRESS] {
        let failed = |action: &str| {
            let action = action.to_owned();
            move |source: ProgramError| DatapathError::Program { program: name, action, source: Box::new(source) }
        };
        let program: &mut SchedClassifier = ebpf
            .program_mut(name)
            .ok_or_else(|| DatapathError::Io {
                action: format!("find program {name} in the eBPF object"),
                source: std::io::ErrorKind::NotFound.into(),
            })?
            .try_into()
            .map_err(failed("use it as a tc classifier"))?;
        program.load().map_err(failed("load it"))?;
        let path = pins.program(name);
        remove_pin(&path)?;
        program.pin(&path).map_err(|error| failed("pin it")(ProgramError::IOError(std::io::Error::other(error))))?;
    }
    Ok((Events::take(&mut ebpf)?, kept))
}
