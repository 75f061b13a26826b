//! The table of the kernel programs' maps, read from their declarations.
//!
//! The sources are tokenised, not compiled, so that no toolchain for the eBPF target is needed.

use crate::workspace::Workspace;
use anyhow::{Context, Result, anyhow, bail};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::BTreeMap;
use std::str::FromStr;

/// Declares the maps: `#[btf_map(name = "…")] static NAME: Kind<Key, Value, ENTRIES> = …`.
const DECLARATIONS: &str = "agent-ebpf/src/maps.rs";
/// The purpose of each map (documentation of the constant with its name) and its size.
const NAMES: &str = "agent-ebpf/common/src/map.rs";
/// Declares the fields of keys and values.
const FIELDS: &str = "agent-ebpf/common/src/abi.rs";

/// One line for each map.
pub(super) fn table(workspace: &Workspace) -> Result<String> {
    let read = |file: &str| -> Result<Vec<TokenTree>> {
        let path = workspace.root().join(file);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        tokens(&text).with_context(|| file.to_owned())
    };
    render(&read(DECLARATIONS)?, &read(NAMES)?, &read(FIELDS)?)
}

fn tokens(text: &str) -> Result<Vec<TokenTree>> {
    let stream = TokenStream::from_str(text).map_err(|error| anyhow!("line {}: {error}", error.span().start().line))?;
    Ok(stream.into_iter().collect())
}

fn render(declarations: &[TokenTree], names: &[TokenTree], fields: &[TokenTree]) -> Result<String> {
    let constants = constants(names);
    let structs = structs(fields);
    let mut table = String::from("| map | kind | key | value | entries | holds |\n|---|---|---|---|---|---|\n");
    let maps = maps(declarations)?;
    if maps.is_empty() {
        bail!("{DECLARATIONS} declares no map");
    }
    for map in maps {
        let name = format!("\"{}\"", map.name);
        let meaning = constants
            .values()
            .find(|constant| constant.value == name)
            .map(|constant| constant.meaning.replace(['[', ']'], ""))
            .with_context(|| format!("{NAMES} has no constant that holds {name}"))?;
        let entries = constants.get(&map.entries).map_or(map.entries.as_str(), |constant| constant.value.as_str());
        let shape = |name: &Option<String>| match name {
            None => "index".to_owned(),
            Some(name) => structs.get(name).map_or_else(|| format!("`{name}`"), |fields| fields.join(", ")),
        };
        table.push_str(&format!(
            "| `{}` | {} | {} | {} | {} | {meaning} |\n",
            map.name,
            map.kind,
            shape(&map.key),
            shape(&map.value),
            entries.replace('_', ","),
        ));
    }
    Ok(table)
}

/// A map as it is declared.
#[derive(Debug, PartialEq, Eq)]
struct Map {
    name: String,
    kind: String,
    /// None for arrays.
    key: Option<String>,
    value: Option<String>,
    /// A number, the name of a constant, or an expression.
    entries: String,
}

fn maps(tokens: &[TokenTree]) -> Result<Vec<Map>> {
    let mut maps = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let Some(name) = map_name(token) else { continue };
        // … static NAME : Kind < A , B , C > = …
        let after: Vec<TokenTree> =
            tokens.iter().skip(at).skip_while(|token| !is(token, ":")).skip(1).cloned().collect();
        let kind = after.first().map(ToString::to_string).unwrap_or_default();
        let inside: Vec<TokenTree> = after.into_iter().skip(2).take_while(|token| !is(token, ">")).collect();
        let parameters: Vec<String> =
            inside.split(|token| is(token, ",")).map(|words| words.iter().map(expression).collect()).collect();
        let (key, value, entries) = match parameters.as_slice() {
            [key, value, entries] => (Some(key), value, entries),
            [value, entries] => (None, value, entries),
            _ => bail!("{DECLARATIONS}: the map {name} has {} parameters, expected 2 or 3", parameters.len()),
        };
        let (key, value, entries) = (key.cloned(), Some(value.clone()), entries.clone());
        maps.push(Map { name, kind, key, value, entries });
    }
    Ok(maps)
}

/// The name in `[btf_map(name = "…")]`.
fn map_name(token: &TokenTree) -> Option<String> {
    let TokenTree::Group(attribute) = token else { return None };
    let mut inside = attribute.stream().into_iter();
    if !is(&inside.next()?, "btf_map") {
        return None;
    }
    let TokenTree::Group(arguments) = inside.next()? else { return None };
    let literal = arguments.stream().into_iter().last()?.to_string();
    Some(literal.trim_matches('"').to_owned())
}

/// A parameter's token without the braces around an expression.
fn expression(token: &TokenTree) -> String {
    match token {
        TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
            format!("`{}`", group.stream().to_string().replace(' ', ""))
        }
        other => other.to_string(),
    }
}

fn is(token: &TokenTree, text: &str) -> bool {
    !matches!(token, TokenTree::Group(_)) && token.to_string() == text
}

/// A constant with its documentation.
struct Constant {
    meaning: String,
    /// The source text.
    value: String,
}

/// `/// meaning` and `const NAME: type = value;`, by name.
fn constants(tokens: &[TokenTree]) -> BTreeMap<String, Constant> {
    let mut found = BTreeMap::new();
    let mut meaning = String::new();
    for (at, token) in tokens.iter().enumerate() {
        // `#![doc]` is about the module, not about what follows.
        let is_inner = at.checked_sub(1).and_then(|before| tokens.get(before)).is_some_and(|token| is(token, "!"));
        if let Some(line) = documentation(token).filter(|_| !is_inner) {
            meaning = [meaning, line].join(" ").trim().to_owned();
        } else if is(token, "const") {
            let value = tokens.iter().skip(at).skip_while(|token| !is(token, "=")).nth(1);
            if let (Some(name), Some(value)) = (tokens.get(at + 1), value) {
                let meaning = std::mem::take(&mut meaning);
                found.insert(name.to_string(), Constant { meaning, value: value.to_string() });
            }
        } else if is(token, ";") {
            meaning.clear();
        }
    }
    found
}

/// The text of `#[doc = "…"]`, which is what `///` is.
fn documentation(token: &TokenTree) -> Option<String> {
    let TokenTree::Group(attribute) = token else { return None };
    let mut inside = attribute.stream().into_iter();
    if !is(&inside.next()?, "doc") {
        return None;
    }
    let literal = inside.nth(1)?.to_string();
    Some(literal.trim_matches('"').trim().replace("\\\"", "\""))
}

/// The names of the fields of each struct, without padding and room to grow.
fn structs(tokens: &[TokenTree]) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for (at, token) in tokens.iter().enumerate() {
        let Some(name) = tokens.get(at + 1).filter(|_| is(token, "struct")) else { continue };
        // Parameters may stand between the name and the fields.
        let fields = tokens.iter().skip(at + 2).take_while(|token| !is(token, ";")).find_map(|token| match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group),
            _ => None,
        });
        let Some(body) = fields else { continue };
        let inside: Vec<TokenTree> = body.stream().into_iter().collect();
        let names = inside
            .windows(2)
            .filter_map(|pair| match pair {
                [name @ TokenTree::Ident(_), colon] if is(colon, ":") => Some(name.to_string()),
                _ => None,
            })
            .filter(|name| !["zero", "spare", "room"].contains(&name.as_str()))
            .collect();
        // The second declaration of a structure is its variant for tests.
        found.entry(name.to_string()).or_insert(names);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = r#"
        #[btf_map(name = "cst_rev")]
        pub(crate) static REV: HashMap<RevKey, RevValue, REV_ENTRIES> = HashMap::new();
        #[btf_map(name = "cst_ports")]
        pub(crate) static PORTS: Array<PortWord, 1> = Array::new();
        #[btf_map(name = "cst_counters")]
        pub(crate) static COUNTERS: PerCpuArray<u64, { Counter::ALL.len() }> = PerCpuArray::new();
    "#;
    const NAMES: &str = r#"
        //! About the module.

        /// Every flow by its [`RevKey`].
        pub const REV: &str = "cst_rev";
        /// Ports of the host.
        pub const PORTS: &str = "cst_ports";
        /// Packets.
        pub const COUNTERS: &str = "cst_counters";
        /// Flows at a time.
        pub const REV_ENTRIES: usize = 262_144;
    "#;
    const STRUCTS: &str = "
        pub struct RevKey<const N: usize = 4> { /// The end.\n pub remote: [u8; 4], pub zero: [u8; 3] }
        pub struct RevValue { pub pod: Address, pub pod_port: Port }
        pub struct PortWord { pub bits: u64 }
    ";

    fn rendered(maps: &str, names: &str) -> Result<String> {
        render(&tokens(maps).unwrap(), &tokens(names).unwrap(), &tokens(STRUCTS).unwrap())
    }

    #[test]
    fn each_map_is_a_line() {
        let table = rendered(MAPS, NAMES).unwrap();
        assert_eq!(
            table.lines().skip(2).collect::<Vec<_>>(),
            [
                "| `cst_rev` | HashMap | remote | pod, pod_port | 262,144 | Every flow by its `RevKey`. |",
                "| `cst_ports` | Array | index | bits | 1 | Ports of the host. |",
                "| `cst_counters` | PerCpuArray | index | `u64` | `Counter::ALL.len()` | Packets. |",
            ]
        );
    }

    #[test]
    fn a_map_without_a_documented_name_is_an_error() {
        let error = rendered(MAPS, "").unwrap_err().to_string();
        assert!(error.contains("cst_rev"), "{error}");
        assert!(rendered("", NAMES).is_err());
    }
}
