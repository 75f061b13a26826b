//! IPAM: who owns a block, who holds an address.
//!
//! | module | owns |
//! |---|---|
//! | [`cluster`] | blocks: which node has which pod CIDR |
//! | [`supply`] | what a node may allocate from: pools of pod CIDRs or of single addresses |
//! | [`node`] | the IPAM modes as the node sees them: what to allocate from, what to write |
//! | [`lease`] | who holds an address of this node, since when, and whether that is final |
//! | [`audit`] | whether the leases agree with the namespaces and devices that exist |
//! | [`explain`] | why an address or a node is as it is, in words |
//! | [`verdict`] | what the operator decided about the pod CIDRs that a node lists, as codes |

pub mod audit;
pub mod cluster;
pub mod explain;
pub mod lease;
mod legacy_verdicts;
pub mod node;
pub mod supply;
pub mod verdict;

use crate::ip::overlaps;
use ipnet::IpNet;
use jiff::Timestamp;
use std::time::Duration;

/// `from` plus `by`, saturating.
fn later(from: Timestamp, by: Duration) -> Timestamp {
    from.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// A pod range that overlaps a network in use (`ipam` decision 17). Packets to one of the two would be misrouted: no address
/// that both have is allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("pod range {pods} overlaps with {network} ({what}); choose another range for the pods, or for the other")]
pub struct Overlap {
    /// The pod range.
    pub pods: IpNet,
    /// The other network.
    pub network: IpNet,
    /// Description of the other network, such as `eth0 of this node` or `service-cidr`.
    pub what: String,
}

impl Overlap {
    /// Whether no address of the pod range is outside of the other network.
    #[must_use]
    pub fn covers(&self) -> bool {
        self.network.contains(&self.pods)
    }
}

/// All pairs of a pod range and another network that overlap. Other networks are those of the nodes (each address with
/// its prefix length) and the Service CIDRs, with human-readable descriptions. The caller omits legitimate ones: the
/// router address and the pods' own routes.
#[must_use]
pub fn find_overlaps(pods: &[IpNet], networks: &[(IpNet, String)]) -> Vec<Overlap> {
    let pair = |pods: &IpNet| {
        let pods = *pods;
        let hits = networks.iter().filter(move |(network, _)| overlaps(&pods, network));
        hits.map(move |(network, what)| Overlap { pods, network: network.trunc(), what: what.clone() })
    };
    pods.iter().flat_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_range_over_the_node_network_is_found_whichever_is_larger() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let networks = [
            (net("10.1.2.3/24"), "eth0 of this node".to_owned()),
            (net("10.96.0.0/12"), "service-cidr".to_owned()),
            (net("192.168.1.10/32"), "InternalIP of node-b".to_owned()),
        ];
        let found = |pods: &str| -> Vec<String> {
            find_overlaps(&[net(pods)], &networks).iter().map(|overlap| overlap.what.clone()).collect()
        };
        assert_eq!(found("10.0.0.0/8"), ["eth0 of this node", "service-cidr"]);
        assert_eq!(found("10.1.2.128/25"), ["eth0 of this node"]);
        assert_eq!(found("192.168.0.0/16"), ["InternalIP of node-b"]);
        assert!(found("10.244.0.0/16").is_empty());
        assert!(found("fd00::/64").is_empty());
        let text = find_overlaps(&[net("10.0.0.0/8")], &networks)[0].to_string();
        assert!(text.contains("10.0.0.0/8") && text.contains("10.1.2.0/24") && text.contains("eth0"), "{text}");
    }
}
