//! How often a read whose store is late may be tried another way. Pure logic.
//!
//! Invariants:
//! - Over time, one of [`READS`] reads is tried another way, and [`SAVED_MAX`] at once: the other way costs as many
//!   requests as a segment has data fragments. On a machine that is too busy all stores are late, and
//!   more requests make it busier. Source: Dean and Barroso, "The Tail at Scale", 2013, with its limit of a few percent.
//! - The limit holds for a short time of each read only, [`LATE_MIN`](super::health::LATE_MIN). After that, a read is
//!   tried another way whatever was saved, so none waits for a store that stalls.

use std::sync::atomic::{AtomicU32, Ordering};

/// Of so many reads, one may be tried another way. Chosen by hand: 4 % more requests with four data fragments.
const READS: u32 = 100;
/// Most that is saved up. Chosen by hand: a full queue of a store that stops.
const SAVED_MAX: u32 = 64;

/// What is saved up, in reads.
#[derive(Debug)]
pub(super) struct Hedges(AtomicU32);

impl Default for Hedges {
    fn default() -> Self {
        Hedges(AtomicU32::new(SAVED_MAX * READS))
    }
}

impl Hedges {
    /// Notes a read.
    pub(super) fn note_read(&self) {
        // Threads at the limit may go beyond it by one each, and write nothing there.
        if self.0.load(Ordering::Relaxed) < SAVED_MAX * READS {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether a read may be tried another way now.
    pub(super) fn take(&self) -> bool {
        let less = |saved: u32| saved.checked_sub(READS);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_reads_is_tried_another_way() {
        let hedges = Hedges::default();
        (0..SAVED_MAX).for_each(|_| assert!(hedges.take()));
        assert!(!hedges.take(), "they are used up");
        for _ in 0..3 {
            (0..READS - 1).for_each(|_| hedges.note_read());
            assert!(!hedges.take());
            hedges.note_read();
            assert!(hedges.take());
        }
        (0..READS * SAVED_MAX * 2).for_each(|_| hedges.note_read());
        (0..SAVED_MAX).for_each(|_| assert!(hedges.take()));
        assert!(!hedges.take(), "not more are saved up");
    }
}
