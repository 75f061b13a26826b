//! Work that may block on a disk, the kernel or a network namespace, off the async workers.
//!
//! The runtime has few workers, which serve CNI, probes and the leader election: a blocking call on one of them would
//! stop all of that. Such a call is passed to a [`Blocking`] port. In production the port runs it on a separate thread,
//! with bounded concurrency, so that a hanging disk takes no threads from netlink. Scripts and the simulation run it
//! inline: they have no hanging disk, and their clock is paused, where threads would make runs irreproducible.

use std::future::{Future, pending};
use std::panic::resume_unwind;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Executor of one kind of blocking work. Clones share the bound.
#[derive(Debug, Clone)]
pub struct Blocking {
    /// Maximum concurrency; `None` runs work inline.
    threads: Option<Arc<Semaphore>>,
}

impl Blocking {
    /// Runs work on threads, at most `limit` at a time; further work queues in order.
    #[must_use]
    pub fn threads(limit: usize) -> Self {
        Self { threads: Some(Arc::new(Semaphore::new(limit))) }
    }

    /// Runs work in the caller's task.
    #[must_use]
    pub const fn inline() -> Self {
        Self { threads: None }
    }

    /// Runs `work` and returns its result. Work that was started completes even if the caller is dropped, and counts
    /// against the bound until then. A panic of the work is propagated to the caller.
    pub async fn run<T, F>(&self, work: F) -> T
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let Some(threads) = &self.threads else { return work() };
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(threads).acquire_owned().await else { return pending().await };
        let on_thread = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        joined(on_thread).await
    }

    /// Runs a task that blocks between its awaits, such as an actor or a loop around a file, on a thread of its own until it
    /// ends. It does not count against the bound. Dropping this future does not end the task: it needs its own
    /// cancellation. A panic of the task is propagated to the caller.
    pub async fn host<F>(&self, task: F) -> F::Output
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        if self.threads.is_none() {
            return task.await;
        }
        let runtime = tokio::runtime::Handle::current();
        joined(tokio::task::spawn_blocking(move || runtime.block_on(task))).await
    }
}

async fn joined<T>(on_thread: tokio::task::JoinHandle<T>) -> T {
    match on_thread.await.map_err(tokio::task::JoinError::try_into_panic) {
        Ok(done) => done,
        Err(Ok(panic)) => resume_unwind(panic),
        // The runtime is shutting down, and this task with it.
        Err(Err(_)) => pending().await,
    }
}

/// The ports of an agent. Each kind of work has its own bound, so that a hanging one does not block others.
#[derive(Debug, Clone)]
pub struct Ports {
    /// State files and the CNI configuration.
    pub disk: Blocking,
    /// Changes and observations of the kernel: netlink, kernel maps, attached programs, namespaces.
    pub kernel: Blocking,
    /// Reads for callers: dumps of kernel maps, metrics. Their cost depends on the number of flows.
    pub inspection: Blocking,
}

/// Usually there is one write per file at a time; the rest are reads at startup and for callers.
const DISK: usize = 4;
/// Every reconciler of the kernel has at most one running operation.
const KERNEL: usize = 16;
/// Callers of dumps wait for each other.
const INSPECTION: usize = 2;

impl Ports {
    /// On threads.
    #[must_use]
    pub fn threads() -> Self {
        let (disk, kernel) = (Blocking::threads(DISK), Blocking::threads(KERNEL));
        Self { disk, kernel, inspection: Blocking::threads(INSPECTION) }
    }

    /// In the caller's task.
    #[must_use]
    pub const fn inline() -> Self {
        Self { disk: Blocking::inline(), kernel: Blocking::inline(), inspection: Blocking::inline() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[tokio::test]
    async fn hanging_work_blocks_neither_its_worker_nor_another_port() {
        let (disk, kernel) = (Blocking::threads(1), Blocking::threads(1));
        let (release, hang) = mpsc::channel::<()>();
        let port = disk.clone();
        let stalled = tokio::spawn(async move { port.run(move || hang.recv().is_ok()).await });
        // This test has one worker: a blocking call would hang the test here.
        assert_eq!(kernel.run(|| 7).await, 7);
        tokio::task::yield_now().await;
        let waiting = disk.run(|| 8);
        tokio::pin!(waiting);
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut waiting).await.is_err(), "the bound holds");
        release.send(()).unwrap();
        assert!(stalled.await.unwrap());
        assert_eq!(waiting.await, 8);
    }

    #[tokio::test]
    async fn a_panic_of_the_work_is_one_of_its_task() {
        for port in [Blocking::threads(1), Blocking::inline()] {
            let run = tokio::spawn({
                let port = port.clone();
                async move { port.run(|| panic!("index out of range")).await }
            });
            assert!(run.await.unwrap_err().is_panic());
            assert_eq!(port.run(|| 1).await, 1, "the permit came back");
        }
    }

    #[tokio::test]
    async fn a_hosted_task_that_blocks_does_not_block_the_worker() {
        let (release, hang) = mpsc::channel::<()>();
        let (sender, mut answer) = tokio::sync::mpsc::channel(1);
        let hosted = tokio::spawn(async move {
            let task = async move {
                tokio::time::sleep(Duration::from_millis(1)).await;
                sender.send(1).await.unwrap();
                // Blocks its thread.
                hang.recv().unwrap();
                sender.send(2).await.unwrap();
            };
            Blocking::threads(1).host(task).await;
        });
        assert_eq!(answer.recv().await, Some(1));
        tokio::task::yield_now().await;
        release.send(()).unwrap();
        assert_eq!(answer.recv().await, Some(2));
        hosted.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn inline_work_is_done_within_the_same_poll() {
        let done = futures::FutureExt::now_or_never(Blocking::inline().run(|| 3));
        assert_eq!(done, Some(3));
    }
}
