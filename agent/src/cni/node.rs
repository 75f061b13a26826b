//! STATUS and GC: the verbs that are about the node.

use super::attachment::{Attachment, client};
use super::{agent_failure, check, interface, kernel_failure};
use crate::api::types::{self, GcRequest, GcResponse};
use crate::clock;
use cistern_core::cni::netconf::{Garbage, NetConf, Paths, ValidAttachment};
use cistern_core::cni::served::served_lately;
use cistern_core::cni::spec::{Call, Code, Failure};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// kubelet asks for the state of the network every few seconds, by way of the runtime.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// An agent that does not answer in this time is stuck.
const GC_TIMEOUT: Duration = Duration::from_secs(20);

/// STATUS (`ipam` decision 6): an agent that is away or starting is no reason to take a node that served lately out of service; an
/// agent that has served since it started and says that it cannot is.
pub(super) fn status(conf: &NetConf) -> Result<(), Failure> {
    let mut client = client(&conf.paths, STATUS_TIMEOUT);
    match client.health() {
        Ok(health) if health.ready => Ok(()),
        Ok(health) if health.starting && has_served(client.socket()) => Ok(()),
        Ok(health) => {
            let message = format!("the Cistern agent cannot serve pods: {}", health.reasons.join("; "));
            Err(Failure::new(Code::NotAvailable, message))
        }
        Err(error) if error.is_retryable() && has_served(client.socket()) => Ok(()),
        Err(error) => Err(Failure::new(Code::NotAvailable, error.to_string())),
    }
}

/// Whether an agent served this node lately, by the file beside its socket.
fn has_served(socket: &Path) -> bool {
    let Some(file) = socket.parent().map(|directory| directory.join("served")) else { return false };
    let Ok(contents) = std::fs::read(&file) else { return false };
    let modified = file.metadata().and_then(|metadata| metadata.modified()).ok();
    served_lately(&contents, clock::uptime(), modified.and_then(|modified| modified.elapsed().ok()))
}

/// GC: the agent ends the leases; their pairs are removed here.
pub(super) fn gc(garbage: Garbage) -> Result<(), Failure> {
    let Garbage { network, valid, paths } = garbage;
    let known = |ValidAttachment { container_id, ifname }| types::Attachment { container_id, ifname };
    let request = GcRequest { network, valid: valid.into_iter().map(known).collect(), began: clock::moment() };
    let answer = client(&paths, GC_TIMEOUT).post::<_, GcResponse>("/v1/cni/gc", &request);
    let ended = answer.map_err(|error| agent_failure(&error))?.released;
    let failures: Vec<Failure> =
        ended.into_iter().filter_map(|attachment| remove_pair(attachment, &paths).err()).collect();
    let Some(code) = failures.first().map(|failure| failure.code) else { return Ok(()) };
    let messages: Vec<String> = failures.into_iter().map(|failure| failure.message).collect();
    Err(Failure::new(code, messages.join("; ")))
}

/// Removes the pair of an attachment, unless a new ADD has the attachment since its lease ended.
fn remove_pair(attachment: types::Attachment, paths: &Paths) -> Result<(), Failure> {
    let types::Attachment { container_id, ifname } = attachment;
    let call = Call { container_id, ifname, netns: String::new(), args: BTreeMap::new() };
    let mut attachment = Attachment::locked(call, paths)?;
    if check::held(&mut attachment)?.is_ok() {
        return Ok(());
    }
    // In the role of an IPAM plugin there is no interface.
    interface::remove(&attachment.pair).map_err(|error| kernel_failure(&error))
}
