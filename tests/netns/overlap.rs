//! Networks of the node that overlap the pods' addresses: only what both have is affected.

use crate::process::{Rig, until};
use cistern_tests::lab::Machine;
use serde_json::Value;
use std::net::Ipv4Addr;

fn routes(node: &Machine) -> String {
    node.run("ip", &["route", "show"]).unwrap()
}

fn address(result: &Value) -> Ipv4Addr {
    result["ips"][0]["address"].as_str().unwrap().trim_end_matches("/32").parse().unwrap()
}

/// A bridge as Docker creates it.
fn add_bridge(rig: &Rig, name: &str, address: &str) {
    rig.node.run("ip", &["link", "add", name, "type", "bridge"]).unwrap();
    rig.node.run("ip", &["address", "add", address, "dev", name]).unwrap();
    rig.node.run("ip", &["link", "set", name, "up"]).unwrap();
}

#[test]
fn nothing_of_a_pod_cidr_inside_the_nodes_own_network_reaches_the_kernel_until_that_changes() {
    let mut rig = Rig::new("o-covered");
    // The pod CIDR is half of the network of eth0, with the gateway in it.
    let settings = ["--cluster-pool-ipv4-cidr", "172.29.8.0/25", "--cluster-pool-ipv4-mask-size", "25"];
    let before = (routes(&rig.node), rig.node.run("ip", &["address", "show", "dev", "lo"]).unwrap());
    rig.start_api();
    rig.start_agent(&settings);
    until("the overlap to be reported", || {
        let reasons = rig.status().map(|status| status["health"]["reasons"].to_string()).unwrap_or_default();
        reasons.contains("172.29.8.0/24") && reasons.contains("eth0")
    });
    let refused = rig.add("early").unwrap_err();
    assert!(refused["msg"].as_str().unwrap().contains("172.29.8.0/24"), "{refused}");
    assert_eq!((routes(&rig.node), rig.node.run("ip", &["address", "show", "dev", "lo"]).unwrap()), before);
    // A restart changes nothing of it, and it ends by itself.
    rig.kill_agent();
    rig.start_agent(&settings);
    until("the overlap to be reported again", || rig.status().is_some() && !rig.is_ready());
    rig.node.run("ip", &["address", "replace", "172.30.8.20/24", "dev", "eth0"]).unwrap();
    rig.node.run("ip", &["address", "del", "172.29.8.20/24", "dev", "eth0"]).unwrap();
    rig.node.run("ip", &["route", "replace", "default", "via", "172.30.8.1"]).unwrap();
    until("readiness", || rig.is_ready());
    rig.cni("ADD", "early").unwrap();
    assert!(routes(&rig.node).contains("unreachable 172.29.8.0/25"), "{}", routes(&rig.node));
}

#[test]
fn a_network_elsewhere_in_the_pool_does_not_concern_a_node() {
    let mut rig = Rig::new("o-pool");
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    let before = address(&rig.add("a").unwrap());
    // Inside cluster-pool-ipv4-cidr, and outside of this node's pod CIDR.
    add_bridge(&rig, "docker0", "10.244.200.1/24");
    rig.kill_agent();
    rig.start_agent(&[]);
    until("readiness after a restart", || rig.is_ready());
    rig.add("b").unwrap();
    assert_eq!(rig.cni("ADD", "a").map(|result| address(&result)).unwrap(), before);
}

#[test]
fn addresses_of_a_network_inside_the_pod_cidr_are_not_allocated() {
    let mut rig = Rig::new("o-part");
    rig.start_api();
    // With the address of docker0, the router address would make it the bridge of another plugin.
    rig.start_agent(&["--cluster-pool-ipv4-mask-size", "27", "--local-router-ipv4", "10.244.0.1"]);
    until("readiness", || rig.is_ready());
    add_bridge(&rig, "docker0", "10.244.0.17/28");
    until("the overlap to be reported", || rig.finds("pod-cidr-overlap", "10.244.0.16/28"));
    assert!(rig.is_ready(), "the rest of the pod CIDR serves");
    // Of 30 addresses 15 are in this half, and the router has one of them.
    let mut got = Vec::new();
    let refused = loop {
        match rig.add(&format!("pod-{}", got.len())) {
            Ok(result) => got.push(address(&result)),
            Err(error) => break error,
        }
        assert!(got.len() < 15, "{got:?}");
    };
    assert!(got.len() == 14 && got.iter().all(|address| address.octets()[3] < 16), "{got:?}");
    assert!(refused["msg"].as_str().unwrap().contains("exhausted"), "{refused}");
    rig.node.run("ip", &["link", "del", "docker0"]).unwrap();
    until("the finding to end", || !rig.finds("pod-cidr-overlap", "10.244.0.16/28"));
    until("an address of the other half", || {
        rig.cni("ADD", &format!("pod-{}", got.len())).is_ok_and(|result| address(&result).octets()[3] >= 16)
    });
}

#[test]
fn a_network_that_comes_over_a_serving_pod_cidr_takes_no_address_from_a_pod() {
    let mut rig = Rig::new("o-later");
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    let before = address(&rig.add("a").unwrap());
    let talks = |rig: &Rig| rig.node.existing_pod("a").run("ping", &["-c1", "-W1", "172.29.8.20"]).is_ok();
    until("the pod to talk", || talks(&rig));
    // As a VPN does.
    add_bridge(&rig, "vpn0", "10.240.0.1/12");
    until("the overlap to be reported", || !rig.is_ready());
    for restarted in [false, true] {
        if restarted {
            rig.kill_agent();
            rig.start_agent(&[]);
            until("the agent", || rig.status().is_some() && !rig.is_ready());
        }
        assert!(talks(&rig), "the pod goes on");
        assert_eq!(rig.cni("ADD", "a").map(|result| address(&result)).unwrap(), before);
        let refused = rig.cni("ADD", "late-pod").map_err(|_| ()).is_err();
        assert!(refused, "no new address");
    }
    rig.node.run("ip", &["link", "del", "vpn0"]).unwrap();
    until("readiness", || rig.is_ready());
    rig.add("b").unwrap();
}
