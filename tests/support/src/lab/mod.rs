//! Small networks of namespaces on this machine: nodes, external hosts, pods.
//!
//! ```text
//!              wire: a namespace with one bridge
//!        ┌──────────────┬───────────────┐
//!      eth0           eth0            eth0
//!   node-a (node)   node-b (node)   outside (host)      each a network, mount and UTS namespace
//!   ├─ pod-1        └─ pod-1
//!   └─ pod-2        network namespaces under the node's own /run/netns
//! ```
//!
//! A machine's namespaces are held by a waiting process, so they outlive the agents that are started in them. Each
//! machine has its own `/run` and `/var/lib`; a node also has its own bpffs at `/sys/fs/bpf`. No device or mount is
//! created in the host's namespaces, so labs are isolated from each other and leave nothing behind.
//!
//! The holders of a lab terminate when its creator does, even after `kill -9`, and kill the processes on their machines.
//! Processes started on a machine also have [`MARK`] in their environment: dropping the lab kills them, and the next lab
//! of the same prefix kills those whose creator has terminated.
//!
//! Creating a lab requires root.

mod machine;
mod process;

pub use machine::{Machine, Pod};
pub(crate) use process::{output, set_up};

use anyhow::{Context, Result, ensure};
use ipnet::Ipv4Net;
use process::{Holder, Mark};
use std::cell::Cell;

/// Environment variable of every process in a lab: its prefix and its creator.
pub const MARK: &str = "CISTERN_LAB";

const BRIDGE: &str = "wire";

/// A network of machines.
#[derive(Debug)]
pub struct Lab {
    mark: Mark,
    kept: bool,
    wire: Holder,
    ports: Cell<u32>,
}

impl Lab {
    /// Creates an empty network. Remains of labs with this prefix whose creators were killed are removed first. A
    /// prefix consists of letters, digits and hyphens.
    ///
    /// # Errors
    /// The caller is not root, or the kernel refuses a namespace.
    pub fn new(prefix: &str) -> Result<Self> {
        Self::make(prefix, false)
    }

    /// As [`Lab::new`], but the lab survives its creator and its value. [`Lab::remove_left`] removes it, and so does
    /// the next lab of the prefix once the creator has terminated.
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn kept(prefix: &str) -> Result<Self> {
        Self::make(prefix, true)
    }

    fn make(prefix: &str, kept: bool) -> Result<Self> {
        ensure!(
            !prefix.is_empty() && prefix.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
            "lab prefix {prefix:?}: expected letters, digits and hyphens"
        );
        ensure!(nix::unistd::geteuid().is_root(), "a lab consists of namespaces: run this as root");
        Self::remove_left(prefix)?;
        let mark = Mark::own(prefix)?;
        let setup = format!("ip link add {BRIDGE} type bridge stp_state 0 forward_delay 0\nip link set {BRIDGE} up");
        let wire = Holder::start(&mark, &format!("{prefix}-wire"), &setup, kept).context("the wire")?;
        Ok(Self { mark, kept, wire, ports: Cell::new(0) })
    }

    /// Kills all processes of labs with this prefix whose creators have terminated, and thereby frees their namespaces.
    /// Returns the number of processes.
    ///
    /// # Errors
    /// `/proc` cannot be read, or a process does not terminate.
    pub fn remove_left(prefix: &str) -> Result<usize> {
        process::end(|mark| mark.prefix == prefix && !mark.maker_lives())
    }

    /// Adds a Kubernetes node: it forwards packets and has its own bpffs.
    ///
    /// # Errors
    /// An error from the kernel.
    pub fn node(&self, name: &str, address: Ipv4Net) -> Result<Machine> {
        self.machine(name, address, "mount -t bpf bpf /sys/fs/bpf\necho 1 >/proc/sys/net/ipv4/ip_forward\n")
    }

    /// Adds a host that is not a node: a client or server outside the cluster.
    ///
    /// # Errors
    /// An error from the kernel.
    pub fn host(&self, name: &str, address: Ipv4Net) -> Result<Machine> {
        self.machine(name, address, "")
    }

    /// Replaces a machine's `eth0` by a new device with the same address. Its routes are lost.
    ///
    /// # Errors
    /// An error from the kernel.
    pub fn replace_eth0(&self, machine: &Machine) -> Result<()> {
        machine.run("ip", &["link", "delete", "eth0"])?;
        self.plug(machine.holder(), machine.net(), machine.name())
    }

    fn machine(&self, name: &str, address: Ipv4Net, setup: &str) -> Result<Machine> {
        let setup = format!("{OWN_FILES}{setup}ip link set lo up\n");
        let holder = Holder::start(&self.mark, name, &setup, self.kept).with_context(|| format!("machine {name}"))?;
        self.plug(&holder, address, name)?;
        Ok(Machine::new(name, address, holder))
    }

    /// Connects a machine's `eth0` to the wire.
    fn plug(&self, holder: &Holder, address: Ipv4Net, name: &str) -> Result<()> {
        let port = self.ports.get();
        self.ports.set(port + 1);
        self.wire
            .run(&format!(
                "ip link add port{port} type veth peer name eth0 netns {}\n\
                 ip link set port{port} master {BRIDGE} up",
                holder.id()
            ))
            .with_context(|| format!("wire of {name}"))?;
        holder
            .run(&format!("ip address add {address} dev eth0\nip link set eth0 up"))
            .with_context(|| format!("eth0 of {name}"))
            .map(drop)
    }
}

/// A machine's own files: `/run` and `/var/lib` are empty, `/etc` and `/opt` overlay those of the host.
const OWN_FILES: &str = "\
mount -t tmpfs run /run
mount -t tmpfs state /var/lib
for directory in etc opt; do
  mkdir -p /run/lab/$directory/upper /run/lab/$directory/work
  mount -t overlay lab -o lowerdir=/$directory,upperdir=/run/lab/$directory/upper,workdir=/run/lab/$directory/work /$directory
done
";

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = process::end(|mark| *mark == self.mark)
        {
            eprintln!("lab {}: {error:#}", self.mark.prefix);
        }
    }
}
