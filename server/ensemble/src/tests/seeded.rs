//! Runs the other tests with bugs switched on, and demands that they notice.

block::seeded_bugs_found_by! {
    "identity-unchecked": "tests::over_tls::other_pool_and_other_member_are_refused",
    "pool-unchecked": "tests::over_tls::other_pool_and_other_member_are_refused",
    "frame-kind-unchecked": "frames::tests::frame_of_another_kind_or_request_is_refused",
    "room-for-answers-unchecked": "tests::over_tls::peer_that_reads_late_gets_every_answer",
    "left-member-served": "tests::over_tls::link_ends_with_its_member_and_with_its_place",
    "moved-member-kept": "tests::over_tls::link_ends_with_its_member_and_with_its_place",
    "member-answers-late=9000": "tests::over_tls::member_on_one_machine_answers_soon",
    "member-unlocked": "tests::one_member_of_a_directory_runs_at_a_time",
    "ended-member-left": "tests::member_whose_disk_failed_for_a_while_counts_again",
    "owner-role-kept": "tests::owner_that_gives_up_promises_to_the_next_one",
    "member-failure-not-stored": "tests::failures::failed_disk_is_noted_in_the_document",
    "shared-sync-answered-early": "tests::failures::requests_that_wait_for_a_sync_share_the_next_one_and_are_answered_after_it",
    "sync-goal-moves": "sender::tests::sync_is_asked_for_while_ever_later_batches_want_one",
    "own-promise-asked-once": "tests::candidate_takes_the_whole_log_after_a_damaged_one",
    "trim-unheard": "tests::full_rings::full_member_gets_room_from_what_the_store_has_since",
    "empty-end-ignored": "tests::full_rings::candidate_begins_where_an_empty_member_was_reset_to",
    "own-damage-unseen": "tests::full_rings::owner_with_a_damaged_batch_ends",
    "open-not-proven": "tests::logs::owner_that_opens_proves_its_own_log",
}
