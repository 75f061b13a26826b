//! Targets that other programs of the node change, too.

use super::{BlockingOperations, Offloaded, Operations};
use crate::clock::Clock;
use crate::tables::findings::{Findings, Found};
use crate::tables::{Reader, Watched};
use cistern_core::reconcile::contention::{Contention, REPAIRS, WINDOW};
use cistern_core::reconcile::{Classify, ErrorClass};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A blocking target whose rows are put back at once when another program takes them away. Rows that are taken too often
/// are put back less often, and reported as findings.
pub struct Kept<T: BlockingOperations, K: Ord, V> {
    target: Offloaded<T>,
    /// Changes with the target.
    seen: Watched<K, V>,
    name: &'static str,
    findings: Findings,
    clock: Clock,
    past: Mutex<Past<T>>,
}

/// What was done to the target.
struct Past<T: BlockingOperations> {
    /// What was set, and not deleted since.
    set: BTreeMap<T::Key, T::Value>,
    contention: Contention<T::Key>,
}

/// Why a row is not set.
#[derive(Debug, thiserror::Error)]
pub enum KeptError<E: std::error::Error> {
    /// The target's error.
    #[error(transparent)]
    Target(E),
    /// Another program takes the row away again and again.
    #[error(
        "taken away by another program {REPAIRS} times within {} s; put back every {} s from now on",
        WINDOW.as_secs(),
        WINDOW.as_secs()
    )]
    Contested {
        /// Time to the next repair.
        retry_after: Duration,
    },
}

impl<E: std::error::Error + Classify> Classify for KeptError<E> {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Target(error) => error.class(),
            Self::Contested { retry_after } => ErrorClass::Throttled { retry_after: Some(*retry_after) },
        }
    }
}

impl<T: BlockingOperations, K: Ord, V> Kept<T, K, V> {
    /// Keeps what is set in `target`, whose changes `seen` shows. `name` is that of its reconciler.
    #[must_use]
    pub fn new(target: Offloaded<T>, seen: Reader<K, V>, name: &'static str, findings: Findings, clock: Clock) -> Self {
        let past = Mutex::new(Past { set: BTreeMap::new(), contention: Contention::default() });
        Self { target, seen: seen.into(), name, findings, clock, past }
    }

    fn past(&self) -> MutexGuard<'_, Past<T>> {
        self.past.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self) {
        let now = self.clock.monotonic();
        let contested: Vec<Found> = self
            .past()
            .contention
            .contested(now)
            .map(|key| Found {
                reason: "contested",
                subject: format!("{} {key:?}", self.name),
                message: format!(
                    "another program of this node took it away {REPAIRS} times within {} s; it is put back every {} s until \
                     that ends. `ip monitor route address` shows when; systemd-networkd (ManageForeignRoutes=), \
                     NetworkManager (unmanaged-devices=) and keepalived are programs that can be configured to leave it",
                    WINDOW.as_secs(),
                    WINDOW.as_secs()
                ),
            })
            .collect();
        self.findings.replace(self.name, contested);
    }
}

impl<T: BlockingOperations, K, V> Operations for Kept<T, K, V>
where
    K: Ord + Send + Sync + 'static,
    V: Send + Sync + 'static,
{
    type Key = T::Key;
    type Value = T::Value;
    type Error = KeptError<T::Error>;

    async fn update(&self, key: &T::Key, value: &T::Value) -> Result<(), Self::Error> {
        let repair = {
            let mut past = self.past();
            if past.set.get(key) == Some(value) {
                past.contention.repair(key, self.clock.monotonic())
            } else {
                past.contention.forget(key);
                Ok(())
            }
        };
        if let Err(retry_after) = repair {
            self.report();
            return Err(KeptError::Contested { retry_after });
        }
        self.target.update(key, value).await.map_err(KeptError::Target)?;
        self.past().set.insert(key.clone(), value.clone());
        Ok(())
    }

    async fn delete(&self, key: &T::Key) -> Result<(), Self::Error> {
        self.target.delete(key).await.map_err(KeptError::Target)?;
        let mut past = self.past();
        past.set.remove(key);
        past.contention.forget(key);
        Ok(())
    }

    async fn observe(&self) -> Result<BTreeMap<T::Key, T::Value>, Self::Error> {
        let observed = self.target.observe().await.map_err(KeptError::Target)?;
        self.report();
        Ok(observed)
    }

    async fn changed(&self) {
        self.seen.changed().await;
    }
}
