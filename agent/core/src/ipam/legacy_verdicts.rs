//! The error texts of the release before, which wrote verdicts as text alone.
//!
//! This is the only place that reads a message. It serves one rolling upgrade, in which an agent of this release meets an
//! operator of the release before, and goes with the next release. Agents of the release before read the texts of this one in
//! the same way, so every text of a [`Verdict`] that they act on is readable here (the tests of `cluster_pool` hold that).

use super::verdict::{Code, Verdict};
use ipnet::IpNet;

/// How a text of the release before names a pod CIDR: between these words.
struct Form {
    code: Code,
    before: &'static str,
    after: &'static str,
}

/// Texts that name the pod CIDR they are about.
const ABOUT_A_CIDR: [Form; 8] = [
    Form {
        code: Code::Conflict,
        before: "node has CIDRs allocated that conflict: it lists ",
        after: " but was given ",
    },
    Form { code: Code::OutOfRange, before: "requested CIDR ", after: " is out of range: the pool is " },
    Form { code: Code::NotAligned, before: "requested CIDR ", after: " is not one aligned block: the pool is " },
    Form { code: Code::Overlapping, before: "requested CIDRs ", after: " and " },
    Form { code: Code::AlreadyAllocated, before: "requested CIDR ", after: " is already allocated: " },
    Form { code: Code::InQuarantine, before: "requested CIDR ", after: " is in quarantine: " },
    Form { code: Code::NoPool, before: "allocator not configured for the requested CIDR ", after: ": IPv" },
    Form {
        code: Code::OutsidePool,
        before: "pod CIDR ",
        after: " is kept, but is not a block of the pool as configured now (",
    },
];

/// Texts about the whole list, by their beginning and a later part.
const ABOUT_THE_LIST: [Form; 3] = [
    Form {
        code: Code::InvalidCidr,
        before: "spec.ipam.podCIDRs holds \"",
        after: "\", which is not a CIDR; expected ",
    },
    Form { code: Code::NotSettled, before: "no IPv", after: " pod CIDR yet: nobody led for a while" },
    Form { code: Code::PoolExhausted, before: "unable to allocate a IPv", after: " pod CIDR: the pool is full (" },
];

/// The verdict that a text of the release before stands for; none for a text of another origin.
#[must_use]
pub(super) fn read(text: &str) -> Option<Verdict> {
    let between = |form: &Form| Some(text.strip_prefix(form.before)?.split_once(form.after)?.0);
    let about_a_cidr = ABOUT_A_CIDR.iter().find_map(|form| {
        let cidr: IpNet = between(form)?.parse().ok()?;
        Some((form.code, Some(cidr)))
    });
    let about_the_list = || ABOUT_THE_LIST.iter().find_map(|form| between(form).map(|_| (form.code, None)));
    let (code, cidr) = about_a_cidr.or_else(about_the_list)?;
    Some(Verdict { code, cidr, text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_release_before_are_understood() {
        let net = "10.33.0.0/26";
        let cases = [
            (
                "node has CIDRs allocated that conflict: it lists 10.33.0.0/26 but was given 10.33.0.64/26; when it lists \
                 only what it was given, or its CiliumNode is deleted while it has no pods, all is well",
                Code::Conflict,
                net,
            ),
            (
                "requested CIDR 10.33.0.0/26 is out of range: the pool is 10.9.0.0/24 in blocks of /26",
                Code::OutOfRange,
                net,
            ),
            (
                "requested CIDR 10.33.0.0/26 is not one aligned block: the pool is 10.33.0.0/24 in blocks of /27",
                Code::NotAligned,
                net,
            ),
            ("requested CIDRs 10.33.0.0/26 and 10.33.0.0/27 overlap", Code::Overlapping, net),
            (
                "requested CIDR 10.33.0.0/26 is already allocated: 10.33.0.0/26 belongs to n2",
                Code::AlreadyAllocated,
                net,
            ),
            (
                "requested CIDR 10.33.0.0/26 is in quarantine: 10.33.0.0/26 belonged to n2 and is kept back until \
                 2026-01-01T00:10:00Z",
                Code::InQuarantine,
                net,
            ),
            (
                "allocator not configured for the requested CIDR fd33::/124: IPv6 has no pool",
                Code::NoPool,
                "fd33::/124",
            ),
            (
                "pod CIDR 10.33.0.0/26 is kept, but is not a block of the pool as configured now (10.9.0.0/24 in blocks of \
                 /26); to renumber, delete this CiliumNode and re-create the node's pods",
                Code::OutsidePool,
                net,
            ),
            (
                "spec.ipam.podCIDRs holds \"10.33/26\", which is not a CIDR; expected one such as 10.0.1.0/24",
                Code::InvalidCidr,
                "",
            ),
            (
                "no IPv4 pod CIDR yet: nobody led for a while, or the API server was restored from a backup, and nodes \
                 list first what they have; two minutes later this node gets one",
                Code::NotSettled,
                "",
            ),
            (
                "unable to allocate a IPv4 pod CIDR: the pool is full (10.33.0.0/25 in blocks of /26); add a CIDR to the \
                 list, or wait until the blocks of deleted nodes have rested",
                Code::PoolExhausted,
                "",
            ),
        ];
        for (text, code, cidr) in cases {
            let read = read(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((read.code, read.cidr, read.text.as_str()), (code, cidr.parse().ok(), text));
        }
    }

    #[test]
    fn texts_of_another_origin_are_no_verdicts() {
        for text in [
            "",
            "allocator not configured for the requested cidr",
            "requested CIDR (10.33.0.0/26) is already allocated",
            "requested CIDR 10.33.0/26 is already allocated: 10.33.0.0/26 belongs to n2",
            "the pool is full",
            "a note: requested CIDR 10.33.0.0/26 is already allocated: 10.33.0.0/26 belongs to n2",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
