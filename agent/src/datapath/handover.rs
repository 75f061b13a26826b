//! How the programs of one build take over from those of another, with every flow.
//!
//! A start compares the maps that are pinned with those that this build declares:
//! * **The rows are the same, or grew in place** (see [`layout`](super::layout)): the programs are loaded over the pinned maps, and
//!   each link gets its new program when the devices are reconciled. Older and newer programs work on the same rows meanwhile.
//! * **The rows of any map differ otherwise**: all maps are created again in a directory beside, and the programs over them take
//!   over as stated below, on every device that has links. It takes as long as copying the rows, twice. This is decided for all maps
//!   together, so that the programs over either set have settings of their own.
//!
//! # The order of a takeover
//! The *predecessor* is the datapath in `ROOT`, the *successor* the one beside. Both are attached to a device for a while,
//! the successor's programs behind the predecessor's, and [`handover`] in the settings of each says which part it plays.
//!
//! | step | what is done | why no packet is lost and no port allocated twice |
//! |---|---|---|
//! | [`Step::Created`] | maps and programs of the successor are pinned in `ROOT/next` | nothing is attached |
//! | [`Step::Narrowed`] | the predecessor allocates even ports alone; wait until programs that run have ended | from now on it makes no entry with an odd port that would not be copied |
//! | [`Step::Filled`] | all rows are copied; the successor waits | nothing of it is attached |
//! | [`Step::Attached`] | on each device, ingress before egress | a waiting program passes every packet untouched |
//! | [`Step::Committed`] | `ROOT/next` becomes `ROOT/takeover` | from now on the successor may have flows that its predecessor lacks: a start completes the takeover, and never undoes it |
//! | [`Step::Opened`] | the successor translates the flows that it has, and allocates odd ports alone | it sees only what its predecessor passed on; every entry with an odd port was copied |
//! | [`Step::Closed`] | the predecessor makes no new entry, and passes such packets on; wait as above | the successor, behind it, makes it |
//! | [`Step::CaughtUp`] | what the predecessor wrote since is copied | it serves its flows all the while |
//! | [`Step::Released`] | the successor allocates all ports | it has every entry there is |
//! | [`Step::EgressDetached`], [`Step::IngressDetached`] | the predecessor leaves every device, egress before ingress | the successor serves both |
//! | [`Step::Merged`] | what the predecessor saw of flows after they were copied is added to their rows | only times, states and counters are missing |
//! | [`Step::MapsMoved`], [`Step::Moved`] | the pins of the successor take the places of its predecessor's; `ROOT/takeover` is removed | pins are names: programs do not notice |
//!
//! # A kill at any step
//! The next start, of either build, finds:
//! * `ROOT/next`: the takeover had not begun. It is removed, and the predecessor allocates all ports again.
//! * `ROOT/takeover`: it is completed from [`Step::Opened`] on; each step may be repeated. Rows are carried over by the names of
//!   their fields, from the description that is pinned beside them, so that this needs no knowledge of either build.
//!
//! Only then are the maps compared with those of the build that starts. So an older build takes over from a newer one in the same
//! way as a newer one from an older.
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

/// A step of a takeover that has been done. Tests end a start after each of them, as a kill would.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Maps and programs of the successor are pinned.
    Created,
    /// The predecessor allocates even ports alone.
    Narrowed,
    /// All rows are copied.
    Filled,
    /// The successor's programs are attached, and pass every packet.
    Attached,
    /// From now on the takeover is completed, never undone.
    Committed,
    /// The successor allocates odd ports.
    Opened,
    /// The predecessor makes no new entry.
    Closed,
    /// What the predecessor wrote since is copied.
    CaughtUp,
    /// The successor allocates all ports.
    Released,
    /// The predecessor's egress programs are detached.
    EgressDetached,
    /// All of the predecessor's programs are detached.
    IngressDetached,
    /// What the predecessor saw last is added.
    Merged,
    /// The maps are where those of the predecessor were.
    MapsMoved,
    /// Everything is where that of the predecessor was.
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

/// Is called after each step; an error ends the start there.
pub type Observer<'a> = &'a mut dyn FnMut(Step) -> io::Result<()>;

/// A map of flows that has another capacity than was asked for. It is used as it is: a new one would end every flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptCapacity {
    /// Its name.
    pub map: String,
    /// Entries that it holds.
    pub found: u32,
    /// Entries that were asked for.
    pub expected: u32,
}

impl fmt::Display for KeptCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { map, found, expected } = self;
        write!(
            f,
            "{map} holds {found} entries, and {expected} are configured: it stays as it is, since a new one would end the \
             flows that are open; it gets its new capacity with the next boot of the machine"
        )
    }
}

/// The programs of a build, loaded and pinned, and the maps that they use.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) ebpf: Ebpf,
    pub(super) declared: BTreeMap<String, Declared>,
    pub(super) kept: Vec<KeptCapacity>,
}

/// Loads a build, over the maps that are pinned or over new ones that take over from them.
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
            // Every flow must have its place.
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

/// Undoes or completes what an agent that was killed left.
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

/// What a comparison of the pinned maps with those of a build came to.
enum Comparison {
    /// The build uses the maps that are pinned. Maps of flows whose capacity is another than the one asked for are named.
    Usable(Vec<KeptCapacity>),
    /// The rows of this map are others.
    Differs { map: String, found: String, expected: String, kept: Vec<KeptCapacity> },
}

/// A missing map is no difference, and neither is a capacity that another build left and that this one can use.
///
/// # Errors
/// [`DatapathError::Incompatible`] when a map is of another type, or its rows are not those that are described: another program
/// made it.
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
                kept.push(KeptCapacity { map: name.clone(), found: found.capacity, expected });
            }
            // A kind of packets without a slot is not counted; everything else works.
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

/// Attaches the successor's programs to every device that has links, each behind the program whose place it takes.
fn attach(serving: &Side, successor: &Side, build: &Build<'_>) -> Result<(), DatapathError> {
    let mut links = serving.links()?;
    // Ingress before egress.
    links.reverse();
    let mut programs = Attached::open_all(successor, build)?;
    for link in links {
        // A device that has gone, or was moved to another namespace, is none of ours any more.
        if device_name(link.ifindex).is_none() {
            continue;
        }
        if let Some(program) = programs.iter_mut().find(|program| program.spec.link == link.program) {
            program.ensure_after(successor, link.ifindex, &serving.link(&link.program, link.ifindex))?;
        }
    }
    Ok(())
}

/// From [`Step::Opened`] to the end. May be repeated from any point.
fn complete(pins: &Pins, build: &Build<'_>, observer: Observer<'_>) -> Result<(), DatapathError> {
    let (predecessor, successor) = (pins.serving(), pins.takeover());
    // Of the maps, the settings are moved when all others are, and the description after them: without settings nothing is left to
    // carry over. Links are moved after the maps.
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

/// Moves a pin to its place, where it replaces another.
fn rename(from: &Side, to: &Side, directory: &str, name: &str) -> Result<(), DatapathError> {
    let [from, to] = [from, to].map(|side| side.directory().join(directory).join(name));
    remove_pin(&to)?;
    fs::rename(&from, &to).map_err(DatapathError::io(format!("rename {} to {}", from.display(), to.display())))
}

/// The only key of an array of one.
const SLOT: [u8; 4] = [0; 4];

/// The settings of a datapath: their map, their row and its fields. `None` without settings, or without a part to play in them.
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

/// The part that the programs of a datapath play.
fn role(side: &Side) -> Result<Option<u32>, DatapathError> {
    Ok(settings(side)?.and_then(|(_, row, fields)| {
        let field = fields.field(HANDOVER)?;
        Some(u32::from_ne_bytes(row.get(field.offset..field.offset + field.size)?.try_into().ok()?))
    }))
}

/// Gives the programs of a datapath their part. A build that does not know of it plays none.
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

/// Which rows are carried over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// All, into maps that nothing uses.
    Fill,
    /// Those that programs made since.
    CatchUp,
    /// What programs saw of flows since, and what they counted.
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

/// The rows of one map on their way to another.
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

    /// Copies every row; with [`kernel::NO_EXIST`] none that the target has.
    fn copy(&self, flags: u64) -> io::Result<()> {
        let array = self.target.kind == MapType::Array as u32;
        self.each(|key, value| {
            // An array of fewer slots has no place for those beyond.
            if array && u32::from_ne_bytes(key.as_slice().try_into().unwrap_or_default()) >= self.target.capacity {
                return Ok(());
            }
            self.target.update(&key, &value, flags).map(drop)
        })
    }

    /// Adds what the source's programs saw to the rows of both: what was seen of either end, and when.
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

    /// Sets every bit that either has.
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

/// An unsigned number of up to 8 bytes in the byte order of the machine, which is little-endian wherever the programs run.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
