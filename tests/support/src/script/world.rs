//! What a script acts on: the API server, the roles that run, the files, what was printed last.

use std::collections::BTreeMap;

use cistern::app::agent_role::Shared;
use cistern::app::operator;
use cistern::app::operator_role::{self, Operator};
use cistern::clock::Clock;
use cistern_core::settings::{Command, Directory, Layers, Settings};
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::archive::Archive;
use crate::apiserver::table::plain_text;
use crate::apiserver::{ApiServer, Lifeline, Options, Snapshot};

/// The state of one run.
pub(super) struct World {
    pub(super) server: ApiServer,
    pub(super) backup: Option<Snapshot>,
    /// Files of the archive, and what `>` has written.
    pub(super) files: BTreeMap<String, String>,
    /// What the last command has printed.
    pub(super) stdout: String,
    /// Why the last command has failed.
    pub(super) stderr: String,
    /// Running roles by (role, name).
    roles: BTreeMap<(String, String), Role>,
}

/// A running agent or operator.
pub(super) struct Role {
    cancel: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    lifeline: Lifeline,
}

impl Role {
    /// Ends it in order.
    pub(super) async fn stop(self) -> Result<(), String> {
        self.cancel.cancel();
        match self.task.await {
            Ok(outcome) => outcome.map_err(|error| format!("it ended with: {error:#}")),
            Err(error) => Err(format!("it ended with: {error}")),
        }
    }

    /// Ends it without letting it do anything any more: first every way out is cut, then its tasks are told to go.
    pub(super) async fn kill(self) {
        self.lifeline.cut();
        self.cancel.cancel();
        // How a process that has been killed would have ended is of no interest.
        let _ = self.task.await;
    }
}

impl World {
    /// An API server with the project's own kinds, as after the chart was installed, and nothing that runs.
    pub(super) fn new(archive: &Archive, seed: u64) -> anyhow::Result<Self> {
        let server = ApiServer::new(Options { seed, ..Options::default() });
        for definition in cistern_crds::all() {
            server.create(&serde_json::to_value(definition)?)?;
        }
        Ok(Self {
            server,
            backup: None,
            files: archive.files.clone(),
            stdout: String::new(),
            stderr: String::new(),
            roles: BTreeMap::new(),
        })
    }

    /// A file of the archive; `stdout` and `stderr` are what the last command has left.
    pub(super) fn file(&self, name: &str) -> Result<&str, String> {
        match name {
            "stdout" => Ok(&self.stdout),
            "stderr" => Ok(&self.stderr),
            name => self.files.get(name).map(String::as_str).ok_or_else(|| format!("there is no file {name}")),
        }
    }

    /// Starts an operator under a name. `settings` is YAML with keys as in the ConfigMap `cilium-config`.
    pub(super) fn start_operator(&mut self, name: &str, settings: &str) -> Result<(), String> {
        let settings = self.settings(name, settings, Command::Operator)?;
        let shared = Shared::new(Clock::following_runtime(self.server.clock().now()));
        let (client, lifeline) = self.server.mortal_client_as(name);
        let operator = Operator {
            client,
            election: operator::election(&settings).map_err(|error| format!("{error:#}"))?,
            pool: operator::pool(&settings).map_err(|error| format!("{error:#}"))?,
            leader: shared.leader,
            targets: shared.targets,
            waits: shared.waits,
            clock: shared.clock,
        };
        let cancel = CancellationToken::new();
        let task = tokio::spawn(operator_role::run(operator, cancel.clone()));
        self.add_role("operator", name, Role { cancel, task, lifeline })
    }

    /// Settings as `cistern` itself reads them from a mounted ConfigMap.
    fn settings(&self, node: &str, yaml: &str, command: Command) -> Result<Settings, String> {
        let keys: BTreeMap<String, Value> = if yaml.trim().is_empty() {
            BTreeMap::new()
        } else {
            serde_saphyr::from_str(yaml).map_err(|error| error.to_string())?
        };
        let directory = keys.into_iter().map(|(key, value)| (key, plain_text(&value))).collect();
        let directory = Directory { path: "the script".to_owned(), files: directory };
        let layers = Layers { directory: Some(directory), hostname: node.to_owned(), ..Layers::default() };
        let (settings, _) = Settings::load(&layers, command).map_err(|errors| errors.to_string())?;
        Ok(settings)
    }

    fn add_role(&mut self, role: &str, name: &str, running: Role) -> Result<(), String> {
        let key = (role.to_owned(), name.to_owned());
        if self.roles.contains_key(&key) {
            running.cancel.cancel();
            return Err(format!("{role} {name} runs already"));
        }
        self.roles.insert(key, running);
        Ok(())
    }

    pub(super) fn take_role(&mut self, role: &str, name: &str) -> Result<Role, String> {
        self.roles.remove(&(role.to_owned(), name.to_owned())).ok_or_else(|| format!("{role} {name} does not run"))
    }

    /// A role that has ended by itself is a failure, whatever the script looks at.
    pub(super) fn check_roles(&self) -> Result<(), String> {
        match self.roles.iter().find(|(_, role)| role.task.is_finished()) {
            Some(((role, name), _)) => Err(format!("{role} {name} has ended by itself")),
            None => Ok(()),
        }
    }

    /// Stops what still runs; every role must end in order, even with faults.
    pub(super) async fn end(&mut self) -> Result<(), String> {
        self.check_roles()?;
        for ((role, name), running) in std::mem::take(&mut self.roles) {
            running.stop().await.map_err(|error| format!("stopping {role} {name}: {error}"))?;
        }
        Ok(())
    }
}
