//! The events of a simulated cluster, generated from the seed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ipnet::Ipv4Net;
use jiff::Timestamp;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::QUARANTINE;
use super::judge::{Hand, Judge, RECORDS, blocks, records};
use crate::apiserver::Call;
use crate::script::archive::Archive;
use crate::script::commands;
use crate::script::world::World;
use crate::script::{fnv1a, fnv1a_after};

/// Interval of checks.
const LOOK: Duration = Duration::from_secs(1);

/// Time limit for becoming stable: a quarantine, a Lease, the longest back-offs, one after the other.
const REST_BOUND: Duration = Duration::from_secs(300);

/// A list without an answer, or a Lease, must time out first, and then the retries; 70 s later the new leader checks
/// for late writes of the former one.
const TAKE_OVER: Duration = Duration::from_secs(120);

/// Time for which the API server is stopped to restore a backup; long enough for Leases to expire.
const OUTAGE: std::ops::Range<u64> = 27..60;

/// Time without writes at the end.
const QUIET: Duration = Duration::from_secs(20);

/// Prefix length of a node's pod CIDR: five pods.
const MASK: u8 = 29;

/// State of a node.
#[derive(Default)]
struct Node {
    agent: bool,
    pods: BTreeSet<String>,
}

pub(super) struct Story {
    world: World,
    judge: Judge,
    random: SmallRng,
    log: Vec<String>,
    /// Hash of everything so far.
    trace: u64,
    /// Position up to which changes have been checked.
    revision: u64,
    nodes: BTreeMap<String, Node>,
    most_nodes: usize,
    /// Operators, and whether they are running.
    operators: BTreeMap<String, bool>,
    /// Clients whose link is down, and until when.
    blocked: BTreeMap<String, Instant>,
    pool: Vec<Ipv4Net>,
    spare: Option<Ipv4Net>,
    backup: Option<Timestamp>,
    pods: u32,
    end: Instant,
}

impl Story {
    pub(super) fn begin(seed: u64) -> Result<Self, String> {
        // The world has its own random numbers from the seed.
        let mut random = SmallRng::seed_from_u64(seed ^ 0x0057_0127);
        let faults = *[0, 0, 5, 15, 30].choose(&mut random).unwrap_or(&0);
        let mut world = World::new(&Archive::default(), seed, faults, None).map_err(|error| error.to_string())?;
        world.datapath = false;
        world.quarantine = QUARANTINE;
        // Most clusters are small: they fail in as many ways, and faster.
        let large = random.random_bool(0.1);
        let most_nodes = if large { random.random_range(5..=12) } else { random.random_range(2..=5_usize) };
        let net = |text: &str, prefix: u8| text.parse().map(|ip| Ipv4Net::new_assert(ip, prefix));
        let mut pool = vec![net("10.0.0.0", random.random_range(MASK - 3..=MASK - 1)).map_err(|e| e.to_string())?];
        if random.random_bool(0.3) {
            pool.push(net("10.0.1.0", random.random_range(MASK - 2..=MASK)).map_err(|e| e.to_string())?);
        }
        let spare = net("10.0.2.0", random.random_range(MASK - 2..=MASK)).map_err(|e| e.to_string())?;
        let spare = random.random_bool(0.3).then_some(spare);
        let operators = ["one", "two", "three"].iter().take(random.random_range(2..=3));
        let story = Self {
            revision: world.server.revision(),
            world,
            judge: Judge::default(),
            log: Vec::new(),
            trace: fnv1a(&[]),
            nodes: BTreeMap::new(),
            most_nodes,
            operators: operators.map(|name| ((*name).to_owned(), false)).collect(),
            blocked: BTreeMap::new(),
            pool,
            spare,
            backup: None,
            pods: 0,
            end: Instant::now() + Duration::from_secs(random.random_range(if large { 60..150 } else { 15..60 })),
            random,
        };
        Ok(story)
    }

    /// The calls since the last query.
    pub(super) fn take_calls(&mut self) -> Vec<String> {
        let calls: Vec<String> = self.world.server.calls().iter().map(ToString::to_string).collect();
        self.world.server.clear_calls();
        calls.iter().for_each(|call| self.note(call));
        calls
    }

    /// Log lines, and the hash of everything.
    pub(super) fn into_log(self) -> (Vec<String>, u64) {
        (self.log, self.trace)
    }

    fn note(&mut self, text: &str) {
        self.trace = fnv1a_after(self.trace, text.as_bytes());
    }

    fn now(&self) -> Timestamp {
        self.world.server.clock().now()
    }

    fn say(&mut self, text: &str) {
        let now = self.now().strftime("%H:%M:%S%.3f");
        let line = format!("{now} {text}");
        self.note(&line);
        self.log.push(line);
    }

    /// Runs a command of the script language.
    async fn run(&mut self, command: &str) -> Result<String, String> {
        self.say(command);
        let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let outcome = commands::run(&mut self.world, &words).await;
        match outcome {
            Ok(printed) => Ok(printed.into_text().unwrap_or_default()),
            Err(failure) => {
                self.say(&format!("    failed: {failure}"));
                Err(failure)
            }
        }
    }

    /// Runs a command that must succeed.
    async fn must(&mut self, command: &str) -> Result<String, String> {
        self.run(command).await.map_err(|failure| format!("{command}: {failure}"))
    }

    /// Checks what happened since the last call.
    fn look(&mut self, hand: Hand) -> Result<(), String> {
        self.world.check_roles()?;
        let now = self.now();
        let changes = self.world.server.changes_after(self.revision).map_err(|error| error.to_string())?;
        self.revision = self.world.server.revision();
        for change in &changes {
            self.note(&change.name);
            self.note(&change.after.as_ref().map(ToString::to_string).unwrap_or_default());
            if let Some(news) = self.judge.see(change, hand, now)? {
                self.say(&format!("    {news}"));
            }
        }
        for name in self.nodes.iter().filter(|(_, node)| node.agent).map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            let served = self.world.agent(&name)?.node.pool.peek();
            let news = match served.rows.get(&()) {
                Some(row) => self.judge.uses(&name, row.pod_cidr)?.then(|| format!("    {name} uses {}", row.pod_cidr)),
                None if served.synced => {
                    self.judge.uses_none(&name)?.map(|former| format!("    {name} uses {former} no more"))
                }
                None => None,
            };
            if let Some(news) = news {
                self.say(&news);
            }
        }
        Ok(())
    }

    /// Advances time.
    async fn pass(&mut self, time: Duration) -> Result<(), String> {
        let until = Instant::now() + time;
        while Instant::now() < until {
            sleep(LOOK.min(until - Instant::now())).await;
            self.look(Hand::Ours)?;
            let crashed = self.nodes.iter().filter(|(name, node)| node.agent && self.world.has_crashed(name));
            for name in crashed.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
                self.say(&format!("    the agent of {name} has crashed"));
                self.judge.crashed(&name);
                self.kill_agent(&name).await?;
                self.start_agent(&name).await?;
            }
            let now = Instant::now();
            let open: Vec<String> =
                self.blocked.iter().filter(|(_, until)| **until <= now).map(|(name, _)| name.clone()).collect();
            for name in open {
                self.open(&name).await?;
            }
        }
        Ok(())
    }

    async fn open(&mut self, name: &str) -> Result<(), String> {
        if self.blocked.remove(name).is_some() {
            self.must(&format!("api/up {name}")).await?;
        }
        Ok(())
    }

    fn chosen<T: Clone>(&mut self, from: impl Iterator<Item = T>) -> Option<T> {
        let all: Vec<T> = from.collect();
        all.choose(&mut self.random).cloned()
    }

    fn a_node(&mut self) -> Option<String> {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        self.chosen(names.into_iter())
    }

    fn an_operator(&mut self, running: bool) -> Option<String> {
        let names: Vec<String> =
            self.operators.iter().filter(|(_, runs)| **runs == running).map(|(name, _)| name.clone()).collect();
        self.chosen(names.into_iter())
    }

    /// The current settings, as in the ConfigMap.
    fn write_settings(&mut self) {
        let pool: Vec<String> = self.pool.iter().map(ToString::to_string).collect();
        let settings = format!(
            "cluster-pool-ipv4-cidr: \"{}\"\ncluster-pool-ipv4-mask-size: \"{MASK}\"\nenable-ipv4-masquerade: \"false\"\n\
             leader-election-lease-duration: 15s\nleader-election-renew-deadline: 10s\nleader-election-retry-period: 5s\n",
            pool.join(" ")
        );
        self.world.files.insert("settings".to_owned(), settings);
    }

    pub(super) async fn run_story(&mut self) -> Result<(), String> {
        self.write_settings();
        for name in self.operators.keys().cloned().collect::<Vec<_>>() {
            self.start_operator(&name).await?;
        }
        for _ in 0..self.random.random_range(1..=self.most_nodes) {
            self.join().await?;
        }
        while Instant::now() < self.end {
            self.event().await?;
            let pause = match self.random.random_range(0..10_u8) {
                0..=4 => self.random.random_range(0..600),
                5..=7 => self.random.random_range(600..4_000),
                8 => self.random.random_range(4_000..10_000),
                _ => self.random.random_range(10_000..25_000),
            };
            self.pass(Duration::from_millis(pause)).await?;
        }
        self.come_to_rest().await?;
        self.world.end().await
    }

    async fn event(&mut self) -> Result<(), String> {
        match self.random.random_range(0..100_u8) {
            0..=13 => self.join().await,
            14..=21 => self.leave().await,
            22..=25 => self.replace().await,
            26..=32 => self.restart_agent().await,
            33..=46 => self.pod().await,
            47..=53 => self.kill_operator().await,
            54..=60 => match self.an_operator(false) {
                Some(name) => self.start_operator(&name).await,
                None => Ok(()),
            },
            61..=70 => self.block_operator().await,
            71..=74 => self.block_agent().await,
            75..=82 => self.fault().await,
            83..=85 => {
                self.look(Hand::Ours)?;
                self.must("api/compact").await.map(drop)
            }
            86..=88 => self.back_up().await,
            89..=91 => self.restore().await,
            92..=93 => self.extend_pool().await,
            94..=96 => self.delete_object().await,
            _ => self.edit_object().await,
        }
    }

    async fn start_operator(&mut self, name: &str) -> Result<(), String> {
        self.open(name).await?;
        self.must(&format!("operator/start {name} settings")).await?;
        self.operators.insert(name.to_owned(), true);
        Ok(())
    }

    async fn stop_operator(&mut self, how: &str, name: &str) -> Result<(), String> {
        if how == "stop" {
            // Otherwise it would wait for answers that never arrive.
            self.open(name).await?;
        }
        self.operators.insert(name.to_owned(), false);
        self.must(&format!("operator/{how} {name}")).await?;
        self.look(Hand::Ours)
    }

    async fn kill_operator(&mut self) -> Result<(), String> {
        let Some(name) = self.an_operator(true) else { return Ok(()) };
        let how = if self.random.random_bool(0.7) { "kill" } else { "stop" };
        self.stop_operator(how, &name).await
    }

    /// Adds a machine and starts its agent.
    async fn join(&mut self) -> Result<(), String> {
        if self.nodes.len() >= self.most_nodes {
            return Ok(());
        }
        let registered = self.registered()?;
        let free: Vec<String> = (0..=self.most_nodes)
            .map(|n| format!("n{n}"))
            .filter(|name| !self.nodes.contains_key(name) && !registered.contains(name))
            .collect();
        let Some(name) = self.chosen(free.into_iter()) else { return Ok(()) };
        if self.random.random_bool(0.15) {
            self.claim(&name).await?;
        }
        self.add_machine(&name).await
    }

    /// An administrator writes a node's pod CIDR before the node is added: usually one that no node lists.
    async fn claim(&mut self, name: &str) -> Result<(), String> {
        let objects = self.world.server.list("ciliumnodes").map_err(|error| error.to_string())?;
        let listed: BTreeSet<Ipv4Net> = objects.iter().flat_map(blocks).collect();
        let any = self.random.random_bool(0.2);
        let choice: Vec<Ipv4Net> =
            self.all_blocks().into_iter().filter(|block| any || !listed.contains(block)).collect();
        let Some(block) = self.chosen(choice.into_iter()) else { return Ok(()) };
        let object = json!({
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumNode",
            "metadata": {"name": name},
            "spec": {"ipam": {"podCIDRs": [block]}},
        });
        self.world.files.insert("claim".to_owned(), object.to_string());
        self.look(Hand::Ours)?;
        self.say(&format!("    of {name}: {block}"));
        // There may be an earlier object of that name.
        let _ = self.run("k8s/add claim").await;
        self.look(Hand::Person)
    }

    async fn add_machine(&mut self, name: &str) -> Result<(), String> {
        self.must(&format!("machine/add {name}")).await?;
        self.nodes.insert(name.to_owned(), Node::default());
        self.start_agent(name).await
    }

    async fn start_agent(&mut self, name: &str) -> Result<(), String> {
        self.open(name).await?;
        self.must(&format!("agent/start {name} settings")).await?;
        if let Some(node) = self.nodes.get_mut(name) {
            node.agent = true;
        }
        Ok(())
    }

    async fn kill_agent(&mut self, name: &str) -> Result<(), String> {
        match self.nodes.get_mut(name) {
            Some(node) if node.agent => node.agent = false,
            _ => return Ok(()),
        }
        self.must(&format!("agent/kill {name}")).await?;
        self.look(Hand::Ours)
    }

    /// A machine is lost with its pods; its Node remains until it is deleted.
    async fn remove_machine(&mut self, name: &str) -> Result<(), String> {
        self.kill_agent(name).await?;
        self.must(&format!("machine/remove {name}")).await?;
        self.nodes.remove(name);
        self.judge.machine_gone(name);
        Ok(())
    }

    async fn delete_node(&mut self, name: &str) -> Result<(), String> {
        // After a restore there may be none.
        let _ = self.run(&format!("k8s/delete node {name}")).await;
        self.look(Hand::Ours)
    }

    /// Removes a node: the Node first and the machine a little later, or vice versa.
    async fn leave(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        let pause = Duration::from_millis(self.random.random_range(0..20_000));
        if self.random.random_bool(0.3) {
            self.delete_node(&name).await?;
            self.pass(pause).await?;
            return self.remove_machine(&name).await;
        }
        self.remove_machine(&name).await?;
        self.pass(pause).await?;
        self.delete_node(&name).await
    }

    /// Another machine with the same name.
    async fn replace(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        self.remove_machine(&name).await?;
        self.delete_node(&name).await?;
        let pause = Duration::from_millis(self.random.random_range(0..3_000));
        self.pass(pause).await?;
        self.add_machine(&name).await
    }

    async fn restart_agent(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        if self.random.random_bool(0.5) && self.nodes.get(&name).is_some_and(|node| node.agent) {
            // Between two of the writes that follow, whenever they do.
            let writes = self.random.random_range(0..8_u8);
            return self.must(&format!("disk/crash {name} {writes}")).await.map(drop);
        }
        self.kill_agent(&name).await?;
        let pause = Duration::from_millis(self.random.random_range(0..10_000));
        self.pass(pause).await?;
        self.start_agent(&name).await
    }

    /// Adds or deletes a pod.
    async fn pod(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        let Some(node) = self.nodes.get(&name).filter(|node| node.agent) else { return Ok(()) };
        if self.random.random_bool(0.3) {
            let Some(pod) = node.pods.iter().next().cloned() else { return Ok(()) };
            self.judge.ends(&name, &pod);
            if self.run(&format!("cni/del {name} {pod}")).await.is_ok() {
                self.judge.ended(&name, Some(&pod));
                if let Some(node) = self.nodes.get_mut(&name) {
                    node.pods.remove(&pod);
                }
            }
            return Ok(());
        }
        self.pods += 1;
        let pod = format!("c{}", self.pods);
        if let Ok(address) = self.run(&format!("cni/add {name} {pod}")).await {
            let address = address.trim();
            self.say(&format!("    {address}"));
            self.judge.granted(address, &name, &pod)?;
            if let Some(node) = self.nodes.get_mut(&name) {
                node.pods.insert(pod.clone());
            }
            let _ = self.run(&format!("cni/confirm {name} {pod}")).await;
        }
        Ok(())
    }

    /// An operator is paused (its packets are held), or disconnected.
    async fn block_operator(&mut self) -> Result<(), String> {
        let Some(name) = self.an_operator(true) else { return Ok(()) };
        let how = ["held", "held", "silent", "down"].choose(&mut self.random).copied().unwrap_or("held");
        let time = Duration::from_millis(self.random.random_range(1_000..50_000));
        self.must(&format!("api/{how} {name}")).await?;
        self.blocked.insert(name, Instant::now() + time);
        Ok(())
    }

    async fn block_agent(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        let how = ["held", "silent", "down"].choose(&mut self.random).copied().unwrap_or("held");
        let time = Duration::from_millis(self.random.random_range(1_000..30_000));
        self.must(&format!("api/{how} {name}")).await?;
        self.blocked.insert(name, Instant::now() + time);
        Ok(())
    }

    async fn fault(&mut self) -> Result<(), String> {
        let fault = ["409", "409", "timeout-after", "timeout-before", "reset-after", "500", "429"]
            .choose(&mut self.random)
            .copied()
            .unwrap_or("409");
        if self.random.random_bool(0.15) {
            return self.storm().await;
        }
        let times = self.random.random_range(1..6_u8);
        let filter = [
            "verb=patch resource=ciliumnodes",
            "verb=patch resource=configmaps",
            "verb=create resource=configmaps",
            "verb=update resource=leases",
            "verb=patch resource=ciliumnodes/status",
            "verb=create resource=ciliumnodes",
            "verb=list resource=ciliumnodes",
        ]
        .choose(&mut self.random)
        .copied()
        .unwrap_or_default();
        match self.random.random_range(0..4_u8) {
            0 => self.must(&format!("fault {times} watch-expired verb=watch")).await?,
            _ => self.must(&format!("fault {times} {fault} {filter}")).await?,
        };
        Ok(())
    }

    /// Writes of a kind get conflicts, as if another controller wrote the same objects continuously. Creation does so a few
    /// times only: a conflict there means that the object exists, and a node that is without its object for longer than the
    /// quarantine does lose its pod CIDR.
    async fn storm(&mut self) -> Result<(), String> {
        let times = self.random.random_range(10..60_u8);
        let verbs = [("verb=patch", times), ("verb=update", times), ("verb=create", times.min(5))];
        let resource = ["ciliumnodes", "ciliumnodes/status", "configmaps", "leases"].choose(&mut self.random);
        let resource = resource.copied().unwrap_or("ciliumnodes");
        for (verb, times) in verbs {
            self.must(&format!("fault {times} 409 {verb} resource={resource}")).await?;
        }
        Ok(())
    }

    /// A backup from before the first leader loses all assignments without any trace.
    async fn back_up(&mut self) -> Result<(), String> {
        if self.records().is_none() {
            return Ok(());
        }
        self.look(Hand::Ours)?;
        self.backup = Some(self.now());
        self.must("api/backup").await.map(drop)
    }

    fn records(&self) -> Option<Value> {
        self.world.server.get("configmap", "kube-system", RECORDS).ok()
    }

    /// The API server is stopped, restored from the backup, and started again.
    async fn restore(&mut self) -> Result<(), String> {
        let Some(backup) = self.backup.take() else { return Ok(()) };
        self.must("api/down").await?;
        if self.random.random_bool(0.3) {
            for name in
                self.operators.iter().filter(|(_, runs)| **runs).map(|(name, _)| name.clone()).collect::<Vec<_>>()
            {
                self.stop_operator("kill", &name).await?;
                self.start_operator(&name).await?;
            }
        }
        let outage = Duration::from_secs(self.random.random_range(OUTAGE));
        self.pass(outage).await?;
        self.must("api/restore").await?;
        self.revision = self.world.server.revision();
        let objects = self.world.server.list("ciliumnodes").map_err(|error| error.to_string())?;
        self.judge.restored(&objects, self.records().as_ref(), backup);
        let nodes = self.registered()?;
        for name in self.nodes.keys().filter(|name| !nodes.contains(*name)).cloned().collect::<Vec<_>>() {
            self.must(&format!("machine/register {name}")).await?;
        }
        self.must("api/up").await.map(drop)
    }

    /// Names of the Nodes.
    fn registered(&self) -> Result<BTreeSet<String>, String> {
        let nodes = self.world.server.list("nodes").map_err(|error| error.to_string())?;
        Ok(nodes.iter().filter_map(|node| node.pointer("/metadata/name")?.as_str().map(str::to_owned)).collect())
    }

    /// The pool gets another element, and operators are restarted one by one.
    async fn extend_pool(&mut self) -> Result<(), String> {
        let Some(spare) = self.spare.take() else { return Ok(()) };
        self.pool.push(spare);
        self.write_settings();
        for name in self.operators.iter().filter(|(_, runs)| **runs).map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.stop_operator("stop", &name).await?;
            self.start_operator(&name).await?;
            self.pass(Duration::from_secs(2)).await?;
        }
        Ok(())
    }

    /// A client deletes the CiliumNode of a running node.
    async fn delete_object(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        let _ = self.run(&format!("k8s/delete ciliumnode {name}")).await;
        self.look(Hand::Ours)
    }

    /// A client writes a pod CIDR to an object: one of the pool, possibly another node's.
    async fn edit_object(&mut self) -> Result<(), String> {
        let Some(name) = self.a_node() else { return Ok(()) };
        let all: Vec<Ipv4Net> = self.all_blocks();
        let Some(block) = self.chosen(all.into_iter()) else { return Ok(()) };
        self.look(Hand::Ours)?;
        let _ = self
            .run(&format!("k8s/patch ciliumnode {name} {{\"spec\":{{\"ipam\":{{\"podCIDRs\":[\"{block}\"]}}}}}}"))
            .await;
        self.look(Hand::Person)
    }

    fn all_blocks(&self) -> Vec<Ipv4Net> {
        self.pool.iter().flat_map(|net| net.subnets(MASK.max(net.prefix_len())).into_iter().flatten()).collect()
    }

    /// Faults end; the cluster must become stable.
    async fn come_to_rest(&mut self) -> Result<(), String> {
        self.must("faults off").await?;
        self.world.server.clear_faults();
        self.must("api/up").await?;
        for name in self.blocked.keys().cloned().collect::<Vec<_>>() {
            self.open(&name).await?;
        }
        for name in self.operators.iter().filter(|(_, runs)| !**runs).map(|(name, _)| name.clone()).collect::<Vec<_>>()
        {
            self.start_operator(&name).await?;
        }
        let nodes = self.registered()?;
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            if !nodes.contains(&name) {
                self.must(&format!("machine/register {name}")).await?;
            }
            self.world.machine(&name)?.crash_after(None);
            if self.nodes.get(&name).is_some_and(|node| !node.agent) {
                self.start_agent(&name).await?;
            }
        }
        let orphans: Vec<&String> = nodes.iter().filter(|name| !self.nodes.contains_key(*name)).collect();
        for name in orphans {
            self.delete_node(name).await?;
        }
        // An object that never had an owner is deleted by its creator.
        let objects = self.world.server.list("ciliumnodes").map_err(|error| error.to_string())?;
        let unowned = objects.iter().filter(|object| object.pointer("/metadata/ownerReferences").is_none());
        let left: Vec<String> = unowned
            .filter_map(|object| object.pointer("/metadata/name")?.as_str().map(str::to_owned))
            .filter(|name| !self.nodes.contains_key(name))
            .collect();
        for name in left {
            self.must(&format!("k8s/delete ciliumnode {name}")).await?;
            self.look(Hand::Person)?;
        }
        let until = Instant::now() + REST_BOUND;
        // The current leader must have seen the last changes.
        self.pass(TAKE_OVER).await?;
        while let Err(reason) = self.at_rest() {
            if Instant::now() >= until {
                return Err(format!("after {} s without faults: {reason}", REST_BOUND.as_secs()));
            }
            self.pass(Duration::from_secs(2)).await?;
        }
        self.say("at rest");
        self.take_calls();
        let rest = self.now();
        self.pass(QUIET).await?;
        self.at_rest()?;
        let writes = self.world.server.calls();
        // A node's condition follows its state with a delay, and another reason of the same state a minute later at
        // most. A full pass that comes just before finds the condition of before the restore and repairs it.
        let mut written: BTreeMap<String, usize> = BTreeMap::new();
        let mut expected = |call: &Call| match (call.resource.as_str(), call.subresource.as_str()) {
            // Events have their own budget.
            ("leases" | "events", _) => true,
            ("nodes", "status") => {
                let writes = written.entry(call.name.clone()).or_default();
                *writes += 1;
                *writes <= 2
            }
            _ => false,
        };
        // A call is recorded when it ends; one that started earlier may have been blocked since.
        let begun_since = writes.iter().filter(|call| call.at >= rest);
        match begun_since.filter(|call| call.verb.is_write()).find(|call| !expected(call)) {
            Some(call) => Err(format!("written although the cluster is stable: {call}")),
            None => Ok(()),
        }
    }

    /// Whether the cluster is stable.
    fn at_rest(&self) -> Result<(), String> {
        let error = |object: &Value| {
            object.pointer("/status/ipam/operator-status/error").and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let objects = self.world.server.list("ciliumnodes").map_err(|error| error.to_string())?;
        let mut taken = BTreeSet::new();
        let mut full = Vec::new();
        for object in &objects {
            let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            let (listed, error) = (blocks(object), error(object));
            if !self.nodes.contains_key(name) {
                return Err(format!("the object of {name} is still there, though the node is gone"));
            }
            let conflict = self.judge.is_touched(name, &listed);
            match (listed.first(), self.judge.used_by(name)) {
                (None, _) if error.contains("full") => full.push(name.to_owned()),
                (None, _) => return Err(format!("{name} has no pod CIDR, and its error is {error:?}")),
                (Some(_), None) => return Err(format!("{name} does not use its pod CIDR")),
                (Some(_), Some(used)) if !listed.contains(&used) => {
                    return Err(format!("{name} lists {listed:?} and uses {used}"));
                }
                // After a restore, the pod CIDR of a node's pods is listed beside the one that the operator knows.
                (Some(_), Some(_)) if listed.len() > 1 && self.judge.has_pods(name) => {
                    for block in &listed {
                        if !taken.insert(*block) && !conflict {
                            return Err(format!("{name} lists {block}, and so does another"));
                        }
                    }
                }
                (Some(_), Some(_)) if !error.is_empty() && !conflict => {
                    return Err(format!("{name} lists {listed:?}, and its error is {error:?}"));
                }
                (Some(block), Some(_)) => {
                    if !taken.insert(*block) && !self.judge.is_touched(name, &listed) {
                        return Err(format!("{name} lists {block}, and so does another"));
                    }
                }
            }
        }
        if let Some(name) = self.nodes.keys().find(|name| {
            !objects.iter().any(|object| object.pointer("/metadata/name").and_then(Value::as_str) == Some(name))
        }) {
            return Err(format!("{name} has no object"));
        }
        let kept = self.records();
        let known = kept.as_ref().map(records).unwrap_or_default();
        for object in &objects {
            let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
            let listed = blocks(object);
            if known.get(name) != Some(&listed) && !listed.is_empty() && !self.judge.is_touched(name, &listed) {
                return Err(format!("{name} lists {listed:?}, and recorded are {:?}", known.get(name)));
            }
        }
        let resting = kept.as_ref().and_then(|map| map.pointer("/data/quarantine.json")?.as_str());
        if resting.is_some_and(|text| text != "[]") {
            return Err(format!("pod CIDRs are quarantined: {}", resting.unwrap_or_default()));
        }
        let free = self.all_blocks().into_iter().filter(|block| !taken.contains(block)).count();
        if free > 0 && !full.is_empty() && !self.nodes.keys().any(|name| self.judge.is_touched(name, &BTreeSet::new()))
        {
            return Err(format!("{full:?} have the error that the pool is full, and {free} pod CIDRs are free"));
        }
        Ok(())
    }
}
