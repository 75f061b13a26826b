//! Many concurrent calls, many containers in sequence, and an agent that is not running yet: real plugins with a real
//! agent.

use crate::process::{Rig, cni, program, start_cni, until};
use cistern_tests::lab::Machine;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};

const PODS: usize = 100;

fn serving(prefix: &str, settings: &[&str]) -> Rig {
    let mut rig = Rig::new(prefix);
    rig.start_api();
    rig.start_agent(settings);
    until("readiness", || rig.is_ready());
    rig
}

/// Runs the plugin for all containers concurrently.
fn at_once(node: &Machine, verb: &str, containers: &[(String, Value)]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let calls: Vec<_> =
            containers.iter().map(|(name, previous)| scope.spawn(move || cni(node, verb, name, previous))).collect();
        calls.into_iter().map(|call| call.join().unwrap().unwrap_or_else(|error| panic!("{verb}: {error}"))).collect()
    })
}

fn rows(node: &Machine, arguments: &[&str]) -> Vec<Value> {
    let program = program("cistern");
    let printed = node.json(program.to_str().unwrap(), &[arguments, &["-o", "json"]].concat()).unwrap();
    printed.as_array().unwrap().clone()
}

#[test]
fn a_hundred_pods_are_added_and_deleted_at_once() {
    let rig = serving("b-hundred", &[]);
    let node = &rig.node;
    let names: Vec<String> = (0..PODS).map(|number| format!("p{number}")).collect();
    let script: String = names.iter().map(|name| format!("ip netns add {name}\n")).collect();
    node.run("sh", &["-ec", &script]).unwrap();
    let new: Vec<(String, Value)> = names.iter().map(|name| (name.clone(), Value::Null)).collect();
    let results = at_once(node, "ADD", &new);
    let addresses: BTreeSet<&str> =
        results.iter().map(|result| result["ips"][0]["address"].as_str().unwrap()).collect();
    assert_eq!(addresses.len(), PODS, "each has an address of its own");
    // CHECK examines both sides of the pair, addresses, routes and neighbours.
    let added: Vec<(String, Value)> = names.iter().cloned().zip(results.iter().cloned()).collect();
    at_once(node, "CHECK", &added);
    let confirmed = rows(node, &["ip", "list"]).into_iter().filter(|row| row["state"] == "confirmed").count();
    assert_eq!(confirmed, PODS);
    assert_eq!(rows(node, &["bpf", "endpoint", "list"]).len(), PODS);
    let router = results[0]["ips"][0]["gateway"].as_str().unwrap();
    for name in names.iter().step_by(10) {
        node.existing_pod(name).run("ping", &["-c1", "-W2", router]).unwrap();
    }

    at_once(node, "DEL", &added);
    let held = |row: &Value| row["state"] == "confirmed" || row["state"] == "provisional";
    assert_eq!(rows(node, &["ip", "list"]).into_iter().find(held), None);
    until("an empty endpoint map", || rows(node, &["bpf", "endpoint", "list"]).is_empty());
    assert_eq!(node.run("ip", &["route", "show", "proto", "198"]).unwrap(), "");
    assert!(!node.run("ip", &["-o", "link"]).unwrap().contains(" cst"));
}

// case: ipam P12
#[test]
fn a_pod_whose_sandbox_is_recreated_without_del_does_not_exhaust_a_small_pool() {
    let rig = serving("b-anew", &["--cluster-pool-ipv4-mask-size", "27"]);
    // Network, broadcast and router addresses are reserved: 29 are left, for 100 sandboxes with the same pod UID.
    for number in 0..100 {
        let name = format!("sandbox-{number}");
        rig.add(&name).unwrap_or_else(|error| panic!("{name}: {error}"));
        rig.node.existing_pod(&name).remove().unwrap();
    }
    let confirmed: Vec<Value> =
        rows(&rig.node, &["ip", "list"]).into_iter().filter(|row| row["state"] == "confirmed").collect();
    assert_eq!(confirmed.len(), 1, "{confirmed:?}");
    assert_eq!(confirmed[0]["container_id"], "sandbox-99");
}

#[test]
fn an_add_waits_for_a_starting_and_for_a_restarting_agent() {
    let mut rig = Rig::new("b-wait");
    rig.start_api();
    let plugin = |rig: &Rig, name: &str| {
        rig.node.pod(name).unwrap();
        start_cni(&mut rig.node.command(program("cistern-cni")), "ADD", name, &Value::Null)
    };
    // No agent has served on this node yet, and there is no socket.
    let early = plugin(&rig, "early");
    rig.start_agent(&[]);
    let output = early.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    until("readiness", || rig.is_ready());

    // The socket exists without a listener.
    rig.kill_agent();
    let meanwhile = plugin(&rig, "meanwhile");
    rig.start_agent(&[]);
    let output = meanwhile.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let confirmed: BTreeSet<String> = rows(&rig.node, &["ip", "list"])
        .into_iter()
        .filter(|row| row["state"] == "confirmed")
        .map(|row| row["container_id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(confirmed, ["early".to_owned(), "meanwhile".to_owned()].into());
}

fn status(node: &Machine) -> Result<(), String> {
    let mut command = node.command(program("cistern-cni"));
    command.env("CNI_COMMAND", "STATUS").env("CNI_PATH", "/").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "cistern-cni"});
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), conf.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stdout).unwrap()) }
}

// case: ipam P14
#[test]
fn a_node_that_has_served_stays_well_while_its_agent_restarts() {
    let mut rig = Rig::new("b-status");
    rig.write_kubeconfig();
    rig.start_agent(&[]);
    until("the agent's word", || status(&rig.node).is_err_and(|error| error.contains("no pod CIDR yet")));
    rig.start_api();
    until("readiness", || status(&rig.node).is_ok());
    // Straight after it was ready for the first time.
    rig.kill_agent();
    assert_eq!(status(&rig.node), Ok(()));
    for (clock, set) in [("back", "1 hour"), ("forward", "1 hour ago")] {
        rig.node.run("touch", &["-d", set, "/run/cistern/served"]).unwrap();
        assert_eq!(status(&rig.node), Ok(()), "the clock was set {clock}");
    }
    for _ in 0..3 {
        rig.start_agent(&[]);
        until("readiness after a restart", || {
            assert_eq!(status(&rig.node), Ok(()), "while it starts");
            rig.is_ready()
        });
        rig.kill_agent();
    }
}

// case: ipam P10
#[test]
fn queued_dels_are_executed_after_a_reboot() {
    let mut rig = serving("b-reboot", &[]);
    let names = ["one", "two", "three"];
    for name in names {
        rig.add(name).unwrap();
    }
    rig.kill_agent();
    for name in names {
        rig.cni("DEL", name).unwrap();
    }
    let waiting = |rig: &Rig| {
        let queue = rig.node.file("/var/lib/cistern/cni-queue");
        let files = std::fs::read_dir(queue).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        files.filter(|name| name != "lock").count()
    };
    assert_eq!(waiting(&rig), names.len());
    // A reboot clears /run; namespaces that a runtime has not deleted yet are lost, too.
    rig.node.run("sh", &["-c", "rm -rf /run/cistern"]).unwrap();
    rig.start_agent(&[]);
    until("readiness", || rig.is_ready());
    until("the queue", || waiting(&rig) == 0);
    let held = |row: &Value| row["state"] == "confirmed" || row["state"] == "provisional";
    assert_eq!(rows(&rig.node, &["ip", "list"]).into_iter().find(held), None);
    assert_eq!(rows(&rig.node, &["bpf", "endpoint", "list"]), [json!(null); 0]);
}

/// A call by any HTTP client: status and body.
fn http(rig: &Rig, method: &str, path: &str) -> (u16, Value) {
    http_with(rig, method, path, &Value::Null)
}

fn http_with(rig: &Rig, method: &str, path: &str, body: &Value) -> (u16, Value) {
    use std::io::{Read as _, Write as _};
    let socket = rig.node.file("/run/cistern/cistern.sock");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head = format!(
        "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}",
        body.len()
    );
    write!(stream, "{method} {path} HTTP/1.1\r\n{head}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{method} {path}: {error}: {body:?}")))
}

// case: ipam P1
// case: ipam P2
// case: ipam P3
// case: ipam P5
#[test]
fn the_calls_by_owner_return_the_status_codes_of_cilium_s_api() {
    let rig = serving("b-http", &["--cluster-pool-ipv4-mask-size", "29"]);
    let pod = rig.add("pod").unwrap();
    let (address, router) = (pod["ips"][0]["address"].as_str().unwrap(), &pod["ips"][0]["gateway"]);
    let address = address.strip_suffix("/32").unwrap();

    let (status, body) = http(&rig, "POST", "/v1/ipam?owner=shop/cart&expiration=true");
    assert_eq!(status, 201, "{body}");
    let host = &body["host-addressing"]["ipv4"];
    assert_eq!((&host["enabled"], &host["ip"]), (&json!(true), router));
    assert!(host["alloc-range"].as_str().unwrap().ends_with("/29"), "{body}");
    assert_eq!((&body["address"]["ipv4-pool-name"], &body["ipv4"]["gateway"]), (&json!("default"), router));
    assert_eq!(body["address"]["ipv4"], body["ipv4"]["ip"]);
    assert!(body["ipv4"]["cidrs"].is_array());
    let uuid = body["ipv4"]["expiration-uuid"].as_str().unwrap();
    assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12], "{uuid}");
    assert_eq!(body.get("ipv6"), None, "this node has no IPv6 pool");
    let (status, second) = http(&rig, "POST", "/v1/ipam?family=ipv4");
    assert_eq!((status, second["ipv4"].get("expiration-uuid")), (201, None));

    let owned = second["ipv4"]["ip"].as_str().unwrap();
    let expiring = body["ipv4"]["ip"].as_str().unwrap();
    let row = || rows(&rig.node, &["ip", "list"]).into_iter().find(|row| row["address"] == expiring).unwrap();
    assert_ne!(row()["until"], Value::Null, "the timer runs");
    let present = |addressing: Value| {
        let endpoint = json!({"addressing": addressing, "container-id": "c9", "state": "waiting-for-identity"});
        http_with(&rig, "PUT", "/v1/endpoint/cni-attachment-id:c9:eth0", &endpoint)
    };
    let with = |uuid: &str, pool: &str| json!({"ipv4": expiring, "ipv4-pool-name": pool, "ipv4-expiration-uuid": uuid});
    for (addressing, status, words) in [
        (with("another", "default"), 500, "does not match the timer"),
        (with(uuid, "gold"), 500, "no expiration timer registered"),
        (json!({"ipv4": owned, "ipv4-expiration-uuid": uuid}), 500, "no expiration timer registered"),
        (json!({"ipv4": "10.1.2", "ipv4-expiration-uuid": uuid}), 400, "is not an IP address"),
        (json!({"ipv4": expiring}), 400, "no address with its expiration UUID"),
        (Value::Null, 400, "no address with its expiration UUID"),
    ] {
        let (given, body) = present(addressing.clone());
        assert_eq!(given, status, "{addressing}: {body}");
        assert!(body.as_str().unwrap().contains(words), "{addressing}: {body}");
        assert_ne!(row()["until"], Value::Null, "{addressing}: the timer runs on");
    }
    let (status, endpoint) = present(with(uuid, ""));
    assert_eq!((status, &endpoint["status"]["networking"]["addressing"][0]["ipv4"]), (201, &json!(expiring)));
    assert_eq!(row()["until"], Value::Null, "the address stays");
    assert_eq!(present(with(uuid, "")).0, 500, "there is no timer any more");
    for (method, path, status, words) in [
        ("DELETE", format!("/v1/ipam/{address}?pool=default"), 500, "in use by endpoint pod/eth0"),
        ("DELETE", "/v1/ipam/10.1.2?pool=default".into(), 400, "is not an IP address"),
        ("DELETE", format!("/v1/ipam/{owned}"), 400, "pool is empty"),
        ("POST", format!("/v1/ipam/{owned}?pool=default&owner=x"), 409, owned),
        ("POST", "/v1/ipam/192.0.2.1?pool=default".into(), 400, "192.0.2.1"),
        ("POST", "/v1/ipam?family=ipx".into(), 502, "ipx"),
    ] {
        let (given, body) = http(&rig, method, &path);
        assert_eq!(given, status, "{method} {path}: {body}");
        assert!(body.to_string().contains(words), "{method} {path}: {body}");
    }
    assert_eq!(http(&rig, "DELETE", &format!("/v1/ipam/{owned}?pool=default")).0, 200);
    assert_eq!(http(&rig, "DELETE", &format!("/v1/ipam/{owned}?pool=default")).0, 404);

    // Five addresses for pods: one is the pod's, one has an owner, the others are allocated now.
    for _ in 0..3 {
        assert_eq!(http(&rig, "POST", "/v1/ipam").0, 201);
    }
    let (status, body) = http(&rig, "POST", "/v1/ipam");
    assert_eq!(status, 502);
    assert!(body.as_str().unwrap().contains("/29"), "{body}");
    assert_eq!(rig.cni("ADD", "pod").unwrap()["ips"], pod["ips"], "the pod keeps its address through all of it");
}

/// The plugin under its other name, a link to it.
#[test]
fn it_answers_as_cilium_cni() {
    let rig = serving("b-name", &[]);
    rig.node.pod("pod").unwrap();
    let link = rig.node.file("/run/cilium-cni");
    std::os::unix::fs::symlink(program("cistern-cni"), link).unwrap();
    let mut command: Command = rig.node.command("/run/cilium-cni");
    command.envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "pod"), ("CNI_IFNAME", "eth0"), ("CNI_PATH", "/run")]);
    command.env("CNI_NETNS", "/run/netns/pod").stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let conf = json!({"cniVersion": "0.3.1", "name": "cilium", "type": "cilium-cni", "enable-debug": false});
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), conf.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(rig.holds("pod"));
}
