//! Validation of `metadata`: names, labels, annotations, owner references and finalizers.

use serde_json::Value;

use super::resource::Resource;
use super::tree;

/// Maximum length of `generateName` in a generated name, which leaves room for five random characters.
const GENERATED_PREFIX: usize = 58;

/// (field path, problem) pairs for everything invalid in an object's metadata.
pub(super) fn problems(resource: &Resource, object: &Value) -> Vec<(String, String)> {
    let mut problems = Vec::new();
    let mut report = |field: &str, text: String| problems.push((field.to_owned(), text));

    let name = tree::text(object, "/metadata/name");
    if let Some(text) = wrong_name(resource, name) {
        report("metadata.name", format!("Invalid value: \"{name}\": {text}"));
    }
    for field in ["labels", "annotations"] {
        let Some(map) = object.pointer(&format!("/metadata/{field}")).and_then(Value::as_object) else { continue };
        let place = format!("metadata.{field}");
        for (key, value) in map {
            if !is_qualified_name(key) {
                report(
                    &place,
                    format!(
                        "Invalid value: \"{key}\": name part must consist of alphanumeric characters, '-', '_' or '.'"
                    ),
                );
            }
            match value.as_str() {
                None => report(&place, format!("Invalid value: {value}: must be a string")),
                Some(text) if field == "labels" && !is_label_value(text) => {
                    report(
                        &place,
                        format!(
                            "Invalid value: \"{text}\": a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
                        ),
                    );
                }
                Some(_) => {}
            }
        }
    }
    let mut controllers = 0;
    for owner in tree::list(object, "/metadata/ownerReferences") {
        for field in ["apiVersion", "kind", "name", "uid"] {
            if tree::text(owner, &format!("/{field}")).is_empty() {
                report(
                    &format!("metadata.ownerReferences.{field}"),
                    "Invalid value: \"\": must not be empty".to_owned(),
                );
            }
        }
        if (tree::text(owner, "/apiVersion"), tree::text(owner, "/kind")) == ("v1", "Event") {
            report(
                "metadata.ownerReferences",
                "Invalid value: \"/v1, Kind=Event\": /v1, Kind=Event is disallowed from being an owner".to_owned(),
            );
        }
        controllers += u32::from(owner.get("controller") == Some(&Value::Bool(true)));
    }
    if controllers > 1 {
        report(
            "metadata.ownerReferences",
            "Invalid value: only one reference can have controller set to true".to_owned(),
        );
    }
    for finalizer in tree::list(object, "/metadata/finalizers").iter().filter_map(Value::as_str) {
        if !is_qualified_name(finalizer) {
            report("metadata.finalizers", format!("Invalid value: \"{finalizer}\": name is not a qualified name"));
        }
    }
    problems
}

/// A generated name. `random` is a source of numbers.
pub(super) fn generate_name(prefix: &str, mut random: impl FnMut() -> u32) -> String {
    // Kubernetes omits vowels and look-alikes, so that no words are formed.
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut name: String = prefix.chars().take(GENERATED_PREFIX).collect();
    for _ in 0..5 {
        let letter = ALPHABET.iter().cycle().nth(random() as usize % ALPHABET.len());
        name.extend(letter.map(|letter| char::from(*letter)));
    }
    name
}

/// What is wrong with a name; `None` if it is valid.
fn wrong_name(resource: &Resource, name: &str) -> Option<&'static str> {
    let label = matches!((resource.group.as_str(), resource.plural.as_str()), ("", "namespaces" | "services"));
    let (fits, text) = if label {
        (
            is_dns_label(name),
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character",
        )
    } else {
        (
            is_dns_subdomain(name),
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character",
        )
    };
    (!fits).then_some(text)
}

fn is_dns_label(text: &str) -> bool {
    text.len() <= 63
        && ends_alphanumeric(text)
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

fn is_dns_subdomain(text: &str) -> bool {
    let part = |part: &str| {
        ends_alphanumeric(part) && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    text.len() <= 253 && text.split('.').all(part)
}

fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_name_part(text)
}

fn is_name_part(text: &str) -> bool {
    text.len() <= 63
        && ends_alphanumeric(text)
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

pub(super) fn is_qualified_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(&prefix.to_ascii_lowercase()) && is_name_part(name),
        None => is_name_part(text),
    }
}

fn ends_alphanumeric(text: &str) -> bool {
    let fits = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    fits(text.chars().next()) && fits(text.chars().next_back())
}
