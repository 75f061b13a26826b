//! Termination by signals.

use std::future::Future;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Runs `work` with a token that SIGTERM and SIGINT cancel.
///
/// # Errors
/// The handlers cannot be installed, or an error of `work`.
pub(super) async fn until_signal<W>(work: impl FnOnce(CancellationToken) -> W) -> anyhow::Result<()>
where
    W: Future<Output = anyhow::Result<()>>,
{
    let cancel = CancellationToken::new();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut work = Box::pin(work(cancel.clone()));
    tokio::select! {
        outcome = &mut work => return outcome,
        _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
        _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
    }
    cancel.cancel();
    work.await
}
