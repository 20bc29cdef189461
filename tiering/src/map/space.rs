//! Live share of the space that the store holds. These estimates nominate segments for reclaim and
//! are shown to people; nothing else depends on them.
//!
//! Invariants:
//! - Block counts are exact once a pass over all segments has ended, unless something was committed
//!   during it. In bytes, a block counts as the average of its segment.

use super::records::SegmentRecord;
use parking_lot::Mutex;

/// Totals over the segments of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Segments that have a record.
    pub segment_count: u64,
    /// Bytes of their objects.
    pub object_bytes: u64,
    /// Live bytes among them.
    pub live_bytes: u64,
    /// Live blocks.
    pub live_block_count: u64,
}

impl Space {
    /// Adds a segment with `live` live blocks.
    pub fn add(&mut self, record: &SegmentRecord, live: u32) {
        self.add_shared(record, live, live);
    }

    /// Like [`Space::add`], if only `places` of the segment's blocks are live because some are
    /// named more than once.
    pub fn add_shared(&mut self, record: &SegmentRecord, live: u32, places: u32) {
        let object_bytes = u64::from(record.info.object_bytes);
        self.segment_count += 1;
        self.object_bytes += object_bytes;
        self.live_block_count += u64::from(live);
        self.live_bytes += live_bytes(record, places);
    }
}

/// The live bytes of a segment.
#[must_use]
pub fn live_bytes(record: &SegmentRecord, live: u32) -> u64 {
    let blocks = u64::from(record.block_count.max(1));
    u64::from(record.info.object_bytes) * u64::from(live).min(blocks) / blocks
}

#[derive(Debug, Default)]
struct Known {
    space: Space,
    is_known: bool,
    /// Live blocks lost since the last pass began.
    lost_block_count: u64,
}

/// Counts the space of a pool: see the module.
#[derive(Debug, Default)]
pub struct SpaceCounter(Mutex<Known>);

impl SpaceCounter {
    /// The current estimate; `None` before the first pass has ended.
    #[must_use]
    pub fn get(&self) -> Option<Space> {
        let known = self.0.lock();
        known.is_known.then_some(known.space)
    }

    /// Live blocks lost since the last pass began.
    #[must_use]
    pub fn lost_block_count(&self) -> u64 {
        self.0.lock().lost_block_count
    }

    pub(crate) fn begin_pass(&self) {
        self.0.lock().lost_block_count = 0;
    }

    pub(crate) fn end_pass(&self, space: Space) {
        let mut known = self.0.lock();
        known.space = space;
        known.is_known = true;
    }

    /// Accounts for a commit: the segments that it added and forgot, and the total change of live
    /// blocks.
    pub(super) fn apply(
        &self,
        added: &[SegmentRecord],
        forgotten: &[SegmentRecord],
        live_delta: i64,
    ) {
        let mut known = self.0.lock();
        let Space { segment_count, object_bytes, live_bytes, live_block_count } = &mut known.space;
        // Lost blocks count as the average of the previous ones, new blocks as themselves.
        let new_blocks: i64 = added.iter().map(|record| i64::from(record.block_count)).sum();
        let new_bytes: u64 = added.iter().map(|record| u64::from(record.info.object_bytes)).sum();
        let old_delta = live_delta - new_blocks;
        if let Some(average) = live_bytes.checked_div(*live_block_count) {
            // Blocks gained without a new segment are named a second time, so the live bytes do not
            // grow.
            let bytes = average.saturating_mul(old_delta.min(0).unsigned_abs());
            *live_bytes = live_bytes.saturating_sub(bytes);
        }
        *live_bytes += new_bytes;
        *live_block_count = live_block_count.saturating_add_signed(live_delta);
        *segment_count =
            (*segment_count + added.len() as u64).saturating_sub(forgotten.len() as u64);
        let gone: u64 = forgotten.iter().map(|record| u64::from(record.info.object_bytes)).sum();
        *object_bytes = (*object_bytes + new_bytes).saturating_sub(gone);
        if old_delta < 0 {
            known.lost_block_count += old_delta.unsigned_abs();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyId;
    use crate::segment::{SegmentInfo, SegmentNumber};
    use block::Epoch;
    use block::seal::Algorithm;

    fn record(number: u64, object_bytes: u32, block_count: u32) -> SegmentRecord {
        let info = SegmentInfo {
            number: SegmentNumber(number),
            epoch: Epoch(1),
            id: [0; 16],
            algorithm: Algorithm::default(),
            key: KeyId::POOL,
            object_bytes,
            frame_count: 1,
        };
        SegmentRecord { info, placement: crate::segment::Placement::Object, block_count }
    }

    #[test]
    fn commits_keep_the_estimate_near_the_measured_space() {
        let counter = SpaceCounter::default();
        assert_eq!(counter.get(), None);
        let mut space = Space::default();
        space.add(&record(1, 1000, 10), 10);
        space.add(&record(2, 3000, 10), 5);
        assert_eq!(
            space,
            Space { segment_count: 2, object_bytes: 4000, live_bytes: 2500, live_block_count: 15 }
        );
        counter.begin_pass();
        counter.end_pass(space);
        // Add a segment of 10 blocks, 6 of which replace older ones.
        counter.apply(&[record(3, 2000, 10)], &[], 4);
        let now = counter.get().unwrap();
        assert_eq!((now.segment_count, now.object_bytes, now.live_block_count), (3, 6000, 19));
        assert_eq!(now.live_bytes, 2500 + 2000 - 6 * (2500 / 15));
        assert_eq!(counter.lost_block_count(), 6);
        counter.apply(&[], &[record(2, 3000, 10)], 0);
        assert_eq!(counter.get().unwrap().object_bytes, 3000);
        counter.begin_pass();
        assert_eq!(counter.lost_block_count(), 0);
    }
}
