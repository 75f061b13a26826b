//! A real kube-apiserver behind the links, faults and record of calls of this server.
//!
//! Clients keep their virtual clock, on which their calls still take no time: a [`Hold`] stops the clock during a call,
//! and after a write until all watches that cover the object have delivered it. A script therefore behaves the same on
//! both servers, and sleeping for minutes costs no time on either. The real server keeps real time: ages, the lifetime
//! of events and its own timers follow the wall clock.
//!
//! # Limits
//!
//! * Writes are serialised, so that the record can tell which of them changed something.
//! * No controller runs besides the server: there is no garbage collection.
//! * Watches end by the virtual clock; the real server never has one that lasts for minutes.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as blocking};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use http::request::Parts;
use http::{HeaderMap, Method, Request, header};
use http_body_util::BodyExt as _;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{sleep, timeout};

use super::calls::Verb;
use super::error::{ApiError, ApiResult};
use super::resource::{Resource, Storage};
use super::selector::Selector;
use super::state::Place;
use super::{BODY_LIMIT, TEST_MANAGER, tree};

/// Real time within which a watch should deliver a write. It takes longer only on an overloaded machine, or if the
/// watch started after the write; then the clock continues.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(3);

/// Real time after the start of a watch for which the clock is stopped, so that its initial events are delivered.
const INITIAL_EVENTS: Duration = Duration::from_millis(30);

/// Duration in seconds of a request for the events that a watch missed.
const HISTORY_SECONDS: u32 = 1;

/// Name of a backup in its folder.
const SAVED: &str = "saved";

/// Maximum number of attempts while the server is not ready, and the delay between them.
const MAX_ATTEMPTS: u32 = 100;
const BETWEEN_TRIES: Duration = Duration::from_millis(100);
const TOO_MANY: u16 = 429;

/// The caller's account, for RBAC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Account {
    /// Cluster administrator.
    #[default]
    Administrator,
    /// The agents' service account.
    Agent,
    /// The operators' service account.
    Operator,
}

/// Stops the paused clock of the runtime in which it was created, until it is dropped.
pub(super) struct Hold {
    /// The other end blocks a thread of the runtime: tokio does not advance the clock while one is busy.
    _busy: blocking::Sender<()>,
}

impl Hold {
    pub(super) fn new() -> Self {
        let (busy, done) = blocking::channel();
        drop(tokio::task::spawn_blocking(move || done.recv()));
        Self { _busy: busy }
    }
}

/// A call to the real server.
pub(super) struct Ask {
    pub(super) account: Account,
    pub(super) verb: Verb,
    pub(super) resource: Arc<Resource>,
    pub(super) place: Place,
    method: Method,
    path_and_query: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Ask {
    /// A request of a client in this process.
    pub(super) fn forwarded(account: Account, request: &super::Request, parts: &Parts, body: &Bytes) -> Self {
        let mut headers = HeaderMap::new();
        for name in [header::ACCEPT, header::CONTENT_TYPE, header::USER_AGENT] {
            if let Some(value) = parts.headers.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        Self {
            account,
            verb: request.verb,
            resource: Arc::clone(&request.resource),
            place: request.place.clone(),
            method: parts.method.clone(),
            path_and_query: parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
            headers,
            body: body.clone(),
        }
    }

    /// A request of the administrator.
    fn own(verb: Verb, resource: &Arc<Resource>, place: &Place, query: &str, body: Option<&Value>) -> Self {
        let mut headers = HeaderMap::new();
        let content = match verb {
            Verb::Patch if query.contains("force=") => "application/apply-patch+yaml",
            Verb::Patch => "application/merge-patch+json",
            _ => "application/json",
        };
        headers.insert(header::CONTENT_TYPE, http::HeaderValue::from_static(content));
        let method = match verb {
            Verb::Get | Verb::List | Verb::Watch => Method::GET,
            Verb::Create => Method::POST,
            Verb::Update => Method::PUT,
            Verb::Patch => Method::PATCH,
            Verb::Delete | Verb::DeleteCollection => Method::DELETE,
        };
        Self {
            account: Account::Administrator,
            verb,
            resource: Arc::clone(resource),
            place: place.clone(),
            method,
            path_and_query: format!("{}?{query}", path(resource, place)),
            headers,
            body: body.map(|body| Bytes::from(body.to_string())).unwrap_or_default(),
        }
    }

    fn request(&self) -> io::Result<Request<Body>> {
        let mut request = Request::builder().method(self.method.clone()).uri(&self.path_and_query);
        if let Some(headers) = request.headers_mut() {
            headers.clone_from(&self.headers);
        }
        request.body(Body::from(self.body.to_vec())).map_err(io::Error::other)
    }
}

fn path(resource: &Resource, place: &Place) -> String {
    let mut path = if resource.group.is_empty() { "/api/".to_owned() } else { "/apis/".to_owned() };
    path.push_str(&resource.api_version());
    if resource.namespaced && !place.namespace.is_empty() {
        path.push_str("/namespaces/");
        path.push_str(&place.namespace);
    }
    for part in [&resource.plural, &place.name, &place.subresource] {
        if !part.is_empty() {
            path.push('/');
            path.push_str(part);
        }
    }
    path
}

/// The resource version of an object; 0 if it has none.
fn version(object: &Value) -> u64 {
    tree::text(object, "/metadata/resourceVersion").parse().unwrap_or_default()
}

/// The real server's answer.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) code: u16,
    pub(super) text: String,
    /// Whether the call changed something.
    pub(super) changed: bool,
}

impl Reply {
    /// The object, or the error.
    fn object(self) -> ApiResult<Value> {
        let body: Value = serde_json::from_str(&self.text).unwrap_or_default();
        if (200..300).contains(&self.code) {
            return Ok(body);
        }
        let message = match tree::text(&body, "/message") {
            "" => self.text.as_str(),
            message => message,
        };
        Err(ApiError::from_afar(self.code, tree::text(&body, "/reason"), message, body.get("details")))
    }
}

/// The start of a watch.
pub(super) enum Opened {
    Refused(Reply),
    /// One event per line.
    Lines(mpsc::UnboundedReceiver<Bytes>),
}

/// A completed write.
struct Written {
    storage: Storage,
    namespace: String,
    name: String,
    /// The object as it is now, or was before its deletion.
    object: Value,
    version: u64,
    deleted: bool,
}

/// An open watch whose events a write waits for.
struct Feed {
    storage: Storage,
    /// Empty for all namespaces.
    namespace: String,
    selector: Selector,
    /// Delivers events after this version.
    after: u64,
    /// By namespace and name: the last delivered version of the object, and whether that was its deletion.
    delivered: Mutex<BTreeMap<(String, String), (u64, bool)>>,
}

impl Feed {
    /// Whether it will deliver a write.
    fn covers(&self, written: &Written) -> bool {
        self.storage == written.storage
            && (self.namespace.is_empty() || self.namespace == written.namespace)
            && self.after < written.version
            && self.selector.matches(&written.object)
    }

    fn has_delivered(&self, written: &Written) -> bool {
        let delivered = self.delivered.lock().unwrap_or_else(PoisonError::into_inner);
        let last = delivered.get(&(written.namespace.clone(), written.name.clone()));
        last.is_some_and(|(version, gone)| *version >= written.version && (*gone || !written.deleted))
    }

    fn tell(&self, line: &[u8]) {
        let event: Value = serde_json::from_slice(line).unwrap_or_default();
        let text = |pointer: &str| tree::text(&event, pointer).to_owned();
        if let Ok(version) = text("/object/metadata/resourceVersion").parse() {
            let mut delivered = self.delivered.lock().unwrap_or_else(PoisonError::into_inner);
            let object = (text("/object/metadata/namespace"), text("/object/metadata/name"));
            delivered.insert(object, (version, text("/type") == "DELETED"));
        }
    }
}

/// The database of a real server, for backups.
pub trait Database: Send + Sync {
    /// Writes a backup to a folder that must not exist yet. The server continues.
    ///
    /// # Errors
    /// The backup failed, or the server does not continue.
    fn back_up(&self, to: &Path) -> anyhow::Result<()>;

    /// Restores a backup from a folder. The server is restarted.
    ///
    /// # Errors
    /// The restore failed, or the server does not start.
    fn restore(&self, from: &Path) -> anyhow::Result<()>;
}

/// The connection to a real server.
pub struct Upstream {
    /// With the real clock.
    runtime: Runtime,
    clients: BTreeMap<Account, kube::Client>,
    /// Held during a write.
    writing: tokio::sync::Mutex<()>,
    feeds: Mutex<Vec<Arc<Feed>>>,
    /// Incremented with every event of a watch.
    news: watch::Sender<u64>,
    /// The server's resource version at the start of the current script.
    began: AtomicU64,
    /// Whether an administrator has written a CRD since the last query.
    redefined: AtomicBool,
    database: Arc<dyn Database>,
}

impl Upstream {
    /// Connects with a kubeconfig for each account. `database` is the server's.
    ///
    /// # Errors
    /// A kubeconfig is invalid.
    pub fn new(kubeconfigs: &[(Account, String)], database: Arc<dyn Database>) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let mut clients = BTreeMap::new();
        for (account, text) in kubeconfigs {
            let client = runtime.block_on(async {
                let kubeconfig = kube::config::Kubeconfig::from_yaml(text)?;
                let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await?;
                // Errors of the server must reach the client.
                config.default_retry = false;
                anyhow::Ok(kube::Client::try_from(config)?)
            })?;
            clients.insert(*account, client);
        }
        Ok(Self {
            runtime,
            clients,
            writing: tokio::sync::Mutex::new(()),
            feeds: Mutex::new(Vec::new()),
            news: watch::Sender::new(0),
            began: AtomicU64::new(0),
            redefined: AtomicBool::new(false),
            database,
        })
    }

    /// Whether a script has written a CRD since the last query, so that it must be reinstalled for the next script.
    pub fn has_been_redefined(&self) -> bool {
        self.redefined.swap(false, Ordering::Relaxed)
    }

    fn feeds(&self) -> MutexGuard<'_, Vec<Arc<Feed>>> {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a client's call. The clock continues when the answer has arrived and the watches have delivered the
    /// write, even if the client has gone away.
    pub(super) fn call(self: &Arc<Self>, ask: Ask, hold: Hold) -> oneshot::Receiver<io::Result<Reply>> {
        let (answer, answered) = oneshot::channel();
        let this = Arc::clone(self);
        self.runtime.spawn(async move {
            match this.perform(&ask).await {
                Ok((reply, written)) => {
                    // The client may have gone away.
                    let _ = answer.send(Ok(reply));
                    this.settle(written.as_ref()).await;
                }
                Err(error) => drop(answer.send(Err(error))),
            }
            drop(hold);
        });
        answered
    }

    /// Opens a watch for a client.
    pub(super) fn open(
        self: &Arc<Self>,
        ask: Ask,
        selector: Selector,
        after: u64,
        hold: Hold,
    ) -> oneshot::Receiver<io::Result<Opened>> {
        let (answer, answered) = oneshot::channel();
        let this = Arc::clone(self);
        let feed = Arc::new(Feed {
            storage: ask.resource.storage.clone(),
            namespace: ask.place.namespace.clone(),
            selector,
            after,
            delivered: Mutex::default(),
        });
        // Register it before the watch starts, so that writes in between are waited for.
        self.feeds().push(Arc::clone(&feed));
        self.runtime.spawn(async move {
            this.follow(&ask, &feed, answer, hold).await;
            this.feeds().retain(|other| !Arc::ptr_eq(other, &feed));
            this.news.send_modify(|count| *count += 1);
        });
        answered
    }

    async fn follow(&self, ask: &Ask, feed: &Feed, answer: oneshot::Sender<io::Result<Opened>>, hold: Hold) {
        let response = match self.send(ask).await {
            Ok(response) if response.status().is_success() => response,
            Ok(response) => {
                let reply = read_reply(response).await.map(|(code, text)| Reply { code, text, changed: false });
                return drop(answer.send(reply.map(Opened::Refused)));
            }
            Err(error) => return drop(answer.send(Err(error))),
        };
        let (lines, receiver) = mpsc::unbounded_channel();
        if answer.send(Ok(Opened::Lines(receiver))).is_err() {
            return;
        }
        let mut beginning = std::pin::pin!(sleep(INITIAL_EVENTS));
        let mut hold = Some(hold);
        let mut chunks = response.into_body().into_data_stream();
        let mut rest = Vec::new();
        loop {
            let chunk = tokio::select! {
                chunk = chunks.next() => chunk,
                () = &mut beginning, if hold.is_some() => { hold = None; continue }
                () = lines.closed() => return,
            };
            let Some(Ok(chunk)) = chunk else { return };
            rest.extend_from_slice(&chunk);
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                feed.tell(&line);
                // Whether the client still listens is checked above.
                let _ = lines.send(Bytes::from(line));
            }
            self.news.send_modify(|count| *count += 1);
        }
    }

    async fn send(&self, ask: &Ask) -> io::Result<http::Response<Body>> {
        let client = self
            .clients
            .get(&ask.account)
            .ok_or_else(|| io::Error::other("there is no kubeconfig for this account"))?;
        client.send(ask.request()?).await.map_err(io::Error::other)
    }

    async fn perform(&self, ask: &Ask) -> io::Result<(Reply, Option<Written>)> {
        let dry_run = ask.path_and_query.contains("dryRun=");
        if !ask.verb.is_write() || ask.verb == Verb::DeleteCollection || dry_run {
            let (code, text) = read_reply(self.send(ask).await?).await?;
            return Ok((Reply { code, text, changed: false }, None));
        }
        let _one = self.writing.lock().await;
        // If a write names the version that it replaces, and succeeds, the previous version need not be read.
        let named = version(&serde_json::from_slice(&ask.body).unwrap_or_default());
        let look = named == 0 && !ask.place.name.is_empty();
        let before = if look { self.look(ask).await? } else { None };
        let (code, text) = read_reply(self.send(ask).await?).await?;
        if !(200..300).contains(&code) {
            return Ok((Reply { code, text, changed: false }, None));
        }
        let after: Value = serde_json::from_str(&text).unwrap_or_default();
        let known = before.as_ref().map_or(named, version);
        let deleted = ask.verb == Verb::Delete && tree::text(&after, "/kind") == "Status";
        let (object, now) = match before {
            // The answer to a delete does not have the version, which is a later one.
            Some(before) if deleted => (before, known + 1),
            _ => (after.clone(), version(&after)),
        };
        let changed = now != known;
        let written = Written {
            storage: ask.resource.storage.clone(),
            namespace: tree::text(&object, "/metadata/namespace").to_owned(),
            name: tree::text(&object, "/metadata/name").to_owned(),
            object,
            version: now,
            deleted,
        };
        Ok((Reply { code, text, changed }, changed.then_some(written)))
    }

    /// The object before a write.
    async fn look(&self, ask: &Ask) -> io::Result<Option<Value>> {
        let place = Place { subresource: String::new(), ..ask.place.clone() };
        let look = Ask::own(Verb::Get, &ask.resource, &place, "", None);
        let (code, text) = read_reply(self.send(&look).await?).await?;
        Ok((code == 200).then(|| serde_json::from_str(&text).unwrap_or_default()))
    }

    /// Waits until the watches have delivered a write.
    async fn settle(&self, written: Option<&Written>) {
        let Some(written) = written else { return };
        let mut news = self.news.subscribe();
        let all_have_delivered = async {
            while self.feeds().iter().any(|feed| feed.covers(written) && !feed.has_delivered(written)) {
                if news.changed().await.is_err() {
                    return;
                }
            }
        };
        if timeout(DELIVERY_TIMEOUT, all_have_delivered).await.is_err() {
            tracing::warn!(resource = &*written.storage.plural, name = written.name, "a watch delivered a write late");
        }
    }

    /// Runs a future to completion while the caller's thread, and so its runtime, is blocked.
    fn block<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> ApiResult<T> {
        let (answer, answered) = blocking::channel();
        self.runtime.spawn(async move { answer.send(task.await) });
        answered.recv().map_err(|error| ApiError::internal(error.to_string()))
    }

    /// Executes a request of the administrator, and waits for its effects.
    fn administer(self: &Arc<Self>, ask: Ask) -> ApiResult<Value> {
        if ask.verb.is_write() && &*ask.resource.plural == "customresourcedefinitions" {
            self.redefined.store(true, Ordering::Relaxed);
        }
        let this = Arc::clone(self);
        let reply = self.block(async move {
            let mut tries = 0;
            loop {
                let (reply, written) = this.perform(&ask).await?;
                this.settle(written.as_ref()).await;
                // A kind whose definition was just changed is not served for a moment.
                if reply.code != TOO_MANY || tries == MAX_ATTEMPTS {
                    return Ok::<_, io::Error>(reply);
                }
                tries += 1;
                sleep(BETWEEN_TRIES).await;
            }
        })?;
        reply.map_err(|error| ApiError::internal(error.to_string()))?.object()
    }

    pub(super) fn create(self: &Arc<Self>, resource: &Arc<Resource>, object: &Value) -> ApiResult<Value> {
        let place = Place {
            namespace: super::namespace_for(resource, tree::text(object, "/metadata/namespace")),
            name: String::new(),
            subresource: String::new(),
        };
        let created = self.administer(Ask::own(Verb::Create, resource, &place, "", Some(object)))?;
        let name = tree::text(&created, "/metadata/name").to_owned();
        let place = Place { name, ..place };
        self.with_status(resource, &place, object, created)
    }

    pub(super) fn apply(self: &Arc<Self>, resource: &Arc<Resource>, object: &Value) -> ApiResult<Value> {
        let mut place = Place {
            namespace: super::namespace_for(resource, tree::text(object, "/metadata/namespace")),
            name: tree::text(object, "/metadata/name").to_owned(),
            subresource: String::new(),
        };
        let query = format!("fieldManager={TEST_MANAGER}&force=true");
        let applied = self.administer(Ask::own(Verb::Patch, resource, &place, &query, Some(object)))?;
        if !resource.status_subresource || object.get("status").is_none() {
            return Ok(applied);
        }
        "status".clone_into(&mut place.subresource);
        self.administer(Ask::own(Verb::Patch, resource, &place, &query, Some(object)))
    }

    pub(super) fn patch(self: &Arc<Self>, resource: &Arc<Resource>, place: &Place, patch: &Value) -> ApiResult<Value> {
        let patched = self.administer(Ask::own(Verb::Patch, resource, place, "", Some(patch)))?;
        self.with_status(resource, place, patch, patched)
    }

    /// Writes the status of `from`, if it is a subresource.
    fn with_status(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        place: &Place,
        from: &Value,
        written: Value,
    ) -> ApiResult<Value> {
        let Some(status) = from.get("status").filter(|_| resource.status_subresource) else { return Ok(written) };
        let place = Place { subresource: "status".to_owned(), ..place.clone() };
        self.administer(Ask::own(Verb::Patch, resource, &place, "", Some(&json!({"status": status}))))
    }

    pub(super) fn delete(self: &Arc<Self>, resource: &Arc<Resource>, place: &Place) -> ApiResult<()> {
        self.administer(Ask::own(Verb::Delete, resource, place, "", None)).map(drop)
    }

    pub(super) fn get(self: &Arc<Self>, resource: &Arc<Resource>, place: &Place) -> ApiResult<Value> {
        self.administer(Ask::own(Verb::Get, resource, place, "", None))
    }

    pub(super) fn list(self: &Arc<Self>, resource: &Arc<Resource>) -> ApiResult<Vec<Value>> {
        let mut list = self.administer(Ask::own(Verb::List, resource, &everywhere(), "", None))?;
        let Some(Value::Array(mut items)) = list.get_mut("items").map(Value::take) else { return Ok(Vec::new()) };
        for item in &mut items {
            let map = tree::as_map(item);
            map.insert("apiVersion".to_owned(), Value::String(resource.api_version()));
            map.insert("kind".to_owned(), Value::String(resource.kind.clone()));
        }
        Ok(items)
    }

    /// The versions of an object since the script started.
    pub(super) fn history(self: &Arc<Self>, resource: &Arc<Resource>, place: &Place) -> ApiResult<Vec<Option<Value>>> {
        let began = self.began.load(Ordering::Relaxed);
        let query = format!(
            "watch=true&resourceVersion={began}&timeoutSeconds={HISTORY_SECONDS}&fieldSelector=metadata.name%3D{}",
            place.name
        );
        let all = Place { name: String::new(), ..place.clone() };
        let ask = Ask::own(Verb::Watch, resource, &all, &query, None);
        let this = Arc::clone(self);
        let reply = self.block(async move { read_reply(this.send(&ask).await?).await })?;
        let (code, text) = reply.map_err(|error| ApiError::internal(error.to_string()))?;
        if code != 200 {
            return Err(Reply { code, text, changed: false }.object().err().unwrap_or_else(ApiError::no_such_path));
        }
        let events = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        Ok(events
            .filter_map(|mut event| match tree::text(&event, "/type") {
                "ADDED" | "MODIFIED" => Some(Some(event.get_mut("object")?.take())),
                "DELETED" => Some(None),
                _ => None,
            })
            .collect())
    }

    /// Backs up the server. Writes and the clock are stopped meanwhile.
    pub(super) fn back_up(self: &Arc<Self>) -> anyhow::Result<tempfile::TempDir> {
        let folder = tempfile::Builder::new().prefix("cistern-backup-").tempdir()?;
        let to = folder.path().join(SAVED);
        self.with_database(move |database| database.back_up(&to))?;
        Ok(folder)
    }

    /// Restores a backup. All watches end.
    pub(super) fn restore(self: &Arc<Self>, backup: &tempfile::TempDir) -> anyhow::Result<()> {
        let from = backup.path().join(SAVED);
        self.with_database(move |database| database.restore(&from))
    }

    fn with_database(
        self: &Arc<Self>,
        task: impl FnOnce(&dyn Database) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<()> {
        let this = Arc::clone(self);
        let outcome = self.block(async move {
            let _one = this.writing.lock().await;
            let database = Arc::clone(&this.database);
            tokio::task::spawn_blocking(move || task(&*database)).await
        });
        outcome.map_err(|error| anyhow::anyhow!("{error}"))??
    }

    /// Starts a script: objects of earlier ones are deleted.
    pub(super) fn begin(self: &Arc<Self>, resources: &[Arc<Resource>]) -> ApiResult<()> {
        for resource in resources {
            for object in self.list(resource)? {
                let text = |pointer: &str| tree::text(&object, pointer).to_owned();
                let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
                // Others are the server's own.
                if ["configmaps", "leases"].contains(&resource.plural.as_str()) && !name.starts_with("cistern") {
                    continue;
                }
                match self.delete(resource, &Place { namespace, name, subresource: String::new() }) {
                    Err(error) if error.code != 404 => return Err(error),
                    _ => {}
                }
            }
        }
        if let Some(resource) = resources.first() {
            let list = self.administer(Ask::own(Verb::List, resource, &everywhere(), "limit=1", None))?;
            let version = tree::text(&list, "/metadata/resourceVersion").parse().unwrap_or_default();
            self.began.store(version, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn everywhere() -> Place {
    Place { namespace: String::new(), name: String::new(), subresource: String::new() }
}

async fn read_reply(response: http::Response<Body>) -> io::Result<(u16, String)> {
    let code = response.status().as_u16();
    let body = http_body_util::Limited::new(response.into_body(), 16 * BODY_LIMIT);
    let bytes = body.collect().await.map_err(io::Error::other)?.to_bytes();
    Ok((code, String::from_utf8_lossy(&bytes).into_owned()))
}
