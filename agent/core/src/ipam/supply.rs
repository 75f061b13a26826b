//! The address supply of a node: pools by name and family, each made of pod CIDRs or of single addresses.
//!
//! A [`NodeMode`](crate::ipam::node::NodeMode) plans the [`Supply`]. The owner of the leases takes it over
//! ([`Leases::set_supply`](crate::ipam::lease::Leases::set_supply)), keeps its pod CIDRs as records in the same journal as
//! the leases, and allocates from it through [`Pools`].

use crate::ip::Family;
use crate::ipam::node::address_set::AddressSet;
use crate::ipam::node::pod_cidr::{AddressError, Addresses, PodCidr, Usage};
use ipnet::IpNet;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

/// The pool of a node whose mode knows no pools, and the one that is taken where no other is asked for.
pub const DEFAULT_POOL: &str = "default";

/// Whether addresses of a pod CIDR are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GrantState {
    /// New addresses are allocated from it.
    Active,
    /// No new address is allocated; the pod CIDR is released as soon as that is safe.
    Draining,
}

/// A pod CIDR that this node was granted. A restart without the API server serves from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The pool that it belongs to.
    pub pool: String,
    /// The pod CIDR, without host bits.
    pub net: IpNet,
    /// Whether addresses of it are allocated.
    pub state: GrantState,
    /// UID of the Node that it was last listed for, where the mode needs to know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_uid: Option<String>,
    /// It was listed for this node since the agent started. Not recorded: after a restart it must be seen again.
    #[serde(skip)]
    pub confirmed: bool,
}

impl Grant {
    /// An active pod CIDR of the default pool.
    #[must_use]
    pub fn new(net: IpNet) -> Self {
        let pool = DEFAULT_POOL.to_owned();
        Self { pool, net: net.trunc(), state: GrantState::Active, node_uid: None, confirmed: false }
    }

    /// Whether both have the same record.
    pub(crate) fn is_recorded_as(&self, other: &Self) -> bool {
        let fields = |grant: &Self| (grant.pool.clone(), grant.net, grant.state, grant.node_uid.clone());
        fields(self) == fields(other)
    }
}

/// The addresses of a pool and family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// All addresses of these pod CIDRs.
    PodCidrs(Vec<Grant>),
    /// Only these addresses.
    Addresses(BTreeSet<IpAddr>),
}

/// One family of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSupply {
    /// Its addresses.
    pub source: Source,
    /// Why none of them is allocated at present, with the remedy. Pods keep their addresses.
    pub blocked: Option<String>,
}

/// What a node may allocate from, by pool and family.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Supply {
    pools: BTreeMap<(String, Family), PoolSupply>,
}

impl Supply {
    /// Pod CIDRs, in the order in which they are to be used.
    pub fn of_grants(grants: impl IntoIterator<Item = Grant>) -> Self {
        let mut supply = Self::default();
        for grant in grants {
            supply.add(grant);
        }
        supply
    }

    /// Adds a pod CIDR behind those of its pool and family. A pool of single addresses becomes one of pod CIDRs.
    pub fn add(&mut self, grant: Grant) {
        let key = (grant.pool.clone(), Family::of_net(&grant.net));
        let empty = || PoolSupply { source: Source::PodCidrs(Vec::new()), blocked: None };
        let pool = self.pools.entry(key).or_insert_with(empty);
        match &mut pool.source {
            Source::PodCidrs(grants) => grants.push(grant),
            source @ Source::Addresses(_) => *source = Source::PodCidrs(vec![grant]),
        }
    }

    /// Sets the source of a family of a pool.
    pub fn set(&mut self, pool: impl Into<String>, family: Family, supply: PoolSupply) {
        self.pools.insert((pool.into(), family), supply);
    }

    /// Stops allocation from every pool, or lets it continue.
    pub fn block(&mut self, reason: Option<&str>) {
        for pool in self.pools.values_mut() {
            pool.blocked = reason.map(str::to_owned);
        }
    }

    /// Whether the supply is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Every pool by name and family.
    pub fn pools(&self) -> impl Iterator<Item = (&str, Family, &PoolSupply)> {
        self.pools.iter().map(|((name, family), pool)| (name.as_str(), *family, pool))
    }

    /// Every pod CIDR.
    pub fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.pools.values().flat_map(|pool| match &pool.source {
            Source::PodCidrs(grants) => grants.as_slice(),
            Source::Addresses(_) => &[],
        })
    }

    /// The pod CIDR that new addresses of a pool and family come from: the first active one, else the first that is
    /// draining.
    #[must_use]
    pub fn served(&self, pool: &str, family: Family) -> Option<&Grant> {
        let of_pool = || self.grants().filter(|grant| grant.pool == pool && Family::of_net(&grant.net) == family);
        of_pool().find(|grant| grant.state == GrantState::Active).or_else(|| of_pool().next())
    }

    /// Why no address of this pool and family is allocated, if the plan blocks it.
    #[must_use]
    pub fn blocked(&self, pool: &str, family: Family) -> Option<&str> {
        self.pools.get(&(pool.to_owned(), family))?.blocked.as_deref()
    }

    /// Why no address of a pool is allocated at present.
    #[must_use]
    pub fn refusal(&self, pool: &str) -> Option<String> {
        self.pools.iter().filter(|((name, _), _)| name == pool).find_map(|(_, supply)| {
            supply.blocked.clone().or_else(|| match &supply.source {
                Source::PodCidrs(grants) if grants.iter().all(|grant| grant.state == GrantState::Draining) => {
                    let first = grants.first()?;
                    Some(format!("{} is being released in favour of another pod CIDR", first.net))
                }
                Source::PodCidrs(_) | Source::Addresses(_) => None,
            })
        })
    }

    /// Whether both have the same addresses, blocked or not.
    pub(crate) fn has_same_addresses(&self, other: &Self) -> bool {
        let same = |one: &PoolSupply, other: &PoolSupply| match (&one.source, &other.source) {
            (Source::PodCidrs(one), Source::PodCidrs(other)) => {
                let nets = |grants: &[Grant]| grants.iter().map(|grant| (grant.net, grant.state)).collect::<Vec<_>>();
                nets(one) == nets(other)
            }
            (one, other) => one == other,
        };
        let mut pairs = self.pools.iter().zip(&other.pools);
        self.pools.len() == other.pools.len() && pairs.all(|(one, other)| one.0 == other.0 && same(one.1, other.1))
    }
}

/// State of the addresses of a pod CIDR or of a set of addresses.
pub trait Allocator: fmt::Debug + Send {
    /// Whether the allocator contains the address.
    fn usable(&self, address: IpAddr) -> bool;

    /// Keeps an address from being allocated, under a label such as `router`. An address that this allocator does not have
    /// needs no keeping and is accepted.
    ///
    /// # Errors
    /// The address is allocated or excluded already. Its quarantine, if any, ends.
    fn exclude(&mut self, address: IpAddr, label: &str) -> Result<(), AddressError>;

    /// Keeps the addresses of a network from being allocated, under a label. Those that are allocated stay so.
    fn exclude_net(&mut self, net: &IpNet, label: &str);

    /// Allocates a free address to `owner`, chosen by the random number `draw`. When none is free, the one that has been in
    /// quarantine longest.
    ///
    /// # Errors
    /// All addresses are allocated or excluded.
    fn allocate_next(&mut self, owner: &str, now: Timestamp, draw: u64) -> Result<IpAddr, AddressError>;

    /// Allocates this address to `owner`.
    ///
    /// # Errors
    /// The address is not usable here, allocated, excluded (the error contains the label), or quarantined.
    fn allocate(&mut self, address: IpAddr, owner: &str, now: Timestamp) -> Result<(), AddressError>;

    /// Frees an address without quarantine, because no caller has received it yet.
    ///
    /// # Errors
    /// `owner` does not hold it. Nothing changes then.
    fn undo(&mut self, address: IpAddr, owner: &str) -> Result<(), AddressError>;

    /// Releases an address; it is in quarantine until `until`.
    ///
    /// # Errors
    /// `owner` does not hold it. Nothing changes then.
    fn release(&mut self, address: IpAddr, owner: &str, now: Timestamp, until: Timestamp) -> Result<(), AddressError>;

    /// Restores a recorded quarantine. Returns false, and changes nothing, when the address is not usable here or is not
    /// free.
    fn restore_quarantine(&mut self, address: IpAddr, since: Timestamp, until: Timestamp) -> bool;

    /// Frees all addresses whose quarantine has ended.
    fn expire(&mut self, now: Timestamp);

    /// Counts of addresses by state.
    fn usage(&self) -> Usage;
}

#[derive(Debug)]
struct Member {
    allocator: Box<dyn Allocator>,
    /// The pod CIDR, if it is one.
    net: Option<IpNet>,
}

/// Counts of an allocator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolUsage {
    /// The pool.
    pub pool: String,
    /// The family.
    pub family: Family,
    /// The pod CIDR; none for a set of addresses.
    pub net: Option<IpNet>,
    /// Its addresses by state.
    pub usage: Usage,
}

/// The allocators of a [`Supply`]. Draining pod CIDRs have one only where their family has no active one: nothing is drawn
/// from it.
#[derive(Debug, Default)]
pub struct Pools {
    pools: BTreeMap<(String, Family), Vec<Member>>,
}

impl Pools {
    /// Creates allocators in which all usable addresses are free.
    #[must_use]
    pub fn new(supply: &Supply) -> Self {
        let members = |pool: &PoolSupply| match &pool.source {
            Source::PodCidrs(grants) => {
                let active = grants.iter().any(|grant| grant.state == GrantState::Active);
                let used = grants.iter().filter(|grant| !active || grant.state == GrantState::Active);
                used.map(|grant| Member { allocator: Box::new(PodCidr::new(grant.net)), net: Some(grant.net) })
                    .collect()
            }
            Source::Addresses(addresses) => {
                vec![Member { allocator: Box::new(AddressSet::new(addresses.iter().copied())), net: None }]
            }
        };
        Self { pools: supply.pools.iter().map(|(key, pool)| (key.clone(), members(pool))).collect() }
    }

    /// Whether there is no allocator.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Whether there is a pool of this name.
    #[must_use]
    pub fn has(&self, pool: &str) -> bool {
        self.pools.keys().any(|(name, _)| name == pool)
    }

    /// The families of a pool.
    #[must_use]
    pub fn families(&self, pool: &str) -> Vec<Family> {
        self.pools.keys().filter(|(name, _)| name == pool).map(|(_, family)| *family).collect()
    }

    /// The first pod CIDR of a family, in any pool.
    #[must_use]
    pub fn net_of(&self, family: Family) -> Option<IpNet> {
        let of_family = self.pools.iter().filter(|((_, of), _)| *of == family);
        of_family.flat_map(|(_, members)| members).find_map(|member| member.net)
    }

    /// The pod CIDR that has an address.
    #[must_use]
    pub fn net_with(&self, address: IpAddr) -> Option<IpNet> {
        self.members().filter_map(|member| member.net).find(|net| net.contains(&address))
    }

    /// Whether an allocator has the address.
    #[must_use]
    pub fn usable(&self, address: IpAddr) -> bool {
        self.members().any(|member| member.allocator.usable(address))
    }

    /// The allocator that has an address.
    pub fn with(&mut self, address: IpAddr) -> Option<&mut (dyn Allocator + 'static)> {
        let mut members = self.pools.values_mut().flatten();
        members.find(|member| member.allocator.usable(address)).map(|member| &mut *member.allocator)
    }

    /// Keeps the addresses of a network from being allocated.
    pub fn exclude_net(&mut self, net: &IpNet, label: &str) {
        for member in self.pools.values_mut().flatten() {
            member.allocator.exclude_net(net, label);
        }
    }

    /// Frees all addresses whose quarantine has ended.
    pub fn expire(&mut self, now: Timestamp) {
        for member in self.pools.values_mut().flatten() {
            member.allocator.expire(now);
        }
    }

    /// Addresses of each allocator by state.
    #[must_use]
    pub fn usage(&self) -> Vec<PoolUsage> {
        let counted = |(pool, family): &(String, Family), member: &Member| PoolUsage {
            pool: pool.clone(),
            family: *family,
            net: member.net,
            usage: member.allocator.usage(),
        };
        self.pools.iter().flat_map(|(key, members)| members.iter().map(move |member| counted(key, member))).collect()
    }

    /// Allocates this address of a pool.
    ///
    /// # Errors
    /// See [`Allocator::allocate`].
    pub fn allocate(&mut self, pool: &str, address: IpAddr, owner: &str, now: Timestamp) -> Result<(), AddressError> {
        let members = self.family(pool, Family::of(address))?;
        let at = members.iter().position(|member| member.allocator.usable(address)).unwrap_or_default();
        let disabled = AddressError::FamilyDisabled { family: Family::of(address) };
        members.get_mut(at).map_or(Err(disabled), |member| member.allocator.allocate(address, owner, now))
    }

    /// Allocates an address of a pool and family: from the first allocator with an available address.
    ///
    /// # Errors
    /// The error of the first allocator, if none has one.
    pub fn allocate_one(
        &mut self,
        pool: &str,
        family: Family,
        owner: &str,
        now: Timestamp,
        draw: u64,
    ) -> Result<IpAddr, AddressError> {
        let mut refused = None;
        for member in self.family(pool, family)? {
            match member.allocator.allocate_next(owner, now, draw) {
                Ok(address) => return Ok(address),
                Err(error) => {
                    refused.get_or_insert(error);
                }
            }
        }
        Err(refused.unwrap_or(AddressError::FamilyDisabled { family }))
    }

    /// One address of the family asked for, or of each family of the pool: IPv6 first, then IPv4. When IPv4 fails the IPv6
    /// address is free again (`ipam` 2.1.1).
    ///
    /// # Errors
    /// One of the families has no available address; nothing is allocated then.
    pub fn allocate_next(
        &mut self,
        pool: &str,
        family: Option<Family>,
        owner: &str,
        now: Timestamp,
        draw: u64,
    ) -> Result<Addresses, AddressError> {
        let wanted: Vec<Family> = match family {
            Some(family) => vec![family],
            None => self.families(pool).into_iter().rev().collect(),
        };
        let mut addresses = Addresses::default();
        for family in wanted {
            match self.allocate_one(pool, family, owner, now, draw) {
                Ok(address) => addresses.set(address),
                Err(error) => {
                    for address in addresses.iter() {
                        // Allocated a moment ago to this owner, so this cannot be refused.
                        self.with(address).map_or(Ok(()), |allocator| allocator.undo(address, owner))?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(addresses)
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.pools.values().flatten()
    }

    fn family(&mut self, pool: &str, family: Family) -> Result<&mut Vec<Member>, AddressError> {
        self.pools.get_mut(&(pool.to_owned(), family)).ok_or(AddressError::FamilyDisabled { family })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(net: &str, state: GrantState) -> Grant {
        Grant { state, ..Grant::new(net.parse().unwrap()) }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    // case: ipam D6
    #[test]
    fn with_ipv4_full_the_ipv6_address_is_free_again() {
        let nets = [grant("10.0.0.9/32", GrantState::Active), grant("fd00::/126", GrantState::Active)];
        let mut pools = Pools::new(&Supply::of_grants(nets));
        let both = pools.allocate_next(DEFAULT_POOL, None, "a", NOW, 5).unwrap();
        assert_eq!(both.ipv4, Some("10.0.0.9".parse().unwrap()));
        assert!(both.ipv6.is_some());
        let before = pools.usage();
        let error = pools.allocate_next(DEFAULT_POOL, None, "b", NOW, 9).unwrap_err();
        assert!(matches!(error, AddressError::RangeFull { net: IpNet::V4(_), .. }), "{error}");
        assert_eq!(pools.usage(), before);
        let ipv6 = pools.allocate_next(DEFAULT_POOL, Some(Family::Ipv6), "b", NOW, 9).unwrap();
        assert!(ipv6.ipv4.is_none() && ipv6.ipv6.is_some());
        let mut single = Pools::new(&Supply::of_grants([grant("10.0.0.0/30", GrantState::Active)]));
        assert!(single.allocate_next(DEFAULT_POOL, None, "a", NOW, 0).unwrap().ipv6.is_none());
        assert_eq!(
            single.allocate_next(DEFAULT_POOL, Some(Family::Ipv6), "a", NOW, 0),
            Err(AddressError::FamilyDisabled { family: Family::Ipv6 })
        );
    }

    #[test]
    fn the_next_pod_cidr_is_used_when_the_first_is_full_and_a_draining_one_never() {
        let nets = [
            grant("10.0.0.1/32", GrantState::Draining),
            grant("10.0.0.2/32", GrantState::Active),
            grant("10.0.0.3/32", GrantState::Active),
        ];
        let supply = Supply::of_grants(nets);
        assert_eq!(supply.served(DEFAULT_POOL, Family::Ipv4).unwrap().net, "10.0.0.2/32".parse().unwrap());
        let mut pools = Pools::new(&supply);
        let mut next = || pools.allocate_one(DEFAULT_POOL, Family::Ipv4, "a", NOW, 7);
        assert_eq!((next(), next()), (Ok(ip("10.0.0.2")), Ok(ip("10.0.0.3"))));
        assert!(matches!(next(), Err(AddressError::RangeFull { .. })));
        assert_eq!(supply.refusal(DEFAULT_POOL), None);
        let left = Supply::of_grants([grant("10.0.0.1/32", GrantState::Draining)]);
        assert!(left.refusal(DEFAULT_POOL).unwrap().contains("10.0.0.1/32 is being released"));
        assert_eq!(left.refusal("another"), None);
    }

    #[test]
    fn pools_are_apart_and_one_of_them_may_be_a_set_of_addresses() {
        let mut supply = Supply::of_grants([grant("10.0.0.0/30", GrantState::Active)]);
        let addresses = BTreeSet::from([ip("192.0.2.7"), ip("192.0.2.9")]);
        let set = PoolSupply { source: Source::Addresses(addresses), blocked: Some("not attached".to_owned()) };
        supply.set("nic-1", Family::Ipv4, set);
        assert_eq!(supply.refusal("nic-1").as_deref(), Some("not attached"));
        let mut pools = Pools::new(&supply);
        let given = pools.allocate_one("nic-1", Family::Ipv4, "a", NOW, 0).unwrap();
        assert_eq!(given, ip("192.0.2.7"));
        assert!(pools.allocate(DEFAULT_POOL, ip("192.0.2.9"), "a", NOW).is_err(), "of another pool");
        assert_eq!((pools.net_with(given), pools.usable(given)), (None, true));
        let usage = pools.usage();
        assert_eq!(
            usage.iter().map(|pool| (pool.pool.as_str(), pool.usage.used)).collect::<Vec<_>>(),
            [(DEFAULT_POOL, 0), ("nic-1", 1)]
        );
    }
}
