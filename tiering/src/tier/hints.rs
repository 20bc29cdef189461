//! Background fetching of ranges that clients announce and of ranges that streams will read next,
//! within fixed budgets.
//!
//! Invariants:
//! - The work that hints start is bounded in tasks and in bytes, however slow the store is.

use super::Tier;
use crate::read::Reader;
use crate::segment::FrameRef;
use block::VolumeId;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// Maximum number of bytes that one prefetch hint fetches. Chosen by hand: the stream cache holds
/// no more by default, so anything beyond would be fetched in vain.
const PREFETCH_BYTES_MAX: u64 = 32 << 20;
/// Maximum number of client hints that are processed concurrently; further hints are dropped.
/// Chosen by hand: enough to fill the read-ahead budget with requests of 512 KiB, and even a hint
/// over the most scattered map holds less than 1 MiB while it is resolved.
pub(super) const PREFETCH_COUNT_MAX: usize = 32;
/// Maximum number of concurrent read-aheads of streams. It is separate from the limit for hints so
/// that the hints of one client do not stop the read-ahead of another. Chosen by hand: a read asks
/// for at most 8 MiB of read-ahead, mostly for less.
const READ_AHEAD_COUNT_MAX: usize = 64;

/// The job; see the module.
pub(crate) struct Prefetch {
    reader: Arc<Reader>,
    pub(super) hint_places: Arc<Semaphore>,
    read_ahead_places: Arc<Semaphore>,
    /// Hints and read-aheads that were dropped.
    pub(super) dropped_count: AtomicU64,
}

impl Tier {
    /// Hints that a range will be read. Fetches the frames of its first 32 MiB in the background,
    /// as far as there is room. Never waits: while the store is slow, hints beyond a fixed number
    /// are dropped and counted.
    pub fn prefetch(&self, volume: VolumeId, offset: u64, length: u64) {
        let range = offset..offset.saturating_add(length);
        self.parts.jobs.prefetch.fetch(volume, range, &self.parts.jobs.prefetch.hint_places);
    }
}

impl Prefetch {
    pub(super) fn new(reader: Arc<Reader>) -> Prefetch {
        Prefetch {
            reader,
            hint_places: Arc::new(Semaphore::new(PREFETCH_COUNT_MAX)),
            read_ahead_places: Arc::new(Semaphore::new(READ_AHEAD_COUNT_MAX)),
            dropped_count: AtomicU64::new(0),
        }
    }

    /// Fetches a range that a stream will read next, as far as there is room.
    pub(super) fn read_ahead(&self, volume: VolumeId, range: Range<u64>) {
        self.fetch(volume, range, &self.read_ahead_places);
    }

    fn fetch(&self, volume: VolumeId, range: Range<u64>, places: &Arc<Semaphore>) {
        // The caller does not wait for the task, so this semaphore is the only bound on the number
        // of tasks.
        let Ok(place) = places.clone().try_acquire_owned() else {
            self.dropped_count.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let reader = self.reader.clone();
        let end = range.end.min(range.start.saturating_add(PREFETCH_BYTES_MAX));
        let task = async move {
            match reader.resolve(volume, None, range.start, end.saturating_sub(range.start)).await {
                Ok(wanted) => {
                    let mut frames: Vec<FrameRef> =
                        wanted.iter().map(|part| part.frame.clone()).collect();
                    drop(wanted);
                    frames.dedup();
                    if let Some(fetch) = reader.segments.frames.read_ahead(&frames)
                        && let Err(error) = fetch.await
                    {
                        tracing::debug!(%error, "could not read ahead to the end");
                    }
                }
                // The read itself will report the error.
                Err(error) => tracing::debug!(%error, "could not begin to read ahead"),
            }
            drop(place);
        };
        tokio::spawn(task);
    }
}
