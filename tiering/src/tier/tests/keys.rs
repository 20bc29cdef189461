//! Volumes with dedicated keys: data under a destroyed key is lost, and no other data.

use super::*;
use crate::map::SnapshotChange;
use crate::repair::Finding;
use crate::seeded_bugs::SeededBugs;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;

/// Key of volume 2 in all tests of the tier.
const KEY: KeyId = KeyId(2);

/// Checks that every segment is under the key of the volume for which its blocks were written.
async fn check_segments(tier: &Tier) -> [u64; 2] {
    let mut counts = [0, 0];
    for (record, _) in tier.parts.metadata.map.segments_after(0, 100_000).await.unwrap() {
        let entries = tier.parts.segments.frames.read_directory(&record.stored()).await.unwrap();
        // Layer 0 has no owner.
        for entry in entries.iter().filter(|entry| entry.layer != 0) {
            let is_keyed = entry.layer == 2;
            assert_eq!(
                record.info.key,
                if is_keyed { KEY } else { KeyId::POOL },
                "{}",
                record.info
            );
            counts[usize::from(is_keyed)] += 1;
        }
    }
    counts
}

/// Checks that stored blocks of volume 2 cannot be read, and all other data can.
async fn check_gone(tier: &Tier, model: &Model) {
    let mut without = model.clone();
    without.retain(|(volume, _), _| *volume == 1);
    let mut gone_count = 0;
    for zone in ZONES {
        let mut buf = vec![0; ZONE_BYTES as usize];
        tier.read(VolumeId(1), zone, &mut buf).await.unwrap();
        assert!(buf == expected(&without, 1, zone, buf.len()));
        for block in 0..ZONE_BYTES / BLOCK_BYTES {
            let offset = zone + block * BLOCK_BYTES;
            let want = expected(model, 2, offset, BLOCK_BYTES as usize);
            let mut buf = vec![0; BLOCK_BYTES as usize];
            let read = tier.read(VolumeId(2), offset, &mut buf).await;
            match want.iter().all(|byte| *byte == 0) {
                true => assert!(read.is_ok() && buf == want, "block {block}"),
                false => {
                    assert_eq!(read.unwrap_err().kind(), ErrorKind::Denied, "block {block}");
                    gone_count += 1;
                }
            }
        }
    }
    assert!(gone_count > 50, "{gone_count}");
}

pub(super) async fn destroyed(seed: u64, seeded_bugs: SeededBugs) {
    let store = Arc::new(FaultStore::default());
    let mut world = World::new(seed);
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened.clone()).await.unwrap();
    for turn in 0..12 {
        let made = world.window(40);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        if turn % 4 == 3 {
            look_again(&tier);
            reclaim_until_idle(&tier).await;
            sweep_all_abandoned(&tier).await;
        }
    }
    check_all(&tier, &world.model).await;
    let [plain_count, keyed_count] = match seeded_bugs.mixed_keys {
        true => [1, 1],
        false => check_segments(&tier).await,
    };
    assert!(plain_count > 0 && keyed_count > 0);
    check_fsck(&tier).await;
    tier.close().await.unwrap();
    // Another process, which finds the key destroyed.
    opened.epoch = Epoch(2);
    opened.volume_keys = VolumeKeys::default();
    opened.volume_keys.assign(VolumeId(2), KEY);
    let tier = Tier::open(opened.clone()).await.unwrap();
    check_gone(&tier, &world.model).await;
    tier.close().await.unwrap();
    // A process during whose run the key is destroyed.
    let mut opened = options(store.clone(), 3);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    check_all(&tier, &world.model).await;
    tier.forget_key(KEY);
    let tier = match tier.parts.jobs.hydrator.frames.memory_bytes {
        0 => tier,
        _ => {
            // Data in memory needs no key.
            tier.close().await.unwrap();
            let opened = options(store.clone(), 4);
            opened.volume_keys.remove(KEY);
            Tier::open(opened).await.unwrap()
        }
    };
    check_gone(&tier, &world.model).await;

    // The blocks cannot be read, but their integrity is still known.
    let mut last = 0;
    let mut keyed = None;
    while let Some(one) = tier.scrub_next(last).await.unwrap() {
        last = one.info.number.0;
        assert!(matches!(one.finding, Finding::Whole { .. }), "{:?}", one.finding);
        keyed = keyed.or((one.info.key == KEY).then_some(one.info));
    }
    let keyed = keyed.unwrap();
    store.damage(&keyed.object_path(), |bytes| bytes[200] ^= 1).await;
    let found = tier.scrub_next(keyed.number.0 - 1).await.unwrap().unwrap();
    assert!(matches!(found.finding, Finding::Bad { .. }), "{:?}", found.finding);
    store.damage(&keyed.object_path(), |bytes| bytes[200] ^= 1).await;

    // No data of the volume enters the store any more, in the clear or under another key.
    let made = block_extent(1, 7);
    let refused = tier.destage(plain_window(world.lsn + 1, vec![(2, made)]), &Payloads).await;
    assert_eq!(refused.unwrap_err().error.kind(), ErrorKind::Denied);

    // Their space is reclaimed without the key.
    world.lsn += 1;
    let pages = 0..(99 << 40) / PAGE_BYTES;
    tier.destage(trim_window(world.lsn, 2, pages), &Payloads).await.unwrap();
    fold_all(&tier).await;
    look_again(&tier);
    reclaim_until_idle(&tier).await;
    sweep_all_abandoned(&tier).await;
    world.model.retain(|(volume, _), _| *volume == 1);
    check_all(&tier, &world.model).await;
    assert_eq!(tier.reclaim_status().stuck_count, 0);
    let [plain_count, keyed_count] = check_segments(&tier).await;
    assert!(plain_count > 0 && keyed_count == 0, "{keyed_count} frames are left");
    check_fsck(&tier).await;
    tier.close().await.unwrap();
}

#[test]
fn destroying_a_key_erases_only_its_data() {
    for seed in seeds(3) {
        println!("SEED={seed}");
        runtime().block_on(destroyed(seed, SeededBugs::default()));
    }
}

#[test]
fn a_segment_under_the_wrong_key_is_found() {
    let seeded_bugs = SeededBugs { mixed_keys: true, ..SeededBugs::default() };
    let found = (1..=3).any(|seed| {
        let run = AssertUnwindSafe(destroyed(seed, seeded_bugs)).catch_unwind();
        runtime().block_on(run).is_err()
    });
    assert!(found, "nobody noticed segments of two keys");
}

/// If the key is missing by mistake, reclaim leaves segments alone that are still referenced.
#[test]
fn live_data_under_a_missing_key_is_kept() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(5);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for _ in 0..6 {
            let made = world.window(60);
            tier.destage(made.window, &Payloads).await.unwrap();
            world.model = made.after;
        }
        tier.close().await.unwrap();
        let opened = options(store.clone(), 2);
        opened.volume_keys.remove(KEY);
        let tier = Tier::open(opened).await.unwrap();
        // Without anything left to drop.
        super::clones::step_all(&tier).await;
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        sweep_all_abandoned(&tier).await;
        assert!(tier.reclaim_status().stuck_count > 0);
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 3)).await.unwrap();
        check_all(&tier, &world.model).await;
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        assert_eq!(tier.reclaim_status().stuck_count, 0);
        check_all(&tier, &world.model).await;
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// A volume is removed with its snapshots and its key. Reclaim runs before the pages that the
/// snapshots showed are dropped.
async fn dropped_with_key(seeded_bugs: SeededBugs) {
    let mut world = World::new(6);
    let mut opened = options(Arc::new(FaultStore::default()), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    let volume = VolumeId(2);
    for _ in 0..12 {
        let mut made = world.window(60);
        let record = Bytes::from_static(b"one");
        made.window.snapshots = vec![SnapshotChange::Made { volume, record }];
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        // Pages that snapshots show get copies of their own.
        super::clones::step_all(&tier).await;
    }
    world.lsn += 1;
    let mut window = plain_window(world.lsn, Vec::new());
    let removed = tier.snapshots().into_iter();
    window.snapshots =
        removed.map(|(volume, lsn, _)| SnapshotChange::Removed { volume, lsn }).collect();
    tier.destage(window, &Payloads).await.unwrap();
    world.lsn += 1;
    let window = trim_window(world.lsn, 2, 0..(99 << 40) / PAGE_BYTES);
    tier.destage(window, &Payloads).await.unwrap();
    world.model.retain(|(volume, _), _| *volume == 1);
    tier.forget_key(KEY);
    for _ in 0..20 {
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        assert_eq!(tier.reclaim_status().stuck_count, 0);
        tier.step(1).await.unwrap();
    }
    super::clones::step_all(&tier).await;
    look_again(&tier);
    reclaim_until_idle(&tier).await;
    sweep_all_abandoned(&tier).await;
    assert_eq!(tier.reclaim_status().stuck_count, 0);
    let [_, keyed_count] = check_segments(&tier).await;
    assert_eq!(keyed_count, 0, "frames are left");
    check_all(&tier, &world.model).await;
    check_fsck(&tier).await;
    tier.close().await.unwrap();
}

#[test]
fn dropped_data_under_a_destroyed_key_is_not_damaged() {
    runtime().block_on(dropped_with_key(SeededBugs::default()));
    with_dedup(|| runtime().block_on(dropped_with_key(SeededBugs::default())));
    let seeded_bugs = SeededBugs { keyless_damaged: true, ..SeededBugs::default() };
    let run = AssertUnwindSafe(dropped_with_key(seeded_bugs)).catch_unwind();
    assert!(runtime().block_on(run).is_err(), "{seeded_bugs:?} goes unnoticed");
}
