//! CHECK.

use super::attachment::Attachment;
use super::interface::{Ends, parse_mac};
use super::{agent_failure, kernel_failure};
use crate::api::client::ClientError;
use crate::api::types::{CheckRequest, CheckResponse};
use cistern_core::cni::netconf::{NetConf, Role};
use cistern_core::cni::refusal::Refusal;
use cistern_core::cni::spec::{AddResult, Call, Code, Failure, ResultInterface};
use std::net::IpAddr;

/// Carries out a CHECK.
pub(super) fn check(conf: NetConf, call: Call) -> Result<(), Failure> {
    let NetConf { prev_result, paths, role, .. } = conf;
    let previous = prev_result.ok_or_else(|| {
        Failure::new(Code::Configuration, "prevResult: absent; expected the result of ADD, which CHECK compares")
    })?;
    let previous: AddResult = serde_json::from_value(previous)
        .map_err(|error| Failure::new(Code::Decode, format!("prevResult cannot be read: {error}")))?;
    let mut attachment = Attachment::locked(call, &paths)?;
    let held = held(&mut attachment)?.map_err(|message| Failure::new(Code::UnknownContainer, message))?;
    let mut differences = Vec::new();
    let address = IpAddr::V4(held.address);
    if !previous.ips.iter().any(|ip| ip.address.addr() == address) {
        differences
            .push(format!("prevResult does not name {address}, which the agent has allocated to this interface"));
    }
    // In the role of an IPAM plugin the other plugin checks the interface.
    if role == Role::Interface {
        differences.extend(interface_differences(&attachment, &previous, &held)?);
    }
    if held.interface.is_none() {
        differences.push("the agent's lease is not confirmed".to_owned());
    }
    if differences.is_empty() { Ok(()) } else { Err(Failure::new(Code::Difference, differences.join("; "))) }
}

/// What the agent holds for an attachment; in its words, that it holds nothing.
pub(super) fn held(attachment: &mut Attachment) -> Result<Result<CheckResponse, String>, Failure> {
    let (container_id, ifname) = (attachment.call.container_id.clone(), attachment.call.ifname.clone());
    match attachment.client.post("/v1/cni/check", &CheckRequest { container_id, ifname }) {
        Ok(held) => Ok(Ok(held)),
        Err(ClientError::Refused { error, .. }) if error.refusal() == Some(Refusal::NoLease) => Ok(Err(error.message)),
        Err(error) => Err(agent_failure(&error)),
    }
}

/// Differences between the interface and the chain's result.
fn interface_differences(
    attachment: &Attachment,
    previous: &AddResult,
    held: &CheckResponse,
) -> Result<Vec<String>, Failure> {
    let (call, pair) = (&attachment.call, &attachment.pair);
    let is_pods =
        |interface: &&ResultInterface| interface.name == call.ifname && interface.sandbox.as_ref() == Some(&call.netns);
    let mut differences = Vec::new();
    let mut pod_mac = pair.pod_mac;
    match previous.interfaces.iter().find(is_pods) {
        None => differences.push(format!("prevResult does not name {} in {}", call.ifname, call.netns)),
        // A later plugin of the chain may have changed the hardware address.
        Some(interface) => pod_mac = interface.mac.as_deref().and_then(parse_mac).unwrap_or(pod_mac),
    }
    let mut ends = Ends::open(&call.netns).map_err(|error| kernel_failure(&error))?;
    let found = ends
        .differences(pair, &call.ifname, pod_mac, held.address, held.router)
        .map_err(|error| kernel_failure(&error))?;
    differences.extend(found);
    Ok(differences)
}
