//! Incremental update of the Internet checksum.
//!
//! RFC 1624 equation 3: `HC' = ~(~HC + ~m + m')` for a 16-bit word that changes from `m` to `m'`, in ones' complement
//! arithmetic. Words are in network order; the sum is independent of it if all use the same.

/// The checksum field after a 16-bit word changed from `from` to `to`.
#[inline(always)]
#[must_use]
pub const fn replace_word(checksum: [u8; 2], from: [u8; 2], to: [u8; 2]) -> [u8; 2] {
    let sum = !u16::from_be_bytes(checksum) as u32 + !u16::from_be_bytes(from) as u32 + u16::from_be_bytes(to) as u32;
    fold(sum)
}

/// The checksum field after an IPv4 address changed from `from` to `to`.
#[inline(always)]
#[must_use]
pub const fn replace_address(checksum: [u8; 2], from: [u8; 4], to: [u8; 4]) -> [u8; 2] {
    let sum = !u16::from_be_bytes(checksum) as u32
        + !u16::from_be_bytes([from[0], from[1]]) as u32
        + !u16::from_be_bytes([from[2], from[3]]) as u32
        + u16::from_be_bytes([to[0], to[1]]) as u32
        + u16::from_be_bytes([to[2], to[3]]) as u32;
    fold(sum)
}

/// Folds the carries of at most five words and complements. Two folds suffice: the first leaves at most 0xffff + 4.
#[inline(always)]
const fn fold(sum: u32) -> [u8; 2] {
    let once = (sum & 0xffff) + (sum >> 16);
    let twice = (once & 0xffff) + (once >> 16);
    (!(twice as u16)).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::{replace_address, replace_word};
    use proptest::prelude::*;

    /// RFC 1071 over all bytes, with the checksum field zeroed by the caller.
    fn whole(bytes: &[u8]) -> [u8; 2] {
        let mut sum: u64 = bytes
            .chunks(2)
            .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!(sum as u16)).to_be_bytes()
    }

    /// Whether a receiver accepts: the sum over everything, including the field, is all ones.
    fn accepted(bytes: &[u8]) -> bool {
        whole(bytes) == [0, 0]
    }

    /// Pseudo-random, reproducible numbers (Marsaglia, "Xorshift RNGs").
    fn numbers() -> impl FnMut() -> u64 {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        }
    }

    // case: masquerade CS5
    #[test]
    fn differences_equal_recomputation() {
        let mut next = numbers();
        for round in 0..1_000_000_u32 {
            let mut packet = [0_u8; 48];
            for word in packet.chunks_mut(8) {
                word.copy_from_slice(&next().to_ne_bytes());
            }
            // Extreme values have the most carries.
            if round % 8 == 0 {
                packet[12..16].fill(if round % 16 == 0 { 0 } else { 0xff });
            }
            let packet = &mut packet[..20 + (round % 29) as usize];
            packet[10..12].fill(0);
            let first = whole(packet);
            packet[10..12].copy_from_slice(&first);

            let address = (next() as u32).to_be_bytes();
            let port = (next() as u16).to_be_bytes();
            let old_address: [u8; 4] = packet[12..16].try_into().unwrap();
            let old_port: [u8; 2] = packet[16..18].try_into().unwrap();
            let changed = replace_word(replace_address(first, old_address, address), old_port, port);
            packet[12..16].copy_from_slice(&address);
            packet[16..18].copy_from_slice(&port);
            packet[10..12].copy_from_slice(&changed);
            assert!(accepted(packet), "{packet:02x?}");

            // Also equal to recomputation, except for the two representations of zero, which receivers do not
            // distinguish.
            packet[10..12].fill(0);
            let again = whole(packet);
            let zero = |sum: [u8; 2]| matches!(sum, [0, 0] | [0xff, 0xff]);
            assert!(changed == again || (zero(changed) && zero(again)), "{changed:02x?} against {again:02x?}");
        }
    }

    proptest! {
        #[test]
        fn there_and_back_is_where_it_was(checksum: [u8; 2], from: [u8; 4], to: [u8; 4]) {
            let back = replace_address(replace_address(checksum, from, to), to, from);
            let zeros = [[0, 0], [0xff, 0xff]];
            prop_assert!(back == checksum || (zeros.contains(&back) && zeros.contains(&checksum)));
        }
    }

    #[test]
    fn the_example_of_rfc_1624() {
        // Section 4: HC 0xdd2f, m 0x5555, m' 0x3285 gives 0x0000, where the formula of RFC 1141 gives 0xffff.
        assert_eq!(replace_word([0xdd, 0x2f], [0x55, 0x55], [0x32, 0x85]), [0, 0]);
    }
}
