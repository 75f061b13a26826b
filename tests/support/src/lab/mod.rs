//! Small networks of namespaces on this machine: nodes, outside hosts, pods.
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
//! A machine's namespaces are held by a process that only waits, so they outlive every agent that is started in them.
//! Each machine has its own `/run` and `/var/lib`; a node has its own bpffs at `/sys/fs/bpf` too. Nothing is made
//! in the host's namespaces, neither device nor mount, so labs cannot meet each other and leave nothing behind.
//!
//! The waiting processes of a lab end when whoever made the lab does, even by `kill -9`, and take with them what runs in
//! their machines. Processes that were started in a machine also carry [`MARK`] in their environment: dropping the lab
//! ends them, and the next lab of the same prefix ends those that are left although their maker is gone.
//!
//! Making one needs root.

mod machine;
mod process;

pub use machine::{Machine, Pod};
pub(crate) use process::{output, set_up};

use anyhow::{Context, Result, ensure};
use ipnet::Ipv4Net;
use process::{Holder, Mark};
use std::cell::Cell;

/// Environment variable of every process in a lab: its prefix and who made it.
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
    /// Makes an empty network. What killed makers of labs with this prefix left is removed first. A prefix is letters,
    /// digits and hyphens.
    ///
    /// # Errors
    /// When the caller is not root, or the kernel refuses a namespace.
    pub fn new(prefix: &str) -> Result<Self> {
        Self::make(prefix, false)
    }

    /// As [`Lab::new`], but nothing ends with the maker or when the value is dropped. [`Lab::remove_left`] ends it, and
    /// so does the next lab of the prefix once the maker is gone.
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
        ensure!(nix::unistd::geteuid().is_root(), "a lab is made of namespaces: run this as root");
        Self::remove_left(prefix)?;
        let mark = Mark::own(prefix)?;
        let setup = format!("ip link add {BRIDGE} type bridge stp_state 0 forward_delay 0\nip link set {BRIDGE} up");
        let wire = Holder::start(&mark, &format!("{prefix}-wire"), &setup, kept).context("the wire")?;
        Ok(Self { mark, kept, wire, ports: Cell::new(0) })
    }

    /// Ends every process of labs with this prefix whose maker is gone, and with them their namespaces. Returns how many
    /// processes there were.
    ///
    /// # Errors
    /// When `/proc` cannot be read, or a process does not end.
    pub fn remove_left(prefix: &str) -> Result<usize> {
        process::end(|mark| mark.prefix == prefix && !mark.maker_lives())
    }

    /// A Kubernetes node: forwards packets, has its own bpffs.
    ///
    /// # Errors
    /// When the kernel refuses part of it.
    pub fn node(&self, name: &str, address: Ipv4Net) -> Result<Machine> {
        self.machine(name, address, "mount -t bpf bpf /sys/fs/bpf\necho 1 >/proc/sys/net/ipv4/ip_forward\n")
    }

    /// A host that is no node: a client or a server outside of the cluster.
    ///
    /// # Errors
    /// When the kernel refuses part of it.
    pub fn host(&self, name: &str, address: Ipv4Net) -> Result<Machine> {
        self.machine(name, address, "")
    }

    /// Takes a machine's `eth0` away and gives it a new one with the same address. Routes over it are gone.
    ///
    /// # Errors
    /// When the kernel refuses part of it.
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

/// What a machine has for itself: `/run` and `/var/lib` empty, `/etc` and `/opt` as they are here, with its own changes.
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
