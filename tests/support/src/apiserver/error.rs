//! Errors: `Status` objects with the codes, reasons and messages of the real server.

use serde_json::{Value, json};

use super::resource::Resource;
use super::tree;

/// An error, in the form of a `meta/v1` Status.
///
/// Clients decide by `code` and `reason`; `message` follows the wording of kube-apiserver, so that the output of tests
/// is the same as in a cluster.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message} ({reason}, {code})")]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason, such as `NotFound`.
    pub reason: &'static str,
    /// Human-readable message.
    pub message: String,
    /// `details` of the Status; `Value::Null` when there are none.
    pub details: Value,
}

/// The result of an operation of the server.
pub(super) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    /// The answer of another server.
    pub(super) fn from_afar(code: u16, reason: &str, message: &str, details: Option<&Value>) -> Self {
        const KNOWN: [&str; 16] = [
            "AlreadyExists",
            "BadRequest",
            "Conflict",
            "Expired",
            "Forbidden",
            "Gone",
            "InternalError",
            "Invalid",
            "MethodNotAllowed",
            "NotAcceptable",
            "NotFound",
            "ServiceUnavailable",
            "Timeout",
            "TooManyRequests",
            "Unauthorized",
            "UnsupportedMediaType",
        ];
        let reason = KNOWN.into_iter().find(|known| *known == reason).unwrap_or("");
        Self { details: details.cloned().unwrap_or_default(), ..Self::new(code, reason, message) }
    }

    fn about(mut self, resource: &Resource, name: &str) -> Self {
        self.details = json!({"name": name, "group": resource.group, "kind": resource.plural});
        self
    }

    /// 404 for a path that names no served resource.
    pub(super) fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    /// 404 for an object.
    pub(super) fn not_found(resource: &Resource, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} \"{name}\" not found", resource.qualified())).about(resource, name)
    }

    /// 403 without permission.
    pub(super) fn forbidden(resource: &Resource, name: &str) -> Self {
        let message = format!("{} \"{name}\" is forbidden: no rule of RBAC allows it", resource.qualified());
        Self::new(403, "Forbidden", message).about(resource, name)
    }

    /// 409 for a create of an existing object.
    pub(super) fn already_exists(resource: &Resource, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} \"{name}\" already exists", resource.qualified()))
            .about(resource, name)
    }

    /// 409 for a write that was based on an older version, or on another incarnation, of the object.
    pub(super) fn conflict(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} \"{name}\": {why}", resource.qualified());
        Self::new(409, "Conflict", message).about(resource, name)
    }

    /// 409 for a server-side apply of fields that other managers own. `fields` are (manager, field path) pairs.
    pub(super) fn apply_conflict(fields: &[(String, String)]) -> Self {
        let noun = if fields.len() == 1 { "conflict" } else { "conflicts" };
        let list: Vec<String> =
            fields.iter().map(|(manager, path)| format!("conflict with \"{manager}\": {path}")).collect();
        let causes: Vec<Value> = fields
            .iter()
            .map(|(manager, path)| {
                json!({"reason": "FieldManagerConflict", "message": format!("conflict with \"{manager}\""), "field": path})
            })
            .collect();
        let message = format!("Apply failed with {} {noun}: {}", fields.len(), list.join(", "));
        Self { details: json!({"causes": causes}), ..Self::new(409, "Conflict", message) }
    }

    /// 410 for a version that has been compacted away.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"))
    }

    /// 400.
    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 405.
    pub(super) fn method_not_allowed() -> Self {
        Self::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    }

    /// 415 for a patch type that the kind does not support.
    pub(super) fn unsupported_media_type(found: &str) -> Self {
        Self::new(
            415,
            "UnsupportedMediaType",
            format!("the body of the request was in an unknown format - got: {found}"),
        )
    }

    /// 422. `problems` are (field path, problem) pairs, at least one.
    pub(super) fn invalid(resource: &Resource, name: &str, problems: &[(String, String)]) -> Self {
        let list: Vec<String> = problems.iter().map(|(field, text)| format!("{field}: {text}")).collect();
        let text = match list.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let causes: Vec<Value> = problems
            .iter()
            .map(|(field, text)| json!({"reason": cause(text), "message": text, "field": field}))
            .collect();
        let kind = if resource.group.is_empty() {
            resource.kind.clone()
        } else {
            format!("{}.{}", resource.kind, resource.group)
        };
        let mut error = Self::new(422, "Invalid", format!("{kind} \"{name}\" is invalid: {text}"));
        error.details = json!({"name": name, "group": resource.group, "kind": resource.kind, "causes": causes});
        error
    }

    /// 422 for an option of a call.
    pub(super) fn invalid_option(kind: &str, field: &str, message: &str) -> Self {
        let causes = json!([{"reason": cause(message), "message": message, "field": field}]);
        let mut error = Self::new(422, "Invalid", format!("{kind}.meta.k8s.io \"\" is invalid: {field}: {message}"));
        error.details = json!({"group": "meta.k8s.io", "kind": kind, "causes": causes});
        error
    }

    /// 429 with the seconds after which the client may retry.
    pub(super) fn too_many_requests(retry_after_seconds: u32) -> Self {
        let mut error = Self::new(
            429,
            "TooManyRequests",
            "the server has received too many requests and has asked us to try again later",
        );
        error.details = json!({"retryAfterSeconds": retry_after_seconds});
        error
    }

    /// 500 without a reason, as the real server answers in unexpected situations.
    pub(super) fn unexpected(message: impl Into<String>) -> Self {
        Self::new(500, "", message)
    }

    /// 500.
    pub(super) fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "InternalError", format!("Internal error occurred: {}", message.into()))
    }

    /// 503, as from a load balancer whose API servers are down.
    pub(super) fn unavailable() -> Self {
        Self::new(503, "ServiceUnavailable", "the server is currently unable to handle the request")
    }

    /// 504 for a request that timed out in the server; the client does not know whether it took effect.
    pub(super) fn timeout() -> Self {
        let mut error = Self::new(504, "Timeout", "Timeout: request did not complete within requested timeout");
        error.details = json!({});
        error
    }

    /// Seconds for the `Retry-After` header, if the answer has one.
    pub(super) fn retry_after_seconds(&self) -> Option<u64> {
        self.details.get("retryAfterSeconds").and_then(Value::as_u64)
    }

    /// The `Status` object.
    pub(super) fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            tree::as_map(&mut status).insert("reason".to_owned(), json!(self.reason));
        }
        if let (Some(map), false) = (status.as_object_mut(), self.details.is_null()) {
            map.insert("details".to_owned(), self.details.clone());
        }
        status
    }
}

/// The reason of a cause, derived from its message.
fn cause(message: &str) -> &'static str {
    let begins = [
        ("Required value", "FieldValueRequired"),
        ("Duplicate value", "FieldValueDuplicate"),
        ("Unsupported value", "FieldValueNotSupported"),
        ("Forbidden", "FieldValueForbidden"),
        ("Too long", "FieldValueTooLong"),
    ];
    match begins.into_iter().find(|(begin, _)| message.starts_with(begin)) {
        Some((_, reason)) => reason,
        None if message.contains(" in body must be of type ") => "FieldValueTypeInvalid",
        None => "FieldValueInvalid",
    }
}
