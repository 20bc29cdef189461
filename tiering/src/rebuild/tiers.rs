//! Segments change their tiers: one is copied to the object store, dropped from the data stores, or brought back.
//!
//! Invariants:
//! - Order: what is written is durable, then the map names it, then what it replaces is deleted, after a while and not
//!   while a copy holds the segment.
//! - Fragments are dropped only if the whole object was read back in the same step and has the bytes of the image that
//!   the fragments give. An object with other bytes is rewritten from fragments that verify, and nothing is dropped.
//! - Fragments that are brought back have a generation above all that was ever written of the segment from other cuts,
//!   so a fragment on a store that was away meanwhile is not taken for one of them. It is the number of the next commit:
//!   a generation is at most the number of the commit that recorded it, because a commit raises that of a segment by
//!   one at most, or to its own number. An attempt that was not recorded used at most one more. The commit that dropped
//!   the fragments, and the one of each opening, came after all of them, except for attempts of this owner to bring the
//!   segment back since; these have the same cuts, and so the same bytes.

use super::oldest::Oldest;
use super::{LACKING_MAX, RECORDS_AT_ONCE, Rebuild};
use crate::map::read_times::{GROUP_SEGMENTS, Times, place_of};
use crate::outage::public_text;
use crate::segment::{Fragments, Placement, SegmentNumber, StoredSegment};
use crate::survey::Amount;
use crate::tiers::{TierOutcome, TierPlan, TierPolicy, TierRoom, TierStep, Tiers};
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Reads for each frame of a segment from which it is hot; each counts half after an hour. Chosen by hand: a backup that
/// reads the segment once in large requests does not make it hot, nor does the verification after it.
const HOT_PASSES: u32 = 3;
/// Longest time since the last read of a hot segment. Chosen by hand: the time in which a read comes to count half.
const HOT_WITHIN: Duration = Duration::from_secs(3600);

/// A walk through the records of all segments, and what it has found so far.
struct Walk {
    policy: TierPolicy,
    room: TierRoom,
    plan: TierPlan,
    /// Segments that are not cold, and may leave because room is short.
    oldest: Oldest,
}

impl Walk {
    /// `count_max`: the maximum number of segments that may leave because room is short.
    fn new(policy: TierPolicy, room: TierRoom, count_max: usize) -> Walk {
        let oldest = Oldest::new(room.wanted_bytes, count_max);
        Walk { policy, room, plan: TierPlan::default(), oldest }
    }

    /// Returns the plan. Segments that leave because room is short come behind the cold ones.
    fn end(self) -> TierPlan {
        let Walk { mut plan, mut oldest, .. } = self;
        oldest.without(plan.to_drop.bytes);
        for (number, bytes) in oldest.into_list() {
            plan.to_drop += Amount { segment_count: 1, bytes };
            if plan.drop.len() < LACKING_MAX {
                plan.drop.push(number);
            }
        }
        plan
    }
}

impl Rebuild {
    /// Walks the records of all segments. Returns those that are not where the policy and the room of the data stores
    /// want them.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn walk_tiers(&self, policy: TierPolicy, room: TierRoom) -> Result<TierPlan> {
        let mut walk = Walk::new(policy, room, self.leaving_count_max());
        if !policy.tiers.is_moving() {
            return Ok(walk.end());
        }
        self.segments.heat.fade(self.pool.clock.now());
        let below = self.metadata.next_segment.load(Ordering::SeqCst);
        let unread = self.metadata.map.unread_records();
        let (mut last, mut living) = (0, BTreeSet::new());
        let mut times: (u64, Times) = (u64::MAX, [0; GROUP_SEGMENTS]);
        loop {
            let (records, next) = self.metadata.map.live_after(last, RECORDS_AT_ONCE).await?;
            for (record, _) in &records {
                let segment = record.stored();
                let (group, place) = place_of(segment.info.number.0);
                if group != times.0 {
                    living.insert(group);
                    times = (group, self.metadata.map.read_times(group).await?);
                }
                self.plan(&mut walk, &segment, times.1[place]);
            }
            match next {
                Some(next) => last = next,
                None => break,
            }
        }
        if self.metadata.map.unread_records() == unread {
            self.segments.read_times.prune(&self.metadata, &living, below).await?;
        }
        Ok(walk.end())
    }

    /// Adds a segment to the plan if it is not where the policy and the room want it. `read_at`: when it was last read,
    /// as recorded.
    fn plan(&self, walk: &mut Walk, segment: &StoredSegment, read_at: u32) {
        let Walk { policy, room, plan, oldest } = walk;
        let number = segment.info.number.0;
        let bytes = u64::from(segment.info.object_bytes);
        // Of all, so that one of which nothing is known counts as read now.
        let idle = self.segments.read_times.idle(number, read_at);
        let is_object = self.segments.store.is_object(segment);
        let is_moved_out = policy.tiers == Tiers::ObjectStore;
        let (numbers, amount) = match &segment.placement {
            _ if is_object => {
                let hot_reads = segment.info.frame_count.max(1).saturating_mul(HOT_PASSES);
                let is_hot = idle <= HOT_WITHIN.min(policy.cold_after)
                    && self.segments.heat.of(number) >= hot_reads;
                let has_room = plan.to_bring_back.bytes.saturating_add(bytes) <= room.spare_bytes;
                if is_moved_out || !is_hot || !has_room {
                    return;
                }
                (&mut plan.bring_back, &mut plan.to_bring_back)
            }
            // Fragments of a later version.
            _ if self.segments.store.redundancy(segment).is_none() => return,
            Placement::Fragments(fragments) if !fragments.is_copied => {
                (&mut plan.copy, &mut plan.to_copy)
            }
            _ if is_moved_out || idle >= policy.cold_after => (&mut plan.drop, &mut plan.to_drop),
            _ => return oldest.add(number, bytes, idle),
        };
        *amount += Amount { segment_count: 1, bytes };
        if numbers.len() < LACKING_MAX {
            numbers.push(number);
        }
    }

    /// Changes the tiers of a segment, in memory of a few segments.
    ///
    /// # Errors
    /// `Unavailable` if a store does not answer or too few fragments can be had; `Corrupt` if the segment does not
    /// verify where it is read; `Fenced` when another process owns the pool. Nothing has changed then.
    pub(crate) async fn change_tiers(
        &self,
        number: SegmentNumber,
        step: TierStep,
    ) -> Result<TierOutcome> {
        let _turn = self.turn(number).await;
        let _hold = self.segments.leftovers.hold_one(number);
        // The order matters: what the map forgets from now on is not deleted before the end.
        let Some(segment) = self.current(number).await? else { return Ok(TierOutcome::Needless) };
        let is_object = self.segments.store.is_object(&segment);
        match (step, &segment.placement) {
            (TierStep::BringBack, _) if is_object => self.bring_back(&segment).await,
            (TierStep::Copy, Placement::Fragments(fragments))
                if !is_object && !fragments.is_copied =>
            {
                self.copy(&segment, fragments).await
            }
            (TierStep::Drop, Placement::Fragments(fragments))
                if !is_object && fragments.is_copied =>
            {
                self.drop_fragments(&segment).await
            }
            _ => Ok(TierOutcome::Needless),
        }
    }

    /// Writes the object of a segment in fragments.
    async fn copy(&self, segment: &StoredSegment, fragments: &Fragments) -> Result<TierOutcome> {
        let image = self.image_of(segment).await?;
        self.put_object(segment, image).await?;
        let placement = Fragments { is_copied: true, ..fragments.clone() };
        self.done(segment, Placement::Fragments(Arc::new(placement))).await
    }

    /// Lets the object be all that there is of a segment, if it is whole.
    async fn drop_fragments(&self, segment: &StoredSegment) -> Result<TierOutcome> {
        let store = &self.segments.store;
        let image = match store.read_fragments(segment).await {
            Ok(image) => Some(image),
            // There is nothing to compare with, and nothing to lose.
            Err(cause) if self.is_too_little_left(segment, &cause) => None,
            Err(cause) => return Err(failed("read the fragments of", segment)(cause)),
        };
        let object = match store.read_object(segment).await {
            Ok(object) => Some(object),
            Err(object_store::Error::NotFound { .. }) => None,
            Err(cause) => return Err(failed("read back the object of", segment)(cause)),
        };
        match (image, object) {
            (None, None) => return Err(damaged("the object of", segment, "it is not there")),
            (None, Some(object)) => {
                if let Some(why) = self.pool.verify(&segment.info, &object).await? {
                    return Err(damaged("the object of", segment, &why));
                }
            }
            (Some(image), object)
                if object.as_ref() != Some(&image) && !self.pool.seeded_bugs.dropped_uncompared =>
            {
                self.check_image(segment, &image).await?;
                let bytes = image.len() as u64;
                self.rewrite_object(segment, image).await?;
                return Ok(TierOutcome::Rewritten(bytes));
            }
            (Some(_), _) => {}
        }
        if self.pool.seeded_bugs.dropped_early {
            let deleted = store.delete_moved(segment, &Placement::Object).await;
            deleted.map_err(failed("delete the fragments of", segment))?;
        }
        self.done(segment, Placement::Object).await
    }

    /// Verifies the object of a segment that is in fragments, too, and writes it anew from these unless it is whole.
    /// Returns whether it was written.
    ///
    /// # Errors
    /// Like [`Rebuild::change_tiers`].
    pub(crate) async fn mend_object(&self, number: SegmentNumber) -> Result<bool> {
        let _turn = self.turn(number).await;
        let _hold = self.segments.leftovers.hold_one(number);
        let Some(segment) = self.current(number).await? else { return Ok(false) };
        if !segment.placement.is_copied() || self.segments.store.is_object(&segment) {
            return Ok(false);
        }
        match self.segments.store.read_object(&segment).await {
            Ok(object) if self.pool.verify(&segment.info, &object).await?.is_none() => {
                return Ok(false);
            }
            Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
            Err(cause) => return Err(failed("read the object of", &segment)(cause)),
        }
        let image = self.image_of(&segment).await?;
        self.rewrite_object(&segment, image).await?;
        Ok(true)
    }

    /// Writes the object of a segment once more, from fragments that verify.
    async fn rewrite_object(&self, segment: &StoredSegment, image: Bytes) -> Result<()> {
        self.put_object(segment, image).await?;
        tracing::warn!(
            object = %segment.info.name(),
            "an object was not what its fragments are, and was written anew from them"
        );
        Ok(())
    }

    /// Writes the fragments of a segment that is an object.
    async fn bring_back(&self, segment: &StoredSegment) -> Result<TierOutcome> {
        let placement = self.fragments_from_object(segment).await?;
        self.done(segment, placement).await
    }

    /// Writes all fragments of a segment anew from its object, which verifies. The caller has the turn.
    pub(super) async fn fragments_from_object(&self, segment: &StoredSegment) -> Result<Placement> {
        let object = self.segments.store.read_object(segment).await;
        let object = object.map_err(failed("read the object of", segment))?;
        if let Some(why) = self.pool.verify(&segment.info, &object).await? {
            return Err(damaged("the object of", segment, &why));
        }
        self.pool.check_owner().await?;
        let generation = {
            let writer = self.metadata.writer.lock().await;
            self.metadata.map.check(&writer)?;
            writer.root().commit_number + 1
        };
        let put = self.segments.store.put_fragments(&segment.info, object, generation).await;
        put.map_err(failed("write the fragments of", segment))
    }

    /// The image that the fragments of a segment give, verified.
    async fn image_of(&self, segment: &StoredSegment) -> Result<Bytes> {
        let image = self.segments.store.read_fragments(segment).await;
        let image = image.map_err(failed("read the fragments of", segment))?;
        self.check_image(segment, &image).await?;
        Ok(image)
    }

    async fn check_image(&self, segment: &StoredSegment, image: &Bytes) -> Result<()> {
        match self.pool.verify(&segment.info, image).await? {
            None => Ok(()),
            Some(why) => Err(damaged("the fragments of", segment, &why)),
        }
    }

    async fn put_object(&self, segment: &StoredSegment, image: Bytes) -> Result<()> {
        // It may overwrite: an owner of the past must not.
        self.pool.check_owner().await?;
        let put = self.segments.store.put_object(&segment.info, image).await;
        put.map_err(failed("write the object of", segment))
    }

    async fn done(&self, segment: &StoredSegment, placement: Placement) -> Result<TierOutcome> {
        Ok(match self.commit(segment, placement).await? {
            true => TierOutcome::Done(u64::from(segment.info.object_bytes)),
            false => TierOutcome::Needless,
        })
    }
}

fn failed<'a>(
    verb: &'a str,
    segment: &'a StoredSegment,
) -> impl FnOnce(object_store::Error) -> Error + 'a {
    move |cause| {
        let what = format!("{verb} segment {}: {}", segment.info.name(), public_text(&cause));
        Error::with_source(ErrorKind::Unavailable, what, cause)
    }
}

fn damaged(what: &str, segment: &StoredSegment, why: &str) -> Error {
    let what = format!("verify {what} segment {}: {why}", segment.info.name());
    Error::new(ErrorKind::Corrupt, what)
}
