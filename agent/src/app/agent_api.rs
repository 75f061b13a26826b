//! Implementation of the agent API, by the tables and the lease owner.

use super::metrics;
use super::node_status::NodeStatus;
use crate::api::server::{AgentApi, Failure, IpamQuery};
use crate::api::types::{
    AddRequest, AddResponse, AddressExplanation, AddressPair, CheckRequest, CheckResponse, ConfirmRequest, DelRequest,
    DelResponse, EndpointRequest, EndpointResponse, ExplainMasqueradeRequest, ExplainMasqueradeResponse, GcRequest,
    GcResponse, Health, HostAddressing, HostFamily, IpReport, IpamAddress, IpamResponse, LeasedAddress, NodeReply,
    Status, WaitReport,
};
use crate::blocking::Blocking;
use crate::clock::{self, Clock};
use crate::leases::{self, EndpointError, Endpoints, View, log_release};
use crate::state::ServedMarker;
use crate::tables::notices::{Notices, Reason};
use crate::telemetry::metrics::{cni_add, render};
use cistern_core::cni::refusal::Refusal;
use cistern_core::ipam::lease::{
    self, AddError, Attachment, ConfirmError, DEFAULT_POOL, LeaseState, OwnerError, RowState,
};
use cistern_core::ipam::node::pod_cidr::AddressError;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Implementation of all calls.
pub struct Answers {
    /// The owner of the leases.
    pub endpoints: Endpoints,
    /// What is known of this node.
    pub node: NodeStatus,
    /// Port of dumps of kernel maps.
    pub inspection: Blocking,
    /// Output: notices to be published as events.
    pub notices: Notices,
    /// Records for CNI STATUS that this node serves.
    pub served: ServedMarker,
    /// Time.
    pub clock: Clock,
}

impl Answers {
    /// All metrics of this process, in the text format of Prometheus.
    pub async fn metrics(&self) -> String {
        // Without an answer of the lease owner, the other metrics are still served.
        let view = self.endpoints.view().await.unwrap_or_default();
        let node = self.node.clone();
        // Reading a kernel map needs a system call per entry.
        let packets = self.inspection.run(move || node.packets()).await;
        render(&metrics::agent(&self.node, &view, &packets, self.clock.now()))
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` is given")]
fn failure(error: EndpointError) -> Failure {
    Failure::new(refusal(&error), error.to_string())
}

fn refusal(error: &EndpointError) -> Refusal {
    match error {
        EndpointError::Add(add) | EndpointError::Owner(OwnerError::Add(add)) => add.refusal(),
        EndpointError::Confirm(ConfirmError::NoLease { .. }) => Refusal::NoLease,
        EndpointError::Confirm(ConfirmError::OtherGeneration { .. }) => Refusal::OtherGeneration,
        EndpointError::Owner(OwnerError::InUse { .. }) => Refusal::InUse,
        EndpointError::Owner(OwnerError::NotAllocated { .. }) => Refusal::NotAllocated,
        EndpointError::Owner(OwnerError::UnknownPool { .. }) => Refusal::UnknownPool,
        EndpointError::Owner(OwnerError::NoTimer { .. }) => Refusal::NoTimer,
        EndpointError::Owner(OwnerError::OtherTimer { .. }) => Refusal::OtherTimer,
        EndpointError::Owner(OwnerError::Address(address)) => match address {
            AddressError::AlreadyAllocated { .. } | AddressError::Excluded { .. } => Refusal::AlreadyAllocated,
            AddressError::OutOfRange { .. } => Refusal::OutOfRange,
            AddressError::FamilyDisabled { .. } => Refusal::FamilyDisabled,
            _ => Refusal::NotFree,
        },
        EndpointError::NotDurable { .. } | EndpointError::NoAnswer => Refusal::NotDurable,
        EndpointError::Datapath { .. } => Refusal::Datapath,
        EndpointError::ShuttingDown => Refusal::ShuttingDown,
    }
}

fn attachment(container_id: String, ifname: String) -> Result<Attachment, Failure> {
    for (field, value) in [("container_id", &container_id), ("ifname", &ifname)] {
        if value.is_empty() {
            return Err(Failure::new(Refusal::BadRequest, format!("{field} is empty; expected a name")));
        }
    }
    Ok(Attachment { container_id, ifname })
}

fn parse_ip(text: &str) -> Result<IpAddr, Failure> {
    text.parse()
        .map_err(|_| Failure::new(Refusal::InvalidIp, format!("{text:?} is not an IP address; nothing was changed")))
}

/// `ipam` 2.1.2: the pool is required with an address.
fn required_pool(query: &IpamQuery) -> Result<String, Failure> {
    if query.pool.is_empty() {
        return Err(Failure::new(Refusal::PoolRequired, "pool is empty; expected the name of the address's pool"));
    }
    Ok(query.pool.clone())
}

fn no_ipv4() -> Failure {
    Failure::new(Refusal::NoIpv4, "the lease holds no IPv4 address, and this node serves IPv4 only")
}

impl AgentApi for Answers {
    async fn add(&self, request: AddRequest) -> Result<AddResponse, Failure> {
        let pod = request.pod.map(|pod| lease::Pod { namespace: pod.namespace, name: pod.name, uid: pod.uid });
        let granted = self
            .endpoints
            .add(lease::AddRequest {
                attachment: attachment(request.container_id, request.ifname)?,
                network: request.network,
                pod,
                netns: request.netns,
                began: request.began,
            })
            .await
            .inspect_err(|error| {
                if let EndpointError::Add(AddError::Exhausted { .. }) = error {
                    self.notices.publish(&self.node.node, Reason::AddressesExhausted, error.to_string());
                }
            })
            .map_err(failure)?;
        let address = granted.lease.addresses.ipv4.ok_or_else(no_ipv4)?;
        // The first ADD of a node may arrive while its router address is being added, which is the source of the pod's
        // route on the node. The lease is kept, so a retry gets the same address.
        let router = granted.router.ipv4.ok_or_else(no_ipv4)?;
        if let Err(error) = self.node.router_is_set(router).await {
            let reason = format!(
                "router address {router} of {address} is not on this node yet ({error}); the address remains allocated to \
                 the pod"
            );
            return Err(Failure::new(Refusal::RouterNotSet, reason));
        }
        let Attachment { container_id, ifname } = &granted.lease.attachment;
        let pod = granted.lease.pod.as_ref().map(tracing::field::display);
        tracing::info!(container_id, ifname, pod, %address, "address allocated");
        let pod_cidr = self.node.pod_cidr().filter(|pod_cidr| pod_cidr.contains(&address));
        self.served.mark_first().await;
        let leased = LeasedAddress {
            address: address.into(),
            prefix_len: pod_cidr.map_or(32, |pod_cidr| pod_cidr.prefix_len()),
            router: router.into(),
        };
        Ok(AddResponse::new(vec![leased], self.node.pod_mtu(), granted.lease.generation))
    }

    async fn confirm(&self, request: ConfirmRequest) -> Result<(), Failure> {
        let attachment = attachment(request.container_id, request.ifname)?;
        let ConfirmRequest { generation, interface, began, .. } = request;
        self.endpoints.confirm(attachment, generation, interface, began.clone()).await.map_err(failure)?;
        let took = began.zip(clock::uptime()).and_then(|(began, now)| now.checked_sub(began.uptime()));
        took.into_iter().for_each(cni_add);
        Ok(())
    }

    async fn del(&self, request: DelRequest) -> Result<DelResponse, Failure> {
        let lease = self
            .endpoints
            .del(attachment(request.container_id, request.ifname)?, request.began)
            .await
            .map_err(failure)?;
        if let Some(lease) = &lease {
            log_release(lease, "address released");
        }
        Ok(DelResponse { released: lease.and_then(|lease| lease.addresses.ipv4) })
    }

    async fn check(&self, request: CheckRequest) -> Result<CheckResponse, Failure> {
        let attachment = attachment(request.container_id, request.ifname)?;
        let held = self.endpoints.check(attachment.clone()).await.map_err(failure)?;
        let (lease, router) =
            held.ok_or_else(|| Failure::new(Refusal::NoLease, format!("{attachment} holds no address on this node")))?;
        let interface = match lease.state {
            LeaseState::Confirmed { interface, .. } => Some(interface),
            LeaseState::Provisional { .. } => None,
        };
        Ok(CheckResponse {
            address: lease.addresses.ipv4.ok_or_else(no_ipv4)?,
            router: router.ipv4.ok_or_else(no_ipv4)?,
            interface,
        })
    }

    async fn gc(&self, request: GcRequest) -> Result<GcResponse, Failure> {
        let mut valid = BTreeSet::new();
        for known in request.valid {
            valid.insert(attachment(known.container_id, known.ifname)?);
        }
        let request = lease::CollectRequest { network: request.network, valid, began: request.began };
        let ended = self.endpoints.collect(request).await.map_err(failure)?;
        for lease in &ended {
            log_release(lease, "address released: the runtime no longer knows its owner");
        }
        let released = ended.into_iter().map(|lease| lease.attachment).collect();
        Ok(GcResponse { released })
    }

    async fn allocate(&self, query: IpamQuery) -> Result<IpamResponse, Failure> {
        let family = leases::family(&query.family).map_err(|text| Failure::new(Refusal::BadFamily, text))?;
        let expiration = query.expiration.then(|| leases::expiration_ids(&mut rand::random));
        let request = lease::OwnerRequest {
            family,
            owner: query.owner,
            pool: Some(query.pool).filter(|pool| !pool.is_empty()),
            expiration,
        };
        let leases = self.endpoints.allocate(request).await.map_err(failure)?;
        let view = self.endpoints.view().await.map_err(failure)?;
        let router = view.router.ipv4.ok_or_else(no_ipv4)?;
        let alloc_range = self.node.pod_cidr().map(|cidr| cidr.to_string()).unwrap_or_default();
        let ipv4 = leases.iter().find_map(|lease| match lease.address {
            IpAddr::V4(ip) => Some((ip, lease)),
            IpAddr::V6(_) => None,
        });
        Ok(IpamResponse {
            host_addressing: HostAddressing { ipv4: Some(HostFamily { enabled: true, ip: router, alloc_range }) },
            address: AddressPair {
                ipv4: ipv4.map(|(ip, _)| ip),
                ipv4_pool_name: ipv4.map(|(_, lease)| lease.pool.clone()),
            },
            ipv4: ipv4.map(|(ip, lease)| IpamAddress {
                ip,
                gateway: router,
                cidrs: self.node.native_cidrs(),
                expiration_uuid: lease.expiration.as_ref().map(|expiration| expiration.uuid.clone()),
            }),
        })
    }

    async fn allocate_ip(&self, ip: String, query: IpamQuery) -> Result<(), Failure> {
        let (ip, pool) = (parse_ip(&ip)?, required_pool(&query)?);
        self.endpoints.allocate_address(ip, query.owner, pool).await.map(|_| ()).map_err(failure)
    }

    async fn release_ip(&self, ip: String, query: IpamQuery) -> Result<(), Failure> {
        let (ip, pool) = (parse_ip(&ip)?, required_pool(&query)?);
        self.endpoints.release(ip, pool).await.map(|_| ()).map_err(failure)
    }

    /// The timers of the addresses that the endpoint presents; another UUID, or none that runs, ends the call.
    async fn create_endpoint(&self, request: EndpointRequest) -> Result<EndpointResponse, Failure> {
        let addressing = request.addressing.unwrap_or_default();
        let presented: Vec<_> = addressing.presented().collect();
        if presented.is_empty() {
            let message = "addressing: no address with its expiration UUID; expected ipv4 and ipv4-expiration-uuid of an \
                           address of POST /v1/ipam: endpoints are created by the CNI plugin alone";
            return Err(Failure::new(Refusal::BadRequest, message));
        }
        for (address, pool, uuid) in presented {
            let pool = if pool.is_empty() { DEFAULT_POOL } else { pool };
            let stopped = self.endpoints.stop_expiration(parse_ip(address)?, pool.to_owned(), uuid.to_owned()).await;
            stopped.map_err(failure)?;
        }
        Ok(EndpointResponse::of(addressing))
    }

    async fn addresses(&self) -> Result<Vec<IpReport>, Failure> {
        let view = self.endpoints.view().await.map_err(failure)?;
        Ok(view.rows.into_iter().filter_map(ip_report).collect())
    }

    /// A node that is ready counts as having served before the answer leaves: the agent may be killed right after it.
    async fn health(&self) -> Health {
        let mut health = self.node.health();
        if health.ready {
            self.served.mark_first().await;
        }
        health.starting = !health.ready && !self.served.is_marked();
        health
    }

    async fn status(&self) -> Status {
        let view = self.endpoints.view().await;
        // Without an answer of the lease owner, the rest of the status is still reported.
        let mut status = self.node.status(view.as_ref().unwrap_or(&View::default()));
        status.waits.extend(view.err().map(|error| WaitReport {
            name: "lease owner".to_owned(),
            reason: error.to_string(),
            since: self.clock.now().to_string(),
            next_try: None,
        }));
        status.health.starting = !status.health.ready && !self.served.is_marked();
        status
    }

    async fn map(&self, name: String) -> Result<serde_json::Value, Failure> {
        // A table of flows takes hundreds of thousands of system calls.
        let node = self.node.clone();
        self.inspection.run(move || node.map(&name)).await
    }

    async fn explain_ip(&self, ip: String) -> Result<AddressExplanation, Failure> {
        let address = parse_ip(&ip)?;
        let view = self.endpoints.view().await.map_err(failure)?;
        Ok(self.node.explain_ip(&view, address))
    }

    async fn explain_node(&self, name: Option<String>) -> NodeReply {
        let view = self.endpoints.view().await.unwrap_or_default();
        self.node.explain_node(&view, name.as_deref())
    }

    async fn explain_masquerade(
        &self,
        request: ExplainMasqueradeRequest,
    ) -> Result<ExplainMasqueradeResponse, Failure> {
        self.node.explain_masquerade(&request).await
    }
}

fn ip_report(row: lease::Row) -> Option<IpReport> {
    let IpAddr::V4(address) = row.address else { return None };
    // Only a pod's lease has an attachment as owner; an owner string may contain a slash, too.
    let attachment = match row.state {
        RowState::Provisional | RowState::Confirmed => row.holder.split_once('/'),
        RowState::Owner | RowState::Quarantined | RowState::Reserved => None,
    };
    let (container_id, ifname) = attachment.map(|(id, ifname)| (id.to_owned(), ifname.to_owned())).unzip();
    Some(IpReport {
        address,
        state: row.state.to_string(),
        owner: row.pod.map_or(row.holder, |pod| pod.to_string()),
        container_id,
        ifname,
        since: row.since.map(|time| time.to_string()),
        until: row.until.map(|time| time.to_string()),
    })
}
