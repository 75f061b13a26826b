//! A watch: the stream of events that follows a revision.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{self, Stream};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::error::{ApiError, ApiResult};
use super::faults::Fault;
use super::request::{Form, Request};
use super::resource::Resource;
use super::selector::Selector;
use super::store::{Change, Store};
use super::tree;
use super::{Caller, Link, Links, Shared, form_of, table};

/// Interval of bookmarks, for watches that request them.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// Default timeout of a watch.
const LIFETIME: Duration = Duration::from_secs(30 * 60);

/// Source of a watch's events.
enum Source {
    /// This server's store. The receiver is notified of changes.
    Store(tokio::sync::watch::Receiver<u64>),
    /// A real server, one event per line.
    Upstream(mpsc::UnboundedReceiver<Bytes>),
}

/// State of a [`Source`].
enum News {
    /// There are changes.
    Changes,
    Line(Bytes),
    /// The end.
    End,
}

impl Source {
    async fn news(&mut self) -> News {
        match self {
            Self::Store(revisions) => revisions.changed().await.map_or(News::End, |()| News::Changes),
            Self::Upstream(lines) => lines.recv().await.map_or(News::End, News::Line),
        }
    }
}

/// Scope and position of a watch.
pub(super) struct Watch {
    source: Source,
    shared: Arc<Shared>,
    caller: Caller,
    resource: Arc<Resource>,
    namespace: Option<String>,
    selector: Selector,
    /// All events up to this version have been sent.
    revision: u64,
    pending: VecDeque<Bytes>,
    ended: bool,
    bookmarks: bool,
    next_bookmark: Instant,
    deadline: Instant,
    form: Form,
    cut_after: Option<usize>,
    delay: Option<Duration>,
    /// The server's restart count when this watch started.
    life: u64,
}

impl Watch {
    /// Opens a watch. The caller holds the lock of `store`, so that no event is missed between the initial state and
    /// the watch.
    pub(super) fn open(
        shared: Arc<Shared>,
        store: &Store,
        caller: &Caller,
        request: &Request,
        fault: Option<Fault>,
    ) -> ApiResult<Self> {
        let Request { resource, query, .. } = request;
        let asked = query.number("resourceVersion")?;
        let initial = match query.text("sendInitialEvents") {
            "" => asked.unwrap_or_default() == 0,
            _ if query.text("resourceVersionMatch") != "NotOlderThan" => {
                let text = "Forbidden: resourceVersionMatch is required when sendInitialEvents is set";
                return Err(ApiError::invalid_option("ListOptions", "resourceVersionMatch", text));
            }
            flag => flag == "true",
        };
        let source = Source::Store(shared.revision.subscribe());
        let mut watch = Self::new(shared, source, store.revision(), caller, request, fault)?;
        if initial {
            let namespace = watch.namespace.clone();
            for (_, object) in store.list(&resource.storage, namespace.as_deref()) {
                if watch.selector.matches(object) {
                    watch.push("ADDED", object);
                }
            }
            if query.text("sendInitialEvents") == "true" && watch.bookmarks {
                watch.push_bookmark(true);
            }
        } else if let Some(revision) = asked.filter(|revision| *revision > 0) {
            watch.revision = revision;
        }
        Ok(watch)
    }

    /// Forwards the events of a real server.
    pub(super) fn relay(
        shared: Arc<Shared>,
        lines: mpsc::UnboundedReceiver<Bytes>,
        caller: &Caller,
        request: &Request,
        fault: Option<Fault>,
    ) -> ApiResult<Self> {
        let watch = Self::new(shared, Source::Upstream(lines), 0, caller, request, fault)?;
        // The real server sends its own.
        Ok(Self { bookmarks: false, ..watch })
    }

    fn new(
        shared: Arc<Shared>,
        source: Source,
        revision: u64,
        caller: &Caller,
        request: &Request,
        fault: Option<Fault>,
    ) -> ApiResult<Self> {
        let Request { resource, query, place, in_namespace, form, .. } = request;
        let now = Instant::now();
        let lifetime = query.number("timeoutSeconds")?.map_or(LIFETIME, Duration::from_secs);
        let life = shared.links.borrow().life;
        let mut watch = Self {
            source,
            caller: caller.clone(),
            resource: Arc::clone(resource),
            namespace: in_namespace.then(|| place.namespace.clone()),
            selector: Selector::parse(resource, query.text("labelSelector"), query.text("fieldSelector"))?,
            revision,
            pending: VecDeque::new(),
            ended: false,
            bookmarks: query.flag("allowWatchBookmarks"),
            next_bookmark: now + BOOKMARK_INTERVAL,
            deadline: now + lifetime,
            form: *form,
            cut_after: None,
            delay: None,
            life,
            shared,
        };
        match fault {
            Some(Fault::WatchExpired) => {
                watch.fail(&ApiError::expired(query.number("resourceVersion")?.unwrap_or_default(), revision));
            }
            Some(Fault::WatchCut(events)) => watch.cut_after = Some(events),
            Some(Fault::WatchDelayed(delay)) => watch.delay = Some(delay),
            _ => {}
        }
        Ok(watch)
    }

    /// The events as JSON, one per line. The stream ends with the watch's timeout, and fails if the connection is
    /// reset.
    pub(super) fn into_stream(self) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
        stream::unfold(self, |mut watch| async move { watch.next().await.map(|item| (item, watch)) })
    }

    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        let shared = Arc::clone(&self.shared);
        let mut links = shared.links.subscribe();
        loop {
            let link = self.link(&links.borrow_and_update());
            match link {
                None => return None,
                Some(Link::Refused) => return Some(Err(io::ErrorKind::ConnectionReset.into())),
                Some(Link::Up) => {
                    if self.cut_after == Some(0) {
                        return None;
                    }
                    if let Some(line) = self.pending.pop_front() {
                        if let Some(delay) = self.delay {
                            sleep(delay).await;
                        }
                        if let Some(left) = self.cut_after.as_mut() {
                            *left -= 1;
                        }
                        return Some(Ok(line));
                    }
                    if self.ended || Instant::now() >= self.deadline {
                        return None;
                    }
                    if let Source::Store(revisions) = &mut self.source {
                        revisions.borrow_and_update();
                        self.collect();
                    }
                    if !self.pending.is_empty() {
                        continue;
                    }
                    if self.bookmarks && Instant::now() >= self.next_bookmark {
                        self.next_bookmark = Instant::now() + BOOKMARK_INTERVAL;
                        self.push_bookmark(false);
                        continue;
                    }
                }
                Some(Link::Silent | Link::Held) => {}
            }
            let bookmark = if self.bookmarks { self.next_bookmark } else { self.deadline };
            let up = link == Some(Link::Up);
            tokio::select! {
                biased;
                changed = links.changed() => if changed.is_err() { return None },
                news = self.source.news(), if up => match news {
                    News::Changes => {}
                    News::Line(line) => self.pending.push_back(line),
                    News::End => self.ended = true,
                },
                () = sleep_until(self.deadline.min(bookmark)), if up => {}
            }
        }
    }

    /// The state of the client's link; `None` if the server has been restarted since.
    fn link(&self, links: &Links) -> Option<Link> {
        (links.life == self.life).then(|| links.of(&self.caller))
    }

    fn collect(&mut self) {
        let shared = Arc::clone(&self.shared);
        let state = shared.lock();
        let changes: ApiResult<Vec<Change>> =
            state.store.changes_after(self.revision).map(|changes| changes.cloned().collect());
        let latest = state.store.revision();
        drop(state);
        match changes {
            Err(expired) => self.fail(&expired),
            Ok(changes) => {
                for change in &changes {
                    self.push_change(change);
                }
                self.revision = self.revision.max(latest);
            }
        }
    }

    fn push_change(&mut self, change: &Change) {
        let covered = change.key.storage == self.resource.storage
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == change.key.namespace);
        if !covered {
            return;
        }
        let before = change.before.as_deref().filter(|object| self.selector.matches(object));
        let after = !change.deleted && self.selector.matches(&change.after);
        match (before, after) {
            (None, false) => {}
            (None, true) => self.push("ADDED", &change.after),
            (Some(_), true) => self.push("MODIFIED", &change.after),
            (Some(before), false) => {
                // An object that no longer matches the selector is sent in its last matching form, with the version of
                // the change.
                let mut last = before.clone();
                tree::copy_metadata(&mut last, &change.after, "resourceVersion");
                self.push("DELETED", &last);
            }
        }
    }

    fn push(&mut self, kind: &str, object: &Value) {
        let shown = self.resource.present(object);
        let text = form_of(&self.resource, self.form, &shown, self.shared.clock.now());
        self.line(kind, &text);
    }

    fn push_bookmark(&mut self, initial_end: bool) {
        let mut metadata = json!({"resourceVersion": self.revision.to_string()});
        if initial_end {
            tree::as_map(&mut metadata).insert("annotations".to_owned(), json!({"k8s.io/initial-events-end": "true"}));
        }
        let (kind, version) = match self.form {
            Form::Metadata => (table::PARTIAL, table::META_VERSION.to_owned()),
            Form::Whole | Form::Table => (self.resource.kind.as_str(), self.resource.api_version()),
        };
        let object = json!({"kind": kind, "apiVersion": version, "metadata": metadata});
        self.line("BOOKMARK", &object.to_string());
    }

    /// Sends an error event and ends the watch.
    fn fail(&mut self, error: &ApiError) {
        self.line("ERROR", &error.to_status().to_string());
        self.ended = true;
    }

    fn line(&mut self, kind: &str, object: &str) {
        self.pending.push_back(Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")));
    }
}
