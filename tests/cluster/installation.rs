//! Helm: upgrade, rollback, uninstall, reinstallation, another IPAM mode.

use crate::rig::{LONG, Rig, SYSTEM, image, text, variant_image};
use crate::traffic::Traffic;
use crate::{faults, network};
use anyhow::{Context, Result, ensure};
use cistern_tests::cluster::{self, Ipam, Machine, wait_for};
use serde_json::Value;
use std::net::Ipv4Addr;
use std::path::Path;

const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/cistern");

pub(crate) fn upgrade_and_rollback() -> Result<()> {
    let rig = Rig::new()?;
    let pods = rig.web()?;
    let before = image_of_agents(&rig)?;
    let (repository, _) = before.rsplit_once(':').context("the image has no tag")?;
    let next = format!("{repository}:variant");
    rig.cluster.load(variant_image().to_str().context("the image's path is not UTF-8")?)?;
    let traffic = Traffic::start(&rig, &pods)?;
    let upgrade = ["upgrade", "cistern", CHART, "--reuse-values", "--set", "image.tag=variant"];
    rig.cluster.helm(&[&upgrade[..], &["--namespace", SYSTEM, "--wait", LONG]].concat())?;
    ensure!(image_of_agents(&rig)? == next, "the image was not replaced");
    rig.agents_are_ready()?;
    for node in rig.cluster.nodes()? {
        let is_pinned = node.file("/sys/fs/bpf/cistern/maps/cst_variant")?.exists();
        ensure!(is_pinned, "{}: the other build's map is not pinned", node.name());
    }
    rig.addresses_agree()?;
    // An attachment that the newer build writes down and the older one has to read.
    rig.make_pod("upgraded", "node-1")?;
    rig.pod_is_ready("upgraded")?;
    rig.cluster.helm(&["rollback", "cistern", "--namespace", SYSTEM, "--wait", LONG])?;
    rig.agents_are_ready()?;
    traffic.finish()?;
    ensure!(image_of_agents(&rig)? == before, "the image was not rolled back");
    rig.addresses_agree()?;
    rig.kubectl(&["delete", "pod/upgraded", LONG])?;
    rig.addresses_agree()
}

fn image_of_agents(rig: &Rig) -> Result<String> {
    let path = "jsonpath={.spec.template.spec.containers[0].image}";
    rig.system(&["get", "daemonset/cistern", "--output", path])
}

pub(crate) fn uninstall() -> Result<()> {
    let rig = Rig::new()?;
    let pods = rig.web()?;
    let routers: Vec<(Machine, Ipv4Addr)> =
        rig.cluster.nodes()?.into_iter().map(|node| Ok((node.clone(), router(&node)?))).collect::<Result<_>>()?;
    rig.cluster.helm(&["uninstall", "cistern", "--namespace", SYSTEM, "--wait", LONG])?;
    // Helm does not wait for pods to terminate.
    let selector = ["--selector", "app.kubernetes.io/part-of=cistern", "--output", "name"];
    let made = ["get", "lease/cistern-operator", "configmap/cistern-ipam", "configmap/cilium-config"];
    let mut left = String::new();
    wait_for("the deletion of all objects of Cistern", || {
        left = rig.system(&[&["get", "all,configmaps,leases,serviceaccounts"], &selector[..]].concat())?;
        left += &rig.system(&[&made[..], &["--ignore-not-found", "--output", "name"]].concat())?;
        Ok(left.is_empty())
    })
    .with_context(|| format!("there are {left}"))?;
    for (node, router) in routers {
        clean(&rig, &node, router)?;
        // The network of running pods continues to work: the node reaches its pods.
        for pod in pods.iter().filter(|pod| pod.node.name() == node.name()) {
            node.run("curl", &["--silent", "--fail", "--max-time", "20", &format!("http://{}:8080/", pod.address)])?;
        }
    }
    Ok(())
}

/// The address that the agent added to the node's loopback device.
fn router(node: &Machine) -> Result<Ipv4Addr> {
    let text = node.run("ip", &["-4", "-oneline", "address", "show", "dev", "lo"])?;
    let ours = text.lines().filter(|line| !line.contains("127.0.0.1")).collect::<Vec<_>>();
    let [line] = ours[..] else { anyhow::bail!("{}: expected one address of ours: {text}", node.name()) };
    let address = line.split_whitespace().nth(3).and_then(|network| network.split('/').next());
    Ok(address.context("ip prints another format")?.parse()?)
}

/// Only the interfaces of running pods are left of Cistern on the node.
fn clean(rig: &Rig, node: &Machine, router: Ipv4Addr) -> Result<()> {
    let name = node.name();
    let names = |path: &str| -> Result<Vec<String>> {
        let entries = std::fs::read_dir(node.file(path)?).with_context(|| format!("{name}: read {path}"))?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    ensure!(!node.file("/sys/fs/bpf/cistern")?.exists(), "{name}: maps are pinned");
    ensure!(names("/etc/cni/net.d")?.is_empty(), "{name}: a network configuration remains");
    let plugins = names("/opt/cni/bin")?;
    ensure!(
        !plugins.iter().any(|plugin| plugin.contains("cistern") || plugin.contains("cilium")),
        "{name}: {plugins:?}"
    );
    let lo = node.run("ip", &["-4", "-oneline", "address", "show", "dev", "lo"])?;
    ensure!(!lo.contains(&router.to_string()), "{name}: the router's address remains: {lo}");
    let attached = node.run("bpftool", &["net", "show"])?;
    ensure!(!attached.contains("cst_") && !attached.contains("cistern"), "{name}: programs are attached: {attached}");
    let routes = node.run("ip", &["-4", "route", "show", "table", "all"])?;
    let routes = routes.lines().filter(|line| line.contains("10.244."));
    let unwanted: Vec<&str> = routes.filter(|line| !line.contains("dev cst")).collect();
    ensure!(unwanted.is_empty(), "{name}: routes remain: {unwanted:?}");
    let running = rig.cluster.kubectl(&[
        "get",
        "pods",
        "--all-namespaces",
        "--field-selector",
        &format!("spec.nodeName={name},spec.hostNetwork=false"),
        "--output",
        "name",
    ])?;
    let links = node.run("ip", &["-oneline", "link", "show", "type", "veth"])?;
    let ours = links.lines().filter(|line| line.contains(": cst")).count();
    ensure!(ours == running.lines().count(), "{name}: {ours} interfaces for the pods {running}: {links}");
    Ok(())
}

pub(crate) fn install_again() -> Result<()> {
    let rig = Rig::without_cistern(Ipam::ClusterPool)?;
    let before = rig.pods("app=web")?;
    rig.system(&["delete", "configmap/cistern-ipam", "--ignore-not-found"])?;
    // Now the agents run the operator's controllers, with the chart's permissions for that.
    rig.install(&["operator.inDaemonSet=true".to_owned()])?;
    let deployments = rig.system(&["get", "deployments", "--output", "name"])?;
    ensure!(!deployments.contains("cistern"), "there are {deployments}");
    wait_for("an agent to become leader", || {
        let leader = faults::leader(&rig)?;
        Ok(rig.cluster.spec().node_names()?.iter().any(|node| leader.starts_with(node.as_str())))
    })?;
    wait_for("the leader to record the pod CIDRs", || {
        let records = rig.system(&["get", "configmap/cistern-ipam", "--output", r"jsonpath={.data.blocks\.json}"])?;
        Ok(rig.cluster.spec().node_names()?.iter().all(|node| records.contains(&format!("{node:?}"))))
    })?;
    rig.make_pod("new", "node-1")?;
    rig.pod_is_ready("new")?;
    let after = rig.web()?;
    let known = |pods: &[crate::rig::Pod]| pods.iter().map(|pod| (pod.name.clone(), pod.address)).collect::<Vec<_>>();
    ensure!(known(&before) == known(&after), "the pods were {before:?}, and are {after:?}");
    rig.addresses_agree()?;
    Traffic::start(&rig, &after)?.finish()
}

pub(crate) fn kubernetes_mode() -> Result<()> {
    let rig = Rig::without_cistern(Ipam::Kubernetes)?;
    rig.install(&["annotateK8sNode=true".to_owned()])?;
    let pods = rig.web()?;
    for node in rig.cluster.spec().node_names()? {
        let given = rig.cluster.kubectl(&["get", "node", &node, "--output", "jsonpath={.spec.podCIDRs[*]}"])?;
        wait_for("the mirrored pod CIDR", || {
            Ok(rig.cluster.blocks(&node)?.iter().map(ToString::to_string).eq([given.as_str()]))
        })?;
        wait_for("the annotation of the Node", || {
            let node: Value = serde_json::from_str(&rig.cluster.get(&format!("/api/v1/nodes/{node}"))?)?;
            Ok(text(&node, "/metadata/annotations/network.cilium.io~1ipv4-pod-cidr") == given)
        })?;
    }
    network::every_pod_reaches_every_pod(&rig, &pods)?;
    network::leaves_as_its_node(&rig, &pods)?;
    let traffic = Traffic::start(&rig, &pods)?;
    rig.system(&["delete", "pod", "--selector", "app.kubernetes.io/name=cistern-agent", LONG])?;
    rig.agents_are_ready()?;
    traffic.finish()?;
    rig.addresses_agree()
}

pub(crate) fn down() -> Result<()> {
    cluster::down()?;
    let mounts = std::fs::read_to_string("/proc/mounts")?;
    ensure!(!mounts.contains(cluster::DIRECTORY), "mounts remain: {mounts}");
    ensure!(!Path::new(cluster::DIRECTORY).exists(), "{} remains", cluster::DIRECTORY);
    for entry in std::fs::read_dir("/sys/fs/cgroup")?.flatten() {
        let group = entry.path().join(cluster::cgroup::ROOT);
        ensure!(!group.exists(), "{} remains", group.display());
    }
    ensure!(!Path::new("/sys/fs/cgroup").join(cluster::cgroup::ROOT).exists(), "a control group remains");
    ensure!(image().exists(), "the image was deleted");
    Ok(())
}
