//! The future that waits until the log reaches an LSN.
//!
//! Invariants:
//! - A dropped waiter leaves no wake-up behind.

use super::LogInner;
use crate::ring::shared_ring::Target;
use block::Result;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Resolves once the log has reached `target`.
pub(super) struct Reached<'a> {
    pub(super) inner: &'a LogInner,
    pub(super) target: Target,
    pub(super) id: Option<u64>,
}

impl Future for Reached<'_> {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        this.inner.shared.poll_reached(this.target, &mut this.id, context)
    }
}

impl Drop for Reached<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.inner.shared.forget(self.target.lsn, self.target.wait, id);
        }
    }
}
