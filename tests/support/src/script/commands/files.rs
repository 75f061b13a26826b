//! Checks of output and files.

use regex::RegexBuilder;

use super::{Outcome, Printed, exactly};
use crate::script::world::World;

pub(super) fn stdout(world: &World, arguments: &[&str]) -> Outcome {
    let [pattern] = exactly(arguments, "stdout PATTERN")?;
    find(pattern, &world.stdout, "what was printed")
}

pub(super) fn stderr(world: &World, arguments: &[&str]) -> Outcome {
    let [pattern] = exactly(arguments, "stderr PATTERN")?;
    find(pattern, &world.stderr, "the failure")
}

pub(super) fn grep(world: &World, arguments: &[&str]) -> Outcome {
    let [pattern, file] = exactly(arguments, "grep PATTERN FILE")?;
    find(pattern, world.file(file)?, file)
}

/// Compares two texts line by line, ignoring trailing blanks and empty lines at the end.
pub(super) fn cmp(world: &World, arguments: &[&str]) -> Outcome {
    let [left, right] = exactly(arguments, "cmp FILE FILE, where stdout and stderr are files, too")?;
    let lines = |file: &str| -> Result<Vec<String>, String> {
        Ok(world.file(file)?.trim_end().lines().map(|line| line.trim_end().to_owned()).collect())
    };
    let (found, wanted) = (lines(left)?, lines(right)?);
    if found == wanted {
        return Ok(Printed::Unchanged);
    }
    let all = found.len().max(wanted.len());
    let different = (0..all).find(|index| found.get(*index) != wanted.get(*index)).unwrap_or_default();
    let show = |lines: &[String]| lines.get(different).map_or("(ends)".to_owned(), |line| format!("{line:?}"));
    Err(format!(
        "{left} and {right} differ from line {}: {} and {}\n{left} is\n{}",
        different + 1,
        show(&found),
        show(&wanted),
        found.join("\n")
    ))
}

fn find(pattern: &str, text: &str, name: &str) -> Outcome {
    let regex = RegexBuilder::new(pattern).multi_line(true).build().map_err(|error| error.to_string())?;
    if regex.is_match(text) { Ok(Printed::Unchanged) } else { Err(format!("{pattern} is not in {name}:\n{text}")) }
}
