//! Every `cases/<feature>/*.txtar` is one test. The language is described in `README.md` beside this file.

use std::path::Path;

fn script(path: &Path) -> datatest_stable::Result<()> {
    Ok(cistern_tests::script::run(path)?)
}

datatest_stable::harness! {
    { test = script, root = "script/cases", pattern = r"\.txtar$" },
}
