//! Parsing of HTTP requests.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::Query;
use http::request::Parts;
use http::{Method, header};

use super::calls::Verb;
use super::error::{ApiError, ApiResult};
use super::patch::PatchKind;
use super::resource::{Registry, Resource};
use super::state::Place;

/// A call to a resource.
pub(super) struct Request {
    pub(super) verb: Verb,
    pub(super) resource: Arc<Resource>,
    pub(super) place: Place,
    /// For lists and watches: whether they cover one namespace only.
    pub(super) in_namespace: bool,
    pub(super) patch: Option<PatchKind>,
    pub(super) query: Parameters,
    /// The caller, from the `User-Agent`.
    pub(super) user_agent: String,
    pub(super) form: Form,
}

/// The form in which a client requests lists and objects: the first one that it accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Form {
    /// Complete.
    #[default]
    Whole,
    /// As a `meta/v1` Table.
    Table,
    /// As `meta/v1` PartialObjectMetadata.
    Metadata,
}

/// The query parameters.
#[derive(Default)]
pub(super) struct Parameters(HashMap<String, String>);

impl Parameters {
    /// A parameter's value; empty if it is absent.
    pub(super) fn text(&self, name: &str) -> &str {
        self.0.get(name).map(String::as_str).unwrap_or_default()
    }

    /// Whether a parameter is `true` or `1`.
    pub(super) fn flag(&self, name: &str) -> bool {
        matches!(self.text(name), "true" | "1")
    }

    /// A parameter as a number; `None` if it is absent.
    pub(super) fn number(&self, name: &str) -> ApiResult<Option<u64>> {
        match self.text(name) {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(|_| {
                ApiError::bad_request(format!("invalid value for query parameter {name}: \"{text}\": must be a number"))
            }),
        }
    }
}

/// The query parameters of a request.
pub(super) fn parameters(parts: &Parts) -> ApiResult<Parameters> {
    let Query(pairs) = Query::try_from_uri(&parts.uri).map_err(|error| ApiError::bad_request(error.to_string()))?;
    Ok(Parameters(pairs))
}

/// Parses a call to a resource.
///
/// # Errors
/// 404 for an unknown path, 405 for a method that the path does not support, 415 for an unknown patch format.
pub(super) fn parse(registry: &Registry, parts: &Parts) -> ApiResult<Request> {
    let segments: Vec<&str> = parts.uri.path().split('/').filter(|segment| !segment.is_empty()).collect();
    let (group, version, rest) = match segments.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return Err(ApiError::no_such_path()),
    };
    let find = |plural: &str| registry.find(group, version, plural);
    let found = match rest {
        // `namespaces/x/status` is the status of a Namespace, `namespaces/x/pods` are the Pods in it.
        ["namespaces", namespace, plural, rest @ ..] if find(plural).is_some() => {
            find(plural).map(|resource| (resource, Some(*namespace), rest))
        }
        [plural, rest @ ..] => find(plural).map(|resource| (resource, None, rest)),
        [] => None,
    };
    let (resource, namespace, rest) = found.ok_or_else(ApiError::no_such_path)?;
    if namespace.is_some() && !resource.namespaced {
        return Err(ApiError::no_such_path());
    }
    let (name, subresource) = match rest {
        [] => ("", ""),
        [name] => (*name, ""),
        [name, "status"] if resource.status_subresource => (*name, "status"),
        _ => return Err(ApiError::no_such_path()),
    };
    if !name.is_empty() && resource.namespaced && namespace.is_none() {
        return Err(ApiError::no_such_path());
    }
    let query = parameters(parts)?;
    let verb = match (&parts.method, name.is_empty()) {
        (&Method::GET, true) if query.flag("watch") => Verb::Watch,
        (&Method::GET, true) => Verb::List,
        (&Method::GET, false) => Verb::Get,
        (&Method::POST, true) => Verb::Create,
        (&Method::PUT, false) => Verb::Update,
        (&Method::PATCH, false) => Verb::Patch,
        (&Method::DELETE, false) if subresource.is_empty() => Verb::Delete,
        (&Method::DELETE, true) => Verb::DeleteCollection,
        _ => return Err(ApiError::method_not_allowed()),
    };
    if verb == Verb::Create && resource.namespaced && namespace.is_none() {
        return Err(ApiError::method_not_allowed());
    }
    let header = |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let patch = match verb {
        Verb::Patch => Some(PatchKind::from_content_type(header(header::CONTENT_TYPE))?),
        _ => None,
    };
    Ok(Request {
        verb,
        place: Place {
            namespace: namespace.unwrap_or_default().to_owned(),
            name: name.to_owned(),
            subresource: subresource.to_owned(),
        },
        in_namespace: namespace.is_some(),
        patch,
        user_agent: header(header::USER_AGENT).split('/').next().unwrap_or_default().to_owned(),
        form: Form::of(header(header::ACCEPT)),
        resource,
        query,
    })
}

impl Form {
    fn of(accept: &str) -> Self {
        let mut parts = accept.split(',').next().unwrap_or_default().split(';').map(str::trim);
        let is_json = parts.next() == Some("application/json");
        let parts: Vec<&str> = parts.collect();
        match parts.iter().find_map(|part| part.strip_prefix("as=")) {
            Some("Table") if is_json && parts.contains(&"v=v1") => Self::Table,
            Some("PartialObjectMetadata" | "PartialObjectMetadataList") if is_json && parts.contains(&"v=v1") => {
                Self::Metadata
            }
            _ => Self::Whole,
        }
    }
}
