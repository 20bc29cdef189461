//! Rebuild: makes fragments anew that segments lack, where another store has room for them. Rebalance: moves
//! fragments to the stores that would get them now.
//!
//! Invariants:
//! - Order: the new fragments are durable, then the map names them, then the old ones are deleted, after a while
//!   and not while a copy holds the segment.
//! - One job at a time changes where a segment is, and it reads the record once it has the turn.
//! - A segment is held meanwhile: even if the map forgets it, nothing of it is deleted before.
//! - Segments that survive the fewest further losses come first.
//! - A walk that was cut short loses nothing: the next one begins again with what is still lacking.

mod oldest;
mod tiers;
mod unnamed;

use crate::outage::public_text;
use crate::pool::{JobParts, Metadata, Pool, Segments};
use crate::segment::{Fragments, Placement, SegmentNumber, StoredSegment};
use crate::segment_store::{Depth, Rebuilt, StoredFragment};
use crate::survey::TierSpace;
use block::{Error, ErrorKind, Result};
use futures::StreamExt;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Records read at a time. Chosen by hand.
const RECORDS_AT_ONCE: usize = 256;
/// Maximum number of segments that a walk remembers as lacking; others are found by the next one. Chosen by
/// hand: 16 MiB of numbers.
pub const LACKING_MAX: usize = 1 << 20;

/// How well the segments would survive losses of stores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Redundancy {
    /// Bytes of the images of segments, by the number of further stores that may be lost, at worst, without
    /// losing them; [`ANY_LOSS`](crate::segment_store::ANY_LOSS): all of them. `None`: too few fragments can be had
    /// now.
    pub bytes: BTreeMap<Option<u8>, u64>,
    /// Segments that lack fragments, or have some on stores that leave.
    pub lacking_count: u64,
    /// Bytes of their images.
    pub lacking_bytes: u64,
    /// The contents of the stores that have a fragment of any segment, by number.
    pub stores: BTreeMap<u32, StoreContents>,
    /// Space that they take, by tier.
    pub space: TierSpace,
    /// Every record could be read. Otherwise, other stores may have fragments, too.
    pub is_complete: bool,
}

/// The fragments that a store has of the segments that are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreContents {
    /// Their number.
    pub fragment_count: u64,
    /// Bytes of them, about: the image of a segment by its number of data fragments.
    pub bytes: u64,
}

/// How far the segments are from where they would be if they were written now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imbalance {
    /// All segments of the pool.
    pub segment_count: u64,
    /// Fragments that can be moved now.
    pub fragment_count: u64,
    /// Fragments that wait for a store that fails, and is not lost yet.
    pub waiting_count: u64,
}

/// The change of a segment's placement.
#[derive(Clone, Copy, Debug)]
enum Change {
    Rebuild(Depth),
    Rebalance,
}

/// Result of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RebuildReport {
    /// Fragments rebuilt, or moved.
    pub fragment_count: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Whether the segment still lacks fragments.
    pub is_lacking: bool,
    /// Whether a store did not say that it has its fragment, while nothing was found lacking.
    pub is_unsure: bool,
}

/// Time for which moved fragments stay at their old places. Chosen by hand: longer than a read takes.
const MOVED_STAY: Duration = Duration::from_secs(150);
/// Time after the deletion of fragments in which a store has told its room again. Chosen by hand: three times the pause
/// between two questions.
const TOLD_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of segments whose old fragments are remembered; the oldest are forgotten and left to the sweep
/// after the end of the segment. Chosen by hand: 30 MiB.
const MOVED_MAX: usize = 65_536;

/// A segment as it was before it moved.
struct Moved {
    since: Instant,
    segment: StoredSegment,
    /// It has left the data stores.
    is_dropped: bool,
}

/// The job; see the module.
pub(crate) struct Rebuild {
    pool: Arc<Pool>,
    metadata: Arc<Metadata>,
    segments: Arc<Segments>,
    /// One job at a time changes where a segment is.
    turns: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
    /// Those whose old fragments are to be deleted.
    moved: Arc<Mutex<VecDeque<Moved>>>,
    /// When fragments of segments that have left the data stores were deleted, and the bytes of these segments. Only
    /// those of which the stores may not have told the room since.
    deleted: Mutex<VecDeque<(Instant, u64)>>,
}

impl Rebuild {
    pub(crate) fn new(parts: &JobParts) -> Rebuild {
        let JobParts { pool, metadata, segments } = parts.clone();
        Rebuild {
            pool,
            metadata,
            segments,
            turns: Mutex::default(),
            moved: Arc::default(),
            deleted: Mutex::default(),
        }
    }

    /// Walks the records of all segments. Returns what they survive, and the numbers of those that lack
    /// fragments, those first that survive the fewest losses.
    pub(crate) async fn walk(&self) -> Result<(Redundancy, Vec<u64>)> {
        let mut found = Redundancy::default();
        let unread = self.metadata.map.unread_records();
        let mut lacking: BTreeMap<Option<u8>, Vec<u64>> = BTreeMap::new();
        let (mut last, mut remembered) = (0, 0);
        loop {
            let (records, next) = self.metadata.map.live_after(last, RECORDS_AT_ONCE).await?;
            for (record, _) in &records {
                // Of segments in a way that this version does not know, too.
                // A restored pool names stores that are not its own.
                let is_object = self.segments.store.is_object(&record.stored());
                if let Placement::Fragments(fragments) = &record.stored().placement
                    && !is_object
                {
                    let parts = u64::from(fragments.data.max(1));
                    let bytes = u64::from(record.info.object_bytes).div_ceil(parts);
                    for store in fragments.stores().filter(|id| *id != Fragments::NOWHERE) {
                        let contents = found.stores.entry(store).or_default();
                        contents.fragment_count += 1;
                        contents.bytes += bytes;
                    }
                }
                let segment = record.stored();
                found.space.add(&segment, is_object);
                let Some(state) = self.segments.store.redundancy(&segment) else {
                    continue;
                };
                let bytes = u64::from(record.info.object_bytes);
                *found.bytes.entry(state.spare).or_default() += bytes;
                if state.is_lacking {
                    found.lacking_count += 1;
                    found.lacking_bytes += bytes;
                    if remembered < LACKING_MAX {
                        lacking.entry(state.spare).or_default().push(record.info.number.0);
                        remembered += 1;
                    }
                }
            }
            match next {
                Some(next) => last = next,
                None => break,
            }
        }
        found.is_complete = self.metadata.map.unread_records() == unread;
        Ok((found, lacking.into_values().flatten().collect()))
    }

    /// Returns the numbers of some segments above `last`, in order, and where to go on; absent after the last one.
    pub(crate) async fn numbers_after(&self, last: u64) -> Result<(Vec<u64>, Option<u64>)> {
        let (records, next) = self.metadata.map.live_after(last, RECORDS_AT_ONCE).await?;
        Ok((records.iter().map(|(record, _)| record.info.number.0).collect(), next))
    }

    /// Returns the numbers of the segments whose fragments on a data store are not among those that it lists. Some of them
    /// may have got or moved them meanwhile. The listing is kept as 16 bytes for each fragment.
    pub(crate) async fn unlisted(&self, store: u32) -> Result<Vec<u64>> {
        let mut listed = HashSet::new();
        let mut listing = self.segments.store.list_fragments(Some(store));
        while let Some(part) = listing.next().await {
            let part = part.map_err(|cause| {
                let what = format!("list the fragments of a data store: {}", public_text(&cause));
                Error::with_source(ErrorKind::Unavailable, what, cause)
            })?;
            listed.insert(hash_of(&part));
        }
        let (mut unlisted, mut last) = (Vec::new(), 0);
        loop {
            let (records, next) = self.metadata.map.live_after(last, RECORDS_AT_ONCE).await?;
            for (record, _) in &records {
                let Placement::Fragments(fragments) = &record.stored().placement else { continue };
                let segment = record.info.name();
                let mut named = (0..=u8::MAX).zip(&fragments.places);
                let lacks = named.any(|(index, place)| {
                    let part = StoredFragment { segment, index, place: *place };
                    place.store == store && !listed.contains(&hash_of(&part))
                });
                if lacks && unlisted.len() < LACKING_MAX {
                    unlisted.push(record.info.number.0);
                }
            }
            match next {
                Some(next) => last = next,
                None => return Ok(unlisted),
            }
        }
    }

    /// Makes the fragments anew that a segment lacks. With [`Depth::Checksums`], all of them are verified,
    /// and those that are not whole are lacking, too. `None` if the map no longer names the segment.
    ///
    /// # Errors
    /// `Unavailable` if too few fragments can be had, or no store takes one; `Fenced` when another process owns
    /// the pool.
    pub(crate) async fn rebuild(
        &self,
        number: SegmentNumber,
        depth: Depth,
    ) -> Result<Option<RebuildReport>> {
        self.change(number, Change::Rebuild(depth)).await
    }

    /// Walks the records of all segments. Returns how many fragments are not where they would be if their segments
    /// were written now, and the numbers of segments of which some can be moved now.
    pub(crate) async fn walk_misplaced(&self) -> Result<(Imbalance, Vec<u64>)> {
        let (mut found, mut numbers, mut last) = (Imbalance::default(), Vec::new(), 0);
        loop {
            let (records, next) = self.metadata.map.live_after(last, RECORDS_AT_ONCE).await?;
            found.segment_count += records.len() as u64;
            for (record, _) in &records {
                let misplaced = self.segments.store.misplaced(&record.stored());
                found.fragment_count += misplaced.fragment_count as u64;
                found.waiting_count += misplaced.waiting_count as u64;
                if misplaced.fragment_count > 0 && numbers.len() < LACKING_MAX {
                    numbers.push(record.info.number.0);
                }
            }
            match next {
                Some(next) => last = next,
                None => return Ok((found, numbers)),
            }
        }
    }

    /// Moves fragments of a segment to where they would be if it were written now. `None` if the map no longer names
    /// the segment.
    ///
    /// # Errors
    /// Like [`Rebuild::rebuild`].
    pub(crate) async fn rebalance(&self, number: SegmentNumber) -> Result<Option<RebuildReport>> {
        self.change(number, Change::Rebalance).await
    }

    async fn change(&self, number: SegmentNumber, change: Change) -> Result<Option<RebuildReport>> {
        let _turn = self.turn(number).await;
        let _hold = self.segments.leftovers.hold_one(number);
        // The order matters: what the map forgets from now on is not deleted before the end.
        let Some(segment) = self.current(number).await? else { return Ok(None) };
        let (verb, changed) = match change {
            Change::Rebuild(depth) => {
                ("rebuild", self.segments.store.rebuild(&segment, depth).await)
            }
            Change::Rebalance => ("rebalance", self.segments.store.rebalance(&segment).await),
        };
        let rebuilt = match changed {
            Ok(rebuilt) => rebuilt,
            // The object has what too few fragments give, unless stores may come back that have them.
            Err(cause)
                if matches!(change, Change::Rebuild(_))
                    && segment.placement.is_copied()
                    && self.is_too_little_left(&segment, &cause)
                    && self.segments.store.read_fragments(&segment).await.is_err() =>
            {
                let placement = self.fragments_from_object(&segment).await?;
                all_anew(placement, &segment)
            }
            Err(cause) => {
                let what =
                    format!("{verb} segment {}: {}", segment.info.name(), public_text(&cause));
                return Err(Error::with_source(ErrorKind::Unavailable, what, cause));
            }
        };
        let Rebuilt { placement, fragment_count, bytes, is_lacking, is_unsure } = rebuilt;
        let report = RebuildReport { fragment_count, bytes, is_lacking, is_unsure };
        match placement {
            None => Ok(Some(report)),
            Some(placement) => Ok(self.commit(&segment, placement).await?.then_some(report)),
        }
    }

    /// Whether a segment that could not be rebuilt has too few fragments for good: they are gone or damaged, or their
    /// stores are lost.
    fn is_too_little_left(&self, segment: &StoredSegment, cause: &object_store::Error) -> bool {
        let is_lacking = || {
            let redundancy = self.segments.store.redundancy(segment);
            redundancy.is_some_and(|redundancy| redundancy.is_lacking)
        };
        matches!(cause, object_store::Error::NotFound { .. })
            || is_lacking()
            || self.segments.store.is_lost(segment)
    }

    /// Waits for the turn to change where a segment is.
    pub(crate) async fn turn(&self, number: SegmentNumber) -> tokio::sync::OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock();
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            turns.entry(number.0).or_default().clone()
        };
        turn.lock_owned().await
    }

    /// The segment as the map names it, once a commit that is under way has ended.
    pub(crate) async fn current(&self, number: SegmentNumber) -> Result<Option<StoredSegment>> {
        let writer = self.metadata.writer.lock().await;
        self.metadata.map.check(&writer)?;
        let found = self.metadata.map.find_segment(number.0).await?;
        Ok(found.map(|record| record.stored()))
    }

    /// Lets the map name the new placement of a segment, whose bytes are durable. The caller has the turn.
    /// Returns false if the map no longer names the segment at the old one; what is new is deleted then.
    ///
    /// # Errors
    /// Those of a commit. Whether the placement counts is unknown then, and nothing is deleted.
    pub(crate) async fn commit(
        &self,
        segment: &StoredSegment,
        placement: Placement,
    ) -> Result<bool> {
        self.pool.check_owner().await?;
        let changes = [(segment.clone(), placement.clone())];
        let (metadata, moved) = (Arc::clone(&self.metadata), Arc::clone(&self.moved));
        let clock = Arc::clone(&self.pool.clock);
        // In a task of its own, so that a caller that gives up does not leave the map half changed.
        let task = self.pool.background.spawn(async move {
            let mut writer = metadata.writer.lock().await;
            let is_changed = metadata.map.set_placements(&mut writer, &changes).await?[0];
            let [(segment, after)] = changes;
            if is_changed && leaves_places(&segment.placement, &after) {
                // Readers and copies that began before still read at the old places.
                let is_dropped = matches!(after, Placement::Object);
                let mut moved = moved.lock();
                moved.push_back(Moved { since: clock.now(), segment, is_dropped });
                let excess = moved.len().saturating_sub(MOVED_MAX);
                moved.drain(..excess);
            }
            Ok::<_, Error>(is_changed)
        });
        let is_changed = task.await.map_err(|cause| {
            Error::with_source(ErrorKind::Io, "commit the placement of a segment", cause)
        })??;
        if !is_changed {
            // What it has at the old one is deleted with the segment, or with its move there.
            let placement = new_part(&placement, &segment.placement);
            self.delete_unnamed(&StoredSegment { info: segment.info, placement }).await;
        }
        Ok(is_changed)
    }

    /// Deletes the fragments that a segment has at a placement and not at its present one. The caller has the turn.
    async fn delete_unnamed(&self, left: &StoredSegment) {
        let current = match self.current(left.info.number).await {
            Ok(current) => current.filter(|current| current.info.id == left.info.id),
            Err(error) => {
                tracing::debug!(error = %error.chain(), "fragments that have moved stay for now");
                return;
            }
        };
        let kept = current.map_or(Placement::Object, |current| current.placement);
        if let Err(error) = self.segments.store.delete_moved(left, &kept).await {
            tracing::debug!(segment = %left.info.name(), %error, "could not delete moved fragments");
        }
    }

    /// Deletes what has arrived at stores after others had taken its place.
    pub(crate) async fn sweep_strays(&self) -> Result<()> {
        let strays = self.segments.store.strays();
        if strays.is_empty() {
            return Ok(());
        }
        self.pool.check_owner().await?;
        for number in strays {
            let _turn = self.turn(number).await;
            // One that the map does not have yet may still be written.
            let Some(segment) = self.current(number).await? else { continue };
            if let Err(error) = self.segments.store.delete_strays(&segment).await {
                tracing::debug!(segment = %segment.info.name(), %error, "could not delete strays");
            }
        }
        Ok(())
    }

    /// Deletes fragments that have moved a while ago. What cannot be deleted is left to the sweep after the end
    /// of the segment.
    pub(crate) async fn sweep_moved(&self) -> Result<()> {
        let is_due = |moved: &Moved| {
            self.pool.clock.since(moved.since) >= MOVED_STAY
                && !self.segments.leftovers.is_held(moved.segment.info.number)
        };
        if !self.moved.lock().front().is_some_and(is_due) {
            return Ok(());
        }
        // Before one is taken from the list: while the store is away, they all stay there.
        self.pool.check_owner().await?;
        loop {
            let next = self.moved.lock().pop_front_if(|moved| is_due(moved));
            let Some(Moved { segment, is_dropped, .. }) = next else { return Ok(()) };
            let _turn = self.turn(segment.info.number).await;
            self.delete_unnamed(&segment).await;
            if is_dropped {
                let bytes = u64::from(segment.info.object_bytes);
                let mut deleted = self.deleted.lock();
                self.forget_told(&mut deleted);
                deleted.push_back((self.pool.clock.now(), bytes));
            }
        }
    }

    /// Bytes of the segments that have left the data stores, and whose fragments the stores still count as theirs.
    pub(crate) fn leaving_bytes(&self) -> u64 {
        let waiting: u64 = {
            let moved = self.moved.lock();
            let dropped = moved.iter().filter(|moved| moved.is_dropped);
            dropped.map(|moved| u64::from(moved.segment.info.object_bytes)).sum()
        };
        let mut deleted = self.deleted.lock();
        self.forget_told(&mut deleted);
        waiting + deleted.iter().map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// Forgets deletions of which the stores have told the room since.
    fn forget_told(&self, deleted: &mut VecDeque<(Instant, u64)>) {
        let is_told = |(since, _): &(Instant, u64)| self.pool.clock.since(*since) >= TOLD_AFTER;
        while deleted.pop_front_if(|deleted| is_told(deleted)).is_some() {}
    }

    /// The number of segments that may leave the data stores before old fragments are deleted: far fewer than are
    /// remembered, so that the room comes back while this owner runs.
    fn leaving_count_max(&self) -> usize {
        (MOVED_MAX / 2).saturating_sub(self.moved.lock().len())
    }
}

/// Two fragments have the same one by chance only.
fn hash_of(part: &StoredFragment) -> u64 {
    let mut hasher = DefaultHasher::new();
    part.hash(&mut hasher);
    hasher.finish()
}

/// The fragments of a placement that another one does not have.
fn new_part(placement: &Placement, earlier: &Placement) -> Placement {
    let (Placement::Fragments(new), Placement::Fragments(old)) = (placement, earlier) else {
        return placement.clone();
    };
    let mut part = Fragments::clone(new);
    for (place, old) in part.places.iter_mut().zip(&old.places) {
        if place == old {
            place.store = Fragments::NOWHERE;
        }
    }
    Placement::Fragments(Arc::new(part))
}

/// Whether a segment has fragments at the old placement that are not at the new one.
fn leaves_places(old: &Placement, new: &Placement) -> bool {
    match (old, new) {
        (Placement::Object, _) => false,
        (Placement::Fragments(_), Placement::Object) => true,
        (Placement::Fragments(old), Placement::Fragments(new)) => old.places != new.places,
    }
}

/// The outcome of a rebuild that has made all fragments anew.
fn all_anew(placement: Placement, segment: &StoredSegment) -> Rebuilt {
    let (stored_count, is_lacking) = match &placement {
        Placement::Object => (0, false),
        Placement::Fragments(fragments) => {
            let stored = fragments.stores().filter(|id| *id != Fragments::NOWHERE).count();
            (stored as u64, stored < fragments.places.len())
        }
    };
    let data = match &placement {
        Placement::Fragments(fragments) => u64::from(fragments.data.max(1)),
        Placement::Object => 1,
    };
    let bytes = u64::from(segment.info.object_bytes).div_ceil(data) * stored_count;
    Rebuilt {
        placement: Some(placement),
        fragment_count: stored_count,
        bytes,
        is_lacking,
        is_unsure: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::FragmentPlace;

    fn placement(places: &[(u32, u64)]) -> Placement {
        let place = |&(store, generation): &(u32, u64)| FragmentPlace { store, generation };
        Placement::Fragments(Arc::new(Fragments {
            data: 2,
            parity: 1,
            codec: 1,
            ends: vec![10, 20],
            places: places.iter().map(place).collect(),
            is_copied: false,
        }))
    }

    #[test]
    fn new_part_of_a_placement_has_nothing_of_the_earlier_one() {
        let old = placement(&[(1, 1), (2, 1), (3, 1)]);
        let new = placement(&[(1, 1), (4, 2), (3, 2)]);
        let part = new_part(&new, &old);
        assert!(part.is(&placement(&[(Fragments::NOWHERE, 1), (4, 2), (3, 2)])), "{part:?}");
        assert!(new_part(&new, &Placement::Object).is(&new), "all of it is new");
        assert!(new_part(&Placement::Object, &old).is(&Placement::Object));
    }
}
