//! The clock of the metadata database, which never shows less than the time of its newest write.
//!
//! The database takes no write that is older than the newest one. A machine whose clock was ahead for a
//! while, or that follows one whose clock is, could write nothing until its own has caught up.
//!
//! A clock that jumps forward would make all garbage old enough at once, and with it what is only about to be named: it is
//! followed no faster than time passes. One that is put back is followed: the database ends, and is opened again.
//!
//! Invariants:
//! - Nothing of ours depends on the time that is shown. The database finds out by it how old its garbage
//!   is: of tables, which are named by it; of manifests, whose age the store tells, so that theirs has to
//!   be longer by as much as this clock is ahead.

use chrono::{DateTime, Utc};
use parking_lot::Mutex;
use slatedb_common::clock::{DefaultSystemClock, SystemClock, SystemClockTicker};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The database waits for a clock that is behind by less. Source: slatedb 0.18 `clock.rs`, which waits for
/// twice as long, and at most 10 s.
const BEHIND_MAX: Duration = Duration::from_secs(2);
/// On top of the time of the newest write: its table may have been named later. Chosen by hand.
const MARGIN: Duration = Duration::from_secs(60);

/// What a clock is corrected by while it goes. Chosen by hand: above what a time service does in steps, far below the
/// age of garbage.
const CORRECTED_MAX: Duration = Duration::from_secs(60);

/// How far the clocks of a test are ahead of the machine's, by now. Clones share it.
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

/// See the module.
#[derive(Debug)]
pub(super) struct ForwardClock {
    inner: DefaultSystemClock,
    begun: (DateTime<Utc>, Instant),
    behind: Duration,
    ahead: Duration,
    shift: ClockShift,
}

/// What is shown of a clock that showed `begun` when this began, that long ago.
fn shown(wall: DateTime<Utc>, begun: DateTime<Utc>, passed: Duration) -> DateTime<Utc> {
    wall.min(begun + passed + CORRECTED_MAX)
}

impl ForwardClock {
    /// It shows more than `not_before`, in milliseconds since 1970, and is ahead by `shift` in tests.
    pub(super) fn new(not_before: Option<i64>, shift: ClockShift) -> ForwardClock {
        let inner = DefaultSystemClock::new();
        let behind = not_before.unwrap_or(i64::MIN).saturating_sub(inner.now().timestamp_millis());
        let behind = u64::try_from(behind).map_or(Duration::ZERO, Duration::from_millis);
        let ahead = match behind > BEHIND_MAX {
            true => behind + MARGIN,
            false => Duration::ZERO,
        };
        let begun = (inner.now(), Instant::now());
        ForwardClock { inner, begun, behind, ahead, shift }
    }

    /// Says it where the machine's clock is behind.
    pub(super) fn tell(&self) {
        if self.behind > BEHIND_MAX {
            tracing::warn!(
                behind_s = self.behind.as_secs(),
                "this machine's clock is behind the newest metadata: it was ahead, or that of another owner is"
            );
        }
    }

    /// How far it is ahead of this machine's.
    pub(super) fn ahead(&self) -> Duration {
        self.ahead + self.shift.get()
    }
}

impl SystemClock for ForwardClock {
    fn now(&self) -> DateTime<Utc> {
        let (begun, since) = self.begun;
        shown(self.inner.now(), begun, since.elapsed()) + self.ahead()
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
