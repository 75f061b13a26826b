//! The Kubernetes API: connecting, watching, writing, electing a leader.
//!
//! API structs do not leave this module: [`views`] turns them into the rows of [`crate::tables::rows`].

pub mod cilium_node;
pub mod client;
pub mod crd;
pub mod election;
pub mod events;
pub mod node;
pub mod node_condition;
pub mod orphans;
pub mod pod_cidrs;
pub mod records;
pub mod uninstall;
pub mod views;
pub mod watch;
mod written;

use crate::telemetry::metrics;
use cistern_core::reconcile::{Classify, ErrorClass};
use std::future::Future;
use std::time::Duration;
use tokio::sync::watch as channel;
use tokio::time::Instant;

/// Timeout of a write. Shorter than what is left of a leader's Lease when it is renewed, so that no write of a former
/// leader arrives after a new one has started (`ipam` decision 14).
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(4);

/// Field manager of the agent's writes, recorded in `metadata.managedFields`.
pub const AGENT: &str = "cistern-agent";
/// See [`AGENT`].
pub const OPERATOR: &str = "cistern-operator";

/// A failed call to the API server.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesError {
    /// There is no usable configuration for the API server.
    #[error("kubeconfig {path}: {reason}; expected a kubeconfig file, or a service account inside a pod")]
    Config {
        /// The file, or `in-cluster`.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The API server rejected the call, or could not be reached.
    #[error("{verb} {kind} {name}: {}", reason(source))]
    Call {
        /// `create`, `patch`, `list` …
        verb: &'static str,
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object; empty for lists.
        name: String,
        /// The client's error.
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time; the write may have arrived.
    #[error("{verb} {kind} {name}: no answer within {} s; it may have arrived", timeout.as_secs())]
    Timeout {
        /// `create`, `patch` …
        verb: &'static str,
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// The timeout.
        timeout: Duration,
    },
    /// Another process is the leader; nothing was written.
    #[error("{verb} {kind} {name}: not written, because this process is no longer the leader")]
    NotLeader {
        /// `create`, `patch` …
        verb: &'static str,
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
    },
    /// An object is currently invalid; nothing was written.
    #[error(
        "patch {kind} {name}: not written, the object cannot be read: {reason}; expected a form of its kind that this version knows"
    )]
    Unreadable {
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// The reason.
        reason: String,
    },
    /// An object that was created recently has been deleted; nothing was written.
    #[error(
        "create {kind} {name}: the one that was made a moment ago is gone, perhaps with an owner that does not exist any \
         more; it is made again in {} s",
        retry_after.as_secs()
    )]
    Vanished {
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// When it may be recreated.
        retry_after: Duration,
    },
    /// The pod CIDRs of an object were written recently; nothing was written.
    #[error("patch {kind} {name}: its pod CIDRs were written recently; the next write is in {} s", retry_after.as_secs())]
    TooSoon {
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// When they may be written again.
        retry_after: Duration,
    },
}

impl KubernetesError {
    /// The HTTP status, if the API server answered.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Call { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            _ => None,
        }
    }

    /// The object or its kind does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// The object exists already, or was changed since it was read.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        self.status() == Some(409)
    }
}

impl Classify for KubernetesError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Config { .. } | Self::Unreadable { .. } => ErrorClass::Permanent,
            Self::Vanished { retry_after, .. } | Self::TooSoon { retry_after, .. } => {
                ErrorClass::Throttled { retry_after: Some(*retry_after) }
            }
            Self::Timeout { .. } | Self::NotLeader { .. } => ErrorClass::Transient,
            Self::Call { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => match status.code {
                    429 => ErrorClass::Throttled {
                        retry_after: status
                            .details
                            .as_ref()
                            .filter(|details| details.retry_after_seconds > 0)
                            .map(|details| Duration::from_secs(u64::from(details.retry_after_seconds))),
                    },
                    // The object or the caller's permissions are wrong; retrying does not help.
                    400 | 401 | 403 | 405 | 413 | 415 | 422 => ErrorClass::Permanent,
                    _ => ErrorClass::Transient,
                },
                kube::Error::SerdeError(_) | kube::Error::BuildRequest(_) => ErrorClass::Permanent,
                _ => ErrorClass::Transient,
            },
        }
    }
}

/// An error with all its causes in one line.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// The API server's message if there is one; else the error with all its causes.
fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{} ({})", status.message, status.code),
        other => causes(other),
    }
}

/// Runs a call under [`WRITE_TIMEOUT`], and describes it if it fails.
pub(crate) async fn write<T>(
    verb: &'static str,
    kind: &'static str,
    name: &str,
    call: impl Future<Output = Result<T, kube::Error>> + Send,
) -> Result<T, KubernetesError> {
    within(WRITE_TIMEOUT, verb, kind, name, call).await
}

async fn within<T>(
    timeout: Duration,
    verb: &'static str,
    kind: &'static str,
    name: &str,
    call: impl Future<Output = Result<T, kube::Error>> + Send,
) -> Result<T, KubernetesError> {
    let outcome = match tokio::time::timeout(timeout, call).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(KubernetesError::Call { verb, kind, name: name.to_owned(), source: Box::new(source) }),
        Err(_) => Err(KubernetesError::Timeout { verb, kind, name: name.to_owned(), timeout }),
    };
    count(verb, kind, &outcome);
    outcome
}

/// Counts a call by its result.
fn count<T>(verb: &str, kind: &str, outcome: &Result<T, KubernetesError>) {
    let result = outcome.as_ref().map_or_else(CallResult::of, |_| CallResult::Ok);
    metrics::kubernetes_call(&verb.trim_end_matches(" of").replace(' ', "-"), kind, &result.to_string());
}

/// How a call ended, as the label `result` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallResult {
    Ok,
    Status(u16),
    Timeout,
    NotLeader,
    Unreachable,
}

impl CallResult {
    fn of(error: &KubernetesError) -> Self {
        match error {
            KubernetesError::Timeout { .. } => Self::Timeout,
            KubernetesError::NotLeader { .. } => Self::NotLeader,
            error => error.status().map_or(Self::Unreachable, Self::Status),
        }
    }
}

impl std::fmt::Display for CallResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Status(code) => write!(f, "{code}"),
            Self::Timeout => f.write_str("timeout"),
            Self::NotLeader => f.write_str("not-leader"),
            Self::Unreachable => f.write_str("unreachable"),
        }
    }
}

/// Until when this process may write as leader; checked for every write.
#[derive(Debug, Clone)]
pub struct Leadership(channel::Receiver<Option<Instant>>);

impl Leadership {
    /// Follows a leader election: the time by which every write must have completed; `None` while another process
    /// leads.
    #[must_use]
    pub fn new(receiver: channel::Receiver<Option<Instant>>) -> Self {
        Self(receiver)
    }

    /// Whether this process is the leader now.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.0.borrow().is_some_and(|until| until > Instant::now())
    }

    /// Runs a write if this process is the leader, and cancels it before another process can be.
    pub(crate) async fn write<T>(
        &self,
        verb: &'static str,
        kind: &'static str,
        name: &str,
        call: impl Future<Output = Result<T, kube::Error>> + Send,
    ) -> Result<T, KubernetesError> {
        let now = Instant::now();
        let budget = self.0.borrow().and_then(|until| until.checked_duration_since(now)).filter(|left| !left.is_zero());
        let Some(budget) = budget else {
            let refused = Err(KubernetesError::NotLeader { verb, kind, name: name.to_owned() });
            count(verb, kind, &refused);
            return refused;
        };
        within(budget.min(WRITE_TIMEOUT), verb, kind, name, call).await
    }
}
