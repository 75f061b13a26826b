//! The table of kernel programs.

use super::error::DatapathError;
use aya::programs::tc::TcAttachType;
use aya::util::KernelVersion;

/// Attach point of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Packets that arrive by an egress device. First in the device's chain, so that other programs see pod addresses.
    Ingress,
    /// Packets that leave by an egress device. Last in the device's chain, for the same reason.
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

/// A kernel feature that a program requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// tcx links: several ordered programs per hook, each replaced in place (Linux 6.6,
    /// <https://git.kernel.org/torvalds/c/e420bed02507>).
    Tcx,
}

impl Feature {
    /// Name, and the first kernel version that has it.
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
    /// Its attach point.
    pub hook: Hook,
    /// Prefix of its links' pins: `LINK_IFINDEX`.
    pub link: &'static str,
    /// Required kernel features.
    pub features: &'static [Feature],
}

impl Program {
    pub(super) fn hook(&self) -> Hook {
        self.hook
    }

    /// Whether this kernel has the required features.
    pub(super) fn check(&self) -> Result<(), DatapathError> {
        let Ok(kernel) = KernelVersion::current() else { return Ok(()) };
        let missing = self.features.iter().map(|feature| feature.describe()).find(|(_, _, since)| kernel < *since);
        missing.map_or(Ok(()), |(feature, since, _)| Err(DatapathError::Feature { program: self.name, feature, since }))
    }
}

/// All programs, in the order in which they are attached to a device; they are detached in reverse order. The ingress
/// program comes before the egress program, so that replies of translated packets can always be translated back.
pub const PROGRAMS: &[Program] = &[
    Program { name: "cistern_ingress", hook: Hook::Ingress, link: "ingress", features: &[Feature::Tcx] },
    Program { name: "cistern_egress", hook: Hook::Egress, link: "egress", features: &[Feature::Tcx] },
    #[cfg(feature = "test-variant")]
    Program { name: "cistern_variant", hook: Hook::Ingress, link: "variant", features: &[Feature::Tcx] },
];

/// A build of the kernel programs: the eBPF object, and the attach points of its programs.
#[derive(Debug, Clone, Copy)]
pub struct Build<'a> {
    /// The ELF object.
    pub object: &'a [u8],
    /// Its programs, in the order in which they are attached.
    pub programs: &'a [Program],
}

impl Build<'static> {
    /// The build embedded in this agent.
    ///
    /// # Errors
    /// The agent was built without the eBPF object.
    pub fn embedded() -> Result<Self, DatapathError> {
        let object = super::object::object().ok_or(DatapathError::NoObject)?;
        Ok(Self { object, programs: PROGRAMS })
    }
}
