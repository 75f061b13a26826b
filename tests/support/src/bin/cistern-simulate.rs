//! Runs seeds of the simulation, on all processors, and prints those that fail.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use cistern_tests::script::simulation;
use clap::Parser;

#[derive(Parser)]
#[command(about = "Runs seeds of the simulation of operators and agents")]
struct Arguments {
    /// How many seeds to run
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Print everything that happened
    #[arg(long)]
    log: bool,
    /// Stop after this many failures
    #[arg(long, default_value_t = 5)]
    failures: u64,
}

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
            match simulation::run(seed) {
                Ok(report) if log => {
                    println!("seed {seed}, trace {:016x}\n{}", report.trace, report.log.join("\n"));
                }
                Ok(_) => {}
                Err(failure) => {
                    failed.fetch_add(1, Ordering::Relaxed);
                    println!("{failure}\n`cargo xtask simulate --from {seed} --seeds 1` repeats it");
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let (failed, run) = (failed.into_inner(), next.into_inner().min(seeds));
    println!("{run} seeds from {from}: {failed} failed, {:.1} s", begun.elapsed().as_secs_f64());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
