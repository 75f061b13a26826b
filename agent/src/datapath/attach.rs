//! The programs on the egress devices: tcx links, pinned by device.

use super::error::DatapathError;
use super::kernel::{self, ENOLINK, TcxLink};
use super::loader::{EGRESS, INGRESS};
use super::pins::{Pins, remove_link};
use crate::reconciler::BlockingOperations;
use aya::programs::links::{FdLink, LinkError, PinnedLink};
use aya::programs::tc::{SchedClassifierLink, TcAttachOptions, TcAttachType};
use aya::programs::{LinkOrder, ProgramError, SchedClassifier};
use cistern_core::masquerade::plan::AttachmentEntry;
use nix::net::if_::if_indextoname;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;

/// The programs on the egress devices, by `ifindex`.
///
/// The ingress program is attached before the egress program, so that no translated packet is sent whose answer would
/// not be understood; and it stays one longer. Ingress stands first and egress last among what is attached to the
/// device: other programs then see pod addresses.
#[derive(Debug)]
pub struct Attachments {
    pins: Pins,
    ingress: Direction,
    egress: Direction,
}

/// One of the two programs.
#[derive(Debug)]
struct Direction {
    attach: TcAttachType,
    name: &'static str,
    program: SchedClassifier,
    /// The kernel's number of the program.
    id: u32,
}

/// A program in the chain of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChainProgram {
    /// The kernel's number.
    pub id: u32,
    /// Its name, as far as the kernel keeps it.
    pub name: String,
    /// Whether it is the one of this agent.
    pub ours: bool,
}

/// What is attached to a device, in the order in which packets pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chain {
    /// For packets that come in.
    pub ingress: Vec<ChainProgram>,
    /// For packets that go out.
    pub egress: Vec<ChainProgram>,
}

impl Direction {
    fn open(pins: &Pins, attach: TcAttachType, name: &'static str) -> Result<Self, DatapathError> {
        let path = pins.program(name);
        let action = format!("open its pin {}", path.display());
        let opened = SchedClassifier::from_pin(&path).and_then(|program| {
            let id = program.info()?.id();
            Ok((program, id))
        });
        let (program, id) =
            opened.map_err(|source| DatapathError::Program { program: name, action, source: Box::new(source) })?;
        Ok(Self { attach, name, program, id })
    }

    fn failed(&self, action: String) -> impl FnOnce(ProgramError) -> DatapathError + use<> {
        let program = self.name;
        move |source| DatapathError::Program { program, action, source: Box::new(source) }
    }

    /// Makes the device run this program: swaps it in place where a link is pinned, attaches and pins one where not. A
    /// link whose device has gone is replaced.
    fn ensure(&mut self, pins: &Pins, ifindex: u32, device: &str) -> Result<(), DatapathError> {
        let path = pins.link(self.attach, ifindex);
        match kernel::tcx_link(&path) {
            Ok(link) if link.ifindex == ifindex && link.program_id == self.id => return Ok(()),
            Ok(link) if link.ifindex == ifindex => match self.swap(pins, ifindex) {
                Err(ProgramError::SyscallError(error)) if error.io_error.raw_os_error() == Some(ENOLINK) => {
                    remove_link(&path)?;
                }
                result => {
                    return result.map_err(self.failed(format!("take the place of the program before on {device}")));
                }
            },
            Ok(_) => remove_link(&path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(DatapathError::io(format!("open link {}", path.display()))(error)),
        }
        self.attach(pins, ifindex, device).map_err(self.failed(format!("attach it to {device}")))
    }

    /// Swaps the program of a pinned link; no packet passes without one.
    fn swap(&mut self, pins: &Pins, ifindex: u32) -> Result<(), ProgramError> {
        let pinned = PinnedLink::from_pin(pins.link(self.attach, ifindex)).map_err(link_error)?;
        let link = SchedClassifierLink::try_from(FdLink::from(pinned)).map_err(link_error)?;
        let id = self.program.attach_to_link(link)?;
        // The pin keeps the link; ours is only a descriptor, which is closed here.
        self.program.take_link(id).map(drop)
    }

    /// Attaches by a new link, and pins it at once: without the pin it ends with this process.
    fn attach(&mut self, pins: &Pins, ifindex: u32, device: &str) -> Result<(), ProgramError> {
        let order = if self.attach == TcAttachType::Ingress { LinkOrder::first() } else { LinkOrder::last() };
        let id = self.program.attach_with_options(device, self.attach, TcAttachOptions::TcxOrder(order))?;
        let link = FdLink::try_from(self.program.take_link(id)?).map_err(link_error)?;
        link.pin(pins.link(self.attach, ifindex))
            .map(drop)
            .map_err(|error| ProgramError::IOError(io::Error::other(error)))
    }

    /// What is pinned for a device.
    fn state(&self, pins: &Pins, ifindex: u32) -> Result<Option<TcxLink>, DatapathError> {
        let path = pins.link(self.attach, ifindex);
        match kernel::tcx_link(&path) {
            Ok(link) => Ok(Some(link)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DatapathError::io(format!("open link {}", path.display()))(error)),
        }
    }

    fn chain(&self, device: &str) -> Result<Vec<ChainProgram>, DatapathError> {
        let (_, programs) = SchedClassifier::query_tcx(device, self.attach)
            .map_err(self.failed(format!("list what is attached to {device}")))?;
        Ok(programs
            .iter()
            .map(|program| ChainProgram {
                id: program.id(),
                name: program.name_as_str().unwrap_or_default().to_owned(),
                ours: program.id() == self.id,
            })
            .collect())
    }
}

fn link_error(error: LinkError) -> ProgramError {
    match error {
        LinkError::SyscallError(error) => error.into(),
        error => ProgramError::IOError(io::Error::other(error)),
    }
}

impl Attachments {
    pub(super) fn open(pins: &Pins) -> Result<Self, DatapathError> {
        Ok(Self {
            pins: pins.clone(),
            ingress: Direction::open(pins, TcAttachType::Ingress, INGRESS)?,
            egress: Direction::open(pins, TcAttachType::Egress, EGRESS)?,
        })
    }

    /// Makes a device run both programs of this agent.
    ///
    /// # Errors
    /// [`DatapathError::NoDevice`], or the kernel's error. What could be done is done: ingress may be attached without
    /// egress, never the other way round.
    pub fn attach(&mut self, ifindex: u32, name: &str) -> Result<(), DatapathError> {
        let gone = || DatapathError::NoDevice { name: name.to_owned(), ifindex };
        let device = device_name(ifindex).ok_or_else(gone)?;
        self.ingress.ensure(&self.pins, ifindex, &device)?;
        self.egress.ensure(&self.pins, ifindex, &device)
    }

    /// Takes both programs off a device, the device being there or not.
    ///
    /// # Errors
    /// When a pin could not be removed.
    pub fn detach(&mut self, ifindex: u32) -> Result<(), DatapathError> {
        remove_link(&self.pins.link(TcAttachType::Egress, ifindex))?;
        remove_link(&self.pins.link(TcAttachType::Ingress, ifindex))
    }

    /// Devices that links of ours are pinned for, whoever attached them, and whether both run the programs of this
    /// agent.
    ///
    /// # Errors
    /// When the pins cannot be read.
    pub fn attached(&self) -> Result<BTreeMap<u32, AttachmentEntry>, DatapathError> {
        let path = self.pins.links();
        let failed = || DatapathError::io(format!("list {}", path.display()));
        let mut devices = BTreeSet::new();
        for entry in fs::read_dir(&path).map_err(failed())? {
            let name = entry.map_err(failed())?.file_name();
            let index: Option<u32> =
                name.to_str().and_then(|name| name.split_once('_')).and_then(|(_, index)| index.parse().ok());
            devices.extend(index);
        }
        devices
            .into_iter()
            .map(|ifindex| {
                let runs = |direction: &Direction| {
                    let link = direction.state(&self.pins, ifindex)?;
                    Ok::<_, DatapathError>(link == Some(TcxLink { program_id: direction.id, ifindex }))
                };
                // A device that moved to another namespace took its links along.
                let name = device_name(ifindex).unwrap_or_default();
                let complete = !name.is_empty() && runs(&self.ingress)? && runs(&self.egress)?;
                Ok((ifindex, AttachmentEntry { name, complete }))
            })
            .collect()
    }

    /// Everything that is attached to a device, ours and others', so that a lost place can be shown.
    ///
    /// # Errors
    /// [`DatapathError::NoDevice`], or the kernel's error.
    pub fn chain(&self, ifindex: u32) -> Result<Chain, DatapathError> {
        let device = device_name(ifindex).ok_or_else(|| DatapathError::NoDevice { name: String::new(), ifindex })?;
        Ok(Chain { ingress: self.ingress.chain(&device)?, egress: self.egress.chain(&device)? })
    }
}

/// The device's present name; `None` when it has gone. For that the library answers an empty name, not an error.
fn device_name(ifindex: u32) -> Option<String> {
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
