//! A small Kubernetes API server, for tests and for the demo.
//!
//! ```text
//!  kube::Client ── tower service ─┐                                     ┌─ store    objects, revisions, history
//!                                 ├─ links, faults, record ─ request ─ state ─ fields   managedFields, apply
//!  kubectl, agents ── HTTP ───────┘                       │     │       └─ schema   merging, pruning, checks
//!                                                         │  watch ◄──┘
//!                                                         └─ or upstream ── a real kube-apiserver
//! ```
//!
//! `state` is a synchronous state machine under one lock; the asynchronous parts (waiting, watches, HTTP) are around it.
//! Time is tokio's, so that with a paused clock ages, timeouts and bookmarks are exact and cost nothing.
//!
//! # Limits
//!
//! `tests/servers/requests` compares it with kube-apiserver: both must answer the requests there alike, in code, reason,
//! invalid fields and objects. Messages of errors and `managedFields` are not compared. Every fact modelled here needs a
//! line there. Not modelled:
//!
//! * **Permissions.** Every client is allowed everything; there is no authentication and no TLS. On a real server the
//!   scripts run with the chart's permissions ([`ApiServer::in_front_of`]).
//! * **Schema rules** beyond type, `required`, `enum`, bounds and `format: cidr`: `pattern`, other formats, `oneOf`, CEL,
//!   defaults of custom resources. Built-in kinds are checked for types, Nodes for their pod CIDRs, ConfigMaps for their keys
//!   and immutability, new events for their fields; they get no defaults (no cluster IPs, no node ports, no taints).
//! * **Controllers.** There is no kubelet, scheduler, node lifecycle or endpoint controller. Dependents are collected within
//!   the write that orphaned them; a real cluster takes seconds. Foreground deletion is treated as background. A Namespace
//!   is deleted with all its content at once, ignoring the content's finalizers.
//! * **Consistency between servers.** There is one; a lagging watch cache is only modelled as late
//!   watch events. Real latency, real throttling by priority and fairness, and sizes (1.5 MB per object) are not.
//! * **Webhooks and conversion** between versions of a custom resource: only `apiVersion` differs.
//! * **`managedFields` sent by clients** are ignored; the lists' `.` markers for maps are not kept.

mod builtin;
mod calls;
mod clock;
mod definition;
mod discovery;
mod error;
mod faults;
mod fields;
mod manifest;
mod metadata;
mod patch;
mod request;
mod resource;
mod schema;
mod selector;
mod serve;
mod state;
mod store;
pub(crate) mod table;
mod tree;
mod upstream;
mod watch;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Body;
use bytes::Bytes;
use http::request::Parts;
use http::{Response, header};
use http_body_util::{BodyExt as _, Limited};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::sleep;

pub use calls::{Call, Verb};
pub use clock::Clock;
pub use error::ApiError;
pub use faults::{CallMatch, Fault};
pub use manifest::{ManifestError, parse_manifest};
pub use serve::{kubeconfig, serve};
pub use upstream::{Account, Database, Upstream};

use error::ApiResult;
use faults::{Faults, REQUEST_TIMEOUT};
use patch::PatchKind;
use request::{Form, Parameters, Request};
use resource::Resource;
use selector::Selector;
use state::{DeleteOptions, Deleted, Place, State, WriteOptions};
use store::Key;
use upstream::{Ask, Hold, Opened};
use watch::Watch;

/// The largest request body, in bytes; kube-apiserver's limit.
const BODY_LIMIT: usize = 3 * 1024 * 1024;

/// Number of changes kept for watches to resume from.
const KEPT_CHANGES: usize = 20_000;

/// The field manager of a test's own writes.
const TEST_MANAGER: &str = "kubectl";

/// Initial configuration of a server.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Seed of UIDs, generated names and random faults: equal seeds and equal calls give equal runs.
    pub seed: u64,
    /// The server's clock at the start.
    pub epoch: Timestamp,
}

impl Default for Options {
    /// Seed 1, at noon of the first day of 2026.
    fn default() -> Self {
        let epoch = Timestamp::from_second(1_767_268_800).unwrap_or(Timestamp::UNIX_EPOCH);
        Self { seed: 1, epoch }
    }
}

/// State of the connection between a client and the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// Requests arrive.
    #[default]
    Up,
    /// Connections are refused, open ones are reset.
    Refused,
    /// Packets are lost: calls and watches wait until the link is up again.
    Silent,
    /// Packets are delayed: a request of a client in this process arrives when the link is up again, even if the client
    /// has given up on it; watches deliver nothing. To other processes, a paused process looks like this.
    Held,
}

/// The caller: its name in the record of calls, and the number of a client in this process.
#[derive(Clone, Debug)]
struct Caller {
    name: String,
    id: Option<u64>,
    /// The account whose permissions apply on a real server.
    account: Account,
}

/// All links to the server, and the number of its restarts.
#[derive(Clone, Debug, Default)]
struct Links {
    all: Link,
    clients: BTreeMap<String, Link>,
    /// Numbers of clients whose process was killed.
    dead: BTreeSet<u64>,
    /// Number of restarts; open watches end with a restart.
    life: u64,
}

impl Links {
    fn of(&self, caller: &Caller) -> Link {
        match self.all {
            _ if caller.id.is_some_and(|id| self.dead.contains(&id)) => Link::Refused,
            Link::Up => self.clients.get(&caller.name).copied().unwrap_or_default(),
            all => all,
        }
    }
}

struct Shared {
    state: Mutex<State>,
    faults: Mutex<Faults>,
    calls: Mutex<Vec<Call>>,
    /// The store's revision, which watches wait on.
    revision: tokio::sync::watch::Sender<u64>,
    links: tokio::sync::watch::Sender<Links>,
    clock: Clock,
    /// The number of the next client in this process.
    next_client: AtomicU64,
    /// Answers instead of `state`, which then only has the kinds.
    upstream: Option<Arc<Upstream>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_calls(&self) -> MutexGuard<'_, Vec<Call>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lifetime of a process with a client.
#[derive(Clone)]
pub struct Lifeline {
    shared: Arc<Shared>,
    id: u64,
}

impl Lifeline {
    /// Kills the process, as seen by the server: none of its calls arrives any more, its watches break.
    pub fn cut(&self) {
        self.shared.links.send_modify(|links| {
            links.dead.insert(self.id);
        });
    }
}

/// Increment of the resource version after a snapshot.
const LOST_REVISIONS: u64 = 100_000;

/// The server's whole state at one moment, to restore later, as an etcd snapshot of a real cluster.
pub struct Snapshot(Saved);

enum Saved {
    Here(Box<State>),
    /// Copy of a real server's database.
    Folder(tempfile::TempDir),
}

/// A running API server. Clones refer to the same server.
#[derive(Clone)]
pub struct ApiServer {
    shared: Arc<Shared>,
}

/// A recorded write.
#[derive(Clone, Debug)]
pub struct ObjectChange {
    /// Plural name of the resource.
    pub resource: String,
    /// Name of the object.
    pub name: String,
    /// The object before; `None` if it was created.
    pub before: Option<Arc<Value>>,
    /// The object after; `None` if it was deleted.
    pub after: Option<Arc<Value>>,
}

/// An answer before it becomes HTTP.
enum Answer {
    /// Status and text.
    Json(u16, String),
    Events(Box<Watch>),
}

impl ApiServer {
    /// A server with the initial namespaces of every cluster only. Faults are off.
    pub fn new(options: Options) -> Self {
        Self::build(options, None)
    }

    /// Links, faults and record of calls in front of a real server that has the objects. `definitions` are those of the
    /// kinds that it serves in addition to the built-in ones. Objects of earlier runs are deleted: Nodes, objects of
    /// these kinds, events, and the project's Leases and ConfigMaps.
    ///
    /// # Errors
    /// An error of the real server.
    pub fn in_front_of(upstream: &Arc<Upstream>, options: Options, definitions: &[Value]) -> Result<Self, ApiError> {
        let front = Self::build(options, Some(Arc::clone(upstream)));
        for definition in definitions {
            front.write(definition, |state, resource, place, options| {
                state.create(resource, place, definition.clone(), options)
            })?;
        }
        let of_definitions = definitions.iter().map(|definition| tree::text(definition, "/spec/names/plural"));
        let plurals = ["nodes", "events", "configmaps", "leases"].into_iter().chain(of_definitions);
        let resources = {
            let state = front.shared.lock();
            plurals.map(|plural| find_named(&state, plural)).collect::<ApiResult<Vec<_>>>()?
        };
        upstream.begin(&resources)?;
        Ok(front)
    }

    fn build(options: Options, upstream: Option<Arc<Upstream>>) -> Self {
        let clock = Clock::starting_at(options.epoch);
        let state = State::new(clock, options.seed, KEPT_CHANGES);
        let shared = Shared {
            revision: tokio::sync::watch::Sender::new(state.store.revision()),
            state: Mutex::new(state),
            // Separate random numbers for faults, so that enabling them does not change UIDs.
            faults: Mutex::new(Faults::new(options.seed ^ 0x5eed_fa17)),
            calls: Mutex::new(Vec::new()),
            links: tokio::sync::watch::Sender::new(Links::default()),
            clock,
            next_client: AtomicU64::new(0),
            upstream,
        };
        Self { shared: Arc::new(shared) }
    }

    /// A client in this process. `name` identifies it in the record of calls, faults and links.
    ///
    /// Requires a tokio runtime. No network is involved, so it works with a paused clock.
    pub fn client_as(&self, name: &str) -> kube::Client {
        self.mortal_client_as(name, Account::Administrator).0
    }

    /// As [`Self::client_as`], with a handle to kill the client's process. `account` applies on a real server.
    pub fn mortal_client_as(&self, name: &str, account: Account) -> (kube::Client, Lifeline) {
        let id = self.shared.next_client.fetch_add(1, Ordering::Relaxed);
        let (server, caller) = (self.clone(), Caller { name: name.to_owned(), id: Some(id), account });
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (server, caller) = (server.clone(), caller.clone());
            async move {
                let (parts, body) = request.into_parts();
                let body = read_body(body).await?;
                if server.shared.links.borrow().of(&caller) != Link::Held {
                    return server.answer(Some(caller), &parts, &body).await;
                }
                // In a separate task the request arrives even if the client drops the call.
                let sent = tokio::spawn(async move { server.answer(Some(caller), &parts, &body).await });
                sent.await.map_err(io::Error::other)?
            }
        });
        (kube::Client::new(service, "default"), Lifeline { shared: Arc::clone(&self.shared), id })
    }

    /// Whether a real server has the objects.
    pub fn is_real(&self) -> bool {
        self.shared.upstream.is_some()
    }

    /// Makes existing objects older than new ones, by their creation timestamps: a real server takes these from the
    /// wall clock, in whole seconds.
    pub fn grow_older(&self) {
        if self.is_real() {
            std::thread::sleep(std::time::Duration::from_millis(1_050));
        }
    }

    /// The server's clock.
    pub fn clock(&self) -> Clock {
        self.shared.clock
    }

    /// Injects random faults, derived from the seed, into this percentage of all calls, except those for the resources
    /// in `spared` (plural names).
    pub fn set_faults(&self, percent: u8, spared: &[&str]) {
        self.shared.lock_faults().set_rate(percent, spared);
    }

    /// Injects this fault into the next `times` calls that match.
    pub fn ask_fault(&self, calls: CallMatch, fault: Fault, times: usize) {
        self.shared.lock_faults().ask(calls, fault, times);
    }

    /// Removes injected faults that have not matched a call yet.
    pub fn clear_faults(&self) {
        self.shared.lock_faults().clear();
    }

    /// Sets the state of all clients' links.
    pub fn set_link(&self, link: Link) {
        self.shared.links.send_modify(|links| links.all = link);
    }

    /// Sets the state of one client's link, by the name given to [`Self::client_as`].
    pub fn set_client_link(&self, client: &str, link: Link) {
        self.shared.links.send_modify(|links| {
            links.clients.insert(client.to_owned(), link);
        });
    }

    /// All calls to resources so far, in the order of their answers.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.lock_calls().clone()
    }

    /// Forgets the calls so far.
    pub fn clear_calls(&self) {
        self.shared.lock_calls().clear();
    }

    /// Drops the history of changes: watches from before now get 410.
    pub fn compact(&self) {
        self.shared.lock().store.compact();
    }

    /// The current resource version.
    pub fn revision(&self) -> u64 {
        self.shared.lock().store.revision()
    }

    /// The writes after a resource version, oldest first, without links, faults and the record of calls.
    ///
    /// # Errors
    /// 410 if some of them have been dropped.
    pub fn changes_after(&self, revision: u64) -> Result<Vec<ObjectChange>, ApiError> {
        let state = self.shared.lock();
        let changes = state.store.changes_after(revision)?;
        Ok(changes
            .map(|change| ObjectChange {
                resource: change.key.storage.plural.to_string(),
                name: change.key.name.clone(),
                before: change.before.clone(),
                after: (!change.deleted).then(|| Arc::clone(&change.after)),
            })
            .collect())
    }

    /// The current state. Afterwards the resource version jumps, as the rest of a cluster writes, too: a version from
    /// after the snapshot is not reused soon after a restore.
    ///
    /// # Errors
    /// A real server's database cannot be copied, or does not restart.
    pub fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let saved = match &self.shared.upstream {
            Some(upstream) => Saved::Folder(upstream.back_up()?),
            None => {
                let mut state = self.shared.lock();
                let saved = state.clone();
                state.store.skip(LOST_REVISIONS);
                self.publish(state);
                Saved::Here(Box::new(saved))
            }
        };
        Ok(Snapshot(saved))
    }

    /// Restores an older state, as from an etcd backup: later writes are lost, the resource version continues from the
    /// older one, and all watches end. UIDs assigned since are not reused.
    ///
    /// # Errors
    /// A real server does not start with it, or the snapshot is of another server.
    pub fn restore_from(&self, snapshot: &Snapshot) -> anyhow::Result<()> {
        match (&snapshot.0, &self.shared.upstream) {
            (Saved::Folder(folder), Some(upstream)) => upstream.restore(folder),
            (Saved::Here(saved), None) => {
                let mut state = self.shared.lock();
                let lost = std::mem::replace(&mut *state, State::clone(saved));
                state.keep_drawing_from(lost);
                state.store.compact();
                let revision = state.store.revision();
                drop(state);
                self.shared.links.send_modify(|links| links.life += 1);
                self.shared.revision.send_replace(revision);
                Ok(())
            }
            _ => anyhow::bail!("the snapshot is of another server"),
        }
    }

    /// Creates an object together with its status, without links, faults and the record of calls.
    ///
    /// # Errors
    /// As for a client.
    pub fn create(&self, object: &Value) -> Result<Value, ApiError> {
        if let Some(upstream) = &self.shared.upstream {
            return upstream.create(&self.kind_of(object)?, object);
        }
        self.write(object, |state, resource, place, options| {
            let created = state.create(resource, place, object.clone(), options)?;
            let Some(status) = object.get("status").filter(|_| resource.status_subresource) else { return Ok(created) };
            let place = Place {
                namespace: place.namespace.clone(),
                name: tree::text(&created, "/metadata/name").to_owned(),
                subresource: "status".to_owned(),
            };
            state.patch(resource, &place, PatchKind::Merge, &json!({"status": status}), options)
        })
    }

    /// Applies an object, including its status, forcing conflicts, without links, faults and the record of calls.
    ///
    /// # Errors
    /// As for a client.
    pub fn apply(&self, object: &Value) -> Result<Value, ApiError> {
        if let Some(upstream) = &self.shared.upstream {
            return upstream.apply(&self.kind_of(object)?, object);
        }
        self.write(object, |state, resource, place, options| {
            let options = WriteOptions { force: true, ..options.clone() };
            let place = Place { name: tree::text(object, "/metadata/name").to_owned(), ..place.clone() };
            let applied = state.patch(resource, &place, PatchKind::Apply, object, &options)?;
            if !resource.status_subresource || object.get("status").is_none() {
                return Ok(applied);
            }
            let place = Place { subresource: "status".to_owned(), ..place };
            state.patch(resource, &place, PatchKind::Apply, object, &options)
        })
    }

    fn kind_of(&self, object: &Value) -> ApiResult<Arc<Resource>> {
        let state = self.shared.lock();
        let found = state.registry.find_kind(tree::text(object, "/apiVersion"), tree::text(object, "/kind"));
        found.ok_or_else(ApiError::no_such_path)
    }

    fn write(
        &self,
        object: &Value,
        write: impl FnOnce(&mut State, &Resource, &Place, &WriteOptions) -> ApiResult<Arc<Value>>,
    ) -> Result<Value, ApiError> {
        let resource = self.kind_of(object)?;
        let mut state = self.shared.lock();
        let place = Place {
            namespace: namespace_for(&resource, tree::text(object, "/metadata/namespace")),
            name: String::new(),
            subresource: String::new(),
        };
        let options = WriteOptions { manager: TEST_MANAGER.to_owned(), ..WriteOptions::default() };
        let written = write(&mut state, &resource, &place, &options);
        self.publish(state);
        written.map(|object| resource.present(&object).into_owned())
    }

    /// Changes an object by a merge patch; the status is patched separately. Without links, faults and the record of
    /// calls.
    ///
    /// # Errors
    /// As for a client.
    pub fn patch(&self, kind: &str, namespace: &str, name: &str, patch: &Value) -> Result<(), ApiError> {
        let mut state = self.shared.lock();
        let resource = find_named(&state, kind)?;
        let mut place =
            Place { namespace: namespace_for(&resource, namespace), name: name.to_owned(), subresource: String::new() };
        if let Some(upstream) = &self.shared.upstream {
            return upstream.patch(&resource, &place, patch).map(drop);
        }
        let options = WriteOptions { manager: TEST_MANAGER.to_owned(), ..WriteOptions::default() };
        let mut patched = state.patch(&resource, &place, PatchKind::Merge, patch, &options);
        if patched.is_ok() && resource.status_subresource && patch.get("status").is_some() {
            place.subresource = "status".to_owned();
            patched = state.patch(&resource, &place, PatchKind::Merge, patch, &options);
        }
        self.publish(state);
        patched.map(drop)
    }

    /// Deletes an object, without links, faults and the record of calls. `kind` is a name as for `kubectl`.
    ///
    /// # Errors
    /// As for a client.
    pub fn delete(&self, kind: &str, namespace: &str, name: &str) -> Result<(), ApiError> {
        let mut state = self.shared.lock();
        let resource = find_named(&state, kind)?;
        let namespace = namespace_for(&resource, namespace);
        if let Some(upstream) = &self.shared.upstream {
            return upstream.delete(&resource, &Place { namespace, name: name.to_owned(), subresource: String::new() });
        }
        let deleted = state.delete(&resource, &namespace, name, &DeleteOptions::default());
        self.publish(state);
        deleted.map(drop)
    }

    /// An object, without links, faults and the record of calls. `kind` is a name as for `kubectl`: plural, singular or
    /// short, with or without its group.
    ///
    /// # Errors
    /// As for a client.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Result<Value, ApiError> {
        let state = self.shared.lock();
        let resource = find_named(&state, kind)?;
        let namespace = namespace_for(&resource, namespace);
        if let Some(upstream) = &self.shared.upstream {
            return upstream.get(&resource, &Place { namespace, name: name.to_owned(), subresource: String::new() });
        }
        let object = state.get(&resource, &namespace, name)?;
        Ok(resource.present(&object).into_owned())
    }

    /// All objects of a kind, ordered by namespace and name, without links, faults and the record of calls.
    ///
    /// # Errors
    /// 404 for an unknown kind.
    pub fn list(&self, kind: &str) -> Result<Vec<Value>, ApiError> {
        let state = self.shared.lock();
        let resource = find_named(&state, kind)?;
        if let Some(upstream) = &self.shared.upstream {
            return upstream.list(&resource);
        }
        Ok(state.store.list(&resource.storage, None).map(|(_, object)| resource.present(object).into_owned()).collect())
    }

    /// The recorded versions of an object, oldest first; `None` for a deletion.
    ///
    /// # Errors
    /// 404 for an unknown kind.
    pub fn history(&self, kind: &str, namespace: &str, name: &str) -> Result<Vec<Option<Value>>, ApiError> {
        let state = self.shared.lock();
        let resource = find_named(&state, kind)?;
        let namespace = namespace_for(&resource, namespace);
        if let Some(upstream) = &self.shared.upstream {
            return upstream
                .history(&resource, &Place { namespace, name: name.to_owned(), subresource: String::new() });
        }
        let key = State::key(&resource, &namespace, name);
        let versions = state.store.history(&key);
        Ok(versions.map(|version| version.map(|object| resource.present(object).into_owned())).collect())
    }

    /// Notifies watches of the writes under this lock.
    fn publish(&self, state: MutexGuard<'_, State>) {
        let revision = state.store.revision();
        drop(state);
        self.shared.revision.send_if_modified(|seen| std::mem::replace(seen, revision) != revision);
    }

    /// Answers an HTTP request. Without a `caller`, the `User-Agent` names it.
    ///
    /// # Errors
    /// The connection was refused or reset, so there is no answer.
    async fn answer(&self, caller: Option<Caller>, parts: &Parts, body: &Bytes) -> io::Result<Response<Body>> {
        let parsed = {
            let state = self.shared.lock();
            request::parse(&state.registry, parts)
        };
        let agent = parsed.as_ref().map(|request| request.user_agent.clone()).unwrap_or_default();
        let caller = caller.unwrap_or(Caller { name: agent, id: None, account: Account::default() });
        self.arrive(&caller).await?;
        match parsed {
            Ok(request) => self.answer_call(&caller, &request, parts, body).await,
            Err(error) => Ok(self.answer_other(parts, &error)),
        }
    }

    /// Waits until the link is up.
    async fn arrive(&self, caller: &Caller) -> io::Result<()> {
        let mut links = self.shared.links.subscribe();
        loop {
            match links.borrow_and_update().of(caller) {
                Link::Up => return Ok(()),
                Link::Refused => return Err(io::ErrorKind::ConnectionRefused.into()),
                Link::Silent | Link::Held => {}
            }
            links.changed().await.map_err(io::Error::other)?;
        }
    }

    /// Discovery, health and unknown paths.
    fn answer_other(&self, parts: &Parts, error: &ApiError) -> Response<Body> {
        let path = parts.uri.path();
        if let "/healthz" | "/livez" | "/readyz" = path {
            return respond(200, "text/plain", Body::from("ok"));
        }
        if path == "/openapi/v2" {
            // An empty document of this protobuf type, so that kubectl validates nothing itself.
            return respond(200, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf", Body::empty());
        }
        match discovery::answer(&self.shared.lock().registry, path) {
            Some(answer) => respond_json(200, &answer),
            None => respond_error(error),
        }
    }

    /// A call to a resource, with its fault, added to the record.
    async fn answer_call(
        &self,
        caller: &Caller,
        request: &Request,
        parts: &Parts,
        body: &Bytes,
    ) -> io::Result<Response<Body>> {
        let Request { verb, resource, place, patch, query, .. } = request;
        let manager = Some(query.text("fieldManager")).filter(|text| !text.is_empty());
        // An apply must name its field manager; other writes default to the client's name.
        let manager = match patch {
            Some(PatchKind::Apply) => manager.unwrap_or_default(),
            _ => manager.unwrap_or(&caller.name),
        };
        let mut call = Call {
            at: self.shared.clock.now(),
            client: caller.name.clone(),
            verb: *verb,
            group: resource.group.clone(),
            resource: resource.plural.clone(),
            subresource: place.subresource.clone(),
            namespace: place.namespace.clone(),
            name: place.name.clone(),
            manager: if verb.is_write() { manager.to_owned() } else { String::new() },
            patch: calls::patch_name(*patch),
            code: 0,
            changed: false,
        };
        let fault = self.shared.lock_faults().draw(&call);
        let before = match fault {
            Some(Fault::Refused(code)) => Some(Ok(refusal(code, resource, &place.name))),
            Some(Fault::TimeoutBefore) => {
                sleep(REQUEST_TIMEOUT).await;
                Some(Ok(ApiError::timeout()))
            }
            Some(Fault::ResetBefore) => Some(Err(io::ErrorKind::ConnectionReset)),
            _ => None,
        };
        let outcome = match before {
            Some(Err(broken)) => Err(broken),
            Some(Ok(error)) => Ok(Err(error)),
            None => {
                let executed = match &self.shared.upstream {
                    None => self.execute(&mut call, request, body, manager, caller, fault),
                    Some(upstream) => {
                        let ask = Ask::forwarded(caller.account, request, parts, body);
                        self.forward(upstream, &mut call, request, ask, caller, fault).await?
                    }
                };
                match fault {
                    Some(Fault::TimeoutAfter) => {
                        sleep(REQUEST_TIMEOUT).await;
                        Ok(Err(ApiError::timeout()))
                    }
                    Some(Fault::ResetAfter) => Err(io::ErrorKind::ConnectionReset),
                    _ => Ok(executed),
                }
            }
        };
        call.code = match &outcome {
            Err(_) => 0,
            Ok(Err(error)) => error.code,
            Ok(Ok(Answer::Json(code, _))) => *code,
            Ok(Ok(Answer::Events(_))) => 200,
        };
        self.shared.lock_calls().push(call);
        Ok(match outcome? {
            Ok(Answer::Json(code, text)) => respond(code, "application/json", Body::from(text)),
            Ok(Answer::Events(watch)) => respond(200, "application/json", Body::from_stream(watch.into_stream())),
            Err(error) => respond_error(&error),
        })
    }

    /// Forwards a call to the real server.
    async fn forward(
        &self,
        upstream: &Arc<Upstream>,
        call: &mut Call,
        request: &Request,
        ask: Ask,
        caller: &Caller,
        fault: Option<Fault>,
    ) -> io::Result<ApiResult<Answer>> {
        if request.verb != Verb::Watch {
            let reply = upstream.call(ask, Hold::new()).await.map_err(io::Error::other)??;
            call.changed = reply.changed;
            return Ok(Ok(Answer::Json(reply.code, reply.text)));
        }
        let Request { resource, query, .. } = request;
        let (selector, after) =
            match Selector::parse(resource, query.text("labelSelector"), query.text("fieldSelector"))
                .and_then(|selector| Ok((selector, query.number("resourceVersion")?.unwrap_or_default())))
            {
                Ok(parsed) => parsed,
                Err(error) => return Ok(Err(error)),
            };
        let opened = upstream.open(ask, selector, after, Hold::new()).await.map_err(io::Error::other)??;
        Ok(match opened {
            Opened::Refused(reply) => Ok(Answer::Json(reply.code, reply.text)),
            Opened::Lines(lines) => Watch::relay(Arc::clone(&self.shared), lines, caller, request, fault)
                .map(|watch| Answer::Events(Box::new(watch))),
        })
    }

    /// Executes a call, under one lock.
    fn execute(
        &self,
        call: &mut Call,
        request: &Request,
        body: &Bytes,
        manager: &str,
        caller: &Caller,
        fault: Option<Fault>,
    ) -> ApiResult<Answer> {
        let mut state = self.shared.lock();
        let revision = state.store.revision();
        let answer = self.execute_on(&mut state, request, body, manager, caller, fault);
        call.changed = state.store.revision() != revision;
        self.publish(state);
        answer
    }

    fn execute_on(
        &self,
        state: &mut State,
        request: &Request,
        body: &Bytes,
        manager: &str,
        caller: &Caller,
        fault: Option<Fault>,
    ) -> ApiResult<Answer> {
        let Request { verb, resource, place, patch, query, .. } = request;
        let dry_run = match query.text("dryRun") {
            "" => false,
            "All" => true,
            other => {
                let text = format!("Unsupported value: \"{other}\"");
                return Err(ApiError::invalid_option("CreateOptions", "dryRun", &text));
            }
        };
        let options = WriteOptions { manager: manager.to_owned(), force: query.flag("force"), dry_run };
        let one = |code: u16, object: &Value| {
            let shown = resource.present(object);
            Answer::Json(code, form_of(resource, request.form, &shown, self.shared.clock.now()))
        };
        match verb {
            Verb::Get => state.get(resource, &place.namespace, &place.name).map(|object| one(200, &object)),
            Verb::List => self.execute_list(state, request),
            Verb::Watch => Watch::open(Arc::clone(&self.shared), &state.store, caller, request, fault)
                .map(|watch| Answer::Events(Box::new(watch))),
            Verb::Create => {
                let body = parse_body(body)?;
                state.create(resource, place, body, &options).map(|object| one(201, &object))
            }
            Verb::Update => {
                let body = parse_body(body)?;
                let existed = state.get(resource, &place.namespace, &place.name).is_ok();
                let written = state.update(resource, place, body, &options)?;
                Ok(one(if existed { 200 } else { 201 }, &written))
            }
            Verb::Patch => {
                let body = parse_body(body)?;
                let existed = state.get(resource, &place.namespace, &place.name).is_ok();
                let kind = patch.unwrap_or(PatchKind::Merge);
                let written = state.patch(resource, place, kind, &body, &options)?;
                Ok(one(if existed { 200 } else { 201 }, &written))
            }
            Verb::Delete => {
                let options = delete_options(query, body, dry_run)?;
                Ok(match state.delete(resource, &place.namespace, &place.name, &options)? {
                    Deleted::Marked(object) => one(200, &object),
                    Deleted::Gone(object) => Answer::Json(
                        200,
                        json!({
                            "kind": "Status",
                            "apiVersion": "v1",
                            "metadata": {},
                            "status": "Success",
                            "details": {
                                "name": place.name,
                                "group": resource.group,
                                "kind": resource.plural,
                                "uid": object.pointer("/metadata/uid"),
                            },
                        })
                        .to_string(),
                    ),
                })
            }
            Verb::DeleteCollection => {
                let options = delete_options(query, body, dry_run)?;
                let selector = Selector::parse(resource, query.text("labelSelector"), query.text("fieldSelector"))?;
                let namespace = request.in_namespace.then_some(place.namespace.as_str());
                let chosen: Vec<(Key, Arc<Value>)> = state
                    .store
                    .list(&resource.storage, namespace)
                    .filter(|(_, object)| selector.matches(object))
                    .map(|(key, object)| (key.clone(), Arc::clone(object)))
                    .collect();
                let revision = state.store.revision();
                for (key, _) in &chosen {
                    state.delete(resource, &key.namespace, &key.name, &options)?;
                }
                let items: Vec<Cow<'_, Value>> = chosen.iter().map(|(_, object)| resource.present(object)).collect();
                let list = list_of(resource, &items, &json!({"resourceVersion": revision.to_string()}));
                Ok(Answer::Json(200, list))
            }
        }
    }

    /// A list, whole or in pages. A continued page shows the same state as the first one.
    fn execute_list(&self, state: &State, request: &Request) -> ApiResult<Answer> {
        let Request { resource, place, query, in_namespace, form, .. } = request;
        let selector = Selector::parse(resource, query.text("labelSelector"), query.text("fieldSelector"))?;
        let namespace = in_namespace.then_some(place.namespace.as_str());
        let latest = state.store.revision();
        let asked = query.number("resourceVersion")?.unwrap_or_default();
        if asked > latest {
            let mut error = ApiError::timeout();
            error.message = format!("Too large resource version: {asked}, current: {latest}");
            error.details = json!({
                "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
                "retryAfterSeconds": 1,
            });
            return Err(error);
        }
        let exact = query.text("resourceVersionMatch") == "Exact";
        let (revision, after) = match query.text("continue") {
            "" => (if exact { asked } else { latest }, None),
            token => parse_continue(token, resource)?,
        };
        let limit = query.number("limit")?.filter(|limit| *limit > 0);
        let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let objects = state.store.list_at(&resource.storage, namespace, revision)?;
        let mut rest = objects
            .iter()
            .filter(|(key, object)| after.as_ref().is_none_or(|after| *key > after) && selector.matches(object));
        let page: Vec<(&Key, &Arc<Value>)> = rest.by_ref().take(limit).collect();
        let left = rest.count();
        let mut metadata = json!({"resourceVersion": revision.to_string()});
        if let (Some((last, _)), true) = (page.last(), left > 0) {
            let map = tree::as_map(&mut metadata);
            map.insert("continue".to_owned(), json!(format!("{revision}:{}/{}", last.namespace, last.name)));
            map.insert("remainingItemCount".to_owned(), json!(left));
        }
        let items: Vec<Cow<'_, Value>> = page.iter().map(|(_, object)| resource.present(object)).collect();
        let answer = match form {
            Form::Whole => list_of(resource, &items, &metadata),
            Form::Table => table::table(resource, &items, &metadata, self.shared.clock.now()).to_string(),
            Form::Metadata => json!({
                "kind": "PartialObjectMetadataList",
                "apiVersion": table::META_VERSION,
                "metadata": metadata,
                "items": items.iter().map(|object| table::partial(object)).collect::<Vec<_>>(),
            })
            .to_string(),
        };
        Ok(Answer::Json(200, answer))
    }
}

/// An object in the form that the client requests.
fn form_of(resource: &Resource, form: Form, object: &Value, now: Timestamp) -> String {
    match form {
        Form::Whole => object.to_string(),
        Form::Table => table::table(resource, &[Cow::Borrowed(object)], &json!({}), now).to_string(),
        Form::Metadata => table::partial(object).to_string(),
    }
}

/// A list in its wire format. The items of built-in kinds have neither `apiVersion` nor `kind`: the list's say them.
fn list_of(resource: &Resource, items: &[Cow<'_, Value>], metadata: &Value) -> String {
    let text = |item: &Cow<'_, Value>| match &**item {
        Value::Object(fields) if resource.is_built_in() => {
            let is_of_item = |key: &str| key != "apiVersion" && key != "kind";
            let fields: BTreeMap<&String, &Value> = fields.iter().filter(|(key, _)| is_of_item(key)).collect();
            json!(fields).to_string()
        }
        item => item.to_string(),
    };
    let items: Vec<String> = items.iter().map(text).collect();
    let (version, kind, items) = (resource.api_version(), &resource.kind, items.join(","));
    format!(r#"{{"apiVersion":"{version}","items":[{items}],"kind":"{kind}List","metadata":{metadata}}}"#)
}

/// The namespace of an object of this resource whose manifest says `namespace`.
fn namespace_for(resource: &Resource, namespace: &str) -> String {
    match (resource.namespaced, namespace) {
        (false, _) => String::new(),
        (true, "") => "default".to_owned(),
        (true, namespace) => namespace.to_owned(),
    }
}

fn find_named(state: &State, name: &str) -> ApiResult<Arc<Resource>> {
    let name = name.to_lowercase();
    let matches = |resource: &&Arc<Resource>| {
        resource.plural == name
            || resource.singular == name
            || resource.kind.to_lowercase() == name
            || resource.short_names.contains(&name)
            || resource.qualified() == name
    };
    state.registry.iter().find(matches).cloned().ok_or_else(ApiError::no_such_path)
}

fn parse_continue(token: &str, resource: &Resource) -> ApiResult<(u64, Option<Key>)> {
    let parsed = token.split_once(':').and_then(|(revision, place)| {
        let (namespace, name) = place.split_once('/')?;
        Some((revision.parse().ok()?, Some(State::key(resource, namespace, name))))
    });
    parsed.ok_or_else(|| ApiError::bad_request("continue key is not valid"))
}

/// JSON, or YAML for an apply.
fn parse_body(body: &Bytes) -> ApiResult<Value> {
    serde_json::from_slice(body).or_else(|error| {
        let text = std::str::from_utf8(body).unwrap_or_default();
        let yaml = serde_saphyr::from_str::<Value>(text).ok().filter(Value::is_object);
        yaml.ok_or_else(|| ApiError::bad_request(format!("the body of the request is not valid JSON: {error}")))
    })
}

/// Delete options come in the body, those of the query win.
fn delete_options(query: &Parameters, body: &Bytes, dry_run: bool) -> ApiResult<DeleteOptions> {
    let body = if body.is_empty() { Value::Null } else { parse_body(body)? };
    let text = |pointer: &str| Some(tree::text(&body, pointer)).filter(|text| !text.is_empty()).map(str::to_owned);
    let policy = text("/propagationPolicy").unwrap_or_else(|| query.text("propagationPolicy").to_owned());
    let policy = if policy.is_empty() { "Background".to_owned() } else { policy };
    if !["Background", "Foreground", "Orphan"].contains(&policy.as_str()) {
        let text = format!("Unsupported value: \"{policy}\"");
        return Err(ApiError::invalid_option("DeleteOptions", "propagationPolicy", &text));
    }
    Ok(DeleteOptions {
        uid: text("/preconditions/uid"),
        resource_version: text("/preconditions/resourceVersion"),
        orphan: policy == "Orphan" || body.get("orphanDependents") == Some(&Value::Bool(true)),
        dry_run: dry_run || !tree::list(&body, "/dryRun").is_empty(),
    })
}

/// The refusal of an injected fault.
fn refusal(code: u16, resource: &Resource, name: &str) -> ApiError {
    match code {
        403 => ApiError::forbidden(resource, name),
        404 => ApiError::not_found(resource, name),
        409 => ApiError::conflict(
            resource,
            name,
            "the object has been modified; please apply your changes to the latest version and try again",
        ),
        429 => ApiError::too_many_requests(1),
        503 => ApiError::unavailable(),
        504 => ApiError::timeout(),
        _ => ApiError::internal("injected fault"),
    }
}

fn respond(code: u16, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static(content_type));
    response
}

fn respond_json(code: u16, value: &Value) -> Response<Body> {
    respond(code, "application/json", Body::from(value.to_string()))
}

fn respond_error(error: &ApiError) -> Response<Body> {
    let mut response = respond_json(error.code, &error.to_status());
    if let Some(seconds) = error.retry_after_seconds() {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Reads a body of at most [`BODY_LIMIT`] bytes.
async fn read_body<B>(body: B) -> io::Result<Bytes>
where
    B: axum::body::HttpBody<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    Limited::new(body, BODY_LIMIT).collect().await.map(http_body_util::Collected::to_bytes).map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
