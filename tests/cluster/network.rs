//! The pod network.

use crate::rig::{LONG, NAMESPACE, PROBE, Pod, Rig, WEB_NODE_PORT, WEB_SERVICE, answer, text};
use crate::traffic::{self, PORT};
use anyhow::{Context, Result, ensure};
use cistern_tests::cluster::{KUBERNETES_SERVICE, OUTSIDE, wait_for};
use cistern_tests::probe::{Answer, HttpAnswer};
use kube::api::ListParams;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;

/// Port of the Deployment's pods.
const HTTP: u16 = 8080;

pub(crate) fn addresses() -> Result<()> {
    let rig = Rig::new()?;
    let blocks = [rig.cluster.blocks("node-1")?, rig.cluster.blocks("node-2")?];
    ensure!(blocks.iter().all(|blocks| blocks.len() == 1) && blocks[0] != blocks[1], "the pod CIDRs are {blocks:?}");
    rig.web()?;
    rig.addresses_agree()?;
    nodes_report_that_they_are_ready(&rig)
}

fn nodes_report_that_they_are_ready(rig: &Rig) -> Result<()> {
    // The condition follows the agent's state with some seconds' delay.
    wait_for("cistern.io/Ready on every node", || {
        let nodes = rig.cluster.list("/api/v1/nodes", &ListParams::default())?;
        Ok(nodes.iter().all(|node| {
            let conditions = node.pointer("/status/conditions").and_then(|all| all.as_array()).into_iter().flatten();
            let ours = conditions.filter(|one| text(one, "/type") == "cistern.io/Ready");
            ours.map(|one| text(one, "/status")).eq(["True"])
        }))
    })
}

pub(crate) fn inside() -> Result<()> {
    let rig = Rig::new()?;
    let pods = rig.web()?;
    every_pod_reaches_every_pod(&rig, &pods)?;
    // One of each node.
    for from in pods.iter().step_by(2) {
        services(&rig, from, &pods)?;
    }
    // The NodePort, from outside, on every node.
    let outside = rig.cluster.machine("outside")?;
    for node in rig.cluster.nodes()? {
        let mut ask = outside.command_in_network(PROBE)?;
        let address = format!("{}:{WEB_NODE_PORT}", node.address()?);
        let seen: HttpAnswer = answer(ask.args(["ask-http", &address, "/hostname"]), "outside")?;
        ensure!(pods.iter().any(|pod| pod.name == seen.body), "port {WEB_NODE_PORT} of {}: {seen:?}", node.name());
    }
    Ok(())
}

/// With its own address; and every node reaches it.
pub(crate) fn every_pod_reaches_every_pod(rig: &Rig, pods: &[Pod]) -> Result<()> {
    for from in pods {
        for to in pods {
            let address = format!("{}:{HTTP}", to.address);
            let seen: HttpAnswer = from.ask(&["ask-http", &address, "/clientip"])?;
            let seen = seen.body.rsplit_once(':').map(|(address, _)| address.to_owned());
            ensure!(seen == Some(from.address.to_string()), "{to} sees {from} as {seen:?}");
        }
        // Nodes reach the pods of all nodes, as kubelets and the API server do.
        for node in rig.cluster.nodes()? {
            let mut ask = node.command_in_network(PROBE)?;
            let seen: HttpAnswer =
                answer(ask.args(["ask-http", &format!("{}:{HTTP}", from.address), "/clientip"]), node.name())?;
            let wanted = format!("{}:", node.address()?);
            // A node connects to its own pods with its router address.
            let own = node.name() == from.node.name();
            ensure!(own || seen.body.starts_with(&wanted), "{from} sees {} as {}", node.name(), seen.body);
        }
    }
    Ok(())
}

/// Through kube-proxy: a Service with pods on both nodes, the API server's, the DNS server's.
fn services(rig: &Rig, from: &Pod, pods: &[Pod]) -> Result<()> {
    let mut reached = BTreeSet::new();
    wait_for("a Service to forward to each of its pods", || {
        let seen: HttpAnswer = from.ask(&["ask-http", WEB_SERVICE, "/hostname"])?;
        ensure!(pods.iter().any(|pod| pod.name == seen.body), "{WEB_SERVICE} forwards to {seen:?}");
        reached.insert(seen.body);
        Ok(reached.len() == pods.len())
    })?;
    for server in [KUBERNETES_SERVICE.to_string(), "kubernetes.default.svc".to_owned()] {
        let url = format!("https://{server}/readyz");
        let curl = ["exec", &from.name, "--", "curl", "--silent", "--insecure", "--max-time", "20", &url];
        let said = rig.kubectl(&curl)?;
        ensure!(said == "ok", "{url} says {said:?}");
    }
    Ok(())
}

pub(crate) fn outside() -> Result<()> {
    let rig = Rig::new()?;
    let pods = rig.web()?;
    leaves_as_its_node(&rig, &pods)?;
    // The router has no routes to pods.
    let routes = rig.cluster.machine("router")?.run("ip", &["-4", "route", "show"])?;
    ensure!(!routes.contains("10.244."), "the router has routes to pods: {routes}");
    Ok(())
}

/// The external host sees the address of the pod's node.
pub(crate) fn leaves_as_its_node(rig: &Rig, pods: &[Pod]) -> Result<()> {
    let _server = traffic::serve(rig.cluster.machine("outside")?.command_in_network(PROBE)?)?;
    let target = format!("{OUTSIDE}:{PORT}");
    for pod in pods {
        for ask in ["ask-tcp", "ask-udp"] {
            let seen: Answer = pod.ask(&[ask, &target])?;
            ensure!(seen.seen_as.ip() == pod.node.address()?, "outside sees {pod} as {seen:?}");
        }
    }
    Ok(())
}

pub(crate) fn many_pods() -> Result<()> {
    // Kubernetes' default limit; with more processors, what a pod CIDR has room for besides the existing pods.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let many = if processors < 4 { 110 } else { 240 };
    let rig = Rig::new()?;
    // Creates their namespace, and the existing pods.
    rig.web()?;
    rig.cluster.apply(&include_str!("many.yaml").replace("MANY", &many.to_string()))?;
    rig.kubectl(&["rollout", "status", "deployment/many", LONG])?;
    let pods = rig.pods("app=many")?;
    let addresses: BTreeSet<Ipv4Addr> = pods.iter().map(|pod| pod.address).collect();
    ensure!(addresses.len() == many, "{many} pods have {} addresses", addresses.len());
    rig.addresses_agree()?;
    rig.kubectl(&["delete", "deployment/many", "--cascade=foreground", LONG])?;
    wait_for("the deletion of the pods", || {
        Ok(rig.list(NAMESPACE, "pods", &ListParams::default().labels("app=many"))?.is_empty())
    })
    .context("after the deletion of the Deployment")?;
    rig.addresses_agree()
}
