//! Execution of calls.

use super::publish::endpoint;
use super::task::Task;
use super::{EndpointError, View};
use crate::reconciler::NotRealised;
use cistern_core::ipam::audit::Namespace;
use cistern_core::ipam::lease::{
    AddError, AddRequest, Attachment, CollectRequest, Granted, OwnerError, OwnerLease, OwnerRequest, PodAttachment,
    PodLease, RecordKey, Row,
};
use cistern_core::ipam::node::pod_cidr::{AddressError, Addresses};
use cistern_core::moment::Moment;
use futures::future::BoxFuture;
use jiff::{SignedDuration, Timestamp};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// How long a call waits for the datapath: less than the plugin waits for the agent.
const DATAPATH_TIMEOUT: Duration = Duration::from_secs(5);

/// Completes when the datapath has what is published for an address, or with the reason why not.
pub(super) type Realisation = BoxFuture<'static, Result<(), NotRealised>>;

/// The removal of the pod with this address from the datapath.
pub(super) type Removal = (Ipv4Addr, Realisation);

impl Task {
    pub(super) fn add(&mut self, request: AddRequest) -> Result<Granted, EndpointError> {
        let (now, draw) = (self.parts.clock.now(), (self.parts.draw)());
        let host = &self.parts.host;
        let may_live = |netns: &str| host.namespace(netns) != Namespace::Gone;
        let outcome = self.leases.add(request, may_live, now, draw);
        let answer = self.durable(outcome).map_err(|error| self.with_wall_clock(error));
        // Superseded leases must leave the datapath, and the first ADD may have chosen the router address.
        self.publish();
        answer
    }

    /// Publishes the pod for the datapath; the lease is confirmed when that is realised. `None` if there is nothing to wait
    /// for: without a datapath, for a pod without an entry, and for a confirmation that changes nothing.
    pub(super) fn present(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: &PodAttachment,
        began: Option<&Moment>,
    ) -> Option<Realisation> {
        let lease = self.leases.check(attachment, self.parts.clock.now())?;
        if lease.generation != generation || self.leases.asked_since(lease, began) {
            return None;
        }
        let (address, entry) = (lease.addresses.ipv4?, endpoint(interface, generation)?);
        self.parts.datapath.as_ref()?;
        self.presented.insert(attachment.clone(), (generation, entry));
        self.publish();
        self.realisation(address)
    }

    /// Takes back what [`Task::present`] published, and returns the error of the confirmation. The reason may be that the
    /// lease ended meanwhile.
    pub(super) fn withdraw(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: PodAttachment,
        began: Option<&Moment>,
        error: NotRealised,
    ) -> Result<(), EndpointError> {
        let lease = self.leases.check(attachment, self.parts.clock.now());
        let Some(address) = lease.filter(|lease| lease.generation == generation).and_then(|lease| lease.addresses.ipv4)
        else {
            return self.confirm(attachment, generation, interface, began);
        };
        // A repeated confirmation may have presented another interface since.
        let entry = endpoint(&interface, generation);
        if self.presented.get(attachment).is_some_and(|(_, presented)| Some(*presented) == entry) {
            self.presented.remove(attachment);
        }
        self.publish();
        match error {
            NotRealised::Ended => Err(EndpointError::ShuttingDown),
            error => Err(EndpointError::Datapath { address, reason: error.to_string() }),
        }
    }

    pub(super) fn confirm(
        &mut self,
        attachment: &Attachment,
        generation: u64,
        interface: PodAttachment,
        began: Option<&Moment>,
    ) -> Result<(), EndpointError> {
        let now = self.parts.clock.now();
        let entry = endpoint(&interface, generation);
        let outcome = self.leases.confirm(attachment, generation, interface, began, now);
        let answer = self.durable(outcome).map(drop);
        if self.presented.get(attachment).is_some_and(|(_, presented)| Some(*presented) == entry) {
            self.presented.remove(attachment);
        }
        self.publish();
        answer
    }

    pub(super) fn del(
        &mut self,
        attachment: &Attachment,
        began: Option<Moment>,
    ) -> Result<(Option<PodLease>, Vec<Removal>), EndpointError> {
        let outcome = self.leases.del(attachment, began, self.parts.clock.now());
        let answer = self.given_back(outcome, |_| vec![RecordKey::Pod(attachment.clone())]);
        self.publish();
        let lease = answer?;
        let removals = self.removals(lease.as_slice());
        Ok((lease, removals))
    }

    pub(super) fn collect(&mut self, request: &CollectRequest) -> Result<(Vec<PodLease>, Vec<Removal>), EndpointError> {
        let now = self.parts.clock.now();
        let host = &self.parts.host;
        let may_live = |netns: &str| host.namespace(netns) != Namespace::Gone;
        let outcome = self.leases.collect(request, may_live, now);
        let key = |lease: &PodLease| RecordKey::Pod(lease.attachment.clone());
        let answer = self.given_back(outcome, |ended| ended.iter().map(key).collect());
        self.next_audit = now;
        self.publish();
        let leases = answer?;
        let removals = self.removals(&leases);
        Ok((leases, removals))
    }

    /// The removal of ended leases from the datapath, as just published.
    fn removals(&self, ended: &[PodLease]) -> Vec<Removal> {
        let addresses = ended.iter().filter_map(|lease| lease.addresses.ipv4);
        addresses.filter_map(|address| Some((address, self.realisation(address)?))).collect()
    }

    /// What is published for an address, in the datapath.
    fn realisation(&self, address: Ipv4Addr) -> Option<Realisation> {
        Some(Box::pin(self.parts.datapath.as_ref()?.realised(address, DATAPATH_TIMEOUT)))
    }

    pub(super) fn check(&self, attachment: &Attachment) -> Option<(PodLease, Addresses)> {
        let lease = self.leases.check(attachment, self.parts.clock.now())?;
        Some((lease.clone(), self.leases.router()))
    }

    pub(super) fn allocate(&mut self, request: OwnerRequest) -> Result<Vec<OwnerLease>, EndpointError> {
        let (now, draw) = (self.parts.clock.now(), (self.parts.draw)());
        let outcome = self.leases.allocate_for_owner(request, now, draw);
        let answer = self.durable(outcome);
        self.publish();
        answer
    }

    pub(super) fn allocate_address(
        &mut self,
        address: IpAddr,
        owner: String,
        pool: &str,
    ) -> Result<OwnerLease, EndpointError> {
        let outcome = self.leases.allocate_address_for_owner(address, owner, pool, self.parts.clock.now());
        let answer = self.durable(outcome).map_err(|error| self.with_wall_clock(error));
        self.publish();
        answer
    }

    pub(super) fn release(&mut self, address: IpAddr, pool: &str) -> Result<OwnerLease, EndpointError> {
        let outcome = self.leases.release_for_owner(address, pool, self.parts.clock.now());
        let answer = self.given_back(outcome, |_| vec![RecordKey::Owner(pool.to_owned(), address)]);
        self.publish();
        answer.and_then(|answer| Ok(answer?))
    }

    pub(super) fn stop_expiration(&mut self, address: IpAddr, pool: &str, uuid: &str) -> Result<(), EndpointError> {
        let outcome = self.leases.stop_expiration(address, pool, uuid, self.parts.clock.now());
        let answer = self.durable(outcome);
        self.publish();
        answer
    }

    pub(super) fn view(&self) -> View {
        View {
            rows: self.rows(),
            usage: self.leases.usage(),
            router: self.leases.router(),
            durable: self.owed.is_empty(),
        }
    }

    /// Difference between the wall clock and the leases' clock.
    fn ahead(&self) -> SignedDuration {
        self.parts.wall.now().duration_since(self.parts.clock.now())
    }

    /// A time by the wall clock, in whole seconds so that it is the same for every query.
    fn shown(&self, time: Timestamp) -> Timestamp {
        time.checked_add(SignedDuration::from_secs(self.ahead().as_secs())).unwrap_or(time)
    }

    /// An error with times by the wall clock.
    fn with_wall_clock(&self, mut error: EndpointError) -> EndpointError {
        if let EndpointError::Add(AddError::Overtaken { at, .. })
        | EndpointError::Owner(OwnerError::Address(AddressError::InQuarantine { until: at, .. })) = &mut error
        {
            *at = self.shown(*at);
        }
        error
    }

    /// The addresses that are not free.
    fn rows(&self) -> Vec<Row> {
        let shown = |time: Timestamp| self.shown(time);
        let mut rows = self.leases.snapshot();
        for row in &mut rows {
            (row.since, row.until) = (row.since.map(shown), row.until.map(shown));
        }
        rows
    }
}
