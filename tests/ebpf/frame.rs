//! Ethernet frames with IPv4, built and checked independently of the code under test.

use cistern_core::masquerade::decide::{Content, Packet, TcpFlags, Verdict};
use std::net::{Ipv4Addr, SocketAddrV4};

const ETHERNET: usize = 14;
const IPV4: usize = 20;

/// Ones' complement sum of big-endian words (RFC 1071), folded.
fn sum(bytes: &[u8], start: u64) -> u64 {
    let mut sum = start;
    for pair in bytes.chunks(2) {
        sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

fn pseudo_header(ip: &[u8], length: usize) -> u64 {
    sum(&ip[12..20], u64::from(ip[9]) + length as u64)
}

/// A frame with the packet, with all checksums correct.
pub(crate) fn build(packet: &Packet, payload: &[u8]) -> Vec<u8> {
    let (source, destination) = (packet.source.port().to_be_bytes(), packet.destination.port().to_be_bytes());
    let (protocol, checksum_at, mut transport): (u8, Option<usize>, Vec<u8>) = match packet.content {
        Content::Tcp(TcpFlags { syn, ack, fin, rst }) => {
            let flags = u8::from(fin) | u8::from(syn) << 1 | u8::from(rst) << 2 | u8::from(ack) << 4;
            let mut header = vec![0; 20];
            header[0..2].copy_from_slice(&source);
            header[2..4].copy_from_slice(&destination);
            header[4..8].copy_from_slice(&0x0102_0304_u32.to_be_bytes());
            header[12] = 5 << 4;
            header[13] = flags;
            header[14..16].copy_from_slice(&64_000_u16.to_be_bytes());
            (6, Some(16), header)
        }
        Content::Udp | Content::Fragment => {
            let mut header = vec![0; 8];
            header[0..2].copy_from_slice(&source);
            header[2..4].copy_from_slice(&destination);
            header[4..6].copy_from_slice(&(8 + payload.len() as u16).to_be_bytes());
            (17, Some(6), header)
        }
        Content::EchoRequest => (1, Some(2), [&[8, 0, 0, 0], &source[..], &[0, 1]].concat()),
        Content::EchoReply => (1, Some(2), [&[0, 0, 0, 0], &destination[..], &[0, 1]].concat()),
        Content::IcmpError(kind) | Content::IcmpOther(kind) => (1, Some(2), vec![kind, 0, 0, 0, 0, 0, 0, 0]),
        Content::Other(number) => (number, None, vec![0; 20]),
    };
    transport.extend_from_slice(payload);

    let mut ip = vec![0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, protocol, 0, 0];
    ip.extend_from_slice(&packet.source.ip().octets());
    ip.extend_from_slice(&packet.destination.ip().octets());
    let length = (IPV4 + transport.len()) as u16;
    ip[2..4].copy_from_slice(&length.to_be_bytes());
    if packet.content == Content::Fragment {
        ip[6] = 0x20;
    }
    let header_checksum = !(sum(&ip, 0) as u16);
    ip[10..12].copy_from_slice(&header_checksum.to_be_bytes());

    if let Some(at) = checksum_at {
        let start = if protocol == 1 { 0 } else { pseudo_header(&ip, transport.len()) };
        let checksum = match !(sum(&transport, start) as u16) {
            0 if protocol == 17 => 0xffff,
            checksum => checksum,
        };
        transport[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend(ip);
    frame.extend(transport);
    frame
}

/// The start of the kernel's `struct __sk_buff`, for a test run of a packet that arrived by this device.
pub(crate) fn context(device: u32) -> [u8; 40] {
    const INGRESS_IFINDEX: usize = 36;
    let mut context = [0; 40];
    context[INGRESS_IFINDEX..].copy_from_slice(&device.to_ne_bytes());
    context
}

/// Offset of the transport header.
fn transport_at(frame: &[u8]) -> usize {
    ETHERNET + usize::from(frame[ETHERNET] & 0x0f) * 4
}

/// The checksum field of UDP.
pub(crate) fn udp_checksum(frame: &mut [u8]) -> &mut [u8] {
    let at = transport_at(frame) + 6;
    &mut frame[at..at + 2]
}

/// Inserts options of this many bytes into an IPv4 header without options.
pub(crate) fn with_options(mut frame: Vec<u8>, bytes: usize) -> Vec<u8> {
    assert!(bytes.is_multiple_of(4) && bytes <= 40);
    let end = ETHERNET + IPV4;
    // No-operation options (RFC 791 3.1).
    frame.splice(end..end, std::iter::repeat_n(1, bytes));
    frame[ETHERNET] += (bytes / 4) as u8;
    let length = (frame.len() - ETHERNET) as u16;
    frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&length.to_be_bytes());
    frame[ETHERNET + 10..ETHERNET + 12].fill(0);
    let checksum = !(sum(&frame[ETHERNET..end + bytes], 0) as u16);
    frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// The endpoints of a frame; an echo's identifier is where the model has it.
pub(crate) fn ends(frame: &[u8]) -> (SocketAddrV4, SocketAddrV4) {
    let ip = &frame[ETHERNET..];
    let at = transport_at(frame);
    let word = |offset: usize| u16::from_be_bytes([frame[at + offset], frame[at + offset + 1]]);
    let (source_port, destination_port) = match (ip[9], frame[at]) {
        (6 | 17, _) => (word(0), word(2)),
        (1, 8) => (word(4), 0),
        (1, 0) => (0, word(4)),
        _ => (0, 0),
    };
    let address = |from: usize| Ipv4Addr::new(ip[from], ip[from + 1], ip[from + 2], ip[from + 3]);
    (SocketAddrV4::new(address(12), source_port), SocketAddrV4::new(address(16), destination_port))
}

/// Panics unless a receiver would accept every checksum in the frame.
#[track_caller]
pub(crate) fn assert_checksums(frame: &[u8]) {
    let at = transport_at(frame);
    let ip = &frame[ETHERNET..at];
    assert_eq!(sum(ip, 0), 0xffff, "IPv4 header checksum of {frame:02x?}");
    let transport = &frame[at..];
    match ip[9] {
        17 if transport[6..8] == [0, 0] => {}
        6 | 17 => {
            assert_eq!(
                sum(transport, pseudo_header(ip, transport.len())),
                0xffff,
                "transport checksum of {frame:02x?}"
            );
        }
        1 => assert_eq!(sum(transport, 0), 0xffff, "ICMP checksum of {frame:02x?}"),
        _ => {}
    }
}

/// The difference between two frames. Panics if anything but one endpoint and the checksums changed.
#[track_caller]
pub(crate) fn verdict(before: &[u8], after: &[u8]) -> Verdict {
    if before == after {
        return Verdict::Pass;
    }
    assert_checksums(after);
    let ((old_source, old_destination), (source, destination)) = (ends(before), ends(after));
    let mut expected = before.to_vec();
    let at = transport_at(before);
    expected[ETHERNET + 10..ETHERNET + 20].copy_from_slice(&after[ETHERNET + 10..ETHERNET + 20]);
    // Ports and checksum; in an echo message they are adjacent.
    let [ports, checksum] = match before[ETHERNET + 9] {
        6 => [0..4, 16..18],
        17 => [0..4, 6..8],
        _ => [4..6, 2..4],
    };
    for range in [ports, checksum] {
        let range = range.start + at..range.end + at;
        expected[range.clone()].copy_from_slice(&after[range]);
    }
    assert_eq!(expected, after, "more than ends and checksums changed");
    match (source != old_source, destination != old_destination) {
        (true, false) => Verdict::Source(source),
        (false, true) => Verdict::Destination(destination),
        _ => panic!("{before:02x?} became {after:02x?}"),
    }
}
