//! Bugs put into the protocol on purpose, so that the model can show that it finds them.

block::seeded_bugs! {
    /// A member answers a promise without keeping it: recovery reads that do not fence.
    promise_not_kept: "promise-not-kept",
    /// A member keeps its promise in memory only.
    promise_not_stored: "promise-not-stored",
    /// A member whose log may lack something says that it lacks nothing.
    amnesiac_votes: "amnesiac-votes",
    /// A candidate takes the longest log instead of the one with the latest epoch.
    tail_by_length: "tail-by-length",
    /// A new owner's first batch takes the place of the last one that it found.
    opening_over_tail: "opening-over-tail",
    /// An owner acknowledges by the members it is changing to before the chain says so.
    unrecorded_configuration: "unrecorded-configuration",
    /// An owner records a configuration whose quorum lacks batches that were acknowledged without it.
    recorded_too_early: "recorded-too-early",
    /// An owner gives up a change whose link may exist.
    recording_given_up: "recording-given-up",
    /// An owner serves reads without a lease.
    read_without_lease: "read-without-lease",
    /// An owner that has resigned goes on to serve reads.
    resigned_reads: "resigned-reads",
    /// A member heeds the late resignation of an earlier owner.
    resign_of_any_epoch: "resign-of-any-epoch",
    /// A flush waits for the owner's own disk only.
    own_sync_is_commit: "own-sync-is-commit",
    /// A member counts as complete once it has the opening batch, though it has answered for more.
    proven_too_early: "proven-too-early",
    /// An owner goes on although the member on its own node has promised a later epoch.
    own_promise_unseen: "own-promise-unseen",
    /// A member that starts promises at once, although an owner may have a lease from it.
    lease_forgotten: "lease-forgotten",
    /// A member accepts a longer lease without storing its length.
    lease_not_stored: "lease-not-stored",
    /// A member drops its log for a reset that arrives late.
    late_reset_obeyed: "late-reset-obeyed",
    /// An owner resets a member to its newest batch, which is not in the store.
    reset_above_released: "reset-above-released",
    /// A member that starts counts a damaged batch as one that it has.
    damage_skipped: "damage-skipped",
    /// A member does not note how far it has answered.
    note_forgotten: "note-forgotten",
    /// A member says that it lacks nothing although a part of its log was damaged.
    damage_unseen: "damage-unseen",
    /// A member's document does not say that a write or sync of its log has failed.
    failure_not_stored: "failure-not-stored",
    /// A member goes alone although a quorum without it may have acknowledged batches.
    alone_below_all: "alone-below-all",
    /// A member goes alone although its log may lack something.
    alone_unproven: "alone-unproven",
    /// An owner counts a batch for a member once it has sent it.
    sent_is_written: "sent-is-written",
}
