//! Entries of flows, for listings.

use crate::datapath::error::DatapathError;
use cistern_core::masquerade::expire::{FlowOwner, FlowRecord, FlowState, InboundRecord, Protocol, Seen};
use cistern_ebpf_common::abi::{FlowKey, ICMP, InboundValue, OWNER_HOST, RevKey, RevValue, TCP, UDP, seen};
use cistern_ebpf_common::map;
use std::net::SocketAddrV4;

pub(in crate::datapath) fn protocol(map: &'static str, number: u8) -> Result<Protocol, DatapathError> {
    match number {
        TCP => Ok(Protocol::Tcp),
        UDP => Ok(Protocol::Udp),
        ICMP => Ok(Protocol::Icmp),
        _ => Err(DatapathError::Foreign { map, key: "of a flow".to_owned(), field: "protocol", value: number.into() }),
    }
}

pub(in crate::datapath) fn seen_bits(bits: u8) -> Seen {
    Seen { any: bits & seen::ANY != 0, fin: bits & seen::FIN != 0, rst: bits & seen::RST != 0 }
}

fn end(address: [u8; 4], port: [u8; 2]) -> SocketAddrV4 {
    SocketAddrV4::new(address.into(), u16::from_be_bytes(port))
}

pub(super) fn flow_record(key: RevKey, value: RevValue, now: u32) -> Result<FlowRecord, DatapathError> {
    let protocol = protocol(map::REV, key.protocol)?;
    Ok(FlowRecord {
        protocol,
        origin: end(value.origin, value.origin_port),
        remote: end(key.remote, key.remote_port),
        external: end(key.external, key.external_port),
        owner: if value.owner == OWNER_HOST { FlowOwner::Host } else { FlowOwner::Pod },
        state: FlowState::of(protocol, seen_bits(value.sent), seen_bits(value.received)),
        age_seconds: now.saturating_sub(value.created),
        idle_seconds: now.saturating_sub(value.last_seen),
        ifindex: value.ifindex,
    })
}

pub(super) fn inbound_record(key: FlowKey, value: InboundValue, now: u32) -> Result<InboundRecord, DatapathError> {
    let protocol = protocol(map::INBOUND, key.protocol)?;
    Ok(InboundRecord {
        protocol,
        pod: end(key.source, key.source_port),
        remote: end(key.destination, key.destination_port),
        state: FlowState::of(protocol, seen_bits(value.sent), seen_bits(value.received)),
        age_seconds: now.saturating_sub(value.created),
        idle_seconds: now.saturating_sub(value.last_seen),
        ifindex: value.ifindex,
    })
}
