//! Events of the programs, such as a flow without a free port.

use super::error::DatapathError;
use aya::Ebpf;
use aya_log::EbpfLogger;
use std::io;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Tracing target of the events.
const TARGET: &str = "cistern::datapath::kernel";

/// Reader of the programs' ring buffer.
pub struct Events {
    logger: EbpfLogger<Forward>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// Takes the ring buffer from the loaded object.
    pub(super) fn take(ebpf: &mut Ebpf) -> Result<Self, DatapathError> {
        let logger =
            EbpfLogger::init_with_logger(ebpf, Forward).map_err(|error| DatapathError::Events(Box::new(error)))?;
        Ok(Self { logger })
    }

    /// Forwards events to `tracing` until cancelled.
    ///
    /// # Errors
    /// The ring buffer cannot be polled.
    pub async fn forward(self) -> Result<(), DatapathError> {
        // SAFETY: the logger owns the ring buffer, hence the descriptor it names is open as long as the logger lives.
        #[expect(unsafe_code, reason = "tokio's registration is unsafe for types that are not I/O safe by their type")]
        let registered = unsafe { AsyncFd::register_with_interest(self.logger, Interest::READABLE) };
        let failed =
            |source: io::Error| DatapathError::Io { action: "wait for events of the programs".to_owned(), source };
        let mut logger = registered.map_err(|error| failed(error.into()))?;
        loop {
            let mut ready = logger.readable_mut().await.map_err(failed)?;
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    }
}

/// Forwards records of the `log` crate, which aya uses for events, to `tracing`.
struct Forward;

impl log::Log for Forward {
    fn enabled(&self, _metadata: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let message = record.args();
        match record.level() {
            log::Level::Error => tracing::error!(target: TARGET, "{message}"),
            log::Level::Warn => tracing::warn!(target: TARGET, "{message}"),
            log::Level::Info => tracing::info!(target: TARGET, "{message}"),
            log::Level::Debug => tracing::debug!(target: TARGET, "{message}"),
            log::Level::Trace => tracing::trace!(target: TARGET, "{message}"),
        }
    }

    fn flush(&self) {}
}
