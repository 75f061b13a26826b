//! HTTP over TCP: probes for kubelet, metrics for Prometheus.
//!
//! Try it: `curl http://127.0.0.1:9879/readyz`.

use super::types::Health;
use crate::tables::Waits;
use crate::telemetry::metrics;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use futures::future::BoxFuture;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Answers to kubelet's probes.
pub trait Probe: Send + Sync + 'static {
    /// Whether the process's tasks respond, so that a restart would not help. Missing external inputs do not matter.
    fn live(&self) -> impl Future<Output = Health> + Send;
    /// Whether the process is ready, and why not.
    fn ready(&self) -> impl Future<Output = Health> + Send;
}

/// `GET /healthz` and `GET /readyz`: 200, or 503 with the reasons.
pub fn probes<P: Probe>(probe: Arc<P>) -> Router {
    let answer = |health: Health| {
        let status = if health.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (status, Json(health)).into_response()
    };
    Router::new()
        .route("/healthz", get(async move |State(probe): State<Arc<P>>| answer(probe.live().await)))
        .route("/readyz", get(async move |State(probe): State<Arc<P>>| answer(probe.ready().await)))
        .with_state(probe)
}

/// Returns all metrics as text.
pub type Metrics = Arc<dyn Fn() -> BoxFuture<'static, String> + Send + Sync>;

/// `GET /metrics`
pub fn metrics(gather: Metrics) -> Router {
    let answer = async |State(gather): State<Metrics>| ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], gather().await);
    Router::new().route("/metrics", get(answer)).with_state(gather)
}

/// Another program may have the port, such as a predecessor that is shutting down.
const BIND_RETRY: Duration = Duration::from_secs(5);

/// Serves on a TCP address until cancelled. While the address is in use, `wait` is a wait with the reason; pods are
/// served nevertheless.
///
/// # Errors
/// Accepting fails permanently.
pub async fn serve(
    address: SocketAddr,
    router: Router,
    wait: &'static str,
    waits: Waits,
    cancel: CancellationToken,
) -> std::io::Result<()> {
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => waits.begin(wait, format!("cannot listen on {address}: {error}"), Some(BIND_RETRY)),
        }
        tokio::select! {
            () = cancel.cancelled() => return Ok(()),
            () = tokio::time::sleep(BIND_RETRY) => {}
        }
    };
    waits.end(wait);
    // Clients keep connections open, which must not delay the shutdown.
    tokio::select! {
        () = cancel.cancelled() => Ok(()),
        served = async { axum::serve(listener, router).await } => served,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    /// Runs, and waits for an external input.
    struct Waiting;

    impl Probe for Waiting {
        async fn live(&self) -> Health {
            Health::new(Vec::new())
        }

        async fn ready(&self) -> Health {
            Health::new(vec!["no pod CIDR yet".to_owned()])
        }
    }

    #[tokio::test]
    async fn a_process_that_waits_is_alive_and_not_ready() {
        for (path, status) in [("/healthz", 200), ("/readyz", 503), ("/metrics", 404)] {
            let request = Request::get(path).body(Body::empty()).unwrap();
            let response = probes(Arc::new(Waiting)).oneshot(request).await.unwrap();
            assert_eq!(response.status(), status, "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_taken_port_is_a_wait_until_it_is_free() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let waits = Waits::new(crate::clock::Clock::system());
        let mut seen = waits.reader();
        let cancel = CancellationToken::new();
        let server = tokio::spawn(serve(address, probes(Arc::new(Waiting)), "probes", waits.clone(), cancel.clone()));
        while seen.snapshot().rows.is_empty() {
            seen.changed().await;
        }
        let reason = seen.peek().rows["probes"].reason.clone();
        assert!(reason.contains(&address.to_string()), "{reason}");
        drop(taken);
        while !seen.snapshot().rows.is_empty() {
            seen.changed().await;
        }
        tokio::net::TcpStream::connect(address).await.unwrap();
        cancel.cancel();
        server.await.unwrap().unwrap();
    }
}
