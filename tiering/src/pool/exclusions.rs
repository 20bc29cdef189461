//! Segments that a copy of some volumes, or a pool that was restored from one, lacks on purpose.
//!
//! Invariants:
//! - A segment that is missing counts as excluded only if its number is one of the copy's, and
//!   nothing that the copy contains references it.

use super::Metadata;
use crate::seeded_bugs::SeededBugs;
use crate::segment::SegmentInfo;
use block::{Result, VolumeId};
use parking_lot::RwLock;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Segments that a copy of some volumes, or a pool that was restored from one, lacks on purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    /// The first segment number above all segments of the copy.
    pub below: u64,
    /// The volumes that the copy contains.
    pub volumes: Arc<BTreeSet<VolumeId>>,
    /// Volumes from this one on were created since and lack nothing; `None` while no volume is
    /// known to be new.
    pub first_new_volume: Option<VolumeId>,
}

/// Tells which missing segments are missing on purpose.
pub(crate) struct Exclusions {
    /// See [`crate::TierOptions::excluded`] and [`crate::Tier::set_excluded`].
    pub excluded: RwLock<Option<Excluded>>,
    pub metadata: Arc<Metadata>,
    pub is_read_only: bool,
    pub seeded_bugs: SeededBugs,
}

impl Exclusions {
    /// Returns whether the map references a segment that is not missing on purpose.
    pub(crate) async fn is_wanted(&self, info: &SegmentInfo) -> bool {
        match self.metadata.map.find_segment(info.number.0).await {
            Ok(Some(record)) if record.is_of(info) => !self.may_be_missing(info.number.0).await,
            Ok(_) => false,
            // The answer is unknown; assume it is wanted.
            Err(_) => true,
        }
    }

    /// Returns whether a missing segment of this number may be one that the copy lacks on purpose.
    pub(crate) fn may_be_excluded(&self, number: u64) -> bool {
        self.excluded.read().as_ref().is_some_and(|excluded| number < excluded.below)
    }

    /// Returns whether references from volumes that were dropped because they were not restored are
    /// still being subtracted from the counts.
    pub(crate) fn is_counting_out(&self) -> bool {
        self.excluded.read().as_ref().is_some_and(
            |Excluded { volumes, first_new_volume, .. }| {
                // Until it is known which volumes are new, the others have yet to be dropped.
                if first_new_volume.is_none() && !self.seeded_bugs.lacking_unchosen {
                    return true;
                }
                let is_old = |volume: VolumeId| first_new_volume.is_none_or(|first| volume < first);
                self.metadata.is_dropping(|volume| is_old(volume) && !volumes.contains(&volume))
            },
        )
    }

    /// Returns whether a segment may be missing on purpose. A reader that does not find it does not
    /// retry.
    pub(crate) async fn may_be_missing(&self, number: u64) -> bool {
        self.may_be_excluded(number)
            && (self.is_read_only
                || self.is_counting_out()
                || self.is_excluded(number).await.unwrap_or(false))
    }

    /// Returns whether a missing segment is one that the copy lacks on purpose, according to its
    /// count of live blocks.
    ///
    /// # Errors
    /// Those of [`Map::live_blocks`].
    pub(crate) async fn is_excluded(&self, number: u64) -> Result<bool> {
        Ok(self.may_be_excluded(number) && self.metadata.map.live_blocks(number).await? == 0)
    }
}
