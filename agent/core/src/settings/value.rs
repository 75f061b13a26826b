//! Value types: parsing and rendering.

use crate::masquerade::ip_masq::DefaultExclusions;
use crate::masquerade::plan::FlowPolicy;
use ipnet::Ipv4Net;
use jiff::SignedDuration;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// A value type.
pub(super) trait Value: Sized {
    /// The accepted values, as the object of "expected".
    const EXPECTED: &'static str;
    /// Whether a flag without a value means `true`.
    const IS_SWITCH: bool = false;

    /// Parses text without surrounding white space. The error states what was expected, as precisely as possible.
    fn parse(text: &str) -> Result<Self, String>;

    /// Renders the value so that [`Value::parse`] returns it.
    fn render(&self) -> String;
}

fn expected<T: Value>() -> String {
    T::EXPECTED.to_owned()
}

impl Value for bool {
    const EXPECTED: &'static str = "`true` or `false`";
    const IS_SWITCH: bool = true;

    /// Accepts what Go's `strconv.ParseBool` accepts, since Cilium reads the same file with it.
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
            "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
            _ => Err(expected::<Self>()),
        }
    }

    fn render(&self) -> String {
        self.to_string()
    }
}

impl Value for u8 {
    const EXPECTED: &'static str = "a whole number from 0 to 255";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| expected::<Self>())
    }

    fn render(&self) -> String {
        self.to_string()
    }
}

impl Value for u32 {
    const EXPECTED: &'static str = "a whole number from 0 to 4294967295";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| expected::<Self>())
    }

    fn render(&self) -> String {
        self.to_string()
    }
}

/// 0 and the empty text mean "detect".
impl Value for Option<u16> {
    const EXPECTED: &'static str = "a whole number from 1 to 65535, or 0";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Ok(None),
            _ => text.parse().map(|number: u16| (number != 0).then_some(number)).map_err(|_| expected::<Self>()),
        }
    }

    fn render(&self) -> String {
        self.unwrap_or(0).to_string()
    }
}

impl Value for String {
    const EXPECTED: &'static str = "a text";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("a non-empty text".to_owned()) } else { Ok(text.to_owned()) }
    }

    fn render(&self) -> String {
        self.clone()
    }
}

impl Value for Option<String> {
    const EXPECTED: &'static str = "a text, or nothing";

    fn parse(text: &str) -> Result<Self, String> {
        Ok((!text.is_empty()).then(|| text.to_owned()))
    }

    fn render(&self) -> String {
        self.clone().unwrap_or_default()
    }
}

impl Value for PathBuf {
    const EXPECTED: &'static str = "an absolute path";

    fn parse(text: &str) -> Result<Self, String> {
        let path = Self::from(text);
        if path.is_absolute() { Ok(path) } else { Err(expected::<Self>()) }
    }

    fn render(&self) -> String {
        self.display().to_string()
    }
}

impl Value for Option<PathBuf> {
    const EXPECTED: &'static str = "an absolute path, or nothing";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { PathBuf::parse(text).map(Some).map_err(|_| expected::<Self>()) }
    }

    fn render(&self) -> String {
        self.as_ref().map(PathBuf::render).unwrap_or_default()
    }
}

impl Value for Option<Ipv4Addr> {
    const EXPECTED: &'static str = "an IPv4 address such as 169.254.23.0, or nothing";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(|_| expected::<Self>()) }
    }

    fn render(&self) -> String {
        self.map(|address| address.to_string()).unwrap_or_default()
    }
}

impl Value for Option<Ipv4Net> {
    const EXPECTED: &'static str = "an IPv4 CIDR such as 10.0.0.0/8, or nothing";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { text.parse().map(Some).map_err(|_| expected::<Self>()) }
    }

    fn render(&self) -> String {
        self.map(|cidr| cidr.to_string()).unwrap_or_default()
    }
}

impl Value for Vec<Ipv4Net> {
    const EXPECTED: &'static str = "IPv4 CIDRs such as 10.0.0.0/8, separated by commas or spaces";

    fn parse(text: &str) -> Result<Self, String> {
        let parse = |item: &str| item.parse().map_err(|_| format!("{}; `{item}` is none", Self::EXPECTED));
        items(text).map(parse).collect()
    }

    fn render(&self) -> String {
        joined(self, ",")
    }
}

impl Value for Duration {
    const EXPECTED: &'static str = "a duration such as 15s, 1m30s or 2h";

    fn parse(text: &str) -> Result<Self, String> {
        let duration: SignedDuration = text.parse().map_err(|_| expected::<Self>())?;
        duration.try_into().map_err(|_| "a duration that is not negative".to_owned())
    }

    fn render(&self) -> String {
        SignedDuration::try_from(*self).map(|duration| format!("{duration:#}").replace(' ', "")).unwrap_or_default()
    }
}

/// A type with a fixed set of words.
macro_rules! words {
    ($type:ty, $expected:literal, { $($text:literal => $value:path,)+ }) => {
        impl Value for $type {
            const EXPECTED: &'static str = $expected;

            fn parse(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok($value),)+
                    _ => Err(expected::<Self>()),
                }
            }

            fn render(&self) -> String {
                match self {
                    $($value => $text.to_owned(),)+
                }
            }
        }
    };
}

/// Source of pod addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IpamMode {
    /// The operator assigns each node a pod CIDR of the cluster's pool.
    ClusterPool,
    /// The Node has the pod CIDR, set by kube-controller-manager or by an annotation.
    Kubernetes,
}

impl IpamMode {
    /// The value of the key `ipam`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ClusterPool => "cluster-pool",
            Self::Kubernetes => "kubernetes",
        }
    }
}

words!(IpamMode, "`cluster-pool` or `kubernetes`; the other modes of Cilium are not implemented", {
    "cluster-pool" => IpamMode::ClusterPool,
    "kubernetes" => IpamMode::Kubernetes,
});
words!(FlowPolicy, "`sticky` or `immediate`", {
    "sticky" => FlowPolicy::Sticky,
    "immediate" => FlowPolicy::Immediate,
});
words!(DefaultExclusions, "`reserved` or `rfc1918`", {
    "reserved" => DefaultExclusions::Reserved,
    "rfc1918" => DefaultExclusions::Rfc1918,
});

/// Minimum severity of logged messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Also what an administrator should investigate.
    Warning,
    /// Also what was done.
    Info,
    /// Also why it was done.
    Debug,
}

/// Format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Human-readable.
    Text,
    /// One JSON object per line.
    Json,
}

/// The value of `log-opt`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// Minimum severity.
    pub level: LogLevel,
    /// Format of a line.
    pub format: LogFormat,
    /// Options of Cilium's other log drivers (`syslog.…`), which are ignored.
    pub ignored: Vec<String>,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { level: LogLevel::Info, format: LogFormat::Text, ignored: Vec::new() }
    }
}

impl Value for LogOptions {
    const EXPECTED: &'static str = "options such as level=info,format=json or {\"level\":\"info\",\"format\":\"json\"}; \
                                    level is debug, info, warning or error, format is text or json";

    fn parse(text: &str) -> Result<Self, String> {
        let options: BTreeMap<String, String> = if text.starts_with('{') {
            serde_json::from_str(text).map_err(|_| expected::<Self>())?
        } else {
            let pair = |item: &str| item.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
            items(text).map(pair).collect::<Option<_>>().ok_or_else(expected::<Self>)?
        };
        let mut parsed = Self::default();
        for (name, value) in options {
            match (name.as_str(), value.as_str()) {
                ("level", "debug") => parsed.level = LogLevel::Debug,
                ("level", "info") => parsed.level = LogLevel::Info,
                ("level", "warning" | "warn") => parsed.level = LogLevel::Warning,
                ("level", "error" | "fatal" | "panic") => parsed.level = LogLevel::Error,
                ("format", "text" | "text-ts") => parsed.format = LogFormat::Text,
                ("format", "json" | "json-ts") => parsed.format = LogFormat::Json,
                ("level" | "format", _) => return Err(expected::<Self>()),
                _ => parsed.ignored.push(name),
            }
        }
        Ok(parsed)
    }

    fn render(&self) -> String {
        let level = match self.level {
            LogLevel::Error => "error",
            LogLevel::Warning => "warning",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
        };
        let format = match self.format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        format!("level={level},format={format}")
    }
}

/// The URL of an API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiServerUrl(String);

impl ApiServerUrl {
    /// The URL, with its scheme.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Value for Option<ApiServerUrl> {
    const EXPECTED: &'static str = "one URL such as https://10.0.0.1:6443, or nothing";

    fn parse(text: &str) -> Result<Self, String> {
        let mut urls = items(text);
        let (first, second) = (urls.next(), urls.next());
        match (first, second) {
            (None, _) => Ok(None),
            (Some(url), None) => {
                let host = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
                match host {
                    Some(host) if !host.is_empty() && !host.starts_with('/') => Ok(Some(ApiServerUrl(url.to_owned()))),
                    _ => Err(expected::<Self>()),
                }
            }
            (Some(_), Some(_)) => Err("one URL; failover to another is not implemented".to_owned()),
        }
    }

    fn render(&self) -> String {
        self.as_ref().map(|url| url.0.clone()).unwrap_or_default()
    }
}

/// Address and port of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeAddress(pub SocketAddr);

impl ServeAddress {
    /// This port on 127.0.0.1.
    #[must_use]
    pub fn localhost(port: u16) -> Self {
        Self(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }
}

impl Value for Option<ServeAddress> {
    const EXPECTED: &'static str = "an address and a port such as 127.0.0.1:9962, or :9962 for every address of the \
                                    host, or nothing";

    /// Accepts the forms that Go's `net.Listen` accepts, except names other than `localhost`.
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(None);
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(expected::<Self>)?;
        let port: u16 = port.parse().map_err(|_| expected::<Self>())?;
        let host = match host {
            "" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            host => host.trim_matches(['[', ']']).parse().map_err(|_| expected::<Self>())?,
        };
        if port == 0 {
            return Err(format!("{}; port 0 is not supported", Self::EXPECTED));
        }
        Ok(Some(ServeAddress(SocketAddr::new(host, port))))
    }

    fn render(&self) -> String {
        self.map(|address| address.0.to_string()).unwrap_or_default()
    }
}

/// A range of ports, inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortRange {
    /// The first port.
    pub first: u16,
    /// The last port; not less than the first.
    pub last: u16,
}

impl Value for PortRange {
    const EXPECTED: &'static str = "the first and the last port, such as 30000,32767";

    fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim_start_matches('[').trim_end_matches(']');
        let ports: Option<Vec<u16>> =
            text.split([',', '-', ' ']).filter(|port| !port.is_empty()).map(|port| port.trim().parse().ok()).collect();
        match ports.as_deref() {
            Some([first, last]) if *first > 0 && first <= last => Ok(Self { first: *first, last: *last }),
            _ => Err(expected::<Self>()),
        }
    }

    fn render(&self) -> String {
        format!("{},{}", self.first, self.last)
    }
}

/// A device name, or a prefix of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevicePattern {
    /// Whether matching devices are excluded.
    pub excludes: bool,
    /// The name or prefix.
    pub name: String,
    /// Whether `name` is a prefix.
    pub is_prefix: bool,
}

impl DevicePattern {
    fn matches(&self, device: &str) -> bool {
        if self.is_prefix { device.starts_with(&self.name) } else { device == self.name }
    }

    fn parse(text: &str) -> Option<Self> {
        let (excludes, rest) = text.strip_prefix('!').map_or((false, text), |rest| (true, rest));
        let (is_prefix, name) = rest.strip_suffix('+').map_or((false, rest), |name| (true, name));
        // The kernel's rule for interface names (`dev_valid_name`, net/core/dev.c), without `+` and `!`.
        let is_name = name.len() < 16 && !name.contains(['/', ':', '+', '!']) && !matches!(name, "." | "..");
        (is_name && (is_prefix || !name.is_empty())).then(|| Self { excludes, name: name.to_owned(), is_prefix })
    }
}

/// Device selection. The first pattern that matches decides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceSelector {
    /// The patterns, in order.
    pub patterns: Vec<DevicePattern>,
}

impl DeviceSelector {
    /// Whether a device is selected. `detected` says whether it would be selected by default; it applies if no pattern
    /// selects devices by name.
    #[must_use]
    pub fn selects(&self, device: &str, detected: bool) -> bool {
        match self.patterns.iter().find(|pattern| pattern.matches(device)) {
            Some(pattern) => !pattern.excludes,
            None => detected && self.is_automatic(),
        }
    }

    /// Whether no pattern selects devices by name.
    #[must_use]
    pub fn is_automatic(&self) -> bool {
        self.patterns.iter().all(|pattern| pattern.excludes)
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.render())
    }
}

impl std::str::FromStr for DeviceSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
}

impl Value for DeviceSelector {
    const EXPECTED: &'static str = "device names such as eth0, eth+ or !docker0, separated by commas or spaces";

    fn parse(text: &str) -> Result<Self, String> {
        let parse =
            |item: &str| DevicePattern::parse(item).ok_or_else(|| format!("{}; `{item}` is none", Self::EXPECTED));
        Ok(Self { patterns: items(text).map(parse).collect::<Result<_, _>>()? })
    }

    fn render(&self) -> String {
        let mut text = String::new();
        for DevicePattern { excludes, name, is_prefix } in &self.patterns {
            let separator = if text.is_empty() { "" } else { "," };
            let (not, rest) = (if *excludes { "!" } else { "" }, if *is_prefix { "+" } else { "" });
            // Writing to a String cannot fail.
            let _ = write!(text, "{separator}{not}{name}{rest}");
        }
        text
    }
}

/// Splits a list from a ConfigMap: Cilium's chart separates by spaces, its flags by commas.
fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(|separator: char| separator == ',' || separator.is_whitespace()).filter(|item| !item.is_empty())
}

fn joined<T: ToString>(items: &[T], separator: &str) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
}
