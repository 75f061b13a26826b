//! Named tasks with a common lifetime.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;
use tokio::task::{Id, JoinSet};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

/// A set of named tasks. Each gets the same cancellation token; an unexpected end is reported with the task's name, so
/// that the caller can terminate everything: a missing task is worse than a restart.
#[derive(Debug)]
pub struct Supervisor {
    scope: &'static str,
    tasks: JoinSet<anyhow::Result<()>>,
    names: HashMap<Id, String>,
    cancel: CancellationToken,
}

impl Supervisor {
    /// An empty scope, cancelled with `parent`.
    #[must_use]
    pub fn new(scope: &'static str, parent: &CancellationToken) -> Self {
        Self { scope, tasks: JoinSet::new(), names: HashMap::new(), cancel: parent.child_token() }
    }

    /// The token that stops the tasks of this scope.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// Starts a task.
    pub fn spawn<F>(&mut self, name: impl Into<String>, task: F)
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let handle = self.tasks.spawn(task);
        self.names.insert(handle.id(), name.into());
    }

    /// Starts a task that cannot fail.
    pub fn spawn_loop<F>(&mut self, name: impl Into<String>, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.spawn(name, async move {
            task.await;
            Ok(())
        });
    }

    /// Runs until the scope is cancelled or a task ends unexpectedly, then cancels and joins all tasks.
    ///
    /// # Errors
    /// The first task that ended unexpectedly, by name, with its error.
    pub async fn join(self) -> anyhow::Result<()> {
        self.finish(None).await
    }

    /// As [`Supervisor::join`], for the scope of a whole process: does not wait longer than `grace` for tasks to end.
    ///
    /// # Errors
    /// The first task that ended unexpectedly, by name, with its error; else the tasks that did not end.
    pub async fn join_within(self, grace: Duration) -> anyhow::Result<()> {
        self.finish(Some(grace)).await
    }

    async fn finish(mut self, grace: Option<Duration>) -> anyhow::Result<()> {
        let first = tokio::select! {
            biased;
            () = self.cancel.cancelled() => None,
            ended = self.tasks.join_next_with_id() => ended,
        };
        let asked = self.cancel.is_cancelled();
        self.cancel.cancel();
        let mut outcome = match first.map(|ended| self.report(ended)) {
            Some(report) if !asked => Err(report),
            _ => Ok(()),
        };
        let deadline = grace.map(|grace| Instant::now() + grace);
        loop {
            let next = self.tasks.join_next_with_id();
            let ended = match deadline {
                None => next.await,
                Some(deadline) => match timeout_at(deadline, next).await {
                    Ok(ended) => ended,
                    Err(_) => {
                        let error = anyhow::anyhow!("{} of {} did not end", self.hanging(), self.scope);
                        tracing::error!(scope = self.scope, %error, "tasks hang");
                        return outcome.and(Err(error));
                    }
                },
            };
            let Some(ended) = ended else { return outcome };
            let failed = !matches!(&ended, Ok((_, Ok(()))));
            let report = self.report(ended);
            if failed {
                tracing::error!(scope = self.scope, error = format!("{report:#}"), "task failed while ending");
                if outcome.is_ok() {
                    outcome = Err(report);
                }
            }
        }
    }

    /// The tasks that have not ended.
    fn hanging(&self) -> String {
        let mut names: Vec<_> = self.names.values().map(|name| format!("task {name:?}")).collect();
        names.sort();
        names.join(", ")
    }

    fn report(&mut self, ended: Result<(Id, anyhow::Result<()>), tokio::task::JoinError>) -> anyhow::Error {
        let (id, result) = match ended {
            Ok((id, result)) => (id, result),
            Err(error) => (error.id(), Err(anyhow::Error::new(error))),
        };
        let name = self.names.remove(&id).unwrap_or_else(|| "unnamed".to_owned());
        match result {
            Ok(()) => anyhow::anyhow!("task {name:?} of {} ended unexpectedly", self.scope),
            Err(error) => error.context(format!("task {name:?} of {}", self.scope)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_unexpected_end_names_the_task_and_stops_the_others() {
        let root = CancellationToken::new();
        let mut supervisor = Supervisor::new("test", &root);
        let token = supervisor.token();
        supervisor.spawn_loop("steady", async move { token.cancelled().await });
        supervisor.spawn("brittle", async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            anyhow::bail!("disk on fire")
        });
        let error = format!("{:#}", supervisor.join().await.unwrap_err());
        assert!(error.contains("brittle") && error.contains("disk on fire"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_is_reported_by_name() {
        let root = CancellationToken::new();
        let mut supervisor = Supervisor::new("test", &root);
        supervisor.spawn("careless", async { panic!("index out of range") });
        let error = format!("{:#}", supervisor.join().await.unwrap_err());
        assert!(error.contains("careless"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_that_do_not_end_are_named_beside_the_one_that_failed() {
        for fails in [false, true] {
            let root = CancellationToken::new();
            let mut supervisor = Supervisor::new("test", &root);
            let token = supervisor.token();
            supervisor.spawn_loop("steady", async move { token.cancelled().await });
            supervisor.spawn_loop("stuck", std::future::pending());
            if fails {
                supervisor.spawn("careless", async { panic!("index out of range") });
            } else {
                root.cancel();
            }
            let error = format!("{:#}", supervisor.join_within(Duration::from_secs(5)).await.unwrap_err());
            assert_eq!(error.contains("careless"), fails, "{error}");
            assert_eq!(error.contains("stuck"), !fails, "{error}");
            assert!(!error.contains("steady"), "{error}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn cancelling_joins_everything_without_error() {
        let root = CancellationToken::new();
        let mut supervisor = Supervisor::new("test", &root);
        for name in ["a", "b"] {
            let token = supervisor.token();
            supervisor.spawn_loop(name, async move { token.cancelled().await });
        }
        root.cancel();
        supervisor.join().await.unwrap();
    }
}
