//! Decides whether destage waits for the end of a burst of writes. Pure.
//!
//! Invariants:
//! - Destage waits for a burst only while the log has room for it, and until the oldest entry has
//!   half of the maximum age.
//! - If clients write slowly, it waits for at most one look.

use std::time::{Duration, Instant};
use wal::LogStatus;

/// Time between two checks for the end of a burst. Chosen by hand: longer than a client's pause
/// within a burst.
pub(super) const BURST_LOOK: Duration = Duration::from_millis(50);
/// Batches of the log per second that make a burst. Chosen by hand: about a tenth of the capacity
/// of one processor. Below that, destage takes nothing from the clients.
const BATCHES_A_SECOND: f64 = 2000.0;
/// Bytes of the log per second that make a burst, too. Chosen by hand in the same way.
const BYTES_A_SECOND: f64 = (128u64 << 20) as f64;
/// Destage continues while this part of the log, or of its extents, is in use, in eighths. Chosen
/// by hand: a quarter is a burst that the log can absorb.
const REST_EIGHTHS: u64 = 2;
/// Destage is urgent while this part of the log is in use, in eighths. Chosen by hand: below the
/// level at which writers are slowed down, and above the level that remains, after destage has
/// waited, under a load that it can keep up with.
const URGENT_EIGHTHS: u64 = 3;

/// Maximum number of frozen generations that wait, because a read looks through all of them. Chosen
/// by hand: more than a burst makes without snapshots.
const FROZEN_COUNT_MAX: u64 = 8;

/// Reports whether the log is filling up, so that destage must continue quickly.
pub(super) fn is_urgent(log: &LogStatus) -> bool {
    is_used(log.used_bytes, log.ring_bytes, URGENT_EIGHTHS)
}

fn is_used(used: u64, of: u64, eighths: u64) -> bool {
    used.saturating_mul(8) >= of.saturating_mul(eighths)
}

/// State of the log at the last look.
pub(super) struct Burst {
    looked: Instant,
    batch_count: u64,
    batch_bytes: u64,
    is_on: bool,
    /// A generation has been waiting since then.
    is_waited_for: bool,
}

impl Burst {
    pub(super) fn new(looked: Instant) -> Burst {
        Burst { looked, batch_count: 0, batch_bytes: 0, is_on: false, is_waited_for: false }
    }

    /// Reports whether a frozen generation waits; ask again after [`BURST_LOOK`]. `gather` is the
    /// age at which entries are destaged in any case.
    pub(super) fn goes_first(&mut self, log: &LogStatus, gather: Duration, now: Instant) -> bool {
        let is_old = log.oldest_undestaged_age.is_some_and(|age| age >= gather);
        let is_room = !log.is_full
            && !is_used(log.used_bytes, log.ring_bytes, REST_EIGHTHS)
            && !is_used(log.extent_count, log.extent_count_max, REST_EIGHTHS)
            && log.frozen_count < FROZEN_COUNT_MAX;
        self.look(log, now);
        self.is_waited_for = self.is_on && !is_old && is_room;
        self.is_waited_for
    }

    fn look(&mut self, log: &LogStatus, now: Instant) {
        let passed = now - self.looked;
        if passed < BURST_LOOK {
            return;
        }
        let is_above = |from: u64, to: u64, a_second: f64| {
            to.saturating_sub(from) as f64 >= a_second * passed.as_secs_f64()
        };
        // After a long time without a look it is unknown whether there was a pause in between. The
        // next look tells, which may be late if other work has the processors.
        self.is_on = (passed > 4 * BURST_LOOK && !self.is_waited_for)
            || is_above(self.batch_count, log.batch_count, BATCHES_A_SECOND)
            || is_above(self.batch_bytes, log.batch_bytes, BYTES_A_SECOND);
        (self.looked, self.batch_count, self.batch_bytes) = (now, log.batch_count, log.batch_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Lsn;
    use block::env::{Clock, ManualClock};

    const GATHER: Duration = Duration::from_secs(15);

    fn log(batch_count: u64, batch_bytes: u64) -> LogStatus {
        LogStatus {
            used_bytes: 0,
            ring_bytes: 1 << 30,
            last_lsn: Lsn(9),
            acked_lsn: Lsn(9),
            durable_lsn: Lsn(9),
            destaged_lsn: Lsn(0),
            oldest_undestaged_age: Some(Duration::from_secs(1)),
            oldest_spilled_age: None,
            undestaged_bytes: 0,
            memory_bytes: 0,
            extent_count: 0,
            extent_count_max: 1 << 20,
            frozen_count: 1,
            batch_count,
            batch_bytes,
            entry_count: batch_count,
            sync_count: 0,
            is_full: false,
            is_failed: false,
        }
    }

    /// Returns the answers of several looks, [`BURST_LOOK`] apart, at a log that gets this many
    /// batches and bytes in between.
    fn looks(count: u64, batches: u64, bytes: u64) -> Vec<bool> {
        let begun = ManualClock::new().now();
        let mut burst = Burst::new(begun);
        let look = |n: u64| {
            let at = begun + BURST_LOOK * u32::try_from(n).unwrap();
            burst.goes_first(&log(n * batches, n * bytes), GATHER, at)
        };
        (1..=count).map(look).collect()
    }

    #[test]
    fn a_burst_is_many_batches_or_many_bytes() {
        assert_eq!(looks(3, 150, 0), [true; 3], "3,000 batches a second");
        assert_eq!(looks(3, 20, 10 << 20), [true; 3], "200 MiB a second");
        assert_eq!(looks(3, 50, 1 << 20), [false; 3], "1,000 batches, and 20 MiB a second");
        assert_eq!(looks(3, 0, 0), [false; 3]);
    }

    #[test]
    fn end_of_a_burst_is_seen_within_two_looks() {
        let begun = ManualClock::new().now();
        let mut burst = Burst::new(begun);
        let mut says = |ms: u64, batches: u64| {
            burst.goes_first(&log(batches, 0), GATHER, begun + Duration::from_millis(ms))
        };
        assert!(says(60, 1000), "it is on");
        assert!(says(80, 1000), "too soon to tell");
        assert!(!says(120, 1001), "it is over");
        assert!(says(5000, 5000), "nobody has looked for long");
        assert!(!says(5060, 5001), "it was over before that");
        assert!(says(9000, 9000), "and once more");
        assert!(says(9060, 9300), "but that one goes on");
        assert!(!says(12_060, 9301), "the look that ends it is late");
    }

    #[test]
    fn a_log_that_fills_or_is_old_does_not_wait() {
        let says = |change: fn(&mut LogStatus)| {
            let mut status = log(1000, 0);
            change(&mut status);
            let begun = ManualClock::new().now();
            Burst::new(begun).goes_first(&status, GATHER, begun + 2 * BURST_LOOK)
        };
        assert!(says(|_| {}));
        assert!(says(|log| log.used_bytes = log.ring_bytes / 4 - 1));
        assert!(!says(|log| log.used_bytes = log.ring_bytes / 4));
        assert!(!says(|log| log.extent_count = log.extent_count_max / 4));
        assert!(!says(|log| log.is_full = true));
        assert!(!says(|log| log.frozen_count = 8));
        assert!(says(|log| log.oldest_undestaged_age = Some(GATHER - BURST_LOOK)));
        assert!(!says(|log| log.oldest_undestaged_age = Some(GATHER)));
    }

    #[test]
    fn a_load_that_destage_follows_is_not_urgent() {
        let with = |used_bytes| LogStatus { used_bytes, ..log(1, 1) };
        let eighth = log(1, 1).ring_bytes / 8;
        assert!(!is_urgent(&with(3 * eighth - 1)));
        assert!(is_urgent(&with(3 * eighth)));
    }
}
