//! Bugs put there on purpose, so that tests can show that they would notice.
//!
//! Invariants:
//! - Without the feature `planted` (or a test build) every switch is off and cannot be turned on.

use crate::format::batch;

/// Which bugs are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Planted {
    /// A batch counts as written when it was submitted.
    pub(crate) ack_before_write: bool,
    /// A flush is answered without a sync.
    pub(crate) flush_ignored: bool,
    /// Recovery takes a batch whose checksum differs.
    pub(crate) torn_accepted: bool,
    /// Recovery takes a batch that does not follow the one before.
    pub(crate) stale_accepted: bool,
    /// Recovery trusts the page cache for what was never synced.
    pub(crate) tail_not_rewritten: bool,
    /// A generation goes on behind a snapshot.
    pub(crate) snapshot_not_frozen: bool,
    /// What lies before a snapshot and what lies behind it is joined in one side file.
    pub(crate) sides_joined: bool,
    /// The newest batch is taken to be the one with the highest number, whatever it follows.
    pub(crate) newest_by_sequence: bool,
    /// Batches are written as version 1, by a program that knows no other.
    pub(crate) old_batches: bool,
    /// A batch is taken whose tag does not fit it.
    pub(crate) tag_ignored: bool,
    /// A place that cannot be read counts as one where nothing was written.
    pub(crate) unreadable_ends: bool,
    /// Whoever closes the gate of back-pressure is the one that opens it.
    pub(crate) gate_by_waiter: bool,
    /// A rest of a payload is judged by what was left of it, not by the buffer that it keeps.
    pub(crate) rest_buffer_forgotten: bool,
    /// That the log has failed is not noted.
    pub(crate) failure_not_noted: bool,
    /// Recovery takes a file system that was unmounted since for the same one.
    pub(crate) remount_not_seen: bool,
    /// Recovery does not ask whether writing back has failed since.
    pub(crate) writeback_not_asked: bool,
    /// A dropped append leaves its entry in the queue.
    pub(crate) kept_when_dropped: bool,
}

impl Planted {
    /// Format version of the batches that are written.
    pub(crate) fn batch_version(self) -> u16 {
        if self.old_batches { batch::VERSION_WITHOUT_TAG } else { batch::VERSION }
    }

    /// As the environment variable SPINDLE_PLANTED names them, separated by commas.
    #[cfg(any(test, feature = "planted"))]
    pub(crate) fn from_environment() -> Self {
        let names = std::env::var("SPINDLE_PLANTED").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        Planted {
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

    /// None.
    #[cfg(not(any(test, feature = "planted")))]
    pub(crate) fn from_environment() -> Self {
        Planted::default()
    }
}
