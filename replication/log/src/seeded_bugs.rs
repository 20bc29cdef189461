//! Seeded bugs, with which tests show that they would notice such bugs.
//!
//! Invariants:
//! - Without the feature `seeded-bugs` (or a test build) every switch is off and cannot be turned on.

use crate::format::batch;

/// The bugs that are switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeededBugs {
    /// A batch counts as written as soon as it is submitted.
    pub(crate) ack_before_write: bool,
    /// A flush is answered without a sync.
    pub(crate) flush_ignored: bool,
    /// Recovery takes a batch whose checksum differs.
    pub(crate) torn_accepted: bool,
    /// Recovery takes a batch that does not follow the previous one.
    pub(crate) stale_accepted: bool,
    /// Recovery trusts the page cache for data that was never synced.
    pub(crate) tail_not_rewritten: bool,
    /// A generation continues after a snapshot.
    pub(crate) snapshot_not_frozen: bool,
    /// A spill file joins data from both sides of a snapshot.
    pub(crate) sides_joined: bool,
    /// The batch with the highest number counts as the newest, whatever it follows.
    pub(crate) newest_by_sequence: bool,
    /// Batches are written as version 1, by a program that knows no other.
    pub(crate) old_batches: bool,
    /// A batch is taken although its tag does not match.
    pub(crate) tag_ignored: bool,
    /// An unreadable place counts as a place where nothing was written.
    pub(crate) unreadable_ends: bool,
    /// The waiter that closed the gate of back-pressure has to open it.
    pub(crate) gate_by_waiter: bool,
    /// The remainder of a payload is judged by its length, not by the buffer that it keeps.
    pub(crate) rest_buffer_forgotten: bool,
    /// A failure of the log is not recorded.
    pub(crate) failure_not_noted: bool,
    /// Recovery does not notice that the file system was unmounted meanwhile.
    pub(crate) remount_not_seen: bool,
    /// Recovery does not ask whether write-back has failed meanwhile.
    pub(crate) writeback_not_asked: bool,
    /// A dropped append leaves its entry in the queue.
    pub(crate) kept_when_dropped: bool,
}

impl SeededBugs {
    /// Returns the format version of the batches that are written.
    pub(crate) fn batch_version(self) -> u16 {
        if self.old_batches { batch::VERSION_WITHOUT_TAG } else { batch::VERSION }
    }

    /// Reads the comma-separated names in the environment variable SPINDLE_SEEDED_BUGS.
    #[cfg(any(test, feature = "seeded-bugs"))]
    pub(crate) fn from_environment() -> Self {
        let names = std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        SeededBugs {
            ack_before_write: has("ack-before-write"),
            flush_ignored: has("flush-ignored"),
            torn_accepted: has("torn-accepted"),
            stale_accepted: has("stale-accepted"),
            tail_not_rewritten: has("tail-not-rewritten"),
            snapshot_not_frozen: has("snapshot-not-frozen"),
            sides_joined: has("sides-joined"),
            newest_by_sequence: has("newest-by-sequence"),
            old_batches: has("old-batches"),
            tag_ignored: has("tag-ignored"),
            unreadable_ends: has("unreadable-ends"),
            gate_by_waiter: has("gate-by-waiter"),
            rest_buffer_forgotten: has("rest-buffer-forgotten"),
            failure_not_noted: has("failure-not-noted"),
            remount_not_seen: has("remount-not-seen"),
            writeback_not_asked: has("writeback-not-asked"),
            kept_when_dropped: has("kept-when-dropped"),
        }
    }

    /// Returns no bugs.
    #[cfg(not(any(test, feature = "seeded-bugs")))]
    pub(crate) fn from_environment() -> Self {
        SeededBugs::default()
    }
}
