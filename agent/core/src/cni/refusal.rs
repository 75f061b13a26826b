//! The refusals of the agent API: one code for programs, and what follows from it.
//!
//! Codes are part of the API: the plugin acts on them, `cistern_cni_request_duration_seconds` has them as a label, and a plugin of
//! another build may meet an agent of this one. None changes its meaning; new ones are added.

use std::fmt;

/// Why a call was refused. The call had no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The node has no pod CIDR yet.
    WaitingForPodCidr,
    /// Allocation is suspended; the message has the reason.
    HeldBack,
    /// There is no address for the router.
    NoRouter,
    /// The router address is not on the node yet.
    RouterNotSet,
    /// The agent is shutting down.
    ShuttingDown,
    /// The pool is exhausted.
    PoolExhausted,
    /// The DEL of this attachment arrived before its ADD.
    OvertakenByDel,
    /// The attachment holds no lease.
    NoLease,
    /// The lease was reallocated since.
    OtherGeneration,
    /// The lease records cannot be written.
    NotDurable,
    /// The endpoint cannot be added to the kernel map.
    Datapath,
    /// The lease has no IPv4 address.
    NoIpv4,
    /// A pod has the address.
    InUse,
    /// The address is not allocated through these calls.
    NotAllocated,
    /// The node has no pool of this name.
    UnknownPool,
    /// The address has another owner.
    AlreadyAllocated,
    /// The address is outside the pool.
    OutOfRange,
    /// The node does not serve this family.
    FamilyDisabled,
    /// The address cannot be allocated now.
    NotFree,
    /// No expiration timer runs for the address.
    NoTimer,
    /// The timer of the address has another UUID.
    OtherTimer,
    /// The request cannot be parsed.
    BadRequest,
    /// The family is neither `ipv4` nor `ipv6`.
    BadFamily,
    /// The text is not an IP address.
    InvalidIp,
    /// The call needs the name of a pool.
    PoolRequired,
    /// A kernel map cannot be read.
    Map,
    /// The node does not masquerade.
    NoDatapath,
    /// The API has no such path.
    NoSuchPath,
    /// Another reason; see the message.
    Refused,
}

/// The consequences of a refusal.
struct Meaning {
    code: &'static str,
    /// HTTP status.
    status: u16,
    /// The same call may succeed later without a change of the configuration.
    retryable: bool,
    when: When,
}

/// How a refusal relates to the state of the agent.
#[derive(PartialEq, Eq)]
enum When {
    /// The agent is about to serve: an ADD waits for it.
    Starting,
    /// The agent reports what it waits for as a wait, a condition or an event.
    Waiting,
    /// The call itself is invalid.
    Always,
}

const fn meaning(code: &'static str, status: u16, retryable: bool, when: When) -> Meaning {
    Meaning { code, status, retryable, when }
}

impl Refusal {
    /// All codes.
    pub const ALL: [Self; 29] = [
        Self::WaitingForPodCidr,
        Self::HeldBack,
        Self::NoRouter,
        Self::RouterNotSet,
        Self::ShuttingDown,
        Self::PoolExhausted,
        Self::OvertakenByDel,
        Self::NoLease,
        Self::OtherGeneration,
        Self::NotDurable,
        Self::Datapath,
        Self::NoIpv4,
        Self::InUse,
        Self::NotAllocated,
        Self::UnknownPool,
        Self::AlreadyAllocated,
        Self::OutOfRange,
        Self::FamilyDisabled,
        Self::NotFree,
        Self::NoTimer,
        Self::OtherTimer,
        Self::BadRequest,
        Self::BadFamily,
        Self::InvalidIp,
        Self::PoolRequired,
        Self::Map,
        Self::NoDatapath,
        Self::NoSuchPath,
        Self::Refused,
    ];

    const fn meaning(self) -> Meaning {
        match self {
            Self::WaitingForPodCidr => meaning("waiting-for-pod-cidr", 503, true, When::Starting),
            Self::HeldBack => meaning("held-back", 503, true, When::Starting),
            Self::NoRouter => meaning("no-router", 503, true, When::Waiting),
            Self::RouterNotSet => meaning("router-not-set", 503, true, When::Waiting),
            Self::ShuttingDown => meaning("shutting-down", 503, true, When::Starting),
            Self::PoolExhausted => meaning("pool-exhausted", 503, true, When::Always),
            Self::OvertakenByDel => meaning("overtaken-by-del", 409, false, When::Always),
            Self::NoLease => meaning("no-lease", 404, false, When::Always),
            Self::OtherGeneration => meaning("other-generation", 409, false, When::Always),
            Self::NotDurable => meaning("not-durable", 507, true, When::Always),
            Self::Datapath => meaning("datapath", 500, true, When::Always),
            Self::NoIpv4 => meaning("no-ipv4", 500, false, When::Always),
            Self::InUse => meaning("in-use", 500, false, When::Always),
            Self::NotAllocated => meaning("not-allocated", 404, false, When::Always),
            Self::UnknownPool => meaning("unknown-pool", 400, false, When::Always),
            Self::AlreadyAllocated => meaning("already-allocated", 409, false, When::Always),
            Self::OutOfRange => meaning("out-of-range", 400, false, When::Always),
            Self::FamilyDisabled => meaning("family-disabled", 501, false, When::Always),
            Self::NotFree => meaning("not-free", 503, true, When::Always),
            Self::NoTimer => meaning("no-timer", 500, false, When::Always),
            Self::OtherTimer => meaning("other-timer", 500, false, When::Always),
            Self::BadRequest => meaning("bad-request", 400, false, When::Always),
            Self::BadFamily => meaning("bad-family", 400, false, When::Always),
            Self::InvalidIp => meaning("invalid-ip", 400, false, When::Always),
            Self::PoolRequired => meaning("pool-required", 400, false, When::Always),
            Self::Map => meaning("map", 500, false, When::Always),
            Self::NoDatapath => meaning("no-datapath", 501, false, When::Always),
            Self::NoSuchPath => meaning("no-such-path", 404, false, When::Always),
            Self::Refused => meaning("refused", 500, false, When::Always),
        }
    }

    /// The code, as `reason` of an answer and as label of a metric.
    #[must_use]
    pub const fn code(self) -> &'static str {
        self.meaning().code
    }

    /// Parses a code. `None` for an unknown code of another build.
    #[must_use]
    pub fn from_code(code: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.code() == code)
    }

    /// The HTTP status of the answer.
    #[must_use]
    pub const fn status(self) -> u16 {
        self.meaning().status
    }

    /// Whether the same call may succeed later without a change of the configuration.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        self.meaning().retryable
    }

    /// Whether the agent is about to serve, so that an ADD waits for it.
    #[must_use]
    pub fn is_starting(self) -> bool {
        self.meaning().when == When::Starting
    }

    /// Whether the agent reports what it waits for as a wait, a condition or an event already. A runtime repeats such a call
    /// every few seconds for every pod.
    #[must_use]
    pub fn is_reported_elsewhere(self) -> bool {
        self.meaning().when != When::Always
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The codes on which plugins of the first release and dashboards depend.
    #[test]
    fn codes_of_the_first_release_keep_code_status_and_retry() {
        for (code, status, retryable) in [
            ("waiting-for-pod-cidr", 503, true),
            ("held-back", 503, true),
            ("no-router", 503, true),
            ("router-not-set", 503, true),
            ("shutting-down", 503, true),
            ("pool-exhausted", 503, true),
            ("overtaken-by-del", 409, false),
            ("no-lease", 404, false),
            ("other-generation", 409, false),
            ("not-durable", 507, true),
            ("datapath", 500, true),
            ("no-ipv4", 500, false),
            ("in-use", 500, false),
            ("not-allocated", 404, false),
            ("unknown-pool", 400, false),
            ("already-allocated", 409, false),
            ("out-of-range", 400, false),
            ("family-disabled", 501, false),
            ("not-free", 503, true),
            ("bad-request", 400, false),
            ("bad-family", 400, false),
            ("invalid-ip", 400, false),
            ("pool-required", 400, false),
            ("map", 500, false),
            ("no-datapath", 501, false),
            ("no-such-path", 404, false),
            ("refused", 500, false),
        ] {
            let refusal = Refusal::from_code(code).unwrap();
            assert_eq!((refusal.status(), refusal.is_retryable()), (status, retryable), "{code}");
        }
        let starting: BTreeSet<&str> =
            Refusal::ALL.into_iter().filter(|refusal| refusal.is_starting()).map(Refusal::code).collect();
        assert_eq!(starting, BTreeSet::from(["held-back", "shutting-down", "waiting-for-pod-cidr"]));
    }

    #[test]
    fn codes_are_distinct_and_those_of_other_builds_are_unknown() {
        let codes: BTreeSet<&str> = Refusal::ALL.into_iter().map(Refusal::code).collect();
        assert_eq!(codes.len(), Refusal::ALL.len());
        assert_eq!(Refusal::from_code("of-another-build"), None);
    }
}
