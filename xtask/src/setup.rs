//! Installation of what the other commands need.
//!
//! On Debian, as root, missing packages are installed; elsewhere setup prints them with the command to install them,
//! and fails. It is idempotent.

use crate::ebpf;
use crate::process::{self, find, path_with};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// A required program.
struct Program {
    /// Its name on `PATH`, or its path.
    name: &'static str,
    /// The Debian package that provides it.
    package: &'static str,
    /// What it is used by.
    used_by: &'static str,
}

/// No C compiler is listed: without one, this program could not have been built.
const PROGRAMS: [Program; 15] = [
    Program { name: "git", package: "git", used_by: "check" },
    Program { name: "ip", package: "iproute2", used_by: "namespace tests, demo" },
    Program { name: "ping", package: "iputils-ping", used_by: "demo" },
    Program { name: "ethtool", package: "ethtool", used_by: "eBPF tests: checksum offloads" },
    Program { name: "bpftool", package: "bpftool", used_by: "eBPF tests, demo" },
    Program { name: "kubectl", package: "kubernetes-client", used_by: "script tests, demo" },
    Program {
        name: "/usr/lib/cni/ptp",
        package: "containernetworking-plugins",
        used_by: "namespace tests, bench, cluster",
    },
    Program { name: "runc", package: "runc", used_by: "cluster" },
    Program { name: "buildah", package: "buildah", used_by: "image, cluster" },
    Program { name: "iptables", package: "iptables", used_by: "namespace tests: portmap; cluster: kube-proxy" },
    Program { name: "strace", package: "strace", used_by: "namespace tests: kill -9 at each system call" },
    Program { name: "conntrack", package: "conntrack", used_by: "cluster: kube-proxy" },
    Program { name: "curl", package: "curl", used_by: "cluster: the test image" },
    Program { name: "busybox", package: "busybox-static", used_by: "cluster: shell of the test image" },
    Program { name: "/etc/ssl/certs/ca-certificates.crt", package: "ca-certificates", used_by: "image" },
];

/// Needed by `conformance` only. If they cannot be installed, setup reports it and succeeds.
const CONFORMANCE_PROGRAMS: [Program; 3] = [
    Program { name: "dig", package: "bind9-dnsutils", used_by: "conformance: the test image" },
    Program { name: "wget", package: "wget", used_by: "conformance: the test image" },
    Program { name: "nc.openbsd", package: "netcat-openbsd", used_by: "conformance: the test image" },
];

/// The oldest Go that downloads the toolchain that a module requires.
const OLDEST_GO: u32 = 21;

/// The version of bpf-linker that is known to build these programs.
const LINKER_VERSION: &str = "0.13";
/// The LLVM versions that bpf-linker can be built with, in order of preference.
const LINKER_LLVM: [u32; 3] = [22, 21, 23];
/// The LLVM of the workspace's Rust version: an older linker could not read a nightly's bitcode.
const OLDEST_LLVM: u32 = 22;
/// What `cargo install bpf-linker` needs besides LLVM itself.
const LINKER_LIBRARIES: [&str; 4] = ["g++", "zlib1g-dev", "libzstd-dev", "libxml2-dev"];
/// Debian's toolchain with a precompiled `core` for the eBPF target.
const COMPILED_TOOLCHAIN: [&str; 2] = ["rustc-web", "libstd-rust-web-dev-bpf"];

/// Checks and installs everything, and prints the result.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut packages = Packages::of_this_machine();
    install_programs(&mut packages, &PROGRAMS)?;
    if let Err(error) = install_programs(&mut packages, &CONFORMANCE_PROGRAMS) {
        eprintln!("setup: `cargo xtask conformance` cannot run on this machine: {error:#}");
    }
    install_components(workspace)?;
    install_go(&mut packages)?;
    // The linker first: the compiler must not be newer than the linker's LLVM.
    install_linker(workspace, &mut packages)?;
    install_kernel_toolchain(&mut packages)?;
    let toolchain = ebpf::toolchain().map_err(|refused| {
        anyhow::anyhow!("no toolchain can build the kernel programs:\n  - {}", refused.join("\n  - "))
    })?;
    eprintln!("setup: complete; kernel programs are built with {toolchain}");
    Ok(())
}

/// Debian's package manager, if available.
struct Packages {
    /// Why packages cannot be installed.
    refusal: Option<&'static str>,
    lists_are_fresh: bool,
}

impl Packages {
    fn of_this_machine() -> Self {
        let refusal = if find("apt-get").is_none() || !Path::new("/etc/debian_version").exists() {
            Some("this is not Debian")
        } else if !crate::test::is_root() {
            Some("you are not root")
        } else {
            None
        };
        Self { refusal, lists_are_fresh: false }
    }

    /// Updates the package lists once. A fresh container has none.
    fn refresh(&mut self) -> Result<()> {
        if !self.lists_are_fresh {
            process::run(Command::new("apt-get").arg("update"))?;
            self.lists_are_fresh = true;
        }
        Ok(())
    }

    /// Whether apt could install `package`.
    fn offers(&mut self, package: &str) -> Result<bool> {
        if self.refusal.is_some() {
            return Ok(false);
        }
        self.refresh()?;
        let policy = process::output(Command::new("apt-cache").args(["policy", package]).env("LC_ALL", "C"))?;
        Ok(policy.lines().any(|line| line.trim().starts_with("Candidate:") && !line.contains("(none)")))
    }

    /// Installs `packages`, or fails with the command to do so.
    fn install(&mut self, packages: &BTreeSet<&str>) -> Result<()> {
        let names = packages.iter().copied().collect::<Vec<_>>().join(" ");
        if let Some(refusal) = self.refusal {
            bail!("{refusal}: install what Debian calls `apt-get install {names}`, then run setup again");
        }
        self.refresh()?;
        process::run(
            Command::new("apt-get")
                .args(["install", "--yes", "--no-install-recommends"])
                .args(packages)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    }
}

fn is_there(program: &Program) -> bool {
    if program.name.starts_with('/') { Path::new(program.name).exists() } else { find(program.name).is_some() }
}

fn install_programs(packages: &mut Packages, programs: &[Program]) -> Result<()> {
    let mut wanted = BTreeSet::new();
    for program in programs.iter().filter(|program| !is_there(program)) {
        eprintln!("setup: {} is missing (package {}, used by {})", program.name, program.package, program.used_by);
        wanted.insert(program.package);
    }
    if wanted.is_empty() { Ok(()) } else { packages.install(&wanted) }
}

/// The components of the Rust toolchain that `check` needs.
fn install_components(workspace: &Workspace) -> Result<()> {
    for (subcommand, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if process::output(workspace.cargo().args([subcommand, "--version"])).is_ok() {
            continue;
        }
        if find("rustup").is_none() {
            bail!("`cargo {subcommand}` is missing, and so is rustup: install {component} for {}", rustc());
        }
        process::run(Command::new("rustup").current_dir(workspace.root()).args(["component", "add", component]))
            .with_context(|| format!("adding {component}"))?;
    }
    Ok(())
}

/// Go, which builds Helm for the chart's tests and Kubernetes for the cluster. If it cannot be installed, setup reports
/// it and succeeds.
fn install_go(packages: &mut Packages) -> Result<()> {
    if process::output(Command::new("go").arg("version")).is_ok_and(|said| go_minor(&said) >= Some(OLDEST_GO)) {
        return Ok(());
    }
    if packages.refusal.is_none() {
        packages.refresh()?;
        let policy = process::output(Command::new("apt-cache").args(["policy", "golang-go"]).env("LC_ALL", "C"))?;
        let candidate = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate:"));
        if candidate.and_then(go_minor) >= Some(OLDEST_GO) {
            return packages.install(&["golang-go"].into());
        }
    }
    eprintln!(
        "setup: no Go 1.{OLDEST_GO} or newer, and no package golang-go of it: `cargo xtask test` builds Helm with it, \
         `cluster` and `test --cluster` Kubernetes, unless KUBEBUILDER_ASSETS or PATH has the programs; put one from go.dev/dl into PATH"
    );
    Ok(())
}

/// `26` of `go version go1.26.8 linux/amd64` and of a Debian version `2:1.26~1`.
fn go_minor(text: &str) -> Option<u32> {
    text.split_whitespace().find_map(|word| {
        let version = word.rsplit(':').next()?.trim_start_matches("go").strip_prefix("1.")?;
        version.split(|end: char| !end.is_ascii_digit()).next()?.parse().ok()
    })
}

fn rustc() -> String {
    process::output(Command::new("rustc").arg("--version"))
        .map_or_else(|_| "the Rust toolchain".to_owned(), |version| version.trim().to_owned())
}

/// A compiler for the kernel programs: nightly with sources if rustup can install it, else Debian's precompiled `core`.
fn install_kernel_toolchain(packages: &mut Packages) -> Result<()> {
    let Err(before) = ebpf::toolchain() else { return Ok(()) };
    if find("rustup").is_some() {
        eprintln!("setup: no toolchain for the kernel programs is installed ({})", before.join("; "));
        let mut add = Command::new("rustup");
        add.args(["toolchain", "install", "nightly", "--profile", "minimal"]);
        add.args(["--component", "rust-src", "--no-self-update"]);
        let has_nightly = process::output(Command::new("rustup").args(["run", "nightly", "rustc", "-V"])).is_ok();
        if has_nightly {
            // Adding a component to an installed nightly keeps its date; installing would fetch the newest one.
            add = Command::new("rustup");
            add.args(["component", "add", "rust-src", "--toolchain", "nightly"]);
        }
        if !process::status(&mut add)?.success() {
            eprintln!("setup: rustup cannot install it; trying Debian's compiler");
        }
    }
    let Err(refused) = ebpf::toolchain() else { return Ok(()) };
    for package in COMPILED_TOOLCHAIN {
        if packages.refusal.is_none() && !packages.offers(package)? {
            bail!("no compiler for the kernel programs: apt has no {package}, and {}", refused.join("; "));
        }
    }
    packages.install(&COMPILED_TOOLCHAIN.into())
}

/// The linker, built with an LLVM that reads the compiler's bitcode.
fn install_linker(workspace: &Workspace, packages: &mut Packages) -> Result<()> {
    let mut probe = Command::new("bpf-linker");
    probe.arg("--version").env("PATH", path_with(ebpf::cargo_bin()));
    let version = process::output(&mut probe).unwrap_or_default();
    let llvm = ebpf::linker_llvm();
    if is_wanted_linker(&version) && llvm.is_none_or(|llvm| llvm >= OLDEST_LLVM) {
        return Ok(());
    }
    let found = match (version.trim(), llvm) {
        ("", _) => "none runs".to_owned(),
        (version, None) => format!("found {version}"),
        (version, Some(llvm)) => format!("found {version} on LLVM {llvm}"),
    };
    eprintln!("setup: bpf-linker {LINKER_VERSION} on LLVM {OLDEST_LLVM} or newer is required; {found}");
    let by_hand = |llvm: u32| {
        format!(
            "PATH=/usr/lib/llvm-{llvm}/bin:$PATH cargo install bpf-linker --locked --version ^{LINKER_VERSION} \
             --no-default-features --features llvm-{llvm}"
        )
    };
    if let Some(refusal) = packages.refusal {
        bail!("{refusal}: install LLVM {OLDEST_LLVM} with its headers, then `{}`", by_hand(OLDEST_LLVM));
    }
    let mut chosen = None;
    for llvm in LINKER_LLVM.into_iter().filter(|llvm| *llvm >= OLDEST_LLVM) {
        if packages.offers(&format!("llvm-{llvm}-dev"))? {
            chosen = Some(llvm);
            break;
        }
    }
    let Some(llvm) = chosen else {
        bail!(
            "apt has no LLVM that both bpf-linker {LINKER_VERSION} and the kernel programs' compiler support: expected \
             llvm-{OLDEST_LLVM}-dev or newer, up to {}; after installing one from another source, run `{}`",
            LINKER_LLVM.into_iter().max().unwrap_or(OLDEST_LLVM),
            by_hand(OLDEST_LLVM)
        );
    };
    let (llvm_dev, polly_dev) = (format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev"));
    let mut wanted: BTreeSet<&str> = LINKER_LIBRARIES.into();
    wanted.extend([llvm_dev.as_str(), polly_dev.as_str()]);
    packages.install(&wanted)?;
    let mut install = process::with_own_compiler("cargo", workspace.root());
    install.args(["install", "bpf-linker", "--locked", "--force", "--version", &format!("^{LINKER_VERSION}")]);
    install.args(["--no-default-features", "--features", &format!("llvm-{llvm}")]);
    install.env("PATH", path_with(format!("/usr/lib/llvm-{llvm}/bin")));
    process::run(&mut install)
}

/// Whether `bpf-linker --version` prints the required version.
fn is_wanted_linker(version: &str) -> bool {
    version
        .split_whitespace()
        .nth(1)
        .and_then(|number| number.strip_prefix(LINKER_VERSION))
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_required_linker_is_accepted() {
        for (version, good) in [
            ("bpf-linker 0.13.0\n", true),
            ("bpf-linker 0.13\n", true),
            ("bpf-linker 0.130.0\n", false),
            ("bpf-linker 0.12.1\n", false),
            ("", false),
        ] {
            assert_eq!(is_wanted_linker(version), good, "{version:?}");
        }
    }

    #[test]
    fn the_version_of_go_is_parsed_from_go_s_and_debian_s_output() {
        for (text, minor) in [
            ("go version go1.26.8 linux/amd64\n", Some(26)),
            (" 2:1.19~1", Some(19)),
            ("1.24.4-1", Some(24)),
            ("(none)", None),
            ("", None),
        ] {
            assert_eq!(go_minor(text), minor, "{text:?}");
        }
    }

    #[test]
    fn a_machine_without_apt_gets_the_list_of_packages() {
        let mut packages = Packages { refusal: Some("this is not Debian"), lists_are_fresh: false };
        let error = packages.install(&["bpftool", "iproute2"].into()).unwrap_err().to_string();
        assert!(error.contains("not Debian") && error.contains("bpftool iproute2"), "{error}");
    }
}
