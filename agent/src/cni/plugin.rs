//! The verbs.

use super::deletion_queue::{DeletionQueue, QUEUE_DIR, QueuedDel};
use super::interface::{self, Ends, Made, Pair, mac_text, parse_mac};
use crate::api::client::{Client, ClientError};
use crate::api::types::{
    AddRequest, AddResponse, Behind, CheckRequest, CheckResponse, ConfirmRequest, DelRequest, DelResponse, GcRequest,
    GcResponse, Interface, Moment, PodRef, SOCKET_PATH,
};
use crate::clock;
use crate::netlink::NetlinkError;
use cistern_core::cni::plan::{self, Step, Undo, undo_after};
use cistern_core::cni::spec::{
    AddResult, Attached, AttachedPair, Call, Code, Failure, NetConf, ResultInterface, Role, VERSIONS, Verb, Version,
    VersionResult, verb,
};
use ipnet::Ipv4Net;
use jiff::Timestamp;
use nix::errno::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{ErrorKind, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// A runtime waits minutes for an ADD; an agent that does not answer in this time is stuck.
const AGENT_TIMEOUT: Duration = Duration::from_secs(20);

/// How long an ADD waits for an agent that is starting, all its calls together. With [`AGENT_TIMEOUT`] it is below the least
/// that runtimes give a plugin: the kubelet gives two minutes to all of a sandbox.
const STARTING: Duration = Duration::from_secs(10);

/// An agent that is starting is asked again after this long.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Runs the plugin on this process's environment and standard streams. Whatever happens, what is printed is JSON as the
/// specification says, unless nobody but a person called.
#[must_use]
pub fn main() -> ExitCode {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(command) = variable("CNI_COMMAND") else {
        println!(
            "cistern-cni {}: the CNI plugin of Cistern, versions {}. A container runtime calls it, with CNI_COMMAND and \
             the network configuration on standard input.",
            env!("CARGO_PKG_VERSION"),
            VERSIONS.join(", ")
        );
        return ExitCode::SUCCESS;
    };
    let mut stdin = Vec::new();
    let read = std::io::stdin().lock().read_to_end(&mut stdin);
    let mut version = Version::NEWEST;
    let outcome = match read {
        // A defect must not leave the runtime without an answer that it can read.
        Ok(_) => catch_unwind(AssertUnwindSafe(|| run(&command, &stdin, &variable, &mut version)))
            .unwrap_or_else(|_| Err(Failure::new(Code::Io, "internal error; standard error has its place"))),
        Err(error) => Err(Failure::new(Code::Io, format!("standard input cannot be read: {error}"))),
    };
    let (text, code) = match outcome {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(failure) => {
            eprintln!("cistern-cni {command}: {failure}");
            (encode(&failure.object(version)).unwrap_or_default(), ExitCode::FAILURE)
        }
    };
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

fn encode<T: Serialize>(value: &T) -> Result<String, Failure> {
    serde_json::to_string(value).map_err(|error| Failure::new(Code::Io, format!("result: {error}")))
}

/// Carries out one call and answers what to print. `version` is set as soon as it is known.
fn run(
    command: &str,
    stdin: &[u8],
    variable: &impl Fn(&str) -> Option<String>,
    version: &mut Version,
) -> Result<String, Failure> {
    let verb = verb(command)?;
    if verb == Verb::Version {
        let cni_version = NetConf::version_asked_for(stdin);
        return encode(&VersionResult { cni_version, supported_versions: VERSIONS });
    }
    let conf = NetConf::parse(stdin)?;
    *version = conf.version()?;
    let since = match verb {
        Verb::Check => Version::V0_4_0,
        Verb::Status | Verb::Gc => Version::V1_1_0,
        Verb::Add | Verb::Del | Verb::Version => Version::V0_3_1,
    };
    if *version < since {
        let message = format!("{verb} belongs to CNI {} and later; cniVersion is {}", since.name(), version.name());
        return Err(Failure::new(Code::Version, message));
    }
    match verb {
        Verb::Add => {
            let role = conf.validate()?;
            let call = Call::parse(verb, variable)?;
            encode(&Attachment::new(conf, call, role).add(*version)?)
        }
        Verb::Del => {
            // What stopped an ADD must not stop its DEL; that of our own interface does all that any does.
            let role = conf.role().unwrap_or(Role::Interface);
            let call = Call::parse(verb, variable)?;
            Attachment::new(conf, call, role).del()?;
            Ok(String::new())
        }
        Verb::Check => {
            let role = conf.validate()?;
            let call = Call::parse(verb, variable)?;
            Attachment::new(conf, call, role).check()?;
            Ok(String::new())
        }
        Verb::Status => status(&conf).map(|()| String::new()),
        Verb::Gc => gc(&conf).map(|()| String::new()),
        Verb::Version => Ok(String::new()),
    }
}

fn client(conf: &NetConf) -> Client {
    let socket = conf.socket_path.clone().unwrap_or_else(|| SOCKET_PATH.to_owned());
    Client::new(PathBuf::from(socket), AGENT_TIMEOUT)
}

/// The agent's answer as the runtime gets it.
fn agent_failure(error: &ClientError) -> Failure {
    let code = match error {
        _ if error.is_retryable() => Code::TryAgainLater,
        ClientError::Refused { .. } => Code::Agent,
        _ => Code::Decode,
    };
    Failure::new(code, error.to_string())
}

/// Whether the agent is about to serve: it is not there yet, has no pool yet, or ended in the middle of the call. One
/// that takes the call and does not answer it is stuck instead.
fn is_starting(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. } => true,
        ClientError::Broken { source, .. } => !matches!(source.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock),
        ClientError::Refused { error, .. } => {
            matches!(error.reason.as_str(), "held-back" | "shutting-down" | "waiting-for-pod-cidr")
        }
        ClientError::Malformed { .. } => false,
    }
}

fn kernel_failure(error: &NetlinkError) -> Failure {
    let code = match error {
        NetlinkError::Namespace { .. } if error.is_missing() => Code::UnknownContainer,
        // What is there is no network namespace.
        NetlinkError::Namespace { errno: Errno::EINVAL | Errno::ENOTDIR | Errno::EISDIR, .. } => Code::Environment,
        NetlinkError::Namespace { .. } => Code::Io,
        _ => Code::Kernel,
    };
    Failure::new(code, error.to_string())
}

/// STATUS (`ipam` decision 6): an agent that is away for a restart is no reason to take the node out of service; one
/// that says that it cannot serve is.
fn status(conf: &NetConf) -> Result<(), Failure> {
    let mut client = client(conf);
    match client.health() {
        Ok(health) if health.ready => Ok(()),
        Ok(health) => {
            let message = format!("the Cistern agent cannot serve pods: {}", health.reasons.join("; "));
            Err(Failure::new(Code::NotAvailable, message))
        }
        // The marker of an agent that has served since the boot: it is away, and will be back.
        Err(error) if error.is_retryable() && served_before(client.socket()) => Ok(()),
        Err(error) => Err(Failure::new(Code::NotAvailable, error.to_string())),
    }
}

/// How long an agent may be away without the node being reported as unable to serve.
const AWAY: Duration = Duration::from_secs(300);

fn served_before(socket: &Path) -> bool {
    let Some(directory) = socket.parent() else { return false };
    let marker = directory.join("served");
    std::fs::metadata(marker)
        .and_then(|metadata| metadata.modified())
        .ok()
        .and_then(|modified| modified.elapsed().ok())
        .is_some_and(|age| age < AWAY)
}

fn gc(conf: &NetConf) -> Result<(), Failure> {
    let valid = conf
        .valid()?
        .iter()
        .map(|attachment| crate::api::types::Attachment {
            container_id: attachment.container_id.clone(),
            ifname: attachment.ifname.clone(),
        })
        .collect();
    let request = GcRequest { network: conf.name.clone(), valid };
    let released: GcResponse = client(conf).post("/v1/cni/gc", &request).map_err(|error| agent_failure(&error))?;
    let mut errors = Vec::new();
    for attachment in released.released {
        // In the role of an IPAM plugin there is none.
        if let Err(error) = interface::remove(&Pair::of(&attachment.container_id, &attachment.ifname)) {
            errors.push(error.to_string());
        }
    }
    if errors.is_empty() { Ok(()) } else { Err(Failure::new(Code::Kernel, errors.join("; "))) }
}

/// One interface of one container.
struct Attachment {
    conf: NetConf,
    call: Call,
    role: Role,
    pair: Pair,
    client: Client,
    began: Option<Moment>,
    /// Until when an agent that is starting is waited for.
    patience: Instant,
    /// A call for a lease broke off: the agent may hold one for this attachment.
    lease_is_open: bool,
}

/// What ADD knows by now.
#[derive(Default)]
struct Progress {
    ends: Option<Ends>,
    lease: Option<AddResponse>,
    /// Indexes of the host's and the pod's side.
    indexes: Option<(u32, u32)>,
}

impl Attachment {
    fn new(conf: NetConf, call: Call, role: Role) -> Self {
        let pair = Pair::of(&call.container_id, &call.ifname);
        let client = client(&conf);
        let (began, patience) = (clock::moment(), Instant::now() + STARTING);
        Self { conf, call, role, pair, client, began, patience, lease_is_open: false }
    }

    fn add(mut self, version: Version) -> Result<AddResult, Failure> {
        let mut progress = Progress::default();
        if self.role == Role::Interface {
            progress.ends = Some(self.open_ends()?);
        }
        for step in plan::add(self.role) {
            if let Err(failure) = self.step(*step, &mut progress) {
                return Err(self.undone(*step, failure));
            }
        }
        let (Some(lease), mtu) = (&progress.lease, self.mtu(&progress)) else {
            return Err(Failure::new(Code::Agent, "no lease after every step"));
        };
        let (pair, prefix_len) = match self.role {
            Role::Interface => (Some(self.attached_pair(mtu)), 32),
            Role::Ipam => (None, lease.prefix_len),
        };
        let address = Ipv4Net::new(lease.address, prefix_len)
            .map_err(|error| Failure::new(Code::Decode, format!("prefix_len {prefix_len} of the lease: {error}")))?;
        Ok(Attached { pair, address, router: lease.router, dns: self.conf.dns.take() }.result(version))
    }

    /// Opens both ends of the pair that is to be made, and refuses what can be refused before anything is asked for.
    fn open_ends(&self) -> Result<Ends, Failure> {
        if self.conf.prev_result.as_ref().is_some_and(|result| !result.is_null()) {
            let message = "prevResult: present; expected none, since cistern-cni makes the interface and comes first";
            return Err(Failure::new(Code::UnsupportedField, message));
        }
        // Nothing is asked of the agent for a namespace that is not there.
        let ends = Ends::open(&self.call.netns).map_err(|error| {
            kernel_failure(&error).with_details(format!("CNI_NETNS: {:?}; nothing was changed", self.call.netns))
        })?;
        if ends.is_host().map_err(|error| kernel_failure(&error))? {
            let message =
                format!("CNI_NETNS: {:?} is the node's own network namespace; expected a pod's", self.call.netns);
            return Err(Failure::new(Code::Environment, message));
        }
        Ok(ends)
    }

    fn attached_pair(&self, mtu: u32) -> AttachedPair {
        AttachedPair {
            host: (self.pair.host.clone(), mac_text(self.pair.host_mac)),
            pod: (self.call.ifname.clone(), mac_text(self.pair.pod_mac)),
            netns: self.call.netns.clone(),
            mtu,
        }
    }

    fn mtu(&self, progress: &Progress) -> u32 {
        self.conf.mtu.or(progress.lease.as_ref().map(|lease| lease.mtu)).unwrap_or_default()
    }

    fn step(&mut self, step: Step, progress: &mut Progress) -> Result<(), Failure> {
        let mtu = self.mtu(progress);
        let Progress { ends, lease, indexes } = progress;
        let kernel = |outcome: Result<(), NetlinkError>| outcome.map_err(|error| kernel_failure(&error));
        match (step, ends, lease, indexes) {
            (Step::Lease, _, lease, _) => {
                *lease = Some(self.lease()?);
                Ok(())
            }
            (Step::MakePair, Some(ends), _, indexes) => {
                match ends.make(&self.pair, &self.call.ifname, mtu).map_err(|error| kernel_failure(&error))? {
                    Made::Pair { host, pod } => *indexes = Some((host, pod)),
                    Made::NameTaken { kind } => {
                        let message = format!(
                            "CNI_IFNAME: {:?}; expected a free name: the pod has a device ({kind}) of it that Cistern did \
                             not make",
                            self.call.ifname
                        );
                        return Err(Failure::new(Code::Environment, message));
                    }
                }
                Ok(())
            }
            (Step::SetUpPod, Some(ends), Some(lease), Some((_, pod))) => {
                kernel(ends.set_up_pod(&self.pair, *pod, lease.address, lease.router))
            }
            (Step::SetUpHost, Some(ends), Some(lease), Some((host, pod))) => {
                kernel(ends.set_up_host(*host, lease.address, lease.router))?;
                kernel(ends.wait_until_they_send(*host, *pod))
            }
            (Step::Confirm, _, Some(lease), Some((host, _))) => {
                let interface = Interface {
                    host_ifname: self.pair.host.clone(),
                    host_ifindex: *host,
                    mac: mac_text(self.pair.pod_mac),
                };
                self.confirm(lease.generation, Behind::Pair(interface))
            }
            (Step::Confirm, None, Some(lease), None) => {
                let (plugin, routed) = (self.conf.plugin.clone(), self.conf.is_routed());
                self.confirm(lease.generation, Behind::Plugin { plugin, routed })
            }
            _ => Err(Failure::new(Code::Agent, format!("step {step:?} came before what it needs"))),
        }
    }

    /// A call of an ADD: waits for an agent that is starting. Each of them may be repeated.
    fn ask<Q: Serialize, R: DeserializeOwned>(&mut self, path: &str, request: &Q) -> Result<R, ClientError> {
        loop {
            match self.client.post(path, request) {
                Err(error) if is_starting(&error) && Instant::now() < self.patience => {
                    self.lease_is_open |= error.may_have_happened();
                    std::thread::sleep(ASK_AGAIN);
                }
                answer => return answer,
            }
        }
    }

    fn confirm(&mut self, generation: u64, interface: Behind) -> Result<(), Failure> {
        let request = ConfirmRequest {
            container_id: self.call.container_id.clone(),
            ifname: self.call.ifname.clone(),
            generation,
            interface,
            began: self.began.clone(),
        };
        self.ask("/v1/cni/confirm", &request).map_err(|error| agent_failure(&error))
    }

    fn lease(&mut self) -> Result<AddResponse, Failure> {
        let pod = self.call.pod().map(|(namespace, name, uid)| PodRef { namespace, name, uid });
        let request = AddRequest {
            container_id: self.call.container_id.clone(),
            ifname: self.call.ifname.clone(),
            netns: self.call.netns.clone(),
            network: Some(self.conf.name.clone()),
            pod,
            began: self.began.clone(),
        };
        self.ask("/v1/cni/add", &request).map_err(|error| {
            self.lease_is_open |= error.may_have_happened();
            agent_failure(&error).with_details("no address was given; pods that run are not affected")
        })
    }

    /// Takes back what the steps up to `step` did. What cannot be taken back is in the details.
    fn undone(&mut self, step: Step, failure: Failure) -> Failure {
        // An agent that refused, or was not there, holds no lease for this ADD.
        let undo = if step == Step::Lease && !self.lease_is_open { Vec::new() } else { undo_after(self.role, step) };
        let errors: Vec<String> =
            undo.into_iter().filter_map(|undo| self.undo_or_queue(undo).err()).map(|f| f.message).collect();
        if errors.is_empty() {
            return failure;
        }
        let details = format!("{}; not taken back: {}", failure.details, errors.join("; "));
        failure.with_details(details.trim_start_matches("; ").to_owned())
    }

    fn undo(&mut self, undo: Undo) -> Result<(), Failure> {
        match undo {
            Undo::RemovePair => interface::remove(&self.pair).map_err(|error| kernel_failure(&error)),
            Undo::Release => {
                let request = self.del_request();
                let released = self.client.post::<_, DelResponse>("/v1/cni/del", &request);
                released.map(|_| ()).map_err(|error| agent_failure(&error))
            }
        }
    }

    fn del_request(&self) -> DelRequest {
        DelRequest {
            container_id: self.call.container_id.clone(),
            ifname: self.call.ifname.clone(),
            began: self.began.clone(),
        }
    }

    /// As [`Attachment::undo`]; without agent the release waits on disk.
    fn undo_or_queue(&mut self, undo: Undo) -> Result<(), Failure> {
        match self.undo(undo) {
            Err(failure) if undo == Undo::Release && failure.code == Code::TryAgainLater => self.queue(),
            outcome => outcome,
        }
    }

    /// Runs every step and tells every failure.
    fn del(mut self) -> Result<(), Failure> {
        let steps = plan::del(self.role).iter();
        let mut failures = steps.filter_map(|undo| self.undo_or_queue(*undo).err());
        let Some(first) = failures.next() else { return Ok(()) };
        let rest: Vec<String> = failures.map(|failure| failure.message).collect();
        Err(first.with_details(rest.join("; ")))
    }

    /// Leaves the DEL for the agent's return. With the lock in hand the agent is asked once more: it may have come back
    /// and read the queue in between.
    fn queue(&mut self) -> Result<(), Failure> {
        let directory = PathBuf::from(self.conf.queue_dir.clone().unwrap_or_else(|| QUEUE_DIR.to_owned()));
        let later = |error: &dyn std::fmt::Display| {
            Failure::new(Code::TryAgainLater, format!("DEL cannot be kept for the agent's return: {error}"))
        };
        let queue = DeletionQueue::open_shared(&directory).map_err(|error| later(&error))?;
        if self.undo(Undo::Release).is_ok() {
            return Ok(());
        }
        let DelRequest { container_id, ifname, began } = self.del_request();
        let del = QueuedDel { queued: Timestamp::now(), began, container_id, ifname };
        queue.push(&del).map_err(|error| later(&error))
    }

    fn check(mut self) -> Result<(), Failure> {
        let previous = self.conf.prev_result.take().filter(|result| !result.is_null()).ok_or_else(|| {
            Failure::new(Code::Configuration, "prevResult: absent; expected the result of ADD, which CHECK compares")
        })?;
        let previous: AddResult = serde_json::from_value(previous)
            .map_err(|error| Failure::new(Code::Decode, format!("prevResult cannot be read: {error}")))?;
        let request = CheckRequest { container_id: self.call.container_id.clone(), ifname: self.call.ifname.clone() };
        let held: CheckResponse = match self.client.post("/v1/cni/check", &request) {
            Ok(held) => held,
            Err(ClientError::Refused { status: 404, error, .. }) => {
                return Err(Failure::new(Code::UnknownContainer, error.message));
            }
            Err(error) => return Err(agent_failure(&error)),
        };
        let mut differences = Vec::new();
        let address = std::net::IpAddr::V4(held.address);
        if !previous.ips.iter().any(|ip| ip.address.addr() == address) {
            differences.push(format!("prevResult does not name {address}, which the agent holds for this interface"));
        }
        // In the role of an IPAM plugin the interface is the other plugin's to check.
        if self.role == Role::Interface {
            differences.extend(self.interface_differences(&previous, &held)?);
        }
        if held.interface.is_none() {
            differences.push("the agent holds a lease that is not confirmed".to_owned());
        }
        if differences.is_empty() { Ok(()) } else { Err(Failure::new(Code::Difference, differences.join("; "))) }
    }

    /// Where the interface is not as the chain's result says.
    fn interface_differences(&self, previous: &AddResult, held: &CheckResponse) -> Result<Vec<String>, Failure> {
        let is_pods = |interface: &&ResultInterface| {
            interface.name == self.call.ifname && interface.sandbox.as_ref() == Some(&self.call.netns)
        };
        let mut differences = Vec::new();
        let mut pod_mac = self.pair.pod_mac;
        match previous.interfaces.iter().find(is_pods) {
            None => differences.push(format!("prevResult does not name {} in {}", self.call.ifname, self.call.netns)),
            // A later plugin of the chain may have given it another hardware address.
            Some(interface) => pod_mac = interface.mac.as_deref().and_then(parse_mac).unwrap_or(pod_mac),
        }
        let mut ends = Ends::open(&self.call.netns).map_err(|error| kernel_failure(&error))?;
        let found = ends
            .differences(&self.pair, &self.call.ifname, pod_mac, held.address, held.router)
            .map_err(|error| kernel_failure(&error))?;
        differences.extend(found);
        Ok(differences)
    }
}
