//! Decides whether a device is so fast that waiting for it costs less than handing its
//! writes to another thread.
//!
//! Invariants:
//! - The decision uses a mean of recent write times, so that a single late write does not decide.
//!   Because only one write in [`MEASURED_EVERY`] is measured, a device that becomes three times
//!   too slow delays client threads about fifty times before it counts as slow.
//! - Pure logic: the writer measures.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longest write that callers wait for. Chosen by hand: a device takes so long for longer ones that
/// a hand-over is a small part of it.
pub(crate) const BYTES_MAX: usize = 256 << 10;
/// Highest mean of a fast device. Chosen by hand: a hand-over and the way back cost 10 to 50 us on
/// a virtual machine (docs/decisions/2026-11-21-log-io-buffered.md); local NVMe takes less than
/// this limit, a disk behind a network more.
const MEAN_US_MAX: u32 = 200;
/// Upper limit of one sample, so that a device that once stood still is tried again after some
/// thirty writes.
const SAMPLE_US_MAX: u32 = 8000;
/// Share of the mean that one sample replaces, as a power of two: an eighth.
const SHIFT: u32 = 3;
/// One in this many of the writes that callers wait for is measured: reading the clock is a system
/// call on some machines.
const MEASURED_EVERY: u32 = 16;

/// Statistics of the device's writes of up to [`BYTES_MAX`].
#[derive(Debug, Default)]
pub(crate) struct WriteLatency {
    /// In 1/8 us; corresponds to at most [`SAMPLE_US_MAX`].
    mean: AtomicU32,
    waited_count: AtomicU32,
}

impl WriteLatency {
    /// Returns whether waiting for the next write is better. A device that was not measured yet
    /// counts as fast.
    pub(crate) fn is_fast(&self) -> bool {
        self.mean.load(Ordering::Relaxed) >> SHIFT <= MEAN_US_MAX
    }

    /// Returns whether to measure a write. Called once for each write that a caller waits for.
    pub(crate) fn is_measured(&self) -> bool {
        self.waited_count.fetch_add(1, Ordering::Relaxed).is_multiple_of(MEASURED_EVERY)
    }

    /// Adds the duration of one write. Two concurrent calls may count as one.
    pub(crate) fn note(&self, took: Duration) {
        let took = u32::try_from(took.as_micros()).unwrap_or(u32::MAX).min(SAMPLE_US_MAX);
        let mean = self.mean.load(Ordering::Relaxed);
        self.mean.store(mean - (mean >> SHIFT) + took, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_fast_until_its_mean_latency_rises_and_again_after_it_falls() {
        let known = WriteLatency::default();
        assert!(known.is_fast(), "before the first write");
        (0..100).for_each(|_| known.note(Duration::from_micros(60)));
        assert!(known.is_fast());
        known.note(Duration::from_millis(1));
        assert!(known.is_fast(), "one that was a little late does not decide");
        (0..10).for_each(|_| known.note(Duration::from_micros(600)));
        assert!(!known.is_fast());
        (0..100).for_each(|_| known.note(Duration::from_micros(60)));
        assert!(known.is_fast());
        known.note(Duration::from_secs(3600));
        assert!(!known.is_fast(), "it stood still");
        let count = (1..1000).find(|_| {
            known.note(Duration::from_micros(60));
            known.is_fast()
        });
        assert!(count.is_some_and(|count| count < 40), "{count:?}");
    }

    #[test]
    fn one_write_in_some_is_measured_and_the_first_is() {
        let known = WriteLatency::default();
        let measured: Vec<u32> = (0..64).filter(|_| known.is_measured()).collect();
        assert_eq!(measured, [0, 16, 32, 48]);
    }
}
