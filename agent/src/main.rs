//! `cistern`: the agent, the operator and the command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    cistern::app::install_tls_provider();
    cistern::app::cli::run()
}
