//! Segments that nothing names: what a crash, a cancelled destage or reclaim left in the store.
//!
//! Invariants:
//! - Deleted is only a segment of an epoch below ours that no segment record names, what this process
//!   uploaded and knows that it never committed, and what it knows that the map has durably forgotten.
//!   The metadata database fenced the lower epochs before we opened it, so no record of theirs can appear
//!   any more.
//! - Whether the map names an object is asked while no commit is under way, so that what was seen is durable;
//!   and whether the pool is still ours, before the first one is deleted.
//! - What a copy in another store still needs is not deleted before it has it, nor what is just put back: see [`Hold`].
//! - An object whose name is not that of a segment is left alone and counted.
//! - One that the store does not delete, while it answers, keeps nothing else waiting: see [`undeletable`].
//! - An abandoned upload is forgotten only once its object was deleted, or is found to be named. One
//!   that reaches the store after that, still under way when it was given up, is left to the next
//!   epoch's sweep.

mod undeletable;

use crate::listing;
use crate::outage::public_text;
use crate::segment::{FOLDER, SegmentId, SegmentNumber, parse_object_path};
use crate::tier::Inner;
use block::{Error, ErrorKind, Result};
use futures::TryStreamExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;
use undeletable::Undeletable;

/// Abandoned uploads that are remembered; beyond it the oldest are left to the next epoch's sweep.
/// Chosen by hand: 400 KiB of names, and 64 GiB of segments that all failed to be committed.
const ABANDONED_MAX: usize = 4096;

/// Abandoned uploads that one call deletes, one request after the other. Chosen by hand: a second
/// or two at the store's latency, so that who calls can be stopped.
const ABANDONED_PER_SWEEP_MAX: usize = 32;

/// Objects that one sweep of the whole folder finds undeletable before it leaves the rest to the next one, which passes
/// over these. Chosen by hand: the client tries each of them for some seconds.
const REFUSED_PER_SWEEP_MAX: u64 = 16;

/// What a sweep found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Objects looked at.
    pub object_count: u64,
    /// Segments deleted.
    pub deleted_count: u64,
    /// Their size.
    pub deleted_bytes: u64,
    /// Objects among the segments that are none; left alone.
    pub foreign_count: u64,
    /// Objects that the store has not deleted just now.
    pub refused_count: u64,
    /// Not everything was looked at: another sweep goes on.
    pub is_cut: bool,
}

/// Deletions that wait for copies. Beyond it, what a copy needs is deleted all the same, and it begins anew with
/// a newer state. Chosen by hand: 6 MiB of names, and a terabyte of segments.
const HELD_MAX: usize = 65_536;

/// Segments that are not deleted, by number: those of one state that is being copied, or one that is put back.
#[derive(Debug)]
pub(crate) struct Hold {
    from: AtomicU64,
    below: AtomicU64,
}

impl Hold {
    /// The state has no number from here on.
    pub(crate) fn set_below(&self, below: u64) {
        self.below.store(below, Ordering::SeqCst);
    }

    /// Everything below this number has been copied.
    pub(crate) fn release_below(&self, from: u64) {
        self.from.store(from, Ordering::SeqCst);
    }

    fn has(&self, number: SegmentNumber) -> bool {
        let from = self.from.load(Ordering::SeqCst);
        (from..self.below.load(Ordering::SeqCst)).contains(&number.0)
    }
}

/// Uploads of this process that no commit will name.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    abandoned: Mutex<VecDeque<Path>>,
    holds: Mutex<Vec<Weak<Hold>>>,
    held: Mutex<VecDeque<Path>>,
    undeletable: Undeletable,
    /// One sweep of them at a time.
    sweep: tokio::sync::Mutex<()>,
}

impl Orphans {
    /// Remembers objects that may have been written and are not named by the map.
    pub(crate) fn abandon(&self, names: Vec<Path>) {
        let mut abandoned = self.abandoned.lock();
        abandoned.extend(names);
        let excess = abandoned.len().saturating_sub(ABANDONED_MAX);
        abandoned.drain(..excess);
    }

    /// Uploads that wait to be deleted.
    pub(crate) fn abandoned_count(&self) -> usize {
        self.abandoned.lock().len()
    }

    /// Objects that the store does not delete.
    pub(crate) fn undeletable_count(&self) -> usize {
        self.undeletable.count()
    }

    /// As after hours, when those are tried again.
    #[cfg(test)]
    pub(crate) fn make_undeletable_due(&self) {
        self.undeletable.make_due();
    }

    /// From now on no segment is deleted, until the hold says of which it is not; dropping it ends it.
    pub(crate) fn hold(&self) -> Arc<Hold> {
        let hold = Arc::new(Hold { from: AtomicU64::new(0), below: AtomicU64::new(u64::MAX) });
        self.holds.lock().push(Arc::downgrade(&hold));
        hold
    }

    /// From now on this segment is not deleted; dropping it ends it.
    pub(crate) fn hold_one(&self, number: SegmentNumber) -> Arc<Hold> {
        let (from, below) = (AtomicU64::new(number.0), AtomicU64::new(number.0.saturating_add(1)));
        let hold = Arc::new(Hold { from, below });
        self.holds.lock().push(Arc::downgrade(&hold));
        hold
    }

    /// Deletions that wait for copies.
    pub(crate) fn held_count(&self) -> usize {
        self.held.lock().len()
    }

    fn is_held(&self, path: &Path) -> bool {
        let Some((_, number, _)) = parse_object_path(path) else { return false };
        let mut holds = self.holds.lock();
        holds.retain(|hold| hold.strong_count() > 0);
        holds.iter().filter_map(Weak::upgrade).any(|hold| hold.has(number))
    }

    /// Puts a deletion off, if some copy needs the object and not too many wait already.
    fn put_off(&self, path: &Path) -> bool {
        let is_held = self.is_held(path);
        let mut held = self.held.lock();
        let is_put_off = is_held && held.len() < HELD_MAX;
        if is_put_off {
            held.push_back(path.clone());
        }
        is_put_off
    }

    /// Takes up again what no copy needs any more.
    fn take_up(&self) {
        let mut held = self.held.lock();
        let waiting = std::mem::take(&mut *held);
        let mut free = Vec::new();
        for path in waiting {
            match free.len() >= ABANDONED_PER_SWEEP_MAX || self.is_held(&path) {
                true => held.push_back(path),
                false => free.push(path),
            }
        }
        drop(held);
        if !free.is_empty() {
            self.abandon(free);
        }
    }

    fn oldest(&self) -> Option<Path> {
        self.abandoned.lock().front().cloned()
    }

    /// Takes `path` off the list. It may have gone meanwhile, because the list was full.
    fn forget(&self, path: &Path) {
        self.abandoned.lock().retain(|abandoned| abandoned != path);
    }
}

impl Inner {
    /// See [`crate::Tier::sweep_abandoned`].
    pub(crate) async fn sweep_abandoned(&self) -> Result<SweepReport> {
        let _alone = self.orphans.sweep.lock().await;
        let mut report = SweepReport::default();
        self.orphans.take_up();
        let mut again = self.orphans.undeletable.due(ABANDONED_PER_SWEEP_MAX, Instant::now());
        for _ in 0..ABANDONED_PER_SWEEP_MAX {
            let Some(path) = self.orphans.oldest().or_else(|| again.pop()) else { break };
            if self.orphans.put_off(&path) {
                self.orphans.forget(&path);
                self.orphans.undeletable.forget(&self.options.conditions, &path);
                continue;
            }
            if report.object_count == 0 {
                self.check_owner().await?;
            }
            report.object_count += 1;
            // A commit that failed may have become durable all the same: the map decides.
            let is_named = match parse_object_path(&path) {
                Some((_, number, id)) => self.is_named(number, id).await?,
                None => true,
            };
            match is_named {
                true => self.orphans.undeletable.forget(&self.options.conditions, &path),
                false => match self.delete_or_note(&path).await {
                    Ok(true) => {
                        tracing::debug!(object = %path, "deleted an abandoned upload");
                        report.deleted_count += 1;
                    }
                    Ok(false) => report.refused_count += 1,
                    Err(error) => {
                        // The others are not to wait for this one.
                        self.orphans.forget(&path);
                        self.orphans.abandon(vec![path]);
                        return Err(error);
                    }
                },
            }
            self.orphans.forget(&path);
        }
        Ok(report)
    }

    /// See [`crate::Tier::sweep_orphans`].
    pub(crate) async fn sweep_orphans(&self) -> Result<SweepReport> {
        let mut report = SweepReport::default();
        let mut listing = listing::list(&self.store, Some(&Path::from(FOLDER)));
        while let Some(found) = listing.try_next().await.map_err(sweep_failed)? {
            report.object_count += 1;
            let Some((epoch, number, id)) = parse_object_path(&found.location) else {
                report.foreign_count += 1;
                continue;
            };
            if epoch >= self.options.epoch
                || self.has_record(number, id).await?
                || self.is_named(number, id).await?
            {
                continue;
            }
            // Those that the store does not delete are tried again by themselves.
            let is_known = self.orphans.undeletable.has(&found.location);
            if is_known || self.orphans.put_off(&found.location) {
                continue;
            }
            if report.refused_count >= REFUSED_PER_SWEEP_MAX {
                report.is_cut = true;
                break;
            }
            if report.deleted_count + report.refused_count == 0 {
                self.check_owner().await?;
            }
            if !self.delete_or_note(&found.location).await? {
                report.refused_count += 1;
                continue;
            }
            tracing::info!(object = %found.location, "deleted an orphan segment");
            report.deleted_count += 1;
            report.deleted_bytes += found.size;
        }
        Ok(report)
    }

    /// Deletes an object. False where the store does not, though it answers: it is tried again by itself.
    ///
    /// # Errors
    /// `Unavailable` where the store does not answer otherwise either.
    async fn delete_or_note(&self, path: &Path) -> Result<bool> {
        let refused = match self.delete(path).await {
            Ok(()) => None,
            Err(refused) => match self.store.head(path).await {
                Ok(_) => Some(refused),
                Err(object_store::Error::NotFound { .. }) => None,
                Err(_) => return Err(sweep_failed(refused)),
            },
        };
        let conditions = &self.options.conditions;
        match &refused {
            None => self.orphans.undeletable.forget(conditions, path),
            Some(refused) => {
                let why = public_text(refused);
                self.orphans.undeletable.note(conditions, path, &why, Instant::now());
            }
        }
        Ok(refused.is_none())
    }

    /// Whether the map names a segment, durably or not yet. What it does not name then, it never names
    /// again: while a commit is under way, or was left halfway by a failure, there is no answer.
    pub(crate) async fn is_named(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        if self.options.planted.sweep_unlocked {
            return self.has_record(number, id).await;
        }
        let writer = self.writer.lock().await;
        self.map.check(&writer)?;
        self.has_record(number, id).await
    }

    /// As [`Inner::is_named`], at this moment.
    async fn has_record(&self, number: SegmentNumber, id: SegmentId) -> Result<bool> {
        Ok(self.map.find_segment(number.0).await?.is_some_and(|record| record.info.id == id))
    }

    /// An owner of the past that wakes up must not delete what the present one names.
    pub(crate) async fn check_owner(&self) -> Result<()> {
        match &self.options.owner_check {
            Some(check) => check.ask().await,
            None => Ok(()),
        }
    }

    pub(crate) async fn delete(&self, path: &Path) -> object_store::Result<()> {
        match self.store.delete(path).await {
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            other => other,
        }
    }
}

fn sweep_failed(cause: object_store::Error) -> Error {
    Error::with_source(ErrorKind::Unavailable, "sweep orphan segments", cause)
}
