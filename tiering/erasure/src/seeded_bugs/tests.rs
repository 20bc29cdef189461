//! Runs the other tests with bugs switched on, and demands that they notice.

block::seeded_bugs_found_by! {
    "parity-of-another-row": "codec::tests::every_pattern_of_losses_gives_the_image_and_the_fragments",
    "range-checksum-skipped": "fragment::tests::range_is_verified_without_the_rest",
    "stale-fragment-accepted": "fragment::tests::fragment_of_another_place_or_placement_counts_for_nothing",
}
