//! Runs the other tests with bugs switched on, and demands that they notice.

block::seeded_bugs_found_by! {
    "debt-at-once": "coded::tests::store_that_fails_is_replaced_and_without_another_one_the_debt_is_recorded",
    "dropped-early": "coded::tests::tiers::fragments_stay_until_the_metadata_without_them_is_durable",
    "dropped-uncompared": "coded::tests::tiers::object_that_differs_from_the_fragments_is_written_anew_and_not_relied_on",
    "fragments-unawaited": "coded::tests::tiers::segment_is_brought_back_only_once_its_fragments_are_durable",
    "domain-shared": "coded::tests::no_two_fragments_share_a_domain",
    "header-unchecked": "coded::tests::fragment_of_another_segment_counts_for_nothing",
    "late-store-awaited": "coded::tests::fragment_of_a_store_that_is_late_goes_to_another_one",
    "moved-fragment-deleted-early": "coded::tests::rebalance_moves_only_what_a_new_store_would_have_and_keeps_the_old_until_told",
    "witness-unchecked": "coded::tests::store_whose_witness_is_gone_is_away_and_not_empty",
}
