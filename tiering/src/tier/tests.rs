//! The tier against a model in memory, over stores that fail, die, and are damaged.

mod keep;

use super::*;
use crate::destage::{ExtentContent, WindowExtent};
use crate::map::ranges::RANGE_PAGES_MIN;
use crate::testing::{Fault, FaultStore, Op, Rng, seeds};
use block::units::SECTOR_BYTES;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;
use tokio::runtime::Runtime;

const SECTOR: usize = SECTOR_BYTES as usize;
const PAGE_SECTORS: u64 = PAGE_BYTES / SECTOR_BYTES;
/// Where the model's volumes have data: near the start, and far out.
const ZONES: [u64; 2] = [0, 40 << 40];
const ZONE_BYTES: u64 = 5 << 20;

struct Payloads;

impl LogSource for Payloads {
    type Handle = Bytes;

    async fn read(&self, handle: &Bytes) -> Result<Bytes> {
        Ok(handle.clone())
    }
}

fn options(store: Arc<dyn ObjectStore>, epoch: u64) -> TierOptions {
    let key = PoolKey::new([0x42; 32]);
    let mut options = TierOptions::new(store, [7; 16], key, Epoch(epoch));
    options.segment_bytes = 256 << 10;
    options.database.poll_interval = Duration::from_millis(20);
    options.open_timeout = Duration::from_secs(20);
    options
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// What a volume must read as: sectors that are not zero.
type Model = HashMap<(u32, u64), [u8; SECTOR]>;

/// Extents of a window by first sector: end, and payload or zero. A newer one cuts an older one.
#[derive(Clone, Default)]
struct Extents(BTreeMap<u64, (u64, Option<Bytes>)>);

impl Extents {
    fn insert(&mut self, start: u64, end: u64, content: Option<Bytes>) {
        let touched: Vec<u64> = self
            .0
            .range(..end)
            .filter(|(_, (old_end, _))| *old_end > start)
            .map(|(old_start, _)| *old_start)
            .collect();
        for old_start in touched {
            let (old_end, old) = self.0.remove(&old_start).unwrap();
            let part = |from: u64, to: u64| {
                old.as_ref().map(|bytes| {
                    let at = |sector: u64| ((sector - old_start) * SECTOR_BYTES) as usize;
                    bytes.slice(at(from)..at(to))
                })
            };
            if old_start < start {
                self.0.insert(old_start, (start, part(old_start, start)));
            }
            if old_end > end {
                self.0.insert(end, (old_end, part(end, old_end)));
            }
        }
        self.0.insert(start, (end, content));
    }
}

/// Makes windows, and keeps what they mean.
struct World {
    rng: Rng,
    model: Model,
    lsn: u64,
}

#[derive(Clone)]
struct Made {
    window: Window<Bytes>,
    after: Model,
}

impl World {
    fn new(seed: u64) -> World {
        World { rng: Rng::new(seed), model: Model::new(), lsn: 0 }
    }

    fn window(&mut self, op_count: u64) -> Made {
        let mut volumes: BTreeMap<u32, Extents> = BTreeMap::new();
        for _ in 0..op_count {
            let volume = 1 + self.rng.below(2) as u32;
            self.lsn += 1;
            let (start, end, content) = self.any_op();
            volumes.entry(volume).or_default().insert(start, end, content);
        }
        let mut after = self.model.clone();
        for (volume, extents) in &volumes {
            for (start, (end, content)) in &extents.0 {
                apply(&mut after, *volume, *start, *end, content.as_ref());
            }
        }
        let volume_records = (0..self.rng.below(2))
            .map(|_| (VolumeId(1), Bytes::from(format!("record at {}", self.lsn))))
            .collect();
        let volumes = volumes
            .into_iter()
            .map(|(volume, extents)| (VolumeId(volume), extents.into_extents()))
            .collect();
        let window = Window {
            last_lsn: Lsn(self.lsn),
            volume_records,
            volumes,
            asides: Vec::new(),
            is_late: false,
        };
        Made { window, after }
    }

    fn any_op(&mut self) -> (u64, u64, Option<Bytes>) {
        let rng = &mut self.rng;
        let zone = ZONES[rng.below(2) as usize] / SECTOR_BYTES;
        let zone_sectors = ZONE_BYTES / SECTOR_BYTES;
        let kind = rng.below(100);
        if kind < 3 {
            // Everything between the zones and beyond, from some sector on.
            let start = zone + rng.below(zone_sectors);
            return (start, (99 << 40) / SECTOR_BYTES, None);
        }
        if kind < 6 {
            let pages = u64::from(RANGE_PAGES_MIN) + rng.below(40);
            let start = zone + rng.below(zone_sectors);
            return (start, start + pages * PAGE_SECTORS, None);
        }
        let sectors = match rng.below(4) {
            0 => 1 + rng.below(15),
            1 => 8 * (1 + rng.below(4)),
            2 => 8 * (1 + rng.below(100)),
            _ => 1 + rng.below(1000),
        };
        let mut start = zone + rng.below(zone_sectors - sectors);
        if rng.below(2) == 0 {
            start = start / 8 * 8;
        }
        let content = match rng.below(10) {
            0 => None,
            1 => Some(vec![0; sectors as usize * SECTOR]),
            _ => Some(rng.bytes(sectors as usize * SECTOR, 40)),
        };
        (start, start + sectors, content.map(Bytes::from))
    }
}

impl Extents {
    fn into_extents(self) -> Vec<WindowExtent<Bytes>> {
        let extents = self.0.into_iter().map(|(start_sector, (end, content))| WindowExtent {
            start_sector,
            sector_count: end - start_sector,
            content: content.map_or(ExtentContent::Zero, ExtentContent::Data),
        });
        extents.collect()
    }
}

fn apply(model: &mut Model, volume: u32, start: u64, end: u64, content: Option<&Bytes>) {
    match content {
        None => model.retain(|(of, sector), _| *of != volume || *sector < start || *sector >= end),
        Some(bytes) => {
            for (sector, bytes) in (start..end).zip(bytes.chunks_exact(SECTOR)) {
                if bytes.iter().all(|byte| *byte == 0) {
                    model.remove(&(volume, sector));
                } else {
                    model.insert((volume, sector), bytes.try_into().unwrap());
                }
            }
        }
    }
}

fn expected(model: &Model, volume: u32, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let end = offset + length as u64;
    for sector in offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
        let Some(data) = model.get(&(volume, sector)) else { continue };
        let from = (sector * SECTOR_BYTES).max(offset);
        let until = ((sector + 1) * SECTOR_BYTES).min(end);
        let within = (from - sector * SECTOR_BYTES) as usize;
        bytes[(from - offset) as usize..(until - offset) as usize]
            .copy_from_slice(&data[within..within + (until - from) as usize]);
    }
    bytes
}

async fn check_random_reads(tier: &Tier, model: &Model, rng: &mut Rng, count: u64) {
    for _ in 0..count {
        let volume = 1 + rng.below(2) as u32;
        let length_max = if rng.below(4) == 0 { 600_000 } else { 9000 };
        let length = 1 + rng.below(length_max);
        let offset = ZONES[rng.below(2) as usize] + rng.below(ZONE_BYTES);
        let mut buf = vec![0xaa; length as usize];
        tier.read(VolumeId(volume), offset, &mut buf).await.unwrap();
        assert!(
            buf == expected(model, volume, offset, buf.len()),
            "volume {volume}, offset {offset}, length {length}"
        );
    }
}

async fn check_all(tier: &Tier, model: &Model) {
    for volume in [1, 2] {
        for zone in ZONES {
            let mut buf = vec![0xaa; (ZONE_BYTES + 2 * PAGE_BYTES) as usize];
            tier.read(VolumeId(volume), zone, &mut buf).await.unwrap();
            let want = expected(model, volume, zone, buf.len());
            let differs = buf.iter().zip(&want).position(|(a, b)| a != b);
            assert_eq!(differs, None, "volume {volume}, zone {zone}");
            check_allocation(tier, volume, zone, &want).await;
        }
    }
}

async fn check_allocation(tier: &Tier, volume: u32, offset: u64, want: &[u8]) {
    let mut at = 0;
    while at < want.len() {
        let rest = (want.len() - at) as u64;
        let extents = tier.allocation(VolumeId(volume), offset + at as u64, rest, 7).await.unwrap();
        assert!(!extents.is_empty() && extents.len() <= 7);
        for extent in extents {
            let end = at + extent.length_bytes as usize;
            let is_zero = want[at..end].iter().all(|byte| *byte == 0);
            assert!(!extent.is_hole || is_zero, "data in a hole at {at}");
            if !extent.is_hole {
                // Blocks of zeroes are not stored, so every stored block has something in it.
                for block in want[at..end].chunks(BLOCK_BYTES as usize) {
                    assert!(block.iter().any(|byte| *byte != 0), "zeroes stored at {at}");
                }
            }
            at = end;
        }
    }
    assert_eq!(at, want.len());
}

async fn check_fsck(tier: &Tier) -> FsckReport {
    let report = tier.fsck(FsckOptions::default()).await.unwrap();
    assert_eq!(report.differences, Vec::<String>::new());
    report
}

async fn fold_all(tier: &Tier) {
    while tier.step(3).await.unwrap().ranges_left > 0 {}
}

#[test]
fn what_was_destaged_is_read_back_after_every_reopen() {
    for seed in seeds(4) {
        println!("SEED={seed}");
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(seed);
        for epoch in 1..=8 {
            // Nothing local: each life has a runtime and a tier of its own.
            runtime().block_on(async {
                let tier = Tier::open(options(store.clone(), epoch)).await.unwrap();
                assert_eq!(tier.destaged_lsn(), Lsn(world.lsn));
                check_all(&tier, &world.model).await;
                for _ in 0..1 + world.rng.below(4) {
                    let op_count = 1 + world.rng.below(60);
                    let made = world.window(op_count);
                    let records = made.window.volume_records.clone();
                    tier.destage(made.window, &Payloads).await.unwrap();
                    world.model = made.after;
                    assert_eq!(tier.destaged_lsn(), Lsn(world.lsn));
                    for record in records {
                        assert!(tier.volume_records().contains(&record));
                    }
                    check_random_reads(&tier, &world.model, &mut world.rng, 20).await;
                    if world.rng.below(3) == 0 {
                        tier.step(2).await.unwrap();
                    }
                }
                check_all(&tier, &world.model).await;
                check_fsck(&tier).await;
                if epoch % 2 == 0 {
                    fold_all(&tier).await;
                    check_all(&tier, &world.model).await;
                    check_fsck(&tier).await;
                }
                let swept = tier.sweep_orphans().await.unwrap();
                assert_eq!(swept.deleted_count, 0);
                tier.close().await.unwrap();
            });
        }
    }
}

/// One life that ends when the store has seen so many calls, of all or of those after opening.
/// Returns how many windows came through.
fn life_until_crash(
    store: Arc<FaultStore>,
    epoch: u64,
    made: &[Made],
    calls_after_open: Option<u64>,
) -> usize {
    let runtime = runtime();
    let done = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        let work = async {
            let tier = Tier::open(options(store.clone(), epoch)).await?;
            if let Some(count) = calls_after_open {
                store.go_away_after(count);
            }
            for made in made {
                tier.destage(made.window.clone(), &Payloads).await?;
                done.fetch_add(1, Ordering::SeqCst);
                tier.step(2).await?;
            }
            tier.close().await
        };
        let death = async {
            while !store.is_away() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            result = work => {
                assert!(result.is_ok() || store.is_away(), "{result:?}");
            }
            () = death => {}
        }
    });
    runtime.shutdown_background();
    done.load(Ordering::SeqCst) as usize
}

#[test]
fn a_crash_at_any_request_leaves_a_prefix_and_no_dangling_frame() {
    for seed in seeds(3) {
        println!("SEED={seed}");
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(seed);
        let mut done = 0;
        let mut made: Vec<Made> = Vec::new();
        let mut swept_count = 0;
        for epoch in 1..=12 {
            while made.len() < done + 4 {
                let op_count = 5 + world.rng.below(40);
                let next = world.window(op_count);
                world.model = next.after.clone();
                made.push(next);
            }
            let store = Arc::new(FaultStore::new(shared.clone()));
            let calls_after_open = (epoch % 4 != 0).then(|| world.rng.below(120));
            if calls_after_open.is_none() {
                store.go_away_after(world.rng.below(60));
            }
            let came_through = life_until_crash(store, 2 * epoch, &made[done..], calls_after_open);
            // What the store holds is the state after some window that is not older than the last
            // one that was answered.
            let runtime = runtime();
            runtime.block_on(async {
                let tier = Tier::open(options(shared.clone(), 2 * epoch + 1)).await.unwrap();
                let lsn = tier.destaged_lsn();
                let found = made.iter().take_while(|made| made.window.last_lsn <= lsn).count();
                assert!(
                    found >= done + came_through,
                    "SEED={seed}: {found}, {done}+{came_through}"
                );
                assert!(found <= done + came_through + 1);
                assert!(lsn == Lsn::NONE || made[found - 1].window.last_lsn == lsn);
                let empty = Model::new();
                let model = found.checked_sub(1).map_or(&empty, |last| &made[last].after);
                check_all(&tier, model).await;
                check_fsck(&tier).await;
                swept_count += tier.sweep_orphans().await.unwrap().deleted_count;
                check_all(&tier, model).await;
                check_fsck(&tier).await;
                tier.close().await.unwrap();
                done = found;
            });
        }
        assert!(done > 3, "SEED={seed}: hardly anything came through");
        println!("SEED={seed}: {done} windows, {swept_count} orphans");
    }
}

#[test]
fn transient_and_ambiguous_failures_are_waited_out() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store = Arc::new(FaultStore::default());
            let mut world = World::new(seed);
            let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
            for _ in 0..3 {
                let made = world.window(40);
                store.make_ambiguous(Op::Put, 2);
                store.fail_next(Op::Get, 1);
                tier.destage(made.window, &Payloads).await.unwrap();
                assert_eq!(tier.status().upload_failure, None, "found to have arrived");
                world.model = made.after;
                store.fail_next(Op::Put, 2);
                let made = world.window(40);
                tier.destage(made.window, &Payloads).await.unwrap();
                world.model = made.after;
            }
            assert!(tier.status().upload_retry_count > 0);
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

#[test]
fn an_upload_that_fails_shows_why_until_one_succeeds() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(7);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let made = world.window(40);
        store.set_away(true);
        let destage = {
            let tier = tier.clone();
            tokio::spawn(async move { tier.destage(made.window, &Payloads).await })
        };
        let failing = async {
            loop {
                match tier.status().upload_failure {
                    Some(failure) => return failure,
                    None => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            }
        };
        let failure = tokio::time::timeout(Duration::from_secs(30), failing).await.unwrap();
        assert!(!failure.error.is_empty() && failure.age <= failure.lasts, "{failure:?}");
        store.set_away(false);
        destage.await.unwrap().unwrap();
        assert_eq!(tier.status().upload_failure, None);
        tier.close().await.unwrap();
    });
}

fn window_of(lsn: u64, start: u64, bytes: Vec<u8>) -> Window<Bytes> {
    let extent = WindowExtent {
        start_sector: start,
        sector_count: bytes.len() as u64 / SECTOR_BYTES,
        content: ExtentContent::Data(bytes.into()),
    };
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes: vec![(VolumeId(1), vec![extent])],
        asides: Vec::new(),
        is_late: false,
    }
}

#[test]
fn a_destage_gets_over_bad_transfers_of_what_it_reads() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut uncached = options(store.clone(), 1);
        uncached.frames.memory_bytes = 0;
        uncached.frames.stream_bytes = 0;
        let tier = Tier::open(uncached).await.unwrap();
        tier.destage(window_of(1, 0, vec![1; 8192]), &Payloads).await.unwrap();
        // One sector of an old block: the rest of it is read from the store.
        for (lsn, fault) in [(2, Fault::Flipped), (3, Fault::Short)] {
            store.inject(Op::Get, "segments", 1, fault);
            let window = window_of(lsn, lsn, vec![lsn as u8; SECTOR]);
            let report = tier.destage(window, &Payloads).await.unwrap();
            assert_eq!((report.merged_block_count, store.clear_injected()), (1, 0));
        }
        assert_eq!(tier.status().frames.store_refetch_count, 1);
        // An upload whose answer was lost is compared with what is there.
        for fault in [Fault::Flipped, Fault::Short] {
            store.make_ambiguous(Op::Put, 1);
            store.inject(Op::Get, "segments", 1, fault);
            let lsn = tier.destaged_lsn().0 + 1;
            tier.destage(window_of(lsn, 64, vec![9; 4096]), &Payloads).await.unwrap();
            assert_eq!(store.clear_injected(), 0);
        }
        let mut buf = vec![0; 5 * SECTOR];
        tier.read(VolumeId(1), 0, &mut buf).await.unwrap();
        let first: Vec<u8> = buf.iter().step_by(SECTOR).copied().collect();
        assert_eq!(first, [1, 1, 2, 3, 1]);
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn a_window_given_twice_or_cancelled_is_destaged_once() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let store = Arc::new(FaultStore::new(shared));
            let mut world = World::new(seed);
            let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
            store.set_delay(Duration::from_millis(2));
            let mut cancelled_count = 0;
            for round in 0..10u64 {
                let made = world.window(30);
                let patience = Duration::from_millis(round * 3);
                let first =
                    tokio::time::timeout(patience, tier.destage(made.window.clone(), &Payloads));
                if first.await.is_err() {
                    cancelled_count += 1;
                    tier.destage(made.window.clone(), &Payloads).await.unwrap();
                }
                let again = tier.destage(made.window, &Payloads).await.unwrap();
                assert!(again.was_done);
                world.model = made.after;
            }
            assert!(cancelled_count > 2, "{cancelled_count} cancelled");
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            sweep_all_abandoned(&tier).await;
            let segments = check_fsck(&tier).await.segment_count;
            let found = tier.sweep_orphans().await.unwrap();
            assert_eq!(found.object_count, segments, "nothing but named segments is left");
            check_all(&tier, &world.model).await;
            tier.close().await.unwrap();
        });
    }
}

/// Returns how many it deleted.
async fn sweep_all_abandoned(tier: &Tier) -> u64 {
    let mut deleted_count = 0;
    while tier.status().abandoned_count > 0 {
        deleted_count += tier.sweep_abandoned().await.unwrap().deleted_count;
    }
    deleted_count
}

#[test]
fn an_abandoned_upload_is_deleted_in_this_epoch_and_kept_in_mind_until_it_is() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(1);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let made = world.window(30);
        // Uploaded, and never committed: the source fails at the last volume.
        let mut broken = made.window.clone();
        let (volume, extents) = broken.volumes.last().unwrap().clone();
        let short = WindowExtent {
            start_sector: 4096,
            sector_count: 8,
            content: ExtentContent::Data(Bytes::from_static(b"short")),
        };
        broken.volumes = vec![(volume, extents), (VolumeId(99), vec![short])];
        tier.destage(broken, &Payloads).await.unwrap_err();
        tier.destage(made.window, &Payloads).await.unwrap();
        // An upload that a failed commit has left may turn out to be committed.
        let named = tier.inner.map.segments_after(0, 1).await.unwrap()[0].0.info.object_path();
        tier.inner.orphans.abandon(vec![named.clone()]);
        let id = "00112233445566778899aabbccddeeff";
        let extra = Path::from(format!("segments/{:016x}/{:016x}-{id}", 1, 77_000));
        store.put(&extra, "abandoned".into()).await.unwrap();
        tier.inner.orphans.abandon(vec![extra.clone()]);
        let waiting = tier.status().abandoned_count;
        assert!(waiting >= 3, "{waiting}");

        store.fail_next(Op::Delete, 1);
        let error = tier.sweep_abandoned().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(tier.status().abandoned_count, waiting, "what was not deleted stays listed");
        assert_eq!(sweep_all_abandoned(&tier).await, waiting - 1);
        assert!(store.get(&extra).await.is_err());
        store.get(&named).await.unwrap();
        check_all(&tier, &made.after).await;
        let segments = check_fsck(&tier).await.segment_count;
        assert_eq!(tier.sweep_orphans().await.unwrap().object_count, segments);

        // Beyond its bound the list forgets the oldest; a sweep is a bounded number of requests.
        let path =
            |number: u64| Path::from(format!("segments/{:016x}/{:016x}-{id}", 1, 1000 + number));
        tier.inner.orphans.abandon((0..5000).map(path).collect());
        assert_eq!(tier.status().abandoned_count, 4096);
        store.put(&path(4999), "newest".into()).await.unwrap();
        let swept = tier.sweep_abandoned().await.unwrap();
        assert_eq!((swept.object_count, tier.status().abandoned_count), (32, 4064));
        sweep_all_abandoned(&tier).await;
        assert!(store.get(&path(4999)).await.is_err());
        tier.close().await.unwrap();
    });
}

#[test]
fn an_earlier_owner_is_fenced_and_a_lower_epoch_cannot_open() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(1);
        let first = Tier::open(options(store.clone(), 1)).await.unwrap();
        let made = world.window(20);
        first.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        let second = Tier::open(options(store.clone(), 2)).await.unwrap();
        let late = world.window(20);
        let error = Error::from(first.destage(late.window.clone(), &Payloads).await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        let error = Error::from(first.destage(late.window.clone(), &Payloads).await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        check_all(&second, &world.model).await;
        second.destage(late.window, &Payloads).await.unwrap();
        check_all(&second, &late.after).await;
        // Whatever a fenced owner uploads late is an orphan of a lower epoch; nothing else is.
        second.sweep_orphans().await.unwrap();
        let id = "00112233445566778899aabbccddeeff";
        let late_upload =
            |epoch: u64, number: u64| format!("segments/{epoch:016x}/{number:016x}-{id}");
        let orphan = late_upload(1, 1);
        for path in [&orphan, &late_upload(2, 1), "segments/0000000000000001/README"] {
            store.put(&Path::from(path), "late".into()).await.unwrap();
        }
        let swept = second.sweep_orphans().await.unwrap();
        assert_eq!((swept.deleted_count, swept.deleted_bytes, swept.foreign_count), (1, 4, 1));
        assert!(store.get(&Path::from(orphan)).await.is_err());
        check_all(&second, &late.after).await;
        check_fsck(&second).await;
        second.close().await.unwrap();
        let error = Tier::open(options(store.clone(), 1)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        let third = Tier::open(options(store, 2)).await.unwrap();
        check_all(&third, &late.after).await;
        third.close().await.unwrap();
    });
}

async fn paths(store: &dyn ObjectStore, folder: &str) -> Vec<Path> {
    use futures::TryStreamExt;
    let listing = store.list(Some(&Path::from(folder)));
    let mut paths: Vec<Path> = listing.map_ok(|meta| meta.location).try_collect().await.unwrap();
    paths.sort();
    paths
}

#[test]
fn damage_is_an_error_that_names_what_and_never_wrong_data() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let mut world = World::new(seed);
            let tier = Tier::open(options(shared.clone(), 1)).await.unwrap();
            for _ in 0..3 {
                let made = world.window(40);
                tier.destage(made.window, &Payloads).await.unwrap();
                world.model = made.after;
            }
            tier.close().await.unwrap();
            let mut epoch = 2;
            let mut noticed_count = 0;
            for folder in ["segments", "metadata/compacted"] {
                let found = paths(&*shared, folder).await;
                for _ in 0..6 {
                    let path = &found[world.rng.below(found.len() as u64) as usize];
                    let whole = shared.get(path).await.unwrap().bytes().await.unwrap();
                    let store = FaultStore::new(shared.clone());
                    let (at, bit) =
                        (world.rng.next_u64() as usize % whole.len(), world.rng.below(8));
                    store.damage(path, |bytes| bytes[at] ^= 1 << bit).await;
                    noticed_count += u32::from(is_noticed(&shared, epoch, &world.model).await);
                    epoch += 1;
                    shared.put(path, whole.into()).await.unwrap();
                }
            }
            // Metadata that compaction has replaced is not read any more; all else is noticed.
            assert!(noticed_count >= 6, "{noticed_count} noticed");
            let tier = Tier::open(options(shared, epoch)).await.unwrap();
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

/// Reads everything: what is read is right, or an error of kind `Corrupt`.
async fn is_noticed(store: &Arc<dyn ObjectStore>, epoch: u64, model: &Model) -> bool {
    let is_corrupt = |error: &Error| {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        true
    };
    let tier = match Tier::open(options(store.clone(), epoch)).await {
        Ok(tier) => tier,
        Err(error) => return is_corrupt(&error),
    };
    let mut noticed = false;
    for volume in [1, 2] {
        for zone in ZONES {
            for page in 0..ZONE_BYTES / PAGE_BYTES {
                let mut buf = vec![0; PAGE_BYTES as usize];
                let offset = zone + page * PAGE_BYTES;
                match tier.read(VolumeId(volume), offset, &mut buf).await {
                    Ok(()) => assert!(buf == expected(model, volume, offset, buf.len())),
                    Err(error) => noticed |= is_corrupt(&error),
                }
            }
        }
    }
    match tier.fsck(FsckOptions::default()).await {
        Ok(report) => noticed |= !report.is_clean(),
        Err(error) => noticed |= is_corrupt(&error),
    }
    let _ = tier.close().await;
    noticed
}

#[test]
fn another_pool_key_opens_nothing() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        Tier::open(options(store.clone(), 1)).await.unwrap().close().await.unwrap();
        let mut other = options(store, 2);
        other.pool_key = PoolKey::new([0x43; 32]);
        let error = Tier::open(other).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("metadata root"), "{error}");
    });
}

#[test]
fn a_store_that_is_away_at_the_start_is_an_error_in_time() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        store.set_away(true);
        let error = Tier::open(options(store.clone(), 1)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        store.set_away(false);
        store.go_away_after(3);
        let mut impatient = options(store, 1);
        impatient.open_timeout = Duration::from_millis(300);
        let error = Tier::open(impatient).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    });
}

#[test]
fn a_crash_while_the_pool_is_made_leaves_a_store_that_opens() {
    for calls in 0..40 {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let store = Arc::new(FaultStore::new(shared.clone()));
        store.go_away_after(calls);
        life_until_crash(store, 1, &[], None);
        runtime().block_on(async {
            let tier = Tier::open(options(shared, 1)).await.unwrap();
            assert_eq!(tier.destaged_lsn(), Lsn::NONE, "{calls} calls");
            tier.close().await.unwrap();
        });
    }
}

#[test]
fn an_owner_of_the_past_that_opens_late_does_not_disturb_the_present_one() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(2);
        let present = Tier::open(options(store.clone(), 5)).await.unwrap();
        let late = Tier::open(options(store.clone(), 4)).await.err().unwrap();
        assert_eq!(late.kind(), ErrorKind::Fenced);
        let made = world.window(20);
        present.destage(made.window, &Payloads).await.unwrap();
        check_all(&present, &made.after).await;
        present.close().await.unwrap();
    });
}

#[test]
fn a_reader_writes_nothing_and_fences_nobody() {
    runtime().block_on(async {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let error = Tier::open_read_only(options(shared.clone(), 1)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let mut world = World::new(3);
        let owner = Tier::open(options(shared.clone(), 1)).await.unwrap();
        let first = world.window(50);
        owner.destage(first.window, &Payloads).await.unwrap();
        world.model = first.after.clone();
        let store = Arc::new(FaultStore::new(shared));
        let reader = Tier::open_read_only(options(store.clone(), 1)).await.unwrap();
        check_all(&reader, &first.after).await;
        check_fsck(&reader).await;
        let second = world.window(50);
        owner.destage(second.window, &Payloads).await.unwrap();
        check_all(&owner, &second.after).await;
        check_all(&reader, &first.after).await;
        let third = world.window(5);
        let denied = Error::from(reader.destage(third.window, &Payloads).await.unwrap_err());
        assert_eq!(denied.kind(), ErrorKind::Denied);
        assert_eq!(reader.step(1).await.unwrap_err().kind(), ErrorKind::Denied);
        assert_eq!(reader.sweep_orphans().await.unwrap_err().kind(), ErrorKind::Denied);
        reader.close().await.unwrap();
        assert_eq!((store.call_count(Op::Put), store.call_count(Op::Delete)), (0, 0));
        owner.close().await.unwrap();
    });
}

#[test]
fn a_check_of_metadata_that_is_compacted_meanwhile_finds_no_damage() {
    runtime().block_on(async {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let owner = Tier::open(options(shared.clone(), 1)).await.unwrap();
        let mut world = World::new(6);
        for _ in 0..6 {
            let made = world.window(30);
            owner.destage(made.window, &Payloads).await.unwrap();
            world.model = made.after;
        }
        let store = Arc::new(FaultStore::new(shared.clone()));
        let mut small = options(store.clone(), 1);
        small.database.cache_bytes = 0;
        let mut refreshed_count = 0;
        // Which looks meet it depends on what the database reads meanwhile: again until one did.
        for (count, skipped) in [0, 1, 2, 4, 8, 16, 32].into_iter().cycle().take(70).enumerate() {
            if count >= 7 && refreshed_count > 0 {
                break;
            }
            let reader = Tier::open_read_only(small.clone()).await.unwrap();
            let opened_at = reader.destaged_lsn();
            let old = report_of_all(&shared).await;
            let made = world.window(30);
            owner.destage(made.window, &Payloads).await.unwrap();
            let new = report_of_all(&shared).await;
            // Some table that is needed next was collected: at the first look or later on.
            store.inject_after(Op::Get, "metadata/compacted", skipped, 1, Fault::NotFound);
            let report = check_fsck(&reader).await;
            store.clear_injected();
            refreshed_count += u32::from(reader.destaged_lsn() > opened_at);
            let pages = |report: &FsckReport| {
                (report.page_count, report.run_count, report.block_count, report.segment_count)
            };
            let found = pages(&report);
            assert!(found == pages(&old) || found == pages(&new), "one state, counted once");
            assert!((old.frame_count..=new.frame_count).contains(&report.frame_count));
        }
        assert!(refreshed_count >= 1, "no look met a table that was gone");
        owner.close().await.unwrap();

        // An owner that is always faster is not damage either.
        let reader = Tier::open_read_only(small).await.unwrap();
        store.inject(Op::Get, "metadata/compacted", u64::MAX, Fault::NotFound);
        let error = reader.fsck(FsckOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
        store.clear_injected();
        check_fsck(&reader).await;
        reader.close().await.unwrap();
    });
}

async fn report_of_all(store: &Arc<dyn ObjectStore>) -> FsckReport {
    let reader = Tier::open_read_only(options(store.clone(), 1)).await.unwrap();
    check_fsck(&reader).await
}

#[test]
fn a_first_start_that_was_cut_short_is_begun_anew() {
    runtime().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        // What is there before the first object of the database has its name.
        let folder = dir.path().join(database::FOLDER).join("manifest");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("00000000000000000001.manifest#1"), b"half of it").unwrap();
        let local = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
        let mut options = options(Arc::new(local), 1);
        options.database.has_conditional_update = false;
        let tier = Tier::open(options.clone()).await.unwrap();
        tier.close().await.unwrap();
        options.epoch = Epoch(2);
        Tier::open(options).await.unwrap().close().await.unwrap();
    });
}

/// The windows that have settled, and those that have begun: number and state after them.
#[derive(Clone)]
struct Between {
    settled: (u64, Arc<Model>),
    begun: (u64, Arc<Model>),
}

/// Reads at random until told to stop. As with the overlay in front, what a window in flight holds
/// may come from either side of it. Returns how many reads could be checked.
async fn read_beside(
    tier: Tier,
    between: Arc<parking_lot::Mutex<Between>>,
    stop: Arc<AtomicBool>,
    mut rng: Rng,
) -> u64 {
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let volume = 1 + rng.below(2) as u32;
        let offset = ZONES[rng.below(2) as usize] + rng.below(ZONE_BYTES);
        let mut buf = vec![0xaa; 1 + rng.below(40_000) as usize];
        let before = between.lock().settled.clone();
        tier.read(VolumeId(volume), offset, &mut buf).await.unwrap();
        let after = between.lock().begun.clone();
        if after.0 > before.0 + 1 {
            tokio::task::yield_now().await;
            continue; // it lasted longer than a window
        }
        let before = expected(&before.1, volume, offset, buf.len());
        let after = expected(&after.1, volume, offset, buf.len());
        for at in 0..buf.len() {
            let is_right = buf[at] == before[at] || buf[at] == after[at];
            assert!(is_right, "volume {volume}, byte {}", offset + at as u64);
        }
        count += 1;
        tokio::time::sleep(Duration::from_micros(300)).await; // a hit in memory never waits
    }
    count
}

#[test]
fn reads_beside_a_destage_see_each_block_before_or_after_it() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store = Arc::new(FaultStore::default());
            let mut small = options(store.clone(), 1);
            small.map.page_cache_bytes = 48 << 10; // pages come and go
            let tier = Tier::open(small).await.unwrap();
            store.set_delay(Duration::from_micros(200));
            let mut world = World::new(seed);
            let empty = (0, Arc::new(Model::new()));
            let between = Between { settled: empty.clone(), begun: empty };
            let between = Arc::new(parking_lot::Mutex::new(between));
            let stop = Arc::new(AtomicBool::new(false));
            let reader = |number: u64| {
                let rng = Rng::new(seed * 100 + number);
                tokio::spawn(read_beside(tier.clone(), between.clone(), stop.clone(), rng))
            };
            let readers = [reader(0), reader(1), reader(2)];
            for number in 1..=25 {
                let made = world.window(6);
                let after = (number, Arc::new(made.after.clone()));
                between.lock().begun = after.clone();
                tier.destage(made.window, &Payloads).await.unwrap();
                tier.step(1).await.unwrap();
                between.lock().settled = after;
                world.model = made.after;
            }
            stop.store(true, Ordering::Relaxed);
            let mut read_count = 0;
            for reader in readers {
                read_count += reader.await.unwrap();
            }
            assert!(read_count > 50, "{read_count} reads");
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

fn scattered_window(rng: &mut Rng, lsn: u64, block_count: u64, volume_bytes: u64) -> Window<Bytes> {
    let mut extents = Extents::default();
    let payload = Bytes::from(rng.bytes(BLOCK_BYTES as usize, 50));
    for _ in 0..block_count {
        let start = rng.below(volume_bytes / BLOCK_BYTES) * 8;
        extents.insert(start, start + 8, Some(payload.clone()));
    }
    let volumes = vec![(VolumeId(1), extents.into_extents())];
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes,
        asides: Vec::new(),
        is_late: false,
    }
}

#[test]
fn a_volume_of_100_tib_stays_within_the_budget_and_is_trimmed_at_once() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut small = options(store.clone(), 1);
        small.segment_bytes = 16 << 20;
        small.map.page_cache_bytes = 1 << 20;
        let tier = Tier::open(small.clone()).await.unwrap();
        let mut rng = Rng::new(5);
        let volume_bytes = 100 << 40;
        for lsn in 1..=4 {
            let window = scattered_window(&mut rng, lsn, 10_000, volume_bytes);
            tier.destage(window, &Payloads).await.unwrap();
            assert!(tier.status().map.page_cache_bytes <= 1 << 20);
        }
        tier.close().await.unwrap();
        let started = Instant::now();
        small.epoch = Epoch(2);
        let tier = Tier::open(small).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(2), "open took {:?}", started.elapsed());
        assert_eq!(tier.status().map.page_count, 0);

        let extents = vec![WindowExtent {
            start_sector: 3,
            sector_count: volume_bytes / SECTOR_BYTES - 7,
            content: ExtentContent::Zero,
        }];
        let trim = Window {
            last_lsn: Lsn(9),
            volume_records: Vec::new(),
            volumes: vec![(VolumeId(1), extents)],
            asides: Vec::new(),
            is_late: false,
        };
        let started = Instant::now();
        let report = tier.destage(trim, &Payloads).await.unwrap();
        assert!(started.elapsed() < Duration::from_secs(1), "trim took {:?}", started.elapsed());
        assert_eq!(report.commit.range_count, 1);
        let found = tier.allocation(VolumeId(1), 0, volume_bytes, 10).await.unwrap();
        assert!(found.iter().all(|extent| extent.is_hole), "{found:?}");
        check_fsck(&tier).await;
        let mut looked_at = 0;
        loop {
            let report = tier.step(1000).await.unwrap();
            assert!(report.page_count <= 1000);
            looked_at += report.page_count;
            if report.ranges_left == 0 {
                break;
            }
        }
        assert!((39_000..=40_000).contains(&looked_at), "{looked_at} pages");
        let report = check_fsck(&tier).await;
        assert_eq!((report.page_count, report.block_count), (0, 0));
        tier.close().await.unwrap();
    });
}

/// The block-th block of a volume, as one extent.
fn block_extent(block: u64, byte: u8) -> WindowExtent<Bytes> {
    let content = ExtentContent::Data(Bytes::from(vec![byte; BLOCK_BYTES as usize]));
    WindowExtent { start_sector: block * 8, sector_count: 8, content }
}

fn plain_window(lsn: u64, volumes: Vec<(u32, WindowExtent<Bytes>)>) -> Window<Bytes> {
    let volumes = volumes.into_iter().map(|(id, extent)| (VolumeId(id), vec![extent]));
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes: volumes.collect(),
        asides: Vec::new(),
        is_late: false,
    }
}

fn trim_window(lsn: u64, volume: u32, pages: std::ops::Range<u64>) -> Window<Bytes> {
    let extent = WindowExtent {
        start_sector: pages.start * PAGE_SECTORS,
        sector_count: (pages.end - pages.start) * PAGE_SECTORS,
        content: ExtentContent::Zero,
    };
    plain_window(lsn, vec![(volume, extent)])
}

#[test]
fn a_damaged_map_page_is_its_volumes_and_nobody_elses() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let both = |lsn, byte| {
            plain_window(lsn, vec![(1, block_extent(0, byte)), (2, block_extent(0, byte))])
        };
        tier.destage(both(10, 1), &Payloads).await.unwrap();
        let page = crate::map::keys::page_key(crate::map::LayerId(1), 0);
        tier.inner.map.damage(&page).await;
        let failed = tier.destage(both(20, 2), &Payloads).await.unwrap_err();
        assert_eq!((failed.volume, failed.error.kind()), (Some(VolumeId(1)), ErrorKind::Corrupt));
        let check = |start, count, has_payload| {
            let tier = tier.clone();
            async move { tier.check_extents(VolumeId(1), &[(start, count, has_payload)]).await }
        };
        assert_eq!(check(0, 8, true).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(check(0, 8, false).await.unwrap_err().kind(), ErrorKind::Corrupt);
        check(PAGE_SECTORS, 8, true).await.unwrap();
        check(0, 100 * PAGE_SECTORS, false).await.unwrap();

        // Without the volume the window goes in, and says where the rest is.
        let files = vec![AsideFile { first_lsn: Lsn(11), last_lsn: Lsn(20), id: [7; 16] }];
        let mut without = plain_window(20, vec![(2, block_extent(0, 2))]);
        without.asides = vec![(VolumeId(1), files.clone())];
        tier.destage(without, &Payloads).await.unwrap();
        let mut found = vec![0; 512];
        tier.read(VolumeId(2), 0, &mut found).await.unwrap();
        assert_eq!(found, [2; 512]);
        let report = tier.fsck(FsckOptions::default()).await.unwrap();
        let behind = "volume 1 is behind the others: its writes from LSN 11 to 20 are only in 1";
        assert!(report.differences.iter().any(|line| line.starts_with(behind)), "{report:?}");
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        assert_eq!(tier.asides(), BTreeMap::from([(VolumeId(1), files)]));

        // A trim of many pages hides the damage; it cannot be folded, but other volumes' trims can.
        let mut late = trim_window(20, 1, 0..100);
        late.asides = vec![(VolumeId(1), Vec::new())];
        late.is_late = true;
        let early = Window { last_lsn: Lsn(19), ..late.clone() };
        let refused = tier.destage(early, &Payloads).await.unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::Invalid);
        assert!(!tier.destage(late, &Payloads).await.unwrap().was_done);
        assert!(tier.asides().is_empty());
        assert_eq!(tier.destaged_lsn(), Lsn(20));
        tier.destage(trim_window(21, 2, 0..100), &Payloads).await.unwrap();
        assert_eq!(tier.step(1000).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(tier.step(1000).await.unwrap().ranges_left, 1);
        assert_eq!(tier.step(1000).await.unwrap_err().kind(), ErrorKind::Corrupt);
        tier.close().await.unwrap();
    });
}

#[test]
fn late_windows_at_one_lsn_count_in_their_order() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let late = |mut window: Window<Bytes>, is_last: bool| {
            window.is_late = true;
            let file = AsideFile { first_lsn: Lsn(1), last_lsn: Lsn(9), id: [7; 16] };
            let left = if is_last { Vec::new() } else { vec![file] };
            window.asides = vec![(VolumeId(1), left)];
            window
        };
        let at = |page: u64| page * PAGE_SECTORS;
        tier.destage(plain_window(10, vec![(1, block_extent(at(5) / 8, 1))]), &Payloads)
            .await
            .unwrap();
        // A trim of many pages, then data in the middle of it, then another trim, and data again;
        // nothing folds in between, and the owner dies once.
        tier.destage(late(trim_window(10, 1, 0..100), false), &Payloads).await.unwrap();
        tier.destage(
            late(plain_window(10, vec![(1, block_extent(at(50) / 8, 2))]), false),
            &Payloads,
        )
        .await
        .unwrap();
        tier.close().await.unwrap();
        tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        tier.destage(late(trim_window(10, 1, 60..160), false), &Payloads).await.unwrap();
        tier.destage(
            late(plain_window(10, vec![(1, block_extent(at(70) / 8, 3))]), true),
            &Payloads,
        )
        .await
        .unwrap();
        let expected = [(5, 0), (50, 2), (70, 3), (71, 0)];
        for round in 0..3 {
            tier.inner.map.forget_pages();
            for (page, byte) in expected {
                let mut found = vec![0xee; 512];
                tier.read(VolumeId(1), at(page) * SECTOR_BYTES, &mut found).await.unwrap();
                assert_eq!(found, [byte; 512], "page {page}, round {round}");
            }
            while tier.step(1000).await.unwrap().ranges_left > 0 {}
        }
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn a_damaged_count_of_live_blocks_stops_no_window() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        tier.destage(plain_window(1, vec![(1, block_extent(0, 1))]), &Payloads).await.unwrap();
        tier.inner.map.damage(&crate::map::keys::live_key(1)).await;
        tier.inner.map.forget_live();
        tier.destage(plain_window(2, vec![(1, block_extent(0, 2))]), &Payloads).await.unwrap();
        let mut found = vec![0; 512];
        tier.read(VolumeId(1), 0, &mut found).await.unwrap();
        assert_eq!(found, [2; 512]);
        // Nothing hides it from whoever checks.
        let failed = tier.fsck(FsckOptions::default()).await.unwrap_err();
        assert!(failed.to_string().contains("live blocks of segment 1"), "{failed}");
        tier.close().await.unwrap();
    });
}

#[test]
fn ranges_over_a_damaged_page_do_not_fill_the_list_for_others() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store, 1)).await.unwrap();
        tier.destage(plain_window(1, vec![(1, block_extent(0, 1))]), &Payloads).await.unwrap();
        let page = crate::map::keys::page_key(crate::map::LayerId(1), 0);
        tier.inner.map.damage(&page).await;
        let range_max = crate::map::ranges::RANGE_COUNT_MAX as u64;
        let mut lsn = 1;
        let failed = loop {
            lsn += 1;
            match tier.destage(trim_window(lsn, 1, 0..100), &Payloads).await {
                Ok(_) => assert!(lsn < 2 * range_max, "the list has no bound"),
                Err(failed) => break failed,
            }
        };
        assert_eq!((failed.volume, failed.error.kind()), (Some(VolumeId(1)), ErrorKind::Corrupt));
        for _ in 0..20 {
            lsn += 1;
            tier.destage(trim_window(lsn, 2, 0..100), &Payloads).await.unwrap();
            assert!(tier.status().map.range_count as u64 <= range_max + 1);
        }
        tier.close().await.unwrap();
    });
}

/// Against one bit a sector.
#[test]
fn partial_blocks_are_those_that_a_window_has_to_complete() {
    let mut rng = Rng::new(3);
    for _ in 0..2000 {
        let (mut extents, mut at) = (Vec::new(), 0);
        let mut have = vec![false; 400];
        while at < 300 {
            at += rng.below(20);
            let count = 1 + rng.below(40);
            extents.push((at, count, true));
            have[at as usize..(at + count) as usize].fill(true);
            at += count;
        }
        let is_partial = |block: &[bool]| block.contains(&true) && block.contains(&false);
        let blocks = have.chunks(8).enumerate();
        let wanted: Vec<u64> =
            blocks.filter(|(_, block)| is_partial(block)).map(|(index, _)| index as u64).collect();
        assert_eq!(crate::destage::partial_blocks(&extents), wanted, "{extents:?}");
    }
}
