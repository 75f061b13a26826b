//! Starting other programs. Commands are printed; errors name the command.

use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

/// Whether `cargo run` or rustup's proxies set the variable for *this* build. Inherited, it would make the inner Cargo
/// use the wrong compiler, or rebuild everything because a build script tracks it.
fn describes_this_build(variable: &str) -> bool {
    const OF_THE_USER: [&str; 6] =
        ["CARGO_HOME", "CARGO_TARGET_DIR", "CARGO_BUILD_JOBS", "CARGO_INCREMENTAL", "CARGO_TERM_", "CARGO_NET_"];
    const OF_REGISTRIES: [&str; 3] = ["CARGO_HTTP_", "CARGO_REGISTR", "CARGO_SOURCE_"];
    if variable == "CARGO" || variable == "LD_LIBRARY_PATH" {
        return true;
    }
    variable.starts_with("CARGO_") && !OF_THE_USER.iter().chain(&OF_REGISTRIES).any(|kept| variable.starts_with(kept))
}

/// Variables that choose compilers and flags. The kernel programs are built with our flags only.
const COMPILER_CHOICES: [&str; 8] = [
    "RUSTC",
    "RUSTC_WRAPPER",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_BOOTSTRAP",
    "RUSTDOC",
    "RUSTFLAGS",
    "RUSTDOCFLAGS",
    "RUSTUP_TOOLCHAIN",
];

/// The Cargo that runs this program, in a clean environment.
pub(crate) fn cargo(directory: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(directory);
    forget_this_build(&mut command);
    command
}

/// Removes from `command` the variables that describe the build of this program.
fn forget_this_build(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(describes_this_build) {
            command.env_remove(name);
        }
    }
}

/// A program that chooses its compiler itself: without the variables of this build or of the caller.
pub(crate) fn with_own_compiler(program: &str, directory: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory);
    forget_this_build(&mut command);
    for name in COMPILER_CHOICES {
        command.env_remove(name);
    }
    command
}

/// The command as typed in a shell.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut words = vec![program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|argument| {
        let text = argument.to_string_lossy();
        if text.is_empty() || text.contains([' ', '"', '$', '*']) { format!("'{text}'") } else { text.into_owned() }
    }));
    words.join(" ")
}

/// Prints and runs `command`; an exit code other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` ended with {status}", shown(command));
    }
    Ok(())
}

/// Prints and runs `command`.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", shown(command));
    command.status().with_context(|| format!("cannot start `{}`", shown(command)))
}

/// Prints and runs `command`; `on_line` sees each line of its standard output, which is also printed.
pub(crate) fn stream(command: &mut Command, mut on_line: impl FnMut(&str)) -> Result<ExitStatus> {
    eprintln!("$ {}", shown(command));
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        // Bytes, not `lines()`, because the output of tests need not be UTF-8.
        while reader.read_until(b'\n', &mut line).with_context(|| format!("reading from `{}`", shown(command)))? > 0 {
            let text = String::from_utf8_lossy(&line);
            print!("{text}");
            on_line(text.trim_end());
            line.clear();
        }
    }
    child.wait().with_context(|| format!("waiting for `{}`", shown(command)))
}

/// The standard output of `command`, which must succeed. Nothing is printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start `{}`", shown(command)))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` ended with {}: {}", shown(command), output.status, said.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` printed output that is not UTF-8", shown(command)))
}

/// The path of `program`: on `PATH`, or in Debian's directories for the administrator.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|directory| directory.join(program))
        .find(|candidate| candidate.is_file())
}

/// `PATH` with `directory` in front.
pub(crate) fn path_with(directory: impl AsRef<OsStr>) -> std::ffi::OsString {
    let mut path = directory.as_ref().to_owned();
    if let Some(rest) = std::env::var_os("PATH") {
        path.push(":");
        path.push(rest);
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_this_build_are_distinguished_from_the_user_s() {
        for ours in ["CARGO", "CARGO_MANIFEST_DIR", "CARGO_PKG_NAME", "CARGO_ENCODED_RUSTFLAGS", "LD_LIBRARY_PATH"] {
            assert!(describes_this_build(ours), "{ours}");
        }
        for theirs in ["CARGO_HOME", "CARGO_TARGET_DIR", "CARGO_TERM_COLOR", "CARGO_REGISTRIES_X_INDEX", "PATH"] {
            assert!(!describes_this_build(theirs), "{theirs}");
        }
    }

    #[test]
    fn a_command_is_shown_as_typed_in_a_shell() {
        let mut command = Command::new("/usr/bin/cargo");
        command.args(["test", "--test", "*", ""]);
        assert_eq!(shown(&command), "cargo test --test '*' ''");
    }

    #[test]
    fn streamed_lines_need_not_be_utf8() {
        let mut lines = Vec::new();
        let status = stream(Command::new("sh").args(["-c", r"printf 'a\n\377b\nc'; exit 3"]), |line| {
            lines.push(line.to_owned());
        })
        .unwrap();
        assert_eq!(status.code(), Some(3));
        assert_eq!(lines, ["a", "\u{fffd}b", "c"]);
    }
}
