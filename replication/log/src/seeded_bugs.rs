//! The seeded bugs of the write log.
//!
//! Invariants: those of [`block::seeded_bugs`].

block::seeded_bugs! {
    /// A batch counts as written as soon as it is submitted.
    ack_before_write: "ack-before-write",
    /// A batch is acknowledged although no quorum has it.
    ack_without_quorum: "ack-without-quorum",
    /// A flush is answered once the owner's own disk has synced.
    commit_by_own_sync: "commit-by-own-sync",
    /// An opening batch takes the place of one that other members may have acknowledged.
    opening_replaced: "opening-replaced",
    /// A flush is answered without a sync.
    flush_ignored: "flush-ignored",
    /// Recovery takes a batch whose checksum differs.
    torn_accepted: "torn-accepted",
    /// Recovery takes a batch that does not follow the previous one.
    stale_accepted: "stale-accepted",
    /// Recovery trusts the page cache for data that was never synced.
    tail_not_rewritten: "tail-not-rewritten",
    /// A generation continues after a snapshot.
    snapshot_not_frozen: "snapshot-not-frozen",
    /// A spill file joins data from both sides of a snapshot.
    sides_joined: "sides-joined",
    /// The batch with the highest number counts as the newest, whatever it follows.
    newest_by_sequence: "newest-by-sequence",
    /// A batch is taken although its tag does not match.
    tag_ignored: "tag-ignored",
    /// An unreadable place counts as a place where nothing was written.
    unreadable_ends: "unreadable-ends",
    /// The waiter that closed the gate of back-pressure has to open it.
    gate_by_waiter: "gate-by-waiter",
    /// The remainder of a payload is judged by its length, not by the buffer that it keeps.
    rest_buffer_forgotten: "rest-buffer-forgotten",
    /// A failure of the log is not recorded.
    failure_not_noted: "failure-not-noted",
    /// Recovery does not notice that the file system was unmounted meanwhile.
    remount_not_seen: "remount-not-seen",
    /// Recovery does not ask whether write-back has failed meanwhile.
    writeback_not_asked: "writeback-not-asked",
    /// A member's cut moves the end of the log and leaves the batches behind it in the ring.
    cut_not_cleared: "cut-not-cleared",
    /// A member's reset leaves the batches in the ring.
    reset_not_cleared: "reset-not-cleared",
    /// A member leaves batches above the end of its log that a crash has left.
    stale_kept: "stale-kept",
    /// A member writes over entries that are not destaged.
    released_early: "released-early",
    /// A member writes over a file while its first batch may still be there after a loss of power.
    entered_at_once: "entered-at-once",
    /// A member stores a batch that does not follow the newest one.
    successor_not_checked: "successor-not-checked",
    /// Entries use the file that is kept for openings.
    spare_used: "spare-used",
    /// A dropped append leaves its entry in the queue.
    kept_when_dropped: "kept-when-dropped",
    /// Each sync of the log's files takes this number of milliseconds longer, as on a slow device.
    log_sync_late: "log-sync-late" = text,
}
