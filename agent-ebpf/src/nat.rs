//! Entries of translated flows: lookup, creation, update.
//!
//! The reverse map is authoritative: a port is owned by having its entry there, inserted with `BPF_NOEXIST`, which is
//! atomic and needs no lock. The forward cache only saves the search.

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
    // SAFETY: takes no arguments and returns a number.
    (unsafe { bpf_ktime_get_coarse_ns() } / 1_000_000_000) as u32
}

/// Whether fewer than `window` seconds have passed since `since`, which is 0 for "never".
#[inline(always)]
pub(crate) fn within(since: u32, window: u32, now: u32) -> bool {
    since != 0 && now.saturating_sub(since) < window
}

/// Bits of a packet that an entry records.
#[inline(always)]
pub(crate) fn seen_of(flow: &FlowKey, flags: u8) -> u8 {
    if flow.protocol == TCP { tcp_seen(flags) } else { seen::ANY }
}

/// The owner of a flow that is searched or created.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    /// `OWNER_POD` or `OWNER_HOST`.
    pub(crate) kind: u8,
    /// The endpoint's generation; 0 for the host.
    pub(crate) generation: u32,
    /// The device by which its packets arrive; 0 for any.
    pub(crate) device: u32,
}

/// Why a flow got no entry.
#[derive(Clone, Copy)]
pub(crate) enum Refused {
    /// The programs that take over from these create it.
    HandedOver,
    /// All tried ports are in use.
    NoPort,
    /// The reverse map is full.
    MapFull,
}

/// Whether the port is reserved.
#[inline(always)]
pub(crate) fn reserved(port: u16) -> bool {
    PORTS.get(u32::from(port >> 6)).is_none_or(|word| word.reserved >> (port & 63) & 1 != 0)
}

/// The ports for flows of this protocol.
#[inline(always)]
pub(crate) fn range(settings: &SettingsValue, protocol: u8) -> PortRange {
    if protocol == ICMP { PortRange::ANY } else { PortRange { first: settings.port_first, last: settings.port_last } }
}

/// Whether a flow of this protocol may have the port.
#[inline(always)]
pub(crate) fn is_allocatable(settings: &SettingsValue, protocol: u8, port: u16) -> bool {
    range(settings, protocol).contains(port) && (protocol == ICMP || !reserved(port))
}

/// Records a packet from the local end. A TCP SYN resets the entry's state. An entry of a former pod with the same
/// address and tuple becomes this pod's.
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

/// Records a packet from the remote end.
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

/// The entry under `key`, if it belongs to `flow`.
#[inline(always)]
pub(crate) fn owned(key: &RevKey, flow: &FlowKey) -> Option<&'static mut RevValue> {
    let value = REV.get_ptr_mut(key)?;
    // SAFETY: the pointer is valid until the program ends. The entry's slot may be reused for another flow meanwhile,
    // but only by the collector's deletion of long-idle entries; then one time stamp of that flow is wrong by a packet.
    let value = unsafe { &mut *value };
    (value.origin == flow.source && value.origin_port == flow.source_port).then_some(value)
}

/// Searches the entry of a flow that is missing in the cache, as far as any allocation has probed.
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
        let walked = walk.next_port();
        let port = walked.to_be_bytes();
        if tries.used[attempt] == 0 {
            continue;
        }
        if let Some(value) = owned(&flow.outside(external, port), flow) {
            return Some((port, value));
        }
        if tries.flipped != 0 {
            let neighbour = (walked ^ 1).to_be_bytes();
            if let Some(value) = owned(&flow.outside(external, neighbour), flow) {
                return Some((neighbour, value));
            }
        }
    }
    None
}

/// Inserts a flow into the cache. A failure is harmless: the next packet searches.
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

/// Result of an attempt to own a port.
enum Claim {
    /// Owned by the flow.
    Owned,
    /// Owned by another flow.
    Taken,
    /// The map is full.
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
        // Another CPU may have inserted it for a packet of the same flow.
        Err(EEXIST) if owned(key, flow).is_some() => Claim::Owned,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::Full,
    }
}

/// Allocates a port to a flow: its source port if that is free and allowed.
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
        let tried = if attempt == 0 {
            u16::from_be_bytes(flow.source_port)
        } else {
            // Most flows keep their port, and need no hash.
            if attempt == 1 {
                walk = PortWalk::new(range(settings, flow.protocol), flow_hash(settings.hash_key, flow));
            }
            walk.next_port()
        };
        let port = if attempt == 0 { tried } else { handover::fitted(settings.handover, tried) };
        if !is_allocatable(settings, flow.protocol, port) || !handover::allocates(settings.handover, port) {
            continue;
        }
        let flipped = port != tried;
        let port = port.to_be_bytes();
        match claim(ctx, &flow.outside(external, port), flow, &value) {
            Claim::Owned => {
                mark_try(attempt, flipped);
                return Ok(port);
            }
            Claim::Taken => {}
            Claim::Full => return Err(Refused::MapFull),
        }
    }
    Err(Refused::NoPort)
}

/// Records that this attempt allocated a port, or its neighbour (`flipped`).
#[inline(always)]
fn mark_try(attempt: usize, flipped: bool) {
    if let Some(tries) = TRIES.get_ptr_mut(0)
        && attempt < ports::TRIES
    {
        // SAFETY: the single slot of an array map; bytes are only ever set to 1.
        unsafe {
            if (*tries).used[attempt] == 0 {
                if attempt != 0 {
                    (*tries).moved = 1;
                }
                (*tries).used[attempt] = 1;
            }
            if flipped {
                (*tries).flipped = 1;
            }
        }
    }
}

/// Whether a socket of the node listens on this translated source, or is connected from it to this remote endpoint.
#[inline(always)]
fn used_by_host(ctx: &TcContext, key: &RevKey) -> bool {
    if key.protocol == ICMP {
        return false;
    }
    // The tuple of the reply, since that is what the socket would receive.
    let mut tuple = SocketTuple {
        source: key.remote,
        destination: key.external,
        source_port: key.remote_port,
        destination_port: key.external_port,
    };
    let tuple_pointer = core::ptr::from_mut(&mut tuple).cast::<bpf_sock_tuple>();
    let size = size_of::<SocketTuple>() as u32;
    // SAFETY: the tuple is initialised and of the given length; -1 is the device's namespace. A socket is released
    // right after the lookup, as the verifier requires.
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

/// The IPv4 part of the kernel's `struct bpf_sock_tuple`; its union has the size of the IPv6 part, and the helper
/// derives the family from the length.
#[repr(C)]
struct SocketTuple {
    source: Address,
    destination: Address,
    source_port: Port,
    destination_port: Port,
}

/// Deletes a flow from cache and reverse map.
#[inline(always)]
pub(crate) fn forget(flow: &FlowKey, external: Address, external_port: Port) {
    let key = flow.outside(external, external_port);
    if owned(&key, flow).is_some() {
        let _ = REV.remove(key);
    }
    let _ = FWD.remove(flow);
}
