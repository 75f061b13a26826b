//! The settings of the pool, checked.

use crate::ip::Family;
use crate::ip::block::{BlockSet, Carving, CarvingError, OverlapError};
use crate::ipam::cluster::ledger::Ledger;
use crate::ipam::cluster::records::RecordSet;
use crate::ipam::lease::DEFAULT_POOL;
use ipnet::IpNet;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::time::Duration;

/// Quarantine of a deleted node's pod CIDR: pods may still be running on that machine.
pub const BLOCK_QUARANTINE: Duration = Duration::from_secs(600);

/// A pod CIDR of this size is accepted with a warning; a longer IPv4 mask is rejected (`ipam` decision 12): of the two
/// addresses that remain for pods, one is the router's.
const LONGEST_IPV4_MASK: u8 = 30;

/// The configuration of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilySettings {
    /// `enable-ipv4`, `enable-ipv6`
    pub enabled: bool,
    /// `cluster-pool-ipv4-cidr`, `cluster-pool-ipv6-cidr`, in order.
    pub cidrs: Vec<IpNet>,
    /// `cluster-pool-ipv4-mask-size`, `cluster-pool-ipv6-mask-size`: prefix length of a node's pod CIDR.
    pub mask_size: u8,
}

/// Why a pool configuration is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A list for a disabled family.
    #[error("expected an empty list: enable-{key} is false")]
    ListOfDisabledFamily {
        /// The family as in key names.
        key: &'static str,
    },
    /// No list for an enabled family.
    #[error("expected at least one CIDR: enable-{key} is true, and without one there is nothing to allocate")]
    EmptyList {
        /// The family as in key names.
        key: &'static str,
    },
    /// No family is enabled.
    #[error("expected `true` for enable-ipv4 or enable-ipv6")]
    NoFamily,
    /// An element of the other family.
    #[error("{cidr} is of the other family; expected CIDRs of {key} only")]
    OtherFamily {
        /// The family as in key names.
        key: &'static str,
        /// The element.
        cidr: IpNet,
    },
    /// An element that cannot be divided.
    #[error("{error} (cluster-pool-{key}-mask-size)")]
    Carving {
        /// The family as in key names.
        key: &'static str,
        /// The reason.
        error: CarvingError,
    },
    /// Two elements overlap.
    #[error("{error}")]
    Overlap {
        /// The family as in key names.
        key: &'static str,
        /// Which.
        error: OverlapError,
    },
    /// There is no room for pods.
    #[error(
        "expected 30 or less, 29 or less is recommended: a /{mask_size} has no room for the router address and a pod"
    )]
    BlockTooSmall {
        /// As configured.
        mask_size: u8,
    },
}

impl ConfigError {
    /// The setting to correct.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        match self {
            Self::NoFamily => "enable-ipv4",
            Self::BlockTooSmall { .. } => "cluster-pool-ipv4-mask-size",
            Self::ListOfDisabledFamily { key }
            | Self::EmptyList { key }
            | Self::OtherFamily { key, .. }
            | Self::Carving { key, .. }
            | Self::Overlap { key, .. } => cidr_setting(key),
        }
    }
}

fn cidr_setting(family: &str) -> &'static str {
    if family == "ipv4" { "cluster-pool-ipv4-cidr" } else { "cluster-pool-ipv6-cidr" }
}

/// A problem of a pool configuration that is accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigWarning {
    /// Room for one pod.
    #[error("a /30 has one address for pods; 29 or less is recommended")]
    OnePodPerNode,
    /// Host bits are set.
    #[error("{cidr} has bits beyond its prefix and is read as {used}")]
    HostBits {
        /// The family as in key names.
        key: &'static str,
        /// As configured.
        cidr: IpNet,
        /// As used.
        used: IpNet,
    },
}

impl ConfigWarning {
    /// The setting to look at.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        match self {
            Self::OnePodPerNode => "cluster-pool-ipv4-mask-size",
            Self::HostBits { key, .. } => cidr_setting(key),
        }
    }
}

/// A valid pool configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    ipv4: Option<BlockSet<String>>,
    ipv6: Option<BlockSet<String>>,
    quarantine: Duration,
}

impl Settings {
    /// Validates a configuration. `quarantine` is that of a deleted node's pod CIDR ([`BLOCK_QUARANTINE`]).
    ///
    /// # Errors
    /// All errors, not only the first.
    pub fn new(
        ipv4: FamilySettings,
        ipv6: FamilySettings,
        quarantine: Duration,
    ) -> Result<(Self, Vec<ConfigWarning>), Vec<ConfigError>> {
        let mut errors = Vec::new();
        let mut warnings = Vec::new();
        if !ipv4.enabled && !ipv6.enabled {
            errors.push(ConfigError::NoFamily);
        }
        let ipv4 = family_pool(Family::Ipv4, ipv4, &mut errors, &mut warnings);
        let ipv6 = family_pool(Family::Ipv6, ipv6, &mut errors, &mut warnings);
        if errors.is_empty() { Ok((Self { ipv4, ipv6, quarantine }, warnings)) } else { Err(errors) }
    }

    /// The same pool with another quarantine.
    #[must_use]
    pub fn with_quarantine(self, quarantine: Duration) -> Self {
        Self { quarantine, ..self }
    }

    /// The ledger of a new leader.
    pub(super) fn ledger(&self, records: &RecordSet, now: Timestamp) -> Ledger {
        let sets = self.ipv4.iter().chain(&self.ipv6).cloned().collect();
        Ledger::take_over(BTreeMap::from([(DEFAULT_POOL.to_owned(), sets)]), self.quarantine, records, now)
    }
}

fn family_pool(
    family: Family,
    settings: FamilySettings,
    errors: &mut Vec<ConfigError>,
    warnings: &mut Vec<ConfigWarning>,
) -> Option<BlockSet<String>> {
    let FamilySettings { enabled, cidrs, mask_size } = settings;
    let key = match family {
        Family::Ipv4 => "ipv4",
        Family::Ipv6 => "ipv6",
    };
    match (enabled, cidrs.is_empty()) {
        (false, true) => return None,
        (false, false) => {
            errors.push(ConfigError::ListOfDisabledFamily { key });
            return None;
        }
        (true, true) => errors.push(ConfigError::EmptyList { key }),
        (true, false) => {}
    }
    if family == Family::Ipv4 && (LONGEST_IPV4_MASK + 1..=32).contains(&mask_size) {
        errors.push(ConfigError::BlockTooSmall { mask_size });
    }
    if family == Family::Ipv4 && mask_size == LONGEST_IPV4_MASK {
        warnings.push(ConfigWarning::OnePodPerNode);
    }
    let mut carvings = Vec::new();
    for cidr in cidrs {
        if Family::of_net(&cidr) != family {
            errors.push(ConfigError::OtherFamily { key, cidr });
            continue;
        }
        if cidr.trunc() != cidr {
            warnings.push(ConfigWarning::HostBits { key, cidr, used: cidr.trunc() });
        }
        match Carving::new(cidr, mask_size) {
            Ok(carving) => carvings.push(carving),
            Err(error) => errors.push(ConfigError::Carving { key, error }),
        }
    }
    BlockSet::new(carvings).map_err(|error| errors.push(ConfigError::Overlap { key, error })).ok()
}
