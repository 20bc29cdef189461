//! Bugs put into admission on purpose, so that the tests can show that they find them.

block::seeded_bugs! {
    /// A handshake accepts the certificate of a removed node.
    removed_still_accepted: "removed-still-accepted",
    /// A handshake accepts each well-formed certificate.
    strangers_accepted: "strangers-accepted",
    /// Signatures of a removed node count, also later ones.
    later_signatures_count: "later-signatures-count",
    /// Records are taken without a look at their signatures.
    signatures_unchecked: "signatures-unchecked",
    /// The removal of a node leaves its connections open.
    connections_stay: "connections-stay",
    /// A token admits more than one node.
    token_stays: "token-stays",
    /// A token admits nodes for ever.
    token_never_expires: "token-never-expires",
    /// A joiner does not compare the issuer's certificate with the token.
    pin_unchecked: "pin-unchecked",
    /// A resumed session passes by the list of nodes.
    sessions_resumed: "sessions-resumed",
    /// The answers to a probe are late, as on a slow network.
    probe_answered_late: "probe-answered-late",
}
