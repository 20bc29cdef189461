//! Cost of the map and of destage:
//! `cargo run --release -p tiering --example map_bench [-- BLOCKS]`.
//!
//! Prints nanoseconds per lookup and per update of the map. For destage it prints MiB/s, and CPU
//! time and elapsed time in microseconds per 4 KiB block, for random and for sequential data. The
//! store is in memory, so that only the cost of this crate is counted.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use block::seal::PoolKey;
use block::{Epoch, Lsn, Result, VolumeId};
use bytes::Bytes;
use object_store::memory::InMemory;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::map::pages;
use tiering::{
    DestageReport, ExtentContent, LogSource, SnapshotChange, Tier, TierOptions, Window,
    WindowExtent,
};

const BLOCK: usize = 4096;

struct Payloads;

impl LogSource for Payloads {
    type Handle = Bytes;

    async fn read(&self, handle: &Bytes) -> Result<Bytes> {
        Ok(handle.clone())
    }
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 20
    }
}

/// Returns the CPU time of the process, user and system.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux has /proc");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
    let ticks: u64 = fields[11..13].iter().map(|field| field.parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 10)
}

/// Returns blocks like those of a database: half of each compresses away.
fn payload(rng: &mut Rng, bytes: usize) -> Bytes {
    let mut data = vec![0u8; bytes];
    for chunk in data.chunks_mut(64) {
        for word in chunk.chunks_mut(8).take(4) {
            word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()]);
        }
    }
    data.into()
}

fn window(lsn: u64, extents: Vec<WindowExtent<Bytes>>) -> Window<Bytes> {
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes: vec![(VolumeId(1), extents)],
        stalled_volumes: Vec::new(),
        late: None,
        snapshots: Vec::new(),
    }
}

fn random_window(rng: &mut Rng, lsn: u64, count: u64, volume_blocks: u64) -> Window<Bytes> {
    let mut blocks: Vec<u64> = (0..count).map(|_| rng.next() % volume_blocks).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let extents = blocks.into_iter().map(|block| WindowExtent {
        start_sector: block * 8,
        sector_count: 8,
        content: ExtentContent::Data(payload(rng, BLOCK)),
    });
    window(lsn, extents.collect())
}

fn sequential_window(rng: &mut Rng, lsn: u64, count: u64) -> Window<Bytes> {
    let extents = (0..count / 32).map(|index| WindowExtent {
        start_sector: index * 256,
        sector_count: 256,
        content: ExtentContent::Data(payload(rng, 32 * BLOCK)),
    });
    window(lsn, extents.collect())
}

async fn open() -> Tier {
    let key = PoolKey::new([1; 32]);
    let options = TierOptions::new(Arc::new(InMemory::new()), [1; 16], key, Epoch(1));
    Tier::open(options).await.expect("an empty store opens")
}

async fn destage(name: &str, tier: &Tier, windows: Vec<Window<Bytes>>) {
    for (index, window) in windows.into_iter().enumerate() {
        let (started, cpu_started) = (Instant::now(), cpu());
        let done: DestageReport = tier.destage(window, &Payloads).await.expect("it destages");
        let (time, used) = (started.elapsed(), cpu() - cpu_started);
        let blocks = done.stored_block_count as f64;
        println!(
            "{name} {index}: {:7.0} MiB/s, {:5.2} us time, {:5.2} us CPU a block \
             (build {:4.2}, commit {:4.2}); {} operands, {} images, {:.0} metadata bytes a block",
            blocks / 256.0 / time.as_secs_f64(),
            time.as_secs_f64() * 1e6 / blocks,
            used.as_secs_f64() * 1e6 / blocks,
            done.build_us as f64 / blocks,
            done.commit_us as f64 / blocks,
            done.commit.operand_count,
            done.commit.image_count,
            done.commit.batch_bytes as f64 / blocks,
        );
    }
}

fn bench_pages(rng: &mut Rng) {
    let mut page: Vec<pages::Run> = Vec::new();
    let rounds = 200_000u32;
    let run = |first: u8, index: u32| pages::Run {
        segment: 7,
        frame_index: index,
        offset: index * 2048,
        sealed_bytes: 2100,
        first,
        last: first,
        within: 0,
    };
    let started = Instant::now();
    for index in 0..rounds {
        let new = run(rng.next() as u8, index);
        page = pages::assign(&page, &[new]);
    }
    let update = started.elapsed() / rounds;
    let whole = pages::Page { runs: page.into_boxed_slice(), ..pages::Page::default() };
    let started = Instant::now();
    let mut found = 0;
    for _ in 0..rounds {
        let block = rng.next() as u8;
        found += whole.runs_between(block, block).count();
    }
    let lookup = started.elapsed() / rounds;
    println!("page of {} runs: update {update:?}, lookup {lookup:?} ({found})", whole.runs.len());
}

async fn bench_lookups(rng: &mut Rng, tier: &Tier, volume_blocks: u64, name: &str) {
    let count = 20_000u32;
    let started = Instant::now();
    for _ in 0..count {
        let offset = rng.next() % volume_blocks * BLOCK as u64;
        tier.allocation(VolumeId(1), offset, BLOCK as u64, 1).await.expect("it is mapped");
    }
    println!("{name}: {:?} a lookup through the database", started.elapsed() / count);
    let mut buf = vec![0; BLOCK];
    let started = Instant::now();
    for _ in 0..count {
        let offset = rng.next() % volume_blocks * BLOCK as u64;
        tier.read(VolumeId(1), offset, &mut buf).await.expect("it reads");
    }
    println!("{name}: {:?} a read of 4 KiB through the page cache", started.elapsed() / count);
}

/// Measures the same windows of scattered writes, and reads, with an increasing number of snapshots
/// between them.
async fn bench_snapshots(count: u64) {
    let blocks = 1 << 18; // 1 GiB
    for snapshot_count in [0, 10, 200] {
        let mut rng = Rng(43);
        let tier = open().await;
        let (mut metadata_bytes, mut stored, mut commit_us) = (0, 0, 0);
        let mut snapshots = Vec::new();
        for lsn in 1..=200 {
            let mut window = random_window(&mut rng, lsn, count, blocks);
            if lsn % (200 / snapshot_count.max(1)) == 0 && snapshot_count > 0 {
                let record = Bytes::from_static(b"a snapshot");
                window.snapshots.push(SnapshotChange::Made { volume: VolumeId(1), record });
                snapshots.push(Lsn(lsn));
            }
            let done = tier.destage(window, &Payloads).await.expect("it destages");
            metadata_bytes += done.commit.batch_bytes;
            stored += done.stored_block_count;
            commit_us += done.commit_us;
        }
        let mut read = async |at: Option<Lsn>| {
            let mut buf = vec![0; BLOCK];
            let mut times = Vec::new();
            for _ in 0..5 {
                let started = Instant::now();
                for _ in 0..2_000 {
                    let offset = rng.next() % blocks * BLOCK as u64;
                    match at {
                        None => tier.read(VolumeId(1), offset, &mut buf).await,
                        Some(at) => tier.read_at(VolumeId(1), at, offset, &mut buf).await,
                    }
                    .expect("it reads");
                }
                times.push(started.elapsed() / 2_000);
            }
            times.sort();
            times[times.len() / 2]
        };
        let live = read(None).await;
        println!(
            "{snapshot_count} snapshots: {} metadata bytes and {:.2} us of commit a block; a read of 4 KiB takes \
             {live:?}",
            metadata_bytes / stored,
            commit_us as f64 / stored as f64
        );
        if let Some((oldest, newest)) = snapshots.first().zip(snapshots.last()) {
            let (oldest, newest) = (read(Some(*oldest)).await, read(Some(*newest)).await);
            println!("    of the oldest snapshot {oldest:?}, of the newest {newest:?}");
        }
        tier.close().await.expect("it closes");
    }
}

/// Measures clones of clones, with some blocks of each overwritten: the cost of making one, and of
/// reading the last one when a page is read for the first time and later; then the same once it is
/// independent.
async fn bench_clones(count: u64) {
    let blocks = 1 << 18; // 1 GiB
    for depth in [0u32, 1, 4, 14] {
        let mut rng = Rng(44);
        let store: Arc<InMemory> = Arc::new(InMemory::new());
        let open = async |epoch| {
            let key = PoolKey::new([1; 32]);
            let options = TierOptions::new(store.clone(), [1; 16], key, Epoch(epoch));
            Tier::open(options).await.expect("it opens")
        };
        let tier = open(1).await;
        let mut made = Duration::ZERO;
        let mut lsn = 0;
        for volume in 1..=depth + 1 {
            for _ in 0..if volume == 1 { 20 } else { 1 } {
                lsn += 1;
                let mut window = random_window(&mut rng, lsn, count, blocks);
                window.volumes[0].0 = VolumeId(volume);
                let record = Bytes::from_static(b"a snapshot");
                window.snapshots.push(SnapshotChange::Made { volume: VolumeId(volume), record });
                tier.destage(window, &Payloads).await.expect("it destages");
            }
            if volume <= depth {
                let started = Instant::now();
                let record = Bytes::from_static(b"a clone");
                let of = (VolumeId(volume), Lsn(lsn));
                let cloned = tier.clone_volume(of, VolumeId(volume + 1), record);
                cloned.await.expect("it is cloned");
                made += started.elapsed();
            }
        }
        tier.close().await.expect("it closes");
        let last = VolumeId(depth + 1);
        let mut times = Vec::new();
        for is_promoted in [false, true] {
            let tier = open(2 + u64::from(is_promoted)).await;
            if is_promoted && tier.promote(last).await.expect("it is asked") {
                while tier.step(256).await.expect("it goes on").promotes_left > 0 {}
            }
            for _ in 0..2 {
                let started = Instant::now();
                for page in 0..1024u64 {
                    let offset = (page * 256 + rng.next() % 256) * BLOCK as u64;
                    let mut buf = vec![0; BLOCK];
                    tier.read(last, offset, &mut buf).await.expect("it reads");
                }
                times.push(started.elapsed() / 1024);
            }
            tier.close().await.expect("it closes");
        }
        println!(
            "{depth} volumes below: a clone took {:?}; reading each page once {:?}, again {:?}; independent {:?}, {:?}",
            made / depth.max(1),
            times[0],
            times[1],
            times[2],
            times[3]
        );
    }
}

#[tokio::main]
async fn main() {
    let count: u64 = std::env::args().nth(1).map_or(32_768, |text| text.parse().expect("BLOCKS"));
    let mut rng = Rng(42);
    bench_pages(&mut rng);
    bench_snapshots((count / 16).max(1)).await;
    bench_clones((count / 16).max(1)).await;

    let small = 10 << 18; // 10 GiB
    let tier = open().await;
    let windows = (1..=20).map(|lsn| random_window(&mut rng, lsn, count, small)).collect();
    destage("random 4 KiB over 10 GiB ", &tier, windows).await;
    bench_lookups(&mut rng, &tier, small, "10 GiB").await;
    tier.close().await.expect("it closes");

    let large = 100 << 28; // 100 TiB
    let tier = open().await;
    let windows = (1..=6).map(|lsn| random_window(&mut rng, lsn, count, large)).collect();
    destage("random 4 KiB over 100 TiB", &tier, windows).await;
    tier.close().await.expect("it closes");

    let tier = open().await;
    let windows = (1..=4).map(|lsn| sequential_window(&mut rng, lsn, count)).collect();
    destage("sequential               ", &tier, windows).await;
    bench_lookups(&mut rng, &tier, count, "sequential").await;
    tier.close().await.expect("it closes");
}
