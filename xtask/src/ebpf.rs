//! The kernel programs: selects a compiler, and builds them.
//!
//! There are two kinds of toolchain. A nightly one with `rust-src` builds `core` for the BPF target; a rustc with a
//! precompiled `core` for that target (Debian's `rustc-web` with `libstd-rust-web-dev-bpf`) needs no nightly, only
//! unstable features enabled. Both link with `bpf-linker`, whose LLVM must not be older than the compiler's.

use crate::process::{self, path_with};
use crate::workspace::{EBPF_PACKAGE, EBPF_TARGET, Workspace};
use anyhow::{Context, Result, bail};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A compiler that can build the kernel programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Toolchain {
    /// A toolchain of rustup with the sources of `core`.
    Nightly {
        /// Its name in rustup.
        name: String,
        /// Output of `rustc --version`.
        version: String,
    },
    /// A rustc with a precompiled `core` for the target.
    Compiled {
        /// Its path.
        rustc: PathBuf,
        /// Output of `rustc --version`.
        version: String,
    },
}

impl fmt::Display for Toolchain {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nightly { name, version } => write!(out, "rustup toolchain {name} with rust-src ({version})"),
            Self::Compiled { rustc, version } => {
                write!(out, "{} with a compiled core for {EBPF_TARGET} ({version})", rustc.display())
            }
        }
    }
}

impl Toolchain {
    /// A Cargo that builds for the eBPF target. `subcommand` is `build` or `clippy`.
    fn cargo(&self, workspace: &Workspace, subcommand: &str) -> Command {
        let mut command = match self {
            Self::Nightly { name, .. } => {
                let mut command = process::with_own_compiler("rustup", workspace.root());
                command.args(["run", name, "cargo", subcommand, "-Z", "build-std=core"]);
                command
            }
            Self::Compiled { rustc, .. } => {
                let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
                let mut command = process::with_own_compiler(&cargo, workspace.root());
                command.arg(subcommand).env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1");
                command
            }
        };
        command
            .args(["--locked", "--package", EBPF_PACKAGE, "--release", "--target", EBPF_TARGET])
            .arg("--target-dir")
            .arg(directory(workspace))
            .env("CARGO_ENCODED_RUSTFLAGS", compiler_flags())
            .env("PATH", path_with(cargo_bin()));
        command
    }

    /// Clippy for the kernel programs, if this toolchain has it.
    pub(crate) fn clippy(&self, workspace: &Workspace) -> Option<Command> {
        let Self::Nightly { name, .. } = self else { return None };
        let mut probe = process::with_own_compiler("rustup", workspace.root());
        process::output(probe.args(["run", name, "cargo", "clippy", "--version"])).ok()?;
        let mut command = self.cargo(workspace, "clippy");
        command.args(["--", "-D", "warnings", "-D", "clippy::undocumented_unsafe_blocks"]);
        Some(command)
    }
}

/// Flags of the compiler, in Cargo's own separated form. The debug information becomes the BTF by which the kernel
/// and `bpftool` know the names of fields.
fn compiler_flags() -> String {
    let architecture = format!("--cfg=bpf_target_arch=\"{}\"", std::env::consts::ARCH);
    ["-Clinker=bpf-linker", "-Clink-arg=--btf", "-Cdebuginfo=2", architecture.as_str()].join("\u{1f}")
}

/// The build directory of the kernel programs, separate so that the two compilers do not evict each other's artifacts.
fn directory(workspace: &Workspace) -> PathBuf {
    workspace.root().join("target/ebpf")
}

/// Directory of programs installed by `cargo install`.
pub(crate) fn cargo_bin() -> PathBuf {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(|| {
        let home = std::env::var_os("HOME")?;
        Some(Path::new(&home).join(".cargo"))
    });
    home.unwrap_or_default().join("bin")
}

/// The toolchain that [`build`] uses, or all that were tried and the reasons for rejecting them.
pub(crate) fn toolchain() -> Result<Toolchain, Vec<String>> {
    let mut refused = Vec::new();
    let linker = linker_llvm();
    let mut candidates = nightlies(&mut refused);
    candidates.extend(compiled(&mut refused));
    for (toolchain, llvm) in candidates {
        match (llvm, linker) {
            (Some(llvm), Some(linker)) if llvm > linker => {
                refused.push(format!("{toolchain} writes LLVM {llvm} bitcode, bpf-linker is built on LLVM {linker}"));
            }
            _ => return Ok(toolchain),
        }
    }
    Err(refused)
}

/// The toolchains of rustup with the sources of `core`, plain `nightly` before dated ones.
fn nightlies(refused: &mut Vec<String>) -> Vec<(Toolchain, Option<u32>)> {
    let Ok(listed) = process::output(Command::new("rustup").args(["toolchain", "list", "--quiet"])) else {
        refused.push("rustup is not on PATH".to_owned());
        return Vec::new();
    };
    let mut names: Vec<&str> = listed.lines().map(str::trim).filter(|name| name.starts_with("nightly")).collect();
    names.sort_by_key(|name| name.len());
    if names.is_empty() {
        refused.push("rustup has no nightly toolchain".to_owned());
    }
    let mut found = Vec::new();
    for name in names {
        let rustc = |arguments: &[&str]| {
            let mut command = process::with_own_compiler("rustup", Path::new("/"));
            process::output(command.args(["run", name, "rustc"]).args(arguments))
        };
        let (Ok(sysroot), Ok(verbose)) = (rustc(&["--print", "sysroot"]), rustc(&["-vV"])) else {
            refused.push(format!("the toolchain {name} does not run"));
            continue;
        };
        if !Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core").is_dir() {
            refused.push(format!("the toolchain {name} lacks rust-src"));
            continue;
        }
        let (version, llvm) = versions(&verbose);
        found.push((Toolchain::Nightly { name: name.to_owned(), version }, llvm));
    }
    found
}

/// The rustc programs outside rustup with a precompiled `core` for the target.
fn compiled(refused: &mut Vec<String>) -> Vec<(Toolchain, Option<u32>)> {
    let mut candidates = vec![PathBuf::from("/usr/bin/rustc")];
    candidates.extend(process::find("rustc"));
    candidates.dedup();
    let mut found = Vec::new();
    for rustc in candidates {
        let ask = |arguments: &[&str]| {
            let mut command = process::with_own_compiler(&rustc.to_string_lossy(), Path::new("/"));
            process::output(command.args(arguments))
        };
        let (Ok(libraries), Ok(verbose)) = (ask(&["--print", "target-libdir", "--target", EBPF_TARGET]), ask(&["-vV"]))
        else {
            continue;
        };
        if has_core(Path::new(libraries.trim())) {
            let (version, llvm) = versions(&verbose);
            found.push((Toolchain::Compiled { rustc, version }, llvm));
        } else {
            refused.push(format!("{} carries no compiled core for {EBPF_TARGET}", rustc.display()));
        }
    }
    found
}

/// Whether `libraries` has a precompiled `core`.
fn has_core(libraries: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(libraries) else { return false };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libcore-") && name.ends_with(".rlib")
    })
}

/// The first line of `rustc -vV`, and the major version of its LLVM.
fn versions(verbose: &str) -> (String, Option<u32>) {
    let llvm = verbose
        .lines()
        .find_map(|line| line.strip_prefix("LLVM version: "))
        .and_then(|version| version.split('.').next()?.parse().ok());
    (verbose.lines().next().unwrap_or_default().to_owned(), llvm)
}

/// The major version of the LLVM that bpf-linker loads. `None` if it is unknown: LLVM may be linked statically.
pub(crate) fn linker_llvm() -> Option<u32> {
    let linker = std::env::split_paths(&path_with(cargo_bin()))
        .map(|directory| directory.join("bpf-linker"))
        .find(|candidate| candidate.is_file())?;
    llvm_of_libraries(&process::output(Command::new("ldd").arg(linker)).ok()?)
}

fn llvm_of_libraries(listed: &str) -> Option<u32> {
    let after = listed.split("libLLVM").nth(1)?.trim_start_matches([':', '-']).trim_start_matches(".so.");
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Builds the kernel programs and their variant for tests, reports the toolchain, and returns the path of the object.
pub(crate) fn build(workspace: &Workspace) -> Result<PathBuf> {
    let toolchain = toolchain().map_err(|refused| {
        let reasons = refused.join("\n  - ");
        anyhow::anyhow!(
            "no toolchain here can build the kernel programs:\n  - {reasons}\n`cargo xtask setup` installs one; \
             `cargo build` alone builds an agent without them, which refuses what needs the datapath"
        )
    })?;
    eprintln!("kernel programs: {toolchain}");
    object(workspace, &toolchain, VARIANT)?;
    object(workspace, &toolchain, "")
}

/// The feature of the programs' variant, for upgrade tests.
const VARIANT: &str = "test-variant";

/// Builds one object, with this feature of the programs.
///
/// The object is only written if its content changed: the agent's build script watches it, and an unchanged object must
/// not rebuild the agent.
fn object(workspace: &Workspace, toolchain: &Toolchain, feature: &str) -> Result<PathBuf> {
    process::run(toolchain.cargo(workspace, "build").args(["--features", feature]))?;
    let built = directory(workspace).join(EBPF_TARGET).join("release").join(EBPF_PACKAGE);
    let name = if feature.is_empty() { "cistern.o".to_owned() } else { format!("cistern-{feature}.o") };
    let object = directory(workspace).join(name);
    let content = std::fs::read(&built).with_context(|| format!("reading {}", built.display()))?;
    if !content.starts_with(b"\x7fELF") {
        bail!("{} is no ELF object: was it linked by bpf-linker?", built.display());
    }
    let changed = std::fs::read(&object).ok().as_deref() != Some(content.as_slice());
    if changed {
        let fresh = object.with_extension("o.new");
        std::fs::write(&fresh, &content).with_context(|| format!("writing {}", fresh.display()))?;
        std::fs::rename(&fresh, &object).with_context(|| format!("replacing {}", object.display()))?;
    }
    let state = if changed { "new" } else { "unchanged" };
    eprintln!("kernel programs: {} ({} bytes, {state})", object.display(), content.len());
    Ok(object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_rustc() {
        let verbose = "rustc 1.96.0 (abc 2026-05-01)\nbinary: rustc\nrelease: 1.96.0\nLLVM version: 22.1.2\n";
        assert_eq!(versions(verbose), ("rustc 1.96.0 (abc 2026-05-01)".to_owned(), Some(22)));
        assert_eq!(versions("rustc 1.96.0\n"), ("rustc 1.96.0".to_owned(), None));
    }

    #[test]
    fn the_linkers_llvm_is_read_from_its_libraries() {
        let new = "\tlibLLVM.so.22.1 => /usr/lib/llvm-22/lib/libLLVM.so.22.1 (0x00007f10)\n";
        let old = "\tlibz.so.1 => /lib/libz.so.1\n\tlibLLVM-17.so.1 => /usr/lib/libLLVM-17.so.1 (0x0)\n";
        assert_eq!(llvm_of_libraries(new), Some(22));
        assert_eq!(llvm_of_libraries(old), Some(17));
        assert_eq!(llvm_of_libraries("\tlibc.so.6 => /lib/libc.so.6\n"), None);
    }

    #[test]
    fn a_compiled_core_is_recognised() {
        let directory = std::env::temp_dir().join(format!("xtask-core-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        assert!(!has_core(&directory));
        std::fs::write(directory.join("libcore-0123456789abcdef.rlib"), b"").unwrap();
        assert!(has_core(&directory));
        std::fs::remove_dir_all(&directory).unwrap();
        assert!(!has_core(&directory));
    }
}
