//! Copies of some volumes: determines which segments these volumes need.
//!
//! Invariants:
//! - A segment is excluded only if its own directory has nothing that was written for a layer of
//!   these volumes, or for a layer that such a layer was made from, and it has no back-reference to
//!   a page of these layers. A segment whose directory cannot be read is copied.
//! - A directory never changes. Of an excluded segment only the back-references are examined again,
//!   in each state, as long as no layer is added to the needed ones.

use super::{Copier, held_of};
use crate::fetch::Frames;
use crate::map::records::SegmentRecord;
use crate::map::{LayerId, Map};
use crate::repair::is_lost;
use crate::segment::StoredSegment;
use block::{Result, VolumeId};
use futures::{StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// Maximum number of directories that are read concurrently. Chosen by hand: two requests each, and
/// at most 1 MiB.
const DIRECTORIES_AT_ONCE: usize = 8;

/// The volumes that a copy contains.
pub(super) struct Part {
    volumes: BTreeSet<VolumeId>,
    /// The layers that they needed in the newest state that was examined.
    layers: BTreeSet<LayerId>,
    /// Ids of the segments whose directories name nothing of these layers, by number: 40 bytes
    /// each.
    excluded: BTreeMap<u64, [u8; 16]>,
}

impl Copier {
    /// Restricts the copy to the data of these volumes and their snapshots; the metadata is copied
    /// whole. Objects that the copy already has stay as long as the pool has them.
    #[must_use]
    pub fn of_volumes(mut self, volumes: BTreeSet<VolumeId>) -> Copier {
        self.part = Some(Part { volumes, layers: BTreeSet::new(), excluded: BTreeMap::new() });
        self
    }

    /// Returns whether the copy contains this volume.
    pub(super) fn is_of(&self, volume: VolumeId) -> bool {
        self.part.as_ref().is_none_or(|part| part.volumes.contains(&volume))
    }

    /// Selects the segments that the copy should have from `all`, which are all segments with
    /// records with these numbers.
    pub(super) async fn needed(
        &mut self,
        map: &Map,
        all: BTreeMap<u64, SegmentRecord>,
        numbers: RangeInclusive<u64>,
    ) -> Result<BTreeMap<u64, SegmentRecord>> {
        let Some(part) = &mut self.part else { return Ok(all) };
        let gone = |number: &u64| !all.contains_key(number);
        let gone: Vec<u64> =
            part.excluded.range(numbers.clone()).map(|(number, _)| *number).filter(gone).collect();
        for number in gone {
            part.excluded.remove(&number);
        }
        let seeded_bugs = self.source.pool.seeded_bugs;
        let layers = map.layers().needed_by(&part.volumes, seeded_bugs.part_without_bases);
        if !layers.is_subset(&part.layers) {
            part.excluded.clear();
        }
        part.layers.clone_from(&layers);
        let mut referenced = BTreeSet::new();
        if !seeded_bugs.part_without_references {
            referenced = map.referenced_from(numbers, &layers).await?;
        }
        let (mut needed, mut unknown) = (BTreeMap::new(), Vec::new());
        for (number, record) in all {
            let is_there = self.segments.get(&number) == Some(&held_of(&record.info));
            if is_there || self.bad.contains_key(&number) || referenced.contains(&number) {
                needed.insert(number, record);
            } else if part.excluded.get(&number) != Some(&record.info.id) {
                unknown.push(record);
            }
        }
        let frames = &self.source.segments.frames;
        let layers = &layers;
        let mut looked = futures::stream::iter(unknown)
            .map(|record| async move {
                let is_needed = is_written_for(frames, &record.stored(), layers).await;
                is_needed.map(|is_needed| (record, is_needed))
            })
            .buffered(DIRECTORIES_AT_ONCE);
        while let Some((record, is_needed)) = looked.try_next().await? {
            let number = record.info.number.0;
            match is_needed {
                true => drop(needed.insert(number, record)),
                false => drop(part.excluded.insert(number, record.info.id)),
            }
        }
        Ok(needed)
    }
}

async fn is_written_for(
    frames: &Frames,
    segment: &StoredSegment,
    layers: &BTreeSet<LayerId>,
) -> Result<bool> {
    match frames.read_directory(segment).await {
        Ok(entries) => Ok(entries.iter().any(|entry| layers.contains(&LayerId(entry.layer)))),
        Err(error) if is_lost(&error) => Ok(true),
        Err(error) => Err(error),
    }
}
