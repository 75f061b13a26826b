//! What the agent set in the kernel is put back when another program takes it away.

use crate::process::{Rig, until};
use cistern_tests::lab::Machine;
use std::process::{Command, Stdio};

fn serving(prefix: &str) -> Rig {
    let mut rig = Rig::new(prefix);
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    until("the router address", || router(&rig.node).is_some());
    rig
}

/// The routes of the agent, as `ip` prints them.
fn routes(node: &Machine) -> Vec<String> {
    node.run("ip", &["route", "show", "proto", "197"]).unwrap().lines().map(str::to_owned).collect()
}

/// The router address, as CIDR.
fn router(node: &Machine) -> Option<String> {
    let shown = node.json("ip", &["-j", "-4", "address", "show", "dev", "lo", "scope", "link"]).unwrap();
    let addresses = shown.as_array().unwrap().iter().filter_map(|link| link["addr_info"].as_array()).flatten();
    // What the filter leaves out is printed as an empty object.
    let mut local = addresses.filter_map(|address| address["local"].as_str());
    Some(format!("{}/32", local.next()?))
}

#[test]
fn flushed_routes_of_the_agent_are_put_back() {
    let rig = serving("rp-routes");
    let before = routes(&rig.node);
    assert!(before.iter().any(|route| route.starts_with("unreachable 10.244.")), "{before:?}");
    rig.node.run("ip", &["route", "flush", "proto", "197"]).unwrap();
    until("the routes to be back", || routes(&rig.node) == before);
}

#[test]
fn a_deleted_router_address_is_put_back() {
    let rig = serving("rp-router");
    let before = router(&rig.node).unwrap();
    rig.node.run("ip", &["address", "del", &before, "dev", "lo"]).unwrap();
    until("the router address to be back", || router(&rig.node).as_ref() == Some(&before));
    rig.add("late").unwrap();
}

/// Whether a pod reaches the node, and the node the pod.
fn talks(rig: &Rig, pod: &str, address: &str) -> bool {
    let ping = |run: &mut Command| run.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success();
    let to_node = ping(rig.node.existing_pod(pod).command("ping").args(["-c1", "-W1", "172.29.8.20"]));
    to_node && ping(rig.node.command("ping").args(["-c1", "-W1", address]))
}

/// A pod's address and the name of its device on the node.
fn pod(rig: &Rig, name: &str) -> (String, String) {
    let result = rig.add(name).unwrap();
    let address = result["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32").to_owned();
    (address, result["interfaces"][0]["name"].as_str().unwrap().to_owned())
}

#[test]
fn the_route_to_a_pod_is_put_back_whatever_took_it() {
    let rig = serving("rp-pod-route");
    let (address, device) = pod(&rig, "cart");
    let route = |rig: &Rig| rig.node.run("ip", &["route", "show", &address]).unwrap();
    until("the pod to talk", || talks(&rig, "cart", &address));
    let before = route(&rig);
    let router = router(&rig.node).unwrap();
    for command in [
        &["route", "del", &address][..],
        &["route", "flush", "proto", "198"],
        // The kernel deletes the routes with this source.
        &["address", "del", &router, "dev", "lo"],
        &["address", "flush", "dev", "lo", "scope", "link"],
    ] {
        rig.node.run("ip", command).unwrap();
        until(&format!("the route after {command:?}"), || route(&rig) == before);
        until(&format!("the pod to talk after {command:?}"), || talks(&rig, "cart", &address));
    }
    rig.node.run("ip", &["link", "set", &device, "down"]).unwrap();
    until("a finding that names the pod", || rig.finds("pod-device-down", &address));
    let down = rig.status().unwrap()["findings"].to_string();
    assert!(down.contains("cart") && down.contains(&format!("ip link set {device} up")), "{down}");
    assert_eq!(route(&rig), "", "what somebody set down stays down");
    rig.node.run("ip", &["link", "set", &device, "up"]).unwrap();
    until("the route after the device is up", || route(&rig) == before);
    until("the pod to talk after the device is up", || talks(&rig, "cart", &address));
    until("the finding to end", || !rig.finds("pod-device-down", &address));
    rig.cni("DEL", "cart").unwrap();
    assert_eq!(route(&rig), "");
    assert!(!rig.finds("pod-device-down", &address));
}

#[test]
fn the_sysctls_of_a_pods_device_are_put_back() {
    let rig = serving("rp-sysctl");
    let (address, device) = pod(&rig, "cart");
    until("the pod to talk", || talks(&rig, "cart", &address));
    for (name, wrong, right) in [("rp_filter", "0", "1"), ("forwarding", "0", "1"), ("proxy_arp", "1", "0")] {
        let path = format!("/proc/sys/net/ipv4/conf/{device}/{name}");
        let value = || rig.node.run("cat", &[&path]).unwrap();
        assert_eq!(value(), right, "{name}");
        rig.node.run("sh", &["-c", &format!("echo {wrong} > {path}")]).unwrap();
        until(&format!("{name} to be {right} again"), || value() == right);
    }
}

#[test]
fn the_router_answers_a_pod_that_lost_its_neighbours_whatever_arp_ignore_says() {
    let rig = serving("rp-arp");
    let (address, _) = pod(&rig, "cart");
    for value in ["0", "1", "2", "8"] {
        rig.node.run("sh", &["-c", &format!("echo {value} > /proc/sys/net/ipv4/conf/all/arp_ignore")]).unwrap();
        let pod = rig.node.existing_pod("cart");
        pod.run("ip", &["neigh", "flush", "all", "nud", "permanent"]).unwrap();
        pod.run("ip", &["neigh", "flush", "all"]).unwrap();
        let shown = pod.run("ip", &["neigh", "show", "nud", "permanent"]).unwrap();
        assert_eq!(shown, "", "the pod has forgotten the router");
        until(&format!("the pod to talk with arp_ignore {value}"), || talks(&rig, "cart", &address));
    }
}

#[test]
fn an_agent_without_its_pins_ends_and_the_next_one_masquerades_again() {
    let mut rig = serving("rp-pins");
    let (address, _) = pod(&rig, "cart");
    let programs = |rig: &Rig| rig.node.run("ls", &["/sys/fs/bpf/cistern/links"]).unwrap_or_default();
    assert!(programs(&rig).contains("egress"), "{}", programs(&rig));
    rig.node.run("rm", &["-r", "/sys/fs/bpf/cistern"]).unwrap();
    until("the agent to end", || rig.agent.as_mut().unwrap().try_wait().unwrap().is_some());
    let log = rig.log();
    assert!(log.contains("the pins below /sys/fs/bpf/cistern were removed"), "{log}");
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    assert!(programs(&rig).contains("egress"), "{}", programs(&rig));
    assert!(rig.rows(&["bpf", "endpoint", "list"]).iter().any(|row| row["address"] == address.as_str()));
}

#[test]
fn a_foreign_route_to_a_pod_is_not_replaced() {
    let rig = serving("rp-foreign");
    let (address, _) = pod(&rig, "cart");
    until("the pod to talk", || talks(&rig, "cart", &address));
    let foreign = ["blackhole", &address];
    // In one step, as a routing daemon does.
    rig.node.run("ip", &[&["route", "replace"][..], &foreign].concat()).unwrap();
    until("the agent to say which row it cannot set", || {
        let status = rig.status().unwrap();
        status["reconcilers"].to_string().contains(&address) && !rig.is_ready()
    });
    assert!(rig.node.run("ip", &["route", "show", &address]).unwrap().starts_with("blackhole"));
    rig.node.run("ip", &[&["route", "del"][..], &foreign].concat()).unwrap();
    until("the pod to talk again", || talks(&rig, "cart", &address) && rig.is_ready());
}

#[test]
fn what_is_taken_again_and_again_is_reported() {
    let rig = serving("rp-contest");
    let address = router(&rig.node).unwrap();
    until("a finding about the router address", || {
        if router(&rig.node).is_some() {
            rig.node.run("ip", &["address", "del", &address, "dev", "lo"]).unwrap();
        }
        rig.finds("contested", address.trim_end_matches("/32"))
    });
    until("the node to say why it is not ready", || !rig.is_ready());
}
