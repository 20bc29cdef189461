//! Options, advice and counters of [`Frames`](super::Frames).
//!
//! Invariants:
//! - Every budget is in bytes, and a test reaches every limit.

use crate::cache::{CacheOptions, CacheStatus};
use crate::outage::StoreFailure;
use block::Conditions;
use block::env::{Clock, SystemClock};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Default of [`FramesOptions::missing_patience`]. Chosen by hand: longer than it takes to rename a
/// bucket or to remount a mount in one step, and short compared with the time that a reader waits
/// for an outage.
const MISSING_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 60 } else { 5_000 });
/// Default of [`FramesOptions::unreadable_patience`]. Chosen by hand: longer than a node of a store
/// takes to restart.
const UNREADABLE_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 120 } else { 10_000 });

/// Budgets and limits of [`Frames`](super::Frames).
#[derive(Clone, Debug)]
pub struct FramesOptions {
    /// Memory for plaintext frames, in bytes; 0 disables the cache.
    pub memory_bytes: u64,
    /// Memory for plaintext frames of sequential streams and their read-ahead, in bytes; 0 disables
    /// read-ahead.
    pub stream_bytes: u64,
    /// Largest read-ahead window of one stream, in bytes of the volume. At most a quarter of
    /// `stream_bytes` is used.
    pub window_bytes_max: u64,
    /// The NVMe cache, if any.
    pub cache: Option<CacheOptions>,
    /// Maximum number of concurrent reads of the object store.
    pub store_read_count_max: usize,
    /// Timeout of one attempt of a store read; each MiB adds one second.
    pub attempt_timeout: Duration,
    /// A store read that keeps failing for transient reasons fails for good after this long.
    pub retry_duration_max: Duration,
    /// Shortest time after which an object that is not found counts as missing. It must be looked
    /// for repeatedly, and others must be read meanwhile.
    pub missing_patience: Duration,
    /// Shortest time after which an object that cannot be read counts as unreadable, under the same
    /// conditions.
    pub unreadable_patience: Duration,
    /// Registry in which store reads and the NVMe cache raise lasting conditions.
    pub conditions: Conditions,
    /// Time for patience, pauses and the ages of failures.
    pub clock: Arc<dyn Clock>,
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
            clock: Arc::new(SystemClock),
        }
    }
}

/// Access pattern of the caller; determines which cache the frames enter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Frames may be wanted again, so they enter the main memory cache.
    #[default]
    Random,
    /// Part of a sequential stream. Frames pass through the small stream cache, so that a scan does
    /// not evict the main one.
    Sequential,
    /// A background job that moves frames. They enter no cache.
    Once,
}

/// Advice of [`Frames::on_read`](super::Frames::on_read).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// Access pattern to use for this read.
    pub access: Access,
    /// Range of the volume, in bytes, that the caller should resolve in the background and whose
    /// frames it should pass to [`Frames::read_ahead`](super::Frames::read_ahead). It may reach
    /// past the end of the volume.
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
    /// Requests to the object store that failed for a transient reason.
    pub store_retry_count: u64,
    /// Cause of the last such failure, until a request succeeds.
    pub store_failure: Option<StoreFailure>,
    /// Bytes read from the object store.
    pub store_read_bytes: u64,
    /// Frames and whole objects that did not verify on arrival and were read once more.
    pub store_refetch_count: u64,
    /// Frames whose copy in the store did not verify in two reads.
    pub store_bad_count: u64,
    /// Frames read ahead.
    pub ahead_frame_count: u64,
    /// Frames that were not read ahead because they would have exceeded the budget.
    pub ahead_dropped_count: u64,
    /// Bytes of plaintext frames in memory.
    pub memory_used_bytes: u64,
    /// Frames that are being fetched.
    pub flight_count: u64,
    /// The NVMe cache; `None` if there is none or it could not be opened.
    pub cache: Option<CacheStatus>,
}
