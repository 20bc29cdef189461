//! The clock of the metadata database, which never shows less than the time of its newest write.
//!
//! The database rejects writes that are older than its newest one. Without this clock, a machine
//! whose clock was ahead for a while, or that takes over from a machine whose clock is ahead, could
//! write nothing until its own clock has caught up.
//!
//! A clock that jumps forward would make all garbage old enough at once, including tables that are
//! about to be named. This clock therefore follows it no faster than time passes. It does follow a
//! clock that is set back: the database ends and is reopened.
//!
//! Invariants:
//! - No code of this project depends on the time shown. The database uses it to compute the age of
//!   its garbage. Tables are named by this clock. The age of manifests comes from the store, so
//!   their minimum age must be longer by the time that this clock is ahead.

use block::env::Clock as _;
use chrono::{DateTime, Utc};
use parking_lot::Mutex;
use slatedb_common::clock::{DefaultSystemClock, SystemClock, SystemClockTicker};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Lag of the clock up to which the database waits for it. Source: slatedb 0.18 `clock.rs`, which
/// waits for twice that time, and at most 10 s.
const BEHIND_MAX: Duration = Duration::from_secs(2);
/// Added to the time of the newest write, because its table may have been named later. Chosen by
/// hand.
const MARGIN: Duration = Duration::from_secs(60);

/// Correction of a running clock that is followed at once. Chosen by hand: above the steps of a
/// time service, far below the age of garbage.
const CORRECTED_MAX: Duration = Duration::from_secs(60);

/// Lead of a test's clocks over the machine's, which the test can advance. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClockShift(Arc<Mutex<Duration>>);

impl ClockShift {
    fn get(&self) -> Duration {
        *self.0.lock()
    }

    #[cfg(test)]
    pub(crate) fn advance(&self, by: Duration) {
        *self.0.lock() += by;
    }
}

/// The clock: see the module.
#[derive(Debug)]
pub(super) struct MonotonicClock {
    inner: DefaultSystemClock,
    begun: (DateTime<Utc>, Instant),
    behind: Duration,
    ahead: Duration,
    shift: ClockShift,
}

/// The time to show when the machine's clock shows `wall`, `passed` after it showed `begun`.
fn shown(wall: DateTime<Utc>, begun: DateTime<Utc>, passed: Duration) -> DateTime<Utc> {
    wall.min(begun + passed + CORRECTED_MAX)
}

impl MonotonicClock {
    /// Creates a clock that shows more than `not_before`, in milliseconds since 1970, and is ahead
    /// by `shift` in tests.
    pub(super) fn new(not_before: Option<i64>, shift: ClockShift) -> MonotonicClock {
        let inner = DefaultSystemClock::new();
        let behind = not_before.unwrap_or(i64::MIN).saturating_sub(inner.now().timestamp_millis());
        let behind = u64::try_from(behind).map_or(Duration::ZERO, Duration::from_millis);
        let ahead = match behind > BEHIND_MAX {
            true => behind + MARGIN,
            false => Duration::ZERO,
        };
        let begun = (inner.now(), block::env::SystemClock.now());
        MonotonicClock { inner, begun, behind, ahead, shift }
    }

    /// Logs a warning if the machine's clock is behind.
    pub(super) fn tell(&self) {
        if self.behind > BEHIND_MAX {
            tracing::warn!(
                behind_s = self.behind.as_secs(),
                "this machine's clock is behind the newest metadata: it was ahead earlier, or \
                 another owner's clock is"
            );
        }
    }

    /// Time by which it is ahead of the machine's clock.
    pub(super) fn ahead(&self) -> Duration {
        self.ahead + self.shift.get()
    }
}

impl SystemClock for MonotonicClock {
    fn now(&self) -> DateTime<Utc> {
        let (begun, since) = self.begun;
        shown(self.inner.now(), begun, block::env::SystemClock.since(since)) + self.ahead()
    }

    fn sleep<'a>(&'a self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.inner.sleep(duration)
    }

    fn ticker<'a>(&'a self, duration: Duration) -> SystemClockTicker<'a> {
        SystemClockTicker::new(self, duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_jumps_forward_is_followed_no_faster_than_time_passes() {
        let begun = DateTime::from_timestamp(1_795_378_530, 0).expect("a time");
        let hour = Duration::from_secs(3600);
        assert_eq!(shown(begun + hour, begun, hour), begun + hour);
        assert_eq!(shown(begun + hour * 9000, begun, hour), begun + hour + CORRECTED_MAX);
        assert_eq!(shown(begun - hour, begun, hour), begun - hour, "the database ends then");
    }
}
