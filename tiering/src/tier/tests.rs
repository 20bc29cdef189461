//! The tier compared with a model in memory, over stores that fail, crash, and are damaged.
//!
//! Invariants:
//! - This file contains the shared parts: the model, windows for it, and the comparison of all
//!   reads of a tier with it. The tests are in the modules, by topic.
//! - All randomness comes from a seed that is in the test or that the test prints.

mod clones;
mod copies;
mod crash;
mod damage;
mod dedup;
mod hints;
mod histories;
mod ill;
mod keep;
mod keys;
mod objects;
mod owners;
mod parts;
mod reclaim;
mod restores;
mod scrub;
mod snapshots;
mod store;
mod windows;

use super::*;
use crate::destage::{ExtentContent, WindowExtent};
use crate::map::database::{self, Database};
use crate::map::pages::PAGE_BYTES;
use crate::map::ranges::RANGE_PAGES_MIN;
use crate::testing::{FaultStore, Op, Rng, seeds};
use block::units::{BLOCK_BYTES, SECTOR_BYTES};
use futures::TryStreamExt;
use futures::future::BoxFuture;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64};
use tokio::runtime::Runtime;

const SECTOR: usize = SECTOR_BYTES as usize;
const PAGE_SECTORS: u64 = PAGE_BYTES / SECTOR_BYTES;
/// Places where the model's volumes have data: near the start, and far out.
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
    // Volume 2 has a dedicated key.
    options.volume_keys.insert(KeyId(2), PoolKey::new([0x43; 32]));
    options.volume_keys.assign(VolumeId(2), KeyId(2));
    options.database.poll_interval = Duration::from_millis(20);
    options.open_timeout = Duration::from_secs(20);
    if IS_DEDUP.get() {
        options.is_dedup = true;
        options.fingerprint_mask = 0xfff;
    }
    options
}

thread_local! {
    static IS_DEDUP: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with all volumes deduplicated, with recurring blocks, and with fingerprints that
/// many blocks share.
fn with_dedup<T>(run: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            IS_DEDUP.set(false);
        }
    }
    IS_DEDUP.set(true);
    let _reset = Reset;
    run()
}

/// Returns blocks that are drawn from a small set.
fn recurring(rng: &mut Rng, block_count: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut which, mut goes_on) = (0, 0);
    for _ in 0..block_count {
        // Mostly in sequence.
        (which, goes_on) = match goes_on {
            0 => (rng.below(150), rng.below(12)),
            _ => (which + rng.below(2), goes_on - 1),
        };
        bytes.extend(Rng::new(1 + which).bytes(BLOCK_BYTES as usize, 40));
    }
    bytes
}

/// A runtime that does not wait for its tasks when it ends. foyer 0.22 spawns a fetch while it
/// holds the lock of the fetches under way. If the runtime ends at that moment, tokio drops the
/// fetch there, which takes the same lock, and that thread never ends.
struct Ending(Option<Runtime>);

impl std::ops::Deref for Ending {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        self.0.as_ref().expect("it is there until it ends")
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.take().expect("it ends once").shutdown_background();
    }
}

fn runtime() -> Ending {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    Ending(Some(builder.worker_threads(2).enable_all().build().unwrap()))
}

/// Expected contents of volumes: sectors that are not zero.
type Model = HashMap<(u32, u64), [u8; SECTOR]>;

/// A write or trim of sectors: first sector, end, and payload or zero.
type AnyOp = (u64, u64, Option<Bytes>);

/// Extents of a window by first sector: end, and payload or zero. A newer extent cuts older ones.
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

/// Makes windows, and tracks the contents that they imply.
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
            stalled_volumes: Vec::new(),
            late: None,
            snapshots: Vec::new(),
        };
        Made { window, after }
    }

    fn any_op(&mut self) -> AnyOp {
        let rng = &mut self.rng;
        let zone = ZONES[rng.below(2) as usize] / SECTOR_BYTES;
        let zone_sectors = ZONE_BYTES / SECTOR_BYTES;
        let kind = rng.below(100);
        if kind < 3 {
            // Everything between the zones and beyond, starting at some sector.
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
            3.. if IS_DEDUP.get() && sectors.is_multiple_of(8) => {
                start = start / 8 * 8;
                Some(recurring(rng, sectors / 8))
            }
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
                // Blocks of zeroes are not stored, so every stored block has a byte that is not
                // zero.
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
    check_counts(tier).await;
    report
}

/// Checks that the pages in a segment's directory and its back-references give the count that
/// commits have maintained.
async fn check_counts(tier: &Tier) {
    if tier.parts.pool.is_read_only {
        return;
    }
    let _writer = tier.parts.metadata.writer.lock().await;
    for (record, live) in tier.parts.metadata.map.segments_after(0, 200).await.unwrap() {
        match tier.parts.jobs.reclaim.exact_count(&record).await {
            Ok(found) => assert_eq!(found, u64::from(live), "{}", record.info),
            // It is excluded from the copy, or its key is destroyed.
            Err(error) => {
                let kinds = [ErrorKind::NotFound, ErrorKind::Denied];
                assert!(kinds.contains(&error.kind()), "{}", error.chain());
            }
        }
    }
}

async fn fold_all(tier: &Tier) {
    while tier.step(3).await.unwrap().ranges_left > 0 {}
}

/// The windows that have settled, and those that have begun: number and state after each.
#[derive(Clone)]
struct Between {
    settled: (u64, Arc<Model>),
    begun: (u64, Arc<Model>),
}

/// Leaves hardly any dead blocks.
const EAGER: ReclaimOptions = ReclaimOptions { target_percent: 101 };

/// Makes a pass of reclaim due at once, as if the pause were over.
fn look_again(tier: &Tier) {
    tier.parts.jobs.reclaim.look_again();
}

/// Reclaims until nothing is left to do for now.
async fn reclaim_until_idle(tier: &Tier) {
    while !tier.reclaim_step(EAGER).await.unwrap().is_idle {}
}

/// Reclaims everything that can be reclaimed, and deletes the segments.
async fn reclaim_all(tier: &Tier) {
    look_again(tier);
    reclaim_until_idle(tier).await;
    sweep_all_abandoned(tier).await;
}

/// Sweeps until no abandoned uploads are left. Returns the number of deletions.
async fn sweep_all_abandoned(tier: &Tier) -> u64 {
    let mut deleted_count = 0;
    while tier.status().abandoned_count > 0 {
        deleted_count += tier.sweep_abandoned().await.unwrap().deleted_count;
    }
    deleted_count
}

/// Returns one block of a volume as one extent.
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
        stalled_volumes: Vec::new(),
        late: None,
        snapshots: Vec::new(),
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
