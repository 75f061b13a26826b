//! Operations of administrators and other controllers on the API, without faults and links.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Outcome, Printed, exactly, silent, take_namespace};
use crate::apiserver::{parse_manifest, table};
use crate::script::world::World;

fn objects(world: &World, files: &[&str]) -> Result<Vec<Value>, String> {
    if files.is_empty() {
        return Err("expected the files with the objects".to_owned());
    }
    let mut objects = Vec::new();
    for file in files {
        objects.extend(parse_manifest(world.file(file)?).map_err(|error| format!("{file}: {error}"))?);
    }
    Ok(objects)
}

pub(super) fn add(world: &World, arguments: &[&str]) -> Outcome {
    for object in objects(world, arguments)? {
        world.server.create(&object).map_err(|error| error.to_string())?;
    }
    Ok(silent())
}

pub(super) fn apply(world: &World, arguments: &[&str]) -> Outcome {
    for object in objects(world, arguments)? {
        world.server.apply(&object).map_err(|error| error.to_string())?;
    }
    Ok(silent())
}

/// A merge patch; `status` in it is patched separately.
pub(super) fn patch(world: &World, arguments: &[&str]) -> Outcome {
    let (namespace, rest) = take_namespace(arguments)?;
    let [kind, name, patch] = exactly(&rest, "k8s/patch KIND NAME JSON [-n NAMESPACE]")?;
    let patch: Value = serde_json::from_str(patch).map_err(|error| format!("{patch}: {error}"))?;
    world.server.patch(kind, namespace, name, &patch).map_err(|error| error.to_string())?;
    Ok(silent())
}

pub(super) fn delete(world: &World, arguments: &[&str]) -> Outcome {
    let (namespace, rest) = take_namespace(arguments)?;
    let Some((kind, names)) = rest.split_first().filter(|(_, names)| !names.is_empty()) else {
        return Err("expected: k8s/delete KIND NAME… [-n NAMESPACE]".to_owned());
    };
    for name in names {
        world.server.delete(kind, namespace, name).map_err(|error| error.to_string())?;
    }
    Ok(silent())
}

/// Prints the value at a path, or the object without the fields set by the server.
pub(super) fn get(world: &World, arguments: &[&str]) -> Outcome {
    let (namespace, rest) = take_namespace(arguments)?;
    let (kind, name, path) = match rest.as_slice() {
        [kind, name] => (kind, name, None),
        [kind, name, path] => (kind, name, Some(path)),
        _ => return Err("expected: k8s/get KIND NAME [PATH] [-n NAMESPACE]".to_owned()),
    };
    let object = world.server.get(kind, namespace, name).map_err(|error| error.to_string())?;
    Ok(Printed::Text(match path {
        Some(path) => shown(&object, path),
        None => serde_json::to_string_pretty(&essence(object)).map_err(|error| error.to_string())?,
    }))
}

/// Prints a line per object: its name and the values at the paths.
pub(super) fn list(world: &World, arguments: &[&str]) -> Outcome {
    let Some((kind, paths)) = arguments.split_first() else {
        return Err("expected: k8s/list KIND PATH…".to_owned());
    };
    let objects = world.server.list(kind).map_err(|error| error.to_string())?;
    let line = |object: &Value| {
        let values = paths.iter().map(|path| shown(object, path));
        let words: Vec<String> = [shown(object, ".metadata.name")].into_iter().chain(values).collect();
        format!("{}\n", words.join(" "))
    };
    Ok(Printed::Text(objects.iter().map(line).collect()))
}

/// Fails if two objects have the same value at a path, or one has none.
pub(super) fn distinct(world: &World, arguments: &[&str]) -> Outcome {
    let [kind, path] = exactly(arguments, "k8s/distinct KIND PATH")?;
    let mut holders: BTreeMap<String, String> = BTreeMap::new();
    for object in world.server.list(kind).map_err(|error| error.to_string())? {
        let (name, value) = (shown(&object, ".metadata.name"), shown(&object, path));
        if ["", "[]"].contains(&value.as_str()) {
            return Err(format!("{name} has nothing at {path}"));
        }
        if let Some(other) = holders.insert(value.clone(), name.clone()) {
            return Err(format!("{other} and {name} both have {value}"));
        }
    }
    Ok(silent())
}

/// Prints a line for each value that a path of an object has had, `(deleted)` for deletions.
pub(super) fn history(world: &World, arguments: &[&str]) -> Outcome {
    let (namespace, rest) = take_namespace(arguments)?;
    let [kind, name, path] = exactly(&rest, "k8s/history KIND NAME PATH [-n NAMESPACE]")?;
    let versions = world.server.history(kind, namespace, name).map_err(|error| error.to_string())?;
    let mut lines: Vec<String> = versions
        .iter()
        .map(|version| version.as_ref().map_or("(deleted)".to_owned(), |object| shown(object, path)))
        .collect();
    lines.dedup();
    Ok(Printed::Text(lines.iter().map(|line| format!("{line}\n")).collect()))
}

/// Adds Nodes with the CiliumNodes that their agents would create: with this pod CIDR, or without any.
pub(super) fn add_nodes(world: &World, arguments: &[&str]) -> Outcome {
    if arguments.is_empty() {
        return Err("expected: node/add NAME[=POD_CIDR]…".to_owned());
    }
    for argument in arguments {
        let (name, pod_cidr) = argument.split_once('=').map_or((*argument, None), |(name, cidr)| (name, Some(cidr)));
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        let node = world.server.create(&node).map_err(|error| error.to_string())?;
        let owner = json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.pointer("/metadata/uid")});
        let pod_cidrs: Vec<&str> = pod_cidr.into_iter().collect();
        let cilium_node = json!({
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNode",
            "metadata": {"name": name, "ownerReferences": [owner]},
            "spec": {"ipam": {"podCIDRs": pod_cidrs}},
        });
        world.server.create(&cilium_node).map_err(|error| error.to_string())?;
    }
    Ok(silent())
}

fn shown(object: &Value, path: &str) -> String {
    table::lookup(object, path).map_or_else(String::new, |value| table::plain_text(&value))
}

/// An object without the fields set by the server.
fn essence(mut object: Value) -> Value {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in ["uid", "resourceVersion", "creationTimestamp", "generation", "managedFields"] {
            metadata.remove(field);
        }
    }
    object
}
