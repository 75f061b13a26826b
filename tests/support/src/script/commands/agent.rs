//! Requests of the CNI plugin and the CLI to an agent, and the state of its machine.

use cistern::api::server::{AgentApi as _, Failure};
use cistern::api::types::{AddRequest, CheckRequest, ConfirmRequest, DelRequest, Interface, PodAttachment, PodRef};
use serde::Serialize;
use serde_json::Value;

use super::{Outcome, Printed, exactly, silent};
use crate::apiserver::table;
use crate::script::world::World;

/// The interface name used by runtimes.
const IFNAME: &str = "eth0";

/// The host side's index of the first container; the others follow.
const FIRST_HOST_IFINDEX: u32 = 100;

fn refused(failure: Failure) -> String {
    let Failure { status, error } = failure;
    format!("{status} {}: {}", error.reason, error.message)
}

fn netns(container: &str) -> String {
    format!("/run/netns/{container}")
}

pub(super) fn add_machines(world: &mut World, names: &[&str]) -> Outcome {
    if names.is_empty() {
        return Err("expected: machine/add NAME…".to_owned());
    }
    for name in names {
        world.add_machine(name)?;
    }
    Ok(silent())
}

pub(super) fn reboot(world: &World, arguments: &[&str]) -> Outcome {
    let [name] = exactly(arguments, "machine/reboot NAME")?;
    world.reboot(name)?;
    Ok(silent())
}

/// A fault of the disk of a machine.
#[derive(Clone, Copy)]
pub(super) enum Disk {
    Refuse,
    Accept,
    Damage,
}

/// The disk refuses to write node.json and new lease records, or does so no more; or node.json and the records of granted pod
/// CIDRs are damaged.
pub(super) fn disk(world: &mut World, arguments: &[&str], what: Disk) -> Outcome {
    let [name] = exactly(arguments, "disk/refuse|accept|damage NAME")?;
    let root = world.state_of(name)?;
    let machine = world.machine(name)?;
    match what {
        Disk::Refuse => machine.set_full(true),
        Disk::Accept => machine.set_full(false),
        Disk::Damage => machine.lose_grants(),
    }
    let temporary = root.join("node.new");
    let done = match what {
        Disk::Refuse => std::fs::create_dir(temporary),
        Disk::Accept => std::fs::remove_dir(temporary),
        Disk::Damage => std::fs::write(root.join("node.json"), "damaged"),
    };
    done.map_err(|error| error.to_string())?;
    Ok(silent())
}

/// Every state file of a machine is lost; its agent must not run.
pub(super) fn lose(world: &mut World, arguments: &[&str]) -> Outcome {
    let [name] = exactly(arguments, "disk/lose NAME")?;
    let root = world.state_of(name)?;
    world.machine(name)?.lose_records();
    for entry in std::fs::read_dir(root).map_err(|error| error.to_string())? {
        let path = entry.map_err(|error| error.to_string())?.path();
        if path.is_file() {
            std::fs::remove_file(path).map_err(|error| error.to_string())?;
        }
    }
    Ok(silent())
}

/// The agent of a machine ends by itself after so many more writes of lease records.
pub(super) fn crash(world: &World, arguments: &[&str]) -> Outcome {
    let [name, writes] = exactly(arguments, "disk/crash NAME WRITES")?;
    let writes = writes.parse().map_err(|error| format!("{writes}: expected a number of writes: {error}"))?;
    world.machine(name)?.crash_after(Some(writes));
    Ok(silent())
}

/// Removes machines.
pub(super) fn remove_machines(world: &mut World, names: &[&str]) -> Outcome {
    for name in names {
        world.remove_machine(name)?;
    }
    Ok(silent())
}

/// Recreates the Nodes of machines.
pub(super) fn register_machines(world: &World, names: &[&str]) -> Outcome {
    for name in names {
        world.register_node(name)?;
    }
    Ok(silent())
}

/// Requests an address and prints it. Also creates the container's namespace.
pub(super) async fn add(world: &mut World, arguments: &[&str]) -> Outcome {
    let [node, container] = exactly(arguments, "cni/add NODE CONTAINER")?;
    world.machine(node)?.set_namespace(&netns(container), true);
    let request = AddRequest {
        container_id: container.to_owned(),
        ifname: IFNAME.to_owned(),
        netns: netns(container),
        network: None,
        pod: Some(PodRef {
            namespace: "default".to_owned(),
            name: container.to_owned(),
            uid: Some(format!("uid-of-{container}")),
        }),
        began: Some(world.moment(node)?),
    };
    let granted = world.agent(node)?.add(request).await.map_err(refused)?;
    world.generations.insert((node.to_owned(), container.to_owned()), granted.generation);
    let lines = granted.leased().into_iter().map(|leased| format!("{}\n", leased.address));
    Ok(Printed::Text(lines.collect()))
}

/// Confirms the interface.
pub(super) async fn confirm(world: &World, arguments: &[&str]) -> Outcome {
    let [node, container] = exactly(arguments, "cni/confirm NODE CONTAINER")?;
    let generation = world.generations.get(&(node.to_owned(), container.to_owned()));
    let position = world.generations.keys().take_while(|(_, other)| other != container).count();
    let request = ConfirmRequest {
        container_id: container.to_owned(),
        ifname: IFNAME.to_owned(),
        generation: *generation.ok_or("nothing was granted: cni/add comes first")?,
        interface: PodAttachment::Pair(Interface {
            host_ifname: format!("cst-{container}"),
            host_ifindex: FIRST_HOST_IFINDEX.saturating_add(u32::try_from(position).unwrap_or(u32::MAX)),
            mac: "02:00:00:00:00:01".to_owned(),
        }),
        began: Some(world.moment(node)?),
    };
    world.agent(node)?.confirm(request).await.map_err(refused)?;
    Ok(silent())
}

/// Releases the address and prints it, if there was one. Also deletes the container's namespace.
pub(super) async fn del(world: &World, arguments: &[&str]) -> Outcome {
    let [node, container] = exactly(arguments, "cni/del NODE CONTAINER")?;
    let request =
        DelRequest { container_id: container.to_owned(), ifname: IFNAME.to_owned(), began: Some(world.moment(node)?) };
    let released = world.agent(node)?.del(request).await.map_err(refused)?.released;
    world.machine(node)?.set_namespace(&netns(container), false);
    Ok(Printed::Text(released.map(|address| format!("{address}\n")).unwrap_or_default()))
}

/// Prints the allocated address of a container.
pub(super) async fn check(world: &World, arguments: &[&str]) -> Outcome {
    let [node, container] = exactly(arguments, "cni/check NODE CONTAINER")?;
    let request = CheckRequest { container_id: container.to_owned(), ifname: IFNAME.to_owned() };
    let found = world.agent(node)?.check(request).await.map_err(refused)?;
    Ok(Printed::Text(format!("{}\n", found.address)))
}

/// Prints the output of `cistern status -o json`, or the value at a path of it.
pub(super) async fn status(world: &World, arguments: &[&str]) -> Outcome {
    let (node, path) = match arguments {
        [node] => (node, None),
        [node, path] => (node, Some(*path)),
        _ => return Err("expected: status NODE [PATH]".to_owned()),
    };
    print(&world.agent(node)?.status().await, path)
}

/// Succeeds if the agent is ready; otherwise the error has its reasons.
pub(super) async fn health(world: &World, arguments: &[&str]) -> Outcome {
    let [node] = exactly(arguments, "health NODE")?;
    let health = world.agent(node)?.health().await;
    if health.ready { Ok(silent()) } else { Err(health.reasons.join("\n")) }
}

/// Prints the output of `cistern ip list -o json`, one row per line.
pub(super) async fn addresses(world: &World, arguments: &[&str]) -> Outcome {
    let [node] = exactly(arguments, "ip/list NODE")?;
    let rows = world.agent(node)?.addresses().await.map_err(refused)?;
    let lines = rows.iter().map(|row| serde_json::to_string(row).map(|row| format!("{row}\n")));
    Ok(Printed::Text(lines.collect::<Result<_, _>>().map_err(|error| error.to_string())?))
}

/// Prints the output of `cistern explain ip -o json`, or the value at a path of it.
pub(super) async fn explain_ip(world: &World, arguments: &[&str]) -> Outcome {
    let (node, address, path) = match arguments {
        [node, address] => (node, address, None),
        [node, address, path] => (node, address, Some(*path)),
        _ => return Err("expected: explain/ip NODE IP [PATH]".to_owned()),
    };
    print(&world.agent(node)?.explain_ip((*address).to_owned()).await.map_err(refused)?, path)
}

/// Prints the output of `cistern explain node -o json` of the agent of `NODE` for `OTHER`, or a value of it.
pub(super) async fn explain_node(world: &World, arguments: &[&str]) -> Outcome {
    let (node, other, path) = match arguments {
        [node, other] => (node, other, None),
        [node, other, path] => (node, other, Some(*path)),
        _ => return Err("expected: explain/node NODE OTHER [PATH]".to_owned()),
    };
    print(&world.agent(node)?.explain_node(Some((*other).to_owned())).await, path)
}

/// Prints the lines of `GET /metrics` without comments.
pub(super) async fn metrics(world: &World, arguments: &[&str]) -> Outcome {
    let [node] = exactly(arguments, "metrics NODE")?;
    let text = world.agent(node)?.metrics().await;
    Ok(Printed::Text(text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect()))
}

/// Prints the rows of a target, one per line.
pub(super) fn target(world: &World, arguments: &[&str]) -> Outcome {
    let [node, target] = exactly(arguments, "target NODE TARGET")?;
    world.machine(node)?.shown(target).map(Printed::Text)
}

fn print(value: &impl Serialize, path: Option<&str>) -> Outcome {
    let value: Value = serde_json::to_value(value).map_err(|error| error.to_string())?;
    Ok(Printed::Text(match path {
        Some(path) => table::lookup(&value, path).map(|found| table::plain_text(&found)).unwrap_or_default(),
        None => serde_json::to_string_pretty(&value).map_err(|error| error.to_string())?,
    }))
}
