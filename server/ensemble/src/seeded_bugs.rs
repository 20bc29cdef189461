//! Bugs put into the members at run time on purpose, so that the tests can show that they find them.

block::seeded_bugs! {
    /// An owner takes the member that it finds on a node for the one that it asks for.
    identity_unchecked: "identity-unchecked",
    /// A node serves the members of other pools, too.
    pool_unchecked: "pool-unchecked",
    /// Frames of other kinds are read as messages.
    frame_kind_unchecked: "frame-kind-unchecked",
    /// Requests are taken although there is no room for their answers.
    room_for_answers_unchecked: "room-for-answers-unchecked",
    /// A connection stays when its member leaves the service.
    left_member_served: "left-member-served",
    /// A link stays when its member moves to another node.
    moved_member_kept: "moved-member-kept",
    /// The document does not tell of a failed write or sync.
    failure_not_stored: "member-failure-not-stored",
    /// A candidate does not ask its own member again for a promise that was taken back.
    own_promise_asked_once: "own-promise-asked-once",
    /// A member finds room only by what the batches that it stores say.
    trim_unheard: "trim-unheard",
    /// A candidate waits for batches of a member that was reset to the tail and has none.
    empty_end_ignored: "empty-end-ignored",
    /// An owner goes on with a damaged batch in its own log.
    own_damage_unseen: "own-damage-unseen",
    /// The document of an owner that has opened does not prove its log.
    open_not_proven: "open-not-proven",
    /// Two members of one directory may run.
    member_unlocked: "member-unlocked",
    /// A member whose thread has ended stays so.
    ended_member_left: "ended-member-left",
    /// An owner that gives up leaves its node in the role of the owner.
    owner_role_kept: "owner-role-kept",
    /// Requests that share a sync are answered before it.
    shared_sync_answered_early: "shared-sync-answered-early",
    /// A sync is asked for only with the batch that wants it last, however many follow.
    sync_goal_moves: "sync-goal-moves",
    /// The members on a node answer this number of milliseconds late, as over a slow network.
    member_answers_late: "member-answers-late" = text,
}
