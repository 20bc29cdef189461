//! Bugs put into data nodes on purpose, so that the tests can show that they find them.

block::seeded_bugs! {
    /// A node carries out the requests of an owner that another one has followed.
    fence_unchecked: "fence-unchecked",
    /// A node forgets at its end which owners have come.
    fence_forgotten: "fence-forgotten",
    /// A later owner does not wait for the changes under way of an earlier one.
    fence_early: "fence-early",
    /// Proofs are taken without a look at their signatures.
    proof_unchecked: "proof-unchecked",
    /// A node serves a folder to the keys of all pools.
    key_unchecked: "key-unchecked",
    /// The check of a fragment does not look at its payload.
    payload_unchecked: "payload-unchecked",
    /// A directory without the identity of the drive counts as the drive.
    drive_unchecked: "drive-unchecked",
}

#[cfg(test)]
mod tests;
