//! Parsing and rewriting of packet headers.

use aya_ebpf::bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR};
use aya_ebpf::programs::TcContext;
use cistern_ebpf_common::abi::{Address, FlowKey, ICMP, Port, TCP, UDP};
use cistern_ebpf_common::counter::Counter;
use cistern_ebpf_common::header::{
    ETHERNET_LENGTH, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ICMP_CHECKSUM, ICMP_ECHO_REPLY, ICMP_ECHO_REQUEST,
    ICMP_IDENTIFIER, IPV4_CHECKSUM, IPV4_REWRITTEN, Ipv4Header, TCP_CHECKSUM, UDP_CHECKSUM, icmp_is_error,
};

use crate::report::count;

/// A TCP, UDP or echo packet that is not a fragment.
pub(crate) struct Packet {
    header: Ipv4Header,
    /// Offset of the transport header.
    transport: usize,
    /// The tuple of the packet. An echo request has its identifier as source port, a reply as destination port.
    pub(crate) flow: FlowKey,
    /// TCP flags; 0 for other protocols.
    pub(crate) flags: u8,
    /// An ICMP echo reply.
    pub(crate) echo_reply: bool,
}

/// Result of parsing.
enum Parsed {
    /// A packet to process.
    Flow(Packet),
    /// Passed unchanged, with this counter.
    Untouched(Counter),
    /// Neither IPv4 nor IPv6.
    Foreign,
}

/// Fields of the socket buffer without an accessor.
#[inline(always)]
pub(crate) fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid, and the verifier knows the field.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// The device by which the packet arrived at this node; 0 if the node itself sends it.
#[inline(always)]
pub(crate) fn ingress_ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: as above.
    unsafe { (*ctx.skb.skb).ingress_ifindex }
}

/// The mark of the packet.
#[inline(always)]
pub(crate) fn mark(ctx: &TcContext) -> u32 {
    // SAFETY: as above.
    unsafe { (*ctx.skb.skb).mark }
}

/// Maximum length of the headers that the programs read: Ethernet, IPv4 with all options, TCP without options.
const HEADERS: u32 = 14 + 60 + 20;

/// The packet to process. Others are passed unchanged and counted by kind.
#[inline(always)]
pub(crate) fn flow(ctx: &TcContext) -> Option<Packet> {
    match parse(ctx) {
        Parsed::Flow(packet) => Some(packet),
        Parsed::Untouched(kind) => {
            count(kind);
            None
        }
        Parsed::Foreign => None,
    }
}

/// Parses the headers. If they are outside the linear part of the packet, they are pulled in, once.
#[inline(always)]
fn parse(ctx: &TcContext) -> Parsed {
    // SAFETY: as above.
    let (protocol, vlan) = unsafe { ((*ctx.skb.skb).protocol as u16, (*ctx.skb.skb).vlan_present) };
    match u16::from_be(protocol) {
        ETHERTYPE_IPV4 => {}
        ETHERTYPE_IPV6 => return Parsed::Untouched(Counter::Ipv6),
        _ => return Parsed::Foreign,
    }
    if vlan != 0 {
        return Parsed::Untouched(Counter::Vlan);
    }
    for _ in 0..2 {
        if let Some(parsed) = parse_linear(ctx) {
            return parsed;
        }
        if ctx.pull_data(ctx.len().min(HEADERS)).is_err() {
            break;
        }
    }
    Parsed::Untouched(Counter::Malformed)
}

/// `N` bytes at `at`, if they end before `end`.
#[inline(always)]
fn bytes<const N: usize>(at: usize, end: usize) -> Option<[u8; N]> {
    if at + N > end {
        return None;
    }
    // SAFETY: the bytes are in the linear part of the packet, as the comparison also proves to the verifier.
    Some(unsafe { *(at as *const [u8; N]) })
}

/// Parses the headers in the linear part; `None` if they are not there.
#[inline(always)]
fn parse_linear(ctx: &TcContext) -> Option<Parsed> {
    let (start, end) = (ctx.data(), ctx.data_end());
    let header = Ipv4Header(bytes(start + ETHERNET_LENGTH, end)?);
    let Some(length) = header.length() else { return Some(Parsed::Untouched(Counter::Malformed)) };
    if header.is_fragment() {
        return Some(Parsed::Untouched(Counter::Fragment));
    }
    let transport = ETHERNET_LENGTH + length;
    let mut flow = FlowKey {
        source: header.source(),
        destination: header.destination(),
        source_port: [0; 2],
        destination_port: [0; 2],
        protocol: header.protocol(),
        zero: [0; 3],
    };
    let mut flags = 0;
    let mut echo_reply = false;
    match flow.protocol {
        TCP => {
            let tcp: [u8; 18] = bytes(start + transport, end)?;
            flow.source_port = [tcp[0], tcp[1]];
            flow.destination_port = [tcp[2], tcp[3]];
            flags = tcp[13];
        }
        UDP => {
            let udp: [u8; 8] = bytes(start + transport, end)?;
            flow.source_port = [udp[0], udp[1]];
            flow.destination_port = [udp[2], udp[3]];
        }
        ICMP => {
            let icmp: [u8; 8] = bytes(start + transport, end)?;
            match icmp[0] {
                ICMP_ECHO_REQUEST => flow.source_port = [icmp[4], icmp[5]],
                ICMP_ECHO_REPLY => {
                    flow.destination_port = [icmp[4], icmp[5]];
                    echo_reply = true;
                }
                kind if icmp_is_error(kind) => return Some(Parsed::Untouched(Counter::IcmpError)),
                _ => return Some(Parsed::Untouched(Counter::IcmpOther)),
            }
        }
        _ => return Some(Parsed::Untouched(Counter::ProtocolOther)),
    }
    Some(Parsed::Flow(Packet { header, transport, flow, flags, echo_reply }))
}

impl Packet {
    /// Sets the packet's source. After an error it may be partly changed, and must be dropped.
    #[inline(always)]
    pub(crate) fn set_source(&mut self, ctx: &TcContext, address: Address, port: Port) -> Result<(), i64> {
        let (from, from_port) = (self.flow.source, self.flow.source_port);
        self.header.set_source(address);
        let offset = if self.flow.protocol == ICMP { ICMP_IDENTIFIER } else { 0 };
        self.write(ctx, (from, address), (from_port, port), offset)
    }

    /// Sets the packet's destination. After an error it may be partly changed, and must be dropped.
    #[inline(always)]
    pub(crate) fn set_destination(&mut self, ctx: &TcContext, address: Address, port: Port) -> Result<(), i64> {
        let (from, from_port) = (self.flow.destination, self.flow.destination_port);
        self.header.set_destination(address);
        let offset = if self.flow.protocol == ICMP { ICMP_IDENTIFIER } else { 2 };
        self.write(ctx, (from, address), (from_port, port), offset)
    }

    /// Writes the addresses of `self.header`, the changed port, and the transport checksum.
    ///
    /// If the checksum is left to the device (`CHECKSUM_PARTIAL`), it only covers the pseudo-header, and the helper
    /// updates that: hence the flag for addresses, which are part of it, and not for ports. ICMP has no pseudo-header.
    /// A UDP checksum of 0 means "none" and is kept.
    #[inline(always)]
    fn write(
        &self,
        ctx: &TcContext,
        address: (Address, Address),
        port: (Port, Port),
        port_offset: usize,
    ) -> Result<(), i64> {
        let (start, end) = (ctx.data(), ctx.data_end());
        let at = start + ETHERNET_LENGTH + IPV4_CHECKSUM;
        if at + IPV4_REWRITTEN > end {
            return Err(-1);
        }
        // SAFETY: the bytes are in the linear part of the packet, which the kernel makes writable for programs with
        // direct packet access.
        unsafe { *(at as *mut [u8; IPV4_REWRITTEN]) = self.header.rewritten() };
        let (offset, flags) = match self.flow.protocol {
            TCP => (TCP_CHECKSUM, 0),
            UDP => (UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0)),
            _ => (ICMP_CHECKSUM, 0),
        };
        let checksum = self.transport + offset;
        if self.flow.protocol != ICMP {
            ctx.l4_csum_replace(
                checksum,
                u64::from(u32::from_ne_bytes(address.0)),
                u64::from(u32::from_ne_bytes(address.1)),
                u64::from(BPF_F_PSEUDO_HDR) | flags | 4,
            )?;
        }
        if port.0 != port.1 {
            ctx.store(self.transport + port_offset, &port.1, 0)?;
            ctx.l4_csum_replace(
                checksum,
                u64::from(u16::from_ne_bytes(port.0)),
                u64::from(u16::from_ne_bytes(port.1)),
                flags | 2,
            )?;
        }
        Ok(())
    }
}
