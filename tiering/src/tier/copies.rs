//! Copies for the daemon: making one, hydrating a pool that was restored from one, and the copies
//! that damaged segments are restored from.

use super::Tier;
use crate::copier::{
    Copier, CopierOptions, CopyProgress, HydrateOptions, HydrateProgress, Lacking, RestoredStore,
};
use crate::repair::RepairSource;
use async_recursion::async_recursion;
use block::Result;
use object_store::ObjectStore;
use std::sync::Arc;

impl Tier {
    /// Lists the contents of the copy in `target`. Call the copier's methods from the background
    /// runtime.
    ///
    /// # Errors
    /// `Unavailable` or `Denied` when the copy cannot be listed.
    #[async_recursion]
    pub async fn copier(
        &self,
        target: Arc<dyn ObjectStore>,
        options: CopierOptions,
        progress: Arc<CopyProgress>,
    ) -> Result<Copier> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.copies.copier(target, options, progress).await
    }

    /// Fetches every object of a restored pool that is still only in the copy. Returns when the
    /// pool's own store has everything that the copy sends. The result names the segments that
    /// could not be fetched: those that the copy lacks, and those that it does not send while it
    /// sends others. If there are any, the pool still needs the copy unless they are given up: call
    /// it again after a while. Call it from the background runtime.
    ///
    /// # Errors
    /// `Unavailable` when a store does not answer: call it again, the fetched objects are kept.
    /// `Corrupt` when the copy lacks a table of the metadata; the segments are fetched
    /// nevertheless.
    #[async_recursion]
    pub async fn hydrate(
        &self,
        store: &Arc<RestoredStore>,
        options: HydrateOptions,
        progress: &HydrateProgress,
    ) -> Result<Lacking> {
        self.parts.pool.check_writable()?;
        self.parts.jobs.hydrator.hydrate(store, options, progress).await
    }

    /// Sets the copies, in order of preference, from which damaged and missing segments of the
    /// pool's store are restored.
    pub fn set_repair_sources(&self, sources: Vec<RepairSource>) {
        self.parts.jobs.repair.set_sources(sources);
    }

    /// Raises the read counts of these segments, by number, to at least the given values, which
    /// come from a copy or from before a restart.
    pub fn warm(&self, segments: &[(u64, u32)]) {
        for (segment, count) in segments {
            self.parts.segments.heat.warm(*segment, *count);
        }
    }

    /// Fades old reads. Call it once in a while.
    pub fn fade(&self) {
        self.parts.segments.heat.fade(self.parts.pool.clock.now());
    }
}
