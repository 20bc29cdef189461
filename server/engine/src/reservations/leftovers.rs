//! Requests that a client, a connection or a device has left behind: they still run, or are in the
//! write log.
//!
//! Writes of a client that disconnected while the log was full must not be applied hours later,
//! over writes of its successor that were acknowledged and flushed.
//!
//! Invariants:
//! - A new client is served only when all requests of connections, devices and clients that ended
//!   earlier are either visible or dropped.
//! - A new client does not wait for log space: an old request that waits for it is dropped with its
//!   connection and leaves the queue of the log.

use super::Reservations;
use super::permit::Permit;
use crate::seeded_bugs::seeded_bugs;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Longest wait for requests of earlier connections. Chosen by hand: less than the time that a client gives its
/// negotiation; it tries again.
const DRAIN_WAIT: Duration = Duration::from_secs(8);
/// Part of that wait in which a connection closed by its client may finish its requests. Chosen by
/// hand: a store that answers needs less.
const LEFTOVER_GRACE: Duration = Duration::from_secs(1);

/// Returns the end of a wait for requests of earlier connections that begins now, as a moment of
/// tokio's timers.
pub(super) fn drain_deadline() -> Instant {
    tokio::time::sleep(DRAIN_WAIT).deadline()
}

impl Reservations {
    /// Finishes or drops the requests of connections that their clients have closed. Open connections are not affected. To
    /// be called before a client is served, and before one is refused because of other clients.
    ///
    /// # Errors
    /// `Unavailable`: it takes too long; try again. Errors of the log.
    #[async_recursion]
    pub async fn end_leftovers(&self, volume: u32) -> Result<()> {
        self.end_left(volume, None, drain_deadline()).await
    }

    /// Like [`Reservations::end_leftovers`], on behalf of the connection `own`, which is left alone.
    pub(super) async fn end_left(
        &self,
        volume: u32,
        own: Option<&Arc<Permit>>,
        until: Instant,
    ) -> Result<()> {
        if seeded_bugs().leftovers_kept {
            return Ok(());
        }
        let left: Vec<Arc<Permit>> = {
            let all = self.users.lock();
            let connections = all.get(&volume).into_iter().flat_map(|users| &users.connections);
            let is_own = |permit: &Arc<Permit>| own.is_some_and(|own| Arc::ptr_eq(own, permit));
            connections.filter(|permit| !is_own(permit) && permit.is_left()).cloned().collect()
        };
        if !left.is_empty() {
            let ended = futures::future::join_all(left.iter().map(|permit| permit.ended()));
            if tokio::time::timeout(LEFTOVER_GRACE, ended).await.is_err() {
                left.iter().for_each(|permit| permit.close());
                self.mark_unsettled(volume);
            }
        }
        let Some(mark) = self.unsettled.lock().get(&volume).copied() else { return Ok(()) };
        self.quiet(volume, &left, until).await?;
        let mut unsettled = self.unsettled.lock();
        if unsettled.get(&volume) == Some(&mark) {
            unsettled.remove(&volume);
        }
        Ok(())
    }

    pub(super) fn mark_unsettled(&self, volume: u32) {
        *self.unsettled.lock().entry(volume).or_default() += 1;
    }

    /// Resolves when no request behind `gates` runs any more and everything that dropped requests have left in the log is
    /// visible. Each of the gates is closed, or its connection has ended.
    ///
    /// # Errors
    /// `Unavailable`: they take too long; try again. Errors of the log.
    pub(super) async fn quiet(
        &self,
        volume: u32,
        gates: &[Arc<Permit>],
        until: Instant,
    ) -> Result<()> {
        let late = |why: &str| {
            let what = format!("end earlier requests of a volume: {why}; try again");
            Error::new(ErrorKind::Unavailable, what)
        };
        let drained = async {
            for permit in gates {
                permit.drained().await;
            }
        };
        let drained = tokio::time::timeout_at(until, drained).await;
        drained.map_err(|_| late("some are still running"))?;
        let settled = tokio::time::timeout_at(until, (self.settle.0)(volume)).await;
        settled.map_err(|_| late("the write log does not make progress with some of them"))?
    }

    /// Like [`Reservations::end_leftovers`], and also waits for requests of an earlier device. To be
    /// called before a device is used.
    ///
    /// # Errors
    /// `Unavailable`: earlier requests are still in the log; try again. Errors of the log.
    #[async_recursion]
    pub async fn settle(&self, volume: u32) -> Result<()> {
        self.end_leftovers(volume).await?;
        self.quiet(volume, &[], drain_deadline()).await
    }
}
