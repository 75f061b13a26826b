//! Routes, MTU and source addresses are the kernel's choice: metrics, tables and rules count.

use crate::process::{Rig, until};
use serde_json::Value;

/// A node with `eth0` and a second device on another network.
fn two_devices(prefix: &str) -> Rig {
    let rig = Rig::new(prefix);
    for arguments in [
        &["link", "add", "eth1", "type", "veth", "peer", "name", "far"][..],
        &["link", "set", "eth1", "mtu", "1400", "up"],
        &["link", "set", "far", "up"],
        &["address", "add", "172.29.9.20/24", "dev", "eth1"],
    ] {
        rig.node.run("ip", arguments).unwrap();
    }
    rig
}

fn device(rig: &Rig, name: &str) -> Option<Value> {
    let status = rig.status()?;
    status["masquerade"]["devices"].as_array()?.iter().find(|device| device["name"] == name).cloned()
}

fn source(rig: &Rig) -> Option<Value> {
    Some(device(rig, "eth0")?["address"].clone())
}

#[test]
fn an_address_that_others_add_does_not_become_the_source_of_pods() {
    let mut rig = Rig::new("x-source");
    rig.start_api();
    // As keepalived does, with an address lower than the node's own.
    rig.node.run("ip", &["address", "add", "172.29.8.5/32", "dev", "eth0"]).unwrap();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    assert_eq!(source(&rig).unwrap(), "172.29.8.20");
    rig.node.run("ip", &["address", "add", "172.29.8.4/24", "dev", "eth0"]).unwrap();
    // It is the kernel's choice from now on, too.
    rig.node.run("ip", &["route", "replace", "default", "via", "172.29.8.1", "src", "172.29.8.4"]).unwrap();
    rig.node.run("ip", &["address", "add", "172.29.8.3/32", "dev", "eth0"]).unwrap();
    until("the address to be seen", || {
        rig.rows(&["bpf", "ipmasq", "list"]).iter().any(|row| row["prefix"] == "172.29.8.3/32")
    });
    assert_eq!(source(&rig).unwrap(), "172.29.8.20");
    rig.kill_agent();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    assert_eq!(source(&rig).unwrap(), "172.29.8.20", "a restart changes nothing");
    // The kernel deletes the other addresses of the network, and the routes, too.
    rig.node.run("ip", &["address", "del", "172.29.8.20/24", "dev", "eth0"]).unwrap();
    rig.node.run("ip", &["route", "replace", "default", "via", "172.29.8.1", "dev", "eth0", "onlink"]).unwrap();
    until("an address that the node has", || source(&rig).is_some_and(|address| address != "172.29.8.20"));
}

#[test]
fn the_source_of_pods_is_the_nodes_own_address() {
    let mut rig = Rig::new("x-internal-ip");
    rig.node.run("ip", &["address", "add", "172.29.8.5/32", "dev", "eth0"]).unwrap();
    rig.start_api_with(
        "apiVersion: v1\nkind: Node\nmetadata: {name: node-a}\n\
         status: {addresses: [{type: InternalIP, address: 172.29.8.5}]}\n",
    );
    rig.start_agent(&[]);
    until("the address of the Node", || source(&rig).is_some_and(|address| address == "172.29.8.5"));
    let reason = device(&rig, "eth0").unwrap()["reason"].to_string();
    assert!(reason.contains("172.29.8.5 is an address of the Node"), "{reason}");
}

#[test]
fn pods_get_the_mtu_of_the_route_that_the_kernel_takes() {
    let mut rig = two_devices("x-mtu");
    // The first in every list has the higher metric.
    for arguments in [
        &["route", "del", "default"][..],
        &["route", "add", "default", "via", "172.29.8.1", "dev", "eth0", "metric", "200"],
        &["route", "add", "default", "via", "172.29.9.1", "dev", "eth1", "metric", "300"],
    ] {
        rig.node.run("ip", arguments).unwrap();
    }
    rig.start_api();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    let mut number = 0;
    let mut next_pod_has = |mtu: u64| {
        number += 1;
        let name = format!("pod-{number}");
        rig.add(&name).unwrap();
        let links = rig.node.existing_pod(&name).json("ip", &["-j", "link", "show", "eth0"]).unwrap();
        links[0]["mtu"] == mtu
    };
    assert!(next_pod_has(1500));
    assert_eq!(explained_device(&rig), "eth0");
    let better = ["via", "172.29.9.1", "dev", "eth1", "metric", "100"];
    rig.node.run("ip", &[&["route", "add", "default"][..], &better].concat()).unwrap();
    assert_eq!(explained_device(&rig), "eth1");
    until("the MTU of the better route's device", || next_pod_has(1400));
    rig.node.run("ip", &[&["route", "change", "default"][..], &better, &["mtu", "1300"]].concat()).unwrap();
    until("the route's own MTU", || next_pod_has(1300));
}

/// The device by which a pod's packet to the outside leaves, as explained.
fn explained_device(rig: &Rig) -> String {
    let pod = rig.rows(&["ip", "list"])[0]["address"].as_str().unwrap().to_owned();
    let arguments = ["explain", "masquerade", "--from", &pod, "--to", "9.9.9.9:53", "--protocol", "udp", "-o", "json"];
    let answer = rig.node.json(crate::process::program("cistern").to_str().unwrap(), &arguments).unwrap();
    answer["device"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn direct_routes_take_the_device_that_the_kernel_takes() {
    let mut rig = two_devices("x-nic");
    // Both devices are on the network of the other node.
    rig.node.run("ip", &["address", "change", "172.29.8.20/24", "dev", "eth0", "metric", "200"]).unwrap();
    rig.node.run("ip", &["address", "add", "172.29.8.30/24", "dev", "eth1", "metric", "100"]).unwrap();
    let objects = [
        include_str!("../../crds/ciliumnodes.yaml"),
        "apiVersion: v1\nkind: Node\nmetadata: {name: node-a}\n",
        "apiVersion: v1\nkind: Node\nmetadata: {name: node-b}\n",
        "apiVersion: cilium.io/v2\nkind: CiliumNode\nmetadata: {name: node-b}\n\
         spec: {addresses: [{type: InternalIP, ip: 172.29.8.21}], ipam: {podCIDRs: [10.244.77.0/24]}}\n",
    ];
    rig.start_api_with(&objects.join("---\n"));
    rig.start_agent(&["--auto-direct-node-routes=true"]);
    let route = |rig: &Rig| {
        let routes = rig.node.json("ip", &["-j", "route", "show", "10.244.77.0/24"]).unwrap();
        Some((routes[0]["dev"].as_str()?.to_owned(), routes[0]["gateway"].as_str()?.to_owned()))
    };
    let by = |device: &str| Some((device.to_owned(), "172.29.8.21".to_owned()));
    until("the route by the device of the lower metric", || route(&rig) == by("eth1"));
    rig.node.run("ip", &["route", "add", "172.29.8.21/32", "dev", "eth0"]).unwrap();
    until("the route by the device of the longer prefix", || route(&rig) == by("eth0"));
    // By a rule and a table that the main table knows nothing of.
    rig.node.run("ip", &["route", "add", "172.29.8.21/32", "dev", "eth1", "table", "77"]).unwrap();
    rig.node.run("ip", &["rule", "add", "to", "172.29.8.21", "table", "77"]).unwrap();
    until("the route by the device of the rule", || route(&rig) == by("eth1"));
    rig.node
        .run("ip", &["route", "replace", "172.29.8.21/32", "via", "172.29.9.1", "dev", "eth1", "table", "77"])
        .unwrap();
    until("a reason instead of a route", || {
        route(&rig).is_none()
            && rig
                .wait("route to node node-b")
                .is_some_and(|reason| reason.contains("172.29.8.21 is reached via 172.29.9.1"))
    });
}
