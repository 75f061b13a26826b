//! A script that a seed writes: the real agents and operators of a small cluster through random bad days, with the rules
//! of block allocation checked at every write.
//!
//! ```text
//!  seed ─► story ─ commands ─► World ─ changes, pools ─► judge
//! ```
//!
//! First comes the *story*: nodes join, go and come back, operators are killed, paused past their Lease or cut off, the API
//! server fails in every way it knows, forgets its history, goes back to a backup. Then the bad days end, and everything
//! must come to rest. What is judged:
//!
//! * No block is given to a node while another node lists it, uses it or has lost it less than the quarantine ago,
//!   whoever leads, and no pod gets an address that another pod has.
//! * The block of a node never changes while its pods have addresses.
//! * After the bad days every node has a block, or the reason why the pool has none; the objects of nodes that are gone
//!   go; and then nothing is written any more but Leases, events, and once each Node's condition.
//!
//! Equal seeds give equal runs: every choice follows from the seed and the runtime's clock. That holds where the seed may
//! decide about tokio's own draws too ([`REPLAYS`]); elsewhere runs are nearly equal.
//!
//! # What a green run does not prove
//!
//! Machines have no datapath here (masquerading does not look at who gives blocks). A paused process is one whose packets
//! are held ([`crate::apiserver::Link::Held`]): what it sent before its deadline arrives long after it, but its own timers
//! go on, so that it does not miss its deadline by being paused. A dead machine's pods end with it.

mod judge;
mod story;

use std::fmt::Write as _;
use std::time::Duration;

use story::Story;

/// How long the block of a deleted node rests in a simulation.
const QUARANTINE: Duration = Duration::from_secs(40);

/// How many of the last lines of the log, and of the last API calls, a failure shows.
const SHOWN: usize = 150;

/// Whether this build replays a seed exactly.
pub const REPLAYS: bool = cfg!(tokio_unstable);

/// What became of one seed.
#[derive(Debug, PartialEq, Eq)]
pub struct Report {
    /// A number that follows from everything that happened: what befell the cluster, every call, every object that was
    /// written, every address of a pod.
    pub trace: u64,
    /// Everything that happened.
    pub log: Vec<String>,
}

/// Runs the simulation of one seed.
///
/// # Errors
/// The rule that was broken, with what led to it.
pub fn run(seed: u64) -> Result<Report, String> {
    let runtime = super::runtime(seed).map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let mut story = Story::begin(seed)?;
        let outcome = story.tell().await;
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
