//! Packets on their way out by an egress device.
//!
//! ```text
//!  parse ─► cache hit ─────────────────────────────────────► translate
//!             │ miss, SYN, or policy at once
//!             ├─ source is the device's address ─► host: hold the port, move the flow only if a pod has it
//!             ├─ source is no pod of ours, or an exempt one ─► pass
//!             ├─ destination excluded ─► pass (TCP, shortly after the change: translate if it was before)
//!             ├─ answer to a flow from outside ─► pass
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
    Address, DeviceKey, ENDPOINT_EXEMPT, EndpointKey, ExcludedAddress, ExcludedValue, FlowKey, MARK_TRANSLATED,
    OWNER_HOST, OWNER_POD, Port, REASON_OWN_NODE, RevValue, SETTING_IMMEDIATE, SETTING_MASQUERADE, SettingsValue, TCP,
    seen,
};
use cistern_ebpf_common::counter::Counter;
use cistern_ebpf_common::header::{tcp_never_opens, tcp_opens, tcp_seen};

use aya_ebpf::btf_maps::lpm_trie::Key;

use crate::maps::{DEVICES, ENDPOINTS, EXCLUDED, FWD, INBOUND, REV, SETTINGS};
use crate::nat::{self, Refused};
use crate::packet::{self, Packet, Parsed};
use crate::report::{count, event};

/// What becomes of a packet.
enum Verdict {
    /// It goes on as it is, counted as this.
    Pass(Counter),
    /// It goes on from this address and port.
    Translate(Address, Port),
    /// It ends here, counted as this.
    Drop(Counter),
}

#[classifier]
pub fn cistern_egress(ctx: TcContext) -> i32 {
    let mut packet = match packet::parse(&ctx) {
        Parsed::Flow(packet) => packet,
        Parsed::Untouched(kind) => {
            count(kind);
            return TCX_NEXT;
        }
        Parsed::Foreign => return TCX_NEXT,
    };
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
    }
}

/// The longest excluded prefix that holds the address.
#[inline(always)]
pub(crate) fn excluded(address: Address) -> Option<&'static ExcludedValue> {
    EXCLUDED.get(&Key::new(32, ExcludedAddress { address }))
}

#[inline(always)]
fn decide(ctx: &TcContext, packet: &Packet) -> Verdict {
    let flow = &packet.flow;
    if packet::mark(ctx) & MARK_TRANSLATED != 0 {
        return Verdict::Pass(Counter::AlreadyTranslated);
    }
    if packet.echo_reply {
        return Verdict::Pass(Counter::EchoReply);
    }
    let Some(settings) = SETTINGS.get(0) else { return Verdict::Pass(Counter::Disabled) };
    if settings.flags & SETTING_MASQUERADE == 0 {
        return Verdict::Pass(Counter::Disabled);
    }
    // SAFETY: user space writes devices whole, and rarely; a torn read is excluded by the four-byte value.
    let device =
        unsafe { DEVICES.get(DeviceKey { ifindex: packet::ifindex(ctx) }) }.map_or([0; 4], |value| value.address);
    let now = nat::now();
    let opens = flow.protocol == TCP && tcp_opens(packet.flags);
    let sticky = settings.flags & SETTING_IMMEDIATE == 0;

    let mut cached = None;
    if let Some(value) = FWD.get_ptr_mut(flow) {
        // SAFETY: valid until the program ends; a slot that the LRU gives away meanwhile shows another flow's values
        // for this one packet at worst, which the check against the reverse map notices within a second.
        let value = unsafe { &mut *value };
        if value.external != device && !is_own_address(value.external) {
            nat::forget(flow, value.external, value.external_port);
            count(Counter::StaleAddress);
        } else if !opens && sticky {
            let closing = flow.protocol == TCP && tcp_seen(packet.flags) != seen::ANY;
            if value.checked == now && !closing {
                return Verdict::Translate(value.external, value.external_port);
            }
            if let Some(entry) = nat::owned(&flow.outside(value.external, value.external_port), flow) {
                nat::touch_sent(entry, flow, packet.flags, now);
                value.checked = now;
                return Verdict::Translate(value.external, value.external_port);
            }
            let _ = FWD.remove(flow);
        } else {
            cached = Some((value.external, value.external_port));
        }
    }

    if flow.source == device && device != [0; 4] {
        return host(ctx, settings, packet, now);
    }
    // SAFETY: user space replaces endpoint values whole; the flags are one word.
    match unsafe { ENDPOINTS.get(EndpointKey { address: flow.source }) } {
        None => return Verdict::Pass(Counter::ForeignSource),
        Some(endpoint) if endpoint.flags & ENDPOINT_EXEMPT != 0 => return Verdict::Pass(Counter::PodExempt),
        Some(_) => {}
    }

    if let Some(prefix) = excluded(flow.destination) {
        return keep_or_pass(settings, packet, device, prefix, cached, now, sticky);
    }

    if opens {
        let _ = INBOUND.remove(flow);
    } else if let Some(value) = INBOUND.get_ptr_mut(flow) {
        // SAFETY: as for the cache.
        let value = unsafe { &mut *value };
        value.sent |= nat::seen_of(flow, packet.flags);
        if value.last_seen != now {
            value.last_seen = now;
        }
        return Verdict::Pass(Counter::InboundReply);
    }

    if let Some((external, port)) = cached
        && let Some(entry) = nat::owned(&flow.outside(external, port), flow)
    {
        nat::touch_sent(entry, flow, packet.flags, now);
        return Verdict::Translate(external, port);
    }
    if device == [0; 4] {
        event(ctx, Counter::NoDeviceAddress, flow, now);
        return Verdict::Pass(Counter::NoDeviceAddress);
    }
    if let Some((port, entry)) = nat::find(settings, flow, device) {
        nat::touch_sent(entry, flow, packet.flags, now);
        nat::cache(flow, device, port, now);
        count(Counter::CacheRefilled);
        return Verdict::Translate(device, port);
    }
    if flow.protocol == TCP && !opens {
        if tcp_never_opens(packet.flags) {
            return Verdict::Pass(Counter::NeverOpens);
        }
        if sticky && nat::within(settings.policy_changed, settings.window, now) {
            return Verdict::Pass(Counter::PolicyWindow);
        }
    }
    open(ctx, settings, flow, device, OWNER_POD, now)
}

/// Makes the entry of a new flow.
#[inline(always)]
fn open(ctx: &TcContext, settings: &SettingsValue, flow: &FlowKey, external: Address, owner: u8, now: u32) -> Verdict {
    match nat::allocate(ctx, settings, flow, external, owner, now) {
        Ok(port) => {
            nat::cache(flow, external, port, now);
            count(Counter::FlowCreated);
            Verdict::Translate(external, port)
        }
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

/// Whether the address is on this node: it may be on another device than the one that the packet leaves by.
#[inline(always)]
fn is_own_address(address: Address) -> bool {
    excluded(address).is_some_and(|prefix| prefix.reason == REASON_OWN_NODE)
}

/// A packet to an excluded destination: passes, unless it is of a TCP flow that was translated before the prefix was
/// excluded. A SYN follows the present policy, and ends what an older flow of the same ends had.
#[inline(always)]
fn keep_or_pass(
    settings: &SettingsValue,
    packet: &Packet,
    device: Address,
    prefix: &ExcludedValue,
    cached: Option<(Address, Port)>,
    now: u32,
    sticky: bool,
) -> Verdict {
    let flow = &packet.flow;
    let opens = tcp_opens(packet.flags);
    if flow.protocol != TCP || !sticky {
        return Verdict::Pass(Counter::Excluded);
    }
    if opens && let Some((external, port)) = cached {
        nat::forget(flow, external, port);
    } else if nat::within(prefix.since, settings.window, now)
        && let Some((port, entry)) = nat::find(settings, flow, device)
    {
        if opens {
            nat::forget(flow, device, port);
        } else {
            nat::touch_sent(entry, flow, packet.flags, now);
            nat::cache(flow, device, port, now);
            count(Counter::CacheRefilled);
            return Verdict::Translate(device, port);
        }
    }
    Verdict::Pass(Counter::Excluded)
}

/// A flow of the host under the address that pods leave under too. It keeps its port, which is held in the reverse map
/// so that no pod is given it towards the same remote end. Where a pod has it already, the host's flow is moved.
///
/// Held are only ports that a pod could be given, towards destinations that pods are translated for, and for TCP only
/// by a SYN: a listening or connected socket is found by the look-up that allocation does.
#[inline(always)]
fn host(ctx: &TcContext, settings: &SettingsValue, packet: &Packet, now: u32) -> Verdict {
    let flow = &packet.flow;
    let opens = flow.protocol != TCP || tcp_opens(packet.flags);
    if !nat::givable(settings, flow.protocol, u16::from_be_bytes(flow.source_port))
        || excluded(flow.destination).is_some()
    {
        return Verdict::Pass(Counter::HostFlow);
    }
    let key = flow.outside(flow.source, flow.source_port);
    if let Some(entry) = nat::owned(&key, flow) {
        nat::touch_sent(entry, flow, packet.flags, now);
        return Verdict::Pass(Counter::HostFlow);
    }
    if REV.get_ptr(key).is_some() {
        if let Some((port, entry)) = nat::find(settings, flow, flow.source) {
            nat::touch_sent(entry, flow, packet.flags, now);
            nat::cache(flow, flow.source, port, now);
            count(Counter::HostTranslated);
            return Verdict::Translate(flow.source, port);
        }
        if flow.protocol == TCP && tcp_never_opens(packet.flags) {
            return Verdict::Pass(Counter::NeverOpens);
        }
        count(Counter::HostTranslated);
        return open(ctx, settings, flow, flow.source, OWNER_HOST, now);
    }
    if opens {
        let value = RevValue {
            origin: flow.source,
            origin_port: flow.source_port,
            sent: seen::ANY,
            received: 0,
            last_seen: now,
            created: now,
            ifindex: packet::ifindex(ctx),
            owner: OWNER_HOST,
            zero: [0; 3],
        };
        // A full map costs the host its reservation, not its packet.
        let _ = REV.insert(key, value, u64::from(BPF_NOEXIST));
    }
    Verdict::Pass(Counter::HostFlow)
}
