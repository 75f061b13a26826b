//! The chart, rendered by Helm: the objects it renders from values, the values it rejects, and that the program accepts
//! the rendered settings.
//!
//! The cluster tests cover how the objects work together.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, in the functions that tests share too"
)]

use cistern_core::settings::{Command as Role, Directory, IpamMode, Layers, Settings};
use cistern_tests::cluster::Spec;
use cistern_tests::cluster::binaries::Binaries;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The oldest supported Kubernetes version.
const KUBERNETES: &str = "1.34.0";

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/cistern")
}

/// Helm, as the cluster uses it: from `PATH`, or built once.
fn helm() -> Command {
    static PATH: LazyLock<PathBuf> =
        LazyLock::new(|| Binaries::new(&Spec::default().kubernetes).unwrap().find("helm").unwrap());
    Command::new(&*PATH)
}

/// All objects that the chart renders from these values, or Helm's error.
fn render(values: &[&str]) -> Result<Vec<Value>, String> {
    let mut command = helm();
    command.args(["template", "cistern"]).arg(chart());
    command.args(["--namespace", "kube-system", "--kube-version", KUBERNETES, "--include-crds"]);
    for value in values {
        command.args(["--set", value]);
    }
    let output = command.output().unwrap();
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let documents = text.split("\n---\n").map(|text| text.trim_start_matches("---\n"));
    let has_content = |text: &&str| text.lines().any(|line| !line.trim().is_empty() && !line.starts_with('#'));
    Ok(documents.filter(has_content).map(|text| serde_saphyr::from_str(text).unwrap()).collect())
}

fn good(values: &[&str]) -> Vec<Value> {
    render(values).unwrap_or_else(|error| panic!("{values:?}: {error}"))
}

fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}

/// `cilium-config`, as the program reads it.
fn settings(objects: &[Value], role: Role) -> Result<(Settings, Vec<String>), String> {
    let data = find(objects, "ConfigMap", "cilium-config").unwrap()["data"].as_object().unwrap();
    let text = |(key, value): (&String, &Value)| (key.clone(), value.as_str().unwrap().to_owned());
    let directory = Directory { path: "cilium-config".to_owned(), files: data.iter().map(text).collect() };
    let layers = Layers { directory: Some(directory), hostname: "node-a".to_owned(), ..Layers::default() };
    let loaded = Settings::load(&layers, role).map_err(|errors| errors.to_string())?;
    Ok((loaded.0, loaded.1.into_iter().map(|warning| warning.message).collect()))
}

fn accepted(values: &[&str]) -> Settings {
    let objects = good(values);
    let (_, warnings) = settings(&objects, Role::Agent).unwrap();
    assert_eq!(warnings, [""; 0], "{values:?}");
    settings(&objects, Role::Operator).unwrap_or_else(|error| panic!("{values:?}: {error}")).0
}

#[test]
fn helm_lint_finds_nothing() {
    let output = helm().args(["lint", "--strict"]).arg(chart()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn values_with_ciliums_names_become_the_settings_of_the_program() {
    let defaults = accepted(&[]);
    assert_eq!(defaults.ipam, IpamMode::ClusterPool);
    assert_eq!(defaults.cluster_pool_ipv4, ["10.0.0.0/8".parse().unwrap()]);
    assert!(defaults.cni_exclusive && !defaults.leader_election && !defaults.enable_ip_masq_agent);
    assert!(defaults.write_cni_conf_when_ready.is_some() && defaults.read_cni_conf.is_none());
    let set = accepted(&[
        "ipam.operator.clusterPoolIPv4PodCIDRList={10.1.0.0/16,10.2.0.0/16}",
        "ipam.operator.clusterPoolIPv4MaskSize=25",
        "ipv4NativeRoutingCIDR=10.0.0.0/8",
        "autoDirectNodeRoutes=true",
        "MTU=1450",
        "devices={eth0,ens+}",
        "ipMasqAgent.enabled=true",
        "bpf.natMax=1048576",
        "operator.inDaemonSet=true",
        "cni.customConf=true",
        "cni.configMap=mine",
        "logOptions.format=json",
        "extraConfig.service-cidr=10.96.0.0/12",
    ]);
    assert_eq!(set.cluster_pool_ipv4.len(), 2);
    assert_eq!((set.cluster_pool_ipv4_mask_size, set.mtu, set.bpf_nat_global_max), (25, Some(1450), 1 << 20));
    assert_eq!(set.ipv4_native_routing_cidr, Some("10.0.0.0/8".parse().unwrap()));
    assert!(set.auto_direct_node_routes && set.enable_ip_masq_agent && set.leader_election);
    assert!(set.devices.selects("ens3", false) && !set.devices.selects("wlan0", true));
    assert_eq!(set.read_cni_conf, Some("/etc/cistern/cni/cni-config".into()));
    assert_eq!(set.service_cidrs, ["10.96.0.0/12".parse().unwrap()]);
    let kubernetes = accepted(&["ipam.mode=kubernetes", "k8s.requireIPv4PodCIDR=true"]);
    assert_eq!((kubernetes.ipam, kubernetes.require_ipv4_pod_cidr), (IpamMode::Kubernetes, true));
}

#[test]
fn invalid_combinations_of_values_are_rejected() {
    for values in [
        &["k8s.requireIPv4PodCIDR=true"][..],
        &["k8s.requireIPv6PodCIDR=true", "ipam.mode=cluster-pool"],
        &["ipam.mode=eni"],
        &["ipam.operator.clusterPoolIPv4MaskSize=31"],
        &["ipam.operator.clusterPoolIPv4PodCIDRList={10.0.0.0}"],
        &["routingMode=tunnel"],
        &["ipv6.enabled=true"],
        &["ipMasqAgent.config.nonMasqueradeCIDRs={10.0.0.0/8}"],
        &["MTU=100"],
        &["autoDirectNodeRoute=true"],
    ] {
        let error = render(values).expect_err(&values.join(","));
        assert!(error.contains("don't meet the specifications of the schema"), "{values:?}: {error}");
    }
}

/// Paths of all values, groups included.
fn paths(prefix: &str, values: &Map<String, Value>, into: &mut Vec<String>) {
    for (name, value) in values {
        into.push(format!("{prefix}{name}"));
        if let Value::Object(below) = value {
            paths(&format!("{prefix}{name}."), below, into);
        }
    }
}

// `helm upgrade --reuse-values` passes the values of an older chart, which lack new ones.
#[test]
fn every_value_may_be_missing() {
    let values: Map<String, Value> =
        serde_saphyr::from_str(&std::fs::read_to_string(chart().join("values.yaml")).unwrap()).unwrap();
    let mut all = Vec::new();
    paths("", &values, &mut all);
    assert!(all.len() > 60, "{}", all.len());
    for path in all {
        let objects = good(&[&format!("{path}=null")]);
        if let Err(error) = settings(&objects, Role::Agent) {
            panic!("without {path}: {error}");
        }
    }
}

fn pod<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    &find(objects, kind, name).unwrap_or_else(|| panic!("no {kind} {name}"))["spec"]["template"]
}

#[test]
fn agent_and_operator_start_without_a_pod_network() {
    let objects = good(&["k8sServiceHost=192.0.2.7", "k8sServicePort=6443"]);
    for (kind, name, priority) in [
        ("DaemonSet", "cistern", "system-node-critical"),
        ("Deployment", "cistern-operator", "system-cluster-critical"),
    ] {
        let spec = &pod(&objects, kind, name)["spec"];
        assert_eq!(spec["hostNetwork"], true, "{name}");
        assert_eq!(spec["tolerations"], json!([{"operator": "Exists"}]), "{name}");
        assert_eq!(spec["priorityClassName"], priority);
        assert_eq!(spec["nodeSelector"], json!({"kubernetes.io/os": "linux"}), "{name}");
        let container = &spec["containers"][0];
        assert_eq!(container["resources"], Value::Null, "{name} has no limits");
        assert!(container["livenessProbe"].is_object() && container["readinessProbe"].is_object(), "{name}");
        let environment: BTreeMap<&str, &Value> = container["env"]
            .as_array()
            .unwrap()
            .iter()
            .map(|variable| (variable["name"].as_str().unwrap(), &variable["value"]))
            .collect();
        assert_eq!(environment["KUBERNETES_SERVICE_HOST"], "192.0.2.7");
        assert_eq!(environment["KUBERNETES_SERVICE_PORT"], "6443");
    }
    assert_eq!(find(&objects, "Deployment", "cistern-operator").unwrap()["spec"]["replicas"], 2);
}

#[test]
fn only_the_init_container_is_privileged() {
    let objects = good(&[]);
    let spec = &pod(&objects, "DaemonSet", "cistern")["spec"];
    let propagation = |container: &Value| {
        let mounts = container["volumeMounts"].as_array().unwrap().clone();
        mounts.into_iter().find(|mount| mount["mountPath"] == "/sys/fs/bpf").unwrap()["mountPropagation"].clone()
    };
    let (init, agent) = (&spec["initContainers"][0], &spec["containers"][0]);
    assert_eq!((&init["securityContext"]["privileged"], propagation(init)), (&json!(true), json!("Bidirectional")));
    assert_eq!(agent["securityContext"]["privileged"], Value::Null);
    assert_eq!(agent["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    assert_eq!(propagation(agent), "HostToContainer");
    let operator = &pod(&objects, "Deployment", "cistern-operator")["spec"]["containers"][0]["securityContext"];
    assert_eq!((&operator["runAsNonRoot"], &operator["capabilities"]), (&json!(true), &json!({"drop": ["ALL"]})));
}

#[test]
fn the_role_that_runs_the_controllers_has_the_operators_permissions() {
    let may = |objects: &[Value], role: &str, resource: &str, verb: &str| {
        let rules = find(objects, "ClusterRole", role).unwrap()["rules"].as_array().unwrap().clone();
        let has = |list: &Value, word: &str| list.as_array().is_some_and(|list| list.iter().any(|item| item == word));
        rules.iter().any(|rule| has(&rule["resources"], resource) && has(&rule["verbs"], verb))
    };
    let may_delete_nodes = |objects: &[Value], role: &str| may(objects, role, "ciliumnodes", "delete");
    let apart = good(&[]);
    assert!(may_delete_nodes(&apart, "cistern-operator") && !may_delete_nodes(&apart, "cistern"));
    let together = good(&["operator.inDaemonSet=true"]);
    assert!(may_delete_nodes(&together, "cistern"));
    // All roles write events, and the agent writes its Node's condition.
    for (objects, role) in [(&apart, "cistern"), (&apart, "cistern-operator"), (&together, "cistern")] {
        assert!(["create", "patch"].iter().all(|verb| may(objects, role, "events", verb)), "{role}");
    }
    assert!(
        may(&apart, "cistern", "nodes/status", "patch") && !may(&apart, "cistern-operator", "nodes/status", "patch")
    );
    assert!(find(&together, "Deployment", "cistern-operator").is_none());
    assert!(find(&together, "ClusterRole", "cistern-operator").is_none());
    // The agent may patch its Node only if so configured.
    let verbs = |objects: &[Value]| find(objects, "ClusterRole", "cistern").unwrap()["rules"][0]["verbs"].clone();
    assert_eq!(verbs(&apart), json!(["list", "watch"]));
    assert_eq!(verbs(&good(&["annotateK8sNode=true"])), json!(["list", "watch", "patch"]));
}

#[test]
fn a_change_of_the_settings_restarts_the_agents() {
    let checksum = |values: &[&str]| {
        pod(&good(values), "DaemonSet", "cistern")["metadata"]["annotations"]["cistern.io/config-checksum"].clone()
    };
    assert_eq!(checksum(&[]), checksum(&["healthPort=9879"]));
    assert_ne!(checksum(&[]), checksum(&["MTU=1400"]));
}

#[test]
fn the_pre_delete_hook_asks_all_agents() {
    let objects = good(&["uninstall.timeout=30s", "uninstall.ignoreUnanswered=true"]);
    let job = find(&objects, "Job", "cistern-uninstall").unwrap();
    assert_eq!(job["metadata"]["annotations"]["helm.sh/hook"], "pre-delete");
    let arguments = job["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    let wanted = json!(["--timeout=30s", "--ignore-unanswered", "--operator-deployment=cistern-operator"]);
    assert_eq!(arguments, wanted);
    let matches = cistern::app::cli::command().try_get_matches_from(
        ["cistern", "uninstall"].into_iter().chain(arguments.as_array().unwrap().iter().filter_map(Value::as_str)),
    );
    assert!(matches.is_ok(), "{matches:?}");
    assert!(find(&good(&["uninstall.enabled=false"]), "Job", "cistern-uninstall").is_none());
    assert!(find(&objects, "CustomResourceDefinition", "ciliumnodes.cilium.io").is_some());
}
