//! Control groups of the cluster, which identify its processes regardless of their parents.
//!
//! On a host with cgroup v1 each hierarchy gets `cistern-cluster/MACHINE`, since a kubelet keeps its pods in all of
//! them; with cgroup v2 there is one hierarchy. Below the machine's group each daemon has its own group in the
//! *tracking* hierarchy, which it joins before it starts.

use super::wait_for;
use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The root group, in each hierarchy.
pub const ROOT: &str = "cistern-cluster";

/// Controllers that a kubelet requires with cgroup v2.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "io", "memory", "pids"];

/// Mount point of a hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    mount: PathBuf,
    second_version: bool,
}

/// The hierarchies in the format of `/proc/mounts`, the one for tracking first.
fn hierarchies(mounts: &str) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mounts.lines() {
        let mut fields = line.split(' ').skip(1);
        let (Some(mount), Some(kind @ ("cgroup" | "cgroup2"))) = (fields.next(), fields.next()) else { continue };
        found.push(Hierarchy { mount: mount.into(), second_version: kind == "cgroup2" });
    }
    found.sort_by_key(|hierarchy| !hierarchy.second_version);
    found
}

fn of_this_host() -> Result<Vec<Hierarchy>> {
    let found = hierarchies(&fs::read_to_string("/proc/mounts").context("read /proc/mounts")?);
    anyhow::ensure!(!found.is_empty(), "/proc/mounts names no cgroup hierarchy: expected one at /sys/fs/cgroup");
    Ok(found)
}

/// Creates the group of a machine in every hierarchy.
pub(super) fn make_machine(machine: &str) -> Result<()> {
    for hierarchy in of_this_host()? {
        let mut group = hierarchy.mount.clone();
        for part in [ROOT, machine] {
            let parent = group.clone();
            if hierarchy.second_version {
                hand_down(&parent);
            }
            group.push(part);
            fs::create_dir_all(&group).with_context(|| format!("create the control group {}", group.display()))?;
            // In cgroup v1 a group accepts no process before these are set.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if !hierarchy.second_version && group.join(file).exists() {
                    let value = fs::read_to_string(parent.join(file))?;
                    fs::write(group.join(file), value.trim())
                        .with_context(|| format!("{}: {file}", group.display()))?;
                }
            }
        }
        if hierarchy.second_version {
            hand_down(&group);
        }
    }
    Ok(())
}

/// Enables the controllers of `group` for its children.
fn hand_down(group: &Path) {
    let available = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    for controller in CONTROLLERS.iter().filter(|name| available.split_whitespace().any(|one| one == **name)) {
        // A kubelet that lacks one reports it more precisely.
        let _ = fs::write(group.join("cgroup.subtree_control"), format!("+{controller}"));
    }
}

/// Creates the group of a daemon and returns the file for process IDs.
pub(super) fn make_daemon(machine: &str, daemon: &str) -> Result<PathBuf> {
    let group = daemon_group(machine, daemon)?;
    fs::create_dir_all(&group).with_context(|| format!("create the control group {}", group.display()))?;
    Ok(group.join("cgroup.procs"))
}

fn daemon_group(machine: &str, daemon: &str) -> Result<PathBuf> {
    let tracking = of_this_host()?.swap_remove(0);
    Ok(tracking.mount.join(ROOT).join(machine).join(daemon))
}

/// The processes in a daemon's group.
pub(super) fn daemon_processes(machine: &str, daemon: &str) -> Result<Vec<Pid>> {
    Ok(processes(&daemon_group(machine, daemon)?))
}

fn processes(group: &Path) -> Vec<Pid> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).map(Pid::from_raw).collect()
}

/// `group` and its descendants, deepest first; empty if it does not exist.
fn tree(group: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(tree(&entry.path()));
        }
    }
    if group.is_dir() {
        found.push(group.to_owned());
    }
    found
}

/// Kills every process of `machine`, or of all machines, and removes their groups.
pub(super) fn end(machine: Option<&str>) -> Result<()> {
    let part = machine.map_or_else(|| PathBuf::from(ROOT), |name| Path::new(ROOT).join(name));
    let roots: Vec<PathBuf> = of_this_host()?.iter().map(|hierarchy| hierarchy.mount.join(&part)).collect();
    wait_for("the cluster's processes to terminate", || {
        let all: BTreeSet<Pid> = roots.iter().flat_map(|root| tree(root)).flat_map(|group| processes(&group)).collect();
        for process in &all {
            kill_one(*process)?;
        }
        Ok(all.is_empty())
    })?;
    wait_for("the kernel to free the cluster's control groups", || {
        let groups: Vec<PathBuf> = roots.iter().flat_map(|root| tree(root)).collect();
        // A busy one is retried in the next round.
        Ok(groups.iter().filter(|group| fs::remove_dir(group).is_err()).count() == 0)
    })
}

/// Kills a process, which may have terminated already.
pub(super) fn kill_one(process: Pid) -> Result<()> {
    match kill(process, Signal::SIGKILL) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(errno) => Err(errno).with_context(|| format!("kill process {process}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_v2_is_used_for_tracking_wherever_it_is_mounted() {
        let mounts = "proc /proc proc rw 0 0\n\
                      cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      tmpfs /sys/fs/cgroup tmpfs rw 0 0\n";
        let paths: Vec<_> = hierarchies(mounts).into_iter().map(|one| (one.mount, one.second_version)).collect();
        assert_eq!(paths, [("/sys/fs/cgroup/unified".into(), true), (PathBuf::from("/sys/fs/cgroup/pids"), false)]);
    }

    #[test]
    fn a_tree_is_listed_from_its_leaves() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b/c")).unwrap();
        fs::write(directory.path().join("a/cgroup.procs"), "12\n345\n").unwrap();
        let found = tree(&directory.path().join("a"));
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["c", "b", "a"]);
        assert_eq!(processes(&found[2]), [Pid::from_raw(12), Pid::from_raw(345)]);
        assert!(tree(&directory.path().join("missing")).is_empty());
    }
}
