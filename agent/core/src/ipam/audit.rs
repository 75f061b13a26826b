//! Audit of the pod leases against the network namespaces and devices that exist: the net below CNI DEL and GC.
//!
//! Each look compares the leases with what the kernel shows. What a look finds is a suspicion, since pods come and go
//! meanwhile; it becomes a finding when the next look finds it too, and is acted on when every look of [`GRACE`] found
//! it. Only what can hurt no pod is acted on:
//!
//! | lease | namespace | host's device | |
//! |---|---|---|---|
//! | confirmed | gone | gone | the lease ends: no packet can come from or reach that address any more |
//! | confirmed | gone | there | finding: a process may still live in the namespace |
//! | confirmed | there | gone | finding: the pod is cut off, and its runtime must make it anew |
//! | confirmed | not to be seen | gone | finding: nothing is concluded from a directory that is not visible |
//! | none | | there, with a route | finding: a pod without a record; its address is not allocated |
//! | none | | there, without route | the device is removed when no namespace that exists is connected by it: what an ADD left that was killed |
//!
//! A lease that no pod has ends within [`EVERY`] + [`GRACE`] + [`EVERY`] of its pod's end.

use super::later;
use super::lease::{Attachment, LeaseState, PodAttachment, PodLease};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::time::Duration;

/// Interval of audits.
pub const EVERY: Duration = Duration::from_secs(60);

/// Actions require the same result for this long.
pub const GRACE: Duration = Duration::from_secs(300);

/// State of a network namespace's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Namespace {
    /// It exists.
    There,
    /// Its directory exists, but it does not.
    Gone,
    /// Its directory is not visible to the agent, so nothing is known.
    Unseen,
}

/// Whether a device has the name of a host side: `cst` and 11 hex digits (`architecture` section 8).
#[must_use]
pub fn is_host_side(name: &str) -> bool {
    name.strip_prefix("cst").is_some_and(|hash| hash.len() == 11 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The host side of a pod's veth pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLink {
    /// Its index.
    pub ifindex: u32,
    /// The address that the host routes to it, if any.
    pub address: Option<Ipv4Addr>,
}

/// The observed state.
pub struct Seen<'a> {
    /// Host sides of pods' veth pairs, by name.
    pub links: &'a BTreeMap<String, HostLink>,
    /// State of the namespace at a path.
    pub namespace: &'a dyn Fn(&str) -> Namespace,
    /// Name of the host side of an attachment's pair.
    pub host_side: &'a dyn Fn(&Attachment) -> String,
}

/// A finding for the administrator.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Finding {
    /// The lease's pod no longer exists.
    #[error(
        "{attachment} has an address, but its namespace {netns} and its device {link} no longer exist and no DEL arrived; the lease will be released unless they reappear"
    )]
    Lost {
        /// The lease's.
        attachment: Attachment,
        /// Of that lease.
        generation: u64,
        /// Path of the namespace.
        netns: String,
        /// The host's device.
        link: String,
    },
    /// The namespace's path no longer exists, but the device does.
    #[error(
        "{attachment}: the path {netns} of its namespace no longer exists, but its device {link} does, so its pod may be running; the lease is kept until DEL"
    )]
    NoNamespace {
        /// The lease's.
        attachment: Attachment,
        /// Path of the namespace.
        netns: String,
        /// The host's device.
        link: String,
    },
    /// The pod is disconnected.
    #[error(
        "{attachment}: its device {link} no longer exists, but its namespace {netns} does: the pod is disconnected; delete the pod so that it is recreated"
    )]
    NoDevice {
        /// The lease's.
        attachment: Attachment,
        /// Path of the namespace.
        netns: String,
        /// The host's device.
        link: String,
    },
    /// The state of the namespace is unknown.
    #[error(
        "{attachment}: its device {link} no longer exists, and the directory of its namespace {netns} is not visible to this agent (mount the host's /run into it); the lease is kept until DEL"
    )]
    Unseen {
        /// The lease's.
        attachment: Attachment,
        /// Path of the namespace.
        netns: String,
        /// The host's device.
        link: String,
    },
    /// An unrecorded pod.
    #[error(
        "{link} has a route for {address}, but no record of its pod (was one set aside?): the pod continues, and its address is not allocated while the device exists"
    )]
    Unrecorded {
        /// The host's device.
        link: String,
        /// The address routed to it.
        address: Ipv4Addr,
    },
    /// A device without lease and route.
    #[error(
        "{link} has neither a lease nor a route: left behind by an ADD that was killed; it will be deleted and its other side is in no namespace that exists"
    )]
    LeftOver {
        /// The host's device.
        link: String,
    },
}

impl Finding {
    /// A machine-readable reason.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Lost { .. } => "lease-without-pod",
            Self::NoNamespace { .. } => "namespace-missing",
            Self::NoDevice { .. } => "device-missing",
            Self::Unseen { .. } => "namespaces-not-visible",
            Self::Unrecorded { .. } => "pod-without-lease",
            Self::LeftOver { .. } => "device-without-pod",
        }
    }

    /// The subject: an attachment or a device.
    #[must_use]
    pub fn subject(&self) -> String {
        match self {
            Self::Lost { attachment, .. }
            | Self::NoNamespace { attachment, .. }
            | Self::NoDevice { attachment, .. }
            | Self::Unseen { attachment, .. } => attachment.to_string(),
            Self::Unrecorded { link, .. } | Self::LeftOver { link } => link.clone(),
        }
    }
}

/// The result of an audit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Audited {
    /// Findings of at least two consecutive audits.
    pub findings: Vec<Finding>,
    /// Leases to release, with their generations.
    pub lost: Vec<(Attachment, u64)>,
    /// Devices to delete.
    pub left_over: Vec<String>,
}

/// The history of audits. It is not persistent: acting later is harmless.
#[derive(Debug, Clone, Default)]
pub struct Audit {
    since: BTreeMap<Finding, Timestamp>,
}

impl Audit {
    /// Runs one audit.
    pub fn look<'a>(&mut self, leases: impl Iterator<Item = &'a PodLease>, seen: &Seen<'_>, now: Timestamp) -> Audited {
        let found = compare(leases, seen);
        self.since.retain(|finding, _| found.contains(finding));
        let mut audited = Audited::default();
        for finding in found {
            let since = *self.since.entry(finding.clone()).or_insert(now);
            if since >= now {
                continue;
            }
            if later(since, GRACE) <= now {
                match &finding {
                    Finding::Lost { attachment, generation, .. } => {
                        audited.lost.push((attachment.clone(), *generation));
                    }
                    Finding::LeftOver { link } => audited.left_over.push(link.clone()),
                    _ => {}
                }
            }
            audited.findings.push(finding);
        }
        audited
    }
}

fn compare<'a>(leases: impl Iterator<Item = &'a PodLease>, seen: &Seen<'_>) -> BTreeSet<Finding> {
    let mut found = BTreeSet::new();
    let mut leased = BTreeSet::new();
    for lease in leases {
        let link = match &lease.state {
            LeaseState::Confirmed { interface: PodAttachment::Pair(pair), .. } => pair.host_ifname.clone(),
            // The device's name is unknown, so the lease is kept until DEL or GC.
            LeaseState::Confirmed { interface: PodAttachment::Plugin { .. }, .. } => continue,
            // Its ADD may be running; otherwise it expires.
            LeaseState::Provisional { .. } => {
                leased.insert((seen.host_side)(&lease.attachment));
                continue;
            }
        };
        let (attachment, netns) = (lease.attachment.clone(), lease.netns.clone());
        match ((seen.namespace)(&netns), seen.links.contains_key(&link)) {
            (Namespace::There | Namespace::Unseen, true) => {}
            // Only our own devices are examined.
            (_, false) if !is_host_side(&link) => {}
            (Namespace::Gone, true) => {
                found.insert(Finding::NoNamespace { attachment, netns, link: link.clone() });
            }
            (Namespace::Gone, false) => {
                let generation = lease.generation;
                found.insert(Finding::Lost { attachment, generation, netns, link: link.clone() });
            }
            (Namespace::There, false) => {
                found.insert(Finding::NoDevice { attachment, netns, link: link.clone() });
            }
            (Namespace::Unseen, false) => {
                found.insert(Finding::Unseen { attachment, netns, link: link.clone() });
            }
        }
        leased.insert(link);
    }
    for (link, HostLink { address, .. }) in seen.links.iter().filter(|(link, _)| !leased.contains(*link)) {
        found.insert(match address {
            Some(address) => Finding::Unrecorded { link: link.clone(), address: *address },
            None => Finding::LeftOver { link: link.clone() },
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ipam::lease::Interface;
    use crate::ipam::node::pod_cidr::Addresses;

    const LINK: &str = "cst0123456789a";
    const OTHER: &str = "cstffffffffff0";

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn lease(confirmed: bool) -> PodLease {
        let interface =
            PodAttachment::Pair(Interface { host_ifname: LINK.to_owned(), host_ifindex: 7, mac: String::new() });
        PodLease {
            attachment: Attachment { container_id: "c".to_owned(), ifname: "eth0".to_owned() },
            network: None,
            pod: None,
            netns: "/run/netns/c".to_owned(),
            began: None,
            confirmed: None,
            pool: "default".to_owned(),
            addresses: Addresses { ipv4: Some(Ipv4Addr::new(10, 0, 0, 5)), ipv6: None },
            generation: 4,
            state: if confirmed {
                LeaseState::Confirmed { since: at(0), interface }
            } else {
                LeaseState::Provisional { since: at(0), expires: at(600) }
            },
        }
    }

    /// A constant state, audited every minute.
    fn looks(lease: Option<&PodLease>, namespace: Namespace, links: &[(&str, bool)], count: i64) -> Vec<Audited> {
        let address = |routed: &bool| routed.then_some(Ipv4Addr::new(10, 0, 0, 5));
        let link =
            |(name, routed): &(&str, bool)| ((*name).to_owned(), HostLink { ifindex: 7, address: address(routed) });
        let links = links.iter().map(link).collect();
        let seen = Seen { links: &links, namespace: &|_| namespace, host_side: &|_| LINK.to_owned() };
        let mut audit = Audit::default();
        (0..count).map(|minute| audit.look(lease.into_iter(), &seen, at(60 * minute))).collect()
    }

    fn reasons(audited: &Audited) -> Vec<&'static str> {
        audited.findings.iter().map(Finding::reason).collect()
    }

    #[test]
    fn only_a_lease_without_namespace_and_without_device_ends_and_only_after_the_grace() {
        let confirmed = lease(true);
        let all = looks(Some(&confirmed), Namespace::Gone, &[], 7);
        assert_eq!(all[0], Audited::default(), "one look is no finding");
        for audited in &all[1..5] {
            assert_eq!((reasons(audited), audited.lost.len()), (vec!["lease-without-pod"], 0));
        }
        assert_eq!(all[5].lost, [(confirmed.attachment.clone(), 4)]);
        for (namespace, links, expected) in [
            (Namespace::There, &[(LINK, true)][..], &[][..]),
            (Namespace::Unseen, &[(LINK, true)], &[]),
            (Namespace::Gone, &[(LINK, true)], &["namespace-missing"]),
            (Namespace::There, &[], &["device-missing"]),
            (Namespace::Unseen, &[], &["namespaces-not-visible"]),
        ] {
            let all = looks(Some(&confirmed), namespace, links, 20);
            assert!(all.iter().all(|audited| audited.lost.is_empty()), "{namespace:?} {links:?}");
            assert_eq!(reasons(&all[19]), expected, "{namespace:?} {links:?}");
        }
        let all = looks(Some(&lease(false)), Namespace::Gone, &[], 20);
        assert_eq!(all[19], Audited::default(), "an unfinished one ends by its own time");
        let mut foreign = confirmed;
        if let LeaseState::Confirmed { interface: PodAttachment::Pair(pair), .. } = &mut foreign.state {
            pair.host_ifname = "veth7".to_owned();
        }
        assert_eq!(looks(Some(&foreign), Namespace::Gone, &[], 20)[19], Audited::default(), "not our device");
        let interface = PodAttachment::Plugin { plugin: "bridge".to_owned(), routed: true };
        foreign.state = LeaseState::Confirmed { since: at(0), interface };
        assert_eq!(looks(Some(&foreign), Namespace::Gone, &[], 20)[19], Audited::default(), "another plugin's");
    }

    #[test]
    fn a_pod_that_is_seen_again_begins_a_new_grace() {
        let lease = lease(true);
        let (none, there) =
            (BTreeMap::new(), BTreeMap::from([(LINK.to_owned(), HostLink { ifindex: 7, address: None })]));
        let mut audit = Audit::default();
        for minute in 0..30 {
            // The device exists once in five minutes.
            let links = if minute % 5 == 0 { &there } else { &none };
            let seen = Seen { links, namespace: &|_| Namespace::Gone, host_side: &|_| String::new() };
            assert!(audit.look([&lease].into_iter(), &seen, at(60 * minute)).lost.is_empty(), "{minute}");
        }
    }

    #[test]
    fn a_device_without_lease_is_removed_only_when_it_leads_nowhere() {
        let all = looks(None, Namespace::There, &[(LINK, true), (OTHER, false)], 7);
        assert_eq!(reasons(&all[6]), ["pod-without-lease", "device-without-pod"]);
        assert_eq!(all[4].left_over, [""; 0]);
        assert_eq!(all[6].left_over, [OTHER]);
        // The device of a running ADD has a lease, by its name.
        assert_eq!(looks(Some(&lease(false)), Namespace::There, &[(LINK, false)], 20)[19], Audited::default());
    }

    #[test]
    fn host_sides_are_recognised_by_their_names() {
        assert!(is_host_side(LINK));
        for other in ["cst", "cst7", "cst-c1", "cstore0", "cst0123456789ab", "veth0"] {
            assert!(!is_host_side(other), "{other}");
        }
    }
}
