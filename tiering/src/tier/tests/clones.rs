//! Clones, clones of clones and rollbacks, compared with a model of every volume and every
//! snapshot: under writes, trims, reclaim, folding, pruning, promoting and restarts, and with
//! seeded bugs that these tests must detect.

use super::*;
use crate::map::SnapshotChange;
use crate::seeded_bugs::SeededBugs;
use futures::FutureExt;
use std::panic::AssertUnwindSafe;

/// Present or past contents of one volume; the model's volume is 0.
type Held = Arc<Model>;

pub(super) struct Clones {
    pub(super) world: World,
    pub(super) live: BTreeMap<u32, Held>,
    pub(super) shown: BTreeMap<(u32, Lsn), Held>,
    pub(super) next_volume: u32,
    rollback_count: u32,
    /// States that may exist after a crash now, the newest last.
    possible: Vec<State>,
}

/// Contents of volumes and of snapshots.
type State = (BTreeMap<u32, Held>, BTreeMap<(u32, Lsn), Held>);

const VOLUMES_MAX: usize = 6;

impl Clones {
    pub(super) fn new(seed: u64) -> Clones {
        let live: BTreeMap<u32, Held> = [(1, Held::default()), (2, Held::default())].into();
        let (world, shown) = (World::new(seed), BTreeMap::new());
        let possible = vec![(live.clone(), shown.clone())];
        Clones { world, live, shown, next_volume: 3, rollback_count: 0, possible }
    }

    fn state(&self) -> State {
        (self.live.clone(), self.shown.clone())
    }

    /// Updates the model after a change of the volumes has succeeded.
    fn came(&mut self, state: State) {
        (self.live, self.shown) = state;
        self.possible = vec![self.state()];
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.world.rng.below(bound.max(1) as u64) as usize
    }

    fn any_volume(&mut self) -> u32 {
        let index = self.below(self.live.len());
        *self.live.keys().nth(index).expect("volume 1 is never removed")
    }

    fn any_snapshot(&mut self) -> Option<(u32, Lsn)> {
        let index = self.below(self.shown.len());
        self.shown.keys().nth(index).copied()
    }

    /// Makes a window of writes and trims, each with its volume, and applies it to the model. Newer
    /// extents cut older ones.
    pub(super) fn window_of(&mut self, ops: Vec<(u32, AnyOp)>) -> Window<Bytes> {
        let mut volumes: BTreeMap<u32, Extents> = BTreeMap::new();
        for (volume, (start, end, content)) in ops {
            self.world.lsn += 1;
            volumes.entry(volume).or_default().insert(start, end, content);
        }
        for (volume, extents) in &volumes {
            let model = Arc::make_mut(self.live.get_mut(volume).expect("it is there"));
            for (start, (end, content)) in &extents.0 {
                apply(model, 0, *start, *end, content.as_ref());
            }
        }
        let mut window = plain_window(self.world.lsn, Vec::new());
        window.volumes = volumes
            .into_iter()
            .map(|(volume, extents)| (VolumeId(volume), extents.into_extents()))
            .collect();
        window
    }

    /// Removes a snapshot at the end of a window, even one that a clone depends on: its base is
    /// kept.
    pub(super) fn without_snapshot(&mut self, window: &mut Window<Bytes>, at: (u32, Lsn)) {
        self.shown.remove(&at);
        let (volume, lsn) = (VolumeId(at.0), at.1);
        window.snapshots.push(SnapshotChange::Removed { volume, lsn });
    }

    /// Makes a snapshot at the end of a window.
    pub(super) fn with_snapshot(&mut self, window: &mut Window<Bytes>, volume: u32) {
        let record = Bytes::from_static(b"one");
        window.snapshots.push(SnapshotChange::Made { volume: VolumeId(volume), record });
        self.shown.insert((volume, window.last_lsn), self.live[&volume].clone());
    }

    /// Makes a window of writes and trims of some volumes, possibly with snapshots at its end.
    fn window(&mut self, op_count: u64) -> Window<Bytes> {
        let ops = (0..op_count).map(|_| (self.any_volume(), self.world.any_op())).collect();
        let mut window = self.window_of(ops);
        if self.below(4) == 0
            && let Some(at) = self.any_snapshot()
        {
            self.without_snapshot(&mut window, at);
        }
        if self.below(3) == 0 {
            let volume = self.any_volume();
            self.with_snapshot(&mut window, volume);
        }
        window
    }

    /// Destages a window of writes, trims and snapshots.
    pub(super) async fn write(&mut self, tier: &Tier, op_count: u64) -> Result<()> {
        let window = self.window(op_count);
        self.destage(tier, window).await
    }

    /// Destages a window that is already applied to the model.
    pub(super) async fn destage(&mut self, tier: &Tier, window: Window<Bytes>) -> Result<()> {
        let after = self.state();
        self.possible.push(after.clone());
        tier.destage(window, &Payloads).await.map_err(|failed| failed.error)?;
        self.came(after);
        Ok(())
    }

    /// Clones, rolls back, promotes or removes.
    pub(super) async fn change(&mut self, tier: &Tier) -> Result<()> {
        match self.below(8) {
            0 | 1 if self.live.len() < VOLUMES_MAX => match self.any_snapshot() {
                Some(at) => self.clone_of(tier, at).await,
                None => Ok(()),
            },
            2 => match self.any_snapshot() {
                Some(at) => self.roll_back(tier, at).await,
                None => Ok(()),
            },
            3 => {
                let volume = self.any_volume();
                self.promote(tier, volume).await
            }
            4 => {
                let volume = self.any_volume();
                self.remove_if_alone(tier, volume).await
            }
            _ => Ok(()),
        }
    }

    /// Clones a volume from a snapshot, unless there are too many volumes.
    pub(super) async fn clone_of(&mut self, tier: &Tier, (source, at): (u32, Lsn)) -> Result<()> {
        if self.live.len() >= VOLUMES_MAX {
            return Ok(());
        }
        let (volume, record) = (self.next_volume, Bytes::from_static(b"a clone"));
        self.next_volume += 1;
        let held = self.shown[&(source, at)].clone();
        tier.volume_keys().assign(VolumeId(volume), tier.volume_keys().of(VolumeId(source)));
        let made = tier.clone_volume((VolumeId(source), at), VolumeId(volume), record);
        self.becomes(volume, held, made).await
    }

    /// Rolls a volume back to one of its own snapshots, if that still exists.
    pub(super) async fn roll_back(&mut self, tier: &Tier, (volume, at): (u32, Lsn)) -> Result<()> {
        if !self.live.contains_key(&volume) {
            return Ok(());
        }
        self.world.lsn += 1;
        let since = Lsn(self.world.lsn);
        let destaged = tier.destage(plain_window(since.0, Vec::new()), &Payloads).await;
        destaged.map_err(|failed| failed.error)?;
        let held = self.shown[&(volume, at)].clone();
        self.rollback_count += 1;
        self.becomes(volume, held, tier.roll_back(VolumeId(volume), at, since, None)).await
    }

    pub(super) async fn promote(&mut self, tier: &Tier, volume: u32) -> Result<()> {
        let volume = VolumeId(volume);
        let has_origin = tier.origin(volume).is_some();
        assert_eq!(tier.promote(volume).await?, has_origin);
        Ok(())
    }

    /// Removes a volume, unless it is one of the first two or has snapshots.
    pub(super) async fn remove_if_alone(&mut self, tier: &Tier, volume: u32) -> Result<()> {
        let has_snapshots = self.shown.keys().any(|(of, _)| *of == volume);
        match volume > 2 && !has_snapshots {
            true => self.remove(tier, volume).await,
            false => Ok(()),
        }
    }

    /// Sets the contents of a volume once `made` has succeeded.
    async fn becomes(
        &mut self,
        volume: u32,
        held: Held,
        made: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let mut after = self.state();
        after.0.insert(volume, held);
        self.possible.push(after.clone());
        match made.await {
            Ok(()) => self.came(after),
            Err(error) if error.kind() == ErrorKind::Busy => drop(self.possible.pop()),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn remove(&mut self, tier: &Tier, volume: u32) -> Result<()> {
        // Regardless of the remaining steps, the volume is no longer read.
        self.live.remove(&volume);
        self.possible = vec![self.state()];
        self.world.lsn += 1;
        let pages = 0..(99 << 40) / PAGE_BYTES;
        let destaged = tier.destage(trim_window(self.world.lsn, volume, pages), &Payloads).await;
        destaged.map_err(|failed| failed.error)?;
        tier.retire(VolumeId(volume)).await
    }

    pub(super) async fn check_some(&mut self, tier: &Tier, count: u64) {
        for _ in 0..count {
            let at = if self.below(2) == 0 { self.any_snapshot() } else { None };
            let (volume, at) = match at {
                Some((volume, at)) => (volume, Some(at)),
                None => (self.any_volume(), None),
            };
            let rng = &mut self.world.rng;
            let length_max = if rng.below(4) == 0 { 600_000 } else { 9000 };
            let length = 1 + rng.below(length_max);
            let offset = ZONES[rng.below(2) as usize] + rng.below(ZONE_BYTES);
            self.check(tier, (volume, at), offset, length as usize).await;
        }
    }

    async fn check(
        &self,
        tier: &Tier,
        (volume, at): (u32, Option<Lsn>),
        offset: u64,
        length: usize,
    ) {
        let mut buf = vec![0xaa; length];
        let held = match at {
            None => {
                tier.read(VolumeId(volume), offset, &mut buf).await.unwrap();
                &self.live[&volume]
            }
            Some(at) => {
                tier.read_at(VolumeId(volume), at, offset, &mut buf).await.unwrap();
                &self.shown[&(volume, at)]
            }
        };
        let want = expected(held, 0, offset, length);
        let differs = buf.iter().zip(&want).position(|(a, b)| a != b);
        assert_eq!(differs, None, "volume {volume} at {at:?}, offset {offset}, length {length}");
    }

    pub(super) async fn check_all(&self, tier: &Tier) {
        let live = self.live.keys().map(|volume| (*volume, None));
        let shown = self.shown.keys().map(|(volume, at)| (*volume, Some(*at)));
        for (volume, at) in live.chain(shown) {
            for zone in ZONES {
                let length = (ZONE_BYTES + 2 * PAGE_BYTES) as usize;
                self.check(tier, (volume, at), zone, length).await;
                let held = at.map_or_else(|| &self.live[&volume], |at| &self.shown[&(volume, at)]);
                let want = expected(held, 0, zone, length);
                check_holes(tier, (volume, at), zone, &want).await;
            }
        }
        self.check_differences(tier).await;
    }

    /// Compares consecutive snapshots of a volume, also across a rollback: ranges that are not
    /// reported must be equal.
    async fn check_differences(&self, tier: &Tier) {
        let pairs = self.shown.iter().zip(self.shown.iter().skip(1));
        for (((volume, older), then), ((_, newer), now)) in pairs.filter(|(a, b)| a.0.0 == b.0.0) {
            for zone in ZONES {
                let end = zone + ZONE_BYTES + PAGE_BYTES;
                let mut differs = vec![false; (end - zone) as usize];
                let mut next = Some(zone);
                while let Some(start) = next {
                    let (id, lsns) = (VolumeId(*volume), (*older, *newer));
                    let (found, after) = tier.differences(id, lsns, start..end, 3).await.unwrap();
                    for extent in found {
                        let at = (extent.offset - zone) as usize;
                        differs[at..at + extent.length_bytes as usize].fill(true);
                    }
                    next = after;
                }
                let then = expected(then, 0, zone, differs.len());
                let now = expected(now, 0, zone, differs.len());
                for (at, differs) in differs.into_iter().enumerate() {
                    let is_same = then[at] == now[at];
                    assert!(differs || is_same, "volume {volume}, {older} to {newer}, {at}");
                }
            }
        }
    }
}

async fn check_holes(tier: &Tier, (volume, at): (u32, Option<Lsn>), offset: u64, want: &[u8]) {
    let volume = VolumeId(volume);
    let mut done = 0;
    while done < want.len() {
        let (from, rest) = (offset + done as u64, (want.len() - done) as u64);
        let extents = match at {
            None => tier.allocation(volume, from, rest, 7).await.unwrap(),
            Some(at) => tier.allocation_at(volume, at, (from, rest), 7).await.unwrap(),
        };
        assert!(!extents.is_empty() && extents.len() <= 7);
        for extent in extents {
            let end = done + extent.length_bytes as usize;
            let is_zero = want[done..end].iter().all(|byte| *byte == 0);
            assert_eq!(extent.is_hole, is_zero, "volume {volume} at {at:?}, {done}");
            done = end;
        }
    }
}

/// Folds, prunes, promotes and forgets everything.
pub(super) async fn step_all(tier: &Tier) {
    while tier.step(50).await.unwrap().page_count > 0 {}
}

pub(super) async fn random_history(seed: u64, seeded_bugs: SeededBugs) -> u32 {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let open = async |epoch| {
        let mut opened = options(store.clone(), epoch);
        opened.seeded_bugs = seeded_bugs;
        let tier = Tier::open(opened).await.unwrap();
        tier.load_fingerprints().await.unwrap();
        tier
    };
    let mut clones = Clones::new(seed);
    let mut tier = open(1).await;
    let mut forgotten_count = 0;
    for turn in 0..60 {
        let op_count = 1 + clones.world.rng.below(40);
        clones.write(&tier, op_count).await.unwrap();
        clones.change(&tier).await.unwrap();
        for _ in 0..clones.below(4) {
            tier.step(1 + clones.below(20)).await.unwrap();
        }
        if clones.below(3) == 0 {
            reclaim_all(&tier).await;
        }
        if turn % 3 == 0 {
            tier.sweep_again();
            while tier.sweep_back_references(20).await.unwrap() {}
        }
        clones.check_some(&tier, 15).await;
        if turn % 10 == 9 {
            clones.check_all(&tier).await;
            check_fsck(&tier).await;
            let status = tier.reclaim_status();
            assert_eq!(status.stuck_count, 0);
            forgotten_count += status.forgotten_count;
            tier.close().await.unwrap();
            tier = open(2 + turn).await;
        }
    }
    // A single remaining volume must be as if it had never had relatives.
    let removed = clones.shown.keys();
    let removed = removed
        .map(|(volume, lsn)| SnapshotChange::Removed { volume: VolumeId(*volume), lsn: *lsn });
    clones.world.lsn += 1;
    let mut window = plain_window(clones.world.lsn, Vec::new());
    window.snapshots = removed.collect();
    tier.destage(window, &Payloads).await.unwrap();
    clones.shown.clear();
    let others: Vec<u32> = clones.live.keys().copied().filter(|volume| *volume > 1).collect();
    let kept = *others.last().expect("volume 2 is there");
    tier.promote(VolumeId(kept)).await.unwrap();
    for volume in others.into_iter().chain([1]).filter(|volume| *volume != kept) {
        clones.remove(&tier, volume).await.unwrap();
    }
    for _ in 0..4 {
        step_all(&tier).await;
        reclaim_all(&tier).await;
    }
    assert_eq!(tier.origin(VolumeId(kept)), None);
    clones.check_all(&tier).await;
    let report = check_fsck(&tier).await;
    assert_eq!((report.snapshot_count, report.copy_count), (0, 0));
    let space = tier.reclaim_status().space.unwrap();
    assert!(report.object_bytes * 100 <= space.live_bytes * 115, "{space:?}");
    assert!(forgotten_count > 20, "{forgotten_count} segments");
    tier.close().await.unwrap();
    clones.rollback_count
}

#[test]
fn every_clone_shows_its_own_writes_and_its_origin() {
    let mut rollback_count = 0;
    for seed in seeds(2) {
        println!("SEED={seed}");
        rollback_count += runtime().block_on(random_history(seed, SeededBugs::default()));
    }
    assert!(rollback_count > 0, "nothing was rolled back");
}

#[test]
fn seeded_bugs_are_noticed() {
    let of = |bug: fn(&mut SeededBugs)| {
        let mut seeded_bugs = SeededBugs::default();
        bug(&mut seeded_bugs);
        seeded_bugs
    };
    let all = [
        of(|bugs| bugs.reclaim_without_clones = true),
        of(|bugs| bugs.base_uncounted = true),
        of(|bugs| bugs.range_uncovers_base = true),
        of(|bugs| bugs.promoted_over_newer = true),
    ];
    for seeded_bugs in all {
        let is_noticed = (1..=10).any(|seed| {
            let run = AssertUnwindSafe(random_history(seed, seeded_bugs)).catch_unwind();
            runtime().block_on(run).is_err()
        });
        assert!(is_noticed, "{seeded_bugs:?} goes unnoticed");
    }
}

/// Runs writes, clones, rollbacks and reads while reclaim, folding, pruning and promoting run.
pub(super) async fn together(seed: u64) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let tier = Tier::open(options(store, 1)).await.unwrap();
    let mut clones = Clones::new(seed);
    let reclaiming = {
        let tier = tier.clone();
        tokio::spawn(async move {
            loop {
                look_again(&tier);
                while !tier.reclaim_step(EAGER).await.unwrap().is_idle {
                    tokio::task::yield_now().await;
                }
                let _ = tier.sweep_abandoned().await.unwrap();
                tier.step(5).await.unwrap();
                tier.sweep_again();
                while tier.sweep_back_references(20).await.unwrap() {}
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    for _ in 0..60 {
        let op_count = 1 + clones.world.rng.below(40);
        clones.write(&tier, op_count).await.unwrap();
        clones.change(&tier).await.unwrap();
        clones.check_some(&tier, 25).await;
    }
    reclaiming.abort();
    match reclaiming.await {
        Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
        _ => {}
    }
    clones.check_all(&tier).await;
    check_fsck(&tier).await;
    let status = tier.reclaim_status();
    assert!(status.forgotten_count > 10, "{status:?}");
    assert_eq!(status.stuck_count, 0);
    tier.close().await.unwrap();
}

#[test]
fn clones_are_read_while_space_is_reclaimed() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(together(seed));
    }
}

impl Clones {
    /// Finds the state after a crash: the operation under way is either complete or has no effect.
    /// Returns whether there was one.
    pub(super) async fn settle(&mut self, tier: &Tier) -> bool {
        self.world.lsn = self.world.lsn.max(tier.destaged_lsn().0);
        let mut possible = std::mem::take(&mut self.possible);
        let is_ambiguous = possible.len() > 1;
        loop {
            let newest = possible.pop().expect("nothing that once was is there");
            self.came(newest);
            if self.is_there(tier).await {
                return is_ambiguous;
            }
        }
    }

    /// Returns whether the volumes and snapshots match the model.
    async fn is_there(&self, tier: &Tier) -> bool {
        let mut found: Vec<(u32, Lsn)> =
            tier.snapshots().into_iter().map(|(volume, lsn, _)| (volume.0, lsn)).collect();
        found.sort_unstable();
        let mut is_same = found == self.shown.keys().copied().collect::<Vec<_>>();
        for (volume, held) in &self.live {
            for zone in ZONES {
                let mut buf = vec![0xaa; ZONE_BYTES as usize];
                tier.read(VolumeId(*volume), zone, &mut buf).await.unwrap();
                is_same &= buf == expected(held, 0, zone, buf.len());
            }
        }
        is_same
    }
}

/// The process ends at an arbitrary request to the store, also while a clone is made or a volume
/// rolled back. Finished operations are retained, and the one under way is either complete or has
/// no effect.
#[test]
pub(super) fn a_crash_at_any_request_leaves_every_clone_as_it_was() {
    let (mut ambiguous_count, mut seed_count, mut cloned_count) = (0, 0, 0);
    // Requests of the database's own tasks count, too, so the number of clones depends on timing. More
    // seeds follow until enough were made, unless the seeds were chosen by the caller.
    let wanted = seeds(4);
    let further = seeds(12).into_iter().filter(|seed| !wanted.contains(seed));
    let enough = 2 * u32::try_from(wanted.len()).unwrap();
    for seed in wanted.iter().copied().chain(further) {
        if seed_count >= wanted.len() && cloned_count > enough && ambiguous_count > 3 {
            break;
        }
        println!("SEED={seed}");
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut clones = Clones::new(seed);
        let first = clones.next_volume;
        for epoch in 1..=12 {
            let store = Arc::new(FaultStore::new(shared.clone()));
            let calls = 10 + clones.below(250) as u64;
            let life = runtime();
            life.block_on(async {
                let work = async {
                    let tier = Tier::open(options(store.clone(), 2 * epoch)).await?;
                    store.go_away_after(calls);
                    loop {
                        let op_count = 1 + clones.world.rng.below(20);
                        clones.write(&tier, op_count).await?;
                        clones.change(&tier).await?;
                        look_again(&tier);
                        while !tier.reclaim_step(EAGER).await?.is_idle {}
                        tier.sweep_abandoned().await?;
                        tier.step(10).await?;
                    }
                };
                let death = async {
                    while !store.is_away() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                let ended: Result<()> = tokio::select! {
                    ended = work => ended,
                    () = death => Ok(()),
                };
                assert!(ended.is_ok() || store.is_away(), "{ended:?}");
            });
            // End all tasks of this run.
            drop(life);
            runtime().block_on(async {
                let tier = Tier::open(options(shared.clone(), 2 * epoch + 1)).await.unwrap();
                ambiguous_count += u32::from(clones.settle(&tier).await);
                clones.check_all(&tier).await;
                check_fsck(&tier).await;
                step_all(&tier).await;
                tier.sweep_orphans().await.unwrap();
                reclaim_all(&tier).await;
                clones.check_all(&tier).await;
                check_fsck(&tier).await;
                tier.close().await.unwrap();
            });
        }
        // A single seed may make few clones.
        (seed_count, cloned_count) = (seed_count + 1, cloned_count + clones.next_volume - first);
    }
    assert!(cloned_count > enough, "hardly anything was cloned: {cloned_count}");
    assert!(ambiguous_count > 3, "no life ended while anything was under way");
}

/// A range that is older than a snapshot, and not folded when the volume is rolled back to it.
#[test]
fn blocks_trimmed_before_a_snapshot_stay_trimmed_after_rollback() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store, 1)).await.unwrap();
        let made = |volume: u32| {
            let record = Bytes::from_static(b"one");
            SnapshotChange::Made { volume: VolumeId(volume), record }
        };
        let mut window = plain_window(1, vec![(1, block_extent(800, 7))]);
        window.snapshots = vec![made(1)];
        tier.destage(window, &Payloads).await.unwrap();
        let clone = VolumeId(2);
        let record = Bytes::from_static(b"a clone");
        tier.clone_volume((VolumeId(1), Lsn(1)), clone, record).await.unwrap();
        let mut window = trim_window(2, 2, 0..40);
        window.snapshots = vec![made(2)];
        tier.destage(window, &Payloads).await.unwrap();
        tier.destage(plain_window(3, Vec::new()), &Payloads).await.unwrap();
        let error = tier.roll_back(clone, Lsn(2), Lsn(4), None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        tier.roll_back(clone, Lsn(2), Lsn(3), None).await.unwrap();
        let check = async || {
            let mut buf = [0xaa; 4096];
            tier.read(clone, 800 * BLOCK_BYTES, &mut buf).await.unwrap();
            assert_eq!(buf, [0; 4096]);
            tier.read_at(clone, Lsn(2), 800 * BLOCK_BYTES, &mut buf).await.unwrap();
            assert_eq!(buf, [0; 4096]);
            check_fsck(&tier).await;
        };
        check().await;
        step_all(&tier).await;
        tier.parts.metadata.map.forget_pages();
        check().await;
        tier.close().await.unwrap();
    });
}

/// Ranges hidden while the volume still existed must not keep its source.
#[test]
fn a_removed_clone_leaves_nothing_whenever_its_end_was_folded() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store, 1)).await.unwrap();
        let mut window = plain_window(1, vec![(1, block_extent(3, 7))]);
        let record = Bytes::from_static(b"one");
        window.snapshots = vec![SnapshotChange::Made { volume: VolumeId(1), record }];
        tier.destage(window, &Payloads).await.unwrap();
        let clone = VolumeId(2);
        let record = Bytes::from_static(b"a clone");
        tier.clone_volume((VolumeId(1), Lsn(1)), clone, record).await.unwrap();
        assert_eq!(tier.dependents(VolumeId(1), Lsn(1)), [clone]);
        tier.destage(trim_window(2, 2, 0..(99 << 40) / PAGE_BYTES), &Payloads).await.unwrap();
        step_all(&tier).await;
        tier.retire(clone).await.unwrap();
        assert!(!tier.is_retirable(clone));
        step_all(&tier).await;
        assert_eq!(tier.dependents(VolumeId(1), Lsn(1)), []);
        assert!(
            tier.parts.metadata.map.layers().get(LayerId(2)).is_none(),
            "its layer is forgotten"
        );
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// However often a volume is rolled back, it can be rolled back again once it is independent.
#[test]
fn a_volume_is_rolled_back_any_number_of_times() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store, 1)).await.unwrap();
        let volume = VolumeId(1);
        let mut busy_count = 0;
        for round in 0..40 {
            let lsn = 1 + 2 * round;
            let mut window = plain_window(lsn, vec![(1, block_extent(round, 1 + round as u8))]);
            let record = Bytes::from_static(b"one");
            window.snapshots = vec![SnapshotChange::Made { volume, record }];
            tier.destage(window, &Payloads).await.unwrap();
            tier.destage(plain_window(lsn + 1, Vec::new()), &Payloads).await.unwrap();
            if let Err(error) = tier.roll_back(volume, Lsn(lsn), Lsn(lsn + 1), None).await {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                busy_count += 1;
                step_all(&tier).await;
                tier.roll_back(volume, Lsn(lsn), Lsn(lsn + 1), None).await.unwrap();
            }
        }
        assert!(busy_count > 0 && busy_count < 5, "{busy_count}");
        for block in 0..40 {
            let mut buf = [0xaa; 4096];
            tier.read(volume, block * BLOCK_BYTES, &mut buf).await.unwrap();
            assert_eq!(buf, [1 + block as u8; 4096]);
        }
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}
