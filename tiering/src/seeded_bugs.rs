//! The seeded bugs of the data tier.
//!
//! Invariants: those of [`block::seeded_bugs`].

block::seeded_bugs! {
    /// Reclaim re-points a block although it was written meanwhile.
    repoint_blindly: "repoint-blindly",
    /// Reclaim forgets a segment without examining the pages that reference it.
    forget_unchecked: "forget-unchecked",
    /// Reclaim deletes a segment before the metadata without it is durable.
    delete_first: "delete-first",
    /// References to overwritten blocks are subtracted from the counts twice.
    count_out_twice: "count-out-twice",
    /// The lookup of segments to delete does not exclude a concurrent commit.
    sweep_unlocked: "sweep-unlocked",
    /// Reclaim examines the newest state of pages only, not the states that snapshots show.
    reclaim_without_snapshots: "reclaim-without-snapshots",
    /// When a page gets an image, no page version keeps the state that snapshots show.
    versions_forgotten: "versions-forgotten",
    /// A page version is dropped together with the snapshot that it was made for, although an older
    /// snapshot shows it.
    pruned_too_much: "pruned-too-much",
    /// A reference that a snapshot still shows is subtracted from the count when its block is
    /// overwritten.
    kept_uncounted: "kept-uncounted",
    /// Reclaim examines the layer that a block was written for, but not the layers made from it.
    reclaim_without_clones: "reclaim-without-clones",
    /// A reference that a layer shows of its base is subtracted from the count when its block is
    /// overwritten.
    base_uncounted: "base-uncounted",
    /// A range is dropped although this makes pages of the base visible again.
    range_uncovers_base: "range-uncovers-base",
    /// Promoting a page overwrites the layer's own blocks with those of the base.
    promoted_over_newer: "promoted-over-newer",
    /// A copy gets the manifest of a state before the objects that the state references.
    manifest_first: "manifest-first",
    /// Objects that a copy still needs are deleted.
    copy_without_hold: "copy-without-hold",
    /// Objects in a copy that a pin keeps are deleted.
    pin_ignored: "pin-ignored",
    /// A segment from a copy is restored without verifying it.
    repair_unverified: "repair-unverified",
    /// A copy of some volumes lacks segments that were written for the volumes from which they were
    /// made.
    part_without_bases: "part-without-bases",
    /// A copy of some volumes lacks segments that these volumes reference only by back-references.
    part_without_references: "part-without-references",
    /// A segment that is being restored may be deleted at the same time.
    repair_unheld: "repair-unheld",
    /// A damaged segment replaces an intact one in a copy.
    damage_overwrites: "damage-overwrites",
    /// A missing segment counts as damage even if another process owns the pool by now.
    missing_unowned: "missing-unowned",
    /// Hydration overwrites an object that the pool has received meanwhile.
    hydrate_overwrites: "hydrate-overwrites",
    /// Reclaim treats segments that a restored pool lacks on purpose as damage, before the volumes
    /// to drop are chosen.
    lacking_unchosen: "lacking-unchosen",
    /// Reclaim treats data that is dropped with its key as damage.
    keyless_damaged: "keyless-damaged",
    /// A restored pool counts as complete as soon as it looks so, on the basis of commits that may
    /// still be lost.
    complete_unsettled: "complete-unsettled",
    /// A segment is not closed when the next volume has another key.
    mixed_keys: "mixed-keys",
    /// A block counts as a duplicate if its fingerprint matches, without comparing the bytes.
    fingerprints_trusted: "fingerprints-trusted",
    /// A page that references a frame which was not written for it gets no back-reference.
    unreferenced_back: "unreferenced-back",
    /// A back-reference is dropped although a clone's page still references the segment.
    swept_without_clones: "swept-without-clones",
    /// Duplicates are found in segments that are damaged, or that exist only in the copy.
    bad_reused: "bad-reused",
    /// A pack of the cache file lists its frames before they are written.
    directory_first: "directory-first",
    /// A cache file that was not closed is trusted as if it had been.
    unclosed_trusted: "unclosed-trusted",
    /// An object that cannot be read counts as unreadable even in an outage.
    judged_alone: "judged-alone",
    /// An object that was not found once counts as missing.
    missing_unconfirmed: "missing-unconfirmed",
    /// The copies are asked for a repair one after the other.
    repair_in_turn: "repair-in-turn",
    /// A single listing without metadata is enough for a later owner to create new metadata.
    listing_believed: "listing-believed",
    /// Fragments are dropped without a comparison with the object that is to stay.
    dropped_uncompared: "dropped-uncompared",
    /// Fragments are deleted before the metadata without them is durable.
    dropped_early: "dropped-early",
    /// Reclaim and destage ignore which segments the other one uses.
    unpinned: "dedup-unpinned",
}
