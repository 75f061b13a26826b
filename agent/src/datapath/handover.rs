//! Takeover: the programs of one build replace those of another without losing flows.
//!
//! At startup, the pinned maps are compared with those that this build declares:
//! * **The rows are the same, or grew in place** (see [`layout`](super::layout)): the programs are loaded with the pinned maps, and
//!   each link gets its new program when the devices are reconciled. Older and newer programs use the same rows meanwhile.
//! * **The rows of any map differ otherwise**: all maps are created in a second directory, and the programs with them take
//!   over as described below, on every device with links. This takes the time to copy all rows twice. It is decided for all maps
//!   together, so that the programs with either set have their own settings.
//!
//! # The order of a takeover
//! The *predecessor* is the datapath in `ROOT`, the *successor* the second one. Both are attached to a device for a while,
//! the successor's programs behind the predecessor's, and [`handover`] in the settings of each is its role.
//!
//! | step | action | why no packet is lost and no port allocated twice |
//! |---|---|---|
//! | [`Step::Created`] | maps and programs of the successor are pinned in `ROOT/next` | nothing is attached |
//! | [`Step::Narrowed`] | the predecessor only allocates even ports; wait for running programs | from now on it creates no entry with an odd port that would not be copied |
//! | [`Step::Filled`] | all rows are copied; the successor waits | nothing of it is attached |
//! | [`Step::Attached`] | on each device, ingress before egress | a waiting program passes all packets unchanged |
//! | [`Step::Committed`] | `ROOT/next` becomes `ROOT/takeover` | from now on the successor may have flows that its predecessor lacks: a start completes the takeover, and never reverts it |
//! | [`Step::Opened`] | the successor translates its flows, and only allocates odd ports | it only sees packets that its predecessor passed; all entries with odd ports were copied |
//! | [`Step::Closed`] | the predecessor creates no entries, and passes such packets; wait as above | the successor, attached after it, creates them |
//! | [`Step::CaughtUp`] | entries that the predecessor created since are copied | it continues to serve its flows |
//! | [`Step::Released`] | the successor allocates all ports | it has all entries |
//! | [`Step::EgressDetached`], [`Step::IngressDetached`] | the predecessor is detached from all devices, egress before ingress | the successor serves both |
//! | [`Step::Merged`] | the predecessor's updates of flows since they were copied are merged | only times, states and counters are missing |
//! | [`Step::MapsMoved`], [`Step::Moved`] | the successor's pins replace its predecessor's; `ROOT/takeover` is removed | pins are only names for programs and maps |
//!
//! Where only ports of one parity may be allocated, the port walk tries the neighbours of the others, so it tries as many. The
//! search of a flow knows of that (`flipped` of [`map::TRIES`]), and so does the successor, to which it is carried over.
//!
//! # A kill at any step
//! The next start, of either build, finds:
//! * `ROOT/next`: the takeover had not been committed. It is removed, and the predecessor allocates all ports again.
//! * `ROOT/takeover`: it is completed from [`Step::Opened`] on; each step can be repeated. Rows are carried over by the names of
//!   their fields, by the description pinned with them, which requires no knowledge of either build.
//!
//! Only then are the maps compared with those of the starting build. An older build takes over from a newer one in the same way
//! as vice versa.
//!
//! The first release does not know [`handover`]: taking over from it, the predecessor is neither narrowed nor closed, and a flow
//! that is opened within the milliseconds between the last copy and the end of its programs may get another port.

use super::attach::{Attached, device_name};
use super::error::DatapathError;
use super::kernel::{self, RawMap};
use super::layout::{Declared, LAYOUTS, Layout, Layouts, Row, declared};
use super::loader::{self, Capacities};
use super::pins::{Pins, Side, remove_link, remove_pin};
use super::programs::{Build, Hook, Program};
use aya::Ebpf;
use aya::maps::MapType;
use aya_obj::generated::bpf_map_type;
use cistern_ebpf_common::abi::handover;
use cistern_ebpf_common::map;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;

/// A completed step of a takeover. Tests stop a start after each of them, as a kill would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Maps and programs of the successor are pinned.
    Created,
    /// The predecessor allocates only even ports.
    Narrowed,
    /// All rows are copied.
    Filled,
    /// The successor's programs are attached, and pass all packets.
    Attached,
    /// From now on the takeover is completed, never undone.
    Committed,
    /// The successor allocates odd ports.
    Opened,
    /// The predecessor creates no entries any more.
    Closed,
    /// What the predecessor wrote since is copied.
    CaughtUp,
    /// The successor allocates all ports.
    Released,
    /// The predecessor's egress programs are detached.
    EgressDetached,
    /// All of the predecessor's programs are detached.
    IngressDetached,
    /// The predecessor's last updates are merged.
    Merged,
    /// The maps are in the place of the predecessor's.
    MapsMoved,
    /// Everything is in the place of the predecessor's.
    Moved,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 14] = [
        Self::Created,
        Self::Narrowed,
        Self::Filled,
        Self::Attached,
        Self::Committed,
        Self::Opened,
        Self::Closed,
        Self::CaughtUp,
        Self::Released,
        Self::EgressDetached,
        Self::IngressDetached,
        Self::Merged,
        Self::MapsMoved,
        Self::Moved,
    ];
}

/// Called after each step; an error stops the start there.
pub type Observer<'a> = &'a mut dyn FnMut(Step) -> io::Result<()>;

/// A flow map with another capacity than requested. It is kept, because a new one would end all flows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapacityMismatch {
    /// Its name.
    pub map: String,
    /// Its capacity.
    pub found: u32,
    /// The requested capacity.
    pub expected: u32,
}

impl fmt::Display for CapacityMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { map, found, expected } = self;
        write!(
            f,
            "{map} holds {found} entries, and {expected} are configured: it is kept, since a new one would end the \
             open flows; it gets the new capacity after a reboot"
        )
    }
}

/// The loaded and pinned programs of a build, and the maps that they use.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) ebpf: Ebpf,
    pub(super) declared: BTreeMap<String, Declared>,
    pub(super) kept: Vec<CapacityMismatch>,
}

/// Loads a build, with the pinned maps or with new ones that take over from them.
pub(super) fn open(
    pins: &Pins,
    build: &Build<'_>,
    capacities: Capacities,
    observer: Observer<'_>,
) -> Result<Opened, DatapathError> {
    let declared = declared(build.object)?;
    pins.prepare()?;
    heal(pins, build, observer)?;
    let serving = pins.serving();
    let pinned = Layouts::read(&serving)?;
    match compare(&serving, &declared, &pinned, capacities)? {
        Comparison::Usable(kept) => {
            Layouts::write(&serving, &declared, &pinned)?;
            let ebpf = loader::load(&serving, build, &declared, capacities)?;
            Ok(Opened { ebpf, declared, kept })
        }
        Comparison::Differs { map, found, expected, mut kept } => {
            // All flows must fit.
            kept.retain(|kept| kept.map == map::REV && kept.found > kept.expected);
            let flows = kept.first().map_or(capacities.flows, |kept| kept.found);
            let capacities = Capacities { flows, ..capacities };
            tracing::warn!(
                map,
                found,
                expected,
                "the rows of a pinned map differ: new programs take over with every flow"
            );
            let next = pins.next();
            next.create()?;
            Layouts::write(&next, &declared, &Layouts::default())?;
            let ebpf = loader::load(&next, build, &declared, capacities)?;
            reached(observer, Step::Created)?;
            prepare(&serving, &next, build, observer)?;
            fs::rename(next.directory(), pins.takeover().directory())
                .map_err(DatapathError::io(format!("rename {}", next.directory().display())))?;
            reached(observer, Step::Committed)?;
            complete(pins, build, observer)?;
            serving.remove_unknown("progs", |name| build.programs.iter().any(|program| program.name == name))?;
            Ok(Opened { ebpf, declared, kept })
        }
    }
}

fn reached(observer: &mut dyn FnMut(Step) -> io::Result<()>, step: Step) -> Result<(), DatapathError> {
    observer(step).map_err(DatapathError::io(format!("continue after {step:?}")))
}

/// Reverts or completes the takeover of an agent that was killed.
fn heal(pins: &Pins, build: &Build<'_>, observer: Observer<'_>) -> Result<(), DatapathError> {
    let (serving, next, takeover) = (pins.serving(), pins.next(), pins.takeover());
    if takeover.directory().exists() {
        tracing::warn!("completing the takeover of the kernel programs that an agent before began");
        complete(pins, build, observer)?;
    }
    if next.directory().exists() {
        next.remove()?;
        play(&serving, handover::NONE)?;
    }
    Ok(())
}

/// Result of a comparison of the pinned maps with those of a build.
enum Comparison {
    /// The build can use the pinned maps. Lists flow maps with another capacity than requested.
    Usable(Vec<CapacityMismatch>),
    /// The rows of this map differ.
    Differs { map: String, found: String, expected: String, kept: Vec<CapacityMismatch> },
}

/// Missing maps, and other capacities that this build can use, are no differences.
///
/// # Errors
/// [`DatapathError::Incompatible`] if a map is of another type, or its rows are not as described: another program
/// created it.
fn compare(
    side: &Side,
    declared: &BTreeMap<String, Declared>,
    pinned: &Layouts,
    capacities: Capacities,
) -> Result<Comparison, DatapathError> {
    let (mut kept, mut differs) = (Vec::new(), None);
    for (name, own) in declared {
        let path = side.map(name);
        if !path.exists() {
            continue;
        }
        let found = RawMap::open(&path).map_err(DatapathError::io(format!("open {}", path.display())))?;
        let layout = pinned.maps.get(name);
        let kind = |number: u32| {
            let kind = bpf_map_type::try_from(number).ok().and_then(|kind| MapType::try_from(kind).ok());
            kind.map_or_else(|| number.to_string(), |kind| format!("{kind:?}"))
        };
        let described =
            layout.map_or((own.layout.key.size, own.layout.value.size), |map| (map.key.size, map.value.size));
        for (field, found, expected) in [
            ("type", kind(found.kind), kind(own.kind)),
            ("key size", found.key_size.to_string(), described.0.to_string()),
            ("value size", found.value_size.to_string(), described.1.to_string()),
            ("flags", found.flags.to_string(), own.flags.to_string()),
        ] {
            if found != expected {
                return Err(DatapathError::Incompatible { path, field, found, expected });
            }
        }
        let conflict = layout.and_then(|layout| {
            let value = || own.layout.value.conflict(&layout.value);
            own.layout.key.conflict(&layout.key).or_else(value)
        });
        if let (None, Some((found, expected))) = (&differs, conflict) {
            differs = Some((name.clone(), found, expected));
        }
        match capacities.of(name) {
            Some(expected) if found.capacity != expected => {
                kept.push(CapacityMismatch { map: name.clone(), found: found.capacity, expected });
            }
            // Counters without a slot are not counted.
            None if found.capacity < own.capacity && name != map::COUNTERS => {
                let [found, expected] = [found.capacity, own.capacity].map(|entries| format!("{entries} entries"));
                differs = differs.or(Some((name.clone(), found, expected)));
            }
            _ => {}
        }
    }
    Ok(match differs {
        None => Comparison::Usable(kept),
        Some((map, found, expected)) => Comparison::Differs { map, found, expected, kept },
    })
}

/// From [`Step::Narrowed`] to [`Step::Attached`].
fn prepare(serving: &Side, next: &Side, build: &Build<'_>, observer: Observer<'_>) -> Result<(), DatapathError> {
    play(serving, handover::EVEN)?;
    kernel::wait_for_programs();
    reached(observer, Step::Narrowed)?;
    carry(serving, next, Pass::Fill)?;
    play(next, handover::WAITING)?;
    reached(observer, Step::Filled)?;
    attach(serving, next, build)?;
    reached(observer, Step::Attached)
}

/// Attaches the successor's programs to every device with links, each directly after the program that it replaces.
fn attach(serving: &Side, successor: &Side, build: &Build<'_>) -> Result<(), DatapathError> {
    let mut links = serving.links()?;
    // Ingress before egress.
    links.reverse();
    let mut programs = Attached::open_all(successor, build)?;
    for link in links {
        // A device that was deleted, or moved to another namespace, is not ours any more.
        if device_name(link.ifindex).is_none() {
            continue;
        }
        if let Some(program) = programs.iter_mut().find(|program| program.spec.link == link.program) {
            program.ensure_after(successor, link.ifindex, &serving.link(&link.program, link.ifindex))?;
        }
    }
    Ok(())
}

/// From [`Step::Opened`] to the end. Can be repeated from any point.
fn complete(pins: &Pins, build: &Build<'_>, observer: Observer<'_>) -> Result<(), DatapathError> {
    let (predecessor, successor) = (pins.serving(), pins.takeover());
    // The settings are moved after all other maps, and the description after them: without settings there is nothing
    // left to carry over. Links are moved after the maps.
    if successor.map(map::SETTINGS).exists() {
        if role(&successor)? == Some(handover::WAITING) {
            play(&successor, handover::ODD)?;
        }
        reached(observer, Step::Opened)?;
        play(&predecessor, handover::CLOSED)?;
        kernel::wait_for_programs();
        reached(observer, Step::Closed)?;
        carry(&predecessor, &successor, Pass::CatchUp)?;
        reached(observer, Step::CaughtUp)?;
        play(&successor, handover::NONE)?;
        reached(observer, Step::Released)?;
        for (ingress, step) in [(false, Step::EgressDetached), (true, Step::IngressDetached)] {
            for link in predecessor.links()? {
                let hook = build.programs.iter().find(|program| program.link == link.program).map(Program::hook);
                if (hook == Some(Hook::Ingress)) == ingress {
                    remove_link(&predecessor.link(&link.program, link.ifindex))?;
                }
            }
            reached(observer, step)?;
        }
        kernel::wait_for_programs();
        carry(&predecessor, &successor, Pass::Merge)?;
        reached(observer, Step::Merged)?;
        let mut maps = successor.names("maps")?;
        maps.sort_by_key(|name| (name == LAYOUTS, name == map::SETTINGS));
        for name in maps {
            rename(&successor, &predecessor, "maps", &name)?;
        }
    }
    reached(observer, Step::MapsMoved)?;
    for directory in ["progs", "links"] {
        for name in successor.names(directory)? {
            rename(&successor, &predecessor, directory, &name)?;
        }
    }
    successor.remove()?;
    reached(observer, Step::Moved)
}

/// Moves a pin, replacing the one at its destination.
fn rename(from: &Side, to: &Side, directory: &str, name: &str) -> Result<(), DatapathError> {
    let [from, to] = [from, to].map(|side| side.directory().join(directory).join(name));
    remove_pin(&to)?;
    fs::rename(&from, &to).map_err(DatapathError::io(format!("rename {} to {}", from.display(), to.display())))
}

/// The only key of an array of one.
const SLOT: [u8; 4] = [0; 4];

/// The settings of a datapath: their map, their row and its fields. `None` without settings, or without the field for
/// takeovers.
fn settings(side: &Side) -> Result<Option<(RawMap, Vec<u8>, Row)>, DatapathError> {
    let path = side.map(map::SETTINGS);
    let failed = || DatapathError::io(format!("read {}", path.display()));
    let fields = Layouts::read(side)?.maps.remove(map::SETTINGS).unwrap_or_default().value;
    if !path.exists() || fields.field(HANDOVER).is_none() {
        return Ok(None);
    }
    let map = RawMap::open(&path).map_err(failed())?;
    let row = map.lookup(&SLOT).map_err(failed())?.unwrap_or_default();
    Ok(Some((map, row, fields)))
}

const HANDOVER: &str = "handover";

/// The role of a datapath's programs in the takeover.
fn role(side: &Side) -> Result<Option<u32>, DatapathError> {
    Ok(settings(side)?.and_then(|(_, row, fields)| {
        let field = fields.field(HANDOVER)?;
        Some(u32::from_ne_bytes(row.get(field.offset..field.offset + field.size)?.try_into().ok()?))
    }))
}

/// Sets the role of a datapath's programs. A build without takeovers ignores it.
fn play(side: &Side, role: u32) -> Result<(), DatapathError> {
    let Some((map, mut row, fields)) = settings(side)? else { return Ok(()) };
    if let Some(field) = fields.field(HANDOVER)
        && let Some(bytes) = row.get_mut(field.offset..field.offset + field.size)
        && bytes.len() == size_of::<u32>()
    {
        bytes.copy_from_slice(&role.to_ne_bytes());
        let path = side.map(map::SETTINGS);
        map.update(&SLOT, &row, kernel::ANY).map_err(DatapathError::io(format!("write {}", path.display())))?;
    }
    Ok(())
}

/// The rows that are carried over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// All rows, into unused maps.
    Fill,
    /// Rows created by programs since.
    CatchUp,
    /// Updates of flows and counters since.
    Merge,
}

/// Maps that programs write, entry by entry.
const FLOWS: [&str; 3] = [map::REV, map::FWD, map::INBOUND];

/// Carries rows over, map by map.
fn carry(from: &Side, to: &Side, pass: Pass) -> Result<(), DatapathError> {
    let (from_layouts, to_layouts) = (Layouts::read(from)?.maps, Layouts::read(to)?.maps);
    for name in to.names("maps")? {
        let (Some(old), Some(new)) = (from_layouts.get(&name), to_layouts.get(&name)) else { continue };
        let (source, target) = (from.map(&name), to.map(&name));
        if name == LAYOUTS || !source.exists() {
            continue;
        }
        let failed =
            || DatapathError::io(format!("carry the rows of {} over to {}", source.display(), target.display()));
        let source = RawMap::open(&source).map_err(failed())?;
        let target = RawMap::open(&target).map_err(failed())?;
        let carried = Carried { source: &source, target: &target, old, new };
        match (pass, name.as_str()) {
            (Pass::Merge, map::COUNTERS) => carried.count(),
            (_, map::COUNTERS | map::EVENTS) => Ok(()),
            (Pass::Fill, _) => carried.copy(kernel::ANY),
            (_, map::TRIES) => carried.unite(),
            (Pass::CatchUp, flows) if FLOWS.contains(&flows) => carried.copy(kernel::NO_EXIST),
            (Pass::Merge, map::REV | map::INBOUND) => carried.merge(),
            _ => Ok(()),
        }
        .map_err(failed())?;
    }
    Ok(())
}

/// A map whose rows are being carried over to another.
struct Carried<'a> {
    source: &'a RawMap,
    target: &'a RawMap,
    old: &'a Layout,
    new: &'a Layout,
}

impl Carried<'_> {
    fn each(&self, mut row: impl FnMut(Vec<u8>, Vec<u8>) -> io::Result<()>) -> io::Result<()> {
        self.source.visit(|key, value| {
            row(self.new.key.converted(&self.old.key, key), self.new.value.converted(&self.old.value, value))
        })
    }

    /// Copies all rows; with [`kernel::NO_EXIST`] only those that the target does not have.
    fn copy(&self, flags: u64) -> io::Result<()> {
        let array = self.target.kind == MapType::Array as u32;
        self.each(|key, value| {
            // An array with fewer slots has no place for further ones.
            if array && u32::from_ne_bytes(key.as_slice().try_into().unwrap_or_default()) >= self.target.capacity {
                return Ok(());
            }
            self.target.update(&key, &value, flags).map(drop)
        })
    }

    /// Merges updates of the source's programs into rows that exist in both: packets seen from either end, and time
    /// stamps.
    fn merge(&self) -> io::Result<()> {
        let field = |name: &str| self.new.value.field(name).map(|field| field.offset..field.offset + field.size);
        let (bits, time) = (["sent", "received"].map(field), field("last_seen"));
        self.each(|key, value| {
            let Some(before) = self.target.lookup(&key)? else {
                return self.target.update(&key, &value, kernel::NO_EXIST).map(drop);
            };
            let mut merged = before.clone();
            for range in bits.iter().flatten() {
                for (to, from) in merged
                    .get_mut(range.clone())
                    .into_iter()
                    .flatten()
                    .zip(value.get(range.clone()).into_iter().flatten())
                {
                    *to |= *from;
                }
            }
            if let Some(range) = &time
                && let (Some(to), Some(from)) = (merged.get_mut(range.clone()), value.get(range.clone()))
                && number(from) > number(to)
            {
                to.copy_from_slice(from);
            }
            if merged == before { Ok(()) } else { self.target.update(&key, &merged, kernel::EXIST).map(drop) }
        })
    }

    /// Sets all bits that either has.
    fn unite(&self) -> io::Result<()> {
        self.each(|key, value| {
            let Some(before) = self.target.lookup(&key)? else { return Ok(()) };
            let united: Vec<u8> = before.iter().zip(&value).map(|(one, other)| one | other).collect();
            if united == before { Ok(()) } else { self.target.update(&key, &united, kernel::ANY).map(drop) }
        })
    }

    /// Moves numbers of each CPU to the target's: repeated, it adds nothing. No program of the source runs any more.
    fn count(&self) -> io::Result<()> {
        self.source.visit(|key, values| {
            let Ok(Some(mut sums)) = self.target.lookup(key) else { return Ok(()) };
            for (to, from) in sums.chunks_exact_mut(8).zip(values.chunks_exact(8)) {
                to.copy_from_slice(&number(to).wrapping_add(number(from)).to_ne_bytes());
            }
            self.target.update(key, &sums, kernel::ANY)?;
            self.source.update(key, &vec![0; values.len()], kernel::ANY).map(drop)
        })
    }
}

/// An unsigned number of up to 8 bytes in host byte order, which is little-endian on all supported machines.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
