//! Publish desired rows, await their realisation.

use crate::tables::Reader;
use std::fmt::{self, Debug};
use std::future::Future;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Why a row is not realised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotRealised {
    /// An operation failed; it is retried while the row is desired.
    #[error("{0}")]
    Failed(String),
    /// Neither success nor failure within this time; the operation continues.
    #[error("{target} were not updated within {} s", within.as_secs())]
    Late {
        /// Name of the target.
        target: &'static str,
        /// How long the caller waited.
        within: Duration,
    },
    /// Another value was published for the row meanwhile.
    #[error("{target}: another value was published for the row")]
    Superseded {
        /// Name of the target.
        target: &'static str,
    },
    /// The reconciler has stopped.
    #[error("the agent is shutting down")]
    Ended,
}

/// A caller that waits for a row.
pub(super) struct Request<K, V> {
    pub(super) key: K,
    /// The row in the table at the time of the request; `None` for no row.
    pub(super) wanted: Option<V>,
    pub(super) reply: oneshot::Sender<Result<(), NotRealised>>,
}

pub(super) type Requests<K, V> = mpsc::Receiver<Request<K, V>>;

/// Maximum number of waiting requests; further callers wait to submit theirs.
const QUEUE: usize = 256;

/// Waits until rows of a table are realised in its target. Clones use the same reconciler.
pub struct Handle<K: Ord, V> {
    target: &'static str,
    desired: Reader<K, V>,
    sender: mpsc::Sender<Request<K, V>>,
}

impl<K: Ord, V> Clone for Handle<K, V> {
    fn clone(&self) -> Self {
        Self { target: self.target, desired: self.desired.clone(), sender: self.sender.clone() }
    }
}

impl<K: Ord, V> Debug for Handle<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("target", &self.target).finish_non_exhaustive()
    }
}

pub(super) fn new<K: Ord, V>(target: &'static str, desired: Reader<K, V>) -> (Handle<K, V>, Requests<K, V>) {
    let (sender, requests) = mpsc::channel(QUEUE);
    (Handle { target, desired, sender }, requests)
}

impl<K, V> Handle<K, V>
where
    K: Ord + Send + Sync + 'static,
    V: Clone + Send + Sync + 'static,
{
    /// Waits until the target has what the table has under `key` at the time of this call, a value or no row.
    ///
    /// The owner of the table publishes, then calls this, and may continue to publish while the future waits. The row
    /// is tried at once, before others and regardless of its back-off; also before the first full pass, and before the
    /// table is synced.
    ///
    /// # Errors
    /// The error of that operation. While the row remains in the table it is retried; to give up, remove it.
    pub fn realised(&self, key: K, within: Duration) -> impl Future<Output = Result<(), NotRealised>> + Send + 'static {
        let wanted = self.desired.peek().rows.get(&key).cloned();
        let (target, sender) = (self.target, self.sender.clone());
        async move { in_time(target, within, ask(&sender, key, wanted)).await }
    }

    /// Waits until the table has `value` under `key`, for a caller that does not publish it, and the target has it, too.
    ///
    /// # Errors
    /// As [`Handle::realised`].
    pub fn has(
        &self,
        key: K,
        value: V,
        within: Duration,
    ) -> impl Future<Output = Result<(), NotRealised>> + Send + 'static
    where
        K: Clone,
    {
        let (target, sender, mut desired) = (self.target, self.sender.clone(), self.desired.clone());
        async move {
            let published = async {
                loop {
                    desired.snapshot();
                    match ask(&sender, key.clone(), Some(value.clone())).await {
                        Err(NotRealised::Superseded { .. }) => desired.changed().await,
                        outcome => return outcome,
                    }
                }
            };
            in_time(target, within, published).await
        }
    }
}

async fn ask<K, V>(sender: &mpsc::Sender<Request<K, V>>, key: K, wanted: Option<V>) -> Result<(), NotRealised> {
    let (reply, answer) = oneshot::channel();
    sender.send(Request { key, wanted, reply }).await.map_err(|_| NotRealised::Ended)?;
    answer.await.map_err(|_| NotRealised::Ended)?
}

async fn in_time(
    target: &'static str,
    within: Duration,
    work: impl Future<Output = Result<(), NotRealised>>,
) -> Result<(), NotRealised> {
    tokio::time::timeout(within, work).await.unwrap_or(Err(NotRealised::Late { target, within }))
}
