//! The kernel programs: one table.

use super::error::DatapathError;
use aya::programs::tc::TcAttachType;
use aya::util::KernelVersion;

/// Where a program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Packets that come in by an egress device. First among all programs there, so that the others see pod addresses.
    Ingress,
    /// Packets that leave by an egress device. Last among all programs there, for the same reason.
    Egress,
}

impl Hook {
    pub(super) const fn attach_type(self) -> TcAttachType {
        match self {
            Self::Ingress => TcAttachType::Ingress,
            Self::Egress => TcAttachType::Egress,
        }
    }
}

/// What a program needs from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// tcx links: several programs on one hook, in an order, each swapped in place (Linux 6.6,
    /// <https://git.kernel.org/torvalds/c/e420bed02507>).
    Tcx,
}

impl Feature {
    /// Name, and the first release that has it.
    const fn describe(self) -> (&'static str, &'static str, KernelVersion) {
        match self {
            Self::Tcx => ("tcx", "6.6", KernelVersion::new(6, 6, 0)),
        }
    }
}

/// A kernel program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    /// Its name in the object.
    pub name: &'static str,
    /// Where it is attached.
    pub hook: Hook,
    /// How the pins of its links start: `LINK_IFINDEX`.
    pub link: &'static str,
    /// What it needs from the kernel.
    pub features: &'static [Feature],
}

impl Program {
    pub(super) fn hook(&self) -> Hook {
        self.hook
    }

    /// Whether this kernel has what the program needs.
    pub(super) fn check(&self) -> Result<(), DatapathError> {
        let Ok(kernel) = KernelVersion::current() else { return Ok(()) };
        let missing = self.features.iter().map(|feature| feature.describe()).find(|(_, _, since)| kernel < *since);
        missing.map_or(Ok(()), |(feature, since, _)| Err(DatapathError::Feature { program: self.name, feature, since }))
    }
}

/// All programs, in the order in which they are attached to a device; they are detached in the opposite order. The ingress program
/// comes before the egress program, so that no translated packet is sent whose answer would not be understood.
pub const PROGRAMS: &[Program] = &[
    Program { name: "cistern_ingress", hook: Hook::Ingress, link: "ingress", features: &[Feature::Tcx] },
    Program { name: "cistern_egress", hook: Hook::Egress, link: "egress", features: &[Feature::Tcx] },
];

/// A build of the kernel programs: the eBPF object, and which of its programs are attached where.
#[derive(Debug, Clone, Copy)]
pub struct Build<'a> {
    /// The ELF object.
    pub object: &'a [u8],
    /// Its programs, in the order in which they are attached.
    pub programs: &'a [Program],
}

impl Build<'static> {
    /// The build that is part of this agent.
    ///
    /// # Errors
    /// When the agent was built without its eBPF object.
    pub fn embedded() -> Result<Self, DatapathError> {
        let object = super::object::object().ok_or(DatapathError::NoObject)?;
        Ok(Self { object, programs: PROGRAMS })
    }
}
