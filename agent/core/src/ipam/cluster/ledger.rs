//! State of a leader between plans: allocated and quarantined pod CIDRs, by pool, family and node name.
//!
//! The ledger books and releases; whether a node may have what it lists is the mode's to judge. Its states are those of the
//! page in [`super`].

use super::records::{PoolRecord, QuarantineRecord, RecordSet, Records, room_of, room_of_refused};
use super::{PoolName, verdicts};
use crate::ip::Family;
use crate::ip::block::{Block, BlockSet, Carving, Quarantined};
use crate::ipam::later;
use crate::ipam::verdict::Verdict;
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The pod CIDRs of a known node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    /// UID of its CiliumNode; `None` while the node is only known from the records.
    pub(super) uid: Option<String>,
    /// With the pool that each is of, ordered by family.
    pub(super) held: Vec<Held>,
}

/// A pod CIDR that a node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) pool: PoolName,
    pub(super) block: Block<String>,
}

/// One pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Pool {
    sets: BTreeMap<Family, BlockSet<String>>,
    /// UIDs of nodes whose claims the last plan refused.
    refused: BTreeSet<String>,
    /// Pod CIDRs that such nodes list, and which of them does: pods may have addresses from there.
    avoided: BTreeMap<IpNet, String>,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    pools: BTreeMap<PoolName, Pool>,
    pub(super) nodes: BTreeMap<String, Known>,
    quarantine: Duration,
}

impl Ledger {
    /// The ledger of a new leader: recorded nodes have their pod CIDRs, recorded quarantines continue. The first
    /// [`plan`](super::ClusterMode::plan) adds the other nodes' lists.
    #[must_use]
    pub fn take_over(
        pools: BTreeMap<PoolName, Vec<BlockSet<String>>>,
        quarantine: Duration,
        records: &RecordSet,
        now: Timestamp,
    ) -> Self {
        let none = Records::default();
        let mut ledger = Self { pools: BTreeMap::new(), nodes: BTreeMap::new(), quarantine };
        for (name, sets) in pools {
            let records = records.get(&name).unwrap_or(&none);
            let sets = sets.into_iter().filter_map(|mut set| {
                let family = Family::of_net(&set.carvings().first()?.cidr());
                restore(&mut set, family, records, quarantine, now);
                Some((family, set))
            });
            let pool = Pool { sets: sets.collect(), refused: records.refused.clone(), avoided: BTreeMap::new() };
            ledger.pools.insert(name.clone(), pool);
            for (node, blocks) in &records.blocks {
                // What is no longer acceptable becomes a claim of its node.
                let _ = ledger.book(&name, node, None, blocks);
            }
        }
        ledger
    }

    /// The pod CIDRs of a known node, in the order of its `podCIDRs`.
    #[must_use]
    pub fn blocks(&self, node: &str) -> Option<Vec<IpNet>> {
        Some(self.nodes.get(node)?.held.iter().map(|held| held.block.net).collect())
    }

    /// The allocators of a pool.
    pub(super) fn sets(&self, pool: &str) -> impl Iterator<Item = (Family, &BlockSet<String>)> {
        self.pools.get(pool).into_iter().flat_map(|pool| &pool.sets).map(|(family, set)| (*family, set))
    }

    /// The allocator of a pool and family.
    pub(super) fn set(&self, pool: &str, family: Family) -> Option<&BlockSet<String>> {
        self.pools.get(pool)?.sets.get(&family)
    }

    /// See [`Self::set`].
    pub(super) fn set_mut(&mut self, pool: &str, family: Family) -> Option<&mut BlockSet<String>> {
        self.pools.get_mut(pool)?.sets.get_mut(&family)
    }

    /// Whether the list of this object was refused in the last plan.
    pub(super) fn is_refused(&self, pool: &str, uid: &str) -> bool {
        self.pools.get(pool).is_some_and(|pool| pool.refused.contains(uid))
    }

    pub(super) fn set_refused(&mut self, pool: &str, refused: BTreeSet<String>) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.refused = refused;
        }
    }

    /// Ends quarantines.
    pub(super) fn expire(&mut self, now: Timestamp) {
        for set in self.pools.values_mut().flat_map(|pool| pool.sets.values_mut()) {
            set.expire(now);
        }
    }

    /// Follows which objects exist: the pod CIDRs of nodes that are gone, or are another object now, go into quarantine.
    pub(super) fn retain(&mut self, present: &BTreeMap<&str, &str>, now: Timestamp) {
        let gone = |(name, known): (&String, &Known)| {
            let uid = present.get(name.as_str());
            let same = uid.is_some_and(|uid| known.uid.as_ref().is_none_or(|known| known == uid));
            (!same).then(|| name.clone())
        };
        for name in self.nodes.iter().filter_map(gone).collect::<Vec<_>>() {
            self.forget(&name, now);
        }
        for (name, known) in &mut self.nodes {
            known.uid = present.get(name.as_str()).map(|uid| (*uid).to_owned());
        }
    }

    /// Quarantines the pod CIDRs of a deleted node. No-op for an unknown node.
    pub(super) fn forget(&mut self, node: &str, now: Timestamp) {
        if let Some(known) = self.nodes.remove(node) {
            self.release(known.held, now);
        }
    }

    /// Quarantines pod CIDRs.
    pub(super) fn release(&mut self, held: Vec<Held>, now: Timestamp) {
        let until = later(now, self.quarantine);
        for Held { pool, block } in held {
            if let Some(set) = self.set_mut(&pool, Family::of_net(&block.net)) {
                // The ledger is the only owner of this proof, so it cannot be stale.
                let released = set.release(&block, now, until);
                debug_assert_eq!(released, Ok(()));
            }
        }
    }

    /// Takes a pod CIDR from a node without quarantine, for the node that serves it.
    pub(super) fn give_up(&mut self, pool: &str, node: &str, net: IpNet) {
        let Some(known) = self.nodes.get_mut(node) else { return };
        let (given_up, kept) = std::mem::take(&mut known.held).into_iter().partition(|held| held.block.net == net);
        known.held = kept;
        let given_up: Vec<Held> = given_up;
        if let Some(set) = self.set_mut(pool, Family::of_net(&net)) {
            for Held { block, .. } in given_up {
                set.free(&block);
            }
        }
    }

    /// Whether [`Self::book`] would succeed.
    ///
    /// # Errors
    /// The verdict against the first element that the node may not have.
    pub(super) fn check_claim(&self, pool: &str, node: &str, listed: &[IpNet]) -> Result<(), Verdict> {
        for family in [Family::Ipv4, Family::Ipv6] {
            let nets = of_family(listed, family);
            match (self.set(pool, family), nets.first()) {
                (Some(set), _) => {
                    set.check_claim(&nets, &node.to_owned()).map_err(|error| verdicts::refused(&error))?;
                }
                (None, Some(net)) => return Err(verdicts::no_pool(family, *net)),
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// Books pod CIDRs that a node lists, or that are recorded for it, in place of those of that pool that it had.
    ///
    /// # Errors
    /// See [`Self::check_claim`].
    pub(super) fn book(&mut self, pool: &str, node: &str, uid: Option<&str>, listed: &[IpNet]) -> Result<(), Verdict> {
        let name = node.to_owned();
        let mut held = Vec::new();
        for family in [Family::Ipv4, Family::Ipv6] {
            if let Some(set) = self.set_mut(pool, family) {
                let claimed = set.claim(&of_family(listed, family), &name);
                let claimed = claimed.map_err(|error| verdicts::refused(&error))?;
                held.extend(claimed.into_iter().map(|block| Held { pool: pool.to_owned(), block }));
            }
        }
        self.hold(&name, uid, held);
        Ok(())
    }

    /// Adds to what a node holds.
    pub(super) fn hold(&mut self, node: &str, uid: Option<&str>, held: Vec<Held>) {
        let new = || Known { uid: uid.map(str::to_owned), held: Vec::new() };
        let known = self.nodes.entry(node.to_owned()).or_insert_with(new);
        known.held.extend(held.into_iter().filter(|held| !known.held.contains(held)).collect::<Vec<_>>());
        known.held.sort_by_key(|held| Family::of_net(&held.block.net));
    }

    /// Replaces what is avoided, and quarantines pod CIDRs that a node listed without owning them and no longer lists,
    /// unless another node owns them.
    pub(super) fn avoid(&mut self, pool: &str, avoided: BTreeMap<IpNet, String>, now: Timestamp) {
        let until = later(now, self.quarantine);
        let Some(pool) = self.pools.get_mut(pool) else { return };
        for (net, owner) in std::mem::replace(&mut pool.avoided, avoided) {
            let listed = pool.avoided.contains_key(&net);
            if !listed && let Some(set) = pool.sets.get_mut(&Family::of_net(&net)) {
                set.restore_quarantine(Quarantined { net, owner, since: now, until });
            }
        }
    }

    /// How much room the records of a pool take, at least when their quarantine is grouped.
    pub(super) fn room(&self, pool: &str) -> usize {
        let held = |(name, known): (&String, &Known)| {
            let nets = known.held.iter().filter(|held| held.pool == pool).map(|held| &held.block.net);
            room_of(name, nets)
        };
        let Some(Pool { sets, refused, .. }) = self.pools.get(pool) else { return 0 };
        let quarantined =
            sets.values().flat_map(BlockSet::quarantined).map(|entry| room_of(&entry.owner, [&entry.net]));
        let refused = refused.iter().map(|uid| room_of_refused(uid));
        self.nodes.iter().map(held).chain(quarantined).chain(refused).sum()
    }

    /// What has to be recorded.
    pub(super) fn records(&self) -> RecordSet {
        let mut records: RecordSet = self.pools.iter().map(|(name, pool)| (name.clone(), pool.records())).collect();
        for (node, known) in &self.nodes {
            for Held { pool, block } in &known.held {
                if let Some(records) = records.get_mut(pool) {
                    records.blocks.entry(node.clone()).or_default().push(block.net);
                }
            }
        }
        records
    }
}

impl Pool {
    fn records(&self) -> Records {
        let mut records = Records { refused: self.refused.clone(), ..Records::default() };
        for set in self.sets.values() {
            records.quarantine.extend(set.quarantined().map(|entry| {
                let Quarantined { net: cidr, owner: node, since, until } = entry;
                QuarantineRecord { cidr, node, since, until }
            }));
            let used = |carving: &&Carving| {
                let held = set.held().map(|block| block.net).chain(set.quarantined().map(|entry| entry.net));
                held.into_iter().any(|net| carving.is_block(&net))
            };
            let pools = set.carvings().iter().chain(set.legacy().iter().filter(used));
            let record = |carving: &Carving| PoolRecord { cidr: carving.cidr(), mask_size: carving.block_prefix() };
            records.pools.extend(pools.map(record));
        }
        records.pools.sort_unstable();
        records
    }
}

/// Former elements of the pool and quarantines, as recorded.
fn restore(set: &mut BlockSet<String>, family: Family, records: &Records, quarantine: Duration, now: Timestamp) {
    let former = records.pools.iter().filter(|pool| Family::of_net(&pool.cidr) == family);
    let former = former.filter_map(|pool| Carving::new(pool.cidr, pool.mask_size).ok());
    set.honour(former.filter(|former| !set.carvings().contains(former)).collect());
    for record in records.quarantine.iter().filter(|record| Family::of_net(&record.cidr) == family) {
        // If the clock was set back, limit the quarantine to its full duration.
        let until = record.until.min(later(now, quarantine));
        if until > now {
            let (net, owner, since) = (record.cidr, record.node.clone(), record.since);
            // Of two records of one pod CIDR, the first by address counts.
            set.restore_quarantine(Quarantined { net, owner, since, until });
        }
    }
}

/// The distinct CIDRs of a family, in order.
fn of_family(nets: &[IpNet], family: Family) -> Vec<IpNet> {
    let mut seen = BTreeSet::new();
    nets.iter().filter(|net| Family::of_net(net) == family && seen.insert(**net)).copied().collect()
}
