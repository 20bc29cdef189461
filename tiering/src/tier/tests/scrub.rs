//! Scrub and repair: damaged or missing segments are restored from copies exactly as they were,
//! and nothing else is.

use super::*;
use crate::copier::{CopierOptions, CopyProgress};
use crate::repair::{Finding, RepairSource};
use crate::seeded_bugs::SeededBugs;
use crate::segment::FOLDER;
use crate::testing::Fault;
use futures::FutureExt;
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;

pub(super) fn source(name: &str, store: &Arc<FaultStore>) -> RepairSource {
    RepairSource { name: name.to_owned(), store: store.clone() }
}

pub(super) async fn copy_to(tier: &Tier, target: &Arc<FaultStore>) {
    let (progress, options) = (Arc::new(CopyProgress::default()), CopierOptions::default());
    let mut copier = tier.copier(target.clone(), options, progress).await.unwrap();
    copier.pass().await.unwrap();
}

pub(super) async fn segment_paths(store: &dyn ObjectStore) -> Vec<Path> {
    let listing = store.list(Some(&Path::from("segments")));
    let mut paths: Vec<Path> = listing.map_ok(|meta| meta.location).try_collect().await.unwrap();
    paths.sort();
    paths
}

pub(super) async fn bytes_of(store: &dyn ObjectStore, path: &Path) -> Option<Bytes> {
    match store.get(path).await {
        Ok(got) => Some(got.bytes().await.unwrap()),
        Err(_) => None,
    }
}

/// Flips a bit, truncates the object, deletes it, or replaces it by another segment.
async fn damage(store: &FaultStore, path: &Path, others: &[Path], rng: &mut Rng) {
    match rng.below(4) {
        0 => {
            let (at, bit) = (rng.next_u64() as usize, rng.below(8));
            store
                .damage(path, |bytes| {
                    let at = at % bytes.len();
                    bytes[at] ^= 1 << bit;
                })
                .await;
        }
        1 => store.damage(path, |bytes| bytes.truncate(bytes.len() / 2)).await,
        2 => store.delete(path).await.unwrap(),
        _ => {
            let other = others.iter().find(|other| *other != path).unwrap();
            if let Some(bytes) = bytes_of(store, other).await {
                store.put(path, bytes.into()).await.unwrap();
            }
        }
    }
}

/// Runs a whole scrub. Returns the findings, by number.
pub(super) async fn scrub(tier: &Tier) -> BTreeMap<u64, Finding> {
    let (mut found, mut last) = (BTreeMap::new(), 0);
    while let Some(one) = tier.scrub_next(last).await.unwrap() {
        last = one.info.number.0;
        found.insert(last, one.finding);
    }
    found
}

pub(super) fn number_of(path: &Path) -> u64 {
    crate::segment::SegmentName::parse(path).unwrap().number.0
}

/// Segments are damaged in the pool's store and in one copy; the other copy has them intact.
async fn damaged_everywhere_but_once(seed: u64, seeded_bugs: SeededBugs) {
    let store = Arc::new(FaultStore::default());
    let mut world = World::new(seed);
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened.clone()).await.unwrap();
    for _ in 0..6 {
        let made = world.window(60);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
    }
    let (near, far) = (Arc::new(FaultStore::default()), Arc::new(FaultStore::default()));
    copy_to(&tier, &near).await;
    copy_to(&tier, &far).await;
    tier.close().await.unwrap();

    let paths = segment_paths(&*store).await;
    let mut whole = BTreeMap::new();
    let (mut damaged, mut damaged_near) = (BTreeSet::new(), BTreeSet::new());
    for path in &paths {
        whole.insert(path.clone(), bytes_of(&*store, path).await.unwrap());
    }
    for path in &paths {
        if world.rng.below(3) > 0 {
            damage(&store, path, &paths, &mut world.rng).await;
            // The replacement may itself have been damaged before, but it differs from the
            // original.
            if bytes_of(&*store, path).await.as_ref() != whole.get(path) {
                damaged.insert(number_of(path));
            }
        }
        if world.rng.below(2) == 0 {
            damage(&near, path, &paths, &mut world.rng).await;
            if bytes_of(&*near, path).await.as_ref() != whole.get(path) {
                damaged_near.insert(number_of(path));
            }
        }
    }
    opened.epoch = Epoch(2);
    let tier = Tier::open(opened.clone()).await.unwrap();
    tier.set_repair_sources(vec![source("near", &near), source("far", &far)]);
    for (number, finding) in scrub(&tier).await {
        match finding {
            Finding::Whole { frame_count } => {
                assert!(frame_count > 0 && !damaged.contains(&number), "{number}");
            }
            Finding::Repaired { source, .. } => {
                assert!(damaged.contains(&number), "{number} was whole");
                let nearest = if damaged_near.contains(&number) { "far" } else { "near" };
                assert_eq!(source, nearest, "{number}");
            }
            other => panic!("{number}: {other:?}"),
        }
    }
    assert_eq!(tier.status().repaired_count, damaged.len() as u64);
    assert!(scrub(&tier).await.values().all(|one| matches!(one, Finding::Whole { .. })));
    for (path, bytes) in whole {
        assert_eq!(bytes_of(&*store, &path).await, Some(bytes), "{path}");
    }
    check_all(&tier, &world.model).await;
    check_fsck(&tier).await;
    tier.close().await.unwrap();
    println!("SEED={seed}: {} of {} segments repaired", damaged.len(), paths.len());
}

#[test]
fn damaged_objects_are_repaired_from_a_copy() {
    for seed in seeds(6) {
        println!("SEED={seed}");
        runtime().block_on(damaged_everywhere_but_once(seed, SeededBugs::default()));
    }
}

/// A read is answered from a copy as soon as there is one; a segment that no copy has is reported
/// and left alone.
#[test]
fn reads_repair_from_copies_and_leave_other_damage_alone() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for lsn in 1..=3 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn, lsn as u8))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        let copy = Arc::new(FaultStore::default());
        copy_to(&tier, &copy).await;
        tier.close().await.unwrap();
        let paths = segment_paths(&*store).await;
        let [flipped, gone, _] = &paths[..] else { panic!("{paths:?}") };
        store.damage(flipped, |bytes| bytes[100] ^= 1).await;
        store.delete(gone).await.unwrap();
        let after = bytes_of(&*store, flipped).await;

        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        let read = async |block: u64| {
            let mut buf = vec![0; BLOCK_BYTES as usize];
            tier.read(VolumeId(1), block * BLOCK_BYTES, &mut buf).await.map(|()| buf)
        };
        for block in [1, 2] {
            assert_eq!(read(block).await.unwrap_err().kind(), ErrorKind::Corrupt);
        }
        let found = scrub(&tier).await;
        let is_bad = |number: u64| matches!(found[&number], Finding::Bad { .. });
        assert!(is_bad(number_of(flipped)) && is_bad(number_of(gone)), "{found:?}");
        // A copy in which it is no better changes nothing either.
        let empty = Arc::new(FaultStore::default());
        tier.set_repair_sources(vec![source("empty", &empty)]);
        let asked = empty.call_count(Op::Get);
        assert_eq!(read(1).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert!(empty.call_count(Op::Get) > asked);
        // Readers do not ask it repeatedly.
        let asked = empty.call_count(Op::Get);
        assert_eq!(read(1).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(empty.call_count(Op::Get), asked);
        let found = scrub(&tier).await;
        let Finding::Bad { why } = &found[&number_of(gone)] else { panic!("{found:?}") };
        assert!(why.contains("in the copy empty: not there"), "{why}");
        assert_eq!(bytes_of(&*store, flipped).await, after);
        assert_eq!(bytes_of(&*store, gone).await, None);
        // Nor a copy that is away: the next scrub asks it.
        copy.set_away(true);
        tier.set_repair_sources(vec![source("empty", &empty), source("copy", &copy)]);
        assert_eq!(read(2).await.unwrap_err().kind(), ErrorKind::Corrupt);
        copy.set_away(false);
        tier.set_repair_sources(vec![source("empty", &empty), source("copy", &copy)]);
        for block in [1, 2, 3] {
            assert!(read(block).await.unwrap().iter().all(|byte| u64::from(*byte) == block));
        }
        assert_eq!(tier.status().repaired_count, 2);
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// A missing segment reappears after this many requests for it. Returns whether a reader that did
/// not find it at first reads it then, or else asks the copy.
async fn back_after(request_count: u64) -> bool {
    let store = Arc::new(FaultStore::default());
    let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
    let window = plain_window(1, vec![(1, block_extent(1, 7))]);
    tier.destage(window, &Payloads).await.unwrap();
    let copy = Arc::new(FaultStore::default());
    copy_to(&tier, &copy).await;
    tier.close().await.unwrap();
    let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
    tier.set_repair_sources(vec![source("copy", &copy)]);
    store.inject(Op::Get, FOLDER, request_count, Fault::NotFound);
    let mut buf = vec![0; BLOCK_BYTES as usize];
    let asked = copy.call_count(Op::Get);
    let read = tier.read(VolumeId(1), BLOCK_BYTES, &mut buf).await;
    assert!(read.is_err() || buf.iter().all(|byte| *byte == 7));
    tier.close().await.unwrap();
    read.is_ok() || copy.call_count(Op::Get) > asked
}

#[test]
fn reader_notices_repairs_by_another_process() {
    for count in 1..=12 {
        assert!(runtime().block_on(back_after(count)), "{count}");
    }
}

/// A segment is reclaimed while a copy sends it.
async fn reclaimed_while_it_is_put_back(seeded_bugs: SeededBugs) {
    let store = Arc::new(FaultStore::default());
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    for lsn in 1..=3 {
        let window = plain_window(lsn, vec![(1, block_extent(lsn, 7))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    let copy = Arc::new(FaultStore::default());
    copy_to(&tier, &copy).await;
    tier.set_repair_sources(vec![source("copy", &copy)]);
    let paths = segment_paths(&*store).await;
    store.damage(&paths[0], |bytes| bytes[100] ^= 1).await;
    copy.take_calls();
    copy.hold_gets(true);
    let reclaiming = async {
        while copy.call_count(Op::Get) == 0 {
            tokio::task::yield_now().await;
        }
        let window = plain_window(4, vec![(1, block_extent(1, 8))]);
        tier.destage(window, &Payloads).await.unwrap();
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        while tier.status().abandoned_count > 0 {
            tier.sweep_abandoned().await.unwrap();
        }
        copy.hold_gets(false);
    };
    let (found, ()) = tokio::join!(tier.scrub_next(0), reclaiming);
    let found = found.unwrap().unwrap();
    assert_eq!((found.info.object_path(), found.finding), (paths[0].clone(), Finding::Gone));
    while tier.reclaim_status().held_count + tier.status().abandoned_count > 0 {
        tier.sweep_abandoned().await.unwrap();
    }
    let left = segment_paths(&*store).await;
    assert!(!left.contains(&paths[0]), "it came back: {left:?}");
    check_fsck(&tier).await;
    tier.close().await.unwrap();
}

#[test]
fn segment_reclaimed_during_repair_stays_deleted() {
    runtime().block_on(reclaimed_while_it_is_put_back(SeededBugs::default()));
}

/// Writes, reclaim, copies and damage, while both stores fail at random. In the end all data is as
/// written, and the store has no unreferenced objects.
async fn churn(seed: u64) {
    let store = Arc::new(FaultStore::default());
    let copy = Arc::new(FaultStore::default());
    let mut world = World::new(seed);
    let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
    tier.set_repair_sources(vec![source("copy", &copy)]);
    let (mut repaired, mut failed) = (0, 0);
    for _ in 0..25 {
        let op_count = 1 + world.rng.below(60);
        let made = world.window(op_count);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        copy_to(&tier, &copy).await;
        let paths = segment_paths(&*store).await;
        for path in &paths {
            if paths.len() > 1 && world.rng.below(4) == 0 {
                damage(&store, path, &paths, &mut world.rng).await;
            }
        }
        copy.fail_randomly(world.rng.next_u64(), [0, 5][world.rng.below(2) as usize]);
        let scrubbing = async {
            let mut last = 0;
            loop {
                match tier.scrub_next(last).await {
                    Ok(Some(one)) => {
                        repaired += u64::from(matches!(one.finding, Finding::Repaired { .. }));
                        last = one.info.number.0;
                    }
                    Ok(None) => break,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
                        failed += 1;
                    }
                }
            }
        };
        let reclaiming = async {
            look_again(&tier);
            loop {
                let step = tier.reclaim_step(EAGER).await;
                let _ = tier.sweep_abandoned().await;
                if step.is_ok_and(|step| step.is_idle) {
                    break;
                }
            }
        };
        tokio::join!(scrubbing, reclaiming);
        copy.fail_randomly(0, 0);
        // Segments that the copy did not send before.
        let found = scrub(&tier).await;
        assert!(found.values().all(|one| !matches!(one, Finding::Bad { .. })), "{found:?}");
        assert_eq!(
            tier.reclaim_status().stuck_count,
            0,
            "reclaim goes on with what is whole again"
        );
        check_random_reads(&tier, &world.model, &mut world.rng, 30).await;
    }
    check_all(&tier, &world.model).await;
    let report = check_fsck(&tier).await;
    while tier.reclaim_status().held_count + tier.status().abandoned_count > 0 {
        tier.sweep_abandoned().await.unwrap();
    }
    assert_eq!(segment_paths(&*store).await.len() as u64, report.segment_count);
    println!("SEED={seed}: {repaired} repaired, {failed} steps failed");
    tier.close().await.unwrap();
}

#[test]
fn repair_continues_beside_writes_reclaim_and_failing_copies() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(churn(seed));
    }
}

#[test]
fn seeded_bugs_of_repair_are_noticed() {
    let unverified = SeededBugs { repair_unverified: true, ..SeededBugs::default() };
    let is_noticed = (1..=4).any(|seed| {
        let run = AssertUnwindSafe(damaged_everywhere_but_once(seed, unverified));
        runtime().block_on(run.catch_unwind()).is_err()
    });
    assert!(is_noticed, "repair-unverified was not noticed");
    let unheld = SeededBugs { repair_unheld: true, ..SeededBugs::default() };
    let run = AssertUnwindSafe(reclaimed_while_it_is_put_back(unheld));
    assert!(runtime().block_on(run.catch_unwind()).is_err(), "repair-unheld was not noticed");
}
