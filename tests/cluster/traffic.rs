//! Streams that must not lose anything.

use crate::rig::{PROBE, Pod, Rig};
use anyhow::{Context, Result, ensure};
use cistern_tests::cluster::OUTSIDE;
use cistern_tests::probe::StreamReport;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Port of [`serve`].
pub(crate) const PORT: u16 = 9000;

/// Minimum duration of streams, so that all of them have started.
const LEAST: Duration = Duration::from_secs(5);

/// A process that is killed when dropped.
#[derive(Debug)]
pub(crate) struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        // An error means that it has terminated already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves echo in the network of `probe`, a command of [`PROBE`].
pub(crate) fn serve(mut probe: Command) -> Result<Ending> {
    probe.args(["serve", &format!("0.0.0.0:{PORT}")]);
    let mut child = Ending(probe.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?);
    let mut line = String::new();
    BufReader::new(child.0.stdout.as_mut().context("no output")?).read_line(&mut line)?;
    ensure!(line.starts_with("ready"), "an echo server printed {line:?}");
    Ok(child)
}

/// TCP and UDP between pods of two nodes, and from both to the external host.
pub(crate) struct Traffic {
    start: Instant,
    streams: Vec<(String, Ending)>,
    _servers: Vec<Ending>,
}

impl Traffic {
    /// Starts between the first pod of the first node and that of the second.
    pub(crate) fn start(rig: &Rig, pods: &[Pod]) -> Result<Self> {
        let [one, _, other, _] = pods else { anyhow::bail!("expected two pods on each of two nodes: {pods:?}") };
        let outside = rig.cluster.machine("outside")?.command_in_network(PROBE)?;
        let servers = vec![serve(outside)?, serve(other.command(PROBE)?)?];
        let mut streams = Vec::new();
        for (from, to) in [(one, other.address), (one, OUTSIDE), (other, OUTSIDE)] {
            for kind in ["stream-tcp", "stream-udp"] {
                let mut probe = from.command(PROBE)?;
                probe.args([kind, &format!("{to}:{PORT}"), "--per-second", "100"]);
                let child = probe.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
                streams.push((format!("{kind} from {} to {to}", from.node.name()), Ending(child)));
            }
        }
        Ok(Self { start: Instant::now(), streams, _servers: servers })
    }

    /// Stops the streams; fails if anything was lost.
    pub(crate) fn finish(mut self) -> Result<()> {
        std::thread::sleep(LEAST.saturating_sub(self.start.elapsed()));
        for (_, stream) in &mut self.streams {
            drop(stream.0.stdin.take());
        }
        let mut wrong = Vec::new();
        for (name, stream) in &mut self.streams {
            let output = std::io::read_to_string(stream.0.stdout.as_mut().context("no output")?)?;
            let report: StreamReport =
                serde_json::from_str(&output).with_context(|| format!("{name} printed {output:?}"))?;
            if report.sent == 0 || report.received != report.sent || report.error.is_some() {
                wrong.push(format!("{name}: {report:?}"));
            }
        }
        ensure!(wrong.is_empty(), "lost: {}", wrong.join("\n"));
        Ok(())
    }
}
