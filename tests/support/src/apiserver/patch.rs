//! The patch formats: merge patch (RFC 7386), JSON patch (RFC 6902) and the strategic merge patch of built-in kinds.

use serde_json::{Map, Value, json};

use super::error::{ApiError, ApiResult};
use super::resource::Resource;
use super::schema::{ListKind, Schema};
use super::tree;

/// The format of a patch, from its content type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PatchKind {
    Merge,
    Json,
    Strategic,
    Apply,
}

impl PatchKind {
    /// Reads a `Content-Type`; parameters are ignored.
    pub(super) fn from_content_type(content_type: &str) -> ApiResult<Self> {
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/json-patch+json" => Ok(Self::Json),
            "application/strategic-merge-patch+json" => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            other => Err(ApiError::unsupported_media_type(other)),
        }
    }
}

/// Applies a patch other than an apply. `current` is in the version that the patch was written for.
pub(super) fn patched(resource: &Resource, current: &Value, kind: PatchKind, patch: &Value) -> ApiResult<Value> {
    let mut object = current.clone();
    match kind {
        PatchKind::Merge => json_patch::merge(&mut object, patch),
        PatchKind::Json => {
            let operations: json_patch::Patch = serde_json::from_value(patch.clone())
                .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
            json_patch::patch(&mut object, &operations).map_err(|error| {
                let name = tree::text(current, "/metadata/name");
                let mut refusal = ApiError::invalid(resource, name, &[("patch".to_owned(), error.to_string())]);
                refusal.details = json!({});
                refusal.message = format!("the server rejected our request due to an error in our request: {error}");
                refusal
            })?;
        }
        PatchKind::Strategic if resource.strategic_patch => strategic(&mut object, patch, &resource.schema),
        PatchKind::Strategic => {
            return Err(ApiError::unsupported_media_type("application/strategic-merge-patch+json"));
        }
        PatchKind::Apply => return Err(ApiError::internal("an apply is not a plain patch")),
    }
    Ok(object)
}

/// Merges by the schema's list kinds. Of the directives, `$patch: delete`, `$patch: replace`, `$retainKeys` and
/// `$deleteFromPrimitiveList/…` are followed; `$setElementOrder/…` is dropped, since no kind here depends on order.
fn strategic(target: &mut Value, patch: &Value, schema: &Schema) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if patch.get("$patch").and_then(Value::as_str) == Some("replace") {
        let plain = patch.iter().filter(|(name, _)| !name.starts_with('$'));
        *target = Value::Object(plain.map(|(name, value)| (name.clone(), value.clone())).collect());
        return;
    }
    let map = tree::as_map(target);
    if let Some(kept) = patch.get("$retainKeys").and_then(Value::as_array) {
        map.retain(|name, _| kept.iter().any(|keep| keep.as_str() == Some(name)));
    }
    for (name, value) in patch {
        if let Some(list) = name.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(own)), Value::Array(gone)) = (map.get_mut(list), value) {
                own.retain(|item| !gone.contains(item));
            }
        } else if name.starts_with('$') {
            continue;
        } else if value.is_null() {
            map.remove(name);
        } else {
            merge_field(map, name, value, schema.field(name));
        }
    }
}

fn merge_field(map: &mut Map<String, Value>, name: &str, patch: &Value, schema: &Schema) {
    let slot = map.entry(name.to_owned()).or_insert(Value::Null);
    match (patch, &schema.list) {
        (Value::Array(items), ListKind::Set) => {
            let mut merged = slot.as_array().cloned().unwrap_or_default();
            let mut new: Vec<Value> = items.iter().filter(|item| !merged.contains(item)).cloned().collect();
            // New items are inserted before existing ones.
            new.append(&mut merged);
            *slot = Value::Array(new);
        }
        (Value::Array(items), ListKind::Map(keys)) => {
            let mut merged = slot.as_array().cloned().unwrap_or_default();
            // Strategic merges identify items by the first key only.
            let key = keys.first().map(String::as_str).unwrap_or_default();
            let mut new = Vec::new();
            for item in items {
                let same = |own: &Value| own.get(key).is_some() && own.get(key) == item.get(key);
                if item.get("$patch").and_then(Value::as_str) == Some("delete") {
                    merged.retain(|own| !same(own));
                } else if let Some(own) = merged.iter_mut().find(|own| same(own)) {
                    strategic(own, item, schema.items());
                } else {
                    new.push(item.clone());
                }
            }
            new.append(&mut merged);
            *slot = Value::Array(new);
        }
        (Value::Object(_), _) => strategic(slot, patch, schema),
        _ => *slot = patch.clone(),
    }
}
