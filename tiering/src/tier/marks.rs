//! The jobs that leave damaged segments alone: reclaim and deduplication.

use crate::dedup::Dedup;
use crate::reclaim::Reclaim;
use crate::repair::SegmentMarks;
use std::sync::Arc;

/// The marks of both; see the module.
pub(super) struct Marks {
    pub dedup: Arc<Dedup>,
    pub reclaim: Arc<Reclaim>,
}

impl SegmentMarks for Marks {
    fn note_bad(&self, number: u64) {
        self.dedup.note_bad(number);
    }

    fn note_well(&self, number: u64) {
        self.reclaim.note_well(number);
        self.dedup.note_well(number);
    }
}
