//! Snapshots compared with a model of each: under writes, trims, reclaim, pruning, folding and
//! restarts, and with seeded bugs that these tests must detect.

use super::crash::life_until_crash;
use super::*;
use crate::map::SnapshotChange;
use crate::seeded_bugs::SeededBugs;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;

/// A pool with two volumes, their contents, and the contents of each existing snapshot.
struct Snapshots {
    world: World,
    shown: Shown,
}

/// Contents of each existing snapshot, by volume and LSN.
type Shown = BTreeMap<(u32, Lsn), Arc<Model>>;

impl Snapshots {
    fn new(seed: u64) -> Snapshots {
        Snapshots { world: World::new(seed), shown: BTreeMap::new() }
    }

    /// Makes a window that may make snapshots at its end and may remove some.
    fn window(&mut self, op_count: u64) -> Window<Bytes> {
        let made = self.world.window(op_count);
        let mut window = made.window;
        self.world.model = made.after;
        let rng = &mut self.world.rng;
        if rng.below(4) == 0
            && let Some((volume, lsn)) = nth(&self.shown, rng)
        {
            self.shown.remove(&(volume, lsn));
            window.snapshots.push(SnapshotChange::Removed { volume: VolumeId(volume), lsn });
        }
        if rng.below(3) == 0 {
            let model = Arc::new(self.world.model.clone());
            for volume in [1, 2].into_iter().take(1 + self.world.rng.below(2) as usize) {
                let record = Bytes::from(format!("snapshot at {}", window.last_lsn));
                let volume = VolumeId(volume);
                window.snapshots.push(SnapshotChange::Made { volume, record });
                self.shown.insert((volume.0, window.last_lsn), model.clone());
            }
        }
        window
    }

    async fn check_some(&mut self, tier: &Tier, count: u64) {
        for _ in 0..count {
            let Some((volume, at)) = nth(&self.shown, &mut self.world.rng) else { return };
            let model = self.shown[&(volume, at)].clone();
            let rng = &mut self.world.rng;
            let length_max = if rng.below(4) == 0 { 600_000 } else { 9000 };
            let length = 1 + rng.below(length_max);
            let offset = ZONES[rng.below(2) as usize] + rng.below(ZONE_BYTES);
            let mut buf = vec![0xaa; length as usize];
            tier.read_at(VolumeId(volume), at, offset, &mut buf).await.unwrap();
            assert!(
                buf == expected(&model, volume, offset, buf.len()),
                "volume {volume} at {at}, offset {offset}, length {length}"
            );
        }
    }

    async fn check_all(&self, tier: &Tier) {
        check_all(tier, &self.world.model).await;
        for ((volume, at), model) in &self.shown {
            for zone in ZONES {
                let mut buf = vec![0xaa; (ZONE_BYTES + 2 * PAGE_BYTES) as usize];
                tier.read_at(VolumeId(*volume), *at, zone, &mut buf).await.unwrap();
                let want = expected(model, *volume, zone, buf.len());
                let differs = buf.iter().zip(&want).position(|(a, b)| a != b);
                assert_eq!(differs, None, "volume {volume} at {at}, zone {zone}");
                check_allocation_at(tier, *volume, *at, zone, &want).await;
            }
        }
        self.check_differences(tier).await;
        let found: Vec<(u32, Lsn)> =
            tier.snapshots().into_iter().map(|(volume, lsn, _)| (volume.0, lsn)).collect();
        assert_eq!(found, self.shown.keys().copied().collect::<Vec<_>>());
    }
}

impl Snapshots {
    /// Compares consecutive snapshots: ranges that are not reported are equal, and holes have no
    /// data.
    async fn check_differences(&self, tier: &Tier) {
        let pairs = self.shown.iter().zip(self.shown.iter().skip(1));
        for (((volume, older), then), ((of, newer), now)) in pairs.filter(|(a, b)| a.0.0 == b.0.0) {
            assert_eq!(volume, of);
            for zone in ZONES {
                let end = zone + ZONE_BYTES + PAGE_BYTES;
                let mut differs = vec![None; (end - zone) as usize];
                let mut next = Some(zone);
                while let Some(start) = next {
                    let (id, lsns) = (VolumeId(*volume), (*older, *newer));
                    let (found, after) = tier.differences(id, lsns, start..end, 3).await.unwrap();
                    for extent in found {
                        let at = (extent.offset - zone) as usize;
                        let part = &mut differs[at..at + extent.length_bytes as usize];
                        assert!(part.iter().all(Option::is_none), "named twice");
                        part.fill(Some(extent.is_hole));
                    }
                    assert!(after.is_none_or(|after| after > start));
                    next = after;
                }
                let then = expected(then, *volume, zone, differs.len());
                let now = expected(now, *volume, zone, differs.len());
                for (at, differs) in differs.into_iter().enumerate() {
                    let place = || format!("volume {volume}, {older} to {newer}, {at}");
                    assert!(differs.is_some() || then[at] == now[at], "{}", place());
                    assert!(differs != Some(true) || now[at] == 0, "{}", place());
                }
            }
        }
    }
}

fn nth<T>(shown: &BTreeMap<(u32, Lsn), T>, rng: &mut Rng) -> Option<(u32, Lsn)> {
    let index = rng.below(shown.len().max(1) as u64) as usize;
    shown.keys().nth(index).copied()
}

async fn check_allocation_at(tier: &Tier, volume: u32, snapshot: Lsn, offset: u64, want: &[u8]) {
    let mut at = 0;
    while at < want.len() {
        let range = (offset + at as u64, (want.len() - at) as u64);
        let extents = tier.allocation_at(VolumeId(volume), snapshot, range, 7).await.unwrap();
        assert!(!extents.is_empty() && extents.len() <= 7);
        for extent in extents {
            let end = at + extent.length_bytes as usize;
            let is_zero = want[at..end].iter().all(|byte| *byte == 0);
            assert_eq!(extent.is_hole, is_zero, "volume {volume} at {snapshot}, {at}");
            at = end;
        }
    }
}

/// Folds and prunes everything.
async fn step_all(tier: &Tier) {
    loop {
        let done = tier.step(50).await.unwrap();
        if done.ranges_left == 0 && done.prunes_left == 0 {
            return;
        }
    }
}

/// Checks the bytes that each snapshot holds exclusively against all states of all pages.
async fn check_held(tier: &Tier) {
    let map = &tier.parts.metadata.map;
    let list = map.snapshots();
    let mut total = 0;
    for layer in [LayerId(1), LayerId(2)] {
        let living = list.of(layer);
        let mut want: BTreeMap<Lsn, u64> = BTreeMap::new();
        let pages = ZONES.iter().flat_map(|zone| {
            let first = (zone / PAGE_BYTES) as u32;
            first..first + 60
        });
        for page in pages {
            let mut holders: HashMap<(u8, u64, u32, u8), Vec<Option<Lsn>>> = HashMap::new();
            for at in living.iter().copied().map(Some).chain([None]) {
                let shown = match at {
                    Some(at) => map.page_at(layer, page, at).await.unwrap(),
                    None => map.page(layer, page).await.unwrap(),
                };
                for run in shown.runs.iter().filter(|run| run.is_mapped()) {
                    for (block, within) in (run.first..=run.last).zip(run.within..) {
                        let place = (block, run.segment, run.frame_index, within);
                        holders.entry(place).or_default().push(at);
                    }
                }
            }
            for only in holders.values().filter(|holders| holders.len() == 1) {
                if let Some(at) = only[0] {
                    *want.entry(at).or_default() += 1;
                }
            }
        }
        let mut found: BTreeMap<Lsn, u64> = BTreeMap::new();
        for ((at, _), count) in map.held_blocks(layer, living).await.unwrap() {
            *found.entry(at).or_default() += count;
            total += count;
        }
        assert_eq!(found, want, "layer {layer}");
    }
    let held = tier.held_bytes(VolumeId(1)).await.unwrap();
    assert_eq!(held.len(), list.of(LayerId(1)).len());
    assert!(total > 0 || list.iter().count() < 4, "no snapshot holds anything");
}

pub(super) async fn random_history(seed: u64, seeded_bugs: SeededBugs) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let open = async |epoch| {
        let mut opened = options(store.clone(), epoch);
        opened.seeded_bugs = seeded_bugs;
        let tier = Tier::open(opened).await.unwrap();
        tier.load_fingerprints().await.unwrap();
        tier
    };
    let mut snapshots = Snapshots::new(seed);
    let mut tier = open(1).await;
    let mut forgotten_count = 0;
    for turn in 0..40 {
        let op_count = 1 + snapshots.world.rng.below(40);
        let window = snapshots.window(op_count);
        tier.destage(window, &Payloads).await.unwrap();
        for _ in 0..snapshots.world.rng.below(4) {
            tier.step(1 + snapshots.world.rng.below(20) as usize).await.unwrap();
        }
        if snapshots.world.rng.below(3) == 0 {
            reclaim_all(&tier).await;
        }
        snapshots.check_some(&tier, 10).await;
        let rng = &mut snapshots.world.rng;
        check_random_reads(&tier, &snapshots.world.model, rng, 5).await;
        if turn % 8 == 7 {
            snapshots.check_all(&tier).await;
            check_fsck(&tier).await;
            let status = tier.reclaim_status();
            assert_eq!(status.stuck_count, 0);
            forgotten_count += status.forgotten_count;
            tier.close().await.unwrap();
            tier = open(2 + turn).await;
        }
    }
    step_all(&tier).await;
    check_held(&tier).await;
    // Without its snapshots a pool must be as if it had never had any.
    let removed = snapshots.shown.keys();
    let removed = removed
        .map(|(volume, lsn)| SnapshotChange::Removed { volume: VolumeId(*volume), lsn: *lsn });
    let mut window = plain_window(snapshots.world.lsn + 1, Vec::new());
    window.snapshots = removed.collect();
    tier.destage(window, &Payloads).await.unwrap();
    snapshots.shown.clear();
    step_all(&tier).await;
    // Blocks that were counted for snapshots are found when the first segments are examined.
    for _ in 0..3 {
        reclaim_all(&tier).await;
    }
    snapshots.check_all(&tier).await;
    let report = check_fsck(&tier).await;
    assert_eq!((report.snapshot_count, report.copy_count), (0, 0));
    let objects: Vec<_> =
        store.list(Some(&Path::from(crate::segment::FOLDER))).try_collect().await.unwrap();
    let stored: u64 = objects.iter().map(|object| object.size).sum();
    let space = tier.reclaim_status().space.unwrap();
    assert_eq!((report.object_bytes, space.object_bytes), (stored, stored));
    assert!(stored * 100 <= space.live_bytes * 115, "{space:?}");
    assert!(forgotten_count > 20, "{forgotten_count} segments");
    tier.close().await.unwrap();
}

#[test]
fn every_snapshot_keeps_its_state_despite_later_changes() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(random_history(seed, SeededBugs::default()));
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
        of(|bugs| bugs.reclaim_without_snapshots = true),
        of(|bugs| bugs.versions_forgotten = true),
        of(|bugs| bugs.pruned_too_much = true),
        of(|bugs| bugs.kept_uncounted = true),
    ];
    for seeded_bugs in all {
        let is_noticed = (1..=10).any(|seed| {
            let run = AssertUnwindSafe(random_history(seed, seeded_bugs)).catch_unwind();
            runtime().block_on(run).is_err()
        });
        assert!(is_noticed, "{seeded_bugs:?} goes unnoticed");
    }
}

/// Runs windows, reads of snapshots, reclaim, folding and pruning concurrently.
pub(super) async fn together(seed: u64) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let tier = Tier::open(options(store, 1)).await.unwrap();
    let mut snapshots = Snapshots::new(seed);
    let reclaiming = {
        let tier = tier.clone();
        tokio::spawn(async move {
            loop {
                look_again(&tier);
                while !tier.reclaim_step(EAGER).await.unwrap().is_idle {
                    tokio::task::yield_now().await;
                }
                let _ = tier.sweep_abandoned().await.unwrap();
                tier.step(20).await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    for _ in 0..40 {
        let op_count = 1 + snapshots.world.rng.below(40);
        // A snapshot that a window removes may be gone while the window is destaged; no reader has
        // it open then.
        let window = snapshots.window(op_count);
        tier.destage(window, &Payloads).await.unwrap();
        snapshots.check_some(&tier, 20).await;
    }
    reclaiming.abort();
    match reclaiming.await {
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        _ => {}
    }
    snapshots.check_all(&tier).await;
    let report = check_fsck(&tier).await;
    assert!(report.snapshot_count == 0 || report.copy_count > 0, "{report:?}");
    let status = tier.reclaim_status();
    assert!(status.forgotten_count > 10, "{status:?}");
    assert_eq!(status.stuck_count, 0);
    tier.close().await.unwrap();
}

#[test]
fn snapshots_are_read_while_space_is_reclaimed() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(together(seed));
    }
}

fn made(volume: u32) -> SnapshotChange {
    SnapshotChange::Made { volume: VolumeId(volume), record: Bytes::from_static(b"one") }
}

async fn block_at(tier: &Tier, at: Option<Lsn>, block: u64) -> u8 {
    let (volume, offset) = (VolumeId(1), block * BLOCK_BYTES);
    let mut buf = [0xaa; BLOCK_BYTES as usize];
    match at {
        None => tier.read(volume, offset, &mut buf).await.unwrap(),
        Some(at) => tier.read_at(volume, at, offset, &mut buf).await.unwrap(),
    }
    assert!(buf.iter().all(|byte| *byte == buf[0]), "a torn block");
    buf[0]
}

/// A volume is stalled while a snapshot of it is made; its late entries come before the snapshot or
/// after it.
#[test]
fn late_entries_appear_in_the_right_snapshots() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        tier.destage(plain_window(1, vec![(1, block_extent(0, 1))]), &Payloads).await.unwrap();
        let file = |first, last| NamedSpillFile {
            first_lsn: Lsn(first),
            last_lsn: Lsn(last),
            id: [1; 16],
        };
        // Windows up to 10 and 20 lack the volume; there is a snapshot at 10.
        for (lsn, files) in [(10, vec![file(2, 10)]), (20, vec![file(2, 10), file(11, 20)])] {
            let mut window = plain_window(lsn, vec![(2, block_extent(9, 9))]);
            window.stalled_volumes = vec![(VolumeId(1), files)];
            window.snapshots = if lsn == 10 { vec![made(1)] } else { Vec::new() };
            tier.destage(window, &Payloads).await.unwrap();
        }
        assert_eq!(block_at(&tier, Some(Lsn(10)), 0).await, 1, "it has not come yet");
        let late = |lsn: u64, extent, left: Vec<NamedSpillFile>| {
            let mut window = plain_window(20, vec![(1, extent)]);
            window.stalled_volumes = vec![(VolumeId(1), left)];
            window.late = Some(Lsn(lsn));
            window
        };
        let first = late(10, block_extent(0, 10), vec![file(11, 20)]);
        tier.destage(first, &Payloads).await.unwrap();
        assert_eq!(block_at(&tier, Some(Lsn(10)), 0).await, 10);
        tier.destage(late(20, block_extent(0, 20), Vec::new()), &Payloads).await.unwrap();
        // Enough windows that the page is folded.
        for lsn in 21..60 {
            let window = plain_window(lsn, vec![(1, block_extent(lsn, lsn as u8))]);
            tier.destage(window, &Payloads).await.unwrap();
        }
        reclaim_all(&tier).await;
        let check = async |tier: &Tier| {
            assert_eq!(block_at(tier, Some(Lsn(10)), 0).await, 10);
            assert_eq!(block_at(tier, Some(Lsn(10)), 30).await, 0);
            assert_eq!(block_at(tier, None, 0).await, 20);
            assert_eq!(block_at(tier, None, 30).await, 30);
            check_fsck(tier).await;
            tier.close().await.unwrap();
        };
        check(&tier).await;
        check(&Tier::open(options(store, 2)).await.unwrap()).await;
    });
}

/// A snapshot of a volume that is completely overwritten costs the space that it shows, and none
/// once it is removed.
#[test]
fn the_space_of_a_snapshot_comes_back_when_it_is_removed() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut opened = options(store.clone(), 1);
        opened.segment_bytes = 1 << 20;
        let tier = Tier::open(opened).await.unwrap();
        let mut rng = Rng::new(3);
        let mut lsn = 0;
        let mut fill = async |snapshots: Vec<SnapshotChange>| {
            lsn += 1;
            let mut window = plain_window(lsn, Vec::new());
            let content = ExtentContent::Data(Bytes::from(rng.bytes(8 << 20, 100)));
            let extent = WindowExtent { start_sector: 0, sector_count: 16 << 10, content };
            window.volumes = vec![(VolumeId(1), vec![extent])];
            window.snapshots = snapshots;
            tier.destage(window, &Payloads).await.unwrap();
        };
        let stored = async || {
            step_all(&tier).await;
            reclaim_all(&tier).await;
            reclaim_all(&tier).await;
            let folder = Path::from(crate::segment::FOLDER);
            let found: Vec<_> = store.list(Some(&folder)).try_collect().await.unwrap();
            found.iter().map(|object| object.size).sum::<u64>()
        };
        fill(vec![made(1)]).await;
        let one = stored().await;
        for _ in 0..5 {
            fill(Vec::new()).await;
        }
        let two = stored().await;
        assert!((one * 19 / 10..one * 21 / 10).contains(&two), "{one}, then {two}");
        fill(vec![made(1)]).await;
        fill(Vec::new()).await;
        let three = stored().await;
        assert!((one * 29 / 10..one * 31 / 10).contains(&three), "{one}, then {three}");
        for removed in [1, 7] {
            let lsn = Lsn(removed);
            fill(vec![SnapshotChange::Removed { volume: VolumeId(1), lsn }]).await;
        }
        let rest = stored().await;
        assert!(rest <= one * 21 / 20, "{one}, then {rest}");
        assert_eq!(check_fsck(&tier).await.copy_count, 0);
        tier.close().await.unwrap();
    });
}

/// The process ends at an arbitrary request to the store: every snapshot of the windows that
/// succeeded exists, with its contents.
#[test]
pub(super) fn a_crash_at_any_request_leaves_every_snapshot_as_it_was() {
    for seed in seeds(3) {
        println!("SEED={seed}");
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut snapshots = Snapshots::new(seed);
        // Contents of the snapshots after each window, in addition to those of the volumes.
        let mut made: Vec<(Made, Shown)> = Vec::new();
        let mut done = 0;
        for epoch in 1..=10 {
            while made.len() < done + 4 {
                let op_count = 5 + snapshots.world.rng.below(40);
                let window = snapshots.window(op_count);
                let after = snapshots.world.model.clone();
                made.push((Made { window, after }, snapshots.shown.clone()));
            }
            let store = Arc::new(FaultStore::new(shared.clone()));
            let calls = snapshots.world.rng.below(150);
            let windows: Vec<Made> = made[done..].iter().map(|(made, _)| made.clone()).collect();
            let came_through = life_until_crash(store, 2 * epoch, &windows, Some(calls));
            runtime().block_on(async {
                let tier = Tier::open(options(shared.clone(), 2 * epoch + 1)).await.unwrap();
                let lsn = tier.destaged_lsn();
                let is_there = |(made, _): &&(Made, _)| made.window.last_lsn <= lsn;
                let found = made.iter().take_while(is_there).count();
                assert!((done + came_through..=done + came_through + 1).contains(&found));
                if let Some((made, shown)) = found.checked_sub(1).map(|last| &made[last]) {
                    let mut then = Snapshots::new(seed);
                    (then.world.model, then.shown) = (made.after.clone(), shown.clone());
                    then.check_all(&tier).await;
                    check_fsck(&tier).await;
                    tier.sweep_orphans().await.unwrap();
                    reclaim_all(&tier).await;
                    then.check_all(&tier).await;
                    check_fsck(&tier).await;
                }
                tier.close().await.unwrap();
                done = found;
            });
        }
        assert!(done > 3, "SEED={seed}: hardly anything came through");
    }
}

async fn stored_bytes(store: &dyn ObjectStore) -> u64 {
    let folder = Path::from(crate::segment::FOLDER);
    let found: Vec<_> = store.list(Some(&folder)).try_collect().await.unwrap();
    found.iter().map(|object| object.size).sum()
}

/// Pages that were only partly overwritten have no copies. Blocks that they still count for a
/// snapshot are found even if the pages are not written any more.
#[test]
fn space_is_reclaimed_without_further_writes() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut opened = options(store.clone(), 1);
        opened.segment_bytes = 1 << 20;
        let tier = Tier::open(opened).await.unwrap();
        let mut rng = Rng::new(4);
        let mut window = plain_window(1, Vec::new());
        let content = ExtentContent::Data(Bytes::from(rng.bytes(8 << 20, 100)));
        let extent = WindowExtent { start_sector: 0, sector_count: 16 << 10, content };
        window.volumes = vec![(VolumeId(1), vec![extent])];
        window.snapshots = vec![made(1)];
        tier.destage(window, &Payloads).await.unwrap();
        let one = stored_bytes(&*store).await;
        // Every other block, in a few windows.
        for lsn in 2..=5u64 {
            let mut extents = Extents::default();
            for block in (lsn - 2..2048).step_by(4).filter(|block| block % 2 == 0 || lsn > 3) {
                let payload = rng.bytes(BLOCK_BYTES as usize, 100).into();
                extents.insert(block * 8, block * 8 + 8, Some(payload));
            }
            let mut window = plain_window(lsn, Vec::new());
            window.volumes = vec![(VolumeId(1), extents.into_extents())];
            tier.destage(window, &Payloads).await.unwrap();
        }
        step_all(&tier).await;
        let two = stored_bytes(&*store).await;
        let mut window = plain_window(6, Vec::new());
        let lsn = Lsn(1);
        window.snapshots = vec![SnapshotChange::Removed { volume: VolumeId(1), lsn }];
        tier.destage(window, &Payloads).await.unwrap();
        step_all(&tier).await;
        reclaim_all(&tier).await;
        let rest = stored_bytes(&*store).await;
        assert!(two > one * 13 / 10, "{one}, then {two}");
        assert!(rest <= one * 21 / 20, "{one}, with the snapshot {two}, then {rest}");
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// A copy that does not verify keeps its volume from being pruned, but no other one.
#[test]
fn a_damaged_copy_does_not_keep_other_volumes_from_being_pruned() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store, 1)).await.unwrap();
        for lsn in 1..=40 {
            let extents = [1, 2].map(|volume| (volume, block_extent(lsn % 5, lsn as u8)));
            let mut window = plain_window(lsn, extents.to_vec());
            window.snapshots = if lsn == 3 { vec![made(1), made(2)] } else { Vec::new() };
            tier.destage(window, &Payloads).await.unwrap();
        }
        assert_eq!(check_fsck(&tier).await.copy_count, 2);
        let key = crate::map::keys::copy_key(LayerId(1), 0, Lsn(3));
        tier.parts.metadata.map.damage(&key).await;
        let mut window = plain_window(41, Vec::new());
        let removed = |volume| SnapshotChange::Removed { volume: VolumeId(volume), lsn: Lsn(3) };
        window.snapshots = vec![removed(1), removed(2)];
        tier.destage(window, &Payloads).await.unwrap();
        let mut failed = 0;
        for _ in 0..10 {
            failed += u32::from(tier.step(10).await.is_err());
        }
        assert!(failed > 0, "the damage is not noticed");
        assert_eq!(tier.status().map.prune_count, 1);
        let report = tier.fsck(FsckOptions::default()).await.unwrap();
        assert_eq!(report.copy_count, 1);
        let named = |line: &String| line.contains("copy 3 of page 0 of layer 1");
        assert!(report.differences.iter().any(named), "{report:?}");
        tier.close().await.unwrap();
    });
}
