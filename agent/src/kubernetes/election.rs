//! Leader election.

use super::{KubernetesError, write};
use crate::clock::Clock;
use crate::tables::{Table, Waits};
use cistern_core::election::evaluate::{Action, Observation, Record, Timings, evaluate};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Name of the Lease that the operators share.
pub const LEASE_NAME: &str = "cistern-operator";

const KIND: &str = "Lease";
/// Name of the wait for the election.
pub const WAIT: &str = "leader election";

/// Parameters of an election.
#[derive(Debug, Clone)]
pub struct Election {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of this process among the candidates; unique, even across restarts.
    pub identity: String,
    /// Durations.
    pub timings: Timings,
}

/// State of the election.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeaderRow {
    /// This process is the leader.
    pub leading: bool,
    /// The leader, as last observed.
    pub holder: Option<String>,
}

/// Channels between the election and the leader's tasks.
pub struct Scope {
    /// The time by which every write of the leader must have completed; `None` while another process leads.
    pub until: watch::Sender<Option<Instant>>,
    /// True while tasks of the leader are running. No new claim is made before they have ended.
    pub busy: watch::Receiver<bool>,
    /// When writes of earlier leaders were last suspected to be lost: the Lease went back to an older version or was
    /// deleted, as after the restore of a backup, or had not been renewed for long.
    pub doubt: watch::Sender<Option<Instant>>,
}

struct Candidate {
    api: Api<Lease>,
    election: Election,
    clock: Clock,
    observed: Option<(Observation, Option<Lease>)>,
    /// The monotonic time before the last successful write was sent, while leading.
    leading: Option<Duration>,
    doubt: watch::Sender<Option<Instant>>,
}

/// Takes part until cancelled, then releases the Lease if no task of the leader is running.
pub async fn run(
    client: Client,
    election: Election,
    mut scope: Scope,
    view: Arc<Table<(), LeaderRow>>,
    waits: Waits,
    clock: Clock,
    cancel: CancellationToken,
) {
    let api = Api::namespaced(client, &election.namespace);
    let mut this = Candidate { api, election, clock, observed: None, leading: None, doubt: scope.doubt.clone() };
    loop {
        let pause = this.step(&scope, &waits).await;
        let until = this.leading.map(|renewed| this.clock.instant(this.election.timings.leads_until(renewed)));
        scope.until.send_if_modified(|current| std::mem::replace(current, until) != until);
        view.publish(BTreeMap::from([((), this.row())]));
        if this.leading.is_none() && *scope.busy.borrow_and_update() {
            // Stepped down: the leader's tasks must have ended before another claim.
            tokio::select! {
                biased;
                () = cancel.cancelled() => break,
                _ = scope.busy.wait_for(|busy| !busy) => {}
            }
        }
        tokio::select! {
            biased;
            () = cancel.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
    }
    if this.leading.is_some() && !*scope.busy.borrow() {
        this.release().await;
    }
    scope.until.send_replace(None);
}

impl Candidate {
    fn row(&self) -> LeaderRow {
        let holder = self.observed.as_ref().and_then(|(observed, _)| observed.record.as_ref()?.holder.clone());
        LeaderRow { leading: self.leading.is_some(), holder: holder.filter(|holder| !holder.is_empty()) }
    }

    /// One observation and at most one write; returns how long to wait.
    async fn step(&mut self, scope: &Scope, waits: &Waits) -> Duration {
        let retry = self.election.timings.retry_period();
        // A leader knows the object from its own last write; after a failed write it reads it again.
        if (self.leading.is_none() || self.observed.is_none())
            && let Err(error) = self.look().await
        {
            waits.begin(WAIT, error.to_string(), Some(retry));
            if self.leading.is_none() {
                return retry;
            }
        }
        let now = self.clock.monotonic();
        let Some((observed, object)) = &self.observed else {
            // A leader that cannot read the Lease continues until its deadline.
            return self.deadline_or(retry, now);
        };
        match evaluate(observed, &self.election.identity, self.leading, &self.election.timings, now) {
            Action::Acquire { transitions, timeout } => {
                if *scope.busy.borrow() {
                    return retry;
                }
                let object = object.clone();
                let deserted = object.as_ref().is_some_and(|lease| self.is_deserted(lease));
                self.claim(object, Some(transitions), timeout, waits).await;
                if self.leading.is_some() {
                    if deserted {
                        self.doubt.send_replace(Some(Instant::now()));
                    }
                    tracing::info!(identity = self.election.identity, "leading");
                }
                retry
            }
            Action::Renew { timeout } => {
                let object = object.clone();
                self.claim(object, None, timeout, waits).await;
                self.deadline_or(retry, self.clock.monotonic())
            }
            Action::Wait { until, .. } => {
                waits.end(WAIT);
                until.saturating_sub(now)
            }
            Action::StepDown { loss } => {
                tracing::warn!(identity = self.election.identity, reason = %loss, "no longer leading");
                self.leading = None;
                self.observed = None;
                Duration::ZERO
            }
        }
    }

    /// Whether the Lease has not been renewed for longer than a change of leaders takes, by the wall clocks. If clocks
    /// differ, new nodes wait a little, or not; there are no other consequences.
    fn is_deserted(&self, lease: &Lease) -> bool {
        let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.as_ref());
        let longest = self.election.timings.duration() + 2 * self.election.timings.retry_period();
        renewed.is_some_and(|at| {
            Duration::try_from(self.clock.now().duration_since(at.0)).is_ok_and(|silent| silent > longest)
        })
    }

    fn deadline_or(&mut self, pause: Duration, now: Duration) -> Duration {
        let Some(renewed) = self.leading else { return pause };
        let deadline = self.election.timings.leads_until(renewed);
        if now >= deadline {
            tracing::warn!(identity = self.election.identity, "no longer leading: not renewed in time");
            self.leading = None;
        }
        pause.min(deadline.saturating_sub(now))
    }

    async fn look(&mut self) -> Result<(), KubernetesError> {
        let object = write("get", KIND, LEASE_NAME, self.api.get_opt(LEASE_NAME)).await?;
        // This process's own writes need no such check: its clock may have been set back.
        if let Some((_, Some(last))) = &self.observed
            && object.as_ref().is_none_or(|object| is_older(object, last))
        {
            tracing::warn!("the Lease went back to an older state, or was deleted");
            self.doubt.send_replace(Some(Instant::now()));
        }
        self.saw(object);
        Ok(())
    }

    fn saw(&mut self, object: Option<Lease>) {
        let now = self.clock.monotonic();
        let record = object.as_ref().map(record);
        match &mut self.observed {
            Some((observed, last)) => {
                observed.look(record, now);
                *last = object;
            }
            None => self.observed = Some((Observation::first(record, now), object)),
        }
    }

    /// Writes a claim or a renewal, with the resource version as precondition.
    async fn claim(&mut self, object: Option<Lease>, transitions: Option<i32>, timeout: Duration, waits: &Waits) {
        let before = self.clock.monotonic();
        let time = MicroTime(self.clock.now());
        let mut lease = object.clone().unwrap_or_else(|| Lease {
            metadata: ObjectMeta { name: Some(LEASE_NAME.to_owned()), ..ObjectMeta::default() },
            ..Lease::default()
        });
        let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
        spec.holder_identity = Some(self.election.identity.clone());
        spec.lease_duration_seconds = i32::try_from(self.election.timings.duration().as_secs()).ok();
        if let Some(transitions) = transitions {
            spec.acquire_time = Some(time.clone());
            spec.lease_transitions = Some(transitions);
        }
        spec.renew_time = Some(time);
        let params = PostParams::default();
        let call = async {
            match object {
                Some(_) => self.api.replace(LEASE_NAME, &params, &lease).await,
                None => self.api.create(&params, &lease).await,
            }
        };
        let verb = if transitions.is_some() { "claim" } else { "renew" };
        let timeout = timeout.min(super::WRITE_TIMEOUT);
        match super::within(timeout, verb, KIND, LEASE_NAME, call).await {
            Ok(object) => {
                waits.end(WAIT);
                self.saw(Some(object));
                self.leading = Some(before);
            }
            Err(error) => {
                waits.begin(WAIT, error.to_string(), Some(self.election.timings.retry_period()));
                // This write or another client's may have succeeded: the next step reads the object again.
                if let Err(error) = self.look().await {
                    tracing::debug!(%error, "lease not read after a failed write");
                }
            }
        }
    }

    /// Releases the Lease, so that the next leader need not wait for its expiry.
    async fn release(&mut self) {
        let Some((_, Some(mut lease))) = self.observed.take() else { return };
        if let Some(spec) = lease.spec.as_mut() {
            spec.holder_identity = Some(String::new());
            spec.renew_time = Some(MicroTime(self.clock.now()));
        }
        let params = PostParams::default();
        let call = self.api.replace(LEASE_NAME, &params, &lease);
        match write("release", KIND, LEASE_NAME, call).await {
            Ok(_) => tracing::info!(identity = self.election.identity, "lease released"),
            Err(error) => tracing::warn!(%error, "lease not released; it ends by itself"),
        }
    }
}

/// Whether a Lease is an earlier state of another one. The version does not tell: a server may be restored from a
/// backup with higher versions (`etcdutl snapshot restore --bump-revision`).
fn is_older(lease: &Lease, last: &Lease) -> bool {
    let version = |lease: &Lease| lease.resource_version()?.parse::<u64>().ok();
    let spec = |lease: &Lease| lease.spec.clone().unwrap_or_default();
    let (now, then) = (spec(lease), spec(last));
    version(lease) < version(last)
        || now.lease_transitions < then.lease_transitions
        // The clocks of two holders may differ.
        || (now.holder_identity == then.holder_identity && now.renew_time < then.renew_time)
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    Record {
        holder: spec.holder_identity,
        duration_seconds: spec.lease_duration_seconds,
        transitions: spec.lease_transitions.unwrap_or_default(),
        renewed: spec.renew_time.map(|time| time.0.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_from_a_backup_looks_older_even_under_a_higher_version() {
        let lease = |version: &str, holder: &str, transitions: i32, renewed: &str| Lease {
            metadata: ObjectMeta { resource_version: Some(version.to_owned()), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_transitions: Some(transitions),
                renew_time: Some(MicroTime(renewed.parse().unwrap())),
                ..LeaseSpec::default()
            }),
        };
        let last = lease("700", "a", 4, "2026-01-02T03:04:05Z");
        assert!(!is_older(&last, &last));
        assert!(!is_older(&lease("701", "a", 4, "2026-01-02T03:04:07Z"), &last));
        assert!(is_older(&lease("300", "a", 4, "2026-01-02T03:04:05Z"), &last));
        assert!(is_older(&lease("1000000700", "a", 4, "2026-01-02T02:00:00Z"), &last));
        assert!(is_older(&lease("1000000700", "b", 3, "2026-01-02T04:00:00Z"), &last));
        // The next holder's clock may be behind.
        assert!(!is_older(&lease("702", "b", 5, "2026-01-02T03:04:01Z"), &last));
    }
}
