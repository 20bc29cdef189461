//! Bugs seeded on purpose, so that tests can prove that they would detect them.
//!
//! Invariants:
//! - Without the feature `seeded-bugs` (or a test build) every switch is off and cannot be turned on.

/// The set of seeded bugs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SeededBugs {
    /// Reclaim re-points a block although it was written meanwhile.
    pub(crate) repoint_blindly: bool,
    /// Reclaim forgets a segment without examining the pages that reference it.
    pub(crate) forget_unchecked: bool,
    /// Reclaim deletes a segment before the metadata without it is durable.
    pub(crate) delete_first: bool,
    /// References to overwritten blocks are subtracted from the counts twice.
    pub(crate) count_out_twice: bool,
    /// The lookup of segments to delete does not exclude a concurrent commit.
    pub(crate) sweep_unlocked: bool,
    /// Reclaim examines the newest state of pages only, not the states that snapshots show.
    pub(crate) reclaim_without_snapshots: bool,
    /// When a page gets an image, its state that snapshots show is not copied.
    pub(crate) copies_forgotten: bool,
    /// A copy of a page is dropped together with the snapshot that it was made for, although an
    /// older snapshot shows it.
    pub(crate) pruned_too_much: bool,
    /// A reference that a snapshot still shows is subtracted from the count when its block is
    /// overwritten.
    pub(crate) kept_uncounted: bool,
    /// Reclaim examines the layer that a block was written for, but not the layers made from it.
    pub(crate) reclaim_without_clones: bool,
    /// A reference that a layer shows of its base is subtracted from the count when its block is
    /// overwritten.
    pub(crate) base_uncounted: bool,
    /// A range is dropped although this makes pages of the base visible again.
    pub(crate) range_uncovers_base: bool,
    /// Promoting a page overwrites the layer's own blocks with those of the base.
    pub(crate) promoted_over_newer: bool,
    /// A copy gets the manifest of a state before the objects that the state references.
    pub(crate) manifest_first: bool,
    /// Objects that a copy still needs are deleted.
    pub(crate) copy_without_hold: bool,
    /// Objects in a copy that a pin keeps are deleted.
    pub(crate) pin_ignored: bool,
    /// A segment from a copy is restored without verifying it.
    pub(crate) mend_unverified: bool,
    /// A copy of some volumes lacks segments that were written for the volumes from which they were
    /// made.
    pub(crate) part_without_bases: bool,
    /// A copy of some volumes lacks segments that these volumes reference only by back-references.
    pub(crate) part_without_references: bool,
    /// A segment that is being restored may be deleted at the same time.
    pub(crate) mend_unheld: bool,
    /// A damaged segment replaces an intact one in a copy.
    pub(crate) damage_overwrites: bool,
    /// A missing segment counts as damage even if another process owns the pool by now.
    pub(crate) missing_unowned: bool,
    /// Hydration overwrites an object that the pool has received meanwhile.
    pub(crate) hydrate_overwrites: bool,
    /// Reclaim treats segments that a restored pool lacks on purpose as damage, before the volumes
    /// to drop are chosen.
    pub(crate) lacking_unchosen: bool,
    /// Reclaim treats data that is dropped with its key as damage.
    pub(crate) keyless_damaged: bool,
    /// A restored pool counts as whole as soon as it looks so, on the basis of commits that may
    /// still be lost.
    pub(crate) whole_unsettled: bool,
    /// A segment is not closed when the next volume has another key.
    pub(crate) mixed_keys: bool,
    /// A block counts as a duplicate if its fingerprint matches, without comparing the bytes.
    pub(crate) fingerprints_trusted: bool,
    /// A page that references a frame which was not written for it gets no back-reference.
    pub(crate) unreferenced_back: bool,
    /// A back-reference is dropped although a clone's page still references the segment.
    pub(crate) swept_without_clones: bool,
    /// Duplicates are found in segments that are damaged, or that exist only in the copy.
    pub(crate) bad_reused: bool,
    /// A pack of the cache file lists its frames before they are written.
    pub(crate) directory_first: bool,
    /// A cache file that was not closed is trusted as if it had been.
    pub(crate) unclosed_trusted: bool,
    /// An object that cannot be read counts as unreadable even in an outage.
    pub(crate) judged_alone: bool,
    /// An object that was not found once counts as missing.
    pub(crate) missing_unconfirmed: bool,
    /// The copies for mending are asked one after the other.
    pub(crate) mend_in_turn: bool,
    /// A single listing without metadata is enough for a later owner to create new metadata.
    pub(crate) listing_believed: bool,
    /// Reclaim and destage ignore which segments the other one uses.
    pub(crate) unpinned: bool,
}

impl SeededBugs {
    /// Returns the bugs that the environment variable SPINDLE_SEEDED_BUGS lists, separated by commas.
    #[cfg(any(test, feature = "seeded-bugs"))]
    pub(crate) fn from_environment() -> Self {
        let names = std::env::var("SPINDLE_SEEDED_BUGS").unwrap_or_default();
        let has = |name: &str| names.split(',').any(|one| one == name);
        SeededBugs {
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

    /// Returns no bugs.
    #[cfg(not(any(test, feature = "seeded-bugs")))]
    pub(crate) fn from_environment() -> Self {
        SeededBugs::default()
    }
}
