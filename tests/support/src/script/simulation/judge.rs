//! The rules, and what must be remembered to check them.
//!
//! A rule binds whoever can know what it is about. A leader can know what an object lists and what the operators' records
//! hold: a block that stood in no record when its object was deleted (claimed and gone between two passes, or lost by a
//! restored API server) rests for nobody. People may write what they want: who has a block that they wrote somewhere is
//! for them to sort out.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::Ipv4Net;
use jiff::Timestamp;
use serde_json::Value;

use super::QUARANTINE;
use crate::apiserver::ObjectChange;

/// Who made a change that is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hand {
    /// Agents and operators.
    Ours,
    /// A person.
    Person,
}

/// A block that somebody had.
struct Rest {
    block: Ipv4Net,
    node: String,
    since: Timestamp,
}

/// What is known of the objects and of the machines.
#[derive(Default)]
pub(super) struct Judge {
    /// Blocks by CiliumNode.
    listed: BTreeMap<String, BTreeSet<Ipv4Net>>,
    /// Blocks that pods of a running machine may have addresses of.
    used: BTreeMap<String, Ipv4Net>,
    resting: Vec<Rest>,
    /// What people wrote into objects, by node.
    by_hand: BTreeSet<(String, Ipv4Net)>,
    /// Blocks by node in the operators' records: only what stands there, or in an object, can be known to a leader.
    recorded: BTreeMap<String, BTreeSet<Ipv4Net>>,
    /// Addresses of pods that run.
    addresses: BTreeMap<String, (String, String)>,
    /// Those of them whose runtime has begun to take them away, by node and pod.
    ending: BTreeSet<(String, String)>,
}

/// Slack of the clock: changes are looked at twice a second, and a deletion is noticed a little after it happened.
const SLACK: i64 = 1;

fn overlap(a: &Ipv4Net, b: &Ipv4Net) -> bool {
    a.contains(b) || b.contains(a)
}

/// The blocks that a CiliumNode lists.
pub(super) fn blocks(object: &Value) -> BTreeSet<Ipv4Net> {
    let list = object.pointer("/spec/ipam/podCIDRs").and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|text| text.as_str()?.parse().ok()).collect()
}

/// The ConfigMap of the operators.
pub(super) const RECORDS: &str = "cistern-ipam";

/// Blocks by node, as recorded there.
pub(super) fn records(object: &Value) -> BTreeMap<String, BTreeSet<Ipv4Net>> {
    let text = object.pointer("/data/blocks.json").and_then(Value::as_str);
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

impl Judge {
    /// Looks at one change.
    ///
    /// # Errors
    /// The rule that it breaks.
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
            // A machine that lists again what it has is given nothing.
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
            // Nobody can know what a person is writing at this moment.
            if let Some(theirs) = blocks
                .iter()
                .find(|theirs| overlap(theirs, block) && !self.by_hand.contains(&(other.clone(), **theirs)))
            {
                return Err(format!("{block} is given to {name} while {other} lists {theirs}"));
            }
        }
        let ours = |other: &String, theirs: &Ipv4Net| !self.by_hand.contains(&(other.clone(), *theirs));
        let known =
            |other: &String, theirs: &Ipv4Net| self.listed.contains_key(other) || self.is_recorded(other, theirs);
        if let Some((other, theirs)) = self.used.iter().find(|(other, theirs)| {
            *other != name && overlap(theirs, block) && ours(other, theirs) && known(other, theirs)
        }) {
            return Err(format!("{block} is given to {name} while {other} gives addresses from {theirs}"));
        }
        let fresh =
            |rest: &&Rest| now.duration_since(rest.since).as_secs() + SLACK < QUARANTINE.as_secs().cast_signed();
        if let Some(rest) =
            self.resting.iter().filter(fresh).find(|rest| rest.node != name && overlap(&rest.block, block))
        {
            return Err(format!(
                "{block} is given to {name} though {} lost {} at {}",
                rest.node, rest.block, rest.since
            ));
        }
        Ok(())
    }

    /// A machine's agent gives addresses from this block.
    ///
    /// # Errors
    /// When pods have addresses of another one.
    pub(super) fn uses(&mut self, name: &str, block: Ipv4Net) -> Result<bool, String> {
        match self.used.insert(name.to_owned(), block) {
            Some(before) if before == block => Ok(false),
            Some(before) if self.has_pods(name) => {
                Err(format!("the block of {name} changed from {before} to {block} under its pods"))
            }
            _ => Ok(true),
        }
    }

    /// Whether pods of this machine have addresses, and are to keep them.
    pub(super) fn has_pods(&self, name: &str) -> bool {
        self.addresses.values().any(|pod| pod.0 == name && !self.ending.contains(pod))
    }

    /// The runtime begins to take a pod away.
    pub(super) fn ends(&mut self, node: &str, pod: &str) {
        self.ending.insert((node.to_owned(), pod.to_owned()));
    }

    /// A pod got an address.
    ///
    /// # Errors
    /// When another pod has it.
    pub(super) fn granted(&mut self, address: &str, node: &str, pod: &str) -> Result<(), String> {
        match self.addresses.insert(address.to_owned(), (node.to_owned(), pod.to_owned())) {
            Some((other, held)) if other != node || held != pod => {
                Err(format!("{address} of pod {held} on {other} is given to pod {pod} on {node}"))
            }
            _ => Ok(()),
        }
    }

    /// The pods of a machine whose names match are gone.
    pub(super) fn ended(&mut self, node: &str, pod: Option<&str>) {
        self.addresses.retain(|_, (on, held)| on != node || pod.is_some_and(|pod| pod != held));
    }

    /// A machine is gone, with its pods.
    pub(super) fn machine_gone(&mut self, name: &str) {
        self.used.remove(name);
        self.ended(name, None);
    }

    fn is_recorded(&self, name: &str, block: &Ipv4Net) -> bool {
        self.recorded.get(name).is_some_and(|blocks| blocks.contains(block))
    }

    /// The API server went back to an older state, with these CiliumNodes and these records.
    pub(super) fn restored(&mut self, objects: &[Value], kept: Option<&Value>, backup: Timestamp) {
        self.recorded = kept.map(records).unwrap_or_default();
        self.listed = objects
            .iter()
            .map(|object| {
                let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
                (name.to_owned(), blocks(object))
            })
            .collect();
        // What was deleted since is there again, or was forgotten with the rest.
        self.resting.retain(|rest| rest.since <= backup);
    }

    /// Whether people wrote into this object, or what it lists into another one.
    pub(super) fn is_touched(&self, name: &str, listed: &BTreeSet<Ipv4Net>) -> bool {
        self.by_hand.iter().any(|(node, written)| node == name || listed.iter().any(|block| overlap(written, block)))
    }

    /// The block that a machine uses.
    pub(super) fn used_by(&self, name: &str) -> Option<Ipv4Net> {
        self.used.get(name).copied()
    }
}
