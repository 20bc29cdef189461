//! The commit of a step: pairs the old places of blocks with the new ones; one batch re-points
//! their pages and forgets the old segments.

use super::Live;
use super::Reclaim;
use super::referenced::Foreign;
use super::rewrite::Rewritten;
use crate::dedup::Victims;
use crate::destage::write::Written;
use crate::map::database::Database;
use crate::map::dedup::BackReferences;
use crate::map::repoint::Place;
use crate::map::{LayerId, Moved, Placed, Repoint, RepointReport};
use crate::segment_store::Leftover;
use block::{Error, ErrorKind, Result};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Data for the segments of a step that have back-references.
#[derive(Debug, Default)]
pub(super) struct ByPlace {
    /// Their back-references.
    pub references: HashMap<u64, BackReferences>,
    /// The segments of these that have live blocks.
    pub live: HashSet<u64>,
    pub naming: Vec<(LayerId, u32)>,
    pub foreign: Vec<Foreign>,
    /// Back-references that are no longer needed.
    pub needless: Vec<(u64, LayerId, u32)>,
}

impl Reclaim {
    /// Commits in a task of its own, so that dropping the step does not leave the map half changed.
    pub(super) async fn commit_moves(
        self: &Arc<Self>,
        seen: Arc<Database>,
        rewritten: Rewritten,
        taken: Victims,
    ) -> Result<RepointReport> {
        let Rewritten { live, settled, emptied, written, by_place, .. } = rewritten;
        let new: Vec<Leftover> = written.segments.iter().map(Leftover::from).collect();
        let old: Vec<Leftover> = emptied.iter().map(Leftover::from).collect();
        if self.pool.seeded_bugs.delete_first {
            for segment in &old {
                self.segments.store.delete(segment).await.map_err(|error| {
                    Error::with_source(ErrorKind::Unavailable, "delete a segment", error)
                })?;
            }
        }
        let moved = match moves_of(live, &written) {
            Ok(moved) => moved,
            Err(error) => {
                self.segments.leftovers.abandon(new);
                for record in &emptied {
                    self.leave_alone(record, error.clone())?;
                }
                return Err(error);
            }
        };
        let (by_place, moved) = by_place.split(moved);
        let asked = Repoint {
            moved,
            settled,
            segments: written.segments,
            fingerprints: written.fingerprints,
            by_place,
            emptied,
            next_segment: self.metadata.next_segment.load(Ordering::SeqCst),
            seeded_bugs: self.pool.seeded_bugs,
        };
        let reclaim = self.clone();
        let task = self.pool.background.spawn(async move {
            let _taken = taken; // until the commit is over
            let mut writer = reclaim.metadata.writer.lock().await;
            let mut lists = asked.fingerprints.clone();
            if !Arc::ptr_eq(&seen, &reclaim.metadata.map.db()) {
                reclaim.segments.leftovers.abandon(new);
                let what = "reclaim segments: the metadata database was opened again meanwhile";
                return Err(Error::new(ErrorKind::Unavailable, what));
            }
            let done = reclaim.metadata.map.repoint(&mut writer, asked).await;
            match &done {
                Ok(report) => {
                    let is_unused = |number: u64| {
                        report.unused.iter().any(|record| record.info.number.0 == number)
                    };
                    lists.retain(|(number, _)| !is_unused(*number));
                    reclaim.dedup.add(&lists);
                    reclaim
                        .dedup
                        .forget(report.forgotten.iter().map(|record| record.info.number.0));
                    let gone = report.forgotten.iter().chain(&report.unused);
                    reclaim.segments.leftovers.abandon(gone.map(Leftover::from));
                }
                // It is unknown which of them the map references; each is deleted only if it is not
                // referenced.
                Err(_) => reclaim.segments.leftovers.abandon(new.into_iter().chain(old)),
            }
            done
        });
        task.await.map_err(|cause| Error::with_source(ErrorKind::Io, "commit reclaim", cause))?
    }
}

impl ByPlace {
    /// Splits off the moves of segments with back-references; the rest is re-pointed by block.
    fn split(self, moved: Vec<Moved>) -> (crate::map::repoint::ByPlace, Vec<Moved>) {
        let is_its = |one: &Moved| self.references.contains_key(&one.from.segment);
        let (its, rest): (Vec<Moved>, Vec<Moved>) = moved.into_iter().partition(is_its);
        let mut places: HashMap<Place, Placed> = HashMap::new();
        for Moved { block_count, from, to, .. } in its {
            let count = u8::try_from(block_count).expect("a frame has 16 blocks at most");
            places.extend((0..count).map(|block| {
                let from = (from.segment, from.at.frame_index, from.within + block);
                (from, Placed { within: to.within + block, ..to })
            }));
        }
        let references: BTreeSet<(u64, LayerId, u32)> = self
            .foreign
            .iter()
            .filter_map(|one| Some((places.get(&one.place)?.segment, one.layer, one.page)))
            .collect();
        let all = crate::map::repoint::ByPlace {
            places,
            pages: self.naming,
            back_references: references.into_iter().collect(),
            forgotten: self.references,
            needless: self.needless,
        };
        (all, rest)
    }
}

/// Pairs the old places of blocks with their new places.
fn moves_of(mut live: Vec<Live>, written: &Written) -> Result<Vec<Moved>> {
    live.sort_unstable_by_key(|one| (one.layer, one.first_block));
    let overlaps = |pair: &[Live]| {
        pair[0].layer == pair[1].layer
            && pair[0].first_block + pair[0].block_count > pair[1].first_block
    };
    if live.windows(2).any(overlaps) {
        let what = "reclaim segments: two of them hold the same block";
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let live_count: u64 = live.iter().map(|one| one.block_count).sum();
    let mut changes: Vec<_> = written.changes.iter().collect();
    changes.sort_unstable_by_key(|change| (change.layer, change.first_block));
    let mut moved = Vec::with_capacity(changes.len());
    let mut at = 0;
    for change in changes {
        let Some(to) = change.placed else { continue };
        let end = change.first_block + change.block_count;
        let is_before = |one: &Live| {
            (one.layer, one.first_block + one.block_count) <= (change.layer, change.first_block)
        };
        while live.get(at).is_some_and(is_before) {
            at += 1;
        }
        let mut index = at;
        while let Some(one) = live.get(index) {
            if one.layer != change.layer || one.first_block >= end {
                break;
            }
            let first_block = one.first_block.max(change.first_block);
            let last = (one.first_block + one.block_count).min(end);
            let part = |placed: Placed, start: u64| Placed {
                within: placed.within + (first_block - start) as u8,
                ..placed
            };
            moved.push(Moved {
                layer: one.layer,
                first_block,
                block_count: last - first_block,
                from: part(one.from, one.first_block),
                to: part(to, change.first_block),
            });
            index += 1;
        }
    }
    if moved.iter().map(|one| one.block_count).sum::<u64>() != live_count {
        let what = "reclaim segments: not all of their live data was written again";
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    Ok(moved)
}
