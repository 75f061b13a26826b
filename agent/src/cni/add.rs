//! ADD.

use super::attachment::Attachment;
use super::interface::{Ends, Made, mac_text};
use super::{agent_failure, kernel_failure};
use crate::api::client::ClientError;
use crate::api::types::{AddRequest, AddResponse, ConfirmRequest, Interface, LeasedAddress, PodAttachment, PodRef};
use crate::netlink::NetlinkError;
use cistern_core::cni::netconf::{NetConf, Role};
use cistern_core::cni::plan::{self, Step, undo_after};
use cistern_core::cni::spec::{AddResult, Attached, AttachedPair, Call, Code, Failure};
use ipnet::Ipv4Net;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

/// How long an ADD waits for an agent that is starting, all its calls together.
const AGENT_START_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of retries while an agent is starting.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Carries out an ADD.
pub(super) fn add(conf: NetConf, call: Call) -> Result<AddResult, Failure> {
    let ends = match conf.role {
        Role::Interface => Some(open_ends(&conf, &call)?),
        Role::Ipam => None,
    };
    let attachment = Attachment::locked(call, &conf.paths)?;
    let patience = Instant::now() + AGENT_START_TIMEOUT;
    let progress = Progress { ends, lease: None, indexes: None };
    Add { conf, attachment, patience, lease_is_open: false, progress }.run()
}

/// Opens both ends of the pair that is to be created, and refuses what can be refused before anything is asked for.
fn open_ends(conf: &NetConf, call: &Call) -> Result<Ends, Failure> {
    if conf.prev_result.is_some() {
        let message = "prevResult: present; expected none, since cistern-cni creates the interface and comes first";
        return Err(Failure::new(Code::UnsupportedField, message));
    }
    // Nothing is asked of the agent for a namespace that does not exist.
    let ends = Ends::open(&call.netns).map_err(|error| {
        kernel_failure(&error).with_details(format!("CNI_NETNS: {:?}; nothing was changed", call.netns))
    })?;
    if ends.is_host().map_err(|error| kernel_failure(&error))? {
        let message = format!("CNI_NETNS: {:?} is the node's own network namespace; expected a pod's", call.netns);
        return Err(Failure::new(Code::Environment, message));
    }
    Ok(ends)
}

/// A lease as this build can use it.
#[derive(Clone, Copy)]
struct Lease {
    address: Ipv4Addr,
    prefix_len: u8,
    router: Ipv4Addr,
    mtu: u32,
    generation: u64,
}

impl TryFrom<&AddResponse> for Lease {
    type Error = Failure;

    fn try_from(response: &AddResponse) -> Result<Self, Failure> {
        let ipv4 = |leased: LeasedAddress| match (leased.address, leased.router) {
            (IpAddr::V4(address), IpAddr::V4(router)) => Some((address, leased.prefix_len, router)),
            _ => None,
        };
        let Some((address, prefix_len, router)) = response.leased().into_iter().find_map(ipv4) else {
            return Err(Failure::new(Code::Decode, "the lease has no IPv4 address; expected one"));
        };
        Ok(Self { address, prefix_len, router, mtu: response.mtu, generation: response.generation })
    }
}

/// What is known by now.
struct Progress {
    ends: Option<Ends>,
    lease: Option<Lease>,
    /// Indexes of the host's and the pod's side.
    indexes: Option<(u32, u32)>,
}

struct Add {
    conf: NetConf,
    attachment: Attachment,
    /// Until when to wait for a starting agent.
    patience: Instant,
    /// A call for a lease was interrupted: the agent may have allocated one.
    lease_is_open: bool,
    progress: Progress,
}

impl Add {
    fn run(mut self) -> Result<AddResult, Failure> {
        for step in plan::add(self.conf.role) {
            if let Err(failure) = self.step(*step) {
                return Err(self.undone(*step, failure));
            }
        }
        let Some(lease) = self.progress.lease else {
            return Err(Failure::new(Code::Agent, "no lease after every step"));
        };
        let (pair, prefix_len) = match self.conf.role {
            Role::Interface => (Some(self.attached_pair()), 32),
            Role::Ipam => (None, lease.prefix_len),
        };
        let address = Ipv4Net::new(lease.address, prefix_len)
            .map_err(|error| Failure::new(Code::Decode, format!("prefix_len {prefix_len} of the lease: {error}")))?;
        Ok(Attached { pair, address, router: lease.router, dns: self.conf.dns.take() }.result(self.conf.version))
    }

    fn attached_pair(&self) -> AttachedPair {
        let (pair, call) = (&self.attachment.pair, &self.attachment.call);
        AttachedPair {
            host: (pair.host.clone(), mac_text(pair.host_mac)),
            pod: (call.ifname.clone(), mac_text(pair.pod_mac)),
            netns: call.netns.clone(),
            mtu: self.mtu(),
        }
    }

    fn mtu(&self) -> u32 {
        self.conf.mtu.or(self.progress.lease.map(|lease| lease.mtu)).unwrap_or_default()
    }

    fn step(&mut self, step: Step) -> Result<(), Failure> {
        let mtu = self.mtu();
        let (call, pair) = (&self.attachment.call, &self.attachment.pair);
        let Progress { ends, lease, indexes } = &mut self.progress;
        let kernel = |outcome: Result<(), NetlinkError>| outcome.map_err(|error| kernel_failure(&error));
        match (step, ends, *lease, indexes) {
            (Step::Lease, _, _, _) => {
                let lease = self.lease()?;
                self.progress.lease = Some(lease);
                Ok(())
            }
            (Step::MakePair, Some(ends), _, indexes) => {
                match ends.make(pair, &call.ifname, mtu).map_err(|error| kernel_failure(&error))? {
                    Made::Pair { host, pod } => *indexes = Some((host, pod)),
                    Made::NameTaken { kind } => {
                        let message = format!(
                            "CNI_IFNAME: {:?}; expected a free name: the pod has a device ({kind}) of it that Cistern did \
                             not create",
                            call.ifname
                        );
                        return Err(Failure::new(Code::Environment, message));
                    }
                }
                Ok(())
            }
            (Step::SetUpPod, Some(ends), Some(lease), Some((_, pod))) => {
                kernel(ends.set_up_pod(pair, *pod, lease.address, lease.router))
            }
            (Step::SetUpHost, Some(ends), Some(lease), Some((host, pod))) => {
                kernel(ends.set_up_host(*host, lease.address, lease.router))?;
                kernel(ends.wait_until_they_send(*host, *pod))
            }
            (Step::Confirm, _, Some(lease), Some((host, _))) => {
                let interface =
                    Interface { host_ifname: pair.host.clone(), host_ifindex: *host, mac: mac_text(pair.pod_mac) };
                self.confirm(lease.generation, PodAttachment::Pair(interface))
            }
            (Step::Confirm, None, Some(lease), None) => {
                let (plugin, routed) = (self.conf.plugin.clone(), self.conf.is_routed());
                self.confirm(lease.generation, PodAttachment::Plugin { plugin, routed })
            }
            _ => Err(Failure::new(Code::Agent, format!("step {step:?} came before what it needs"))),
        }
    }

    /// A call of an ADD, which is idempotent: waits for a starting agent.
    fn ask<Q: Serialize, R: DeserializeOwned>(&mut self, path: &str, request: &Q) -> Result<R, ClientError> {
        loop {
            match self.attachment.client.post(path, request) {
                Err(error) if is_starting(&error) && Instant::now() < self.patience => {
                    self.lease_is_open |= error.may_have_happened();
                    std::thread::sleep(RETRY_INTERVAL);
                }
                answer => return answer,
            }
        }
    }

    fn confirm(&mut self, generation: u64, interface: PodAttachment) -> Result<(), Failure> {
        let call = &self.attachment.call;
        let request = ConfirmRequest {
            container_id: call.container_id.clone(),
            ifname: call.ifname.clone(),
            generation,
            interface,
            began: self.attachment.began.clone(),
        };
        self.ask("/v1/cni/confirm", &request).map_err(|error| agent_failure(&error))
    }

    fn lease(&mut self) -> Result<Lease, Failure> {
        let call = &self.attachment.call;
        let request = AddRequest {
            container_id: call.container_id.clone(),
            ifname: call.ifname.clone(),
            netns: call.netns.clone(),
            network: Some(self.conf.name.clone()),
            pod: call.pod().map(|(namespace, name, uid)| PodRef { namespace, name, uid }),
            began: self.attachment.began.clone(),
        };
        let response: AddResponse = self.ask("/v1/cni/add", &request).map_err(|error| {
            self.lease_is_open |= error.may_have_happened();
            agent_failure(&error).with_details("no address was allocated; running pods are not affected")
        })?;
        self.lease_is_open = true;
        Lease::try_from(&response)
    }

    /// Undoes what the steps up to `step` did. What cannot be undone is in the details.
    fn undone(&mut self, step: Step, failure: Failure) -> Failure {
        // An agent that rejected the call, or was not running, has no lease for this ADD.
        let undo =
            if step == Step::Lease && !self.lease_is_open { Vec::new() } else { undo_after(self.conf.role, step) };
        let errors: Vec<String> = undo
            .into_iter()
            .filter_map(|undo| self.attachment.undo_or_queue(undo).err())
            .map(|failure| failure.message)
            .collect();
        if errors.is_empty() {
            return failure;
        }
        let details = format!("{}; not undone: {}", failure.details, errors.join("; "));
        failure.with_details(details.trim_start_matches("; ").to_owned())
    }
}

/// Whether the agent is about to serve: it is not running yet, has no pool yet, or terminated during the call. An agent
/// that accepts the call and does not answer is stuck instead.
fn is_starting(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        ClientError::Broken { source, .. } => !matches!(source.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock),
        ClientError::Refused { error, .. } => error.refusal().is_some_and(|refusal| refusal.is_starting()),
        ClientError::Malformed { .. } => false,
    }
}
