//! Cilium's keys that Cistern does not implement.
//!
//! A `cilium-config` as Cilium's chart writes it names well over a hundred keys, nearly all of them of parts that
//! Cistern has not got. They must not keep it from starting, so each is told of once, in one line per part, and a key
//! that switches its part off is not told of at all. The exception are values that promise something about where
//! packets go, or under which protection: to go on without it would break or expose traffic, so they are refused with
//! the way out named ([`REFUSED`]).

use super::layers::{Given, known_names};
use super::{SettingsError, Warning};
use crate::spelling::nearest;
use std::collections::BTreeMap;

/// Names only, from the command references and charts of Cilium; comments start with `#`.
const NAMES: &str = include_str!("cilium-keys.txt");

/// Which values of a key leave traffic on the way that Cistern sends it.
enum Accepted {
    /// Those that switch it off, and none.
    Off,
    /// None, and these.
    Words(&'static [&'static str]),
}

impl Accepted {
    fn holds(&self, value: &str) -> bool {
        match self {
            Self::Off => is_off(value),
            Self::Words(words) => value.is_empty() || words.iter().any(|word| word.eq_ignore_ascii_case(value)),
        }
    }

    fn in_words(&self) -> String {
        match self {
            Self::Off => "`false` or empty".to_owned(),
            Self::Words([]) => "empty".to_owned(),
            Self::Words(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
        }
    }
}

use Accepted::{Off, Words};

/// Keys with values that change where traffic goes, or who can read it: the accepted values, and the reason with the way
/// out.
const REFUSED: &[(&str, Accepted, &str)] = &[
    (
        "routing-mode",
        Words(&["native"]),
        "there are no tunnels: pod traffic leaves as it is; set it to `native`, with auto-direct-node-routes=true where all nodes share one network, or with routes in the network",
    ),
    (
        "tunnel",
        Words(&["disabled"]),
        "there are no tunnels: pod traffic leaves as it is; set it to `disabled`, with auto-direct-node-routes=true where all nodes share one network, or with routes in the network",
    ),
    ("cluster-pool-ipv6-cidr", Words(&[]), "IPv6 is not implemented: nodes would get no block of it"),
    ("ipv4-range", Words(&["auto"]), "the node's block comes from its CiliumNode"),
    ("local-router-ipv6", Words(&[]), "IPv6 is not implemented"),
    (
        "kube-proxy-replacement",
        Words(&["false", "disabled", "partial", "probe"]),
        "Services are left to kube-proxy: set it to `false` and run kube-proxy",
    ),
    ("bpf-lb-only", Off, "Services are not load-balanced"),
    ("enable-host-reachable-services", Off, "Services are left to kube-proxy"),
    ("enable-wireguard", Off, "traffic between nodes would not be encrypted"),
    ("enable-ipsec", Off, "traffic between nodes would not be encrypted"),
    ("enable-ztunnel", Off, "traffic between pods would not be encrypted"),
    ("encrypt-node", Off, "traffic between nodes would not be encrypted"),
    ("enable-encryption-strict-mode", Off, "traffic that has to be encrypted would leave in clear"),
    ("enable-encryption-strict-mode-egress", Off, "traffic that has to be encrypted would leave in clear"),
    ("enable-encryption-strict-mode-ingress", Off, "traffic that has to be encrypted would be taken in clear"),
    ("mesh-auth-mutual-enabled", Off, "pods would talk without the authentication that policies ask for"),
    (
        "enable-policy",
        Words(&["default", "never"]),
        "network policies are not implemented: traffic that no policy allows would pass",
    ),
    ("enable-host-firewall", Off, "network policies are not implemented: the host would be open"),
    ("enable-xdp-prefilter", Off, "traffic that the filter drops would pass"),
    ("prefilter-device", Words(&["undefined"]), "traffic that the filter drops would pass"),
    ("enable-egress-gateway", Off, "traffic of the selected pods would leave under another address"),
    ("enable-ipv4-egress-gateway", Off, "traffic of the selected pods would leave under another address"),
    (
        "enable-masquerade-to-route-source",
        Off,
        "traffic would leave under another address; see derive-masq-ip-addr-from-device",
    ),
    (
        "egress-masquerade-interfaces",
        Words(&[]),
        "it limits iptables rules, and there are none; name the devices in `devices`",
    ),
    ("enable-local-redirect-policy", Off, "traffic would not go to the node-local pods that the policies name"),
    ("enable-vtep", Off, "the endpoints behind the tunnel would not be reached"),
    ("enable-nat46x64-gateway", Off, "traffic between IPv4 and IPv6 would not be translated"),
    ("enable-ipip-termination", Off, "traffic in IPIP would not be unpacked"),
    ("enable-bgp-control-plane", Off, "routes would not be announced"),
    ("bgp-announce-lb-ip", Off, "routes would not be announced"),
    ("bgp-announce-pod-cidr", Off, "routes would not be announced"),
    ("enable-l2-announcements", Off, "nobody would answer for the addresses of LoadBalancer Services"),
    ("enable-l2-pod-announcements", Off, "nobody would answer for the addresses of pods"),
    ("enable-ingress-controller", Off, "Ingresses would not be served"),
    ("enable-gateway-api", Off, "Gateways would not be served"),
    ("loadbalancer-l7", Off, "Services would not be balanced by request"),
    ("enable-standalone-dns-proxy", Off, "policies on DNS names would not be enforced"),
    (
        "cni-chaining-mode",
        Words(&["none", "portmap"]),
        "cistern-cni makes the pods' interfaces itself; hostPorts are served by `portmap` behind it",
    ),
    ("cni-external-routing", Off, "cistern-cni and the agent make the pods' routes"),
    ("enable-high-scale-ipcache", Off, "there are no tunnels"),
    ("flannel-master-device", Words(&[]), "cistern-cni makes the pods' interfaces itself"),
    ("ipvlan-master-device", Words(&["undefined"]), "cistern-cni makes the pods' interfaces itself"),
];

/// Keys whose lack has a consequence that a person should read, when they are not off.
const NOTED: &[(&str, &str)] = &[
    ("enable-policy", "network policies are not implemented: what they forbid passes"),
    ("enable-lb-ipam", "LoadBalancer Services get no addresses"),
    ("remove-cilium-node-taints", "a node with the taint node.cilium.io/agent-not-ready keeps it"),
    ("bpf-map-dynamic-size-ratio", "maps are as large as bpf-nat-global-max says, whatever memory the node has"),
    ("clean-cilium-state", "state is kept over restarts"),
    ("clean-cilium-bpf-state", "state is kept over restarts"),
    ("cni-uninstall", "the network configuration stays when the agent ends"),
    ("kvstore", "state is kept in Kubernetes objects alone"),
    ("enable-bandwidth-manager", "limits on pods' bandwidth are not enforced"),
    (
        "direct-routing-skip-unreachable",
        "auto-direct-node-routes makes routes to nodes on the same network alone, and reports the others",
    ),
    ("kube-proxy-replacement", "Services are left to kube-proxy, which has to run"),
];

/// Parts of Cilium: how its keys start, and what the part is called. The first match counts.
const PARTS: &[(&str, &[&str])] = &[
    (
        "Hubble",
        &["hubble-", "enable-hubble", "monitor-", "enable-monitor", "enable-recorder", "trace-", "nat-map-stats"],
    ),
    (
        "network policies",
        &[
            "policy-",
            "enable-policy",
            "identity-",
            "enable-k8s-networkpolicy",
            "enable-k8s-cluster-network-policy",
            "enable-non-default-deny",
            "labels",
            "mesh-auth-",
        ],
    ),
    (
        "the L7 and DNS proxies",
        &[
            "envoy-",
            "enable-envoy",
            "external-envoy",
            "proxy-",
            "enable-l7",
            "http-",
            "tofqdns-",
            "dnsproxy-",
            "dns-",
            "ingress-",
            "gateway-",
            "enable-ingress",
            "enable-gateway",
            "loadbalancer-l7",
        ],
    ),
    (
        "Services",
        &[
            "bpf-lb-",
            "node-port-",
            "nodeport-",
            "enable-node-port",
            "enable-host-port",
            "enable-external-ips",
            "enable-svc-",
            "enable-health-check-",
            "enable-session-",
            "enable-internal-traffic",
            "enable-service-",
            "service-",
            "default-lb-",
            "lb-",
            "enable-no-service",
            "kube-proxy-",
            "enable-dynamic-source-lookup",
        ],
    ),
    ("cluster mesh", &["clustermesh-", "cluster-", "max-connected-clusters"]),
    ("health checks", &["enable-health-", "enable-endpoint-health-", "health-check-", "agent-health-"]),
    (
        "other IPAM modes",
        &["ipam-", "eni-", "aws-", "ec2-", "azure-", "alibaba", "auto-create-cilium-pod", "limit-ipam-"],
    ),
    ("IPv6", &["enable-ipv6", "ipv6-"]),
    (
        "metrics and profiles",
        &[
            "prometheus-",
            "operator-prometheus",
            "metrics",
            "enable-metrics",
            "pprof",
            "operator-pprof",
            "controller-group-metrics",
        ],
    ),
    ("the CNI plugin", &["cni-"]),
];

/// What keys of no part are summed up under.
const OTHER_PART: &str = "other parts";

/// The names of Cilium's keys that Cistern does not implement.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    NAMES.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Whether this is such a key.
pub(super) fn is_known(key: &str) -> bool {
    names().any(|name| name == key)
}

/// Key, accepted values and reason of everything in [`REFUSED`], for the documentation.
pub(super) fn refusals() -> impl Iterator<Item = (&'static str, String, &'static str)> {
    REFUSED.iter().map(|(key, accepted, reason)| (*key, accepted.in_words(), *reason))
}

/// Judges the keys that are not Cistern's own.
pub(super) fn judge(keys: BTreeMap<String, Given>, warnings: &mut Vec<Warning>, errors: &mut Vec<SettingsError>) {
    let mut parts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (key, given) in keys {
        if !is_known(&key) {
            let reason = unknown(&key);
            errors.push(given.error(key, reason));
        } else if let Some((_, accepted, reason)) = refused(&key, &given.text) {
            let reason = format!("expected {}: {reason}", accepted.in_words());
            errors.push(given.error(key, reason));
        } else if is_off(&given.text) {
            // Nothing is missing.
        } else if let Some((_, consequence)) = NOTED.iter().find(|(name, _)| *name == key) {
            let message = format!("{key}={} ({}) has no effect: {consequence}", given.text, given.source);
            warnings.push(Warning { keys: vec![key], message });
        } else if !REFUSED.iter().any(|(name, _, _)| *name == key) {
            // What is left of the keys in REFUSED asks for what Cistern does anyway.
            parts.entry(part(&key)).or_default().push(key);
        }
    }
    for (part, keys) in parts {
        let message = format!("Cilium's keys for {part} have no effect: {}", keys.join(", "));
        warnings.push(Warning { keys, message });
    }
}

fn refused(key: &str, value: &str) -> Option<&'static (&'static str, Accepted, &'static str)> {
    REFUSED.iter().find(|(name, accepted, _)| *name == key && !accepted.holds(value))
}

fn part(key: &str) -> &'static str {
    let of = |(_, starts): &&(&str, &[&str])| starts.iter().any(|start| key.starts_with(start));
    PARTS.iter().find(of).map_or(OTHER_PART, |(part, _)| part)
}

/// Whether a value switches something off, or says nothing.
fn is_off(value: &str) -> bool {
    const OFF: &[&str] = &["", "false", "f", "0", "0s", "none", "disabled", "off", "never", "undefined"];
    OFF.iter().any(|off| off.eq_ignore_ascii_case(value))
}

fn unknown(key: &str) -> String {
    let nearest = nearest(key, known_names());
    let suggestion = nearest.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
    format!("neither Cistern nor Cilium knows this key{suggestion}")
}
