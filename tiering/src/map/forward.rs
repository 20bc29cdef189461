//! The clock of the metadata database, which never shows less than the time of its newest write.
//!
//! The database takes no write that is older than the newest one. A machine whose clock was ahead for a
//! while, or that follows one whose clock is, could write nothing until its own has caught up.
//!
//! Invariants:
//! - Nothing of ours depends on the time that is shown; the database keeps garbage by it, at least as
//!   long as it would with a clock that was never put right.

use chrono::{DateTime, Utc};
use slatedb_common::clock::{DefaultSystemClock, SystemClock, SystemClockTicker};
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

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
        let behind = u64::try_from(behind.saturating_add(1)).unwrap_or(0);
        if behind > 1 {
            tracing::warn!(
                behind_ms = behind,
                "this machine's clock is behind the newest metadata: it was ahead, or that of another owner is"
            );
        }
        ForwardClock { inner, ahead: ahead + Duration::from_millis(behind) }
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
