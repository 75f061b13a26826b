//! The state of a script: the API server, machines, running roles, files, the last output.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cistern::app::agent_api::Answers;
use cistern::app::agent_role::{self, Agent, Running, Shared};
use cistern::app::operator;
use cistern::app::operator_role::{self, Ipam, Operator};
use cistern::blocking::Ports;
use cistern::clock::Clock;
use cistern::kubernetes::client::Client;
use cistern::kubernetes::election::Election;
use cistern::state::{ServedMarker, StateDir};
use cistern_core::ipam::cluster::cluster_pool::BLOCK_QUARANTINE;
use cistern_core::ipam::lease::RecordTimes;
use cistern_core::moment::Moment;
use cistern_core::settings::{Command, Directory, Layers, Settings};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

#[cfg(test)]
mod panics;
#[cfg(test)]
mod stalls;

use super::archive::Archive;
use super::memory::Machine;
use crate::apiserver::table::plain_text;
use crate::apiserver::{Account, ApiServer, Lifeline, Options, Snapshot, Upstream};

/// The nodes' network; machines get its addresses in order of creation.
const NODES: Ipv4Addr = Ipv4Addr::new(192, 168, 7, 0);

/// Virtual time within which a role must terminate. Longer than the timeout of any call.
const ORDERLY_END: Duration = Duration::from_secs(120);

/// The state of one run.
pub(super) struct World {
    pub(super) server: ApiServer,
    pub(super) backup: Option<Snapshot>,
    /// Files of the archive, and those written by `>`.
    pub(super) files: BTreeMap<String, String>,
    /// Output of the last command.
    pub(super) stdout: String,
    /// Error of the last command.
    pub(super) stderr: String,
    /// Generations of allocated leases, by node and container.
    pub(super) generations: BTreeMap<(String, String), u64>,
    machines: BTreeMap<String, Machine>,
    /// Running roles by (role, name).
    roles: BTreeMap<(String, String), Role>,
    /// Number of machines so far.
    made: u32,
    faults: u8,
    random: SmallRng,
    /// Whether nodes have a masquerading datapath.
    pub(super) datapath: bool,
    /// Quarantine of a deleted node's pod CIDR.
    pub(super) quarantine: Duration,
}

/// A running agent or operator.
pub(super) struct Role {
    cancel: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    lifeline: Lifeline,
    /// For an agent: its API, and its connection to the machine.
    agent: Option<(Arc<Answers>, Arc<AtomicBool>)>,
}

impl Role {
    /// Stops it orderly.
    pub(super) async fn stop(self) -> Result<(), String> {
        self.cancel.cancel();
        match timeout(ORDERLY_END, self.task).await {
            Ok(Ok(outcome)) => outcome.map_err(|error| format!("it ended with: {error:#}")),
            Ok(Err(error)) => Err(format!("it ended with: {error}")),
            Err(_) => Err(format!("it did not end within {} s", ORDERLY_END.as_secs())),
        }
    }

    /// Kills it: first all of its connections are cut, then its tasks are cancelled.
    pub(super) async fn kill(self) {
        self.lifeline.cut();
        if let Some((_, alive)) = &self.agent {
            alive.store(false, Ordering::Relaxed);
        }
        self.cancel.cancel();
        // The result of a killed process does not matter.
        let _ = timeout(ORDERLY_END, self.task).await;
    }
}

impl World {
    /// An API server with the project's kinds, as after the installation of the chart, without running roles: the small
    /// one, or a real one.
    pub(super) fn new(archive: &Archive, seed: u64, faults: u8, real: Option<Arc<Upstream>>) -> anyhow::Result<Self> {
        let definitions = cistern_crds::all().iter().map(serde_json::to_value).collect::<Result<Vec<Value>, _>>()?;
        let server = match real {
            Some(upstream) => {
                // A real server derives ages from the wall clock.
                let options = Options { seed, epoch: jiff::Timestamp::now() };
                ApiServer::in_front_of(&upstream, options, &definitions)?
            }
            None => {
                let server = ApiServer::new(Options { seed, ..Options::default() });
                for definition in &definitions {
                    server.create(definition)?;
                }
                server
            }
        };
        server.set_faults(faults, &[]);
        Ok(Self {
            server,
            backup: None,
            files: archive.files.clone(),
            stdout: String::new(),
            stderr: String::new(),
            generations: BTreeMap::new(),
            machines: BTreeMap::new(),
            roles: BTreeMap::new(),
            made: 0,
            faults,
            random: SmallRng::seed_from_u64(seed),
            datapath: true,
            quarantine: BLOCK_QUARANTINE,
        })
    }

    /// Sets the percentage of calls and operations with random faults; calls for the spared resources have none.
    pub(super) fn set_faults(&mut self, percent: u8, spared: &[&str]) {
        self.faults = percent;
        self.server.set_faults(percent, spared);
        self.machines.values().for_each(|machine| machine.set_faults(percent));
    }

    /// A file of the archive; `stdout` and `stderr` are those of the last command.
    pub(super) fn file(&self, name: &str) -> Result<&str, String> {
        match name {
            "stdout" => Ok(&self.stdout),
            "stderr" => Ok(&self.stderr),
            name => self.files.get(name).map(String::as_str).ok_or_else(|| format!("there is no file {name}")),
        }
    }

    /// Adds a machine and its Node, as kubelet registers it.
    pub(super) fn add_machine(&mut self, name: &str) -> Result<(), String> {
        self.made = self.made.saturating_add(1);
        let address = Ipv4Addr::from(u32::from(NODES).saturating_add(self.made));
        let machine = Machine::new(address, self.random.random(), self.faults).map_err(|error| error.to_string())?;
        self.machines.insert(name.to_owned(), machine);
        self.register_node(name)
    }

    /// Creates the Node of a machine, as kubelet does.
    pub(super) fn register_node(&self, name: &str) -> Result<(), String> {
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name},
            "status": {"addresses": [{"type": "InternalIP", "address": self.machine(name)?.address.to_string()}]},
        });
        self.server.create(&node).map(drop).map_err(|error| error.to_string())
    }

    /// Removes a machine, with its kernel and disk. Its agent must have ended.
    pub(super) fn remove_machine(&mut self, name: &str) -> Result<(), String> {
        self.machines.remove(name).map(drop).ok_or_else(|| format!("there is no machine {name}"))
    }

    /// Reboots a machine whose agent is not running.
    pub(super) fn reboot(&self, name: &str) -> Result<(), String> {
        if self.roles.contains_key(&("agent".to_owned(), name.to_owned())) {
            return Err(format!("agent {name} runs: agent/kill comes first"));
        }
        self.machine(name).map(Machine::reboot)
    }

    /// The current moment of a machine.
    pub(super) fn moment(&self, name: &str) -> Result<Moment, String> {
        let uptime_ns = u64::try_from(self.server.clock().now().as_nanosecond()).map_err(|error| error.to_string())?;
        Ok(Moment { boot: self.machine(name)?.boot(), uptime_ns })
    }

    pub(super) fn machine(&self, name: &str) -> Result<&Machine, String> {
        self.machines.get(name).ok_or_else(|| format!("there is no machine {name}: machine/add comes first"))
    }

    /// Starts an operator under a name. `settings` is YAML with keys as in the ConfigMap `cilium-config`.
    pub(super) fn start_operator(&mut self, name: &str, settings: &str) -> Result<(), String> {
        let settings = read_settings(name, settings, Command::Operator)?;
        let shared = Shared::new(self.clock());
        let (client, lifeline) = self.server.mortal_client_as(name, Account::Operator);
        let cancel = CancellationToken::new();
        let operator = self.operator_with(&settings, client, &shared)?;
        let task = tokio::spawn(operator_role::run(operator, cancel.clone()));
        self.add_role("operator", name, Role { cancel, task, lifeline, agent: None })
    }

    /// The state directory of a machine.
    pub(super) fn state_of(&mut self, name: &str) -> Result<std::path::PathBuf, String> {
        Ok(self.machine(name)?.state.path().to_owned())
    }

    /// Starts the agent of a machine.
    pub(super) fn start_agent(&mut self, name: &str, settings: &str) -> Result<(), String> {
        self.start_agent_as(name, settings, |agent| agent, |_| {})
    }

    /// Starts the agent of a machine with changed parts, and with further tasks of its process.
    fn start_agent_as(
        &mut self,
        name: &str,
        settings: &str,
        change: impl FnOnce(Agent) -> Agent,
        extend: impl FnOnce(&mut Running),
    ) -> Result<(), String> {
        let settings = read_settings(name, settings, Command::Agent)?;
        let shared = Shared::new(self.clock());
        let (client, lifeline) = self.server.mortal_client_as(name, Account::Agent);
        let mut draws = SmallRng::seed_from_u64(self.random.random());
        let operator =
            if settings.leader_election { Some(self.operator_with(&settings, client.clone(), &shared)?) } else { None };
        let machine = self.machine(name)?;
        let way = lifeline.clone();
        let mut grasp = machine.grasp(Box::new(move || way.cut()));
        if !self.datapath {
            grasp.targets.datapath = None;
        }
        let agent = Agent {
            build: "script".to_owned(),
            settings,
            client,
            targets: grasp.targets,
            state: StateDir::open(machine.state.path()).map_err(|error| error.to_string())?,
            leases: grasp.leases,
            incomplete: false,
            lease_store: grasp.lease_store,
            lease_clock: shared.clock,
            boot: machine.boot(),
            rebooted: grasp.rebooted,
            times: if grasp.rebooted { RecordTimes::BeginAnew } else { RecordTimes::Continue },
            host: grasp.host,
            draw: Box::new(move || draws.random()),
            maps: None,
            reserved_ports: Vec::new(),
            served: ServedMarker::default(),
            operator,
            listener: None,
            ports: Ports::inline(),
            shared,
        };
        let cancel = CancellationToken::new();
        let mut running = agent_role::start(change(agent), &cancel).map_err(|error| format!("{error:#}"))?;
        extend(&mut running);
        let answers = Arc::clone(&running.answers);
        let task = tokio::spawn(running.join());
        self.add_role("agent", name, Role { cancel, task, lifeline, agent: Some((answers, grasp.alive)) })
    }

    /// Whether the process of an agent has ended by itself, as `disk/crash` wants it.
    pub(super) fn has_crashed(&self, name: &str) -> bool {
        let role = self.roles.get(&("agent".to_owned(), name.to_owned()));
        role.and_then(|role| role.agent.as_ref()).is_some_and(|(_, alive)| !alive.load(Ordering::Relaxed))
    }

    /// The API of a running agent.
    pub(super) fn agent(&self, name: &str) -> Result<Arc<Answers>, String> {
        let role = self.roles.get(&("agent".to_owned(), name.to_owned()));
        let answers = role.and_then(|role| role.agent.as_ref()).map(|(answers, _)| Arc::clone(answers));
        answers.ok_or_else(|| format!("agent {name} does not run"))
    }

    /// The operator's controllers, by the settings.
    fn operator_with(&mut self, settings: &Settings, client: Client, shared: &Shared) -> Result<Operator, String> {
        let election = operator::election(settings).map_err(|error| format!("{error:#}"))?;
        let ipam = match operator::ipam(settings).map_err(|error| format!("{error:#}"))? {
            Ipam::ClusterPool(pool) => Ipam::ClusterPool(Box::new(pool.with_quarantine(self.quarantine))),
            other @ Ipam::External => other,
        };
        Ok(Operator {
            client,
            election: Election {
                identity: format!("{}-{:08x}", settings.node_name, self.random.random::<u32>()),
                ..election
            },
            ipam,
            leader: Arc::clone(&shared.leader),
            targets: Arc::clone(&shared.targets),
            waits: shared.waits.clone(),
            clock: shared.clock,
        })
    }

    fn clock(&self) -> Clock {
        Clock::following_runtime(self.server.clock().now())
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

    /// A role that ended unexpectedly is a failure, whatever the script checks.
    pub(super) fn check_roles(&self) -> Result<(), String> {
        match self.roles.iter().find(|(_, role)| role.task.is_finished()) {
            Some(((role, name), _)) => Err(format!("{role} {name} has ended by itself")),
            None => Ok(()),
        }
    }

    /// Stops all running roles, which must terminate orderly, even with faults.
    pub(super) async fn end(&mut self) -> Result<(), String> {
        self.check_roles()?;
        for ((role, name), running) in std::mem::take(&mut self.roles) {
            running.stop().await.map_err(|error| format!("stopping {role} {name}: {error}"))?;
        }
        Ok(())
    }
}

/// Settings as parsed by `cistern` from a mounted ConfigMap.
fn read_settings(node: &str, yaml: &str, command: Command) -> Result<Settings, String> {
    let keys: BTreeMap<String, Value> = match yaml.trim() {
        "" => BTreeMap::new(),
        yaml => serde_saphyr::from_str(yaml).map_err(|error| error.to_string())?,
    };
    let files = keys.into_iter().map(|(key, value)| (key, plain_text(&value))).collect();
    let directory = Directory { path: "the script".to_owned(), files };
    let layers = Layers { directory: Some(directory), hostname: node.to_owned(), ..Layers::default() };
    Settings::load(&layers, command).map(|(settings, _)| settings).map_err(|errors| errors.to_string())
}
