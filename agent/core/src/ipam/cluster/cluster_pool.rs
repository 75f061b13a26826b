//! One block of the cluster pool for each node (`ipam` 2.2).
//!
//! [`plan`] is a pure function of what the CiliumNodes say, of the [`Ledger`] that the leader keeps between plans, and of
//! the [`Records`] that outlive a leader. Claims are honoured before anything is given, a claim that cannot be honoured
//! changes nothing but the error text of its node, and no block is given while any node lists it, rightly or not.
//!
//! Order of writes for whoever applies a plan: the records first, then the nodes. A plan is kept (its ledger is the
//! input of the next one) whether or not every write succeeded: what was lost is planned again.

use crate::ip::block::{Block, BlockSet, Carving, CarvingError, ClaimError, Counts, OverlapError, Quarantined};
use crate::ip::{Family, overlaps};
use crate::ipam::later;
use crate::ipam::verdict::{Code, Verdict};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long the block of a deleted node rests: pods may still run on that machine.
pub const BLOCK_QUARANTINE: Duration = Duration::from_secs(600);

/// A node's block of this size is accepted with a warning; a longer IPv4 mask is refused (`ipam` decision 12).
const SMALLEST_IPV4_BLOCK: u8 = 30;

/// The settings of one family as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilySettings {
    /// `enable-ipv4`, `enable-ipv6`
    pub enabled: bool,
    /// `cluster-pool-ipv4-cidr`, `cluster-pool-ipv6-cidr`, in order.
    pub cidrs: Vec<IpNet>,
    /// `cluster-pool-ipv4-mask-size`, `cluster-pool-ipv6-mask-size`: prefix length of a node's block.
    pub mask_size: u8,
}

/// Why a pool configuration is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A list for a family that is off.
    #[error("cluster-pool-{key}-cidr is set but enable-{key} is false; expected an empty list")]
    ListOfDisabledFamily {
        /// The family as in key names.
        key: &'static str,
    },
    /// No list for a family that is on.
    #[error("enable-{key} is true but cluster-pool-{key}-cidr is empty; expected at least one CIDR")]
    EmptyList {
        /// The family as in key names.
        key: &'static str,
    },
    /// No family is on.
    #[error("enable-ipv4 and enable-ipv6 are both false; expected at least one of them true")]
    NoFamily,
    /// An element of the other family.
    #[error("cluster-pool-{key}-cidr holds {cidr}; expected CIDRs of that family only")]
    OtherFamily {
        /// The family as in key names.
        key: &'static str,
        /// The element.
        cidr: IpNet,
    },
    /// An element that cannot be carved.
    #[error("cluster-pool-{key}-cidr with cluster-pool-{key}-mask-size: {error}")]
    Carving {
        /// The family as in key names.
        key: &'static str,
        /// Why.
        error: CarvingError,
    },
    /// Two elements overlap.
    #[error("cluster-pool-{key}-cidr: {error}")]
    Overlap {
        /// The family as in key names.
        key: &'static str,
        /// Which.
        error: OverlapError,
    },
    /// No pod would fit.
    #[error(
        "cluster-pool-ipv4-mask-size {mask_size} is refused: a node needs room for its router address and pods; expected 30 or less, better 29 or less"
    )]
    BlockTooSmall {
        /// As configured.
        mask_size: u8,
    },
}

/// Something odd about a pool configuration that is accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigWarning {
    /// Room for one pod.
    #[error("cluster-pool-ipv4-mask-size 30 leaves one address for pods on each node; 29 or less is better")]
    OnePodPerNode,
    /// Host bits are set.
    #[error("cluster-pool-{key}-cidr holds {cidr}, which has host bits set; {used} is used")]
    HostBits {
        /// The family as in key names.
        key: &'static str,
        /// As configured.
        cidr: IpNet,
        /// As used.
        used: IpNet,
    },
}

/// A pool configuration that can be worked with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    ipv4: Option<BlockSet<String>>,
    ipv6: Option<BlockSet<String>>,
    quarantine: Duration,
}

impl Settings {
    /// Checks a configuration. `quarantine` is how long the block of a deleted node rests ([`BLOCK_QUARANTINE`]).
    ///
    /// # Errors
    /// Everything that is wrong with it, not only the first.
    pub fn new(
        ipv4: FamilySettings,
        ipv6: FamilySettings,
        quarantine: Duration,
    ) -> Result<(Self, Vec<ConfigWarning>), Vec<ConfigError>> {
        let mut errors = Vec::new();
        let mut warnings = Vec::new();
        if !ipv4.enabled && !ipv6.enabled {
            errors.push(ConfigError::NoFamily);
        }
        let ipv4 = family_pool(Family::Ipv4, ipv4, &mut errors, &mut warnings);
        let ipv6 = family_pool(Family::Ipv6, ipv6, &mut errors, &mut warnings);
        if errors.is_empty() { Ok((Self { ipv4, ipv6, quarantine }, warnings)) } else { Err(errors) }
    }

    /// The same pool with another rest for the blocks of deleted nodes.
    #[must_use]
    pub fn with_quarantine(self, quarantine: Duration) -> Self {
        Self { quarantine, ..self }
    }
}

fn family_pool(
    family: Family,
    settings: FamilySettings,
    errors: &mut Vec<ConfigError>,
    warnings: &mut Vec<ConfigWarning>,
) -> Option<BlockSet<String>> {
    let FamilySettings { enabled, cidrs, mask_size } = settings;
    let key = match family {
        Family::Ipv4 => "ipv4",
        Family::Ipv6 => "ipv6",
    };
    match (enabled, cidrs.is_empty()) {
        (false, true) => return None,
        (false, false) => {
            errors.push(ConfigError::ListOfDisabledFamily { key });
            return None;
        }
        (true, true) => errors.push(ConfigError::EmptyList { key }),
        (true, false) => {}
    }
    if family == Family::Ipv4 && (SMALLEST_IPV4_BLOCK + 1..=32).contains(&mask_size) {
        errors.push(ConfigError::BlockTooSmall { mask_size });
    }
    if family == Family::Ipv4 && mask_size == SMALLEST_IPV4_BLOCK {
        warnings.push(ConfigWarning::OnePodPerNode);
    }
    let mut carvings = Vec::new();
    for cidr in cidrs {
        if Family::of_net(&cidr) != family {
            errors.push(ConfigError::OtherFamily { key, cidr });
            continue;
        }
        if cidr.trunc() != cidr {
            warnings.push(ConfigWarning::HostBits { key, cidr, used: cidr.trunc() });
        }
        match Carving::new(cidr, mask_size) {
            Ok(carving) => carvings.push(carving),
            Err(error) => errors.push(ConfigError::Carving { key, error }),
        }
    }
    BlockSet::new(carvings).map_err(|error| errors.push(ConfigError::Overlap { key, error })).ok()
}

/// A CiliumNode as far as this planner reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`: the name of the Kubernetes node.
    pub name: String,
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.creationTimestamp`
    pub created: Timestamp,
    /// Whether `metadata.deletionTimestamp` is set, or what it says cannot be read: it keeps what it has and is given
    /// nothing.
    pub deleting: bool,
    /// `spec.ipam.podCIDRs` as written.
    pub pod_cidrs: Vec<String>,
    /// The block that the node's agent listed by itself: its pods have addresses of it.
    pub claim: Option<IpNet>,
    /// `status.ipam.operator-status.error`; empty when absent.
    pub error: String,
    /// The annotation [`ANNOTATION`](crate::ipam::verdict::ANNOTATION) as written.
    pub annotation: Option<String>,
}

/// A block of a deleted node, as recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineRecord {
    /// The block.
    pub cidr: IpNet,
    /// The node that had it, and may claim it back.
    pub node: String,
    /// When the node was found gone.
    pub since: Timestamp,
    /// When the block becomes free.
    pub until: Timestamp,
}

/// An element of the pool, as configured now or formerly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PoolRecord {
    /// The CIDR.
    pub cidr: IpNet,
    /// Prefix length of its blocks.
    pub mask_size: u8,
}

/// What outlives a leader: the operator's ConfigMap (`ipam` decision 13).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Records {
    /// Blocks of deleted nodes, by address.
    pub quarantine: Vec<QuarantineRecord>,
    /// The pool as configured, and former elements that a node still has a block of. A block of a former element is a
    /// recorded legacy block: its node keeps it, nobody else is given any.
    pub pools: Vec<PoolRecord>,
    /// UIDs of nodes whose `podCIDRs` are refused: they come last when the next leader judges claims, so that who won a
    /// block keeps it.
    pub refused: BTreeSet<String>,
    /// The blocks of each node that has any, by name: who has what is decided here, and not by what a CiliumNode says
    /// after somebody edited it. It also tells the next leader of nodes that went while nobody led.
    pub blocks: BTreeMap<String, Vec<IpNet>>,
}

/// A ConfigMap that cannot be read. Nothing may be planned before somebody repairs or deletes it: it may name blocks that
/// are in use.
#[derive(Debug, thiserror::Error)]
#[error("key {key} cannot be read: {error}")]
pub struct RecordsError {
    key: &'static str,
    error: serde_json::Error,
}

const QUARANTINE_KEY: &str = "quarantine.json";
const POOLS_KEY: &str = "pools.json";
const REFUSED_KEY: &str = "refused.json";
const BLOCKS_KEY: &str = "blocks.json";

impl Records {
    /// As `data` of the ConfigMap.
    ///
    /// # Errors
    /// None in practice: every field has a JSON form.
    pub fn to_data(&self) -> Result<BTreeMap<String, String>, RecordsError> {
        let text = |key: &'static str, text: Result<String, serde_json::Error>| match text {
            Ok(text) => Ok((key.to_owned(), text)),
            Err(error) => Err(RecordsError { key, error }),
        };
        Ok(BTreeMap::from([
            text(QUARANTINE_KEY, serde_json::to_string(&self.quarantine))?,
            text(POOLS_KEY, serde_json::to_string(&self.pools))?,
            text(REFUSED_KEY, serde_json::to_string(&self.refused))?,
            text(BLOCKS_KEY, serde_json::to_string(&self.blocks))?,
        ]))
    }

    /// From `data` of the ConfigMap; absent keys are empty lists.
    ///
    /// # Errors
    /// The key that cannot be read, and why.
    pub fn from_data(data: &BTreeMap<String, String>) -> Result<Self, RecordsError> {
        fn list<T: Default + for<'a> Deserialize<'a>>(
            data: &BTreeMap<String, String>,
            key: &'static str,
        ) -> Result<T, RecordsError> {
            let Some(text) = data.get(key) else { return Ok(T::default()) };
            serde_json::from_str(text).map_err(|error| RecordsError { key, error })
        }
        Ok(Self {
            quarantine: list(data, QUARANTINE_KEY)?,
            pools: list(data, POOLS_KEY)?,
            refused: list(data, REFUSED_KEY)?,
            blocks: list(data, BLOCKS_KEY)?,
        })
    }

    /// These records with what `earlier` knows and they do not contradict: what a leader had made durable, after somebody
    /// put other records in their place, a backup of the API server for example.
    #[must_use]
    pub fn adopt(mut self, earlier: &Self) -> Self {
        let mut known: Vec<IpNet> = self.quarantine.iter().map(|record| record.cidr).collect();
        known.extend(self.blocks.values().flatten());
        let new = |net: &IpNet| !known.iter().any(|known| overlaps(known, net));
        for (name, blocks) in earlier.blocks.iter().filter(|(_, blocks)| blocks.iter().all(new)) {
            self.blocks.entry(name.clone()).or_insert_with(|| blocks.clone());
        }
        self.quarantine.extend(earlier.quarantine.iter().filter(|record| new(&record.cidr)).cloned());
        self.pools.extend(earlier.pools.iter().filter(|pool| !self.pools.contains(pool)).copied().collect::<Vec<_>>());
        self.refused.extend(earlier.refused.iter().cloned());
        self
    }
}

/// What a known node holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    /// Of its CiliumNode; none while the node is only known from the records.
    uid: Option<String>,
    blocks: Vec<Block<String>>,
}

/// What the list of a node amounts to.
enum Claim {
    /// An unknown node without any.
    Nothing,
    /// An unknown node, and blocks that it may have.
    Blocks(Vec<IpNet>),
    /// A known node that lists nothing but what it was given.
    Known,
}

/// What a leader knows between plans: which node, by name, holds which blocks, and which blocks rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    ipv4: Option<BlockSet<String>>,
    ipv6: Option<BlockSet<String>>,
    nodes: BTreeMap<String, Known>,
    /// UIDs of nodes whose claim was refused in the last plan.
    refused: BTreeSet<String>,
    /// Blocks that such nodes list, and which of them does: pods may have addresses from there.
    avoided: BTreeMap<IpNet, String>,
    quarantine: Duration,
}

impl Ledger {
    /// The ledger of a new leader: recorded nodes have their blocks, recorded blocks rest. The first [`plan`] books what
    /// other nodes list.
    #[must_use]
    pub fn take_over(settings: &Settings, records: &Records, now: Timestamp) -> Self {
        let Settings { mut ipv4, mut ipv6, quarantine } = settings.clone();
        for (family, set) in [(Family::Ipv4, &mut ipv4), (Family::Ipv6, &mut ipv6)] {
            let Some(set) = set else { continue };
            let former = records.pools.iter().filter(|pool| Family::of_net(&pool.cidr) == family);
            let former = former.filter_map(|pool| Carving::new(pool.cidr, pool.mask_size).ok());
            set.honour(former.filter(|former| !set.carvings().contains(former)).collect());
            for record in records.quarantine.iter().filter(|record| Family::of_net(&record.cidr) == family) {
                // A clock that was set back must not keep a block away for longer than the rest itself.
                let until = record.until.min(later(now, quarantine));
                if until > now {
                    let (net, owner, since) = (record.cidr, record.node.clone(), record.since);
                    // Two records of one block: the first, by address, stands for both.
                    set.restore_quarantine(Quarantined { net, owner, since, until });
                }
            }
        }
        let (refused, avoided) = (records.refused.clone(), BTreeMap::new());
        let mut ledger = Self { ipv4, ipv6, nodes: BTreeMap::new(), refused, avoided, quarantine };
        for (name, blocks) in &records.blocks {
            // What cannot be booked any more is a claim of its node, to be judged as one.
            let _ = ledger.book(name, None, blocks);
        }
        ledger
    }

    /// The blocks of a known node, in the order of its `podCIDRs`.
    #[must_use]
    pub fn blocks(&self, node: &str) -> Option<Vec<IpNet>> {
        Some(self.nodes.get(node)?.blocks.iter().map(|block| block.net).collect())
    }

    /// Blocks by state, of each family that has a pool.
    #[must_use]
    pub fn counts(&self) -> Vec<(Family, Counts)> {
        self.sets().map(|(family, set)| (family, set.counts(&[]))).collect()
    }

    fn sets(&self) -> impl Iterator<Item = (Family, &BlockSet<String>)> {
        let ipv4 = self.ipv4.iter().map(|set| (Family::Ipv4, set));
        ipv4.chain(self.ipv6.iter().map(|set| (Family::Ipv6, set)))
    }

    fn set(&self, family: Family) -> Option<&BlockSet<String>> {
        match family {
            Family::Ipv4 => self.ipv4.as_ref(),
            Family::Ipv6 => self.ipv6.as_ref(),
        }
    }

    fn set_mut(&mut self, family: Family) -> Option<&mut BlockSet<String>> {
        match family {
            Family::Ipv4 => self.ipv4.as_mut(),
            Family::Ipv6 => self.ipv6.as_mut(),
        }
    }

    fn expire(&mut self, now: Timestamp) {
        for set in self.ipv4.iter_mut().chain(&mut self.ipv6) {
            set.expire(now);
        }
    }

    /// Sends the blocks of a node that is gone to quarantine. An unknown node is no matter.
    fn forget(&mut self, node: &str, now: Timestamp) {
        let Some(known) = self.nodes.remove(node) else { return };
        self.release(known.blocks, now);
    }

    fn release(&mut self, blocks: Vec<Block<String>>, now: Timestamp) {
        let until = later(now, self.quarantine);
        for block in blocks {
            if let Some(set) = self.set_mut(Family::of_net(&block.net)) {
                // The ledger is the only keeper of this proof, so it cannot be stale.
                let released = set.release(&block, now, until);
                debug_assert_eq!(released, Ok(()));
            }
        }
    }

    /// Judges what a node lists. The verdict follows from the ledger alone, and not from when it was judged.
    fn judge(&self, node: &Node) -> Result<Claim, Verdict> {
        let (listed, unreadable) = parse(&node.pod_cidrs);
        if let Some(text) = unreadable {
            return Err(invalid(text));
        }
        if let Some(known) = self.blocks(&node.name) {
            return match listed.iter().find(|net| !known.contains(net)) {
                None => Ok(Claim::Known),
                Some(net) => Err(conflict(*net, &known)),
            };
        }
        self.check_claim(&node.name, &listed)?;
        Ok(if listed.is_empty() { Claim::Nothing } else { Claim::Blocks(listed) })
    }

    fn check_claim(&self, node: &str, listed: &[IpNet]) -> Result<(), Verdict> {
        for family in [Family::Ipv4, Family::Ipv6] {
            let nets = of_family(listed, family);
            match (self.set(family), nets.first()) {
                (Some(set), _) => set.check_claim(&nets, &node.to_owned()).map_err(|error| refused(&error))?,
                (None, Some(net)) => return Err(no_pool(family, *net)),
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// Lets a node's blocks rest that are not its own any more, by what it lists: of several of one family, those that are
    /// not listed beside another; and what it was given, when its agent lists another one by itself, that nothing
    /// speaks against, and none of those: it has that from before, and heard of nothing else.
    fn hear(&mut self, node: &Node, now: Timestamp) {
        let (listed, unreadable) = parse(&node.pod_cidrs);
        let Some(known) = self.nodes.get_mut(&node.name) else { return };
        let (kept, unlisted): (Vec<_>, Vec<_>) =
            std::mem::take(&mut known.blocks).into_iter().partition(|block| listed.contains(&block.net));
        let is_beside =
            |block: &Block<String>| kept.iter().any(|kept| Family::of_net(&kept.net) == Family::of_net(&block.net));
        let (left, missing): (Vec<_>, Vec<_>) = unlisted.into_iter().partition(is_beside);
        let nothing_kept = kept.is_empty();
        known.blocks = kept.into_iter().chain(missing).collect();
        known.blocks.sort_by_key(|block| Family::of_net(&block.net));
        self.release(left, now);
        let claims = node.claim.is_some_and(|claim| listed.contains(&claim));
        if nothing_kept && claims && unreadable.is_none() && self.check_claim(&node.name, &listed).is_ok() {
            self.forget(&node.name, now);
        }
    }

    /// Books what [`Self::judge`] accepted, or what is recorded.
    fn book(&mut self, name: &str, uid: Option<&str>, listed: &[IpNet]) -> Result<(), Verdict> {
        let name = name.to_owned();
        let mut blocks = Vec::new();
        for family in [Family::Ipv4, Family::Ipv6] {
            if let Some(set) = self.set_mut(family) {
                blocks.extend(set.claim(&of_family(listed, family), &name).map_err(|error| refused(&error))?);
            }
        }
        self.nodes.insert(name, Known { uid: uid.map(str::to_owned), blocks });
        Ok(())
    }

    /// Lets blocks rest that a node listed without having them and lists no more, unless somebody has them.
    fn rest_unlisted(&mut self, avoided: BTreeMap<IpNet, String>, now: Timestamp) {
        let until = later(now, self.quarantine);
        for (net, owner) in std::mem::replace(&mut self.avoided, avoided) {
            let listed = self.avoided.contains_key(&net);
            if !listed && let Some(set) = self.set_mut(Family::of_net(&net)) {
                set.restore_quarantine(Quarantined { net, owner, since: now, until });
            }
        }
    }

    /// Gives a node a block of each family that has a pool and that it has none of, all or nothing: first what it had
    /// itself a short while ago, then the next free one.
    fn complete(
        &mut self,
        node: &Node,
        avoid: &[IpNet],
        settled: bool,
        full: &mut BTreeSet<Family>,
    ) -> Result<(), Verdict> {
        let has = |family| {
            let known = self.nodes.get(&node.name);
            known.is_some_and(|known| known.blocks.iter().any(|block| Family::of_net(&block.net) == family))
        };
        let missing: Vec<Family> = self.sets().map(|(family, _)| family).filter(|family| !has(*family)).collect();
        for family in &missing {
            let Some(set) = self.set(*family) else { continue };
            let own = set.own_quarantined(&node.name, avoid);
            if own.is_none() && !settled {
                return Err(not_settled(*family));
            }
            if own.is_none() && (full.contains(family) || set.peek(avoid).is_err()) {
                full.insert(*family);
                return Err(exhausted(*family, set));
            }
        }
        let mut blocks = Vec::new();
        for family in missing {
            let Some(set) = self.set_mut(family) else { continue };
            let given = match set.own_quarantined(&node.name, avoid) {
                Some(own) => set.claim(&[own], &node.name).map_err(|error| refused(&error))?,
                None => vec![set.take(node.name.clone(), avoid).map_err(|_| exhausted(family, set))?],
            };
            blocks.extend(given);
        }
        let new = || Known { uid: Some(node.uid.clone()), blocks: Vec::new() };
        let known = self.nodes.entry(node.name.clone()).or_insert_with(new);
        known.blocks.extend(blocks);
        known.blocks.sort_by_key(|block| Family::of_net(&block.net));
        Ok(())
    }

    /// The part of `avoid` that hand-outs must pass over: what lies inside an element of the pool. What holds a whole
    /// element cannot have come from this pool, and must not stop it.
    fn inside_pool(&self, mut avoid: BTreeMap<IpNet, String>) -> BTreeMap<IpNet, String> {
        let carvings: Vec<Carving> = self.sets().flat_map(|(_, set)| set.carvings()).copied().collect();
        let inside = |net: &IpNet| {
            let one_block = carvings.iter().any(|carving| carving.is_block(net));
            let part = carvings.iter().any(|carving| overlaps(&carving.cidr(), net))
                && !carvings.iter().any(|carving| net.contains(&carving.cidr()));
            one_block || part
        };
        avoid.retain(|net, _| inside(net));
        avoid
    }

    /// The verdict on a node whose pod CIDR belongs to the pool as it was configured before.
    fn outside_pool(&self, node: &str) -> Option<Verdict> {
        let blocks = &self.nodes.get(node)?.blocks;
        blocks.iter().find_map(|block| {
            let set = self.set(Family::of_net(&block.net))?;
            let current = set.carvings().iter().any(|carving| carving.is_block(&block.net));
            (!current).then(|| outside_pool(block.net, set))
        })
    }

    fn records(&self) -> Records {
        let blocks = self
            .nodes
            .iter()
            .map(|(name, known)| (name.clone(), known.blocks.iter().map(|block| block.net).collect::<Vec<_>>()));
        let blocks = blocks.filter(|(_, blocks)| !blocks.is_empty()).collect();
        let mut records = Records { refused: self.refused.clone(), blocks, ..Records::default() };
        for (_, set) in self.sets() {
            records.quarantine.extend(set.quarantined().map(|entry| {
                let Quarantined { net: cidr, owner: node, since, until } = entry;
                QuarantineRecord { cidr, node, since, until }
            }));
            let used = |carving: &&Carving| {
                let held = set.held().map(|block| block.net).chain(set.quarantined().map(|entry| entry.net));
                held.into_iter().any(|net| carving.is_block(&net))
            };
            let pools = set.carvings().iter().chain(set.legacy().iter().filter(used));
            records
                .pools
                .extend(pools.map(|carving| PoolRecord { cidr: carving.cidr(), mask_size: carving.block_prefix() }));
        }
        records.pools.sort_unstable();
        records
    }
}

// The texts of verdicts. Agents of the release before recognise them by parts (`legacy_verdicts`): those parts stay for this
// release.

/// An element longer than this is cut in the text: an annotation repeats it.
const LONGEST_ELEMENT: usize = 100;

fn invalid(element: &str) -> Verdict {
    let shown: String = element.chars().take(LONGEST_ELEMENT).collect();
    let text = format!("spec.ipam.podCIDRs holds {shown:?}, which is not a CIDR; expected one such as 10.0.1.0/24");
    Verdict { code: Code::InvalidCidr, cidr: None, text }
}

fn conflict(listed: IpNet, recorded: &[IpNet]) -> Verdict {
    let recorded = recorded.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let text = format!(
        "node has CIDRs allocated that conflict: it lists {listed} but was given {recorded}; when it lists only what it was \
         given, or its CiliumNode is deleted while it has no pods, all is well"
    );
    Verdict { code: Code::Conflict, cidr: Some(listed), text }
}

fn refused(error: &ClaimError<String>) -> Verdict {
    let (code, net) = match error {
        ClaimError::OutOfRange { net, .. } => (Code::OutOfRange, net),
        ClaimError::NotABlock { net, .. } => (Code::NotAligned, net),
        ClaimError::Overlapping { net, .. } => (Code::Overlapping, net),
        ClaimError::Held { net, .. } => (Code::AlreadyAllocated, net),
        ClaimError::InQuarantine { net, .. } => (Code::InQuarantine, net),
    };
    Verdict { code, cidr: Some(*net), text: error.to_string() }
}

fn no_pool(family: Family, net: IpNet) -> Verdict {
    let text = format!("allocator not configured for the requested CIDR {net}: {family} has no pool");
    Verdict { code: Code::NoPool, cidr: Some(net), text }
}

fn outside_pool(net: IpNet, pool: &BlockSet<String>) -> Verdict {
    let text = format!(
        "pod CIDR {net} is kept, but is not a block of the pool as configured now ({pool}); to renumber, delete this \
         CiliumNode and re-create the node's pods"
    );
    Verdict { code: Code::OutsidePool, cidr: Some(net), text }
}

fn not_settled(family: Family) -> Verdict {
    let text = format!(
        "no {family} pod CIDR yet: nobody led for a while, or the API server was restored from a backup, and nodes list \
         first what they have; two minutes later this node gets one"
    );
    Verdict { code: Code::NotSettled, cidr: None, text }
}

fn exhausted(family: Family, pool: &BlockSet<String>) -> Verdict {
    let text = format!(
        "unable to allocate a {family} pod CIDR: the pool is full ({pool}); add a CIDR to the list, or wait until the blocks \
         of deleted nodes have rested"
    );
    Verdict { code: Code::PoolExhausted, cidr: None, text }
}

/// The CIDRs of a family, each once, in their order.
fn of_family(nets: &[IpNet], family: Family) -> Vec<IpNet> {
    let mut seen = BTreeSet::new();
    nets.iter().filter(|net| Family::of_net(net) == family && seen.insert(**net)).copied().collect()
}

/// What is planned from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Every CiliumNode, in any order.
    pub nodes: Vec<Node>,
    /// Whether `nodes` comes from a list that was read whole after leadership was won, and the records were read too.
    /// Nothing is planned before.
    pub synced: bool,
    /// Whether nodes had the time to list what they have. Before, a node gets no block but its own: the API server may
    /// have lost what earlier leaders wrote.
    pub settled: bool,
}

/// What shall become of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// The incarnation that this is meant for: a precondition of the write.
    pub uid: String,
    /// `spec.ipam.podCIDRs` to write; `None` when it is right or must not be touched.
    pub pod_cidrs: Option<Vec<IpNet>>,
    /// What annotation and `status.ipam.operator-status.error` have to say; none clears both.
    pub verdict: Option<Verdict>,
    /// The annotation of that verdict on the list as it is after the write.
    pub annotation: Option<String>,
    /// What the node's agent listed by itself is the node's block: it is no claim any more.
    pub accepted: bool,
}

/// The result of planning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The nodes to write to, by name. A node that is as it shall be is left out.
    pub nodes: BTreeMap<String, NodePlan>,
    /// What the ConfigMap shall hold. `None` before the input has synced.
    pub records: Option<Records>,
    /// The input of the next plan.
    pub ledger: Ledger,
}

/// Plans. Two laws hold: a plan made after this one was applied has nothing to write, and the order of `input.nodes` does
/// not matter.
///
/// Of several nodes that list one block, the one in the ledger has it; without one, as for a new leader, a node that was
/// not refused before, then the one created first, then the smaller UID. The others get an error and are not changed.
#[must_use]
pub fn plan(input: &Input, mut ledger: Ledger, now: Timestamp) -> Plan {
    if !input.synced {
        return Plan { nodes: BTreeMap::new(), records: None, ledger };
    }
    ledger.expire(now);
    let mut nodes: Vec<&Node> = input.nodes.iter().collect();
    nodes.sort_by_key(|node| (ledger.refused.contains(&node.uid), node.created, &node.uid, &node.name));
    let present: BTreeMap<&str, &str> = nodes.iter().map(|node| (node.name.as_str(), node.uid.as_str())).collect();
    let gone = |(name, known): (&String, &Known)| {
        let uid = present.get(name.as_str());
        let same = uid.is_some_and(|uid| known.uid.as_ref().is_none_or(|known| known == uid));
        (!same).then(|| name.clone())
    };
    for name in ledger.nodes.iter().filter_map(gone).collect::<Vec<_>>() {
        ledger.forget(&name, now);
    }
    for (name, known) in &mut ledger.nodes {
        known.uid = present.get(name.as_str()).map(|uid| (*uid).to_owned());
    }

    // Claims first, over all nodes, so that nothing is given which somebody has.
    let mut verdicts: BTreeMap<&str, Verdict> = BTreeMap::new();
    let mut avoid: BTreeMap<IpNet, String> = BTreeMap::new();
    let mut refused = BTreeSet::new();
    for node in &nodes {
        ledger.hear(node, now);
        let booked = match ledger.judge(node) {
            Ok(Claim::Blocks(listed)) => ledger.book(&node.name, Some(&node.uid), &listed),
            Ok(Claim::Nothing | Claim::Known) => Ok(()),
            Err(error) => Err(error),
        };
        if booked.is_err() {
            refused.insert(node.uid.clone());
            for net in parse(&node.pod_cidrs).0 {
                // Of several, the same one at every plan: their order here is another one once they are refused.
                let owner = avoid.entry(net.trunc()).or_insert_with(|| node.name.clone());
                if node.name < *owner {
                    owner.clone_from(&node.name);
                }
            }
        }
    }
    ledger.refused = refused;
    nodes.sort_by_key(|node| (node.created, &node.uid, &node.name));
    let avoid = ledger.inside_pool(avoid);
    ledger.rest_unlisted(avoid.clone(), now);
    let avoid: Vec<IpNet> = avoid.into_keys().collect();
    let mut full = BTreeSet::new();
    for node in nodes.iter().filter(|node| !node.deleting && !ledger.refused.contains(&node.uid)).collect::<Vec<_>>() {
        if let Err(verdict) = ledger.complete(node, &avoid, input.settled, &mut full) {
            verdicts.insert(&node.name, verdict);
        }
    }
    // Bookings were only added since a claim was refused, so it is refused still; perhaps for another reason.
    for node in nodes.iter().filter(|node| ledger.refused.contains(&node.uid)) {
        if let Err(verdict) = ledger.judge(node) {
            verdicts.insert(&node.name, verdict);
        }
    }

    let mut planned = BTreeMap::new();
    for node in nodes.into_iter().filter(|node| !node.deleting) {
        let pod_cidrs = spec_to_write(&ledger, node);
        let verdict = verdicts.remove(node.name.as_str()).or_else(|| ledger.outside_pool(&node.name));
        let list = pod_cidrs.as_ref().map(|nets| nets.iter().map(ToString::to_string).collect::<Vec<_>>());
        let annotation = verdict.as_ref().map(|verdict| verdict.annotation(list.as_ref().unwrap_or(&node.pod_cidrs)));
        let is_shown =
            annotation == node.annotation && verdict.as_ref().map_or("", |verdict| verdict.text.as_str()) == node.error;
        let known = ledger.nodes.get(&node.name);
        let accepted = known
            .is_some_and(|known| node.claim.is_some_and(|claim| known.blocks.iter().any(|block| block.net == claim)));
        if pod_cidrs.is_some() || !is_shown || accepted {
            let uid = node.uid.clone();
            planned.insert(node.name.clone(), NodePlan { uid, pod_cidrs, verdict, annotation, accepted });
        }
    }
    Plan { nodes: planned, records: Some(ledger.records()), ledger }
}

/// The blocks of a node, when it lists only a part of them. A list that contradicts the ledger is left alone, since pods
/// may use what it names; so is the order of a list that is right.
fn spec_to_write(ledger: &Ledger, node: &Node) -> Option<Vec<IpNet>> {
    let (listed, unreadable) = parse(&node.pod_cidrs);
    let blocks = ledger.blocks(&node.name)?;
    let contradicts = unreadable.is_some() || listed.iter().any(|net| !blocks.contains(net));
    let complete = blocks.iter().all(|net| listed.contains(net));
    (!contradicts && !complete).then_some(blocks)
}

/// The CIDRs of a list, and the first element that is none.
fn parse(texts: &[String]) -> (Vec<IpNet>, Option<&String>) {
    let mut nets = Vec::new();
    let mut unreadable = None;
    for text in texts {
        match text.parse::<IpNet>() {
            Ok(net) => nets.push(net),
            Err(_) => unreadable = unreadable.or(Some(text)),
        }
    }
    (nets, unreadable)
}

#[cfg(test)]
mod tests;
