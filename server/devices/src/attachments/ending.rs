//! The end of all devices at a stop, in order or because the pool is lost.
//!
//! Invariant: nothing is attached or detached afterwards.

use super::{AT_ONCE_MAX, AttachedState, Attachments, DeviceSlot};
use crate::blocking::blocking;
use crate::volumes::Volumes;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Time that requests in flight have at an orderly stop. The next daemon gets those that are not
/// answered by then.
const LEAVE_GRACE: Duration = Duration::from_secs(5);

impl<V: Volumes> Attachments<V> {
    /// Stops serving in order: requests that were begun are answered, and the devices wait for the
    /// next daemon.
    #[async_recursion]
    pub async fn leave(&self) {
        let leave = |served: DeviceSlot| {
            served.lock().take().into_iter().for_each(|device| device.leave(LEAVE_GRACE));
            Ok(())
        };
        for error in self.end_all(leave).await {
            tracing::error!(error = %error.chain(), "could not stop a device in order");
        }
    }

    /// Ends all served devices concurrently, as each may take seconds. Returns the errors.
    async fn end_all(
        &self,
        end: impl Fn(DeviceSlot) -> Result<()> + Copy + Send + 'static,
    ) -> Vec<Error> {
        let mut ending = tokio::task::JoinSet::new();
        let turns = Arc::new(tokio::sync::Semaphore::new(AT_ONCE_MAX));
        for served in self.take_served().await {
            let turns = turns.clone();
            ending.spawn(async move {
                let _turn = turns.acquire().await; // never closed
                blocking(move || end(served)).await
            });
        }
        let mut failures = Vec::new();
        while let Some(ended) = ending.join_next().await {
            let panicked = |cause| Error::with_source(ErrorKind::Io, "end a device", cause);
            failures.extend(ended.map_err(panicked).and_then(|ended| ended).err());
        }
        failures
    }

    /// Ends the devices of a pool that is no longer ours. Their users get errors, because later
    /// reads would not return what they wrote.
    #[async_recursion]
    pub async fn abandon(&self) {
        let remove =
            |served: DeviceSlot| served.lock().take().map_or(Ok(()), |device| device.remove(true));
        for error in self.end_all(remove).await {
            tracing::error!(error = %error.chain(), "could not remove a device");
        }
    }

    async fn take_served(&self) -> Vec<DeviceSlot> {
        let all = self.live.lock().await.take();
        let served =
            all.into_iter().flat_map(BTreeMap::into_values).filter_map(|live| match live.state {
                AttachedState::Served(served) => {
                    served.resizes.abort();
                    Some(served.device)
                }
                AttachedState::Failed { .. } => None,
            });
        served.collect()
    }
}
