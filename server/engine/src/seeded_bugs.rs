//! The seeded bugs of the engine, which the crash tester must find.
//!
//! Invariants: those of [`block::seeded_bugs`].

block::seeded_bugs! {
    /// A write is answered when it is queued, before it is submitted to the log's files.
    ack_before_submit: "ack-before-submit",
    /// A trim or write-zeroes is answered but not logged.
    trim_lost: "trim-lost",
    /// A generation leaves the overlay, and its log space is given back, before its window is
    /// durable in the store.
    overlay_dropped_early: "overlay-dropped-early",
    /// A wall clock that jumps is believed at once.
    clock_trusted: "clock-trusted",
    /// Background jobs whose names begin with this text panic when they start.
    panicking_job: "panicking-job" = text,
    /// The ends of an unaligned range and the part between them are logged one after the other.
    step_torn: "step-torn",
    /// Requests of an ended connection are not finished before the next one is served.
    leftovers_kept: "leftovers-kept",
    /// A rebuild counts as done without asking the stores for the fragments.
    rebuild_unchecked: "rebuild-unchecked",
    /// A full generation stays in the log until a caller waits for the store.
    destage_put_off: "destage-put-off",
}
