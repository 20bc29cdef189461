//! Runs the other tests with bugs switched on, and demands that they notice.

block::seeded_bugs_found_by! {
    "fence-unchecked": "tests::later_owner_shuts_an_earlier_one_out_for_good",
    "fence-forgotten": "tests::later_owner_shuts_an_earlier_one_out_for_good",
    "fence-early": "fence::tests::later_owner_waits_for_changes_under_way",
    "proof-unchecked": "tests::opening_needs_a_proof_for_these_two_nodes",
    "key-unchecked": "tests::folder_is_served_to_the_key_of_its_pool_only",
    "payload-unchecked": "tests::fragment_is_verified_where_it_is",
    "drive-unchecked": "tests::unmounted_drive_is_away_and_is_not_written",
}
