//! Back-pressure on the log's writers: the gate at which acknowledgements held back by [`Pace`]
//! wait.
//!
//! Invariants:
//! - A closed gate opens after the time that was decided on, whatever happens to its waiters, the
//!   runtime and the log.
//! - An open gate has no waiters.

use super::Inner;
use crate::options::LogOptions;
use crate::throttle::{Hold, Pace};
use block::env::{Clock, SystemClock};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// The state that holds acknowledgements back.
pub(super) struct Pressure {
    pub(super) pace: Pace,
    /// The current gate: a new semaphore without permits for each closing. Closing the semaphore
    /// opens the gate and releases waiters that arrive before or after that.
    gate: Arc<Semaphore>,
}

impl Pressure {
    pub(super) fn new(options: &LogOptions) -> Arc<Mutex<Pressure>> {
        let pace = Pace::new(options.slow_from_percent, options.generation_bytes_max);
        Arc::new(Mutex::new(Pressure { pace, gate: Arc::new(Semaphore::new(0)) }))
    }
}

/// Holds back an acknowledgement as [`Pace`] decides.
pub(super) async fn hold_back(inner: &Arc<Inner>, bytes: u64) {
    let fill = inner.fill();
    if fill * 100.0 < f64::from(inner.options.slow_from_percent) {
        return;
    }
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let (hold, gate) = {
        let mut pressure = inner.pressure.lock();
        let hold = pressure.pace.admit(bytes, fill, || SystemClock.now_ns());
        match hold {
            Hold::Go => return,
            Hold::Wait => {}
            Hold::Close { .. } => pressure.gate = Arc::new(Semaphore::new(0)),
        }
        (hold, pressure.gate.clone())
    };
    match hold {
        Hold::Go | Hold::Wait => {}
        // The timer does not belong to a waiter: a client that takes no answers must not keep the
        // gate closed for others.
        Hold::Close { delay_ns } => {
            let gate = ClosedGate(inner.pressure.clone(), gate.clone());
            if inner.planted.gate_by_waiter {
                tokio::time::sleep(Duration::from_nanos(delay_ns)).await;
                return drop(gate);
            }
            runtime.spawn(async move {
                tokio::time::sleep(Duration::from_nanos(delay_ns)).await;
                drop(gate);
            });
        }
    }
    let opened = gate.acquire().await;
    debug_assert!(opened.is_err(), "nobody gives permits");
}

/// Opens the gate when dropped, also when the runtime ends. It does not keep the log alive.
struct ClosedGate(Arc<Mutex<Pressure>>, Arc<Semaphore>);

impl Drop for ClosedGate {
    fn drop(&mut self) {
        self.0.lock().pace.open();
        self.1.close();
    }
}
