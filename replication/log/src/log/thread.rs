//! The log thread, and its end.
//!
//! Invariants:
//! - It ticks a few times a second and does the work that no task stayed for. It records a failure
//!   of the log's disk.
//! - It does not keep the log open: it ends with the last handle.
//! - A step that panics fails the log.

use super::{DrivenCore, LogInner};
use crate::ring::shared_ring::SharedRing;
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

/// Time between two ticks of the log thread. Chosen by hand: it limits the age of unflushed data to
/// a second.
pub(super) const TICK: Duration = Duration::from_millis(200);

/// The thread, once it is started.
#[derive(Default)]
pub(super) struct LogThread {
    is_stopping: AtomicBool,
    handle: OnceLock<Thread>,
    join: Mutex<Option<JoinHandle<()>>>,
}

impl LogThread {
    /// Wakes the thread, which then does the work that others left.
    pub(super) fn nudge(&self) {
        if let Some(thread) = self.handle.get() {
            thread.unpark();
        }
    }
}

impl LogInner {
    fn tick(&self) {
        if let Some(DrivenCore { core, disk }) = &mut *self.driven.lock() {
            let _guard = FailOnPanic(&self.shared);
            core.tick(disk, &self.shared);
        }
        self.drive();
    }

    /// Ends the thread, and waits for it unless it waits for a failed disk.
    pub(super) fn stop_thread(&self) {
        self.thread.is_stopping.store(true, Ordering::Release);
        self.thread.nudge();
        let thread = self.thread.join.lock().take();
        let Some(thread) = thread else { return };
        let is_own = thread.thread().id() == std::thread::current().id();
        // A thread that is recording a failure may be waiting for the disk that has failed.
        if !is_own && self.is_noted() && thread.join().is_err() {
            tracing::error!("the log thread has panicked");
        }
    }
}

impl Drop for LogInner {
    fn drop(&mut self) {
        self.stop_thread();
    }
}

/// Starts the thread of `inner`, and lets the disk's threads step the core.
///
/// # Errors
/// `Io` if the thread cannot be started.
pub(super) fn start_thread(inner: &Arc<LogInner>) -> Result<()> {
    let weak = Arc::downgrade(inner);
    if let Some(DrivenCore { disk, .. }) = &*inner.driven.lock() {
        let weak = Weak::clone(&weak);
        disk.set_notify(Arc::new(move || {
            if let Some(inner) = weak.upgrade() {
                inner.shared.dirty.set();
                inner.drive();
            }
        }));
    }
    let clock = Arc::clone(&inner.clock);
    let thread = std::thread::Builder::new()
        .name("spindle-log".into())
        .spawn(move || {
            loop {
                let started = clock.now();
                std::thread::park_timeout(TICK);
                let Some(inner) = weak.upgrade() else { return };
                inner.note_failure();
                if inner.thread.is_stopping.load(Ordering::Acquire) {
                    return;
                }
                if clock.now() - started >= TICK { inner.tick() } else { inner.drive() }
            }
        })
        .map_err(|e| Error::with_source(ErrorKind::Io, "start the log thread", e))?;
    let _ = inner.thread.handle.set(thread.thread().clone());
    *inner.thread.join.lock() = Some(thread);
    inner.drive();
    Ok(())
}

/// Fails the log when a step panics: the core is then in an unknown state, and nothing more may be
/// answered.
pub(super) struct FailOnPanic<'a>(pub(super) &'a SharedRing);

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "step the write log: a check of its own state failed";
            self.0.fail(Error::new(ErrorKind::Io, what));
        }
    }
}
