//! Bugs put into the placement of fragments on purpose, so that the tests can show that they find them.

block::seeded_bugs! {
    /// A segment goes without a fragment as soon as a store fails.
    debt_at_once: "debt-at-once",
    /// Two fragments of a segment may be in one failure domain.
    domain_shared: "domain-shared",
    /// A placement is returned before the fragments are durable that bring a segment back.
    fragments_unawaited: "fragments-unawaited",
    /// A fragment is taken for the wanted one whatever its header says.
    header_unchecked: "header-unchecked",
    /// A write waits for a store however late it is.
    late_store_awaited: "late-store-awaited",
    /// A fragment is deleted from the store that it leaves before the metadata names its new place.
    moved_fragment_deleted_early: "moved-fragment-deleted-early",
    /// A directory without the store's identity counts as the store.
    witness_unchecked: "witness-unchecked",
}

#[cfg(test)]
mod tests;
