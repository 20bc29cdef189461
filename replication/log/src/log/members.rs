//! The log and its other members: their answers, and the owner's right to serve.
//!
//! Invariants:
//! - A read is answered only by an owner that holds a lease after it has the data.

use super::Log;
use block::{Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use std::time::Duration;

/// Longest time that closing waits for a quorum. Chosen by hand: several times as long as a
/// take-over may last.
pub(super) const QUORUM_WAIT: Duration = Duration::from_secs(10);

impl Log {
    /// Reports whether several machines keep the log. Files beside the ring are on this one only.
    #[must_use]
    pub fn has_replicas(&self) -> bool {
        self.inner.replicas.is_some()
    }

    /// Takes notice of the members' answers. The implementation of [`Replicas`](crate::Replicas)
    /// calls this, from any thread, without a lock that its own methods take.
    pub fn on_replicas(&self) {
        self.inner.shared.dirty.set();
        self.inner.drive();
        self.inner.lease.notify_waiters();
    }

    /// Returns the LSN up to which everything is in the data tier: that which a batch would state now.
    #[must_use]
    pub fn destaged_lsn(&self) -> Lsn {
        self.inner.shared.destaged()
    }

    /// Returns the sequence of the first batch that the ring holds for members that lack it; 1 for a log
    /// without members, which does not keep the places of its batches.
    #[must_use]
    pub fn first_batch(&self) -> u64 {
        let before = self.inner.shared.places.lock().before();
        before.map_or(1, |before| before.sequence + 1)
    }

    /// Reads consecutive batches behind the sequence `after`: at most `bytes_max` bytes, but at least one
    /// batch, and none if no batch is behind or the log has no members. Blocks.
    ///
    /// # Errors
    /// `NotFound`: the batches were released. `Corrupt`: the batch behind `after` is damaged; a later one
    /// ends the list. `Io`.
    pub fn read_batches(&self, after: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        // A copy, so that the log does not wait for the disk.
        let places = self.inner.shared.places.lock().clone();
        let read = places.read(&*self.inner.reader, self.inner.chain, after, bytes_max)?;
        Ok(read.into_iter().map(|batch| (batch.position(), batch.bytes)).collect())
    }

    /// Resolves once this owner may answer a read whose data it already has. A log without other
    /// members always may.
    ///
    /// # Errors
    /// The reason for which the log was given up: it may have another owner.
    pub async fn await_lease(&self) -> Result<()> {
        let Some(replicas) = &self.inner.replicas else { return Ok(()) };
        let may_answer = || self.inner.shared.check().map(|()| replicas.has_lease());
        if may_answer()? {
            return Ok(()); // the usual case waits for nothing
        }
        loop {
            let mut changed = self.changes();
            let notified = self.inner.lease.notified();
            if may_answer()? {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = notified => {}
                _ = changed.changed() => {}
            }
        }
    }
}

/// Builds the error of a log that cannot be closed in order.
pub(super) fn without_quorum() -> Error {
    let what = "close the write log: too few of its members answer. The newest writes are on this machine, and were \
                not answered; the next owner of the pool decides about them";
    Error::new(ErrorKind::Unavailable, what)
}

#[cfg(test)]
mod tests;
