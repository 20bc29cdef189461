//! Reclaimed space: under load, through crashes, and with seeded bugs that these tests must
//! detect.

use super::*;
use crate::seeded_bugs::SeededBugs;
use crate::segment::FOLDER;
use block::env::{Clock, SystemClock};
use futures::FutureExt;
use object_store::local::LocalFileSystem;
use std::panic::AssertUnwindSafe;

/// Returns the total size and number of the segment objects.
async fn stored(store: &dyn ObjectStore) -> (u64, u64) {
    let found: Vec<_> = store.list(Some(&Path::from(FOLDER))).try_collect().await.unwrap();
    (found.iter().map(|object| object.size).sum(), found.len() as u64)
}

#[test]
fn overwritten_space_comes_back_and_nothing_else_changes() {
    for seed in seeds(4) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let mut world = World::new(seed);
            let mut tier = Tier::open(options(store.clone(), 1)).await.unwrap();
            let (mut forgotten_count, mut moved_block_count) = (0, 0);
            let mut count = |tier: &Tier| {
                let status = tier.reclaim_status();
                assert_eq!(status.stuck_count, 0);
                forgotten_count += status.forgotten_count;
                moved_block_count += status.moved_block_count;
            };
            for turn in 0..30 {
                let op_count = 1 + world.rng.below(60);
                let made = world.window(op_count);
                tier.destage(made.window, &Payloads).await.unwrap();
                world.model = made.after;
                if world.rng.below(3) == 0 {
                    tier.step(2).await.unwrap();
                }
                if world.rng.below(2) == 0 {
                    look_again(&tier);
                    reclaim_until_idle(&tier).await;
                    check_random_reads(&tier, &world.model, &mut world.rng, 20).await;
                    sweep_all_abandoned(&tier).await;
                    check_random_reads(&tier, &world.model, &mut world.rng, 20).await;
                }
                if turn % 10 == 9 {
                    check_all(&tier, &world.model).await;
                    check_fsck(&tier).await;
                    count(&tier);
                    tier.close().await.unwrap();
                    tier = Tier::open(options(store.clone(), 2 + turn)).await.unwrap();
                    check_all(&tier, &world.model).await;
                }
            }
            fold_all(&tier).await;
            look_again(&tier);
            reclaim_until_idle(&tier).await;
            sweep_all_abandoned(&tier).await;
            check_all(&tier, &world.model).await;
            let report = check_fsck(&tier).await;
            let (bytes, object_count) = stored(&store).await;
            assert_eq!((bytes, object_count), (report.object_bytes, report.segment_count));
            count(&tier);
            let space = tier.reclaim_status().space.unwrap();
            assert_eq!((space.object_bytes, space.segment_count), (bytes, object_count));
            assert_eq!(space.live_block_count, report.block_count, "{space:?}");
            assert!(bytes * 100 <= space.live_bytes * 112, "{space:?}: segments of 90 % are left");
            assert!(forgotten_count > 20, "{forgotten_count} segments");
            assert!(moved_block_count > 100, "{moved_block_count} blocks");
            tier.close().await.unwrap();
        });
    }
}

/// Runs windows, reads and reclaim concurrently. Panics on any error.
pub(super) async fn churn(seed: u64, seeded_bugs: SeededBugs) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut world = World::new(seed);
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    let reclaiming = {
        let tier = tier.clone();
        tokio::spawn(async move {
            loop {
                look_again(&tier);
                while !tier.reclaim_step(EAGER).await.unwrap().is_idle {
                    tokio::task::yield_now().await;
                }
                let _ = tier.sweep_abandoned().await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    for _ in 0..40 {
        let op_count = 1 + world.rng.below(60);
        let made = world.window(op_count);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        check_random_reads(&tier, &world.model, &mut world.rng, 20).await;
        if world.rng.below(4) == 0 {
            tier.step(2).await.unwrap();
        }
    }
    reclaiming.abort();
    match reclaiming.await {
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        _ => {}
    }
    check_all(&tier, &world.model).await;
    check_fsck(&tier).await;
    let status = tier.reclaim_status();
    assert!(status.forgotten_count > 10, "{status:?}");
    assert_eq!(status.stuck_count, 0);
    tier.close().await.unwrap();
}

#[test]
fn writes_reads_and_reclaim_go_on_together() {
    for seed in seeds(4) {
        println!("SEED={seed}");
        runtime().block_on(churn(seed, SeededBugs::default()));
    }
}

#[test]
fn seeded_bugs_are_noticed() {
    let of = |bug: fn(&mut SeededBugs)| {
        let mut seeded_bugs = SeededBugs::default();
        bug(&mut seeded_bugs);
        seeded_bugs
    };
    let all = [
        of(|bugs| bugs.repoint_blindly = true),
        of(|bugs| bugs.forget_unchecked = true),
        of(|bugs| bugs.delete_first = true),
        of(|bugs| bugs.count_out_twice = true),
    ];
    for seeded_bugs in all {
        let is_noticed = (1..=10).any(|seed| {
            let churned = AssertUnwindSafe(churn(seed, seeded_bugs)).catch_unwind();
            runtime().block_on(churned).is_err()
        });
        assert!(is_noticed, "{seeded_bugs:?} goes unnoticed");
    }
}

/// Makes a window of `block_count` incompressible blocks, at random places of volume 1.
fn scattered(rng: &mut Rng, lsn: u64, blocks: u64, block_count: u64) -> Window<Bytes> {
    let mut extents = Extents::default();
    for _ in 0..block_count {
        let start = rng.below(blocks) * 8;
        extents.insert(start, start + 8, Some(rng.bytes(BLOCK_BYTES as usize, 100).into()));
    }
    let mut window = plain_window(lsn, Vec::new());
    window.volumes = vec![(VolumeId(1), extents.into_extents())];
    window
}

/// The guaranteed level, after random overwrites of ten times the volume's size.
#[test]
fn random_overwrites_settle_within_the_space_and_the_writes_that_are_promised() {
    const BLOCKS: u64 = 16 << 10;
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut opened = options(store.clone(), 1);
        opened.segment_bytes = 1 << 20;
        let tier = Tier::open(opened).await.unwrap();
        let mut rng = Rng::new(11);
        let (mut lsn, mut destaged_bytes, mut settled_bytes) = (0, 0, 0);
        let mut moved_before = 0;
        while lsn < 11 * BLOCKS {
            lsn += 512;
            let done =
                tier.destage(scattered(&mut rng, lsn, BLOCKS, 512), &Payloads).await.unwrap();
            destaged_bytes += done.object_bytes;
            if lsn == 6 * BLOCKS {
                (moved_before, settled_bytes) =
                    (tier.reclaim_status().written_bytes, destaged_bytes);
            }
            look_again(&tier);
            while !tier.reclaim_step(ReclaimOptions::default()).await.unwrap().is_idle {}
            sweep_all_abandoned(&tier).await;
        }
        let status = tier.reclaim_status();
        let space = status.space.unwrap();
        let (bytes, _) = stored(&store).await;
        let amplification = 1.0
            + (status.written_bytes - moved_before) as f64
                / (destaged_bytes - settled_bytes) as f64;
        let stored_part = bytes as f64 / space.live_bytes as f64;
        println!(
            "stored {stored_part:.3} of the live bytes, write amplification {amplification:.2}"
        );
        assert!(stored_part <= 1.35, "{stored_part} {space:?}");
        assert!(amplification <= 2.5, "{amplification}");
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn segment_with_a_damaged_frame_is_left_alone() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let blocks = |from: u64, count: u64, byte: u8| {
            let mut extents = Vec::new();
            for block in from..from + count {
                extents.push(block_extent(block, byte));
            }
            extents
        };
        let window = |lsn: u64, extents: Vec<WindowExtent<Bytes>>| {
            let mut window = plain_window(lsn, Vec::new());
            window.volumes = vec![(VolumeId(1), extents)];
            window
        };
        tier.destage(window(1, blocks(0, 20, 1)), &Payloads).await.unwrap();
        tier.destage(window(2, blocks(20, 20, 2)), &Payloads).await.unwrap();
        // Most blocks of both are overwritten.
        let mut newer = blocks(4, 16, 3);
        newer.extend(blocks(24, 16, 3));
        tier.destage(window(3, newer), &Payloads).await.unwrap();
        let record = tier.parts.metadata.map.find_segment(1).await.unwrap().unwrap();
        let path = record.info.object_path();
        store.damage(&path, |bytes| bytes[120] ^= 1).await;
        reclaim_until_idle(&tier).await;
        let status = tier.reclaim_status();
        assert_eq!((status.stuck_count, status.forgotten_count), (1, 1), "{status:?}");
        let is_raised =
            |tier: &Tier| tier.conditions().is_raised(block::ConditionKind::ReclaimBlocked, "pool");
        assert!(is_raised(&tier));
        let mut block = vec![0; BLOCK_BYTES as usize];
        tier.read(VolumeId(1), 20 * BLOCK_BYTES, &mut block).await.unwrap();
        assert!(block.iter().all(|byte| *byte == 2));
        let error = tier.read(VolumeId(1), 0, &mut block).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        // It is dropped once none of its blocks is live.
        tier.destage(window(4, blocks(0, 4, 4)), &Payloads).await.unwrap();
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        reclaim_until_idle(&tier).await;
        assert!(tier.parts.metadata.map.find_segment(1).await.unwrap().is_none());
        assert!(!is_raised(&tier));
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn segments_forgotten_by_an_uncertain_commit_await_its_outcome() {
    for is_durable in [false, true] {
        runtime().block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let local = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
            let store = Arc::new(FaultStore::new(Arc::new(local)));
            let mut opened = options(store.clone(), 1);
            opened.database.has_conditional_update = false;
            let tier = Tier::open(opened).await.unwrap();
            for lsn in 1..=2 {
                let window = plain_window(lsn, vec![(1, block_extent(0, lsn as u8))]);
                tier.destage(window, &Payloads).await.unwrap();
            }
            // The first segment is dead; the writes of the metadata database, or their answers, are
            // lost.
            let folder = database::FOLDER;
            if is_durable {
                store.inject(Op::Put, folder, 1, crate::testing::Fault::Unheard);
            } else {
                store.inject(Op::Put, folder, 1, crate::testing::Fault::Denied);
            }
            let mut outcomes = Vec::new();
            for _ in 0..200 {
                match tier.reclaim_step(EAGER).await {
                    Ok(_) if tier.reclaim_status().forgotten_count > 0 => break,
                    Ok(report) if report.is_idle => look_again(&tier),
                    Ok(_) => {}
                    Err(error) => outcomes.push(error.kind()),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
                let mut block = vec![0; BLOCK_BYTES as usize];
                tier.read(VolumeId(1), 0, &mut block).await.unwrap();
                assert!(block.iter().all(|byte| *byte == 2));
            }
            println!("{is_durable}: {outcomes:?}");
            sweep_all_abandoned(&tier).await;
            let report = check_fsck(&tier).await;
            assert_eq!(stored(&*store).await.1, report.segment_count);
            assert_eq!(report.segment_count, 1);
            tier.close().await.unwrap();
        });
    }
}

#[test]
fn check_beside_the_owner_distinguishes_reclaimed_from_missing_segments() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for lsn in 1..=4 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn % 2, lsn as u8))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        let reader = Tier::open_read_only(options(store.clone(), 1)).await.unwrap();
        reclaim_until_idle(&tier).await;
        assert_eq!(sweep_all_abandoned(&tier).await, 2);
        let report = check_fsck(&reader).await;
        // A reader looks for a newer state once, when it encounters a missing segment; it may have
        // found that state.
        let is_either = matches!(report.reclaimed_count, 0 | 2) && report.frame_count == 2;
        assert!(is_either, "{report:?}");
        // A segment that the owner still has is reported as missing.
        let record = tier.parts.metadata.map.find_segment(4).await.unwrap().unwrap();
        store.delete(&record.info.object_path()).await.unwrap();
        let report = reader.fsck(FsckOptions::default()).await.unwrap();
        assert!(report.differences[0].contains("segment 4"), "{report:?}");
        reader.close().await.unwrap();
        tier.close().await.unwrap();
    });
}

/// A commit that forgets a segment is visible and not yet durable. Returns whether a sweep deletes
/// the segment.
async fn sweep_beside_a_commit(seeded_bugs: SeededBugs) -> bool {
    let store = Arc::new(FaultStore::default());
    let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
    for lsn in 1..=2 {
        let window = plain_window(lsn, vec![(1, block_extent(0, lsn as u8))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    let dead = tier.parts.metadata.map.find_segment(1).await.unwrap().unwrap();
    tier.close().await.unwrap();
    let mut opened = options(store.clone(), 2);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    store.inject(Op::Put, database::FOLDER, u64::MAX, crate::testing::Fault::Broken);
    let reclaiming = tokio::spawn({
        let tier = tier.clone();
        async move { while !tier.reclaim_step(EAGER).await.is_ok_and(|done| done.is_idle) {} }
    });
    while tier.parts.metadata.map.find_segment(1).await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let swept = tokio::time::timeout(Duration::from_millis(300), tier.sweep_orphans()).await;
    let is_deleted = store.head(&dead.info.object_path()).await.is_err();
    assert_eq!(is_deleted, swept.is_ok_and(|swept| swept.unwrap().deleted_count > 0));
    // The process ends here; the store accepts everything again.
    reclaiming.abort();
    store.set_away(true);
    drop(tier);
    is_deleted
}

#[test]
fn forgotten_segments_are_deleted_only_after_a_durable_commit() {
    let run = |seeded_bugs| {
        let runtime = runtime();
        let is_deleted = runtime.block_on(sweep_beside_a_commit(seeded_bugs));
        drop(runtime);
        is_deleted
    };
    assert!(!run(SeededBugs::default()));
    let seeded_bugs = SeededBugs { sweep_unlocked: true, ..SeededBugs::default() };
    assert!(run(seeded_bugs), "{seeded_bugs:?} goes unnoticed");
}

#[test]
fn pass_is_repeated_after_an_outage() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut opened = options(store.clone(), 1);
        opened.frames.retry_duration_max = Duration::from_millis(100);
        let tier = Tier::open(opened).await.unwrap();
        for lsn in 1..=6 {
            let window = plain_window(lsn, vec![(1, block_extent(0, lsn as u8))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        // The pass itself; the segments that it nominates cannot be examined.
        while tier.reclaim_step(EAGER).await.unwrap() != ReclaimReport::default() {}
        store.inject(Op::Get, FOLDER, u64::MAX, crate::testing::Fault::Denied);
        let failed = tier.reclaim_step(EAGER).await;
        println!("{failed:?}");
        store.clear_injected();
        let deadline = SystemClock.now() + Duration::from_secs(30);
        while tier.reclaim_status().forgotten_count < 5 {
            let _ = tier.reclaim_step(EAGER).await;
            assert!(SystemClock.now() < deadline, "{:?}", tier.reclaim_status());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tier.close().await.unwrap();
    });
}
