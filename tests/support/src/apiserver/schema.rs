//! Schemas: how lists and maps merge, and for custom resources which values are valid.
//!
//! Built-in kinds have *open* schemas that only describe merging; wrong types are found by decoding into the kind's own
//! type. A custom resource has the structural schema of its CustomResourceDefinition: unknown fields are pruned, and
//! type, `required`, `enum`, bounds of numbers, strings and lists, and `format: cidr` are checked. `pattern`, other
//! formats, `oneOf` and the like, defaults and CEL rules are not.

use std::collections::BTreeMap;

use serde_json::Value;

/// Merging of a list (`x-kubernetes-list-type`).
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum ListKind {
    /// Replaced as a whole.
    #[default]
    Atomic,
    /// Scalars, each at most once.
    Set,
    /// Objects identified by these fields.
    Map(Vec<String>),
}

/// The schema of one value.
#[derive(Clone, Debug, Default)]
pub(super) struct Schema {
    fields: BTreeMap<String, Schema>,
    values: Option<Box<Schema>>,
    items: Option<Box<Schema>>,
    pub(super) list: ListKind,
    /// A map that is replaced as a whole (`x-kubernetes-map-type: atomic`).
    pub(super) atomic_map: bool,
    /// Unknown fields are preserved.
    open: bool,
    checks: Checks,
}

#[derive(Clone, Debug, Default)]
struct Checks {
    kind: Option<String>,
    /// `format: cidr`
    cidr: bool,
    int_or_string: bool,
    nullable: bool,
    required: Vec<String>,
    allowed: Vec<Value>,
    minimum: Option<f64>,
    maximum: Option<f64>,
    min_size: Option<u64>,
    max_size: Option<u64>,
}

/// Accepts everything: lists are atomic, all fields are kept.
static OPEN: Schema = Schema {
    fields: BTreeMap::new(),
    values: None,
    items: None,
    list: ListKind::Atomic,
    atomic_map: false,
    open: true,
    checks: Checks {
        kind: None,
        cidr: false,
        int_or_string: false,
        nullable: true,
        required: Vec::new(),
        allowed: Vec::new(),
        minimum: None,
        maximum: None,
        min_size: None,
        max_size: None,
    },
};

impl Schema {
    /// An object of a built-in kind: only its metadata is described.
    pub(super) fn built_in() -> Self {
        OPEN.clone().with_metadata()
    }

    /// An object of a custom resource. `source` is the `openAPIV3Schema` of one version.
    pub(super) fn custom(source: &Value) -> Self {
        let mut schema = Self::parse(source);
        for field in ["apiVersion", "kind"] {
            schema.fields.entry(field.to_owned()).or_insert_with(|| OPEN.clone());
        }
        schema.fields.insert("metadata".to_owned(), OPEN.clone());
        schema.with_metadata()
    }

    fn with_metadata(self) -> Self {
        self.list_map("metadata.ownerReferences", &["uid"]).list_set("metadata.finalizers")
    }

    /// Declares the list at a dotted path to be a list of objects identified by `keys`; `[]` descends into a list's
    /// items.
    pub(super) fn list_map(mut self, path: &str, keys: &[&str]) -> Self {
        self.place(path).list = ListKind::Map(keys.iter().map(|key| (*key).to_owned()).collect());
        self
    }

    /// Declares the list at a dotted path to be a set of scalars.
    pub(super) fn list_set(mut self, path: &str) -> Self {
        self.place(path).list = ListKind::Set;
        self
    }

    /// Declares the map at a dotted path to be atomic.
    pub(super) fn map_atomic(mut self, path: &str) -> Self {
        self.place(path).atomic_map = true;
        self
    }

    fn place(&mut self, path: &str) -> &mut Self {
        path.split('.').fold(self, |schema, step| match step {
            "[]" => schema.items.get_or_insert_with(|| Box::new(OPEN.clone())),
            field => schema.fields.entry(field.to_owned()).or_insert_with(|| OPEN.clone()),
        })
    }

    fn parse(source: &Value) -> Self {
        let text = |field: &str| source.get(field).and_then(Value::as_str);
        let flag = |field: &str| source.get(field).and_then(Value::as_bool).unwrap_or_default();
        let names = |field: &str| -> Vec<String> {
            let list = source.get(field).and_then(Value::as_array);
            list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let size = |names: [&str; 3]| names.iter().find_map(|name| source.get(*name)).and_then(Value::as_u64);
        let additional = source.get("additionalProperties");
        Self {
            fields: source
                .get("properties")
                .and_then(Value::as_object)
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), Self::parse(schema)))
                .collect(),
            values: match additional {
                Some(Value::Bool(true)) => Some(Box::new(OPEN.clone())),
                Some(schema @ Value::Object(_)) => Some(Box::new(Self::parse(schema))),
                _ => None,
            },
            items: source.get("items").map(|schema| Box::new(Self::parse(schema))),
            list: match text("x-kubernetes-list-type") {
                Some("set") => ListKind::Set,
                Some("map") => ListKind::Map(names("x-kubernetes-list-map-keys")),
                _ => ListKind::Atomic,
            },
            atomic_map: text("x-kubernetes-map-type") == Some("atomic"),
            open: flag("x-kubernetes-preserve-unknown-fields"),
            checks: Checks {
                kind: text("type").map(str::to_owned),
                cidr: text("format") == Some("cidr"),
                int_or_string: flag("x-kubernetes-int-or-string"),
                nullable: flag("nullable"),
                required: names("required"),
                allowed: source.get("enum").and_then(Value::as_array).cloned().unwrap_or_default(),
                minimum: source.get("minimum").and_then(Value::as_f64),
                maximum: source.get("maximum").and_then(Value::as_f64),
                min_size: size(["minLength", "minItems", "minProperties"]),
                max_size: size(["maxLength", "maxItems", "maxProperties"]),
            },
        }
    }

    /// The schema of a field of this map.
    pub(super) fn field(&self, name: &str) -> &Self {
        self.fields.get(name).or(self.values.as_deref()).unwrap_or(&OPEN)
    }

    /// The schema of the items of this list.
    pub(super) fn items(&self) -> &Self {
        self.items.as_deref().unwrap_or(&OPEN)
    }

    /// Prunes unknown fields, and `null` where it is not allowed.
    pub(super) fn prune(&self, value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|name, value| {
                    let known = self.fields.get(name).or(self.values.as_deref());
                    match known {
                        Some(schema) => !value.is_null() || schema.checks.nullable,
                        None => self.open,
                    }
                });
                for (name, value) in map.iter_mut() {
                    self.field(name).prune(value);
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|item| self.items().prune(item)),
            _ => {}
        }
    }

    /// The path of the first unknown field.
    pub(super) fn unknown(&self, path: &str, value: &Value) -> Option<String> {
        match value {
            Value::Object(map) => map.iter().find_map(|(name, value)| {
                let place = format!("{path}.{name}");
                match self.fields.get(name).or(self.values.as_deref()) {
                    Some(schema) => schema.unknown(&place, value),
                    None if self.open => None,
                    None => Some(place),
                }
            }),
            Value::Array(list) => list
                .iter()
                .enumerate()
                .find_map(|(index, item)| self.items().unknown(&format!("{path}[{index}]"), item)),
            _ => None,
        }
    }

    /// Adds (field path, problem) pairs for all violations of the schema.
    pub(super) fn check(&self, path: &str, value: &Value, problems: &mut Vec<(String, String)>) {
        let checks = &self.checks;
        let mut report = |text: String| problems.push((path.to_owned(), text));
        if value.is_null() && checks.nullable {
            return;
        }
        if let Some(wanted) = checks.kind.as_deref() {
            let fits = match wanted {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "boolean" => value.is_boolean(),
                "integer" => value.is_i64() || value.is_u64(),
                "number" => value.is_number(),
                _ => true,
            };
            if !fits {
                let found = type_name(value);
                return report(format!(
                    "Invalid value: \"{found}\": {path} in body must be of type {wanted}: \"{found}\""
                ));
            }
        }
        if checks.cidr && value.as_str().is_some_and(|text| text.parse::<ipnet::IpNet>().is_err()) {
            return report(format!("Invalid value: {value}: {path} in body must be of type cidr: {value}"));
        }
        if checks.int_or_string && !(value.is_string() || value.is_i64() || value.is_u64()) {
            return report(format!("Invalid value: {value}: must be an integer or a string"));
        }
        if !checks.allowed.is_empty() && !checks.allowed.contains(value) {
            let list: Vec<String> = checks.allowed.iter().map(Value::to_string).collect();
            report(format!("Unsupported value: {value}: supported values: {}", list.join(", ")));
        }
        if let Some(number) = value.as_f64() {
            if let Some(minimum) = checks.minimum.filter(|minimum| number < *minimum) {
                report(format!("Invalid value: {value}: {path} in body should be greater than or equal to {minimum}"));
            }
            if let Some(maximum) = checks.maximum.filter(|maximum| number > *maximum) {
                report(format!("Invalid value: {value}: {path} in body should be less than or equal to {maximum}"));
            }
        }
        let size = match value {
            Value::String(text) => Some(text.chars().count()),
            Value::Array(list) => Some(list.len()),
            Value::Object(map) => Some(map.len()),
            _ => None,
        };
        if let Some(size) = size.and_then(|size| u64::try_from(size).ok()) {
            if checks.min_size.is_some_and(|minimum| size < minimum) {
                report(format!("Invalid value: {value}: has a size of {size}, below the minimum"));
            }
            if checks.max_size.is_some_and(|maximum| size > maximum) {
                report(format!("Too long: has a size of {size}, above the maximum"));
            }
        }
        match value {
            Value::Object(map) => {
                for name in checks.required.iter().filter(|name| !map.contains_key(*name)) {
                    problems.push((join(path, name), "Required value".to_owned()));
                }
                for (name, value) in map {
                    self.field(name).check(&join(path, name), value, problems);
                }
            }
            Value::Array(list) => {
                for (index, item) in list.iter().enumerate() {
                    self.items().check(&format!("{path}[{index}]"), item, problems);
                }
                self.check_keys(path, list, problems);
            }
            _ => {}
        }
    }

    /// Elements of sets and keyed lists must be unique.
    fn check_keys(&self, path: &str, list: &[Value], problems: &mut Vec<(String, String)>) {
        if self.list == ListKind::Atomic {
            return;
        }
        let steps: Vec<Option<String>> = list.iter().map(|item| super::fields::item_step(&self.list, item)).collect();
        for (index, step) in steps.iter().enumerate() {
            let place = format!("{path}[{index}]");
            match step {
                None => problems.push((place, "Required value: the fields that tell items apart".to_owned())),
                Some(_) if steps.iter().take(index).any(|earlier| earlier == step) => {
                    problems.push((place, format!("Duplicate value: {}", list.get(index).unwrap_or(&Value::Null))));
                }
                Some(_) => {}
            }
        }
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}
