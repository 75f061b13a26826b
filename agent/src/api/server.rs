//! Server of the agent API on its unix socket.
//!
//! Try it: `curl --unix-socket /run/cistern/cistern.sock http://localhost/v1/status`.

use super::types::{
    AddRequest, AddResponse, AddressExplanation, ApiError, CheckRequest, CheckResponse, ConfirmRequest, DelRequest,
    DelResponse, EndpointRequest, EndpointResponse, ExplainMasqueradeRequest, ExplainMasqueradeResponse, GcRequest,
    GcResponse, Health, IpReport, IpamResponse, NodeReply, Status,
};
use crate::telemetry::metrics;
use axum::Extension;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{FromRequest, Path as UrlPath, Query, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use cistern_core::cni::refusal::Refusal;
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// An error with its HTTP status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// HTTP status code.
    pub status: u16,
    /// Body.
    pub error: ApiError,
}

impl Failure {
    /// A reset.
    pub fn new(refusal: Refusal, message: impl Into<String>) -> Self {
        let reason = refusal.code().to_owned();
        let error = ApiError { reason, message: message.into(), retryable: refusal.is_retryable() };
        Self { status: refusal.status(), error }
    }

    /// A request that cannot be read.
    fn unreadable(status: StatusCode, message: String) -> Self {
        Self { status: status.as_u16(), ..Self::new(Refusal::BadRequest, message) }
    }
}

/// A refused call, for the log and the metrics.
#[derive(Clone)]
struct Refused(ApiError);

impl Refused {
    /// A runtime repeats a waiting call every few seconds for every pod, so only other errors are logged as warnings.
    fn log(&self, verb: &str) {
        let ApiError { reason, message: error, .. } = &self.0;
        if self.0.refusal().is_some_and(Refusal::is_reported_elsewhere) {
            tracing::debug!(verb, reason, error, "call refused");
        } else {
            tracing::warn!(verb, reason, error, "call refused");
        }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let refused = Extension(Refused(self.error.clone()));
        (status, refused, Json(self.error)).into_response()
    }
}

/// Query of `POST /v1/ipam` and `POST /v1/ipam/{ip}` (`ipam` 5.1).
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct IpamQuery {
    /// `ipv4`, `ipv6`, or empty for all enabled families.
    #[serde(default)]
    pub family: String,
    /// The owner of the address, usually `namespace/pod`.
    #[serde(default)]
    pub owner: String,
    /// Pool; empty for the agent's default, where allowed.
    #[serde(default)]
    pub pool: String,
    /// The address is released on a timer unless an endpoint presents the UUID.
    #[serde(default)]
    pub expiration: bool,
}

/// Implementation of the calls. Answers are sent after their effect is on disk and in the kernel.
pub trait AgentApi: Send + Sync + 'static {
    /// See [`AddRequest`].
    fn add(&self, request: AddRequest) -> impl Future<Output = Result<AddResponse, Failure>> + Send;
    /// See [`ConfirmRequest`].
    fn confirm(&self, request: ConfirmRequest) -> impl Future<Output = Result<(), Failure>> + Send;
    /// See [`DelRequest`].
    fn del(&self, request: DelRequest) -> impl Future<Output = Result<DelResponse, Failure>> + Send;
    /// See [`CheckRequest`].
    fn check(&self, request: CheckRequest) -> impl Future<Output = Result<CheckResponse, Failure>> + Send;
    /// See [`GcRequest`].
    fn gc(&self, request: GcRequest) -> impl Future<Output = Result<GcResponse, Failure>> + Send;
    /// `POST /v1/ipam`
    fn allocate(&self, query: IpamQuery) -> impl Future<Output = Result<IpamResponse, Failure>> + Send;
    /// `POST /v1/ipam/{ip}`
    fn allocate_ip(&self, ip: String, query: IpamQuery) -> impl Future<Output = Result<(), Failure>> + Send;
    /// `DELETE /v1/ipam/{ip}`
    fn release_ip(&self, ip: String, query: IpamQuery) -> impl Future<Output = Result<(), Failure>> + Send;
    /// See [`EndpointRequest`].
    fn create_endpoint(
        &self,
        request: EndpointRequest,
    ) -> impl Future<Output = Result<EndpointResponse, Failure>> + Send;
    /// All addresses that are not free.
    fn addresses(&self) -> impl Future<Output = Result<Vec<IpReport>, Failure>> + Send;
    /// See [`Health`].
    fn health(&self) -> impl Future<Output = Health> + Send;
    /// See [`Status`].
    fn status(&self) -> impl Future<Output = Status> + Send;
    /// Rows of a kernel map for the CLI, by the CLI's name of the map.
    fn map(&self, name: String) -> impl Future<Output = Result<serde_json::Value, Failure>> + Send;
    /// `GET /v1/explain/ip/{ip}`: explanation of an address.
    fn explain_ip(&self, ip: String) -> impl Future<Output = Result<AddressExplanation, Failure>> + Send;
    /// See [`NodeReply`]; without a name, this node.
    fn explain_node(&self, name: Option<String>) -> impl Future<Output = NodeReply> + Send;
    /// See [`ExplainMasqueradeRequest`].
    fn explain_masquerade(
        &self,
        request: ExplainMasqueradeRequest,
    ) -> impl Future<Output = Result<ExplainMasqueradeResponse, Failure>> + Send;
}

/// A JSON body; if it is invalid, the answer is an [`ApiError`].
struct Body<T>(T);

impl<T, S> FromRequest<S> for Body<T>
where
    T: serde::de::DeserializeOwned,
    S: Send + Sync,
{
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        match Json::from_request(request, state).await {
            Ok(Json(body)) => Ok(Self(body)),
            Err(rejection) => {
                let rejection: JsonRejection = rejection;
                Err(Failure::unreadable(rejection.status(), rejection.body_text()))
            }
        }
    }
}

type Answer<T> = Result<Json<T>, Failure>;

fn query(parsed: Result<Query<IpamQuery>, QueryRejection>, headers: &HeaderMap) -> Result<IpamQuery, Failure> {
    let Query(mut query) =
        parsed.map_err(|rejection| Failure::unreadable(rejection.status(), rejection.body_text()))?;
    // Cilium's client sends this as a header; its documentation has a query parameter.
    if headers.get("expiration").is_some_and(|value| value.as_bytes() == b"true") {
        query.expiration = true;
    }
    Ok(query)
}

/// Counts the plugin's calls by verb, result and duration, and logs rejected ones.
async fn observe(request: Request, next: Next) -> Response {
    const PREFIX: &str = "/v1/cni/";
    let verb = request.uri().path().strip_prefix(PREFIX).unwrap_or_default().to_owned();
    let begun = Instant::now();
    let response = next.run(request).await;
    let refused = response.extensions().get::<Refused>();
    refused.into_iter().for_each(|refused| refused.log(&verb));
    let result = refused.map_or("ok", |Refused(error)| error.reason.as_str());
    metrics::cni_request(&verb, result, begun.elapsed());
    response
}

/// The routes of the API.
pub fn router<A: AgentApi>(api: Arc<A>) -> Router {
    Router::new()
        .route(
            "/v1/cni/add",
            post(async |State(api): State<Arc<A>>, Body(body)| -> Answer<AddResponse> {
                api.add(body).await.map(Json)
            }),
        )
        .route(
            "/v1/cni/confirm",
            post(async |State(api): State<Arc<A>>, Body(body)| -> Answer<()> { api.confirm(body).await.map(Json) }),
        )
        .route(
            "/v1/cni/del",
            post(async |State(api): State<Arc<A>>, Body(body)| -> Answer<DelResponse> {
                api.del(body).await.map(Json)
            }),
        )
        .route(
            "/v1/cni/check",
            post(async |State(api): State<Arc<A>>, Body(body)| -> Answer<CheckResponse> {
                api.check(body).await.map(Json)
            }),
        )
        .route(
            "/v1/cni/gc",
            post(async |State(api): State<Arc<A>>, Body(body)| -> Answer<GcResponse> { api.gc(body).await.map(Json) }),
        )
        // For the routes above only.
        .route_layer(from_fn(observe))
        .route(
            "/v1/ipam",
            post(
                async |State(api): State<Arc<A>>,
                       headers: HeaderMap,
                       parsed: Result<Query<IpamQuery>, QueryRejection>| {
                    let answer = match query(parsed, &headers) {
                        Ok(query) => api.allocate(query).await,
                        Err(failure) => Err(failure),
                    };
                    match answer {
                        Ok(body) => (StatusCode::CREATED, Json(body)).into_response(),
                        // Cilium answers allocation failures this way, and its plugin displays the string (`ipam` 5.1).
                        Err(failure) => (StatusCode::BAD_GATEWAY, Json(failure.error.message)).into_response(),
                    }
                },
            ),
        )
        .route(
            "/v1/ipam/{ip}",
            post(
                async |State(api): State<Arc<A>>,
                       UrlPath(ip): UrlPath<String>,
                       headers: HeaderMap,
                       parsed: Result<Query<IpamQuery>, QueryRejection>|
                       -> Answer<()> { api.allocate_ip(ip, query(parsed, &headers)?).await.map(Json) },
            )
            .delete(
                async |State(api): State<Arc<A>>,
                       UrlPath(ip): UrlPath<String>,
                       headers: HeaderMap,
                       parsed: Result<Query<IpamQuery>, QueryRejection>|
                       -> Answer<()> { api.release_ip(ip, query(parsed, &headers)?).await.map(Json) },
            ),
        )
        .route(
            "/v1/endpoint/{id}",
            put(async |State(api): State<Arc<A>>, body: Result<Body<EndpointRequest>, Failure>| {
                let answer = match body {
                    Ok(Body(body)) => api.create_endpoint(body).await,
                    Err(failure) => Err(failure),
                };
                match answer {
                    Ok(body) => (StatusCode::CREATED, Json(body)).into_response(),
                    // A string, too (`ipam` 5.2).
                    Err(Failure { status, error }) => {
                        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                        (status, Json(error.message)).into_response()
                    }
                }
            }),
        )
        .route(
            "/v1/ip",
            get(async |State(api): State<Arc<A>>| -> Answer<Vec<IpReport>> { api.addresses().await.map(Json) }),
        )
        .route(
            "/v1/healthz",
            get(async |State(api): State<Arc<A>>| {
                let health = api.health().await;
                let status = if health.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                (status, Json(health))
            }),
        )
        .route("/v1/status", get(async |State(api): State<Arc<A>>| Json(api.status().await)))
        .route(
            "/v1/bpf/{name}",
            get(async |State(api): State<Arc<A>>, UrlPath(name): UrlPath<String>| -> Answer<serde_json::Value> {
                api.map(name).await.map(Json)
            }),
        )
        .route(
            "/v1/explain/ip/{ip}",
            get(async |State(api): State<Arc<A>>, UrlPath(ip): UrlPath<String>| -> Answer<AddressExplanation> {
                api.explain_ip(ip).await.map(Json)
            }),
        )
        .route("/v1/explain/node", get(async |State(api): State<Arc<A>>| Json(api.explain_node(None).await)))
        .route(
            "/v1/explain/node/{name}",
            get(async |State(api): State<Arc<A>>, UrlPath(name): UrlPath<String>| {
                Json(api.explain_node(Some(name)).await)
            }),
        )
        .route(
            "/v1/explain/masquerade",
            post(async |State(api): State<Arc<A>>, Body(body)| -> Answer<ExplainMasqueradeResponse> {
                api.explain_masquerade(body).await.map(Json)
            }),
        )
        .fallback(async || Failure::new(Refusal::NoSuchPath, "no such path in the agent API"))
        .with_state(api)
}

/// The socket cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}: {source}")]
pub struct SocketError {
    action: &'static str,
    path: PathBuf,
    source: std::io::Error,
}

/// Binds the socket, mode 0600. It is bound under a temporary name and renamed, so that clients always find the old or
/// the new one, and the remains of a killed agent are replaced.
///
/// # Errors
/// The failed operation and path.
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    let fail = |action, path: &Path| {
        let path = path.to_owned();
        move |source| SocketError { action, path, source }
    };
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(fail("create directory", directory))?;
    }
    let temporary = path.with_extension("new");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail("remove", &temporary)(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&temporary).map_err(fail("bind", &temporary))?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600)).map_err(fail("chmod", &temporary))?;
    std::fs::rename(&temporary, path).map_err(fail("rename into place", path))?;
    Ok(listener)
}

/// Serves until cancelled; then accepts no new calls and completes running ones.
///
/// # Errors
/// Accepting fails permanently.
pub async fn serve<A: AgentApi>(listener: UnixListener, api: Arc<A>, cancel: CancellationToken) -> std::io::Result<()> {
    axum::serve(listener, router(api)).with_graceful_shutdown(async move { cancel.cancelled().await }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Write};
    use std::sync::Mutex;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(text)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The level that a refusal is logged at.
    fn level(refusal: Refusal) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .without_time()
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        let Failure { error, .. } = Failure::new(refusal, "no");
        tracing::subscriber::with_default(subscriber, || Refused(error).log("add"));
        let lines = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert_eq!(lines.lines().count(), 1, "{lines}");
        lines.split_whitespace().next().unwrap_or_default().to_owned()
    }

    // case: ipam P4
    #[test]
    fn waiting_calls_are_logged_at_debug_level_and_errors_as_warnings() {
        use Refusal::{HeldBack, NoRouter, RouterNotSet, ShuttingDown, WaitingForPodCidr};
        let waiting = [WaitingForPodCidr, HeldBack, NoRouter, RouterNotSet, ShuttingDown];
        for refusal in Refusal::ALL {
            let expected = if waiting.contains(&refusal) { "DEBUG" } else { "WARN" };
            assert_eq!(level(refusal), expected, "{refusal}");
        }
    }
}
