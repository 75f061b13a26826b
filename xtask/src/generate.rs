//! Generated files, and the check that they are up to date.
//!
//! Generated files are committed, so that readers and reviews see them.

mod maps;

use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A generator and its output.
enum Generator {
    /// An example that writes files to the folder given as its last argument; they belong into `folder` and `copied`.
    Folder { example: &'static str, folder: &'static str, copied: &'static str },
    /// An example that prints the content of `file`.
    File { example: &'static str, file: &'static str },
    /// A function that returns the part of `file` between `<!-- generated: NAME -->` and `<!-- /generated -->`.
    Region { make: fn(&Workspace) -> Result<String>, file: &'static str, name: &'static str },
}

impl Generator {
    /// The generated file or folder.
    fn makes(&self) -> &str {
        match self {
            Self::Folder { folder, .. } => folder,
            Self::File { file, .. } | Self::Region { file, .. } => file,
        }
    }
}

const GENERATORS: [Generator; 5] = [
    Generator::Folder { example: "gen", folder: "crds", copied: "charts/cistern/crds" },
    Generator::File { example: "settings", file: "agent/core/settings.md" },
    Generator::File { example: "command-line", file: "agent/command-line.md" },
    Generator::File { example: "observing", file: "agent/observing.md" },
    Generator::Region { make: maps::table, file: "agent-ebpf/README.md", name: "maps" },
];

/// Options of `gen`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Only files (or their folders) whose path contains this
    path: Option<String>,
    /// Change nothing; fail if a committed file differs from the generated one
    #[arg(long)]
    check: bool,
}

/// Writes generated files that are outdated, or with `--check` fails if there are any.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let path = options.path.as_deref().unwrap_or_default();
    if options.check { compare(workspace, path) } else { write(workspace, path) }
}

fn write(workspace: &Workspace, wanted: &str) -> Result<()> {
    for (file, content) in fresh(workspace, wanted)? {
        let path = workspace.root().join(&file);
        let up_to_date = std::fs::read_to_string(&path).is_ok_and(|committed| committed == content);
        if !up_to_date {
            std::fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        }
        eprintln!("gen: {} {}", file.display(), if up_to_date { "unchanged" } else { "written" });
    }
    Ok(())
}

/// Fails if a committed file differs from its generator's output, and shows the first line that differs. Files whose
/// path does not contain `wanted` are skipped.
pub(crate) fn compare(workspace: &Workspace, wanted: &str) -> Result<()> {
    let mut stale = Vec::new();
    for (file, content) in fresh(workspace, wanted)? {
        let committed = std::fs::read_to_string(workspace.root().join(&file)).unwrap_or_default();
        if let Some(difference) = first_difference(&committed, &content) {
            stale.push(format!("{}:{difference}", file.display()));
        }
    }
    if stale.is_empty() {
        return Ok(());
    }
    bail!("outdated; run `cargo xtask gen`:\n  {}", stale.join("\n  "))
}

/// The expected content of each generated file.
fn fresh(workspace: &Workspace, wanted: &str) -> Result<BTreeMap<PathBuf, String>> {
    let mut files = BTreeMap::new();
    for generator in GENERATORS.iter().filter(|generator| generator.makes().contains(wanted)) {
        match *generator {
            Generator::Folder { example, folder, copied } => {
                let empty = workspace.metadata()?.target_directory.join("generated").join(folder);
                if empty.exists() {
                    std::fs::remove_dir_all(&empty).with_context(|| format!("emptying {}", empty.display()))?;
                }
                std::fs::create_dir_all(&empty).with_context(|| format!("making {}", empty.display()))?;
                process::output(example_of_ours(workspace, example).arg("--").arg(&empty))?;
                let made = read_folder(&empty)?;
                if made.is_empty() {
                    bail!("the generator of {folder} wrote no file");
                }
                for to in [folder, copied] {
                    files.extend(made.iter().map(|(name, text)| (Path::new(to).join(name), text.clone())));
                }
            }
            Generator::File { example, file } => {
                files.insert(file.into(), process::output(&mut example_of_ours(workspace, example))?);
            }
            Generator::Region { make, file, name } => {
                let path = workspace.root().join(file);
                let current = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
                let filled = replace_region(&current, name, &make(workspace)?).with_context(|| file.to_owned())?;
                files.insert(file.into(), filled);
            }
        }
    }
    Ok(files)
}

/// No package is selected: another selection than that of the other builds would unify other features, and rebuild the
/// dependencies.
fn example_of_ours(workspace: &Workspace, example: &str) -> Command {
    let mut command = workspace.cargo();
    command.args(["run", "--quiet", "--locked", "--example", example]);
    command
}

/// Name and content of each file in `folder`.
fn read_folder(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        files.extend(path.file_name().map(|name| (PathBuf::from(name), text)));
    }
    Ok(files)
}

/// Replaces the text between the marks of the region `name` by `made`.
fn replace_region(text: &str, name: &str, made: &str) -> Result<String> {
    let (start, end) = (format!("<!-- generated: {name} -->\n"), "<!-- /generated -->");
    let (before, rest) = text.split_once(&start).with_context(|| format!("has no line `{}`", start.trim_end()))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("has no `{end}` after `{}`", start.trim_end()))?;
    Ok(format!("{before}{start}\n{}\n\n{end}{after}", made.trim_matches('\n')))
}

/// The first line in which two texts differ, with both versions.
fn first_difference(committed: &str, generated: &str) -> Option<String> {
    if committed == generated {
        return None;
    }
    let (mut left, mut right) = (committed.lines(), generated.lines());
    let mut number = 1;
    loop {
        match (left.next(), right.next()) {
            (None, None) => return Some(format!("{number}: the end of the file differs")),
            (a, b) if a == b => number += 1,
            (a, b) => {
                let shown =
                    |line: Option<&str>| line.map_or("the end of the file".to_owned(), |line| format!("{line:?}"));
                return Some(format!("{number}: has {}, expected {}", shown(a), shown(b)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_replaced_and_the_rest_kept() {
        let text = "# Maps\n<!-- generated: maps -->\nold\n<!-- /generated -->\nafter\n";
        let expected = "# Maps\n<!-- generated: maps -->\n\n| a |\n\n<!-- /generated -->\nafter\n";
        assert_eq!(replace_region(text, "maps", "| a |\n").unwrap(), expected);
        assert_eq!(replace_region(expected, "maps", "| a |\n").unwrap(), expected);
        let error = replace_region(text, "keys", "x").unwrap_err().to_string();
        assert!(error.contains("generated: keys"), "{error}");
    }

    #[test]
    fn the_first_difference_is_shown() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n").unwrap(), "2: has \"b\", expected \"c\"");
        assert_eq!(first_difference("a\n", "a\nc\n").unwrap(), "2: has the end of the file, expected \"c\"");
        assert_eq!(first_difference("a", "a\n").unwrap(), "2: the end of the file differs");
    }
}
