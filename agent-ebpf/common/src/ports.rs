//! Order in which ports are tried for a flow.
//!
//! The source port is tried first if it is allowed. Then a keyed hash of the flow determines a start and an odd stride.
//! The walk runs over the next power of two at or above the number of ports, in which an odd stride reaches every
//! position; positions are scattered, since a small stride would stay inside a reserved block, and those beyond the end
//! are folded back into the range. So all ports of the range are reachable, flows do not cluster, and without the key
//! two flows cannot be aimed at one port. The order depends on the flow, the key and the range only, so that a flow
//! missing in the cache is found again.

use crate::abi::FlowKey;

/// Number of ports tried for a packet: the source port, then sixteen of the walk.
pub const TRIES: usize = 17;

/// An inclusive range of ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    /// First port.
    pub first: u16,
    /// Last port; if less than `first`, the range is `first` only.
    pub last: u16,
}

impl PortRange {
    /// Echo identifiers: any 16-bit number.
    pub const ANY: Self = Self { first: 0, last: u16::MAX };

    /// Whether the range contains the port.
    #[inline(always)]
    #[must_use]
    pub const fn contains(self, port: u16) -> bool {
        self.first <= port && port <= self.last
    }
}

/// The walk over a range.
#[derive(Debug, Clone, Copy)]
pub struct PortWalk {
    first: u32,
    count: u32,
    mask: u32,
    /// Half the bits of the mask, at least 1: the shift of [`PortWalk::scatter`].
    shift: u32,
    position: u32,
    stride: u32,
}

impl PortWalk {
    /// Starts a walk at a position derived from `hash`.
    #[inline(always)]
    #[must_use]
    pub const fn new(range: PortRange, hash: u64) -> Self {
        let count = (range.last as u32).saturating_sub(range.first as u32) + 1;
        let mask = count.next_power_of_two() - 1;
        Self {
            first: range.first as u32,
            count,
            mask,
            shift: mask.count_ones() / 2 + 1,
            position: hash as u32,
            stride: (hash >> 32) as u32 | 1,
        }
    }

    /// The next port to try.
    #[inline(always)]
    pub const fn next_port(&mut self) -> u16 {
        let place = self.scatter(self.position & self.mask);
        self.position = self.position.wrapping_add(self.stride);
        // The mask is less than twice the count, so one subtraction suffices.
        let folded = if place >= self.count { place - self.count } else { place };
        (self.first + folded) as u16
    }

    /// Permutes the positions: both steps, the shift and the multiplication by an odd factor, are invertible.
    #[inline(always)]
    const fn scatter(&self, place: u32) -> u32 {
        let place = place ^ (place >> self.shift);
        let place = place.wrapping_mul(0x9e37_79b1) & self.mask;
        let place = place ^ (place >> self.shift);
        place.wrapping_mul(0x85eb_ca6b) & self.mask
    }
}

/// SipHash-1-3 of the flow (Aumasson and Bernstein, "SipHash: a fast short-input PRF"). With addresses of `N` bytes, a
/// multiple of 4, the endpoints are `N / 4` words, and ports and protocol one more.
#[inline(always)]
#[must_use]
pub const fn flow_hash<const N: usize>(key: [u64; 2], flow: &FlowKey<N>) -> u64 {
    let (sp, dp) = (flow.source_port, flow.destination_port);
    let mut state = Sip {
        v0: key[0] ^ 0x736f_6d65_7073_6575,
        v1: key[1] ^ 0x646f_7261_6e64_6f6d,
        v2: key[0] ^ 0x6c79_6765_6e65_7261,
        v3: key[1] ^ 0x7465_6462_7974_6573,
    };
    let mut word = 0;
    while word < N / 4 {
        state.absorb(ends_word(flow, word * 8));
        word += 1;
    }
    state.absorb(u64::from_le_bytes([sp[0], sp[1], dp[0], dp[1], flow.protocol, 0, 0, 0]));
    // The last word has the remaining bytes, none here, and the length in its top byte.
    state.absorb((2 * N as u64 + 8) << 56);
    state.v2 ^= 0xff;
    state.round();
    state.round();
    state.round();
    state.v0 ^ state.v1 ^ state.v2 ^ state.v3
}

/// Eight bytes of the source followed by the destination.
#[inline(always)]
const fn ends_word<const N: usize>(flow: &FlowKey<N>, at: usize) -> u64 {
    let mut bytes = [0; 8];
    let mut index = 0;
    while index < 8 {
        let from = at + index;
        bytes[index] = if from < N { flow.source[from] } else { flow.destination[from - N] };
        index += 1;
    }
    u64::from_le_bytes(bytes)
}

struct Sip {
    v0: u64,
    v1: u64,
    v2: u64,
    v3: u64,
}

impl Sip {
    #[inline(always)]
    const fn absorb(&mut self, word: u64) {
        self.v3 ^= word;
        self.round();
        self.v0 ^= word;
    }

    #[inline(always)]
    const fn round(&mut self) {
        self.v0 = self.v0.wrapping_add(self.v1);
        self.v2 = self.v2.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(13) ^ self.v0;
        self.v3 = self.v3.rotate_left(16) ^ self.v2;
        self.v0 = self.v0.rotate_left(32);
        self.v2 = self.v2.wrapping_add(self.v1);
        self.v0 = self.v0.wrapping_add(self.v3);
        self.v1 = self.v1.rotate_left(17) ^ self.v2;
        self.v3 = self.v3.rotate_left(21) ^ self.v0;
        self.v2 = self.v2.rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::{TCP, UDP};
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::hash::Hasher;

    fn flow(source: u32, port: u16) -> FlowKey {
        FlowKey {
            source: source.to_be_bytes(),
            destination: [45, 33, 7, 80],
            source_port: port.to_be_bytes(),
            destination_port: [1, 187],
            protocol: TCP,
            zero: [0; 3],
        }
    }

    #[test]
    fn the_hash_is_siphash_1_3() {
        // The standard library's default hasher is SipHash-1-3 with the key 0.
        for (source, port) in [(0, 0), (0x0a3d_040b, 41_000), (u32::MAX, u16::MAX)] {
            let flow = flow(source, port);
            let mut oracle = std::collections::hash_map::DefaultHasher::new();
            oracle.write(&flow.source);
            oracle.write(&flow.destination);
            oracle.write(&flow.source_port);
            oracle.write(&flow.destination_port);
            oracle.write(&[flow.protocol, 0, 0, 0]);
            assert_eq!(flow_hash([0, 0], &flow), oracle.finish());

            let (mut from, mut to) = ([0xfd; 16], [0x20; 16]);
            from[12..].copy_from_slice(&flow.source);
            to[12..].copy_from_slice(&flow.destination);
            let FlowKey { source_port, destination_port, protocol, zero, .. } = flow;
            let longer = FlowKey { source: from, destination: to, source_port, destination_port, protocol, zero };
            let mut oracle = std::collections::hash_map::DefaultHasher::new();
            for part in [&from[..], &to, &source_port, &destination_port, &[protocol, 0, 0, 0]] {
                oracle.write(part);
            }
            assert_eq!(flow_hash([0, 0], &longer), oracle.finish());
        }
    }

    #[test]
    fn the_key_and_every_field_count() {
        let one = flow(1, 2);
        let mut other = one;
        other.protocol = UDP;
        let hashes: BTreeSet<u64> = [
            flow_hash([1, 2], &one),
            flow_hash([2, 2], &one),
            flow_hash([1, 3], &one),
            flow_hash([1, 2], &other),
            flow_hash([1, 2], &one.answer()),
        ]
        .into_iter()
        .collect();
        assert_eq!(hashes.len(), 5);
    }

    proptest! {
        #[test]
        fn every_port_is_reached_and_none_outside(first: u16, length in 0_u16..2_000, hash: u64) {
            let range = PortRange { first, last: first.saturating_add(length) };
            let mut walk = PortWalk::new(range, hash);
            let all: BTreeSet<u16> = (0..2 * (u32::from(length) + 1)).map(|_| walk.next_port()).collect();
            let expected: BTreeSet<u16> = (range.first..=range.last).collect();
            prop_assert_eq!(all, expected);
        }
    }

    #[test]
    fn the_whole_range_is_walked_without_a_repeat() {
        let mut walk = PortWalk::new(PortRange::ANY, 0x1234_5678_9abc_def0);
        let all: BTreeSet<u16> = (0..=u32::from(u16::MAX)).map(|_| walk.next_port()).collect();
        assert_eq!(all.len(), 65_536);
    }

    #[test]
    fn a_walk_leaves_a_reserved_block_whatever_its_stride() {
        // A third of all ports is one reserved block. Sixteen independent attempts would all hit it once in 43 million
        // walks.
        let range = PortRange { first: 1_024, last: u16::MAX };
        for stride in 0..4_096_u64 {
            for start in [0, 20_000, 30_000, 40_000, 50_000] {
                let mut walk = PortWalk::new(range, stride << 32 | start);
                let free = (1..TRIES).filter(|_| !(30_000..51_500).contains(&walk.next_port())).count();
                assert!(free > 0, "start {start}, stride {stride}");
            }
        }
    }

    #[test]
    fn a_range_of_one_port_gives_it() {
        let mut walk = PortWalk::new(PortRange { first: 2_000, last: 2_000 }, u64::MAX);
        assert_eq!((walk.next_port(), walk.next_port()), (2_000, 2_000));
    }
}
