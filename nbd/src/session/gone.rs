//! Clients that have gone while requests of theirs run: nobody asks for these any more.
//!
//! The end of the stream is seen by reading, which a session does not do while it has as many requests as it may. So
//! it looks at the socket from time to time.
//!
//! Invariants:
//! - What runs for a client that has gone is dropped two looks after that at the latest, so that it neither waits for
//!   log space nor keeps the volume from others.
//! - A client that has closed one direction only, and still takes replies, has a moment for them.

use super::{End, Session};
use block::BlockDevice;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Sleep;

/// Pause between two looks. Chosen by hand: what is running on a store that answers is over by then.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// When to look, and what was seen.
#[derive(Default)]
pub(super) struct Watch {
    sleep: Option<Pin<Box<Sleep>>>,
    was_gone: bool,
}

impl<D: BlockDevice> Session<D> {
    /// Looks from time to time whether the client for whom requests run is there.
    pub(super) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Result<(), End> {
        loop {
            let sleep = match &mut self.watch.sleep {
                // Its waker is this task's since it was armed.
                Some(sleep) if !sleep.is_elapsed() => return Ok(()),
                Some(sleep) => sleep,
                None if self.running.is_empty() => return Ok(()),
                None => self.watch.sleep.insert(Box::pin(tokio::time::sleep(LOOK_PAUSE))),
            };
            let Poll::Ready(()) = sleep.as_mut().poll(cx) else { return Ok(()) };
            self.watch.sleep = None;
            let is_gone = !self.running.is_empty() && self.stream.is_closed_by_peer();
            if is_gone && self.watch.was_gone {
                return Err(End::Gone { request_count: self.running.len() });
            }
            self.watch.was_gone = is_gone;
        }
    }
}
