//! The daemons of the machines: command lines and configuration files. Pure.

use super::cgroup;
use super::spec::{CONTROL, Cni, DNS_SERVICE, Ipam, POD_NETWORK, SERVICE_NETWORK, Spec, node_address, reference_block};
use std::net::Ipv4Addr;

/// Directory of certificates and keys on each machine.
pub(super) const PKI: &str = "/etc/kubernetes/pki";
/// Image of the sandbox container.
pub(super) const PAUSE_IMAGE: &str = "localhost/pause:1";
/// Maximum number of pods on a node, which fit in a pod CIDR of 254 addresses.
const MOST_PODS: u8 = 250;

/// A component of Kubernetes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Daemon {
    /// On the control plane.
    Etcd,
    /// On the control plane.
    KubeApiserver,
    /// On the control plane.
    KubeControllerManager,
    /// On the control plane.
    KubeScheduler,
    /// On each node.
    Containerd,
    /// On each node.
    Kubelet,
    /// On each node.
    KubeProxy,
}

impl Daemon {
    /// Those of the control plane, in the order in which they start.
    pub const CONTROL_PLANE: [Self; 4] =
        [Self::Etcd, Self::KubeApiserver, Self::KubeControllerManager, Self::KubeScheduler];
    /// Those of a node, in the order in which they start.
    pub const NODE: [Self; 3] = [Self::Containerd, Self::Kubelet, Self::KubeProxy];

    /// Its program.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::KubeApiserver => "kube-apiserver",
            Self::KubeControllerManager => "kube-controller-manager",
            Self::KubeScheduler => "kube-scheduler",
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
        }
    }

    /// Its command line.
    pub(super) fn arguments(self, spec: &Spec) -> Vec<String> {
        let kubeconfig = format!("--kubeconfig=/etc/kubernetes/{}.conf", self.name());
        match self {
            Self::Etcd => vec![
                "--data-dir=/var/lib/etcd".into(),
                // The disk of this cluster need not survive a power loss.
                "--unsafe-no-fsync".into(),
            ],
            Self::KubeApiserver => vec![
                "--etcd-servers=http://127.0.0.1:2379".into(),
                format!("--advertise-address={CONTROL}"),
                format!("--service-cluster-ip-range={SERVICE_NETWORK}"),
                "--authorization-mode=Node,RBAC".into(),
                "--enable-admission-plugins=NodeRestriction".into(),
                "--allow-privileged=true".into(),
                format!("--client-ca-file={PKI}/ca.crt"),
                format!("--tls-cert-file={PKI}/apiserver.crt"),
                format!("--tls-private-key-file={PKI}/apiserver.key"),
                format!("--kubelet-certificate-authority={PKI}/ca.crt"),
                format!("--kubelet-client-certificate={PKI}/apiserver-kubelet-client.crt"),
                format!("--kubelet-client-key={PKI}/apiserver-kubelet-client.key"),
                // The nodes' names cannot be resolved.
                "--kubelet-preferred-address-types=InternalIP".into(),
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
                format!("--service-account-key-file={PKI}/tokens.pub"),
                format!("--service-account-signing-key-file={PKI}/tokens.key"),
            ],
            Self::KubeControllerManager => {
                let mut arguments = vec![
                    kubeconfig,
                    "--leader-elect=false".into(),
                    "--bind-address=127.0.0.1".into(),
                    "--use-service-account-credentials".into(),
                    format!("--service-account-private-key-file={PKI}/tokens.key"),
                    format!("--root-ca-file={PKI}/ca.crt"),
                ];
                if spec.ipam == Ipam::Kubernetes {
                    arguments.extend([
                        "--allocate-node-cidrs".into(),
                        format!("--cluster-cidr={POD_NETWORK}"),
                        format!("--service-cluster-ip-range={SERVICE_NETWORK}"),
                    ]);
                }
                arguments
            }
            Self::KubeScheduler => vec![kubeconfig, "--leader-elect=false".into(), "--bind-address=127.0.0.1".into()],
            Self::Containerd => vec!["--config=/etc/containerd/config.toml".into()],
            Self::Kubelet => vec![kubeconfig, "--config=/etc/kubernetes/kubelet.yaml".into()],
            Self::KubeProxy => vec!["--config=/etc/kubernetes/kube-proxy.yaml".into()],
        }
    }
}

/// Shell: initialises a node's file tree at its first start, without the host's files.
pub(super) fn node_setup(spec: &Spec, index: u8) -> String {
    let own = "echo 1 >/proc/sys/net/ipv4/ip_forward\n\
        if [ ! -e /etc/cni/own ]; then\n\
        rm -rf /etc/cni /etc/containerd /etc/kubernetes /opt/cni\n\
        mkdir -p /etc/cni/net.d /etc/kubernetes /opt/cni/bin\n\
        cp /usr/lib/cni/loopback /usr/lib/cni/portmap /usr/lib/cni/ptp /usr/lib/cni/host-local /opt/cni/bin/\n\
        touch /etc/cni/own\n\
        fi\n";
    format!("{own}{}", reference_routes(spec, Some(index)))
}

/// Shell: with the reference plugins, routes to the pods of all nodes but one. The control plane needs them, too,
/// because pods' requests to the API server are not masqueraded.
pub(super) fn reference_routes(spec: &Spec, except: Option<u8>) -> String {
    if spec.cni != Cni::Reference {
        return String::new();
    }
    let nodes = (0..spec.nodes).filter(|node| Some(*node) != except);
    nodes.map(|node| format!("ip route add {} via {}\n", reference_block(node), node_address(node))).collect()
}

/// The files of a node, without certificates and kubeconfigs.
pub(super) fn node_files(spec: &Spec, name: &str, index: u8) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![
        ("/etc/hostname".to_owned(), format!("{name}\n")),
        ("/etc/hosts".to_owned(), format!("127.0.0.1 localhost\n{} {name}\n", node_address(index))),
        ("/etc/machine-id".to_owned(), format!("{:032x}\n", u128::from(index) + 1)),
        // No server: otherwise the host's resolver would be used.
        ("/etc/resolv.conf".to_owned(), String::new()),
        ("/etc/containerd/config.toml".to_owned(), containerd()),
        ("/etc/kubernetes/kubelet.yaml".to_owned(), kubelet(name, node_address(index))),
        ("/etc/kubernetes/kube-proxy.yaml".to_owned(), kube_proxy(name)),
    ];
    if spec.cni == Cni::Reference {
        files.push(("/etc/cni/net.d/10-reference.conflist".to_owned(), reference_conflist(&reference_block(index))));
    }
    files.into_iter().map(|(path, text)| (path, text.into_bytes())).collect()
}

fn containerd() -> String {
    format!(
        "version = 3\n\
         root = '/var/lib/containerd'\n\
         state = '/run/containerd'\n\
         [grpc]\n\
         address = '/run/containerd/containerd.sock'\n\
         [metrics]\n\
         address = '127.0.0.1:1338'\n\
         [plugins.'io.containerd.cri.v1.images'.pinned_images]\n\
         sandbox = '{PAUSE_IMAGE}'\n\
         [plugins.'io.containerd.cri.v1.runtime']\n\
         # Else runc fails where CAP_SYS_RESOURCE is missing.\n\
         restrict_oom_score_adj = true\n\
         [plugins.'io.containerd.cri.v1.runtime'.cni]\n\
         bin_dirs = ['/opt/cni/bin']\n\
         conf_dir = '/etc/cni/net.d'\n\
         [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
         runtime_type = 'io.containerd.runc.v2'\n\
         [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\n\
         SystemdCgroup = false\n"
    )
}

fn kubelet(name: &str, address: Ipv4Addr) -> String {
    let group = cgroup::ROOT;
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1\n\
         kind: KubeletConfiguration\n\
         address: {address}\n\
         authentication:\n\
         \x20 anonymous: {{enabled: false}}\n\
         \x20 webhook: {{enabled: true}}\n\
         \x20 x509: {{clientCAFile: {PKI}/ca.crt}}\n\
         authorization: {{mode: Webhook}}\n\
         tlsCertFile: {PKI}/kubelet-serving.crt\n\
         tlsPrivateKeyFile: {PKI}/kubelet-serving.key\n\
         containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n\
         clusterDNS: [{DNS_SERVICE}]\n\
         clusterDomain: cluster.local\n\
         resolvConf: /etc/resolv.conf\n\
         volumePluginDir: /var/lib/kubelet/plugins/volume\n\
         maxPods: {MOST_PODS}\n\
         cgroupDriver: cgroupfs\n\
         # Kubelets that share one delete each other's pods.\n\
         cgroupRoot: /{group}/{name}\n\
         failCgroupV1: false\n\
         failSwapOn: false\n\
         enforceNodeAllocatable: []\n\
         oomScoreAdj: 0\n\
         # Do not evict pods or remove images because of the host's disk and memory usage.\n\
         localStorageCapacityIsolation: false\n\
         imageGCHighThresholdPercent: 100\n\
         evictionHard: {{memory.available: 0%, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}}\n"
    )
}

fn kube_proxy(name: &str) -> String {
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
         kind: KubeProxyConfiguration\n\
         hostnameOverride: {name}\n\
         clientConnection: {{kubeconfig: /etc/kubernetes/kube-proxy.conf}}\n\
         mode: iptables\n\
         clusterCIDR: {POD_NETWORK}\n\
         oomScoreAdj: 0\n\
         # The sizes of connection tracking are the host's.\n\
         conntrack: {{maxPerCore: 0, min: 0}}\n"
    )
}

/// The CNI network configuration with `ptp` and `host-local`, for pod addresses in `block`.
#[must_use]
pub fn reference_conflist(block: &str) -> String {
    let conflist = serde_json::json!({
        "cniVersion": "1.0.0",
        "name": "reference",
        "plugins": [
            {"type": "ptp", "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": block}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            }},
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    format!("{conflist:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(spec: &Spec, path: &str) -> Option<String> {
        let files = node_files(spec, "node-2", 1);
        files.into_iter().find(|(name, _)| name == path).map(|(_, text)| String::from_utf8(text).unwrap())
    }

    #[test]
    fn yaml_files_are_yaml_and_name_their_node() {
        for (path, pointer) in
            [("/etc/kubernetes/kubelet.yaml", "/cgroupRoot"), ("/etc/kubernetes/kube-proxy.yaml", "/hostnameOverride")]
        {
            let text = text(&Spec::default(), path).unwrap();
            let value: serde_json::Value = serde_saphyr::from_str(&text).unwrap();
            let named = value.pointer(pointer).and_then(serde_json::Value::as_str).unwrap();
            assert!(named.ends_with("node-2"), "{path}: {named}");
        }
    }

    #[test]
    fn the_reference_plugins_get_routes_to_the_other_nodes() {
        let spec = Spec { nodes: 3, cni: Cni::Reference, ..Spec::default() };
        let conflist = text(&spec, "/etc/cni/net.d/10-reference.conflist").unwrap();
        assert!(conflist.contains("10.244.2.0/24"), "{conflist}");
        let setup = node_setup(&spec, 1);
        assert!(setup.contains("10.244.1.0/24 via 172.30.0.21") && setup.contains("10.244.3.0/24 via 172.30.0.23"));
        assert!(!setup.contains("10.244.2.0/24"), "{setup}");
        assert_eq!(reference_routes(&spec, None).lines().count(), 3);
        let other = Spec { cni: Cni::None, ..spec };
        assert_eq!(text(&other, "/etc/cni/net.d/10-reference.conflist"), None);
        assert!(!node_setup(&other, 1).contains("route"));
    }

    #[test]
    fn nodes_get_blocks_from_kubernetes_only_when_asked_for() {
        let blocks = |ipam| {
            let spec = Spec { ipam, ..Spec::default() };
            Daemon::KubeControllerManager.arguments(&spec).iter().any(|one| one == "--allocate-node-cidrs")
        };
        assert!(blocks(Ipam::Kubernetes));
        assert!(!blocks(Ipam::ClusterPool));
    }
}
