//! The specification of a cluster, and the addresses that follow from it.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

/// Network of the pods.
pub const POD_NETWORK: &str = "10.244.0.0/16";
/// Network of the Services.
pub const SERVICE_NETWORK: &str = "10.96.0.0/16";
/// The Service of the API server.
pub const KUBERNETES_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// The Service of CoreDNS.
pub const DNS_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// The nodes' gateway: a separate machine without routes to pods.
pub(super) const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
/// The control plane.
pub const CONTROL: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 10);
/// The external host: an address in no private or reserved range.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 80);
/// The gateway on the external hosts' segment.
pub(super) const OUTSIDE_GATEWAY: Ipv4Addr = Ipv4Addr::new(45, 33, 7, 1);
/// Prefix length of both segments.
pub(super) const PREFIX_LENGTH: u8 = 24;

/// Last octet of the first node.
const FIRST_NODE: u8 = 21;
/// Maximum number of nodes on the segment.
const MOST_NODES: u8 = 200;

/// Names of the machines that are not nodes.
pub(super) const ROUTER_NAME: &str = "router";
pub(super) const CONTROL_NAME: &str = "control";
pub(super) const OUTSIDE_NAME: &str = "outside";

/// CNI plugin of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cni {
    /// Cistern, by its Helm chart
    Cistern,
    /// The CNI project's ptp and host-local plugins with static routes, to tell Cistern's defects from others
    Reference,
    /// None: the nodes remain NotReady
    None,
}

/// Component that assigns pod CIDRs to nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Ipam {
    /// Cistern's operator
    ClusterPool,
    /// kube-controller-manager, in the Nodes' spec.podCIDRs
    Kubernetes,
}

impl Ipam {
    /// Its name in the chart's `ipam.mode`.
    #[must_use]
    pub const fn mode(self) -> &'static str {
        match self {
            Self::ClusterPool => "cluster-pool",
            Self::Kubernetes => "kubernetes",
        }
    }
}

/// Specification of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Number of nodes.
    pub nodes: u8,
    /// Minor version of Kubernetes: `1.36`.
    pub kubernetes: String,
    /// CNI plugin.
    pub cni: Cni,
    /// Component that assigns pod CIDRs.
    pub ipam: Ipam,
}

impl Default for Spec {
    fn default() -> Self {
        Self { nodes: 2, kubernetes: "1.36".to_owned(), cni: Cni::Cistern, ipam: Ipam::ClusterPool }
    }
}

/// Selects the version that tests run on, other than the default.
const KUBERNETES_VARIABLE: &str = "CISTERN_KUBERNETES";

impl Spec {
    /// The specification for tests: the default, with the version that the environment selects.
    ///
    /// # Errors
    /// Not a version.
    pub fn of_tests() -> Result<Self> {
        match std::env::var(KUBERNETES_VARIABLE) {
            Ok(text) => {
                let kubernetes = minor_release(&text).context(KUBERNETES_VARIABLE)?;
                Ok(Self { kubernetes, ..Self::default() })
            }
            Err(_) => Ok(Self::default()),
        }
    }

    /// The names of the nodes, in order.
    ///
    /// # Errors
    /// There are none, or more than fit on the segment.
    pub fn node_names(&self) -> Result<Vec<String>> {
        ensure!((1..=MOST_NODES).contains(&self.nodes), "{} nodes: expected 1 to {MOST_NODES}", self.nodes);
        Ok((0..self.nodes).map(node_name).collect())
    }
}

/// `1.36` of `1.36`, `1.36.3` and `v1.36.3`.
///
/// # Errors
/// Not a version.
pub fn minor_release(version: &str) -> Result<String> {
    let mut parts = version.trim_start_matches('v').split('.');
    let number = |part: Option<&str>| part.and_then(|text| text.parse::<u16>().ok());
    let (major, minor) = (number(parts.next()), number(parts.next()));
    let (major, minor) =
        major.zip(minor).with_context(|| format!("Kubernetes version {version:?}: expected a form such as 1.36"))?;
    Ok(format!("{major}.{minor}"))
}

fn node_name(index: u8) -> String {
    format!("node-{}", u16::from(index) + 1)
}

/// The address of node number `index`, counted from 0.
pub(super) fn node_address(index: u8) -> Ipv4Addr {
    let [a, b, c, _] = GATEWAY.octets();
    Ipv4Addr::new(a, b, c, FIRST_NODE.saturating_add(index))
}

/// Pod CIDR of node number `index` with the reference plugins.
pub(super) fn reference_block(index: u8) -> String {
    format!("10.244.{}.0/24", u16::from(index) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minor_version_is_parsed_from_every_form_of_a_version() {
        for version in ["1.36", "v1.36.3", "1.36.0-rc.1", "v1.36.3+build"] {
            assert_eq!(minor_release(version).unwrap(), "1.36", "{version}");
        }
        for wrong in ["", "latest", "1", "1.x"] {
            assert!(minor_release(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nodes_have_distinct_addresses_and_blocks_within_the_segment() {
        let spec = |nodes| Spec { nodes, ..Spec::default() };
        assert_eq!(spec(2).node_names().unwrap(), ["node-1", "node-2"]);
        assert!(spec(0).node_names().is_err());
        assert!(spec(201).node_names().is_err());
        let last = MOST_NODES - 1;
        assert_eq!(node_address(last), Ipv4Addr::new(172, 30, 0, 220));
        assert_eq!(reference_block(last), "10.244.200.0/24");
        let pods: ipnet::Ipv4Net = POD_NETWORK.parse().unwrap();
        assert!(pods.contains(&reference_block(last).parse::<ipnet::Ipv4Net>().unwrap()));
    }
}
