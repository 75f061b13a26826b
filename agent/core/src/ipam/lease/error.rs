//! Refusals, and findings about the leases.

use super::DEFAULT_POOL;
use super::record::Attachment;
use crate::cni::refusal::Refusal;
use crate::ipam::node::pod_cidr::AddressError;
use crate::reconcile::{Classify, ErrorClass};
use ipnet::IpNet;
use jiff::Timestamp;
use std::net::IpAddr;

/// Something that whoever operates the node should know. None of them stops the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// Two records named one address; the younger lease is the truth, since an address is given anew only when it
    /// was given back.
    #[error(
        "{address}: the records name two holders, {kept} and {dropped}; the lease of {kept} is the younger and is kept"
    )]
    TwoHolders {
        /// The address.
        address: IpAddr,
        /// Whose lease was kept.
        kept: String,
        /// Whose lease was dropped.
        dropped: String,
    },
    /// A live lease has an address of an earlier pod CIDR.
    #[error("{holder} keeps {address}, which is outside the node's pod CIDR {net}; new addresses come from {net}")]
    OutsidePodCidr {
        /// Who holds it.
        holder: String,
        /// The address.
        address: IpAddr,
        /// The pod CIDR now.
        net: IpNet,
    },
    /// An address that no pod should have belongs to a pod already.
    #[error("{address} should be kept for {label}, but {holder} has it and keeps it until it ends")]
    ExclusionHeld {
        /// The address.
        address: IpAddr,
        /// What it should be kept for.
        label: String,
        /// Who has it.
        holder: String,
    },
    /// A configured router address lies inside the pod CIDR.
    #[error(
        "configured router address {address} is inside the pod CIDR {net}; it is used as it is and given to no pod"
    )]
    RouterInsidePodCidr {
        /// The router address.
        address: IpAddr,
        /// The pod CIDR.
        net: IpNet,
    },
    /// The sources disagree about the router address.
    #[error("router address {used} is used; {other} was found too and is ignored")]
    RouterMismatch {
        /// The one in use.
        used: IpAddr,
        /// The other.
        other: IpAddr,
    },
    /// The former router address cannot be kept.
    #[error("router address {old} cannot be kept ({reason}); {new} replaces it, which interrupts traffic briefly")]
    RouterReplaced {
        /// The former address.
        old: IpAddr,
        /// The new address.
        new: IpAddr,
        /// Why the former one is not possible.
        reason: AddressError,
    },
    /// No address is left for the router.
    #[error("no router address: {reason}; no pod is added before one is free")]
    NoRouter {
        /// Why.
        reason: AddressError,
    },
}

/// Why an ADD gets no address. Nothing is held for it then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// No pod CIDR yet.
    #[error(
        "this node has no pod CIDR yet; addresses are given as soon as its CiliumNode lists one in spec.ipam.podCIDRs"
    )]
    WaitingForPodCidr,
    /// The caller said [`super::Leases::hold_back`].
    #[error("no new address is given: {reason}")]
    HeldBack {
        /// As given by the caller.
        reason: String,
    },
    /// There is no address for the router, and without one no pod can reach anything.
    #[error("no router address: {reason}")]
    NoRouter {
        /// Why.
        reason: AddressError,
    },
    /// Nothing is left in the pod CIDR.
    #[error("pool {pool} is exhausted: {reason}")]
    Exhausted {
        /// The pool.
        pool: String,
        /// The numbers.
        reason: AddressError,
    },
    /// The DEL for this attachment came first.
    #[error("a DEL for {attachment} at {at} came before this ADD; the address would never be given back")]
    Overtaken {
        /// The attachment.
        attachment: Attachment,
        /// When the DEL came.
        at: Timestamp,
    },
}

impl AddError {
    /// The refusal that it is answered as.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::WaitingForPodCidr => Refusal::WaitingForPodCidr,
            Self::HeldBack { .. } => Refusal::HeldBack,
            Self::NoRouter { .. } => Refusal::NoRouter,
            Self::Exhausted { .. } => Refusal::PoolExhausted,
            Self::Overtaken { .. } => Refusal::OvertakenByDel,
        }
    }

    /// Its code.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        self.refusal().code()
    }
}

impl Classify for AddError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::WaitingForPodCidr | Self::HeldBack { .. } | Self::NoRouter { .. } | Self::Exhausted { .. } => {
                ErrorClass::Transient
            }
            Self::Overtaken { .. } => ErrorClass::Permanent,
        }
    }
}

/// Why a lease is not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmError {
    /// Nothing is held: never given, given back, or expired.
    #[error("{attachment} holds no lease; it was given back or expired")]
    NoLease {
        /// The attachment.
        attachment: Attachment,
    },
    /// The lease was given anew since.
    #[error("{attachment} presents generation {presented}, but its lease has generation {current}")]
    OtherGeneration {
        /// The attachment.
        attachment: Attachment,
        /// As presented.
        presented: u64,
        /// As held.
        current: u64,
    },
}

/// Why a call by owner text is refused. Nothing changes then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    /// As for an ADD.
    #[error(transparent)]
    Add(#[from] AddError),
    /// The address cannot be given.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Host scope has one pool.
    #[error("pool {pool} is not known; this node has the pool {DEFAULT_POOL}")]
    UnknownPool {
        /// The pool asked for.
        pool: String,
    },
    /// A pod has the address.
    #[error("{address} is in use by endpoint {attachment}; it is given back by a CNI DEL for that endpoint")]
    InUse {
        /// The address.
        address: IpAddr,
        /// Who has it.
        attachment: Attachment,
    },
    /// Nothing was given through these calls under (pool, address).
    #[error("{address} of pool {pool} is not allocated through this call")]
    NotAllocated {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
    },
    /// There is no timer to stop.
    #[error("no expiration timer registered for {address} of pool {pool}")]
    NoTimer {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
    },
    /// The timer belongs to an earlier allocation.
    #[error("expiration UUID {presented} does not match the timer of {address} of pool {pool}")]
    OtherTimer {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
        /// The UUID as presented.
        presented: String,
    },
}

impl Classify for OwnerError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Add(error) => error.class(),
            Self::Address(AddressError::RangeFull { .. } | AddressError::InQuarantine { .. }) => ErrorClass::Transient,
            _ => ErrorClass::Permanent,
        }
    }
}
