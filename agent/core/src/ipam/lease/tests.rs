use super::*;
use crate::ipam::audit::{self, Audit, HostLink, Namespace, Seen};
use crate::ipam::node::pod_cidr::AddressError;
use crate::ipam::node::pod_cidr::Usage;
use crate::ipam::supply::{Grant, GrantState};
use crate::reconcile::{Classify, ErrorClass};
use ipnet::{IpNet, Ipv4Net};
use proptest::prelude::*;
use std::fmt;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

const BOOT: &str = "this";

fn moment(boot: &str, uptime_ns: u64) -> Moment {
    Moment { boot: boot.to_owned(), uptime_ns }
}

/// An ADD for the container `c1`.
fn begun(began: Moment) -> AddRequest {
    AddRequest { began: Some(began), ..request("c1", "u1") }
}

/// What is granted in each family, and what lies around the pods.
#[derive(Debug, Clone, Default)]
struct Network {
    ipv4: Option<Ipv4Net>,
    ipv6: Option<ipnet::Ipv6Net>,
    exclusions: Vec<Exclusion>,
    configured_router: Addresses,
    seen_routers: Vec<Addresses>,
}

impl Leases {
    fn set_network(&mut self, network: Network, now: Timestamp, draw: u64) -> Outcome<Vec<Finding>> {
        let Network { ipv4, ipv6, exclusions, configured_router, seen_routers } = network;
        let nets = ipv4.map(IpNet::V4).into_iter().chain(ipv6.map(IpNet::V6));
        let surroundings = Surroundings { exclusions, configured_router, seen_routers, ..Surroundings::default() };
        let Outcome { answer, changes } =
            self.set_supply(Supply::of_grants(nets.map(Grant::new)), surroundings, now, draw);
        Outcome { answer: answer.findings, changes }
    }
}

fn read(text: &str) -> Record {
    let Stored::Current(record) = Record::from_json(text).unwrap() else { panic!("{text}") };
    record
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn network(ipv4: &str) -> Network {
    Network { ipv4: Some(ipv4.parse().unwrap()), ..Network::default() }
}

fn attachment(container: impl fmt::Display) -> Attachment {
    Attachment { container_id: container.to_string(), ifname: "eth0".to_owned() }
}

fn request(container: impl fmt::Display, uid: &str) -> AddRequest {
    AddRequest {
        attachment: attachment(&container),
        network: Some("cistern".to_owned()),
        pod: Some(Pod { namespace: "ns".to_owned(), name: "pod".to_owned(), uid: Some(uid.to_owned()) }),
        netns: format!("/run/netns/{container}"),
        began: None,
    }
}

fn pair(index: u32) -> Interface {
    Interface { host_ifname: format!("cst{index}"), host_ifindex: index, mac: "02:00:00:00:00:01".to_owned() }
}

fn interface(index: u32) -> PodAttachment {
    PodAttachment::Pair(pair(index))
}

/// The lease task of an agent with its disk: every change is written before an answer is used.
struct Agent {
    leases: Leases,
    disk: BTreeMap<RecordKey, String>,
    findings: Vec<Finding>,
}

fn write(disk: &mut BTreeMap<RecordKey, String>, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Put(record) => disk.insert(record.key(), record.to_json().unwrap()),
            Change::Remove(key) => disk.remove(key),
        };
    }
}

impl Agent {
    fn start(network: Network) -> Self {
        Self::restart(BTreeMap::new(), network, at(0))
    }

    fn restart(disk: BTreeMap<RecordKey, String>, network: Network, now: Timestamp) -> Self {
        Self::restore(disk, network, RecordTimes::Continue, now)
    }

    fn restore(mut disk: BTreeMap<RecordKey, String>, network: Network, times: RecordTimes, now: Timestamp) -> Self {
        let records: Vec<Record> = disk.values().map(|text| read(text)).collect();
        let Restored { mut leases, mut findings, changes } =
            Leases::restore(records, Timings::default(), times, BOOT.to_owned(), now);
        write(&mut disk, &changes);
        let Outcome { answer, changes } = leases.set_network(network, now, 11);
        findings.extend(answer);
        write(&mut disk, &changes);
        Self { leases, disk, findings }
    }

    fn done<T>(&mut self, outcome: Outcome<T>) -> T {
        write(&mut self.disk, &outcome.changes);
        outcome.answer
    }

    fn add(&mut self, request: AddRequest, now: Timestamp) -> Result<Granted, AddError> {
        let outcome = self.leases.add(request, |_| true, now, 4);
        self.done(outcome)
    }

    fn confirm(&mut self, container: &str, generation: u64, now: Timestamp) -> Result<PodLease, ConfirmError> {
        let outcome = self.leases.confirm(&attachment(container), generation, interface(7), None, now);
        self.done(outcome)
    }

    fn del(&mut self, container: impl fmt::Display, now: Timestamp) -> Option<PodLease> {
        let outcome = self.leases.del(&attachment(container), None, now);
        self.done(outcome)
    }

    fn del_begun(&mut self, began: Moment, now: Timestamp) -> Option<PodLease> {
        let outcome = self.leases.del(&attachment("c1"), Some(began), now);
        self.done(outcome)
    }

    fn usage(&self) -> Usage {
        self.leases.usage()[0].usage
    }
}

fn address(granted: &Granted) -> IpAddr {
    granted.lease.addresses.iter().next().unwrap()
}

#[test]
fn an_address_is_provisional_then_confirmed_and_survives_a_restart_unchanged() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let first = agent.add(request("c1", "u1"), at(0)).unwrap();
    assert_eq!(first.router, agent.leases.router());
    assert_ne!(first.router.iter().next().unwrap(), address(&first));
    let again = agent.add(request("c1", "u1"), at(5)).unwrap();
    assert_eq!((again.lease.addresses, again.lease.generation), (first.lease.addresses, first.lease.generation));
    assert!(matches!(again.lease.state, LeaseState::Provisional { expires, .. } if expires == at(605)));
    let confirmed = agent.confirm("c1", first.lease.generation, at(6)).unwrap();
    // A repeated confirmation writes nothing.
    let outcome = agent.leases.confirm(&attachment("c1"), first.lease.generation, interface(7), None, at(7));
    assert_eq!((outcome.answer.as_ref(), outcome.changes.len()), (Ok(&confirmed), 0));
    let agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(10_000));
    assert_eq!(agent.findings, []);
    assert_eq!(agent.leases.check(&attachment("c1"), at(10_000)), Some(&confirmed));
    assert_eq!(agent.leases.router(), first.router);
}

#[test]
fn confirming_an_absent_or_another_lease_is_refused() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    assert!(matches!(agent.confirm("c1", 1, at(0)), Err(ConfirmError::NoLease { .. })));
    let first = agent.add(request("c1", "u1"), at(0)).unwrap().lease;
    agent.del("c1", at(1)).unwrap();
    assert!(matches!(agent.confirm("c1", first.generation, at(2)), Err(ConfirmError::NoLease { .. })));
    let second = agent.add(request("c1", "u1"), at(3)).unwrap().lease;
    let error = agent.confirm("c1", first.generation, at(4)).unwrap_err();
    assert_eq!(
        error,
        ConfirmError::OtherGeneration {
            attachment: attachment("c1"),
            presented: first.generation,
            current: second.generation
        }
    );
    assert!(agent.confirm("c1", second.generation + 1, at(4)).is_err());
    assert!(agent.confirm("c1", second.generation, at(5)).is_ok());
}

#[test]
fn without_a_pod_cidr_an_add_waits_and_everything_else_works() {
    let mut agent = Agent::start(Network::default());
    let error = agent.add(request("c1", "u1"), at(0)).unwrap_err();
    assert_eq!((error.reason(), error.class()), ("waiting-for-pod-cidr", ErrorClass::Transient));
    assert_eq!(agent.del("c1", at(1)), None);
    let outcome = agent.leases.set_network(network("10.66.1.16/28"), at(2), 3);
    agent.done(outcome);
    let lease = agent.add(request("c2", "u1"), at(3)).unwrap().lease;
    agent.confirm("c2", lease.generation, at(4)).unwrap();
    // After a restart without the API server the leases exist; only new ones wait.
    let mut agent = Agent::restart(agent.disk, Network::default(), at(5));
    assert!(agent.leases.check(&attachment("c2"), at(5)).is_some());
    assert!(agent.add(request("c2", "u1"), at(6)).is_ok());
    assert!(agent.add(request("c3", "u3"), at(6)).is_err());
    assert!(agent.del("c2", at(7)).is_some());
}

#[test]
fn an_exhausted_pool_reports_its_counts() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    for index in 0..13 {
        agent.add(request(index, &format!("u{index}")), at(0)).unwrap();
    }
    let error = agent.add(request("x", "ux"), at(1)).unwrap_err();
    assert_eq!((error.reason(), error.class()), ("pool-exhausted", ErrorClass::Transient));
    let text = error.to_string();
    assert!(text.contains("14 usable addresses, 13 in use, 1 reserved, 0 in quarantine"), "{text}");
    // Unconfirmed leases expire.
    assert!(agent.add(request("x", "ux"), at(599)).is_err());
    assert_eq!(agent.leases.next_deadline(), Some(at(600)));
    assert!(agent.add(request("x", "ux"), at(600)).is_ok());
    assert_eq!(agent.usage(), Usage { size: 14, used: 1, reserved: 1, quarantined: 12 });
}

// A DEL is queued without an agent. The agent is restarted, and an ADD for the same container is processed before the
// DEL.
#[test]
fn a_queued_del_does_not_release_a_lease_requested_later() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let first = agent.add(begun(moment(BOOT, 10)), at(10)).unwrap().lease;
    agent.confirm("c1", first.generation, at(11)).unwrap();
    // Requested again: it is the same lease, of an ADD that started after the DEL.
    let again = agent.add(begun(moment(BOOT, 21)), at(22)).unwrap().lease;
    assert_eq!(again.addresses, first.addresses);
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(23));
    assert_eq!(agent.del_begun(moment(BOOT, 20), at(23)), None);
    agent.confirm("c1", again.generation, at(24)).unwrap();
    assert_eq!(agent.del_begun(moment(BOOT, 20), at(25)), None);
    assert_eq!(agent.usage().used, 1);
    // A DEL of that lease, and one after an ADD that started before it and arrived late.
    assert!(agent.del_begun(moment(BOOT, 30), at(40)).is_some());
    agent.add(begun(moment(BOOT, 29)), at(41)).unwrap();
    assert!(agent.del_begun(moment(BOOT, 30), at(42)).is_some());
    assert_eq!(agent.usage().used, 0);
}

// The ADD that requested it again is killed between its lease and its confirmation, after the earlier DEL was
// processed.
#[test]
fn a_repeated_add_that_was_not_completed_expires_like_any_other() {
    let asked_again = || {
        let mut agent = Agent::start(network("10.66.1.16/28"));
        let lease = agent.add(begun(moment(BOOT, 10)), at(10)).unwrap().lease;
        agent.confirm("c1", lease.generation, at(11)).unwrap();
        let again = agent.add(begun(moment(BOOT, 21)), at(22)).unwrap().lease;
        assert!(matches!(again.state, LeaseState::Confirmed { .. }), "till then its pod may run");
        (agent, again.generation)
    };
    let (mut agent, generation) = asked_again();
    assert_eq!(agent.del_begun(moment(BOOT, 20), at(23)), None);
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(24));
    let unfinished = Agent::restart(agent.disk.clone(), network("10.66.1.16/28"), at(24));
    let changes = { unfinished }.leases.expire(at(23 + 600));
    assert!(changes.contains(&Change::Remove(RecordKey::Pod(attachment("c1")))), "{changes:?}");
    let confirmed = agent.confirm("c1", generation, at(25)).unwrap();
    assert_eq!(agent.del_begun(moment(BOOT, 20), at(26)), None);
    assert_eq!(agent.leases.check(&attachment("c1"), at(9_999)), Some(&confirmed));
    // Confirmed before that DEL is processed, with the same interface.
    let (mut agent, generation) = asked_again();
    let confirmed = agent.confirm("c1", generation, at(23)).unwrap();
    assert_eq!(agent.del_begun(moment(BOOT, 20), at(24)), None);
    assert_eq!(agent.leases.check(&attachment("c1"), at(9_999)), Some(&confirmed));
}

// The call of an ADD that timed out long ago is executed after that of the next.
#[test]
fn a_late_add_does_not_make_its_lease_older() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    agent.add(begun(moment(BOOT, 21)), at(22)).unwrap();
    let late = agent.add(begun(moment(BOOT, 10)), at(23)).unwrap().lease;
    agent.add(request("c1", "u1"), at(24)).unwrap();
    assert_eq!(agent.del_begun(moment(BOOT, 20), at(25)), None);
    let mut confirm = |generation| {
        let began = moment(BOOT, 10);
        agent.leases.confirm(&late.attachment, generation, interface(7), Some(&began), at(26)).answer
    };
    assert!(matches!(confirm(late.generation).unwrap().state, LeaseState::Provisional { .. }), "it is not its lease");
    let other = confirm(late.generation - 1);
    assert!(matches!(other, Err(ConfirmError::OtherGeneration { .. })), "its lease has ended: it has no address");
    assert_eq!(agent.usage().used, 1);
}

// The wall clock is years ahead in one boot and years behind in the next, and a DEL is queued across the reboot.
#[test]
fn the_effect_of_a_del_is_independent_of_the_wall_clock() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    agent.add(begun(moment("before", 900)), at(1_000_000)).unwrap();
    let restore = |agent: Agent| Agent::restore(agent.disk, network("10.66.1.16/28"), RecordTimes::BeginAnew, at(-9));
    // Its namespace was recreated before the agent started, so it was not dropped.
    let mut agent = restore(agent);
    assert!(agent.del_begun(moment("before", 901), at(-8)).is_some());
    agent.add(begun(moment("before", 902)), at(-7)).unwrap();
    let mut agent = restore(agent);
    assert!(agent.del_begun(moment(BOOT, 1), at(-6)).is_some());
    agent.add(begun(moment(BOOT, 2)), at(-5)).unwrap();
    let mut agent = restore(agent);
    assert_eq!(agent.del_begun(moment("before", 903), at(-4)), None);
    assert_eq!(agent.usage().used, 1);
    assert!(agent.del("c1", at(-3)).is_some(), "who does not say when it began is carried out");
}

#[test]
fn a_del_that_overtakes_its_add_makes_that_add_fail_and_no_later_one() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    assert_eq!(agent.del_begun(moment(BOOT, 10), at(10)), None);
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(11));
    let error = agent.add(request("c1", "u1"), at(12)).unwrap_err();
    assert_eq!((error.reason(), error.class()), ("overtaken-by-del", ErrorClass::Permanent));
    assert!(agent.add(begun(moment(BOOT, 10)), at(12)).is_err());
    assert_eq!(agent.usage().used, 0);
    // An earlier queued DEL does not make it older.
    agent.del_begun(moment(BOOT, 8), at(12));
    assert!(agent.add(begun(moment(BOOT, 9)), at(12)).is_err());
    // The runtime attaches the container again, knowing of its DEL, while that is queued.
    assert!(agent.add(begun(moment(BOOT, 11)), at(13)).is_ok());
    assert!(!agent.disk.contains_key(&RecordKey::Tombstone(attachment("c1"))));
    assert!(agent.add(request("c1", "u1"), at(14)).is_ok());
    // For plugins that do not report their start time the tombstone counts until it expires.
    agent.del("c9", at(20));
    assert!(agent.add(request("c9", "u9"), at(79)).is_err());
    assert!(agent.add(request("c9", "u9"), at(80)).is_ok());
    // A DEL that found its lease leaves none: the same container may be attached again at once.
    assert!(agent.del("c9", at(81)).is_some());
    assert!(agent.add(request("c9", "u9"), at(81)).is_ok());
}

// case: ipam P9
#[test]
fn a_repeated_del_never_takes_the_address_from_the_pod_that_has_it_now() {
    let mut agent = Agent::start(network("10.66.1.0/30"));
    let old = agent.add(request("old", "u1"), at(0)).unwrap();
    agent.confirm("old", old.lease.generation, at(1)).unwrap();
    assert!(agent.del("old", at(2)).is_some());
    // No other address is free, so the address is reallocated at once.
    let new = agent.add(request("new", "u2"), at(3)).unwrap();
    assert_eq!(address(&new), address(&old));
    let confirmed = agent.confirm("new", new.lease.generation, at(4)).unwrap();
    assert_eq!(agent.del("old", at(5)), None);
    assert_eq!(agent.del("old", at(6)), None);
    assert_eq!(agent.leases.check(&attachment("new"), at(7)), Some(&confirmed));
    assert!(agent.add(request("third", "u3"), at(8)).is_err());
}

// case: ipam P12
#[test]
fn a_hundred_sandboxes_of_one_pod_without_a_del_do_not_exhaust_a_pool_of_32() {
    let mut agent = Agent::start(network("10.66.1.0/27"));
    let mut addresses = BTreeSet::new();
    for index in 0..100 {
        let current = format!("/run/netns/{index}");
        let outcome = agent.leases.add(request(index, "u1"), |netns| netns == current, at(index), index as u64 * 977);
        let granted = agent.done(outcome).unwrap();
        addresses.insert(address(&granted));
        agent.confirm(&index.to_string(), granted.lease.generation, at(index)).unwrap();
        assert_eq!(agent.usage().used, 1);
    }
    assert!(addresses.len() > 10, "an address rests before it is given again");
}

#[test]
fn only_an_older_sandbox_of_the_same_uid_and_interface_without_namespace_is_superseded() {
    let mut agent = Agent::start(network("10.66.1.0/27"));
    let other_interface = AddRequest {
        attachment: Attachment { container_id: "a".to_owned(), ifname: "net1".to_owned() },
        ..request("a", "u1")
    };
    let nameless = AddRequest { pod: None, ..request("d", "u1") };
    let older_runtime = AddRequest {
        pod: Some(Pod { namespace: "ns".to_owned(), name: "pod".to_owned(), uid: None }),
        ..request("e", "u1")
    };
    for request in
        [request("a", "u1"), other_interface, request("b", "u1"), request("c", "u2"), nameless, older_runtime]
    {
        agent.add(request, at(0)).unwrap();
    }
    let gone = |netns: &str| netns != "/run/netns/a" && netns != "/run/netns/c" && netns != "/run/netns/e";
    let outcome = agent.leases.add(request("new", "u1"), gone, at(1), 4);
    agent.done(outcome).unwrap();
    let left: Vec<String> = agent.leases.pods().map(|lease| lease.attachment.to_string()).collect();
    assert_eq!(left, ["a/net1", "b/eth0", "c/eth0", "d/eth0", "e/eth0", "new/eth0"]);
    // Without a UID nothing is superseded.
    let outcome = agent.leases.add(AddRequest { pod: None, ..request("last", "") }, |_| false, at(2), 4);
    agent.done(outcome).unwrap();
    assert_eq!(agent.leases.pods().count(), 7);
}

#[test]
fn an_address_is_quarantined_across_a_restart_and_free_afterwards() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let lease = agent.add(request("c1", "u1"), at(0)).unwrap();
    agent.del("c1", at(1));
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(2));
    assert_eq!(agent.usage(), Usage { size: 14, used: 0, reserved: 1, quarantined: 1 });
    let row = agent.leases.snapshot().into_iter().find(|row| row.address == address(&lease)).unwrap();
    assert_eq!((row.state, row.until), (RowState::Quarantined, Some(at(31))));
    let changes = agent.leases.expire(at(31));
    assert_eq!(changes, [Change::Remove(RecordKey::Quarantine(address(&lease)))]);
    assert_eq!(agent.usage().free(), 13);
}

#[test]
fn a_clock_that_was_set_back_does_not_prolong_timers() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    agent.add(request("c1", "u1"), at(1_000_000)).unwrap();
    agent.add(request("c2", "u2"), at(1_000_000)).unwrap();
    agent.del("c2", at(1_000_000));
    agent.del("c3", at(1_000_000));
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(0));
    agent.leases.expire(at(60));
    assert_eq!(agent.usage().quarantined, 0);
    assert!(agent.add(request("c3", "u3"), at(61)).is_ok());
    agent.leases.expire(at(600));
    assert!(agent.leases.check(&attachment("c1"), at(600)).is_none());
}

#[test]
fn after_a_reboot_all_timers_restart_with_any_clock() {
    const YEAR: i64 = 31_536_000;
    for jump in [-20 * YEAR, -100, 0, 5, 20 * YEAR] {
        let mut agent = Agent::start(network("10.66.1.16/28"));
        agent.add(request("c1", "u1"), at(0)).unwrap();
        agent.add(request("c2", "u2"), at(0)).unwrap();
        agent.del("c2", at(10));
        agent.del("c3", at(10));
        let outcome = agent.leases.allocate_for_owner(owner_request(None, true), at(10), 5);
        agent.done(outcome).unwrap();
        let boot = |second| at(10 + jump + second);
        let agent = Agent::restore(agent.disk, network("10.66.1.16/28"), RecordTimes::BeginAnew, boot(0));
        // The agent is restarted right after: the restarted timers are on disk.
        let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), boot(20));
        assert_eq!(agent.usage(), Usage { size: 14, used: 2, reserved: 1, quarantined: 1 }, "{jump}");
        agent.leases.expire(boot(29));
        assert_eq!(agent.usage().quarantined, 1, "{jump}");
        agent.leases.expire(boot(30));
        assert_eq!(agent.usage().quarantined, 0, "{jump}");
        assert!(agent.add(request("c3", "u3"), boot(59)).is_err(), "{jump}");
        assert!(agent.add(request("c3", "u3"), boot(60)).is_ok(), "{jump}");
        agent.leases.expire(boot(599));
        assert_eq!(agent.usage().used, 3, "{jump}");
        agent.leases.expire(boot(600));
        assert_eq!(agent.usage().used, 1, "{jump}");
    }
}

#[test]
fn on_a_full_disk_removals_are_done_and_records_follow_when_there_is_space() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    for container in ["a", "b"] {
        let lease = agent.add(request(container, container), at(0)).unwrap().lease;
        agent.confirm(container, lease.generation, at(0)).unwrap();
    }
    let mut disk = agent.disk.clone();
    let full = |disk: &mut BTreeMap<RecordKey, String>, change: &Change| match change {
        Change::Put(_) => Err("no space"),
        Change::Remove(key) => {
            disk.remove(key);
            Ok(())
        }
    };
    let mut owed = Owed::default();
    owed.extend(agent.leases.add(request("c", "c"), |_| true, at(1), 4).changes);
    assert_eq!(owed.write(|change| full(&mut disk, change)), Err("no space"));
    assert!(owed.owes(&RecordKey::Pod(attachment("c"))));
    // Repeated requests do not accumulate pending changes.
    for second in 2..50 {
        owed.extend(agent.leases.add(request("c", "c"), |_| true, at(second), 4).changes);
        assert_eq!((owed.write(|change| full(&mut disk, change)), owed.len()), (Err("no space"), 1));
    }
    owed.extend(agent.leases.del(&attachment("a"), None, at(50)).changes);
    assert!(owed.write(|change| full(&mut disk, change)).is_err());
    assert!(!disk.contains_key(&RecordKey::Pod(attachment("a"))) && !owed.owes(&RecordKey::Pod(attachment("a"))));
    // The failed ADD is reverted: only the quarantine of its address is pending.
    owed.extend(agent.leases.del(&attachment("c"), None, at(51)).changes);
    assert!(owed.write(|change| full(&mut disk, change)).is_err());
    assert_eq!(owed.len(), 2, "{owed:?}");
    let mut written = Vec::new();
    assert_eq!(
        owed.write(|change| {
            written.push(change.key());
            Ok::<_, ()>(())
        }),
        Ok(())
    );
    assert!(owed.is_empty() && written.iter().all(|key| matches!(key, RecordKey::Quarantine(_))), "{written:?}");
    // A removal frees space for a record.
    let mut space = 0;
    owed.extend(agent.leases.del(&attachment("b"), None, at(52)).changes);
    assert_eq!(
        owed.write(|change| match change {
            Change::Put(_) if space == 0 => Err(()),
            Change::Put(_) => {
                space -= 1;
                Ok(())
            }
            Change::Remove(_) => {
                space += 1;
                Ok(())
            }
        }),
        Ok(())
    );
}

#[test]
fn leases_keep_their_addresses_when_the_pod_cidr_changes() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let old = agent.add(request("old", "u1"), at(0)).unwrap();
    agent.confirm("old", old.lease.generation, at(1)).unwrap();
    let old_router = agent.leases.router();
    let outcome = agent.leases.set_network(network("10.99.0.0/24"), at(2), 3);
    let findings = agent.done(outcome);
    let [Finding::OutsidePodCidr { address: outside, .. }, Finding::RouterReplaced { old: router, new, .. }] =
        &findings[..]
    else {
        panic!("{findings:?}");
    };
    assert_eq!((*outside, Some(*router)), (address(&old), old_router.iter().next()));
    let inside: Ipv4Net = "10.99.0.0/24".parse().unwrap();
    assert!(IpNet::from(inside).contains(new));
    let fresh = agent.add(request("new", "u2"), at(3)).unwrap();
    assert!(inside.contains(&fresh.lease.addresses.ipv4.unwrap()));
    assert_eq!(agent.add(request("old", "u1"), at(4)).unwrap().lease.addresses, old.lease.addresses);
    assert_eq!(agent.del("old", at(5)).unwrap().addresses, old.lease.addresses);
    // Switched back during the quarantine: the address is still quarantined, and the lease is allocated.
    let outcome = agent.leases.set_network(network("10.66.1.16/28"), at(6), 3);
    agent.done(outcome);
    assert_eq!(agent.usage(), Usage { size: 14, used: 0, reserved: 1, quarantined: 1 });
    let outcome = agent.leases.set_network(network("10.66.1.16/28"), at(6), 3);
    assert_eq!((outcome.answer, outcome.changes), (vec![], vec![]));
}

#[test]
fn the_router_address_is_kept_from_our_records_then_from_elsewhere_and_else_drawn() {
    let routers = |text: &str| Addresses { ipv4: Some(text.parse().unwrap()), ipv6: None };
    let seen = |list: &[&str]| Network {
        seen_routers: list.iter().map(|text| routers(text)).collect(),
        ..network("10.66.1.16/28")
    };
    // From elsewhere: the first suitable one.
    let agent = Agent::start(seen(&["10.66.1.20", "10.66.1.21"]));
    assert_eq!(agent.leases.router(), routers("10.66.1.20"));
    assert_eq!(agent.findings, [Finding::RouterMismatch { used: ip("10.66.1.20"), other: ip("10.66.1.21") }]);
    // Our record has precedence.
    let agent = Agent::restart(agent.disk, seen(&["10.66.1.25"]), at(1));
    assert_eq!(agent.leases.router(), routers("10.66.1.20"));
    assert_eq!(agent.findings, [Finding::RouterMismatch { used: ip("10.66.1.20"), other: ip("10.66.1.25") }]);
    // One outside the pod CIDR belongs to another node.
    let agent = Agent::start(seen(&["10.9.9.9"]));
    let [Finding::RouterReplaced { old, new, .. }] = &agent.findings[..] else { panic!("{:?}", agent.findings) };
    assert_eq!((*old, Some(*new)), (ip("10.9.9.9"), agent.leases.router().iter().next()));
    // A running pod's address has precedence over the router's.
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let lease = agent.add(request("c1", "u1"), at(0)).unwrap();
    let mut disk = agent.disk.clone();
    disk.remove(&RecordKey::Router(Family::Ipv4));
    let agent = Agent::restart(disk, seen(&[&address(&lease).to_string()]), at(1));
    assert_ne!(agent.leases.router().iter().next(), Some(address(&lease)));
    assert!(matches!(&agent.findings[..], [Finding::RouterReplaced { .. }]), "{:?}", agent.findings);
    // Configured: used unchanged, inside or outside.
    let configured = |text: &str| Network { configured_router: routers(text), ..network("10.66.1.16/28") };
    let agent = Agent::start(configured("169.254.23.0"));
    assert_eq!((agent.leases.router(), agent.findings.len()), (routers("169.254.23.0"), 0));
    assert_eq!(agent.usage().reserved, 0);
    let agent = Agent::start(configured("10.66.1.17"));
    assert!(matches!(&agent.findings[..], [Finding::RouterInsidePodCidr { .. }]), "{:?}", agent.findings);
    assert_eq!(agent.usage().reserved, 1);
}

#[test]
fn a_router_address_is_found_as_soon_as_one_is_free() {
    let mut agent = Agent::start(network("10.66.1.4/31"));
    let lease = agent.add(request("c1", "u1"), at(0)).unwrap();
    // The next pod CIDR consists of the pod's own address.
    let narrow =
        Network { ipv4: Some(Ipv4Net::new(lease.lease.addresses.ipv4.unwrap(), 32).unwrap()), ..Network::default() };
    let outcome = agent.leases.set_network(narrow, at(1), 0);
    let findings = agent.done(outcome);
    assert!(matches!(&findings[..], [Finding::NoRouter { .. }]), "{findings:?}");
    let error = agent.add(request("c2", "u2"), at(2)).unwrap_err();
    assert_eq!((error.reason(), error.class()), ("no-router", ErrorClass::Transient));
    agent.del("c1", at(3));
    assert_eq!(agent.add(request("c2", "u2"), at(4)).unwrap_err().reason(), "pool-exhausted");
    assert_eq!(agent.leases.router(), lease.lease.addresses);
    assert!(!agent.disk.contains_key(&RecordKey::Quarantine(address(&lease))));
}

#[test]
fn an_excluded_address_that_a_pod_has_is_excluded_when_the_pod_ends() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let lease = agent.add(request("c1", "u1"), at(0)).unwrap();
    let exclusions = vec![Exclusion { address: address(&lease), label: "node-ip".to_owned(), of_pod: false }];
    let outcome = agent.leases.set_network(Network { exclusions, ..network("10.66.1.16/28") }, at(1), 3);
    let findings = agent.done(outcome);
    assert!(matches!(&findings[..], [Finding::ExclusionHeld { .. }]), "{findings:?}");
    assert!(agent.del("c1", at(2)).is_some());
    assert_eq!(agent.usage(), Usage { size: 14, used: 0, reserved: 2, quarantined: 0 });
    let row = agent.leases.snapshot().into_iter().find(|row| row.address == address(&lease)).unwrap();
    assert_eq!((row.state, row.holder.as_str()), (RowState::Reserved, "node-ip"));
}

#[test]
fn suspending_allocation_only_affects_new_addresses() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let lease = agent.add(request("c1", "u1"), at(0)).unwrap().lease;
    agent.leases.hold_back(Some("node-b lists the same block".to_owned()));
    assert!(agent.add(request("c1", "u1"), at(1)).is_ok());
    assert!(agent.confirm("c1", lease.generation, at(1)).is_ok());
    let error = agent.add(request("c2", "u2"), at(1)).unwrap_err();
    assert_eq!(error.reason(), "held-back");
    assert!(error.to_string().contains("node-b"));
    agent.leases.hold_back(None);
    assert!(agent.add(request("c2", "u2"), at(2)).is_ok());
}

#[test]
fn gc_releases_invalid_leases_and_a_reboot_those_without_namespace() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    for container in ["a", "b", "c"] {
        agent.add(request(container, container), at(0)).unwrap();
    }
    for (container, network) in [("d", Some("other")), ("e", None)] {
        let network = network.map(str::to_owned);
        agent.add(AddRequest { network, ..request(container, container) }, at(0)).unwrap();
    }
    let mut collect = |network: &str, valid: &[&str], exists: &dyn Fn(&str) -> bool| {
        let valid = valid.iter().copied().map(attachment).collect();
        let request = CollectRequest { network: network.to_owned(), valid, began: None };
        let outcome = agent.leases.collect(&request, exists, at(1));
        agent.done(outcome).into_iter().map(|lease| lease.attachment).collect::<Vec<_>>()
    };
    assert_eq!(collect("cistern", &["a", "c", "z"], &|_| true), [attachment("b")], "whatever its namespace");
    assert_eq!(collect("other", &[], &|_| true), [], "a runtime that lost its state, and a pod that runs");
    assert_eq!(collect("other", &[], &|_| false), [attachment("d")], "of its own network a GC knows everything");
    let outcome = agent.leases.drop_gone(|netns| netns.ends_with("/a"), at(2));
    assert_eq!(agent.done(outcome).len(), 2);
    assert_eq!(agent.leases.pods().map(|lease| &lease.attachment).collect::<Vec<_>>(), [&attachment("a")]);
}

#[test]
fn collecting_leaves_what_was_asked_for_since_it_began() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let began = |uptime_ns| Some(Moment { boot: "boot".to_owned(), uptime_ns });
    for (container, uptime_ns) in [("a", 1), ("b", 3)] {
        agent.add(AddRequest { began: began(uptime_ns), ..request(container, container) }, at(0)).unwrap();
    }
    let valid = BTreeSet::from([attachment("z")]);
    let gc = CollectRequest { network: "cistern".to_owned(), valid, began: began(2) };
    let outcome = agent.leases.collect(&gc, |_| true, at(1));
    let ended: Vec<Attachment> = agent.done(outcome).into_iter().map(|lease| lease.attachment).collect();
    assert_eq!(ended, [attachment("a")]);
}

#[test]
fn the_gateway_on_a_bridge_of_another_plugin_remains_the_router_s() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let router = agent.leases.router();
    let address = router.ipv4.unwrap().into();
    let on_bridge = Network {
        exclusions: vec![Exclusion { address, label: "node-ip".to_owned(), of_pod: false }],
        ..network("10.66.1.16/28")
    };
    let outcome = agent.leases.set_network(on_bridge.clone(), at(1), 3);
    assert_eq!(agent.done(outcome), []);
    let agent = Agent::restart(agent.disk, on_bridge, at(2));
    assert_eq!((agent.leases.router(), agent.findings), (router, vec![]));
}

fn owner_request(family: Option<Family>, uuids: bool) -> OwnerRequest {
    OwnerRequest {
        family,
        owner: "ns/pod".to_owned(),
        pool: None,
        expiration: uuids.then(|| ExpirationIds { ipv4: "uuid-4".to_owned(), ipv6: "uuid-6".to_owned() }),
    }
}

fn dual() -> Network {
    Network {
        ipv4: Some("10.66.1.16/28".parse().unwrap()),
        ipv6: Some("fd66::/120".parse().unwrap()),
        ..Network::default()
    }
}

// case: ipam P1
#[test]
fn a_request_by_owner_without_family_allocates_one_of_each_with_timers() {
    let mut agent = Agent::start(dual());
    let outcome = agent.leases.allocate_for_owner(owner_request(None, true), at(0), 5);
    let leases = agent.done(outcome).unwrap();
    let [v4, v6] = &leases[..] else { panic!("{leases:?}") };
    assert!(v4.address.is_ipv4() && v6.address.is_ipv6());
    assert_eq!((v4.pool.as_str(), v4.owner.as_str()), ("default", "ns/pod"));
    assert_eq!(v4.expiration, Some(Expiration { uuid: "uuid-4".to_owned(), at: at(600) }));
    assert_eq!(v6.expiration, Some(Expiration { uuid: "uuid-6".to_owned(), at: at(600) }));
    let outcome = agent.leases.allocate_for_owner(owner_request(Some(Family::Ipv6), false), at(0), 5);
    let leases = agent.done(outcome).unwrap();
    assert!(leases.len() == 1 && leases[0].address.is_ipv6() && leases[0].expiration.is_none());
    let mut unknown = owner_request(None, false);
    unknown.pool = Some("gold".to_owned());
    let outcome = agent.leases.allocate_for_owner(unknown, at(0), 5);
    assert_eq!(agent.done(outcome), Err(OwnerError::UnknownPool { pool: "gold".to_owned() }));
    // A pod gets one of each, too.
    let pod = agent.add(request("c1", "u1"), at(0)).unwrap();
    assert!(pod.lease.addresses.ipv4.is_some() && pod.lease.addresses.ipv6.is_some());
    assert!(pod.router.ipv4.is_some() && pod.router.ipv6.is_some());
}

// case: ipam P2
#[test]
fn exhaustion_by_owner_reports_the_counts_and_allocates_nothing() {
    let mut agent = Agent::start(Network { ipv4: Some("10.66.1.4/31".parse().unwrap()), ..dual() });
    let outcome = agent.leases.allocate_for_owner(owner_request(None, false), at(0), 5);
    agent.done(outcome).unwrap();
    let before = (agent.leases.usage(), agent.disk.clone());
    let outcome = agent.leases.allocate_for_owner(owner_request(None, false), at(1), 5);
    let error = agent.done(outcome).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Transient);
    assert!(error.to_string().contains("range full: 10.66.1.4/31 has 2 usable addresses"), "{error}");
    assert_eq!((agent.leases.usage(), agent.disk.clone()), before);
}

// case: ipam P3
#[test]
fn releasing_by_address_only_affects_allocations_by_owner() {
    let mut agent = Agent::start(dual());
    let pod = agent.add(request("c1", "u1"), at(0)).unwrap();
    let outcome = agent.leases.release_for_owner(address(&pod), "default", at(1));
    let error = agent.done(outcome).unwrap_err();
    assert_eq!(error, OwnerError::InUse { address: address(&pod), attachment: attachment("c1") });
    assert!(error.to_string().contains("in use by endpoint c1/eth0"));
    let router = agent.leases.router().iter().next().unwrap();
    for not_given in [router, ip("10.66.1.30"), ip("192.0.2.1")] {
        let outcome = agent.leases.release_for_owner(not_given, "default", at(1));
        assert!(matches!(agent.done(outcome), Err(OwnerError::NotAllocated { .. })));
    }
    let free = ip("10.66.1.29");
    let outcome = agent.leases.allocate_address_for_owner(free, "ns/other".to_owned(), "default", at(2));
    assert_eq!(agent.done(outcome).unwrap().address, free);
    for (taken, expected) in [(free, "owner ns/other"), (address(&pod), "c1/eth0")] {
        let outcome = agent.leases.allocate_address_for_owner(taken, "ns/third".to_owned(), "default", at(2));
        let error = agent.done(outcome).unwrap_err();
        assert!(error.to_string().contains(&format!("already allocated to {expected}")), "{error}");
    }
    let outcome = agent.leases.allocate_address_for_owner(router, "ns/third".to_owned(), "default", at(2));
    assert!(matches!(agent.done(outcome), Err(OwnerError::Address(AddressError::Excluded { .. }))));
    let outcome = agent.leases.release_for_owner(free, "gold", at(3));
    assert!(matches!(agent.done(outcome), Err(OwnerError::NotAllocated { .. })), "the pool is part of the key");
    let mut agent = Agent::restart(agent.disk, dual(), at(3));
    let outcome = agent.leases.release_for_owner(free, "default", at(3));
    assert_eq!(agent.done(outcome).unwrap().owner, "ns/other");
    let outcome = agent.leases.release_for_owner(free, "default", at(4));
    assert!(agent.done(outcome).is_err(), "released already");
}

// case: ipam P5
#[test]
fn a_timer_releases_the_address_unless_its_uuid_stopped_it() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let mut allocate = |uuid: &str| {
        let mut request = owner_request(None, true);
        request.expiration = Some(ExpirationIds { ipv4: uuid.to_owned(), ipv6: String::new() });
        let outcome = agent.leases.allocate_for_owner(request, at(0), 5);
        agent.done(outcome).unwrap().remove(0).address
    };
    let (kept, lost) = (allocate("right"), allocate("other"));
    // Timers survive a restart of the agent.
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(10));
    let mut stop = |address, pool: &str, uuid: &str| {
        let outcome = agent.leases.stop_expiration(address, pool, uuid, at(11));
        agent.done(outcome)
    };
    assert!(matches!(stop(kept, "default", "wrong"), Err(OwnerError::OtherTimer { .. })));
    assert!(matches!(stop(kept, "gold", "right"), Err(OwnerError::NoTimer { .. })));
    assert_eq!(stop(kept, "default", "right"), Ok(()));
    let error = stop(kept, "default", "right").unwrap_err();
    assert!(error.to_string().contains("no expiration timer registered"), "{error}");
    assert_eq!(agent.leases.next_deadline(), Some(at(600)));
    let changes = agent.leases.expire(at(599));
    assert!(changes.is_empty());
    let changes = agent.leases.expire(at(600));
    assert!(changes.contains(&Change::Remove(RecordKey::Owner("default".to_owned(), lost))), "{changes:?}");
    assert_eq!(agent.usage(), Usage { size: 14, used: 1, reserved: 1, quarantined: 1 });
    let outcome = agent.leases.stop_expiration(lost, "default", "other", at(601));
    assert!(matches!(agent.done(outcome), Err(OwnerError::NoTimer { .. })));
}

#[test]
fn of_two_recorded_holders_the_younger_is_kept_and_the_other_reported() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let old = agent.add(request("old", "u1"), at(0)).unwrap().lease;
    let mut young = agent.add(request("young", "u2"), at(0)).unwrap().lease;
    young.addresses = old.addresses;
    let forged = Record::Pod(young);
    agent.disk.insert(forged.key(), forged.to_json().unwrap());
    let agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(1));
    let address = old.addresses.iter().next().unwrap();
    let (kept, dropped) = ("young/eth0".to_owned(), "old/eth0".to_owned());
    assert_eq!(agent.findings, [Finding::TwoHolders { address, kept, dropped }]);
    assert_eq!(agent.leases.pods().count(), 1);
    assert!(!agent.disk.contains_key(&RecordKey::Pod(attachment("old"))));
}

#[test]
fn records_are_read_as_written_and_other_formats_are_rejected() {
    let mut agent = Agent::start(dual());
    let lease = agent.add(request("c1", "u1"), at(0)).unwrap().lease;
    agent.confirm("c1", lease.generation, at(1)).unwrap();
    agent.add(request("c2", "u2"), at(0)).unwrap();
    agent.del("c2", at(1));
    agent.del("c3", at(1));
    let outcome = agent.leases.allocate_for_owner(owner_request(None, true), at(0), 5);
    agent.done(outcome).unwrap();
    let kinds: BTreeSet<&str> = agent.disk.values().map(|text| text.split('"').nth(7).unwrap()).collect();
    assert_eq!(kinds, BTreeSet::from(["grant", "owner", "pod", "quarantine", "router", "tombstone"]));
    for (key, text) in &agent.disk {
        let record = read(text);
        assert_eq!((&record.key(), &record.to_json().unwrap()), (key, text));
        assert!(text.starts_with(r#"{"format":2,"oldest_reader":2,"kind":"#), "{text}");
        for length in 0..text.len() {
            assert!(Record::from_json(&text[..length]).is_err());
        }
        // The release before wrote the same without an oldest reader, and no grants.
        let before = text.replace(r#"{"format":2,"oldest_reader":2,"#, r#"{"format":1,"#);
        assert_eq!(Record::from_json(&before).unwrap(), Stored::Older(record.clone()));
        // A later one adds fields, and says that this one may ignore them.
        let later = text.replace(r#"{"format":2,"#, r#"{"more":[1],"format":3,"#);
        assert_eq!(Record::from_json(&later).unwrap(), Stored::Current(record));
    }
    let unknown = Record::from_json(r#"{"format":3,"oldest_reader":2,"kind":"new","field":[]}"#).unwrap();
    assert_eq!(unknown, Stored::Unknown { kind: "new".to_owned() });
    let error = Record::from_json(r#"{"format":3,"oldest_reader":3,"kind":"pod"}"#).unwrap_err();
    assert!(matches!(error, RecordError::Format(_)) && error.to_string().contains("format 3"), "{error}");
    assert!(matches!(Record::from_json(r#"{"format":2,"kind":"new"}"#), Err(RecordError::Damaged(_))));
}

#[test]
fn a_pod_cidr_is_recorded_before_anything_of_it_and_exchanged_without_a_gap() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let old = RecordKey::Grant(DEFAULT_POOL.to_owned(), "10.66.1.16/28".parse().unwrap());
    let new = RecordKey::Grant(DEFAULT_POOL.to_owned(), "10.99.0.0/24".parse().unwrap());
    let changes = agent.leases.set_network(network("10.99.0.0/24"), at(1), 3).changes;
    let of_grants: Vec<&Change> =
        changes.iter().filter(|change| matches!(change.key(), RecordKey::Grant(..))).collect();
    let [Change::Put(Record::Grant(drains)), Change::Put(Record::Grant(serves)), Change::Remove(gone)] = &of_grants[..]
    else {
        panic!("{of_grants:?}");
    };
    assert_eq!((drains.state, serves.state), (GrantState::Draining, GrantState::Active));
    assert_eq!(
        (Record::Grant(drains.clone()).key(), Record::Grant(serves.clone()).key(), gone),
        (old.clone(), new.clone(), &old)
    );
    // After each of the writes a restart serves one of the two.
    for count in 0..=changes.len() {
        let mut disk = agent.disk.clone();
        write(&mut disk, &changes[..count]);
        let records: Vec<Record> = disk.values().map(|text| read(text)).collect();
        let timings = Timings::default();
        let restored = Leases::restore(records, timings, RecordTimes::Continue, BOOT.to_owned(), at(2)).leases;
        let served = restored.supply().served(DEFAULT_POOL, Family::Ipv4).unwrap();
        let active = restored.supply().grants().filter(|grant| grant.state == GrantState::Active).count();
        assert!(active <= 1, "{count}: {:?}", restored.supply());
        assert_eq!(served.net == serves.net, disk.contains_key(&new), "{count}");
    }
}

#[test]
fn a_pod_cidr_that_is_left_out_drains_as_long_as_something_holds_an_address_of_it() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    agent.add(request("c1", "u1"), at(0)).unwrap();
    let next = Supply::of_grants([Grant::new("10.99.0.0/24".parse().unwrap())]);
    let set = |agent: &mut Agent, second| {
        let outcome = agent.leases.set_supply(next.clone(), Surroundings::default(), at(second), 3);
        agent.done(outcome).still_held
    };
    let held: IpNet = "10.66.1.16/28".parse().unwrap();
    assert_eq!((set(&mut agent, 1), set(&mut agent, 2)), (vec![held], vec![held]));
    assert!(agent.disk.contains_key(&RecordKey::Grant(DEFAULT_POOL.to_owned(), held)));
    agent.del("c1", at(3));
    assert_eq!(set(&mut agent, 4), []);
    assert!(!agent.disk.contains_key(&RecordKey::Grant(DEFAULT_POOL.to_owned(), held)));
}

#[test]
fn a_pod_without_a_record_that_the_datapath_knows_keeps_its_address_until_the_reboot() {
    let mut agent = Agent::start(network("10.66.1.16/28"));
    let taken = agent.add(request("c1", "u1"), at(0)).unwrap();
    let outcome = agent.leases.adopt(address(&taken), 7, at(1));
    assert_eq!(agent.done(outcome), None);
    let lost = ip("10.66.1.30");
    let outcome = agent.leases.adopt(lost, 7, at(1));
    assert_eq!(agent.done(outcome).unwrap().addresses.iter().next(), Some(lost));
    let mut agent = Agent::restart(agent.disk, network("10.66.1.16/28"), at(2));
    let row = agent.leases.snapshot().into_iter().find(|row| row.address == lost).unwrap();
    assert_eq!(row.state, RowState::Confirmed);
    let named = agent.leases.allocate_address_for_owner(lost, "ns/x".to_owned(), DEFAULT_POOL, at(3));
    assert!(agent.done(named).is_err());
    let outcome = agent.leases.drop_gone(|_| false, at(4));
    assert_eq!(agent.done(outcome).len(), 2);
}

#[test]
fn the_snapshot_has_a_reason_for_each_address() {
    let mut agent = Agent::start(Network {
        exclusions: vec![
            Exclusion { address: ip("10.66.1.20"), label: "node-ip".to_owned(), of_pod: false },
            Exclusion { address: ip("192.0.2.1"), label: "node-ip".to_owned(), of_pod: false },
        ],
        ..network("10.66.1.16/28")
    });
    let first = agent.add(request("c1", "u1"), at(0)).unwrap().lease;
    agent.confirm("c1", first.generation, at(1)).unwrap();
    agent.add(request("c2", "u2"), at(0)).unwrap();
    agent.add(request("c3", "u3"), at(0)).unwrap();
    agent.del("c3", at(2));
    let outcome = agent.leases.allocate_for_owner(owner_request(None, false), at(0), 5);
    agent.done(outcome).unwrap();
    let rows = agent.leases.snapshot();
    assert!(rows.is_sorted_by_key(|row| row.address));
    let states: Vec<(RowState, &str)> = rows.iter().map(|row| (row.state, row.holder.as_str())).collect();
    for expected in [
        (RowState::Confirmed, "c1/eth0"),
        (RowState::Provisional, "c2/eth0"),
        (RowState::Quarantined, "c3/eth0"),
        (RowState::Owner, "ns/pod"),
        (RowState::Reserved, "router"),
        (RowState::Reserved, "node-ip"),
    ] {
        assert!(states.contains(&expected), "{expected:?} in {states:?}");
    }
    assert_eq!(rows.len(), 6);
    let confirmed = rows.iter().find(|row| row.state == RowState::Confirmed).unwrap();
    assert_eq!(confirmed.pod.as_ref().map(ToString::to_string).as_deref(), Some("ns/pod"));
    assert_eq!((confirmed.since, confirmed.until, confirmed.why.as_str()), (Some(at(1)), None, "in use behind cst7"));
}

// Calls of a runtime and of pods against the state machine, with a process that may terminate between any two writes, a
// disk that may be full, a machine that may be rebooted, and an arbitrary wall clock afterwards.

#[derive(Debug, Clone)]
enum Step {
    Add {
        sandbox: u8,
    },
    Confirm {
        sandbox: u8,
    },
    Del {
        sandbox: u8,
    },
    /// The sandbox's namespace and device are lost without a DEL.
    Vanish {
        sandbox: u8,
    },
    Wait {
        seconds: u16,
    },
    Renumber {
        cidr: u8,
    },
    Collect,
    Audit,
    OwnerAllocate {
        timer: bool,
    },
    OwnerStopTimer {
        pick: u8,
    },
    OwnerRelease {
        pick: u8,
    },
    Disk {
        full: bool,
    },
    /// All namespaces are lost, and the clock is arbitrary.
    Reboot {
        second: i64,
    },
}

/// The second extends the first, the third is the other half of the second; the last is elsewhere.
const CIDRS: [&str; 4] = ["10.66.1.16/29", "10.66.1.16/28", "10.66.1.24/29", "10.99.0.0/29"];

const DECADE: i64 = 315_360_000;

fn steps() -> impl Strategy<Value = Vec<(Step, Option<u8>, u64)>> {
    let step = prop_oneof![
        10 => (0_u8..12).prop_map(|sandbox| Step::Add { sandbox }),
        8 => (0_u8..12).prop_map(|sandbox| Step::Confirm { sandbox }),
        5 => (0_u8..12).prop_map(|sandbox| Step::Del { sandbox }),
        2 => (0_u8..12).prop_map(|sandbox| Step::Vanish { sandbox }),
        3 => prop_oneof![1_u16..40, Just(100), Just(700)].prop_map(|seconds| Step::Wait { seconds }),
        1 => (0_u8..4).prop_map(|cidr| Step::Renumber { cidr }),
        1 => Just(Step::Collect),
        3 => Just(Step::Audit),
        1 => any::<bool>().prop_map(|timer| Step::OwnerAllocate { timer }),
        1 => (0_u8..4).prop_map(|pick| Step::OwnerStopTimer { pick }),
        1 => (0_u8..4).prop_map(|pick| Step::OwnerRelease { pick }),
        1 => any::<bool>().prop_map(|full| Step::Disk { full }),
        1 => (-5 * DECADE..5 * DECADE).prop_map(|second| Step::Reboot { second }),
    ];
    // Per step: the number of writes after which the process terminates, if it does; and the draw.
    proptest::collection::vec((step, proptest::option::weighted(0.2, 0_u8..4), any::<u64>()), 1..60)
}

fn device(sandbox: impl fmt::Display) -> String {
    format!("cst{sandbox:0>11}")
}

/// What was answered, and must hold.
#[derive(Default)]
struct World {
    /// Pods that got an address, with the expiry unless confirmed.
    live: BTreeMap<Attachment, (Addresses, u64, Option<Timestamp>)>,
    /// Addresses allocated by owner, with the expiry of their timers.
    owned: BTreeMap<IpAddr, Option<Timestamp>>,
    /// Existing namespaces, and thereby devices.
    sandboxes: BTreeSet<String>,
    /// The owner of each address after the last step, and when an address was last released.
    held: BTreeMap<IpAddr, String>,
    freed: BTreeMap<IpAddr, Timestamp>,
}

/// The agent's process with its pending changes.
struct Process {
    agent: Agent,
    owed: Owed,
    audit: Audit,
    full: bool,
}

impl Process {
    /// Writes until nothing is pending, the disk fails, or the process terminates. Returns whether everything is
    /// written.
    fn write(&mut self, changes: Vec<Change>, mut left: Option<u8>) -> bool {
        self.owed.extend(changes);
        let (disk, full) = (&mut self.agent.disk, self.full);
        let outcome = self.owed.write(|change| {
            match (&mut left, change) {
                (Some(0), _) => return Err("the process has ended"),
                (_, Change::Put(_)) if full => return Err("no space"),
                (Some(left), _) => *left -= 1,
                (None, _) => {}
            }
            write(disk, std::slice::from_ref(change));
            Ok(())
        });
        outcome.is_ok()
    }

    fn restart(self, cidr: usize, times: RecordTimes, now: Timestamp) -> Self {
        let agent = Agent::restore(self.agent.disk, network(CIDRS[cidr]), times, now);
        Self { agent, owed: Owed::default(), audit: Audit::default(), full: self.full }
    }

    fn audited(&mut self, sandboxes: &BTreeSet<String>, now: Timestamp) -> Vec<Change> {
        let links = sandboxes
            .iter()
            .map(|path| (device(path.trim_start_matches("/run/netns/")), HostLink { ifindex: 1, address: None }));
        let links = links.collect();
        let namespace = |netns: &str| if sandboxes.contains(netns) { Namespace::There } else { Namespace::Gone };
        let host_side = |attachment: &Attachment| device(&attachment.container_id);
        let seen = Seen { links: &links, namespace: &namespace, host_side: &host_side };
        let audited = self.audit.look(self.agent.leases.pods(), &seen, now);
        self.agent.leases.end_lost(&audited.lost, now).changes
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(histories()))]

    // What `ipam` 7.2 asks for in its items 1, 2, 3 and 9.
    #[test]
    fn an_address_has_one_owner_and_what_was_answered_holds_whenever_the_process_ends(steps in steps()) {
        let mut cidr = 0;
        let mut now = at(0);
        let agent = Agent::start(network(CIDRS[0]));
        let mut process = Process { agent, owed: Owed::default(), audit: Audit::default(), full: false };
        let mut world = World::default();
        for (step, crash, draw) in steps {
            now = later(now, Duration::from_secs(1));
            // Twelve sandboxes of four pods.
            let request = |sandbox: u8| request(sandbox, &format!("u{}", sandbox % 4));
            // A restart with a full disk can lose: records that were not written, whose calls were not answered, and
            // the quarantine of addresses whose leases were removed first.
            let can_lose = !process.owed.is_empty() || process.full;
            let leases = &mut process.agent.leases;
            let mut answered: Vec<PodLease> = Vec::new();
            let mut owners: Vec<OwnerLease> = Vec::new();
            let mut stopped = None;
            let changes: Vec<Change> = match &step {
                Step::Add { sandbox } => {
                    world.sandboxes.insert(format!("/run/netns/{sandbox}"));
                    let exists = |netns: &str| world.sandboxes.contains(netns);
                    let outcome = leases.add(request(*sandbox), exists, now, draw);
                    answered.extend(outcome.answer.map(|granted| granted.lease));
                    outcome.changes
                }
                Step::Confirm { sandbox } => {
                    let attachment = attachment(sandbox);
                    let generation = world.live.get(&attachment).map_or(0, |(_, generation, _)| *generation);
                    let interface = PodAttachment::Pair(Interface { host_ifname: device(sandbox), ..pair(3) });
                    let outcome = leases.confirm(&attachment, generation, interface, None, now);
                    answered.extend(outcome.answer);
                    outcome.changes
                }
                Step::Del { sandbox } => {
                    // From here on the pod has no claim on the address, whether or not the call is answered.
                    world.live.remove(&attachment(sandbox));
                    world.sandboxes.remove(&format!("/run/netns/{sandbox}"));
                    leases.del(&attachment(sandbox), None, now).changes
                }
                Step::Vanish { sandbox } => {
                    world.sandboxes.remove(&format!("/run/netns/{sandbox}"));
                    world.live.remove(&attachment(sandbox));
                    leases.expire(now)
                }
                Step::Wait { seconds } => {
                    now = later(now, Duration::from_secs((*seconds).into()));
                    leases.expire(now)
                }
                Step::Renumber { cidr: index } => {
                    cidr = usize::from(*index);
                    leases.set_network(network(CIDRS[cidr]), now, draw).changes
                }
                Step::Collect => {
                    let valid = world.live.keys().cloned().collect();
                    let request = CollectRequest { network: "cistern".to_owned(), valid, began: None };
                    leases.collect(&request, |netns| world.sandboxes.contains(netns), now).changes
                }
                Step::Audit => {
                    now = later(now, audit::EVERY);
                    process.audited(&world.sandboxes, now)
                }
                Step::OwnerAllocate { timer } => {
                    let outcome = leases.allocate_for_owner(owner_request(None, *timer), now, draw);
                    owners.extend(outcome.answer.into_iter().flatten());
                    outcome.changes
                }
                Step::OwnerStopTimer { pick } => {
                    let with_timer = world.owned.iter().filter(|(_, end)| end.is_some()).map(|(address, _)| *address);
                    match with_timer.collect::<Vec<_>>().get(usize::from(*pick)) {
                        Some(address) => {
                            let outcome = leases.stop_expiration(*address, DEFAULT_POOL, "uuid-4", now);
                            stopped = outcome.answer.is_ok().then_some(*address);
                            outcome.changes
                        }
                        None => leases.expire(now),
                    }
                }
                Step::OwnerRelease { pick } => match world.owned.keys().nth(usize::from(*pick)).copied() {
                    Some(address) => {
                        let ended = world.owned.remove(&address).flatten().is_some_and(|end| end <= now);
                        let outcome = leases.release_for_owner(address, DEFAULT_POOL, now);
                        prop_assert!(ended || outcome.answer.is_ok());
                        outcome.changes
                    }
                    None => leases.expire(now),
                },
                Step::Disk { full } => {
                    process.full = *full;
                    leases.expire(now)
                }
                Step::Reboot { second } => {
                    now = at(*second);
                    world.live.clear();
                    world.sandboxes.clear();
                    // Timers restart; which of the expired ones were processed is unknown now.
                    world.owned.retain(|_, end| end.is_none());
                    let resting: Vec<IpAddr> = process.agent.leases.resting.keys().copied().collect();
                    world.freed.retain(|address, freed| resting.contains(address) && { *freed = now; true });
                    process = process.restart(cidr, RecordTimes::BeginAnew, now);
                    process.agent.leases.drop_gone(|_| false, now).changes
                }
            };
            let durable = process.write(changes, crash);
            if crash.is_some() {
                // The marker of the boot is set once the leases without namespace are removed from the disk.
                let times = match step {
                    Step::Reboot { .. } => RecordTimes::BeginAnew,
                    _ => RecordTimes::Continue,
                };
                process = process.restart(cidr, times, now);
                if matches!(step, Step::Reboot { .. }) {
                    let changes = process.agent.leases.drop_gone(|_| false, now).changes;
                    process.write(changes, None);
                }
                let findings = &process.agent.findings;
                let two = findings.iter().find(|finding| matches!(finding, Finding::TwoHolders { .. }));
                prop_assert!(two.is_none(), "{:?}", two);
            } else if durable {
                for lease in answered {
                    let expires = match lease.state {
                        LeaseState::Provisional { expires, .. } => Some(expires),
                        LeaseState::Confirmed { .. } => None,
                    };
                    world.live.insert(lease.attachment, (lease.addresses, lease.generation, expires));
                }
                let end = |lease: OwnerLease| (lease.address, lease.expiration.map(|timer| timer.at));
                world.owned.extend(owners.into_iter().map(end));
                world.owned.extend(stopped.map(|address| (address, None)));
            }
            world.live.retain(|_, (_, _, expires)| expires.is_none_or(|expires| expires > now));
            world.owned.retain(|_, end| end.is_none_or(|end| end > now));
            let agent = &mut process.agent;

            // What was answered holds.
            for (attachment, (addresses, ..)) in &world.live {
                let lease = agent.leases.check(attachment, now);
                prop_assert_eq!(lease.map(|lease| lease.addresses), Some(*addresses), "{}", attachment);
            }
            for address in world.owned.keys() {
                prop_assert!(agent.leases.owners.contains_key(&(DEFAULT_POOL.to_owned(), *address)));
            }
            // A DEL is durable even on a full disk.
            if let Step::Del { sandbox } = &step
                && crash.is_none()
            {
                prop_assert!(!agent.disk.contains_key(&RecordKey::Pod(attachment(sandbox))));
            }
            // Pending changes do not accumulate.
            prop_assert!(process.owed.len() <= 44, "{:?}", process.owed);
            // Each address has one owner; the allocator agrees with the leases; the router's is not allocated.
            let mut seen = BTreeSet::new();
            for row in agent.leases.snapshot() {
                prop_assert!(seen.insert(row.address), "{} twice", row.address);
            }
            let inside = |address: &IpAddr| agent.leases.pools.usable(*address);
            let held = agent.leases.holders().filter(|(address, _)| inside(address)).count();
            let resting = agent.leases.resting.keys().filter(|address| inside(address)).count();
            let usage = agent.usage();
            prop_assert_eq!((usage.used, usage.quarantined), (held as u64, resting as u64));
            // A quarantined address is only reallocated if no other is free.
            let holders: BTreeMap<IpAddr, String> = agent.leases.holders().collect();
            for (address, holder) in &world.held {
                if holders.get(address) != Some(holder) {
                    world.freed.insert(*address, now);
                }
            }
            if can_lose && (crash.is_some() || matches!(step, Step::Reboot { .. })) {
                world.freed.clear();
            }
            for address in holders.keys().filter(|address| world.held.get(*address) != holders.get(*address)) {
                if let Some(freed) = world.freed.get(address)
                    && later(*freed, Timings::default().quarantine) > now
                {
                    prop_assert_eq!(usage.free(), 0, "{} given again after {}", address, now.duration_since(*freed));
                }
            }
            world.held = holders;
            // The disk has exactly the state in memory. Checked in one step of eight, because reading is slow.
            if process.owed.is_empty() && draw.is_multiple_of(8) {
                let mut copy = Agent::restart(agent.disk.clone(), network(CIDRS[cidr]), now);
                // A pod CIDR that drains is forgotten when the supply is handed over the next time.
                let outcome = agent.leases.set_network(network(CIDRS[cidr]), now, draw);
                agent.done(outcome);
                prop_assert_eq!(&copy.disk, &agent.disk);
                copy.leases.generation = agent.leases.generation;
                prop_assert_eq!(format!("{:?}", copy.leases), format!("{:?}", agent.leases));
            }
        }
        // All pods are lost without a DEL: their addresses are free within the time in the module's documentation.
        process.full = false;
        for (_, address) in process.agent.leases.owners.keys().cloned().collect::<Vec<_>>() {
            let changes = process.agent.leases.release_for_owner(address, DEFAULT_POOL, now).changes;
            process.write(changes, None);
        }
        let until = later(now, Duration::from_secs(630));
        let confirmed_until = later(now, Duration::from_secs(450));
        while now < until {
            now = later(now, Duration::from_secs(30));
            let changes = process.agent.leases.expire(now);
            process.write(changes, None);
            if now.as_second() % 60 < 30 {
                let changes = process.audited(&BTreeSet::new(), now);
                process.write(changes, None);
            }
            if now >= confirmed_until {
                let mut rows = process.agent.leases.snapshot().into_iter();
                let late = rows.find(|row| matches!(row.state, RowState::Confirmed));
                prop_assert!(late.is_none(), "{:?}", late);
            }
        }
        let outcome = process.agent.leases.set_network(network(CIDRS[cidr]), now, 1);
        process.agent.done(outcome);
        let agent = &process.agent;
        let usage = agent.usage();
        let routers = agent.leases.router().iter().count() as u64;
        prop_assert_eq!(usage, Usage { size: usage.size, used: 0, reserved: routers, quarantined: 0 });
        prop_assert_eq!(agent.disk.len() as u64, routers + 1, "the pod CIDR, and the router's");
        prop_assert_eq!(agent.leases.next_deadline(), None);
    }
}

/// Number of histories per run, each of up to 60 steps. Set by `PROPTEST_CASES`.
fn histories() -> u32 {
    ProptestConfig::default().cases.max(1_000)
}

/// Operations of a runtime on a container: ADDs and DELs, sequentially, and their calls as they arrive.
#[derive(Debug, Clone, Copy)]
enum Call {
    Add,
    Confirm,
    Del,
}

/// At most six operations (true: an ADD), each started after the previous one, and their calls in any order: some
/// twice, as by a plugin that timed out, and some that the agent only receives after a restart.
fn late_calls() -> impl Strategy<Value = (Vec<bool>, Vec<(usize, Call, bool)>)> {
    prop::collection::vec(any::<bool>(), 1..=6).prop_flat_map(|operations| {
        let calls = operations.iter().enumerate().flat_map(|(number, is_add)| {
            let kinds = if *is_add { [Call::Add, Call::Confirm] } else { [Call::Del, Call::Del] };
            kinds.map(|call| (number, call))
        });
        let calls: Vec<_> = calls.collect();
        let restarts = prop::collection::vec(any::<bool>(), calls.len());
        let shuffled = (Just(calls).prop_shuffle(), restarts);
        (
            Just(operations),
            shuffled.prop_map(|(calls, restarts)| {
                calls.into_iter().zip(restarts).map(|((number, call), restart)| (number, call, restart)).collect()
            }),
        )
    })
}

proptest! {
    // The runtime's last operation counts, regardless of the order of arrival.
    #[test]
    fn the_operation_that_started_last_counts_however_late_the_others_arrive((operations, calls) in late_calls()) {
        let began = |number: usize| moment(BOOT, 10 + number as u64);
        let mut agent = Agent::start(network(CIDRS[0]));
        let mut generations: BTreeMap<usize, u64> = BTreeMap::new();
        let (mut early, mut last_del) = (BTreeSet::new(), None);
        let mut now = at(0);
        for (number, call, restart) in calls {
            now = later(now, Duration::from_secs(1));
            if restart {
                agent = Agent::restart(agent.disk, network(CIDRS[0]), now);
            }
            let mut confirm = None;
            match call {
                Call::Add => {
                    if let Ok(granted) = agent.add(begun(began(number)), now) {
                        generations.insert(number, granted.lease.generation);
                        confirm = early.contains(&number).then_some(number);
                    }
                }
                // It follows the answer to its ADD.
                Call::Confirm => {
                    early.insert(number);
                    confirm = Some(number);
                }
                Call::Del => {
                    last_del = last_del.max(Some(number));
                    agent.del_begun(began(number), now);
                }
            }
            // No process of a plugin is left whose container was deleted since.
            if let Some(number) = confirm.filter(|number| last_del.is_none_or(|del| *number > del))
                && let Some(generation) = generations.get(&number)
            {
                let behind = interface(u32::try_from(number).unwrap());
                let outcome = agent.leases.confirm(&attachment("c1"), *generation, behind, Some(&began(number)), now);
                agent.done(outcome).ok();
            }
        }
        let changes = agent.leases.expire(later(now, Duration::from_secs(700)));
        write(&mut agent.disk, &changes);
        let lease = agent.leases.pods.get(&attachment("c1"));
        let last = operations.len() - 1;
        if operations[last] {
            let state = lease.map(|lease| &lease.state);
            let own = |state: &LeaseState| matches!(state, LeaseState::Confirmed { interface: behind, .. }
                if *behind == interface(u32::try_from(last).unwrap()));
            prop_assert!(state.is_some_and(own), "{:?}", lease);
        } else {
            prop_assert_eq!(lease, None);
        }
    }
}
