//! The plan of mode `cluster-pool`.

use crate::ip::block::{BlockSet, Carving, ClaimError};
use crate::ip::{Family, overlaps};
use crate::ipam::cluster::ledger::{Held, Ledger};
use crate::ipam::cluster::records::{FULL, room_of};
use crate::ipam::cluster::{Input, Node, NodePlan, Plan, verdicts};
use crate::ipam::lease::DEFAULT_POOL as POOL;
use crate::ipam::verdict::Verdict;
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};

/// Classification of a node's list that is not refused.
enum Claim {
    /// An unknown node without pod CIDRs.
    Nothing,
    /// An unknown node with acceptable pod CIDRs.
    Blocks(Vec<IpNet>),
    /// A known node that only lists its own pod CIDRs.
    Known,
}

/// A plan under way.
struct Planning {
    ledger: Ledger,
    /// How much room the records take, no less than they will.
    room: usize,
    /// How much they may take.
    limit: usize,
}

/// Plans allocations and verdicts. Invariants: after a plan has been applied, the next one writes nothing; the order of
/// `input.nodes` does not matter.
///
/// Of several nodes that list a pod CIDR, the owner in the ledger has it; without one, as for a new leader, a node that
/// was not refused before, then the oldest one, then the smaller UID. The others get a verdict and are not changed.
#[must_use]
pub fn plan(input: &Input, ledger: Ledger, now: Timestamp) -> Plan<Ledger> {
    plan_within(FULL, input, ledger, now)
}

/// See [`plan`]; `limit` is how much room the records may take.
pub(super) fn plan_within(limit: usize, input: &Input, mut ledger: Ledger, now: Timestamp) -> Plan<Ledger> {
    if !input.synced {
        return Plan { nodes: BTreeMap::new(), records: None, ledger };
    }
    ledger.expire(now);
    let mut nodes: Vec<&Node> = input.nodes.iter().collect();
    nodes.sort_by_key(|node| (ledger.is_refused(POOL, &node.uid), node.created, &node.uid, &node.name));
    ledger.retain(&nodes.iter().map(|node| (node.name.as_str(), node.uid.as_str())).collect(), now);
    let mut contested = contested(&ledger, &nodes);
    if input.settled {
        for (holder, net) in std::mem::take(&mut contested) {
            ledger.give_up(POOL, holder, net);
        }
    }
    let room = ledger.room(POOL);
    let mut this = Planning { ledger, room, limit };

    // Claims first, over all nodes, so that no claimed pod CIDR is allocated.
    let mut verdicts: BTreeMap<&str, Verdict> = BTreeMap::new();
    let mut avoid: BTreeMap<IpNet, String> = BTreeMap::new();
    let mut refused = BTreeSet::new();
    for node in &nodes {
        this.reconcile_listed(node, now);
        if this.judge_and_book(node).is_err() {
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
    let is_refused = |node: &&&Node| refused.contains(&node.uid);
    nodes.sort_by_key(|node| (node.created, &node.uid, &node.name));
    let avoid = this.inside_pool(avoid);
    this.ledger.avoid(POOL, avoid.clone(), now);
    let avoid: Vec<IpNet> = avoid.into_keys().collect();
    let former: BTreeSet<String> =
        this.ledger.sets(POOL).flat_map(|(_, set)| set.quarantined()).map(|entry| entry.owner).collect();
    let mut full = BTreeSet::new();
    for node in nodes.iter().filter(|node| !node.deleting && !is_refused(node)) {
        let had_any = former.contains(&node.name);
        if let Some(net) = contested.get(node.name.as_str()) {
            verdicts.insert(&node.name, verdicts::not_settled(Family::of_net(net)));
            continue;
        }
        if let Err(verdict) = this.complete(node, had_any, &avoid, input.settled, &mut full) {
            verdicts.insert(&node.name, verdict);
        }
    }
    // The ledger only grew since, so a refused claim is still refused; the reason may differ.
    for node in nodes.iter().filter(is_refused) {
        if let Err(verdict) = this.judge(node) {
            verdicts.insert(&node.name, verdict);
        }
    }

    let mut ledger = this.ledger;
    let mut planned = BTreeMap::new();
    for node in nodes.into_iter().filter(|node| !node.deleting) {
        let verdict = verdicts.remove(node.name.as_str()).or_else(|| outside_pool(&ledger, &node.name));
        let accepted = node.claim.is_some_and(|claim| {
            ledger.nodes.get(&node.name).is_some_and(|known| known.held.iter().any(|held| held.block.net == claim))
        });
        let list = list_to_write(&ledger, node).filter(|_| !contested.contains_key(node.name.as_str()));
        if let Some(plan) = NodePlan::new(node, list, verdict, accepted) {
            planned.insert(node.name.clone(), plan);
        }
    }
    ledger.set_refused(POOL, refused);
    Plan { nodes: planned, records: Some(ledger.records()), ledger }
}

impl Planning {
    /// Judges a node's list. The verdict depends on the ledger only.
    fn judge(&self, node: &Node) -> Result<Claim, Verdict> {
        let (listed, unreadable) = parse(&node.pod_cidrs);
        if let Some(text) = unreadable {
            return Err(verdicts::invalid(text));
        }
        if let Some(known) = self.ledger.blocks(&node.name) {
            return match listed.iter().find(|net| !known.contains(net)) {
                None => Ok(Claim::Known),
                Some(net) => Err(verdicts::conflict(*net, &known)),
            };
        }
        self.ledger.check_claim(POOL, &node.name, &listed)?;
        if listed.is_empty() {
            return Ok(Claim::Nothing);
        }
        self.check_room(&node.name, &listed)?;
        Ok(Claim::Blocks(listed))
    }

    fn judge_and_book(&mut self, node: &Node) -> Result<(), Verdict> {
        if let Claim::Blocks(listed) = self.judge(node)? {
            self.ledger.book(POOL, &node.name, Some(&node.uid), &listed)?;
            self.room += room_of(&node.name, &listed);
        }
        Ok(())
    }

    fn check_room(&self, node: &str, nets: &[IpNet]) -> Result<(), Verdict> {
        let fits = self.room + room_of(node, nets) <= self.limit;
        if fits { Ok(()) } else { Err(verdicts::records_full(POOL)) }
    }

    /// Reconciles the ledger with the node's `podCIDRs`: releases pod CIDRs that the node no longer lists, if it lists
    /// others of the family, and releases the assigned one if the node only lists a valid claim of its own.
    fn reconcile_listed(&mut self, node: &Node, now: Timestamp) {
        let (listed, unreadable) = parse(&node.pod_cidrs);
        let Some(known) = self.ledger.nodes.get_mut(&node.name) else { return };
        let (kept, unlisted): (Vec<_>, Vec<_>) =
            std::mem::take(&mut known.held).into_iter().partition(|held| listed.contains(&held.block.net));
        let family = |held: &Held| Family::of_net(&held.block.net);
        let is_beside = |held: &Held| kept.iter().any(|kept| family(kept) == family(held));
        let (left, missing): (Vec<_>, Vec<_>) = unlisted.into_iter().partition(is_beside);
        let nothing_kept = kept.is_empty();
        known.held = kept.into_iter().chain(missing).collect();
        known.held.sort_by_key(family);
        self.ledger.release(left, now);
        let claims = node.claim.is_some_and(|claim| listed.contains(&claim));
        let may_claim = || self.ledger.check_claim(POOL, &node.name, &listed).is_ok();
        if nothing_kept && claims && unreadable.is_none() && may_claim() {
            self.ledger.forget(&node.name, now);
        }
    }

    /// Allocates to a node a pod CIDR of each family that has a pool and of which it has none, all or nothing:
    /// preferably its own quarantined one (if there is any: `had_any`), else the next free one.
    fn complete(
        &mut self,
        node: &Node,
        had_any: bool,
        avoid: &[IpNet],
        settled: bool,
        full: &mut BTreeSet<Family>,
    ) -> Result<(), Verdict> {
        let has = |family| {
            let known = self.ledger.nodes.get(&node.name);
            known.is_some_and(|known| known.held.iter().any(|held| Family::of_net(&held.block.net) == family))
        };
        let missing: Vec<Family> =
            self.ledger.sets(POOL).map(|(family, _)| family).filter(|family| !has(*family)).collect();
        // The search is linear in the number of quarantined pod CIDRs.
        let own = |set: &BlockSet<String>| if had_any { set.own_quarantined(&node.name, avoid) } else { None };
        let mut new = Vec::new();
        for family in &missing {
            let Some(set) = self.ledger.set(POOL, *family) else { continue };
            if own(set).is_some() {
                continue;
            }
            if !settled {
                return Err(verdicts::not_settled(*family));
            }
            match set.peek(avoid) {
                Ok(net) if !full.contains(family) => new.push(net),
                _ => {
                    full.insert(*family);
                    return Err(verdicts::exhausted(*family, set));
                }
            }
        }
        if !new.is_empty() {
            self.check_room(&node.name, &new)?;
            self.room += room_of(&node.name, &new);
        }
        let mut blocks = Vec::new();
        for family in missing {
            let Some(set) = self.ledger.set_mut(POOL, family) else { continue };
            match own(set) {
                Some(own) => {
                    blocks.extend(set.claim(&[own], &node.name).map_err(|error| verdicts::refused(&error))?);
                }
                None => {
                    let taken = set.take(node.name.clone(), avoid);
                    blocks.push(taken.map_err(|_| verdicts::exhausted(family, set))?);
                }
            }
        }
        let held = blocks.into_iter().map(|block| Held { pool: POOL.to_owned(), block }).collect();
        self.ledger.hold(&node.name, Some(&node.uid), held);
        Ok(())
    }

    /// The part of `avoid` that allocation must skip: CIDRs inside an element of the pool. One that contains a whole
    /// element cannot be from this pool, and must not block it.
    fn inside_pool(&self, mut avoid: BTreeMap<IpNet, String>) -> BTreeMap<IpNet, String> {
        let carvings: Vec<Carving> = self.ledger.sets(POOL).flat_map(|(_, set)| set.carvings()).copied().collect();
        let inside = |net: &IpNet| {
            let one_block = carvings.iter().any(|carving| carving.is_block(net));
            let part = carvings.iter().any(|carving| overlaps(&carving.cidr(), net))
                && !carvings.iter().any(|carving| net.contains(&carving.cidr()));
            one_block || part
        };
        avoid.retain(|net, _| inside(net));
        avoid
    }
}

/// Pod CIDRs that one node holds and does not list, while the agent of another one claims them: by holder.
///
/// The record is older than the claim, as after a restore: the holder's agent would list what its pods have addresses of.
fn contested<'a>(ledger: &Ledger, nodes: &[&'a Node]) -> BTreeMap<&'a str, IpNet> {
    let mut found = BTreeMap::new();
    for node in nodes.iter().filter(|node| !node.deleting) {
        let (listed, unreadable) = parse(&node.pod_cidrs);
        let Some(claim) = node.claim.filter(|claim| listed.contains(claim) && unreadable.is_none()) else { continue };
        let holds = ledger.blocks(&node.name).unwrap_or_default();
        if listed.iter().any(|net| holds.contains(net)) {
            continue;
        }
        let owner = node.name.clone();
        let Some(Err(ClaimError::Held { held, owner: holder, .. })) =
            ledger.set(POOL, Family::of_net(&claim)).map(|set| set.check_claim(&[claim], &owner))
        else {
            continue;
        };
        let Some(holder) = nodes.iter().find(|node| node.name == holder && !node.deleting) else { continue };
        let (theirs, unreadable) = parse(&holder.pod_cidrs);
        if held != claim || unreadable.is_some() || theirs.contains(&held) {
            continue;
        }
        // Nothing else may be wrong with the list: the holder gives up nothing for a claim that is refused all the same.
        let mut given_up = ledger.clone();
        given_up.give_up(POOL, &holder.name, held);
        if given_up.check_claim(POOL, &node.name, &listed).is_ok() {
            found.insert(holder.name.as_str(), held);
        }
    }
    found
}

/// The verdict on a node whose pod CIDR belongs to the pool as it was configured before.
fn outside_pool(ledger: &Ledger, node: &str) -> Option<Verdict> {
    ledger.nodes.get(node)?.held.iter().find_map(|Held { block, .. }| {
        let set = ledger.set(POOL, Family::of_net(&block.net))?;
        let current = set.carvings().iter().any(|carving| carving.is_block(&block.net));
        (!current).then(|| verdicts::outside_pool(block.net, set))
    })
}

/// The pod CIDRs to write for a node that lists only part of them. A list that contradicts the ledger is not changed,
/// since pods may use its addresses; nor is the order of a correct list.
fn list_to_write(ledger: &Ledger, node: &Node) -> Option<Vec<IpNet>> {
    let (listed, unreadable) = parse(&node.pod_cidrs);
    let blocks = ledger.blocks(&node.name)?;
    let contradicts = unreadable.is_some() || listed.iter().any(|net| !blocks.contains(net));
    let complete = blocks.iter().all(|net| listed.contains(net));
    (!contradicts && !complete).then_some(blocks)
}

/// The CIDRs of a list, and the first invalid element.
pub(super) fn parse(texts: &[String]) -> (Vec<IpNet>, Option<&String>) {
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
