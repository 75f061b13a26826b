//! Handle of the lease task.

use super::calls::Removal;
use super::task::{Command, Task};
use super::{EndpointError, VIEW_DEADLINE, View};
use cistern_core::ip::Family;
use cistern_core::ipam::lease::{
    AddRequest, Attachment, CollectRequest, ExpirationIds, Granted, OwnerLease, OwnerRequest, PodAttachment, PodLease,
};
use cistern_core::ipam::node::pod_cidr::Addresses;
use cistern_core::moment::Moment;
use futures::future::join_all;
use std::net::IpAddr;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

/// Interval of checks of [`Endpoints::durable`].
const DURABLE_INTERVAL: Duration = Duration::from_secs(1);

/// A handle; clones use the same task.
#[derive(Debug, Clone)]
pub struct Endpoints {
    sender: mpsc::Sender<Command>,
}

impl Endpoints {
    pub(super) fn new(sender: mpsc::Sender<Command>) -> Self {
        Self { sender }
    }

    async fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut Task) -> Result<T, EndpointError> + Send + 'static,
    ) -> Result<T, EndpointError> {
        let (reply, answer) = oneshot::channel();
        let command: Command = Box::new(move |task| {
            // The caller may have gone away; its DEL will release the lease.
            let _ = reply.send(call(task));
        });
        self.sender.send(command).await.map_err(|_| EndpointError::ShuttingDown)?;
        answer.await.map_err(|_| EndpointError::ShuttingDown)?
    }

    /// See [`cistern_core::ipam::lease::Leases::add`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn add(&self, request: AddRequest) -> Result<Granted, EndpointError> {
        self.ask(|task| task.add(request)).await
    }

    /// See [`cistern_core::ipam::lease::Leases::confirm`]. The pod is in the datapath when this returns.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn confirm(
        &self,
        attachment: Attachment,
        generation: u64,
        interface: PodAttachment,
        began: Option<Moment>,
    ) -> Result<(), EndpointError> {
        let presented = {
            let (attachment, interface, began) = (attachment.clone(), interface.clone(), began.clone());
            self.ask(move |task| Ok(task.present(&attachment, generation, &interface, began.as_ref()))).await?
        };
        let error = match presented {
            Some(presented) => presented.await.err(),
            None => None,
        };
        self.ask(move |task| match error {
            None => task.confirm(&attachment, generation, interface, began.as_ref()),
            Some(error) => task.withdraw(&attachment, generation, interface, began.as_ref(), error),
        })
        .await
    }

    /// See [`cistern_core::ipam::lease::Leases::del`]. Returns the released lease, if any, whose pod is no longer in the
    /// datapath then.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn del(&self, attachment: Attachment, began: Option<Moment>) -> Result<Option<PodLease>, EndpointError> {
        let (lease, removals) = self.ask(move |task| task.del(&attachment, began)).await?;
        removed(removals).await;
        Ok(lease)
    }

    /// See [`cistern_core::ipam::lease::Leases::collect`]. Returns the released leases.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn collect(&self, request: CollectRequest) -> Result<Vec<PodLease>, EndpointError> {
        let (leases, removals) = self.ask(move |task| task.collect(&request)).await?;
        removed(removals).await;
        Ok(leases)
    }

    /// See [`cistern_core::ipam::lease::Leases::check`]; also returns the router addresses.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn check(&self, attachment: Attachment) -> Result<Option<(PodLease, Addresses)>, EndpointError> {
        self.ask(move |task| Ok(task.check(&attachment))).await
    }

    /// See [`cistern_core::ipam::lease::Leases::allocate_for_owner`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn allocate(&self, request: OwnerRequest) -> Result<Vec<OwnerLease>, EndpointError> {
        self.ask(|task| task.allocate(request)).await
    }

    /// See [`cistern_core::ipam::lease::Leases::allocate_address_for_owner`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn allocate_address(
        &self,
        address: IpAddr,
        owner: String,
        pool: String,
    ) -> Result<OwnerLease, EndpointError> {
        self.ask(move |task| task.allocate_address(address, owner, &pool)).await
    }

    /// See [`cistern_core::ipam::lease::Leases::release_for_owner`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn release(&self, address: IpAddr, pool: String) -> Result<OwnerLease, EndpointError> {
        self.ask(move |task| task.release(address, &pool)).await
    }

    /// See [`cistern_core::ipam::lease::Leases::stop_expiration`].
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn stop_expiration(&self, address: IpAddr, pool: String, uuid: String) -> Result<(), EndpointError> {
        self.ask(move |task| task.stop_expiration(address, &pool, &uuid)).await
    }

    /// The current leases. Other calls wait for the disk and the kernel; this one has a deadline, so that status and metrics
    /// are available while they hang.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub async fn view(&self) -> Result<View, EndpointError> {
        timeout(VIEW_DEADLINE, self.ask(|task| Ok(task.view()))).await.unwrap_or(Err(EndpointError::NoAnswer))
    }

    /// Waits until all records are on disk.
    ///
    /// # Errors
    /// The agent is shutting down.
    pub async fn durable(&self) -> Result<(), EndpointError> {
        loop {
            match self.view().await {
                Ok(View { durable: true, .. }) => return Ok(()),
                Ok(_) | Err(EndpointError::NoAnswer) => sleep(DURABLE_INTERVAL).await,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Waits until pods are out of the datapath. A DEL does not fail because of the datapath: the reconciler retries, and the
/// address is in quarantine meanwhile.
async fn removed(removals: Vec<Removal>) {
    let outcomes = join_all(removals.into_iter().map(async |(address, realised)| (address, realised.await))).await;
    for (address, outcome) in outcomes {
        if let Err(error) = outcome {
            tracing::warn!(%address, %error, "endpoint not removed at once; the reconciler retries");
        }
    }
}

/// New UUIDs for the timers of a call with an owner string.
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

/// The family of a call with an owner string; `None` for all enabled families.
///
/// # Errors
/// The text, if it is invalid.
pub fn family(text: &str) -> Result<Option<Family>, String> {
    match text {
        "" => Ok(None),
        "ipv4" => Ok(Some(Family::Ipv4)),
        "ipv6" => Ok(Some(Family::Ipv6)),
        other => Err(format!("family {other:?}: expected ipv4, ipv6 or nothing")),
    }
}
