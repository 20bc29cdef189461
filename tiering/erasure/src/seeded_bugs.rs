//! Bugs put into the codes on purpose, so that the tests can show that they find them.

block::seeded_bugs! {
    /// A parity fragment holds the parity of another row.
    parity_of_another_row: "parity-of-another-row",
    /// The checksums of a range are not compared.
    range_checksum_skipped: "range-checksum-skipped",
    /// A fragment of an earlier placement counts.
    stale_fragment_accepted: "stale-fragment-accepted",
}

#[cfg(test)]
mod tests;
