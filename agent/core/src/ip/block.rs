//! Division of CIDRs into blocks of equal size, each with one owner.
//!
//! A [`BlockSet`] is the ledger of one family: an ordered list of CIDRs, each divided into blocks of one size.
//! Allocated space is stored as disjoint intervals, so a set of 65,536 free blocks costs nothing. There are exactly two
//! ways to become the owner of a block: [`BlockSet::take`] allocates a free one, [`BlockSet::claim`] proves ownership
//! of a given one. A released block is quarantined first, because pods may still be running on the node that had it
//! (`ipam` 2.2.8, 2.2.11, 7.2).

use super::{Family, address_bits, net_bounds, overlaps};
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::fmt;

/// Maximum difference between the prefix lengths of an IPv6 pool and its blocks: 65,536 blocks (`ipam` 2.2.1).
pub const MAX_IPV6_BLOCK_BITS: u8 = 16;

/// A CIDR and the size of the blocks it is divided into. Host bits of the CIDR are zero, and the block is not larger
/// than the CIDR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Carving {
    cidr: IpNet,
    block_prefix: u8,
}

/// Why a CIDR cannot be divided as requested.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CarvingError {
    /// The block would be larger than the CIDR.
    #[error("block size /{block_prefix} is larger than {cidr}; expected a mask size of at least {}", cidr.prefix_len())]
    BlockLargerThanCidr {
        /// The CIDR to divide.
        cidr: IpNet,
        /// The requested prefix length of a block.
        block_prefix: u8,
    },
    /// The family has fewer bits.
    #[error("block size /{block_prefix} for {cidr} is out of range; {family} has {} bits", family.bits())]
    PrefixTooLong {
        /// The CIDR to divide.
        cidr: IpNet,
        /// The requested prefix length of a block.
        block_prefix: u8,
        /// The family of the CIDR.
        family: Family,
    },
    /// IPv6 only: more than 2^16 blocks.
    #[error(
        "{cidr} with blocks of /{block_prefix} has 2^{} blocks; expected at most 2^{MAX_IPV6_BLOCK_BITS}",
        block_prefix - cidr.prefix_len()
    )]
    TooManyBlocks {
        /// The CIDR to divide.
        cidr: IpNet,
        /// The requested prefix length of a block.
        block_prefix: u8,
    },
}

impl Carving {
    /// Divides `cidr` (host bits are dropped) into blocks of `/block_prefix`.
    ///
    /// # Errors
    /// The block is larger than the CIDR or longer than the family allows, or there would be more than 2^16 IPv6
    /// blocks.
    pub fn new(cidr: IpNet, block_prefix: u8) -> Result<Self, CarvingError> {
        let cidr = cidr.trunc();
        let family = Family::of_net(&cidr);
        if block_prefix > family.bits() {
            return Err(CarvingError::PrefixTooLong { cidr, block_prefix, family });
        }
        if block_prefix < cidr.prefix_len() {
            return Err(CarvingError::BlockLargerThanCidr { cidr, block_prefix });
        }
        if family == Family::Ipv6 && block_prefix - cidr.prefix_len() > MAX_IPV6_BLOCK_BITS {
            return Err(CarvingError::TooManyBlocks { cidr, block_prefix });
        }
        Ok(Self { cidr, block_prefix })
    }

    /// The CIDR, without host bits.
    #[must_use]
    pub fn cidr(&self) -> IpNet {
        self.cidr
    }

    /// Prefix length of each block.
    #[must_use]
    pub fn block_prefix(&self) -> u8 {
        self.block_prefix
    }

    /// The number of blocks: at most 2^32, since IPv6 is capped.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        1 << (self.block_prefix - self.cidr.prefix_len())
    }

    /// Whether `net` is exactly one aligned block of the CIDR.
    #[must_use]
    pub fn is_block(&self, net: &IpNet) -> bool {
        net.prefix_len() == self.block_prefix && self.cidr.contains(net) && net.trunc() == *net
    }

    fn family(&self) -> Family {
        Family::of_net(&self.cidr)
    }

    /// log2 of the addresses in a block.
    fn shift(&self) -> u32 {
        u32::from(self.family().bits() - self.block_prefix)
    }

    /// The block with this index, counted from the first address of the CIDR. `None` past the last.
    fn block(&self, index: u64) -> Option<IpNet> {
        if index >= self.blocks() {
            return None;
        }
        // Only a /0 block of IPv6 is shifted by 128 bits, and its only index is 0.
        let offset = u128::from(index).checked_shl(self.shift()).unwrap_or(0);
        let first = address_bits(self.cidr.network()) + offset;
        IpNet::new(self.family().address(first), self.block_prefix).ok()
    }

    /// The index of the block that contains this address; `None` outside the CIDR.
    fn index_of(&self, address: u128) -> Option<u64> {
        let (first, last) = net_bounds(&self.cidr);
        if !(first..=last).contains(&address) {
            return None;
        }
        u64::try_from((address - first).checked_shr(self.shift()).unwrap_or(0)).ok()
    }
}

impl fmt::Display for Carving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in blocks of /{}", self.cidr, self.block_prefix)
    }
}

/// Proof of ownership of a block; the only thing that [`BlockSet::release`] accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block<O> {
    /// The pod CIDR.
    pub net: IpNet,
    /// The owner.
    pub owner: O,
    /// Distinguishes this allocation from earlier ones of the same block in this set.
    pub generation: u64,
}

/// A released block that cannot be allocated to other owners yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined<O> {
    /// The pod CIDR.
    pub net: IpNet,
    /// The former owner, who may claim it again.
    pub owner: O,
    /// When it was released.
    pub since: Timestamp,
    /// When it becomes available.
    pub until: Timestamp,
}

/// Why a claim is rejected. The set is unchanged then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError<O: fmt::Display + fmt::Debug> {
    /// No CIDR of the set overlaps the claim.
    #[error("requested CIDR {net} is out of range: the pool is {pool}")]
    OutOfRange {
        /// The claimed CIDR.
        net: IpNet,
        /// The pool as configured.
        pool: String,
    },
    /// The claim overlaps the pool, but is not one of its blocks.
    #[error("requested CIDR {net} is not one aligned block: the pool is {pool}")]
    NotABlock {
        /// The claimed CIDR.
        net: IpNet,
        /// The pool as configured.
        pool: String,
    },
    /// Two CIDRs of one claim overlap.
    #[error("requested CIDRs {net} and {other} overlap")]
    Overlapping {
        /// The claimed CIDR.
        net: IpNet,
        /// The overlapping CIDR of the same claim.
        other: IpNet,
    },
    /// Another owner holds the block, or part of it.
    #[error("requested CIDR {net} is already allocated: {held} belongs to {owner}")]
    Held {
        /// The claimed CIDR.
        net: IpNet,
        /// The allocated block.
        held: IpNet,
        /// Its owner.
        owner: O,
    },
    /// Another owner released the block recently.
    #[error("requested CIDR {net} is in quarantine: {held} belonged to {owner} and is quarantined until {until}")]
    InQuarantine {
        /// The claimed CIDR.
        net: IpNet,
        /// The quarantined block.
        held: IpNet,
        /// Its former owner.
        owner: O,
        /// When it becomes available.
        until: Timestamp,
    },
}

/// No block can be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no block is free: {} of {} held, {} in quarantine, {} avoided because a node lists them",
    .0.held, .0.total, .0.quarantined, .0.kept_back
)]
pub struct Exhausted(pub Counts);

/// The block is not allocated under this proof: it was released, or has another owner now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{net} is not held as generation {generation}")]
pub struct NotHeld {
    /// The block of the proof.
    pub net: IpNet,
    /// The generation of the proof.
    pub generation: u64,
}

/// Blocks of a set by state. A block that a legacy claim partly covers counts as held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// All blocks of all configured CIDRs.
    pub total: u64,
    /// Blocks with an owner.
    pub held: u64,
    /// Quarantined blocks: neither free nor held.
    pub quarantined: u64,
    /// Blocks neither held nor quarantined that the caller asked to avoid.
    pub kept_back: u64,
}

impl Counts {
    /// Blocks that can be allocated now.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.held).saturating_sub(self.quarantined).saturating_sub(self.kept_back)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Tenure<O> {
    Held { owner: O, generation: u64 },
    Quarantined { owner: O, since: Timestamp, until: Timestamp },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Interval<O> {
    net: IpNet,
    last: u128,
    tenure: Tenure<O>,
}

/// The ledger of one family: the owner of each block.
///
/// Invariant: the intervals are disjoint, so an address has at most one owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSet<O> {
    carvings: Vec<Carving>,
    legacy: Vec<Carving>,
    /// By first address.
    intervals: BTreeMap<u128, Interval<O>>,
    /// Next-fit position of each CIDR: the index after the last allocation. Claims do not move it.
    cursors: Vec<u64>,
    generation: u64,
}

/// Two CIDRs of one list overlap.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{first} and {second} overlap; expected disjoint CIDRs")]
pub struct OverlapError {
    /// The element that comes first in the list.
    pub first: IpNet,
    /// The other.
    pub second: IpNet,
}

impl<O: Clone + PartialEq + fmt::Display + fmt::Debug> BlockSet<O> {
    /// A set that allocates blocks from `carvings`, the first in the list first.
    ///
    /// # Errors
    /// Two elements overlap; both are named.
    pub fn new(carvings: Vec<Carving>) -> Result<Self, OverlapError> {
        for (index, first) in carvings.iter().enumerate() {
            if let Some(second) = carvings.iter().skip(index + 1).find(|other| overlaps(&first.cidr, &other.cidr)) {
                return Err(OverlapError { first: first.cidr, second: second.cidr });
            }
        }
        let cursors = vec![0; carvings.len()];
        Ok(Self { carvings, legacy: Vec::new(), intervals: BTreeMap::new(), cursors, generation: 0 })
    }

    /// Accepts claims on blocks of `legacy` from now on: the pool as configured before. Nothing is allocated from it.
    pub fn honour(&mut self, legacy: Vec<Carving>) {
        self.legacy = legacy;
    }

    /// The CIDRs whose blocks may be claimed, but are not allocated.
    #[must_use]
    pub fn legacy(&self) -> &[Carving] {
        &self.legacy
    }

    /// The CIDRs that blocks are allocated from, in order.
    #[must_use]
    pub fn carvings(&self) -> &[Carving] {
        &self.carvings
    }

    /// Allocates a free block to `owner`: from the first CIDR in the list that has one, the first block after the last
    /// allocation, so that a released block is reused last. Blocks that overlap one of `avoid` are skipped.
    ///
    /// # Errors
    /// No block is free; the counts say why.
    pub fn take(&mut self, owner: O, avoid: &[IpNet]) -> Result<Block<O>, Exhausted> {
        let (carving, index, net) = self.next(avoid)?;
        if let (Some(cursor), Some(carving)) = (self.cursors.get_mut(carving), self.carvings.get(carving)) {
            *cursor = (index + 1) % carving.blocks();
        }
        Ok(self.hold(net, owner))
    }

    /// The block that [`Self::take`] would allocate.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn peek(&self, avoid: &[IpNet]) -> Result<IpNet, Exhausted> {
        self.next(avoid).map(|(_, _, net)| net)
    }

    /// Position of the CIDR, index of the block, and the block.
    fn next(&self, avoid: &[IpNet]) -> Result<(usize, u64, IpNet), Exhausted> {
        self.carvings
            .iter()
            .zip(&self.cursors)
            .enumerate()
            .find_map(|(position, (carving, cursor))| {
                let (index, net) = self
                    .first_free(carving, *cursor..carving.blocks(), avoid)
                    .or_else(|| self.first_free(carving, 0..*cursor, avoid))?;
                Some((position, index, net))
            })
            .ok_or_else(|| Exhausted(self.counts(avoid)))
    }

    /// Registers blocks that `owner` claims to have, all or none. Each must be exactly one aligned block of a
    /// configured or legacy CIDR and not overlap another owner's. Blocks that the same owner released into quarantine
    /// may be claimed again; blocks that it already holds are unchanged.
    ///
    /// # Errors
    /// The first reason to reject one of them. Nothing changes then.
    pub fn claim(&mut self, nets: &[IpNet], owner: &O) -> Result<Vec<Block<O>>, ClaimError<O>> {
        self.check_claim(nets, owner)?;
        Ok(nets
            .iter()
            .map(|net| {
                let first = net_bounds(net).0;
                match self.intervals.get(&first).map(|interval| &interval.tenure) {
                    Some(Tenure::Held { generation, .. }) => {
                        Block { net: *net, owner: owner.clone(), generation: *generation }
                    }
                    _ => self.hold(*net, owner.clone()),
                }
            })
            .collect())
    }

    /// Whether [`Self::claim`] would succeed.
    ///
    /// # Errors
    /// As [`Self::claim`].
    pub fn check_claim(&self, nets: &[IpNet], owner: &O) -> Result<(), ClaimError<O>> {
        for (index, net) in nets.iter().enumerate() {
            let net = *net;
            if !self.carvings.iter().chain(&self.legacy).any(|carving| carving.is_block(&net)) {
                let meets = self.carvings.iter().chain(&self.legacy).any(|carving| overlaps(&carving.cidr, &net));
                let pool = self.to_string();
                return Err(if meets {
                    ClaimError::NotABlock { net, pool }
                } else {
                    ClaimError::OutOfRange { net, pool }
                });
            }
            if let Some(other) = nets.iter().take(index).find(|other| **other != net && overlaps(other, &net)) {
                return Err(ClaimError::Overlapping { net, other: *other });
            }
            for (_, interval) in self.overlapping(&net) {
                let held = interval.net;
                match &interval.tenure {
                    Tenure::Held { owner: holder, .. } if holder != owner || held != net => {
                        return Err(ClaimError::Held { net, held, owner: holder.clone() });
                    }
                    Tenure::Quarantined { owner: former, until, .. } if former != owner || held != net => {
                        return Err(ClaimError::InQuarantine { net, held, owner: former.clone(), until: *until });
                    }
                    Tenure::Held { .. } | Tenure::Quarantined { .. } => {}
                }
            }
        }
        Ok(())
    }

    /// The quarantined block that `owner` released last, if blocks of its CIDR are still allocated and it overlaps none
    /// of `avoid`.
    #[must_use]
    pub fn own_quarantined(&self, owner: &O, avoid: &[IpNet]) -> Option<IpNet> {
        self.quarantined()
            .filter(|entry| entry.owner == *owner && self.carvings.iter().any(|carving| carving.is_block(&entry.net)))
            .filter(|entry| !avoid.iter().any(|other| overlaps(other, &entry.net)))
            .max_by_key(|entry| entry.since)
            .map(|entry| entry.net)
    }

    /// Releases a block: it is quarantined from `now` to `until`.
    ///
    /// # Errors
    /// The proof is stale. Nothing changes then.
    pub fn release(&mut self, block: &Block<O>, now: Timestamp, until: Timestamp) -> Result<(), NotHeld> {
        let interval = self.intervals.get_mut(&net_bounds(&block.net).0).filter(|interval| {
            interval.net == block.net
                && interval.tenure == Tenure::Held { owner: block.owner.clone(), generation: block.generation }
        });
        let Some(interval) = interval else {
            return Err(NotHeld { net: block.net, generation: block.generation });
        };
        interval.tenure = Tenure::Quarantined { owner: block.owner.clone(), since: now, until };
        Ok(())
    }

    /// Releases a block without quarantine. No-op if the proof is stale.
    pub fn free(&mut self, block: &Block<O>) {
        // It ends at once.
        if self.release(block, Timestamp::MIN, Timestamp::MIN).is_ok() {
            self.intervals.remove(&net_bounds(&block.net).0);
        }
    }

    /// Restores a recorded quarantine, as after a restart. Returns false, and changes nothing, if the block is already
    /// held or quarantined, because the set is newer than the record.
    pub fn restore_quarantine(&mut self, entry: Quarantined<O>) -> bool {
        let net = entry.net.trunc();
        if self.overlapping(&net).next().is_some() {
            return false;
        }
        let (first, last) = net_bounds(&net);
        let Quarantined { owner, since, until, .. } = entry;
        self.intervals.insert(first, Interval { net, last, tenure: Tenure::Quarantined { owner, since, until } });
        true
    }

    /// Frees all blocks whose quarantine has ended.
    pub fn expire(&mut self, now: Timestamp) {
        self.intervals.retain(|_, interval| match interval.tenure {
            Tenure::Held { .. } => true,
            Tenure::Quarantined { until, .. } => until > now,
        });
    }

    /// All allocated blocks, by address.
    pub fn held(&self) -> impl Iterator<Item = Block<O>> {
        self.intervals.values().filter_map(|interval| match &interval.tenure {
            Tenure::Held { owner, generation } => {
                Some(Block { net: interval.net, owner: owner.clone(), generation: *generation })
            }
            Tenure::Quarantined { .. } => None,
        })
    }

    /// All quarantined blocks, by address.
    pub fn quarantined(&self) -> impl Iterator<Item = Quarantined<O>> {
        self.intervals.values().filter_map(|interval| match &interval.tenure {
            Tenure::Quarantined { owner, since, until } => {
                Some(Quarantined { net: interval.net, owner: owner.clone(), since: *since, until: *until })
            }
            Tenure::Held { .. } => None,
        })
    }

    /// The owner of exactly this block.
    #[must_use]
    pub fn owner(&self, net: &IpNet) -> Option<&O> {
        match self.intervals.get(&net_bounds(net).0) {
            Some(Interval { net: held, tenure: Tenure::Held { owner, .. }, .. }) if held == net => Some(owner),
            _ => None,
        }
    }

    /// Counts blocks by state; `avoid` as for [`Self::take`].
    #[must_use]
    pub fn counts(&self, avoid: &[IpNet]) -> Counts {
        let mut counts = Counts { total: self.carvings.iter().map(Carving::blocks).sum(), ..Counts::default() };
        for carving in &self.carvings {
            let held = self.covered(carving, |tenure| matches!(tenure, Tenure::Held { .. }));
            let quarantined = self.covered(carving, |tenure| matches!(tenure, Tenure::Quarantined { .. }));
            let taken = merge(held.iter().chain(&quarantined).copied().collect());
            let avoided = avoid.iter().filter_map(|net| covered_blocks(carving, net)).collect();
            let all = merge(taken.iter().chain(&merge(avoided)).copied().collect());
            let held = count(&held);
            counts.held += held;
            counts.quarantined += count(&taken) - held;
            counts.kept_back += count(&all) - count(&taken);
        }
        counts
    }

    fn hold(&mut self, net: IpNet, owner: O) -> Block<O> {
        self.generation += 1;
        let (first, last) = net_bounds(&net);
        let tenure = Tenure::Held { owner: owner.clone(), generation: self.generation };
        self.intervals.insert(first, Interval { net, last, tenure });
        Block { net, owner, generation: self.generation }
    }

    /// Intervals that overlap `net`, by first address.
    fn overlapping(&self, net: &IpNet) -> impl Iterator<Item = (u128, &Interval<O>)> {
        let (first, last) = net_bounds(net);
        // Intervals are disjoint: of those that begin before `net`, only the nearest can overlap it.
        let before = self.intervals.range(..first).next_back().filter(move |(_, interval)| interval.last >= first);
        before.into_iter().chain(self.intervals.range(first..=last)).map(|(first, interval)| (*first, interval))
    }

    /// The first block of the CIDR in this range of indices that overlaps neither an interval nor one of `avoid`. Skips
    /// whole obstacles, so the cost depends on what is allocated and not on the size of the CIDR.
    fn first_free(&self, carving: &Carving, range: std::ops::Range<u64>, avoid: &[IpNet]) -> Option<(u64, IpNet)> {
        let mut index = range.start;
        while index < range.end {
            let net = carving.block(index)?;
            let obstacle = self
                .overlapping(&net)
                .map(|(_, interval)| interval.last)
                .chain(avoid.iter().filter(|other| overlaps(other, &net)).map(|other| net_bounds(other).1))
                .max();
            match obstacle {
                None => return Some((index, net)),
                // The obstacle ends in or after this block; `None` if it extends past the end of the CIDR.
                Some(last) => index = carving.index_of(last)? + 1,
            }
        }
        None
    }

    /// Merged ranges of block indices that intervals of one kind cover at least in part.
    fn covered(&self, carving: &Carving, kind: impl Fn(&Tenure<O>) -> bool) -> Vec<(u64, u64)> {
        merge(
            self.overlapping(&carving.cidr)
                .filter(|(_, interval)| kind(&interval.tenure))
                .filter_map(|(_, interval)| covered_blocks(carving, &interval.net))
                .collect(),
        )
    }
}

impl<O> fmt::Display for BlockSet<O> {
    /// The pool as configured, such as `10.33.0.0/25, 10.34.0.0/25 in blocks of /26`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, carving) in self.carvings.iter().enumerate() {
            write!(f, "{}{carving}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// First and last index of the blocks that `net` covers at least in part.
fn covered_blocks(carving: &Carving, net: &IpNet) -> Option<(u64, u64)> {
    if !overlaps(&carving.cidr, net) {
        return None;
    }
    let (pool_first, pool_last) = net_bounds(&carving.cidr);
    let (first, last) = net_bounds(net);
    Some((carving.index_of(first.max(pool_first))?, carving.index_of(last.min(pool_last))?))
}

/// Merges ranges that touch or overlap, so that each block is counted once.
fn merge(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    merged
}

fn count(ranges: &[(u64, u64)]) -> u64 {
    ranges.iter().map(|(first, last)| last - first + 1).sum()
}

#[cfg(test)]
mod tests;
