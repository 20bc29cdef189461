//! Changes where segments are.
//!
//! Invariants:
//! - Compare and set: a placement is changed only if the record still has the one that the caller read.
//! - The bytes at the new place are durable before, and those at the old place are deleted after.

use super::commit::Fresh;
use super::commit::draft::Draft;
use super::records::{Root, SegmentRecord};
use super::{Forget, Map, Writer, keys};
use crate::segment::{Placement, StoredSegment};
use block::Result;
use std::sync::atomic::Ordering;

/// A segment as the caller read it, and its new placement.
pub(crate) type Placed = (StoredSegment, Placement);

impl Map {
    /// Whether segments are or were in fragments.
    pub(crate) fn has_fragments(&self) -> bool {
        self.opener.header().has_fragments()
    }

    /// Whether segments move or moved between data stores and the object store.
    pub(crate) fn has_tiers(&self) -> bool {
        self.opener.header().has_tiers()
    }

    /// Changes the placements of segments durably, in one batch. Returns for each one whether it was changed:
    /// false if its record is gone or has another placement by now.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub(crate) async fn set_placements(
        &self,
        writer: &mut Writer,
        changes: &[Placed],
    ) -> Result<Vec<bool>> {
        self.check(writer)?;
        let mut draft = Draft::new(self);
        let (mut outcome, mut changed) = (Vec::new(), Vec::new());
        for (segment, placement) in changes {
            let number = segment.info.number.0;
            let current = self.find_segment(number).await?;
            let current = current.filter(|record| {
                record.is_of(&segment.info) && record.placement.is(&segment.placement)
            });
            outcome.push(current.is_some());
            if let Some(current) = current {
                assert!(
                    !placement.is_copied() || self.has_tiers(),
                    "earlier versions must not open the metadata before it has such a record"
                );
                let record = SegmentRecord { placement: placement.clone(), ..current };
                draft.put(&keys::segment_key(number), &record.encode());
                changed.push(number);
            }
        }
        if changed.is_empty() {
            return Ok(outcome);
        }
        let root = Root { commit_number: writer.root.commit_number + 1, ..writer.root };
        draft.put(keys::ROOT_KEY, &root.encode());
        self.write(writer, draft.batch).await?;
        self.flush(writer).await?;
        writer.root = root;
        let fresh = Fresh { bytes_left: 0, pages: Vec::new() };
        // First: a reader that has read an earlier record does not keep it.
        self.apply(fresh, &[], Vec::new(), Forget::Nothing);
        changed.iter().for_each(|number| self.segments.remove(number));
        self.commit_number.store(root.commit_number, Ordering::Release);
        // Readers that find too little at the earlier place consult the map again.
        self.repoints.fetch_add(1, Ordering::SeqCst);
        Ok(outcome)
    }
}
