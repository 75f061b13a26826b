//! The cluster shared by the cases, with Cistern and some pods.

use anyhow::{Context, Result, ensure};
use cistern_tests::cluster::{self, Cluster, Ipam, Machine, Spec, wait_for};
use kube::api::ListParams;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Namespace of the cases' pods.
pub(crate) const NAMESPACE: &str = "web";
/// Namespace of Cistern.
pub(crate) const SYSTEM: &str = "kube-system";
/// Timeout of `kubectl` for many objects.
pub(crate) const LONG: &str = "--timeout=600s";

/// A Service with a NodePort, and its namespace.
const WEB: &str = include_str!("web.yaml");
/// Two of its pods on a node, which report their names.
const WEB_OF_NODE: &str = include_str!("web-of-node.yaml");
/// Address of the Service in [`WEB`].
pub(crate) const WEB_SERVICE: &str = "10.96.8.8:80";
/// Port of the nodes in [`WEB`].
pub(crate) const WEB_NODE_PORT: u16 = 30_080;

/// A program that reports what it observes of a network.
pub(crate) const PROBE: &str = env!("CARGO_BIN_EXE_cistern-probe");

/// A cluster with Cistern.
pub(crate) struct Rig {
    pub(crate) cluster: Cluster,
}

/// A running pod of the cases.
#[derive(Debug, Clone)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) node: Machine,
    pub(crate) address: Ipv4Addr,
    container: String,
}

impl std::fmt::Display for Pod {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} on {}", self.name, self.address, self.node.name())
    }
}

impl Pod {
    /// A command of the host in the pod's network.
    pub(crate) fn command(&self, program: &str) -> Result<Command> {
        self.node.command_in_container(&self.container, program)
    }

    /// The output of [`PROBE`] in the pod.
    pub(crate) fn ask<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        answer(self.command(PROBE)?.args(arguments), &format!("{} on {}", self.name, self.node.name()))
    }
}

/// The output of a probe.
pub(crate) fn answer<T: DeserializeOwned>(command: &mut Command, who: &str) -> Result<T> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{who}: {:?}: {}", command.get_args().collect::<Vec<_>>(), said.trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

impl Rig {
    /// The cluster of most cases: Cistern's operator assigns pod CIDRs.
    pub(crate) fn new() -> Result<Self> {
        let rig = Self::without_cistern(Ipam::ClusterPool)?;
        rig.install(&[])?;
        Ok(rig)
    }

    /// A cluster without Cistern, unless it is installed.
    pub(crate) fn without_cistern(ipam: Ipam) -> Result<Self> {
        let spec = Spec { ipam, ..Spec::of_tests()? };
        if Cluster::open().is_ok_and(|there| *there.spec() != spec) {
            cluster::down()?;
        }
        Ok(Self { cluster: Cluster::up(&spec)? })
    }

    /// Installs Cistern, unless it is installed.
    pub(crate) fn install(&self, values: &[String]) -> Result<()> {
        if self.cluster.helm(&["status", "cistern", "--namespace", SYSTEM]).is_err() {
            let image = image();
            self.cluster.load(image.to_str().context("the image's path is not UTF-8")?)?;
            self.cluster.install_cistern(values)?;
        }
        self.cluster.wait_ready()?;
        self.agents_are_ready()
    }

    /// `kubectl` in the namespace of the cases.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.cluster.kubectl(&[&["--namespace", NAMESPACE], arguments].concat())
    }

    /// `kubectl` in the namespace of Cistern.
    pub(crate) fn system(&self, arguments: &[&str]) -> Result<String> {
        self.cluster.kubectl(&[&["--namespace", SYSTEM], arguments].concat())
    }

    /// Objects of Kubernetes' core group in a namespace.
    pub(crate) fn list(&self, namespace: &str, kind: &str, params: &ListParams) -> Result<Vec<Value>> {
        self.cluster.list(&format!("/api/v1/namespaces/{namespace}/{kind}"), params)
    }

    /// Waits until every agent is ready.
    pub(crate) fn agents_are_ready(&self) -> Result<()> {
        self.system(&["rollout", "status", "daemonset/cistern", LONG]).map(drop)
    }

    /// The pods of the Service, created if necessary: two on each node, those of the first node first.
    pub(crate) fn web(&self) -> Result<Vec<Pod>> {
        self.cluster.apply(WEB)?;
        let nodes = self.cluster.spec().node_names()?;
        for node in &nodes {
            self.cluster.apply(&WEB_OF_NODE.replace("NODE", node))?;
        }
        for node in &nodes {
            self.kubectl(&["rollout", "status", &format!("deployment/web-{node}"), LONG])?;
        }
        let mut pods = Vec::new();
        wait_for("two pods on each node", || {
            pods = self.pods("app=web")?;
            Ok(pods.len() == 2 * nodes.len())
        })
        .with_context(|| format!("there are {pods:#?}"))?;
        Ok(pods)
    }

    /// The running pods with a label, without terminating ones, by node and name.
    pub(crate) fn pods(&self, label: &str) -> Result<Vec<Pod>> {
        let list = self.list(NAMESPACE, "pods", &ListParams::default().labels(label))?;
        let mut pods = Vec::new();
        for pod in list.iter().filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none()) {
            let ready = pod.pointer("/status/containerStatuses/0/ready") == Some(&Value::Bool(true));
            let address = text(pod, "/status/podIP").parse();
            let (true, Ok(address)) = (ready, address) else { continue };
            pods.push(Pod {
                name: text(pod, "/metadata/name").to_owned(),
                node: self.cluster.machine(text(pod, "/spec/nodeName"))?,
                address,
                container: text(pod, "/status/containerStatuses/0/containerID")
                    .trim_start_matches("containerd://")
                    .to_owned(),
            });
        }
        pods.sort_by(|one, other| (one.node.name(), &one.name).cmp(&(other.node.name(), &other.name)));
        Ok(pods)
    }

    /// Creates an idle pod on a node.
    pub(crate) fn make_pod(&self, name: &str, node: &str) -> Result<()> {
        self.cluster.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{app: {name}}}}}\n\
             spec:\n  nodeName: {node}\n  terminationGracePeriodSeconds: 0\n  containers:\n  - name: pause\n    \
             image: localhost/pause:1\n    imagePullPolicy: Never\n"
        ))
    }

    /// Waits until a pod is ready.
    pub(crate) fn pod_is_ready(&self, name: &str) -> Result<()> {
        self.kubectl(&["wait", "--for=condition=Ready", &format!("pod/{name}"), LONG]).map(drop)
    }

    /// The name of a node's agent.
    pub(crate) fn agent(&self, node: &str) -> Result<String> {
        let on_node = ListParams::default().labels("app.kubernetes.io/name=cistern-agent");
        let agents = self.list(SYSTEM, "pods", &on_node.fields(&format!("spec.nodeName={node}")))?;
        Ok(text(agents.first().with_context(|| format!("no agent is on {node}"))?, "/metadata/name").to_owned())
    }

    /// The output of `cistern …` on a node.
    pub(crate) fn cistern(&self, node: &str, arguments: &[&str]) -> Result<Value> {
        let agent = self.agent(node)?;
        let exec = ["exec", &agent, "--container", "cistern-agent", "--", "/usr/bin/cistern"];
        Ok(serde_json::from_str(&self.system(&[&exec[..], arguments, &["--output", "json"]].concat())?)?)
    }

    /// All pods with their own address: node, namespace and name, address.
    fn addresses(&self) -> Result<BTreeMap<String, BTreeSet<(String, Ipv4Addr)>>> {
        let list = self.cluster.list("/api/v1/pods", &ListParams::default())?;
        let mut nodes: BTreeMap<String, BTreeSet<(String, Ipv4Addr)>> = BTreeMap::new();
        for pod in list.iter().filter(|pod| pod.pointer("/spec/hostNetwork") != Some(&Value::Bool(true))) {
            let name = format!("{}/{}", text(pod, "/metadata/namespace"), text(pod, "/metadata/name"));
            if let Ok(address) = text(pod, "/status/podIP").parse() {
                nodes.entry(text(pod, "/spec/nodeName").to_owned()).or_default().insert((name, address));
            }
        }
        Ok(nodes)
    }

    /// Waits until the agents have allocated exactly the addresses of their nodes' pods, and checks that no address is
    /// allocated twice or outside its node's pod CIDR. Quarantined addresses are not allocated.
    pub(crate) fn addresses_agree(&self) -> Result<()> {
        let mut difference = String::new();
        wait_for("the agents to have exactly the addresses of all pods", || {
            let wanted = self.addresses()?;
            difference.clear();
            for node in self.cluster.spec().node_names()? {
                let blocks = self.cluster.blocks(&node)?;
                let held = self.cistern(&node, &["ip", "list"])?;
                let held: BTreeSet<(String, Ipv4Addr)> = held
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(|row| matches!(text(row, "/state"), "confirmed" | "provisional"))
                    .map(|row| Ok((text(row, "/owner").to_owned(), text(row, "/address").parse()?)))
                    .collect::<Result<_>>()?;
                let wanted = wanted.get(&node).cloned().unwrap_or_default();
                if held != wanted {
                    difference.push_str(&format!("{node} has {held:?}, its pods have {wanted:?}\n"));
                }
                for (name, address) in &wanted {
                    if !blocks.iter().any(|block| block.contains(address)) {
                        difference.push_str(&format!("{name} on {node} has {address}, its pod CIDRs are {blocks:?}\n"));
                    }
                }
            }
            Ok(difference.is_empty())
        })
        .with_context(|| difference.clone())?;
        let all: Vec<Ipv4Addr> = self.addresses()?.into_values().flatten().map(|(_, address)| address).collect();
        let different: BTreeSet<&Ipv4Addr> = all.iter().collect();
        ensure!(different.len() == all.len(), "two pods have one address: {all:?}");
        Ok(())
    }
}

/// Path of the image of `cargo xtask image`.
pub(crate) fn image() -> PathBuf {
    images().join("cistern.tar")
}

/// Path of the image of another build: other kernel programs and maps, and documents of the next format.
pub(crate) fn variant_image() -> PathBuf {
    images().join("cistern-variant.tar")
}

fn images() -> PathBuf {
    Path::new(PROBE).ancestors().nth(2).unwrap_or(Path::new("/")).join("image")
}

/// A string in an object; empty if there is none.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Prints the state of the cluster, to diagnose a failed case.
pub(crate) fn describe() {
    let Ok(cluster) = Cluster::open() else { return };
    let wanted: [&[&str]; 4] = [
        &["get", "nodes,ciliumnodes", "--output", "wide"],
        &["get", "pods", "--all-namespaces", "--output", "wide"],
        &["get", "events", "--all-namespaces", "--field-selector", "type=Warning"],
        &["--namespace", SYSTEM, "logs", "--selector", "app.kubernetes.io/part-of=cistern", "--tail=25", "--prefix"],
    ];
    for arguments in wanted {
        let said = cluster.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}"));
        eprintln!("--- kubectl {}\n{said}", arguments.join(" "));
    }
}
