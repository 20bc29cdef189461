//! The log and its other members: their answers, and the owner's right to serve.
//!
//! Invariants:
//! - A read is answered only by an owner that holds a lease after it has the data.

use super::Log;
use block::{Error, ErrorKind, Result};
use std::time::Duration;

/// Longest time that closing waits for a quorum. Chosen by hand: several times as long as a
/// take-over may last.
pub(super) const QUORUM_WAIT: Duration = Duration::from_secs(10);

impl Log {
    /// Takes notice of the members' answers. The implementation of [`Replicas`](crate::Replicas)
    /// calls this, from any thread, without a lock that its own methods take.
    pub fn on_replicas(&self) {
        self.inner.shared.dirty.set();
        self.inner.drive();
        self.inner.lease.notify_waiters();
    }

    /// Resolves once this owner may answer a read whose data it already has. A log without other
    /// members always may.
    ///
    /// # Errors
    /// The reason for which the log was given up: it may have another owner.
    pub async fn await_lease(&self) -> Result<()> {
        let Some(replicas) = &self.inner.replicas else { return Ok(()) };
        loop {
            let mut changed = self.changes();
            changed.mark_unchanged();
            let notified = self.inner.lease.notified();
            self.inner.shared.check()?;
            if replicas.has_lease() {
                return Ok(());
            }
            tokio::select! {
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
