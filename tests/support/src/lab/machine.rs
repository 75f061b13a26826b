//! Machines and pods.

use super::process::{Holder, output};
use anyhow::{Context, Result};
use ipnet::Ipv4Net;
use serde_json::Value;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A machine in the lab: a node or a host.
#[derive(Debug)]
pub struct Machine {
    name: String,
    address: Ipv4Net,
    holder: Holder,
}

impl Machine {
    pub(super) fn new(name: &str, address: Ipv4Net, holder: Holder) -> Self {
        Self { name: name.to_owned(), address, holder }
    }

    pub(super) fn holder(&self) -> &Holder {
        &self.holder
    }

    pub(super) fn net(&self) -> Ipv4Net {
        self.address
    }

    /// Its host name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of its `eth0`.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address.addr()
    }

    /// Process ID of the holder of its namespaces, for `nsenter --target ID --net --mount --uts`.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.holder.id()
    }

    /// A command on this machine. Its working directory is `/`, so give the absolute path of the program, or one on
    /// `PATH`. The child's process ID is the program's own.
    #[must_use]
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        self.holder.command_inside(&program.as_ref().to_string_lossy())
    }

    /// Runs a program that must succeed, and returns its output.
    ///
    /// # Errors
    /// It cannot be started or fails; the error contains its output.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        output(self.command(program).args(arguments), &format!("{}: {program} {}", self.name, arguments.join(" ")))
    }

    /// As [`Machine::run`], for a program that prints JSON.
    ///
    /// # Errors
    /// As [`Machine::run`], or the output is not JSON.
    pub fn json(&self, program: &str, arguments: &[&str]) -> Result<Value> {
        json(&self.run(program, arguments)?, &format!("{}: {program} {}", self.name, arguments.join(" ")))
    }

    /// Path of a file of the machine, for this process.
    #[must_use]
    pub fn file(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root/{}", self.id(), path.trim_start_matches('/')))
    }

    /// Path of the machine's network namespace, for this process.
    #[must_use]
    pub fn namespace(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.id()))
    }

    /// Creates the network namespace of a pod, empty as a container runtime does.
    ///
    /// # Errors
    /// A pod of this name exists.
    pub fn pod(&self, name: &str) -> Result<Pod<'_>> {
        self.run("ip", &["netns", "add", name])?;
        Ok(self.existing_pod(name))
    }

    /// A pod with an existing network namespace at `/run/netns/NAME`.
    #[must_use]
    pub fn existing_pod(&self, name: &str) -> Pod<'_> {
        Pod { machine: self, name: name.to_owned() }
    }
}

/// The network namespace of a pod on a machine.
#[derive(Debug)]
pub struct Pod<'a> {
    machine: &'a Machine,
    name: String,
}

impl Pod<'_> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the namespace on the machine: `CNI_NETNS`.
    #[must_use]
    pub fn netns(&self) -> String {
        format!("/run/netns/{}", self.name)
    }

    /// Path of the namespace, for this process.
    #[must_use]
    pub fn namespace(&self) -> PathBuf {
        self.machine.file(&self.netns())
    }

    /// A command in the pod's network, with the machine's files.
    #[must_use]
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        // nsenter opens the path before it enters any namespace.
        let network = format!("--net={}", self.namespace().display());
        self.machine.holder.command(&[network, "--mount".into(), "--uts".into()], &program.as_ref().to_string_lossy())
    }

    /// As [`Machine::run`], in the pod's network.
    ///
    /// # Errors
    /// As [`Machine::run`].
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let what = format!("{} on {}: {program} {}", self.name, self.machine.name, arguments.join(" "));
        output(self.command(program).args(arguments), &what)
    }

    /// As [`Machine::json`], in the pod's network.
    ///
    /// # Errors
    /// As [`Machine::json`].
    pub fn json(&self, program: &str, arguments: &[&str]) -> Result<Value> {
        json(&self.run(program, arguments)?, &format!("{} on {}: {program}", self.name, self.machine.name))
    }

    /// Deletes the namespace with everything in it, as a runtime does after DEL.
    ///
    /// # Errors
    /// It does not exist.
    pub fn remove(&self) -> Result<()> {
        self.machine.run("ip", &["netns", "delete", &self.name]).map(drop)
    }
}

fn json(text: &str, what: &str) -> Result<Value> {
    serde_json::from_str(text).with_context(|| format!("{what}: no JSON: {text}"))
}
