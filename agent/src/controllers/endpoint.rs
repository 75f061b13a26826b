//! The owner of the pod leases: one task, one state machine, commands by a bounded queue.
//!
//! Every answer is given after its records are on disk, and an interface is confirmed after the datapath knows the pod,
//! so that the pod's first packet is treated as its last one is.
//!
//! Leases have a clock of their own ([`Parts::clock`]), which never jumps. Times that go out are those of the wall clock, and
//! are translated here.
//!
//! A device of ours with a route to it is a pod even when no record names it: its record was damaged, or is of another
//! version. Such a pod stays in the datapath, and its address is given to nobody.

use crate::clock::Clock;
use crate::tables::findings::{Findings, Found};
use crate::tables::rows::{HeldRow, NetworkRow, NodeRow, PeerRow, PoolRow};
use crate::tables::{Reader, Table, Waits};
use cistern_core::ip::Family;
use cistern_core::ipam::audit::{self, Audit, HostLink, Namespace, Seen};
use cistern_core::ipam::lease::{
    AddError, AddRequest, Attachment, Behind, Change, ConfirmError, Exclusion, ExpirationIds, Granted, LeaseState,
    Leases, Network, Outcome, Owed, OwnerError, OwnerLease, OwnerRequest, PodLease, Record, RecordKey, RecordTimes,
    Restored, Row, Timings,
};
use cistern_core::ipam::node::host_scope;
use cistern_core::ipam::node::pod_cidr::{AddressError, Addresses, Usage};
use cistern_core::masquerade::plan::EndpointEntry;
use cistern_core::moment::Moment;
use ipnet::{IpNet, Ipv4Net};
use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Where the records survive.
pub trait LeaseStore: Send {
    /// Makes one change durable, or none of it.
    ///
    /// # Errors
    /// What failed on which file.
    fn write(&mut self, change: &Change) -> Result<(), String>;
}

/// Takes the interface of this name away.
pub type RemoveDevice = Box<dyn FnMut(&str) -> Result<(), String> + Send>;

/// Where the kernel programs look pods up.
pub trait EndpointMap: Send {
    /// Makes the pod known.
    ///
    /// # Errors
    /// What failed, for people.
    fn insert(&mut self, address: Ipv4Addr, entry: EndpointEntry) -> Result<(), String>;
    /// Makes it unknown; it need not be known.
    ///
    /// # Errors
    /// What failed, for people.
    fn remove(&mut self, address: Ipv4Addr) -> Result<(), String>;
}

/// Why a call was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// No address.
    #[error(transparent)]
    Add(#[from] AddError),
    /// Not confirmed.
    #[error(transparent)]
    Confirm(#[from] ConfirmError),
    /// A call by owner text was refused.
    #[error(transparent)]
    Owner(#[from] OwnerError),
    /// The disk said no. The records are written as soon as it lets us; this call is not answered with an address.
    #[error("{reason}")]
    NotDurable {
        /// What failed.
        reason: String,
    },
    /// The kernel map said no.
    #[error("the datapath does not take endpoint {address}: {reason}; the lease stays provisional")]
    Datapath {
        /// Address of the pod.
        address: Ipv4Addr,
        /// What failed.
        reason: String,
    },
    /// The agent is ending.
    #[error("the agent is shutting down")]
    ShuttingDown,
}

/// Everything that is known of this node's addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// Addresses that are not free.
    pub rows: Vec<Row>,
    /// Counts by pod CIDR.
    pub usage: Vec<(IpNet, Usage)>,
    /// Router addresses.
    pub router: Addresses,
    /// Everything that was done is on disk.
    pub durable: bool,
}

type Reply<T> = oneshot::Sender<Result<T, EndpointError>>;

enum Command {
    Add(AddRequest, Reply<Granted>),
    Confirm(Attachment, u64, Behind, Option<Moment>, Reply<()>),
    Del(Attachment, Option<Moment>, Reply<Option<PodLease>>),
    Collect(String, BTreeSet<Attachment>, Reply<Vec<PodLease>>),
    Check(Attachment, Reply<Option<(PodLease, Addresses)>>),
    Allocate(OwnerRequest, Reply<Vec<OwnerLease>>),
    AllocateAddress(IpAddr, String, String, Reply<OwnerLease>),
    Release(IpAddr, String, Reply<OwnerLease>),
    View(Reply<View>),
}

/// Calls wait here for the one task; more than this many wait at the door.
const QUEUE: usize = 256;

/// The asking side; clones ask the same task.
#[derive(Debug, Clone)]
pub struct Endpoints {
    sender: mpsc::Sender<Command>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Command")
    }
}

impl Endpoints {
    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, EndpointError> {
        let (reply, answer) = oneshot::channel();
        self.sender.send(command(reply)).await.map_err(|_| EndpointError::ShuttingDown)?;
        answer.await.map_err(|_| EndpointError::ShuttingDown)?
    }

    /// See [`Leases::add`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn add(&self, request: AddRequest) -> Result<Granted, EndpointError> {
        self.ask(|reply| Command::Add(request, reply)).await
    }

    /// See [`Leases::confirm`]. The datapath knows the pod when this returns.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn confirm(
        &self,
        attachment: Attachment,
        generation: u64,
        interface: Behind,
        began: Option<Moment>,
    ) -> Result<(), EndpointError> {
        self.ask(|reply| Command::Confirm(attachment, generation, interface, began, reply)).await
    }

    /// See [`Leases::del`]. Answers the lease that ended, if there was one.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn del(&self, attachment: Attachment, began: Option<Moment>) -> Result<Option<PodLease>, EndpointError> {
        self.ask(|reply| Command::Del(attachment, began, reply)).await
    }

    /// See [`Leases::collect`]. Answers the leases that ended.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn collect(&self, network: String, valid: BTreeSet<Attachment>) -> Result<Vec<PodLease>, EndpointError> {
        self.ask(|reply| Command::Collect(network, valid, reply)).await
    }

    /// See [`Leases::check`]; the router addresses beside it.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn check(&self, attachment: Attachment) -> Result<Option<(PodLease, Addresses)>, EndpointError> {
        self.ask(|reply| Command::Check(attachment, reply)).await
    }

    /// See [`Leases::allocate_for_owner`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn allocate(&self, request: OwnerRequest) -> Result<Vec<OwnerLease>, EndpointError> {
        self.ask(|reply| Command::Allocate(request, reply)).await
    }

    /// See [`Leases::allocate_address_for_owner`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn allocate_address(
        &self,
        address: IpAddr,
        owner: String,
        pool: String,
    ) -> Result<OwnerLease, EndpointError> {
        self.ask(|reply| Command::AllocateAddress(address, owner, pool, reply)).await
    }

    /// See [`Leases::release_for_owner`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn release(&self, address: IpAddr, pool: String) -> Result<OwnerLease, EndpointError> {
        self.ask(|reply| Command::Release(address, pool, reply)).await
    }

    /// What is held now.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn view(&self) -> Result<View, EndpointError> {
        self.ask(Command::View).await
    }
}

/// Fresh UUIDs for the timers of a call by owner text.
#[must_use]
pub fn expiration_ids(draw: &mut dyn FnMut() -> u64) -> ExpirationIds {
    let mut uuid = || {
        let (high, low) = (draw(), draw());
        // RFC 9562 version 4: random but for the version and variant bits.
        format!(
            "{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}",
            high >> 32,
            (high >> 16) & 0xffff,
            high & 0xfff,
            0x8000 | (low >> 48) & 0x3fff,
            low & 0xffff_ffff_ffff
        )
    };
    ExpirationIds { ipv4: uuid(), ipv6: uuid() }
}

/// What the task is made of.
pub struct Parts {
    /// Name of this node.
    pub node: String,
    /// Records from before.
    pub records: Vec<Record>,
    /// How long things wait.
    pub timings: Timings,
    /// `local-router-ipv4`
    pub configured_router: Option<Ipv4Addr>,
    /// Whether the records are from before a reboot: leases whose namespace is gone are dropped.
    pub rebooted: bool,
    /// Whether the times of the records are those of `clock`.
    pub times: RecordTimes,
    /// Whether a network namespace is there.
    pub namespace: Box<dyn Fn(&str) -> Namespace + Send>,
    /// Name of the host side of an attachment's pair.
    pub host_side: Box<dyn Fn(&Attachment) -> String + Send>,
    /// Removes a device by name; it need not be there.
    pub remove_device: RemoveDevice,
    /// Random numbers.
    pub draw: Box<dyn FnMut() -> u64 + Send>,
    /// Where records survive.
    pub store: Box<dyn LeaseStore>,
    /// Where the kernel programs look pods up; none without a datapath.
    pub map: Option<Box<dyn EndpointMap>>,
    /// Where this node's pods get their addresses from.
    pub pool: Reader<(), PoolRow>,
    /// The pod CIDR that a restart would begin with. No address of another one is given: after a crash nobody would know
    /// that pods have addresses of it.
    pub remembered: Reader<(), PoolRow>,
    /// Devices of this node: their addresses are given to no pod.
    pub network: Reader<(), NetworkRow>,
    /// Every node of the cluster: this node's own row names the router address that was published.
    pub peers: Reader<String, PeerRow>,
    /// This node's Node, whose annotations may name the router address, too.
    pub nodes: Reader<String, NodeRow>,
    /// Gets the router address.
    pub router: Arc<Table<Ipv4Addr, ()>>,
    /// Gets the pods whose interface exists.
    pub endpoints: Arc<Table<Ipv4Addr, EndpointEntry>>,
    /// Gets whether anybody holds an address, and where a new one would come from.
    pub held: Arc<Table<(), HeldRow>>,
    /// What is waited for: here, a disk that refuses.
    pub waits: Waits,
    /// What the audit finds.
    pub findings: Findings,
    /// The boot that this machine is in, as a [`Moment`] names it.
    pub boot: String,
    /// Time of the leases: it only goes forward, over restarts too.
    pub clock: Clock,
    /// Time as people read it.
    pub wall: Clock,
}

struct Task {
    leases: Leases,
    /// Made by the state machine, not on disk yet.
    owed: Owed,
    /// When a disk that refused is tried again.
    retry: Option<Timestamp>,
    audit: Audit,
    next_audit: Timestamp,
    /// Host sides of pods' pairs, by name.
    links: BTreeMap<String, HostLink>,
    /// The pod CIDR, and whether it is being left.
    pool: Option<(Ipv4Net, bool)>,
    /// A restarted agent would have this pod CIDR, too.
    on_disk: bool,
    parts: Parts,
}

/// Takes up the leases and returns the asking side and the task, which runs until cancelled and then answers what is
/// still in its queue.
pub fn start(parts: Parts, cancel: CancellationToken) -> (Endpoints, impl Future<Output = ()> + Send) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (Endpoints { sender }, run(parts, receiver, cancel))
}

async fn run(mut parts: Parts, mut receiver: mpsc::Receiver<Command>, cancel: CancellationToken) {
    let (records, boot) = (std::mem::take(&mut parts.records), std::mem::take(&mut parts.boot));
    let now = parts.clock.now();
    let draw = (parts.draw)();
    // Without a network first: which pods there are without a record is known when the leases are.
    let Restored { leases, findings, changes } =
        Leases::restore(records, parts.timings, Network::default(), parts.times, boot, now, draw);
    for finding in findings {
        tracing::warn!(reason = %finding, "finding about pod leases");
    }
    let (audit, links) = (Audit::default(), BTreeMap::new());
    let (owed, retry, next_audit, pool, on_disk) = (Owed::default(), None, now, None, false);
    let mut task = Task { leases, owed, retry, audit, next_audit, links, pool, on_disk, parts };
    task.owed.extend(changes);
    if task.parts.rebooted {
        let there = |netns: &str| (task.parts.namespace)(netns) == Namespace::There;
        let Outcome { answer, changes } = task.leases.drop_gone(there, now);
        task.owed.extend(changes);
        for lease in answer {
            tracing::info!(attachment = %lease.attachment, "lease ended: its network namespace is gone since the reboot");
        }
    }
    task.network_changed();
    loop {
        let deadline = task.next_wake();
        let mut asked = None;
        tokio::select! {
            // Commands first: a pool that changes at the same time is seen by the next one.
            biased;
            () = cancel.cancelled() => break,
            command = receiver.recv() => match command {
                Some(command) => asked = Some(command),
                None => break,
            },
            () = task.parts.pool.changed() => task.network_changed(),
            () = task.parts.remembered.changed() => task.network_changed(),
            () = task.parts.network.changed() => task.network_changed(),
            () = task.parts.peers.changed() => task.network_changed(),
            () = task.parts.nodes.changed() => task.network_changed(),
            () = tokio::time::sleep(deadline) => {}
        }
        // Whatever woke it: what asks again and again must not keep it from what is due, and a lease that has ended meanwhile
        // ends here, with all that has to follow.
        task.due();
        if let Some(command) = asked {
            task.serve(command);
        }
    }
    receiver.close();
    while let Some(command) = receiver.recv().await {
        task.serve(command);
    }
    task.flush();
    if !task.owed.is_empty() {
        tracing::error!(owed = task.owed.len(), "lease records could not be written before the end");
    }
}

/// Host sides of pods' pairs, with the address that is routed to each.
fn host_links(network: &NetworkRow) -> BTreeMap<String, HostLink> {
    let address = |ifindex: u32| {
        let routes = network.routes.iter().filter(|route| route.ifindex == Some(ifindex) && route.gateway.is_none());
        routes.filter(|route| route.destination.prefix_len() == 32).map(|route| route.destination.addr()).next()
    };
    let ours = network.links.iter().filter(|(_, link)| link.kind == "veth" && audit::is_host_side(&link.name));
    ours.map(|(ifindex, link)| (link.name.clone(), HostLink { ifindex: *ifindex, address: address(*ifindex) }))
        .collect()
}

const NETWORK_UNKNOWN: &str = "the devices and routes of this node are not known yet";

/// A disk that refused is tried again after this long.
const DISK_RETRY: Duration = Duration::from_secs(1);

/// Name of the wait for a disk that refuses.
const WAIT: &str = "lease records";

fn not_durable(reason: &str) -> String {
    format!(
        "lease records cannot be written ({reason}): no address is given until they can; pods that run are not affected, \
         and DELs are carried out where the disk lets files be removed"
    )
}

impl Task {
    fn next_wake(&self) -> Duration {
        let now = self.parts.clock.now();
        let next = self.retry.into_iter().chain(self.leases.next_deadline()).fold(self.next_audit, Timestamp::min);
        Duration::try_from(next.duration_since(now)).unwrap_or(Duration::ZERO).max(Duration::from_millis(10))
    }

    /// Does what it is time for.
    fn due(&mut self) {
        let now = self.parts.clock.now();
        if self.retry.into_iter().chain(self.leases.next_deadline()).any(|at| at <= now) {
            let ended = self.leases.expire(now);
            self.owed.extend(ended);
            // What a device leads to is excluded when no record names it: that may just have come to be.
            self.network_changed();
        }
        self.audit();
    }

    fn network_changed(&mut self) {
        let seen = self.parts.network.snapshot();
        self.links = seen.rows.get(&()).map(host_links).unwrap_or_default();
        let network = self.network(&seen.rows);
        let pool = self.parts.pool.snapshot();
        let pool = pool.rows.get(&());
        let remembered = self.parts.remembered.snapshot().rows.get(&()).map(|row| row.pod_cidr);
        self.on_disk = pool.is_none_or(|row| remembered == Some(row.pod_cidr));
        let not_yet = pool.and_then(|row| {
            let block = row.pod_cidr;
            if row.leaving {
                Some(format!("{block} is being left for another pod CIDR"))
            } else {
                (!self.on_disk).then(|| format!("{block} is not on disk yet"))
            }
        });
        let blocked = pool.and_then(|row| row.blocked.clone()).or(not_yet);
        self.pool = pool.map(|row| (row.pod_cidr, row.leaving));
        self.leases.hold_back(blocked.or_else(|| (!seen.synced).then(|| NETWORK_UNKNOWN.to_owned())));
        let draw = (self.parts.draw)();
        let Outcome { answer, changes } = self.leases.set_network(network, self.parts.clock.now(), draw);
        for finding in answer {
            tracing::warn!(reason = %finding, "finding about pod leases");
        }
        self.owed.extend(changes);
        let changes = self.leases.expire(self.parts.clock.now());
        self.owed.extend(changes);
        self.flush();
        self.publish();
    }

    /// What the node was given to hand out, as the tables say now.
    fn network(&mut self, seen: &BTreeMap<(), NetworkRow>) -> Network {
        let addresses = seen
            .values()
            .flat_map(|row| row.links.values())
            // The router address itself sits on the loopback device.
            .filter(|link| !link.loopback)
            .flat_map(|link| link.addresses.iter())
            .map(|address| Exclusion { address: address.addr(), label: "node-ip".to_owned() });
        let unrecorded = self.unrecorded().into_iter().map(|(address, (link, _))| Exclusion {
            address: address.into(),
            label: format!("the pod behind {link}, which no record names"),
        });
        let exclusions = addresses.chain(unrecorded).collect();
        let peers = self.parts.peers.snapshot();
        let published = peers.rows.get(&self.parts.node).and_then(|row| row.router);
        let nodes = self.parts.nodes.snapshot();
        let annotated = nodes.rows.get(&self.parts.node).and_then(|row| host_scope::router(&row.annotations));
        Network {
            ipv4: self.parts.pool.snapshot().rows.get(&()).map(|row| row.pod_cidr),
            ipv6: None,
            exclusions,
            configured_router: Addresses { ipv4: self.parts.configured_router, ipv6: None },
            seen_routers: published
                .into_iter()
                .chain(annotated)
                .map(|router| Addresses { ipv4: Some(router), ipv6: None })
                .collect(),
        }
    }

    /// Addresses of pods that no record names, with name and index of their devices.
    fn unrecorded(&self) -> BTreeMap<Ipv4Addr, (String, u32)> {
        let leased: BTreeSet<String> = self
            .leases
            .pods()
            .filter_map(|lease| match &lease.state {
                LeaseState::Confirmed { interface: Behind::Pair(pair), .. } => Some(pair.host_ifname.clone()),
                LeaseState::Confirmed { interface: Behind::Plugin { .. }, .. } => None,
                LeaseState::Provisional { .. } => Some((self.parts.host_side)(&lease.attachment)),
            })
            .collect();
        let held: BTreeSet<Ipv4Addr> = self.leases.pods().filter_map(|lease| lease.addresses.ipv4).collect();
        self.links
            .iter()
            .filter(|(name, _)| !leased.contains(*name))
            .filter_map(|(name, link)| Some((link.address?, (name.clone(), link.ifindex))))
            .filter(|(address, _)| !held.contains(address))
            .collect()
    }

    /// Looks whether the leases agree with the namespaces and devices, when it is time to and the devices are known.
    fn audit(&mut self) {
        let now = self.parts.clock.now();
        if now < self.next_audit || !self.parts.network.peek().synced {
            return;
        }
        self.next_audit = now.checked_add(audit::EVERY).unwrap_or(Timestamp::MAX);
        let seen = Seen { links: &self.links, namespace: &self.parts.namespace, host_side: &self.parts.host_side };
        let audited = self.audit.look(self.leases.pods(), &seen, now);
        self.parts.findings.replace(
            "audit",
            audited.findings.iter().map(|finding| Found {
                reason: finding.reason(),
                subject: finding.subject(),
                message: finding.to_string(),
            }),
        );
        let Outcome { answer, changes } = self.leases.end_lost(&audited.lost, now);
        for lease in answer {
            tracing::warn!(attachment = %lease.attachment, "lease ended by the audit: its pod is gone and no DEL came");
            self.forget(&lease);
        }
        self.owed.extend(changes);
        for link in audited.left_over {
            match (self.parts.remove_device)(&link) {
                Ok(()) => tracing::warn!(device = link, "device removed by the audit: it led to no pod"),
                Err(reason) => tracing::warn!(device = link, reason, "device not removed; the next audit tries again"),
            }
        }
        self.flush();
        self.publish();
    }

    /// Writes what is owed. A disk that refuses is waited for.
    fn flush(&mut self) {
        let store = &mut self.parts.store;
        let outcome = self.owed.write(|change| store.write(change));
        self.retry = match outcome {
            Ok(()) => {
                self.parts.waits.end(WAIT);
                None
            }
            Err(reason) => {
                self.parts.waits.begin(WAIT, not_durable(&reason), Some(DISK_RETRY));
                self.parts.clock.now().checked_add(DISK_RETRY).ok()
            }
        };
    }

    /// The answer, once all of it is on disk.
    fn durable<T>(&mut self, outcome: Outcome<T>) -> Result<T, EndpointError> {
        self.owed.extend(outcome.changes);
        self.flush();
        self.written(self.owed.is_empty()).map(|()| outcome.answer)
    }

    /// As [`Task::durable`] for what gives addresses back: that these keys are gone from the disk is enough.
    fn given_back<T>(&mut self, outcome: Outcome<T>, keys: impl Fn(&T) -> Vec<RecordKey>) -> Result<T, EndpointError> {
        let keys = keys(&outcome.answer);
        self.owed.extend(outcome.changes);
        self.flush();
        self.written(!keys.iter().any(|key| self.owed.owes(key))).map(|()| outcome.answer)
    }

    fn written(&self, is_so: bool) -> Result<(), EndpointError> {
        if is_so {
            return Ok(());
        }
        let waits = self.parts.waits.reader();
        let reason = waits.peek().rows.get(WAIT).map(|wait| wait.reason.clone()).unwrap_or_default();
        Err(EndpointError::NotDurable { reason })
    }

    fn serve(&mut self, command: Command) {
        let now = self.parts.clock.now();
        // A caller that went away gets no answer; what was done stays done, and its DEL ends it.
        match command {
            Command::Add(request, reply) => {
                let draw = (self.parts.draw)();
                let may_live = |netns: &str| (self.parts.namespace)(netns) != Namespace::Gone;
                let outcome = self.leases.add(request, may_live, now, draw);
                let answer = self.durable(outcome).and_then(|answer| Ok(answer?)).map_err(|error| self.told(error));
                // A superseded lease leaves the datapath, and the first ADD may have chosen the router.
                self.publish();
                let _ = reply.send(answer);
            }
            Command::Confirm(attachment, generation, interface, began, reply) => {
                let answer = self.confirm(&attachment, generation, interface, began.as_ref(), now);
                let _ = reply.send(answer);
            }
            Command::Del(attachment, began, reply) => {
                let outcome = self.leases.del(&attachment, began, now);
                if let Some(lease) = &outcome.answer {
                    self.forget(lease);
                }
                let answer = self.given_back(outcome, |_| vec![RecordKey::Pod(attachment.clone())]);
                self.publish();
                let _ = reply.send(answer);
            }
            Command::Collect(network, valid, reply) => {
                let outcome = self.leases.collect(&network, &valid, now);
                for lease in &outcome.answer {
                    self.forget(lease);
                }
                let key = |lease: &PodLease| RecordKey::Pod(lease.attachment.clone());
                let answer = self.given_back(outcome, |ended| ended.iter().map(key).collect());
                self.next_audit = now;
                self.publish();
                let _ = reply.send(answer);
            }
            Command::Check(attachment, reply) => {
                let lease = self.leases.check(&attachment, now).cloned();
                let _ = reply.send(Ok(lease.map(|lease| (lease, self.leases.router()))));
            }
            Command::Allocate(request, reply) => {
                let draw = (self.parts.draw)();
                let outcome = self.leases.allocate_for_owner(request, now, draw);
                let answer = self.durable(outcome).and_then(|answer| Ok(answer?));
                self.publish();
                let _ = reply.send(answer);
            }
            Command::AllocateAddress(address, owner, pool, reply) => {
                let outcome = self.leases.allocate_address_for_owner(address, owner, &pool, now);
                let answer = self.durable(outcome).and_then(|answer| Ok(answer?)).map_err(|error| self.told(error));
                self.publish();
                let _ = reply.send(answer);
            }
            Command::Release(address, pool, reply) => {
                let outcome = self.leases.release_for_owner(address, &pool, now);
                let answer = self.given_back(outcome, |_| vec![RecordKey::Owner(pool.clone(), address)]);
                self.publish();
                let _ = reply.send(answer.and_then(|answer| Ok(answer?)));
            }
            Command::View(reply) => {
                let view = View {
                    rows: self.rows(),
                    usage: self.leases.usage(),
                    router: self.leases.router(),
                    durable: self.owed.is_empty(),
                };
                let _ = reply.send(Ok(view));
            }
        }
    }

    /// How much the wall clock is ahead of the leases' clock.
    fn ahead(&self) -> SignedDuration {
        self.parts.wall.now().duration_since(self.parts.clock.now())
    }

    /// A time as people's clocks show it. Whole seconds, so that it stays the same each time it is asked for.
    fn shown(&self, time: Timestamp) -> Timestamp {
        time.checked_add(SignedDuration::from_secs(self.ahead().as_secs())).unwrap_or(time)
    }

    /// A refusal with the time that people's clocks show.
    fn told(&self, mut error: EndpointError) -> EndpointError {
        if let EndpointError::Add(AddError::Overtaken { at, .. })
        | EndpointError::Owner(OwnerError::Address(AddressError::InQuarantine { until: at, .. })) = &mut error
        {
            *at = self.shown(*at);
        }
        error
    }

    /// What is not free.
    fn rows(&self) -> Vec<Row> {
        let shown = |time: Timestamp| self.shown(time);
        let mut rows = self.leases.snapshot();
        for row in &mut rows {
            (row.since, row.until) = (row.since.map(shown), row.until.map(shown));
        }
        rows
    }

    /// The kernel forgets the pod before its address can be given to another.
    fn forget(&mut self, lease: &PodLease) {
        if let Some(address) = lease.addresses.ipv4
            && let Some(map) = self.parts.map.as_mut()
            && let Err(reason) = map.remove(address)
        {
            tracing::warn!(%address, reason, "endpoint not removed at once; the reconciler does it");
        }
    }

    fn confirm(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: Behind,
        began: Option<&Moment>,
        now: Timestamp,
    ) -> Result<(), EndpointError> {
        // Checked before the datapath is told: a confirmation that is refused or void must leave no trace there.
        if let Some(lease) = self.leases.check(attachment, now)
            && lease.generation == generation
            && !self.leases.asked_since(lease, began)
            && let (Some(address), Some(map)) = (lease.addresses.ipv4, self.parts.map.as_mut())
            && let Some(entry) = endpoint(&interface)
        {
            map.insert(address, entry).map_err(|reason| EndpointError::Datapath { address, reason })?;
        }
        let outcome = self.leases.confirm(attachment, generation, interface, began, now);
        let answer = self.durable(outcome).and_then(|answer| Ok(answer.map(|_| ())?));
        self.publish();
        answer
    }

    /// Publishes what others follow.
    fn publish(&self) {
        // Others would write down an address that a restart may undo; until then the former one stays.
        if self.on_disk {
            let router = self.leases.router().ipv4.map(|address| (address, ())).into_iter().collect();
            self.parts.router.publish(router);
        }
        // Nothing is taken out of the datapath before it is known which pods there are without a record.
        if !self.parts.network.peek().synced {
            return;
        }
        let unrecorded = self.unrecorded();
        let held = self.leases.held().filter_map(|address| match address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        let held: BTreeSet<Ipv4Addr> = held.chain(unrecorded.keys().copied()).collect();
        let (pod_cidr, leaving) = self.pool.unzip();
        let (within, beyond): (Vec<_>, Vec<_>) =
            held.into_iter().partition(|address| pod_cidr.is_some_and(|pod_cidr| pod_cidr.contains(address)));
        let leaving = leaving.unwrap_or_default();
        self.parts.held.publish(BTreeMap::from([((), HeldRow { pod_cidr, any: !within.is_empty(), leaving, beyond })]));
        let unrecorded = unrecorded.into_iter().map(|(address, (_, ifindex))| (address, entry(ifindex)));
        let leased = self.leases.pods().filter_map(|lease| match (&lease.state, lease.addresses.ipv4) {
            (LeaseState::Confirmed { interface, .. }, Some(address)) => Some((address, endpoint(interface)?)),
            _ => None,
        });
        self.parts.endpoints.publish(unrecorded.chain(leased).collect());
    }
}

/// What the kernel programs know of a pod. One that another plugin attached has no device of ours; one whose packets do
/// not pass this node's routing is left unknown, so that its packets pass unchanged where they leave.
fn endpoint(interface: &Behind) -> Option<EndpointEntry> {
    let ifindex = match interface {
        Behind::Pair(pair) => pair.host_ifindex,
        Behind::Plugin { routed: true, .. } => 0,
        Behind::Plugin { routed: false, .. } => return None,
    };
    Some(entry(ifindex))
}

fn entry(ifindex: u32) -> EndpointEntry {
    EndpointEntry { ifindex, no_masquerade: false }
}

/// The family that a call by owner text names; none for every family that is on.
///
/// # Errors
/// The text, when it is neither.
pub fn family(text: &str) -> Result<Option<Family>, String> {
    match text {
        "" => Ok(None),
        "ipv4" => Ok(Some(Family::Ipv4)),
        "ipv6" => Ok(Some(Family::Ipv6)),
        other => Err(format!("family {other:?}: expected ipv4, ipv6 or nothing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::rows::{LinkRow, RouteRow};

    struct Nowhere;

    impl LeaseStore for Nowhere {
        fn write(&mut self, _change: &Change) -> Result<(), String> {
            Ok(())
        }
    }

    struct Rig {
        ask: Endpoints,
        pool: Arc<Table<(), PoolRow>>,
        remembered: Arc<Table<(), PoolRow>>,
        network: Arc<Table<(), NetworkRow>>,
        held: Arc<Table<(), HeldRow>>,
        router: Arc<Table<Ipv4Addr, ()>>,
    }

    const NET: &str = "10.33.0.0/26";
    const LINK: &str = "cst0123456789a";

    fn at(text: &str) -> Clock {
        Clock::following_runtime(text.parse().unwrap())
    }

    fn request(began: Option<Moment>) -> AddRequest {
        AddRequest {
            attachment: Attachment { container_id: "c1".into(), ifname: "eth0".into() },
            network: None,
            pod: None,
            netns: "/run/netns/c1".into(),
            began,
        }
    }

    impl Rig {
        fn start() -> Self {
            Self::with(at("2026-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z"))
        }

        /// With the leases' clock and people's.
        fn with(clock: Clock, wall: Clock) -> Self {
            let pool = Arc::new(Table::new("pool"));
            pool.publish(BTreeMap::from([((), PoolRow::new(NET.parse().unwrap()))]));
            let remembered = Arc::new(Table::new("remembered-pool"));
            let network: Arc<Table<(), NetworkRow>> = Arc::new(Table::new("network"));
            network.publish(BTreeMap::from([((), NetworkRow::default())]));
            let (peers, nodes) = (Table::new("peers"), Table::new("nodes"));
            let held = Arc::new(Table::new("held"));
            let router = Arc::new(Table::new("router"));
            let mut drawn = 7;
            let parts = Parts {
                node: "a".into(),
                records: Vec::new(),
                timings: Timings::default(),
                configured_router: None,
                rebooted: false,
                times: RecordTimes::Continue,
                namespace: Box::new(|_| Namespace::There),
                host_side: Box::new(|_| LINK.to_owned()),
                remove_device: Box::new(|_| Ok(())),
                draw: Box::new(move || {
                    drawn += 1;
                    drawn
                }),
                store: Box::new(Nowhere),
                map: None,
                pool: pool.reader(),
                remembered: remembered.reader(),
                network: network.reader(),
                peers: peers.reader(),
                nodes: nodes.reader(),
                router: Arc::clone(&router),
                endpoints: Arc::new(Table::new("endpoints")),
                held: Arc::clone(&held),
                waits: Waits::new(clock),
                findings: Findings::new(clock),
                boot: String::new(),
                clock,
                wall,
            };
            let (ask, task) = start(parts, CancellationToken::new());
            tokio::spawn(async move {
                task.await;
                drop((peers, nodes));
            });
            Self { ask, pool, remembered, network, held, router }
        }

        async fn remember(&self) {
            self.remembered.publish(BTreeMap::from([((), PoolRow::new(NET.parse().unwrap()))]));
            self.settle().await;
        }

        async fn settle(&self) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }

        /// An address by name; the router has one of the two.
        async fn take(&self) -> Option<IpAddr> {
            for text in ["10.33.0.20", "10.33.0.21"] {
                let address = text.parse().unwrap();
                if self.ask.allocate_address(address, "ns/x".into(), "default".into()).await.is_ok() {
                    return Some(address);
                }
            }
            None
        }

        fn router(&self) -> Option<Ipv4Addr> {
            self.router.snapshot().rows.keys().next().copied()
        }

        fn held(&self) -> HeldRow {
            self.held.snapshot().rows[&()].clone()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_is_asked_for_by_name_is_held_until_it_is_given_back() {
        let rig = Rig::start();
        rig.remember().await;
        assert!(!rig.held().any);
        let address = rig.take().await.unwrap();
        assert!(rig.held().any);
        // Of another block, it is told as such.
        rig.pool.publish(BTreeMap::from([((), PoolRow::new("10.33.0.64/26".parse().unwrap()))]));
        rig.settle().await;
        let IpAddr::V4(ipv4) = address else { unreachable!() };
        assert_eq!((rig.held().any, rig.held().beyond), (false, vec![ipv4]));
        rig.ask.release(address, "default".into()).await.unwrap();
        assert!(rig.held().beyond.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn no_address_is_given_of_a_pod_cidr_that_is_not_on_disk_or_is_being_left() {
        let rig = Rig::start();
        rig.settle().await;
        assert_eq!((rig.held().pod_cidr, rig.take().await), (NET.parse().ok(), None));
        rig.remember().await;
        assert!(!rig.held().leaving);
        rig.pool.publish(BTreeMap::from([((), PoolRow { leaving: true, ..PoolRow::new(NET.parse().unwrap()) })]));
        rig.settle().await;
        assert_eq!((rig.held().leaving, rig.take().await), (true, None));
        let request = OwnerRequest { owner: "ns/x".into(), pool: None, family: None, expiration: None };
        assert!(rig.ask.allocate(request).await.unwrap_err().to_string().contains("being left"));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_hears_of_a_router_address_of_a_pod_cidr_that_is_not_on_disk() {
        let rig = Rig::start();
        rig.settle().await;
        assert_eq!(rig.router(), None);
        rig.remember().await;
        let first = rig.router().unwrap();
        let next = PoolRow::new("10.33.0.64/26".parse().unwrap());
        rig.pool.publish(BTreeMap::from([((), next.clone())]));
        rig.settle().await;
        assert_eq!(rig.router(), Some(first));
        rig.remembered.publish(BTreeMap::from([((), next.clone())]));
        rig.settle().await;
        assert!(rig.router().is_some_and(|router| next.pod_cidr.contains(&router)), "{:?}", rig.router());
    }

    // An ADD was killed when it had made the pair and the route; nothing changes on the node since.
    #[tokio::test(start_paused = true)]
    async fn an_address_that_a_device_leads_to_is_given_to_nobody_when_its_lease_has_ended() {
        let rig = Rig::start();
        rig.remember().await;
        let address = rig.ask.add(request(None)).await.unwrap().lease.addresses.ipv4.unwrap();
        let link = LinkRow {
            name: LINK.to_owned(),
            up: true,
            loopback: false,
            kind: "veth".to_owned(),
            master: None,
            mtu: 1500,
            mac: Vec::new(),
            addresses: Vec::new(),
        };
        let route = RouteRow { destination: address.into(), ifindex: Some(7), gateway: None, source: None };
        let row = NetworkRow { links: BTreeMap::from([(7, link)]), routes: vec![route] };
        rig.network.publish(BTreeMap::from([((), row)]));
        tokio::time::sleep(Duration::from_secs(12 * 60)).await;
        let given = rig.ask.allocate_address(address.into(), "ns/x".into(), "default".into()).await;
        assert!(given.as_ref().is_err_and(|error| error.to_string().contains(LINK)), "{given:?}");
    }

    // The machine was started in 1970, and has the right time since.
    #[tokio::test(start_paused = true)]
    async fn refusals_show_the_time_that_peoples_clocks_show() {
        let rig = Rig::with(at("1970-01-01T00:05:00Z"), at("2026-01-01T00:00:00Z"));
        rig.remember().await;
        rig.ask.del(request(None).attachment, None).await.unwrap();
        let overtaken = rig.ask.add(request(None)).await.unwrap_err().to_string();
        assert!(overtaken.contains(" at 2026-01-01T00:00:"), "{overtaken}");
        let address = rig.take().await.unwrap();
        rig.ask.release(address, "default".into()).await.unwrap();
        let resting = rig.ask.allocate_address(address, "ns/y".into(), "default".into()).await.unwrap_err().to_string();
        assert!(resting.contains("2026-01-01T00:00:"), "{resting}");
    }
}
