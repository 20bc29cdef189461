//! What segments would survive, fragments rebuilt or moved, and segments that change their tiers, for the callers of
//! the tier.

use super::Tier;
use crate::rebuild::{Imbalance, RebuildReport, Redundancy};
use crate::segment::SegmentNumber;
use crate::segment_store::Depth;
use crate::survey::{self, Survey, SurveyedStore};
use crate::tiers::{TierOutcome, TierPlan, TierPolicy, TierRoom, TierStep};
use async_recursion::async_recursion;
use block::Result;

impl Tier {
    /// Returns whether segments are or were in fragments; once true, it stays true.
    #[must_use]
    pub fn has_fragments(&self) -> bool {
        self.parts.metadata.map.has_fragments()
    }

    /// Deletes fragments that have moved a while ago, and walks the records of all segments. Returns what they would survive, and the numbers of those that lack
    /// fragments, those first that survive the fewest losses. Call it from the background runtime.
    ///
    /// # Errors
    /// Database errors; `Fenced` when another process owns the pool.
    #[async_recursion]
    pub async fn redundancy(&self) -> Result<(Redundancy, Vec<u64>)> {
        let rebuild = &self.parts.jobs.repair.rebuild;
        if !self.parts.pool.is_read_only {
            rebuild.sweep_moved().await?;
            rebuild.sweep_strays().await?;
        }
        rebuild.walk().await
    }

    /// Returns the numbers of some segments above `last`, in order, and where to go on; absent after the last one.
    /// Call it from the background runtime.
    ///
    /// # Errors
    /// Database errors.
    #[async_recursion]
    pub async fn segments_after(&self, last: u64) -> Result<(Vec<u64>, Option<u64>)> {
        self.parts.jobs.repair.rebuild.numbers_after(last).await
    }

    /// Returns the numbers of the segments whose fragments on a data store are not among those that it lists. Some of them
    /// may have got or moved them meanwhile. Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` if the store does not answer; database errors.
    #[async_recursion]
    pub async fn unlisted(&self, store: u32) -> Result<Vec<u64>> {
        self.parts.jobs.repair.rebuild.unlisted(store).await
    }

    /// Walks the records of all segments, and counts how they depend on these data stores, which are all of the
    /// pool. Changes nothing. Call it from the background runtime.
    ///
    /// # Errors
    /// Database errors.
    #[async_recursion]
    pub async fn survey(&self, stores: &[SurveyedStore]) -> Result<Survey> {
        survey::walk(&self.parts.metadata, &self.parts.segments, stores).await
    }

    /// Makes the fragments anew that a segment lacks, in memory of a few segments. `None` if the map no longer
    /// names it. Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` if too few fragments can be had or no store takes one; `Fenced` when another process owns
    /// the pool.
    #[async_recursion]
    pub async fn rebuild(&self, number: u64, depth: Depth) -> Result<Option<RebuildReport>> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.repair.rebuild.rebuild(SegmentNumber(number), depth).await
    }

    /// Walks the records of all segments. Returns how many fragments are not where they would be if their segments
    /// were written now, and the numbers of segments of which some can be moved. Call it from the background runtime.
    ///
    /// # Errors
    /// Database errors; `Fenced` when another process owns the pool.
    #[async_recursion]
    pub async fn imbalance(&self) -> Result<(Imbalance, Vec<u64>)> {
        self.parts.jobs.repair.rebuild.walk_misplaced().await
    }

    /// Moves fragments of a segment to where they would be if it were written now, in memory of a few segments.
    /// `None` if the map no longer names it. Call it from the background runtime.
    ///
    /// # Errors
    /// Like [`Tier::rebuild`].
    #[async_recursion]
    pub async fn rebalance(&self, number: u64) -> Result<Option<RebuildReport>> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.repair.rebuild.rebalance(SegmentNumber(number)).await
    }

    /// Deletes fragments that have moved a while ago, and walks the records of all segments. Returns those that are not
    /// in the tiers where the policy and the room of the data stores want them. Call it from the background runtime.
    ///
    /// # Errors
    /// Database errors; `Fenced` when another process owns the pool.
    #[async_recursion]
    pub async fn tier_plan(&self, policy: TierPolicy, room: TierRoom) -> Result<TierPlan> {
        self.parts.pool.check_writable()?;
        let rebuild = &self.parts.jobs.repair.rebuild;
        rebuild.sweep_moved().await?;
        rebuild.walk_tiers(policy, room).await
    }

    /// Bytes of the segments that were dropped from the data stores, and whose fragments the stores still count as
    /// theirs: these are deleted a while later.
    #[must_use]
    pub fn leaving_bytes(&self) -> u64 {
        self.parts.jobs.repair.rebuild.leaving_bytes()
    }

    /// Changes the tiers of a segment, in memory of a few segments. Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` if a store does not answer or too few fragments can be had; `Corrupt` if the segment does not
    /// verify where it is read; `Fenced` when another process owns the pool. Nothing has changed then.
    #[async_recursion]
    pub async fn change_tiers(&self, number: u64, step: TierStep) -> Result<TierOutcome> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.repair.rebuild.change_tiers(SegmentNumber(number), step).await
    }

    /// Deletes fragments that no record names, of segments that exist: those that a store had that was away when they were
    /// dropped, or that an owner left that ended. Returns their number. Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` if a listing ends early; `Fenced` when another process owns the pool; database errors.
    #[async_recursion]
    pub async fn sweep_unnamed(&self) -> Result<u64> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.repair.rebuild.sweep_unnamed().await
    }

    /// Records when segments were last read, if it is time to. Call it every few seconds from the background runtime.
    ///
    /// # Errors
    /// Database errors; what was read stays in memory.
    #[async_recursion]
    pub async fn save_read_times(&self) -> Result<()> {
        self.parts.pool.check_writable()?;
        self.parts.segments.read_times.save_sometimes(&self.parts.metadata).await
    }
}
