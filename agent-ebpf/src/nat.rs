//! Finding, making and keeping the entries of translated flows.
//!
//! The reverse map is the authority: to own a port is to have its entry there, made with "must not exist", which is one
//! atomic step and needs no lock. The forward cache only spares the search.

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST, bpf_sock_tuple};
use aya_ebpf::helpers::{bpf_ktime_get_coarse_ns, bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp};
use aya_ebpf::programs::TcContext;
use cistern_ebpf_common::abi::{
    Address, FlowKey, FwdValue, ICMP, OWNER_POD, Port, RevKey, RevValue, SettingsValue, TCP, handover, seen,
};
use cistern_ebpf_common::header::{tcp_opens, tcp_seen};
use cistern_ebpf_common::ports::{self, PortRange, PortWalk, flow_hash};

use crate::maps::{FWD, PORTS, REV, TRIES};

const EEXIST: i32 = -17;

/// Seconds of the monotonic clock. The coarse clock costs a fraction of the fine one, and is exact to a few
/// milliseconds.
#[inline(always)]
pub(crate) fn now() -> u32 {
    // SAFETY: takes nothing and returns a number.
    (unsafe { bpf_ktime_get_coarse_ns() } / 1_000_000_000) as u32
}

/// Whether fewer than `window` seconds have passed since `since`, which is 0 for "never".
#[inline(always)]
pub(crate) fn within(since: u32, window: u32, now: u32) -> bool {
    since != 0 && now.saturating_sub(since) < window
}

/// Bits that an entry remembers of a packet.
#[inline(always)]
pub(crate) fn seen_of(flow: &FlowKey, flags: u8) -> u8 {
    if flow.protocol == TCP { tcp_seen(flags) } else { seen::ANY }
}

/// Whose flow is looked for or opened.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    /// `OWNER_POD` or `OWNER_HOST`.
    pub(crate) kind: u8,
    /// The endpoint's; 0 for the host.
    pub(crate) generation: u32,
    /// The device by which its packets come in; 0 where any counts.
    pub(crate) device: u32,
}

/// Why a flow got no entry.
#[derive(Clone, Copy)]
pub(crate) enum Refused {
    /// The programs that take over from these make it.
    HandedOver,
    /// All ports tried are taken.
    NoPort,
    /// The reverse map is full.
    MapFull,
}

/// Whether the port is never given.
#[inline(always)]
pub(crate) fn reserved(port: u16) -> bool {
    PORTS.get(u32::from(port >> 6)).is_none_or(|word| word.reserved >> (port & 63) & 1 != 0)
}

/// The ports that a flow of this protocol may be given.
#[inline(always)]
pub(crate) fn range(settings: &SettingsValue, protocol: u8) -> PortRange {
    if protocol == ICMP { PortRange::ANY } else { PortRange { first: settings.port_first, last: settings.port_last } }
}

/// Whether a flow of this protocol may be given the port.
#[inline(always)]
pub(crate) fn givable(settings: &SettingsValue, protocol: u8, port: u16) -> bool {
    range(settings, protocol).contains(port) && (protocol == ICMP || !reserved(port))
}

/// Records a packet that the flow's own end sent. A TCP SYN starts the entry's life anew. An entry that a former pod with the same
/// address left under the same ends becomes this one's.
#[inline(always)]
pub(crate) fn touch_sent(value: &mut RevValue, flow: &FlowKey, flags: u8, generation: u32, now: u32) {
    if value.endpoint_generation != generation {
        value.endpoint_generation = generation;
    }
    if flow.protocol == TCP && tcp_opens(flags) {
        value.sent = seen::ANY;
        value.received = 0;
    } else {
        let bits = value.sent | seen_of(flow, flags);
        if bits != value.sent {
            value.sent = bits;
        }
    }
    if value.last_seen != now {
        value.last_seen = now;
    }
}

/// Records a packet of the remote end.
#[inline(always)]
pub(crate) fn touch_received(value: &mut RevValue, bits: u8, now: u32) {
    let bits = value.received | bits;
    if bits != value.received {
        value.received = bits;
    }
    if value.last_seen != now {
        value.last_seen = now;
    }
}

/// The entry under `key`, if it is that of `flow`.
#[inline(always)]
pub(crate) fn owned(key: &RevKey, flow: &FlowKey) -> Option<&'static mut RevValue> {
    let value = REV.get_ptr_mut(key)?;
    // SAFETY: the pointer is valid until the program ends. The entry's slot may be given to another flow meanwhile, by
    // the collector only, which takes entries long idle; then one time stamp of that flow is wrong by a packet.
    let value = unsafe { &mut *value };
    (value.origin == flow.source && value.origin_port == flow.source_port).then_some(value)
}

/// Looks for the entry of a flow that the cache has lost, as far as any allocation ever went.
#[inline(always)]
pub(crate) fn find(
    settings: &SettingsValue,
    flow: &FlowKey,
    external: Address,
) -> Option<(Port, &'static mut RevValue)> {
    if let Some(value) = owned(&flow.outside(external, flow.source_port), flow) {
        return Some((flow.source_port, value));
    }
    let tries = TRIES.get(0)?;
    if tries.moved == 0 {
        return None;
    }
    let mut walk = PortWalk::new(range(settings, flow.protocol), flow_hash(settings.hash_key, flow));
    for attempt in 1..ports::TRIES {
        let port = walk.next_port().to_be_bytes();
        if tries.used[attempt] == 0 {
            continue;
        }
        if let Some(value) = owned(&flow.outside(external, port), flow) {
            return Some((port, value));
        }
    }
    None
}

/// Puts a flow into the cache. That this fails is no harm: the next packet searches.
#[inline(always)]
pub(crate) fn cache(
    settings: &SettingsValue,
    flow: &FlowKey,
    external: Address,
    external_port: Port,
    owner: Owner,
    now: u32,
) {
    let value = FwdValue {
        external,
        external_port,
        spare: [0; 2],
        checked: now,
        epoch: settings.epoch,
        device: owner.device,
        endpoint_generation: owner.generation,
        room: [0; 8],
    };
    let _ = FWD.insert(flow, value, u64::from(BPF_ANY));
}

/// What came of the try to own a port.
enum Claim {
    /// It is the flow's.
    Owned,
    /// It is another's.
    Taken,
    /// There is no room for an entry.
    Full,
}

/// Tries to own a port.
#[inline(always)]
fn claim(ctx: &TcContext, key: &RevKey, flow: &FlowKey, value: &RevValue) -> Claim {
    if value.owner == OWNER_POD && used_by_host(ctx, key) {
        return Claim::Taken;
    }
    match REV.insert(key, value, u64::from(BPF_NOEXIST)) {
        Ok(()) => Claim::Owned,
        // Another CPU may have been faster with a packet of this same flow.
        Err(EEXIST) if owned(key, flow).is_some() => Claim::Owned,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::Full,
    }
}

/// Gives a flow a port, which is its own where that is free and may be given.
#[inline(always)]
pub(crate) fn allocate(
    ctx: &TcContext,
    settings: &SettingsValue,
    flow: &FlowKey,
    external: Address,
    owner: Owner,
    now: u32,
) -> Result<Port, Refused> {
    if settings.handover == handover::CLOSED {
        return Err(Refused::HandedOver);
    }
    let ifindex = crate::packet::ifindex(ctx);
    let value = RevValue::opened(flow, owner.kind, owner.generation, ifindex, now);
    let mut walk = PortWalk::new(range(settings, flow.protocol), 0);
    for attempt in 0..ports::TRIES {
        let port = if attempt == 0 {
            u16::from_be_bytes(flow.source_port)
        } else {
            // Most flows keep their port, and need no hash.
            if attempt == 1 {
                walk = PortWalk::new(range(settings, flow.protocol), flow_hash(settings.hash_key, flow));
            }
            walk.next_port()
        };
        if !givable(settings, flow.protocol, port) || !handover::allocates(settings.handover, port) {
            continue;
        }
        let port = port.to_be_bytes();
        match claim(ctx, &flow.outside(external, port), flow, &value) {
            Claim::Owned => {
                mark_try(attempt);
                return Ok(port);
            }
            Claim::Taken => {}
            Claim::Full => return Err(Refused::MapFull),
        }
    }
    Err(Refused::NoPort)
}

/// Remembers that this try gave a port.
#[inline(always)]
fn mark_try(attempt: usize) {
    if let Some(tries) = TRIES.get_ptr_mut(0)
        && attempt < ports::TRIES
    {
        // SAFETY: the one slot of an array map; bytes are only ever set to 1.
        unsafe {
            if (*tries).used[attempt] == 0 {
                if attempt != 0 {
                    (*tries).moved = 1;
                }
                (*tries).used[attempt] = 1;
            }
        }
    }
}

/// Whether a socket of the node listens on this outside end, or has it towards this remote end.
#[inline(always)]
fn used_by_host(ctx: &TcContext, key: &RevKey) -> bool {
    if key.protocol == ICMP {
        return false;
    }
    // The answer's ends, since it is the answer that the socket would take.
    let mut tuple = SocketTuple {
        source: key.remote,
        destination: key.external,
        source_port: key.remote_port,
        destination_port: key.external_port,
    };
    let tuple_pointer = core::ptr::from_mut(&mut tuple).cast::<bpf_sock_tuple>();
    let size = size_of::<SocketTuple>() as u32;
    // SAFETY: the tuple is initialised and as long as said; -1 is the namespace of the device. A socket that is found
    // is released before anything else happens, as the verifier demands.
    unsafe {
        let context = ctx.skb.skb.cast();
        let socket = if key.protocol == TCP {
            bpf_skc_lookup_tcp(context, tuple_pointer, size, CURRENT_NETNS, 0)
        } else {
            bpf_sk_lookup_udp(context, tuple_pointer, size, CURRENT_NETNS, 0)
        };
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
        true
    }
}

/// `BPF_F_CURRENT_NETNS`
const CURRENT_NETNS: u64 = u64::MAX;

/// The IPv4 half of the kernel's `struct bpf_sock_tuple`; its union is as long as the IPv6 half, and the helper takes
/// the family from the length.
#[repr(C)]
struct SocketTuple {
    source: Address,
    destination: Address,
    source_port: Port,
    destination_port: Port,
}

/// Removes a flow from cache and reverse map.
#[inline(always)]
pub(crate) fn forget(flow: &FlowKey, external: Address, external_port: Port) {
    let key = flow.outside(external, external_port);
    if owned(&key, flow).is_some() {
        let _ = REV.remove(key);
    }
    let _ = FWD.remove(flow);
}
