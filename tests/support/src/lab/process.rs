//! The processes of a lab: holding namespaces, and finding all processes again.

use super::MARK;
use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// More than a killed process needs to terminate on a loaded machine.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Shell: waits for the end of its input without a child process, then kills the machine's other processes, including
/// those in pods, until none is left (or they do not terminate). They are identified by the machine's mount namespace.
const END_WITH_MAKER: &str = r#"
set +e
while read -r _; do :; done
left=50
while [ "$left" -gt 0 ]; do
    left=$((left - 1)) found=
    for process in /proc/[0-9]*; do
        id=${process#/proc/}
        [ "$id" != $$ ] && [ "$process/ns/mnt" -ef /proc/$$/ns/mnt ] && kill -9 "$id" && found=1
    done
    [ -n "$found" ] || left=0
done
"#;

/// Field 22 of `/proc/PID/stat` (`man 5 proc`), counted behind the command name, which may hold anything.
const START_TIME_FIELD: usize = 19;

/// The lab of a process. Process IDs are reused; in combination with the start time they are unique.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) prefix: String,
    maker: u32,
    maker_start: u64,
    /// Distinguishes the labs of one creator.
    number: u32,
}

impl Mark {
    /// A new mark of this process.
    pub(super) fn own(prefix: &str) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let maker = std::process::id();
        let maker_start = start_time(maker).context("this process is not in /proc")?;
        Ok(Self { prefix: prefix.to_owned(), maker, maker_start, number: NEXT.fetch_add(1, Ordering::Relaxed) })
    }

    pub(super) fn maker_lives(&self) -> bool {
        start_time(self.maker) == Some(self.maker_start)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let mark = Self {
            prefix: parts.next()?.to_owned(),
            maker: parts.next()?.parse().ok()?,
            maker_start: parts.next()?.parse().ok()?,
            number: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(mark)
    }
}

impl std::fmt::Display for Mark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}/{}/{}", self.prefix, self.maker, self.maker_start, self.number)
    }
}

fn start_time(id: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    stat.rsplit(") ").next()?.split(' ').nth(START_TIME_FIELD)?.parse().ok()
}

/// The IDs of processes with a matching mark.
fn find(wanted: &impl Fn(&Mark) -> bool) -> Result<Vec<Pid>> {
    let prefix = format!("{MARK}=");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("read /proc")? {
        let Some(id) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A terminated process or a zombie has no environment.
        let Ok(environment) = fs::read(format!("/proc/{id}/environ")) else { continue };
        let marked = environment
            .split(|byte| *byte == 0)
            .filter_map(|variable| std::str::from_utf8(variable).ok()?.strip_prefix(&prefix))
            .filter_map(Mark::parse)
            .any(|mark| wanted(&mark));
        if marked {
            found.push(Pid::from_raw(id));
        }
    }
    Ok(found)
}

/// Kills processes with a matching mark and waits for their termination. Returns their number.
pub(super) fn end(wanted: impl Fn(&Mark) -> bool) -> Result<usize> {
    let deadline = Instant::now() + END_TIMEOUT;
    let mut first = None;
    loop {
        let found = find(&wanted)?;
        let count = *first.get_or_insert(found.len());
        if found.is_empty() {
            return Ok(count);
        }
        for id in &found {
            match kill(*id, Signal::SIGKILL) {
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => bail!("kill process {id}: {errno}"),
            }
        }
        ensure!(Instant::now() < deadline, "processes {found:?} do not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A process that waits in its own namespaces to keep them alive.
#[derive(Debug)]
pub(super) struct Holder {
    name: String,
    mark: Mark,
    child: Child,
    kept: bool,
}

impl Holder {
    /// Creates the namespaces, runs `setup` (shell) inside, and leaves the process waiting there for the end of its
    /// input. That happens when its creator terminates for whatever reason; then it kills all processes in its mount
    /// namespace. A kept one waits forever.
    pub(super) fn start(mark: &Mark, name: &str, setup: &str, kept: bool) -> Result<Self> {
        let wait = if kept { "exec sleep infinity" } else { END_WITH_MAKER };
        let script = format!("set -e\nhostname {name}\n{setup}\necho ready\nexec >/dev/null 2>&1\n{wait}");
        let mut command = Command::new("unshare");
        command
            .args(["--net", "--mount", "--uts", "--propagation", "private", "--", "sh", "-c", &script])
            .env(MARK, mark.to_string())
            .stdin(if kept { Stdio::null() } else { Stdio::piped() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C must not reach the machines before the creator has cleaned up.
            .process_group(0);
        let mut child = command.spawn().context("unshare (package util-linux)")?;
        set_up(&mut child, name)?;
        Ok(Self { name: name.to_owned(), mark: mark.clone(), child, kept })
    }

    /// Process ID.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// A command that runs in the namespaces given as `nsenter` options.
    pub(super) fn command(&self, namespaces: &[String], program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.id().to_string()])
            .args(namespaces)
            .args(["--", program])
            .env(MARK, self.mark.to_string());
        command
    }

    /// A command that runs in all namespaces of the holder.
    pub(super) fn command_inside(&self, program: &str) -> Command {
        self.command(&["--net".into(), "--mount".into(), "--uts".into()], program)
    }

    /// Runs a shell script inside; stops at the first command that fails.
    pub(super) fn run(&self, script: &str) -> Result<String> {
        output(self.command_inside("sh").args(["-e", "-c", script]), &format!("{}: {script}", self.name))
    }
}

/// Waits until a machine's first process prints `ready`; otherwise returns its output as an error.
pub(crate) fn set_up(child: &mut Child, name: &str) -> Result<()> {
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut line)?;
    }
    if line != "ready\n" {
        let mut reason = String::new();
        if let Some(mut errors) = child.stderr.take() {
            errors.read_to_string(&mut reason)?;
        }
        bail!("{name} ended with {} while it was set up: {}", child.wait()?, reason.trim());
    }
    Ok(())
}

impl Drop for Holder {
    fn drop(&mut self) {
        if !self.kept {
            // An error means that it has terminated already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Standard output of a command that must succeed.
pub(crate) fn output(command: &mut Command, what: &str) -> Result<String> {
    let Output { status, stdout, stderr } =
        command.stdin(Stdio::null()).output().with_context(|| format!("start {what}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    ensure!(status.success(), "{what}: {status}: {}{}", text(&stderr), text(&stdout));
    Ok(text(&stdout))
}
