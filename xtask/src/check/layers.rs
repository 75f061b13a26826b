//! Which modules and crates each module of the agent may import.
//!
//! Imports have one direction: `app` imports everything, controllers import tables and the core, adapters import the
//! external system they are named after. An adapter can thus be replaced or faked by itself, and a controller can be
//! tested with neither a kernel nor an API server.

use super::tokens::{Reference, Source, references};
use std::path::{Component, Path};

/// The source folder that the table below describes.
const AGENT: &str = "agent/src";

/// A top-level module of the agent (or one of its binaries), and the paths below `crate` that it may import besides
/// itself.
struct Layer {
    name: &'static str,
    may_name: &'static [&'static str],
}

/// Every module may read the clock, run blocking work, log, and count.
const COMMON_MODULES: [&str; 3] = ["blocking", "clock", "telemetry"];

const LAYERS: [Layer; 19] = [
    Layer { name: "main", may_name: &["app"] },
    // The plugin starts in about a millisecond, so it bypasses `app` and its runtime.
    Layer { name: "bin", may_name: &["cni"] },
    Layer {
        name: "app",
        may_name: &[
            "api",
            "cli",
            "cni",
            "controllers",
            "datapath",
            "files",
            "install",
            "kubernetes",
            "leases",
            "netlink",
            "reconciler",
            "state",
            "tables",
        ],
    },
    Layer { name: "controllers", may_name: &["reconciler", "tables"] },
    Layer { name: "reconciler", may_name: &["tables"] },
    // DELs that the plugin queued end leases.
    Layer { name: "leases", may_name: &["cni::deletion_queue", "reconciler", "tables"] },
    Layer { name: "tables", may_name: &[] },
    Layer { name: "blocking", may_name: &[] },
    Layer { name: "clock", may_name: &[] },
    Layer { name: "telemetry", may_name: &[] },
    Layer { name: "api", may_name: &["reconciler", "tables"] },
    Layer { name: "datapath", may_name: &["reconciler", "tables"] },
    Layer { name: "files", may_name: &["reconciler", "tables"] },
    // The network configuration may come from a file.
    Layer { name: "install", may_name: &["files::read", "reconciler", "tables"] },
    Layer { name: "kubernetes", may_name: &["reconciler", "tables"] },
    Layer { name: "netlink", may_name: &["reconciler", "tables"] },
    Layer { name: "state", may_name: &["reconciler", "tables"] },
    Layer { name: "cli", may_name: &["api::client", "api::types"] },
    Layer { name: "cni", may_name: &["api::client", "api::types", "netlink"] },
];

/// A crate that only the listed modules may use.
struct Confined {
    /// The name of the crate, or a common prefix of several.
    prefix: &'static str,
    to: &'static [&'static str],
}

const CONFINED: [Confined; 10] = [
    Confined { prefix: "kube", to: &["kubernetes"] },
    Confined { prefix: "k8s_openapi", to: &["kubernetes"] },
    Confined { prefix: "cistern_crds", to: &["kubernetes"] },
    Confined { prefix: "aya", to: &["datapath"] },
    Confined { prefix: "aya_log", to: &["datapath"] },
    Confined { prefix: "cistern_ebpf_common", to: &["datapath"] },
    Confined { prefix: "netlink_", to: &["netlink"] },
    Confined { prefix: "axum", to: &["api"] },
    Confined { prefix: "prometheus_client", to: &["telemetry"] },
    Confined { prefix: "clap", to: &["app", "cli"] },
];

/// All imports in the wrong direction.
pub(super) fn violations(sources: &[Source]) -> Vec<String> {
    let modules: Vec<Vec<String>> = sources.iter().filter_map(|source| module_of(&source.path)).collect();
    let is_module = |name: &str| modules.iter().any(|module| module.first().is_some_and(|top| top == name));
    let mut found = Vec::new();
    for source in sources {
        let Some(module) = module_of(&source.path) else { continue };
        // `lib.rs` only lists the modules.
        let Some(top) = module.first() else { continue };
        let Some(layer) = LAYERS.iter().find(|layer| layer.name == top) else {
            found.push(format!("{}: the module `{top}` is in no layer", source.path.display()));
            continue;
        };
        for reference in references(&source.tokens, &module) {
            if let Some(why) = refusal(layer, &reference, is_module) {
                found.push(format!("{}:{}: {why}", source.path.display(), reference.line));
            }
        }
    }
    found
}

/// Why `layer` may not import `reference`.
fn refusal(layer: &Layer, reference: &Reference, is_module: impl Fn(&str) -> bool) -> Option<String> {
    let root = reference.segments.first()?;
    if root == "crate" || root == "cistern" {
        let below = reference.segments.get(1..)?;
        let target = below.first()?;
        if target == layer.name || !is_module(target) {
            return None;
        }
        let mut allowed = layer.may_name.iter().chain(&COMMON_MODULES);
        if allowed.any(|path| path.split("::").zip(below).filter(|(a, b)| a == b).count() == path.split("::").count()) {
            return None;
        }
        return Some(format!(
            "`{}` names `{}`; it may name {}",
            layer.name,
            below.join("::"),
            if layer.may_name.is_empty() { "no other module".to_owned() } else { layer.may_name.join(", ") }
        ));
    }
    let confined = CONFINED.iter().find(|confined| {
        if confined.prefix.ends_with('_') { root.starts_with(confined.prefix) } else { root == confined.prefix }
    })?;
    if confined.to.contains(&layer.name) {
        return None;
    }
    Some(format!("`{}` names the crate `{root}`, which stays in {}", layer.name, confined.to.join(", ")))
}

/// The module of a file of the agent: `agent/src/cni/plugin.rs` is `[cni, plugin]`. `None` for other files.
fn module_of(path: &Path) -> Option<Vec<String>> {
    let below = path.strip_prefix(AGENT).ok()?.with_extension("");
    let mut segments: Vec<String> = below
        .components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
            _ => None,
        })
        .collect();
    if segments.last().is_some_and(|last| last == "mod" || last == "lib") {
        segments.pop();
    }
    Some(segments)
}

#[cfg(test)]
mod tests {
    use super::super::tokens::parse;
    use super::*;
    use std::path::PathBuf;

    /// The findings for `text` as the file `path`, in a tree that has every module.
    fn judge(path: &str, text: &str) -> Vec<String> {
        let mut sources: Vec<Source> = LAYERS
            .iter()
            .filter(|layer| !["main", "bin"].contains(&layer.name))
            .map(|layer| parse(PathBuf::from(format!("agent/src/{}/mod.rs", layer.name)), "").unwrap())
            .collect();
        sources.push(parse(PathBuf::from(path), text).unwrap());
        violations(&sources)
    }

    #[test]
    fn imports_in_the_right_direction_pass() {
        for (path, text) in [
            ("agent/src/main.rs", "use cistern::app;"),
            ("agent/src/bin/cistern-cni.rs", "fn main() { cistern::cni::plugin::run() }"),
            ("agent/src/app/agent_role.rs", "use crate::{controllers, datapath::Datapath, kubernetes::watch};"),
            ("agent/src/controllers/node.rs", "use crate::tables::Table; use cistern_core::ipam;"),
            ("agent/src/cni/plugin.rs", "use crate::api::{client::Client, types}; use crate::netlink::link;"),
            ("agent/src/cni/plugin.rs", "use super::delegate; use crate::telemetry::metrics;"),
            ("agent/src/datapath/maps.rs", "use aya::maps::Map; use cistern_ebpf_common::Key;"),
            ("agent/src/kubernetes/views.rs", "use kube::Client; use cistern_crds::CiliumNode;"),
            ("agent/src/api/server.rs", "use crate::Version;"),
            ("agent/core/src/ipam/mod.rs", "use crate::app;"),
        ] {
            assert_eq!(judge(path, text), [] as [&str; 0], "{path}: {text}");
        }
    }

    #[test]
    fn imports_in_the_wrong_direction_are_reported() {
        for (path, text) in [
            ("agent/src/main.rs", "use cistern::controllers;"),
            ("agent/src/bin/cistern-cni.rs", "use cistern::app;"),
            ("agent/src/controllers/node.rs", "use crate::kubernetes::patch;"),
            ("agent/src/controllers/node.rs", "fn f() { g!(crate::netlink::route::list()) }"),
            ("agent/src/controllers/node.rs", "use super::super::datapath;"),
            ("agent/src/netlink/link.rs", "use crate::app::supervisor;"),
            ("agent/src/netlink/link.rs", "use crate::state::leases;"),
            ("agent/src/tables/mod.rs", "use crate::reconciler::Operations;"),
            ("agent/src/cni/plugin.rs", "use crate::api::server;"),
            ("agent/src/cni/plugin.rs", "use crate::api;"),
            ("agent/src/controllers/node.rs", "use kube::Api;"),
            ("agent/src/app/cli.rs", "fn f(map: aya::Ebpf) {}"),
            ("agent/src/state/mod.rs", "use netlink_sys::Socket;"),
            ("agent/src/utils/mod.rs", ""),
        ] {
            assert_eq!(judge(path, text).len(), 1, "{path}: {text}");
        }
    }

    #[test]
    fn a_finding_names_file_line_and_both_modules() {
        let found = judge("agent/src/controllers/node.rs", "\nuse crate::netlink::link;");
        assert_eq!(
            found,
            ["agent/src/controllers/node.rs:2: `controllers` names `netlink::link`; it may name reconciler, tables"]
        );
    }
}
