//! What [`Frames`](super::Frames) is told and what it tells.
//!
//! Invariants:
//! - Every budget is in bytes and every limit is reached by a test.

use crate::cache::{CacheOptions, CacheStatus};
use crate::outage::StoreFailure;
use block::Conditions;
use std::ops::Range;
use std::time::Duration;

/// Chosen by hand: longer than a bucket or a mount takes to be renamed or remounted in one step, and short beside the time
/// that a reader waits for an outage.
const MISSING_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 60 } else { 5_000 });
/// Chosen by hand: longer than a node of a store takes to be restarted.
const UNREADABLE_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 120 } else { 10_000 });

/// Budgets and limits of [`Frames`](super::Frames).
#[derive(Clone, Debug)]
pub struct FramesOptions {
    /// Plaintext frames kept in memory, in bytes; 0 = none.
    pub memory_bytes: u64,
    /// Plaintext frames of sequential streams and their read-ahead, in bytes; 0 = no read-ahead.
    pub stream_bytes: u64,
    /// Largest read-ahead window of one stream, in bytes of the volume; at most a quarter of
    /// `stream_bytes` is used.
    pub window_bytes_max: u64,
    /// The NVMe cache, if any.
    pub cache: Option<CacheOptions>,
    /// Reads of the object store under way at once.
    pub store_read_count_max: usize,
    /// One attempt of a store read is given up after this long, and a second more for each MiB.
    pub attempt_timeout: Duration,
    /// A store read that keeps failing for passing reasons fails after this long.
    pub retry_duration_max: Duration,
    /// An object that is not found counts as missing after this long at the earliest, if it is looked for again and again
    /// and others are read meanwhile.
    pub missing_patience: Duration,
    /// The same for an object that cannot be read: it counts as unreadable.
    pub unreadable_patience: Duration,
    /// Where store reads and the NVMe cache raise the conditions that last.
    pub conditions: Conditions,
}

impl Default for FramesOptions {
    fn default() -> Self {
        FramesOptions {
            memory_bytes: 256 << 20,
            stream_bytes: 32 << 20,
            window_bytes_max: 8 << 20,
            cache: None,
            store_read_count_max: 64,
            attempt_timeout: Duration::from_secs(30),
            retry_duration_max: Duration::from_secs(120),
            missing_patience: MISSING_PATIENCE,
            unreadable_patience: UNREADABLE_PATIENCE,
            conditions: Conditions::default(),
        }
    }
}

/// How the caller reads: it decides which cache the frames enter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Frames may be wanted again: they enter the main memory cache.
    #[default]
    Random,
    /// Part of a sequential stream: frames pass through the small stream cache, so that a scan does
    /// not sweep the main one.
    Sequential,
    /// For a background job that moves frames: they enter no cache.
    Once,
}

/// What [`Frames::on_read`](super::Frames::on_read) advises.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// To read this range with.
    pub access: Access,
    /// Resolve this range of the volume, in bytes, in the background and give its frames to
    /// [`Frames::read_ahead`](super::Frames::read_ahead). It may reach past the end of the volume.
    pub ahead: Option<Range<u64>>,
}

/// Counters since the start, and gauges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FramesStatus {
    /// Frames found in memory.
    pub memory_hit_count: u64,
    /// Frames found in the NVMe cache, or waiting to be written to it.
    pub cache_hit_count: u64,
    /// Frames read from the object store.
    pub store_frame_count: u64,
    /// Requests to the object store.
    pub store_request_count: u64,
    /// Requests to the object store that failed for a passing reason.
    pub store_retry_count: u64,
    /// Why the last of them did, until one succeeds.
    pub store_failure: Option<StoreFailure>,
    /// Bytes read from the object store.
    pub store_read_bytes: u64,
    /// Frames and whole objects that did not verify as they arrived and were read once more.
    pub store_refetch_count: u64,
    /// Frames whose copy in the store did not verify, read twice.
    pub store_bad_count: u64,
    /// Frames read ahead.
    pub ahead_frame_count: u64,
    /// Frames that were to be read ahead, but would have exceeded the budget.
    pub ahead_dropped_count: u64,
    /// Bytes of plaintext frames in memory.
    pub memory_used_bytes: u64,
    /// Frames being fetched.
    pub flight_count: u64,
    /// The NVMe cache; `None` when there is none or it could not be opened.
    pub cache: Option<CacheStatus>,
}
