//! Runs seeds of the simulation on all processors; prints failed seeds and counts as `cargo test` does.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cistern_tests::script::simulation;
use clap::Parser;

#[derive(Parser)]
#[command(about = "Runs seeds of the simulation of operators and agents")]
struct Arguments {
    /// Number of seeds
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Print all events
    #[arg(long)]
    log: bool,
    /// Stop after this many failures
    #[arg(long, default_value_t = 5)]
    failures: u64,
}

/// One of this many seeds is run twice, to check that runs are reproducible.
const REPLAYED: u64 = 50;

fn main() -> ExitCode {
    let Arguments { seeds, from, log, failures } = Arguments::parse();
    let begun = Instant::now();
    let next = AtomicU64::new(0);
    let failed = AtomicU64::new(0);
    let work = || {
        while failed.load(Ordering::Relaxed) < failures {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= seeds {
                break;
            }
            let seed = from.wrapping_add(index);
            let outcome = simulation::run(seed);
            let again = simulation::REPLAYS && (outcome.is_err() || index.is_multiple_of(REPLAYED));
            let replayed = !again || simulation::run(seed) == outcome;
            match &outcome {
                Ok(report) if log => {
                    println!("seed {seed}, trace {:016x}\n{}", report.trace, report.log.join("\n"));
                }
                Ok(_) => {}
                Err(failure) => println!("{failure}\n`cargo xtask simulate --from {seed} --seeds 1` repeats it"),
            }
            if !replayed {
                println!("seed {seed}: a second run differs from the first");
            }
            if outcome.is_err() || !replayed {
                failed.fetch_add(1, Ordering::Relaxed);
                println!("test seed {seed} ... FAILED");
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let (failed, run) = (failed.into_inner(), next.into_inner().min(seeds));
    let (outcome, passed) = (if failed == 0 { "ok" } else { "FAILED" }, run.saturating_sub(failed));
    let time = begun.elapsed().as_secs_f64();
    println!("test result: {outcome}. {passed} passed; {failed} failed; seeds from {from}; finished in {time:.1}s");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
