//! The owner of the pod leases: one task, one state machine, commands by a bounded queue.
//!
//! Every answer is given after its records are on disk, and an interface is confirmed after the datapath knows the pod,
//! so that the pod's first packet is treated as its last one is.

use crate::clock::Clock;
use crate::tables::rows::{NetworkRow, PeerRow, PoolRow};
use crate::tables::{Reader, Table};
use cistern_core::ip::Family;
use cistern_core::ipam::lease::{
    AddError, AddRequest, Attachment, Change, ConfirmError, Exclusion, ExpirationIds, Granted, Interface, LeaseState,
    Leases, Network, Outcome, OwnerError, OwnerLease, OwnerRequest, PodLease, Record, Restored, Row, Timings,
};
use cistern_core::ipam::node::pod_cidr::{Addresses, Usage};
use cistern_core::masquerade::plan::EndpointEntry;
use ipnet::IpNet;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// Where the records survive.
pub trait LeaseStore: Send {
    /// Writes in this order. What was written before a failure stays written.
    ///
    /// # Errors
    /// What failed on which file, and how many of the changes are written.
    fn write(&mut self, changes: &[Change]) -> Result<(), (usize, String)>;
}

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
    /// The disk said no. The records are written with the next call; this one is not answered with an address.
    #[error("the lease cannot be made durable: {reason}; nothing was handed out, addresses that pods hold are safe")]
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
}

type Reply<T> = oneshot::Sender<Result<T, EndpointError>>;

enum Command {
    Add(AddRequest, Reply<Granted>),
    Confirm(Attachment, u64, Interface, Reply<()>),
    Del(Attachment, Reply<Option<PodLease>>),
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
        interface: Interface,
    ) -> Result<(), EndpointError> {
        self.ask(|reply| Command::Confirm(attachment, generation, interface, reply)).await
    }

    /// See [`Leases::del`]. Answers the lease that ended, if there was one.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn del(&self, attachment: Attachment) -> Result<Option<PodLease>, EndpointError> {
        self.ask(|reply| Command::Del(attachment, reply)).await
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
    /// Whether a network namespace exists.
    pub netns_exists: Box<dyn Fn(&str) -> bool + Send>,
    /// Random numbers.
    pub draw: Box<dyn FnMut() -> u64 + Send>,
    /// Where records survive.
    pub store: Box<dyn LeaseStore>,
    /// Where the kernel programs look pods up; none without a datapath.
    pub map: Option<Box<dyn EndpointMap>>,
    /// Where this node's pods get their addresses from.
    pub pool: Reader<(), PoolRow>,
    /// Devices of this node: their addresses are given to no pod.
    pub network: Reader<(), NetworkRow>,
    /// Every node of the cluster: this node's own row names the router address that was published.
    pub peers: Reader<String, PeerRow>,
    /// Gets the router address.
    pub router: Arc<Table<Ipv4Addr, ()>>,
    /// Gets the pods whose interface exists.
    pub endpoints: Arc<Table<Ipv4Addr, EndpointEntry>>,
    /// Time.
    pub clock: Clock,
}

struct Task {
    leases: Leases,
    /// Made by the state machine, not on disk yet.
    owed: VecDeque<Change>,
    parts: Parts,
}

/// Takes up the leases and returns the asking side and the task, which runs until cancelled and then answers what is
/// still in its queue.
pub fn start(parts: Parts, cancel: CancellationToken) -> (Endpoints, impl Future<Output = ()> + Send) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    (Endpoints { sender }, run(parts, receiver, cancel))
}

async fn run(mut parts: Parts, mut receiver: mpsc::Receiver<Command>, cancel: CancellationToken) {
    let records = std::mem::take(&mut parts.records);
    let now = parts.clock.now();
    let network = network(&mut parts);
    let draw = (parts.draw)();
    let Restored { leases, findings, changes } = Leases::restore(records, parts.timings, network, now, draw);
    for finding in findings {
        tracing::warn!(%finding, "pod leases");
    }
    let mut task = Task { leases, owed: changes.into(), parts };
    if task.parts.rebooted {
        let Outcome { answer, changes } = task.leases.drop_gone(&task.parts.netns_exists, now);
        task.owed.extend(changes);
        for lease in answer {
            tracing::info!(attachment = %lease.attachment, "lease ended: its network namespace is gone since the reboot");
        }
    }
    task.network_changed();
    task.publish();
    loop {
        let deadline = task.next_wake();
        tokio::select! {
            // Commands first: a pool that changes at the same time is seen by the next one.
            biased;
            () = cancel.cancelled() => break,
            command = receiver.recv() => match command {
                Some(command) => task.serve(command),
                None => break,
            },
            () = task.parts.pool.changed() => task.network_changed(),
            () = task.parts.network.changed() => task.network_changed(),
            () = task.parts.peers.changed() => task.network_changed(),
            () = tokio::time::sleep(deadline) => task.tick(),
        }
    }
    receiver.close();
    while let Some(command) = receiver.recv().await {
        task.serve(command);
    }
    if let Err(reason) = task.flush() {
        tracing::error!(reason, "lease records could not be written before the end");
    }
}

/// What the node was given to hand out, as the tables say now.
fn network(parts: &mut Parts) -> Network {
    let pool = parts.pool.snapshot();
    let network = parts.network.snapshot();
    let peers = parts.peers.snapshot();
    let exclusions = network
        .rows
        .values()
        .flat_map(|row| row.links.values())
        // The router address itself sits on the loopback device.
        .filter(|link| !link.loopback)
        .flat_map(|link| link.addresses.iter())
        .map(|address| Exclusion { address: address.addr(), label: "node-ip".to_owned() })
        .collect();
    Network {
        ipv4: pool.rows.get(&()).map(|row| row.pod_cidr),
        ipv6: None,
        exclusions,
        configured_router: Addresses { ipv4: parts.configured_router, ipv6: None },
        seen_routers: peers
            .rows
            .get(&parts.node)
            .and_then(|row| row.router)
            .map(|router| Addresses { ipv4: Some(router), ipv6: None })
            .into_iter()
            .collect(),
    }
}

/// A disk that refused is tried again after this long.
const DISK_RETRY: Duration = Duration::from_secs(1);

impl Task {
    fn next_wake(&self) -> Duration {
        if !self.owed.is_empty() {
            return DISK_RETRY;
        }
        let now = self.parts.clock.now();
        self.leases.next_deadline().map_or(Duration::from_secs(3600), |deadline| {
            Duration::try_from(deadline.duration_since(now)).unwrap_or(Duration::ZERO).max(Duration::from_millis(10))
        })
    }

    fn tick(&mut self) {
        let changes = self.leases.expire(self.parts.clock.now());
        self.owed.extend(changes);
        if let Err(reason) = self.flush() {
            tracing::error!(reason, owed = self.owed.len(), "lease records are not durable yet");
        }
        self.publish();
    }

    fn network_changed(&mut self) {
        let network = network(&mut self.parts);
        let blocked = self.parts.pool.peek().rows.get(&()).and_then(|row| row.blocked.clone());
        self.leases.hold_back(blocked);
        let draw = (self.parts.draw)();
        let Outcome { answer, changes } = self.leases.set_network(network, self.parts.clock.now(), draw);
        for finding in answer {
            tracing::warn!(%finding, "pod leases");
        }
        self.owed.extend(changes);
        self.tick();
    }

    /// Writes what is owed.
    fn flush(&mut self) -> Result<(), String> {
        if self.owed.is_empty() {
            return Ok(());
        }
        match self.parts.store.write(self.owed.make_contiguous()) {
            Ok(()) => {
                self.owed.clear();
                Ok(())
            }
            Err((written, reason)) => {
                self.owed.drain(..written.min(self.owed.len()));
                Err(reason)
            }
        }
    }

    fn durable<T>(&mut self, outcome: Outcome<T>) -> Result<T, EndpointError> {
        self.owed.extend(outcome.changes);
        self.flush().map_err(|reason| EndpointError::NotDurable { reason })?;
        Ok(outcome.answer)
    }

    fn serve(&mut self, command: Command) {
        let now = self.parts.clock.now();
        // A caller that went away gets no answer; what was done stays done, and its DEL ends it.
        match command {
            Command::Add(request, reply) => {
                let draw = (self.parts.draw)();
                let outcome = self.leases.add(request, &self.parts.netns_exists, now, draw);
                let answer = self.durable(outcome).and_then(|answer| Ok(answer?));
                // A superseded lease leaves the datapath, and the first ADD may have chosen the router.
                self.publish();
                let _ = reply.send(answer);
            }
            Command::Confirm(attachment, generation, interface, reply) => {
                let answer = self.confirm(&attachment, generation, interface, now);
                let _ = reply.send(answer);
            }
            Command::Del(attachment, reply) => {
                let outcome = self.leases.del(&attachment, now);
                // The kernel forgets the pod before its address can be given to another.
                if let Some(address) = outcome.answer.as_ref().and_then(|lease| lease.addresses.ipv4)
                    && let Some(map) = self.parts.map.as_mut()
                    && let Err(reason) = map.remove(address)
                {
                    tracing::warn!(%address, reason, "endpoint not removed at once; the reconciler does it");
                }
                let answer = self.durable(outcome);
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
                let _ = reply.send(self.durable(outcome).and_then(|answer| Ok(answer?)));
            }
            Command::Release(address, pool, reply) => {
                let outcome = self.leases.release_for_owner(address, &pool, now);
                let _ = reply.send(self.durable(outcome).and_then(|answer| Ok(answer?)));
            }
            Command::View(reply) => {
                let view =
                    View { rows: self.leases.snapshot(), usage: self.leases.usage(), router: self.leases.router() };
                let _ = reply.send(Ok(view));
            }
        }
    }

    fn confirm(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: Interface,
        now: jiff::Timestamp,
    ) -> Result<(), EndpointError> {
        let ifindex = interface.host_ifindex;
        // Checked before the datapath is told: a confirmation that is refused must leave no trace there.
        if let Some(lease) = self.leases.check(attachment, now)
            && lease.generation == generation
            && let (Some(address), Some(map)) = (lease.addresses.ipv4, self.parts.map.as_mut())
        {
            map.insert(address, EndpointEntry { ifindex, no_masquerade: false })
                .map_err(|reason| EndpointError::Datapath { address, reason })?;
        }
        let outcome = self.leases.confirm(attachment, generation, interface, now);
        let answer = self.durable(outcome).and_then(|answer| Ok(answer.map(|_| ())?));
        self.publish();
        answer
    }

    /// Publishes what others follow.
    fn publish(&self) {
        let endpoints: BTreeMap<Ipv4Addr, EndpointEntry> = self
            .leases
            .pods()
            .filter_map(|lease| match (&lease.state, lease.addresses.ipv4) {
                (LeaseState::Confirmed { interface, .. }, Some(address)) => {
                    Some((address, EndpointEntry { ifindex: interface.host_ifindex, no_masquerade: false }))
                }
                _ => None,
            })
            .collect();
        self.parts.endpoints.publish(endpoints);
        let router = self.leases.router().ipv4.map(|address| (address, ())).into_iter().collect();
        self.parts.router.publish(router);
    }
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
