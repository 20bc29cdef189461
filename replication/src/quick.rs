//! Whether a device answers so quickly that waiting for it costs less than handing its writes to another thread.
//!
//! Invariants:
//! - Looks at a mean of what writes took lately, so that one that was late does not decide. A device that has become
//!   three times too slow keeps the threads of clients from their work some fifty times, as one write in some is measured.
//! - Pure: whoever writes measures.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longest write that is waited for. Chosen by hand: longer ones take a device long enough that a hand-over is
/// a small part of it.
pub(crate) const BYTES_MAX: usize = 256 << 10;
/// Mean up to which a device is quick. Chosen by hand: a hand-over and the way back cost 10 to 50 us on a virtual
/// machine (docs/decisions/2026-11-21-log-io-buffered.md), local NVMe takes less than this, a disk behind a network more.
const MEAN_US_MAX: u32 = 200;
/// What one write counts at most, so that a device that stood still once is tried again after some thirty writes.
const SAMPLE_US_MAX: u32 = 8000;
/// Part of the mean that one write replaces, as a power of two: an eighth.
const SHIFT: u32 = 3;
/// Of the writes that are waited for one in so many is measured: a look at the clock is a system call on some
/// machines.
const MEASURED_EVERY: u32 = 16;

/// What is known of the device's writes of up to [`BYTES_MAX`].
#[derive(Debug, Default)]
pub(crate) struct Quickness {
    /// 1/8 us; rises to [`SAMPLE_US_MAX`] at most.
    mean: AtomicU32,
    waited_count: AtomicU32,
}

impl Quickness {
    /// Whether the next write is better waited for. Of a device that is not known yet: yes.
    pub(crate) fn is_quick(&self) -> bool {
        self.mean.load(Ordering::Relaxed) >> SHIFT <= MEAN_US_MAX
    }

    /// To be asked once of each write that is waited for: whether to measure it.
    pub(crate) fn is_measured(&self) -> bool {
        self.waited_count.fetch_add(1, Ordering::Relaxed).is_multiple_of(MEASURED_EVERY)
    }

    /// Takes what one write took. Two at the same moment may count as one.
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
    fn a_device_is_quick_until_it_is_slow_for_a_while_and_again_when_it_is_quick() {
        let known = Quickness::default();
        assert!(known.is_quick(), "before the first write");
        (0..100).for_each(|_| known.note(Duration::from_micros(60)));
        assert!(known.is_quick());
        known.note(Duration::from_millis(1));
        assert!(known.is_quick(), "one that was a little late does not decide");
        (0..10).for_each(|_| known.note(Duration::from_micros(600)));
        assert!(!known.is_quick());
        (0..100).for_each(|_| known.note(Duration::from_micros(60)));
        assert!(known.is_quick());
        known.note(Duration::from_secs(3600));
        assert!(!known.is_quick(), "it stood still");
        let count = (1..1000).find(|_| {
            known.note(Duration::from_micros(60));
            known.is_quick()
        });
        assert!(count.is_some_and(|count| count < 40), "{count:?}");
    }

    #[test]
    fn one_write_in_some_is_measured_and_the_first_is() {
        let known = Quickness::default();
        let measured: Vec<u32> = (0..64).filter(|_| known.is_measured()).collect();
        assert_eq!(measured, [0, 16, 32, 48]);
    }
}
