//! The steps of the demo on a real cluster, using `kubectl`.

use super::images::AGNHOST_IMAGE;
use super::spec::{OUTSIDE, OUTSIDE_NAME};
use super::{Cluster, wait_for};
use anyhow::{Context, Result, ensure};
use std::process::{Child, Stdio};

/// Port of all servers.
const PORT: u16 = 8080;
/// Number of requests to a pod while its agent is replaced.
const REQUESTS: u32 = 300;

/// Prints the checks and counts failures.
struct Checks(u32);

impl Checks {
    fn report(&mut self, item: &str, seen: Result<String>) {
        match seen {
            Ok(seen) => println!("  ok    {item:<30} {seen}"),
            Err(error) => {
                self.0 += 1;
                println!("  FAIL  {item:<30} {error:#}");
            }
        }
    }
}

/// A process that is killed with the demo.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        // An error means that it has terminated already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the demo. Returns whether all checks passed.
///
/// # Errors
/// It cannot start.
pub fn demo(cluster: &Cluster) -> Result<bool> {
    let mut checks = Checks(0);
    let arguments = ["netexec".to_owned(), format!("--http-port={PORT}")];
    let mut server = cluster.machine(OUTSIDE_NAME)?.command(cluster.binaries.find("agnhost")?)?;
    server.args(&arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let _server = Ending(server.spawn()?);
    checks.report("kubectl get ciliumnodes", nodes(cluster));
    for node in cluster.spec().node_names()? {
        cluster.apply(&format!(
            "{{apiVersion: v1, kind: Pod, metadata: {{name: on-{node}, labels: {{app: demo}}}}, spec: {{nodeName: {node}, \
             terminationGracePeriodSeconds: 0, containers: [{{name: agnhost, image: '{AGNHOST_IMAGE}', \
             imagePullPolicy: Never, args: [netexec, --http-port={PORT}]}}]}}}}"
        ))?;
    }
    cluster.kubectl(&["wait", "--for=condition=Ready", "pod", "--selector", "app=demo", "--timeout=120s"])?;
    let (one, other) = ("on-node-1", "on-node-2");
    let addresses = [address(cluster, one)?, address(cluster, other)?];
    checks.report("kubectl get pods", Ok(format!("{one} {}, {other} {}", addresses[0], addresses[1])));
    checks.report("pod to pod across nodes", sees(cluster, one, &addresses[1], &addresses[0]));
    let node = cluster.machine("node-1")?.address()?.to_string();
    checks.report("pod to a host outside", sees(cluster, one, &OUTSIDE.to_string(), &node));
    checks.report("pod to a Service, by name", curl(cluster, one, "https://kubernetes.default.svc/readyz"));
    checks.report("agent deleted meanwhile", agent_deleted(cluster, one, &addresses[1]));
    checks.report("cistern explain ip", explain(cluster, "node-1", &addresses[0]));
    checks.report("kubectl delete pod", deleted(cluster));
    Ok(checks.0 == 0)
}

fn nodes(cluster: &Cluster) -> Result<String> {
    let column = "jsonpath={range .items[*]}{.metadata.name} {.spec.ipam.podCIDRs[*]} {end}";
    let text = cluster.kubectl(&["get", "ciliumnodes", "--output", column])?;
    ensure!(text.split_whitespace().count() == 2 * usize::from(cluster.spec().nodes), "{text:?}");
    Ok(text)
}

fn address(cluster: &Cluster, pod: &str) -> Result<String> {
    cluster.kubectl(&["get", "pod", pod, "--output", "jsonpath={.status.podIP}"])
}

fn curl(cluster: &Cluster, pod: &str, url: &str) -> Result<String> {
    let said =
        cluster.kubectl(&["exec", pod, "--", "curl", "--silent", "--fail", "--insecure", "--max-time", "20", url])?;
    Ok(format!("{url} says {said}"))
}

/// The address that `to` sees when a pod connects to it.
fn sees(cluster: &Cluster, pod: &str, to: &str, wanted: &str) -> Result<String> {
    let url = format!("http://{to}:{PORT}/clientip");
    let said = curl(cluster, pod, &url)?;
    ensure!(said.contains(&format!("says {wanted}:")), "{said}; expected {wanted}");
    Ok(format!("{to} sees {pod} as {wanted}"))
}

/// Requests from a pod, each on its own connection, while the agents are replaced.
fn agent_deleted(cluster: &Cluster, pod: &str, to: &str) -> Result<String> {
    let script = format!(
        "lost=0; for i in $(seq {REQUESTS}); do curl --silent --fail --max-time 5 --output /dev/null \
         http://{to}:{PORT}/hostname || lost=$((lost+1)); done; echo $lost"
    );
    let mut requests = cluster.client("kubectl")?;
    let requests = requests.args(["exec", pod, "--", "sh", "-c", &script]).stdout(Stdio::piped()).spawn()?;
    let system = ["--namespace", "kube-system"];
    let selector = "app.kubernetes.io/name=cistern-agent";
    cluster.kubectl(&[&system[..], &["delete", "pod", "--selector", selector]].concat())?;
    cluster.kubectl(&[&system[..], &["rollout", "status", "daemonset/cistern", "--timeout=120s"]].concat())?;
    let output = requests.wait_with_output()?;
    let lost = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(output.status.success() && lost == "0", "{lost:?} of {REQUESTS} requests were lost");
    Ok(format!("0 of {REQUESTS} requests lost while both agents were deleted and recreated"))
}

/// What a node's agent knows about an address.
fn explain(cluster: &Cluster, node: &str, address: &str) -> Result<String> {
    let system = ["--namespace", "kube-system"];
    let selector = ["--selector", "app.kubernetes.io/name=cistern-agent", "--field-selector"];
    let on_node = format!("spec.nodeName={node}");
    let agent =
        cluster.kubectl(&[&system[..], &["get", "pods", "--output", "name"], &selector, &[&on_node]].concat())?;
    let exec = ["exec", &agent, "--container", "cistern-agent", "--", "cistern", "explain", "ip", address];
    let said = cluster.kubectl(&[&system[..], &exec].concat())?;
    ensure!(said.starts_with(&format!("{address}: confirmed")), "{said}");
    Ok(said.split_whitespace().collect::<Vec<_>>().join(" "))
}

fn deleted(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&["delete", "pod", "--selector", "app=demo"])?;
    for node in cluster.nodes()? {
        let left = || -> Result<usize> {
            let text = node.run("ip", &["-oneline", "route", "show"])?;
            Ok(text.lines().filter(|line| line.contains("dev cst")).count())
        };
        let pods = ["get", "pods", "--all-namespaces", "--output", "name", "--field-selector"];
        let on_node = format!("spec.nodeName={},spec.hostNetwork=false", node.name());
        let wanted = cluster.kubectl(&[&pods[..], &[&on_node]].concat())?.lines().count();
        wait_for("the pods' routes to be gone", || Ok(left()? == wanted)).context(node.name().to_owned())?;
    }
    Ok("no route of theirs is left on the nodes".to_owned())
}
