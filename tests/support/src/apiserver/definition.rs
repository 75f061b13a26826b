//! CustomResourceDefinitions: their resources and their status.

use std::sync::Arc;

use serde_json::{Value, json};

use super::resource::{Cell, Column, Resource, Storage};
use super::schema::Schema;
use super::table;
use super::tree;

/// The resources of a CustomResourceDefinition, one for each served version.
pub(super) fn resources(definition: &Value) -> Vec<Resource> {
    let names = |field: &str| tree::text(definition, &format!("/spec/names/{field}")).to_owned();
    let lists = |field: &str| -> Vec<String> {
        let list = tree::list(definition, &format!("/spec/names/{field}"));
        list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (group, plural, kind) = (tree::text(definition, "/spec/group"), names("plural"), names("kind"));
    tree::list(definition, "/spec/versions")
        .iter()
        .filter(|version| version.get("served").and_then(Value::as_bool).unwrap_or_default())
        .map(|version| Resource {
            group: group.to_owned(),
            version: tree::text(version, "/name").to_owned(),
            kind: kind.clone(),
            plural: plural.clone(),
            singular: Some(names("singular")).filter(|name| !name.is_empty()).unwrap_or_else(|| kind.to_lowercase()),
            short_names: lists("shortNames"),
            categories: lists("categories"),
            namespaced: tree::text(definition, "/spec/scope") == "Namespaced",
            status_subresource: version.pointer("/subresources/status").is_some(),
            status_on_create: false,
            generation: true,
            unconditional_update: false,
            create_on_update: false,
            strategic_patch: false,
            schema: Arc::new(Schema::custom(version.pointer("/schema/openAPIV3Schema").unwrap_or(&Value::Null))),
            normalise: None,
            conversion: None,
            columns: columns(version),
            selectable: tree::list(version, "/selectableFields")
                .iter()
                .map(|field| tree::text(field, "/jsonPath").trim_start_matches('.').to_owned())
                .collect(),
            storage: Storage { group: group.into(), plural: plural.as_str().into() },
        })
        .collect()
}

fn columns(version: &Value) -> Vec<Column> {
    let printed = tree::list(version, "/additionalPrinterColumns");
    if printed.is_empty() {
        return table::plain();
    }
    let columns = printed.iter().map(|column| Column {
        name: tree::text(column, "/name").to_owned(),
        kind: tree::text(column, "/type").to_owned(),
        priority: column.get("priority").and_then(Value::as_i64).unwrap_or_default(),
        cell: Cell::Path(tree::text(column, "/jsonPath").to_owned()),
    });
    table::name_column().into_iter().chain(columns).collect()
}

/// (field path, problem) pairs for a definition that cannot be served.
pub(super) fn problems(definition: &Value) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let wanted = format!("{}.{}", tree::text(definition, "/spec/names/plural"), tree::text(definition, "/spec/group"));
    let name = tree::text(definition, "/metadata/name");
    if name != wanted {
        let text = format!("Invalid value: \"{name}\": must be spec.names.plural+\".\"+spec.group");
        problems.push(("metadata.name".to_owned(), text));
    }
    let scope = tree::text(definition, "/spec/scope");
    if !["Cluster", "Namespaced"].contains(&scope) {
        problems.push(("spec.scope".to_owned(), format!("Unsupported value: \"{scope}\"")));
    }
    let versions = tree::list(definition, "/spec/versions");
    let storage = versions.iter().filter(|version| version.get("storage") == Some(&Value::Bool(true))).count();
    if storage != 1 {
        let text = "Invalid value: must have exactly one version marked as storage version";
        problems.push(("spec.versions".to_owned(), text.to_owned()));
    }
    for (index, version) in versions.iter().enumerate() {
        if version.pointer("/schema/openAPIV3Schema/type").and_then(Value::as_str) != Some("object") {
            let field = format!("spec.versions[{index}].schema.openAPIV3Schema");
            problems.push((field, "Required value: schemas are required, with type object at the root".to_owned()));
        }
    }
    problems
}

/// Sets the defaults of a served definition: the list and singular names and the conditions.
pub(super) fn establish(definition: &mut Value, now: &str) {
    let kind = tree::text(definition, "/spec/names/kind").to_owned();
    if let Some(names) = tree::map_mut(definition, "spec").get_mut("names") {
        let names = tree::as_map(names);
        names.entry("listKind").or_insert_with(|| Value::String(format!("{kind}List")));
        names.entry("singular").or_insert_with(|| Value::String(kind.to_lowercase()));
    }
    let accepted = definition.pointer("/spec/names").cloned().unwrap_or_default();
    let stored: Vec<Value> = tree::list(definition, "/spec/versions")
        .iter()
        .filter(|version| version.get("storage") == Some(&Value::Bool(true)))
        .filter_map(|version| version.get("name").cloned())
        .collect();
    let since = |kind: &str| {
        tree::list(definition, "/status/conditions")
            .iter()
            .find(|condition| tree::text(condition, "/type") == kind)
            .map_or(now, |condition| tree::text(condition, "/lastTransitionTime"))
            .to_owned()
    };
    let condition = |kind: &str, reason: &str, message: &str| json!({"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": since(kind)});
    let status = json!({
        "acceptedNames": accepted,
        "storedVersions": stored,
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
    });
    tree::as_map(definition).insert("status".to_owned(), status);
}
