//! Deduplication: the models of the other tests with recurring blocks, duplicates that must be
//! found, and seeded bugs that these tests must detect.

use super::*;
use crate::dedup::Found;
use crate::seeded_bugs::SeededBugs;
use block::env::{Clock, SystemClock};
use futures::FutureExt;
use std::panic::AssertUnwindSafe;

const BLOCK: usize = BLOCK_BYTES as usize;

#[test]
fn clones_and_rollbacks_match_the_model() {
    with_dedup(|| {
        for seed in seeds(2) {
            println!("SEED={seed}");
            runtime().block_on(clones::random_history(seed, SeededBugs::default()));
        }
    });
}

#[test]
fn snapshots_match_the_model() {
    with_dedup(|| {
        for seed in seeds(2) {
            println!("SEED={seed}");
            runtime().block_on(snapshots::random_history(seed, SeededBugs::default()));
        }
    });
}

#[test]
fn writes_reads_clones_and_reclaim_go_on_together() {
    with_dedup(|| {
        for seed in seeds(1) {
            println!("SEED={seed}");
            runtime().block_on(reclaim::churn(seed, SeededBugs::default()));
            runtime().block_on(clones::together(seed));
            runtime().block_on(snapshots::together(seed));
        }
    });
}

#[test]
fn a_crash_at_any_request_leaves_a_prefix() {
    with_dedup(crash::a_crash_at_any_request_leaves_a_prefix_and_no_dangling_frame);
    with_dedup(snapshots::a_crash_at_any_request_leaves_every_snapshot_as_it_was);
    with_dedup(clones::a_crash_at_any_request_leaves_every_clone_as_it_was);
}

#[test]
fn destroying_a_key_erases_only_its_data() {
    with_dedup(|| {
        for seed in seeds(1) {
            println!("SEED={seed}");
            runtime().block_on(keys::destroyed(seed, SeededBugs::default()));
        }
    });
}

#[test]
fn seeded_bugs_are_noticed() {
    let of = |bug: fn(&mut SeededBugs)| {
        let mut seeded_bugs = SeededBugs::default();
        bug(&mut seeded_bugs);
        seeded_bugs
    };
    let all = [
        of(|bugs| bugs.fingerprints_trusted = true),
        of(|bugs| bugs.unreferenced_back = true),
        of(|bugs| bugs.swept_without_clones = true),
    ];
    for seeded_bugs in all {
        let is_noticed = (1..=10).any(|seed| {
            let run = clones::random_history(seed, seeded_bugs);
            let run = AssertUnwindSafe(run).catch_unwind();
            with_dedup(|| runtime().block_on(run)).is_err()
        });
        assert!(is_noticed, "{seeded_bugs:?} goes unnoticed");
    }
}

/// Returns `block_count` distinct blocks, numbered from `first`.
fn template(first: u64, block_count: u64) -> Bytes {
    let blocks = first..first + block_count;
    blocks.flat_map(|block| Rng::new(1_000_003 * block + 1).bytes(BLOCK, 60)).collect()
}

fn window_of(lsn: u64, parts: Vec<(u32, u64, Bytes)>) -> Window<Bytes> {
    let mut window = plain_window(lsn, Vec::new());
    let mut volumes: BTreeMap<u32, Extents> = BTreeMap::new();
    for (volume, first_block, bytes) in parts {
        let (start, count) = (first_block * 8, (bytes.len() / SECTOR) as u64);
        volumes.entry(volume).or_default().insert(start, start + count, Some(bytes));
    }
    let volumes = volumes.into_iter();
    window.volumes =
        volumes.map(|(volume, extents)| (VolumeId(volume), extents.into_extents())).collect();
    window
}

async fn check_holds(tier: &Tier, volume: u32, first_block: u64, want: &[u8]) {
    let mut buf = vec![0xaa; want.len()];
    tier.read(VolumeId(volume), first_block * BLOCK_BYTES, &mut buf).await.unwrap();
    let differs = buf.iter().zip(want).position(|(a, b)| a != b);
    assert_eq!(differs, None, "volume {volume}");
}

/// The basic requirement: two clones of one template with equal updates, and recurring pages.
#[test]
fn identical_blocks_are_stored_once() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for volume in [1, 3, 4] {
            tier.set_dedup(VolumeId(volume), true);
        }
        let base = template(0, 600);
        let mut window = window_of(1, vec![(1, 0, base.clone())]);
        window.snapshots.push(crate::map::SnapshotChange::Made {
            volume: VolumeId(1),
            record: Bytes::from_static(b"template"),
        });
        let first = tier.destage(window, &Payloads).await.unwrap();
        assert_eq!((first.stored_block_count, first.duplicate_count), (600, 0));
        for volume in [3, 4] {
            let record = Bytes::from_static(b"a clone");
            let made = tier.clone_volume((VolumeId(1), Lsn(1)), VolumeId(volume), record);
            made.await.unwrap();
        }
        // The same update of both, in one window and in two.
        let update = template(5000, 300);
        let parts =
            vec![(3, 100, update.slice(..200 * BLOCK)), (4, 100, update.slice(..200 * BLOCK))];
        let both = tier.destage(window_of(2, parts), &Payloads).await.unwrap();
        assert_eq!((both.stored_block_count, both.duplicate_count), (200, 200));
        let rest = update.slice(200 * BLOCK..);
        tier.destage(window_of(3, vec![(3, 300, rest.clone())]), &Payloads).await.unwrap();
        // The same holds after a restart.
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        tier.set_dedup(VolumeId(4), true);
        tier.load_fingerprints().await.unwrap();
        let again = tier.destage(window_of(4, vec![(4, 300, rest)]), &Payloads).await.unwrap();
        assert_eq!((again.stored_block_count, again.duplicate_count), (0, 100));
        assert_eq!(again.segment_count, 0, "nothing is written for it");
        // Blocks that the template has are found too, wherever they are written.
        let parts = vec![(4, 2000, base.slice(..256 * BLOCK))];
        let again = tier.destage(window_of(5, parts), &Payloads).await.unwrap();
        assert_eq!((again.stored_block_count, again.duplicate_count), (0, 256));
        // One page a thousand times, and zeroes.
        let page = template(9000, 1);
        let mut many: Vec<u8> = page.repeat(1000);
        many.extend(vec![0; 50 * BLOCK]);
        let parts = vec![(4, 4000, Bytes::from(many.clone()))];
        let repeated = tier.destage(window_of(6, parts), &Payloads).await.unwrap();
        assert_eq!((repeated.stored_block_count, repeated.duplicate_count), (1, 999));
        assert_eq!(repeated.zero_block_count, 50);
        // Volumes without deduplication, and those under another key, share nothing.
        for (lsn, volume) in [(7, 5), (8, 2)] {
            tier.set_dedup(VolumeId(volume), volume == 2);
            let parts = vec![(volume, 0, base.slice(..64 * BLOCK))];
            let alone = tier.destage(window_of(lsn, parts), &Payloads).await.unwrap();
            assert_eq!((alone.stored_block_count, alone.duplicate_count), (64, 0));
        }
        let found = tier.dedup_status().found;
        assert_eq!(found[&VolumeId(3)], Found { block_count: 300, duplicate_count: 0 });
        assert_eq!(found[&VolumeId(4)], Found { block_count: 1556, duplicate_count: 1555 });
        check_fsck(&tier).await;

        // The first writer of shared blocks drops them, and the segments are rewritten.
        let changed = template(7000, 300);
        let other = template(8000, 100);
        let parts = vec![(3, 100, changed.clone()), (4, 100, other.clone())];
        tier.destage(window_of(9, parts), &Payloads).await.unwrap();
        let before = tier.parts.metadata.next_segment.load(Ordering::SeqCst);
        for _ in 0..3 {
            reclaim_all(&tier).await;
        }
        assert!(
            tier.parts.metadata.next_segment.load(Ordering::SeqCst) > before,
            "nothing was rewritten"
        );
        let mut want = base.to_vec();
        want[100 * BLOCK..400 * BLOCK].copy_from_slice(&update);
        want[100 * BLOCK..200 * BLOCK].copy_from_slice(&other);
        check_holds(&tier, 4, 0, &want).await;
        check_holds(&tier, 4, 2000, &base[..256 * BLOCK]).await;
        check_holds(&tier, 4, 4000, &many).await;
        want[100 * BLOCK..400 * BLOCK].copy_from_slice(&changed);
        check_holds(&tier, 3, 0, &want).await;
        check_fsck(&tier).await;
        assert_eq!(tier.reclaim_status().stuck_count, 0);
        // Rewritten blocks are found at their new place.
        let parts = vec![(4, 9000, update.slice(100 * BLOCK..)), (4, 9500, page)];
        let again = tier.destage(window_of(10, parts), &Payloads).await.unwrap();
        assert_eq!((again.stored_block_count, again.duplicate_count), (0, 201));
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// Everything is removed, together with all records of deduplication.
#[test]
fn removing_all_data_leaves_no_records() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        for volume in [1, 3] {
            tier.set_dedup(VolumeId(volume), true);
        }
        let bytes = template(0, 500);
        tier.destage(window_of(1, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
        tier.destage(window_of(2, vec![(3, 77, bytes)]), &Payloads).await.unwrap();
        assert!(
            !tier.parts.metadata.map.dedup_keys_after(false, None, 1).await.unwrap().is_empty()
        );
        for (lsn, volume) in [(3, 1), (4, 3)] {
            tier.destage(trim_window(lsn, volume, 0..1 << 20), &Payloads).await.unwrap();
            fold_all(&tier).await;
            reclaim_all(&tier).await;
            check_fsck(&tier).await;
        }
        assert_eq!(tier.fsck(FsckOptions::default()).await.unwrap().segment_count, 0);
        for is_fingerprints in [false, true] {
            let left =
                tier.parts.metadata.map.dedup_keys_after(is_fingerprints, None, 10).await.unwrap();
            assert_eq!(left.len(), 0, "{left:?}");
        }
        tier.close().await.unwrap();
    });
}

/// Clones are made, share blocks of others, and are removed, while the shared blocks stay: their
/// back-references are removed.
#[test]
fn clones_that_are_gone_leave_no_back_references() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        tier.set_dedup(VolumeId(1), true);
        let bytes = template(0, 2000);
        let mut window = window_of(1, vec![(1, 0, bytes.clone())]);
        window.snapshots.push(crate::map::SnapshotChange::Made {
            volume: VolumeId(1),
            record: Bytes::from_static(b"template"),
        });
        tier.destage(window, &Payloads).await.unwrap();
        let mut lsn = 1;
        for clone in 10..13_u32 {
            let record = Bytes::from_static(b"a clone");
            let made = tier.clone_volume((VolumeId(1), Lsn(1)), VolumeId(clone), record.clone());
            made.await.unwrap();
            tier.set_dedup(VolumeId(clone), true);
            lsn += 1;
            let window = window_of(lsn, vec![(clone, 10_000, bytes.clone())]);
            let report = tier.destage(window, &Payloads).await.unwrap();
            assert_eq!(report.duplicate_count, 2000);
            tier.sweep_again();
            while tier.sweep_back_references(7).await.unwrap() {}
            let kept = tier.parts.metadata.map.dedup_keys_after(false, None, 100).await.unwrap();
            assert!(kept.len() > 8, "what is shared keeps its back-references: {kept:?}");
            check_holds(&tier, clone, 10_000, &bytes).await;
            lsn += 1;
            tier.destage(trim_window(lsn, clone, 0..1 << 20), &Payloads).await.unwrap();
            fold_all(&tier).await;
            tier.sweep_again();
            while tier.sweep_back_references(7).await.unwrap() {}
            let left = tier.parts.metadata.map.dedup_keys_after(false, None, 100).await.unwrap();
            assert_eq!(left.len(), 0, "{clone}: {left:?}");
            check_fsck(&tier).await;
        }
        check_holds(&tier, 1, 0, &bytes).await;
        tier.close().await.unwrap();
    });
}

/// A block that cannot be read is not used as a duplicate, and does not block destage.
#[test]
fn unreadable_duplicates_are_stored_again() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for volume in [1, 3] {
            tier.set_dedup(VolumeId(volume), true);
        }
        let bytes = template(0, 40);
        tier.destage(window_of(1, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
        let (record, _) = tier.parts.metadata.map.segments_after(0, 1).await.unwrap().remove(0);
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        tier.set_dedup(VolumeId(3), true);
        tier.load_fingerprints().await.unwrap();
        store.damage(&record.info.object_path(), |bytes| bytes[200] ^= 1).await;
        let report =
            tier.destage(window_of(2, vec![(3, 0, bytes.clone())]), &Payloads).await.unwrap();
        // One frame of 8 blocks.
        assert_eq!((report.stored_block_count, report.duplicate_count), (8, 32));
        assert_eq!(tier.dedup_status().unread_count, 8);
        check_holds(&tier, 3, 0, &bytes).await;
        tier.close().await.unwrap();
    });
}

/// Makes a pool with these bugs and an unreferenced segment.
async fn with_a_dead_segment(seeded_bugs: SeededBugs) -> Tier {
    let mut opened = options(Arc::new(InMemory::new()), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    for volume in [1, 3] {
        tier.set_dedup(VolumeId(volume), true);
    }
    tier.destage(window_of(1, vec![(1, 0, template(0, 64))]), &Payloads).await.unwrap();
    tier.destage(trim_window(2, 1, 0..64), &Payloads).await.unwrap();
    fold_all(&tier).await;
    tier
}

/// Reclaim has found a segment to be unreferenced. Returns whether a destage then finds duplicates
/// in it.
async fn is_found_beside_reclaim(seeded_bugs: SeededBugs) -> bool {
    let tier = with_a_dead_segment(seeded_bugs).await;
    let _taken = tier.parts.dedup.take_victims([1].into_iter());
    let report = tier.destage(window_of(3, vec![(3, 0, template(0, 64))]), &Payloads).await;
    report.unwrap().duplicate_count > 0
}

/// A destage has found duplicates in a segment. Returns whether reclaim then forgets it.
async fn is_forgotten_beside_destage(seeded_bugs: SeededBugs) -> bool {
    let tier = with_a_dead_segment(seeded_bugs).await;
    let pin = tier.parts.dedup.pin(1).unwrap();
    reclaim_all(&tier).await;
    let is_forgotten = tier.reclaim_status().forgotten_count > 0;
    drop(pin);
    reclaim_all(&tier).await;
    assert_eq!(tier.reclaim_status().forgotten_count, 1);
    is_forgotten
}

#[test]
fn reclaim_and_destage_do_not_use_one_segment_at_a_time() {
    let seeded_bugs = SeededBugs { unpinned: true, ..SeededBugs::default() };
    for (seeded_bugs, is_noticed) in [(SeededBugs::default(), false), (seeded_bugs, true)] {
        assert_eq!(runtime().block_on(is_found_beside_reclaim(seeded_bugs)), is_noticed);
        assert_eq!(runtime().block_on(is_forgotten_beside_destage(seeded_bugs)), is_noticed);
    }
}

/// A segment is damaged, and its blocks are in memory and are written again. Returns whether they
/// are then intact in the store.
async fn is_healed_by_writing(seeded_bugs: SeededBugs, is_noticed_by_reader: bool) -> bool {
    let store = Arc::new(FaultStore::default());
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened.clone()).await.unwrap();
    tier.set_dedup(VolumeId(1), true);
    let bytes = template(0, 8);
    tier.destage(window_of(1, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
    let (record, _) = tier.parts.metadata.map.segments_after(0, 1).await.unwrap().remove(0);
    let damage = async || {
        store.damage(&record.info.object_path(), |bytes| bytes[200] ^= 1).await;
    };
    if is_noticed_by_reader {
        damage().await;
        let mut buf = vec![0; BLOCK];
        assert!(tier.read(VolumeId(1), 0, &mut buf).await.is_err());
        // Data damaged in transfer is in no cache, so emulate an earlier reader that succeeded.
        damage().await;
        check_holds(&tier, 1, 0, &bytes).await;
        damage().await;
    } else {
        check_holds(&tier, 1, 0, &bytes).await;
        damage().await;
        let found = tier.scrub_next(0).await.unwrap().unwrap().finding;
        assert!(matches!(found, crate::repair::Finding::Bad { .. }), "{found:?}");
    }
    tier.destage(window_of(2, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
    tier.close().await.unwrap();
    opened.epoch = Epoch(2);
    let tier = Tier::open(opened).await.unwrap();
    let mut buf = vec![0; bytes.len()];
    tier.read(VolumeId(1), 0, &mut buf).await.is_ok_and(|()| buf == bytes)
}

#[test]
fn rewriting_heals_blocks_known_to_be_damaged() {
    let seeded_bugs = SeededBugs { bad_reused: true, ..SeededBugs::default() };
    for is_noticed_by_reader in [false, true] {
        let run = |seeded_bugs| {
            runtime().block_on(is_healed_by_writing(seeded_bugs, is_noticed_by_reader))
        };
        assert!(run(SeededBugs::default()), "{is_noticed_by_reader}");
        assert!(!run(seeded_bugs), "the seeded bug goes unnoticed, {is_noticed_by_reader}");
    }
}

/// In a restored pool, blocks that only the copy has are not used as duplicates until they are
/// here.
#[test]
fn new_data_does_not_depend_on_unfetched_blocks() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        tier.set_dedup(VolumeId(1), true);
        let bytes = template(0, 64);
        tier.destage(window_of(1, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
        tier.set_dedup_floor(tier.next_segment());
        let window = window_of(2, vec![(1, 100, bytes.clone())]);
        let report = tier.destage(window, &Payloads).await.unwrap();
        assert_eq!((report.stored_block_count, report.duplicate_count), (64, 0));
        let window = window_of(3, vec![(1, 200, bytes.clone())]);
        let report = tier.destage(window, &Payloads).await.unwrap();
        assert_eq!(report.duplicate_count, 64, "of what was written here");
        tier.set_dedup_floor(0);
        tier.close().await.unwrap();
    });
}

/// One block is in a thousand pages, more than one step of reclaim examines, and most of them drop
/// it.
#[test]
fn a_block_that_is_everywhere_is_reclaimed_in_steps() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        for volume in [1, 3] {
            tier.set_dedup(VolumeId(volume), true);
        }
        // The segment also has other blocks, all of which are dropped in the end.
        let (page, rest) = (template(9, 1), template(100, 63));
        let parts = vec![(1, 0, page.clone()), (1, 1, rest)];
        tier.destage(window_of(1, parts), &Payloads).await.unwrap();
        let everywhere = (0..300_u64).map(|number| (3, number * 256 + 7, page.clone())).collect();
        let report = tier.destage(window_of(2, everywhere), &Payloads).await.unwrap();
        assert_eq!((report.stored_block_count, report.duplicate_count), (0, 300));
        tier.destage(trim_window(3, 1, 0..64), &Payloads).await.unwrap();
        // 260 pages drop it.
        let others = (0..260_u64).map(|number| (3, number * 256 + 7, template(1000 + number, 1)));
        tier.destage(window_of(4, others.collect()), &Payloads).await.unwrap();
        fold_all(&tier).await;
        for _ in 0..4 {
            reclaim_all(&tier).await;
        }
        assert!(
            tier.parts.metadata.map.find_segment(1).await.unwrap().is_none(),
            "it is reclaimed"
        );
        check_fsck(&tier).await;
        let left = tier.parts.metadata.map.dedup_keys_after(false, None, 1000).await.unwrap();
        assert_eq!(left.len(), 40, "of the pages that have it");
        for number in [260, 280, 299] {
            check_holds(&tier, 3, number * 256 + 7, &page).await;
        }
        assert_eq!(tier.reclaim_status().stuck_count, 0);
        tier.close().await.unwrap();
    });
}

/// One block is in three hundred pages and stays there. Its segment has more references than
/// blocks, and one of its sixty-four blocks is live.
#[test]
fn a_segment_of_which_one_block_is_named_often_is_reclaimed() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        for volume in [1, 3] {
            tier.set_dedup(VolumeId(volume), true);
        }
        let (page, rest) = (template(9, 1), template(100, 63));
        let parts = vec![(1, 0, page.clone()), (1, 1, rest)];
        tier.destage(window_of(1, parts), &Payloads).await.unwrap();
        let everywhere = (0..300_u64).map(|number| (3, number * 256 + 7, page.clone())).collect();
        let report = tier.destage(window_of(2, everywhere), &Payloads).await.unwrap();
        assert_eq!((report.stored_block_count, report.duplicate_count), (0, 300));
        // While all of it is live nothing is rewritten, however often it is examined.
        for _ in 0..3 {
            reclaim_all(&tier).await;
        }
        assert!(tier.parts.metadata.map.find_segment(1).await.unwrap().is_some());
        let other = window_of(3, vec![(1, 1, template(7000, 63))]);
        tier.destage(other, &Payloads).await.unwrap();
        fold_all(&tier).await;
        let live = tier.parts.metadata.map.live_blocks(1).await.unwrap();
        assert_eq!(live, 301, "more than it has blocks");
        for _ in 0..12 {
            reclaim_all(&tier).await;
        }
        assert!(
            tier.parts.metadata.map.find_segment(1).await.unwrap().is_none(),
            "it is reclaimed"
        );
        check_fsck(&tier).await;
        for number in [0, 64, 150, 299] {
            check_holds(&tier, 3, number * 256 + 7, &page).await;
        }
        check_holds(&tier, 1, 0, &page).await;
        let space = tier.reclaim_status().space.unwrap();
        assert!(space.object_bytes < 80 * 4096, "a few copies are left: {space:?}");
        assert_eq!(tier.reclaim_status().stuck_count, 0);
        tier.close().await.unwrap();
    });
}

/// A count that is too high keeps a segment without live blocks, and a check on request corrects
/// it.
#[test]
fn excessive_count_is_corrected_and_its_segment_reclaimed() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        tier.set_dedup(VolumeId(1), true);
        tier.destage(window_of(1, vec![(1, 0, template(0, 64))]), &Payloads).await.unwrap();
        tier.destage(window_of(2, vec![(1, 500, template(0, 9))]), &Payloads).await.unwrap();
        check_fsck(&tier).await;
        let set = async |count: u32| {
            let mut writer = tier.parts.metadata.writer.lock().await;
            tier.parts.metadata.map.set_live(&mut writer, &[(1, count)]).await.unwrap();
        };
        for wrong in [80, 70, 0, 73] {
            set(wrong).await;
            let report = tier.fsck(FsckOptions::default()).await.unwrap();
            let (wanted, found) = match wrong {
                73 => (vec![], vec![]),
                _ => (vec![1], vec![(1, wrong, 73)]),
            };
            assert_eq!(report.miscounted, wanted, "{wrong}");
            assert_eq!(tier.repair_counts(&[1, 999]).await.unwrap(), found, "{wrong}");
            check_fsck(&tier).await;
        }
        set(80).await;
        tier.destage(trim_window(3, 1, 0..2), &Payloads).await.unwrap();
        fold_all(&tier).await;
        reclaim_all(&tier).await;
        assert_eq!(tier.reclaim_status().stuck_count, 1, "the count says that it is needed");
        let report = tier.fsck(FsckOptions::default()).await.unwrap();
        assert_eq!(report.miscounted, [1]);
        assert_eq!(tier.repair_counts(&report.miscounted).await.unwrap(), [(1, 7, 0)]);
        assert_eq!(tier.reclaim_status().stuck_count, 0);
        reclaim_all(&tier).await;
        assert!(
            tier.parts.metadata.map.find_segment(1).await.unwrap().is_none(),
            "it is reclaimed"
        );
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// Damaged records that decide nothing block nothing, and a check reports them.
#[test]
fn damaged_records_of_deduplication_are_named_and_stop_nothing() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for volume in [1, 3] {
            tier.set_dedup(VolumeId(volume), true);
        }
        let bytes = template(0, 64);
        tier.destage(window_of(1, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
        tier.destage(window_of(2, vec![(3, 0, bytes.clone())]), &Payloads).await.unwrap();
        use crate::map::keys;
        tier.parts.metadata.map.damage(&keys::found_key(VolumeId(1))).await;
        tier.parts.metadata.map.damage(&keys::fingerprints_key(1)).await;
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        tier.set_dedup(VolumeId(3), true);
        tier.load_fingerprints().await.unwrap();
        let found = tier.fsck(FsckOptions::default()).await.unwrap().differences;
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().any(|one| one.contains("found for volume 1")), "{found:?}");
        assert!(found.iter().any(|one| one.contains("fingerprints of segment 1")), "{found:?}");
        // Most of it is dropped, the rest moves.
        tier.destage(trim_window(3, 1, 0..64), &Payloads).await.unwrap();
        let window = window_of(4, vec![(3, 10, template(500, 54))]);
        tier.destage(window, &Payloads).await.unwrap();
        fold_all(&tier).await;
        reclaim_all(&tier).await;
        assert!(
            tier.parts.metadata.map.find_segment(1).await.unwrap().is_none(),
            "it is reclaimed"
        );
        check_holds(&tier, 3, 0, &bytes[..10 * BLOCK]).await;
        // A back-reference that does not open cannot be relied on.
        tier.destage(window_of(5, vec![(3, 500, template(500, 54))]), &Payloads).await.unwrap();
        let (key, segment, _) =
            tier.parts.metadata.map.dedup_keys_after(false, None, 1).await.unwrap().remove(0);
        tier.parts.metadata.map.damage(&key).await;
        let found = tier.fsck(FsckOptions::default()).await.unwrap().differences;
        assert!(found.iter().any(|one| one.contains("back-reference")), "{segment}: {found:?}");
        tier.close().await.unwrap();
    });
}

/// The store answers no reads: a window is destaged nevertheless, without further lookups.
#[test]
fn a_store_that_does_not_answer_delays_a_window_by_seconds() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        tier.set_dedup(VolumeId(1), true);
        let bytes = template(0, 2000);
        tier.destage(window_of(1, vec![(1, 0, bytes.clone())]), &Payloads).await.unwrap();
        tier.close().await.unwrap();
        let mut opened = options(store.clone(), 2);
        // The metadata is in memory, the frames are not.
        opened.frames.memory_bytes = 0;
        let tier = Tier::open(opened).await.unwrap();
        tier.set_dedup(VolumeId(1), true);
        tier.load_fingerprints().await.unwrap();
        check_holds(&tier, 1, 0, &bytes).await;
        store.inject(Op::Get, "segments", u64::MAX, crate::testing::Fault::Broken);
        let begun = SystemClock.now();
        let window = window_of(2, vec![(1, 5000, bytes.clone())]);
        let report = tier.destage(window, &Payloads).await.unwrap();
        assert!(
            SystemClock.since(begun) < Duration::from_secs(10),
            "{:?}",
            SystemClock.since(begun)
        );
        assert_eq!(report.stored_block_count, 2000);
        assert!(store.clear_injected() > 0);
        check_holds(&tier, 1, 5000, &bytes).await;
        tier.close().await.unwrap();
    });
}
