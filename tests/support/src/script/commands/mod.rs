//! The commands, one file per subject.

mod agent;
mod api;
mod files;
mod kubernetes;
mod roles;

use super::world::World;

/// Output of a command, for `stdout` and similar commands.
pub(super) enum Printed {
    /// This text.
    Text(String),
    /// That of the previous command, which this one only checks.
    Unchanged,
}

impl Printed {
    pub(super) fn into_text(self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text),
            Self::Unchanged => None,
        }
    }
}

impl std::fmt::Display for Printed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Unchanged => Ok(()),
        }
    }
}

/// The output, or the error.
pub(super) type Outcome = Result<Printed, String>;

/// Prints nothing.
pub(super) fn silent() -> Printed {
    Printed::Text(String::new())
}

/// Runs one command.
pub(super) async fn run(world: &mut World, words: &[String]) -> Outcome {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (command, arguments) = words.split_first().ok_or("expected a command")?;
    match *command {
        "sleep" => api::sleep(world, arguments).await,
        "stdout" => files::stdout(world, arguments),
        "stderr" => files::stderr(world, arguments),
        "grep" => files::grep(world, arguments),
        "cmp" => files::cmp(world, arguments),

        "faults" => api::faults(world, arguments),
        "fault" => api::fault(world, arguments),
        "api/down" | "api/silent" | "api/held" | "api/up" => api::link(world, command, arguments),
        "api/calls" => api::calls(world, arguments),
        "api/count" => api::count(world, arguments),
        "api/forget" => api::forget(world),
        "api/compact" => api::compact(world),
        "api/backup" => api::backup(world),
        "api/restore" => api::restore(world),

        "k8s/add" => kubernetes::add(world, arguments),
        "k8s/apply" => kubernetes::apply(world, arguments),
        "k8s/patch" => kubernetes::patch(world, arguments),
        "k8s/delete" => kubernetes::delete(world, arguments),
        "k8s/get" => kubernetes::get(world, arguments),
        "k8s/list" => kubernetes::list(world, arguments),
        "k8s/distinct" => kubernetes::distinct(world, arguments),
        "k8s/history" => kubernetes::history(world, arguments),
        "node/add" => kubernetes::add_nodes(world, arguments),

        "machine/add" => agent::add_machines(world, arguments),
        "machine/reboot" => agent::reboot(world, arguments),
        "machine/remove" => agent::remove_machines(world, arguments),
        "machine/register" => agent::register_machines(world, arguments),
        "disk/refuse" => agent::disk(world, arguments, agent::Disk::Refuse),
        "disk/accept" => agent::disk(world, arguments, agent::Disk::Accept),
        "disk/damage" => agent::disk(world, arguments, agent::Disk::Damage),
        "disk/lose" => agent::lose(world, arguments),
        "disk/crash" => agent::crash(world, arguments),
        "cni/add" => agent::add(world, arguments).await,
        "cni/confirm" => agent::confirm(world, arguments).await,
        "cni/del" => agent::del(world, arguments).await,
        "cni/check" => agent::check(world, arguments).await,
        "status" => agent::status(world, arguments).await,
        "health" => agent::health(world, arguments).await,
        "ip/list" => agent::addresses(world, arguments).await,
        "explain/ip" => agent::explain_ip(world, arguments).await,
        "explain/node" => agent::explain_node(world, arguments).await,
        "metrics" => agent::metrics(world, arguments).await,
        "target" => agent::target(world, arguments),

        "agent/start" => roles::start(world, "agent", arguments),
        "agent/stop" => roles::stop(world, "agent", arguments).await,
        "agent/kill" => roles::kill(world, "agent", arguments).await,
        "operator/start" => roles::start(world, "operator", arguments),
        "operator/stop" => roles::stop(world, "operator", arguments).await,
        "operator/kill" => roles::kill(world, "operator", arguments).await,
        other => Err(format!("there is no command {other}")),
    }
}

/// Exactly this number of arguments.
fn exactly<'a, const N: usize>(arguments: &[&'a str], usage: &str) -> Result<[&'a str; N], String> {
    arguments.try_into().map_err(|_| format!("expected: {usage}"))
}

/// Takes `-n NAMESPACE` out of the arguments.
fn take_namespace<'a>(arguments: &[&'a str]) -> Result<(&'a str, Vec<&'a str>), String> {
    let mut rest = arguments.to_vec();
    let Some(at) = rest.iter().position(|argument| *argument == "-n") else { return Ok(("", rest)) };
    rest.remove(at);
    if at < rest.len() { Ok((rest.remove(at), rest)) } else { Err("expected a namespace after -n".to_owned()) }
}
