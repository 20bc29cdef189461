//! The gate of a connection: all its requests pass it, so that they can be stopped and waited for.
//!
//! Invariants:
//! - No request passes a closed gate.

use super::request::Connection;
use block::{Error, ErrorKind, Line, Result, Silence};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::Notify;

/// All requests of one connection pass it, so that they can be stopped and waited for.
#[derive(Debug, Default)]
pub(crate) struct Permit {
    is_closed: AtomicBool,
    /// The connection has ended.
    is_over: AtomicBool,
    pub(super) running_count: AtomicUsize,
    /// The gate was closed, its connection has ended, or the last request behind it has ended.
    changed: Notify,
    line: Option<Arc<dyn Line>>,
    /// Names the client in messages.
    pub(super) label: String,
}

/// A request that is running.
#[derive(Debug)]
pub(crate) struct PermitUse<'a>(&'a Permit);

/// Like [`PermitUse`], for a task that may outlive the request.
#[derive(Debug)]
pub(crate) struct PermitHeld(Arc<Permit>);

impl Drop for PermitHeld {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Permit {
    pub(super) fn new(connection: &Connection<'_>) -> Arc<Permit> {
        let (line, label) = (connection.line.clone(), connection.label.to_owned());
        Arc::new(Permit { line, label, ..Permit::default() })
    }

    /// Returns the silence of the client, or `None` if it answers.
    pub(super) fn silence(&self) -> Option<Silence> {
        self.line.as_ref()?.silence()
    }

    /// Passes the gate for one request.
    ///
    /// # Errors
    /// `Fenced`: another connection has replaced this one, its client has closed it and another
    /// client has come, or the attachment was ended.
    pub(crate) fn pass(&self) -> Result<PermitUse<'_>> {
        self.enter();
        let passed = PermitUse(self);
        self.check_open().map(|()| passed)
    }

    /// Like [`Permit::pass`], for a task that may outlive the request.
    pub(crate) fn pass_on(self: &Arc<Self>) -> Result<PermitHeld> {
        self.enter();
        let passed = PermitHeld(self.clone());
        self.check_open().map(|()| passed)
    }

    fn enter(&self) {
        self.running_count.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        let before = self.running_count.fetch_sub(1, Ordering::SeqCst);
        // Nothing waits for the end of requests while others may start.
        let is_waited_for =
            || self.is_closed.load(Ordering::SeqCst) || self.is_over.load(Ordering::SeqCst);
        if before == 1 && is_waited_for() {
            self.changed.notify_waiters();
        }
    }

    fn check_open(&self) -> Result<()> {
        if !self.is_closed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let what = "serve a request: its connection is over or was replaced, or its client is no \
                    longer attached";
        Err(Error::new(ErrorKind::Fenced, what))
    }

    /// The client has closed the connection, and its session has not ended yet.
    pub(super) fn is_left(&self) -> bool {
        !self.is_over.load(Ordering::SeqCst)
            && self.line.as_ref().is_some_and(|line| line.is_over())
    }

    /// Notes that the connection has ended and no request of it runs.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// Resolves when the connection has ended.
    pub(super) async fn ended(&self) {
        self.until(|| self.is_over.load(Ordering::SeqCst)).await;
    }

    /// Describes the client in messages, and how long it has been silent.
    pub(super) fn described(&self) -> String {
        match self.silence() {
            Some(silence) => format!("{} ({silence})", self.label),
            None => self.label.clone(),
        }
    }

    /// Lets no further request start.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// Whether no request of the connection runs, and none will. Its session is about to end.
    pub(super) fn is_closed_and_drained(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst) && self.running_count.load(Ordering::SeqCst) == 0
    }

    /// Resolves when the gate is closed.
    pub(crate) async fn closed(&self) {
        self.until(|| self.is_closed.load(Ordering::SeqCst)).await;
    }

    pub(super) async fn drained(&self) {
        self.until(|| self.running_count.load(Ordering::SeqCst) == 0).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        let mut changed = std::pin::pin!(self.changed.notified());
        loop {
            changed.as_mut().enable(); // before the check, so that no change is missed
            if is_so() {
                return;
            }
            changed.as_mut().await;
            changed.set(self.changed.notified());
        }
    }
}

impl Drop for PermitUse<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
