//! The invariants, and the state for checking them.
//!
//! An invariant only applies to known facts. A leader knows the lists of objects and the operators' records: a pod CIDR
//! that was in no record when its object was deleted (claimed and lost between two passes, or lost by a restore of the
//! API server) is not quarantined. Administrators may write anything: they are responsible for the owners of pod CIDRs
//! that they wrote.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::Ipv4Net;
use jiff::Timestamp;
use serde_json::Value;

use super::QUARANTINE;
use crate::apiserver::ObjectChange;

/// The author of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hand {
    /// Agents and operators.
    Ours,
    /// An administrator.
    Person,
}

/// A pod CIDR that a node had.
struct Rest {
    block: Ipv4Net,
    node: String,
    since: Timestamp,
}

/// State of the objects and machines.
#[derive(Default)]
pub(super) struct Judge {
    /// Pod CIDRs by CiliumNode.
    listed: BTreeMap<String, BTreeSet<Ipv4Net>>,
    /// Pod CIDRs that pods of running machines may have addresses of.
    used: BTreeMap<String, Ipv4Net>,
    resting: Vec<Rest>,
    /// What administrators wrote to objects, by node.
    by_hand: BTreeSet<(String, Ipv4Net)>,
    /// Pod CIDRs by node in the operators' records: leaders only know these, and those of objects.
    recorded: BTreeMap<String, BTreeSet<Ipv4Net>>,
    /// Addresses of running pods.
    addresses: BTreeMap<String, (String, String)>,
    /// Those whose DEL has started, by node and pod.
    ending: BTreeSet<(String, String)>,
    /// Those of them whose DEL failed before the agent crashed.
    unanswered: BTreeSet<(String, String)>,
}

/// Tolerance: changes are checked twice a second, and a deletion is noticed with a delay.
const SLACK: i64 = 1;

fn overlap(a: &Ipv4Net, b: &Ipv4Net) -> bool {
    a.contains(b) || b.contains(a)
}

/// The pod CIDRs that a CiliumNode lists.
pub(super) fn blocks(object: &Value) -> BTreeSet<Ipv4Net> {
    let list = object.pointer("/spec/ipam/podCIDRs").and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|text| text.as_str()?.parse().ok()).collect()
}

/// The ConfigMap of the operators.
pub(super) const RECORDS: &str = "cistern-ipam";

/// The recorded pod CIDRs by node.
pub(super) fn records(object: &Value) -> BTreeMap<String, BTreeSet<Ipv4Net>> {
    let text = object.pointer("/data/blocks.json").and_then(Value::as_str);
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

impl Judge {
    /// Checks one change.
    ///
    /// # Errors
    /// The violated invariant.
    pub(super) fn see(&mut self, change: &ObjectChange, hand: Hand, now: Timestamp) -> Result<Option<String>, String> {
        if change.resource == "configmaps" && change.name == RECORDS {
            self.recorded = change.after.as_deref().map(records).unwrap_or_default();
        }
        if change.resource != "ciliumnodes" {
            return Ok(None);
        }
        let name = &change.name;
        let before = change.before.as_deref().map(blocks).unwrap_or_default();
        let Some(after) = change.after.as_deref().map(blocks) else {
            self.listed.remove(name);
            let known = before.into_iter().filter(|block| self.is_recorded(name, block));
            let rests: Vec<Rest> = known.map(|block| Rest { block, node: name.clone(), since: now }).collect();
            self.resting.extend(rests);
            return Ok(Some(format!("{name} deleted")));
        };
        let given = change.before.is_some() && hand == Hand::Ours;
        for block in after.difference(&before) {
            if hand == Hand::Person {
                self.by_hand.insert((name.clone(), *block));
            }
            // A machine that lists its own again is not assigned anything.
            if given && self.used.get(name) != Some(block) {
                self.may_be_given(name, block, now)?;
            }
        }
        let news = (before != after || change.before.is_none()).then(|| format!("{name} lists {after:?}"));
        self.listed.insert(name.clone(), after);
        Ok(news)
    }

    fn may_be_given(&self, name: &str, block: &Ipv4Net, now: Timestamp) -> Result<(), String> {
        for (other, blocks) in self.listed.iter().filter(|(other, _)| *other != name) {
            // A concurrent write of an administrator cannot be known.
            if let Some(theirs) = blocks
                .iter()
                .find(|theirs| overlap(theirs, block) && !self.by_hand.contains(&(other.clone(), **theirs)))
            {
                return Err(format!("{block} is assigned to {name} while {other} lists {theirs}"));
            }
        }
        let ours = |other: &String, theirs: &Ipv4Net| !self.by_hand.contains(&(other.clone(), *theirs));
        let known =
            |other: &String, theirs: &Ipv4Net| self.listed.contains_key(other) || self.is_recorded(other, theirs);
        if let Some((other, theirs)) = self.used.iter().find(|(other, theirs)| {
            *other != name && overlap(theirs, block) && ours(other, theirs) && known(other, theirs)
        }) {
            return Err(format!("{block} is assigned to {name} while {other} serves {theirs}"));
        }
        let fresh =
            |rest: &&Rest| now.duration_since(rest.since).as_secs() + SLACK < QUARANTINE.as_secs().cast_signed();
        if let Some(rest) =
            self.resting.iter().filter(fresh).find(|rest| rest.node != name && overlap(&rest.block, block))
        {
            return Err(format!(
                "{block} is assigned to {name} although {} lost {} at {}",
                rest.node, rest.block, rest.since
            ));
        }
        Ok(())
    }

    /// A machine's agent allocates addresses from this pod CIDR.
    ///
    /// # Errors
    /// Pods have addresses of another one.
    pub(super) fn uses(&mut self, name: &str, block: Ipv4Net) -> Result<bool, String> {
        match self.used.insert(name.to_owned(), block) {
            Some(before) if before == block => Ok(false),
            Some(before) if self.has_pods(name) => {
                Err(format!("the pod CIDR of {name} changed from {before} to {block} under its pods"))
            }
            _ => Ok(true),
        }
    }

    /// A machine's agent has decided to allocate from no pod CIDR. Returns the one that it allocated from before.
    ///
    /// # Errors
    /// Pods have addresses of it.
    pub(super) fn uses_none(&mut self, name: &str) -> Result<Option<Ipv4Net>, String> {
        match self.used.remove(name) {
            Some(before) if self.has_pods(name) => Err(format!("{name} stopped serving {before} under its pods")),
            before => Ok(before),
        }
    }

    /// Whether pods of this machine have addresses and remain running.
    pub(super) fn has_pods(&self, name: &str) -> bool {
        self.addresses.values().any(|pod| pod.0 == name && !self.ending.contains(pod))
    }

    /// The runtime starts the deletion of a pod.
    pub(super) fn ends(&mut self, node: &str, pod: &str) {
        self.ending.insert((node.to_owned(), pod.to_owned()));
    }

    /// The agent of this machine crashed.
    pub(super) fn crashed(&mut self, node: &str) {
        let is_unanswered = |pod: &&(String, String)| pod.0 == node && self.ending.contains(*pod);
        self.unanswered.extend(self.addresses.values().filter(is_unanswered).cloned());
    }

    /// A pod got an address.
    ///
    /// # Errors
    /// Another pod has it, and it is not one whose DEL failed before the agent crashed. A DEL removes the pod's device before it
    /// asks for the release; if the disk refuses the quarantine and the agent crashes then, the address is free at once.
    pub(super) fn granted(&mut self, address: &str, node: &str, pod: &str) -> Result<(), String> {
        let pod = (node.to_owned(), pod.to_owned());
        match self.addresses.insert(address.to_owned(), pod.clone()) {
            Some(other) if other != pod && !self.unanswered.contains(&other) => {
                Err(format!("{address} of pod {} on {} is allocated to pod {} on {}", other.1, other.0, pod.1, pod.0))
            }
            _ => Ok(()),
        }
    }

    /// The pods of a machine with matching names are deleted.
    pub(super) fn ended(&mut self, node: &str, pod: Option<&str>) {
        self.addresses.retain(|_, (on, held)| on != node || pod.is_some_and(|pod| pod != held));
    }

    /// A machine is lost, with its pods.
    pub(super) fn machine_gone(&mut self, name: &str) {
        self.used.remove(name);
        self.ended(name, None);
    }

    fn is_recorded(&self, name: &str, block: &Ipv4Net) -> bool {
        self.recorded.get(name).is_some_and(|blocks| blocks.contains(block))
    }

    /// The API server was restored to an older state, with these CiliumNodes and records.
    pub(super) fn restored(&mut self, objects: &[Value], kept: Option<&Value>, backup: Timestamp) {
        self.recorded = kept.map(records).unwrap_or_default();
        self.listed = objects
            .iter()
            .map(|object| {
                let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
                (name.to_owned(), blocks(object))
            })
            .collect();
        // What was deleted since exists again, or was lost with the rest.
        self.resting.retain(|rest| rest.since <= backup);
    }

    /// Whether an administrator wrote to this object, or wrote a pod CIDR of it to another one.
    pub(super) fn is_touched(&self, name: &str, listed: &BTreeSet<Ipv4Net>) -> bool {
        self.by_hand.iter().any(|(node, written)| node == name || listed.iter().any(|block| overlap(written, block)))
    }

    /// The pod CIDR that a machine uses.
    pub(super) fn used_by(&self, name: &str) -> Option<Ipv4Net> {
        self.used.get(name).copied()
    }
}
