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
//!   is one that is being mended: see [`Hold`].
//! - An object whose name is not that of a segment is left alone and counted.
//! - An object that the store refuses to delete, while it answers, does not delay others: see
//!   [`undeletable`].
//! - An abandoned upload is forgotten only once its object was deleted or is found to be
//!   referenced. An upload that was still under way when it was given up, and reaches the store
//!   after that, is left to the next epoch's sweep.

mod undeletable;

use crate::listing::OBJECT_COUNT_MAX;
use crate::outage::public_text;
use crate::segment::{SegmentId, SegmentNumber};
use crate::segment_store::{Leftover, Listed};
use crate::tier::Inner;
use block::{Error, ErrorKind, Result};
use futures::TryStreamExt;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;
use undeletable::Undeletable;

/// Maximum number of abandoned uploads that are remembered; beyond it the oldest are left to the
/// next epoch's sweep. Chosen by hand: 400 KiB of names, and 64 GiB of segments that all failed to
/// be committed.
const ABANDONED_MAX: usize = 4096;

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

/// Maximum number of deletions that wait for copies. Beyond it, objects that a copy needs are
/// deleted nevertheless, and the copy starts again with a newer state. Chosen by hand: 6 MiB of
/// names, and a terabyte of segments.
const HELD_MAX: usize = 65_536;

/// A range of segment numbers that are not deleted: those of a state that is being copied, or a
/// segment that is being mended.
#[derive(Debug)]
pub(crate) struct Hold {
    from: AtomicU64,
    below: AtomicU64,
}

impl Hold {
    /// Sets the end of the range: the state has no segment numbered `below` or higher.
    pub(crate) fn set_below(&self, below: u64) {
        self.below.store(below, Ordering::SeqCst);
    }

    /// Releases all numbers below `from`, which have been copied.
    pub(crate) fn release_below(&self, from: u64) {
        self.from.store(from, Ordering::SeqCst);
    }

    fn has(&self, number: SegmentNumber) -> bool {
        let from = self.from.load(Ordering::SeqCst);
        (from..self.below.load(Ordering::SeqCst)).contains(&number.0)
    }
}

/// Objects to be deleted.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    abandoned: Mutex<VecDeque<Leftover>>,
    holds: Mutex<Vec<Weak<Hold>>>,
    held: Mutex<VecDeque<Leftover>>,
    undeletable: Undeletable,
    /// Serializes sweeps of abandoned uploads.
    sweep: tokio::sync::Mutex<()>,
}

impl Orphans {
    /// Registers segments that may have been written and that the map does not reference.
    pub(crate) fn abandon(&self, segments: impl IntoIterator<Item = Leftover>) {
        let mut abandoned = self.abandoned.lock();
        abandoned.extend(segments);
        let excess = abandoned.len().saturating_sub(ABANDONED_MAX);
        abandoned.drain(..excess);
    }

    /// Returns the number of uploads that wait to be deleted.
    pub(crate) fn abandoned_count(&self) -> usize {
        self.abandoned.lock().len()
    }

    /// Returns the number of objects that the store does not delete.
    pub(crate) fn undeletable_count(&self) -> usize {
        self.undeletable.count()
    }

    /// Makes undeletable objects due for another try, as if hours had passed.
    #[cfg(test)]
    pub(crate) fn make_undeletable_due(&self) {
        self.undeletable.make_due();
    }

    /// Holds all segments until the range of the hold is narrowed. Dropping the hold releases them.
    pub(crate) fn hold(&self) -> Arc<Hold> {
        let hold = Arc::new(Hold { from: AtomicU64::new(0), below: AtomicU64::new(u64::MAX) });
        self.holds.lock().push(Arc::downgrade(&hold));
        hold
    }

    /// Holds one segment. Dropping the hold releases it.
    pub(crate) fn hold_one(&self, number: SegmentNumber) -> Arc<Hold> {
        let (from, below) = (AtomicU64::new(number.0), AtomicU64::new(number.0.saturating_add(1)));
        let hold = Arc::new(Hold { from, below });
        self.holds.lock().push(Arc::downgrade(&hold));
        hold
    }

    /// Returns the number of deletions that wait for copies.
    pub(crate) fn held_count(&self) -> usize {
        self.held.lock().len()
    }

    fn is_held(&self, number: SegmentNumber) -> bool {
        let mut holds = self.holds.lock();
        holds.retain(|hold| hold.strong_count() > 0);
        holds.iter().filter_map(Weak::upgrade).any(|hold| hold.has(number))
    }

    /// Postpones a deletion, if a copy needs the segment and not too many are waiting already.
    fn put_off(&self, segment: &Leftover) -> bool {
        let is_held = self.is_held(segment.name.number);
        let mut held = self.held.lock();
        let is_put_off = is_held && held.len() < HELD_MAX;
        if is_put_off {
            held.push_back(segment.clone());
        }
        is_put_off
    }

    /// Resumes deletions of objects that no copy needs any more.
    fn take_up(&self) {
        let mut held = self.held.lock();
        let waiting = std::mem::take(&mut *held);
        let mut free = Vec::new();
        for segment in waiting {
            match free.len() >= ABANDONED_PER_SWEEP_MAX || self.is_held(segment.name.number) {
                true => held.push_back(segment),
                false => free.push(segment),
            }
        }
        drop(held);
        if !free.is_empty() {
            self.abandon(free);
        }
    }

    fn oldest(&self) -> Option<Leftover> {
        self.abandoned.lock().front().cloned()
    }

    /// Removes a segment from the list. It may be gone already, because the list was full.
    fn forget(&self, segment: &Leftover) {
        self.abandoned.lock().retain(|abandoned| abandoned.name != segment.name);
    }
}

impl Inner {
    /// Implements [`crate::Tier::sweep_abandoned`].
    pub(crate) async fn sweep_abandoned(&self) -> Result<SweepReport> {
        let _alone = self.orphans.sweep.lock().await;
        let mut report = SweepReport::default();
        self.orphans.take_up();
        let mut again = self.orphans.undeletable.due(ABANDONED_PER_SWEEP_MAX, Instant::now());
        for _ in 0..ABANDONED_PER_SWEEP_MAX {
            let Some(segment) = self.orphans.oldest().or_else(|| again.pop()) else { break };
            let name = segment.name;
            if self.orphans.put_off(&segment) {
                self.orphans.forget(&segment);
                self.orphans.undeletable.forget(&self.options.conditions, &name);
                continue;
            }
            if report.object_count == 0 {
                self.check_owner().await?;
            }
            report.object_count += 1;
            // A failed commit may have become durable nevertheless, so ask the map.
            match self.is_named(name.number, name.id).await? {
                true => self.orphans.undeletable.forget(&self.options.conditions, &name),
                false => match self.delete_or_note(&segment).await {
                    Ok(true) => {
                        tracing::debug!(object = %name, "deleted an abandoned upload");
                        report.deleted_count += 1;
                    }
                    Ok(false) => report.refused_count += 1,
                    Err(error) => {
                        // The other objects must not wait for this one.
                        self.orphans.forget(&segment);
                        self.orphans.abandon([segment]);
                        return Err(error);
                    }
                },
            }
            self.orphans.forget(&segment);
        }
        Ok(report)
    }

    /// Implements [`crate::Tier::sweep_orphans`].
    pub(crate) async fn sweep_orphans(&self) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        let mut listing = self.segments.list(OBJECT_COUNT_MAX);
        while let Some(found) = listing.try_next().await.map_err(sweep_failed)? {
            report.object_count += 1;
            let Listed::Segment { name, placement, bytes } = found else {
                report.foreign_count += 1;
                continue;
            };
            if name.epoch >= self.options.epoch
                || self.has_record(name.number, name.id).await?
                || self.is_named(name.number, name.id).await?
            {
                continue;
            }
            // Known undeletable objects are retried separately.
            let segment = Leftover { name, placement: Some(placement) };
            let is_known = self.orphans.undeletable.has(&name);
            if is_known || self.orphans.put_off(&segment) {
                continue;
            }
            if report.refused_count >= REFUSED_PER_SWEEP_MAX {
                report.is_cut = true;
                break;
            }
            if report.deleted_count + report.refused_count == 0 {
                self.check_owner().await?;
            }
            if !self.delete_or_note(&segment).await? {
                report.refused_count += 1;
                continue;
            }
            tracing::info!(object = %name, "deleted an orphan segment");
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
        let refused = match self.segments.delete(segment).await {
            Ok(()) => None,
            Err(refused) => match self.segments.size(segment).await {
                Ok(_) => Some(refused),
                Err(object_store::Error::NotFound { .. }) => None,
                Err(_) => return Err(sweep_failed(refused)),
            },
        };
        let conditions = &self.options.conditions;
        match &refused {
            None => self.orphans.undeletable.forget(conditions, &segment.name),
            Some(refused) => {
                let why = public_text(refused);
                self.orphans.undeletable.note(conditions, segment, &why, Instant::now());
            }
        }
        Ok(refused.is_none())
    }

    /// Returns whether the map references a segment, waiting for a commit that is under way. An
    /// unreferenced segment will never be referenced again. Fails while the outcome of a failed
    /// commit is unknown.
    pub(crate) async fn is_named(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        if self.options.planted.sweep_unlocked {
            return self.has_record(number, id).await;
        }
        let writer = self.writer.lock().await;
        self.map.check(&writer)?;
        self.has_record(number, id).await
    }

    /// Like [`Inner::is_named`], but without waiting for commits.
    async fn has_record(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        Ok(self.map.find_segment(number.0).await?.is_some_and(|record| record.info.id == id))
    }

    /// Fails if this process no longer owns the pool: an owner of the past that resumes must not
    /// delete objects that the present one references.
    pub(crate) async fn check_owner(&self) -> Result<()> {
        match &self.options.owner_check {
            Some(check) => check.ask().await,
            None => Ok(()),
        }
    }
}

fn sweep_failed(cause: object_store::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, "sweep orphan segments", cause)
}
