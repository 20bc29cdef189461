//! Detects a client that has disconnected while its requests run.
//!
//! Only a read sees the end of the stream, and a session that runs its maximum of requests does not
//! read. It therefore checks the socket periodically.
//!
//! Invariants:
//! - The requests of a disconnected client are dropped at the second check at the latest, so they
//!   neither wait for log space nor keep the volume from other clients.
//! - A client that has closed only its sending direction has until then to receive its replies.

use super::{End, Session};
use block::BlockDevice;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Sleep;

/// Pause between two checks. Chosen by hand: requests on a responsive store finish in less.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// The timer of the checks, and the result of the last one.
#[derive(Default)]
pub(super) struct Watch {
    sleep: Option<Pin<Box<Sleep>>>,
    was_gone: bool,
}

impl<D: BlockDevice> Session<D> {
    /// Checks periodically whether the client is still connected while requests run.
    pub(super) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Result<(), End> {
        loop {
            let sleep = match &mut self.watch.sleep {
                // This task polled it when it was armed, so its waker is set.
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
