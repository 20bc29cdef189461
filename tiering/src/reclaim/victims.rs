//! Selects the segments that are worth rewriting. Pure logic.
//!
//! Invariants:
//! - Estimates only nominate: nothing is dropped because of a decision made here.
//! - Memory is bounded: of a pass over all segments, the best [`VICTIMS_MAX`] are kept.

use crate::map::records::SegmentRecord;
use crate::map::space::Space;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

/// Maximum number of segments that one pass nominates. Chosen by hand: 64 GiB of segments of the
/// default size, in 400 KiB.
pub(super) const VICTIMS_MAX: usize = 4096;
/// Maximum number of segments that a pass reports as having more references than blocks. Chosen by
/// hand: as many as can be examined before the next pass.
const CROWDED_MAX: usize = 64;
/// Maximum number of segments that could not be read and are left alone until the next start.
/// Chosen by hand.
pub(super) const STUCK_MAX: usize = 4096;
/// Rewriting a segment with a higher percentage of live blocks gains less than a tenth of the
/// effort. Chosen by hand.
const LIVE_PERCENT_MAX: u64 = 90;

/// A nominated segment.
#[derive(Clone, Debug)]
pub(super) struct Victim {
    pub record: SegmentRecord,
    /// Live blocks when it was examined.
    pub live: u32,
}

/// Returns the benefit of rewriting a segment divided by its cost: the freed space times its age,
/// over reading all of it and writing its live part. Returns `None` if it is not worth it. A dead
/// segment is worth most. Source: Rosenblum and Ousterhout, The Design and Implementation of a
/// Log-Structured File System, section 3.6.
pub(super) fn worth(record: &SegmentRecord, live: u32, next_segment: u64) -> Option<u64> {
    let (live, blocks) = (u64::from(live), u64::from(record.block_count.max(1)));
    if live == 0 {
        return Some(u64::MAX);
    }
    if live * 100 > blocks * LIVE_PERCENT_MAX {
        return None;
    }
    // The age is measured in segments written since, because data written together has seen the
    // same load.
    let age = next_segment.saturating_sub(record.info.number.0).max(1);
    // There are at most 2^24 blocks, and the number of segments stays below 2^40.
    Some((blocks - live).saturating_mul(age).saturating_mul(1 << 10) / (blocks + live))
}

/// A pass over all segments.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// Number of the last segment examined.
    pub last: u64,
    pub space: Space,
    /// More segments are worth rewriting than are kept.
    pub has_more: bool,
    /// The least worthy is on top.
    best: BinaryHeap<Reverse<(u64, Reverse<u64>)>>,
    found: Vec<Victim>,
    /// The segments with most references, with their number.
    crowded: Vec<(u32, SegmentRecord)>,
}

impl Pass {
    /// Adds a segment with its number of live blocks, as far as known, and its count.
    pub fn add(&mut self, record: &SegmentRecord, places: u32, live: u32, next_segment: u64) {
        self.space.add_shared(record, live, places);
        let Some(worth) = worth(record, places, next_segment) else { return };
        self.best.push(Reverse((worth, Reverse(record.info.number.0))));
        self.found.push(Victim { record: record.clone(), live: places });
        if self.best.len() > 2 * VICTIMS_MAX {
            self.shrink(VICTIMS_MAX);
        }
    }

    /// Adds a segment that may have far fewer live blocks than its count says.
    pub fn add_crowded(&mut self, record: &SegmentRecord, live: u32) {
        self.crowded.push((live, record.clone()));
        if self.crowded.len() > 2 * CROWDED_MAX {
            self.shrink_crowded();
        }
    }

    fn shrink_crowded(&mut self) {
        self.crowded.sort_unstable_by_key(|(live, record)| (Reverse(*live), record.info.number.0));
        self.crowded.truncate(CROWDED_MAX);
    }

    /// Returns the segments with more references than blocks, in ascending order of references.
    pub fn end_crowded(&mut self) -> Vec<SegmentRecord> {
        self.shrink_crowded();
        self.crowded.drain(..).rev().map(|(_, record)| record).collect()
    }

    fn shrink(&mut self, count_max: usize) {
        while self.best.len() > count_max {
            self.has_more = true;
            self.best.pop();
        }
        let kept: HashSet<u64> = self.best.iter().map(|Reverse((_, Reverse(n)))| *n).collect();
        self.found.retain(|victim| kept.contains(&victim.record.info.number.0));
    }

    /// Returns the victims; the best is last.
    pub fn end(&mut self, next_segment: u64) -> Vec<Victim> {
        self.shrink(VICTIMS_MAX);
        let mut found = std::mem::take(&mut self.found);
        found.sort_by_key(|victim| {
            let worth = worth(&victim.record, victim.live, next_segment);
            (worth, Reverse(victim.record.info.number.0))
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyId;
    use crate::segment::{SegmentInfo, SegmentNumber};
    use block::Epoch;
    use block::seal::Algorithm;

    fn record(number: u64) -> SegmentRecord {
        let info = SegmentInfo {
            number: SegmentNumber(number),
            epoch: Epoch(1),
            id: [0; 16],
            algorithm: Algorithm::default(),
            key: KeyId::POOL,
            object_bytes: 1 << 20,
            frame_count: 256,
        };
        SegmentRecord { info, placement: crate::segment::Placement::Object, block_count: 256 }
    }

    #[test]
    fn the_dead_come_first_then_the_empty_and_the_old() {
        let mut pass = Pass::default();
        for (number, live) in [(1, 200), (2, 100), (3, 0), (4, 100), (5, 256), (6, 240), (7, 0)] {
            pass.add(&record(number), live, live, 8);
        }
        assert_eq!((pass.space.segment_count, pass.space.live_block_count), (7, 896));
        let order: Vec<u64> =
            pass.end(8).iter().rev().map(|victim| victim.record.info.number.0).collect();
        assert_eq!(order, [3, 7, 2, 4, 1], "full ones are left alone");
    }

    #[test]
    fn live_blocks_are_counted_and_crowded_segments_come_first() {
        let mut pass = Pass::default();
        pass.add(&record(1), 3, 5000, 8);
        pass.add(&record(2), 5000, 5000, 8);
        assert_eq!(pass.space.live_block_count, 10_000);
        assert!(pass.space.live_bytes < (1 << 20) * 11 / 10);
        for number in 1..=200_u64 {
            pass.add_crowded(&record(number), 300 + number as u32);
        }
        let crowded = pass.end_crowded();
        assert_eq!(crowded.len(), CROWDED_MAX);
        assert_eq!(crowded.last().map(|one| one.info.number.0), Some(200));
        assert_eq!(pass.end(8).len(), 1);
    }

    #[test]
    fn a_pass_keeps_the_best_of_many() {
        let mut pass = Pass::default();
        let count = 5 * VICTIMS_MAX as u64;
        let mut worths = Vec::new();
        for number in 1..=count {
            let live = (number * 37 % 230) as u32;
            pass.add(&record(number), live, live, count + 1);
            worths.push(worth(&record(number), live, count + 1).unwrap());
        }
        worths.sort_unstable_by(|a, b| b.cmp(a));
        let found = pass.end(count + 1).into_iter().rev();
        let found: Vec<u64> =
            found.map(|victim| worth(&victim.record, victim.live, count + 1).unwrap()).collect();
        assert_eq!(found, worths[..VICTIMS_MAX]);
    }
}
