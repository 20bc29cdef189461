//! The status of the log, for people and for the decisions of destage.
//!
//! Invariants:
//! - Reading it changes nothing and waits for no I/O.

use super::{Log, LogInner};
use block::Lsn;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Status of the log. Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStatus {
    /// Log space from the oldest entry that is not destaged to the head.
    pub used_bytes: u64,
    /// Length of the whole ring.
    pub ring_bytes: u64,
    /// Newest entry queued.
    pub last_lsn: Lsn,
    /// Newest entry that [`Wait::Written`](super::Wait::Written) answers.
    pub acked_lsn: Lsn,
    /// Newest entry on stable storage.
    pub durable_lsn: Lsn,
    /// Newest entry in the data tier.
    pub destaged_lsn: Lsn,
    /// Age of the oldest entry in the ring that is not destaged. For recovered entries it is the
    /// time since the last write, before the open, to the log file that holds them: a lower bound
    /// by the wall clock, because the log's format stores no time.
    pub oldest_undestaged_age: Option<Duration>,
    /// Age of the oldest entry that is in spill files alone. After an open it is the time since the
    /// last write to the oldest spill file, a lower bound as above.
    pub oldest_spilled_age: Option<Duration>,
    /// Bytes of data that only the log holds.
    pub undestaged_bytes: u64,
    /// Payloads held in memory.
    pub memory_bytes: u64,
    /// Extents of the ring in the overlay.
    pub extent_count: u64,
    /// Maximum number of extents; appends wait once it is reached.
    pub extent_count_max: u64,
    /// Frozen generations waiting for destage.
    pub frozen_count: u64,
    /// Batches written since the open.
    pub batch_count: u64,
    /// Bytes of those batches.
    pub batch_bytes: u64,
    /// Entries in those batches.
    pub entry_count: u64,
    /// Syncs since the open.
    pub sync_count: u64,
    /// Whether appends wait for space.
    pub is_full: bool,
    /// Whether the log has failed for good.
    pub is_failed: bool,
}

/// The part of the ring that exists on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSpace {
    /// Bytes of the ring that are still to be created.
    pub missing_bytes: u64,
    /// The reason that the disk gave when it last refused another file.
    pub refusal: Option<String>,
}

impl LogStatus {
    /// Returns the age of the oldest entry that only this machine has, in the ring or in a spill
    /// file.
    #[must_use]
    pub fn oldest_age(&self) -> Option<Duration> {
        self.oldest_undestaged_age.max(self.oldest_spilled_age)
    }
}

impl Log {
    /// Returns the status of the log.
    #[must_use]
    pub fn status(&self) -> LogStatus {
        self.inner.status()
    }

    /// Returns how much of the ring exists on disk.
    #[must_use]
    pub fn ring_space(&self) -> RingSpace {
        let counters = &self.inner.shared.counters;
        let made_bytes =
            u64::from(counters.made_count.load(Ordering::Relaxed)) * self.inner.file_bytes;
        RingSpace {
            missing_bytes: self.inner.ring_bytes.saturating_sub(made_bytes),
            refusal: counters.refusal.lock().clone(),
        }
    }
}

impl LogInner {
    /// See [`Log::status`].
    fn status(&self) -> LogStatus {
        let overlay = self.shared.overlay.status();
        let counters = &self.shared.counters;
        let now = self.clock.now();
        LogStatus {
            used_bytes: self.shared.used_bytes(),
            ring_bytes: self.ring_bytes,
            last_lsn: self.shared.last_lsn(),
            acked_lsn: self.shared.acked(),
            durable_lsn: self.shared.durable(),
            destaged_lsn: self.shared.destaged(),
            oldest_undestaged_age: overlay.since.map(|since| now.duration_since(since)),
            oldest_spilled_age: overlay.spill_since.map(|since| now.duration_since(since)),
            undestaged_bytes: overlay.undestaged_bytes,
            memory_bytes: overlay.memory_bytes,
            extent_count: overlay.extent_count,
            extent_count_max: self.options.entry_count_max,
            frozen_count: overlay.frozen_count,
            batch_count: counters.batch_count.load(Ordering::Relaxed),
            batch_bytes: counters.batch_bytes.load(Ordering::Relaxed),
            entry_count: counters.entry_count.load(Ordering::Relaxed),
            sync_count: counters.sync_count.load(Ordering::Relaxed),
            is_full: counters.is_full.load(Ordering::Relaxed),
            is_failed: self.shared.is_failed(),
        }
    }
}
