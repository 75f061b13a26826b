//! Sends the same requests to both servers, and compares their answers.
//!
//! A file of `requests/` is a list of paragraphs, each of which starts with empty servers. A line is a request: `METHOD
//! PATH [BODY]`, for patches `PATCH:merge`, `PATCH:json`, `PATCH:strategic` or `PATCH:apply`, for metadata alone
//! `GET:metadata` or, of a list, `GET:metadata-list`. A watch lasts a second.
//! `{uid:N}` and `{version:N}` are replaced by those of the object in the answer to the Nth request of the paragraph,
//! `{continue:N}` by its list's continue token. For a line that begins with `~` only code and reason are compared, for
//! one with `?` only its effect on other requests; a comment above gives the reason.
//!
//! UIDs and resource versions are compared up to renaming, times and the versions of lists not at all.

use anyhow::{Context, Result, bail, ensure};
use cistern_tests::apiserver::{ApiServer, Options, Upstream};
use http::{Request, header};
use kube::client::Body;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The compared part of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Compared {
    All,
    Outcome,
    Nothing,
}

struct Line {
    number: usize,
    text: String,
    compared: Compared,
}

/// Runs all paragraphs of a file on both servers.
///
/// # Errors
/// The answers that differ.
pub(super) fn run(path: &Path, real: &Arc<Upstream>) -> Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let mut differences = String::new();
    for paragraph in paragraphs(&text) {
        let definitions = cistern_crds::all().iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        let runtime =
            |paused: bool| tokio::runtime::Builder::new_current_thread().enable_all().start_paused(paused).build();
        let small = runtime(true)?.block_on(async {
            let server = ApiServer::new(Options::default());
            for definition in &definitions {
                server.create(definition)?;
            }
            ask_all(&server, &paragraph).await
        })?;
        let real = runtime(false)?.block_on(async {
            ask_all(&ApiServer::in_front_of(real, Options::default(), &definitions)?, &paragraph).await
        })?;
        for (line, (small, real)) in paragraph.iter().zip(small.iter().zip(&real)) {
            let (small, real) = (part(line.compared, small), part(line.compared, real));
            if small != real {
                let mut lines = Vec::new();
                differ("", &small, &real, &mut lines);
                differences.push_str(&format!("line {}: {}\n{}", line.number, line.text, lines.concat()));
            }
        }
    }
    ensure!(differences.is_empty(), "{}: answers differ, small first:\n{differences}", path.display());
    Ok(())
}

fn paragraphs(text: &str) -> Vec<Vec<Line>> {
    let mut paragraphs = vec![Vec::new()];
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() {
            paragraphs.push(Vec::new());
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (compared, text) = match line.split_at_checked(1) {
            Some(("~", rest)) => (Compared::Outcome, rest.trim()),
            Some(("?", rest)) => (Compared::Nothing, rest.trim()),
            _ => (Compared::All, line),
        };
        if let Some(last) = paragraphs.last_mut() {
            last.push(Line { number, text: text.to_owned(), compared });
        }
    }
    paragraphs.retain(|paragraph| !paragraph.is_empty());
    paragraphs
}

/// The answers in comparable form: `{"code", "body"}` or `{"code", "events"}`.
async fn ask_all(server: &ApiServer, lines: &[Line]) -> Result<Vec<Value>> {
    let client = server.client_as("compare");
    let (mut raw, mut answers, mut known) = (Vec::new(), Vec::new(), Known::default());
    for line in lines {
        let request = request(&filled(&line.text, &raw)?).with_context(|| format!("line {}", line.number))?;
        let response = client.send(request).await?;
        let code = response.status().as_u16();
        let body = response.into_body().collect_bytes().await?;
        let text = String::from_utf8_lossy(&body);
        let values: Vec<Value> = serde_json::Deserializer::from_str(&text)
            .into_iter::<Value>()
            .collect::<Result<_, _>>()
            .with_context(|| format!("line {}: {text}", line.number))?;
        raw.push(values.first().cloned().unwrap_or_default());
        let mut answer = json!({"code": code, "body": values});
        known.mask(&mut answer);
        answers.push(answer);
    }
    Ok(answers)
}

/// Replaces references to earlier answers.
fn filled(text: &str, answers: &[Value]) -> Result<String> {
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        filled.push_str(before);
        let hole = after.split_once('}').and_then(|(hole, after)| {
            let (what, number) = hole.split_once(':')?;
            let pointer = match what {
                "uid" => "/metadata/uid",
                "version" => "/metadata/resourceVersion",
                "continue" => "/metadata/continue",
                _ => return None,
            };
            let number: usize = number.parse().ok()?;
            Some((answers.get(number.checked_sub(1)?)?.pointer(pointer)?.as_str()?, after))
        });
        match hole {
            Some((value, after)) => {
                filled.push_str(value);
                rest = after;
            }
            None => {
                filled.push('{');
                rest = after;
            }
        }
    }
    filled.push_str(rest);
    ensure!(!["{uid:", "{version:", "{continue:"].iter().any(|hole| filled.contains(hole)), "nothing for {filled}");
    Ok(filled)
}

fn request(text: &str) -> Result<Request<Body>> {
    let (method, rest) = text.split_once(' ').context("expected METHOD PATH [BODY]")?;
    // The kind of a single object, and of each one in a watch, differs from that of a list.
    let accept = match method {
        "GET:metadata" => "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        "GET:metadata-list" => "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
        _ => "application/json",
    };
    let (path, body) = rest.split_once(' ').unwrap_or((rest, ""));
    let (method, content_type) = match method {
        "PATCH:merge" => ("PATCH", "application/merge-patch+json"),
        "PATCH:json" => ("PATCH", "application/json-patch+json"),
        "PATCH:strategic" => ("PATCH", "application/strategic-merge-patch+json"),
        "PATCH:apply" => ("PATCH", "application/apply-patch+yaml"),
        "GET" | "POST" | "PUT" | "DELETE" => (method, "application/json"),
        "GET:metadata" | "GET:metadata-list" => ("GET", "application/json"),
        other => bail!("{other}: unknown method"),
    };
    let mut path = path.to_owned();
    if path.contains("watch=") {
        path.push_str("&timeoutSeconds=1");
    }
    let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, content_type);
    let request = request.header(header::ACCEPT, accept);
    Ok(request.header(header::USER_AGENT, "compare/1").body(Body::from(body.as_bytes().to_vec()))?)
}

/// UIDs and resource versions, numbered in the order of their occurrence.
#[derive(Default)]
struct Known(BTreeMap<String, String>);

impl Known {
    fn mask(&mut self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                // Field ownership is covered by the small server's own tests.
                map.remove("managedFields");
                // Defaults of Nodes.
                map.retain(|key, value| !["daemonEndpoints", "nodeInfo"].contains(&key.as_str()) && !value.is_null());
                // A real server has other writers, too: its lists have later versions.
                if map.contains_key("items")
                    && let Some(Value::Object(metadata)) = map.get_mut("metadata")
                {
                    metadata.remove("resourceVersion");
                }
                // Some of the real server's encoders include empty values.
                map.retain(|key, value| !["continue", "group"].contains(&key.as_str()) || value.as_str() != Some(""));
                for (key, value) in map.iter_mut() {
                    match (key.as_str(), value.as_str()) {
                        ("resourceVersion" | "uid", Some(text)) if !text.is_empty() => {
                            let next = format!("{key} {}", self.0.len());
                            *value = Value::String(self.0.entry(text.to_owned()).or_insert(next).clone());
                        }
                        ("continue", Some(_)) => *value = json!("continue"),
                        (_, Some(text)) if is_time(text) => *value = json!("time"),
                        _ => self.mask(value),
                    }
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|item| self.mask(item)),
            // Versions and UIDs in strings.
            Value::String(text) => {
                let words = text.split_inclusive([' ', ',', ':', '"']).map(|word| {
                    let bare = word.trim_end_matches([' ', ',', ':', '"']);
                    let end = word.get(bare.len()..).unwrap_or_default();
                    format!("{}{end}", self.0.get(bare).map_or(bare, String::as_str))
                });
                *text = words.collect();
            }
            _ => {}
        }
    }
}

fn is_time(text: &str) -> bool {
    text.parse::<jiff::Timestamp>().is_ok()
}

/// The compared part of an answer; of an error, what clients evaluate: code, reason, and invalid fields.
fn part(compared: Compared, answer: &Value) -> Value {
    let at = |pointer: &str| answer.pointer(pointer).cloned().unwrap_or_default();
    let refused = at("/code").as_u64().is_some_and(|code| code >= 400);
    match compared {
        Compared::Nothing => Value::Null,
        Compared::All if !refused => answer.clone(),
        Compared::Outcome => json!({"code": at("/code"), "reason": at("/body/0/reason")}),
        Compared::All => {
            let causes = at("/body/0/details/causes");
            let cause = |cause: &Value| json!([cause.get("field"), cause.get("reason")]);
            let mut causes: Vec<Value> = causes.as_array().into_iter().flatten().map(cause).collect();
            // Some validations of the real server report an error twice.
            causes.dedup();
            json!({"code": at("/code"), "reason": at("/body/0/reason"), "causes": causes})
        }
    }
}

/// Collects the paths at which two values differ.
fn differ(path: &str, small: &Value, real: &Value, lines: &mut Vec<String>) {
    match (small, real) {
        (Value::Object(left), Value::Object(right)) => {
            let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
            for key in keys {
                let (left, right) = (left.get(key), right.get(key));
                match (left, right) {
                    (Some(left), Some(right)) => differ(&format!("{path}/{key}"), left, right, lines),
                    _ => lines.push(format!("    {path}/{key}\n        {}\n        {}\n", show(left), show(right))),
                }
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (index, (left, right)) in left.iter().zip(right).enumerate() {
                differ(&format!("{path}/{index}"), left, right, lines);
            }
        }
        _ if small == real => {}
        _ => lines.push(format!("    {path}\n        {small}\n        {real}\n")),
    }
}

fn show(value: Option<&Value>) -> String {
    value.map_or("(nothing)".to_owned(), Value::to_string)
}
