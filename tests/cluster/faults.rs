//! Failures in a cluster.

use crate::rig::{LONG, NAMESPACE, Rig, SYSTEM, text};
use crate::traffic::Traffic;
use anyhow::{Context, Result, ensure};
use cistern_tests::cluster::{Daemon, wait_for};
use kube::api::ListParams;
use serde_json::Value;
use std::time::Duration;

/// Path of the CiliumNodes in the API.
const CILIUM_NODES: &str = "/apis/cilium.io/v2/ciliumnodes";

pub(crate) fn agent_deleted() -> Result<()> {
    let rig = Rig::new()?;
    let pods = rig.web()?;
    let traffic = Traffic::start(&rig, &pods)?;
    for node in ["node-1", "node-2"] {
        let agent = rig.agent(node)?;
        rig.system(&["delete", "pod", &agent, LONG])?;
        rig.agents_are_ready()?;
        ensure!(rig.agent(node)? != agent, "{agent} was not replaced");
    }
    traffic.finish()?;
    rig.addresses_agree()
}

/// Template of the DaemonSet while an agent is to be absent from a node.
const AWAY: &str = r#"{"spec":{"template":{"spec":{"nodeSelector":{"agent":"here"}}}}}"#;
const BACK: &str = r#"{"spec":{"template":{"spec":{"nodeSelector":{"agent":null}}}}}"#;

pub(crate) fn agent_away() -> Result<()> {
    let rig = Rig::new()?;
    rig.web()?;
    rig.make_pod("early", "node-1")?;
    rig.pod_is_ready("early")?;
    let address = rig.pods("app=early")?.first().context("the pod is gone")?.address;

    rig.cluster.kubectl(&["label", "node", "node-2", "agent=here", "--overwrite"])?;
    rig.system(&["patch", "daemonset/cistern", "--patch", AWAY])?;
    let selector = ["--selector", "app.kubernetes.io/name=cistern-agent"];
    let on_node = ["--field-selector", "spec.nodeName=node-1", "--output", "name"];
    wait_for("the agent of node-1 to be gone", || {
        Ok(rig.system(&[&["get", "pods"], &selector[..], &on_node].concat())?.is_empty())
    })?;
    // Its DEL succeeds without the agent, so that kubelet completes the deletion of the pod.
    rig.kubectl(&["delete", "pod/early", LONG])?;
    rig.make_pod("late", "node-1")?;
    let mut message = String::new();
    wait_for("an event with the reason why the pod waits", || {
        let of = "involvedObject.name=late,reason=FailedCreatePodSandBox";
        let events = rig.list(NAMESPACE, "events", &ListParams::default().fields(of))?;
        message = events.iter().map(|event| text(event, "/message").to_owned()).collect();
        Ok(!message.is_empty())
    })?;
    ensure!(message.contains("agent"), "kubelet's message: {message}");

    rig.system(&["patch", "daemonset/cistern", "--patch", BACK])?;
    rig.agents_are_ready()?;
    rig.pod_is_ready("late")?;
    // The DEL was not lost: the address is free or quarantined.
    wait_for("the address of the deleted pod to be released", || {
        let held = rig.cistern("node-1", &["ip", "list"])?;
        let rows = held.as_array().into_iter().flatten();
        let mut of_early = rows.filter(|row| text(row, "/address") == address.to_string());
        Ok(of_early.all(|row| text(row, "/state") != "confirmed" || text(row, "/owner").ends_with("/late")))
    })?;
    rig.addresses_agree()?;
    rig.kubectl(&["delete", "pod/late", LONG])?;
    rig.cluster.kubectl(&["label", "node", "node-2", "agent-"]).map(drop)
}

pub(crate) fn node_daemons() -> Result<()> {
    let rig = Rig::new()?;
    let pods = rig.web()?;
    let node = rig.cluster.machine("node-1")?;
    let traffic = Traffic::start(&rig, &pods)?;
    for daemon in [Daemon::Kubelet, Daemon::Containerd] {
        node.kill(daemon)?;
        rig.cluster.start("node-1", daemon)?;
        let name = format!("after-{}", daemon.name());
        rig.make_pod(&name, "node-1")?;
        rig.pod_is_ready(&name)?;
    }
    rig.cluster.wait_ready()?;
    traffic.finish()?;
    rig.kubectl(&["delete", "pod/after-kubelet", "pod/after-containerd", LONG])?;
    rig.addresses_agree()
}

pub(crate) fn control_plane_away() -> Result<()> {
    const OUTAGE: Duration = Duration::from_secs(20);
    let rig = Rig::new()?;
    let pods = rig.web()?;
    let traffic = Traffic::start(&rig, &pods)?;
    let control = rig.cluster.machine("control")?;
    control.kill(Daemon::Etcd)?;
    control.kill(Daemon::KubeApiserver)?;
    std::thread::sleep(OUTAGE);
    rig.cluster.power_on("control")?;
    rig.cluster.wait_for_api()?;
    rig.cluster.wait_ready()?;
    rig.agents_are_ready()?;
    rig.make_pod("after-outage", "node-2")?;
    rig.pod_is_ready("after-outage")?;
    traffic.finish()?;
    rig.kubectl(&["delete", "pod/after-outage", LONG])?;
    rig.addresses_agree()
}

pub(crate) fn reboot() -> Result<()> {
    let rig = Rig::new()?;
    rig.web()?;
    let node = rig.cluster.machine("node-2")?;
    node.power_off()?;
    rig.cluster.power_on("node-2")?;
    wait_for("the pods of node-2 to run again", || Ok(restarts(&rig, "node-2")?.iter().all(|count| *count > 0)))?;
    rig.cluster.wait_ready()?;
    rig.agents_are_ready()?;
    let pods = rig.web()?;
    rig.addresses_agree()?;
    Traffic::start(&rig, &pods)?.finish()
}

/// The number of restarts of each container of a node's web pods.
fn restarts(rig: &Rig, node: &str) -> Result<Vec<u64>> {
    let list = rig.list(NAMESPACE, "pods", &ListParams::default().labels("app=web"))?;
    let on_node = list.iter().filter(|pod| text(pod, "/spec/nodeName") == node);
    Ok(on_node
        .map(|pod| pod.pointer("/status/containerStatuses/0/restartCount").and_then(Value::as_u64).unwrap_or(0))
        .collect())
}

/// The leader of the operators.
pub(crate) fn leader(rig: &Rig) -> Result<String> {
    let lease =
        rig.cluster.get(&format!("/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/cistern-operator"))?;
    Ok(text(&serde_json::from_str(&lease)?, "/spec/holderIdentity").to_owned())
}

pub(crate) fn leader_killed() -> Result<()> {
    let rig = Rig::new()?;
    let first = leader(&rig)?;
    let operators = ListParams::default().labels("app.kubernetes.io/name=cistern-operator");
    let list = rig.list(SYSTEM, "pods", &operators)?;
    let pod = list.iter().find(|pod| {
        [text(pod, "/metadata/name"), text(pod, "/spec/nodeName")].iter().any(|name| {
            first == **name || first.starts_with(&format!("{name}-")) || first.starts_with(&format!("{name}_"))
        })
    });
    let pod = text(pod.with_context(|| format!("the leader {first:?} is no operator of {list:#?}"))?, "/metadata/name");
    rig.system(&["delete", "pod", pod, "--grace-period=0", "--force", LONG])?;
    wait_for("a new leader", || {
        let now = leader(&rig)?;
        Ok(!now.is_empty() && now != first)
    })?;
    rig.system(&["rollout", "status", "deployment/cistern-operator", LONG]).map(drop)
}

pub(crate) fn node_deleted() -> Result<()> {
    let rig = Rig::new()?;
    rig.web()?;
    let node = rig.cluster.machine("node-2")?;
    let others = rig.cluster.blocks("node-1")?;
    let of_its_name = ListParams::default().fields("metadata.name=node-2");
    node.kill(Daemon::Kubelet)?;
    rig.cluster.kubectl(&["delete", "node/node-2", LONG])?;
    wait_for("the deletion of its CiliumNode", || {
        let left = rig.cluster.list(CILIUM_NODES, &of_its_name)?;
        Ok(left.is_empty())
    })?;
    rig.cluster.start("node-2", Daemon::Kubelet)?;
    wait_for("the node to be registered again", || {
        let (nodes, cilium_nodes) =
            (rig.cluster.list("/api/v1/nodes", &of_its_name)?, rig.cluster.list(CILIUM_NODES, &of_its_name)?);
        Ok(nodes.len() == 1 && cilium_nodes.len() == 1)
    })?;
    rig.cluster.wait_ready()?;
    rig.agents_are_ready()?;
    let pods = rig.web()?;
    let blocks = rig.cluster.blocks("node-2")?;
    ensure!(blocks.len() == 1 && blocks != others, "node-2 has {blocks:?}, node-1 {others:?}");
    rig.addresses_agree()?;
    Traffic::start(&rig, &pods)?.finish()
}
