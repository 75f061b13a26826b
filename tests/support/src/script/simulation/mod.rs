//! Simulation: random faults for the real agents and operators of a small cluster, generated from a seed, with the
//! invariants of pod CIDR allocation checked at every write.
//!
//! ```text
//!  seed ─► story ─ commands ─► World ─ changes, pools ─► judge
//! ```
//!
//! First the *story*: nodes are added, removed and re-added, operators are killed, paused past their Lease or
//! disconnected, the API server fails in every way it can, compacts its history, is restored from a backup. Then faults
//! end, and the cluster must become stable. The invariants:
//!
//! * No pod CIDR is assigned to a node while another node lists it, uses it or lost it less than the quarantine ago,
//!   under any leader, and no pod gets an address that another pod has.
//! * The pod CIDR of a node never changes while its pods have addresses.
//! * After the faults every node has a pod CIDR, or the reason why the pool has none; objects of deleted nodes are
//!   deleted; then nothing is written any more except Leases, events, and once each Node's condition.
//!
//! Equal seeds give equal runs: every choice is derived from the seed and the runtime's clock. This requires that
//! tokio's own random choices are derived from the seed, too ([`REPLAYS`]); otherwise runs are nearly equal.
//!
//! # Limits
//!
//! Machines have no datapath here (masquerading is independent of pod CIDR allocation). A paused process is one whose
//! packets are held ([`crate::apiserver::Link::Held`]): what it sent before its deadline arrives long after it, but its
//! own timers continue, so that it does not miss its deadline because of the pause. A lost machine's pods end with it.

mod judge;
mod story;

use std::fmt::Write as _;
use std::time::Duration;

use story::Story;

/// Quarantine of a deleted node's pod CIDR in a simulation.
const QUARANTINE: Duration = Duration::from_secs(40);

/// Number of the last lines of the log, and of the last API calls, shown for a failure.
const SHOWN: usize = 150;

/// Whether this build replays a seed exactly.
pub const REPLAYS: bool = cfg!(tokio_unstable);

/// Result of a seed.
#[derive(Debug, PartialEq, Eq)]
pub struct Report {
    /// A hash of everything that happened: faults, all calls, all written objects, all addresses of pods.
    pub trace: u64,
    /// Log of everything that happened.
    pub log: Vec<String>,
}

/// Runs the simulation of a seed.
///
/// # Errors
/// The violated invariant, with the preceding log.
pub fn run(seed: u64) -> Result<Report, String> {
    let runtime = super::runtime(seed).map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let mut story = Story::begin(seed)?;
        let outcome = story.run_story().await;
        let calls = story.take_calls();
        let (log, trace) = story.into_log();
        match outcome {
            Ok(()) => Ok(Report { trace, log }),
            Err(broken) => {
                let mut text = format!("seed {seed}, trace {trace:016x}: {broken}\nwhat happened last:\n");
                for lines in [&log, &calls] {
                    for line in lines.iter().skip(lines.len().saturating_sub(SHOWN)) {
                        // Writing to a String cannot fail.
                        let _ = writeln!(text, "    {line}");
                    }
                    text.push('\n');
                }
                Err(text)
            }
        }
    })
}
