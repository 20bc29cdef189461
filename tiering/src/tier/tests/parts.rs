//! Copies of some volumes: every state has all data that these volumes show, whatever they were
//! made from, and a pool that is restored from one drops the volumes that were not copied.

use super::clones::{Clones, step_all};
use super::copies::AT_ONCE;
use super::restores::begin_restore;
use super::*;
use crate::copier::{CopiedState, CopyProgress, HydrateOptions, HydrateProgress, Lacking};
use crate::map::SnapshotChange;
use crate::map::snapshot_store::state_view;
use crate::seeded_bugs::SeededBugs;
use futures::{FutureExt, StreamExt};
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;

fn excluded(
    state: &CopiedState,
    volumes: &BTreeSet<VolumeId>,
    first_new_volume: Option<u32>,
) -> Option<Excluded> {
    let (below, volumes) = (state.next_segment, Arc::new(volumes.clone()));
    let first_new_volume = first_new_volume.map(VolumeId);
    Some(Excluded { below, volumes, first_new_volume })
}

/// Returns the model restricted to some volumes.
fn only(clones: &Clones, volumes: &BTreeSet<VolumeId>) -> Clones {
    let mut part = Clones::new(1);
    let is_one = |volume: u32| volumes.contains(&VolumeId(volume));
    let live = clones.live.iter().filter(|(volume, _)| is_one(**volume));
    part.live = live.map(|(volume, held)| (*volume, held.clone())).collect();
    let shown = clones.shown.iter().filter(|((volume, _), _)| is_one(*volume));
    part.shown = shown.map(|(one, held)| (*one, held.clone())).collect();
    part
}

async fn check_copy(
    target: &Arc<FaultStore>,
    state: &CopiedState,
    clones: &Clones,
    volumes: &BTreeSet<VolumeId>,
) {
    let objects: Arc<dyn ObjectStore> = target.clone();
    let mut opened = options(state_view(objects, state.manifest), state.epoch.0);
    opened.excluded = excluded(state, volumes, None);
    let copy = Tier::open_read_only(opened).await.unwrap();
    only(clones, volumes).check_all(&copy).await;
    check_fsck(&copy).await;
    copy.close().await.unwrap();
}

/// Drops every other volume, with its snapshots.
async fn drop_others(tier: &Tier, clones: &mut Clones, volumes: &BTreeSet<VolumeId>) {
    let is_other = |volume: u32| !volumes.contains(&VolumeId(volume));
    let others: BTreeSet<u32> = clones.live.keys().copied().filter(|one| is_other(*one)).collect();
    let removed: Vec<_> = tier.snapshots();
    clones.world.lsn += 1;
    let mut window = plain_window(clones.world.lsn, Vec::new());
    window.snapshots = removed
        .into_iter()
        .filter(|(volume, ..)| is_other(volume.0))
        .map(|(volume, lsn, _)| SnapshotChange::Removed { volume, lsn })
        .collect();
    tier.destage(window, &Payloads).await.unwrap();
    for volume in others {
        clones.world.lsn += 1;
        let pages = 0..(99 << 40) / PAGE_BYTES;
        let window = trim_window(clones.world.lsn, volume, pages);
        tier.destage(window, &Payloads).await.unwrap();
        if tier.is_retirable(VolumeId(volume)) {
            tier.retire(VolumeId(volume)).await.unwrap();
        }
    }
}

/// Runs a history. Returns the number of segments that the copies lacked.
async fn history(seed: u64, seeded_bugs: SeededBugs) -> u64 {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    let mut clones = Clones::new(seed);
    // Clones have numbers from 3 on. Choose one of the first volumes or none, and some of the
    // clones.
    let first = [1, 2, 100][clones.below(3)];
    let volumes: BTreeSet<VolumeId> = [first, 3, 5, 8].map(VolumeId).into();
    let target = Arc::new(FaultStore::default());
    let copier_of = async || {
        let objects: Arc<dyn ObjectStore> = target.clone();
        let copier = tier.copier(objects, AT_ONCE, Arc::new(CopyProgress::default()));
        copier.await.unwrap().of_volumes(volumes.clone())
    };
    let mut copier = copier_of().await;
    let (mut number, mut lacked_count) = (0, 0);
    let mut last: Option<CopiedState> = None;
    for _ in 0..40 {
        let op_count = 1 + clones.world.rng.below(12);
        clones.write(&tier, op_count).await.unwrap();
        clones.change(&tier).await.unwrap();
        for _ in 0..clones.below(3) {
            tier.step(1 + clones.below(20)).await.unwrap();
        }
        if clones.below(3) == 0 {
            reclaim_all(&tier).await;
        }
        if clones.below(5) == 0 {
            tier.sweep_again();
            while tier.sweep_back_references(20).await.unwrap() {}
        }
        if clones.below(6) == 0 {
            copier = copier_of().await;
        }
        if clones.below(3) > 0 {
            continue;
        }
        if let Some(state) = copier.pass().await.unwrap() {
            number += 1;
            copier.published(number);
            while copier.collect(None).await.unwrap() > 0 {}
            let all = tier.parts.metadata.map.segments_after(0, usize::MAX).await.unwrap();
            lacked_count += all.len() as u64 - state.segment_count;
            last = Some(state);
        }
        if let Some(state) = &last {
            let is_now = state.commit_number == tier.status().map.commit_number;
            assert!(is_now, "the copy is behind");
            check_copy(&target, state, &clones, &volumes).await;
        }
    }
    let state = copier.pass().await.unwrap().or(last).unwrap();
    copier.published(number + 1);
    check_copy(&target, &state, &clones, &volumes).await;
    tier.close().await.unwrap();

    // After the restore, the others are dropped. In the end the pool has the needed segments and
    // references no others.
    let own = Arc::new(FaultStore::default());
    let restored_store = begin_restore(&target, &state, &own).await;
    let first_new_volume = clones.next_volume;
    let open = async |store: Arc<dyn ObjectStore>, epoch| {
        let mut opened = options(store, epoch);
        opened.excluded = excluded(&state, &volumes, Some(first_new_volume));
        opened.seeded_bugs = seeded_bugs;
        let tier = Tier::open(opened).await.unwrap();
        // Like the daemon: keys of volumes that were made since.
        for volume in clones.live.keys().filter(|volume| **volume > 2) {
            tier.volume_keys().assign(VolumeId(*volume), KeyId::POOL);
        }
        tier
    };
    let mut part = only(&clones, &volumes);
    part.world.lsn = clones.world.lsn;
    let restored = open(restored_store.clone(), 2).await;
    part.check_all(&restored).await;
    // Reclaim begins before the volumes to drop are chosen.
    restored.set_excluded(excluded(&state, &volumes, None));
    for _ in 0..3 {
        look_again(&restored);
        while restored.reclaim_step(EAGER).await.unwrap() != ReclaimReport::default() {}
        for _ in 0..20 {
            let _ = restored.reclaim_step(EAGER).await.unwrap();
        }
    }
    assert_eq!(restored.reclaim_status().stuck_count, 0);
    drop_others(&restored, &mut clones, &volumes).await;
    restored.set_excluded(excluded(&state, &volumes, Some(first_new_volume)));
    // A further copy waits until the pool no longer references segments that are missing
    // everywhere.
    let onward = Arc::new(FaultStore::default());
    let objects: Arc<dyn ObjectStore> = onward.clone();
    let counts = Arc::new(CopyProgress::default());
    let mut copier = restored.copier(objects.clone(), AT_ONCE, counts.clone()).await.unwrap();
    let mut copied = None;
    for _ in 0..4 {
        match copier.pass().await {
            Ok(state) => copied = state.or(copied),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain()),
        }
        if let Some(state) = &copied {
            let held = onward.list(Some(&Path::from("segments"))).count().await as u64;
            assert!(held >= state.segment_count, "{held} segments of {}", state.segment_count);
        }
        // Regardless of the pages that are still to be dropped.
        check_fsck(&restored).await;
        restored.step(5).await.unwrap();
        check_fsck(&restored).await;
        step_all(&restored).await;
        reclaim_all(&restored).await;
    }
    part.check_all(&restored).await;
    let state = copier.pass().await.unwrap().or(copied).unwrap();
    assert_eq!(counts.counts().missing_count, 0);
    let copy = Tier::open_read_only(options(state_view(objects, state.manifest), state.epoch.0));
    let copy = copy.await.unwrap();
    part.check_all(&copy).await;
    check_fsck(&copy).await;
    copy.close().await.unwrap();
    assert_eq!(restored.reclaim_status().stuck_count, 0);
    let progress = HydrateProgress::default();
    let options = HydrateOptions { dead_patience: Duration::from_secs(5), ..Default::default() };
    let lacking = restored.hydrate(&restored_store, options, &progress).await.unwrap();
    assert_eq!(lacking, Lacking::default());
    target.set_away(true);
    part.check_all(&restored).await;
    let report = check_fsck(&restored).await;
    restored.close().await.unwrap();
    let segments = own.list(Some(&Path::from("segments"))).count().await as u64;
    assert_eq!(segments, report.segment_count, "everything that was excluded is forgotten");
    lacked_count
}

#[test]
fn partial_copy_holds_all_visible_data_of_its_volumes() {
    let mut lacked_count = 0;
    for seed in seeds(2) {
        println!("SEED={seed}");
        lacked_count += runtime().block_on(history(seed, SeededBugs::default()));
    }
    assert!(lacked_count > 20, "{lacked_count} segments were excluded");
}

#[test]
fn partial_copy_holds_shared_data_of_its_volumes() {
    let mut lacked_count = 0;
    for seed in seeds(2) {
        println!("SEED={seed}");
        lacked_count += with_dedup(|| runtime().block_on(history(seed, SeededBugs::default())));
    }
    assert!(lacked_count > 20, "{lacked_count} segments were excluded");
}

#[test]
fn seeded_bugs_are_noticed() {
    let is_noticed = |seed, seeded_bugs| {
        let run = AssertUnwindSafe(history(seed, seeded_bugs)).catch_unwind();
        runtime().block_on(run).is_err()
    };
    let bases = SeededBugs { part_without_bases: true, ..SeededBugs::default() };
    assert!((1..=10).any(|seed| is_noticed(seed, bases)), "bases are not missed");
    let references = SeededBugs { part_without_references: true, ..SeededBugs::default() };
    let found = with_dedup(|| (1..=10).any(|seed| is_noticed(seed, references)));
    assert!(found, "what is shared is not missed");
}

/// Reclaim of a restored pool begins before the volumes to drop are chosen. Returns the number of
/// segments that it treats as damaged.
async fn reclaimed_before_the_choice(seeded_bugs: SeededBugs) -> u64 {
    let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
    // A segment of volume 2 that is worth rewriting, another one of it, and one of volume 1.
    let mut window = plain_window(1, Vec::new());
    window.volumes = vec![(VolumeId(2), (0..10).map(|block| block_extent(block, 1)).collect())];
    tier.destage(window, &Payloads).await.unwrap();
    let mut window = plain_window(2, Vec::new());
    window.volumes = vec![(VolumeId(2), (0..5).map(|block| block_extent(block, 2)).collect())];
    tier.destage(window, &Payloads).await.unwrap();
    tier.destage(plain_window(3, vec![(1, block_extent(0, 3))]), &Payloads).await.unwrap();
    let (target, own) = (Arc::new(FaultStore::default()), Arc::new(FaultStore::default()));
    let volumes: BTreeSet<VolumeId> = [VolumeId(1)].into();
    let copier = tier.copier(target.clone(), AT_ONCE, Arc::default()).await.unwrap();
    let state = copier.of_volumes(volumes.clone()).pass().await.unwrap().unwrap();
    tier.close().await.unwrap();

    let store = begin_restore(&target, &state, &own).await;
    let mut opened = options(store.clone(), 2);
    opened.excluded = excluded(&state, &volumes, None);
    opened.seeded_bugs = seeded_bugs;
    let restored = Tier::open(opened).await.unwrap();
    for _ in 0..20 {
        let _ = restored.reclaim_step(EAGER).await.unwrap();
    }
    let damaged_count = restored.reclaim_status().stuck_count;
    restored.destage(trim_window(4, 2, 0..1), &Payloads).await.unwrap();
    restored.set_excluded(excluded(&state, &volumes, Some(3)));
    step_all(&restored).await;
    reclaim_all(&restored).await;
    let status = restored.reclaim_status();
    assert_eq!((status.forgotten_count, status.stuck_count), (2, 0));
    let progress = HydrateProgress::default();
    let lacking = restored.hydrate(&store, HydrateOptions::default(), &progress).await.unwrap();
    assert_eq!(lacking, Lacking::default());
    target.set_away(true);
    let mut block = vec![0; BLOCK_BYTES as usize];
    restored.read(VolumeId(1), 0, &mut block).await.unwrap();
    assert!(block.iter().all(|byte| *byte == 3));
    check_fsck(&restored).await;
    restored.close().await.unwrap();
    damaged_count
}

#[test]
fn deliberately_absent_data_is_not_damaged_before_the_choice() {
    let run = |seeded_bugs| runtime().block_on(reclaimed_before_the_choice(seeded_bugs));
    assert_eq!(run(SeededBugs::default()), 0);
    let seeded_bugs = SeededBugs { lacking_unchosen: true, ..SeededBugs::default() };
    assert_eq!(run(seeded_bugs), 1, "{seeded_bugs:?} goes unnoticed");
}
