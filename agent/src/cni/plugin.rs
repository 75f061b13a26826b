//! The process: what it is given, which verb carries it out, what it prints.

use super::{add, attachment, check, node};
use cistern_core::cni::netconf::Input;
use cistern_core::cni::spec::{Call, Code, Failure, VERSIONS, Verb, Version, VersionResult, verb};
use serde::Serialize;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// More is no configuration: the list of GC has some 100 bytes for each pod of a node.
const LARGEST_INPUT: u64 = 16 << 20;

/// Runs the plugin with this process's environment and standard streams. Its output is always JSON by the
/// specification, unless it is called interactively.
#[must_use]
pub fn main() -> ExitCode {
    let variable = |name: &str| std::env::var(name).ok();
    let Some(command) = variable("CNI_COMMAND") else {
        println!(
            "cistern-cni {}: the CNI plugin of Cistern, versions {}. A container runtime calls it, with CNI_COMMAND and \
             the network configuration on standard input.",
            env!("CARGO_PKG_VERSION"),
            VERSIONS.join(", ")
        );
        return ExitCode::SUCCESS;
    };
    let input = read_input();
    // A panic must not leave the runtime without an answer.
    let outcome = catch_unwind(AssertUnwindSafe(|| run(&command, &input, &variable)))
        .unwrap_or_else(|_| Err(Failure::new(Code::Io, "internal error; standard error has its place")));
    let (text, code) = match outcome {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(failure) => {
            log(&command, &failure);
            (encode(&failure.object(input.answer_version())).unwrap_or_default(), ExitCode::FAILURE)
        }
    };
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Writes a line to standard error, which the runtime logs. Its end may be closed by now.
pub(super) fn log(command: &str, what: &dyn std::fmt::Display) {
    let _ = writeln!(std::io::stderr().lock(), "cistern-cni {command}: {what}");
}

fn read_input() -> Input {
    let mut stdin = Vec::new();
    match std::io::stdin().lock().take(LARGEST_INPUT + 1).read_to_end(&mut stdin) {
        Ok(_) if stdin.len() as u64 > LARGEST_INPUT => {
            Input::unreadable(format!("it has more than {LARGEST_INPUT} bytes"))
        }
        Ok(_) => Input::read(&stdin),
        Err(error) => Input::unreadable(format!("it cannot be read: {error}")),
    }
}

fn encode<T: Serialize>(value: &T) -> Result<String, Failure> {
    serde_json::to_string(value).map_err(|error| Failure::new(Code::Io, format!("result: {error}")))
}

/// Carries out one call and answers what to print.
fn run(command: &str, input: &Input, variable: &impl Fn(&str) -> Option<String>) -> Result<String, Failure> {
    match verb(command)? {
        Verb::Version => {
            let cni_version = input.version_asked_for();
            encode(&VersionResult { cni_version, supported_versions: VERSIONS })
        }
        Verb::Del => {
            let call = Call::parse(Verb::Del, variable)?;
            attachment::Attachment::locked_for_del(call, &input.usable_paths())?.del().map(|()| String::new())
        }
        Verb::Add => {
            let conf = input.conf()?;
            encode(&add::add(conf, Call::parse(Verb::Add, variable)?)?)
        }
        Verb::Check => {
            known_since(Verb::Check, Version::V0_4_0, input)?;
            let conf = input.conf()?;
            check::check(conf, Call::parse(Verb::Check, variable)?).map(|()| String::new())
        }
        Verb::Status => {
            known_since(Verb::Status, Version::V1_1_0, input)?;
            node::status(&input.conf()?).map(|()| String::new())
        }
        Verb::Gc => {
            known_since(Verb::Gc, Version::V1_1_0, input)?;
            node::gc(input.garbage()?).map(|()| String::new())
        }
    }
}

/// Refuses a verb that the version of the configuration does not have.
fn known_since(verb: Verb, since: Version, input: &Input) -> Result<(), Failure> {
    let version = input.version()?;
    if version >= since {
        return Ok(());
    }
    let message = format!("{verb} belongs to CNI {} and later; cniVersion is {}", since.name(), version.name());
    Err(Failure::new(Code::Version, message))
}
