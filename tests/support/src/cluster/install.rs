//! What a cluster needs besides its programs: keys, and workloads.

use super::daemon::{self, PKI};
use super::images::COREDNS_IMAGE;
use super::pki::{Authority, Subject, kubeconfig};
use super::spec::{CONTROL, CONTROL_NAME, DNS_SERVICE, KUBERNETES_SERVICE, POD_NETWORK, Spec, node_address};
use super::{Cluster, wait_for};
use crate::lab::output;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The group of cluster administrators.
pub(super) const MASTERS: &str = "system:masters";

/// URL of the API server.
fn server() -> String {
    format!("https://{CONTROL}:6443")
}

/// Creates all keys, certificates and the administrator's kubeconfig in a folder, atomically.
pub(super) fn keys(spec: &Spec, directory: &Path) -> Result<()> {
    if directory.exists() {
        return Ok(());
    }
    let unfinished = directory.with_extension("unfinished");
    let _ = fs::remove_dir_all(&unfinished);
    let authority = Authority::new(&unfinished)?;
    authority.token_keys("tokens")?;
    let client = |name: &str, common_name: &str, organization| {
        authority.sign(name, &Subject { common_name, organization, serves: &[] })
    };
    client("admin", "admin", Some(MASTERS))?;
    client("apiserver-kubelet-client", "apiserver-kubelet-client", Some(MASTERS))?;
    for name in ["kube-controller-manager", "kube-scheduler", "kube-proxy"] {
        client(name, &format!("system:{name}"), None)?;
    }
    let names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"];
    let addresses = [CONTROL, KUBERNETES_SERVICE, std::net::Ipv4Addr::LOCALHOST].map(|address| address.to_string());
    let serves: Vec<String> = names.iter().map(|name| (*name).to_owned()).chain(addresses).collect();
    authority.sign("apiserver", &Subject { common_name: "kube-apiserver", organization: None, serves: &serves })?;
    for (index, node) in (0..).zip(spec.node_names()?) {
        let user = format!("system:node:{node}");
        client(&format!("kubelet-{node}"), &user, Some("system:nodes"))?;
        let serves = [node.clone(), node_address(index).to_string()];
        let subject = Subject { common_name: &user, organization: Some("system:nodes"), serves: &serves };
        authority.sign(&format!("kubelet-serving-{node}"), &subject)?;
    }
    fs::write(unfinished.join("admin.conf"), kubeconfig(&server(), directory, "admin"))?;
    fs::rename(&unfinished, directory).with_context(|| format!("move {} into place", directory.display()))
}

/// The files of the control plane.
pub(super) fn control_files(pki: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let hosts = format!("127.0.0.1 localhost\n{CONTROL} {CONTROL_NAME}\n");
    let mut files = vec![("/etc/hosts".to_owned(), hosts.into_bytes())];
    for name in [
        "ca.crt",
        "tokens.key",
        "tokens.pub",
        "apiserver.crt",
        "apiserver.key",
        "apiserver-kubelet-client.crt",
        "apiserver-kubelet-client.key",
    ] {
        files.push((format!("{PKI}/{name}"), read(&pki.join(name))?));
    }
    for user in ["kube-controller-manager", "kube-scheduler"] {
        files.extend(client_files(pki, user, user)?);
    }
    Ok(files)
}

/// The files of a node.
pub(super) fn node_files(spec: &Spec, node: &str, index: u8, pki: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = daemon::node_files(spec, node, index);
    files.push((format!("{PKI}/ca.crt"), read(&pki.join("ca.crt"))?));
    for end in ["crt", "key"] {
        let file = pki.join(format!("kubelet-serving-{node}.{end}"));
        files.push((format!("{PKI}/kubelet-serving.{end}"), read(&file)?));
    }
    files.extend(client_files(pki, &format!("kubelet-{node}"), "kubelet")?);
    files.extend(client_files(pki, "kube-proxy", "kube-proxy")?);
    Ok(files)
}

/// Certificate, key and kubeconfig of a program on its machine.
fn client_files(pki: &Path, from: &str, name: &str) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for end in ["crt", "key"] {
        files.push((format!("{PKI}/{name}.{end}"), read(&pki.join(format!("{from}.{end}")))?));
    }
    files.push((format!("/etc/kubernetes/{name}.conf"), kubeconfig(&server(), Path::new(PKI), name).into_bytes()));
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// Waits until the nodes have registered, and deploys CoreDNS.
pub(super) fn register(cluster: &Cluster) -> Result<()> {
    cluster.wait_for_api()?;
    let dns = Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes/coredns.yaml");
    let manifests = String::from_utf8(read(&dns)?)?;
    cluster
        .apply(&manifests.replace("COREDNS_IMAGE", COREDNS_IMAGE).replace("DNS_SERVICE", &DNS_SERVICE.to_string()))?;
    let wanted = cluster.spec().node_names()?.len();
    wait_for("the nodes to register", || Ok(cluster.node_conditions()?.len() >= wanted))
}

/// Installs or upgrades Cistern by its chart, and waits until it is ready.
pub(super) fn cistern(cluster: &Cluster, values: &[String]) -> Result<()> {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/cistern");
    let mut helm = cluster.client("helm")?;
    helm.args(["upgrade", "--install", "cistern"]).arg(chart);
    helm.args(["--namespace", "kube-system", "--wait", "--timeout", "120s"]);
    let own = [
        format!("ipam.mode={}", cluster.spec().ipam.mode()),
        format!("ipam.operator.clusterPoolIPv4PodCIDRList={{{POD_NETWORK}}}"),
        // The nodes share an L2 network, and the router has no routes to pods.
        "autoDirectNodeRoutes=true".to_owned(),
    ];
    for value in own.iter().chain(values) {
        helm.args(["--set", value]);
    }
    output(&mut helm, "helm upgrade --install cistern").map(drop)
}

/// Waits until the nodes are Ready and names can be resolved.
pub(super) fn wait_ready(cluster: &Cluster) -> Result<()> {
    wait_for("the nodes to be Ready", || Ok(cluster.node_conditions()?.iter().all(|(_, ready)| *ready)))?;
    cluster
        .kubectl(&["--namespace", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=60s"])
        .map(drop)
}

/// Each registered node and whether it is Ready.
pub(super) fn conditions(nodes: &[Value]) -> Vec<(String, bool)> {
    nodes
        .iter()
        .filter_map(|node| {
            let name = node.pointer("/metadata/name")?.as_str()?.to_owned();
            let conditions = node.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
            let is_ready = |one: &Value| one.get("type").and_then(Value::as_str) == Some("Ready");
            let ready = conditions
                .filter(|one| is_ready(one))
                .any(|one| one.get("status").and_then(Value::as_str) == Some("True"));
            Some((name, ready))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_is_ready_when_its_condition_says_so() {
        let ready =
            |status: &str| json!([{"type": "DiskPressure", "status": "True"}, {"type": "Ready", "status": status}]);
        let nodes = [
            json!({"metadata": {"name": "a"}, "status": {"conditions": ready("True")}}),
            json!({"metadata": {"name": "b"}, "status": {"conditions": ready("Unknown")}}),
            json!({"metadata": {"name": "c"}}),
        ];
        assert_eq!(conditions(&nodes), [("a".into(), true), ("b".into(), false), ("c".into(), false)]);
    }

    #[test]
    fn keys_are_created_once_and_installed_on_their_machines() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path().join("pki");
        let spec = Spec::default();
        keys(&spec, &pki).unwrap();
        let before = fs::read(pki.join("ca.crt")).unwrap();
        keys(&spec, &pki).unwrap();
        assert_eq!(fs::read(pki.join("ca.crt")).unwrap(), before);
        assert!(!pki.with_extension("unfinished").exists());
        let names = |files: Vec<(String, Vec<u8>)>| files.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        let control = names(control_files(&pki).unwrap());
        assert!(control.contains(&"/etc/kubernetes/kube-scheduler.conf".to_owned()), "{control:?}");
        let node = names(node_files(&spec, "node-2", 1, &pki).unwrap());
        assert!(node.contains(&"/etc/kubernetes/pki/kubelet.key".to_owned()), "{node:?}");
        // A node must not have the keys of service account tokens and of the administrator.
        assert!(!node.iter().any(|name| name.contains("tokens") || name.contains("admin")), "{node:?}");
    }
}
