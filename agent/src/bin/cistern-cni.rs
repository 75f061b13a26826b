//! The CNI plugin of Cistern.

use std::process::ExitCode;

fn main() -> ExitCode {
    cistern::cni::main()
}
