//! The agent API answered from the tables and by the owner of the leases.

use super::metrics;
use super::node_status::NodeStatus;
use crate::api::server::{AgentApi, Failure, IpamQuery};
use crate::api::types::{
    AddRequest, AddResponse, AddressExplanation, AddressPair, CheckRequest, CheckResponse, ConfirmRequest, DelRequest,
    DelResponse, ExplainMasqueradeRequest, ExplainMasqueradeResponse, GcRequest, GcResponse, Health, HostAddressing,
    HostFamily, IpReport, IpamAddress, IpamResponse, NodeReply, Status,
};
use crate::clock::{self, Clock};
use crate::leases::{self, EndpointError, Endpoints};
use crate::tables::notices::{Notices, Reason};
use crate::telemetry::metrics::{cni_add, render};
use cistern_core::ipam::lease::{self, AddError, Attachment, ConfirmError, LeaseState, OwnerError, RowState};
use cistern_core::ipam::node::pod_cidr::AddressError;
use std::collections::BTreeSet;
use std::net::IpAddr;

/// Answers every call.
pub struct Answers {
    /// The owner of the leases.
    pub endpoints: Endpoints,
    /// What is known of this node.
    pub node: NodeStatus,
    /// Gets what people should find as events.
    pub notices: Notices,
    /// Time.
    pub clock: Clock,
}

impl Answers {
    /// Every metric of this process, in the text format of Prometheus.
    pub async fn metrics(&self) -> String {
        // An owner of leases that is ending has nothing to tell; the rest still has.
        let view = self.endpoints.view().await.unwrap_or_default();
        let node = self.node.clone();
        // Reading a kernel map takes a system call for each of its entries.
        let packets = tokio::task::spawn_blocking(move || node.packets()).await.unwrap_or_default();
        render(&metrics::agent(&self.node, &view, &packets, self.clock.now()))
    }
}

/// Which HTTP status and word a refusal gets, and whether trying again can help.
fn failure(error: EndpointError) -> Failure {
    let message = error.to_string();
    match error {
        EndpointError::Add(add) => match add {
            AddError::Overtaken { .. } => Failure::permanent(409, add.reason(), message),
            _ => Failure::retryable(503, add.reason(), message),
        },
        EndpointError::Confirm(ConfirmError::NoLease { .. }) => Failure::permanent(404, "no-lease", message),
        EndpointError::Confirm(ConfirmError::OtherGeneration { .. }) => {
            Failure::permanent(409, "other-generation", message)
        }
        EndpointError::Owner(OwnerError::Add(add)) => Failure::retryable(503, add.reason(), message),
        EndpointError::Owner(OwnerError::InUse { .. }) => Failure::permanent(500, "in-use", message),
        EndpointError::Owner(OwnerError::NotAllocated { .. }) => Failure::permanent(404, "not-allocated", message),
        EndpointError::Owner(OwnerError::UnknownPool { .. }) => Failure::permanent(400, "unknown-pool", message),
        EndpointError::Owner(OwnerError::Address(address)) => match address {
            AddressError::AlreadyAllocated { .. } | AddressError::Excluded { .. } => {
                Failure::permanent(409, "already-allocated", message)
            }
            AddressError::OutOfRange { .. } => Failure::permanent(400, "out-of-range", message),
            AddressError::FamilyDisabled { .. } => Failure::permanent(501, "family-disabled", message),
            _ => Failure::retryable(503, "not-free", message),
        },
        EndpointError::Owner(_) => Failure::permanent(500, "refused", message),
        EndpointError::NotDurable { .. } => Failure::retryable(507, "not-durable", message),
        EndpointError::Datapath { .. } => Failure::retryable(500, "datapath", message),
        EndpointError::ShuttingDown => Failure::retryable(503, "shutting-down", message),
    }
}

fn attachment(container_id: String, ifname: String) -> Result<Attachment, Failure> {
    for (field, value) in [("container_id", &container_id), ("ifname", &ifname)] {
        if value.is_empty() {
            return Err(Failure::permanent(400, "bad-request", format!("{field} is empty; expected a name")));
        }
    }
    Ok(Attachment { container_id, ifname })
}

fn parse_ip(text: &str) -> Result<IpAddr, Failure> {
    text.parse().map_err(|_| {
        Failure::permanent(400, "invalid-ip", format!("{text:?} is not an IP address; nothing was changed"))
    })
}

/// `ipam` 2.1.2: the pool is compulsory where an address is named.
fn required_pool(query: &IpamQuery) -> Result<String, Failure> {
    if query.pool.is_empty() {
        return Err(Failure::permanent(400, "pool-required", "pool is empty; expected the name of the address's pool"));
    }
    Ok(query.pool.clone())
}

pub(super) fn told_back(lease: &lease::PodLease, message: &str) {
    let Attachment { container_id, ifname } = &lease.attachment;
    let pod = lease.pod.as_ref().map(tracing::field::display);
    let address = lease.addresses.ipv4.as_ref().map(tracing::field::display);
    tracing::info!(container_id, ifname, pod, address, "{message}");
}

fn no_ipv4() -> Failure {
    Failure::permanent(500, "no-ipv4", "the lease holds no IPv4 address, and this node serves IPv4 only")
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
        // The first ADD of a node may come in the moment in which its router address is chosen; the pod's route on the
        // node has it as source. The lease stays, so the next try gets the same address.
        if !self.node.router_is_set().await {
            let reason =
                format!("the router address of {address} is not on this node yet; the address stays with the pod");
            return Err(Failure::retryable(503, "router-not-set", reason));
        }
        let Attachment { container_id, ifname } = &granted.lease.attachment;
        let pod = granted.lease.pod.as_ref().map(tracing::field::display);
        tracing::info!(container_id, ifname, pod, %address, "address given");
        let pod_cidr = self.node.pod_cidr().filter(|pod_cidr| pod_cidr.contains(&address));
        Ok(AddResponse {
            address,
            prefix_len: pod_cidr.map_or(32, |pod_cidr| pod_cidr.prefix_len()),
            router: granted.router.ipv4.ok_or_else(no_ipv4)?,
            mtu: self.node.pod_mtu(),
            generation: granted.lease.generation,
        })
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
            told_back(lease, "address given back");
        }
        Ok(DelResponse { released: lease.and_then(|lease| lease.addresses.ipv4) })
    }

    async fn check(&self, request: CheckRequest) -> Result<CheckResponse, Failure> {
        let attachment = attachment(request.container_id, request.ifname)?;
        let held = self.endpoints.check(attachment.clone()).await.map_err(failure)?;
        let (lease, router) = held.ok_or_else(|| {
            Failure::permanent(404, "no-lease", format!("{attachment} holds no address on this node"))
        })?;
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
        let ended = self.endpoints.collect(request.network, valid).await.map_err(failure)?;
        for lease in &ended {
            told_back(lease, "address given back: the runtime no longer knows its holder");
        }
        let released = ended.into_iter().map(|lease| lease.attachment).collect();
        Ok(GcResponse { released })
    }

    async fn allocate(&self, query: IpamQuery) -> Result<IpamResponse, Failure> {
        let family = leases::family(&query.family).map_err(|text| Failure::permanent(400, "bad-family", text))?;
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

    async fn addresses(&self) -> Result<Vec<IpReport>, Failure> {
        let view = self.endpoints.view().await.map_err(failure)?;
        Ok(view.rows.into_iter().filter_map(ip_report).collect())
    }

    async fn health(&self) -> Health {
        self.node.health()
    }

    async fn status(&self) -> Status {
        // An owner of leases that is ending has nothing to tell; the rest of the status still has.
        let view = self.endpoints.view().await.unwrap_or_default();
        self.node.status(&view)
    }

    async fn map(&self, name: String) -> Result<serde_json::Value, Failure> {
        self.node.map(&name)
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
        self.node.explain_masquerade(&request)
    }
}

fn ip_report(row: lease::Row) -> Option<IpReport> {
    let IpAddr::V4(address) = row.address else { return None };
    // Only a pod's lease has an attachment as its holder; an owner text may hold a slash too.
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
