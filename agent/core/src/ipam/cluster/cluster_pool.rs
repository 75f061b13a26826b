//! Cluster pool: one pod CIDR of each family for each node (`ipam` 2.2).
//!
//! [`plan`] is a pure function of the CiliumNodes, of the [`Ledger`] that the leader keeps between plans, and of the
//! [`Records`] that outlive a leader. Claims are processed before allocations; a refused claim only changes the verdict
//! on its node; and no pod CIDR is allocated while any node lists it, rightly or not.
//!
//! Write order: the records first, then the nodes. A plan is kept (its ledger is the input of the next one) even if
//! writes failed: failed writes are planned again.

use crate::ip::block::{Block, BlockSet, Carving, CarvingError, ClaimError, Counts, OverlapError, Quarantined};
use crate::ip::{Family, overlaps};
use crate::ipam::later;
use crate::ipam::verdict::{Code, Verdict};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Quarantine of a deleted node's pod CIDR: pods may still be running on that machine.
pub const BLOCK_QUARANTINE: Duration = Duration::from_secs(600);

/// A pod CIDR of this size is accepted with a warning; a longer IPv4 mask is rejected (`ipam` decision 12).
const SMALLEST_IPV4_BLOCK: u8 = 30;

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilySettings {
    /// `enable-ipv4`, `enable-ipv6`
    pub enabled: bool,
    /// `cluster-pool-ipv4-cidr`, `cluster-pool-ipv6-cidr`, in order.
    pub cidrs: Vec<IpNet>,
    /// `cluster-pool-ipv4-mask-size`, `cluster-pool-ipv6-mask-size`: prefix length of a node's pod CIDR.
    pub mask_size: u8,
}

/// Why a pool configuration is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A list for a disabled family.
    #[error("cluster-pool-{key}-cidr is set but enable-{key} is false; expected an empty list")]
    ListOfDisabledFamily {
        /// The family as in key names.
        key: &'static str,
    },
    /// No list for an enabled family.
    #[error("enable-{key} is true but cluster-pool-{key}-cidr is empty; expected at least one CIDR")]
    EmptyList {
        /// The family as in key names.
        key: &'static str,
    },
    /// No family is enabled.
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
    /// An element that cannot be divided.
    #[error("cluster-pool-{key}-cidr with cluster-pool-{key}-mask-size: {error}")]
    Carving {
        /// The family as in key names.
        key: &'static str,
        /// The reason.
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
    /// There is no room for pods.
    #[error(
        "cluster-pool-ipv4-mask-size {mask_size} is refused: a node needs room for its router address and pods; expected 30 or less, better 29 or less"
    )]
    BlockTooSmall {
        /// As configured.
        mask_size: u8,
    },
}

/// A problem of a pool configuration that is accepted.
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

/// A valid pool configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    ipv4: Option<BlockSet<String>>,
    ipv6: Option<BlockSet<String>>,
    quarantine: Duration,
}

impl Settings {
    /// Validates a configuration. `quarantine` is that of a deleted node's pod CIDR ([`BLOCK_QUARANTINE`]).
    ///
    /// # Errors
    /// All errors, not only the first.
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

    /// The same pool with another quarantine.
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

/// The planner's view of a CiliumNode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`: the name of the Kubernetes node.
    pub name: String,
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.creationTimestamp`
    pub created: Timestamp,
    /// `metadata.deletionTimestamp` is set, or the object cannot be parsed: it keeps its pod CIDRs and is allocated
    /// none.
    pub deleting: bool,
    /// `spec.ipam.podCIDRs` as written.
    pub pod_cidrs: Vec<String>,
    /// The pod CIDR that the node's agent listed itself, because its pods have addresses of it.
    pub claim: Option<IpNet>,
    /// `status.ipam.operator-status.error`; empty when absent.
    pub error: String,
    /// The annotation [`ANNOTATION`](crate::ipam::verdict::ANNOTATION) as written.
    pub annotation: Option<String>,
}

/// A recorded pod CIDR of a deleted node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantineRecord {
    /// The pod CIDR.
    pub cidr: IpNet,
    /// The former owner, which may claim it again.
    pub node: String,
    /// When the node's deletion was found.
    pub since: Timestamp,
    /// When it becomes free.
    pub until: Timestamp,
}

/// A current or former element of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PoolRecord {
    /// The CIDR.
    pub cidr: IpNet,
    /// Prefix length of its pod CIDRs.
    pub mask_size: u8,
}

/// State that outlives a leader: the operator's ConfigMap (`ipam` decision 13).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Records {
    /// Pod CIDRs of deleted nodes, by address.
    pub quarantine: Vec<QuarantineRecord>,
    /// The pool as configured, and former elements that a node still has a pod CIDR of. A pod CIDR of a former element
    /// is kept by its node and never allocated.
    pub pools: Vec<PoolRecord>,
    /// UIDs of nodes whose `podCIDRs` are refused. The next leader judges their claims last, so that the owner of a pod
    /// CIDR keeps it.
    pub refused: BTreeSet<String>,
    /// The pod CIDRs of each node, by name. They are authoritative, even if a CiliumNode was edited; a new leader also
    /// detects deletions of nodes by them.
    pub blocks: BTreeMap<String, Vec<IpNet>>,
}

/// An invalid ConfigMap. Nothing is planned until an administrator repairs or deletes it, because it may contain pod
/// CIDRs in use.
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
    /// None in practice: all fields can be serialised.
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
    /// The invalid key, and the reason.
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

    /// These records, merged with the non-contradicting ones of `earlier`: what a leader wrote before the records were
    /// replaced, for example by a backup of the API server.
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

/// The pod CIDRs of a known node.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    /// UID of its CiliumNode; `None` while the node is only known from the records.
    uid: Option<String>,
    blocks: Vec<Block<String>>,
}

/// Classification of a node's list.
enum Claim {
    /// An unknown node without pod CIDRs.
    Nothing,
    /// An unknown node with acceptable pod CIDRs.
    Blocks(Vec<IpNet>),
    /// A known node that only lists its own pod CIDRs.
    Known,
}

/// State of a leader between plans: allocated and quarantined pod CIDRs, by node name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ledger {
    ipv4: Option<BlockSet<String>>,
    ipv6: Option<BlockSet<String>>,
    nodes: BTreeMap<String, Known>,
    /// UIDs of nodes whose claims the last plan refused.
    refused: BTreeSet<String>,
    /// Blocks that such nodes list, and which of them does: pods may have addresses from there.
    avoided: BTreeMap<IpNet, String>,
    quarantine: Duration,
}

impl Ledger {
    /// The ledger of a new leader: recorded nodes have their pod CIDRs, recorded quarantines continue. The first
    /// [`plan`] adds the other nodes' lists.
    #[must_use]
    pub fn take_over(settings: &Settings, records: &Records, now: Timestamp) -> Self {
        let Settings { mut ipv4, mut ipv6, quarantine } = settings.clone();
        for (family, set) in [(Family::Ipv4, &mut ipv4), (Family::Ipv6, &mut ipv6)] {
            let Some(set) = set else { continue };
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
        let (refused, avoided) = (records.refused.clone(), BTreeMap::new());
        let mut ledger = Self { ipv4, ipv6, nodes: BTreeMap::new(), refused, avoided, quarantine };
        for (name, blocks) in &records.blocks {
            // What is no longer acceptable becomes a claim of its node.
            let _ = ledger.book(name, None, blocks);
        }
        ledger
    }

    /// The pod CIDRs of a known node, in the order of its `podCIDRs`.
    #[must_use]
    pub fn blocks(&self, node: &str) -> Option<Vec<IpNet>> {
        Some(self.nodes.get(node)?.blocks.iter().map(|block| block.net).collect())
    }

    /// Counts by state, of each family with a pool.
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

    /// Quarantines the pod CIDRs of a deleted node. No-op for an unknown node.
    fn forget(&mut self, node: &str, now: Timestamp) {
        let Some(known) = self.nodes.remove(node) else { return };
        self.release(known.blocks, now);
    }

    fn release(&mut self, blocks: Vec<Block<String>>, now: Timestamp) {
        let until = later(now, self.quarantine);
        for block in blocks {
            if let Some(set) = self.set_mut(Family::of_net(&block.net)) {
                // The ledger is the only owner of this proof, so it cannot be stale.
                let released = set.release(&block, now, until);
                debug_assert_eq!(released, Ok(()));
            }
        }
    }

    /// Judges a node's list. The verdict depends on the ledger only.
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

    /// Reconciles the ledger with the node's `podCIDRs`: releases pod CIDRs that the node no longer lists, if it lists
    /// others of the family, and releases the assigned one if the node only lists a valid claim of its own.
    fn reconcile_listed(&mut self, node: &Node, now: Timestamp) {
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

    /// Adds what [`Self::judge`] accepted, or recorded pod CIDRs.
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

    /// Quarantines pod CIDRs that a node listed without owning them and no longer lists, unless another node owns them.
    fn quarantine_unlisted(&mut self, avoided: BTreeMap<IpNet, String>, now: Timestamp) {
        let until = later(now, self.quarantine);
        for (net, owner) in std::mem::replace(&mut self.avoided, avoided) {
            let listed = self.avoided.contains_key(&net);
            if !listed && let Some(set) = self.set_mut(Family::of_net(&net)) {
                set.restore_quarantine(Quarantined { net, owner, since: now, until });
            }
        }
    }

    /// Allocates to a node a pod CIDR of each family that has a pool and of which it has none, all or nothing:
    /// preferably its own quarantined one, else the next free one.
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

    /// The part of `avoid` that allocation must skip: CIDRs inside an element of the pool. One that contains a whole
    /// element cannot be from this pool, and must not block it.
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

// The texts of verdicts. Agents of the previous release recognise them by parts (`legacy_verdicts`), which must not
// change in this release.

/// Longer elements are truncated in the text, which the annotation repeats.
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

/// The distinct CIDRs of a family, in order.
fn of_family(nets: &[IpNet], family: Family) -> Vec<IpNet> {
    let mut seen = BTreeSet::new();
    nets.iter().filter(|net| Family::of_net(net) == family && seen.insert(**net)).copied().collect()
}

/// Input of [`plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// All CiliumNodes, in any order.
    pub nodes: Vec<Node>,
    /// Whether `nodes` is a complete list from after the election, and the records have been read. Nothing is planned
    /// before.
    pub synced: bool,
    /// Whether nodes have had time to list their pod CIDRs. Before that, a node only gets its own: the API server may
    /// have lost writes of earlier leaders.
    pub settled: bool,
}

/// The planned writes for a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// UID of the CiliumNode, a precondition of the write.
    pub uid: String,
    /// `spec.ipam.podCIDRs` to write; `None` if it is correct or must not be changed.
    pub pod_cidrs: Option<Vec<IpNet>>,
    /// The verdict for the annotation and `status.ipam.operator-status.error`; `None` clears both.
    pub verdict: Option<Verdict>,
    /// The annotation of that verdict on the list after the write.
    pub annotation: Option<String>,
    /// The agent's claim is accepted: its annotation is removed.
    pub accepted: bool,
}

/// Result of [`plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The nodes to write, by name. Nodes that are up to date are omitted.
    pub nodes: BTreeMap<String, NodePlan>,
    /// The content of the ConfigMap. `None` before the input is synced.
    pub records: Option<Records>,
    /// The input of the next plan.
    pub ledger: Ledger,
}

/// Plans allocations and verdicts. Invariants: after a plan has been applied, the next one writes nothing; the order of
/// `input.nodes` does not matter.
///
/// Of several nodes that list a pod CIDR, the owner in the ledger has it; without one, as for a new leader, a node that
/// was not refused before, then the oldest one, then the smaller UID. The others get a verdict and are not changed.
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

    // Claims first, over all nodes, so that no claimed pod CIDR is allocated.
    let mut verdicts: BTreeMap<&str, Verdict> = BTreeMap::new();
    let mut avoid: BTreeMap<IpNet, String> = BTreeMap::new();
    let mut refused = BTreeSet::new();
    for node in &nodes {
        ledger.reconcile_listed(node, now);
        let booked = match ledger.judge(node) {
            Ok(Claim::Blocks(listed)) => ledger.book(&node.name, Some(&node.uid), &listed),
            Ok(Claim::Nothing | Claim::Known) => Ok(()),
            Err(error) => Err(error),
        };
        if booked.is_err() {
            refused.insert(node.uid.clone());
            for net in parse(&node.pod_cidrs).0 {
                // Of several, the same one in every plan: the order changes once they are refused.
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
    ledger.quarantine_unlisted(avoid.clone(), now);
    let avoid: Vec<IpNet> = avoid.into_keys().collect();
    let mut full = BTreeSet::new();
    for node in nodes.iter().filter(|node| !node.deleting && !ledger.refused.contains(&node.uid)).collect::<Vec<_>>() {
        if let Err(verdict) = ledger.complete(node, &avoid, input.settled, &mut full) {
            verdicts.insert(&node.name, verdict);
        }
    }
    // The ledger only grew since, so a refused claim is still refused; the reason may differ.
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

/// The pod CIDRs to write for a node that lists only part of them. A list that contradicts the ledger is not changed,
/// since pods may use its addresses; nor is the order of a correct list.
fn spec_to_write(ledger: &Ledger, node: &Node) -> Option<Vec<IpNet>> {
    let (listed, unreadable) = parse(&node.pod_cidrs);
    let blocks = ledger.blocks(&node.name)?;
    let contradicts = unreadable.is_some() || listed.iter().any(|net| !blocks.contains(net));
    let complete = blocks.iter().all(|net| listed.contains(net));
    (!contradicts && !complete).then_some(blocks)
}

/// The CIDRs of a list, and the first invalid element.
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
