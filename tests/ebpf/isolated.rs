//! A thread with a network and a mount namespace of its own.

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// Runs `test` with a bpffs, a tmpfs at `/run` and a private loopback device; `test` gets the mount point of the bpffs.
/// All of it is deleted with the thread.
pub(crate) fn isolated<T: Send>(test: impl FnOnce(&Path) -> T + Send) -> T {
    assert!(nix::unistd::geteuid().is_root(), "loading kernel programs needs root");
    assert!(
        cistern::datapath::present(),
        "the agent was built without the eBPF object: run `cargo xtask build-ebpf` first"
    );
    let directory = tempfile::tempdir().expect("temporary directory");
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("new namespaces");
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
            mount(Some("bpf"), directory.path(), Some("bpf"), MsFlags::empty(), none).expect("bpffs");
            mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::empty(), none).expect("/run");
            run("ip link set lo up");
            test(directory.path())
        });
        match thread.join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs a shell command in the namespaces of this thread; returns its output.
pub(crate) fn run(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().expect("sh");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// A named network namespace, in the mount namespace of this thread only.
#[derive(Debug, Clone)]
pub(crate) struct Netns {
    name: String,
    path: PathBuf,
}

impl Netns {
    /// Creates one, with its loopback device up.
    pub(crate) fn new(name: &str) -> Self {
        run(&format!("ip netns add {name} && ip -n {name} link set lo up"));
        Self { name: name.to_owned(), path: Path::new("/run/netns").join(name) }
    }

    /// Runs a shell command in it; returns its output.
    pub(crate) fn run(&self, command: &str) -> String {
        run(&format!("ip netns exec {} sh -ec '{command}'", self.name))
    }

    /// Runs `work` in it, in a separate thread, and waits.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.join();
                work()
            });
            match thread.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Moves this thread into it.
    pub(crate) fn join(&self) {
        let file = File::open(&self.path).expect("network namespace");
        setns(file, CloneFlags::CLONE_NEWNET).expect("enter network namespace");
    }
}
