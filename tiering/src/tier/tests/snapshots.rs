//! Snapshots against a model of each: under writes, trims, reclaim, pruning, folding and restarts, and
//! with bugs that these tests must notice.

use super::reclaim::EAGER;
use super::*;
use crate::map::SnapshotChange;
use crate::planted::Planted;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;

/// A pool with two volumes, what they hold, and what each living snapshot shows.
struct Snapshots {
    world: World,
    shown: BTreeMap<(u32, Lsn), Arc<Model>>,
}

impl Snapshots {
    fn new(seed: u64) -> Snapshots {
        Snapshots { world: World::new(seed), shown: BTreeMap::new() }
    }

    /// A window at whose end there may be snapshots, and in which some may be removed.
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
        let found: Vec<(u32, Lsn)> =
            tier.snapshots().into_iter().map(|(volume, lsn, _)| (volume.0, lsn)).collect();
        assert_eq!(found, self.shown.keys().copied().collect::<Vec<_>>());
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

fn look_again(tier: &Tier) {
    tier.inner.reclaim.look_again();
}

async fn reclaim_all(tier: &Tier) {
    look_again(tier);
    while !tier.reclaim_step(EAGER).await.unwrap().is_idle {}
    sweep_all_abandoned(tier).await;
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

async fn random_history(seed: u64, planted: Planted) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let open = async |epoch| {
        let mut opened = options(store.clone(), epoch);
        opened.planted = planted;
        Tier::open(opened).await.unwrap()
    };
    let mut snapshots = Snapshots::new(seed);
    let mut tier = open(1).await;
    let mut forgotten_count = 0;
    for turn in 0..40 {
        let op_count = 1 + snapshots.world.rng.below(40);
        let window = snapshots.window(op_count);
        tier.destage(window, &Payloads).await.unwrap();
        if snapshots.world.rng.below(2) == 0 {
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
    // Without its snapshots a pool is as if it had never had any.
    let removed = snapshots.shown.keys();
    let removed = removed
        .map(|(volume, lsn)| SnapshotChange::Removed { volume: VolumeId(*volume), lsn: *lsn });
    let mut window = plain_window(snapshots.world.lsn + 1, Vec::new());
    window.snapshots = removed.collect();
    tier.destage(window, &Payloads).await.unwrap();
    snapshots.shown.clear();
    step_all(&tier).await;
    // What was counted for the snapshots' sake is found out when the first segments are looked into.
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
fn every_snapshot_shows_what_was_there_whatever_comes_after() {
    for seed in seeds(6) {
        println!("SEED={seed}");
        runtime().block_on(random_history(seed, Planted::default()));
    }
}

#[test]
fn planted_bugs_are_noticed() {
    let of = |bug: fn(&mut Planted)| {
        let mut planted = Planted::default();
        bug(&mut planted);
        planted
    };
    let all = [
        of(|planted| planted.reclaim_without_snapshots = true),
        of(|planted| planted.copies_forgotten = true),
        of(|planted| planted.pruned_too_much = true),
        of(|planted| planted.kept_uncounted = true),
    ];
    for planted in all {
        let is_noticed = (1..=10).any(|seed| {
            let run = AssertUnwindSafe(random_history(seed, planted)).catch_unwind();
            runtime().block_on(run).is_err()
        });
        assert!(is_noticed, "{planted:?} goes unnoticed");
    }
}
