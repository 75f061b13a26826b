//! The command line.

use super::{agent, install, operator, settings, uninstall};
use crate::cli::{self, Ask, BpfCommand, ExplainCommand, IpCommand};
use cistern_core::settings::{Command as Role, KEYS, Settings};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand};
use std::collections::BTreeMap;
use std::process::ExitCode;

/// Exit code for invalid settings (`sysexits.h`: EX_USAGE).
const BAD_SETTINGS: u8 = 64;

/// Exit code of `cistern status` if the node is not ready.
const NOT_READY: u8 = 2;

const ABOUT: &str = "An eBPF dataplane agent for Kubernetes nodes that owns IP addresses";

const SETTINGS_HELP: &str = "Every flag is also a file of that name in the config directory (as the ConfigMap \
`cilium-config` is mounted) and an environment variable (CISTERN_ or CILIUM_ before its name in capitals, _ for -). Flags \
win over the environment, which wins over files. Names are Cilium's. A flag that neither Cistern nor Cilium knows is \
refused; a file of such a name is reported and has no effect (see strict-config).";

/// The command line, for parsing, `--help` and the generated reference.
#[must_use]
pub fn command() -> Command {
    let role = |name: &'static str, about: &'static str| {
        Command::new(name).about(about).after_help(SETTINGS_HELP).args(setting_flags())
    };
    Command::new("cistern")
        .about(ABOUT)
        .version(crate::app::build_info::short())
        .long_version(crate::app::build_info::long())
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(role("agent", "Runs the node: pod addresses, routes, masquerading"))
        .subcommand(role(
            "operator",
            "Runs the operator: takes part in the leader election, assigns a pod CIDR to each node",
        ))
        .subcommand(install::Options::augment_args(Command::new("install")).about(
            "Prepares a node, as root: mounts bpffs, enables IPv4 forwarding, installs the CNI plugin (init container of \
             the chart)",
        ))
        .subcommand(uninstall::Options::augment_args(Command::new("uninstall")).about(
            "Makes every agent of the cluster remove Cistern from its node, and waits for them (pre-delete hook of the \
             chart)",
        ))
        .subcommand(
            Ask::augment_args(Command::new("status"))
                .about("State of this node, and what it waits for (exit code 2: not ready)"),
        )
        .subcommand(IpCommand::augment_subcommands(asking("ip")).about("Addresses of this node"))
        .subcommand(BpfCommand::augment_subcommands(asking("bpf")).about("Content of the kernel programs' maps"))
        .subcommand(ExplainCommand::augment_subcommands(asking("explain")).about("Explains addresses, nodes and masquerading"))
}

/// The arguments' own description would replace the command's, so callers set that last.
fn asking(name: &'static str) -> Command {
    let mut command = Ask::augment_args(Command::new(name)).subcommand_required(true);
    // Also accepted after the last subcommand: `cistern ip list -o json`.
    for argument in ["socket_path", "output"] {
        command = command.mut_arg(argument, |argument| argument.global(true));
    }
    command
}

fn setting_flags() -> Vec<Arg> {
    KEYS.iter()
        .map(|key| {
            let argument = Arg::new(key.name).long(key.name).action(ArgAction::Set).value_name("VALUE").help(format!(
                "{} [{}]",
                key.meaning.trim(),
                key.expected
            ));
            // `--debug` means `--debug=true`.
            if key.is_switch {
                argument.num_args(0..=1).default_missing_value("true").require_equals(true)
            } else {
                argument
            }
        })
        .collect()
}

fn given_flags(matches: &ArgMatches) -> BTreeMap<String, String> {
    KEYS.iter().filter_map(|key| Some((key.name.to_owned(), matches.get_one::<String>(key.name)?.clone()))).collect()
}

/// Runs the command of this process.
#[must_use]
pub fn run() -> ExitCode {
    let matches = command().get_matches();
    let result = match matches.subcommand() {
        Some(("agent", matches)) => return role(matches, Role::Agent),
        Some(("operator", matches)) => return role(matches, Role::Operator),
        Some(("install", matches)) => install::Options::from_arg_matches(matches)
            .map_err(|error| error.to_string())
            .and_then(|options| install::run(&options).map_err(|error| format!("{error:#}")))
            .map(|()| ExitCode::SUCCESS),
        Some(("uninstall", matches)) => uninstall::Options::from_arg_matches(matches)
            .map_err(|error| error.to_string())
            .and_then(|options| runtime()?.block_on(uninstall::run(&options)).map_err(|error| format!("{error:#}")))
            .map(|()| ExitCode::SUCCESS),
        Some(("status", matches)) => with_ask(matches, |ask| cli::status(ask, &mut std::io::stdout()))
            .map(|ready| if ready { ExitCode::SUCCESS } else { ExitCode::from(NOT_READY) }),
        Some(("ip", matches)) => asked(matches, |ask, command| cli::ip(ask, command, &mut std::io::stdout())),
        Some(("bpf", matches)) => asked(matches, |ask, command| cli::bpf(ask, command, &mut std::io::stdout())),
        Some(("explain", matches)) => asked(matches, |ask, command| cli::explain(ask, command, &mut std::io::stdout())),
        _ => Err("no command".to_owned()),
    };
    result.unwrap_or_else(|error| {
        eprintln!("cistern: {error}");
        ExitCode::FAILURE
    })
}

fn with_ask<T>(matches: &ArgMatches, answer: impl FnOnce(&Ask) -> Result<T, cli::CliError>) -> Result<T, String> {
    let ask = Ask::from_arg_matches(matches).map_err(|error| error.to_string())?;
    answer(&ask).map_err(|error| error.to_string())
}

fn asked<C: FromArgMatches>(
    matches: &ArgMatches,
    answer: impl FnOnce(&Ask, &C) -> Result<(), cli::CliError>,
) -> Result<ExitCode, String> {
    let command = C::from_arg_matches(matches).map_err(|error| error.to_string())?;
    with_ask(matches, |ask| answer(ask, &command)).map(|()| ExitCode::SUCCESS)
}

fn runtime() -> Result<tokio::runtime::Runtime, String> {
    let built = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    built.map_err(|error| format!("cannot start the runtime: {error}"))
}

fn role(matches: &ArgMatches, role: Role) -> ExitCode {
    let (settings, warnings): (Settings, Vec<_>) = match settings::load(given_flags(matches), role) {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("cistern: {error}");
            return ExitCode::from(BAD_SETTINGS);
        }
    };
    super::start_logging(&settings);
    for warning in &warnings {
        tracing::warn!(keys = ?warning.keys, "{warning}");
    }
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cistern: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = match role {
        Role::Agent => runtime.block_on(agent::run(settings)),
        Role::Operator => runtime.block_on(operator::run(settings)),
    };
    // Do not wait for threads that hang on a disk or in the kernel.
    runtime.shutdown_background();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cistern: {error:#}");
            if error.is::<super::Refused>() { ExitCode::from(BAD_SETTINGS) } else { ExitCode::FAILURE }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn flags_are_the_settings_keys() {
        let matches = command()
            .try_get_matches_from(["cistern", "agent", "--ipam", "cluster-pool", "--debug", "--leader-election=false"])
            .unwrap();
        let (_, agent) = matches.subcommand().unwrap();
        assert_eq!(
            given_flags(agent),
            BTreeMap::from([
                ("ipam".to_owned(), "cluster-pool".to_owned()),
                ("debug".to_owned(), "true".to_owned()),
                ("leader-election".to_owned(), "false".to_owned()),
            ])
        );
    }
}
