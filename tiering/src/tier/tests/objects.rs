//! A single object that is missing or cannot be read, while the store works: this is distinguished
//! from an outage, and blocks nothing else.

use super::copies::{Copying, copier_of};
use super::restores::{begin_restore, copied};
use super::scrub::{bytes_of, copy_to, number_of, scrub, segment_paths, source};
use super::*;
use crate::copier::{HydrateOptions, HydrateProgress, Lacking};
use crate::repair::Finding;
use crate::seeded_bugs::SeededBugs;
use crate::segment::{FOLDER, SegmentInfo};
use crate::testing::Fault;
use block::ConditionKind;
use block::env::{Clock, SystemClock};
use std::collections::BTreeSet;

/// Longest time for a verdict on one object in these tests; a read that waits for the store takes
/// longer. Far shorter than the wait for an outage.
const VERDICT_MAX: Duration = Duration::from_secs(20);

/// Makes a pool with one segment of one block for each of the volumes 1 to `count`, and returns the
/// segments' paths.
async fn pool(count: u32, seeded_bugs: SeededBugs) -> (Arc<FaultStore>, Tier, Vec<Path>) {
    let store = Arc::new(FaultStore::default());
    let mut opened = options(store.clone(), 1);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    for volume in 1..=count {
        let window = plain_window(volume.into(), vec![(volume, block_extent(1, volume as u8))]);
        tier.destage(window, &Payloads).await.unwrap();
    }
    let paths = segment_paths(&*store).await;
    (store, tier, paths)
}

async fn read(tier: &Tier, volume: u32) -> Result<u8> {
    let mut buf = vec![0; BLOCK_BYTES as usize];
    tier.read(VolumeId(volume), BLOCK_BYTES, &mut buf).await.map(|()| buf[0])
}

/// Makes a write of one sector within the block.
fn ragged(lsn: u64, volume: u32) -> Window<Bytes> {
    let content = ExtentContent::Data(Bytes::from(vec![9; SECTOR]));
    plain_window(lsn, vec![(volume, WindowExtent { start_sector: 10, sector_count: 1, content })])
}

fn is_raised(tier: &Tier, kind: ConditionKind, path: &Path) -> bool {
    tier.parts.pool.conditions.is_raised(kind, path.as_ref())
}

#[test]
fn unreadable_object_is_named_and_affects_nothing_else() {
    runtime().block_on(async {
        let (store, tier, paths) = pool(5, SeededBugs::default()).await;
        let bad = paths[0].clone();
        store.inject(Op::Get, bad.as_ref(), u64::MAX, Fault::Unsent);
        // Destage: the error names the volume that builds on it, and other volumes are destaged.
        let begun = SystemClock.now();
        let failed = tier.destage(ragged(6, 1), &Payloads).await.unwrap_err();
        assert_eq!(
            (failed.volume, failed.error.kind()),
            (Some(VolumeId(1)), ErrorKind::Unreadable)
        );
        assert!(failed.error.chain().contains(bad.as_ref()), "{}", failed.error.chain());
        assert!(SystemClock.since(begun) < VERDICT_MAX, "{:?}", SystemClock.since(begun));
        tier.destage(ragged(6, 2), &Payloads).await.unwrap();
        assert!(is_raised(&tier, ConditionKind::ObjectUnreadable, &bad));
        let checked = tier.check_extents(VolumeId(1), &[(10, 1, true)]).await;
        assert_eq!(checked.unwrap_err().kind(), ErrorKind::Unreadable);
        // Readers.
        assert_eq!(read(&tier, 1).await.unwrap_err().kind(), ErrorKind::Unreadable);
        assert_eq!(read(&tier, 3).await.unwrap(), 3);
        assert!(tier.status().frames.store_failure.is_none(), "the store is well");
        // The scrub reports it, and examines the others.
        let found = scrub(&tier).await;
        assert_eq!(found.len(), 6);
        for (number, finding) in &found {
            let is_bad = matches!(finding, Finding::Bad { .. });
            assert_eq!(is_bad, *number == number_of(&bad), "{number}: {finding:?}");
        }
        // Reclaim drops other segments that are dead.
        let window = plain_window(7, vec![(3, block_extent(1, 30)), (4, block_extent(1, 40))]);
        tier.destage(window, &Payloads).await.unwrap();
        look_again(&tier);
        reclaim_until_idle(&tier).await;
        while tier.status().abandoned_count > 0 {
            tier.sweep_abandoned().await.unwrap();
        }
        let left = segment_paths(&*store).await;
        assert!(left.contains(&bad) && !left.contains(&paths[2]) && !left.contains(&paths[3]));
        // A copy gets all other objects, and this one as soon as it can be read.
        let mut copying = Copying::new();
        let mut copier = copier_of(&tier, &copying.target).await;
        assert!(copying.turn(&mut copier).await.unwrap());
        let copied = segment_paths(&*copying.target).await;
        assert!(!copied.contains(&bad) && copied.len() + 1 == left.len(), "{copied:?}");
        // The check reports it, and checks the rest.
        let report = tier.fsck(FsckOptions::default()).await.unwrap();
        assert!(report.differences.iter().any(|one| one.contains(bad.as_ref())), "{report:?}");
        // All of that ends when it can be read.
        store.clear_injected();
        tier.try_unreadable_again().await;
        assert_eq!(tier.parts.pool.conditions.list(), []);
        assert_eq!(read(&tier, 1).await.unwrap(), 1);
        tier.destage(ragged(8, 1), &Payloads).await.unwrap();
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// The store is away for a while. Returns whether a reader gets its bytes in the end.
async fn read_in_an_outage(seeded_bugs: SeededBugs) -> bool {
    let (store, tier, _) = pool(3, seeded_bugs).await;
    store.set_away(true);
    let back = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        store.set_away(false);
    };
    let (found, ()) = tokio::join!(read(&tier, 1), back);
    let is_silent = tier.parts.pool.conditions.list().is_empty();
    tier.close().await.unwrap();
    found.is_ok() && is_silent
}

#[test]
fn an_outage_is_not_taken_for_one_unreadable_object() {
    assert!(runtime().block_on(read_in_an_outage(SeededBugs::default())));
    let seeded_bugs = SeededBugs { judged_alone: true, ..SeededBugs::default() };
    assert!(!runtime().block_on(read_in_an_outage(seeded_bugs)), "{seeded_bugs:?} goes unnoticed");
}

/// All segments are answered with this 404 for a while. Returns whether a reader gets its bytes in
/// the end.
async fn read_beside_a_passing_404(fault: Fault, folder: &str, seeded_bugs: SeededBugs) -> bool {
    let (store, tier, _) = pool(3, seeded_bugs).await;
    store.inject(Op::Get, folder, u64::MAX, fault);
    let back = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        store.clear_injected();
    };
    let (found, ()) = tokio::join!(read(&tier, 1), back);
    tier.close().await.unwrap();
    found.is_ok()
}

#[test]
fn a_404_of_the_bucket_or_of_everything_is_an_outage() {
    let run = |fault, folder, seeded_bugs| {
        runtime().block_on(read_beside_a_passing_404(fault, folder, seeded_bugs))
    };
    assert!(run(Fault::NoBucket, FOLDER, SeededBugs::default()));
    assert!(run(Fault::NoBucket, "", SeededBugs::default()));
    assert!(run(Fault::NotFound, "", SeededBugs::default()));
    let seeded_bugs = SeededBugs { missing_unconfirmed: true, ..SeededBugs::default() };
    assert!(!run(Fault::NotFound, "", seeded_bugs), "{seeded_bugs:?} goes unnoticed");
}

#[test]
fn a_missing_object_is_lost_once_that_is_confirmed() {
    runtime().block_on(async {
        let (store, tier, paths) = pool(2, SeededBugs::default()).await;
        // A single answer is no confirmation.
        store.inject(Op::Get, paths[0].as_ref(), 2, Fault::NotFound);
        assert_eq!(read(&tier, 1).await.unwrap(), 1);
        assert_eq!(tier.parts.pool.conditions.list(), []);
        // An unreferenced object is not looked for again.
        let gone = tier.parts.metadata.map.find_segment(1).await.unwrap().unwrap().info;
        let other = SegmentInfo { id: [1; 16], ..gone };
        let begun = SystemClock.now();
        let error = tier.parts.segments.frames.read_object(&other.into()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(
            SystemClock.since(begun) < Duration::from_secs(1)
                && !tier.parts.segments.frames.store().is_suspect(&other)
        );

        let bytes = bytes_of(&*store, &paths[0]).await.unwrap();
        store.delete(&paths[0]).await.unwrap();
        tier.parts.segments.frames.store().clear(&gone);
        let tier = {
            tier.close().await.unwrap();
            Tier::open(options(store.clone(), 2)).await.unwrap()
        };
        let begun = SystemClock.now();
        let error = read(&tier, 1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        assert!(SystemClock.since(begun) < VERDICT_MAX, "{:?}", SystemClock.since(begun));
        assert!(is_raised(&tier, ConditionKind::ObjectMissing, &paths[0]));
        assert_eq!(read(&tier, 2).await.unwrap(), 2);
        // An operator restores it.
        store.put(&paths[0], bytes.into()).await.unwrap();
        tier.try_unreadable_again().await;
        assert_eq!(tier.parts.pool.conditions.list(), []);
        assert_eq!(read(&tier, 1).await.unwrap(), 1);
        tier.close().await.unwrap();
    });
}

#[test]
fn unreadable_object_is_restored_from_a_copy() {
    runtime().block_on(async {
        let (store, tier, paths) = pool(3, SeededBugs::default()).await;
        let copy = Arc::new(FaultStore::default());
        copy_to(&tier, &copy).await;
        tier.set_repair_sources(vec![source("copy", &copy)]);
        store.inject(Op::Get, paths[0].as_ref(), u64::MAX, Fault::Unsent);
        let begun = SystemClock.now();
        assert_eq!(read(&tier, 1).await.unwrap(), 1);
        assert!(SystemClock.since(begun) < VERDICT_MAX, "{:?}", SystemClock.since(begun));
        assert_eq!(tier.status().repaired_count, 1);
        assert_eq!(tier.parts.pool.conditions.list(), []);
        tier.close().await.unwrap();
    });
}

/// Four readers of damaged segments; the first copy sends nothing and the second one has all of
/// them. Returns the time that they took.
async fn read_beside_a_hung_copy(seeded_bugs: SeededBugs) -> Duration {
    let (store, tier, paths) = pool(4, seeded_bugs).await;
    let (hung, well) = (Arc::new(FaultStore::default()), Arc::new(FaultStore::default()));
    copy_to(&tier, &hung).await;
    copy_to(&tier, &well).await;
    tier.close().await.unwrap();
    for path in &paths {
        store.damage(path, |bytes| bytes[100] ^= 1).await;
    }
    let mut opened = options(store.clone(), 2);
    opened.seeded_bugs = seeded_bugs;
    let tier = Tier::open(opened).await.unwrap();
    hung.hold_gets(true);
    tier.set_repair_sources(vec![source("hung", &hung), source("well", &well)]);
    let begun = SystemClock.now();
    let reads = futures::future::join_all((1..=4).map(|volume| read(&tier, volume))).await;
    let took = SystemClock.since(begun);
    for (volume, found) in (1..).zip(reads) {
        assert_eq!(found.unwrap(), volume);
    }
    // The number of requests under way stays within the limit, and copying still progresses.
    let other = Arc::new(FaultStore::default());
    copy_to(&tier, &other).await;
    assert_eq!(segment_paths(&*other).await.len(), 4);
    hung.hold_gets(false);
    tier.close().await.unwrap();
    took
}

#[test]
fn a_copy_that_hangs_does_not_keep_readers_from_another_one() {
    let took = runtime().block_on(read_beside_a_hung_copy(SeededBugs::default()));
    assert!(took < Duration::from_secs(4), "{took:?}");
    let seeded_bugs = SeededBugs { repair_in_turn: true, ..SeededBugs::default() };
    let took = runtime().block_on(read_beside_a_hung_copy(seeded_bugs));
    assert!(took > Duration::from_secs(4), "{seeded_bugs:?} goes unnoticed: {took:?}");
}

#[test]
fn restore_fetches_the_rest_and_retries_missing_objects() {
    runtime().block_on(async {
        let (tier, copying, state, paths) = copied().await;
        let copy = copying.target.clone();
        let own = Arc::new(FaultStore::default());
        let store = begin_restore(&copy, &state, &own).await;
        let mut opened = options(store.clone(), 2);
        opened.restored = Some(store.clone());
        let restored = Tier::open(opened).await.unwrap();
        let progress = HydrateProgress::default();
        // A segment that is not found at first is not lost.
        copy.inject(Op::Get, paths[0].as_ref(), 2, Fault::NotFound);
        copy.inject(Op::Get, paths[1].as_ref(), u64::MAX, Fault::Unsent);
        let hydrated = restored.hydrate(&store, HydrateOptions::default(), &progress).await;
        let lacking = hydrated.unwrap();
        assert_eq!(lacking.missing, BTreeSet::new());
        assert_eq!(lacking.unreadable.keys().collect::<Vec<_>>(), [&paths[1]]);
        assert!(!store.is_complete() && progress.counts(SystemClock.now()).bad_count == 1);
        let here = segment_paths(&*own).await;
        assert_eq!(here, [&paths[..1], &paths[2..]].concat());
        // Giving up missing segments does not give up those that are present and not sent.
        let given_up = Arc::new(paths.iter().cloned().collect());
        let giving_up = HydrateOptions { given_up, ..HydrateOptions::default() };
        let lacking = restored.hydrate(&store, giving_up, &progress).await.unwrap();
        assert!(!lacking.is_empty() && !store.is_complete());
        copy.clear_injected();
        // Each attempt asks the copy, whatever the previous one has found.
        let hydrated = restored.hydrate(&store, HydrateOptions::default(), &progress).await;
        assert_eq!(hydrated.unwrap(), Lacking::default());
        assert!(store.is_complete() && progress.counts(SystemClock.now()).bad_count == 0);
        assert_eq!(segment_paths(&*own).await, paths);
        restored.close().await.unwrap();
        tier.close().await.unwrap();
    });
}

#[test]
fn store_outage_is_not_judged_by_its_copy() {
    runtime().block_on(async {
        let (tier, copying, state, paths) = copied().await;
        let own = Arc::new(FaultStore::default());
        let store = begin_restore(&copying.target, &state, &own).await;
        let bytes = bytes_of(&*copying.target, &paths[0]).await.unwrap();
        own.put(&paths[0], bytes.into()).await.unwrap();
        let mut opened = options(store.clone(), 2);
        opened.restored = Some(store.clone());
        let restored = Tier::open(opened).await.unwrap();
        // Segments that are only in the copy are read there, whatever the state of the pool's own
        // store.
        let mut buf = vec![0; BLOCK_BYTES as usize];
        restored.read(VolumeId(1), 2 * BLOCK_BYTES, &mut buf).await.unwrap();
        own.set_away(true);
        let back = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            own.set_away(false);
        };
        let (found, ()) = tokio::join!(read(&restored, 1), back);
        assert_eq!(found.unwrap(), 7);
        // The copy as a whole is away: that is an outage too, as its witness shows.
        copying.target.set_away(true);
        let mut buf = vec![0; BLOCK_BYTES as usize];
        let back = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            copying.target.set_away(false);
        };
        let reading = restored.read(VolumeId(1), 3 * BLOCK_BYTES, &mut buf);
        let (found, ()) = tokio::join!(reading, back);
        found.unwrap();
        assert_eq!(restored.parts.pool.conditions.list(), []);
        restored.close().await.unwrap();
        tier.close().await.unwrap();
    });
}
