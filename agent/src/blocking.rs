//! Work that may wait for a disk, the kernel or a network namespace, kept off the async workers.
//!
//! The runtime has few workers, and they serve CNI, probes and the leader election: a call that waits on one of them stops
//! all of that. Such a call is handed to a [`Blocking`] port. In production the port runs it on a thread of its own, and
//! lets a bounded number run at a time, so that a disk that hangs takes no thread from netlink. Scripts and the simulation
//! run it inline, at once: they have no disk that hangs, and their clock is paused, where a thread would make a run differ
//! from the next one.

use std::future::pending;
use std::panic::resume_unwind;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Where blocking work of one kind runs. Clones share the bound.
#[derive(Debug, Clone)]
pub struct Blocking {
    /// How many may run at a time; none runs them inline.
    threads: Option<Arc<Semaphore>>,
}

impl Blocking {
    /// Runs work on threads, at most `limit` at a time; what comes on top waits in order.
    #[must_use]
    pub fn threads(limit: usize) -> Self {
        Self { threads: Some(Arc::new(Semaphore::new(limit))) }
    }

    /// Runs work in the task that asks.
    #[must_use]
    pub const fn inline() -> Self {
        Self { threads: None }
    }

    /// Runs `work` and returns its result. Work that has begun is finished even if the caller is dropped, and counts
    /// against the bound until then. A panic of the work is one of the caller.
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
        match on_thread.await.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(done) => done,
            Err(Ok(panic)) => resume_unwind(panic),
            // The runtime is shutting down, and this task with it.
            Err(Err(_)) => pending().await,
        }
    }
}

/// The ports of an agent. Each kind of work has a bound of its own, so that one that hangs stops no other.
#[derive(Debug, Clone)]
pub struct Ports {
    /// State files and the CNI configuration.
    pub disk: Blocking,
    /// What the agent changes and observes in the kernel: netlink, kernel maps, attached programs, namespaces.
    pub kernel: Blocking,
    /// What is read for a caller: dumps of kernel maps, metrics. Its cost follows from the number of flows.
    pub inspection: Blocking,
}

/// One write of each file at a time is the rule; the rest is reading at the start and for callers.
const DISK: usize = 4;
/// Every reconciler of the kernel has at most one operation under way.
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

    /// In the task that asks.
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
    async fn work_that_hangs_stops_neither_its_worker_nor_another_port() {
        let (disk, kernel) = (Blocking::threads(1), Blocking::threads(1));
        let (release, hang) = mpsc::channel::<()>();
        let port = disk.clone();
        let stalled = tokio::spawn(async move { port.run(move || hang.recv().is_ok()).await });
        // This test has one worker: a call that blocked it would end the test here.
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

    #[tokio::test(start_paused = true)]
    async fn inline_work_is_done_within_the_same_poll() {
        let done = futures::FutureExt::now_or_never(Blocking::inline().run(|| 3));
        assert_eq!(done, Some(3));
    }
}
