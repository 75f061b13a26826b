//! The demo; `cargo xtask demo` sets up, builds and runs it.

use cistern_tests::demo;
use clap::Parser;
use std::process::ExitCode;

/// Two nodes, four pods and a host outside on this machine's kernel; prints what was seen.
#[derive(Parser)]
#[command(name = "cistern-demo")]
struct Arguments {
    /// Leave everything running, and say how to look around
    #[arg(long)]
    keep: bool,
    /// End what an earlier run left, and do nothing else
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
