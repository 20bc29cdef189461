//! The clock of the metadata database, which never shows less than the time of its newest write.
//!
//! The database takes no write that is older than the newest one. A machine whose clock was ahead for a
//! while, or that follows one whose clock is, could write nothing until its own has caught up.
//!
//! Invariants:
//! - Nothing of ours depends on the time that is shown. The database finds out by it how old its garbage
//!   is: of tables, which are named by it; of manifests, whose age the store tells, so that theirs has to
//!   be longer by as much as this clock is ahead.

use chrono::{DateTime, Utc};
use slatedb_common::clock::{DefaultSystemClock, SystemClock, SystemClockTicker};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// The database waits for a clock that is behind by less. Source: slatedb 0.18 `clock.rs`, which waits for
/// twice as long, and at most 10 s.
const BEHIND_MAX: Duration = Duration::from_secs(2);
/// On top of the time of the newest write: its table may have been named later. Chosen by hand.
const MARGIN: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug)]
pub(super) struct ForwardClock {
    inner: DefaultSystemClock,
    ahead: Duration,
}

impl ForwardClock {
    /// It shows more than `not_before`, in milliseconds since 1970, and is `ahead` in tests.
    pub(super) fn new(not_before: Option<i64>, ahead: Duration) -> ForwardClock {
        let inner = DefaultSystemClock::new();
        let behind = not_before.unwrap_or(i64::MIN).saturating_sub(inner.now().timestamp_millis());
        let behind = u64::try_from(behind).map_or(Duration::ZERO, Duration::from_millis);
        let mut ahead = ahead;
        if behind > BEHIND_MAX {
            tracing::warn!(
                behind_s = behind.as_secs(),
                "this machine's clock is behind the newest metadata: it was ahead, or that of another owner is"
            );
            ahead += behind + MARGIN;
        }
        ForwardClock { inner, ahead }
    }

    /// How far it is ahead of this machine's.
    pub(super) fn ahead(&self) -> Duration {
        self.ahead
    }
}

impl SystemClock for ForwardClock {
    fn now(&self) -> DateTime<Utc> {
        self.inner.now() + self.ahead
    }

    fn sleep<'a>(&'a self, duration: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        self.inner.sleep(duration)
    }

    fn ticker<'a>(&'a self, duration: Duration) -> SystemClockTicker<'a> {
        SystemClockTicker::new(self, duration)
    }
}
