//! The gate at which the acknowledgements wait that [`Throttle`] holds back.
//!
//! Invariants:
//! - A closed gate opens after the time that was decided on, whatever happens to its waiters, the
//!   runtime and the log.
//! - An open gate has no waiters.

use crate::throttle::{Hold, Throttle};
use block::env::Clock;
use block::simulated::simulated;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// The gate of one log.
#[derive(Debug)]
pub(crate) struct ThrottleGate {
    slow_from_percent: u8,
    state: Arc<Mutex<GateState>>,
    clock: Arc<dyn Clock>,
    /// The moment from which the regulator's nanoseconds count.
    start: Instant,
    /// A seeded bug: the first waiter, not a task of its own, opens the gate.
    is_opened_by_waiter: bool,
}

#[derive(Debug)]
struct GateState {
    throttle: Throttle,
    /// The current gate: a new semaphore without permits for each closing. Closing the semaphore
    /// opens the gate and releases waiters that arrive before or after that.
    gate: Arc<Semaphore>,
}

/// The effects of a release of a generation, as far as they concern the regulator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Release {
    /// Bytes of the log that the release freed.
    pub(crate) bytes: u64,
    /// How full the generation was: 1 if it was frozen for being full.
    pub(crate) share: f64,
    /// Part of the log, from 0 to 1, that is in use after the release.
    pub(crate) fill: f64,
    /// Whether destage has no work left.
    pub(crate) is_last: bool,
}

impl ThrottleGate {
    pub(crate) fn new(
        slow_from_percent: u8,
        generation_bytes_max: u64,
        clock: Arc<dyn Clock>,
        is_opened_by_waiter: bool,
    ) -> ThrottleGate {
        let throttle = Throttle::new(slow_from_percent, generation_bytes_max);
        let gate = Arc::new(Semaphore::new(0));
        ThrottleGate {
            slow_from_percent,
            state: Arc::new(Mutex::new(GateState { throttle, gate })),
            start: clock.now(),
            clock,
            is_opened_by_waiter,
        }
    }

    fn now_ns(&self) -> u64 {
        let since = self.clock.now().saturating_duration_since(self.start);
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Holds back the acknowledgement of an entry that takes `bytes` of the log, with `fill` (0 to
    /// 1) of the log in use, as [`Throttle`] decides. Outside of a runtime nothing is held back.
    pub(crate) async fn hold_back(&self, bytes: u64, fill: f64) {
        if fill * 100.0 < f64::from(self.slow_from_percent) {
            return;
        }
        let (executor, runtime) = (simulated(), tokio::runtime::Handle::try_current());
        if executor.is_none() && runtime.is_err() {
            return;
        }
        let Some(Held { gate, closed }) = self.admit(bytes, fill) else { return };
        // The timer does not belong to a waiter: a client that takes no answers must not keep the
        // gate closed for others.
        if let Some(closed) = closed {
            if self.is_opened_by_waiter {
                tokio::time::sleep(closed.delay).await;
                return drop(closed);
            }
            if let Some(executor) = executor {
                let delay = executor.sleep(closed.delay);
                executor.spawn(Box::pin(async move {
                    delay.await;
                    drop(closed);
                }));
            } else if let Ok(runtime) = runtime {
                runtime.spawn(async move {
                    tokio::time::sleep(closed.delay).await;
                    drop(closed);
                });
            }
        }
        let opened = gate.acquire().await;
        debug_assert!(opened.is_err(), "the gate has no permits");
    }

    /// Decides on an acknowledgement; `None` lets it go.
    fn admit(&self, bytes: u64, fill: f64) -> Option<Held> {
        let mut state = self.state.lock();
        match state.throttle.admit(bytes, fill, || self.now_ns()) {
            Hold::Go => None,
            Hold::Wait => Some(Held { gate: state.gate.clone(), closed: None }),
            Hold::Close { delay_ns } => {
                let gate = Arc::new(Semaphore::new(0));
                state.gate = gate.clone();
                let delay = Duration::from_nanos(delay_ns);
                let closed = ClosedGate { delay, state: self.state.clone(), gate: gate.clone() };
                Some(Held { gate, closed: Some(closed) })
            }
        }
    }

    /// Records that destage released a generation.
    pub(crate) fn on_release(&self, release: Release) {
        let mut state = self.state.lock();
        let now_ns = self.now_ns();
        state.throttle.on_release(now_ns, release.bytes, release.share);
        state.throttle.on_fill(release.fill);
        if release.is_last {
            state.throttle.on_idle();
        }
    }

    /// See [`Throttle::on_pause`].
    pub(crate) fn on_pause(&self) {
        let mut state = self.state.lock();
        let now_ns = self.now_ns();
        state.throttle.on_pause(now_ns);
    }

    /// Returns whether acknowledgements wait.
    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().throttle.is_closed()
    }
}

/// An acknowledgement that is held back.
struct Held {
    gate: Arc<Semaphore>,
    /// Set if this acknowledgement has closed the gate.
    closed: Option<ClosedGate>,
}

/// Opens the gate when dropped, also when the runtime ends. It does not keep the log alive.
struct ClosedGate {
    /// Time after which to drop it.
    delay: Duration,
    state: Arc<Mutex<GateState>>,
    gate: Arc<Semaphore>,
}

impl Drop for ClosedGate {
    fn drop(&mut self) {
        self.state.lock().throttle.open();
        self.gate.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::ManualClock;

    const MIB: u64 = 1 << 20;

    fn gate(clock: &ManualClock) -> ThrottleGate {
        ThrottleGate::new(50, MIB, Arc::new(clock.clone()), false)
    }

    /// Closes the gate by an entry of 4 MiB, opens it at once, and returns the time for which it
    /// would have been closed.
    fn delay(gate: &ThrottleGate) -> Duration {
        let closed = gate.admit(4 * MIB, 0.75).expect("it is held back").closed;
        closed.expect("the gate was open").delay
    }

    #[test]
    fn held_writers_pass_together_and_an_idle_minute_is_little_credit() {
        let clock = ManualClock::new();
        let gate = gate(&clock);
        let first = gate.admit(4 * MIB, 0.75).expect("it is held back");
        let closed = first.closed.expect("the gate was open");
        // At 128 MiB/s, of which as much is let in half-way from the mark to the end.
        assert_eq!(closed.delay.as_millis(), 31);
        let second = gate.admit(4 * MIB, 0.75).expect("it waits");
        assert!(second.closed.is_none() && Arc::ptr_eq(&first.gate, &second.gate));
        assert!(gate.is_closed() && !second.gate.is_closed());
        drop(closed);
        assert!(!gate.is_closed() && second.gate.is_closed());
        clock.advance(Duration::from_secs(60));
        // Two times 31.25 ms, as the second one was not paid for yet, less 10 ms for the idle minute.
        assert_eq!(delay(&gate).as_millis(), 52);
    }

    #[test]
    fn destage_speed_is_measured_by_the_injected_clock_except_for_pauses() {
        let delay_after = |pause: Option<Duration>| {
            let clock = ManualClock::new();
            let gate = gate(&clock);
            for _ in 0..16 {
                if let Some(pause) = pause {
                    clock.advance(pause);
                    gate.on_pause();
                }
                clock.advance(Duration::from_secs(1));
                let fill = 0.75;
                gate.on_release(Release { bytes: 64 * MIB, share: 1.0, fill, is_last: false });
            }
            delay(&gate)
        };
        let steady = delay_after(None).as_millis();
        assert!(steady.abs_diff(62) < 12, "64 MiB/s take {steady} ms for 4 MiB");
        let paused = delay_after(Some(Duration::from_secs(30))).as_millis();
        assert!(paused.abs_diff(steady) < 12, "{paused} ms and {steady} ms");
    }
}
