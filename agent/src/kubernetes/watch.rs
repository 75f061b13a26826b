//! Watches API objects and publishes them as rows of a table.
//!
//! This is not `kube::runtime::watcher` (5.0), which does not allow for what makes these watches safe:
//!
//! - It resumes a broken watch at its version without checking the server. A server that was restored from a backup
//!   answers such a watch as if nothing had happened ([`Which`]).
//! - It does not expose the versions of lists and bookmarks. They say which writes a table reflects ([`Table::follow`],
//!   [`Table::publish_list`]), and so what may be planned from it.
//! - It considers an idle connection dead after the timeout of a watch and a margin, not after 75 s. A timeout around
//!   it can only drop it with its state, which costs a complete list.
//!
//! Its jitter would be no obstacle: the back-off is the caller's.

use crate::tables::rows::ObjectKey;
use crate::tables::{Table, Waits};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, ObjectList, WatchEvent, WatchParams};
use kube::core::{DeserializeGuard, Request};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// An object that cannot be converted to a row. It is reported and skipped; the watch continues.
#[derive(Debug, thiserror::Error)]
#[error("{kind} {name}: {reason}")]
pub struct ViewError {
    /// Kind of the object.
    pub kind: &'static str,
    /// Name of the object.
    pub name: String,
    /// The reason.
    pub reason: String,
}

/// The watched objects of a kind, and how to detect after a broken watch that the server was restored from a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// All objects. After a reconnect, they are listed again.
    All,
    /// All objects. After a reconnect, they are listed again only if the probe object of this name changed; this avoids
    /// a thundering herd of LISTs after a restart of the API server.
    AllOf(String),
    /// The object of this name, which is read again.
    Named(String),
}

/// The watched part of a kind, by default all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    which: Which,
    namespace: Option<String>,
    labels: Option<String>,
    fields: Option<String>,
    metadata_only: bool,
}

impl From<Which> for Selection {
    fn from(which: Which) -> Self {
        Self { which, namespace: None, labels: None, fields: None, metadata_only: false }
    }
}

impl Selection {
    /// Of a namespaced kind, the objects of one namespace.
    #[must_use]
    pub fn in_namespace(self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self }
    }

    /// Only objects that a label selector matches.
    #[must_use]
    pub fn with_labels(self, selector: &str) -> Self {
        Self { labels: Some(selector.to_owned()), ..self }
    }

    /// Only objects that a field selector matches.
    #[must_use]
    pub fn with_fields(self, selector: &str) -> Self {
        Self { fields: Some(selector.to_owned()), ..self }
    }

    /// The server only sends metadata. The kind is then the `PartialObjectMeta` of the watched kind.
    #[must_use]
    pub fn metadata_only(self) -> Self {
        Self { metadata_only: true, ..self }
    }

    /// The field selector; with a name, for the object of that name.
    fn field_selector(&self, name: Option<&str>) -> Option<String> {
        let named = name.map(|name| format!("metadata.name={name}"));
        let parts: Vec<String> = named.into_iter().chain(self.fields.clone()).collect();
        (!parts.is_empty()).then(|| parts.join(","))
    }
}

/// Derives the key of an object in its table.
pub trait Key: Ord + Clone + Debug {
    /// The key of an object.
    fn of(meta: &ObjectMeta) -> Self;
}

/// Of a cluster-scoped kind, the name.
impl Key for String {
    fn of(meta: &ObjectMeta) -> Self {
        meta.name.clone().unwrap_or_default()
    }
}

impl Key for ObjectKey {
    fn of(meta: &ObjectMeta) -> Self {
        Self { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
    }
}

/// Keeps `table` equal to a kind of the API server, until cancelled.
///
/// The table is marked synced after the first complete list. When the watch breaks, rows are kept, the reason is
/// published as a wait, and the watch resumes, or lists again if the server no longer has the history, or was restored
/// from a backup ([`Which`]): watches do not report what a restore lost. For an object that cannot be parsed,
/// [`View::unreadable`] provides the row: an invalid edit must not look like a deletion.
pub async fn run<K, Id, Row>(
    name: &'static str,
    client: Client,
    selection: impl Into<Selection>,
    table: Arc<Table<Id, Row>>,
    view: View<K, Row>,
    waits: Waits,
    cancel: CancellationToken,
) where
    Id: Key,
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    Row: Clone + PartialEq + Debug,
{
    let wait = format!("watch {name}");
    let mut delay = FIRST_DELAY;
    let selection = selection.into();
    let path = K::url_path(&K::DynamicType::default(), selection.namespace.as_deref());
    let request = Request::new(path);
    let mut this =
        Watch { client, request, selection, table, view, version: None, broke: false, listed: None, probed: None };
    loop {
        let begun = Instant::now();
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => return,
            outcome = this.follow(|| waits.end(&wait)) => outcome,
        };
        let lasted = begun.elapsed();
        // A watch that the server ends at its timeout is complete.
        this.broke = outcome != Ok(End::Closed) || lasted < Duration::from_secs(u64::from(WATCH_SECONDS));
        if lasted >= STEADY {
            delay = FIRST_DELAY;
        }
        let reason = match outcome {
            Err(reason) => reason,
            Ok(_) if lasted >= STEADY => continue,
            Ok(_) => {
                // Watching may never succeed, but listing does.
                this.version = None;
                format!("watch: ended by the server after {} ms", lasted.as_millis())
            }
        };
        waits.begin(&wait, reason, Some(delay));
        tokio::select! {
            biased;
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(delay) => {}
        }
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

/// Conversion of objects of a kind to rows.
pub struct View<K, Row> {
    /// Converts an object.
    pub read: Read<K, Row>,
    /// The row of an object of which only the metadata can be parsed, from its previous row, if any, and the reason.
    /// `None` omits it.
    pub unreadable: Unreadable<Row>,
}

/// See [`View`].
pub type Read<K, Row> = Box<dyn Fn(&K) -> Result<Row, ViewError> + Send + Sync>;

/// See [`View`].
pub type Unreadable<Row> = Box<dyn Fn(Option<Row>, &ObjectMeta, &str) -> Option<Row> + Send + Sync>;

/// Initial delay before reconnecting, doubled each time up to [`LONGEST_DELAY`].
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(15);

/// A watch that lasted this long was accepted by the server.
const STEADY: Duration = Duration::from_secs(5);

/// Timeout of a list, or a page of it.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Page size of lists.
const PAGE: u32 = 500;

/// Interval of complete lists. Nodes list at different times, because they started at different times.
const LIST_AGAIN: Duration = Duration::from_secs(3600);

/// Timeout of a watch that the client requests, in seconds.
const WATCH_SECONDS: u32 = 290;

/// Idle timeout of a watch; a false positive costs one watch restart. Servers send a bookmark every minute. Must be
/// shorter than the time that leaders wait for nodes to detect a restored server
/// ([`crate::controllers::ipam_cluster::SETTLE`]).
const DEAD_AFTER: Duration = Duration::from_secs(75);

/// HTTP 410: the requested version is no longer in the server's history.
const GONE: u16 = 410;

/// How a watch ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// By the server.
    Closed,
    /// By the idle timeout.
    Silent,
}

struct Watch<K, Id: Ord, Row> {
    client: Client,
    request: Request,
    selection: Selection,
    table: Arc<Table<Id, Row>>,
    view: View<K, Row>,
    /// The version up to which the table is complete; `None` before a list.
    version: Option<String>,
    /// The last watch ended prematurely.
    broke: bool,
    /// Time of the last list.
    listed: Option<Instant>,
    /// Resource version of the object of [`Which::AllOf`], as last received.
    probed: Option<String>,
}

impl<K, Id, Row> Watch<K, Id, Row>
where
    Id: Key,
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    Row: Clone + PartialEq + Debug,
{
    /// Lists if necessary, then follows one watch to its end. Calls `well` whenever the server has answered.
    async fn follow(&mut self, mut well: impl FnMut()) -> Result<End, String> {
        let version = match &self.version {
            Some(version) if !self.is_list_due() && !self.went_back(version).await? => version.clone(),
            _ => self.list().await?,
        };
        let params = WatchParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.field_selector(),
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        let request = if self.selection.metadata_only {
            self.request.watch_metadata(&params, &version)
        } else {
            self.request.watch(&params, &version)
        };
        let request = request.map_err(|error| format!("start of the watch: {error}"))?;
        let stream = self
            .client
            .request_events::<DeserializeGuard<K>>(request)
            .await
            .map_err(|error| self.failed("start of the watch", &error))?;
        let mut stream = std::pin::pin!(stream);
        well();
        loop {
            let event = match tokio::time::timeout(DEAD_AFTER, stream.next()).await {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(End::Closed),
                Err(_) => return Ok(End::Silent),
            };
            let version = match event.map_err(|error| self.failed("watch", &error))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let version = object.resource_version();
                    self.probe(&object);
                    let row = read(&object, &self.view, &self.table);
                    self.table.follow(version.as_deref(), |rows| rows.extend(row));
                    version
                }
                WatchEvent::Deleted(object) => {
                    let version = object.resource_version();
                    if self.is_probe(&object) {
                        self.probed = None;
                    }
                    self.table.follow(version.as_deref(), |rows| {
                        rows.remove(&Id::of(object.meta()));
                    });
                    version
                }
                WatchEvent::Bookmark(bookmark) => {
                    let version = bookmark.metadata.resource_version;
                    self.table.follow(Some(&version), |_| {});
                    Some(version)
                }
                WatchEvent::Error(status) => {
                    // Whatever the reason, a list resolves it.
                    self.version = None;
                    return Err(format!("watch: {} ({})", status.message, status.code));
                }
            };
            self.version = version.or(self.version.take());
            well();
        }
    }

    /// Complete lists at intervals find what watches missed, at different times per node.
    fn is_list_due(&self) -> bool {
        self.listed.is_some_and(|listed| listed.elapsed() >= LIST_AGAIN)
    }

    fn field_selector(&self) -> Option<String> {
        match &self.selection.which {
            Which::All | Which::AllOf(_) => self.selection.field_selector(None),
            Which::Named(name) => self.selection.field_selector(Some(name)),
        }
    }

    fn is_probe(&self, object: &DeserializeGuard<K>) -> bool {
        matches!(&self.selection.which, Which::AllOf(name) if object.meta().name.as_ref() == Some(name))
    }

    fn probe(&mut self, object: &DeserializeGuard<K>) {
        if self.is_probe(object) {
            self.probed = object.resource_version();
        }
    }

    /// Whether the server's current state may contradict its events up to the version `seen`.
    async fn went_back(&self, seen: &str) -> Result<bool, String> {
        let probe = match (&self.selection.which, self.broke) {
            (Which::Named(_), _) | (Which::All, true) => return Ok(true),
            (Which::All, false) => None,
            (Which::AllOf(name), _) => Some(name),
        };
        let params = ListParams {
            limit: Some(1),
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.field_selector(probe.map(String::as_str)),
            ..ListParams::default()
        };
        let list = self.page(&params).await?;
        let number = |text: &str| text.parse::<u64>().ok();
        let now = list.metadata.resource_version.as_deref().and_then(number);
        let mut went_back = now.zip(number(seen)).is_some_and(|(now, seen)| now < seen);
        if probe.is_some() && !went_back {
            // A newer version will be reported by the watch; any other difference was not reported.
            let found = list.items.first().and_then(ResourceExt::resource_version);
            let newer = found.as_deref().and_then(number).zip(number(seen)).is_some_and(|(found, seen)| found > seen);
            went_back = found != self.probed && !newer;
        }
        if went_back {
            tracing::warn!(table = self.table.name(), version = ?now, in_force = "a new list", "the API server's state contradicts its watch events: it was restored to an older state, or a deletion was not reported");
        }
        Ok(went_back)
    }

    /// Replaces the rows by a complete list, and returns its version.
    async fn list(&mut self) -> Result<String, String> {
        let mut rows = BTreeMap::new();
        let mut probed = None;
        let mut params = ListParams {
            limit: Some(PAGE),
            label_selector: self.selection.labels.clone(),
            field_selector: self.field_selector(),
            ..ListParams::default()
        };
        loop {
            let list = self.page(&params).await?;
            probed = probed.or_else(|| {
                list.items.iter().find(|object| self.is_probe(object)).and_then(ResourceExt::resource_version)
            });
            rows.extend(list.items.iter().filter_map(|object| read(object, &self.view, &self.table)));
            params.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let version = list.metadata.resource_version.ok_or("list without resource version")?;
                self.table.publish_list(rows, &version);
                self.version = Some(version.clone());
                self.probed = probed;
                self.listed = Some(Instant::now());
                return Ok(version);
            }
        }
    }

    async fn page(&self, params: &ListParams) -> Result<ObjectList<DeserializeGuard<K>>, String> {
        let request =
            if self.selection.metadata_only { self.request.list_metadata(params) } else { self.request.list(params) };
        let request = request.map_err(|error| format!("list: {error}"))?;
        match tokio::time::timeout(LIST_TIMEOUT, self.client.request(request)).await {
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

fn read<K: Resource, Id: Key, Row: Clone + PartialEq>(
    object: &DeserializeGuard<K>,
    view: &View<K, Row>,
    table: &Table<Id, Row>,
) -> Option<(Id, Row)>
where
    K::DynamicType: Default,
{
    let (key, name) = (Id::of(object.meta()), object.name_any());
    let problem = match &object.0 {
        Ok(object) => match (view.read)(object) {
            Ok(row) => return Some((key, row)),
            Err(error) => error.to_string(),
        },
        Err(invalid) => format!("{} {name}: {}", K::kind(&K::DynamicType::default()), invalid.error),
    };
    let kept = table.snapshot().rows.get(&key).cloned();
    let in_force = if kept.is_some() { "its previous state" } else { "nothing" };
    tracing::warn!(table = table.name(), error = problem, in_force, "object cannot be read");
    let row = (view.unreadable)(kept, object.meta(), &problem);
    row.map(|row| (key, row))
}

/// The API server's message if there is one; else the error with all its causes in one line.
fn describe(what: &str, error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{what}: {} ({})", status.message, status.code),
        cause => format!("{what}: {}", super::causes(cause)),
    }
}
