//! Bugs put there on purpose, so that tests can show that they would notice.
//!
//! Invariants:
//! - Without the feature `planted` (or a test build) every switch is off and cannot be turned on.

/// Which bugs are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Planted {
    /// Reclaim re-points a block though somebody has written it meanwhile.
    pub(crate) repoint_blindly: bool,
    /// Reclaim forgets a segment without a look at the pages that name it.
    pub(crate) forget_unchecked: bool,
    /// Reclaim deletes a segment before the metadata without it is durable.
    pub(crate) delete_first: bool,
    /// What is overwritten is counted out twice.
    pub(crate) count_out_twice: bool,
    /// What to delete is asked while a commit is under way.
    pub(crate) sweep_unlocked: bool,
    /// Reclaim looks at pages as they are, not at what snapshots show of them.
    pub(crate) reclaim_without_snapshots: bool,
    /// A page gets an image, and what snapshots show of it is not copied.
    pub(crate) copies_forgotten: bool,
    /// A copy is dropped when the snapshot that it was made for is removed, though an older one shows it.
    pub(crate) pruned_too_much: bool,
    /// What a snapshot shows of a page is counted out when it is written over.
    pub(crate) kept_uncounted: bool,
    /// Reclaim looks at the layer that a block was written for, not at those made from it.
    pub(crate) reclaim_without_clones: bool,
    /// What a layer shows of its base is counted out when it is written over.
    pub(crate) base_uncounted: bool,
    /// A range is dropped though pages of the base show again then.
    pub(crate) range_uncovers_base: bool,
    /// A page that is promoted gets what the base has, though the layer has its own.
    pub(crate) promoted_over_newer: bool,
    /// A copy gets the manifest of a state before what the state names.
    pub(crate) manifest_first: bool,
    /// What a copy still needs is deleted.
    pub(crate) copy_without_hold: bool,
    /// What a pin keeps in a copy is deleted.
    pub(crate) pin_ignored: bool,
    /// What a copy has is put back as it is.
    pub(crate) mend_unverified: bool,
    /// A copy of some volumes lacks what was written for those that they were made from.
    pub(crate) part_without_bases: bool,
    /// A copy of some volumes lacks what only back-references say that they name.
    pub(crate) part_without_references: bool,
    /// What is put back may be forgotten meanwhile.
    pub(crate) mend_unheld: bool,
    /// A damaged segment takes the place of a whole one in a copy.
    pub(crate) damage_overwrites: bool,
    /// A segment that is missing is damage, whoever owns the pool by now.
    pub(crate) missing_unowned: bool,
    /// Hydration puts what the copy has over what the pool has got meanwhile.
    pub(crate) hydrate_overwrites: bool,
    /// Reclaim takes what a restored pool lacks on purpose for damage, before it is said which volumes go.
    pub(crate) lacking_unchosen: bool,
    /// Reclaim takes what goes with its key for damage.
    pub(crate) keyless_damaged: bool,
    /// A restored pool has everything as soon as it looks so, by commits that may be lost yet.
    pub(crate) whole_unsettled: bool,
    /// A segment goes on when the volume whose blocks come next has another key.
    pub(crate) mixed_keys: bool,
    /// What has the fingerprint of a stored block is taken for it.
    pub(crate) fingerprints_trusted: bool,
    /// A page that names a frame which was not written for it has no back-reference.
    pub(crate) unreferenced_back: bool,
    /// A back-reference is dropped though a clone's page still names the segment.
    pub(crate) swept_without_clones: bool,
    /// Duplicates are found in segments that are damaged, or in the copy only.
    pub(crate) bad_reused: bool,
    /// A pack of the cache file names its frames before they are there.
    pub(crate) directory_first: bool,
    /// A cache file that was not closed is taken for one that was.
    pub(crate) unclosed_trusted: bool,
    /// An object that cannot be read counts as unreadable in an outage as well.
    pub(crate) judged_alone: bool,
    /// An object that was not found once is lost.
    pub(crate) missing_unconfirmed: bool,
    /// The sources of a repair are asked one after the other.
    pub(crate) mend_in_turn: bool,
    /// One listing that shows no metadata is enough for a later owner to make it anew.
    pub(crate) listing_believed: bool,
    /// Reclaim and destage do not know which segments the other one uses.
    pub(crate) unpinned: bool,
}

impl Planted {
    /// As the environment variable SPINDLE_PLANTED names them, separated by commas.
    #[cfg(any(test, feature = "planted"))]
    pub(crate) fn from_environment() -> Self {
        let names = std::env::var("SPINDLE_PLANTED").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        Planted {
            repoint_blindly: has("repoint-blindly"),
            forget_unchecked: has("forget-unchecked"),
            delete_first: has("delete-first"),
            count_out_twice: has("count-out-twice"),
            sweep_unlocked: has("sweep-unlocked"),
            reclaim_without_snapshots: has("reclaim-without-snapshots"),
            copies_forgotten: has("copies-forgotten"),
            pruned_too_much: has("pruned-too-much"),
            kept_uncounted: has("kept-uncounted"),
            reclaim_without_clones: has("reclaim-without-clones"),
            base_uncounted: has("base-uncounted"),
            range_uncovers_base: has("range-uncovers-base"),
            promoted_over_newer: has("promoted-over-newer"),
            manifest_first: has("manifest-first"),
            copy_without_hold: has("copy-without-hold"),
            pin_ignored: has("pin-ignored"),
            mend_unverified: has("mend-unverified"),
            part_without_bases: has("part-without-bases"),
            part_without_references: has("part-without-references"),
            mend_unheld: has("mend-unheld"),
            damage_overwrites: has("damage-overwrites"),
            missing_unowned: has("missing-unowned"),
            hydrate_overwrites: has("hydrate-overwrites"),
            lacking_unchosen: has("lacking-unchosen"),
            keyless_damaged: has("keyless-damaged"),
            whole_unsettled: has("whole-unsettled"),
            mixed_keys: has("mixed-keys"),
            fingerprints_trusted: has("fingerprints-trusted"),
            unreferenced_back: has("unreferenced-back"),
            swept_without_clones: has("swept-without-clones"),
            bad_reused: has("bad-reused"),
            directory_first: has("directory-first"),
            unclosed_trusted: has("unclosed-trusted"),
            judged_alone: has("judged-alone"),
            missing_unconfirmed: has("missing-unconfirmed"),
            mend_in_turn: has("mend-in-turn"),
            listing_believed: has("listing-believed"),
            unpinned: has("dedup-unpinned"),
        }
    }

    /// None.
    #[cfg(not(any(test, feature = "planted")))]
    pub(crate) fn from_environment() -> Self {
        Planted::default()
    }
}
