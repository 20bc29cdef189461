//! The future that waits until the log reaches an LSN.
//!
//! Invariants:
//! - A dropped waiter leaves no wake-up behind.

use super::Inner;
use crate::options::Wait;
use block::{Lsn, Result};
use std::pin::Pin;
use std::task::{Context, Poll};

/// Resolves once the log has reached `lsn`.
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
