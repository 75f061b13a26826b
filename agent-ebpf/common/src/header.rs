//! Header fields, and rewriting of the IPv4 header.

use crate::abi::{Address, seen};
use crate::checksum::replace_address;

/// Bytes of an Ethernet header without a tag.
pub const ETHERNET_LENGTH: usize = 14;
/// Bytes of an IPv4 header without options.
pub const IPV4_LENGTH: usize = 20;
/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// Offset of the header checksum; source and destination follow it, so that one write changes all three.
pub const IPV4_CHECKSUM: usize = 10;
/// Bytes from the checksum to the end of the destination.
pub const IPV4_REWRITTEN: usize = 10;

/// Offset of the checksum in a TCP header.
pub const TCP_CHECKSUM: usize = 16;
/// Offset of the checksum in a UDP header.
pub const UDP_CHECKSUM: usize = 6;
/// Offset of the checksum in an ICMP header.
pub const ICMP_CHECKSUM: usize = 2;
/// Offset of the identifier in an echo message.
pub const ICMP_IDENTIFIER: usize = 4;

/// ICMP echo reply.
pub const ICMP_ECHO_REPLY: u8 = 0;
/// ICMP echo request.
pub const ICMP_ECHO_REQUEST: u8 = 8;

/// TCP flag FIN.
pub const TCP_FIN: u8 = 0x01;
/// TCP flag SYN.
pub const TCP_SYN: u8 = 0x02;
/// TCP flag RST.
pub const TCP_RST: u8 = 0x04;
/// TCP flag ACK.
pub const TCP_ACK: u8 = 0x10;

/// Whether an ICMP message reports an error about another packet (RFC 1122 3.2.2): unreachable, source quench,
/// redirect, time exceeded, parameter problem.
#[inline(always)]
#[must_use]
pub const fn icmp_is_error(kind: u8) -> bool {
    matches!(kind, 3 | 4 | 5 | 11 | 12)
}

/// Whether the flags open a TCP connection: SYN without ACK, RST or FIN.
#[inline(always)]
#[must_use]
pub const fn tcp_opens(flags: u8) -> bool {
    flags & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN) == TCP_SYN
}

/// Whether a TCP packet without an entry never opens a flow: FIN, RST, and SYN+ACK, which is a reply.
#[inline(always)]
#[must_use]
pub const fn tcp_never_opens(flags: u8) -> bool {
    flags & (TCP_FIN | TCP_RST | TCP_SYN) != 0 && !tcp_opens(flags)
}

/// The bits of [`seen`] for these TCP flags.
#[inline(always)]
#[must_use]
pub const fn tcp_seen(flags: u8) -> u8 {
    let mut bits = seen::ANY;
    if flags & TCP_FIN != 0 {
        bits |= seen::FIN;
    }
    if flags & TCP_RST != 0 {
        bits |= seen::RST;
    }
    bits
}

/// The first 20 bytes of an IPv4 header, as on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Ipv4Header(pub [u8; IPV4_LENGTH]);

impl Ipv4Header {
    /// Length with options in bytes; `None` if it is not an IPv4 header.
    #[inline(always)]
    #[must_use]
    pub const fn length(&self) -> Option<usize> {
        let words = self.0[0] & 0x0f;
        if self.0[0] >> 4 == 4 && words >= 5 { Some(words as usize * 4) } else { None }
    }

    /// Whether the packet is a fragment.
    #[inline(always)]
    #[must_use]
    pub const fn is_fragment(&self) -> bool {
        // Bit 13 of the word is "more fragments", the lower 13 are the offset.
        self.0[6] & 0x3f != 0 || self.0[7] != 0
    }

    /// Protocol number of the payload.
    #[inline(always)]
    #[must_use]
    pub const fn protocol(&self) -> u8 {
        self.0[9]
    }

    /// Source address.
    #[inline(always)]
    #[must_use]
    pub const fn source(&self) -> Address {
        [self.0[12], self.0[13], self.0[14], self.0[15]]
    }

    /// Destination address.
    #[inline(always)]
    #[must_use]
    pub const fn destination(&self) -> Address {
        [self.0[16], self.0[17], self.0[18], self.0[19]]
    }

    /// Sets the source and updates the header checksum.
    #[inline(always)]
    pub const fn set_source(&mut self, source: Address) {
        self.set_checksum(replace_address(self.checksum(), self.source(), source));
        self.0[12] = source[0];
        self.0[13] = source[1];
        self.0[14] = source[2];
        self.0[15] = source[3];
    }

    /// Sets the destination and updates the header checksum.
    #[inline(always)]
    pub const fn set_destination(&mut self, destination: Address) {
        self.set_checksum(replace_address(self.checksum(), self.destination(), destination));
        self.0[16] = destination[0];
        self.0[17] = destination[1];
        self.0[18] = destination[2];
        self.0[19] = destination[3];
    }

    /// The bytes that a rewrite changes: checksum, source and destination.
    #[inline(always)]
    #[must_use]
    pub const fn rewritten(&self) -> [u8; IPV4_REWRITTEN] {
        let h = &self.0;
        [h[10], h[11], h[12], h[13], h[14], h[15], h[16], h[17], h[18], h[19]]
    }

    #[inline(always)]
    const fn checksum(&self) -> [u8; 2] {
        [self.0[10], self.0[11]]
    }

    #[inline(always)]
    const fn set_checksum(&mut self, checksum: [u8; 2]) {
        self.0[10] = checksum[0];
        self.0[11] = checksum[1];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum(header: &[u8; 20]) -> u16 {
        let mut sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    // case: masquerade CS5
    proptest! {
        #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]
        #[test]
        fn a_rewritten_header_still_verifies(mut bytes: [u8; 20], source: [u8; 4], destination: [u8; 4]) {
            bytes[10..12].fill(0);
            let checksum = !sum(&bytes);
            bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
            let before = bytes;
            let mut header = Ipv4Header(bytes);
            header.set_source(source);
            header.set_destination(destination);
            prop_assert_eq!(sum(&header.0), 0xffff);
            prop_assert_eq!(header.source(), source);
            prop_assert_eq!(header.destination(), destination);
            prop_assert_eq!(&header.0[..10], &before[..10]);
            prop_assert_eq!(&header.rewritten()[..], &header.0[10..]);
        }
    }

    #[test]
    fn lengths_and_fragments_are_read_as_rfc_791_says() {
        let mut header = Ipv4Header([0; 20]);
        header.0[0] = 0x45;
        assert_eq!(header.length(), Some(20));
        header.0[0] = 0x4f;
        assert_eq!(header.length(), Some(60));
        header.0[0] = 0x44;
        assert_eq!(header.length(), None);
        header.0[0] = 0x65;
        assert_eq!(header.length(), None);

        header.0[6] = 0x40;
        assert!(!header.is_fragment(), "don't fragment is no fragment");
        header.0[6] = 0x20;
        assert!(header.is_fragment(), "first fragment");
        header.0[6..8].copy_from_slice(&[0, 1]);
        assert!(header.is_fragment(), "last fragment");
    }

    #[test]
    fn flags_open_or_never_open() {
        assert!(tcp_opens(TCP_SYN));
        for flags in [TCP_SYN | TCP_ACK, TCP_FIN | TCP_ACK, TCP_RST, TCP_RST | TCP_ACK, TCP_SYN | TCP_FIN] {
            assert!(!tcp_opens(flags) && tcp_never_opens(flags), "{flags:#x}");
        }
        assert!(!tcp_never_opens(TCP_ACK) && !tcp_opens(TCP_ACK));
        assert!(!tcp_never_opens(TCP_SYN));
    }
}
