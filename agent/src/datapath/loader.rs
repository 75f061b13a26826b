//! Loads a build with the maps pinned in one directory.

use super::error::DatapathError;
use super::layout::Declared;
use super::pins::{Side, remove_pin};
use super::programs::Build;
use aya::programs::{ProgramError, SchedClassifier};
use aya::{Ebpf, EbpfLoader};
use cistern_ebpf_common::map;
use std::collections::BTreeMap;

/// How many entries the flow maps hold. Maps that are pinned already keep what they have
/// ([`CapacityMismatch`](super::CapacityMismatch)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacities {
    /// Translated flows; about 150 bytes of kernel memory each, in two maps.
    pub flows: u32,
    /// Flows opened from outside.
    pub inbound: u32,
}

impl Default for Capacities {
    fn default() -> Self {
        Self { flows: map::REV_ENTRIES as u32, inbound: map::INBOUND_ENTRIES as u32 }
    }
}

impl Capacities {
    /// The capacity of a map that is set here instead of in the object.
    pub(super) fn of(self, name: &str) -> Option<u32> {
        match name {
            map::REV | map::FWD => Some(self.flows),
            map::INBOUND => Some(self.inbound),
            _ => None,
        }
    }
}

/// Loads the programs, creates missing maps, and pins everything. Replaces the pinned programs; links keep their
/// programs.
pub(super) fn load(
    side: &Side,
    build: &Build<'_>,
    declared: &BTreeMap<String, Declared>,
    capacities: Capacities,
) -> Result<Ebpf, DatapathError> {
    let mut loader = EbpfLoader::new();
    for name in declared.keys() {
        loader.map_pin_path(name, side.map(name));
        if let Some(entries) = capacities.of(name) {
            loader.map_max_entries(name, entries);
        }
    }
    let mut ebpf = loader.load(build.object).map_err(|error| DatapathError::Load(Box::new(error)))?;

    for program in build.programs {
        let name = program.name;
        program.check()?;
        let failed = |action: &str| {
            let action = action.to_owned();
            move |source: ProgramError| DatapathError::Program { program: name, action, source: Box::new(source) }
        };
        let loaded: &mut SchedClassifier = ebpf
            .program_mut(name)
            .ok_or_else(|| DatapathError::Io {
                action: format!("find program {name} in the eBPF object"),
                source: std::io::ErrorKind::NotFound.into(),
            })?
            .try_into()
            .map_err(failed("use it as a tc classifier"))?;
        loaded.load().map_err(failed("load it"))?;
        let path = side.program(name);
        remove_pin(&path)?;
        loaded.pin(&path).map_err(|error| failed("pin it")(ProgramError::IOError(std::io::Error::other(error))))?;
    }
    side.remove_unknown("progs", |name| build.programs.iter().any(|program| program.name == name))?;
    Ok(ebpf)
}
