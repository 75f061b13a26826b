//! `cistern`: the agent, the operator and the commands that ask them.

use std::process::ExitCode;

fn main() -> ExitCode {
    cistern::app::install_tls_provider();
    cistern::app::cli::run()
}
