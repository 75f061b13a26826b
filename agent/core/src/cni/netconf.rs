//! The network configuration that a runtime passes on standard input (CNI specification, section 1).
//!
//! Each verb reads as much of it as it needs:
//!
//! | verb | needs | what is wrong with the rest |
//! |---|---|---|
//! | ADD, CHECK, STATUS | every field that ADD uses | is refused with field, value and expectation |
//! | GC | `cniVersion`, `name`, the list of valid attachments | is ignored |
//! | DEL, VERSION | nothing | is ignored |
//!
//! A DEL that fails for its input fails for ever: the runtime repeats it with the same input, and the pod stays `Terminating`.
//! A GC that misreads its list releases the addresses of running pods.

use super::conflist::NAMES;
use super::spec::{Code, Failure, VERSIONS, Version};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The role in which the plugin is called (`architecture` decision 16).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `type` is ours: address and interface.
    Interface,
    /// `ipam.type` names us, `type` another plugin, which creates the interface and calls us for its address.
    Ipam,
}

/// Standard input, if it is a JSON object.
#[derive(Debug, Clone, PartialEq)]
pub struct Input {
    fields: Map<String, Value>,
    /// Why it is not a JSON object.
    unusable: Option<String>,
}

/// A configuration that is valid for ADD.
#[derive(Debug, Clone, PartialEq)]
pub struct NetConf {
    /// Version of the configuration and of the result.
    pub version: Version,
    /// Name of the network.
    pub name: String,
    /// The plugin that creates the interface.
    pub plugin: String,
    /// Our role.
    pub role: Role,
    /// MTU of the pod's interface in bytes; default: the agent's.
    pub mtu: Option<u32>,
    /// Result of the previous plugin, or of ADD.
    pub prev_result: Option<Value>,
    /// DNS settings, passed through.
    pub dns: Option<Value>,
    /// Paths of the agent's socket and of the queue.
    pub paths: Paths,
}

/// Paths that a configuration may name; Cistern's own fields.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Paths {
    /// `socket-path`: the agent's socket, if not the default.
    pub socket: Option<PathBuf>,
    /// `queue-dir`: the directory for DELs queued while the agent is down, if not the default.
    pub queue: Option<PathBuf>,
}

/// The input of GC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Garbage {
    /// Name of the network.
    pub network: String,
    /// Attachments of the network that are in use.
    pub valid: Vec<ValidAttachment>,
    /// Path of the agent's socket.
    pub paths: Paths,
}

/// A valid attachment for GC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidAttachment {
    /// `CNI_CONTAINERID`
    pub container_id: String,
    /// `CNI_IFNAME`
    pub ifname: String,
}

/// Plugins whose pods are directly on an external network: their packets may leave by a device of the node, but bypass
/// its routing, so that replies to the node's address would not reach the pod.
const BESIDE_THE_NODE: [&str; 4] = ["host-device", "ipvlan", "macvlan", "vlan"];

/// Smallest and largest MTU of an interface of ours: an IPv4 host must accept 576 bytes (RFC 791, section 3.1), and no IPv4 packet is
/// larger than 65,535.
const MTU: std::ops::RangeInclusive<u64> = 576..=65_535;

/// Both keys of the list of GC: that of specification 1.1.0 and the one that libcni also writes.
const VALID: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// Longer values are cut in messages.
const SHOWN: usize = 80;

impl NetConf {
    /// Whether the pod's packets are routed by the node, and can be masqueraded. True for our interfaces, and for those
    /// of plugins such as `bridge` and `ptp`.
    #[must_use]
    pub fn is_routed(&self) -> bool {
        !BESIDE_THE_NODE.contains(&self.plugin.as_str())
    }
}

impl Input {
    /// Parses standard input.
    #[must_use]
    pub fn read(stdin: &[u8]) -> Self {
        match serde_json::from_slice::<Map<String, Value>>(stdin) {
            Ok(fields) => Self::of(fields),
            Err(error) => Self::unreadable(error.to_string()),
        }
    }

    /// Wraps an object that is parsed already.
    #[must_use]
    pub fn of(fields: Map<String, Value>) -> Self {
        Self { fields, unusable: None }
    }

    /// Standard input that could not be read.
    #[must_use]
    pub fn unreadable(reason: impl Into<String>) -> Self {
        Self { fields: Map::new(), unusable: Some(reason.into()) }
    }

    /// The value of a field; `null` counts as absent.
    fn given(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// The version that errors are written in: the requested one if supported, else the newest.
    #[must_use]
    pub fn answer_version(&self) -> Version {
        self.version().unwrap_or(Version::NEWEST)
    }

    /// The version that VERSION answers in: as asked for. Some runtimes pass no configuration (section 2, "VERSION").
    #[must_use]
    pub fn version_asked_for(&self) -> &str {
        let asked = self.given("cniVersion").and_then(Value::as_str).filter(|version| !version.is_empty());
        asked.unwrap_or_else(|| Version::NEWEST.name())
    }

    /// The version of the configuration.
    ///
    /// # Errors
    /// [`Code::Decode`] for no JSON object, [`Code::Version`] for a version that is not supported.
    pub fn version(&self) -> Result<Version, Failure> {
        self.usable()?;
        self.given("cniVersion").and_then(Value::as_str).and_then(Version::parse).ok_or_else(|| {
            let asked = shown(self.given("cniVersion"));
            Failure::new(Code::Version, format!("cniVersion: {asked}; expected one of {}", VERSIONS.join(", ")))
        })
    }

    fn usable(&self) -> Result<(), Failure> {
        let Some(reason) = &self.unusable else { return Ok(()) };
        let message = format!("network configuration on standard input is not usable JSON: {reason}");
        let details = "expected an object with cniVersion, name and type; nothing was changed";
        Err(Failure::new(Code::Decode, message).with_details(details))
    }

    /// The configuration of an ADD.
    ///
    /// # Errors
    /// The first field that ADD could not be carried out with: its value, and what was expected.
    pub fn conf(&self) -> Result<NetConf, Failure> {
        let version = self.version()?;
        let name = self.name()?.to_owned();
        let (plugin, role) = self.role()?;
        Ok(NetConf {
            version,
            name,
            plugin,
            role,
            // The MTU is that of the plugin that creates the interface.
            mtu: if role == Role::Interface { self.mtu()? } else { None },
            prev_result: self.given("prevResult").cloned(),
            dns: self.dns()?,
            paths: Paths { socket: self.path("socket-path")?, queue: self.path("queue-dir")? },
        })
    }

    /// The valid paths; defaults replace the others.
    #[must_use]
    pub fn usable_paths(&self) -> Paths {
        Paths {
            socket: self.path("socket-path").unwrap_or_default(),
            queue: self.path("queue-dir").unwrap_or_default(),
        }
    }

    /// The input of GC.
    ///
    /// # Errors
    /// Unless the network and every attachment of the list are known, nothing may be released.
    pub fn garbage(&self) -> Result<Garbage, Failure> {
        let kept = |failure: Failure| failure.with_details("nothing was released");
        self.usable().map_err(kept)?;
        let network = self.name().map_err(kept)?.to_owned();
        Ok(Garbage { network, valid: self.valid().map_err(kept)?, paths: self.usable_paths() })
    }

    /// The attachments of both lists: one that is missing in either is not known to be garbage.
    fn valid(&self) -> Result<Vec<ValidAttachment>, Failure> {
        const EXPECTED: &str = "the list of the attachments that are in use";
        let mut valid = Vec::new();
        let mut lists = VALID.iter().filter_map(|key| Some((key, self.fields.get(*key)?))).peekable();
        if lists.peek().is_none() {
            return Err(wrong(VALID[0], None, EXPECTED));
        }
        for (key, value) in lists {
            let list = value.as_array().ok_or_else(|| wrong(key, Some(value), EXPECTED))?;
            for (index, entry) in list.iter().enumerate() {
                let text = |field: &str| entry.get(field).and_then(Value::as_str).filter(|text| !text.is_empty());
                let (Some(container_id), Some(ifname)) = (text("containerID"), text("ifname")) else {
                    let expected = "an object with containerID and ifname";
                    return Err(wrong(&format!("{key}[{index}]"), Some(entry), expected));
                };
                valid.push(ValidAttachment { container_id: container_id.to_owned(), ifname: ifname.to_owned() });
            }
        }
        Ok(valid)
    }

    fn name(&self) -> Result<&str, Failure> {
        let value = self.given("name");
        let is_name = |name: &&str| {
            name.starts_with(|first: char| first.is_ascii_alphanumeric())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
        };
        value
            .and_then(Value::as_str)
            .filter(is_name)
            .ok_or_else(|| wrong("name", value, "a network name of letters, digits, '_', '.' and '-'"))
    }

    /// The plugin that creates the interface, and our role.
    fn role(&self) -> Result<(String, Role), Failure> {
        let is_ours = |name: &str| NAMES.contains(&name);
        let text = |field: &str, value: Option<&Value>| match value {
            None => Ok(String::new()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(_) => Err(wrong(field, value, "the name of a plugin")),
        };
        let plugin = text("type", self.given("type"))?;
        let ipam = match self.given("ipam") {
            None => String::new(),
            Some(Value::Object(ipam)) => text("ipam.type", ipam.get("type").filter(|kind| !kind.is_null()))?,
            value @ Some(_) => return Err(wrong("ipam", value, "an object with the type of the IPAM plugin")),
        };
        let message = match (is_ours(&plugin), is_ours(&ipam)) {
            (true, false) if ipam.is_empty() => return Ok((plugin, Role::Interface)),
            (false, true) => return Ok((plugin, Role::Ipam)),
            (true, true) => format!("ipam.type: {ipam:?} beside type {plugin:?}; expected the name in one of the two"),
            (true, false) => format!(
                "ipam.type: {ipam:?}; expected none: the addresses come from the Cistern agent (delegation is ipam mode \
                 delegated-plugin)"
            ),
            (false, false) => {
                let names = NAMES.join(", ");
                format!("type: {plugin:?}, ipam.type: {ipam:?}; expected one of {names} in one of the two")
            }
        };
        Err(Failure::new(Code::UnsupportedField, message))
    }

    fn mtu(&self) -> Result<Option<u32>, Failure> {
        let value = self.given("mtu");
        match value.map(Value::as_u64) {
            None | Some(Some(0)) => Ok(None),
            Some(Some(mtu)) if MTU.contains(&mtu) => Ok(u32::try_from(mtu).ok()),
            _ => Err(wrong("mtu", value, "a number from 576 to 65535, or 0 for the agent's default")),
        }
    }

    /// The runtime reads them back from our result: one that it cannot read fails there, after all the work, without naming
    /// the field.
    fn dns(&self) -> Result<Option<Value>, Failure> {
        let Some(value) = self.given("dns") else { return Ok(None) };
        let Value::Object(dns) = value else { return Err(wrong("dns", Some(value), "an object")) };
        for field in ["nameservers", "search", "options"] {
            let value = dns.get(field).filter(|value| !value.is_null());
            let is_list = |value: &Value| value.as_array().is_some_and(|list| list.iter().all(Value::is_string));
            if value.is_some_and(|value| !is_list(value)) {
                return Err(wrong(&format!("dns.{field}"), value, "a list of strings"));
            }
        }
        let domain = dns.get("domain").filter(|value| !value.is_null());
        if domain.is_some_and(|domain| !domain.is_string()) {
            return Err(wrong("dns.domain", domain, "a string"));
        }
        Ok(Some(value.clone()))
    }

    fn path(&self, field: &str) -> Result<Option<PathBuf>, Failure> {
        let Some(value) = self.given(field) else { return Ok(None) };
        let path = value.as_str().map(Path::new).filter(|path| path.is_absolute());
        path.map(|path| Some(path.to_owned())).ok_or_else(|| wrong(field, Some(value), "an absolute path"))
    }
}

fn wrong(field: &str, value: Option<&Value>, expected: &str) -> Failure {
    Failure::new(Code::Configuration, format!("{field}: {}; expected {expected}", shown(value)))
}

/// A value as messages show it.
fn shown(value: Option<&Value>) -> String {
    let Some(value) = value else { return "absent".to_owned() };
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        None => text,
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn input(text: &str) -> Input {
        Input::read(text.as_bytes())
    }

    fn with(field: &str, value: Value) -> Input {
        let mut conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "cistern-cni"});
        conf[field] = value;
        input(&conf.to_string())
    }

    #[test]
    fn each_field_that_add_cannot_use_is_named_with_its_value_and_what_was_expected() {
        let refused = |input: Input| {
            let failure = input.conf().unwrap_err();
            (failure.code as u32, failure.message)
        };
        for text in ["", "{\"cniVersion\": ", "[]", "\"text\"", "null", "\u{0}"] {
            assert_eq!(refused(input(text)).0, 6, "{text}");
        }
        for (field, value, code, expected) in [
            ("cniVersion", json!("0.2.0"), 1, "cniVersion: \"0.2.0\"; expected one of 0.3.1"),
            ("cniVersion", json!(null), 1, "cniVersion: absent; expected one of 0.3.1"),
            ("cniVersion", json!(1.0), 1, "cniVersion: 1.0;"),
            ("name", json!(""), 7, "name: \"\"; expected a network name"),
            ("name", json!("../n"), 7, "name: \"../n\";"),
            ("name", json!(7), 7, "name: 7;"),
            ("name", json!(null), 7, "name: absent;"),
            ("type", json!(["cistern-cni"]), 7, "type: [\"cistern-cni\"]; expected the name of a plugin"),
            ("type", json!("bridge"), 2, "type: \"bridge\", ipam.type: \"\"; expected one of"),
            ("ipam", json!("cistern-cni"), 7, "ipam: \"cistern-cni\"; expected an object"),
            ("ipam", json!({"type": 5}), 7, "ipam.type: 5; expected the name of a plugin"),
            ("ipam", json!({"type": "cistern-cni"}), 2, "ipam.type: \"cistern-cni\" beside"),
            ("ipam", json!({"type": "host-local"}), 2, "ipam.type: \"host-local\"; expected none"),
            ("mtu", json!("1450"), 7, "mtu: \"1450\"; expected a number from 576 to 65535, or 0"),
            ("mtu", json!(100), 7, "mtu: 100;"),
            ("mtu", json!(1450.5), 7, "mtu: 1450.5;"),
            ("mtu", json!(-1), 7, "mtu: -1;"),
            ("mtu", json!(65_536), 7, "mtu: 65536;"),
            ("dns", json!("10.96.0.10"), 7, "dns: \"10.96.0.10\"; expected an object"),
            ("dns", json!({"nameservers": "10.96.0.10"}), 7, "dns.nameservers: \"10.96.0.10\"; expected a list"),
            ("dns", json!({"domain": 1}), 7, "dns.domain: 1; expected a string"),
            ("socket-path", json!("cistern.sock"), 7, "socket-path: \"cistern.sock\"; expected an absolute path"),
            ("queue-dir", json!(5), 7, "queue-dir: 5; expected an absolute path"),
        ] {
            let (given, message) = refused(with(field, value));
            assert_eq!(given, code, "{message}");
            assert!(message.starts_with(expected), "{message:?} does not start with {expected:?}");
        }
        let long = refused(with("name", json!("é".repeat(1_000)))).1;
        assert!(long.chars().count() < 200 && long.contains("é…"), "{long}");
    }

    #[test]
    fn what_add_does_not_use_is_not_its_business() {
        for (field, value) in [
            ("capabilities", json!("none")),
            ("args", json!([1])),
            ("runtimeConfig", json!(5)),
            ("cni.dev/valid-attachments", json!("damaged")),
            ("others", json!(1)),
            ("ipam", json!({})),
            ("ipam", json!(null)),
            ("mtu", json!(null)),
            ("mtu", json!(0)),
        ] {
            let conf = with(field, value.clone()).conf();
            assert!(
                conf.as_ref().is_ok_and(|conf| conf.role == Role::Interface && conf.mtu.is_none()),
                "{value} {conf:?}"
            );
        }
        assert_eq!(with("mtu", json!(1450)).conf().unwrap().mtu, Some(1450));
        for (plugin, ipam, routed) in [("bridge", "cistern-cni", true), ("macvlan", "cilium-cni", false)] {
            let conf = json!({"cniVersion": "1.0.0", "name": "n", "mtu": "64", "type": plugin, "ipam": {"type": ipam}});
            let conf = input(&conf.to_string()).conf().unwrap();
            assert_eq!((conf.role, conf.is_routed()), (Role::Ipam, routed), "whatever its MTU");
        }
    }

    #[test]
    fn answers_have_the_version_that_was_asked_for_or_the_newest() {
        assert_eq!(input(r#"{"cniVersion":"0.4.0","mtu":"1450"}"#).version_asked_for(), "0.4.0");
        assert_eq!(input(r#"{"cniVersion":"0.4.0","mtu":"1450"}"#).answer_version(), Version::V0_4_0);
        assert_eq!(input(r#"{"cniVersion":"0.2.0"}"#).version_asked_for(), "0.2.0");
        for text in ["", "{}", "no JSON", r#"{"cniVersion":""}"#, r#"{"cniVersion":5}"#] {
            assert_eq!(input(text).version_asked_for(), "1.1.0", "{text}");
            assert_eq!(input(text).answer_version(), Version::NEWEST, "{text}");
        }
        assert_eq!(input(r#"{"cniVersion":"0.2.0"}"#).answer_version(), Version::NEWEST);
    }

    #[test]
    fn paths_that_cannot_be_used_leave_the_usual_ones_in_force() {
        let paths = |value: Value| with("socket-path", value).usable_paths().socket;
        for value in [json!(5), json!(null), json!(""), json!("cistern.sock"), json!({})] {
            assert_eq!(paths(value.clone()), None, "{value}");
        }
        assert_eq!(paths(json!("/run/other.sock")), Some(PathBuf::from("/run/other.sock")));
        assert_eq!(input("no JSON").usable_paths(), Paths::default());
    }

    proptest::proptest! {
        /// A damaged configuration is refused in words, or is none of its business; it ends no verb.
        #[test]
        fn no_input_ends_the_process(at in 0_usize..200, byte: u8, cut in 0_usize..200) {
            let mut stdin = with("mtu", json!(1450)).fields.into_iter().collect::<Map<_, _>>();
            stdin.insert("cni.dev/valid-attachments".to_owned(), json!([{"containerID": "c1", "ifname": "eth0"}]));
            let mut stdin = serde_json::to_vec(&stdin).unwrap();
            if let Some(damaged) = stdin.get_mut(at) {
                *damaged = byte;
            }
            stdin.truncate(200_usize.saturating_sub(cut).max(1));
            let input = Input::read(&stdin);
            proptest::prop_assert!(input.conf().err().is_none_or(|failure| !failure.message.is_empty()));
            proptest::prop_assert!(input.garbage().err().is_none_or(|failure| failure.details == "nothing was released"));
            proptest::prop_assert!(VERSIONS.contains(&input.answer_version().name()));
            proptest::prop_assert!(input.usable_paths().socket.is_none_or(|path| path.is_absolute()));
        }
    }

    #[test]
    fn gc_is_refused_unless_network_and_every_attachment_are_known() {
        let list = |value: Value| with("cni.dev/valid-attachments", value);
        let c1 = json!({"containerID": "c1", "ifname": "eth0", "more": true});
        for (input, expected) in [
            (with("mtu", json!(0)), "cni.dev/valid-attachments: absent; expected the list"),
            (list(json!(null)), "cni.dev/valid-attachments: null; expected the list"),
            (list(json!({})), "cni.dev/valid-attachments: {}; expected the list"),
            (list(json!([c1, null])), "cni.dev/valid-attachments[1]: null; expected an object"),
            (list(json!([{"containerID": "c1"}])), "cni.dev/valid-attachments[0]: {"),
            (list(json!([{"containerID": "c1", "ifname": 0}])), "cni.dev/valid-attachments[0]: {"),
            (list(json!([{"containerID": "", "ifname": "eth0"}])), "cni.dev/valid-attachments[0]: {"),
            (with("cni.dev/attachments", json!("c1")), "cni.dev/attachments: \"c1\"; expected the list"),
            (input(r#"{"cniVersion":"1.1.0","cni.dev/valid-attachments":[]}"#), "name: absent"),
        ] {
            let failure = input.garbage().unwrap_err();
            assert_eq!((failure.code as u32, failure.details.as_str()), (7, "nothing was released"), "{failure}");
            assert!(failure.message.starts_with(expected), "{failure}");
        }
        assert_eq!(input("[]").garbage().unwrap_err().code as u32, 6);
        let both = json!({
            "name": "n", "mtu": "1450", "type": 5,
            "cni.dev/valid-attachments": [c1], "cni.dev/attachments": [{"containerID": "c2", "ifname": "eth0"}],
        });
        let garbage = input(&both.to_string()).garbage().unwrap();
        assert_eq!(garbage.network, "n");
        let ids: Vec<&str> = garbage.valid.iter().map(|valid| valid.container_id.as_str()).collect();
        assert_eq!(ids, ["c1", "c2"]);
        assert_eq!(list(json!([])).garbage().unwrap().valid, []);
    }
}
