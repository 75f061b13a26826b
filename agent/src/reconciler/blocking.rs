//! Targets whose operations block: the kernel's.

use super::Operations;
use crate::blocking::Blocking;
use cistern_core::reconcile::Classify;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

/// [`Operations`] that block in system calls, one at a time: a kernel map, routes, attached programs.
pub trait BlockingOperations: Send + 'static {
    /// Key of a row.
    type Key: Ord + Clone + Debug + Send + Sync + 'static;
    /// Desired content of a row.
    type Value: Clone + PartialEq + Debug + Send + Sync + 'static;
    /// Error of an operation.
    type Error: std::error::Error + Classify + Send + 'static;

    /// See [`Operations::update`].
    ///
    /// # Errors
    /// The target does not have the value.
    fn update(&mut self, key: &Self::Key, value: &Self::Value) -> Result<(), Self::Error>;

    /// See [`Operations::delete`].
    ///
    /// # Errors
    /// The target may still have the row.
    fn delete(&mut self, key: &Self::Key) -> Result<(), Self::Error>;

    /// See [`Operations::observe`].
    ///
    /// # Errors
    /// The target cannot be read completely.
    fn observe(&mut self) -> Result<BTreeMap<Self::Key, Self::Value>, Self::Error>;
}

/// A blocking target behind a [`Blocking`] port.
#[derive(Debug)]
pub struct Offloaded<T> {
    target: Arc<Mutex<T>>,
    port: Blocking,
}

impl<T: BlockingOperations> Offloaded<T> {
    /// Runs the operations of `target` on `port`.
    #[must_use]
    pub fn new(target: T, port: Blocking) -> Self {
        Self { target: Arc::new(Mutex::new(target)), port }
    }

    fn run<R: Send + 'static>(&self, operation: impl FnOnce(&mut T) -> R + Send + 'static) -> impl Future<Output = R> {
        let target = Arc::clone(&self.target);
        let port = self.port.clone();
        async move {
            // A panic inside an operation terminates the process with the name of its reconciler; nothing else fails
            // before.
            port.run(move || operation(&mut target.lock().unwrap_or_else(PoisonError::into_inner))).await
        }
    }
}

impl<T: BlockingOperations> Operations for Offloaded<T> {
    type Key = T::Key;
    type Value = T::Value;
    type Error = T::Error;

    async fn update(&self, key: &T::Key, value: &T::Value) -> Result<(), T::Error> {
        let (key, value) = (key.clone(), value.clone());
        self.run(move |target| target.update(&key, &value)).await
    }

    async fn delete(&self, key: &T::Key) -> Result<(), T::Error> {
        let key = key.clone();
        self.run(move |target| target.delete(&key)).await
    }

    async fn observe(&self) -> Result<BTreeMap<T::Key, T::Value>, T::Error> {
        self.run(BlockingOperations::observe).await
    }
}
