//! Copies in other stores: every published state can be opened and is a state of the pool, whatever
//! fails meanwhile.

use super::restores::object;
use super::*;
use crate::copier::{CopiedState, Copier, CopierOptions, CopyProgress};
use crate::map::snapshot_store::state_view;
use crate::seeded_bugs::SeededBugs;
use crate::testing::Fault;
use block::env::ManualClock;
use futures::{FutureExt, StreamExt};
use std::panic::AssertUnwindSafe;

/// Deletes in the copy as early as allowed.
pub(super) const AT_ONCE: CopierOptions =
    CopierOptions { bytes_per_second: None, grace: Duration::ZERO };

/// Opens a state in the way of a reader of the copy.
async fn open_state(target: &Arc<FaultStore>, state: &CopiedState) -> Tier {
    let objects: Arc<dyn ObjectStore> = target.clone();
    let mut options = options(state_view(objects, state.manifest), state.epoch.0);
    // A copy without any segment looks like an outage.
    options.frames.retry_duration_max = Duration::from_secs(2);
    Tier::open_read_only(options).await.unwrap()
}

/// Checks that a state of the copy equals the pool's former state, to the last bit.
async fn check_state(target: &Arc<FaultStore>, state: &CopiedState, history: &History) {
    let copy = open_state(target, state).await;
    assert_eq!(copy.destaged_lsn(), state.destaged_lsn);
    check_all(&copy, &history[&state.destaged_lsn]).await;
    check_fsck(&copy).await;
    copy.close().await.unwrap();
}

type History = BTreeMap<Lsn, Model>;

pub(super) async fn copier_of(tier: &Tier, target: &Arc<FaultStore>) -> Copier {
    let objects: Arc<dyn ObjectStore> = target.clone();
    tier.copier(objects, AT_ONCE, Arc::new(CopyProgress::default())).await.unwrap()
}

/// Copies in the way of the daemon: a pass, publication under the next number, then collection of
/// unneeded objects.
pub(super) struct Copying {
    pub(super) target: Arc<FaultStore>,
    pub(super) published: Vec<CopiedState>,
    pub(super) pinned: Option<u64>,
}

impl Copying {
    pub(super) fn new() -> Copying {
        Copying { target: Arc::default(), published: Vec::new(), pinned: None }
    }

    pub(super) async fn turn(&mut self, copier: &mut Copier) -> Result<bool> {
        let Some(state) = copier.pass().await? else { return Ok(false) };
        if self.published.last() != Some(&state) {
            self.published.push(state);
        }
        copier.published(self.published.len() as u64);
        while copier.collect(self.pinned).await? > 0 {}
        Ok(true)
    }
}

/// Writes and reclaim in the pool, with copies of which many calls fail, and copiers that restart.
async fn churn(seed: u64, seeded_bugs: SeededBugs) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut world = World::new(seed);
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let mut tier = Tier::open(opened.clone()).await.unwrap();
    let mut copying = Copying::new();
    let mut copier = copier_of(&tier, &copying.target).await;
    let (mut history, mut failed_count) = (History::new(), 0);
    for turn in 0..40 {
        let op_count = 1 + world.rng.below(60);
        let made = world.window(op_count);
        let lsn = made.window.last_lsn;
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        history.insert(lsn, world.model.clone());
        if world.rng.below(3) == 0 {
            tier.step(2).await.unwrap();
        }
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        if world.rng.below(2) == 0 {
            let percent = [0, 3, 15][world.rng.below(3) as usize];
            copying.target.fail_randomly(world.rng.next_u64(), percent);
            // Run as many deletions as possible during copying.
            let sweeping = async {
                loop {
                    let _ = tier.sweep_abandoned().await.unwrap();
                    tokio::task::yield_now().await;
                }
            };
            let done = tokio::select! {
                done = copying.turn(&mut copier) => done,
                () = sweeping => unreachable!("it ends with the other"),
            };
            copying.target.fail_randomly(0, 0);
            failed_count += u64::from(done.is_err());
            if percent == 0 {
                done.unwrap();
            }
            if let Some(state) = copying.published.last() {
                check_state(&copying.target, state, &history).await;
            }
            if world.rng.below(6) == 0 && !copying.published.is_empty() {
                copying.pinned = Some(copying.published.len() as u64);
            }
            if let Some(pinned) = copying.pinned {
                check_state(&copying.target, &copying.published[pinned as usize - 1], &history)
                    .await;
            }
        }
        if world.rng.below(5) == 0 {
            copier = copier_of(&tier, &copying.target).await;
        }
        if turn % 15 == 14 {
            tier.close().await.unwrap();
            opened.epoch = Epoch(2 + turn);
            tier = Tier::open(opened.clone()).await.unwrap();
            tier.sweep_orphans().await.unwrap();
            copier = copier_of(&tier, &copying.target).await;
        }
    }
    copying.pinned = None;
    copying.turn(&mut copier).await.unwrap();
    while tier.reclaim_status().held_count > 0 {
        tier.sweep_abandoned().await.unwrap();
    }
    let last = *copying.published.last().unwrap();
    check_state(&copying.target, &last, &history).await;
    assert_eq!(last.destaged_lsn, tier.destaged_lsn());
    assert!(!copying.turn(&mut copier).await.unwrap(), "nothing has changed");
    // Only that state is left, however many copiers have restarted.
    let mut fresh = copier_of(&tier, &copying.target).await;
    copying.turn(&mut fresh).await.unwrap();
    let last = *copying.published.last().unwrap();
    let objects: Vec<_> = copying.target.list(None).try_collect().await.unwrap();
    let count = objects.len() as u64;
    let manifests = objects.iter().filter(|one| one.location.as_ref().contains("/manifest/"));
    let other_count = count - manifests.count() as u64;
    assert_eq!(other_count, last.segment_count + last.table_count, "{objects:#?}");
    let segments = objects.iter().filter(|one| one.location.as_ref().starts_with("segments"));
    assert_eq!(segments.map(|one| one.size).sum::<u64>(), last.segment_bytes);
    println!("SEED={seed}: {failed_count} turns failed, {} states", copying.published.len());
    tier.close().await.unwrap();
}

#[test]
fn copy_is_a_state_of_the_pool_despite_failures() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(churn(seed, SeededBugs::default()));
    }
}

type SwitchOn = fn(&mut SeededBugs);

#[test]
fn seeded_bugs_are_noticed() {
    let bugs: [(&str, SwitchOn); 3] = [
        ("copy-without-hold", |bugs| bugs.copy_without_hold = true),
        ("pin-ignored", |bugs| bugs.pin_ignored = true),
        ("manifest-first", |bugs| bugs.manifest_first = true),
    ];
    for (name, switch_on) in bugs {
        let mut seeded_bugs = SeededBugs::default();
        switch_on(&mut seeded_bugs);
        let is_noticed = (1..=8).any(|seed| {
            let run = AssertUnwindSafe(async {
                match () {
                    () if seeded_bugs.manifest_first => {
                        a_cut_copy_has_no_manifest(seeded_bugs).await
                    }
                    () if seeded_bugs.copy_without_hold => reclaim_beside_a_copy(seeded_bugs).await,
                    () => churn(seed, seeded_bugs).await,
                }
            });
            runtime().block_on(run.catch_unwind()).is_err()
        });
        assert!(is_noticed, "{name} was not noticed");
    }
}

/// A listing of a copy that was interrupted shows no manifest that references missing objects.
async fn a_cut_copy_has_no_manifest(seeded_bugs: SeededBugs) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut opened = options(store, 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    for lsn in 1..=6 {
        let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    let target = Arc::new(FaultStore::default());
    target.inject_after(Op::Put, "segments", 3, u64::MAX, Fault::Broken);
    let mut copier = copier_of(&tier, &target).await;
    assert_eq!(copier.pass().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let folder = database::manifest_folder();
    let manifests: Vec<_> = target.list(Some(&folder)).try_collect().await.unwrap();
    assert!(manifests.is_empty(), "{manifests:?}");
    // Copied objects are not copied again.
    target.clear_injected();
    target.take_calls();
    copier.pass().await.unwrap().unwrap();
    let puts = target.take_calls().into_iter().filter(|call| call.op == Op::Put);
    let again = puts.filter(|call| call.path.as_ref().starts_with("segments")).count();
    assert!(again <= 3, "{again} of 6 segments");
    tier.close().await.unwrap();
}

#[test]
fn interrupted_copy_resumes_where_it_stopped() {
    runtime().block_on(a_cut_copy_has_no_manifest(SeededBugs::default()));
}

/// Everything is overwritten and reclaimed while the earlier state is copied.
async fn reclaim_beside_a_copy(seeded_bugs: SeededBugs) {
    let mut opened = options(Arc::new(InMemory::new()), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    let mut copying = Copying::new();
    let mut copier = copier_of(&tier, &copying.target).await;
    for lsn in 1..=24 {
        let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    copying.target.set_delay(Duration::from_millis(20));
    let reclaiming = async {
        while copying.target.call_count(Op::Put) < 2 {
            tokio::task::yield_now().await;
        }
        for lsn in 1..=24 {
            let window = plain_window(24 + lsn, vec![(1, block_extent(lsn, 8))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        while tier.status().abandoned_count > 0 {
            tier.sweep_abandoned().await.unwrap();
        }
        tier.reclaim_status().held_count
    };
    let (state, held_count) = tokio::join!(copier.pass(), reclaiming);
    let state = state.unwrap().unwrap();
    assert!(held_count > 0, "the copy was faster than reclaim");
    assert_eq!(state.destaged_lsn, Lsn(24));
    copying.target.set_delay(Duration::ZERO);
    copier.published(1);
    let copy = open_state(&copying.target, &state).await;
    for block in 1..=24 {
        let mut buf = vec![0; BLOCK_BYTES as usize];
        copy.read(VolumeId(1), block * BLOCK_BYTES, &mut buf).await.unwrap();
        assert!(buf.iter().all(|byte| *byte == 7), "block {block}");
    }
    check_fsck(&copy).await;
    copy.close().await.unwrap();
    // After that it is deleted.
    while tier.reclaim_status().held_count + tier.status().abandoned_count > 0 {
        tier.sweep_abandoned().await.unwrap();
    }
    copying.turn(&mut copier).await.unwrap();
    let of_before = copying.target.list(Some(&Path::from("segments"))).count().await as u64;
    assert_eq!(of_before, copying.published.last().unwrap().segment_count);
    tier.close().await.unwrap();
}

#[test]
fn reclaim_beside_a_copy_takes_nothing_from_it() {
    runtime().block_on(reclaim_beside_a_copy(SeededBugs::default()));
}

#[test]
fn a_copy_keeps_replaced_objects_for_the_grace_period() {
    runtime().block_on(async {
        let (clock, target) = (ManualClock::new(), Arc::new(FaultStore::default()));
        let options =
            TierOptions { clock: Arc::new(clock.clone()), ..options(Arc::new(InMemory::new()), 1) };
        let tier = Tier::open(options).await.unwrap();
        let (options, progress) = (CopierOptions::default(), Arc::new(CopyProgress::default()));
        let mut copier = tier.copier(target, options, progress).await.unwrap();
        let mut world = World::new(3);
        for state in 1..=2 {
            tier.destage(world.window(20).window, &Payloads).await.unwrap();
            assert!(copier.pass().await.unwrap().is_some());
            copier.published(state);
        }
        clock.advance(options.grace - Duration::from_secs(1));
        assert_eq!(copier.collect(None).await.unwrap(), 0);
        clock.advance(Duration::from_secs(1));
        assert!(copier.collect(None).await.unwrap() > 0);
        tier.close().await.unwrap();
    });
}

#[test]
fn a_copy_that_has_more_than_the_pool_is_refused() {
    runtime().block_on(async {
        let store = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        tier.destage(plain_window(1, vec![(1, block_extent(1, 7))]), &Payloads).await.unwrap();
        // A bucket that is later put back to this state.
        let earlier = store.fork();
        for lsn in 2..6 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        let mut copying = Copying::new();
        let mut copier = copier_of(&tier, &copying.target).await;
        copying.turn(&mut copier).await.unwrap();
        tier.close().await.unwrap();

        let before: Vec<_> = copying.target.list(None).try_collect().await.unwrap();
        let tier = Tier::open(options(Arc::new(earlier), 2)).await.unwrap();
        let mut copier = copier_of(&tier, &copying.target).await;
        let error = copier.pass().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("put back to an earlier state"), "{error}");
        // Repeated attempts stay refused, because they do not raise the pool's number.
        for _ in 0..20 {
            assert_eq!(copier.pass().await.unwrap_err().kind(), ErrorKind::Invalid);
        }
        // The pool reaches the same number through another history.
        let kind = loop {
            let lsn = tier.destaged_lsn().0 + 1;
            let window = plain_window(lsn, vec![(1, block_extent(lsn, 9))]);
            tier.destage(window, &Payloads).await.unwrap();
            match copier.pass().await {
                Err(error) if error.kind() == ErrorKind::Invalid => {}
                other => break other.map(drop).unwrap_err().kind(),
            }
        };
        assert_eq!(kind, ErrorKind::Corrupt);
        let state = copying.published[0];
        let copy = open_state(&copying.target, &state).await;
        let mut buf = vec![0; BLOCK_BYTES as usize];
        copy.read(VolumeId(1), 5 * BLOCK_BYTES, &mut buf).await.unwrap();
        assert!(buf.iter().all(|byte| *byte == 7));
        let after: Vec<_> = copying.target.list(None).try_collect().await.unwrap();
        assert!(before.iter().all(|one| after.iter().any(|other| other.location == one.location)));
        copy.close().await.unwrap();
        tier.close().await.unwrap();
    });
}

#[test]
fn damaged_objects_neither_end_copying_nor_replace_whole_ones() {
    runtime().block_on(async {
        let source = Arc::new(FaultStore::default());
        let tier = Tier::open(options(source.clone(), 1)).await.unwrap();
        let segments = async || -> Vec<Path> {
            let found: Vec<_> =
                source.list(Some(&Path::from("segments"))).try_collect().await.unwrap();
            found.into_iter().map(|one| one.location).collect()
        };
        tier.destage(plain_window(1, vec![(1, block_extent(1, 7))]), &Payloads).await.unwrap();
        let first = segments().await.remove(0);
        let mut copying = Copying::new();
        let progress = Arc::new(CopyProgress::default());
        let target: Arc<dyn ObjectStore> = copying.target.clone();
        let mut copier = tier.copier(target, AT_ONCE, progress.clone()).await.unwrap();
        copying.turn(&mut copier).await.unwrap();
        for lsn in [2, 3] {
            let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        // One segment that the copy has, one that it lacks, and one that is gone.
        let mut others = segments().await;
        others.retain(|path| *path != first);
        let flip = |bytes: &mut Vec<u8>| bytes[70] ^= 1;
        source.damage(&first, flip).await;
        source.damage(&others[0], flip).await;
        source.delete(&others[1]).await.unwrap();
        copying.turn(&mut copier).await.unwrap();
        let counts = progress.counts();
        assert_eq!((counts.damaged_count, counts.missing_count), (1, 1), "{counts:?}");
        let state = *copying.published.last().unwrap();
        assert_eq!(state.destaged_lsn, Lsn(3));
        let copy = open_state(&copying.target, &state).await;
        let mut buf = vec![0; BLOCK_BYTES as usize];
        copy.read(VolumeId(1), BLOCK_BYTES, &mut buf).await.unwrap();
        assert!(buf.iter().all(|byte| *byte == 7), "the copy's own is whole");
        let report = copy.fsck(FsckOptions::default()).await.unwrap();
        assert!(report.difference_count >= 2, "{report:?}");
        copy.close().await.unwrap();
        tier.close().await.unwrap();
    });
}

/// A segment is damaged in the copy, or is intact only in the copy. A copier that restarts gives
/// the copy the better of the two.
async fn damaged_once(is_whole_in_copy: bool, seeded_bugs: SeededBugs) -> bool {
    let source = Arc::new(FaultStore::default());
    let mut opened = options(source.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    tier.destage(plain_window(1, vec![(1, block_extent(1, 7))]), &Payloads).await.unwrap();
    let found: Vec<_> = source.list(Some(&Path::from("segments"))).try_collect().await.unwrap();
    let path = found[0].location.clone();
    let whole = object(&*source, &path).await;
    source.damage(&path, |bytes: &mut Vec<u8>| bytes[120] ^= 1).await;
    let mut copying = Copying::new();
    let mut copier = copier_of(&tier, &copying.target).await;
    copying.turn(&mut copier).await.unwrap();
    assert!(object(&*copying.target, &path).await != whole);
    match is_whole_in_copy {
        // By an operator, as the log advises.
        true => copying.target.put(&path, whole.clone().into()).await.map(drop).unwrap(),
        false => source.put(&path, whole.clone().into()).await.map(drop).unwrap(),
    }
    let mut copier = copier_of(&tier, &copying.target).await;
    for lsn in 2..5 {
        let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
        tier.destage(window, &Payloads).await.unwrap();
        copying.turn(&mut copier).await.unwrap();
    }
    let is_complete = object(&*copying.target, &path).await == whole;
    let marks: Vec<_> =
        copying.target.list(Some(&Path::from("damaged"))).try_collect().await.unwrap();
    assert!(!is_complete || marks.is_empty(), "{marks:?}");
    tier.close().await.unwrap();
    is_complete
}

#[test]
fn damaged_copies_are_rechecked_and_never_replace_whole_objects() {
    for is_whole_in_copy in [true, false] {
        let made = runtime().block_on(damaged_once(is_whole_in_copy, SeededBugs::default()));
        assert!(made, "whole in the copy: {is_whole_in_copy}");
    }
    let seeded_bugs = SeededBugs { damage_overwrites: true, ..SeededBugs::default() };
    assert!(!runtime().block_on(damaged_once(true, seeded_bugs)), "nobody noticed");
}

/// The pool is taken over in the middle of a pass, and the new owner reclaims segments of the
/// state.
async fn taken_over_meanwhile(seeded_bugs: SeededBugs) -> bool {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let paused = Arc::new(FaultStore::new(shared.clone()));
    let lost = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut first = options(paused.clone(), 1);
    first.seeded_bugs = seeded_bugs;
    // None of the wanted objects exists, which looks like an outage.
    first.frames.retry_duration_max = Duration::from_secs(1);
    // Otherwise the database may notice before the copier does.
    first.database.poll_interval = Duration::from_secs(3600);
    let seen = lost.clone();
    first.owner_check = Some(crate::tier::OwnerCheck::new(move || {
        let is_lost = seen.load(std::sync::atomic::Ordering::SeqCst);
        Box::pin(async move {
            match is_lost {
                true => Err(Error::new(ErrorKind::Fenced, "taken over")),
                false => Ok(()),
            }
        })
    }));
    let tier = Tier::open(first).await.unwrap();
    for lsn in 1..=6 {
        let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    let copying = Copying::new();
    let mut copier = copier_of(&tier, &copying.target).await;
    copying.target.set_delay(Duration::from_millis(100));
    let takeover = async {
        while copying.target.call_count(Op::Put) < 2 {
            tokio::task::yield_now().await;
        }
        // The process is suspended.
        paused.hold_gets(true);
        lost.store(true, std::sync::atomic::Ordering::SeqCst);
        let later = Tier::open(options(shared.clone(), 2)).await.unwrap();
        for lsn in 7..=12 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn - 6, 8))]);
            later.destage(window, &Payloads).await.unwrap();
        }
        look_again(&later);
        reclaim_until_idle(&later).await;
        sweep_all_abandoned(&later).await;
        // The process resumes.
        copying.target.set_delay(Duration::ZERO);
        paused.hold_gets(false);
        later
    };
    let (made, later) = tokio::join!(copier.pass(), takeover);
    let mut is_complete = true;
    if let Ok(Some(state)) = made {
        let copy = open_state(&copying.target, &state).await;
        for block in 1..=6 {
            let mut buf = vec![0; BLOCK_BYTES as usize];
            is_complete &= copy.read(VolumeId(1), block * BLOCK_BYTES, &mut buf).await.is_ok();
        }
        copy.close().await.unwrap();
    }
    later.close().await.unwrap();
    is_complete
}

#[test]
fn superseded_owner_makes_no_incomplete_state() {
    assert!(runtime().block_on(taken_over_meanwhile(SeededBugs::default())));
    let seeded_bugs =
        SeededBugs { missing_unowned: true, missing_unconfirmed: true, ..SeededBugs::default() };
    assert!(!runtime().block_on(taken_over_meanwhile(seeded_bugs)), "nobody noticed");
}
