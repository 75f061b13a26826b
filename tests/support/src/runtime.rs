//! A minimal container runtime: it calls a list of CNI plugins as `libcni` does.
//!
//! ADD calls the plugins in order and passes each the previous result; DEL calls them in reverse order, with the result
//! of ADD or, if the runtime lost it, without; CHECK passes that result; for versions below 1.1.0, GC is a DEL of all
//! attachments that are not valid. The caller manages network namespaces. There is no locking and no persistent state.

use crate::lab::Machine;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Path of the reference plugins on Debian (package `containernetworking-plugins`).
pub const REFERENCE_PLUGINS: &str = "/usr/lib/cni";

/// Path of our plugin on a machine, under both of its names.
const OUR_PLUGINS: &str = "/run/cni";

/// An interface of a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attachment {
    /// `CNI_CONTAINERID`
    pub container: String,
    /// `CNI_IFNAME`
    pub ifname: String,
    /// `CNI_NETNS`
    pub netns: String,
}

/// A call that a plugin rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{plugin} {verb}: {code}: {message}")]
pub struct Refused {
    /// `type` of the plugin.
    pub plugin: String,
    /// `CNI_COMMAND`
    pub verb: String,
    /// Code of the error object; 0 if there is none.
    pub code: u64,
    /// Its message, or what was printed instead.
    pub message: String,
}

/// The runtime of a machine.
#[derive(Debug)]
pub struct Runtime<'a> {
    machine: &'a Machine,
    /// Results of ADD, by network.
    cache: BTreeMap<(String, Attachment), Value>,
}

impl<'a> Runtime<'a> {
    /// The runtime of a machine, with `ours` installed as `cistern-cni` and `cilium-cni`.
    ///
    /// # Errors
    /// The links cannot be created.
    pub fn new(machine: &'a Machine, ours: &Path) -> std::io::Result<Self> {
        let directory = machine.file(OUR_PLUGINS);
        std::fs::create_dir_all(&directory)?;
        for name in ["cistern-cni", "cilium-cni"] {
            std::os::unix::fs::symlink(ours, directory.join(name))?;
        }
        Ok(Self { machine, cache: BTreeMap::new() })
    }

    /// ADD of a list. `arguments` are runtime arguments by capability. A failure is followed by a DEL, as runtimes do.
    ///
    /// # Errors
    /// The first rejected call.
    pub fn add(&mut self, list: &Value, attachment: &Attachment, arguments: &Value) -> Result<Value, Refused> {
        let mut result = Value::Null;
        for plugin in plugins(list) {
            match self.call("ADD", list, plugin, Some(attachment), &result, arguments) {
                Ok(given) => result = given,
                Err(refused) => {
                    let _ = self.del(list, attachment, arguments);
                    return Err(refused);
                }
            }
        }
        self.cache.insert((name(list), attachment.clone()), result.clone());
        Ok(result)
    }

    /// DEL of a list, in reverse order.
    ///
    /// # Errors
    /// The first rejected call; the remaining plugins are not called, and the runtime must retry.
    pub fn del(&mut self, list: &Value, attachment: &Attachment, arguments: &Value) -> Result<(), Refused> {
        let key = (name(list), attachment.clone());
        let result = self.cache.get(&key).cloned().unwrap_or_default();
        for plugin in plugins(list).iter().rev() {
            self.call("DEL", list, plugin, Some(attachment), &result, arguments)?;
        }
        self.cache.remove(&key);
        Ok(())
    }

    /// CHECK of a list against the result of its ADD.
    ///
    /// # Errors
    /// The first rejected call.
    pub fn check(&self, list: &Value, attachment: &Attachment, arguments: &Value) -> Result<(), Refused> {
        let result = self.cache.get(&(name(list), attachment.clone())).cloned().unwrap_or_default();
        for plugin in plugins(list) {
            self.call("CHECK", list, plugin, Some(attachment), &result, arguments)?;
        }
        Ok(())
    }

    /// GC of a list: cached attachments that are not valid are deleted; then GC is called on plugins that support it.
    ///
    /// # Errors
    /// The first rejected call.
    pub fn gc(&mut self, list: &Value, valid: &[&Attachment]) -> Result<(), Refused> {
        let network = name(list);
        let of_network = self.cache.keys().filter(|(cached, _)| *cached == network).map(|(_, attachment)| attachment);
        let stale: Vec<Attachment> = of_network.filter(|attachment| !valid.contains(attachment)).cloned().collect();
        for attachment in &stale {
            self.del(list, attachment, &Value::Null)?;
        }
        if !knows_status_and_gc(list) {
            return Ok(());
        }
        let valid: Vec<Value> = valid
            .iter()
            .map(|attachment| json!({"containerID": attachment.container, "ifname": attachment.ifname}))
            .collect();
        let mut list = list.clone();
        for plugin in list.get_mut("plugins").and_then(Value::as_array_mut).into_iter().flatten() {
            set(plugin, "cni.dev/valid-attachments", json!(valid));
        }
        plugins(&list)
            .iter()
            .try_for_each(|plugin| self.call("GC", &list, plugin, None, &Value::Null, &Value::Null).map(drop))
    }

    /// STATUS of a list; versions without the verb count as ready.
    ///
    /// # Errors
    /// The first rejected call.
    pub fn status(&self, list: &Value) -> Result<(), Refused> {
        if !knows_status_and_gc(list) {
            return Ok(());
        }
        plugins(list)
            .iter()
            .try_for_each(|plugin| self.call("STATUS", list, plugin, None, &Value::Null, &Value::Null).map(drop))
    }

    /// Loses all results of ADD, as a runtime whose disk was erased.
    pub fn forget(&mut self) {
        self.cache.clear();
    }

    fn find(&self, plugin: &str) -> PathBuf {
        let ours = Path::new(OUR_PLUGINS).join(plugin);
        if self.machine.file(OUR_PLUGINS).join(plugin).is_symlink() {
            ours
        } else {
            Path::new(REFERENCE_PLUGINS).join(plugin)
        }
    }

    fn call(
        &self,
        verb: &str,
        list: &Value,
        plugin: &Value,
        attachment: Option<&Attachment>,
        result: &Value,
        arguments: &Value,
    ) -> Result<Value, Refused> {
        let kind = text(plugin, "type");
        let refused = |code, message: String| Refused { plugin: kind.clone(), verb: verb.to_owned(), code, message };
        let mut conf = plugin.clone();
        for key in ["cniVersion", "name"] {
            set(&mut conf, key, list.get(key).cloned().unwrap_or_default());
        }
        if !result.is_null() {
            set(&mut conf, "prevResult", result.clone());
        }
        let capable = |capability: &str| plugin.pointer(&format!("/capabilities/{capability}")) == Some(&json!(true));
        let given: serde_json::Map<String, Value> = arguments
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(capability, _)| capable(capability))
            .map(|(capability, value)| (capability.clone(), value.clone()))
            .collect();
        if !given.is_empty() {
            set(&mut conf, "runtimeConfig", Value::Object(given));
        }
        let mut command = self.machine.command(self.find(&kind));
        command.env("CNI_COMMAND", verb).env("CNI_PATH", format!("{OUR_PLUGINS}:{REFERENCE_PLUGINS}"));
        if let Some(attachment) = attachment {
            command
                .env("CNI_CONTAINERID", &attachment.container)
                .env("CNI_IFNAME", &attachment.ifname)
                .env("CNI_NETNS", &attachment.netns);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| refused(0, error.to_string()))?;
        if let Some(mut stdin) = child.stdin.take() {
            // A plugin that fails early may not read it.
            let _ = stdin.write_all(conf.to_string().as_bytes());
        }
        let output = child.wait_with_output().map_err(|error| refused(0, error.to_string()))?;
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if output.status.success() {
            return Ok(printed);
        }
        let said = [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).join(" ");
        let message = printed.get("msg").and_then(Value::as_str).map_or(said, str::to_owned);
        Err(refused(printed.get("code").and_then(Value::as_u64).unwrap_or_default(), message))
    }
}

fn plugins(list: &Value) -> &[Value] {
    list.get("plugins").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

fn text(object: &Value, key: &str) -> String {
    object.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn name(list: &Value) -> String {
    text(list, "name")
}

fn knows_status_and_gc(list: &Value) -> bool {
    !matches!(text(list, "cniVersion").as_str(), "0.3.1" | "0.4.0" | "1.0.0")
}

fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(fields) = object.as_object_mut() {
        fields.insert(key.to_owned(), value);
    }
}
