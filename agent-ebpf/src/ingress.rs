//! Packets that arrive by an egress device.
//!
//! A reply of a translated flow is translated back to the pod. A packet that opens a flow to a pod is recorded, so that
//! the pod's replies leave with the pod's own address. All others are the host's.

use aya_ebpf::bindings::{
    BPF_ANY,
    tcx_action_base::{TCX_DROP, TCX_NEXT},
};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use cistern_ebpf_common::abi::{
    EndpointKey, FlowKey, ICMP, InboundValue, OWNER_POD, RevKey, RevValue, SettingsValue, TCP, handover, same_pod, seen,
};
use cistern_ebpf_common::counter::Counter;
use cistern_ebpf_common::header::tcp_opens;

use crate::egress::{device_address, excluded};
use crate::maps::{ENDPOINTS, FWD, INBOUND, REV, SETTINGS};
use crate::nat;
use crate::packet::{self, Packet};
use crate::report::count;

#[classifier]
pub fn cistern_ingress(ctx: TcContext) -> i32 {
    let Some(mut packet) = packet::flow(&ctx) else { return TCX_NEXT };
    let flow = packet.flow;
    // An echo request from outside is no reply, and the pod's reply to it passes unchanged.
    if flow.protocol == ICMP && !packet.echo_reply {
        return TCX_NEXT;
    }
    let Some(settings) = SETTINGS.get(0) else { return TCX_NEXT };
    if settings.handover == handover::WAITING {
        return TCX_NEXT;
    }
    let key = RevKey {
        remote: flow.source,
        external: flow.destination,
        remote_port: flow.source_port,
        external_port: flow.destination_port,
        protocol: flow.protocol,
        zero: [0; 3],
    };
    if let Some(entry) = REV.get_ptr_mut(key) {
        // SAFETY: valid until the program ends; see `nat::owned` about reused slots.
        let entry = unsafe { &mut *entry };
        if !of_endpoint(entry, settings) {
            count(Counter::PodEnded);
            return TCX_DROP;
        }
        nat::touch_received(entry, nat::seen_of(&flow, packet.flags), nat::now());
        let (origin, port) = (entry.origin, entry.origin_port);
        if origin == key.external && port == key.external_port {
            return TCX_NEXT;
        }
        if packet.set_destination(&ctx, origin, port).is_err() {
            count(Counter::RewriteFailed);
            return TCX_DROP;
        }
        count(Counter::Reversed);
        return TCX_NEXT;
    }
    if flow.protocol != ICMP && settings.handover != handover::ODD {
        remember(&ctx, settings, &packet);
    }
    TCX_NEXT
}

/// Whether the pod that opened the flow is still the endpoint at its address. Checked once per epoch, which is
/// incremented whenever an endpoint may have ended. A flow of the host has no endpoint.
#[inline(always)]
fn of_endpoint(entry: &mut RevValue, settings: &SettingsValue) -> bool {
    // SAFETY: a plain field. Read once: user space may increment it between the comparison and the store.
    let epoch = unsafe { core::ptr::read_volatile(&settings.epoch) };
    if entry.epoch == epoch || entry.owner != OWNER_POD {
        return true;
    }
    // SAFETY: user space replaces endpoint values as a whole; the generation is one word.
    let Some(endpoint) = (unsafe { ENDPOINTS.get(EndpointKey { address: entry.origin }) }) else { return false };
    if !same_pod(entry.endpoint_generation, endpoint.generation) {
        return false;
    }
    entry.epoch = epoch;
    true
}

/// Updates the inbound table: an entry is created for a TCP SYN, or for UDP, to a pod of this node, unless the pod
/// itself opened a flow with the same tuple, whose late packets must not look like an opening. Excluded remote
/// endpoints need none, since replies to them keep the pod's address anyway.
#[inline(always)]
fn remember(ctx: &TcContext, settings: &SettingsValue, packet: &Packet) {
    let flow = &packet.flow;
    // SAFETY: only checked for existence.
    if unsafe { ENDPOINTS.get(EndpointKey { address: flow.destination }) }.is_none() {
        return;
    }
    let (answer, now) = (flow.answer(), nat::now());
    let opens = flow.protocol == TCP && tcp_opens(packet.flags);
    if let Some(value) = INBOUND.get_ptr_mut(answer) {
        // SAFETY: valid until the program ends; if the LRU reuses the slot, that entry gets one wrong time stamp.
        let value = unsafe { &mut *value };
        if opens {
            value.received = seen::ANY;
            value.sent = 0;
        } else {
            value.received |= nat::seen_of(flow, packet.flags);
        }
        if value.last_seen != now {
            value.last_seen = now;
        }
        return;
    }
    if (flow.protocol == TCP && !opens) || excluded(flow.source).is_some() || translated(ctx, settings, &answer) {
        return;
    }
    let value = InboundValue {
        last_seen: now,
        created: now,
        ifindex: packet::ifindex(ctx),
        sent: 0,
        received: seen::ANY,
        room: [0; 10],
    };
    if INBOUND.insert(answer, value, u64::from(BPF_ANY)).is_ok() {
        count(Counter::InboundCreated);
    }
}

/// Whether the pod's flow is translated.
#[inline(always)]
fn translated(ctx: &TcContext, settings: &SettingsValue, flow: &FlowKey) -> bool {
    FWD.get_ptr(flow).is_some() || nat::find(settings, flow, device_address(ctx)).is_some()
}
