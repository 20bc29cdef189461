//! Read counts of segments: a hint that lets a pool be fetched from a copy in the order in which
//! its users need the data.
//!
//! Invariants:
//! - The counts are only a hint: two segments may share a counter, counters fade, and only an order
//!   depends on them.
//! - Counting a read costs one relaxed addition and no lock.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Number of counters; segments whose numbers differ by a multiple of it share one. Chosen by hand:
/// 256 KiB for 2 TiB of segments of the default size.
const COUNTERS: usize = 1 << 16;
/// Maximum number of segments in a list of the hottest. Chosen by hand: 128 GiB in segments of the
/// default size.
pub(crate) const HOTTEST_MAX: usize = 4096;
/// Time after which each read counts half. Chosen by hand: segments that a backup has read at night
/// are cold by noon.
const HALF_LIFE: Duration = Duration::from_secs(3600);

/// The counters; see the module. All readers share them.
#[derive(Debug)]
pub(crate) struct Heat {
    counts: Box<[AtomicU32]>,
    faded: Mutex<Instant>,
}

impl Heat {
    /// Creates counters of no reads, which fade from `now` on.
    pub(crate) fn new(now: Instant) -> Heat {
        let counts = (0..COUNTERS).map(|_| AtomicU32::new(0)).collect();
        Heat { counts, faded: Mutex::new(now) }
    }

    fn counter(&self, segment: u64) -> &AtomicU32 {
        &self.counts[segment as usize % COUNTERS]
    }

    /// Counts a read of a frame of this segment.
    pub(crate) fn note(&self, segment: u64) {
        self.counter(segment).fetch_add(1, Ordering::Relaxed);
    }

    /// Raises the count of a segment to at least `count`.
    pub(crate) fn warm(&self, segment: u64, count: u32) {
        self.counter(segment).fetch_max(count, Ordering::Relaxed);
    }

    /// Returns the faded number of reads.
    pub(crate) fn of(&self, segment: u64) -> u32 {
        self.counter(segment).load(Ordering::Relaxed)
    }

    /// Fades old reads.
    pub(crate) fn fade(&self, now: Instant) {
        let mut faded = self.faded.lock();
        // Halve only once, even after a long time: otherwise recent reads would be forgotten with
        // the rest.
        if now.saturating_duration_since(*faded) >= HALF_LIFE {
            *faded = now;
            for count in &self.counts {
                // A concurrent read may be lost.
                count.store(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
    }
}

/// The hottest among some segments, hottest first.
#[derive(Debug, Default)]
pub(crate) struct Hottest(Vec<(u32, u64)>);

impl Hottest {
    pub(crate) fn add(&mut self, heat: &Heat, segment: u64) {
        let count = heat.of(segment);
        if count > 0 {
            self.0.push((count, segment));
            if self.0.len() >= 2 * HOTTEST_MAX {
                self.cut();
            }
        }
    }

    fn cut(&mut self) {
        self.0.sort_unstable_by_key(|(count, segment)| (std::cmp::Reverse(*count), *segment));
        self.0.truncate(HOTTEST_MAX);
    }

    /// Returns the number and read count of each.
    pub(crate) fn into_list(mut self) -> Vec<(u64, u32)> {
        self.cut();
        self.0.into_iter().map(|(count, segment)| (segment, count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::{Clock, ManualClock};

    #[test]
    fn the_hottest_come_first_and_their_number_is_bounded() {
        let heat = Heat::new(ManualClock::new().now());
        let mut hottest = Hottest::default();
        for segment in 0..3 * HOTTEST_MAX as u64 {
            (0..segment % 7).for_each(|_| heat.note(segment));
            hottest.add(&heat, segment);
        }
        let list = hottest.into_list();
        assert_eq!(list.len(), HOTTEST_MAX);
        assert!(list.is_sorted_by_key(|(_, count)| std::cmp::Reverse(*count)));
        assert_eq!((list[0], list[HOTTEST_MAX - 1].1), ((6, 6), 4));
    }

    #[test]
    fn reads_of_long_ago_count_less() {
        let clock = ManualClock::new();
        let heat = Heat::new(clock.now());
        (0..8).for_each(|_| heat.note(5));
        clock.advance(HALF_LIFE - Duration::from_secs(1));
        heat.fade(clock.now());
        assert_eq!(heat.of(5), 8);
        clock.advance(HALF_LIFE + Duration::from_secs(1));
        heat.fade(clock.now());
        assert_eq!((heat.of(5), heat.of(6)), (4, 0));
        clock.advance(HALF_LIFE);
        heat.fade(clock.now());
        assert_eq!((heat.of(5), heat.of(6)), (2, 0));
    }
}
