//! Conditions that no event reports and that only time and the disk show: a log that stays full,
//! data that grows old, a disk that is too small for the ring.
//!
//! Invariants:
//! - A look takes no lock that a client waits for, and makes one query to the disk of the log.
//! - A state that comes and goes within moments is not a condition.

use crate::conditions::{self, LOG, POOL};
use crate::open_pool::OpenPool;
use block::conditions::Report;
use block::{ConditionKind, Conditions};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wal::{LogStatus, RingSpace};

/// Time for which a log must be full at every look to become a condition, and must not be full to
/// end it. Chosen by hand: a store that only just keeps up fills it for moments.
const FULL_LASTS: Duration = Duration::from_secs(10);
/// Time beyond the configured age after which data that is only in the log is a condition; the
/// configured age itself is used if it is longer. Chosen by hand: a window that is just being
/// written, or a store that is slow for a moment, does not count.
const LATE_MIN: Duration = Duration::from_secs(30);
/// Margin in percent by which a disk that was too small for the ring must be larger to end the
/// condition. Chosen by hand: others use the disk, too, and the condition should not come and go.
const SPACE_MARGIN_PERCENT: u64 = 5;

/// A state that must last before it counts, and must be over for as long before it ends.
#[derive(Debug, Default)]
struct Steady {
    is_on: bool,
    /// Time from which on the opposite state has been seen.
    since: Option<Instant>,
}

impl Steady {
    /// Returns the steady state after a look at `now` that found `is_seen`.
    fn note(&mut self, is_seen: bool, now: Instant) -> bool {
        if is_seen == self.is_on {
            self.since = None;
        } else {
            let since = *self.since.get_or_insert(now);
            if now.duration_since(since) >= FULL_LASTS {
                (self.is_on, self.since) = (is_seen, None);
            }
        }
        self.is_on
    }
}

/// Finds conditions by looking at an open pool from time to time.
pub struct Lookout {
    conditions: Conditions,
    log_dir: PathBuf,
    max_age: Duration,
    full: Steady,
}

impl Lookout {
    /// Makes a lookout that has not looked yet.
    #[must_use]
    pub fn new(open: &OpenPool) -> Lookout {
        Lookout {
            conditions: open.conditions.clone(),
            log_dir: open.config.dir.join("log"),
            max_age: open.config.destage.max_age,
            full: Steady::default(),
        }
    }

    /// Looks once at an open pool.
    pub fn look(&mut self, open: &OpenPool) {
        let log = open.pool.log_status();
        let is_full = self.full.note(log.is_full, open.config.clock.now());
        self.conditions.set(ConditionKind::LogFull, LOG, is_full.then(|| full(&log)));
        let late = late(log.oldest_age().unwrap_or_default(), self.max_age);
        self.conditions.set(ConditionKind::DataAtRisk, POOL, late);
        let was_short = self.conditions.is_raised(ConditionKind::LogSpace, LOG);
        let space = open.pool.ring_space();
        let free_bytes = free_bytes(&self.log_dir);
        let short = short(&self.log_dir, &space, free_bytes, was_short);
        self.conditions.set(ConditionKind::LogSpace, LOG, short);
        // One that was moved away.
        self.conditions.retain(ConditionKind::LogSuperseded, |dir| Path::new(dir).is_dir());
        // The log can fail on its own; other causes that stop the pool report themselves.
        if log.is_failed && !self.conditions.is_raised(ConditionKind::PoolStopped, POOL) {
            conditions::show_stopped(&self.conditions, "its write log has failed");
        }
    }
}

fn full(log: &LogStatus) -> Report {
    Report::new(
        format!(
            "the write log is full: {} of {} MiB wait for the store",
            log.used_bytes >> 20,
            log.ring_bytes >> 20
        ),
        "writers wait until the store has taken some of it",
        "find out why data reaches the store too slowly, or not at all",
    )
}

fn late(oldest: Duration, max_age: Duration) -> Option<Report> {
    let (seconds, max_seconds) = (oldest.as_secs_f64(), max_age.as_secs_f64());
    (oldest > max_age + max_age.max(LATE_MIN)).then(|| {
        Report::new(
            format!(
                "the oldest write that only this machine has is {seconds:.0} s old; destage.max_age is {max_seconds:.0} s"
            ),
            "it and all later writes would be lost with this machine",
            "find out why data reaches the store too slowly, or not at all",
        )
    })
}

fn short(
    log_dir: &Path,
    space: &RingSpace,
    free_bytes: Option<u64>,
    was_short: bool,
) -> Option<Report> {
    let margin_bytes = if was_short { space.missing_bytes / 100 * SPACE_MARGIN_PERCENT } else { 0 };
    let has_room = free_bytes.is_none_or(|free| free >= space.missing_bytes + margin_bytes);
    if space.missing_bytes == 0 || (has_room && space.refusal.is_none()) {
        return None;
    }
    let left = free_bytes
        .map_or_else(String::new, |free| format!(" and its disk has {} MiB left", free >> 20));
    let refusal = match &space.refusal {
        Some(why) => format!("; could not make a log file: {why}"),
        None => String::new(),
    };
    Some(Report::new(
        format!(
            "the write log in {} lacks {} MiB of its size{left}{refusal}",
            log_dir.display(),
            space.missing_bytes >> 20
        ),
        "the log is smaller than configured: writers wait for the store sooner",
        "free space on that disk, or enlarge it; spindle tries again automatically",
    ))
}

/// Free bytes on the disk of a directory; `None` if the file system does not report them.
fn free_bytes(dir: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(dir).ok()?;
    // Some file systems report no size.
    (found.f_blocks > 0).then_some(())?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::{Clock, ManualClock};

    #[test]
    fn brief_states_neither_begin_nor_end_a_condition() {
        let (mut steady, begun) = (Steady::default(), ManualClock::new().now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        for (second, is_seen, counts) in [
            (0, true, false),
            (9, true, false),
            (9, false, false),
            (10, true, false),
            (19, true, false),
            (20, true, true),
            (21, false, true),
            (29, true, true),
            (30, false, true),
            (39, false, true),
            (40, false, false),
        ] {
            assert_eq!(steady.note(is_seen, at(second)), counts, "second {second}");
        }
    }

    #[test]
    fn old_data_is_a_condition_at_twice_the_age() {
        let age = Duration::from_secs;
        assert_eq!(late(age(60), age(30)), None);
        let report = late(age(61), age(30)).expect("it is late");
        assert!(report.what.contains("61 s old; destage.max_age is 30 s"), "{report:?}");
        assert_eq!(late(age(31), age(1)), None);
        assert!(late(age(32), age(1)).is_some());
    }

    #[test]
    fn ring_short_of_disk_is_reported_until_space_appears() {
        let dir = Path::new("log");
        let space = RingSpace { missing_bytes: 100 << 20, refusal: None };
        assert_eq!(short(dir, &space, Some(100 << 20), false), None);
        let report = short(dir, &space, Some(99 << 20), false).expect("it does not fit");
        assert!(report.what.contains("lacks 100 MiB"), "{report:?}");
        assert!(short(dir, &space, Some(101 << 20), true).is_some(), "the edge");
        assert_eq!(short(dir, &space, Some(110 << 20), true), None);
        let refused = RingSpace { refusal: Some("No space left".to_owned()), ..space };
        let report = short(dir, &refused, None, false).expect("it was refused");
        assert!(report.what.contains("could not make a log file: No space left"), "{report:?}");
        let whole = RingSpace { missing_bytes: 0, refusal: None };
        assert_eq!(short(dir, &whole, Some(0), true), None);
    }
}
