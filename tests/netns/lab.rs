//! The lab itself.

use cistern_tests::lab::{Lab, Machine};

fn answers(from: &Machine, to: std::net::Ipv4Addr) -> bool {
    from.run("ping", &["-c1", "-W2", &to.to_string()]).is_ok()
}

#[test]
fn machines_see_each_other_and_have_their_own_files_and_bpffs() {
    let lab = Lab::new("e-machines").unwrap();
    let a = lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let b = lab.node("node-b", "192.0.2.2/24".parse().unwrap()).unwrap();
    let outside = lab.host("outside", "192.0.2.100/24".parse().unwrap()).unwrap();
    assert!(answers(&a, b.address()) && answers(&outside, a.address()));
    assert_eq!(a.run("hostname", &[]).unwrap(), "node-a");

    for directory in ["/run", "/var/lib", "/etc", "/opt", "/sys/fs/bpf"] {
        a.run("mkdir", &[&format!("{directory}/only-on-a")]).unwrap();
        assert!(a.file(&format!("{directory}/only-on-a")).is_dir());
        assert!(!b.file(&format!("{directory}/only-on-a")).exists());
        assert!(!std::path::Path::new(&format!("{directory}/only-on-a")).exists());
    }
    assert_eq!(a.run("cat", &["/proc/sys/net/ipv4/ip_forward"]).unwrap(), "1");
    assert_eq!(outside.run("cat", &["/proc/sys/net/ipv4/ip_forward"]).unwrap(), "0");
}

#[test]
fn a_pod_is_an_empty_network_on_its_machine() {
    let lab = Lab::new("e-pods").unwrap();
    let node = lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let pod = node.pod("pod-1").unwrap();
    let links = pod.json("ip", &["-j", "link"]).unwrap();
    assert_eq!(links.as_array().unwrap().len(), 1, "{links}");
    assert_eq!(node.run("ls", &["/run/netns"]).unwrap(), "pod-1");
    assert!(pod.namespace().exists());
    pod.remove().unwrap();
    assert!(!pod.namespace().exists());
}

/// A process that has started on the machine, and keeps running.
fn running(machine: &Machine) -> std::process::Child {
    let mut command = machine.command("sh");
    let mut child =
        command.args(["-c", "echo here; exec sleep 1000"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
    assert_eq!(line, "here\n");
    child
}

#[test]
fn dropping_a_lab_kills_its_processes_and_no_others() {
    let lab = Lab::new("e-drop").unwrap();
    let other = Lab::new("e-drop").unwrap();
    let node = lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let neighbour = other.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let mut agent = running(&node);
    drop(lab);
    // Killed: no exit code.
    assert_eq!(agent.wait().unwrap().code(), None);
    assert!(node.run("true", &[]).is_err());
    neighbour.run("true", &[]).unwrap();
}

/// Makes the test below run as the creator that the test itself kills.
const MAKER: &str = "CISTERN_LAB_MAKER";

#[test]
fn remains_of_a_killed_creator_are_removed_by_the_next_lab() {
    if std::env::var_os(MAKER).is_some() {
        return make_a_kept_lab();
    }
    let program = std::env::current_exe().unwrap();
    let mut maker = std::process::Command::new(program)
        .args(["--exact", "lab::remains_of_a_killed_creator_are_removed_by_the_next_lab", "--nocapture"])
        .env(MAKER, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(maker.stdout.take().unwrap());
    let id = loop {
        let mut line = String::new();
        assert_ne!(std::io::BufRead::read_line(&mut output, &mut line).unwrap(), 0, "the maker ended");
        // libtest prints the test's name on the same line.
        if let Some((_, id)) = line.trim().split_once("left behind: ") {
            break id.to_owned();
        }
    };
    assert_eq!(Lab::remove_left("e-left").unwrap(), 0, "its maker lives");
    maker.kill().unwrap();
    maker.wait().unwrap();
    assert!(std::path::Path::new(&format!("/proc/{id}/ns")).exists(), "a kept machine outlives its maker");
    // The wire, the node and the process in it.
    assert_eq!(Lab::remove_left("e-left").unwrap(), 3);
    assert!(std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default().is_empty());
}

fn make_a_kept_lab() {
    let lab = Lab::kept("e-left").unwrap();
    let node = lab.node("node-a", "192.0.2.1/24".parse().unwrap()).unwrap();
    let mut process = running(&node);
    println!("left behind: {}", process.id());
    process.wait().unwrap();
}
