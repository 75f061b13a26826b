//! The CNI network configuration in `/etc/cni/net.d`.

use super::netconf::{Input, Role};
use super::spec::Version;
use serde_json::{Map, Value, json};

/// File name of the plugin, as in `type`.
pub const PLUGIN: &str = "cistern-cni";
/// Name of the plugin in configurations written for Cilium.
pub const ALIAS: &str = "cilium-cni";
/// All names of the plugin in configurations.
pub const NAMES: [&str; 2] = [PLUGIN, ALIAS];
/// The plugin that implements hostPort.
pub const PORTMAP: &str = "portmap";

/// Suffix of foreign files that are set aside; runtimes ignore it.
pub const SET_ASIDE: &str = ".cistern_bak";

/// The default configuration. Version 1.0.0, since `portmap` of many distributions does not support later ones. Without
/// `portmap` on the node it is not chained, because no pod would start.
#[must_use]
pub fn default_text(portmap: bool) -> String {
    let mut plugins = vec![json!({"type": PLUGIN})];
    if portmap {
        plugins.push(json!({"type": PORTMAP, "capabilities": {"portMappings": true}}));
    }
    written(&json!({"cniVersion": "1.0.0", "name": "cistern", "plugins": plugins}))
}

/// A configuration of the user's as it is written: one for a single plugin becomes a list of one.
///
/// # Errors
/// What is wrong with it, when a runtime could not use it, no plugin of it is ours, or ours would refuse it.
pub fn custom_text(text: &str) -> Result<String, String> {
    let conf: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
    let name = conf.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    let name = name.ok_or("name: missing; expected the name of the network")?;
    let conf = match (conf.get("plugins"), conf.get("type")) {
        (None, Some(_)) => json!({"cniVersion": conf.get("cniVersion"), "name": name, "plugins": [conf]}),
        _ => conf.clone(),
    };
    let plugins = conf.get("plugins").and_then(Value::as_array).filter(|plugins| !plugins.is_empty());
    let plugins = plugins.ok_or("plugins: missing; expected a list of at least one plugin")?;
    let ours: Vec<(usize, &Value)> = plugins.iter().enumerate().filter(|(_, plugin)| calls_us(plugin)).collect();
    if ours.is_empty() {
        return Err(format!(
            "plugins: none has the type {PLUGIN} (or {ALIAS}), so that pods would get no address of ours"
        ));
    }
    for (index, plugin) in ours {
        let refused = |reason: &dyn std::fmt::Display| format!("plugins[{index}].{reason}");
        let conf = Input::of(passed(&conf, plugin)).conf().map_err(|failure| refused(&failure))?;
        if conf.role == Role::Interface && index > 0 {
            let kind = &conf.plugin;
            return Err(refused(&format_args!("type: {kind:?}; expected it first: it creates the interface")));
        }
    }
    Ok(written(&conf))
}

fn calls_us(plugin: &Value) -> bool {
    let is_ours = |kind: Option<&Value>| kind.and_then(Value::as_str).is_some_and(|kind| NAMES.contains(&kind));
    is_ours(plugin.get("type")) || is_ours(plugin.pointer("/ipam/type"))
}

/// What a runtime passes to a plugin of a list: the plugin's own object with name and version of the list (CNI specification,
/// section 3). Of several versions it chooses the newest that it knows (section 1, `cniVersions`).
fn passed(list: &Value, plugin: &Value) -> Map<String, Value> {
    let mut conf = plugin.as_object().cloned().unwrap_or_default();
    let listed = list.get("cniVersions").and_then(Value::as_array).into_iter().flatten();
    let newest = listed.filter_map(|version| Version::parse(version.as_str()?)).max();
    let version = newest.map(|version| json!(version.name())).or_else(|| list.get("cniVersion").cloned());
    conf.insert("cniVersion".to_owned(), version.unwrap_or_default());
    conf.insert("name".to_owned(), list.get("name").cloned().unwrap_or_default());
    conf
}

fn written(conf: &Value) -> String {
    // Parsed or constructed values can always be serialised.
    format!("{}\n", serde_json::to_string_pretty(conf).unwrap_or_default())
}

/// Whether runtimes read a file of this name as configuration.
#[must_use]
pub fn is_configuration(name: &str) -> bool {
    !name.starts_with('.') && [".conf", ".conflist", ".json"].iter().any(|ending| name.ends_with(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(text: &str) -> Vec<String> {
        let conf: Value = serde_json::from_str(text).unwrap();
        let plugins = conf["plugins"].as_array().unwrap();
        plugins.iter().map(|plugin| plugin["type"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn ours_comes_first_and_portmap_is_chained_where_it_exists() {
        assert_eq!(types(&default_text(true)), ["cistern-cni", "portmap"]);
        assert_eq!(types(&default_text(false)), ["cistern-cni"]);
        assert_eq!(custom_text(&default_text(true)).unwrap(), default_text(true));
    }

    #[test]
    fn what_a_user_gives_must_call_us() {
        let single = r#"{"cniVersion": "1.0.0", "name": "x", "type": "cilium-cni", "mtu": 1400}"#;
        assert_eq!(types(&custom_text(single).unwrap()), ["cilium-cni"]);
        let ipam =
            r#"{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "ptp", "ipam": {"type": "cistern-cni"}}]}"#;
        assert_eq!(types(&custom_text(ipam).unwrap()), ["ptp"]);
        let versions =
            r#"{"cniVersions": ["1.0.0", "9.9.9"], "name": "x", "plugins": [{"type": "cistern-cni", "mtu": 0}]}"#;
        assert_eq!(types(&custom_text(versions).unwrap()), ["cistern-cni"]);
        for (text, part) in [
            ("plugins:", "no JSON"),
            (r#"{"plugins": [{"type": "cistern-cni"}]}"#, "name"),
            (r#"{"name": "x", "plugins": []}"#, "plugins: missing"),
            (r#"{"name": "x", "plugins": [{"type": "bridge"}]}"#, "none has the type cistern-cni"),
            // As the plugin would refuse it.
            (r#"{"name": "x", "type": "cistern-cni"}"#, "plugins[0].cniVersion: absent; expected one of 0.3.1"),
            (r#"{"cniVersion": "0.2.0", "name": "x", "type": "cistern-cni"}"#, "plugins[0].cniVersion: \"0.2.0\""),
            (r#"{"cniVersion": "1.0.0", "name": "a b", "type": "cistern-cni"}"#, "plugins[0].name: \"a b\""),
            (
                r#"{"cniVersion": "1.0.0", "name": "x", "type": "cistern-cni", "mtu": "1450"}"#,
                "plugins[0].mtu: \"1450\"",
            ),
            (
                r#"{"cniVersion": "1.0.0", "name": "x", "type": "cistern-cni", "ipam": {"type": "host-local"}}"#,
                "plugins[0].ipam.type: \"host-local\"",
            ),
            (
                r#"{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "tuning"}, {"type": "cistern-cni"}]}"#,
                "plugins[1].type: \"cistern-cni\"; expected it first",
            ),
        ] {
            let error = custom_text(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn only_what_runtimes_read_is_a_configuration() {
        for name in ["10-kindnet.conflist", "99-loopback.conf", "x.json"] {
            assert!(is_configuration(name) && !is_configuration(&format!("{name}{SET_ASIDE}")), "{name}");
        }
        assert!(!is_configuration(".05-cistern.conflist.new") && !is_configuration(".hidden.conf"));
        assert!(!is_configuration("README"));
    }
}
