//! The operator's verdicts and their texts.
//!
//! Agents of the release before recognise texts by their parts (`ipam/legacy_verdicts.rs`): those parts stay for this release.

use crate::ip::Family;
use crate::ip::block::{BlockSet, ClaimError};
use crate::ipam::verdict::{Code, Verdict};
use ipnet::IpNet;

/// A longer element of a list is cut in the text, which annotation and status repeat.
const LONGEST_ELEMENT: usize = 100;

pub(super) fn invalid(element: &str) -> Verdict {
    let shown: String = element.chars().take(LONGEST_ELEMENT).collect();
    let text = format!("spec.ipam.podCIDRs holds {shown:?}, which is not a CIDR; expected one such as 10.0.1.0/24");
    Verdict { code: Code::InvalidCidr, cidr: None, text }
}

pub(super) fn conflict(listed: IpNet, recorded: &[IpNet]) -> Verdict {
    let recorded = recorded.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let text = format!(
        "node has CIDRs allocated that conflict: it lists {listed} but was given {recorded}; when it lists only what it was \
         given, or its CiliumNode is deleted while it has no pods, all is well"
    );
    Verdict { code: Code::Conflict, cidr: Some(listed), text }
}

pub(super) fn refused(error: &ClaimError<String>) -> Verdict {
    let (code, net) = match error {
        ClaimError::OutOfRange { net, .. } => (Code::OutOfRange, net),
        ClaimError::NotABlock { net, .. } => (Code::NotAligned, net),
        ClaimError::Overlapping { net, .. } => (Code::Overlapping, net),
        ClaimError::Held { net, .. } => (Code::AlreadyAllocated, net),
        ClaimError::InQuarantine { net, .. } => (Code::InQuarantine, net),
    };
    Verdict { code, cidr: Some(*net), text: error.to_string() }
}

pub(super) fn no_pool(family: Family, net: IpNet) -> Verdict {
    let text = format!("allocator not configured for the requested CIDR {net}: {family} has no pool");
    Verdict { code: Code::NoPool, cidr: Some(net), text }
}

pub(super) fn outside_pool(net: IpNet, pool: &BlockSet<String>) -> Verdict {
    let text = format!(
        "pod CIDR {net} is kept, but is not a block of the pool as configured now ({pool}); to renumber, delete this \
         CiliumNode and re-create the node's pods"
    );
    Verdict { code: Code::OutsidePool, cidr: Some(net), text }
}

pub(super) fn not_settled(family: Family) -> Verdict {
    let text = format!(
        "no {family} pod CIDR yet: nobody led for a while, or the API server was restored from a backup, and nodes list \
         first what they have; two minutes later this node gets one"
    );
    Verdict { code: Code::NotSettled, cidr: None, text }
}

pub(super) fn exhausted(family: Family, pool: &BlockSet<String>) -> Verdict {
    let text = format!(
        "unable to allocate a {family} pod CIDR: the pool is full ({pool}); add a CIDR to the list, or wait until the blocks \
         of deleted nodes have rested"
    );
    Verdict { code: Code::PoolExhausted, cidr: None, text }
}

/// Agents of the release before take this text for that of a full pool, by the words they know.
pub(super) fn records_full(pool: &str) -> Verdict {
    let text = format!(
        "unable to allocate a pod CIDR: the pool is full (the object that records the nodes of pool {pool:?} has no room for \
         another); delete CiliumNodes that are not used, or wait until the quarantine of deleted nodes has ended"
    );
    Verdict { code: Code::RecordsFull, cidr: None, text }
}
