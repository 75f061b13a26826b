//! Watches: API objects into the rows of a table.

use crate::tables::{Table, Waits};
use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::DeserializeGuard;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
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

/// Which objects of a kind are watched, and how it is found out, when a watch broke, that the server was restored from a
/// backup meanwhile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// Every one. They are listed again.
    All,
    /// Every one. Where the object of this name is as it was, they are not listed again: lists of thousands of objects by
    /// thousands of nodes, whenever an API server is started anew, would keep it from anything else.
    AllOf(String),
    /// The one of this name, which is read again.
    Named(String),
}

fn named(name: &str) -> String {
    format!("metadata.name={name}")
}

/// Keeps `table` equal to what the API server lists of a cluster-scoped kind, until cancelled.
///
/// The table is marked synced after the first whole list. When the watch breaks, rows stay as they are, the break is a
/// wait with its reason, and the watch goes on where it stood, or after a new list when the server has forgotten what came
/// since, or when it was restored from a backup ([`Which`]): what it has lost is told by no watch. An object that cannot be
/// read has the row that [`View::unreadable`] makes: somebody's typing error must not look like a deletion.
pub async fn run<K, Row>(
    name: &'static str,
    client: Client,
    which: Which,
    table: Arc<Table<String, Row>>,
    view: View<K, Row>,
    waits: Waits,
    cancel: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    Row: Clone + PartialEq + Debug,
{
    let wait = format!("watch {name}");
    let mut delay = FIRST_DELAY;
    let mut this =
        Watch { api: Api::all(client), which, table, view, version: None, broke: false, listed: None, probed: None };
    loop {
        let begun = Instant::now();
        let outcome = tokio::select! {
            biased;
            () = cancel.cancelled() => return,
            outcome = this.follow(|| waits.end(&wait)) => outcome,
        };
        let lasted = begun.elapsed();
        // What a server ends in time, at the request of the watch, is complete.
        this.broke = outcome != Ok(End::Told) || lasted < Duration::from_secs(u64::from(WATCH_SECONDS));
        if lasted >= STEADY {
            delay = FIRST_DELAY;
        }
        let reason = match outcome {
            Err(reason) => reason,
            Ok(_) if lasted >= STEADY => continue,
            Ok(_) => {
                // It may never tell anything; lists do.
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

/// Objects of a kind as rows.
pub struct View<K, Row> {
    /// An object.
    pub read: fn(&K) -> Result<Row, ViewError>,
    /// One of which only the metadata can be read: from what it was before, if it was, and what is wrong. None leaves it out.
    pub unreadable: fn(Option<Row>, &ObjectMeta, &str) -> Option<Row>,
}

/// A broken watch is begun again after this long, doubled each time up to [`LONGEST_DELAY`].
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(15);

/// A watch that lasted so long was none that a server refuses.
const STEADY: Duration = Duration::from_secs(5);

/// How long a list, or a page of it, may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Objects in a page of a list.
const PAGE: u32 = 500;

/// A whole list is taken this long after the one before. Nodes that started at different times list at different times.
const LIST_AGAIN: Duration = Duration::from_secs(3600);

/// How long the server keeps a watch, in seconds.
const WATCH_SECONDS: u32 = 290;

/// A connection that tells nothing for so long counts as dead; where it is not, that costs what the beginning of a watch
/// costs: servers send a bookmark every minute. Shorter than leaders wait for nodes to hear of a restored server
/// ([`crate::controllers::ipam_cluster::SETTLE`]).
const DEAD_AFTER: Duration = Duration::from_secs(75);

/// The server does not know any more what came after the version that was asked for.
const GONE: u16 = 410;

/// How a watch ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// By the server.
    Told,
    /// It told nothing any more.
    Silent,
}

struct Watch<K, Row> {
    api: Api<DeserializeGuard<K>>,
    which: Which,
    table: Arc<Table<String, Row>>,
    view: View<K, Row>,
    /// Up to where the table knows everything; none before a list.
    version: Option<String>,
    /// The last watch ended before its time.
    broke: bool,
    /// When a list was taken last.
    listed: Option<Instant>,
    /// Resource version of the object of [`Which::AllOf`], as last told.
    probed: Option<String>,
}

impl<K, Row> Watch<K, Row>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    K::DynamicType: Default + Clone + Eq + std::hash::Hash,
    Row: Clone + PartialEq + Debug,
{
    /// Lists if need be, then follows one watch to its end. `well` is told whenever the server has answered.
    async fn follow(&mut self, mut well: impl FnMut()) -> Result<End, String> {
        let version = match &self.version {
            Some(version) if !self.is_list_due() && !self.went_back(version).await? => version.clone(),
            _ => self.list().await?,
        };
        let params =
            WatchParams { field_selector: self.selector(), timeout: Some(WATCH_SECONDS), ..WatchParams::default() };
        let stream =
            self.api.watch(&params, &version).await.map_err(|error| self.failed("start of the watch", &error))?;
        let mut stream = std::pin::pin!(stream);
        well();
        loop {
            let event = match tokio::time::timeout(DEAD_AFTER, stream.next()).await {
                Ok(Some(event)) => event,
                Ok(None) => return Ok(End::Told),
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
    }

    /// What only a list can find is found in the end, by each node at another time.
    fn is_list_due(&self) -> bool {
        self.listed.is_some_and(|listed| listed.elapsed() >= LIST_AGAIN)
    }

    fn selector(&self) -> Option<String> {
        match &self.which {
            Which::All | Which::AllOf(_) => None,
            Which::Named(name) => Some(named(name)),
        }
    }

    fn is_probe(&self, object: &DeserializeGuard<K>) -> bool {
        matches!(&self.which, Which::AllOf(name) if object.meta().name.as_ref() == Some(name))
    }

    fn probe(&mut self, object: &DeserializeGuard<K>) {
        if self.is_probe(object) {
            self.probed = object.resource_version();
        }
    }

    /// Whether what the server has now may not be what follows from what it has told up to the version `seen`.
    async fn went_back(&self, seen: &str) -> Result<bool, String> {
        let probe = match (&self.which, self.broke) {
            (Which::Named(_), _) | (Which::All, true) => return Ok(true),
            (Which::All, false) => None,
            (Which::AllOf(name), _) => Some(name),
        };
        let params =
            ListParams { limit: Some(1), field_selector: probe.map(|name| named(name)), ..ListParams::default() };
        let list = self.timely(self.api.list(&params)).await?;
        let number = |text: &str| text.parse::<u64>().ok();
        let now = list.metadata.resource_version.as_deref().and_then(number);
        let mut went_back = now.zip(number(seen)).is_some_and(|(now, seen)| now < seen);
        if probe.is_some() && !went_back {
            // One that changed since is told of by the watch; every other difference came without being told.
            let found = list.items.first().and_then(ResourceExt::resource_version);
            let newer = found.as_deref().and_then(number).zip(number(seen)).is_some_and(|(found, seen)| found > seen);
            went_back = found != self.probed && !newer;
        }
        if went_back {
            tracing::warn!(table = self.table.name(), version = ?now, in_force = "a list that is taken now", "what the API server has is not what follows from what it told: it went back to an older state, or objects vanished unheard");
        }
        Ok(went_back)
    }

    /// Replaces the rows by a whole list, and answers its version.
    async fn list(&mut self) -> Result<String, String> {
        let mut rows = BTreeMap::new();
        let mut probed = None;
        let mut params = ListParams { limit: Some(PAGE), field_selector: self.selector(), ..ListParams::default() };
        loop {
            let list = self.timely(self.api.list(&params)).await?;
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
    view: &View<K, Row>,
    table: &Table<String, Row>,
) -> Option<(String, Row)>
where
    K::DynamicType: Default,
{
    let name = object.name_any();
    let problem = match &object.0 {
        Ok(object) => match (view.read)(object) {
            Ok(row) => return Some((name, row)),
            Err(error) => error.to_string(),
        },
        Err(invalid) => format!("{} {name}: {}", K::kind(&K::DynamicType::default()), invalid.error),
    };
    let kept = table.snapshot().rows.get(&name).cloned();
    let in_force = if kept.is_some() { "what it said before" } else { "nothing of it" };
    tracing::warn!(table = table.name(), error = problem, in_force, "object cannot be read");
    let row = (view.unreadable)(kept, object.meta(), &problem);
    row.map(|row| (name, row))
}

/// What the API server said where it said something; else the error with all its causes in one line.
fn describe(what: &str, error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => format!("{what}: {} ({})", status.message, status.code),
        cause => format!("{what}: {}", super::causes(cause)),
    }
}
