//! Every `cases/<feature>/*.txtar` is one test. The language is described in `README.md` beside this file.

use anyhow::Result;
use cistern_tests::harness::{files, timed};
use cistern_tests::script;
use libtest_mimic::{Arguments, Trial};
use std::path::Path;
use std::process::ExitCode;

fn main() -> Result<ExitCode> {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("script/cases");
    let mut trials: Vec<Trial> = Vec::new();
    for path in files(&cases, ".txtar")? {
        let name = path.strip_prefix(&cases)?.display().to_string();
        trials.push(timed(&name, move || Ok(script::run(&path)?)));
    }
    Ok(libtest_mimic::run(&Arguments::from_args(), trials).exit_code())
}
