//! Errors, and findings about the leases.

use super::DEFAULT_POOL;
use super::record::Attachment;
use crate::cni::refusal::Refusal;
use crate::ipam::node::pod_cidr::AddressError;
use crate::reconcile::{Classify, ErrorClass};
use ipnet::IpNet;
use jiff::Timestamp;
use std::net::IpAddr;

/// A finding for the administrator. None of them stops the node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// Two records have the same address; the younger lease is valid, since an address is reallocated only after its
    /// release.
    #[error(
        "{address}: the records name two holders, {kept} and {dropped}; the lease of {kept} is the younger one and is kept"
    )]
    TwoHolders {
        /// The address.
        address: IpAddr,
        /// The owner of the kept lease.
        kept: String,
        /// The owner of the dropped lease.
        dropped: String,
    },
    /// An existing lease has an address of an earlier pod CIDR.
    #[error("{holder} keeps {address}, which is outside the node's pod CIDR {net}; new addresses come from {net}")]
    OutsidePodCidr {
        /// The owner.
        holder: String,
        /// The address.
        address: IpAddr,
        /// The current pod CIDR.
        net: IpNet,
    },
    /// A pod has an address that must not be allocated to pods.
    #[error("{address} is reserved for {label}, but {holder} has it and keeps it until its DEL")]
    ExclusionHeld {
        /// The address.
        address: IpAddr,
        /// Its intended use.
        label: String,
        /// The owner.
        holder: String,
    },
    /// A configured router address is inside the pod CIDR.
    #[error(
        "configured router address {address} is inside the pod CIDR {net}; it is used unchanged and not allocated to pods"
    )]
    RouterInsidePodCidr {
        /// The router address.
        address: IpAddr,
        /// The pod CIDR.
        net: IpNet,
    },
    /// Sources disagree about the router address.
    #[error("router address {used} is used; {other} was found too and is ignored")]
    RouterMismatch {
        /// The one in use.
        used: IpAddr,
        /// The other.
        other: IpAddr,
    },
    /// The previous router address cannot be kept.
    #[error("router address {old} cannot be kept ({reason}); {new} replaces it, which interrupts traffic briefly")]
    RouterReplaced {
        /// The previous address.
        old: IpAddr,
        /// The new address.
        new: IpAddr,
        /// The reason.
        reason: AddressError,
    },
    /// There is no address for the router.
    #[error("no router address: {reason}; no pod is added before one is free")]
    NoRouter {
        /// The reason.
        reason: AddressError,
    },
}

/// Why an ADD gets no address. Nothing is allocated then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// No pod CIDR yet.
    #[error(
        "this node has no pod CIDR yet; addresses are allocated once its CiliumNode lists one in spec.ipam.podCIDRs"
    )]
    WaitingForPodCidr,
    /// Allocation is suspended ([`super::Leases::hold_back`]).
    #[error("no address is allocated: {reason}")]
    HeldBack {
        /// The reason given by the caller.
        reason: String,
    },
    /// There is no address for the router, without which pods have no gateway.
    #[error("no router address: {reason}")]
    NoRouter {
        /// The reason.
        reason: AddressError,
    },
    /// No address is free in the pod CIDR.
    #[error("pool {pool} is exhausted: {reason}")]
    Exhausted {
        /// The pool.
        pool: String,
        /// The counts.
        reason: AddressError,
    },
    /// The DEL of this attachment arrived first.
    #[error("a DEL for {attachment} at {at} arrived before this ADD; the address would never be released")]
    Overtaken {
        /// The attachment.
        attachment: Attachment,
        /// Time of the DEL.
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
    /// No lease: never allocated, released, or expired.
    #[error("{attachment} has no lease; it was released or expired")]
    NoLease {
        /// The attachment.
        attachment: Attachment,
    },
    /// The lease was reallocated since.
    #[error("{attachment} presents generation {presented}, but its lease has generation {current}")]
    OtherGeneration {
        /// The attachment.
        attachment: Attachment,
        /// The presented generation.
        presented: u64,
        /// The current generation.
        current: u64,
    },
}

/// Why a call with an owner string is rejected. Nothing changes then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OwnerError {
    /// As for an ADD.
    #[error(transparent)]
    Add(#[from] AddError),
    /// The address cannot be allocated.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// There is only one pool.
    #[error("pool {pool} is not known; this node has the pool {DEFAULT_POOL}")]
    UnknownPool {
        /// The requested pool.
        pool: String,
    },
    /// A pod has the address.
    #[error("{address} is in use by endpoint {attachment}; it is released by a CNI DEL for that endpoint")]
    InUse {
        /// The address.
        address: IpAddr,
        /// The owner.
        attachment: Attachment,
    },
    /// Nothing was allocated through these calls for (pool, address).
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
    /// The timer belongs to another allocation.
    #[error("expiration UUID {presented} does not match the timer of {address} of pool {pool}")]
    OtherTimer {
        /// The address.
        address: IpAddr,
        /// The pool.
        pool: String,
        /// The presented UUID.
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
