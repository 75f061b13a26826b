//! Rust sources as tokens: without comments and strings, but with the content of macros.

use crate::workspace::Workspace;
use anyhow::{Context, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A Rust file.
pub(super) struct Source {
    /// Relative to the root of the workspace, with `/`.
    pub(super) path: PathBuf,
    pub(super) tokens: TokenStream,
}

/// All Rust files that git knows.
pub(super) fn rust_files(workspace: &Workspace) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in workspace.files()? {
        if path.extension().is_some_and(|extension| extension == "rs") {
            let file = workspace.root().join(&path);
            let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
            sources.push(parse(path, &text)?);
        }
    }
    Ok(sources)
}

/// Tokenises `text`.
pub(super) fn parse(path: PathBuf, text: &str) -> Result<Source> {
    let tokens = TokenStream::from_str(text)
        .map_err(|error| anyhow!("{}:{}: {error}", path.display(), error.span().start().line))?;
    Ok(Source { path, tokens })
}

/// A path such as `crate::api::client`, and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reference {
    pub(super) segments: Vec<String>,
    pub(super) line: usize,
}

/// All paths in `tokens`. Branches of `use a::{b, c::d}` are returned one by one, and paths that start with `self` or
/// `super` are resolved against `module`, the segments of the module (after `crate`) that contains the tokens.
pub(super) fn references(tokens: &TokenStream, module: &[String]) -> Vec<Reference> {
    let mut found = Vec::new();
    collect(tokens, module, &mut found);
    found
}

fn collect(tokens: &TokenStream, module: &[String], found: &mut Vec<Reference>) {
    let tokens: Vec<TokenTree> = tokens.clone().into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Ident(name) if name == "mod" => {
                // `mod name { … }`: its content is one module deeper.
                if let (Some(TokenTree::Ident(inner)), Some(TokenTree::Group(body))) =
                    (tokens.get(at + 1), tokens.get(at + 2))
                {
                    let mut deeper = module.to_vec();
                    deeper.push(inner.to_string());
                    collect(&body.stream(), &deeper, found);
                    at += 3;
                    continue;
                }
                at += 1;
            }
            TokenTree::Ident(name) if is_path_separator(&tokens, at + 1) && !is_method(&tokens, at) => {
                let line = name.span().start().line;
                at = path(&tokens, at, Vec::new(), line, module, found);
            }
            TokenTree::Group(group) => {
                collect(&group.stream(), module, found);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// Reads the path that starts at `tokens[at]`, below `prefix`, and returns its end.
fn path(
    tokens: &[TokenTree],
    mut at: usize,
    mut prefix: Vec<String>,
    line: usize,
    module: &[String],
    found: &mut Vec<Reference>,
) -> usize {
    loop {
        match tokens.get(at) {
            Some(TokenTree::Ident(name)) => {
                prefix.push(name.to_string());
                at += 1;
            }
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let branches: Vec<TokenTree> = group.stream().into_iter().collect();
                for branch in branches.split(|token| is_mark(Some(token), ',')) {
                    // Nothing stands after a trailing comma.
                    if let Some(first) = branch.first() {
                        path(branch, 0, prefix.clone(), first.span().start().line, module, found);
                    }
                }
                return at + 1;
            }
            _ => break,
        }
        if !is_path_separator(tokens, at) {
            break;
        }
        at += 2;
    }
    if !prefix.is_empty() {
        found.push(Reference { segments: resolve(prefix, module), line });
    }
    at
}

fn is_mark(token: Option<&TokenTree>, mark: char) -> bool {
    matches!(token, Some(TokenTree::Punct(found)) if found.as_char() == mark)
}

fn is_path_separator(tokens: &[TokenTree], at: usize) -> bool {
    is_mark(tokens.get(at), ':') && is_mark(tokens.get(at + 1), ':')
}

/// Whether `tokens[at]` is the method in `value.method::<T>()`.
fn is_method(tokens: &[TokenTree], at: usize) -> bool {
    at.checked_sub(1).is_some_and(|before| is_mark(tokens.get(before), '.'))
}

/// Resolves a path that starts with `self` or `super` to one that starts with `crate`.
fn resolve(segments: Vec<String>, module: &[String]) -> Vec<String> {
    let ups = segments.iter().take_while(|segment| *segment == "super").count();
    let starts_here = segments.first().is_some_and(|first| first == "self");
    if ups == 0 && !starts_here {
        return segments;
    }
    let kept = module.len().saturating_sub(ups);
    let rest = segments.iter().skip(ups.max(1)).filter(|segment| *segment != "self").cloned();
    std::iter::once("crate".to_owned()).chain(module.iter().take(kept).cloned()).chain(rest).collect()
}

/// Where `unsafe` is allowed; clippy requires a `SAFETY` comment for each use.
const UNSAFE_ALLOWED: [&str; 3] = ["agent/src/datapath", "agent/src/netlink/namespace.rs", "agent-ebpf"];

/// All uses of `unsafe` outside of [`UNSAFE_ALLOWED`].
pub(super) fn misplaced_unsafe(sources: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    for source in sources {
        if UNSAFE_ALLOWED.iter().any(|allowed| source.path.starts_with(Path::new(allowed))) {
            continue;
        }
        unsafe_lines(&source.tokens, &mut |line| {
            found.push(format!("{}:{line}: `unsafe` outside of {}", source.path.display(), UNSAFE_ALLOWED.join(", ")));
        });
    }
    found
}

fn unsafe_lines(tokens: &TokenStream, report: &mut impl FnMut(usize)) {
    for token in tokens.clone() {
        match token {
            TokenTree::Ident(word) if word == "unsafe" => report(word.span().start().line),
            TokenTree::Group(group) => unsafe_lines(&group.stream(), report),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str, module: &[&str]) -> Vec<String> {
        let module: Vec<String> = module.iter().map(|segment| (*segment).to_owned()).collect();
        let source = parse(PathBuf::from("a.rs"), text).unwrap();
        references(&source.tokens, &module).iter().map(|reference| reference.segments.join("::")).collect()
    }

    #[test]
    fn branches_of_a_use_are_returned_one_by_one() {
        let text = "use crate::{api::{client, types::Reply as R}, tables::*, cni};";
        assert_eq!(paths(text, &[]), ["crate::api::client", "crate::api::types::Reply", "crate::tables", "crate::cni"]);
    }

    #[test]
    fn paths_in_code_macros_and_types_are_seen() {
        let text = "fn f(x: Vec<crate::app::X>) { assert!(matches!(y, crate::cni::Y { .. })); a.b::<crate::cli::Z>() }";
        assert_eq!(paths(text, &[]), ["crate::app::X", "crate::cni::Y", "crate::cli::Z"]);
    }

    #[test]
    fn comments_and_strings_are_not_seen() {
        let text = "/// [`crate::app`]\n// crate::app\nconst A: &str = \"crate::app\";";
        assert_eq!(paths(text, &[]), [] as [&str; 0]);
    }

    #[test]
    fn relative_paths_are_resolved() {
        let text = "use super::super::app::X; use self::inner::Y; mod tests { use super::*; use super::super::cli; }";
        let expected = ["crate::app::X", "crate::cni::plugin::inner::Y", "crate::cni::plugin", "crate::cni::cli"];
        assert_eq!(paths(text, &["cni", "plugin"]), expected);
    }

    #[test]
    fn lines_are_reported() {
        let source = parse(PathBuf::from("a.rs"), "use crate::{\n    api,\n    cni::x,\n};\n").unwrap();
        let lines: Vec<usize> = references(&source.tokens, &[]).iter().map(|reference| reference.line).collect();
        assert_eq!(lines, [2, 3]);
    }

    #[test]
    fn unsafe_is_found_in_macros_but_not_in_text() {
        let text = "// unsafe\nconst A: &str = \"unsafe\";\nfn f() { g!({ unsafe { h() } }) }\n";
        let at = |path: &str| misplaced_unsafe(&[parse(PathBuf::from(path), text).unwrap()]);
        assert_eq!(at("agent/src/cni/plugin.rs").len(), 1);
        assert!(at("agent/src/cni/plugin.rs").iter().all(|finding| finding.starts_with("agent/src/cni/plugin.rs:3:")));
        assert_eq!(at("agent/src/datapath/maps.rs"), [] as [&str; 0]);
        assert_eq!(at("agent/src/netlink/namespace.rs"), [] as [&str; 0]);
        assert_eq!(at("agent/src/netlink/link.rs").len(), 1);
        assert_eq!(at("agent-ebpf/src/main.rs"), [] as [&str; 0]);
    }
}
