//! CNI ADD and DEL for pods of a kubelet, compared with the reference plugins: `cargo xtask bench kubelet`.
//!
//! In a real cluster, containerd measures the time for a pod's network: a namespace, `loopback`, and the plugins of the
//! network. One node has Cistern, the other `ptp` with `host-local`; both chain `portmap`. Pods are created and deleted
//! one at a time, alternating between the nodes.

#[path = "median.rs"]
mod median;

use anyhow::{Context as _, Result, ensure};
use cistern_tests::cluster::{self, Cluster, Machine, Spec};
use median::median;

const ROUNDS: usize = 30;
const OURS: &str = "node-1";
const REFERENCE: &str = "node-2";
/// Addresses of the pods of [`REFERENCE`].
const BLOCK: &str = "10.99.2.0/24";
const POD: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: measured, namespace: default}
spec:
  nodeName: NODE
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  enableServiceLinks: false
  tolerations: [{operator: Exists}]
  containers: [{name: pause, image: 'localhost/pause:1', imagePullPolicy: Never}]
";

/// Milliseconds that containerd has spent on networks of pods so far.
#[derive(Clone, Copy)]
struct Waited {
    set_up: f64,
    tear_down: f64,
}

fn main() -> Result<()> {
    let image = std::env::var("CISTERN_IMAGE").context("CISTERN_IMAGE is not set: run `cargo xtask bench kubelet`")?;
    cluster::down()?;
    let outcome = measure(&image);
    cluster::down()?;
    let (ours, reference) = outcome?;
    println!("medians of {ROUNDS} interleaved rounds, of what a pod's network takes containerd");
    type Part = fn(&Waited) -> f64;
    let parts: [(&str, Part); 2] = [("ADD", |waited| waited.set_up), ("DEL", |waited| waited.tear_down)];
    for (verb, part) in parts {
        let (ours, reference) = (median(ours.iter().map(part)), median(reference.iter().map(part)));
        println!(
            "  {verb}  cistern-cni, portmap {ours:>6.1} ms   ptp + host-local, portmap {reference:>6.1} ms   ratio {:.2}",
            ours / reference
        );
    }
    Ok(())
}

fn measure(image: &str) -> Result<(Vec<Waited>, Vec<Waited>)> {
    let cluster = Cluster::up(&Spec::default())?;
    cluster.load(image)?;
    cluster.kubectl(&["label", "node", OURS, "bench=cistern"])?;
    let conflist = cluster::reference_conflist(BLOCK);
    cluster.machine(REFERENCE)?.write("/etc/cni/net.d/10-reference.conflist", conflist.as_bytes())?;
    cluster.install_cistern(&["nodeSelector.bench=cistern".to_owned()])?;
    cluster.wait_ready()?;
    let mut times = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        times.0.push(one_pod(&cluster, OURS)?);
        times.1.push(one_pod(&cluster, REFERENCE)?);
    }
    Ok(times)
}

/// Creates and deletes a pod.
fn one_pod(cluster: &Cluster, node: &str) -> Result<Waited> {
    let machine = cluster.machine(node)?;
    let before = waited(&machine)?;
    cluster.apply(&POD.replace("NODE", node))?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "--timeout=60s", "pod/measured"])?;
    let started = waited(&machine)?;
    cluster.kubectl(&["delete", "pod/measured", "--wait"])?;
    let mut ended = started;
    // The pod may be deleted before its sandbox.
    cluster::wait_for("containerd to count a pod", || {
        ended = waited(&machine)?;
        Ok(ended.tear_down > started.tear_down)
    })?;
    let set_up = started.set_up - before.set_up;
    ensure!(set_up > 0.0, "containerd on {node} counted no pod that began");
    Ok(Waited { set_up, tear_down: ended.tear_down - started.tear_down })
}

/// From containerd's metrics.
fn waited(machine: &Machine) -> Result<Waited> {
    let ask = "exec 3<>/dev/tcp/127.0.0.1/1338; printf 'GET /v1/metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
    let metrics = machine.run("bash", &["-c", ask])?;
    let sum = |name: &str| -> Result<f64> {
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("_seconds_sum "));
        Ok(value.with_context(|| format!("containerd has no metric {name}"))?.parse::<f64>()? * 1e3)
    };
    Ok(Waited {
        set_up: sum("containerd_cri_sandbox_create_network")?,
        tear_down: sum("containerd_cri_sandbox_delete_network")?,
    })
}
