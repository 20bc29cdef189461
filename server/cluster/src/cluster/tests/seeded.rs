//! Runs the other tests with bugs switched on, and demands that they notice.

block::seeded_bugs_found_by! {
    "removed-still-accepted": "cluster::tests::removal::removed_node_is_refused_in_the_handshake",
    "strangers-accepted": "cluster::tests::refusals::certificate_of_another_cluster_is_refused_in_the_handshake",
    "later-signatures-count": "admission::tests::later_signatures_of_a_removed_node_do_not_count",
    "signatures-unchecked": "admission::tests::forged_and_foreign_records_are_left_out",
    "connections-stay": "cluster::tests::removal::removal_closes_the_connections_of_that_node_only",
    "token-stays": "cluster::tests::joining::token_admits_one_node",
    "token-never-expires": "cluster::tests::joining::expired_token_is_refused",
    "sessions-resumed": "tls::tests::no_session_is_resumed",
    "probe-answered-late": "cluster::tests::probing::path_on_one_machine_is_fast",
    "pin-unchecked": "cluster::tests::joining::secret_goes_only_to_the_node_that_issued_it",
}
