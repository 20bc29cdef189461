//! What somebody has left behind who is not there any more: requests that still run, or are in the write log.
//!
//! A client that has gone while the log is full must not have its writes applied hours later, on top of what its
//! successor was answered and has flushed.
//!
//! Invariants:
//! - Whoever comes is served when nothing comes any more of connections, devices and clients that were over before.
//! - It does not wait for log space: a request that does is dropped with its connection, and leaves the log's queue.

use super::Claims;
use super::gate::Gate;
use crate::planted::planted;
use block::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Requests of an older connection are waited for so long. Chosen by hand: less than a client waits for
/// its negotiation; it tries again.
pub(super) const DRAIN_WAIT: Duration = Duration::from_secs(8);
/// Of that, connections whose clients have closed them have so long to come to their end by themselves. Chosen by hand:
/// what they have sent is done by then where the store answers.
const LEFTOVER_GRACE: Duration = Duration::from_secs(1);

impl Claims {
    /// To be called before somebody is served, or refused because of others: what connections have left behind whose clients
    /// have closed them is done then, or never comes. Those that are open go on.
    ///
    /// # Errors
    /// `Unavailable`: it takes too long; try again. Those of the log.
    pub async fn end_leftovers(&self, volume: u32) -> Result<()> {
        self.end_left(volume, None, Instant::now() + DRAIN_WAIT).await
    }

    /// As [`Claims::end_leftovers`], for the connection that is `own`.
    pub(super) async fn end_left(
        &self,
        volume: u32,
        own: Option<&Arc<Gate>>,
        until: Instant,
    ) -> Result<()> {
        if planted().leftovers_kept {
            return Ok(());
        }
        let left: Vec<Arc<Gate>> = {
            let all = self.users.lock();
            let connections = all.get(&volume).into_iter().flat_map(|users| &users.connections);
            let is_own = |gate: &Arc<Gate>| own.is_some_and(|own| Arc::ptr_eq(own, gate));
            connections.filter(|gate| !is_own(gate) && gate.is_left()).cloned().collect()
        };
        if !left.is_empty() {
            let ended = futures::future::join_all(left.iter().map(|gate| gate.ended()));
            if tokio::time::timeout(LEFTOVER_GRACE, ended).await.is_err() {
                left.iter().for_each(|gate| gate.close());
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

    /// Ends when nothing comes to the volume any more that requests behind `gates`, which are closed or of connections that
    /// have ended, and dropped ones have left.
    ///
    /// # Errors
    /// `Unavailable`: they take too long; try again. Those of the log.
    pub(super) async fn quiet(
        &self,
        volume: u32,
        gates: &[Arc<Gate>],
        until: Instant,
    ) -> Result<()> {
        let late = |why: &str| {
            let what = format!("end earlier requests of a volume: {why}; try again");
            Error::new(ErrorKind::Unavailable, what)
        };
        let drained = async {
            for gate in gates {
                gate.drained().await;
            }
        };
        let drained = tokio::time::timeout_at(until, drained).await;
        drained.map_err(|_| late("some are still running"))?;
        let settled = tokio::time::timeout_at(until, (self.settle.0)(volume)).await;
        settled.map_err(|_| late("some are in the write log, which does not get on"))?
    }

    /// To be called before a device is used: see the file's head.
    ///
    /// # Errors
    /// `Unavailable`: earlier requests are still queued; try again. Those of the log.
    pub async fn settle(&self, volume: u32) -> Result<()> {
        self.quiet(volume, &[], Instant::now() + DRAIN_WAIT).await
    }
}
