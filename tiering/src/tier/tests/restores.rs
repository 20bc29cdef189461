//! Pools that were restored from a copy: they live while their data is fetched, and afterwards need
//! the copy no more.

use super::copies::{Copying, copier_of};
use super::*;
use crate::copier::{CopiedState, HydrateOptions, HydrateProgress, Lacking, RestoredStore};
use crate::map::snapshot_store::state_view;
use crate::seeded_bugs::SeededBugs;
use crate::segment::SegmentName;
use futures::StreamExt;
use std::collections::BTreeSet;

/// Makes an own store in front of a state of the copy, as the daemon's restore does.
pub(super) async fn begin_restore(
    target: &Arc<FaultStore>,
    state: &CopiedState,
    own: &Arc<FaultStore>,
) -> Arc<RestoredStore> {
    let copy: Arc<dyn ObjectStore> = target.clone();
    let view = state_view(copy, state.manifest);
    let folder = database::manifest_folder();
    let manifests: Vec<_> = view.list(Some(&folder)).try_collect().await.unwrap();
    for manifest in manifests {
        let bytes = view.get(&manifest.location).await.unwrap().bytes().await.unwrap();
        own.put(&manifest.location, bytes.into()).await.unwrap();
    }
    let witness = Path::from("identity");
    target.put(&witness, "here".into()).await.unwrap();
    Arc::new(RestoredStore::new(
        own.clone(),
        view,
        witness,
        state.next_segment,
        Arc::new(SystemClock),
    ))
}

/// Writes, reads, reclaim and restarts in a restored pool, while missing objects are fetched from a
/// copy of which many calls fail.
async fn live_restored(seed: u64) {
    let mut world = World::new(seed);
    let source: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let tier = Tier::open(options(source.clone(), 3)).await.unwrap();
    for _ in 0..12 {
        let op_count = 1 + world.rng.below(60);
        let made = world.window(op_count);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
    }
    let mut copying = Copying::new();
    let mut copier = copier_of(&tier, &copying.target).await;
    copying.turn(&mut copier).await.unwrap();
    let state = copying.published[0];
    copying.pinned = Some(1);
    let own = Arc::new(FaultStore::default());
    let store = begin_restore(&copying.target, &state, &own).await;
    let mut epoch = 4;
    let open = async |store: &Arc<RestoredStore>, epoch| {
        let objects: Arc<dyn ObjectStore> = store.clone();
        Tier::open(options(objects, epoch)).await.unwrap()
    };
    let mut restored = open(&store, epoch).await;
    assert_eq!(restored.destaged_lsn(), state.destaged_lsn);
    check_all(&restored, &world.model).await;
    // The source and its copy diverge from it.
    let mut other = World { rng: Rng::new(seed + 99), model: world.model.clone(), lsn: world.lsn };
    let progress = HydrateProgress::default();
    let (mut is_complete, mut failed_count) = (false, 0);
    for turn in 0..24 {
        let op_count = 1 + world.rng.below(40);
        let made = world.window(op_count);
        restored.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        let op_count = 1 + other.rng.below(40);
        let made = other.window(op_count);
        tier.destage(made.window, &Payloads).await.unwrap();
        other.model = made.after;
        for tier in [&tier, &restored] {
            look_again(tier);
            reclaim_until_idle(tier).await;
            sweep_all_abandoned(tier).await;
            tier.step(2).await.unwrap();
        }
        copying.turn(&mut copier).await.unwrap();
        check_random_reads(&restored, &world.model, &mut world.rng, 10).await;
        if !is_complete && world.rng.below(2) == 0 {
            copying.target.fail_randomly(seed + turn, 12);
            let reads = check_random_reads(&tier, &other.model, &mut other.rng, 5);
            let hydrated = restored.hydrate(&store, HydrateOptions::default(), &progress);
            let (done, ()) = tokio::join!(hydrated, reads);
            copying.target.fail_randomly(0, 0);
            is_complete = done.as_ref().is_ok_and(Lacking::is_empty);
            failed_count += u64::from(done.is_err());
        }
        if world.rng.below(5) == 0 {
            restored.close().await.unwrap();
            epoch += 1;
            restored = open(&store, epoch).await;
            restored.sweep_orphans().await.unwrap();
        }
        if turn % 8 == 7 {
            check_all(&restored, &world.model).await;
            check_fsck(&restored).await;
        }
    }
    let lacking = restored.hydrate(&store, HydrateOptions::default(), &progress).await.unwrap();
    assert_eq!(lacking, Lacking::default());
    assert_eq!(progress.counts(SystemClock.now()).left_bytes, 0);
    copying.target.set_away(true);
    check_all(&restored, &world.model).await;
    restored.close().await.unwrap();
    // It no longer needs the copy, and has no unneeded objects.
    let restored = Tier::open(options(own.clone(), epoch + 1)).await.unwrap();
    restored.sweep_orphans().await.unwrap();
    check_all(&restored, &world.model).await;
    let report = check_fsck(&restored).await;
    let segments = own.list(Some(&Path::from("segments"))).count().await as u64;
    assert_eq!(segments, report.segment_count);
    restored.close().await.unwrap();
    check_all(&tier, &other.model).await;
    tier.close().await.unwrap();
    println!("SEED={seed}: {failed_count} attempts to fetch everything failed");
}

#[test]
fn restored_pool_works_during_the_fetch_and_alone_afterwards() {
    for seed in seeds(4) {
        println!("SEED={seed}");
        runtime().block_on(live_restored(seed));
    }
}

#[test]
fn most_read_data_is_fetched_first() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        for lsn in 1..=8 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        let mut copying = Copying::new();
        let mut copier = copier_of(&tier, &copying.target).await;
        copying.turn(&mut copier).await.unwrap();
        let before = copier.hottest();
        let mut buf = vec![0; BLOCK_BYTES as usize];
        // Block 5 most often, then 3, then 8; it does not matter whether a cache has them.
        for (block, count) in [(3, 5), (5, 9), (8, 2)] {
            for _ in 0..count {
                tier.read(VolumeId(1), block * BLOCK_BYTES, &mut buf).await.unwrap();
            }
        }
        let hottest = copier.hottest();
        assert!(hottest.len() >= 3 && hottest[0].1 >= 9, "{before:?}, then {hottest:?}");
        let own = Arc::new(FaultStore::default());
        let store = begin_restore(&copying.target, &copying.published[0], &own).await;
        let restored = Tier::open(options(store.clone(), 2)).await.unwrap();
        restored.warm(&hottest);
        own.take_calls();
        restored
            .hydrate(&store, HydrateOptions::default(), &HydrateProgress::default())
            .await
            .unwrap();
        let number_of = |call: &crate::testing::Call| {
            (call.op == Op::Put).then(|| SegmentName::parse(&call.path)).flatten()
        };
        let calls = own.take_calls();
        let numbers: Vec<u64> =
            calls.iter().filter_map(number_of).map(|name| name.number.0).collect();
        assert_eq!(numbers.len(), 8, "{numbers:?}");
        let expected: Vec<u64> = hottest.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers[..expected.len()], expected, "{hottest:?}");
        restored.close().await.unwrap();
        tier.close().await.unwrap();
    });
}

#[test]
fn missing_objects_are_named_and_the_rest_is_fetched() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        for lsn in 1..=4 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        let mut copying = Copying::new();
        let mut copier = copier_of(&tier, &copying.target).await;
        copying.turn(&mut copier).await.unwrap();
        let state = copying.published[0];
        let folder = Path::from("segments");
        let segments: Vec<_> = copying.target.list(Some(&folder)).try_collect().await.unwrap();
        copying.target.delete(&segments[1].location).await.unwrap();
        let own = Arc::new(FaultStore::default());
        let store = begin_restore(&copying.target, &state, &own).await;
        let restored = Tier::open(options(store.clone(), 2)).await.unwrap();
        let progress = HydrateProgress::of_state(state.segment_bytes);
        assert_eq!(progress.counts(SystemClock.now()).left_bytes, state.segment_bytes);
        // An unmounted folder has no objects, and that proves nothing.
        copying.target.delete(&Path::from("identity")).await.unwrap();
        let error =
            restored.hydrate(&store, HydrateOptions::default(), &progress).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        // Present objects do not count as left; for the rest the size in the state is used.
        let folders = own.list(Some(&folder)).try_collect::<Vec<_>>().await.unwrap();
        let here: u64 = folders.iter().map(|found| found.size).sum();
        assert!(state.segment_bytes > 0);
        assert_eq!(progress.counts(SystemClock.now()).left_bytes, state.segment_bytes - here);
        let mut buf = vec![0; BLOCK_BYTES as usize];
        let mut errors = Vec::new();
        for block in 1..=4 {
            let read = restored.read(VolumeId(1), block * BLOCK_BYTES, &mut buf);
            let read = tokio::time::timeout(Duration::from_secs(1), read).await;
            errors.extend(read.ok().and_then(Result::err).map(|error| error.kind()));
        }
        assert!(!errors.contains(&ErrorKind::Corrupt), "{errors:?}");
        copying.target.put(&Path::from("identity"), "here".into()).await.unwrap();
        // The pool still needs the copy: the object may reappear there.
        let gone = BTreeSet::from([segments[1].location.clone()]);
        for _ in 0..2 {
            let lacking = restored.hydrate(&store, HydrateOptions::default(), &progress).await;
            let lacking = lacking.unwrap();
            assert_eq!((&lacking.missing, lacking.unreadable.len()), (&gone, 0));
            assert_eq!(progress.counts(SystemClock.now()).bad_count, 1);
            assert_eq!(own.list(Some(&folder)).count().await, 3);
            assert!(!store.is_complete());
        }
        // Unless a person gives it up. Other missing objects are not given up with it.
        let others = Arc::new(BTreeSet::from([Path::from("segments/1/another")]));
        let options = HydrateOptions { given_up: others, ..HydrateOptions::default() };
        let lacking = restored.hydrate(&store, options, &progress).await.unwrap();
        assert!(!lacking.is_empty() && !store.is_complete());
        let given_up = Arc::new(gone.clone());
        let options = HydrateOptions { given_up, ..HydrateOptions::default() };
        let lacking = restored.hydrate(&store, options, &progress).await.unwrap();
        assert_eq!(lacking.missing, gone);
        assert!(store.is_complete());
        restored.close().await.unwrap();
        tier.close().await.unwrap();
    });
}

/// Makes a pool with several segments and a copy of one state. Returns the paths of the segments
/// too.
pub(super) async fn copied() -> (Tier, Copying, CopiedState, Vec<Path>) {
    let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
    for lsn in 1..=4 {
        let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    let mut copying = Copying::new();
    let mut copier = copier_of(&tier, &copying.target).await;
    copying.turn(&mut copier).await.unwrap();
    let state = copying.published[0];
    let found: Vec<_> =
        copying.target.list(Some(&Path::from("segments"))).try_collect().await.unwrap();
    let mut paths: Vec<Path> = found.into_iter().map(|one| one.location).collect();
    paths.sort();
    (tier, copying, state, paths)
}

pub(super) async fn object(store: &dyn ObjectStore, path: &Path) -> Bytes {
    store.get(path).await.unwrap().bytes().await.unwrap()
}

/// An object that enters a restored pool's own store while it is being fetched stays, although the
/// copy has it damaged.
async fn put_while_hydrating(seeded_bugs: SeededBugs) -> bool {
    let (tier, copying, state, paths) = copied().await;
    let last = paths.last().unwrap().clone();
    let whole = object(&*copying.target, &last).await;
    copying.target.damage(&last, |bytes: &mut Vec<u8>| bytes[120] ^= 1).await;
    let own = Arc::new(FaultStore::default());
    let store = begin_restore(&copying.target, &state, &own).await;
    let mut opened = options(store.clone(), 2);
    opened.seeded_bugs = seeded_bugs;
    let restored = Tier::open(opened).await.unwrap();
    copying.target.set_delay(Duration::from_millis(50));
    let before = copying.target.call_count(Op::Get);
    let progress = HydrateProgress::default();
    let operator = async {
        // The pool's objects were listed before this.
        while copying.target.call_count(Op::Get) == before {
            tokio::task::yield_now().await;
        }
        own.put(&last, whole.clone().into()).await.unwrap();
    };
    let (done, ()) =
        tokio::join!(restored.hydrate(&store, HydrateOptions::default(), &progress), operator);
    done.unwrap();
    let is_kept = object(&*own, &last).await == whole;
    restored.close().await.unwrap();
    tier.close().await.unwrap();
    is_kept
}

#[test]
fn hydration_never_replaces_newer_objects_of_the_pool() {
    assert!(runtime().block_on(put_while_hydrating(SeededBugs::default())));
    let seeded_bugs = SeededBugs { hydrate_overwrites: true, ..SeededBugs::default() };
    assert!(!runtime().block_on(put_while_hydrating(seeded_bugs)), "nobody noticed");
}

/// A commit that forgets a segment is visible and not yet durable. Returns whether the pool counts
/// as complete.
async fn whole_beside_a_commit(seeded_bugs: SeededBugs) -> bool {
    let (tier, copying, state, paths) = copied().await;
    let own = Arc::new(FaultStore::default());
    let store = begin_restore(&copying.target, &state, &own).await;
    let mut opened = options(store.clone(), 2);
    opened.seeded_bugs = seeded_bugs;
    let restored = Tier::open(opened).await.unwrap();
    let window = plain_window(state.destaged_lsn.0 + 1, vec![(1, block_extent(1, 8))]);
    restored.destage(window, &Payloads).await.unwrap();
    // Every object is here except the segment that is dead by now.
    let tables = restored.parts.metadata.map.db().objects().tables;
    for path in paths[1..].iter().chain(&tables) {
        if own.head(path).await.is_err() {
            let bytes = object(&*copying.target, path).await;
            own.put(path, bytes.into()).await.unwrap();
        }
    }
    own.inject(Op::Put, database::FOLDER, u64::MAX, crate::testing::Fault::Broken);
    let reclaiming = tokio::spawn({
        let restored = restored.clone();
        async move { while !restored.reclaim_step(EAGER).await.is_ok_and(|done| done.is_idle) {} }
    });
    while restored.parts.metadata.map.find_segment(1).await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let progress = HydrateProgress::default();
    let hydrated = restored.hydrate(&store, HydrateOptions::default(), &progress);
    let hydrated = tokio::time::timeout(Duration::from_millis(300), hydrated).await;
    // The process ends here, and the commit with it.
    reclaiming.abort();
    own.set_away(true);
    drop(restored);
    tier.close().await.unwrap();
    hydrated.is_ok_and(|lacking| lacking.unwrap().is_empty())
}

#[test]
fn restored_pool_counts_as_complete_only_once_durable() {
    let run = |seeded_bugs| {
        let runtime = runtime();
        let is_complete = runtime.block_on(whole_beside_a_commit(seeded_bugs));
        drop(runtime);
        is_complete
    };
    assert!(!run(SeededBugs::default()));
    let seeded_bugs = SeededBugs { complete_unsettled: true, ..SeededBugs::default() };
    assert!(run(seeded_bugs), "{seeded_bugs:?} goes unnoticed");
}

#[test]
fn repaired_objects_of_a_restored_pool_are_read_locally() {
    runtime().block_on(async {
        let (tier, copying, state, paths) = copied().await;
        let last = paths.last().unwrap().clone();
        let other = Arc::new(InMemory::new());
        let whole = object(&*copying.target, &last).await;
        other.put(&last, whole.clone().into()).await.unwrap();
        copying.target.damage(&last, |bytes: &mut Vec<u8>| bytes[120] ^= 1).await;
        let own = Arc::new(FaultStore::default());
        let store = begin_restore(&copying.target, &state, &own).await;
        let restored = Tier::open(options(store.clone(), 2)).await.unwrap();
        let source = crate::repair::RepairSource { name: "other".to_owned(), store: other };
        restored.set_repair_sources(vec![source]);
        let mut buf = vec![0; BLOCK_BYTES as usize];
        restored.read(VolumeId(1), 4 * BLOCK_BYTES, &mut buf).await.unwrap();
        assert!(buf.iter().all(|byte| *byte == 7) && object(&*own, &last).await == whole);
        restored.close().await.unwrap();
        tier.close().await.unwrap();
    });
}
