//! The demo; `cargo xtask demo` installs what is missing, builds and runs it.

use cistern_tests::demo;
use clap::Parser;
use std::process::ExitCode;

/// Runs two nodes, four pods and an external host on this machine's kernel, and prints what it observes.
#[derive(Parser)]
#[command(name = "cistern-demo")]
struct Arguments {
    /// Leave everything running, and print how to inspect it
    #[arg(long)]
    keep: bool,
    /// Only stop what an earlier run left behind
    #[arg(long, conflicts_with = "keep")]
    clean: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let Arguments { keep, clean } = Arguments::parse();
    if clean {
        demo::clean()?;
        return Ok(ExitCode::SUCCESS);
    }
    Ok(if demo::run(demo::Options { keep })? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
