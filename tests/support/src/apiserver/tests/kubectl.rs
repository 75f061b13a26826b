//! `kubectl` against the small API server. `cargo xtask setup` installs it.

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::sync::oneshot;

use crate::apiserver::{ApiServer, Options, kubeconfig, parse_manifest, serve};

const DEFINITION: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: ciliumnodes.cilium.io}
spec:
  group: cilium.io
  scope: Cluster
  names: {kind: CiliumNode, plural: ciliumnodes, shortNames: [cn]}
  versions:
  - name: v2
    served: true
    storage: true
    subresources: {status: {}}
    additionalPrinterColumns:
    - {name: PodCIDRs, type: string, jsonPath: .spec.ipam.podCIDRs}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties:
              ipam: {type: object, properties: {podCIDRs: {type: array, items: {type: string}}}}
";

const OBJECTS: &str = "
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: n1}
spec: {ipam: {podCIDRs: [10.1.0.0/24]}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: cistern-ipam, namespace: kube-system}
data: {blocks: none}
---
apiVersion: v1
kind: Node
metadata: {name: n1}
status: {addresses: [{type: InternalIP, address: 10.0.0.1}]}
";

struct Kubectl<'a> {
    directory: &'a Path,
}

impl Kubectl<'_> {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("/usr/bin/kubectl");
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", self.directory)
            .env("KUBECONFIG", self.directory.join("kubeconfig"))
            .kill_on_drop(true);
        command
    }

    async fn output(&self, arguments: &[&str]) -> Output {
        let output = self.command(arguments).output();
        let output = tokio::time::timeout(Duration::from_secs(60), output).await;
        output.expect("kubectl does not end").expect("kubectl does not start; `cargo xtask setup` installs it")
    }

    /// Runs a command that must succeed, and returns what it printed.
    async fn run(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments).await;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "kubectl {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }
}

#[tokio::test]
async fn kubectl_works_over_http() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let server = ApiServer::new(Options { epoch: jiff::Timestamp::now(), ..Options::default() });
    for object in parse_manifest(DEFINITION).unwrap() {
        server.create(&object).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    std::fs::write(path("kubeconfig"), kubeconfig(listener.local_addr().unwrap())).unwrap();
    std::fs::write(path("objects.yaml"), OBJECTS).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let serving = tokio::spawn(serve(server.clone(), listener, async move {
        let _ = stopped.await;
    }));
    let kubectl = Kubectl { directory: directory.path() };

    let mut watch = kubectl
        .command(&["get", "ciliumnodes", "--watch", "-o", "name"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("kubectl does not start; `cargo xtask setup` installs it");
    let mut watched = BufReader::new(watch.stdout.take().unwrap()).lines();

    let objects = path("objects.yaml");
    let applied = kubectl.run(&["apply", "-f", &objects]).await;
    assert_eq!(
        applied.lines().collect::<Vec<_>>(),
        ["ciliumnode.cilium.io/n1 created", "configmap/cistern-ipam created", "node/n1 created"]
    );
    let again = kubectl.run(&["apply", "-f", &objects]).await;
    assert!(again.lines().all(|line| line.ends_with(" unchanged")), "{again}");
    assert_eq!(watched.next_line().await.unwrap().as_deref(), Some("ciliumnode.cilium.io/n1"));

    let table = kubectl.run(&["get", "ciliumnodes"]).await;
    let words: Vec<&str> = table.split_whitespace().collect();
    assert_eq!(words, ["NAME", "PODCIDRS", "n1", "[\"10.1.0.0/24\"]"]);
    let all = kubectl.run(&["get", "nodes,leases,configmaps,events,services,pods,namespaces,crd", "-A"]).await;
    assert!(all.contains("configmap/cistern-ipam") && all.contains("namespace/kube-system"), "{all}");
    assert!(kubectl.run(&["describe", "cn", "n1"]).await.contains("10.1.0.0/24"));
    assert!(kubectl.run(&["describe", "node", "n1"]).await.contains("Name:               n1"));

    // A strategic merge for the built-in kind, a merge patch for the custom one, and an apply by the server.
    std::fs::write(path("objects.yaml"), OBJECTS.replace("blocks: none", "held: 10.1.0.0/24")).unwrap();
    kubectl.run(&["apply", "-f", &objects]).await;
    let map = server.get("cm", "kube-system", "cistern-ipam").unwrap();
    assert_eq!(map.get("data"), Some(&serde_json::json!({"held": "10.1.0.0/24"})));
    kubectl
        .run(&["patch", "cn", "n1", "--type=merge", "-p", r#"{"spec":{"ipam":{"podCIDRs":["10.1.1.0/24"]}}}"#])
        .await;
    let conflict = kubectl.output(&["apply", "--server-side", "--field-manager=other", "-f", &objects]).await;
    let text = String::from_utf8_lossy(&conflict.stderr).into_owned();
    assert!(!conflict.status.success() && text.contains(".spec.ipam.podCIDRs"), "{text}");
    let forced = &["apply", "--server-side", "--force-conflicts", "--field-manager=other", "-f", &objects];
    kubectl.run(forced).await;
    let path_of_block = "-o=jsonpath={.spec.ipam.podCIDRs[0]}";
    assert_eq!(kubectl.run(&["get", "cn", "n1", path_of_block]).await, "10.1.0.0/24");
    kubectl.run(&["label", "node", "n1", "zone=a"]).await;
    assert_eq!(kubectl.run(&["get", "nodes", "-l", "zone=a", "-o", "name"]).await, "node/n1\n");

    kubectl.run(&["delete", "cn", "n1"]).await;
    let missing = kubectl.output(&["get", "cn", "n1"]).await;
    assert!(String::from_utf8_lossy(&missing.stderr).contains("ciliumnodes.cilium.io \"n1\" not found"));

    watch.kill().await.unwrap();
    stop.send(()).unwrap();
    serving.await.unwrap().unwrap();
}
