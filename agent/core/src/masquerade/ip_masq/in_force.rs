//! Decides which CIDRs are in force.

use super::file::{ConfigFile, DEFAULT_RESYNC_INTERVAL, FileError, parse};
use super::warning::Warning;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::time::Duration;

/// CIDRs excluded by default: `ip-masq-default-exclusions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DefaultExclusions {
    /// Cilium's eleven ranges: private, shared, documentation, benchmark and reserved addresses.
    #[default]
    Reserved,
    /// ip-masq-agent's three ranges: the private ones.
    Rfc1918,
}

impl DefaultExclusions {
    /// The CIDRs, all IPv4.
    #[must_use]
    pub fn ranges(self) -> &'static [Ipv4Net] {
        const RFC1918: [Ipv4Net; 3] = [range(10, 0, 0, 0, 8), range(172, 16, 0, 0, 12), range(192, 168, 0, 0, 16)];
        const RESERVED: [Ipv4Net; 11] = [
            RFC1918[0],
            RFC1918[1],
            RFC1918[2],
            range(100, 64, 0, 0, 10),
            range(192, 0, 0, 0, 24),
            range(192, 0, 2, 0, 24),
            range(192, 88, 99, 0, 24),
            range(198, 18, 0, 0, 15),
            range(198, 51, 100, 0, 24),
            range(203, 0, 113, 0, 24),
            range(240, 0, 0, 0, 4),
        ];
        match self {
            Self::Reserved => &RESERVED,
            Self::Rfc1918 => &RFC1918,
        }
    }
}

const fn range(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

/// The file as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// It does not exist.
    Absent,
    /// Its content.
    Content(String),
    /// It exists but cannot be read, with the error.
    Unreadable(String),
}

/// Input of the decision.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// `enable-ip-masq-agent`
    pub enabled: bool,
    /// `ip-masq-default-exclusions`
    pub defaults: DefaultExclusions,
    /// `enable-ipv6`
    pub ipv6: bool,
    /// The current file.
    pub found: &'a Found,
    /// The last valid file ([`Outcome::last_good`]), of this process or loaded from disk at startup.
    pub last_good: Option<&'a ConfigFile>,
}

/// Source of the list in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ListSource {
    /// The feature is off: only link-local destinations are excluded.
    Off,
    /// There is no file, it is empty, or it is invalid and there never was a valid one.
    BuiltIn,
    /// The current file.
    File,
    /// The last valid file.
    LastGood,
}

impl fmt::Display for ListSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Off => "off",
            Self::BuiltIn => "built-in",
            Self::File => "file",
            Self::LastGood => "last good file",
        })
    }
}

/// CIDRs excluded by the file or by default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exclusions {
    /// The list's IPv4 entries.
    pub ipv4: BTreeSet<Ipv4Net>,
    /// The list's IPv6 entries; empty while IPv6 is off.
    pub ipv6: BTreeSet<Ipv6Net>,
    /// Whether 169.254.0.0/16 is excluded, too.
    pub link_local_ipv4: bool,
    /// Whether fe80::/10 is excluded, too.
    pub link_local_ipv6: bool,
}

/// The CIDRs in force, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The CIDRs.
    pub exclusions: Exclusions,
    /// Source of the list.
    pub source: ListSource,
    /// When the file is re-read, even if it is watched.
    pub resync_interval: Duration,
    /// Problems to report.
    pub warnings: Vec<Warning>,
    /// Why the current file is not in force.
    pub error: Option<FileError>,
    /// The last valid file, to be persisted. `None`: the defaults.
    pub last_good: Option<ConfigFile>,
}

/// Decides which CIDRs are in force (`masquerade` decisions 1 and 2): an invalid file leaves the last valid one in
/// force, or the defaults.
#[must_use]
pub fn decide(input: Input<'_>) -> Outcome {
    if !input.enabled {
        let exclusions = Exclusions { link_local_ipv4: true, link_local_ipv6: true, ..Exclusions::default() };
        return Outcome {
            exclusions,
            source: ListSource::Off,
            resync_interval: DEFAULT_RESYNC_INTERVAL,
            warnings: Vec::new(),
            error: None,
            last_good: input.last_good.cloned(),
        };
    }
    let parsed = match input.found {
        Found::Absent => Ok(None),
        Found::Content(text) => parse(text),
        Found::Unreadable(reason) => Err(FileError::Unreadable { reason: reason.clone() }),
    };
    let (file, source, mut warnings, error) = match parsed {
        Ok(None) => (None, ListSource::BuiltIn, Vec::new(), None),
        Ok(Some((file, warnings))) => (Some(file), ListSource::File, warnings, None),
        Err(error) => match input.last_good {
            Some(file) => (Some(file.clone()), ListSource::LastGood, Vec::new(), Some(error)),
            None => (None, ListSource::BuiltIn, Vec::new(), Some(error)),
        },
    };
    let in_force = file.clone().unwrap_or_default();
    let (exclusions, inert) = exclusions(&in_force, input.defaults, input.ipv6);
    if inert > 0 {
        warnings.push(Warning::Ipv6Inert { entries: inert });
    }
    let resync_interval = in_force.resync_interval;
    Outcome { exclusions, source, resync_interval, warnings, error, last_good: file }
}

/// The CIDRs excluded by a file, and the number of entries without effect.
pub(super) fn exclusions(file: &ConfigFile, defaults: DefaultExclusions, ipv6: bool) -> (Exclusions, usize) {
    let mut exclusions = Exclusions {
        link_local_ipv4: !file.masq_link_local,
        link_local_ipv6: !file.masq_link_local_ipv6,
        ..Exclusions::default()
    };
    let Some(cidrs) = &file.cidrs else {
        exclusions.ipv4 = defaults.ranges().iter().copied().collect();
        return (exclusions, 0);
    };
    for cidr in cidrs {
        match cidr {
            IpNet::V4(cidr) => {
                exclusions.ipv4.insert(*cidr);
            }
            IpNet::V6(cidr) => {
                exclusions.ipv6.insert(*cidr);
            }
        }
    }
    let inert = if ipv6 { 0 } else { std::mem::take(&mut exclusions.ipv6).len() };
    (exclusions, inert)
}
