//! Watches: API objects into the rows of a table.

use crate::tables::{Table, Waits};
use futures::StreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::DeserializeGuard;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// An object that cannot be turned into a row. It is reported and left out; the watch goes on.
#[derive(Debug, thiserror::Error)]
#[error("{kind} {name}: {reason}")]
pub struct ViewError {
    /// Kind of the object.
    pub kind: &'static str,
    /// Name of the object.
    pub name: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Which objects of a kind are watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// Every one.
    All,
    /// The one of this name.
    Named(String),
}

impl Which {
    fn field_selector(&self) -> Option<String> {
        match self {
            Self::All => None,
            Self::Named(name) => Some(format!("metadata.name={name}")),
        }
    }
}

/// Keeps `table` equal to what the API server lists of a cluster-scoped kind, until cancelled.
///
/// The table is marked synced after the first whole list. When the watch breaks, rows stay as they are, the break is a
/// wait with its reason, and the watch goes on where it stood, or after a new list when the server has forgotten what came
/// since, or when its resource version went back: it was restored from a backup then, and what it has lost is told by no
/// watch. An object that cannot be read keeps the row it had: somebody's typing error must not look like a deletion.
pub async fn run<K, Row>(
    name: &'static str,
    client: Client,
    which: Which,
    table: Arc<Table<String, Row>>,
    view: impl Fn(&K) -> Result<Row, ViewError> + Send,
    waits: Waits,
    cancel: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    Row: Clone + PartialEq + Debug,
{
    let wait = format!("watch {name}");
    let mut delay = FIRST_DELAY;
    let mut this = Watch { api: Api::all(client), selector: which.field_selector(), table, view, version: None };
    loop {
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => return,
            outcome = this.follow(|| { waits.end(&wait); delay = FIRST_DELAY; }) => outcome,
        };
        if let Err(reason) = outcome {
            waits.begin(&wait, reason, Some(delay));
            tokio::select! {
                biased;
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(delay) => {}
            }
            delay = (delay * 2).min(LONGEST_DELAY);
        }
    }
}

/// A broken watch is begun again after this long, doubled each time up to [`LONGEST_DELAY`].
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(15);

/// How long a list, or a page of it, may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Objects in a page of a list.
const PAGE: u32 = 500;

/// How long the server keeps a watch, in seconds, and how long after that a silent connection counts as dead.
const WATCH_SECONDS: u32 = 290;
const DEAD_AFTER: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);

/// The server does not know any more what came after the version that was asked for.
const GONE: u16 = 410;

struct Watch<K, Row, View> {
    api: Api<DeserializeGuard<K>>,
    selector: Option<String>,
    table: Arc<Table<String, Row>>,
    view: View,
    /// Up to where the table knows everything; none before a list.
    version: Option<String>,
}

impl<K, Row, View> Watch<K, Row, View>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    Row: Clone + PartialEq + Debug,
    View: Fn(&K) -> Result<Row, ViewError> + Send,
{
    /// Lists if need be, then follows one watch to its end. `well` is told whenever the server has answered.
    async fn follow(&mut self, mut well: impl FnMut()) -> Result<(), String> {
        let version = match &self.version {
            Some(version) if !self.went_back(version).await? => version.clone(),
            _ => self.list().await?,
        };
        let params = WatchParams {
            field_selector: self.selector.clone(),
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        let stream =
            self.api.watch(&params, &version).await.map_err(|error| self.failed("start of the watch", &error))?;
        let mut stream = std::pin::pin!(stream);
        well();
        while let Ok(Some(event)) = tokio::time::timeout(DEAD_AFTER, stream.next()).await {
            let version = match event.map_err(|error| self.failed("watch", &error))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let version = object.resource_version();
                    let row = read(&object, &self.view, &self.table);
                    self.table.follow(version.as_deref(), |rows| rows.extend(row));
                    version
                }
                WatchEvent::Deleted(object) => {
                    let version = object.resource_version();
                    self.table.follow(version.as_deref(), |rows| {
                        rows.remove(&object.name_any());
                    });
                    version
                }
                WatchEvent::Bookmark(bookmark) => {
                    let version = bookmark.metadata.resource_version;
                    self.table.follow(Some(&version), |_| {});
                    Some(version)
                }
                WatchEvent::Error(status) => {
                    // Whatever it is that the server cannot do, it can list.
                    self.version = None;
                    return Err(format!("watch: {} ({})", status.message, status.code));
                }
            };
            self.version = version.or(self.version.take());
            well();
        }
        Ok(())
    }

    /// Whether the server is at an older version than one that it has told before.
    async fn went_back(&self, seen: &str) -> Result<bool, String> {
        let params = ListParams { limit: Some(1), ..self.list_params() };
        let list = self.timely(self.api.list(&params)).await?;
        let number = |text: &str| text.parse::<u64>().ok();
        let now = list.metadata.resource_version.as_deref().and_then(number);
        let went_back = now.zip(number(seen)).is_some_and(|(now, seen)| now < seen);
        if went_back {
            tracing::warn!(table = self.table.name(), version = ?now, in_force = "a list that is taken now", "the API server went back to an older state");
        }
        Ok(went_back)
    }

    /// Replaces the rows by a whole list, and answers its version.
    async fn list(&mut self) -> Result<String, String> {
        let mut rows = BTreeMap::new();
        let mut params = ListParams { limit: Some(PAGE), ..self.list_params() };
        loop {
            let list = self.timely(self.api.list(&params)).await?;
            rows.extend(list.items.iter().filter_map(|object| read(object, &self.view, &self.table)));
            params.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let version = list.metadata.resource_version.ok_or("list without resource version")?;
                self.table.publish_list(rows, &version);
                self.version = Some(version.clone());
                return Ok(version);
            }
        }
    }

    fn list_params(&self) -> ListParams {
        ListParams { field_selector: self.selector.clone(), ..ListParams::default() }
    }

    async fn timely<T>(&self, call: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
        match tokio::time::timeout(LIST_TIMEOUT, call).await {
            Ok(outcome) => outcome.map_err(|error| describe("list", &error)),
            Err(_) => Err(format!("list: no answer within {} s", LIST_TIMEOUT.as_secs())),
        }
    }

    fn failed(&mut self, what: &str, error: &kube::Error) -> String {
        if matches!(error, kube::Error::Api(status) if status.code == GONE) {
            self.version = None;
        }
        describe(what, error)
    }
}

fn read<K: Resource, Row: Clone + PartialEq>(
    object: &DeserializeGuard<K>,
    view: &impl Fn(&K) -> Result<Row, ViewError>,
    table: &Table<String, Row>,
) -> Option<(String, Row)>
where
    K::DynamicType: Default,
{
    let name = object.name_any();
    let problem = match &object.0 {
        Ok(object) => match view(object) {
            Ok(row) => return Some((name, row)),
            Err(error) => error.to_string(),
        },
        Err(invalid) => format!("{} {name}: {}", K::kind(&K::DynamicType::default()), invalid.error),
    };
    let kept = table.snapshot().rows.get(&name).cloned();
    tracing::warn!(
        table = table.name(),
        error = problem,
        in_force = if kept.is_some() { "what it said before" } else { "nothing of it" },
        "object cannot be read"
    );
    kept.map(|row| (name, row))
}

/// What the API server said where it said something; else the error with all its causes in one line.
fn describe(what: &str, error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{what}: {} ({})", status.message, status.code),
        cause => format!("{what}: {}", super::causes(cause)),
    }
}
