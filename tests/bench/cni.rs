//! CNI ADD and DEL as whole processes, compared with the reference plugins `ptp` and `host-local`: `cargo xtask bench
//! cni`.
//!
//! Both create a veth pair, an address and routes for a pod in a new network namespace. The calls alternate, so that
//! other load affects both alike. Every call is run by `nsenter`, whose own time is measured in the same rounds and
//! subtracted.

#[path = "median.rs"]
mod median;

use anyhow::{Context as _, Result, ensure};
use cistern_tests::lab::{Lab, Machine};
use median::median;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROUNDS: usize = 40;
const REFERENCE: &str = "/usr/lib/cni/ptp";
const OURS_CONF: &str = r#"{"cniVersion":"1.0.0","name":"ours","type":"cistern-cni"}"#;
const PTP_CONF: &str = r#"{"cniVersion":"1.0.0","name":"reference","type":"ptp","ipMasq":false,
    "ipam":{"type":"host-local","dataDir":"/run/host-local","ranges":[[{"subnet":"10.99.0.0/24"}]],
    "routes":[{"dst":"0.0.0.0/0"}]}}"#;

/// The agent waits for its Node.
const NODE: &str = r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"}}"#;

fn main() -> Result<()> {
    let cistern = named("CISTERN")?;
    let plugin = named("CISTERN_CNI")?;
    ensure!(Path::new(REFERENCE).is_file(), "{REFERENCE} is missing: `cargo xtask setup` installs it");
    let lab = Lab::new("bench-cni")?;
    let node = lab.node("n1", "172.29.8.11/24".parse()?)?;
    node.run("ip", &["route", "add", "default", "via", "172.29.8.1"])?;
    let here = std::env::current_exe().context("where this bench is")?;
    let apiserver = here.ancestors().nth(2).context("no target folder")?.join("cistern-apiserver");
    std::fs::write(node.file("/run/objects.yaml"), NODE).context("write the objects to begin with")?;
    let mut api = quiet(node.command(apiserver).args([
        "--listen=127.0.0.1:6443",
        "--kubeconfig=/run/kubeconfig",
        "--objects=/run/objects.yaml",
    ]))?;
    wait_for("the API server", || node.file("/run/kubeconfig").exists())?;
    let mut agent = quiet(node.command(&cistern).args([
        "agent",
        "--node-name=n1",
        "--leader-election=true",
        "--k8s-kubeconfig-path=/run/kubeconfig",
        "--cluster-pool-ipv4-cidr=10.244.0.0/16",
    ]))?;
    wait_for("the agent", || node.run(&cistern.to_string_lossy(), &["status"]).is_ok())?;

    let mut times: [Vec<f64>; 5] = Default::default();
    for round in 0..ROUNDS {
        let name = format!("p{round}");
        node.pod(&name)?;
        let enter = timed(&mut node.command("true"), None)?;
        let ours = plugin.to_string_lossy().into_owned();
        let taken = [
            enter,
            call(&node, &ours, OURS_CONF, "ADD", &name, "eth0")?,
            call(&node, REFERENCE, PTP_CONF, "ADD", &name, "eth1")?,
            call(&node, &ours, OURS_CONF, "DEL", &name, "eth0")?,
            call(&node, REFERENCE, PTP_CONF, "DEL", &name, "eth1")?,
        ];
        for (list, time) in times.iter_mut().zip(taken) {
            list.push(time);
        }
        node.existing_pod(&name).remove()?;
    }
    for child in [&mut agent, &mut api] {
        child.kill()?;
        child.wait()?;
    }
    let [enter, ours_add, ptp_add, ours_del, ptp_del] = times.map(median);
    println!("medians of {ROUNDS} interleaved rounds, less {enter:.2} ms for entering the node");
    for (verb, ours, reference) in [("ADD", ours_add, ptp_add), ("DEL", ours_del, ptp_del)] {
        let (ours, reference) = (ours - enter, reference - enter);
        println!(
            "  {verb}  cistern-cni {ours:>6.2} ms   ptp + host-local {reference:>6.2} ms   ratio {:.2}   to reach: 0.50",
            ours / reference
        );
    }
    Ok(())
}

fn named(variable: &str) -> Result<PathBuf> {
    std::env::var_os(variable)
        .map(PathBuf::from)
        .with_context(|| format!("{variable} is not set: run `cargo xtask bench cni`"))
}

fn quiet(command: &mut Command) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("start a program")
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let begun = Instant::now();
    while !is_so() {
        ensure!(begun.elapsed() < Duration::from_secs(30), "waited for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn call(node: &Machine, plugin: &str, conf: &str, verb: &str, name: &str, ifname: &str) -> Result<f64> {
    let mut command = node.command(plugin);
    command
        .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", name), ("CNI_IFNAME", ifname), ("CNI_PATH", "/usr/lib/cni")])
        .env("CNI_NETNS", format!("/run/netns/{name}"));
    timed(&mut command, Some(conf))
}

/// Milliseconds from the start of a process to its end.
fn timed(command: &mut Command, input: Option<&str>) -> Result<f64> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let begun = Instant::now();
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.unwrap_or_default().as_bytes())?;
    }
    let output = child.wait_with_output()?;
    let taken = begun.elapsed().as_secs_f64() * 1e3;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stdout));
    Ok(taken)
}
