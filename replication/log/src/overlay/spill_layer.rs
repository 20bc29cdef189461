//! The index of a spill file: a layer of the overlay below all generations.
//!
//! Invariants:
//! - Only the index is in memory; payloads stay in the file.
//! - A layer without its file shows every sector as lost, never as zeroes or older contents.

use crate::format::spill::{SpillContent, SpillRow};
use crate::overlay::extents::{Cut, ExtentMap, Source, Weight};
use crate::overlay::spill_resident::{SpillFile, SpillFileId, SpillResident};
use std::sync::Arc;
use std::time::Instant;

/// The index of one spill file, or the place of one that is missing.
#[derive(Debug)]
pub struct SpillLayer {
    id: SpillFileId,
    pub(crate) extents: ExtentMap,
    pub(crate) weight: Weight,
    /// Number of lost sectors.
    pub(crate) lost_sector_count: u64,
    /// Time of its oldest entry, as far as is known. After an open it is the time at which the file
    /// was written, which is not earlier. `None` if nothing is known or the file is missing.
    pub(crate) since: Option<Instant>,
    /// False if the file is missing or damaged, so that any sector may have been in it.
    pub(crate) is_complete: bool,
}

impl SpillLayer {
    /// Returns the identity of its file.
    pub(crate) fn id(&self) -> SpillFileId {
        self.id
    }

    /// Makes the layer of a file that cannot be read: every sector counts as lost.
    pub(crate) fn missing(id: SpillFileId) -> SpillLayer {
        let mut layer = SpillLayer::empty(id, false);
        let sectors = crate::format::entry::SECTORS_MAX;
        layer.put(0, sectors, Source::Lost { lsn: id.last_lsn });
        layer
    }

    fn empty(id: SpillFileId, is_complete: bool) -> SpillLayer {
        SpillLayer {
            id,
            extents: ExtentMap::default(),
            weight: Weight::default(),
            lost_sector_count: 0,
            since: None,
            is_complete,
        }
    }

    /// Returns the layer with the time of its oldest entry set.
    pub(crate) fn since(self, since: Option<Instant>) -> SpillLayer {
        SpillLayer { since, ..self }
    }

    fn put(&mut self, start: u64, count: u64, source: Source) {
        if let Source::Lost { .. } = source {
            self.lost_sector_count += count;
        }
        self.extents.insert((start, count), source, &mut self.weight, &Cut::default());
    }

    /// Makes the layer of an open file from its table.
    pub(crate) fn index(file: &Arc<SpillFile>, rows: &[SpillRow]) -> SpillLayer {
        let mut layer = SpillLayer::empty(file.id, true);
        for (index, row) in (0u32..).zip(rows) {
            let source = match row.content {
                SpillContent::Write { .. } => {
                    Source::SpillResident(SpillResident::new(Arc::clone(file), *row, index))
                }
                SpillContent::Zero => Source::Zeroes { is_trim: false },
                SpillContent::Trim => Source::Zeroes { is_trim: true },
                SpillContent::Lost { lsn } => Source::Lost { lsn },
            };
            layer.put(row.start_sector, row.sector_count, source);
        }
        layer
    }
}
