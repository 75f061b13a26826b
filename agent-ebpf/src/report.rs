//! Counters and rate-limited log events.

use aya_ebpf::programs::TcContext;
use aya_log_ebpf::warn;
use cistern_ebpf_common::abi::FlowKey;
use cistern_ebpf_common::counter::Counter;

use crate::maps::{COUNTERS, EVENTS};

/// Counts one packet.
#[inline(always)]
pub(crate) fn count(kind: Counter) {
    if let Some(slot) = COUNTERS.get_ptr_mut(kind as u32) {
        // SAFETY: the slot belongs to this CPU, and the program is not preempted by another one that counts here.
        unsafe { (*slot).packets += 1 }
    }
}

/// Logs why a flow got no port or no address, at most once per second and reason, because this is called for each
/// packet of such a flow.
#[inline(always)]
pub(crate) fn event(ctx: &TcContext, kind: Counter, flow: &FlowKey, now: u32) {
    let Some(events) = EVENTS.get_ptr_mut(0) else { return };
    // SAFETY: the pointer is to the single slot of an array map, which lives as long as the program. Racing CPUs write
    // the same second, and log twice at worst.
    let last = unsafe {
        match kind {
            Counter::NoPort => &mut (*events).no_port,
            Counter::MapFull => &mut (*events).map_full,
            _ => &mut (*events).no_device_address,
        }
    };
    if *last == now {
        return;
    }
    *last = now;
    let source_port = u16::from_be_bytes(flow.source_port);
    let destination_port = u16::from_be_bytes(flow.destination_port);
    match kind {
        Counter::NoPort => warn!(
            ctx,
            "no free port: {:i}:{} to {:i}:{} protocol {} dropped",
            flow.source,
            source_port,
            flow.destination,
            destination_port,
            flow.protocol
        ),
        Counter::MapFull => warn!(
            ctx,
            "map cst_rev is full: {:i}:{} to {:i}:{} protocol {} dropped",
            flow.source,
            source_port,
            flow.destination,
            destination_port,
            flow.protocol
        ),
        _ => warn!(
            ctx,
            "no address on the egress device: {:i}:{} to {:i}:{} protocol {} leaves with the pod's address",
            flow.source,
            source_port,
            flow.destination,
            destination_port,
            flow.protocol
        ),
    }
}
