//! Packets that leave by an egress device.
//!
//! ```text
//!  parse ─► cache hit, by the pod's own device ────────────► translate
//!             │ miss, SYN, or policy at once
//!             ├─ source is no pod of ours:
//!             │    it is the device's address ─► host: reserve the port, translate only if a pod has it
//!             │    any other ─► pass
//!             ├─ the packet came in by another device than the pod's, or the pod is exempt ─► pass
//!             ├─ destination excluded ─► pass (TCP, shortly after a change: translate if it was before)
//!             ├─ reply of a flow from outside ─► pass
//!             ├─ found in the reverse map ─────────────────► translate
//!             ├─ never opens a flow, or may be older than the policy ─► pass
//!             └─ allocate ─────────────────────────────────► translate, or drop
//! ```

use aya_ebpf::bindings::{
    BPF_NOEXIST,
    tcx_action_base::{TCX_DROP, TCX_NEXT},
};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use cistern_ebpf_common::abi::{
    Address, DeviceKey, ENDPOINT_EXEMPT, EndpointKey, ExcludedAddress, ExcludedValue, FwdValue, MARK_TRANSLATED,
    OWNER_HOST, OWNER_POD, Port, RevValue, SETTING_IMMEDIATE, SETTING_MASQUERADE, SettingsValue, TCP, handover, reason,
    same_pod, seen,
};
use cistern_ebpf_common::counter::Counter;
use cistern_ebpf_common::header::{tcp_never_opens, tcp_opens, tcp_seen};

use aya_ebpf::btf_maps::lpm_trie::Key;

use crate::maps::{DEVICES, ENDPOINTS, EXCLUDED, FWD, INBOUND, REV, SETTINGS};
use crate::nat::{self, Owner, Refused};
use crate::packet::{self, Packet};
use crate::report::{count, event};

/// The same value, which the verifier does not know. It follows the whole port walk once for each different constant that
/// reaches it.
#[inline(always)]
fn opaque(settings: &SettingsValue, value: u32) -> u32 {
    // SAFETY: a plain field.
    value ^ unsafe { core::ptr::read_volatile(&settings.zero) }
}

/// The treatment of a packet.
enum Verdict {
    /// Passed unchanged, with this counter.
    Pass(Counter),
    /// Source translated to this address and port.
    Translate(Address, Port),
    /// Dropped, with this counter.
    Drop(Counter),
    /// Passed unchanged to the programs of another build, which decide and count.
    Leave,
}

#[classifier]
pub fn cistern_egress(ctx: TcContext) -> i32 {
    let Some(mut packet) = packet::flow(&ctx) else { return TCX_NEXT };
    match decide(&ctx, &packet) {
        Verdict::Pass(kind) => {
            count(kind);
            TCX_NEXT
        }
        Verdict::Translate(address, port) => {
            if packet.set_source(&ctx, address, port).is_err() {
                count(Counter::RewriteFailed);
                return TCX_DROP;
            }
            ctx.set_mark(packet::mark(&ctx) | MARK_TRANSLATED);
            count(Counter::Translated);
            TCX_NEXT
        }
        Verdict::Drop(kind) => {
            count(kind);
            TCX_DROP
        }
        Verdict::Leave => TCX_NEXT,
    }
}

/// The longest excluded prefix that contains the address.
#[inline(always)]
pub(crate) fn excluded(address: Address) -> Option<&'static ExcludedValue> {
    EXCLUDED.get(&Key::new(32, ExcludedAddress { address }))
}

/// Whether the packet arrived by this device, which is 0 for any.
#[inline(always)]
fn came_by(ctx: &TcContext, device: u32) -> bool {
    device == 0 || device == packet::ingress_ifindex(ctx)
}

/// Whether the source is still the endpoint of the cached flow. A flow of the host has none, and is searched.
#[inline(always)]
fn of_endpoint(value: &FwdValue, source: Address) -> bool {
    // SAFETY: user space replaces endpoint values as a whole; the fields are one word each.
    let endpoint = unsafe { ENDPOINTS.get(EndpointKey { address: source }) };
    endpoint.is_some_and(|endpoint| {
        endpoint.ifindex == value.device && same_pod(value.endpoint_generation, endpoint.generation)
    })
}

#[inline(always)]
fn decide(ctx: &TcContext, packet: &Packet) -> Verdict {
    let flow = &packet.flow;
    let Some(settings) = SETTINGS.get(0) else { return Verdict::Pass(Counter::Disabled) };
    if settings.handover == handover::WAITING {
        return Verdict::Leave;
    }
    if packet::mark(ctx) & MARK_TRANSLATED != 0 {
        return Verdict::Pass(Counter::AlreadyTranslated);
    }
    if packet.echo_reply {
        return Verdict::Pass(Counter::EchoReply);
    }
    if settings.flags & SETTING_MASQUERADE == 0 {
        return Verdict::Pass(Counter::Disabled);
    }
    let opens = flow.protocol == TCP && tcp_opens(packet.flags);
    let sticky = settings.flags & SETTING_IMMEDIATE == 0;

    let mut cached = None;
    if let Some(value) = FWD.get_ptr_mut(flow) {
        // SAFETY: valid until the program ends; if the LRU reuses the slot meanwhile, this packet uses another flow's
        // values at worst, which the check against the reverse map detects within a second.
        let value = unsafe { &mut *value };
        // SAFETY: a plain field. Read once: user space may increment it between the comparison and the store.
        let epoch = unsafe { core::ptr::read_volatile(&settings.epoch) };
        let checked = value.epoch == epoch;
        if !checked && !is_own_address(ctx, value.external) {
            nat::forget(flow, value.external, value.external_port);
            count(Counter::StaleAddress);
        } else if !came_by(ctx, value.device) {
            // Of another pod than the one that opened the flow, or of none.
        } else if !checked && !of_endpoint(value, flow.source) {
            let _ = FWD.remove(flow);
        } else {
            if !checked {
                value.epoch = epoch;
            }
            if opens || !sticky {
                cached = Some((value.external, value.external_port));
            } else {
                let now = nat::now();
                let closing = flow.protocol == TCP && tcp_seen(packet.flags) != seen::ANY;
                if value.checked == now && !closing {
                    return Verdict::Translate(value.external, value.external_port);
                }
                if let Some(entry) = nat::owned(&flow.outside(value.external, value.external_port), flow) {
                    nat::touch_sent(entry, flow, packet.flags, value.endpoint_generation, now);
                    value.checked = now;
                    return Verdict::Translate(value.external, value.external_port);
                }
                let _ = FWD.remove(flow);
            }
        }
    }
    let search = match consider(ctx, settings, packet, cached, sticky) {
        Ok(search) => search,
        Err(verdict) => return verdict,
    };
    search_or_open(ctx, settings, packet, &search, sticky)
}

/// A flow whose entry is searched in the reverse map.
struct Search {
    /// The translated source address.
    external: Address,
    /// The owner.
    owner: Owner,
    /// The destination is excluded: only an older entry counts, and none is created.
    excluded: u32,
}

/// The rules for a cache miss: a verdict, or a search.
#[inline(always)]
fn consider(
    ctx: &TcContext,
    settings: &SettingsValue,
    packet: &Packet,
    cached: Option<(Address, Port)>,
    sticky: bool,
) -> Result<Search, Verdict> {
    let flow = &packet.flow;
    let opens = flow.protocol == TCP && tcp_opens(packet.flags);
    // SAFETY: user space replaces endpoint values as a whole; the flags are one word.
    let Some(endpoint) = (unsafe { ENDPOINTS.get(EndpointKey { address: flow.source }) }) else {
        if flow.source == device_address(ctx) {
            return host(ctx, settings, packet);
        }
        return Err(Verdict::Pass(Counter::ForeignSource));
    };
    if !came_by(ctx, endpoint.ifindex) {
        return Err(Verdict::Pass(Counter::OtherDevice));
    }
    let kind = opaque(settings, OWNER_POD.into()) as u8;
    let owner = Owner { kind, generation: endpoint.generation, device: endpoint.ifindex };
    if endpoint.flags & ENDPOINT_EXEMPT != 0 {
        return Err(Verdict::Pass(Counter::PodExempt));
    }

    if let Some(prefix) = excluded(flow.destination) {
        if flow.protocol == TCP && sticky {
            if opens && let Some((external, port)) = cached {
                nat::forget(flow, external, port);
            } else if prefix.since != 0 && nat::within(prefix.since, settings.window, nat::now()) {
                return Ok(Search { external: device_address(ctx), owner, excluded: opaque(settings, 1) });
            }
        }
        return Err(Verdict::Pass(Counter::Excluded));
    }

    if opens {
        // Checked first: it takes no lock, and there is hardly ever one.
        if INBOUND.get_ptr(flow).is_some() {
            let _ = INBOUND.remove(flow);
        }
    } else if let Some(value) = INBOUND.get_ptr_mut(flow) {
        // SAFETY: as for the cache.
        let value = unsafe { &mut *value };
        let (bits, now) = (value.sent | nat::seen_of(flow, packet.flags), nat::now());
        if bits != value.sent {
            value.sent = bits;
        }
        if value.last_seen != now {
            value.last_seen = now;
        }
        return Err(Verdict::Pass(Counter::InboundReply));
    }

    if let Some((external, port)) = cached
        && let Some(entry) = nat::owned(&flow.outside(external, port), flow)
    {
        nat::touch_sent(entry, flow, packet.flags, owner.generation, nat::now());
        return Err(Verdict::Translate(external, port));
    }
    let external = device_address(ctx);
    if external == [0; 4] {
        event(ctx, Counter::NoDeviceAddress, flow, nat::now());
        return Err(Verdict::Pass(Counter::NoDeviceAddress));
    }
    Ok(Search { external, owner, excluded: opaque(settings, 0) })
}

/// Searches the flow's entry; if there is none, creates one if this packet may open a flow.
///
/// A SYN to an excluded destination deletes the entry of an older flow of the same tuple.
#[inline(always)]
fn search_or_open(
    ctx: &TcContext,
    settings: &SettingsValue,
    packet: &Packet,
    search: &Search,
    sticky: bool,
) -> Verdict {
    let flow = &packet.flow;
    let opens = flow.protocol != TCP || tcp_opens(packet.flags);
    let now = nat::now();
    if let Some((port, entry)) = nat::find(settings, flow, search.external) {
        if search.excluded != 0 && opens {
            nat::forget(flow, search.external, port);
            return Verdict::Pass(Counter::Excluded);
        }
        nat::touch_sent(entry, flow, packet.flags, search.owner.generation, now);
        nat::cache(settings, flow, search.external, port, search.owner, now);
        count(if search.owner.kind == OWNER_HOST { Counter::HostTranslated } else { Counter::CacheRefilled });
        return Verdict::Translate(search.external, port);
    }
    if search.excluded != 0 {
        return Verdict::Pass(Counter::Excluded);
    }
    if !opens {
        if tcp_never_opens(packet.flags) {
            return Verdict::Pass(Counter::NeverOpens);
        }
        if search.owner.kind == OWNER_POD && sticky && nat::within(settings.policy_changed, settings.window, now) {
            return Verdict::Pass(Counter::PolicyWindow);
        }
    }
    match nat::allocate(ctx, settings, flow, search.external, search.owner, now) {
        Ok(port) => {
            nat::cache(settings, flow, search.external, port, search.owner, now);
            count(if search.owner.kind == OWNER_HOST { Counter::HostTranslated } else { Counter::FlowCreated });
            Verdict::Translate(search.external, port)
        }
        Err(Refused::HandedOver) => Verdict::Leave,
        Err(Refused::NoPort) => {
            event(ctx, Counter::NoPort, flow, now);
            Verdict::Drop(Counter::NoPort)
        }
        Err(Refused::MapFull) => {
            event(ctx, Counter::MapFull, flow, now);
            Verdict::Drop(Counter::MapFull)
        }
    }
}

/// The masquerade address of the packet's device; 0.0.0.0 if there is none.
#[inline(always)]
pub(crate) fn device_address(ctx: &TcContext) -> Address {
    // SAFETY: user space writes the four bytes as a whole.
    unsafe { DEVICES.get(DeviceKey { ifindex: packet::ifindex(ctx) }) }.map_or([0; 4], |value| value.address)
}

/// Whether the address is on this node, possibly on another device than the packet's.
#[inline(always)]
fn is_own_address(ctx: &TcContext, address: Address) -> bool {
    address == device_address(ctx) || excluded(address).is_some_and(|prefix| prefix.reason == reason::OWN_NODE)
}

/// A flow of the host from the masquerade address. It keeps its port, which is reserved in the reverse map against use
/// by a pod's flow to the same remote endpoint. If a pod has it already, the host's flow is translated.
///
/// Only ports in the range for pods are reserved, for destinations that are masqueraded, and for TCP only by a SYN: a
/// listening or connected socket is found by the lookup during allocation.
#[inline(always)]
fn host(ctx: &TcContext, settings: &SettingsValue, packet: &Packet) -> Result<Search, Verdict> {
    let flow = &packet.flow;
    let pass = Err(Verdict::Pass(Counter::HostFlow));
    let is_allocatable = nat::is_allocatable(settings, flow.protocol, u16::from_be_bytes(flow.source_port));
    if flow.source == [0; 4] || !is_allocatable || excluded(flow.destination).is_some() {
        return pass;
    }
    let key = flow.outside(flow.source, flow.source_port);
    let now = nat::now();
    if let Some(entry) = nat::owned(&key, flow) {
        nat::touch_sent(entry, flow, packet.flags, 0, now);
        return pass;
    }
    if REV.get_ptr(key).is_some() {
        let none = opaque(settings, 0);
        let owner = Owner { kind: opaque(settings, OWNER_HOST.into()) as u8, generation: none, device: none };
        return Ok(Search { external: flow.source, owner, excluded: none });
    }
    if settings.handover == handover::CLOSED {
        return Err(Verdict::Leave);
    }
    let held = handover::allocates(settings.handover, u16::from_be_bytes(flow.source_port));
    if held && (flow.protocol != TCP || tcp_opens(packet.flags)) {
        let value = RevValue::opened(flow, OWNER_HOST, 0, packet::ifindex(ctx), now);
        // If the map is full, the host loses its reservation, but not its packet.
        let _ = REV.insert(key, value, u64::from(BPF_NOEXIST));
    }
    pass
}
