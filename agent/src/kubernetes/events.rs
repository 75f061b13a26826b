//! Writes the table of notices as Kubernetes events.
//!
//! Events are informational; nothing depends on them. Each write therefore has a budget, and a notice that cannot be
//! written does not block anything:
//!
//! * There is one event per node and reason. Repetitions patch `series.count`: first after [`NOTE_INTERVAL`], then at
//!   most every [`SERIES_INTERVAL`]. Another note for that reason creates a new event, at the same intervals.
//! * A process may write [`BURST`] events at once, then one every [`REFILL`].
//! * A permanent error (no permission to write events) is logged once per notice, which is dropped.
//!
//! Requires the verbs `create` and `patch` on `events` of `events.k8s.io`. Events of cluster-scoped objects are in
//! [`NAMESPACE`].

use super::{KubernetesError, write};
use crate::clock::Clock;
use crate::tables::notices::{Notice, NoticeKey};
use crate::tables::rows::CiliumNodeRow;
use crate::tables::{Reader, Rows};
use crate::telemetry::metrics;
use cistern_core::reconcile::{Classify, ErrorClass};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The only namespace that the API server accepts for cluster-scoped objects.
pub const NAMESPACE: &str = "default";

/// Minimum interval between two patches of an event's count.
pub const SERIES_INTERVAL: Duration = Duration::from_secs(300);
/// Minimum interval between two events of a node with one reason and different notes.
pub const NOTE_INTERVAL: Duration = Duration::from_secs(60);
/// Burst size.
pub const BURST: u32 = 25;
/// After a burst, the interval at which further writes are allowed.
pub const REFILL: Duration = Duration::from_secs(10);
/// Initial delay before retrying a transient error, doubled each time up to [`SERIES_INTERVAL`].
const RETRY: Duration = Duration::from_secs(5);

const KIND: &str = "Event";

/// Limits of the API server.
const LONGEST_NOTE: usize = 1024;
const LONGEST_INSTANCE: usize = 128;
const LONGEST_NAME: usize = 253;

/// The reporter in events.
#[derive(Debug, Clone)]
pub struct Reporter {
    /// [`super::AGENT`] or [`super::OPERATOR`].
    pub controller: &'static str,
    /// Name of the instance.
    pub instance: String,
}

/// State of a notice that was written, or tried.
#[derive(Debug, Default)]
struct Written {
    /// Name of the event; empty before the first one.
    name: String,
    /// The notice as it was written.
    notice: Option<Notice>,
    failures: u32,
    /// Monotonic time before which nothing is written for this key.
    not_before: Duration,
}

/// The next action for a row.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Create,
    Count,
}

struct Writer {
    api: Api<Event>,
    reporter: Reporter,
    clock: Clock,
    written: BTreeMap<NoticeKey, Written>,
    /// Number of writes allowed now, and the time of this value.
    allowed: u32,
    refilled: Duration,
}

/// Writes until cancelled. Events refer to objects of `objects`; a notice waits until its node's object exists.
pub async fn run(
    client: Client,
    reporter: Reporter,
    mut notices: Reader<NoticeKey, Notice>,
    mut objects: Reader<String, CiliumNodeRow>,
    clock: Clock,
    cancel: CancellationToken,
) {
    let mut writer = Writer {
        api: Api::namespaced(client, NAMESPACE),
        reporter,
        clock,
        written: BTreeMap::new(),
        allowed: BURST,
        refilled: clock.monotonic(),
    };
    loop {
        let (rows, known) = (notices.snapshot(), objects.snapshot());
        let pause = tokio::select! {
            () = cancel.cancelled() => return,
            pause = writer.pass(&rows.rows, &known.rows) => pause,
        };
        tokio::select! {
            () = cancel.cancelled() => return,
            () = notices.changed() => {}
            () = objects.changed() => {}
            () = async { match pause { Some(pause) => tokio::time::sleep(pause).await, None => std::future::pending().await } } => {}
        }
    }
}

impl Writer {
    /// Writes what is due and allowed; returns when the next write is due.
    async fn pass(
        &mut self,
        notices: &Rows<NoticeKey, Notice>,
        objects: &Rows<String, CiliumNodeRow>,
    ) -> Option<Duration> {
        self.written.retain(|key, _| notices.contains_key(key));
        let mut next: Option<Duration> = None;
        for (key, notice) in notices {
            let Some(object) = objects.get(&key.0) else { continue };
            let Some(step) = step(self.written.get(key), notice) else { continue };
            let now = self.clock.monotonic();
            let due = self.written.get(key).map_or(Duration::ZERO, |written| written.not_before);
            let due = if due <= now { self.take(now) } else { Err(due) };
            match due {
                Ok(()) => self.write(key, notice, &object.uid, &step).await,
                Err(at) => next = Some(next.map_or(at, |next| next.min(at))),
            }
            // Rows just written, or failed, may be due again.
            if let Some(written) = self.written.get(key)
                && self::step(Some(written), notice).is_some()
            {
                next = Some(next.map_or(written.not_before, |next| next.min(written.not_before)));
            }
        }
        next.map(|at| at.saturating_sub(self.clock.monotonic()).max(Duration::from_millis(100)))
    }

    /// Takes a write from the budget, or returns when one will be available.
    fn take(&mut self, now: Duration) -> Result<(), Duration> {
        let earned = u32::try_from(now.saturating_sub(self.refilled).as_secs() / REFILL.as_secs()).unwrap_or(BURST);
        if self.allowed.saturating_add(earned) >= BURST {
            (self.allowed, self.refilled) = (BURST, now);
        } else {
            self.allowed += earned;
            self.refilled += REFILL * earned;
        }
        match self.allowed.checked_sub(1) {
            Some(left) => {
                self.allowed = left;
                Ok(())
            }
            None => Err(self.refilled + REFILL),
        }
    }

    async fn write(&mut self, key: &NoticeKey, notice: &Notice, uid: &str, step: &Step) {
        let reason = key.1.name();
        let known = self.written.remove(key).unwrap_or_default();
        let name = match step {
            Step::Create => event_name(key, notice),
            Step::Count => known.name.clone(),
        };
        let outcome = match step {
            Step::Create => self.create(key, notice, uid, &name).await,
            Step::Count => self.count(notice, &name).await,
        };
        let now = self.clock.monotonic();
        let done =
            |pause| Written { name: name.clone(), notice: Some(notice.clone()), failures: 0, not_before: now + pause };
        let written = match outcome {
            Ok(()) => {
                metrics::event(reason, "written");
                match step {
                    // It says "once", however often it had happened by then: the count follows.
                    Step::Create => {
                        let once = Notice { count: 1, ..notice.clone() };
                        Written { notice: Some(once), ..done(NOTE_INTERVAL) }
                    }
                    Step::Count => done(SERIES_INTERVAL),
                }
            }
            // Events expire after an hour; then a new one is created.
            Err(error) if error.is_not_found() && *step == Step::Count => {
                Written { not_before: now, ..Written::default() }
            }
            Err(error) if error.class() == ErrorClass::Permanent => {
                metrics::event(reason, "dropped");
                tracing::warn!(node = key.0, reason, %error, "event is not written");
                done(SERIES_INTERVAL)
            }
            Err(error) => {
                metrics::event(reason, "failed");
                tracing::debug!(node = key.0, reason, %error, "event is not written yet");
                let delay = RETRY.saturating_mul(1 << known.failures.min(6)).min(SERIES_INTERVAL);
                Written { failures: known.failures.saturating_add(1), not_before: now + delay, ..known }
            }
        };
        self.written.insert(key.clone(), written);
    }

    async fn create(
        &self,
        (node, reason): &NoticeKey,
        notice: &Notice,
        uid: &str,
        name: &str,
    ) -> Result<(), KubernetesError> {
        let event = Event {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                namespace: Some(NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some(reason.action().to_owned()),
            event_time: Some(MicroTime(notice.first)),
            note: Some(cut(&notice.note, LONGEST_NOTE).to_owned()),
            reason: Some(reason.name().to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("cilium.io/v2".to_owned()),
                kind: Some("CiliumNode".to_owned()),
                name: Some(node.clone()),
                uid: Some(uid.to_owned()),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(self.reporter.controller.to_owned()),
            reporting_instance: Some(cut(&self.reporter.instance, LONGEST_INSTANCE).to_owned()),
            type_: Some(if reason.is_warning() { "Warning" } else { "Normal" }.to_owned()),
            ..Event::default()
        };
        let params = PostParams { field_manager: Some(self.reporter.controller.to_owned()), ..PostParams::default() };
        match write("create", KIND, name, self.api.create(&params, &event)).await {
            // An earlier attempt succeeded without an answer.
            Err(error) if error.is_conflict() => Ok(()),
            outcome => outcome.map(|_| ()),
        }
    }

    async fn count(&self, notice: &Notice, name: &str) -> Result<(), KubernetesError> {
        // The API server accepts counts from 2 on, and no change of other fields.
        let count = i32::try_from(notice.count).unwrap_or(i32::MAX);
        let patch = json!({"series": {"count": count, "lastObservedTime": MicroTime(notice.last)}});
        let params = PatchParams { field_manager: Some(self.reporter.controller.to_owned()), ..PatchParams::default() };
        write("patch", KIND, name, self.api.patch(name, &params, &Patch::Merge(&patch))).await.map(|_| ())
    }
}

/// The next action for a row, whenever it is due.
fn step(written: Option<&Written>, notice: &Notice) -> Option<Step> {
    match written.and_then(|written| written.notice.as_ref()) {
        Some(before) if before.note == notice.note && before.first == notice.first => {
            (notice.count > before.count).then_some(Step::Count)
        }
        _ => Some(Step::Create),
    }
}

/// Deterministic per notice, so that a repeated attempt does not create a second event.
fn event_name((node, reason): &NoticeKey, notice: &Notice) -> String {
    let suffix = format!(".{}.{:x}", reason.name().to_lowercase(), notice.first.as_nanosecond());
    let node = cut(node, LONGEST_NAME.saturating_sub(suffix.len()));
    format!("{}{suffix}", node.trim_end_matches(['.', '-']))
}

/// Truncates to a number of bytes at a character boundary.
fn cut(text: &str, longest: usize) -> &str {
    let end = (0..=longest.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    text.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::notices::Reason;

    fn notice(note: &str, count: u64) -> Notice {
        let first = "2026-01-01T00:00:00Z".parse().unwrap();
        Notice { note: note.into(), count, first, last: first }
    }

    #[test]
    fn a_row_is_created_counted_and_made_anew_with_another_note() {
        let written = Written { notice: Some(notice("a", 1)), ..Written::default() };
        assert_eq!(step(None, &notice("a", 1)), Some(Step::Create));
        assert_eq!(step(Some(&Written::default()), &notice("a", 1)), Some(Step::Create));
        assert_eq!(step(Some(&written), &notice("a", 1)), None);
        assert_eq!(step(Some(&written), &notice("a", 2)), Some(Step::Count));
        assert_eq!(step(Some(&written), &notice("b", 1)), Some(Step::Create));
    }

    #[test]
    fn names_and_notes_fit_the_api_servers_bounds() {
        let name = event_name(&("n.".repeat(126), Reason::PodCidrPoolExhausted), &notice("", 1));
        assert!(name.len() <= LONGEST_NAME && !name.contains(".."), "{name}");
        assert_eq!(
            event_name(&("n1".into(), Reason::LeaseFinding), &notice("", 1)),
            "n1.leasefinding.18867251edfa0000"
        );
        assert_eq!((cut("äöü", 3), cut("abc", 9)), ("ä", "abc"));
    }
}
