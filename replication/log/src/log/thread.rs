//! The log thread, and its end.
//!
//! Invariants:
//! - It ticks a few times a second and does the work that no task stayed for. It records a failure
//!   of the log's disk.
//! - It does not keep the log open: it ends with the last handle.
//! - A step that panics fails the log.

use super::{DrivenCore, LogInner};
use crate::ring::shared_ring::SharedRing;
use block::env::Clock;
use block::simulated::{Executor, simulated};
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Time between two ticks of the log thread. Chosen by hand: it limits the age of unflushed data to
/// a second.
pub(super) const TICK: Duration = Duration::from_millis(200);

/// The thread, once it is started.
#[derive(Default)]
pub(super) struct LogThread {
    is_stopping: AtomicBool,
    handle: OnceLock<Thread>,
    join: Mutex<Option<JoinHandle<()>>>,
    /// Wakes the task that takes the place of the thread in a simulation.
    simulated: Arc<Notify>,
}

impl LogThread {
    /// Wakes the thread, which then does the work that others left.
    pub(super) fn nudge(&self) {
        match self.handle.get() {
            Some(thread) => thread.unpark(),
            None => self.simulated.notify_one(),
        }
    }
}

impl LogInner {
    fn tick(&self) {
        if let Some(DrivenCore { core, disk }) = &mut *self.driven.lock() {
            let _guard = FailOnPanic(&self.shared);
            core.tick(&mut **disk, &self.shared);
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
    if let Some(executor) = simulated() {
        let nudged = Arc::clone(&inner.thread.simulated);
        executor.spawn(Box::pin(simulate_thread(weak, clock, nudged, Arc::clone(&executor))));
        inner.drive();
        return Ok(());
    }
    let thread = std::thread::Builder::new()
        .name("spindle-log".into())
        .spawn(move || {
            loop {
                let started = clock.now();
                std::thread::park_timeout(TICK);
                if !is_round_done(&weak, &*clock, started) {
                    return;
                }
            }
        })
        .map_err(|e| Error::with_source(ErrorKind::Io, "start the log thread", e))?;
    let _ = inner.thread.handle.set(thread.thread().clone());
    *inner.thread.join.lock() = Some(thread);
    inner.drive();
    Ok(())
}

/// Does what is due in one round of the thread, which began to wait at `started`. Returns false at its
/// end.
fn is_round_done(weak: &Weak<LogInner>, clock: &dyn Clock, started: Instant) -> bool {
    let Some(inner) = weak.upgrade() else { return false };
    inner.note_failure();
    if inner.thread.is_stopping.load(Ordering::Acquire) {
        return false;
    }
    if clock.now() - started >= TICK {
        inner.tick()
    } else {
        inner.drive()
    }
    true
}

/// Takes the place of the thread in a simulation.
async fn simulate_thread(
    weak: Weak<LogInner>,
    clock: Arc<dyn Clock>,
    nudged: Arc<Notify>,
    executor: Arc<dyn Executor>,
) {
    loop {
        let started = clock.now();
        tokio::select! {
            biased;
            () = nudged.notified() => {}
            () = executor.sleep(TICK) => {}
        }
        if !is_round_done(&weak, &*clock, started) {
            return;
        }
    }
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
