//! Prints the table of metrics: `cargo xtask gen` writes it to `agent/metrics.md`.

fn main() {
    print!("{}", cistern::telemetry::metrics::markdown());
}
