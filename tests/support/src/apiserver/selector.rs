//! Label and field selectors of lists and watches.

use serde_json::Value;

use super::error::{ApiError, ApiResult};
use super::resource::Resource;

/// The objects covered by a list or a watch.
#[derive(Clone, Debug, Default)]
pub(super) struct Selector {
    labels: Vec<Requirement>,
    fields: Vec<Requirement>,
}

#[derive(Clone, Debug)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

impl Selector {
    /// Parses the query parameters `labelSelector` and `fieldSelector`.
    ///
    /// # Errors
    /// 400 for bad syntax and for a field without support for selection.
    pub(super) fn parse(resource: &Resource, labels: &str, fields: &str) -> ApiResult<Self> {
        let labels = split(labels).into_iter().map(label_requirement).collect::<ApiResult<Vec<_>>>()?;
        let fields = split(fields).into_iter().map(field_requirement).collect::<ApiResult<Vec<_>>>()?;
        for Requirement { key, .. } in &fields {
            let known =
                ["metadata.name", "metadata.namespace"].contains(&key.as_str()) || resource.selectable.contains(key);
            if !known {
                return Err(ApiError::bad_request(format!("field label not supported: {key}")));
            }
        }
        Ok(Self { labels, fields })
    }

    /// Whether an object is covered.
    pub(super) fn matches(&self, object: &Value) -> bool {
        let label = |key: &str| object.get("metadata")?.get("labels")?.get(key)?.as_str().map(str::to_owned);
        // An absent field is selected as the empty string.
        let field = |path: &str| {
            let found = path.split('.').try_fold(object, |value, step| value.get(step));
            Some(match found {
                Some(Value::String(text)) => text.clone(),
                Some(Value::Null) | None => String::new(),
                Some(other) => other.to_string(),
            })
        };
        self.labels.iter().all(|requirement| requirement.holds(label(&requirement.key)))
            && self.fields.iter().all(|requirement| requirement.holds(field(&requirement.key)))
    }
}

impl Requirement {
    fn holds(&self, found: Option<String>) -> bool {
        match &self.test {
            Test::In(values) => found.is_some_and(|found| values.contains(&found)),
            Test::NotIn(values) => found.is_none_or(|found| !values.contains(&found)),
            Test::Exists => found.is_some(),
            Test::Absent => found.is_none(),
        }
    }
}

/// Splits at commas that are not inside brackets.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    text.split(|c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|part| !part.is_empty())
    .collect()
}

fn label_requirement(text: &str) -> ApiResult<Requirement> {
    if let Some(requirement) = equality(text) {
        return Ok(requirement);
    }
    let words: Vec<&str> = text.splitn(3, char::is_whitespace).collect();
    let test = match words.as_slice() {
        [key] => match key.strip_prefix('!') {
            Some(key) => return Ok(Requirement { key: key.to_owned(), test: Test::Absent }),
            None => Test::Exists,
        },
        [_, operator @ ("in" | "notin"), list] => {
            let inner = list.trim().strip_prefix('(').and_then(|list| list.strip_suffix(')'));
            let Some(inner) = inner else { return Err(unreadable(text)) };
            let values = inner.split(',').map(|value| value.trim().to_owned()).collect();
            if *operator == "in" { Test::In(values) } else { Test::NotIn(values) }
        }
        _ => return Err(unreadable(text)),
    };
    let key = words.first().copied().unwrap_or_default().to_owned();
    Ok(Requirement { key, test })
}

fn field_requirement(text: &str) -> ApiResult<Requirement> {
    equality(text).ok_or_else(|| unreadable(text))
}

fn equality(text: &str) -> Option<Requirement> {
    let (operator, negative) =
        ["!=", "==", "="].into_iter().find(|operator| text.contains(operator)).map(|o| (o, o == "!="))?;
    let (key, value) = text.split_once(operator)?;
    let values = vec![value.trim().to_owned()];
    let test = if negative { Test::NotIn(values) } else { Test::In(values) };
    Some(Requirement { key: key.trim().to_owned(), test })
}

fn unreadable(text: &str) -> ApiError {
    ApiError::bad_request(format!("unable to parse requirement: {text}"))
}
