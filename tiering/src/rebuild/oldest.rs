//! The choice of the segments that leave the data stores before they are cold, because room is short. Pure logic.
//!
//! Invariants:
//! - Those come first that were read longest ago.
//! - Without the last one of them, what is chosen would be too little: no segment leaves that need not.
//! - One that was read or written a short while ago is never chosen, however short room is.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Time for which a segment stays in the data stores after it was last read or written. Chosen by hand: one that is
/// brought back is read several times within minutes, and must not leave between two of these reads.
const STAYS: Duration = Duration::from_secs(600);

/// The segments that were read longest ago, as many as are wanted. The memory is that of the chosen ones.
#[derive(Debug)]
pub(super) struct Oldest {
    wanted_bytes: u64,
    count_max: usize,
    /// Bytes of the chosen ones.
    bytes: u64,
    /// Time since the last read, number and bytes; on top is the one that was read last.
    chosen: BinaryHeap<(Reverse<Duration>, u64, u64)>,
}

impl Oldest {
    /// `wanted_bytes`: bytes of segments that are to leave; `count_max`: the maximum number of segments.
    pub(super) fn new(wanted_bytes: u64, count_max: usize) -> Oldest {
        Oldest { wanted_bytes, count_max, bytes: 0, chosen: BinaryHeap::new() }
    }

    /// Considers a segment that was last read `idle` ago.
    pub(super) fn add(&mut self, number: u64, bytes: u64, idle: Duration) {
        if idle >= STAYS {
            self.chosen.push((Reverse(idle), number, bytes));
            self.bytes = self.bytes.saturating_add(bytes);
            self.trim();
        }
    }

    /// Takes back the ones that are not needed because others, which were read even longer ago, leave with these bytes.
    pub(super) fn without(&mut self, leaving_bytes: u64) {
        self.wanted_bytes = self.wanted_bytes.saturating_sub(leaving_bytes);
        self.trim();
    }

    /// Returns number and bytes of each, those first that were read longest ago.
    pub(super) fn into_list(self) -> impl Iterator<Item = (u64, u64)> {
        let sorted = self.chosen.into_sorted_vec().into_iter();
        sorted.map(|(_, number, bytes)| (number, bytes))
    }

    fn trim(&mut self) {
        while let Some((_, _, bytes)) = self.chosen.peek().copied() {
            let rest = self.bytes.saturating_sub(bytes);
            if rest < self.wanted_bytes && self.chosen.len() <= self.count_max {
                return;
            }
            self.chosen.pop();
            self.bytes = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// The numbers of the chosen ones among segments of these bytes, last read so many minutes ago. They are numbered
    /// from 1.
    fn chosen(mut oldest: Oldest, segments: &[(u64, u32)]) -> Vec<u64> {
        for (number, (bytes, minutes)) in (1..).zip(segments) {
            oldest.add(number, *bytes, *minutes * MINUTE);
        }
        oldest.into_list().map(|(number, _)| number).collect()
    }

    #[test]
    fn segments_read_longest_ago_come_first_and_no_more_than_are_wanted() {
        let segments = [(10, 30), (10, 90), (10, 20), (10, 60), (10, 40)];
        let of = |wanted_bytes| chosen(Oldest::new(wanted_bytes, 100), &segments);
        assert_eq!(of(0), [] as [u64; 0]);
        assert_eq!(of(1), [2]);
        assert_eq!(of(10), [2]);
        assert_eq!(of(11), [2, 4]);
        assert_eq!(of(30), [2, 4, 5]);
        assert_eq!(of(u64::MAX), [2, 4, 5, 1, 3]);
        assert_eq!(chosen(Oldest::new(u64::MAX, 2), &segments), [2, 4]);
        assert_eq!(chosen(Oldest::new(u64::MAX, 0), &segments), [] as [u64; 0]);
    }

    #[test]
    fn large_segment_does_not_hide_older_ones() {
        // The oldest ones suffice without the large one, in whatever order the walk finds them.
        assert_eq!(chosen(Oldest::new(20, 100), &[(100, 30), (10, 90), (10, 60)]), [2, 3]);
        assert_eq!(chosen(Oldest::new(20, 100), &[(10, 90), (100, 30), (5, 60)]), [1, 3, 2]);
    }

    #[test]
    fn segment_that_was_read_lately_stays() {
        let segments = [(10, 9), (10, 10), (10, 0)];
        assert_eq!(chosen(Oldest::new(u64::MAX, 100), &segments), [2]);
    }

    #[test]
    fn segments_that_leave_anyway_count() {
        let of = |leaving_bytes| {
            let mut oldest = Oldest::new(30, 100);
            for (number, minutes) in [(1, 30u32), (2, 40), (3, 50)] {
                oldest.add(number, 10, minutes * MINUTE);
            }
            oldest.without(leaving_bytes);
            oldest.into_list().collect::<Vec<_>>()
        };
        assert_eq!(of(0), [(3, 10), (2, 10), (1, 10)]);
        assert_eq!(of(15), [(3, 10), (2, 10)]);
        assert_eq!(of(30), []);
    }
}
