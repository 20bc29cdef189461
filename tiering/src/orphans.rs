//! Deletion of unreferenced segments that a crash, a cancelled destage or reclaim left in the
//! store.
//!
//! Invariants:
//! - A segment is deleted only in one of three cases: its epoch is below ours and no segment record
//!   references it; this process uploaded it and knows that it was never committed; or the map has
//!   durably forgotten it. The metadata database fenced the lower epochs before we opened it, so no
//!   record of theirs can appear any more.
//! - Whether the map references an object is looked up while no commit is under way, so the answer
//!   is durable. Whether this process still owns the pool is checked before the first deletion.
//! - A segment that a copy in another store still needs is not deleted before the copy has it, nor
//!   is one that is being repaired: see [`crate::leftovers::Hold`].
//! - An object whose name is not that of a segment is left alone and counted.
//! - An object that the store refuses to delete, while it answers, does not delay others: see
//!   [`crate::leftovers`].
//! - An abandoned upload is forgotten only once its object was deleted or is found to be
//!   referenced. An upload that was still under way when it was given up, and reaches the store
//!   after that, is left to the next epoch's sweep.

use crate::listing::OBJECT_COUNT_MAX;
use crate::outage::public_text;
use crate::pool::{Metadata, Pool, Segments};
use crate::segment_store::{Leftover, Listed};
use block::{Error, ErrorKind, Result};
use futures::TryStreamExt;
use std::sync::Arc;

/// Abandoned uploads that one call deletes, one request after the other. Chosen by hand: a second
/// or two at the store's latency, so that the caller can be stopped.
const ABANDONED_PER_SWEEP_MAX: usize = 32;

/// Undeletable objects after which a sweep of the whole folder stops. The next sweep skips these
/// and continues. Chosen by hand: the client tries each of them for some seconds.
const REFUSED_PER_SWEEP_MAX: u64 = 16;

/// Result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Objects examined.
    pub object_count: u64,
    /// Segments deleted.
    pub deleted_count: u64,
    /// Total size of these segments.
    pub deleted_bytes: u64,
    /// Objects in the segments folder that are not segments; left alone.
    pub foreign_count: u64,
    /// Objects that the store failed to delete in this sweep.
    pub refused_count: u64,
    /// Not everything was examined: another sweep will continue.
    pub is_cut: bool,
}

/// The job; see the module.
pub(crate) struct Sweeper {
    pub pool: Arc<Pool>,
    pub metadata: Arc<Metadata>,
    pub segments: Arc<Segments>,
}

impl Sweeper {
    /// Implements [`crate::Tier::sweep_abandoned`].
    pub(crate) async fn sweep_abandoned(&self) -> Result<SweepReport> {
        let _alone = self.segments.leftovers.turn().await;
        let mut report = SweepReport::default();
        self.segments.leftovers.take_up();
        let mut again =
            self.segments.leftovers.undeletable.due(ABANDONED_PER_SWEEP_MAX, self.pool.clock.now());
        for _ in 0..ABANDONED_PER_SWEEP_MAX {
            let Some(segment) = self.segments.leftovers.oldest().or_else(|| again.pop()) else {
                break;
            };
            let name = segment.name;
            if self.segments.leftovers.put_off(&segment) {
                self.segments.leftovers.forget(&segment);
                self.segments.leftovers.undeletable.forget(&self.pool.conditions, &name);
                continue;
            }
            if report.object_count == 0 {
                self.pool.check_owner().await?;
            }
            report.object_count += 1;
            // A failed commit may have become durable nevertheless, so ask the map.
            match self.metadata.is_named(name.number, name.id).await? {
                true => self.segments.leftovers.undeletable.forget(&self.pool.conditions, &name),
                false => match self.delete_or_note(&segment).await {
                    Ok(true) => {
                        tracing::debug!(object = %name, "the sweep deleted an abandoned upload");
                        report.deleted_count += 1;
                    }
                    Ok(false) => report.refused_count += 1,
                    Err(error) => {
                        // The other objects must not wait for this one.
                        self.segments.leftovers.forget(&segment);
                        self.segments.leftovers.abandon([segment]);
                        return Err(error);
                    }
                },
            }
            self.segments.leftovers.forget(&segment);
        }
        Ok(report)
    }

    /// Implements [`crate::Tier::sweep_orphans`].
    pub(crate) async fn sweep_orphans(&self) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        let mut listing = self.segments.store.list(OBJECT_COUNT_MAX);
        while let Some(found) = listing.try_next().await.map_err(sweep_failed)? {
            report.object_count += 1;
            let Listed::Segment { name, placement, bytes } = found else {
                report.foreign_count += 1;
                continue;
            };
            if name.epoch >= self.pool.epoch
                || self.metadata.has_record(name.number, name.id).await?
                || self.metadata.is_named(name.number, name.id).await?
            {
                continue;
            }
            // Known undeletable objects are retried separately.
            let segment = Leftover { name, placement };
            let is_known = self.segments.leftovers.undeletable.has(&name);
            if is_known || self.segments.leftovers.put_off(&segment) {
                continue;
            }
            if report.refused_count >= REFUSED_PER_SWEEP_MAX {
                report.is_cut = true;
                break;
            }
            if report.deleted_count + report.refused_count == 0 {
                self.pool.check_owner().await?;
            }
            if !self.delete_or_note(&segment).await? {
                report.refused_count += 1;
                continue;
            }
            tracing::info!(object = %name, "the sweep deleted an orphan segment");
            report.deleted_count += 1;
            report.deleted_bytes += bytes;
        }
        Ok(report)
    }

    /// Deletes a segment. Returns false if the store does not delete it although it answers; the
    /// segment is then retried separately.
    ///
    /// # Errors
    /// `Unavailable` when the store does not answer other requests either.
    async fn delete_or_note(&self, segment: &Leftover) -> Result<bool> {
        let refused = match self.segments.store.delete(segment).await {
            Ok(()) => None,
            Err(refused) => {
                match self.segments.store.size(&segment.name, segment.placement.as_ref()).await {
                    Ok(_) => Some(refused),
                    Err(object_store::Error::NotFound { .. }) => None,
                    Err(_) => return Err(sweep_failed(refused)),
                }
            }
        };
        let conditions = &self.pool.conditions;
        match &refused {
            None => self.segments.leftovers.undeletable.forget(conditions, &segment.name),
            Some(refused) => {
                let why = public_text(refused);
                self.segments.leftovers.undeletable.note(
                    conditions,
                    segment,
                    &why,
                    self.pool.clock.now(),
                );
            }
        }
        Ok(refused.is_none())
    }
}

fn sweep_failed(cause: object_store::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, "sweep orphan segments", cause)
}
