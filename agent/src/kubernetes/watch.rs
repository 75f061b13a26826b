//! Watches: API objects into the rows of a table.

use crate::tables::{Table, Waits};
use futures::StreamExt;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
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
    fn config(&self) -> watcher::Config {
        match self {
            Self::All => watcher::Config::default(),
            Self::Named(name) => watcher::Config::default().fields(&format!("metadata.name={name}")),
        }
    }
}

/// Keeps `table` equal to what the API server lists of a cluster-scoped kind, until cancelled.
///
/// The table is marked synced after the first whole list. When the watch breaks, rows stay as they are, the break is a
/// wait with its reason, and the next list replaces them. An object that cannot be read keeps the row it had: somebody's
/// typing error must not look like a deletion.
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
    let guarded: Api<DeserializeGuard<K>> = Api::all(client);
    let wait = format!("watch {name}");
    let config = which.config();
    let mut delay = FIRST_DELAY;
    let mut stream = watcher::watcher(guarded.clone(), config.clone()).boxed();
    let mut listed: BTreeMap<String, Row> = BTreeMap::new();
    loop {
        let event = tokio::select! {
            () = cancel.cancelled() => return,
            event = stream.next() => event,
        };
        match event {
            Some(Ok(event)) => {
                match event {
                    Event::Init => listed = BTreeMap::new(),
                    Event::InitApply(object) => {
                        if let Some((key, row)) = read(&object, &view, &table) {
                            listed.insert(key, row);
                        }
                    }
                    Event::InitDone => {
                        table.publish(std::mem::take(&mut listed));
                    }
                    Event::Apply(object) => {
                        if let Some((key, row)) = read(&object, &view, &table) {
                            table.modify(|rows| {
                                rows.insert(key, row);
                            });
                        }
                    }
                    Event::Delete(object) => {
                        table.modify(|rows| {
                            rows.remove(&object.name_any());
                        });
                    }
                }
                if table.snapshot().synced {
                    waits.end(&wait);
                    delay = FIRST_DELAY;
                }
            }
            Some(Err(error)) => {
                waits.begin(&wait, describe(&error), Some(delay));
                tokio::select! {
                    () = cancel.cancelled() => return,
                    () = tokio::time::sleep(delay) => {}
                }
                delay = (delay * 2).min(LONGEST_DELAY);
            }
            // The stream of a watcher does not end; should it, it is begun anew.
            None => stream = watcher::watcher(guarded.clone(), config.clone()).boxed(),
        }
    }
}

/// A broken watch is begun again after this long, doubled each time up to [`LONGEST_DELAY`].
const FIRST_DELAY: Duration = Duration::from_millis(200);
const LONGEST_DELAY: Duration = Duration::from_secs(15);

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
fn describe(error: &watcher::Error) -> String {
    let (what, cause) = match error {
        watcher::Error::InitialListFailed(cause) => ("list", Some(cause)),
        watcher::Error::WatchStartFailed(cause) => ("start of the watch", Some(cause)),
        watcher::Error::WatchFailed(cause) => ("watch", Some(cause)),
        watcher::Error::WatchError(status) => return format!("watch: {} ({})", status.message, status.code),
        watcher::Error::NoResourceVersion => ("list without resource version", None),
    };
    match cause {
        Some(kube::Error::Api(status)) => format!("{what}: {} ({})", status.message, status.code),
        Some(cause) => format!("{what}: {}", super::causes(cause)),
        None => what.to_owned(),
    }
}
