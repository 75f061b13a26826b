//! Output of `kubectl get`: objects as rows of a `meta/v1` Table.

use std::borrow::Cow;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::resource::{Cell, Column, Resource};
use super::tree;

/// Group and version of the forms that every kind has.
pub(super) const META_VERSION: &str = "meta.k8s.io/v1";

/// The kind of objects with metadata only.
pub(super) const PARTIAL: &str = "PartialObjectMetadata";

/// An object's metadata only.
pub(super) fn partial(object: &Value) -> Value {
    json!({"kind": PARTIAL, "apiVersion": META_VERSION, "metadata": object.get("metadata")})
}

type Compute = fn(&Value, Timestamp) -> Value;

/// Objects, in the form of the resource's version, as a Table. `metadata` is that of the list.
pub(super) fn table(resource: &Resource, objects: &[Cow<'_, Value>], metadata: &Value, now: Timestamp) -> Value {
    let columns: Vec<Value> = resource
        .columns
        .iter()
        .map(|Column { name, kind, priority, .. }| {
            let format = if name == "Name" { "name" } else { "" };
            json!({"name": name, "type": kind, "format": format, "description": "", "priority": priority})
        })
        .collect();
    let rows: Vec<Value> = objects
        .iter()
        .map(|object| {
            let cells: Vec<Value> = resource.columns.iter().map(|column| cell(column, object, now)).collect();
            json!({"cells": cells, "object": partial(object)})
        })
        .collect();
    json!({
        "kind": "Table",
        "apiVersion": META_VERSION,
        "metadata": metadata,
        "columnDefinitions": columns,
        "rows": rows,
    })
}

fn cell(column: &Column, object: &Value, now: Timestamp) -> Value {
    match &column.cell {
        Cell::Computed(compute) => compute(object, now),
        Cell::Path(path) => {
            let found = lookup(object, path);
            match (column.kind.as_str(), found) {
                ("date", Some(Value::String(time))) => Value::String(age(&time, now)),
                (_, Some(value @ (Value::Array(_) | Value::Object(_)))) => Value::String(value.to_string()),
                (_, Some(value)) => value,
                // As in the real server, the cell of an absent string is empty.
                ("string" | "date", None) => Value::String(String::new()),
                (_, None) => Value::Null,
            }
        }
    }
}

/// The value at a JSONPath of the simple kind that printed columns use: `.a.b`, `.a[0]`, `.a['b.c']`, `.a[*].b`,
/// `.a[?(@.type=="Ready")].status`. Several results are joined by commas.
pub(crate) fn lookup(object: &Value, path: &str) -> Option<Value> {
    let mut found = vec![object];
    for step in steps(path) {
        found = found.into_iter().flat_map(|value| step.select(value)).collect();
    }
    match found.as_slice() {
        [] => None,
        [one] => Some(Value::clone(one)),
        many => Some(Value::String(many.iter().map(|value| plain_text(value)).collect::<Vec<_>>().join(","))),
    }
}

/// A value as text without quotes.
pub(crate) fn plain_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

enum Step {
    Field(String),
    Index(usize),
    All,
    Filter { field: String, equals: Value },
}

impl Step {
    fn select<'a>(&self, value: &'a Value) -> Vec<&'a Value> {
        match (self, value) {
            (Self::Field(name), Value::Object(map)) => map.get(name).into_iter().collect(),
            (Self::Index(index), Value::Array(list)) => list.get(*index).into_iter().collect(),
            (Self::All, Value::Array(list)) => list.iter().collect(),
            (Self::All, Value::Object(map)) => map.values().collect(),
            (Self::Filter { field, equals }, Value::Array(list)) => {
                list.iter().filter(|item| lookup(item, field).as_ref() == Some(equals)).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Splits a path into steps; invalid parts become a field that no object has.
fn steps(path: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut rest = path.trim().trim_start_matches('{').trim_end_matches('}').trim_start_matches('$');
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('[') {
            let end = if inner.starts_with('?') { inner.find(")]").map(|at| at + 1) } else { inner.find(']') };
            let end = end.unwrap_or(inner.len());
            steps.push(bracket(inner.get(..end).unwrap_or_default()));
            rest = inner.get(end + 1..).unwrap_or_default();
        } else {
            let name = rest.trim_start_matches('.');
            let end = name.find(['.', '[']).unwrap_or(name.len());
            // Label keys contain dots; kubectl escapes them as `\.`.
            let mut end = end;
            while name.get(..end).is_some_and(|text| text.ends_with('\\')) {
                let from = end + 1;
                end = name.get(from..).and_then(|tail| tail.find(['.', '['])).map_or(name.len(), |at| from + at);
            }
            let field = name.get(..end).unwrap_or_default().replace('\\', "");
            if !field.is_empty() {
                steps.push(if field == "*" { Step::All } else { Step::Field(field) });
            }
            rest = name.get(end..).unwrap_or_default();
        }
    }
    steps
}

fn bracket(text: &str) -> Step {
    if text == "*" {
        return Step::All;
    }
    if let Ok(index) = text.parse() {
        return Step::Index(index);
    }
    let filter =
        text.strip_prefix("?(@").and_then(|text| text.strip_suffix(')')).and_then(|text| text.split_once("=="));
    match filter {
        Some((field, value)) => {
            let value = value.trim();
            let equals =
                serde_json::from_str(&value.replace('\'', "\"")).unwrap_or_else(|_| Value::String(value.to_owned()));
            Step::Filter { field: field.trim().to_owned(), equals }
        }
        None => Step::Field(text.trim_matches(['\'', '"']).to_owned()),
    }
}

/// The time since `time` in kubectl's short form: `7s`, `3m20s`, `5h`, `2d`.
fn age(time: &str, now: Timestamp) -> String {
    let Ok(since) = time.parse::<Timestamp>() else { return "<unknown>".to_owned() };
    short(now.duration_since(since))
}

fn short(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 && seconds % 60 != 0 => format!("{minutes}m{}s", seconds % 60),
        () if hours < 3 => format!("{minutes}m"),
        () if hours < 8 && minutes % 60 != 0 => format!("{hours}h{}m", minutes % 60),
        () if hours < 48 => format!("{hours}h"),
        () => format!("{days}d"),
    }
}

fn computed(name: &str, kind: &str, priority: i64, compute: Compute) -> Column {
    Column { name: name.to_owned(), kind: kind.to_owned(), priority, cell: Cell::Computed(compute) }
}

fn path(name: &str, path: &str) -> Column {
    Column { name: name.to_owned(), kind: "string".to_owned(), priority: 0, cell: Cell::Path(path.to_owned()) }
}

/// The first column of every kind.
pub(super) fn name_column() -> Option<Column> {
    Some(path("Name", ".metadata.name"))
}

fn age_column() -> Column {
    Column {
        name: "Age".to_owned(),
        kind: "date".to_owned(),
        priority: 0,
        cell: Cell::Path(".metadata.creationTimestamp".to_owned()),
    }
}

fn columns(inner: Vec<Column>) -> Vec<Column> {
    name_column().into_iter().chain(inner).chain([age_column()]).collect()
}

/// Name and age.
pub(super) fn plain() -> Vec<Column> {
    columns(Vec::new())
}

/// The columns of Nodes.
pub(super) fn nodes() -> Vec<Column> {
    let ready: Compute = |node, _| {
        let condition = lookup(node, ".status.conditions[?(@.type==\"Ready\")].status");
        let ready = match condition.as_ref().and_then(Value::as_str) {
            Some("True") => "Ready",
            Some("False") => "NotReady",
            _ => "Unknown",
        };
        let cordoned = node.pointer("/spec/unschedulable") == Some(&Value::Bool(true));
        json!(if cordoned { format!("{ready},SchedulingDisabled") } else { ready.to_owned() })
    };
    let roles: Compute = |node, _| {
        let labels = node.pointer("/metadata/labels").and_then(Value::as_object);
        let roles: Vec<&str> =
            labels.into_iter().flatten().filter_map(|(key, _)| key.strip_prefix("node-role.kubernetes.io/")).collect();
        json!(if roles.is_empty() { "<none>".to_owned() } else { roles.join(",") })
    };
    let address: Compute = |node, _| {
        let found = lookup(node, ".status.addresses[?(@.type==\"InternalIP\")].address");
        found.unwrap_or_else(|| json!("<none>"))
    };
    let mut list = columns(vec![computed("Status", "string", 0, ready), computed("Roles", "string", 0, roles)]);
    list.push(path("Version", ".status.nodeInfo.kubeletVersion"));
    list.push(computed("Internal-IP", "string", 1, address));
    list
}

/// The columns of Namespaces.
pub(super) fn namespaces() -> Vec<Column> {
    columns(vec![path("Status", ".status.phase")])
}

/// The columns of Pods.
pub(super) fn pods() -> Vec<Column> {
    let ready: Compute = |pod, _| {
        let statuses = tree::list(pod, "/status/containerStatuses");
        let ready = statuses.iter().filter(|status| status.get("ready") == Some(&Value::Bool(true))).count();
        json!(format!("{ready}/{}", tree::list(pod, "/spec/containers").len()))
    };
    let restarts: Compute = |pod, _| {
        let statuses = tree::list(pod, "/status/containerStatuses").iter();
        json!(statuses.filter_map(|status| status.get("restartCount").and_then(Value::as_i64)).sum::<i64>())
    };
    let mut list = columns(vec![
        computed("Ready", "string", 0, ready),
        path("Status", ".status.phase"),
        computed("Restarts", "string", 0, restarts),
    ]);
    list.push(Column { priority: 1, ..path("IP", ".status.podIP") });
    list.push(Column { priority: 1, ..path("Node", ".spec.nodeName") });
    list
}

/// The columns of Services.
pub(super) fn services() -> Vec<Column> {
    let external: Compute = |service, _| {
        let found: Vec<&str> = tree::list(service, "/status/loadBalancer/ingress")
            .iter()
            .map(|entry| tree::text(entry, "/ip"))
            .chain(tree::list(service, "/spec/externalIPs").iter().filter_map(Value::as_str))
            .filter(|address| !address.is_empty())
            .collect();
        let pending = tree::text(service, "/spec/type") == "LoadBalancer";
        json!(match found.is_empty() {
            false => found.join(","),
            true if pending => "<pending>".to_owned(),
            true => "<none>".to_owned(),
        })
    };
    let ports: Compute = |service, _| {
        let list: Vec<String> = tree::list(service, "/spec/ports")
            .iter()
            .map(|port| {
                let number = |field: &str| port.get(field).and_then(Value::as_i64).unwrap_or_default();
                let protocol = Some(tree::text(port, "/protocol")).filter(|text| !text.is_empty()).unwrap_or("TCP");
                match number("nodePort") {
                    0 => format!("{}/{protocol}", number("port")),
                    node_port => format!("{}:{node_port}/{protocol}", number("port")),
                }
            })
            .collect();
        json!(if list.is_empty() { "<none>".to_owned() } else { list.join(",") })
    };
    columns(vec![
        path("Type", ".spec.type"),
        path("Cluster-IP", ".spec.clusterIP"),
        computed("External-IP", "string", 0, external),
        computed("Port(s)", "string", 0, ports),
    ])
}

/// The columns of ConfigMaps.
pub(super) fn config_maps() -> Vec<Column> {
    let data: Compute = |map, _| {
        let size = |field: &str| map.get(field).and_then(Value::as_object).map_or(0, serde_json::Map::len);
        json!(size("data") + size("binaryData"))
    };
    columns(vec![computed("Data", "integer", 0, data)])
}

/// The columns of Leases.
pub(super) fn leases() -> Vec<Column> {
    columns(vec![path("Holder", ".spec.holderIdentity")])
}

/// The columns of CustomResourceDefinitions.
pub(super) fn definitions() -> Vec<Column> {
    name_column().into_iter().chain([path("Created At", ".metadata.creationTimestamp")]).collect()
}

/// The columns of Events in both versions.
pub(super) fn events() -> Vec<Column> {
    let seen: Compute = |event, now| {
        let first = ["/lastTimestamp", "/deprecatedLastTimestamp", "/series/lastObservedTime", "/eventTime"]
            .into_iter()
            .chain(["/metadata/creationTimestamp"])
            .map(|pointer| tree::text(event, pointer))
            .find(|time| !time.is_empty());
        json!(age(first.unwrap_or_default(), now))
    };
    let object: Compute = |event, _| {
        let subject = event.get("involvedObject").or_else(|| event.get("regarding")).unwrap_or(&Value::Null);
        json!(format!("{}/{}", tree::text(subject, "/kind").to_lowercase(), tree::text(subject, "/name")))
    };
    let message: Compute = |event, _| {
        json!(event.get("message").or_else(|| event.get("note")).and_then(Value::as_str).unwrap_or_default().trim())
    };
    vec![
        computed("Last Seen", "string", 0, seen),
        path("Type", ".type"),
        path("Reason", ".reason"),
        computed("Object", "string", 0, object),
        computed("Message", "string", 0, message),
        Column { priority: 1, ..path("Name", ".metadata.name") },
    ]
}
