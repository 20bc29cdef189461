//! Copies of some volumes: which segments these need.
//!
//! Invariants:
//! - A segment is left out only if its own directory has nothing that was written for a layer of these volumes, or for one
//!   that such a layer was made from, and it has no back-reference to a page of these layers. What cannot be read is taken.
//! - A directory never changes: of what was left out only back-references are looked at again, in each state, as long as no
//!   other layer comes to those that are needed.

use super::{Copier, held_of};
use crate::map::records::SegmentRecord;
use crate::map::{LayerId, Map};
use crate::mend::is_lost;
use crate::segment::SegmentInfo;
use crate::tier::Inner;
use block::{Result, VolumeId};
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Directories that are read at the same time. Chosen by hand: two requests each, and a MiB at most.
const DIRECTORIES_AT_ONCE: usize = 8;

/// What a copy of some volumes, or a pool that was restored from one, lacks on purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// First number that no segment of the copy has.
    pub below: u64,
    /// The volumes that it is of.
    pub volumes: Arc<BTreeSet<VolumeId>>,
    /// Volumes from this one on were made since, and lack nothing; `None`: there is none of these.
    pub first_new_volume: Option<VolumeId>,
}

/// Which volumes a copy is of.
pub(super) struct Part {
    volumes: BTreeSet<VolumeId>,
    /// The layers that they needed in the newest state that was looked at.
    layers: BTreeSet<LayerId>,
    /// Ids of the segments whose directories name nothing of them, by number: 40 bytes each.
    left_out: BTreeMap<u64, [u8; 16]>,
}

impl Copier {
    /// Copies what these volumes need, and their snapshots; the metadata is copied whole. What the copy has already stays
    /// as long as the pool has it.
    #[must_use]
    pub fn of_volumes(mut self, volumes: BTreeSet<VolumeId>) -> Copier {
        self.part = Some(Part { volumes, layers: BTreeSet::new(), left_out: BTreeMap::new() });
        self
    }

    /// The copy is of this volume.
    pub(super) fn is_of(&self, volume: VolumeId) -> bool {
        self.part.as_ref().is_none_or(|part| part.volumes.contains(&volume))
    }

    /// Of these segments, all that have records from `first` to `last`, those that the copy is to have.
    pub(super) async fn needed(
        &mut self,
        map: &Map,
        all: BTreeMap<u64, SegmentRecord>,
        (first, last): (u64, u64),
    ) -> Result<BTreeMap<u64, SegmentRecord>> {
        let Some(part) = &mut self.part else { return Ok(all) };
        let gone = |number: &u64| !all.contains_key(number);
        let gone: Vec<u64> =
            part.left_out.range(first..=last).map(|(number, _)| *number).filter(gone).collect();
        for number in gone {
            part.left_out.remove(&number);
        }
        let planted = self.inner.options.planted;
        let layers = map.layers().needed_by(&part.volumes, planted.part_without_bases);
        if !layers.is_subset(&part.layers) {
            part.left_out.clear();
        }
        part.layers.clone_from(&layers);
        let mut referenced = BTreeSet::new();
        if !planted.part_without_references {
            referenced = map.referenced_from(first..=last, &layers).await?;
        }
        let (mut needed, mut unknown) = (BTreeMap::new(), Vec::new());
        for (number, record) in all {
            let is_there = self.segments.get(&number) == Some(&held_of(&record.info));
            if is_there || self.bad.contains_key(&number) || referenced.contains(&number) {
                needed.insert(number, record);
            } else if part.left_out.get(&number) != Some(&record.info.id) {
                unknown.push(record);
            }
        }
        let inner = &self.inner;
        let layers = &layers;
        let mut looked = futures::stream::iter(unknown)
            .map(|record| async move {
                let is_needed = is_written_for(inner, &record.info, layers).await;
                is_needed.map(|is_needed| (record, is_needed))
            })
            .buffered(DIRECTORIES_AT_ONCE);
        while let Some((record, is_needed)) = looked.try_next().await? {
            let number = record.info.number.0;
            match is_needed {
                true => drop(needed.insert(number, record)),
                false => drop(part.left_out.insert(number, record.info.id)),
            }
        }
        Ok(needed)
    }
}

async fn is_written_for(
    inner: &Inner,
    info: &SegmentInfo,
    layers: &BTreeSet<LayerId>,
) -> Result<bool> {
    match inner.frames.read_directory(info).await {
        Ok(entries) => Ok(entries.iter().any(|entry| layers.contains(&LayerId(entry.layer)))),
        Err(error) if is_lost(&error) => Ok(true),
        Err(error) => Err(error),
    }
}

impl Inner {
    /// A segment of this number that is not there may be one that the copy was not to have.
    pub(crate) fn may_be_left_out(&self, number: u64) -> bool {
        self.left_out.read().as_ref().is_some_and(|left_out| number < left_out.below)
    }

    /// What only the volumes named that were dropped, as they were not restored, is still being counted out.
    pub(crate) fn is_counting_out(&self) -> bool {
        self.left_out.read().as_ref().is_some_and(
            |LeftOut { volumes, first_new_volume, .. }| {
                // Until it is known which volumes are new, the others are still to be dropped.
                if first_new_volume.is_none() && !self.options.planted.lacking_unchosen {
                    return true;
                }
                let is_old = |volume: VolumeId| first_new_volume.is_none_or(|first| volume < first);
                self.is_dropping(|volume| is_old(volume) && !volumes.contains(&volume))
            },
        )
    }

    /// Whether a segment may be missing on purpose: who does not find it does not look for it again and again.
    pub(crate) async fn may_be_missing(&self, number: u64) -> bool {
        self.may_be_left_out(number)
            && (self.is_read_only
                || self.is_counting_out()
                || self.is_left_out(number).await.unwrap_or(false))
    }

    /// A segment that is not there is one that the copy was not to have, as far as counts say.
    ///
    /// # Errors
    /// As [`Map::live_blocks`].
    pub(crate) async fn is_left_out(&self, number: u64) -> Result<bool> {
        Ok(self.may_be_left_out(number) && self.map.live_blocks(number).await? == 0)
    }
}
