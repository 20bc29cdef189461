//! Segments that wait to be deleted, because the map does not reference them or no longer.
//!
//! Invariants:
//! - The lists are bounded. What they forget is left to the sweep of the next epoch.
//! - A segment that a copy in another store still needs, or that is being repaired, is not handed out:
//!   see [`Hold`].
//!
//! [`crate::orphans`] deletes them.

mod undeletable;

use crate::segment::SegmentNumber;
use crate::segment_store::Leftover;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use undeletable::Undeletable;

/// Maximum number of abandoned uploads that are remembered; beyond it the oldest are left to the
/// next epoch's sweep. Chosen by hand: 400 KiB of names, and 64 GiB of segments that all failed to
/// be committed.
const ABANDONED_MAX: usize = 4096;

/// Postponed deletions that are resumed at a time. Chosen by hand: as many as one sweep deletes.
const FREED_MAX: usize = 32;

/// Maximum number of deletions that wait for copies. Beyond it, objects that a copy needs are
/// deleted nevertheless, and the copy starts again with a newer state. Chosen by hand: 6 MiB of
/// names, and a terabyte of segments.
const HELD_MAX: usize = 65_536;

/// A range of segment numbers that are not deleted: those of a state that is being copied, or a
/// segment that is being repaired.
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

/// Segments to be deleted; see the module.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    abandoned: Mutex<VecDeque<Leftover>>,
    holds: Mutex<Vec<Weak<Hold>>>,
    held: Mutex<VecDeque<Leftover>>,
    pub undeletable: Undeletable,
    /// Serializes sweeps of abandoned uploads.
    sweep: tokio::sync::Mutex<()>,
}

impl Leftovers {
    /// Registers segments that may have been written and that the map does not reference.
    pub(crate) fn abandon(&self, segments: impl IntoIterator<Item = Leftover>) {
        let mut abandoned = self.abandoned.lock();
        abandoned.extend(segments);
        let excess = abandoned.len().saturating_sub(ABANDONED_MAX);
        abandoned.drain(..excess);
    }

    /// Waits for the turn to sweep abandoned uploads.
    pub(crate) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.sweep.lock().await
    }

    /// Returns the number of uploads that wait to be deleted.
    pub(crate) fn abandoned_count(&self) -> usize {
        self.abandoned.lock().len()
    }

    /// Returns the number of objects that the store does not delete.
    pub(crate) fn undeletable_count(&self) -> usize {
        self.undeletable.count()
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

    /// Whether a copy or a repair needs the segment.
    pub(crate) fn is_held(&self, number: SegmentNumber) -> bool {
        let mut holds = self.holds.lock();
        holds.retain(|hold| hold.strong_count() > 0);
        holds.iter().filter_map(Weak::upgrade).any(|hold| hold.has(number))
    }

    /// Postpones a deletion, if a copy needs the segment and not too many are waiting already.
    pub(crate) fn put_off(&self, segment: &Leftover) -> bool {
        let is_held = self.is_held(segment.name.number);
        let mut held = self.held.lock();
        let is_put_off = is_held && held.len() < HELD_MAX;
        if is_put_off {
            held.push_back(segment.clone());
        }
        is_put_off
    }

    /// Resumes deletions of objects that no copy needs any more.
    pub(crate) fn take_up(&self) {
        let mut held = self.held.lock();
        let waiting = std::mem::take(&mut *held);
        let mut free = Vec::new();
        for segment in waiting {
            match free.len() >= FREED_MAX || self.is_held(segment.name.number) {
                true => held.push_back(segment),
                false => free.push(segment),
            }
        }
        drop(held);
        if !free.is_empty() {
            self.abandon(free);
        }
    }

    pub(crate) fn oldest(&self) -> Option<Leftover> {
        self.abandoned.lock().front().cloned()
    }

    /// Removes a segment from the list. It may be gone already, because the list was full.
    pub(crate) fn forget(&self, segment: &Leftover) {
        self.abandoned.lock().retain(|abandoned| abandoned.name != segment.name);
    }
}
