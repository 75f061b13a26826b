//! CNI specification 1.1.0: verbs and their variables, the result in each version's form, the error object.
//!
//! <https://www.cni.dev/docs/spec/>; section numbers are those of that document.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

/// Supported versions of the specification, oldest first.
pub const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A supported version, ordered by age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// 0.3.1
    V0_3_1,
    /// 0.4.0: CHECK
    V0_4_0,
    /// 1.0.0: results without the `version` of an address
    V1_0_0,
    /// 1.1.0: STATUS and GC
    V1_1_0,
}

impl Version {
    /// The newest; used for errors about a configuration without one.
    pub const NEWEST: Self = Self::V1_1_0;

    /// As written in `cniVersion`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// Reads `cniVersion`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0].into_iter().find(|version| version.name() == text)
    }
}

/// Codes of section 5, "Error": below 100 the specification's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Incompatible CNI version.
    Version = 1,
    /// A field of the configuration that is not supported; the message names it and its value.
    UnsupportedField = 2,
    /// The container is unknown or does not exist.
    UnknownContainer = 3,
    /// A necessary environment variable is absent or invalid; the message names it.
    Environment = 4,
    /// Input or output failed.
    Io = 5,
    /// Input could not be decoded.
    Decode = 6,
    /// The network configuration is invalid.
    Configuration = 7,
    /// A transient condition: the same call may succeed later.
    TryAgainLater = 11,
    /// STATUS: no ADD can be served.
    NotAvailable = 50,
    /// CHECK: an interface differs from its state after ADD.
    Difference = 100,
    /// A kernel call failed.
    Kernel = 101,
    /// The agent refused, permanently.
    Agent = 102,
}

/// The error object (section 5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ErrorObject {
    /// Version of this object.
    pub cni_version: &'static str,
    /// See [`Code`].
    pub code: u32,
    /// Summary of the error.
    pub msg: String,
    /// Details.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub details: String,
}

/// A failure to be reported as [`ErrorObject`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The code.
    pub code: Code,
    /// What is wrong: the field or step, the value, what was expected.
    pub message: String,
    /// What is still in force, or other findings.
    pub details: String,
}

impl Failure {
    /// A failure without details.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: String::new() }
    }

    /// Adds details.
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// The error object for the runtime.
    #[must_use]
    pub fn object(&self, version: Version) -> ErrorObject {
        ErrorObject {
            cni_version: version.name(),
            code: self.code as u32,
            msg: self.message.clone(),
            details: self.details.clone(),
        }
    }
}

/// The verbs (section 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Attach a container.
    Add,
    /// Detach a container.
    Del,
    /// Check an attachment.
    Check,
    /// Report readiness for ADD.
    Status,
    /// Release all attachments that are not listed.
    Gc,
    /// Report supported versions.
    Version,
}

impl Verb {
    /// As in `CNI_COMMAND`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Status => "STATUS",
            Self::Gc => "GC",
            Self::Version => "VERSION",
        }
    }
}

/// Reads `CNI_COMMAND`.
///
/// # Errors
/// Another word.
pub fn verb(command: &str) -> Result<Verb, Failure> {
    [Verb::Add, Verb::Del, Verb::Check, Verb::Status, Verb::Gc, Verb::Version]
        .into_iter()
        .find(|verb| verb.name() == command)
        .ok_or_else(|| {
            let message = format!("CNI_COMMAND: {command:?}; expected ADD, DEL, CHECK, STATUS, GC or VERSION");
            Failure::new(Code::Environment, message)
        })
}

/// The variables of an attachment (section 2, "Parameters").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// `CNI_NETNS`; empty only for DEL, whose namespace may not exist any more.
    pub netns: String,
    /// `CNI_ARGS`
    pub args: BTreeMap<String, String>,
}

/// Longest name of a network device, without the terminating zero.
const IFNAME_LENGTH: usize = 15;

impl Call {
    /// Parses the variables that a verb requires.
    ///
    /// # Errors
    /// [`Code::Environment`] naming the variable, its value and what was expected.
    pub fn parse(verb: Verb, variable: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let fail = |name: &str, value: &str, expected: &str| {
            Failure::new(Code::Environment, format!("{name}: {value:?}; expected {expected}"))
        };
        let required = |name: &str, expected: &str| {
            variable(name).filter(|value| !value.is_empty()).ok_or_else(|| fail(name, "", expected))
        };
        let container_id = required("CNI_CONTAINERID", "the ID of the container")?;
        // Section 2: starts with an alphanumeric character, then '_', '.' and '-' too.
        if !container_id.starts_with(|first: char| first.is_ascii_alphanumeric())
            || !container_id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
        {
            return Err(fail("CNI_CONTAINERID", &container_id, "letters, digits, '_', '.' and '-'"));
        }
        let ifname = required("CNI_IFNAME", "the name of the pod's interface")?;
        if ifname.len() > IFNAME_LENGTH
            // The loopback device exists in every namespace and cannot be replaced.
            || matches!(ifname.as_str(), "." | ".." | "lo")
            || ifname.chars().any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
        {
            return Err(fail("CNI_IFNAME", &ifname, "at most 15 characters without '/', ':' and spaces, not lo"));
        }
        let netns = match verb {
            Verb::Del => variable("CNI_NETNS").unwrap_or_default(),
            _ => required("CNI_NETNS", "the path of the pod's network namespace")?,
        };
        let args = match verb {
            // DEL does not use them, and must not fail because of a value that made its ADD fail.
            Verb::Del => BTreeMap::new(),
            _ => args(&variable("CNI_ARGS").unwrap_or_default())?,
        };
        Ok(Self { container_id, ifname, netns, args })
    }

    /// The pod as named by Kubernetes' runtimes: namespace, name, UID.
    #[must_use]
    pub fn pod(&self) -> Option<(String, String, Option<String>)> {
        let arg = |name: &str| self.args.get(name).filter(|value| !value.is_empty()).cloned();
        Some((arg("K8S_POD_NAMESPACE")?, arg("K8S_POD_NAME")?, arg("K8S_POD_UID")))
    }
}

/// `KEY=VALUE;KEY=VALUE`
fn args(text: &str) -> Result<BTreeMap<String, String>, Failure> {
    text.split(';')
        .filter(|pair| !pair.is_empty())
        .map(|pair| match pair.split_once('=') {
            Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
            None => Err(Failure::new(
                Code::Environment,
                format!("CNI_ARGS: {pair:?} in {text:?}; expected KEY=VALUE pairs separated by ';'"),
            )),
        })
        .collect()
}

/// An interface of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultInterface {
    /// Its name.
    pub name: String,
    /// Its hardware address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Its MTU in bytes; 1.1.0 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Path of its network namespace; none for the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
}

/// An address of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultIp {
    /// `4` or `6`; before 1.0.0 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Position in `interfaces`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// With prefix length.
    pub address: IpNet,
    /// Gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A route of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultRoute {
    /// The destination.
    pub dst: IpNet,
    /// Next hop.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
}

/// The result of ADD (section 5, "ADD Success").
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AddResult {
    /// Version of this object.
    pub cni_version: String,
    /// Host side first. None in the role of an IPAM plugin.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interfaces: Vec<ResultInterface>,
    /// Addresses.
    #[serde(default)]
    pub ips: Vec<ResultIp>,
    /// Routes.
    #[serde(default)]
    pub routes: Vec<ResultRoute>,
    /// As configured.
    #[serde(default)]
    pub dns: Value,
}

/// The result of ADD, independent of its version.
#[derive(Debug, Clone, PartialEq)]
pub struct Attached {
    /// The veth pair; `None` in the role of an IPAM plugin.
    pub pair: Option<AttachedPair>,
    /// The pod's address, as a /32 on our interfaces. Other plugins need the prefix that contains the gateway, since
    /// they add routes via it.
    pub address: ipnet::Ipv4Net,
    /// Its gateway.
    pub router: std::net::Ipv4Addr,
    /// DNS settings as configured.
    pub dns: Option<Value>,
}

/// The veth pair of ADD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachedPair {
    /// Host side: name and hardware address.
    pub host: (String, String),
    /// Pod side: name and hardware address.
    pub pod: (String, String),
    /// Path of the pod's namespace.
    pub netns: String,
    /// MTU of both sides in bytes.
    pub mtu: u32,
}

impl AttachedPair {
    fn interfaces(&self, version: Version) -> Vec<ResultInterface> {
        let mtu = (version >= Version::V1_1_0).then_some(self.mtu);
        let interface = |(name, mac): &(String, String), sandbox| ResultInterface {
            name: name.clone(),
            mac: Some(mac.clone()),
            mtu,
            sandbox,
        };
        vec![interface(&self.host, None), interface(&self.pod, Some(self.netns.clone()))]
    }
}

impl Attached {
    /// The result in the form of a version.
    #[must_use]
    pub fn result(&self, version: Version) -> AddResult {
        let router = IpAddr::V4(self.router);
        AddResult {
            cni_version: version.name().to_owned(),
            interfaces: self.pair.as_ref().map(|pair| pair.interfaces(version)).unwrap_or_default(),
            ips: vec![ResultIp {
                version: (version < Version::V1_0_0).then(|| "4".to_owned()),
                interface: self.pair.as_ref().map(|_| 1),
                address: IpNet::V4(self.address),
                gateway: Some(router),
            }],
            routes: vec![ResultRoute { dst: default_route(), gw: Some(router) }],
            dns: self.dns.clone().unwrap_or_else(|| Value::Object(serde_json::Map::new())),
        }
    }
}

fn default_route() -> IpNet {
    IpNet::V4(ipnet::Ipv4Net::new_assert(std::net::Ipv4Addr::UNSPECIFIED, 0))
}

/// The answer to VERSION (section 5).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct VersionResult<'a> {
    /// As requested.
    pub cni_version: &'a str,
    /// Supported versions.
    pub supported_versions: [&'static str; 4],
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(pairs: &'static [(&'static str, &'static str)]) -> impl Fn(&str) -> Option<String> {
        move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    }

    const GOOD: &[(&str, &str)] = &[
        ("CNI_CONTAINERID", "abc-1"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/run/netns/p"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=cart-0;K8S_POD_UID=u-1"),
    ];

    #[test]
    fn variables_become_a_call_and_name_the_pod() {
        let call = Call::parse(Verb::Add, environment(GOOD)).unwrap();
        assert_eq!(call.pod(), Some(("shop".into(), "cart-0".into(), Some("u-1".into()))));
        assert_eq!((call.container_id.as_str(), call.netns.as_str()), ("abc-1", "/run/netns/p"));
    }

    #[test]
    fn each_bad_variable_is_named_with_code_4() {
        for (name, value) in [
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "-a"),
            ("CNI_CONTAINERID", "a/b"),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", "a-name-of-sixteen"),
            ("CNI_IFNAME", "eth:0"),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "lo"),
            ("CNI_NETNS", ""),
            ("CNI_ARGS", "a=b;c"),
        ] {
            let failure =
                Call::parse(Verb::Add, |key| if key == name { Some(value.to_owned()) } else { environment(GOOD)(key) })
                    .unwrap_err();
            assert_eq!(failure.code as u32, 4, "{name}={value}");
            assert!(failure.message.starts_with(name), "{}", failure.message);
        }
        // A DEL has no namespace if the pod's no longer exists.
        let call = Call::parse(Verb::Del, |key| if key == "CNI_NETNS" { None } else { environment(GOOD)(key) });
        assert_eq!(call.unwrap().netns, "");
        // Nor does it fail because of arguments that it does not use.
        let call = Call::parse(Verb::Del, |key| match key {
            "CNI_ARGS" => Some("a=b;c".to_owned()),
            _ => environment(GOOD)(key),
        });
        assert_eq!(call.unwrap().container_id, "abc-1");
    }

    #[test]
    fn a_result_has_the_form_of_its_version() {
        let attached = Attached {
            pair: Some(AttachedPair {
                host: ("cst1".into(), "0a:00:00:00:00:01".into()),
                pod: ("eth0".into(), "0a:00:00:00:00:02".into()),
                netns: "/run/netns/p".into(),
                mtu: 1400,
            }),
            address: "10.244.1.5/32".parse().unwrap(),
            router: "10.244.1.1".parse().unwrap(),
            dns: None,
        };
        let json = |version| serde_json::to_value(attached.result(version)).unwrap();
        let old = json(Version::V0_3_1);
        assert_eq!(old["ips"][0]["version"], "4");
        assert_eq!(old["interfaces"][1].get("mtu"), None);
        let new = json(Version::V1_1_0);
        assert_eq!(new["ips"][0].get("version"), None);
        assert_eq!(new["interfaces"][1]["mtu"], 1400);
        assert_eq!(new["ips"][0]["address"], "10.244.1.5/32");
        assert_eq!(new["ips"][0]["interface"], 1);
        assert_eq!(new["routes"][0]["dst"], "0.0.0.0/0");
        assert_eq!(new["interfaces"][0].get("sandbox"), None);

        let address_alone = Attached { pair: None, address: "10.244.1.5/24".parse().unwrap(), ..attached };
        let ipam = serde_json::to_value(address_alone.result(Version::V1_0_0)).unwrap();
        assert_eq!(ipam.get("interfaces"), None);
        assert_eq!(ipam["ips"], serde_json::json!([{"address": "10.244.1.5/24", "gateway": "10.244.1.1"}]));
        assert_eq!(ipam["routes"], serde_json::json!([{"dst": "0.0.0.0/0", "gw": "10.244.1.1"}]));
    }
}
