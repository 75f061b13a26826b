//! Static checks.
//!
//! Each rule is a function that prints its findings, with file and line. All rules run, so that one run reports
//! everything.

mod layers;
mod manifests;
mod text;
mod tokens;

use crate::ebpf;
use crate::generate;
use crate::process::{self, find};
use crate::workspace::Workspace;
use anyhow::{Result, bail};
use std::process::Command;
use std::time::Instant;

/// Options of `check`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Only rules whose name contains this
    pub(crate) rule: Option<String>,
}

/// A convention of the source tree.
struct Rule {
    name: &'static str,
    /// Prints the findings, and fails if there are any.
    check: fn(&Workspace) -> Result<Outcome>,
}

/// The result of a rule that did not fail.
enum Outcome {
    Good,
    /// The rule cannot be checked on this machine, for this reason.
    NotTried(String),
}

const RULES: [Rule; 10] = [
    Rule { name: "layers", check: layers },
    Rule { name: "manifests", check: manifests },
    Rule { name: "unsafe", check: unsafe_code },
    Rule { name: "words", check: words },
    Rule { name: "readmes", check: readmes },
    Rule { name: "format", check: format },
    Rule { name: "lints", check: lints },
    Rule { name: "lints of the kernel programs", check: kernel_lints },
    Rule { name: "generated files", check: generated },
    Rule { name: "dependencies", check: dependencies },
];

/// Checks all rules and returns the names of those that are violated.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<Vec<String>> {
    let mut broken = Vec::new();
    let wanted = options.rule.as_deref().unwrap_or_default();
    for rule in RULES.iter().filter(|rule| rule.name.contains(wanted)) {
        let start = Instant::now();
        let outcome = (rule.check)(workspace);
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(Outcome::Good) => eprintln!("check: {} ok ({seconds:.1} s)", rule.name),
            Ok(Outcome::NotTried(reason)) => eprintln!("check: {} not tried: {reason}", rule.name),
            Err(error) => {
                eprintln!("check: {} BROKEN: {error:#}", rule.name);
                broken.push(rule.name.to_owned());
            }
        }
    }
    Ok(broken)
}

/// Turns findings into an error that lists them.
fn none(findings: &[String]) -> Result<Outcome> {
    if findings.is_empty() {
        return Ok(Outcome::Good);
    }
    bail!("{} found\n  {}", findings.len(), findings.join("\n  "))
}

fn layers(workspace: &Workspace) -> Result<Outcome> {
    none(&layers::violations(&tokens::rust_files(workspace)?))
}

fn manifests(workspace: &Workspace) -> Result<Outcome> {
    none(&manifests::violations(&workspace.metadata()?.packages))
}

fn unsafe_code(workspace: &Workspace) -> Result<Outcome> {
    none(&tokens::misplaced_unsafe(&tokens::rust_files(workspace)?))
}

fn words(workspace: &Workspace) -> Result<Outcome> {
    none(&text::forbidden(workspace)?)
}

fn readmes(workspace: &Workspace) -> Result<Outcome> {
    none(&text::folders_without_readme(&workspace.files()?))
}

fn format(workspace: &Workspace) -> Result<Outcome> {
    process::run(workspace.cargo().args(["fmt", "--all", "--check"]))?;
    Ok(Outcome::Good)
}

fn lints(workspace: &Workspace) -> Result<Outcome> {
    process::run(workspace.cargo().args(["clippy", "--locked", "--all-targets", "--", "-D", "warnings"]))?;
    Ok(Outcome::Good)
}

fn kernel_lints(workspace: &Workspace) -> Result<Outcome> {
    let toolchain = match ebpf::toolchain() {
        Ok(toolchain) => toolchain,
        Err(refused) => return Ok(Outcome::NotTried(refused.join("; "))),
    };
    let Some(mut clippy) = toolchain.clippy(workspace) else {
        return Ok(Outcome::NotTried(format!("{toolchain} has no clippy")));
    };
    process::run(&mut clippy)?;
    Ok(Outcome::Good)
}

fn generated(workspace: &Workspace) -> Result<Outcome> {
    generate::compare(workspace, "")?;
    Ok(Outcome::Good)
}

/// Licences, bans and sources, which need no network. Advisories are checked when dependencies are updated.
fn dependencies(workspace: &Workspace) -> Result<Outcome> {
    if find("cargo-deny").is_none() {
        return Ok(Outcome::NotTried("cargo-deny is not installed".to_owned()));
    }
    let mut deny = Command::new("cargo-deny");
    deny.current_dir(workspace.root()).args(["--offline", "--locked", "--all-features", "check"]);
    process::run(deny.args(["--hide-inclusion-graph", "bans", "licenses", "sources"]))?;
    Ok(Outcome::Good)
}
