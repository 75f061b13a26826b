//! Attachment of the programs to egress devices by tcx links, pinned per device.

use super::error::DatapathError;
use super::kernel::{self, ENOLINK, TcxLink};
use super::layout::LAYOUTS;
use super::pins::{Side, remove_link};
use super::programs::{Build, Hook, Program};
use crate::reconciler::BlockingOperations;
use aya::programs::links::{FdLink, LinkError, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, TcAttachOptions};
use aya::programs::{LinkOrder, ProgramError, SchedClassifier};
use cistern_core::masquerade::plan::AttachmentEntry;
use nix::net::if_::if_indextoname;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

/// The programs on the egress devices, by `ifindex`.
///
/// They are attached in the order of their table, and detached in reverse order. Programs of another build that this
/// one does not know are detached from a device after its own have been attached there.
#[derive(Debug)]
pub struct Attachments {
    side: Side,
    programs: Vec<Attached>,
    /// The maps of this build.
    maps: BTreeSet<String>,
}

/// An attached program.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) spec: Program,
    program: SchedClassifier,
    /// The program's ID.
    id: u32,
}

/// A program in a device's chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChainProgram {
    /// The program's ID.
    pub id: u32,
    /// Its name, as truncated by the kernel.
    pub name: String,
    /// Whether it is this agent's.
    pub ours: bool,
}

/// The programs of a device, in the order in which they run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chain {
    /// For arriving packets.
    pub ingress: Vec<ChainProgram>,
    /// For leaving packets.
    pub egress: Vec<ChainProgram>,
}

impl Attached {
    /// The pinned programs of a build.
    pub(super) fn open_all(side: &Side, build: &Build<'_>) -> Result<Vec<Self>, DatapathError> {
        build.programs.iter().map(|spec| Self::open(side, *spec)).collect()
    }

    fn open(side: &Side, spec: Program) -> Result<Self, DatapathError> {
        let path = side.program(spec.name);
        let action = format!("open its pin {}", path.display());
        let opened = SchedClassifier::from_pin(&path).and_then(|program| {
            let id = program.info()?.id();
            Ok((program, id))
        });
        let (program, id) =
            opened.map_err(|source| DatapathError::Program { program: spec.name, action, source: Box::new(source) })?;
        Ok(Self { spec, program, id })
    }

    fn failed(&self, action: String) -> impl FnOnce(ProgramError) -> DatapathError + use<> {
        let program = self.spec.name;
        move |source| DatapathError::Program { program, action, source: Box::new(source) }
    }

    /// Makes the device run this program: updates a pinned link in place (`BPF_LINK_UPDATE`), or attaches and pins a
    /// new one. A link whose device no longer exists is replaced.
    fn ensure(&mut self, side: &Side, ifindex: u32, device: &str) -> Result<(), DatapathError> {
        let path = side.link(self.spec.link, ifindex);
        match kernel::tcx_link(&path) {
            Ok(link) if link.ifindex == ifindex && link.program_id == self.id => return Ok(()),
            Ok(link) if link.ifindex == ifindex => match self.swap(&path) {
                Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(ENOLINK) => {
                    remove_link(&path)?;
                }
                result => {
                    return result.map_err(self.failed(format!("replace the previous program on {device}")));
                }
            },
            Ok(_) => remove_link(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(DatapathError::io(format!("open link {}", path.display()))(error)),
        }
        let order = match self.spec.hook {
            Hook::Ingress => LinkOrder::first(),
            Hook::Egress => LinkOrder::last(),
        };
        self.attach(&path, device, order).map_err(self.failed(format!("attach it to {device}")))
    }

    /// Attaches this program directly after the one whose link is pinned at `before`, unless it is attached already.
    pub(super) fn ensure_after(&mut self, side: &Side, ifindex: u32, before: &Path) -> Result<(), DatapathError> {
        let path = side.link(self.spec.link, ifindex);
        let device = device_name(ifindex).ok_or_else(|| DatapathError::NoDevice { name: String::new(), ifindex })?;
        match kernel::tcx_link(&path) {
            Ok(link) if link.ifindex == ifindex => return Ok(()),
            Ok(_) => remove_link(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(DatapathError::io(format!("open link {}", path.display()))(error)),
        }
        let mut attached = || {
            let pinned = PinnedLink::from_pin(before).map_err(link_error)?;
            let link = SchedClassifierLink::try_from(FdLink::from(pinned)).map_err(link_error)?;
            self.attach(&path, &device, LinkOrder::after_link(&link).map_err(link_error)?)
        };
        attached().map_err(self.failed(format!("attach it to {device} behind {}", before.display())))
    }

    /// Replaces the program of a pinned link atomically: no packet passes without a program.
    fn swap(&mut self, path: &Path) -> Result<(), ProgramError> {
        let pinned = PinnedLink::from_pin(path).map_err(link_error)?;
        let link = SchedClassifierLink::try_from(FdLink::from(pinned)).map_err(link_error)?;
        let id = self.program.attach_to_link(link)?;
        // The pin keeps the link alive; our descriptor is closed here.
        self.program.take_link(id).map(drop)
    }

    /// Attaches by a new link, and pins it at once: an unpinned link ends with this process.
    fn attach(&mut self, path: &Path, device: &str, order: LinkOrder) -> Result<(), ProgramError> {
        let attach = self.spec.hook.attach_type();
        let id = self.program.attach_with_options(device, attach, TcAttachOptions::TcxOrder(order))?;
        let link = FdLink::try_from(self.program.take_link(id)?).map_err(link_error)?;
        link.pin(path).map(drop).map_err(|error| ProgramError::IOError(io::Error::other(error)))
    }

    /// Whether the device runs this program.
    fn runs(&self, side: &Side, ifindex: u32) -> Result<bool, DatapathError> {
        let path = side.link(self.spec.link, ifindex);
        match kernel::tcx_link(&path) {
            Ok(link) => Ok(link == TcxLink { program_id: self.id, ifindex }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(DatapathError::io(format!("open link {}", path.display()))(error)),
        }
    }
}

fn link_error(error: LinkError) -> ProgramError {
    match error {
        LinkError::SyscallError(error) => error.into(),
        error => ProgramError::IOError(io::Error::other(error)),
    }
}

impl Attachments {
    pub(super) fn open(side: Side, build: &Build<'_>, maps: BTreeSet<String>) -> Result<Self, DatapathError> {
        let programs = Attached::open_all(&side, build)?;
        Ok(Self { side, programs, maps })
    }

    /// Makes a device run the programs of this agent, and no others of ours.
    ///
    /// # Errors
    /// [`DatapathError::NoDevice`], or the kernel's error. Ingress may be attached without egress then, but not vice
    /// versa.
    pub fn attach(&mut self, ifindex: u32, name: &str) -> Result<(), DatapathError> {
        let gone = || DatapathError::NoDevice { name: name.to_owned(), ifindex };
        let device = device_name(ifindex).ok_or_else(gone)?;
        for program in &mut self.programs {
            program.ensure(&self.side, ifindex, &device)?;
        }
        for unknown in self.unknown(ifindex)? {
            remove_link(&self.side.link(&unknown, ifindex))?;
        }
        self.forget_unknown_maps()
    }

    /// Detaches all programs of ours from a device, which need not exist any more.
    ///
    /// # Errors
    /// A pin could not be removed.
    pub fn detach(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        for unknown in self.unknown(ifindex)? {
            remove_link(&self.side.link(&unknown, ifindex))?;
        }
        for program in self.programs.iter().rev() {
            remove_link(&self.side.link(program.spec.link, ifindex))?;
        }
        self.forget_unknown_maps()
    }

    /// Programs of another build that are attached to the device.
    fn unknown(&self, ifindex: u32) -> Result<Vec<String>, DatapathError> {
        let links = self.side.links()?.into_iter().filter(|link| link.ifindex == ifindex);
        Ok(links.map(|link| link.program).filter(|name| !self.knows(name)).collect())
    }

    fn knows(&self, link: &str) -> bool {
        self.programs.iter().any(|program| program.spec.link == link)
    }

    /// Removes maps of programs that this build does not know, once none of them runs anywhere. If the other build is
    /// started again, it starts with an empty map instead of outdated rows.
    fn forget_unknown_maps(&self) -> Result<(), DatapathError> {
        if self.side.links()?.iter().all(|link| self.knows(&link.program)) {
            self.side.remove_unknown("maps", |name| self.maps.contains(name) || name == LAYOUTS)?;
        }
        Ok(())
    }

    /// Devices with pinned links of ours, by any agent, and whether they run the programs of this agent and no others
    /// of ours.
    ///
    /// # Errors
    /// The pins cannot be read.
    pub fn attached(&self) -> Result<BTreeMap<u32, AttachmentEntry>, DatapathError> {
        let devices: BTreeSet<u32> = self.side.links()?.into_iter().map(|link| link.ifindex).collect();
        devices
            .into_iter()
            .map(|ifindex| {
                // A device that moved to another namespace keeps its links.
                let name = device_name(ifindex).unwrap_or_default();
                let mut complete = !name.is_empty() && self.unknown(ifindex)?.is_empty();
                for program in &self.programs {
                    complete = complete && program.runs(&self.side, ifindex)?;
                }
                Ok((ifindex, AttachmentEntry { name, complete }))
            })
            .collect()
    }

    /// All programs attached to a device, including foreign ones, to show a wrong position.
    ///
    /// # Errors
    /// [`DatapathError::NoDevice`], or the kernel's error.
    pub fn chain(&self, ifindex: u32) -> Result<Chain, DatapathError> {
        let device = device_name(ifindex).ok_or_else(|| DatapathError::NoDevice { name: String::new(), ifindex })?;
        let chain = |hook: Hook| {
            let (_, programs) = SchedClassifier::query_tcx(&device, hook.attach_type()).map_err(|source| {
                let action = format!("list what is attached to {device}");
                DatapathError::Io { action, source: io::Error::other(source) }
            })?;
            Ok::<_, DatapathError>(
                programs
                    .iter()
                    .map(|program| ChainProgram {
                        id: program.id(),
                        name: program.name_as_str().unwrap_or_default().to_owned(),
                        ours: self.programs.iter().any(|own| own.id == program.id()),
                    })
                    .collect(),
            )
        };
        Ok(Chain { ingress: chain(Hook::Ingress)?, egress: chain(Hook::Egress)? })
    }
}

/// The device's current name; `None` if it does not exist, for which the library returns an empty name instead of an
/// error.
pub(super) fn device_name(ifindex: u32) -> Option<String> {
    if_indextoname(ifindex).ok().and_then(|name| name.into_string().ok()).filter(|name| !name.is_empty())
}

impl BlockingOperations for Attachments {
    type Key = u32;
    type Value = AttachmentEntry;
    type Error = DatapathError;

    fn update(&mut self, key: &u32, value: &AttachmentEntry) -> Result<(), DatapathError> {
        self.attach(*key, &value.name)
    }

    fn delete(&mut self, key: &u32) -> Result<(), DatapathError> {
        self.detach(*key)
    }

    fn observe(&mut self) -> Result<BTreeMap<u32, AttachmentEntry>, DatapathError> {
        self.attached()
    }
}
