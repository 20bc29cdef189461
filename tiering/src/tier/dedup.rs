//! Deduplication for the daemon: switching it on, loading its index, and sweeping back-references.

use super::Tier;
use crate::dedup::DedupStatus;
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result, VolumeId};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Number of newest segments whose fingerprints are read at a start. Chosen by hand: 128 GiB of
/// segments of the default size.
const LOADED_SEGMENTS_MAX: u64 = 8192;
/// Segments whose fingerprints are read at a time.
const LOAD_STEP: usize = 16;

/// Shortest time from the end of one sweep of the back-references to the next. Chosen by hand: the
/// sweep reads a page of the map for each.
const SWEEP_PAUSE: Duration = Duration::from_secs(3600);

impl Tier {
    /// Returns whether deduplication was ever used in this pool; once true, it stays true.
    #[must_use]
    pub fn has_dedup(&self) -> bool {
        self.parts.metadata.map.has_dedup()
    }

    /// Marks segments as damaged or missing in the store. Their blocks are not used as duplicates
    /// until the segments are found intact.
    pub fn note_bad_segments(&self, numbers: impl Iterator<Item = u64>) {
        for number in numbers {
            self.parts.dedup.note_bad(number);
        }
    }

    /// Excludes segments below this number from deduplication, in a restored pool, until all
    /// segments of the copy are in the pool's own store.
    pub fn set_dedup_floor(&self, number: u64) {
        self.parts.dedup.set_floor(number);
    }

    /// Turns deduplication on or off for a volume, for future destages. Existing duplicates stay.
    pub fn set_dedup(&self, volume: VolumeId, is_on: bool) {
        self.parts.dedup.set(volume, is_on);
    }

    /// Loads the fingerprints of the newest segments into memory. Call it once after a start, in
    /// the background, if a volume uses deduplication. Dropping the future leaves a part of them
    /// loaded.
    ///
    /// # Errors
    /// The errors of the metadata. A list that does not open is skipped.
    #[async_recursion]
    pub async fn load_fingerprints(&self) -> Result<()> {
        let (metadata, dedup) = (&self.parts.metadata, &self.parts.dedup);
        if !dedup.is_used() {
            return Ok(());
        }
        let next = metadata.next_segment.load(Ordering::SeqCst);
        let mut after = next.saturating_sub(LOADED_SEGMENTS_MAX);
        loop {
            let (lists, last) = metadata.map.fingerprints_after(after, LOAD_STEP).await?;
            dedup.add(&lists);
            match last {
                // Segments written from here on are added by their destage.
                Some(last) if last < next => after = last,
                _ => return Ok(()),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Performs one step of background work: examines up to `budget` back-references, and drops
    /// those of pages that no longer share blocks. A sweep runs once an hour. Returns `false` if
    /// there is nothing to do for now. Call it at the lowest priority.
    ///
    /// # Errors
    /// Those of [`Tier::destage`].
    #[async_recursion]
    pub async fn sweep_back_references(&self, budget: usize) -> Result<bool> {
        self.parts.pool.check_writable()?;
        let last = {
            let sweep = self.parts.dedup.sweep.lock();
            let is_due =
                sweep.ended.is_none_or(|ended| self.parts.pool.clock.since(ended) >= SWEEP_PAUSE);
            let is_urgent = self.parts.jobs.output.is_urgent.load(Ordering::Relaxed);
            if !self.parts.metadata.map.has_dedup()
                || is_urgent
                || (sweep.last.is_none() && !is_due)
            {
                return Ok(false);
            }
            sweep.last.clone()
        };
        let metadata = self.parts.metadata.clone();
        let step = async move {
            let mut writer = metadata.writer.lock().await;
            metadata.map.sweep_back_references(&mut writer, last.as_deref(), budget.max(1)).await
        };
        let done = self.parts.pool.background.spawn(step).await;
        let done = done
            .map_err(|cause| Error::with_source(ErrorKind::Io, "sweep back-references", cause))?;
        let (next, dropped_count) = done?;
        if dropped_count > 0 {
            tracing::debug!(
                dropped_count,
                "the sweep dropped back-references of pages that share nothing any more"
            );
        }
        let mut sweep = self.parts.dedup.sweep.lock();
        if next.is_none() {
            sweep.ended = Some(self.parts.pool.clock.now());
        }
        sweep.last = next;
        Ok(sweep.last.is_some())
    }

    /// Makes a sweep due at once, as if the pause were over.
    #[cfg(test)]
    pub(crate) fn sweep_again(&self) {
        self.parts.dedup.sweep.lock().ended = None;
    }

    /// Returns counts for status.
    #[must_use]
    pub fn dedup_status(&self) -> DedupStatus {
        let dedup = &self.parts.dedup;
        let (count, index_one_in) = dedup.index.lock().status();
        DedupStatus {
            found: self.parts.metadata.map.found(),
            index_block_count: count as u64,
            index_one_in,
            unequal_count: dedup.unequal_count.load(Ordering::Relaxed),
            unread_count: dedup.unread_count.load(Ordering::Relaxed),
        }
    }
}
