//! Words that no file may hold, and files that every folder must.

use crate::workspace::Workspace;
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// A word that no file may hold. Written in halves, so that this file holds none of them.
struct Word {
    halves: (&'static str, &'static str),
    /// Whether letters and digits next to it make it another word.
    whole: bool,
    why: &'static str,
}

const UNFINISHED: &str = "finish it, or describe the limit in the documentation";
const SOMEBODYS: &str = "a path of one machine means nothing on another";

const WORDS: [Word; 9] = [
    Word { halves: ("TO", "DO"), whole: true, why: UNFINISHED },
    Word { halves: ("FIX", "ME"), whole: true, why: UNFINISHED },
    Word { halves: ("XX", "X"), whole: true, why: UNFINISHED },
    Word { halves: ("todo", "!("), whole: false, why: UNFINISHED },
    Word { halves: ("unimplemented", "!("), whole: false, why: UNFINISHED },
    Word { halves: ("/ho", "me/"), whole: false, why: SOMEBODYS },
    Word { halves: ("/ro", "ot/"), whole: false, why: SOMEBODYS },
    Word { halves: ("/Us", "ers/"), whole: false, why: SOMEBODYS },
    Word { halves: ("/wo", "rk/"), whole: false, why: SOMEBODYS },
];

/// Every forbidden word in the tree, and every ticket number: a reason stands in the text itself.
pub(super) fn forbidden(workspace: &Workspace) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for path in workspace.files()? {
        // Cargo writes it.
        if path == Path::new("Cargo.lock") {
            continue;
        }
        let file = workspace.root().join(&path);
        let content = std::fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        let Ok(text) = String::from_utf8(content) else { continue };
        found.extend(judge(&path, &text));
    }
    Ok(found)
}

fn judge(path: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        for word in &WORDS {
            let written = [word.halves.0, word.halves.1].concat();
            if holds(line, &written, word.whole) {
                found.push(format!("{}:{number}: `{written}`: {}", path.display(), word.why));
            }
        }
        if names_ticket(line) {
            found.push(format!("{}:{number}: a ticket number: give the reason instead", path.display()));
        }
    }
    found
}

fn holds(line: &str, word: &str, whole: bool) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        let after = line.get(at + word.len()..).and_then(|text| text.chars().next());
        let joins = |neighbour: Option<char>| neighbour.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
        // Part of a longer path, such as `target/home/x`, is no path of a machine.
        let starts_path =
            !word.starts_with('/') || !before.is_some_and(|c| c.is_alphanumeric() || ")}.-_*/~".contains(c));
        starts_path && !(whole && (joins(before) || joins(after)))
    })
}

/// Whether `line` says "issue" with a number after it.
fn names_ticket(line: &str) -> bool {
    let lower = line.to_lowercase();
    lower.match_indices("issue").any(|(at, word)| {
        let rest = lower.get(at + word.len()..).unwrap_or_default().trim_start_matches([' ', '#']);
        let starts_word = !lower.get(..at).and_then(|text| text.chars().next_back()).is_some_and(char::is_alphanumeric);
        starts_word && rest.starts_with(|first: char| first.is_ascii_digit())
    })
}

/// The top folders, hidden ones aside, that do not explain themselves.
pub(super) fn folders_without_readme(files: &[PathBuf]) -> Vec<String> {
    let mut folders = BTreeSet::new();
    let mut explained = BTreeSet::new();
    for file in files {
        let mut components = file.components();
        let (Some(Component::Normal(top)), Some(Component::Normal(second))) = (components.next(), components.next())
        else {
            continue;
        };
        if top.to_string_lossy().starts_with('.') {
            continue;
        }
        folders.insert(top);
        if second == "README.md" {
            explained.insert(top);
        }
    }
    folders.difference(&explained).map(|folder| format!("{}/README.md is missing", folder.to_string_lossy())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> usize {
        judge(Path::new("a.rs"), text).len()
    }

    #[test]
    fn forbidden_words_are_found() {
        for word in &WORDS {
            let written = [word.halves.0, word.halves.1].concat();
            assert_eq!(count(&format!("// {written} y")), 1, "{written}");
        }
        assert_eq!(count(&["// see iss", "ue #12"].concat()), 1);
        assert_eq!(count(&["Iss", "ue 3 asks"].concat()), 1);
    }

    #[test]
    fn words_that_only_look_alike_pass() {
        for text in
            ["MATODOR", "target/home/x", "~/root/x", "CISTERN_XXXX", "an issue with 3 parts", "tissue 5", "work/"]
        {
            assert_eq!(count(&format!("// {text}")), 0, "{text}");
        }
    }

    #[test]
    fn each_top_folder_explains_itself() {
        let files =
            ["README.md", ".ci/run", "agent/README.md", "agent/src/lib.rs", "crds/src/lib.rs"].map(PathBuf::from);
        assert_eq!(folders_without_readme(&files), ["crds/README.md is missing"]);
    }
}
