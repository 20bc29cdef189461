//! Bugs put into the placement of fragments on purpose, so that the tests can show that they find them.

block::seeded_bugs! {
    /// Two fragments of a segment may be in one failure domain.
    domain_shared: "domain-shared",
    /// A fragment is taken for the wanted one whatever its header says.
    header_unchecked: "header-unchecked",
}
