//! Cilium's keys that Cistern does not implement.
//!
//! The `cilium-config` of Cilium's chart has well over a hundred keys, most of them for features that Cistern does not
//! have. They must not prevent the start, so they are logged once, one line per feature; a key that disables its
//! feature is not logged. Values that change where packets go or how they are protected are rejected, because ignoring
//! them would break or expose traffic. The error states the alternative ([`REFUSED`]).

use super::layers::{Given, Source, known_names};
use super::{SettingsError, Warning};
use crate::spelling::nearest;
use std::collections::BTreeMap;

/// Names only, from the command references and charts of Cilium; comments start with `#`.
const NAMES: &str = include_str!("cilium-keys.txt");

/// The values of a key that agree with what Cistern does.
enum Accepted {
    /// Only those that disable it.
    Off,
    /// The empty value and these.
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

/// Keys with values that change where traffic goes, or who can read it: the accepted values, the reason and the
/// alternative.
const REFUSED: &[(&str, Accepted, &str)] = &[
    (
        "routing-mode",
        Words(&["native"]),
        "tunnels are not implemented: pod traffic is routed natively; set it to `native`, with auto-direct-node-routes=true if all nodes share one L2 network, else with routes in the network",
    ),
    (
        "tunnel",
        Words(&["disabled"]),
        "tunnels are not implemented: pod traffic is routed natively; set it to `disabled`, with auto-direct-node-routes=true if all nodes share one L2 network, else with routes in the network",
    ),
    ("cluster-pool-ipv6-cidr", Words(&[]), "IPv6 is not implemented: nodes would not be assigned a pod CIDR of it"),
    ("ipv4-range", Words(&["auto"]), "the node's pod CIDR is read from its CiliumNode"),
    ("local-router-ipv6", Words(&[]), "IPv6 is not implemented"),
    ("disable-ipv4", Off, "IPv4 is required; it is the former opposite of enable-ipv4"),
    (
        "kube-proxy-replacement",
        Words(&["false", "disabled", "partial", "probe"]),
        "Services are not implemented: set it to `false` and run kube-proxy",
    ),
    ("bpf-lb-only", Off, "Services are not load-balanced"),
    ("enable-host-reachable-services", Off, "Services are not implemented; run kube-proxy"),
    ("enable-wireguard", Off, "traffic between nodes would not be encrypted"),
    ("enable-ipsec", Off, "traffic between nodes would not be encrypted"),
    ("enable-ztunnel", Off, "traffic between pods would not be encrypted"),
    ("encrypt-node", Off, "traffic between nodes would not be encrypted"),
    ("enable-encryption-strict-mode", Off, "traffic that must be encrypted would be sent in clear text"),
    ("enable-encryption-strict-mode-egress", Off, "traffic that must be encrypted would be sent in clear text"),
    ("enable-encryption-strict-mode-ingress", Off, "traffic that must be encrypted would be accepted in clear text"),
    ("mesh-auth-mutual-enabled", Off, "pods would connect without the authentication that policies require"),
    ("mesh-auth-mtls-enabled", Off, "pods would connect without the authentication that policies require"),
    (
        "enable-policy",
        Words(&["default", "never"]),
        "network policies are not implemented: all traffic would be allowed",
    ),
    ("enable-host-firewall", Off, "network policies are not implemented: the host would be unprotected"),
    ("enable-xdp-prefilter", Off, "traffic that the filter drops would pass"),
    ("prefilter-device", Words(&["undefined"]), "traffic that the filter drops would pass"),
    ("enable-egress-gateway", Off, "traffic of the selected pods would leave with another source address"),
    ("enable-ipv4-egress-gateway", Off, "traffic of the selected pods would leave with another source address"),
    (
        "enable-masquerade-to-route-source",
        Off,
        "traffic would leave with another source address; see derive-masq-ip-addr-from-device",
    ),
    (
        "egress-masquerade-interfaces",
        Words(&[]),
        "it restricts iptables rules, which are not used; set `devices` instead",
    ),
    ("enable-local-redirect-policy", Off, "traffic would not be redirected to node-local pods"),
    ("enable-vtep", Off, "the endpoints behind the tunnel would be unreachable"),
    ("enable-nat46x64-gateway", Off, "traffic between IPv4 and IPv6 would not be translated"),
    ("enable-stateless-nat46x64", Off, "traffic between IPv4 and IPv6 would not be translated"),
    ("enable-ipip-termination", Off, "IPIP traffic would not be decapsulated"),
    ("enable-bgp-control-plane", Off, "routes would not be announced"),
    ("bgp-announce-lb-ip", Off, "routes would not be announced"),
    ("bgp-announce-pod-cidr", Off, "routes would not be announced"),
    ("enable-l2-announcements", Off, "ARP requests for the addresses of LoadBalancer Services would not be answered"),
    ("enable-l2-pod-announcements", Off, "ARP requests for the addresses of pods would not be answered"),
    ("enable-ingress-controller", Off, "Ingresses would not be served"),
    ("enable-gateway-api", Off, "Gateways would not be served"),
    ("loadbalancer-l7", Off, "Services would not be load-balanced per request"),
    ("enable-standalone-dns-proxy", Off, "policies on DNS names would not be enforced"),
    (
        "cni-chaining-mode",
        Words(&["none", "portmap"]),
        "cistern-cni creates the pods' interfaces itself; `portmap`, chained behind it, implements hostPort",
    ),
    ("cni-external-routing", Off, "cistern-cni and the agent install the pods' routes"),
    ("enable-high-scale-ipcache", Off, "tunnels are not implemented"),
    ("flannel-master-device", Words(&[]), "cistern-cni creates the pods' interfaces itself"),
    ("ipvlan-master-device", Words(&["undefined"]), "cistern-cni creates the pods' interfaces itself"),
];

/// Keys whose absence has a consequence that administrators should know, unless they are off.
const NOTED: &[(&str, &str)] = &[
    ("enable-policy", "network policies are not implemented or enforced"),
    ("enable-lb-ipam", "LoadBalancer Services get no addresses"),
    ("remove-cilium-node-taints", "the taint node.cilium.io/agent-not-ready is not removed from nodes"),
    ("bpf-map-dynamic-size-ratio", "map sizes follow bpf-nat-global-max, not the node's memory"),
    ("clean-cilium-state", "state is always kept across restarts"),
    ("clean-cilium-bpf-state", "state is always kept across restarts"),
    ("cni-uninstall", "the CNI network configuration remains when the agent terminates"),
    ("kvstore", "state is kept in Kubernetes objects only"),
    ("enable-bandwidth-manager", "limits on pods' bandwidth are not enforced"),
    (
        "direct-routing-skip-unreachable",
        "auto-direct-node-routes installs routes to nodes on the same L2 network only, and reports the others",
    ),
    ("kube-proxy-replacement", "Services are not implemented; kube-proxy is required"),
    ("device", "Cilium replaced it by devices; set devices to choose where traffic is masqueraded"),
    ("blacklist-conflicting-routes", "Cilium removed it; conflicts of the pod CIDR with the node are always detected"),
    ("ct-global-max-entries-tcp", "Cilium replaced it; bpf-nat-global-max limits the masqueraded flows"),
    ("ct-global-max-entries-other", "Cilium replaced it; bpf-nat-global-max limits the masqueraded flows"),
    ("install-iptables-rules", "Cilium removed it; traffic is masqueraded in eBPF, see enable-ipv4-masquerade"),
];

/// Features of Cilium: prefixes of their keys, and their names. The first match counts.
const PARTS: &[(&str, &[&str])] = &[
    (
        "Hubble",
        &[
            "hubble-",
            "cilium-hubble-",
            "enable-hubble",
            "monitor-",
            "enable-monitor",
            "enable-recorder",
            "trace-",
            "nat-map-stats",
        ],
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
            "legacy-host-allows-world",
            "force-local-policy-",
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
            "enable-legacy-services",
            "enable-experimental-lb",
            "lbipam-",
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
        &[
            "ipam-",
            "eni-",
            "aws-",
            "ec2-",
            "update-ec2-",
            "multi-pool-",
            "azure-",
            "alibaba",
            "auto-create-cilium-pod",
            "limit-ipam-",
        ],
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

/// The name for keys of no listed feature.
const OTHER_PART: &str = "other parts";

/// The names of Cilium's keys that Cistern does not implement.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    NAMES.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Whether the key is one of them.
pub(super) fn is_known(key: &str) -> bool {
    names().any(|name| name == key)
}

/// Key, accepted values and reason of everything in [`REFUSED`], for the documentation.
pub(super) fn refusals() -> impl Iterator<Item = (&'static str, String, &'static str)> {
    REFUSED.iter().map(|(key, accepted, reason)| (*key, accepted.in_words(), *reason))
}

/// Sorts the keys that Cistern does not implement into errors and warnings. Returns those that only the config directory
/// has and that Cilium does not know either, with a message about each; with `strict` they are errors.
pub(super) fn judge(
    keys: BTreeMap<String, Given>,
    strict: bool,
    warnings: &mut Vec<Warning>,
    errors: &mut Vec<SettingsError>,
) -> BTreeMap<String, String> {
    let mut without_effect = BTreeMap::new();
    let mut parts: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (key, given) in keys {
        if !is_known(&key) {
            let reason = unknown(&key);
            if strict || !matches!(given.source, Source::File(_)) {
                errors.push(given.error(key, reason));
            } else {
                let message = format!("{key} ({}) has no effect: {reason}", given.source);
                warnings.push(Warning { keys: vec![key.clone()], message: message.clone() });
                without_effect.insert(key, message);
            }
        } else if let Some((_, accepted, reason)) = refused(&key, &given.text) {
            let reason = format!("expected {}: {reason}", accepted.in_words());
            errors.push(given.error(key, reason));
        } else if is_off(&given.text) {
            // Off: no consequence to report.
        } else if let Some((_, consequence)) = NOTED.iter().find(|(name, _)| *name == key) {
            let message = format!("{key}={} ({}) has no effect: {consequence}", given.text, given.source);
            warnings.push(Warning { keys: vec![key], message });
        } else if !REFUSED.iter().any(|(name, _, _)| *name == key) {
            // The remaining accepted values of `REFUSED` request what Cistern does anyway.
            parts.entry(part(&key)).or_default().push(key);
        }
    }
    for (part, keys) in parts {
        let message = format!("Cilium's keys for {part} have no effect: {}", keys.join(", "));
        warnings.push(Warning { keys, message });
    }
    without_effect
}

fn refused(key: &str, value: &str) -> Option<&'static (&'static str, Accepted, &'static str)> {
    REFUSED.iter().find(|(name, accepted, _)| *name == key && !accepted.holds(value))
}

fn part(key: &str) -> &'static str {
    let of = |(_, starts): &&(&str, &[&str])| starts.iter().any(|start| key.starts_with(start));
    PARTS.iter().find(of).map_or(OTHER_PART, |(part, _)| part)
}

/// Whether a value disables something, or is empty.
fn is_off(value: &str) -> bool {
    const OFF: &[&str] = &["", "false", "f", "0", "0s", "none", "disabled", "off", "never", "undefined"];
    OFF.iter().any(|off| off.eq_ignore_ascii_case(value))
}

fn unknown(key: &str) -> String {
    let nearest = nearest(key, known_names());
    let suggestion = nearest.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
    format!("neither Cistern nor Cilium knows this key{suggestion}")
}
