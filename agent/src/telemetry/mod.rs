//! Logs and metrics.

pub mod metrics;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// One line of text.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging to standard error, once per process; later calls change nothing. `RUST_LOG` wins over `level`, which is
/// that of Cistern's own lines; libraries speak from `info` on.
pub fn init(format: Format, level: &str) {
    let default = if level == "debug" { "info,cistern=debug" } else { level };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_span_events(FmtSpan::NONE);
    // A second role in the same process finds the first one's subscriber.
    let _ = match format {
        Format::Text => builder.try_init(),
        Format::Json => builder.json().try_init(),
    };
}
