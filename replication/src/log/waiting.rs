//! Who waits for an entry of the log: until it is answered, and what is left when nobody waits any more.
//!
//! Invariants:
//! - An entry that was queued is written, whether its waiter stays or goes.

use super::Inner;
use crate::options::Wait;
use block::{Lsn, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Makes sure that an entry is written though nobody waits for it.
pub(super) struct Nudge {
    pub(super) inner: Arc<Inner>,
    pub(super) is_due: bool,
    /// Of the entry, once it has one.
    pub(super) lsn: Option<Lsn>,
    pub(super) is_answered: bool,
}

impl Drop for Nudge {
    fn drop(&mut self) {
        match self.lsn {
            Some(lsn) if self.is_answered => self.inner.shared.forget_refusal(lsn),
            Some(lsn) => self.inner.shared.abandon(lsn),
            None => {}
        }
        if self.is_due {
            self.inner.nudge();
        }
    }
}

/// Ready when the log has come to `lsn`.
pub(super) struct Reached<'a> {
    pub(super) inner: &'a Inner,
    pub(super) lsn: Lsn,
    pub(super) wait: Wait,
    /// See [`Shared::poll_reached`].
    pub(super) is_entry: bool,
    pub(super) id: Option<u64>,
}

impl Future for Reached<'_> {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        let place = (this.lsn, this.wait, this.is_entry);
        this.inner.shared.poll_reached(place, &mut this.id, context)
    }
}

impl Drop for Reached<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.inner.shared.forget(self.lsn, self.wait, id);
        }
    }
}
