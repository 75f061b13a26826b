//! Reading the headers of a packet, and rewriting them.

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
    /// Where the transport header starts.
    transport: usize,
    /// The ends, as the packet has them. Of an echo request the identifier is the source port, of a reply it is the
    /// destination port.
    pub(crate) flow: FlowKey,
    /// TCP flags; 0 for the others.
    pub(crate) flags: u8,
    /// An ICMP echo reply.
    pub(crate) echo_reply: bool,
}

/// What a packet is to the programs.
enum Parsed {
    /// One to decide about.
    Flow(Packet),
    /// Not handled, and counted as this.
    Untouched(Counter),
    /// Neither IPv4 nor IPv6.
    Foreign,
}

/// Fields of the socket buffer that no accessor gives.
#[inline(always)]
pub(crate) fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the kernel hands a valid context to the program, and the verifier knows the field.
    unsafe { (*ctx.skb.skb).ifindex }
}

/// The device by which the packet came to this node; 0 where the node itself sends it.
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

/// Bytes that hold all headers that the programs read: Ethernet, IPv4 with all options, TCP up to its options.
const HEADERS: u32 = 14 + 60 + 20;

/// A packet to decide about. One that is not handled goes on untouched, counted by its kind.
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

/// Reads the headers. A packet may have them outside of its linear part; then they are pulled in, once.
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

/// `N` bytes at `at`, if they lie before `end`.
#[inline(always)]
fn bytes<const N: usize>(at: usize, end: usize) -> Option<[u8; N]> {
    if at + N > end {
        return None;
    }
    // SAFETY: the bytes lie in the linear part of the packet, which the comparison proves to the verifier too.
    Some(unsafe { *(at as *const [u8; N]) })
}

/// Reads the headers in the linear part; `None` when they do not lie there.
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
    /// Gives the packet another source. After an error it may be half changed, and must not go on.
    #[inline(always)]
    pub(crate) fn set_source(&mut self, ctx: &TcContext, address: Address, port: Port) -> Result<(), i64> {
        let (from, from_port) = (self.flow.source, self.flow.source_port);
        self.header.set_source(address);
        let offset = if self.flow.protocol == ICMP { ICMP_IDENTIFIER } else { 0 };
        self.write(ctx, (from, address), (from_port, port), offset)
    }

    /// Gives the packet another destination. After an error it may be half changed, and must not go on.
    #[inline(always)]
    pub(crate) fn set_destination(&mut self, ctx: &TcContext, address: Address, port: Port) -> Result<(), i64> {
        let (from, from_port) = (self.flow.destination, self.flow.destination_port);
        self.header.set_destination(address);
        let offset = if self.flow.protocol == ICMP { ICMP_IDENTIFIER } else { 2 };
        self.write(ctx, (from, address), (from_port, port), offset)
    }

    /// Writes the addresses of `self.header`, the changed port, and what both change in the transport checksum.
    ///
    /// The helper corrects a checksum that is left to the device (`CHECKSUM_PARTIAL`) as far as it is there, which is
    /// the pseudo-header: hence the flag for addresses, which are in it, and not for ports, which are not. ICMP has no
    /// pseudo-header. A UDP checksum of 0 says "none" and stays so.
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
        // SAFETY: the bytes lie in the linear part of the packet, which the kernel has made writable for a program that
        // writes directly.
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
